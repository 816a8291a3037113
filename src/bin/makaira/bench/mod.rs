//! `makaira bench`: times products on the GPU.
//!
//! Three kinds of run. Cells ([`cells`]): for each shape and batch the chosen configuration, or those of a
//! sweep, alone, its answer checked, beside the read ceiling of the same bytes. Chains ([`chain`]): all
//! linear layers of a model in one graph, every weight distinct. Experts ([`moe`]): one launch for a stack of experts,
//! beside one for each. Everything is timed in plain order and with early launch; see [`timer`] for the protocol.

mod ceiling;
mod cells;
mod chain;
mod fill;
pub mod layer;
pub mod model;
mod moe;
pub mod operands;
mod plan;
mod plot;
mod reader;
pub mod reference;
mod report;
pub mod timer;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use makaira::backend::{Enqueue, Stream};
use makaira::gemm::{Gemm, Prepared};
use makaira::jit::GpuBackend;
use makaira::kernel::Reduction;
use makaira::kernel::select::Choice;
use makaira::weights::{Activation, default_threads};

use layer::{Random, Shape};
use model::Model;
use moe::MoeModel;
use plan::{Forced, Sweep};
use timer::{Timer, Watchdog};

use crate::problem::KindArgs;

/// Batches of the cells.
const CELL_MS: [u64; 15] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096];
/// Batches of the chains.
const CHAIN_MS: [u64; 3] = [1, 16, 64];

/// Times products on the GPU, answers checked, beside the read ceiling and the times of others.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Layers: names of the comparison or outputs x inputs, like 4096x14336 [default: all eight].
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// Batches [default: 1,2,4,8,16,24,32,48,64,96,128,256,512,1024,4096; with --chain 1,16,64].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    ms: Vec<u64>,
    #[command(flatten)]
    kind: KindArgs,
    /// Measure all linear layers of these models in one graph each, instead of single layers: 8b, 70b, or
    /// LAYERSxN1xK1+N2xK2… for layers that feed each other.
    #[arg(long, value_delimiter = ',', value_name = "MODEL", conflicts_with_all = ["shapes", "config", "sweep", "list", "plot"])]
    chain: Vec<Model>,
    /// Measure mixtures of experts of these models: mixtral, qwen3-30b-a3b, deepseek-v3, or EXPERTSxNxKxTOP for experts
    /// of N outputs and K inputs, TOP of which each token chooses; --ms are tokens.
    #[arg(long, value_delimiter = ',', value_name = "MODEL", conflicts_with_all = ["shapes", "chain", "config", "sweep", "list", "plot", "fp16"])]
    moe: Vec<MoeModel>,
    /// Measure this configuration instead of the chosen one; may be given several times.
    #[arg(long, value_name = "NAME[:STRIPE]", conflicts_with = "sweep")]
    config: Vec<Forced>,
    /// Measure this many of the best-ranked configurations, or `all-configs`.
    #[arg(long, value_name = "N")]
    sweep: Option<Sweep>,
    /// In a sweep, stripe lengths per configuration.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    per_config: u32,
    /// In a sweep, a file of fragments, one a line: only names (NAME:STRIPE) that contain one are measured.
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// In a chain, a file of configurations instead of the chosen ones: a line has one NAME:STRIPE for each product
    /// of a layer, separated by spaces, and is measured as a whole.
    #[arg(long, value_name = "FILE", requires = "chain")]
    sets: Option<PathBuf>,
    /// Measure batch-invariant products: one order of summation for all batches of a layer.
    #[arg(long, conflicts_with_all = ["config", "sweep", "list", "sets"])]
    batch_invariant: bool,
    /// Check the answers and take no time.
    #[arg(long)]
    check_only: bool,
    /// Do not measure the read ceiling.
    #[arg(long)]
    no_ceiling: bool,
    /// Do not measure early launch.
    #[arg(long)]
    no_early: bool,
    /// Write all rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw times and speed-ups as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Times of the fp16 product on this card, from benches/fp16.py.
    #[arg(long, value_name = "FILE")]
    fp16: Option<PathBuf>,
    /// Seconds that a step (one compilation, one configuration) may take before the process is ended.
    #[arg(long, default_value_t = 30)]
    timeout: u64,
    /// Seed of layers and activations [default: from the clock].
    #[arg(long)]
    seed: Option<u64>,
    /// Index of the GPU.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
}

