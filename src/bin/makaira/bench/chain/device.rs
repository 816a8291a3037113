//! A model on a device: weights, buffers, launches, and what a run of it has left.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use makaira::backend::{Backend, DevicePtr, Stream};
use makaira::gemm::{Gemm, Matrix, Prepared, Weight, Workspace};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::{Group, PackedLayout};

use super::super::fill::{Filler, Pattern};
use super::super::layer::{Random, number, random_activations};
use super::super::model::Model;
use super::super::operands::{POISON, hash};
use super::super::plan::{Forced, Pair};
use super::super::reference::{dot, sample};
use super::super::{error_limit, in_order};
use crate::problem::KindArgs;

/// Columns and rows of each checked product.
const SAMPLED: usize = 24;

/// A model on a device.
pub struct Chain {
    /// The device.
    pub backend: Arc<dyn Backend>,
    /// Its layers.
    pub model: Model,
    /// What is multiplied.
    kind: Kind,
    /// Of one layer's weights.
    pub layouts: Vec<PackedLayout>,
    /// Of all weights, in order.
    pub weights: Vec<Weight>,
    patterns: Vec<Pattern>,
    /// What the first product reads: `[max_m][K]`.
    input: DevicePtr,
    /// What each product of a layer writes: `[max_m][N]`.
    outputs: Vec<DevicePtr>,
}

/// The kernels of one layer for a batch.
pub struct Kernels {
    m: u64,
    prepared: Vec<Prepared>,
    workspace: Workspace,
}

impl Chain {
    /// A model with random weights and input.
    ///
    /// # Errors
    /// If the device has too little memory, or the group is none that divides every number of inputs.
    pub fn new(
        gemm: &Gemm,
        model: &Model,
        kind: &KindArgs,
        max_m: u64,
        random: &mut Random,
    ) -> anyhow::Result<Self> {
        let backend = gemm.backend().clone();
        let layouts = model.layouts(kind)?;
        anyhow::ensure!(
            layouts.iter().all(|layout| layout.group != Group::PerColumn),
            "a chain fills its weights tile by tile, scales among them; pass --group 16, 32, 64 or 128"
        );
        let KindArgs { weight: weight_type, activation, .. } = *kind;
        let filler = Filler::load(&*backend, weight_type, &layouts[0])?;
        let (mut weights, mut patterns) = (Vec::new(), Vec::new());
        for idx in 0..model.num_launches() {
            let (in_layer, shape) = model.product(idx);
            let layout = &layouts[in_layer];
            let pattern = Pattern::new(random.next() as u32, weight_type, shape.k);
            let weight = gemm.reserve(layout, weight_type.format)?;
            let weight = weight.with_activation(activation).with_factor(pattern.factor());
            filler.fill(&*backend, weight.ptr(), layout, &pattern, Stream::default())?;
            weights.push(weight);
            patterns.push(pattern);
        }
        backend.synchronize(Stream::default())?;
        let k = model.products[0].k;
        let input = backend.alloc(2 * max_m * k as u64)?;
        let activations = random_activations(activation, max_m as usize, k, random.next());
        backend.upload(input, bytemuck::cast_slice(&activations))?;
        let output = |layout: &PackedLayout| backend.alloc(2 * max_m * layout.n as u64);
        let outputs = layouts.iter().map(output).collect::<Result<_, _>>()?;
        let (model, kind) = (model.clone(), kind.kind());
        Ok(Self { backend, model, kind, layouts, weights, patterns, input, outputs })
    }

    pub fn weight_bytes(&self) -> usize {
        let bytes: usize = self.layouts.iter().map(|layout| layout.total_bytes).sum();
        bytes * self.model.num_layers
    }

    /// The configurations of one layer's products.
    ///
    /// # Errors
    /// If no kernel takes one of them.
    pub fn choices(&self, gemm: &Gemm, m: u64) -> anyhow::Result<Vec<Pair>> {
        let of = |layout: &PackedLayout| {
            Ok(Pair::of(|early| gemm.choice(&self.problem(layout, m), early))?)
        };
        self.layouts.iter().map(of).collect()
    }

