//! Products with a stack of experts, against the f64 product of each row with its expert.

mod lists;
mod operands;
mod products;

use makaira::backend::{DevicePtr, Stream};
use makaira::gemm::experts::{Choices, Experts, Routed, Routing};
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::Config;
use makaira::kernel::experts::select::ExpertChoice;
use makaira::reference::{Reference, Tolerance};
use makaira::weights::{PackedWeights, ScaleType, WeightFormat};

use crate::support::{Device, Random, chain};
use crate::types::{Number, POISON, TypedLayer, numbers};

/// Experts of one shape and type with random contents.
pub struct Stack {
    pub layers: Vec<TypedLayer>,
}

impl Stack {
    pub fn new(
        format: &'static dyn WeightFormat,
        num_experts: usize,
        shape: (usize, usize),
        raw: i64,
        element: ScaleType,
        random: &mut Random,
    ) -> Self {
        let layers = (0..num_experts)
            .map(|_| TypedLayer::new(format, shape, raw, element, random))
            .collect();
        Self { layers }
    }

    pub fn upload<E: Number>(&self, gemm: &Gemm) -> Experts {
        let packed: Vec<PackedWeights> =
            self.layers.iter().map(|layer| layer.packed.clone()).collect();
        gemm.upload_experts(&packed, E::ACTIVATION).expect("it fits")
    }

    pub fn shape(&self) -> (usize, usize) {
        (self.layers[0].n, self.layers[0].k)
    }
}

/// What the tokens of a batch choose.
#[derive(Clone, Debug)]
pub struct Batch {
    pub tokens: usize,
    pub top_k: usize,
    /// `[tokens][top_k]`.
    pub ids: Vec<u32>,
    pub weights: Vec<f32>,
}

impl Batch {
    /// Each token chooses different experts, if there are enough of them; those of a few numbers only, if `among` says
    /// so, so that others have no rows.
    pub fn new(tokens: usize, top_k: usize, among: &[u32], random: &mut Random) -> Self {
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut left = among.to_vec();
            for _ in 0..top_k {
                if left.is_empty() {
                    left = among.to_vec();
                }
                ids.push(left.swap_remove(random.below(left.len())));
            }
        }
        let weights = ids.iter().map(|_| random.uniform(0.05, 1.0) as f32).collect();
        Self { tokens, top_k, ids, weights }
    }

    /// The choices that have a row, in the list's order, by the definition.
    pub fn list(&self, num_experts: usize) -> Vec<usize> {
        let mut list: Vec<usize> =
            (0..self.ids.len()).filter(|at| (self.ids[*at] as usize) < num_experts).collect();
        list.sort_by_key(|at| (self.ids[*at], *at));
        list
    }
}

/// Device memory of exactly what it holds.
pub fn put<T: bytemuck::Pod>(device: &Device, values: &[T]) -> DevicePtr {
    let bytes: &[u8] = bytemuck::cast_slice(values);
    let ptr = device.backend.alloc(bytes.len().max(1) as u64).expect("it fits");
    device.backend.upload(ptr, bytes).expect("it fits");
    ptr
}

pub fn take<T: bytemuck::Pod>(device: &Device, ptr: DevicePtr, count: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); count];
    device.backend.download(ptr, bytemuck::cast_slice_mut(&mut values)).expect("it is there");
    values
}

/// One product between poisoned rows and columns.
pub struct Run<'a> {
    pub device: &'a Device,
    pub stack: &'a Stack,
    pub batch: &'a Batch,
    /// Rows of a block, where the test chooses.
    pub tile_m: Option<u32>,
    /// The kernel, where the test chooses.
    pub config: Option<Config>,
    pub bias: bool,
    pub weighted: bool,
    /// Whether A has the list's order.
    pub in_order: bool,
    /// Elements between rows.
    pub gap: usize,
    /// Whether the kernels start before the ones before them have ended.
    pub early: bool,
}

impl<'a> Run<'a> {
    pub fn new(device: &'a Device, stack: &'a Stack, batch: &'a Batch) -> Self {
        Self {
            device,
            stack,
            batch,
            tile_m: None,
            config: None,
            bias: false,
            weighted: false,
            in_order: false,
            gap: 8,
            early: false,
        }
    }

    fn enqueue(
        &self,
        gemm: &Gemm,
        experts: &Experts,
        (a, c): (Matrix, Matrix),
        routed: &Routed<'_>,
    ) -> Result<(), makaira::gemm::Error> {
        let order = if self.early { Stream::default().early() } else { Stream::default().into() };
        let Batch { tokens, top_k, .. } = *self.batch;
        let workspace = gemm.expert_workspace(experts, tokens as u64, top_k as u32)?;
        let Some(mut config) = self.config else {
            return gemm.matmul_experts(a, experts, c, routed, &workspace, order);
        };
        config.kind = experts.kind();
        let problem =
            experts.problem(config.rows, config.tile_m, routed.max_blocks(), Some(routed.rows()));
        let choice: ExpertChoice =
            problem.choice(&config, self.device.backend.device()).expect("few items");
        let prepared = gemm.prepare_expert_choice(choice)?;
        gemm.matmul_experts_with(&prepared, a, experts, c, routed, &workspace, order)
    }

