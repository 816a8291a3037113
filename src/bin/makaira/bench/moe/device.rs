//! Experts on a device: copies of the stack, batches with their lists, and what a product must be.

use std::collections::BTreeSet;
use std::sync::Arc;

use makaira::backend::{Backend, DevicePtr, Enqueue, Stream};
use makaira::gemm::experts::{Choices, Experts, Routed, Routing};
use makaira::gemm::{Gemm, Matrix, Weight, Workspace};
use makaira::kernel::select::Choice;
use makaira::kernel::{Problem, Rows};
use makaira::weights::{Activation, Group, PackedLayout};

use super::super::fill::{Filler, Pattern};
use super::super::layer::{Random, Shape, number, random_activations};
use super::super::operands::POISON;
use super::super::reference::{dot, sample};
use super::super::rounding_limit;
use super::MoeModel;
use crate::problem::KindArgs;

/// Bytes that the copies of a stack take at least, so that little of one is left in L2 when its turn comes.
const ROTATED_BYTES: u64 = 560_000_000;
/// Columns of each checked row.
const SAMPLED_COLUMNS: usize = 24;
/// Rows that are checked at most.
const SAMPLED_ROWS: usize = 96;

/// The experts of one product on a device.
pub struct Stack {
    backend: Arc<dyn Backend>,
    /// The size of each expert.
    pub shape: Shape,
    activation: Activation,
    num_experts: u32,
    /// Copies of the stack that launches take in turn.
    pub copies: Vec<Experts>,
    /// The same experts, each by itself: of each copy.
    pub singles: Vec<Vec<Weight>>,
    /// What each expert is filled with, the same in all copies.
    patterns: Vec<Pattern>,
    /// `[max_rows][K]`: the tokens, or the rows of the list.
    a: DevicePtr,
    activations: Vec<u16>,
    /// `[max_rows][N]`.
    c: DevicePtr,
    /// Whether rows of A are those of the list, which are multiplied by what they are worth.
    in_order: bool,
    workspace: Workspace,
}

/// A batch: its choices, and its lists on the device.
pub struct Batch {
    /// `[tokens][top_k]`.
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// The choices in the order of the list.
    list: Vec<usize>,
    /// Rows of each expert.
    pub counts: Vec<u64>,
    top_k: usize,
    device_ids: DevicePtr,
    device_weights: DevicePtr,
    routing: Routing,
    backend: Arc<dyn Backend>,
}

impl Batch {
    /// A batch in which each token chooses different experts, each as probably as any other.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn new(
        gemm: &Gemm,
        model: &MoeModel,
        tokens: u64,
        random: &mut Random,
    ) -> anyhow::Result<Self> {
        let backend = gemm.backend().clone();
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let mut chosen = BTreeSet::new();
            while chosen.len() < model.top_k as usize {
                chosen.insert((random.next() % u64::from(model.num_experts)) as u32);
            }
            ids.extend(chosen);
        }
        let weights: Vec<f32> = ids.iter().map(|_| 0.05 + random.unit() as f32).collect();
        let mut list: Vec<usize> = (0..ids.len()).collect();
        list.sort_by_key(|at| (ids[*at], *at));
        let mut counts = vec![0; model.num_experts as usize];
        ids.iter().for_each(|id| counts[*id as usize] += 1);
        let put = |bytes: &[u8]| {
            let ptr = backend.alloc(bytes.len() as u64)?;
            backend.upload(ptr, bytes)?;
            anyhow::Ok(ptr)
        };
        Ok(Self {
            device_ids: put(bytemuck::cast_slice(&ids))?,
            device_weights: put(bytemuck::cast_slice(&weights))?,
            routing: gemm.routing(model.num_experts, tokens, model.top_k)?,
            top_k: model.top_k as usize,
            ids,
            weights,
            list,
            counts,
            backend,
        })
    }

    /// Enqueues the making of the lists.
    ///
    /// # Errors
    /// Those of [`Gemm::route`].
    pub fn route(&self, gemm: &Gemm, order: Enqueue) -> anyhow::Result<Routed<'_>> {
        let choices = Choices {
            ids: self.device_ids,
            weights: Some(self.device_weights),
            tokens: (self.ids.len() / self.top_k) as u64,
        };
        Ok(gemm.route(&self.routing, choices, order)?)
    }

    /// Whether the lists on the device are right, or what is wrong.
    ///
    /// # Errors
    /// Those of the download.
    pub fn check(&self) -> anyhow::Result<Result<(), String>> {
        let mut token_ids = vec![0u32; self.list.len()];
        let mut offsets = vec![0u32; self.counts.len() + 1];
        let pairs = [
            (self.routing.token_ids_ptr(), &mut token_ids),
            (self.routing.offsets_ptr(), &mut offsets),
        ];
        for (ptr, words) in pairs {
            self.backend.download(ptr, bytemuck::cast_slice_mut(words))?;
        }
        let wanted: Vec<u32> = self.list.iter().map(|at| (at / self.top_k) as u32).collect();
        if token_ids != wanted {
            return Ok(Err("the list of rows is not sorted by expert, then by token".to_owned()));
        }
        let counts = offsets.windows(2).map(|pair| u64::from(pair[1]) - u64::from(pair[0]));
        Ok(match offsets[0] == 0 && counts.eq(self.counts.iter().copied()) {
            true => Ok(()),
            false => Err("the offsets of the list are wrong".to_owned()),
        })
    }

    /// Experts that have rows.
    pub fn num_active(&self) -> usize {
        self.counts.iter().filter(|count| **count > 0).count()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        free(&*self.backend, &[self.device_ids, self.device_weights]);
    }
}