    /// The sets of a file: one configuration for each product of a layer, by name, a set a line.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is no set.
    pub fn sets(&self, gemm: &Gemm, m: u64, path: &Path) -> anyhow::Result<Vec<Vec<Pair>>> {
        let device = gemm.backend().device();
        let set = |line: &str| {
            let names: Vec<&str> = line.split_whitespace().collect();
            let (count, wanted) = (names.len(), self.layouts.len());
            anyhow::ensure!(
                count == wanted,
                "`{line}` has {count} configurations, a layer has {wanted} products"
            );
            let pair = |(name, layout): (&&str, &PackedLayout)| {
                let forced: Forced = name.parse().map_err(anyhow::Error::msg)?;
                Ok(Pair::both(forced.choice(&self.problem(layout, m), device)))
            };
            names.iter().zip(&self.layouts).map(pair).collect()
        };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("reading the sets of {}", path.display()))?;
        text.lines().filter(|line| !line.trim().is_empty()).map(set).collect()
    }

    pub fn kernels(&self, gemm: &Gemm, m: u64, choices: &[Choice]) -> anyhow::Result<Kernels> {
        let mut needs = (0, 0);
        let mut prepared = Vec::new();
        for (layout, choice) in self.layouts.iter().zip(choices) {
            for plan in select::plans(&choice.config, &self.problem(layout, m), choice.stripe) {
                needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
            }
            prepared.push(gemm.prepare_choice(*choice)?);
        }
        Ok(Kernels { m, prepared, workspace: gemm.workspace_of(needs.0, needs.1)? })
    }

    fn problem(&self, layout: &PackedLayout, m: u64) -> Problem {
        let rows = Rows::of(layout.n, layout.k);
        let (n, k) = (layout.n as u32, layout.k as u32);
        Problem { kind: self.kind, m, n, k, group: layout.group, rows }
    }

    /// Where product number `idx` reads.
    fn source(&self, idx: usize) -> Matrix {
        match idx.checked_sub(1) {
            None => Matrix { ptr: self.input, stride: self.layouts[0].k as u64 },
            Some(previous) => self.target(previous),
        }
    }

    /// Where it writes.
    fn target(&self, idx: usize) -> Matrix {
        let in_layer = self.model.product(idx).0;
        Matrix { ptr: self.outputs[in_layer], stride: self.layouts[in_layer].n as u64 }
    }

    /// Enqueues product number `idx`.
    pub fn launch(
        &self,
        gemm: &Gemm,
        kernels: &Kernels,
        idx: usize,
        early: bool,
        stream: Stream,
    ) -> anyhow::Result<()> {
        let Kernels { m, prepared, workspace } = kernels;
        let prepared = &prepared[self.model.product(idx).0];
        let (a, c) = (self.source(idx), self.target(idx));
        let stream = in_order(stream, early && idx > 0);
        gemm.matmul_with(prepared, a, &self.weights[idx], c, *m, workspace, stream)?;
        Ok(())
    }

    /// Fills all outputs of a batch of `m` with NaN.
    pub fn poison(&self, m: u64) -> anyhow::Result<()> {
        for (layout, output) in self.layouts.iter().zip(&self.outputs) {
            let pattern = vec![POISON; m as usize * layout.n];
            self.backend.upload(*output, bytemuck::cast_slice(&pattern))?;
        }
        Ok(())
    }

    /// What a run has left.
    pub fn look(&self, kernels: &Kernels) -> anyhow::Result<Result<Left, String>> {
        let m = kernels.m as usize;
        let mut outputs = Vec::new();
        for (layout, ptr) in self.layouts.iter().zip(&self.outputs) {
            let mut output = vec![0; m * layout.n];
            self.backend.download(*ptr, bytemuck::cast_slice_mut(&mut output))?;
            outputs.push(output);
        }
        Ok(self.judge(kernels, &outputs))
    }

    fn judge(&self, kernels: &Kernels, outputs: &[Vec<u16>]) -> Result<Left, String> {
        let value = |bits: &u16| number(self.kind.activation, *bits);
        for (shape, output) in self.model.products.iter().zip(outputs) {
            let bad = output.iter().filter(|bits| !value(bits).is_finite()).count();
            if bad > 0 {
                return Err(format!("{bad} of the outputs of {} are not finite", shape.name));
            }
        }
        let last = outputs.last().expect("a model has products");
        let squares: f64 = last.iter().map(|bits| value(bits).powi(2)).sum();
        let bits = outputs.iter().fold(0u64, |bits, output| bits.rotate_left(1) ^ hash(output));
        let mut left = Left { bits, rms: (squares / last.len() as f64).sqrt(), error: 0.0 };
        // The input of the last layer's first product is overwritten by its last one.
        let per_layer = self.layouts.len();
        for in_layer in 1..per_layer {
            let (n, k) = (self.layouts[in_layer].n, self.layouts[in_layer].k);
            let (from, to) = (&outputs[in_layer - 1], &outputs[in_layer]);
            let stride = self.layouts[in_layer - 1].n;
            let pattern = &self.patterns[self.patterns.len() - per_layer + in_layer];
            let mut random = Random(bits);
            let rows = sample(kernels.m as usize, SAMPLED, &mut random);
            let row = |row: &usize| from[row * stride..][..k].iter().map(value).collect();
            let inputs: Vec<Vec<f64>> = rows.iter().map(row).collect();
            let (mut error, mut norm) = (0.0, 0.0);
            for column in sample(n, SAMPLED, &mut random) {
                let weights = pattern.column(&self.layouts[in_layer], column);
                for (row, input) in rows.iter().zip(&inputs) {
                    let exact = dot(input, &weights);
                    error += (value(&to[row * n + column]) - exact).powi(2);
                    norm += exact.powi(2);
                }
            }
            let (error, limit) = ((error / norm).sqrt(), error_limit(&kernels.prepared[in_layer]));
            if error.is_nan() || error >= limit {
                let name = &self.model.products[in_layer].name;
                return Err(format!(
                    "relative error {error:.2e} of {name}, at most {limit:.0e} is rounding"
                ));
            }
            left.error = left.error.max(error);
        }
        Ok(left)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        for ptr in self.outputs.iter().copied().chain([self.input]) {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing a chain: {error}");
            }
        }
    }
}

