//! Every weight type, scale type and activation type, in every family, against the f64 product of the weights as the
//! source means them; with and without a bias and a residual.
//!
//! The reference knows nothing of packing: weights come from [`reference::decode`].

use half::{bf16, f16};
use makaira::backend::Stream;
use makaira::gemm::{Gemm, Matrix, Weight};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Kind, Problem, Rows};
use makaira::layout::{bf16_from_f64, f16_from_f64};
use makaira::reference::{self, Element, Reference, Tolerance};
use makaira::weights::{
    Activation, Codes, FORMATS, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder,
    ScaleType, Scales, WeightFormat, ZeroOrder, ZeroRule, Zeros,
};

use crate::support::{Device, Random, chain, devices};

/// A layer of a weight type with random contents.
pub struct TypedLayer {
    pub n: usize,
    pub k: usize,
    pub packed: PackedWeights,
    /// `[N][K]`, from the source.
    pub dense: Vec<f32>,
    /// Whether packing rounds its scales.
    pub rounds_scales: bool,
}

impl TypedLayer {
    pub fn new(
        format: &'static dyn WeightFormat,
        shape: (usize, usize),
        raw: i64,
        element: ScaleType,
        random: &mut Random,
    ) -> Self {
        Self::in_order(format, shape, raw, element, None, random)
    }

    /// A layer whose inputs have these groups, of as many as there are; by the group rule without.
    pub fn in_order(
        format: &'static dyn WeightFormat,
        (n, k): (usize, usize),
        raw: i64,
        element: ScaleType,
        order: Option<(Vec<i32>, usize)>,
        random: &mut Random,
    ) -> Self {
        let group = Group::new(k, raw).expect("legal");
        let num_groups = order.as_ref().map_or(group.num_groups(k), |(_, num_groups)| *num_groups);
        let g_idx = order.as_ref().map(|(g_idx, _)| bytemuck::cast_slice(g_idx));
        let codes: Vec<u8> = (0..n * k)
            .map(|_| {
                loop {
                    let code = random.below(format.num_codes()) as u8;
                    if !format.decode(code).is_nan() {
                        break code;
                    }
                }
            })
            .collect();
        let num_scales = n * num_groups;
        let largest =
            (0..format.num_codes()).map(|code| format.decode(code as u8).abs()).fold(1.0, f32::max);
        let scale_bytes: Vec<u8> = (0..num_scales)
            .flat_map(|_| {
                let value = random.uniform(0.02, 0.2) / f64::from(largest);
                match element {
                    ScaleType::F16 => f16_from_f64(value).to_le_bytes().to_vec(),
                    ScaleType::BF16 => bf16_from_f64(value).to_le_bytes().to_vec(),
                    ScaleType::F32 => (value as f32).to_le_bytes().to_vec(),
                    // Subnormals too.
                    ScaleType::E4M3 => vec![1 + random.below(0x58) as u8],
                    ScaleType::E8M0 => vec![118 + random.below(8) as u8],
                }
            })
            .collect();
        let global = if element == ScaleType::E4M3 { 0.013 } else { 1.0 };
        let scales = Scales { bytes: &scale_bytes, element, order: ScaleOrder::Rows, global };
        let zero_bytes: Vec<u8> =
            (0..num_scales).map(|_| random.below(format.num_codes()) as u8).collect();
        let stored = format.zero_rule() == ZeroRule::Stored;
        let zeros = stored.then_some(Zeros { bytes: &zero_bytes, order: ZeroOrder::Rows });
        let codes = Codes::ByOutput(&codes);
        let parts = MatrixParts { n, k, group, format, codes, scales, zeros, g_idx };
        Self::of(&QuantMatrix::from_parts(parts).expect("legal"))
    }

    /// The layer of a matrix.
    pub fn of(matrix: &QuantMatrix<'_>) -> Self {
        Self {
            n: matrix.n(),
            k: matrix.k(),
            packed: PackedWeights::pack(matrix, 1).expect("packs"),
            dense: reference::decode(matrix),
            rounds_scales: matrix.scales().element == ScaleType::F32,
        }
    }

