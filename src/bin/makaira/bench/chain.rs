//! Chains: all linear layers of a model, every weight distinct, in one graph.
//!
//! The products feed each other through buffers in place ([`Model`]): the first one of all reads an input of
//! its own, every other one the leading columns of its predecessor's output, so an early launch that reads
//! before its predecessor has written gives other bits. Weights are filled on the device ([`fill`]). After
//! the timed graphs every output must be finite, the last layer's products must agree with f64 on a
//! sample, and early launch must have left the same bits as plain order.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use half::f16;
use makaira::backend::{Backend, DevicePtr, Stream};
use makaira::gemm::{Gemm, Matrix, Prepared, Weight, Workspace};
use makaira::kernel::Problem;
use makaira::kernel::select::{self, Choice};
use makaira::weights::{Group, PackedLayout, U4B8};
use serde_json::{Value, json};

use super::ceiling::{self, Ceiling};
use super::fill::{Filler, Pattern};
use super::layer::{Random, random_activations};
use super::model::Model;
use super::operands::hash;
use super::reference::{dot, sample};
use super::report::{Others, cell};
use super::timer::Timing;
use super::{CHAIN_MS, Session, error_limit, reader};

/// Bytes that a microsecond of pure reading takes on an H200: what a chain is compared with.
const READ_BYTES_PER_US: f64 = 4.65e6;
/// A NaN that no arithmetic gives.
const POISON: u16 = 0x7e5a;
/// Columns and rows of each checked product.
const SAMPLED: usize = 24;
const HEADING: &str =
    "model    M launches      us  ±% x 4.65 x ceil   early  ±% x 4.65 x ceil x fp16    rms  err";

/// Measures all chains.
///
/// # Errors
/// If a kernel fails or an answer is wrong.
pub fn run(mut session: Session<'_>) -> anyhow::Result<()> {
    let args = session.args;
    let ms = args.ms(&CHAIN_MS);
    let fp16 = args.fp16.as_deref().map(Others::read).transpose()?.unwrap_or_default();
    let mut results = Vec::new();
    let mut num_wrong = 0;
    for model in &args.chain {
        let start = Instant::now();
        let max_m = ms.iter().copied().max().unwrap_or(1);
        let chain = Chain::new(&session.gemm, model, args.group, max_m, &mut session.random)?;
        println!(
            "\n{model}; {:.2} GB of codes and scales, {:.1} s to make",
            chain.weight_bytes() as f64 / 1e9,
            start.elapsed().as_secs_f64()
        );
        let skip_ceilings = args.no_ceiling || args.check_only;
        let ceilings = if skip_ceilings { None } else { Some(chain.ceilings(&session)?) };
        let choices: Vec<Vec<Choice>> =
            ms.iter().map(|m| chain.choices(*m)).collect::<Result<_, _>>()?;
        session.compile(choices.iter().flatten());
        println!("{HEADING}");
        for (m, choices) in ms.iter().zip(choices) {
            let what = format!("the chain {} at m={m}", model.name);
            let measure = || chain.measure(&session, *m, &choices, ceilings.as_deref());
            let result = session.watchdog.watch(&what, measure).context(what)?;
            num_wrong += usize::from(result.answer.is_err());
            println!("{}", result.line(&fp16));
            results.push(result.json(&fp16));
            session.write_json("chains", results.clone())?;
        }
    }
    anyhow::ensure!(num_wrong == 0, "{num_wrong} of {} chains are wrong", results.len());
    Ok(())
}

/// A model on a device.
struct Chain {
    backend: Arc<dyn Backend>,
    model: Model,
    /// Of one layer's weights.
    layouts: Vec<PackedLayout>,
    /// Of all weights, in order.
    weights: Vec<Weight>,
    patterns: Vec<Pattern>,
    /// What the first product reads: `[max_m][K]`.
    input: DevicePtr,
    /// What each product of a layer writes: `[max_m][N]`.
    outputs: Vec<DevicePtr>,
}