fn free(backend: &dyn Backend, ptrs: &[DevicePtr]) {
    for ptr in ptrs {
        if let Err(error) = backend.free(*ptr) {
            log::debug!("freeing a mixture of experts: {error}");
        }
    }
}

impl Stack {
    /// The experts of product `product` of a model for lists of up to `max_rows` rows; `rotate` makes as many copies
    /// as a cold L2 wants.
    ///
    /// # Errors
    /// If the device has too little memory, or the group is none that divides the inputs.
    pub fn new(
        gemm: &Gemm,
        (model, product): (&MoeModel, usize),
        kind: &KindArgs,
        max_rows: u64,
        rotate: bool,
        random: &mut Random,
    ) -> anyhow::Result<Self> {
        let backend = gemm.backend().clone();
        let shape = model.products[product].clone();
        let tile = kind.kind().tile();
        let layout = PackedLayout::of(shape.n, shape.k, kind.group(shape.k)?, tile)?;
        anyhow::ensure!(
            layout.group != Group::PerColumn,
            "experts are filled tile by tile, scales among them; pass --group 16, 32, 64 or 128"
        );
        let KindArgs { weight: weight_type, activation, .. } = *kind;
        let filler = Filler::load(&*backend, weight_type, &layout)?;
        let patterns: Vec<Pattern> = (0..model.num_experts)
            .map(|_| Pattern::new(random.next() as u32, weight_type, shape.k))
            .collect();
        let stack_bytes = layout.total_bytes as u64 * u64::from(model.num_experts);
        let num_copies = if rotate { ROTATED_BYTES.div_ceil(stack_bytes).max(1) } else { 1 };
        let (mut copies, mut singles) = (Vec::new(), Vec::new());
        for _ in 0..num_copies {
            let mut experts =
                gemm.reserve_experts(&layout, weight_type.format, model.num_experts, activation)?;
            let mut weights = Vec::new();
            for (idx, pattern) in (0..model.num_experts).zip(&patterns) {
                experts.set_factor(idx, pattern.factor())?;
                let weight = gemm.reserve(&layout, weight_type.format)?;
                for ptr in [experts.expert_ptr(idx), weight.ptr()] {
                    filler.fill(&*backend, ptr, &layout, pattern, Stream::default())?;
                }
                weights.push(weight.with_activation(activation).with_factor(pattern.factor()));
            }
            copies.push(experts);
            singles.push(weights);
        }
        backend.synchronize(Stream::default())?;
        let activations = random_activations(activation, max_rows as usize, shape.k, random.next());
        let a = backend.alloc(2 * activations.len() as u64)?;
        backend.upload(a, bytemuck::cast_slice(&activations))?;
        let c = backend.alloc(2 * max_rows * shape.n as u64)?;
        let max_tokens = max_rows / u64::from(model.top_k);
        let workspace = gemm.expert_workspace(&copies[0], max_tokens, model.top_k)?;
        let (num_experts, in_order) = (model.num_experts, product > 0);
        Ok(Self {
            backend,
            shape,
            activation,
            num_experts,
            copies,
            singles,
            patterns,
            a,
            activations,
            c,
            in_order,
            workspace,
        })
    }

    /// Bytes of one expert.
    pub fn expert_bytes(&self) -> usize {
        self.copies[0].layout().total_bytes
    }