    /// The kind of products with it and a type of activations.
    pub fn kind(&self, gemm: &Gemm, activation: Activation) -> Kind {
        self.weight(gemm, activation).kind()
    }

    pub fn weight(&self, gemm: &Gemm, activation: Activation) -> Weight {
        gemm.upload(&self.packed).expect("it fits").with_activation(activation)
    }
}

/// A type of activations with its numbers.
pub trait Number: Element + bytemuck::Pod {
    const ACTIVATION: Activation;
    fn round(value: f64) -> Self;
}

impl Number for f16 {
    const ACTIVATION: Activation = Activation::F16;
    fn round(value: f64) -> Self {
        f16_from_f64(value)
    }
}

impl Number for bf16 {
    const ACTIVATION: Activation = Activation::Bf16;
    fn round(value: f64) -> Self {
        bf16_from_f64(value)
    }
}

/// Numbers of up to a size.
pub fn numbers<E: Number>(count: usize, size: f64, random: &mut Random) -> Vec<E> {
    let of = |_| E::round(size * random.uniform(0.01, 1.0) * random.pick(&[-1.0, 1.0]));
    (0..count).map(of).collect()
}

/// A NaN of either type that no kernel writes.
pub const POISON: u16 = 0x7ff1;

/// One product between poisoned rows and columns, and what is added to it.
struct Run<'a, E> {
    device: &'a Device,
    layer: &'a TypedLayer,
    a: Vec<E>,
    m: usize,
    bias: Option<Vec<E>>,
    residual: Option<Vec<E>>,
    /// Elements between rows.
    gap: usize,
    /// Twice, the second launch before the first has ended.
    early: bool,
}