/// The kernels of one layer for a batch.
struct Kernels {
    m: u64,
    prepared: Vec<Prepared>,
    workspace: Workspace,
}

impl Chain {
    /// A model with random weights and input.
    ///
    /// # Errors
    /// If the device has too little memory, or the group is none that divides every number of inputs.
    fn new(
        gemm: &Gemm,
        model: &Model,
        group: i64,
        max_m: u64,
        random: &mut Random,
    ) -> anyhow::Result<Self> {
        let backend = gemm.backend().clone();
        let layouts = model.layouts(group)?;
        anyhow::ensure!(
            layouts.iter().all(|layout| layout.group != Group::PerColumn),
            "a chain fills its weights tile by tile, scales among them; pass --group 32, 64 or 128"
        );
        let filler = Filler::load(&*backend, layouts[0].tile_bytes)?;
        let (mut weights, mut patterns) = (Vec::new(), Vec::new());
        for idx in 0..model.num_launches() {
            let (in_layer, shape) = model.product(idx);
            let layout = &layouts[in_layer];
            let weight = gemm.reserve(layout, &U4B8)?;
            let pattern = Pattern::new(random.next() as u32, shape.k);
            filler.fill(&*backend, weight.ptr(), layout, &pattern, Stream::default())?;
            weights.push(weight);
            patterns.push(pattern);
        }
        backend.synchronize(Stream::default())?;
        let k = model.products[0].k;
        let input = backend.alloc(2 * max_m * k as u64)?;
        let activations = random_activations(max_m as usize, k, random.next());
        backend.upload(input, bytemuck::cast_slice(&activations))?;
        let output = |layout: &PackedLayout| backend.alloc(2 * max_m * layout.n as u64);
        let outputs = layouts.iter().map(output).collect::<Result<_, _>>()?;
        Ok(Self { backend, model: model.clone(), layouts, weights, patterns, input, outputs })
    }

    fn weight_bytes(&self) -> usize {
        let bytes: usize = self.layouts.iter().map(|layout| layout.total_bytes).sum();
        bytes * self.model.num_layers
    }

    /// The best readers of each of a layer's weights.
    fn ceilings(&self, session: &Session<'_>) -> anyhow::Result<Vec<Ceiling>> {
        let of = |(in_layer, layout): (usize, &PackedLayout)| {
            let mut first = vec![0; layout.total_bytes];
            self.backend.download(self.weights[in_layer].ptr(), &mut first)?;
            let per_layer = self.layouts.len();
            let weight =
                |idx: usize| self.weights[idx % self.model.num_layers * per_layer + in_layer].ptr();
            print!("{}: ", self.model.products[in_layer].name);
            ceiling::measure(session, &weight, layout.total_bytes, reader::sum_of(&first))
        };
        self.layouts.iter().enumerate().map(of).collect()
    }

    /// The configurations of one layer's products.
    fn choices(&self, m: u64) -> anyhow::Result<Vec<Choice>> {
        let of =
            |layout: &PackedLayout| Ok(select::choose(&problem(layout, m), self.backend.device())?);
        self.layouts.iter().map(of).collect()
    }