    /// The rows of the list with what is right for each, and C, of which nothing else was written.
    pub fn product<E: Number>(&self, random: &mut Random) -> Result<Product<E>, String> {
        let Self { device, stack, batch, .. } = *self;
        let (gemm, (n, k)) = (Gemm::new(device.backend.clone()), stack.shape());
        let num_experts = stack.layers.len();
        let list = batch.list(num_experts);
        let rows = batch.tokens * batch.top_k;
        let source: Vec<usize> = match self.in_order {
            true => (0..list.len()).collect(),
            false => list.iter().map(|choice| choice / batch.top_k).collect(),
        };
        let a: Vec<E> =
            numbers(k * if self.in_order { list.len() } else { batch.tokens }, 1.0, random);
        // As large as the product, so that neither hides the other.
        let squares: f64 = stack.layers[0].dense.iter().map(|w| f64::from(*w).powi(2)).sum();
        let size = (squares / n as f64).sqrt().min(100.0);
        let bias: Vec<E> = numbers(num_experts * n, size, random);
        let (a_stride, c_stride) = (k + self.gap, n + self.gap);
        // A ends with its last element: what lies behind it is not even allocated. Rows past the list's end are NaN.
        let a_rows = if self.in_order { rows } else { batch.tokens };
        let mut laid = vec![POISON; a_rows.max(1) * a_stride - self.gap];
        for (row, from) in a.chunks(k).enumerate() {
            laid[row * a_stride..][..k].copy_from_slice(bytemuck::cast_slice(from));
        }
        let a_ptr = put(device, &laid);
        let c_ptr = put(device, &vec![POISON; (rows + 2) * c_stride]);
        let bias_ptr = put(device, &bias);
        let [ids, weights] = [put(device, &batch.ids), put(device, &batch.weights)];
        let mut experts = stack.upload::<E>(&gemm);
        if self.bias {
            experts = experts.with_bias(bias_ptr);
        }
        let mut routing = self.routing(&gemm);
        if let Some(tile_m) = self.tile_m {
            routing = routing.with_tile_m(tile_m).expect("a height that kernels have");
        }
        let choices = Choices { ids, weights: Some(weights), tokens: batch.tokens as u64 };
        let matrix = |ptr: DevicePtr, stride: usize| Matrix { ptr, stride: stride as u64 };
        let c = matrix(c_ptr.offset(2 * c_stride as u64), c_stride);
        let order = if self.early { Stream::default().early() } else { Stream::default().into() };
        let enqueue = || {
            let mut routed = gemm.route(&routing, choices, order)?;
            if self.in_order {
                routed = routed.in_order();
            }
            if self.weighted {
                routed = routed.weighted();
            }
            self.enqueue(&gemm, &experts, (matrix(a_ptr, a_stride), c), &routed)
        };
        let result = enqueue().and_then(|()| if self.early { enqueue() } else { Ok(()) });
        result.map_err(|error| chain(&error))?;
        let out: Vec<u16> = take(device, c_ptr, (rows + 2) * c_stride);
        for ptr in [a_ptr, c_ptr, bias_ptr, ids, weights] {
            device.backend.free(ptr).expect("it is ours");
        }
        let mut c = Vec::new();
        for (at, bits) in out.into_iter().enumerate() {
            let (row, column) = (at / c_stride, at % c_stride);
            if (1..=list.len()).contains(&row) && column < n {
                c.push(bytemuck::cast(bits));
            } else if bits != POISON {
                return Err(format!("element {column} of row {row} - 1 was written"));
            }
        }
        let rows = list
            .iter()
            .zip(&source)
            .map(|(choice, row)| Row {
                expert: batch.ids[*choice] as usize,
                a: a[row * k..][..k].to_vec(),
                weight: if self.weighted { batch.weights[*choice].into() } else { 1.0 },
            })
            .collect();
        let bias = self.bias.then_some(bias);
        Ok(Product { rows, bias, c, n })
    }

    pub fn routing(&self, gemm: &Gemm) -> Routing {
        let Batch { tokens, top_k, .. } = *self.batch;
        gemm.routing(self.stack.layers.len() as u32, tokens as u64, top_k as u32).expect("it fits")
    }

    /// Runs and compares with the f64 product.
    pub fn check<E: Number>(&self, random: &mut Random) -> Result<Product<E>, String> {
        let product = self.product::<E>(random)?;
        product.compare(self.stack, self.config.as_ref())?;
        Ok(product)
    }
}

/// A row of the list.
pub struct Row<E> {
    pub expert: usize,
    pub a: Vec<E>,
    pub weight: f64,
}

/// A product and what it is of.
pub struct Product<E> {
    pub rows: Vec<Row<E>>,
    pub bias: Option<Vec<E>>,
    pub c: Vec<E>,
    pub n: usize,
}

impl<E: Number> Product<E> {
    fn compare(&self, stack: &Stack, config: Option<&Config>) -> Result<(), String> {
        let n = self.n;
        for (at, (row, c)) in self.rows.iter().zip(self.c.chunks(n)).enumerate() {
            let TypedLayer { dense, k, rounds_scales, .. } = &stack.layers[row.expert];
            // A choice that nobody made may scale fragments in half precision.
            let mut tolerance =
                config.map_or(Tolerance { half_roundings: 2 }, |config| Tolerance::of(config, *k));
            tolerance.half_roundings += u32::from(*rounds_scales);
            let bias = |column: usize| match &self.bias {
                Some(bias) => bias[row.expert * n + column].value(),
                None => 0.0,
            };
            let reference =
                Reference::new(&row.a, dense, *k).plus(|_, column| bias(column)).times(row.weight);
            let errors = reference.compare(c, tolerance);
            if !errors.is_ok() {
                return Err(format!("row {at} of expert {}: {errors}", row.expert));
            }
        }
        Ok(())
    }
}