    /// Enqueues the product of a batch whose lists are made, with the copy whose turn it is.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul_experts`].
    pub fn launch(
        &self,
        gemm: &Gemm,
        routed: Routed<'_>,
        idx: usize,
        order: Enqueue,
    ) -> anyhow::Result<()> {
        let routed = if self.in_order { routed.in_order().weighted() } else { routed };
        let a = Matrix { ptr: self.a, stride: self.shape.k as u64 };
        let c = Matrix { ptr: self.c, stride: self.shape.n as u64 };
        let experts = &self.copies[idx % self.copies.len()];
        Ok(gemm.matmul_experts(a, experts, c, &routed, &self.workspace, order)?)
    }

    /// Enqueues one product for each expert that has rows, as one does without experts in one launch. Rows of A are
    /// taken to lie in the list's order.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul`].
    pub fn launch_singles(
        &self,
        gemm: &Gemm,
        batch: &Batch,
        workspace: &Workspace,
        idx: usize,
        order: Enqueue,
    ) -> anyhow::Result<()> {
        let (n, k) = (self.shape.n as u64, self.shape.k as u64);
        let mut first = 0;
        for (weight, count) in self.singles[idx % self.singles.len()].iter().zip(&batch.counts) {
            let a = Matrix { ptr: self.a.offset(2 * k * first), stride: k };
            let c = Matrix { ptr: self.c.offset(2 * n * first), stride: n };
            gemm.matmul(a, weight, c, *count, workspace, order)?;
            first += count;
        }
        Ok(())
    }

    /// The kernels that [`Stack::launch_singles`] takes for some batches, and a workspace for all of them.
    ///
    /// # Errors
    /// If no kernel takes the experts.
    pub fn prepare_singles(
        &self,
        gemm: &Gemm,
        batches: &[Batch],
    ) -> anyhow::Result<(Vec<Choice>, Workspace)> {
        let counts: BTreeSet<u64> =
            batches.iter().flat_map(|batch| batch.counts.iter().copied()).collect();
        let weight = &self.singles[0][0];
        let (n, k) = (self.shape.n, self.shape.k);
        let (kind, group, rows) = (weight.kind(), weight.layout().group, Rows::of(n, k));
        let choice = |m: &u64| {
            let problem = Problem { kind, m: *m, n: n as u32, k: k as u32, group, rows };
            gemm.choice(&problem, false)
        };
        let choices =
            counts.iter().filter(|m| **m > 0).map(choice).collect::<Result<Vec<_>, _>>()?;
        let most = counts.last().copied().unwrap_or(0);
        Ok((choices, gemm.workspace(weight, most)?))
    }

    /// Fills all rows of the output with NaN.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn poison(&self) -> anyhow::Result<()> {
        let elements = self.activations.len() / self.shape.k * self.shape.n;
        Ok(self.backend.upload(self.c, bytemuck::cast_slice(&vec![POISON; elements]))?)
    }

    /// The relative error of a sample of a batch's product after [`Stack::poison`], or what is wrong.
    ///
    /// # Errors
    /// Those of the download.
    pub fn check(&self, batch: &Batch, random: &mut Random) -> anyhow::Result<Result<f64, String>> {
        let (n, k) = (self.shape.n, self.shape.k);
        let mut c = vec![0u16; self.activations.len() / k * n];
        self.backend.download(self.c, bytemuck::cast_slice_mut(&mut c))?;
        Ok(self.judge(batch, &c, random))
    }

    fn judge(&self, batch: &Batch, c: &[u16], random: &mut Random) -> Result<f64, String> {
        let (n, k) = (self.shape.n, self.shape.k);
        let value = |bits: &u16| number(self.activation, *bits);
        let (product, behind) = c.split_at(batch.list.len() * n);
        let bad = product.iter().filter(|bits| !value(bits).is_finite()).count();
        if bad > 0 {
            return Err(format!("{bad} of {} outputs are not finite", product.len()));
        }
        if let Some(at) = behind.iter().position(|bits| *bits != POISON) {
            return Err(format!("element {at} behind the list's last row was written"));
        }
        let (mut error, mut norm) = (0.0, 0.0);
        for row in sample(batch.list.len(), SAMPLED_ROWS, random) {
            let choice = batch.list[row];
            let source = if self.in_order { row } else { choice / batch.top_k };
            let a: Vec<f64> = self.activations[source * k..][..k].iter().map(value).collect();
            let pattern = &self.patterns[batch.ids[choice] as usize];
            let worth = if self.in_order { f64::from(batch.weights[choice]) } else { 1.0 };
            for column in sample(n, SAMPLED_COLUMNS, random) {
                let exact = worth * dot(&a, &pattern.column(self.copies[0].layout(), column));
                error += (value(&c[row * n + column]) - exact).powi(2);
                norm += exact.powi(2);
            }
        }
        let (error, limit) = ((error / norm).sqrt(), rounding_limit(self.activation));
        match error < limit {
            true => Ok(error),
            false => Err(format!("relative error {error:.2e}, at most {limit:.0e} is rounding")),
        }
    }

    /// Experts.
    pub fn num_experts(&self) -> u32 {
        self.num_experts
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        free(&*self.backend, &[self.a, self.c]);
    }
}