impl Args {
    /// The batches that are asked for, or `default`.
    fn ms(&self, default: &[u64]) -> Vec<u64> {
        if self.ms.is_empty() { default.to_vec() } else { self.ms.clone() }
    }
}

/// Runs the command.
///
/// # Errors
/// Without a GPU; if a kernel fails; if an answer is wrong.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let gpu = GpuBackend::open(args.gpu)
        .context("bench times a GPU; without one `makaira explain` predicts times")?;
    let session = Session::new(args, gpu)?;
    match (args.chain.is_empty(), args.moe.is_empty()) {
        (true, true) => cells::run(session),
        (false, _) => chain::run(session),
        (true, false) => moe::run(session),
    }
}

/// What every kind of run needs.
struct Session<'a> {
    args: &'a Args,
    gpu: Arc<GpuBackend>,
    gemm: Gemm,
    timer: Timer,
    watchdog: Watchdog,
    random: Random,
}

impl<'a> Session<'a> {
    fn new(args: &'a Args, gpu: GpuBackend) -> anyhow::Result<Self> {
        let gpu = Arc::new(gpu);
        let timer = Timer::new(gpu.context())?;
        let seed = args.seed.unwrap_or_else(|| {
            let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since_epoch.map_or(1, |elapsed| elapsed.as_nanos() as u64)
        });
        println!("{}; seed {seed}", gpu.context().info());
        Ok(Self {
            args,
            gemm: match args.batch_invariant {
                true => Gemm::new(gpu.clone()).batch_invariant(),
                false => Gemm::new(gpu.clone()),
            },
            timer,
            watchdog: Watchdog::start(Duration::from_secs(args.timeout)),
            random: Random(seed),
            gpu,
        })
    }

    /// The card, for a person.
    fn card(&self) -> String {
        self.gpu.context().info().to_string()
    }

    /// Compiles the kernels of all choices and says how many there are.
    fn compile<'c>(&self, choices: impl Iterator<Item = &'c Choice>) {
        let start = Instant::now();
        let count = load_all(&self.gemm, choices);
        println!("{count} kernels loaded in {:.1} s", start.elapsed().as_secs_f64());
    }

    /// Writes the file of `--json`, if it was asked for.
    fn write_json(&self, name: &str, rows: Vec<serde_json::Value>) -> anyhow::Result<()> {
        let Some(path) = &self.args.json else { return Ok(()) };
        let command = std::env::args().collect::<Vec<_>>().join(" ");
        let json = report::document(&self.card(), &command, name, rows);
        std::fs::write(path, format!("{json:#}\n"))
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// Compiles the kernels of all choices, several at a time; says how many there are.
pub fn load_all<'c>(gemm: &Gemm, choices: impl Iterator<Item = &'c Choice>) -> usize {
    let mut unique: Vec<&Choice> = Vec::new();
    for choice in choices {
        if unique.iter().all(|known| known.config != choice.config) {
            unique.push(choice);
        }
    }
    let next = AtomicUsize::new(0);
    let compile = || {
        while let Some(choice) = unique.get(next.fetch_add(1, Ordering::Relaxed)) {
            // A failure comes again, and is reported, when the kernel is wanted.
            if let Err(error) = gemm.prepare_choice(**choice) {
                log::debug!("{}: {error}", choice.config);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..default_threads().min(unique.len()) {
            scope.spawn(compile);
        }
    });
    unique.len()
}

/// The largest relative error that is rounding: one rounding to fp16 is 2.1e-4, scaled fragments round once
/// more, and the in-place reduction rounds once per participant. bf16 has three bits less.
pub fn error_limit(prepared: &Prepared) -> f64 {
    let config = &prepared.choice.config;
    let hops = match config.reduction {
        Reduction::F32 => 1.0,
        Reduction::F16InPlace => 4.0,
    };
    hops * rounding_limit(config.kind.activation)
}

/// The same for products that are rounded once.
fn rounding_limit(activation: Activation) -> f64 {
    match activation {
        Activation::F16 => 5e-4,
        Activation::Bf16 => 4e-3,
    }
}

/// Work on a stream: early, or in plain order.
pub fn in_order(stream: Stream, early: bool) -> Enqueue {
    Enqueue { overlap_previous: early, ..stream.into() }
}
