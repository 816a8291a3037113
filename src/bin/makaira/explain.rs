//! `makaira explain`: which configuration a problem gets, and why.

use anyhow::Context;
use makaira::backend::Backend;
use makaira::jit::GpuBackend;
use makaira::kernel::order;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Problem, Reduction, Scaling};
use makaira::target::DeviceSpec;
use makaira::weights::{Group, PackedLayout};
use serde_json::{Value, json};

use crate::output::{Format, bytes, count};
use crate::{device, problem};

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["m"])))]
pub struct Args {
    #[command(flatten)]
    problem: problem::ProblemArgs,
    /// The card to choose for: a100, rtx4090, h200 …; the GPU of this machine if not given, or h200.
    #[arg(long, value_parser = device::preset, value_name = "CARD")]
    device_like: Option<&'static device::Preset>,
    /// Choose for batch-invariant products: one order of summation for all batches.
    #[arg(long)]
    batch_invariant: bool,
    /// How many other configurations to show.
    #[arg(long, default_value_t = 4)]
    top: usize,
    #[command(flatten)]
    format: Format,
}

/// Runs `explain`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let problem = args.problem.problem()?;
    let spec = match args.device_like {
        Some(preset) => preset.spec(),
        None => match GpuBackend::open(0) {
            Ok(gpu) => gpu.device().clone(),
            Err(error) => {
                log::info!("no GPU here ({error}): choosing for an h200");
                device::preset("h200").map_err(anyhow::Error::msg)?.spec()
            }
        },
    };
    let choice = match args.batch_invariant {
        true => order::choose_in_order(&problem, &spec, &order::invariant_order(&problem, &spec)?)?,
        false => select::choose(&problem, &spec)?,
    };
    // One line a configuration: its best stripe length.
    let mut others: Vec<Choice> = Vec::new();
    let ranked = select::ranked(&Problem { m: select::step(problem.m), ..problem }, &spec);
    for other in &ranked {
        let known = others.iter().chain([&choice]).any(|known| known.config == other.config);
        if !known && others.len() < args.top {
            others.push(*other);
        }
    }
    let figures = Figures::new(&choice, &problem)?;
    args.format.line(text(&problem, &spec, &choice, &figures, ranked.len()).trim_end())?;
    if !others.is_empty() {
        args.format.line("otherwise")?;
    }
    for Choice { config, stripe, cost } in &others {
        args.format.line(format!("  {cost}: {config}, stripes of {stripe}"))?;
    }
    args.format.value(|| {
        json!({
            "problem": {
                "m": problem.m, "n": problem.n, "k": problem.k, "group": problem.group.raw(),
                "type": args.problem.kind.weight.to_string(),
                "activation": problem.kind.activation.name(),
            },
            "device": {
                "name": spec.name, "target": spec.arch.to_string(), "num_sms": spec.num_sms,
            },
            "choice": choice_json(&choice),
            "threads": choice.config.num_threads(),
            "smem_bytes": figures.smem_bytes,
            "bytes_in_flight_per_sm": figures.in_flight_bytes,
            "grid": figures.grid,
            "scratch_bytes": figures.scratch_bytes,
            "num_locks": figures.num_locks,
            "others": others.iter().map(choice_json).collect::<Vec<_>>(),
        })
    })
}

/// What follows from a choice.
struct Figures {
    smem_bytes: u32,
    in_flight_bytes: u64,
    grid: [u32; 2],
    num_launches: usize,
    scratch_bytes: u64,
    num_locks: u64,
}

impl Figures {
    fn new(choice: &Choice, problem: &Problem) -> anyhow::Result<Self> {
        let config = &choice.config;
        let layout = {
            let (n, k) = (problem.n as usize, problem.k as usize);
            PackedLayout::of(n, k, problem.group, problem.kind.tile())?
        };
        // Of a run of 128 inputs, for each team: the tiles of its channels and the rows of the batch.
        let run_bytes = u64::from(config.tile_n / 16) * layout.tile_bytes as u64
            + 256 * u64::from(config.tile_m);
        let ahead = select::family_of(config).runs_in_flight(config);
        let runs = u64::from(ahead * config.warps_k * config.ctas_per_sm);
        let plans: Vec<_> = select::plans(config, problem, choice.stripe).collect();
        Ok(Self {
            smem_bytes: select::family_of(config).smem_bytes(config),
            in_flight_bytes: runs * run_bytes,
            grid: plans.first().context("a problem of at least one row has a launch")?.grid,
            num_launches: plans.len(),
            scratch_bytes: plans.iter().map(|plan| plan.scratch_bytes).max().unwrap_or(0),
            num_locks: plans.iter().map(|plan| plan.num_locks).max().unwrap_or(0),
        })
    }
}