#[cfg(test)]
mod tests {
    use makaira::emu::EmuBackend;

    use super::*;
    use crate::problem::WeightType;

    fn stack(kind: &KindArgs, in_order: bool) -> (Gemm, MoeModel, Stack) {
        let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2))).without_tuning();
        let model: MoeModel = "5x64x256x2".parse().expect("sizes");
        let mut random = Random(21);
        let mut stack =
            Stack::new(&gemm, (&model, 0), kind, model.rows(9), false, &mut random).expect("fits");
        stack.in_order = in_order;
        (gemm, model, stack)
    }

    #[test]
    fn one_launch_and_one_for_each_expert_are_right() {
        for weight in WeightType::all() {
            for (in_order, activation) in [(false, Activation::F16), (true, Activation::Bf16)] {
                let kind = KindArgs { weight, activation, ..KindArgs::default() };
                let (gemm, model, stack) = stack(&kind, in_order);
                let mut random = Random(22);
                let batch = Batch::new(&gemm, &model, 7, &mut random).expect("fits");
                let order = Stream::default().into();
                let routed = batch.route(&gemm, order).expect("runs");
                assert_eq!(batch.check().expect("downloads"), Ok(()));
                stack.poison().expect("uploads");
                stack.launch(&gemm, routed, 0, order).expect("runs");
                let found = stack.check(&batch, &mut random).expect("downloads");
                found.unwrap_or_else(|why| panic!("{weight}, in order {in_order}: {why}"));
            }
        }
    }

    #[test]
    fn singles_leave_the_rows_of_the_list() {
        let (gemm, model, mut stack) = stack(&KindArgs::default(), true);
        let mut random = Random(23);
        let batches = [Batch::new(&gemm, &model, 7, &mut random).expect("fits")];
        let (choices, workspace) = stack.prepare_singles(&gemm, &batches).expect("kernels");
        assert!(!choices.is_empty());
        stack.poison().expect("uploads");
        let order = Stream::default().into();
        stack.launch_singles(&gemm, &batches[0], &workspace, 0, order).expect("runs");
        // Singles are not weighted.
        let [mut batch] = batches;
        batch.weights.fill(1.0);
        let found = stack.check(&batch, &mut random).expect("downloads");
        found.unwrap_or_else(|why| panic!("{why}"));
        stack.in_order = false;
        stack.check(&batch, &mut random).expect("downloads").expect_err("rows of tokens");
    }

    #[test]
    fn a_wrong_or_missing_or_foreign_row_is_noticed() {
        let (gemm, model, stack) = stack(&KindArgs::default(), false);
        let mut random = Random(24);
        let batch = Batch::new(&gemm, &model, 6, &mut random).expect("fits");
        let order = Stream::default().into();
        let routed = batch.route(&gemm, order).expect("runs");
        stack.poison().expect("uploads");
        stack.launch(&gemm, routed, 0, order).expect("runs");
        let (n, rows) = (stack.shape.n, model.rows(9) as usize);
        let mut c = vec![0u16; rows * n];
        stack.backend.download(stack.c, bytemuck::cast_slice_mut(&mut c)).expect("downloads");
        let judge = |c: &[u16]| stack.judge(&batch, c, &mut Random(25));
        judge(&c).expect("right");
        let mut wrong = c.clone();
        wrong.copy_within(0..n, 3 * n);
        assert!(judge(&wrong).expect_err("another row").contains("relative error"));
        let mut wrong = c.clone();
        wrong[5] = POISON;
        assert!(judge(&wrong).expect_err("unwritten").contains("1 of 768 outputs"));
        c[12 * n + 3] = 0;
        assert!(judge(&c).expect_err("overrun").contains("element 3 behind"));
    }

    #[test]
    fn one_scale_per_output_is_refused() {
        let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2)));
        let model: MoeModel = "5x64x256x2".parse().expect("sizes");
        let kind = KindArgs { group: Some(-1), ..KindArgs::default() };
        let error = Stack::new(&gemm, (&model, 0), &kind, 4, false, &mut Random(1)).err();
        assert!(error.expect("refused").to_string().contains("pass --group 16, 32, 64 or 128"));
    }
}