impl<E: Number> Run<'_, E> {
    fn new<'a>(
        device: &'a Device,
        layer: &'a TypedLayer,
        m: usize,
        random: &mut Random,
    ) -> Run<'a, E> {
        // As large as the product, so that neither hides the other.
        let squares: f64 = layer.dense.iter().map(|w| f64::from(*w).powi(2)).sum();
        let size = (squares / layer.n as f64).sqrt().min(100.0);
        let mut maybe = |count| (random.below(2) == 0).then(|| numbers(count, size, random));
        let (bias, residual) = (maybe(layer.n), maybe(m * layer.n));
        let a = numbers(m * layer.k, 1.0, random);
        Run { device, layer, a, m, bias, residual, gap: 8, early: false }
    }

    /// The product by a configuration, or by the one that the selection takes.
    fn run(&self, choice: Option<Choice>) -> Result<Vec<E>, String> {
        let (backend, TypedLayer { n, k, .. }) = (&self.device.backend, self.layer);
        let (m, n, k) = (self.m, *n, *k);
        let gemm = Gemm::new(backend.clone());
        let put = |rows: &[E], columns: usize, poison: bool| {
            let stride = columns + self.gap;
            let mut laid = vec![POISON; (rows.len() / columns + 2) * stride];
            for (row, from) in rows.chunks(columns).enumerate().filter(|_| !poison) {
                let at = (row + 1) * stride;
                laid[at..at + columns].copy_from_slice(bytemuck::cast_slice(from));
            }
            let base = backend.alloc(2 * laid.len() as u64).expect("it fits");
            backend.upload(base, bytemuck::cast_slice(&laid)).expect("it fits");
            (
                base,
                laid.len(),
                Matrix { ptr: base.offset(2 * stride as u64), stride: stride as u64 },
            )
        };
        let (a_base, _, a) = put(&self.a, k, false);
        let (c_base, c_len, c) = put(&vec![E::zeroed(); m * n], n, true);
        let residual = self.residual.as_ref().map(|residual| put(residual, n, false));
        let bias = self.bias.as_ref().map(|bias| put(bias, n, false));
        let mut weight = self.layer.weight(&gemm, E::ACTIVATION);
        if let Some((_, _, bias)) = bias {
            weight = weight.with_bias(bias.ptr);
        }
        let stream = Stream::default();
        let result = match choice {
            Some(choice) => {
                let mut choice = choice;
                choice.config.kind.bias = bias.is_some();
                choice.config.kind.residual = residual.is_some();
                let problem = problem(&gemm, self.layer, E::ACTIVATION, m, choice.config.rows);
                let plans = select::plans(&choice.config, &problem, choice.stripe);
                let (scratch, locks) = plans.fold((0, 0), |(scratch, locks), plan| {
                    (plan.scratch_bytes.max(scratch), plan.num_locks.max(locks))
                });
                let workspace = gemm.workspace_of(scratch, locks).expect("it fits");
                let prepared = gemm.prepare_choice(choice).map_err(|error| chain(&error))?;
                match residual {
                    None => {
                        gemm.matmul_with(&prepared, a, &weight, c, m as u64, &workspace, stream)
                    }
                    Some((_, _, residual)) => gemm.matmul_add_with(
                        &prepared, a, &weight, residual, c, m as u64, &workspace, stream,
                    ),
                }
            }
            None => {
                let workspace = gemm.workspace(&weight, m as u64).map_err(|error| chain(&error))?;
                let order = if self.early { stream.early() } else { stream.into() };
                let enqueue = || match residual {
                    None => gemm.matmul(a, &weight, c, m as u64, &workspace, order),
                    Some((_, _, residual)) => {
                        gemm.matmul_add(a, &weight, residual, c, m as u64, &workspace, order)
                    }
                };
                enqueue().and_then(|()| if self.early { enqueue() } else { Ok(()) })
            }
        };
        result.map_err(|error| chain(&error))?;
        let mut out = vec![0u16; c_len];
        backend.download(c_base, bytemuck::cast_slice_mut(&mut out)).expect("it is there");
        let bases = residual.into_iter().chain(bias).map(|(base, ..)| base);
        for base in bases.chain([a_base, c_base]) {
            backend.free(base).expect("it is ours");
        }
        let stride = n + self.gap;
        let mut product = Vec::new();
        for (at, bits) in out.into_iter().enumerate() {
            let (row, column) = (at / stride, at % stride);
            if (1..=m).contains(&row) && column < n {
                product.push(bytemuck::cast(bits));
            } else if bits != POISON {
                return Err(format!("element {column} of row {row} - 1 was written"));
            }
        }
        Ok(product)
    }

    /// Compares with the f64 product.
    fn check(&self, c: &[E], tolerance: Tolerance) -> Result<(), String> {
        let TypedLayer { n, k, dense, rounds_scales, .. } = self.layer;
        let reference = Reference::new(&self.a, dense, *k)
            .plus(|_, column| self.bias.as_ref().map_or(0.0, |bias| bias[column].value()))
            .plus(|row, column| {
                self.residual.as_ref().map_or(0.0, |rows| rows[row * n + column].value())
            });
        let mut tolerance = tolerance;
        // fp16 scales: in bf16 a quarter of a rounding.
        tolerance.half_roundings += u32::from(*rounds_scales);
        let errors = reference.compare(c, tolerance);
        if errors.is_ok() { Ok(()) } else { Err(errors.to_string()) }
    }
}

fn problem(
    gemm: &Gemm,
    layer: &TypedLayer,
    activation: Activation,
    m: usize,
    rows: Rows,
) -> Problem {
    let (kind, group) = (layer.kind(gemm, activation), layer.packed.layout().group);
    let k = layer.packed.layout().k as u32;
    Problem { kind, m: m as u64, n: layer.n as u32, k, group, rows }
}

/// Group and scale types to test a weight type with.
pub fn scalings(format: &'static dyn WeightFormat) -> Vec<(i64, ScaleType)> {
    let mut scalings = vec![
        (-1, ScaleType::F16),
        (-1, ScaleType::F32),
        (128, ScaleType::F16),
        (128, ScaleType::BF16),
        (64, ScaleType::F16),
        (32, ScaleType::BF16),
        (16, ScaleType::F16),
    ];
    if format.name() == "e2m1" {
        scalings.extend([(16, ScaleType::E4M3), (32, ScaleType::E8M0)]);
    }
    scalings
}

