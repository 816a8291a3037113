//! `makaira bench`: times products on the GPU.
//!
//! For each shape a random layer is made, packed and copied to the device often enough that no copy is in
//! L2 when its turn comes. For each batch the chosen configuration (or those of a sweep) computes a product
//! that is checked against f64 before it is timed and after; see [`timer`] for the protocol. The read
//! ceiling, measured on the same bytes, stands beside it.

mod layer;
mod operands;
mod plan;
mod plot;
mod reader;
mod report;
mod timer;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use makaira::backend::{Backend, Stream};
use makaira::gemm::{Gemm, Prepared};
use makaira::jit::GpuBackend;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Problem, Reduction};
use makaira::weights::{Group, default_threads};

use layer::{Layer, Random, Reference, Shape};
use operands::Operands;
use plan::{Forced, Sweep};
use reader::Reader;
use report::{Ceiling, Others, Row};
use timer::{Timer, Watchdog};

/// Times products on the GPU, answers checked, beside the read ceiling and the times of others.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Layers: names of the comparison or outputs x inputs, like 4096x14336 [default: all eight].
    #[arg(long, value_delimiter = ',')]
    shapes: Vec<Shape>,
    /// Batches.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 16, 32, 64], value_parser = clap::value_parser!(u64).range(1..))]
    ms: Vec<u64>,
    /// Inputs per scale, -1 for one scale per output.
    #[arg(long, default_value_t = 128, allow_negative_numbers = true)]
    group: i64,
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
    /// Check the answers and take no time.
    #[arg(long)]
    check_only: bool,
    /// Do not measure the read ceiling.
    #[arg(long)]
    no_ceiling: bool,
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

/// Runs the command.
///
/// # Errors
/// Without a GPU; if a kernel fails; if an answer is wrong.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let gpu = GpuBackend::open(args.gpu)
        .context("bench times a GPU; without one `makaira explain` predicts times")?;
    let mut bench = Bench::new(args, gpu)?;
    let shapes = if args.shapes.is_empty() { Shape::all() } else { args.shapes.clone() };
    for shape in &shapes {
        bench.shape(shape)?;
    }
    if let Some(path) = &args.plot {
        let title = bench.gpu.context().info().to_string();
        plot::draw(path, &title, &bench.rows, &bench.peers, &bench.fp16)?;
    }
    let wrong = bench.rows.iter().filter(|row| row.answer.is_err()).count();
    anyhow::ensure!(wrong == 0, "{wrong} of {} answers are wrong", bench.rows.len());
    Ok(())
}

struct Bench<'a> {
    args: &'a Args,
    gpu: Arc<GpuBackend>,
    gemm: Gemm,
    timer: Timer,
    watchdog: Watchdog,
    fragments: Vec<String>,
    peers: Others,
    fp16: Others,
    random: Random,
    rows: Vec<Row>,
}

/// What all cells of one shape share.
struct Cell<'a> {
    shape: &'a Shape,
    operands: &'a Operands,
    reference: &'a Reference,
    ceiling: Option<Ceiling>,
    weight_bytes: usize,
}

impl<'a> Bench<'a> {
    fn new(args: &'a Args, gpu: GpuBackend) -> anyhow::Result<Self> {
        let gpu = Arc::new(gpu);
        let timer = Timer::new(gpu.context())?;
        let seed = args.seed.unwrap_or_else(|| {
            let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since_epoch.map_or(1, |elapsed| elapsed.as_nanos() as u64)
        });
        let fragments = match &args.list {
            Some(path) => std::fs::read_to_string(path)
                .with_context(|| format!("reading {}", path.display()))?
                .lines()
                .map(|line| line.trim().to_owned())
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .collect(),
            None => Vec::new(),
        };
        println!("{}; seed {seed}", gpu.context().info());
        Ok(Self {
            args,
            gemm: Gemm::new(gpu.clone()),
            timer,
            watchdog: Watchdog::start(Duration::from_secs(args.timeout)),
            fragments,
            peers: if args.group == 128 { Others::peers() } else { Others::default() },
            fp16: args.fp16.as_deref().map(Others::read).transpose()?.unwrap_or_default(),
            random: Random(seed),
            rows: Vec::new(),
            gpu,
        })
    }