fn text(
    problem: &Problem,
    spec: &DeviceSpec,
    choice: &Choice,
    figures: &Figures,
    num_choices: usize,
) -> String {
    let Choice { config, stripe, cost } = choice;
    let Config { tile_m, tile_n, warps_n, warps_k, stages, ctas_per_sm, .. } = *config;
    let [grid_x, grid_y] = figures.grid;
    let num_tiles = problem.n.div_ceil(config.tile_n);
    let k_tiles = problem.k.div_ceil(128);
    let slots = spec.num_sms * ctas_per_sm;
    let scaling = match (config.group, config.scaling) {
        (Group::PerColumn, _) => "one scale a column, in fp32 at the end of a tile",
        (_, Scaling::Promote) => "in fp32, once a group, on its partial sums",
        (_, Scaling::Fragment) => {
            "in fp16, on the fragments: fewer than the accumulators of this tile"
        }
    };
    let (holder, exchange) = match config.cluster_k {
        1 => ("CTA", ""),
        _ => ("cluster of 2 CTAs", "halves of sums cross shared memory in a cluster; beyond it "),
    };
    let reduction = match (figures.num_locks, config.reduction) {
        (0, _) => "none: every stripe is made of whole tiles".to_owned(),
        (locks, Reduction::F32) => format!(
            "in fp32 through {} of scratch memory, {locks} locks, one hop",
            bytes(figures.scratch_bytes)
        ),
        (locks, Reduction::F16InPlace) => {
            format!("in place in fp16, {locks} locks, a hop a stripe")
        }
    };
    let launches = match figures.num_launches {
        1 => String::new(),
        more => format!(", the first of {more} launches"),
    };
    let bound = if cost.memory_us >= cost.issue_us { "memory" } else { "instruction issue" };
    format!(
        "problem    {problem}\n\
         device     {device}\n\
         choice     {config}, the cheapest of {num_choices}\n\
         tile       {tile_m} rows x {tile_n} outputs; {teams} of {warps}, {threads} threads, {per_warp} outputs a warp\n\
         pipeline   {stages} stages of 128 inputs a team, {smem} of shared memory a CTA of {smem_limit}\n\
         in flight  {in_flight} an SM: {ctas}, {ahead} ahead\n\
         stripes    {stripe} of the {runs} runs ({num_tiles} tiles of {k_tiles}) a {holder}; grid {grid_x} x \
         {grid_y} on {slots} slots{launches}\n\
         reduction  {exchange}{reduction}\n\
         scaling    {scaling}\n\
         predicted  {cost}, bound by {bound}\n",
        problem = problem,
        device = device::describe(spec),
        threads = config.num_threads(),
        per_warp = 16 * config.tiles_per_warp(),
        smem = bytes(figures.smem_bytes.into()),
        smem_limit = bytes(spec.smem_per_cta_bytes.into()),
        in_flight = bytes(figures.in_flight_bytes),
        teams = count(warps_k as usize, "team"),
        warps = count(warps_n as usize, "warp"),
        ctas = count(ctas_per_sm as usize, "CTA"),
        ahead = count(select::family_of(config).runs_in_flight(config) as usize, "stage"),
        runs = u64::from(num_tiles) * u64::from(k_tiles),
    )
}

fn choice_json(choice: &Choice) -> Value {
    json!({
        "config": choice.config.to_string(),
        "stripe": choice.stripe,
        "predicted_us": {
            "total": choice.cost.total_us,
            "memory": choice.cost.memory_us,
            "issue": choice.cost.issue_us,
            "fixed": choice.cost.fixed_us,
        },
    })
}