    fn kernels(&self, gemm: &Gemm, m: u64, choices: &[Choice]) -> anyhow::Result<Kernels> {
        let mut needs = (0, 0);
        let mut prepared = Vec::new();
        for (layout, choice) in self.layouts.iter().zip(choices) {
            for plan in select::plans(&choice.config, &problem(layout, m), choice.stripe) {
                needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
            }
            prepared.push(gemm.prepare_choice(*choice)?);
        }
        Ok(Kernels { m, prepared, workspace: gemm.workspace_of(needs.0, needs.1)? })
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
    fn launch(
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
        let _ = early && idx > 0;
        gemm.matmul_with(prepared, a, &self.weights[idx], c, *m, workspace, stream)?;
        Ok(())
    }

    /// Fills all outputs of a batch of `m` with NaN.
    fn poison(&self, m: u64) -> anyhow::Result<()> {
        for (layout, output) in self.layouts.iter().zip(&self.outputs) {
            let pattern = vec![POISON; m as usize * layout.n];
            self.backend.upload(*output, bytemuck::cast_slice(&pattern))?;
        }
        Ok(())
    }

    /// What a run has left.
    fn look(&self, kernels: &Kernels) -> anyhow::Result<Result<Left, String>> {
        let m = kernels.m as usize;
        let mut outputs = Vec::new();
        for (layout, ptr) in self.layouts.iter().zip(&self.outputs) {
            let mut output = vec![f16::ZERO; m * layout.n];
            self.backend.download(*ptr, bytemuck::cast_slice_mut(&mut output))?;
            outputs.push(output);
        }
        Ok(self.judge(kernels, &outputs))
    }

    fn judge(&self, kernels: &Kernels, outputs: &[Vec<f16>]) -> Result<Left, String> {
        for (shape, output) in self.model.products.iter().zip(outputs) {
            let bad = output.iter().filter(|value| !value.is_finite()).count();
            if bad > 0 {
                return Err(format!("{bad} of the outputs of {} are not finite", shape.name));
            }
        }
        let last = outputs.last().expect("a model has products");
        let squares: f64 = last.iter().map(|value| value.to_f64().powi(2)).sum();
        let bits = outputs
            .iter()
            .fold(0u64, |bits, output| bits.rotate_left(1) ^ hash(bytemuck::cast_slice(output)));
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
            let row = |row: &usize| from[row * stride..][..k].iter().map(|x| x.to_f64()).collect();
            let inputs: Vec<Vec<f64>> = rows.iter().map(row).collect();
            let (mut error, mut norm) = (0.0, 0.0);
            for column in sample(n, SAMPLED, &mut random) {
                let weights = pattern.column(&self.layouts[in_layer], column);
                for (row, input) in rows.iter().zip(&inputs) {
                    let exact = dot(input, &weights);
                    error += (to[row * n + column].to_f64() - exact).powi(2);
                    norm += exact.powi(2);
                }
            }
            let (error, limit) = ((error / norm).sqrt(), error_limit(&kernels.prepared[in_layer]));
            // Not the other way round: NaN is wrong.
            if !(error < limit) {
                let name = &self.model.products[in_layer].name;
                return Err(format!(
                    "relative error {error:.2e} of {name}, at most {limit:.0e} is rounding"
                ));
            }
            left.error = left.error.max(error);
        }
        Ok(left)
    }

    fn measure(
        &self,
        session: &Session<'_>,
        m: u64,
        choices: &[Choice],
        ceilings: Option<&[Ceiling]>,
    ) -> anyhow::Result<Outcome> {
        let kernels = self.kernels(&session.gemm, m, choices)?;
        let num_launches = self.model.num_launches();
        let order = |early: bool| {
            let launch = |idx, stream| self.launch(&session.gemm, &kernels, idx, early, stream);
            self.poison(m)?;
            let timing = if session.args.check_only {
                session.timer.run(num_launches, &launch)?;
                None
            } else {
                Some(session.timer.time_graph(num_launches, &launch)?)
            };
            anyhow::Ok((self.look(&kernels)?, timing))
        };
        let mut outcome = Outcome {
            name: self.model.name.clone(),
            m,
            num_launches,
            weight_bytes: self.weight_bytes(),
            configs: choices.iter().map(|c| format!("{}:{}", c.config, c.stripe)).collect(),
            answer: Err(String::new()),
            timing: None,
            early: None,
            ceiling_us: ceilings.map(|ceilings| {
                ceilings.iter().map(Ceiling::us).sum::<f64>() * self.model.num_layers as f64
            }),
        };
        (outcome.answer, outcome.timing) = order(false)?;
        if !session.args.no_early {
            let (answer, timing) = order(true)?;
            outcome.early = timing;
            match (&outcome.answer, answer) {
                (Ok(plain), Ok(early)) if plain.bits == early.bits => {}
                (Ok(_), Ok(_)) => outcome.answer = Err("early launch changes bits".to_owned()),
                (Ok(_), Err(why)) => outcome.answer = Err(format!("early launch: {why}")),
                (Err(_), _) => {}
            }
        }
        Ok(outcome)
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

fn problem(layout: &PackedLayout, m: u64) -> Problem {
    let rows = makaira::kernel::Rows::of(layout.n, layout.k);
    let (n, k) = (layout.n as u32, layout.k as u32);
    Problem { format: "u4b8", m, n, k, group: layout.group, rows }
}

/// What a run of a chain has left.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Left {
    /// A hash of all outputs of the last layer.
    bits: u64,
    /// The root of the mean square of the last output.
    rms: f64,
    /// The largest relative error of the last layer's products.
    error: f64,
}

/// A measured chain.
struct Outcome {
    name: String,
    m: u64,
    num_launches: usize,
    weight_bytes: usize,
    configs: Vec<String>,
    answer: Result<Left, String>,
    timing: Option<Timing>,
    early: Option<Timing>,
    /// The sum of the read ceilings of all products.
    ceiling_us: Option<f64>,
}

impl Outcome {
    /// Microseconds of the whole chain.
    fn us(&self, timing: Option<Timing>) -> Option<f64> {
        Some(timing?.mean() * self.num_launches as f64)
    }