    fn shape(&mut self, shape: &Shape) -> anyhow::Result<()> {
        let start = Instant::now();
        let group = Group::new(shape.k, self.args.group)?;
        let layer = Layer::random(shape, group, self.random.next());
        let packed = layer.pack()?;
        let max_m = self.args.ms.iter().copied().max().unwrap_or(1) as usize;
        let a = layer::random_activations(max_m, shape.k, self.random.next());
        let reference = Reference::new(&layer, &a, self.random.next());
        let operands = Operands::new(&self.gemm, &packed, &a, !self.args.check_only)?;
        let weight_bytes = packed.bytes().len();
        println!(
            "\n{}: N={} K={}, {:.2} MB of codes and scales x {} copies, {:.1} s to make",
            shape.name,
            shape.n,
            shape.k,
            weight_bytes as f64 / 1e6,
            operands.weights.len(),
            start.elapsed().as_secs_f64()
        );
        let ceiling = match self.args.no_ceiling || self.args.check_only {
            true => None,
            false => Some(self.ceiling(&operands, packed.bytes())?),
        };
        let cell =
            Cell { shape, operands: &operands, reference: &reference, ceiling, weight_bytes };
        let choices = self.choices(shape, group)?;
        self.compile(choices.iter().flat_map(|(_, choices)| choices))?;
        println!("{}", report::HEADING);
        for (m, choices) in choices {
            self.batch(&cell, &shape.problem(m, group), &choices)?;
        }
        Ok(())
    }

    /// The best reader of a weight.
    fn ceiling(&self, operands: &Operands, bytes: &[u8]) -> anyhow::Result<Ceiling> {
        let backend = &*self.gpu;
        let sum = backend.alloc(4)?;
        let wanted = reader::sum_of(bytes);
        let mut best: Option<Ceiling> = None;
        for variant in reader::variants() {
            let timing = self.watchdog.watch(format!("reader {variant}"), || {
                let reader = Reader::load(backend, variant)?;
                let launch = |idx, flush, stream| {
                    let read = (operands.weight(idx).ptr(), bytes.len());
                    anyhow::Ok(reader.launch(backend, read, sum, flush, stream)?)
                };
                backend.upload(sum, &[0; 4])?;
                self.timer.once(&|idx, stream| launch(idx, true, stream))?;
                let mut found = [0; 4];
                backend.download(sum, &mut found)?;
                let found = u32::from_le_bytes(found);
                anyhow::ensure!(found == wanted, "reader {variant} sums {found}, not {wanted}");
                self.timer.time(&|idx, stream| launch(idx, false, stream))
            })?;
            if best.is_none_or(|best| timing.mean() < best.timing.mean()) {
                best = Some(Ceiling { variant, timing });
            }
        }
        backend.free(sum)?;
        let best = best.expect("there are variants");
        println!(
            "read ceiling {:.2} us = {:.0} GB/s ({})",
            best.timing.mean(),
            bytes.len() as f64 / best.timing.mean() / 1e3,
            best.variant
        );
        Ok(best)
    }

    /// What is measured for each batch.
    fn choices(&self, shape: &Shape, group: Group) -> anyhow::Result<Vec<(u64, Vec<Choice>)>> {
        let device = self.gpu.device();
        let of = |m: u64| {
            let problem = shape.problem(m, group);
            let choices = match self.args.sweep {
                Some(sweep) => {
                    let per_config = self.args.per_config as usize;
                    plan::sweep(&problem, device, sweep, per_config, &self.fragments)?
                }
                None if self.args.config.is_empty() => vec![select::choose(&problem, device)?],
                None => self.args.config.iter().map(|c| c.choice(&problem, device)).collect(),
            };
            anyhow::Ok((m, choices))
        };
        self.args.ms.iter().map(|m| of(*m)).collect()
    }