/// The best choice of each family and another one, on a layer of a type.
pub fn families_agree<E: Number>(
    device: &Device,
    layer: &TypedLayer,
    m: usize,
    what: &str,
    random: &mut Random,
) -> Vec<&'static str> {
    let gemm = Gemm::new(device.backend.clone());
    let problem = problem(&gemm, layer, E::ACTIVATION, m, Rows::of(layer.n, layer.k));
    let ranked = select::ranked(&problem, device.backend.device());
    let mut families: Vec<&str> = ranked.iter().map(|choice| choice.config.family).collect();
    families.sort_unstable();
    families.dedup();
    for family in &families {
        let of: Vec<&Choice> =
            ranked.iter().filter(|choice| choice.config.family == *family).collect();
        for choice in [of[0], of[random.below(of.len())]] {
            let run = Run::<E>::new(device, layer, m, random);
            let Config { kind, .. } = choice.config;
            let what = format!("{} stripe={} {kind} m={m} {what}", choice.config, choice.stripe);
            let c = run.run(Some(*choice)).unwrap_or_else(|why| panic!("{what}: {why}"));
            run.check(&c, Tolerance::of(&choice.config, layer.k))
                .unwrap_or_else(|why| panic!("{what}: {why}"));
        }
    }
    families
}

fn every_scaling_of(format: &'static dyn WeightFormat) {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for (raw, element) in scalings(format) {
            let shape = random.pick(&[(188, 640), (128, 1024), (320, 512)]);
            let layer = TypedLayer::new(format, shape, raw, element, &mut random);
            for m in [1 + random.below(8), 9 + random.below(8), 17 + random.below(100)] {
                let what =
                    format!("{} group {raw} {element:?} {shape:?} seed {seed}", format.name());
                let families = families_agree::<f16>(&device, &layer, m, &what, &mut random);
                let in_bf16 = families_agree::<bf16>(&device, &layer, m, &what, &mut random);
                assert!(in_bf16.contains(&"sm80") && families.contains(&"sm80"), "{families:?}");
                if (9..=16).contains(&m) && !device.is_gpu() {
                    assert_eq!(families, ["sm80", "sm90", "sm90wg"], "{what}");
                    assert_eq!(in_bf16, families, "{what}");
                }
            }
        }
    }
}