    /// Microseconds of a pure read of all weights.
    fn read_us(&self) -> f64 {
        self.weight_bytes as f64 / READ_BYTES_PER_US
    }

    fn fp16_us(&self, fp16: &Others) -> Option<f64> {
        fp16.us(&format!("chain_{}", self.name), self.m, "us")
    }

    fn line(&self, fp16: &Others) -> String {
        let order = |timing: Option<Timing>| {
            let us = self.us(timing);
            [
                cell(us, 7, 0),
                cell(timing.map(|timing| 100.0 * timing.spread()), 3, 0),
                cell(us.map(|us| us / self.read_us()), 6, 2),
                cell(us.zip(self.ceiling_us).map(|(us, ceiling)| us / ceiling), 6, 2),
            ]
            .join(" ")
        };
        let fastest = self.us(self.early).or(self.us(self.timing));
        let left = self.answer.as_ref();
        [
            format!("{:<6} {:>3} {:>8}", self.name, self.m, self.num_launches),
            order(self.timing),
            order(self.early),
            cell(self.fp16_us(fp16).zip(fastest).map(|(fp16, us)| fp16 / us), 6, 2),
            cell(left.ok().map(|left| left.rms), 6, 2),
            left.map_or_else(|why| format!("WRONG  {why}"), |left| format!("{:.1e}", left.error)),
        ]
        .join(" ")
    }

    fn json(&self, fp16: &Others) -> Value {
        let ratio = |timing, over: Option<f64>| self.us(timing).zip(over).map(|(us, by)| us / by);
        let runs = |timing: Option<Timing>| {
            timing.map(|timing| timing.us.map(|us| us * self.num_launches as f64))
        };
        let (read, left) = (Some(self.read_us()), self.answer.as_ref().ok());
        json!({
            "model": self.name, "m": self.m, "num_launches": self.num_launches,
            "weight_bytes": self.weight_bytes, "configs": self.configs,
            "us": self.us(self.timing), "run_us": runs(self.timing),
            "early_us": self.us(self.early), "early_run_us": runs(self.early),
            "read_us": self.read_us(), "read_gb_per_s": READ_BYTES_PER_US / 1e3,
            "ceiling_us": self.ceiling_us,
            "of_read": ratio(self.timing, read), "early_of_read": ratio(self.early, read),
            "of_ceiling": ratio(self.timing, self.ceiling_us),
            "early_of_ceiling": ratio(self.early, self.ceiling_us),
            "fp16_us": self.fp16_us(fp16),
            "rel_err": left.map(|left| left.error), "rms": left.map(|left| left.rms),
            "bits": left.map(|left| format!("{:016x}", left.bits)),
            "wrong": self.answer.as_ref().err(),
        })
    }
}
