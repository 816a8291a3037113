//! `makaira tune`: measures the candidates of the user's own layers on his own card and keeps the winners.
//!
//! Every candidate computes a product of random operands that is checked before it is timed, in plain order
//! and with early launch, by the protocol of `bench`. What wins by the mean of both serves both, and is kept
//! beside the compiled kernels and chosen by every program of the same version on the same card and driver. A
//! batch is measured at the step that choices distinguish, for all batches of that step.

mod race;
mod verdict;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use makaira::backend::Backend;
use makaira::gemm::Gemm;
use makaira::jit::{GpuBackend, TuneStore};
use makaira::kernel::Problem;
use makaira::kernel::select::{self, Choice};
use serde_json::{Value, json};

use crate::bench::layer::{Random, Shape};
use crate::bench::timer::{Timer, Watchdog};
use crate::device::Place;
use crate::output::{Format, Progress, count};
use crate::problem::KindArgs;
use race::Race;
use verdict::shortlist;

/// Measures the candidates for your layers on this card and keeps the winners.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Layers: outputs x inputs, like 4096x14336, or names of the bench's, like 8b_down.
    #[arg(long, value_delimiter = ',', required_unless_present_any = ["list", "forget"])]
    shapes: Vec<Shape>,
    /// Batches; each stands for all of its step (1, 2, 4, 8, 16, 32, 48, 64, then powers of two).
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512, 1024], value_parser = clap::value_parser!(u64).range(1..=65536))]
    ms: Vec<u64>,
    #[command(flatten)]
    kind: KindArgs,
    /// How many of the best-ranked candidates are measured for each batch.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..))]
    candidates: u16,
    /// Where to measure: auto (the first GPU), gpu or gpu:<index>.
    #[arg(long, default_value = "auto", value_name = "PLACE")]
    device: Place,
    /// Measure and keep nothing.
    #[arg(long)]
    dry_run: bool,
    /// Seconds that a candidate may take before the process is ended.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// Seed of layers and activations [default: from the clock].
    #[arg(long)]
    seed: Option<u64>,
    /// Say what is kept, and measure nothing.
    #[arg(long, conflicts_with_all = ["shapes", "forget"])]
    list: bool,
    /// Forget all winners, and measure nothing.
    #[arg(long, conflicts_with = "shapes")]
    forget: bool,
    #[command(flatten)]
    format: Format,
}

/// Runs `tune`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let store = TuneStore::of_process();
    if args.list {
        return list(&store, args.format);
    }
    if args.forget {
        let removed = store.clear()?;
        args.format.line(format!("{}: {} forgotten", place(&store), count(removed, "winner")))?;
        return args.format.value(|| json!({ "folder": store.folder(), "forgotten": removed }));
    }
    let ordinal = match args.device {
        Place::Auto => 0,
        Place::Gpu(ordinal) => ordinal,
        Place::Emulator => bail!(
            "tune measures time, which means nothing on the emulator; run it on the card that will \
             serve, or ask `makaira explain` for predictions"
        ),
    };
    if store.folder().is_none() && !args.dry_run {
        bail!("{}: winners cannot be kept; measure with --dry-run", place(&store));
    }
    let gpu = GpuBackend::open(ordinal).context(
        "tune measures time and needs a GPU; `makaira doctor` says more, `makaira explain` predicts",
    )?;
    Tuning::new(args, gpu)?.run(&store)
}

/// Where winners are kept, for a person.
fn place(store: &TuneStore) -> String {
    match store.folder() {
        Some(folder) => folder.display().to_string(),
        None => {
            "no store (MAKAIRA_NO_TUNING or MAKAIRA_NO_CACHE is set, or no folder is known)".into()
        }
    }
}

fn list(store: &TuneStore, format: Format) -> anyhow::Result<()> {
    let records = store.list()?;
    let mut values = Vec::new();
    for record in &records {
        match record {
            Ok(record) => {
                let winner = &record.winner;
                let line = |name: &str| {
                    let line = record.key.lines().find_map(|line| line.strip_prefix(name));
                    line.unwrap_or_default().trim_matches(['"', ' ']).to_owned()
                };
                let order = if line("early_launch ") == "true" { "early" } else { "in order" };
                let (problem, device) = (line("problem "), line("device "));
                format.line(format!("{problem}, {order}; {device}"))?;
                format.line(format!(
                    "    {:.2} us  {} ({})",
                    winner.us, winner.config, winner.plan
                ))?;
                values.push(json!({
                    "problem": problem,
                    "device": device,
                    "early": order == "early",
                    "config": winner.config,
                    "plan": winner.plan,
                    "us": winner.us,
                }));
            }
            Err(finding) => {
                format.line(finding.to_string())?;
                values.push(json!({ "finding": finding.to_string() }));
            }
        }
    }
    let sound = records.iter().filter(|record| record.is_ok()).count();
    format.line(format!("{}: {}", place(store), count(sound, "winner")))?;
    format.value(|| json!({ "folder": store.folder(), "winners": values }))
}