/// One test a format, so that they run side by side; the list is checked below.
macro_rules! formats {
    ($($name:ident),*) => {
        $(#[test]
        fn $name() {
            every_scaling_of(makaira::weights::format_by_name(stringify!($name)).expect("listed"));
        })*

        #[test]
        fn every_format_has_its_test() {
            let names: Vec<&str> = FORMATS.iter().map(|format| format.name()).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

formats!(e2m1, e4m3, u4, u4b8, u8, u8b128);

/// Odd sizes, where rows are copied and written element by element, and sizes that cut the last run.
#[test]
fn any_size_of_any_type() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for format in FORMATS {
            for (shape, gap) in [((67, 250), 1), ((133, 96), 8), ((36, 40), 4), ((1, 1), 0)] {
                let layer = TypedLayer::new(*format, shape, -1, ScaleType::F16, &mut random);
                for m in [1, 5, 33] {
                    let what = format!("{} {shape:?} m={m} seed={seed}", format.name());
                    let mut run = Run::<f16>::new(&device, &layer, m, &mut random);
                    run.gap = gap;
                    let c = run.run(None).unwrap_or_else(|why| panic!("{what}: {why}"));
                    let tolerance = Tolerance { half_roundings: 1 };
                    run.check(&c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
                    let mut run = Run::<bf16>::new(&device, &layer, m, &mut random);
                    run.gap = gap;
                    let c = run.run(None).unwrap_or_else(|why| panic!("{what}: {why}"));
                    let tolerance = Tolerance { half_roundings: 2 };
                    run.check(&c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
        }
    }
}

/// A residual may be C itself.
#[test]
fn the_residual_may_be_the_output() {
    for device in devices() {
        let mut random = Random(91);
        let layer = TypedLayer::new(FORMATS[0], (128, 512), 32, ScaleType::E8M0, &mut random);
        for m in [3, 20] {
            let mut run = Run::<f16>::new(&device, &layer, m, &mut random);
            run.bias = None;
            let before: Vec<f16> = numbers(m * layer.n, 1.0, &mut random);
            let gemm = Gemm::new(device.backend.clone());
            let weight = layer.weight(&gemm, Activation::F16);
            let workspace = gemm.workspace(&weight, m as u64).expect("it fits");
            let put = |values: &[f16], columns: usize| {
                let ptr = device.backend.alloc(2 * values.len() as u64).expect("it fits");
                device.backend.upload(ptr, bytemuck::cast_slice(values)).expect("it fits");
                Matrix { ptr, stride: columns as u64 }
            };
            let (a, c) = (put(&run.a, layer.k), put(&before, layer.n));
            gemm.matmul_add(a, &weight, c, c, m as u64, &workspace, Stream::default())
                .unwrap_or_else(|error| panic!("{}", chain(&error)));
            let mut product = vec![f16::ZERO; m * layer.n];
            device.backend.download(c.ptr, bytemuck::cast_slice_mut(&mut product)).expect("it ran");
            run.residual = Some(before);
            run.check(&product, Tolerance { half_roundings: 0 })
                .unwrap_or_else(|why| panic!("m={m}: {why}"));
            for matrix in [a, c] {
                device.backend.free(matrix.ptr).expect("it is ours");
            }
        }
    }
}

/// Inputs in any order of groups: a permutation of whole groups, one input after the other, groups of any sizes (some
/// without an input) as a shard of a row-parallel layer has them, and one group for all.
#[test]
fn inputs_in_any_order_of_groups() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for name in ["u4", "u4b8", "u8", "u8b128"] {
            let format = makaira::weights::format_by_name(name).expect("listed");
            for (k, raw, case) in [(512, 128, 0), (640, 32, 1), (384, 128, 2), (250, -1, 3)] {
                let num_groups = [4, 20, 9, 7][case];
                let mut g_idx: Vec<i32> = match case {
                    // Every input's group, shuffled below.
                    0 | 1 => (0..k).map(|i| i as i32 / raw as i32).collect(),
                    2 => (0..k).map(|_| [0, 1, 1, 1, 4, 8][random.below(6)]).collect(),
                    _ => vec![5; k],
                };
                for at in (1..k).rev() {
                    g_idx.swap(at, random.below(at + 1));
                }
                let shape = (random.pick(&[64, 188, 32, 7]), k);
                let order = Some((g_idx, num_groups));
                let element = random.pick(&[ScaleType::F16, ScaleType::BF16]);
                let layer = TypedLayer::in_order(format, shape, raw, element, order, &mut random);
                let gathers = layer.packed.input_order().is_some_and(|order| !order.is_identity());
                assert_eq!(gathers, case != 3, "{name} case {case}");
                for m in [1, 11, 40] {
                    let what = format!("{name} case {case} {shape:?} m={m} seed={seed}");
                    let mut run = Run::<f16>::new(&device, &layer, m, &mut random);
                    // Nothing of A is aligned.
                    run.gap = 1;
                    let c = run.run(None).unwrap_or_else(|why| panic!("{what}: {why}"));
                    let tolerance = Tolerance { half_roundings: 1 };
                    run.check(&c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
                    run.early = true;
                    let again = run.run(None).unwrap_or_else(|why| panic!("{what} early: {why}"));
                    assert!(again == c, "{what}: other bits where launches overlap");
                    let run = Run::<bf16>::new(&device, &layer, m, &mut random);
                    let c = run.run(None).unwrap_or_else(|why| panic!("{what}: {why}"));
                    let tolerance = Tolerance { half_roundings: 2 };
                    run.check(&c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
        }
    }
}