/// What a run of a chain has left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Left {
    /// A hash of all outputs of the last layer.
    pub bits: u64,
    /// The root of the mean square of the last output.
    pub rms: f64,
    /// The largest relative error of the last layer's products.
    pub error: f64,
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use half::f16;
    use makaira::asm::Module;
    use makaira::backend::{Error, Kernel, Launch};
    use makaira::emu::EmuBackend;
    use makaira::target::DeviceSpec;
    use makaira::weights::Activation;

    use super::*;
    use crate::problem::WeightType;

    const M: u64 = 3;

    fn chain(text: &str, seed: u64) -> (Gemm, Chain, Kernels) {
        chain_on(Arc::new(EmuBackend::h200_like(2)), &KindArgs::default(), text, seed)
    }

    fn chain_on(
        backend: Arc<dyn Backend>,
        kind: &KindArgs,
        text: &str,
        seed: u64,
    ) -> (Gemm, Chain, Kernels) {
        let gemm = Gemm::new(backend).without_tuning();
        let model: Model = text.parse().expect("a model");
        let chain = Chain::new(&gemm, &model, kind, M + 2, &mut Random(seed)).expect("fits");
        let pairs = chain.choices(&gemm, M).expect("there are kernels");
        let choices: Vec<Choice> = pairs.iter().map(|pair| pair.plain).collect();
        let kernels = chain.kernels(&gemm, M, &choices).expect("they load");
        (gemm, chain, kernels)
    }

    fn run(gemm: &Gemm, chain: &Chain, kernels: &Kernels, early: bool) -> Result<Left, String> {
        chain.poison(M).expect("uploads");
        for idx in 0..chain.model.num_launches() {
            chain.launch(gemm, kernels, idx, early, Stream::default()).expect("runs");
        }
        chain.look(kernels).expect("downloads")
    }

    #[test]
    fn a_chain_is_right_in_both_orders_and_stays_in_range() {
        let (gemm, chain, kernels) = chain("3x320x256+256x256+512x256+256x384", 40);
        let plain = run(&gemm, &chain, &kernels, false).expect("right");
        assert!(plain.error > 0.0 && plain.error < 5e-4, "{plain:?}");
        assert!((0.1..4.0).contains(&plain.rms), "{plain:?}");
        assert_eq!(run(&gemm, &chain, &kernels, true), Ok(plain));
    }

    /// Every weight type with both types of activations.
    #[test]
    fn chains_of_every_type_are_right_and_stay_in_range() {
        for (seed, weight) in (50..).zip(WeightType::all()) {
            for (activation, limit) in [(Activation::F16, 5e-4), (Activation::Bf16, 4e-3)] {
                let kind = KindArgs { weight, activation, ..KindArgs::default() };
                let backend = Arc::new(EmuBackend::h200_like(2));
                let text = "2x384x256+256x384";
                let (gemm, chain, kernels) = chain_on(backend, &kind, text, seed);
                assert!(chain.weights.iter().all(|weight| weight.kind() == kind.kind()));
                let left = run(&gemm, &chain, &kernels, false);
                let left = left.unwrap_or_else(|why| panic!("{}: {why}", kind.text()));
                assert!(left.error > 0.0 && left.error < limit, "{}: {left:?}", kind.text());
                assert!((0.1..4.0).contains(&left.rms), "{}: {left:?}", kind.text());
            }
        }
    }

    /// The emulator, and in what order launches came.
    struct Recording {
        inner: EmuBackend,
        early: Mutex<Vec<bool>>,
    }

    impl Backend for Recording {
        fn device(&self) -> &DeviceSpec {
            self.inner.device()
        }
        fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
            self.inner.alloc(bytes)
        }
        fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
            self.inner.free(ptr)
        }
        fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
            self.inner.upload(ptr, bytes)
        }
        fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
            self.inner.download(ptr, bytes)
        }
        fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error> {
            self.inner.load(module)
        }
        fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error> {
            self.early.lock().expect("no panic holds it").push(launch.overlap_previous);
            self.inner.launch(kernel, launch)
        }
        fn synchronize(&self, stream: Stream) -> Result<(), Error> {
            self.inner.synchronize(stream)
        }
    }

    #[test]
    fn every_launch_but_the_first_of_a_graph_starts_early() {
        let inner = EmuBackend::h200_like(2);
        let recording = Arc::new(Recording { inner, early: Mutex::default() });
        let (gemm, chain, kernels) =
            chain_on(recording.clone(), &KindArgs::default(), "2x384x256+256x384", 43);
        for (early, wanted) in [(false, [false; 4]), (true, [false, true, true, true])] {
            recording.early.lock().expect("no panic holds it").clear();
            run(&gemm, &chain, &kernels, early).expect("right");
            assert_eq!(*recording.early.lock().expect("no panic holds it"), wanted);
        }
    }

    #[test]
    fn every_product_reads_its_predecessor() {
        let (gemm, chain, kernels) = chain("2x384x256+256x384", 41);
        let first = run(&gemm, &chain, &kernels, false).expect("right");
        let mut input = vec![0u16; M as usize * 256];
        chain
            .backend
            .download(chain.input, bytemuck::cast_slice_mut(&mut input))
            .expect("is there");
        // One element of the last row: it has to travel through all four products.
        input[2 * 256 + 17] = f16::from_f32(1.5).to_bits();
        chain.backend.upload(chain.input, bytemuck::cast_slice(&input)).expect("uploads");
        assert_ne!(run(&gemm, &chain, &kernels, false).expect("right").bits, first.bits);
        for idx in 1..4 {
            assert_eq!(chain.source(idx), chain.target(idx - 1));
            assert_ne!(chain.source(idx).ptr, chain.target(idx).ptr);
        }
        let ptrs: std::collections::BTreeSet<_> = chain.weights.iter().map(Weight::ptr).collect();
        assert_eq!(ptrs.len(), 4, "every weight has its own place");
    }

    #[test]
    fn what_a_broken_run_leaves_is_noticed() {
        let (gemm, chain, kernels) = chain("1x384x256+256x384", 42);
        run(&gemm, &chain, &kernels, false).expect("right");
        let outputs = |chain: &Chain| -> Vec<Vec<u16>> {
            let read = |(layout, ptr): (&PackedLayout, &DevicePtr)| {
                let mut output = vec![0; M as usize * layout.n];
                let bytes = bytemuck::cast_slice_mut(&mut output);
                chain.backend.download(*ptr, bytes).expect("is there");
                output
            };
            chain.layouts.iter().zip(&chain.outputs).map(read).collect()
        };
        let right = outputs(&chain);
        chain.judge(&kernels, &right).expect("right");
        for (value, why) in [
            (f16::INFINITY, "1 of the outputs of 384x256 are not finite"),
            (f16::NAN, "are not finite"),
        ] {
            let mut wrong = right.clone();
            wrong[0][5] = value.to_bits();
            assert!(chain.judge(&kernels, &wrong).expect_err("wrong").contains(why));
        }
        let mut wrong = right.clone();
        wrong[1].iter_mut().for_each(|bits| *bits ^= 0x8000);
        let error = chain.judge(&kernels, &wrong).expect_err("wrong");
        assert!(error.starts_with("relative error 2.00e0 of 256x384"), "{error}");
        // The last product skipped: its output is what it was filled with.
        chain.poison(M).expect("uploads");
        chain.launch(&gemm, &kernels, 0, false, Stream::default()).expect("runs");
        let error = chain.look(&kernels).expect("downloads").expect_err("wrong");
        assert!(error.contains("768 of the outputs of 256x384 are not finite"), "{error}");
    }

    #[test]
    fn one_scale_per_output_is_refused() {
        let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2)));
        let model: Model = "1x384x256+256x384".parse().expect("a model");
        let per_column = KindArgs { group: Some(-1), ..KindArgs::default() };
        let error =
            Chain::new(&gemm, &model, &per_column, 1, &mut Random(1)).err().expect("refused");
        assert!(error.to_string().contains("pass --group 16, 32, 64 or 128"), "{error}");
    }
}