/// One run of the command.
struct Tuning<'a> {
    args: &'a Args,
    gpu: Arc<GpuBackend>,
    gemm: Gemm,
    timer: Timer,
    watchdog: Watchdog,
    random: Random,
}

/// A layer and what is measured for it.
struct Task<'a> {
    shape: &'a Shape,
    problems: Vec<(Problem, Vec<Choice>)>,
}

impl<'a> Tuning<'a> {
    fn new(args: &'a Args, gpu: GpuBackend) -> anyhow::Result<Self> {
        let gpu = Arc::new(gpu);
        let from_clock = || {
            let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
            since_epoch.map_or(1, |elapsed| elapsed.as_nanos() as u64)
        };
        Ok(Self {
            args,
            gemm: Gemm::new(gpu.clone()),
            timer: Timer::new(gpu.context())?,
            watchdog: Watchdog::start(Duration::from_secs(args.timeout)),
            random: Random(args.seed.unwrap_or_else(from_clock)),
            gpu,
        })
    }

    fn run(mut self, store: &TuneStore) -> anyhow::Result<()> {
        let (args, format) = (self.args, self.args.format);
        let card = self.gpu.context().info().to_string();
        format.line(format!("{card}; {}; seed {}", args.kind.text(), self.random.0))?;
        let tasks: Vec<Task<'a>> =
            args.shapes.iter().map(|shape| self.task(shape)).collect::<Result<_, _>>()?;
        let each = tasks.iter().flat_map(|task| &task.problems).map(|(_, choices)| choices.len());
        let mut progress = Progress::new(tasks.len() + each.sum::<usize>());
        format.line(verdict::HEADING)?;
        let (mut rows, mut wrong) = (Vec::new(), Vec::new());
        for task in &tasks {
            progress.step(&format!("{}: making the layer", task.shape.name));
            let ms: Vec<u64> = task.problems.iter().map(|(problem, _)| problem.m).collect();
            let seeds = [(); 3].map(|()| self.random.next());
            let race = Race::new(&self.gemm, task.shape, &args.kind, &ms, seeds)?;
            race.load(task.problems.iter().flat_map(|(_, choices)| choices));
            for (problem, choices) in &task.problems {
                let mut outcome =
                    race.run(&self.timer, &self.watchdog, problem, choices, |what| {
                        progress.step(&format!("{} m={} {what}", task.shape.name, problem.m));
                    })?;
                wrong.append(&mut outcome.wrong);
                let current = self.gemm.choice(problem, false)?;
                let verdicts = outcome.verdicts(&current).into_iter().flatten();
                for (early, verdict) in [false, true].into_iter().zip(verdicts) {
                    if !args.dry_run {
                        let (choice, us) = (&verdict.after.choice, verdict.after.us);
                        self.gemm
                            .keep_winner(problem, early, choice, us)
                            .with_context(|| format!("keeping a winner in {}", place(store)))?;
                    }
                    progress.pause(|| format.line(verdict.line(task.shape, problem, early)))?;
                    rows.push(verdict.json(task.shape, args.kind.weight, problem, early));
                }
            }
        }
        drop(progress);
        self.close(store, &card, rows, &wrong)
    }

    /// What was done, and a failure if a candidate was wrong.
    fn close(
        &self,
        store: &TuneStore,
        card: &str,
        rows: Vec<Value>,
        wrong: &[String],
    ) -> anyhow::Result<()> {
        let format = self.args.format;
        let kept = if self.args.dry_run { 0 } else { rows.len() };
        format.line(format!("{}: {} kept", place(store), count(kept, "winner")))?;
        format.value(
            || json!({ "card": card, "folder": store.folder(), "kept": kept, "rows": rows, "wrong": wrong }),
        )?;
        match wrong {
            [] => Ok(()),
            [first, ..] => bail!(
                "{} failed, the first: {first}; none of them was kept",
                count(wrong.len(), "candidate")
            ),
        }
    }

    /// The candidates for each step of the batches, the current choices among them.
    fn task(&self, shape: &'a Shape) -> anyhow::Result<Task<'a>> {
        let (kind, group) = (self.args.kind.kind(), self.args.kind.group(shape.k)?);
        let steps: BTreeSet<u64> = self.args.ms.iter().map(|m| select::step(*m)).collect();
        let of = |m: u64| {
            let problem = shape.problem(kind, m, group);
            let current = [false, true].map(|early| self.gemm.choice(&problem, early));
            let [plain, early] = current;
            let ranked = select::ranked(&problem, self.gpu.device());
            let count = usize::from(self.args.candidates);
            anyhow::Ok((problem, shortlist(&ranked, count, [plain?, early?])))
        };
        Ok(Task { shape, problems: steps.into_iter().map(of).collect::<Result<_, _>>()? })
    }
}