    /// Compiles the kernels of all choices, several at a time.
    fn compile<'c>(&self, choices: impl Iterator<Item = &'c Choice>) -> anyhow::Result<()> {
        let mut unique: Vec<&Choice> = Vec::new();
        for choice in choices {
            if unique.iter().all(|known| known.config != choice.config) {
                unique.push(choice);
            }
        }
        let start = Instant::now();
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some(choice) = unique.get(next.fetch_add(1, Ordering::Relaxed)) {
                // A failure comes again, and is reported, when the kernel is wanted.
                if let Err(error) = self.gemm.prepare_choice(**choice) {
                    log::debug!("{}: {error}", choice.config);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..default_threads().min(unique.len()) {
                scope.spawn(compile);
            }
        });
        let seconds = start.elapsed().as_secs_f64();
        println!("{} kernels loaded in {seconds:.1} s", unique.len());
        Ok(())
    }

    /// Measures the choices for one batch; prints them sorted by time.
    fn batch(&mut self, cell: &Cell, problem: &Problem, choices: &[Choice]) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        for choice in choices {
            let what =
                format!("{} m={} {}:{}", cell.shape.name, problem.m, choice.config, choice.stripe);
            let watched = self.watchdog.watch(&what, || self.measure(cell, problem, *choice));
            rows.push(watched.with_context(|| what)?);
        }
        rows.sort_by(|a, b| a.us().total_cmp(&b.us()));
        for row in &rows {
            println!("{}", report::line(row, &self.peers, &self.fp16));
        }
        self.rows.extend(rows);
        // After each batch, so that a run that is cut short leaves what it has.
        if let Some(path) = &self.args.json {
            let command = std::env::args().collect::<Vec<_>>().join(" ");
            let card = self.gpu.context().info().to_string();
            let json = report::json(&card, &command, &self.rows, &self.peers, &self.fp16);
            std::fs::write(path, format!("{json:#}\n"))
                .with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }

    fn measure(&self, cell: &Cell, problem: &Problem, choice: Choice) -> anyhow::Result<Row> {
        let problem = &Problem { rows: choice.config.rows, ..*problem };
        let mut row = Row {
            shape: cell.shape.clone(),
            m: problem.m,
            weight_bytes: cell.weight_bytes,
            choice,
            grid: [0; 2],
            num_regs: None,
            local_bytes: None,
            answer: Err(String::new()),
            timing: None,
            ceiling: cell.ceiling,
        };
        let prepared = match self.gemm.prepare_choice(choice) {
            Ok(prepared) => prepared,
            // The card is as it was: the other configurations can go on.
            Err(error) => {
                row.answer = Err(format!("{:#}", anyhow::Error::from(error)));
                return Ok(row);
            }
        };
        (row.num_regs, row.local_bytes) =
            (prepared.kernel.num_regs(), prepared.kernel.local_bytes());
        let mut needs = (0, 0);
        for plan in select::plans(&choice.config, problem, choice.stripe) {
            row.grid = plan.grid;
            needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
        }
        let workspace = self.gemm.workspace_of(needs.0, needs.1)?;
        let launch = |idx: usize, stream: Stream| {
            let (a, c) = (cell.operands.a(), cell.operands.c());
            let weight = cell.operands.weight(idx);
            self.gemm.matmul_with(&prepared, a, weight, c, problem.m, &workspace, stream)?;
            anyhow::Ok(())
        };
        let m = problem.m as usize;
        let limit = error_limit(&prepared);
        cell.operands.poison()?;
        self.timer.once(&launch)?;
        row.answer = cell.operands.check(m, cell.reference, limit)?;
        if row.answer.is_ok() && !self.args.check_only {
            cell.operands.poison()?;
            row.timing = Some(self.timer.time(&launch)?);
            row.answer = cell.operands.check(m, cell.reference, limit)?;
        }
        if let (Ok(_), Some(locks)) = (&row.answer, workspace.locks_ptr()) {
            let mut bytes = vec![0; 4 * needs.1 as usize];
            self.gpu.download(locks, &mut bytes)?;
            if bytes.iter().any(|byte| *byte != 0) {
                row.answer = Err("locks are not zero afterwards".to_owned());
            }
        }
        Ok(row)
    }
}

/// The largest relative error that is rounding: one rounding to fp16 is 2.1e-4, scaled fragments round once
/// more, and the in-place reduction rounds once per participant.
fn error_limit(prepared: &Prepared) -> f64 {
    match prepared.choice.config.reduction {
        Reduction::F32 => 5e-4,
        Reduction::F16InPlace => 2e-3,
    }
}
