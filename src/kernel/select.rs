//! From a problem and a device to a configuration and a launch: legality rules, then a cost.
//!
//! Everything here is a pure function of its arguments, so every choice can be tested, and explained to
//! a user, without a GPU. The cost is a prediction in microseconds from the work that each scheduler of
//! the busiest SM has to issue, the bytes that must come from memory, and fixed costs; its constants were
//! fitted to measurements recorded in `benches/NOTES.md`.

use std::fmt;

use super::parts::{epilogue_bytes, magic};
use super::problem::{Config, Plan, Problem, Reduction, Rows, Scaling};
use super::{FAMILIES, KernelFamily};
use crate::target::{DeviceSpec, SmArch};
use crate::weights::Group;

/// Row tiles that one launch covers: the y dimension of a grid has 16 bits.
const MAX_ROW_TILES: u64 = 65535;
/// Strides up to here keep offsets inside a tile of 64 rows in 32 bits.
pub const MAX_ROW_STRIDE_BYTES: u64 = u32::MAX as u64 / 64;
/// Rows of C per CTA, by batch: see [`tile_m_for`].
const TILE_MS: [u32; 8] = [1, 2, 4, 8, 16, 32, 48, 64];

/// Why a configuration cannot be built or run on a target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{config} is not legal for {target}: {rule}")]
pub struct Illegal {
    /// The configuration's name.
    pub config: String,
    /// The target.
    pub target: SmArch,
    /// The rule that it breaks, with the numbers.
    pub rule: String,
}

/// The family of a configuration.
pub fn family_of(config: &Config) -> &'static dyn KernelFamily {
    *FAMILIES
        .iter()
        .find(|family| family.name() == config.family)
        .expect("a configuration names a registered family")
}

/// Checks every rule that a configuration must keep on a target.
///
/// # Errors
/// [`Illegal`] names the first rule that is broken and its numbers.
pub fn check(config: &Config, target: SmArch) -> Result<(), Illegal> {
    let illegal = |rule: String| Err(Illegal { config: config.to_string(), target, rule });
    let family = family_of(config);
    if !family.runs_on(target) {
        return illegal(format!("family {} does not run on {target}", family.name()));
    }
    let Some(spec) = target.spec() else {
        return illegal(format!("nothing is known about {target}"));
    };
    if !(TILE_MS.contains(&config.tile_m)) {
        return illegal(format!("tile_m is {}, it must be one of {TILE_MS:?}", config.tile_m));
    }
    if ![1, 2, 4, 8].contains(&config.warps_n) || ![1, 2, 4, 8, 16].contains(&config.warps_k) {
        return illegal(format!(
            "{} x {} warps: both must be powers of two, at most 8 and 16",
            config.warps_n, config.warps_k
        ));
    }
    if config.num_warps() > 16 {
        return illegal(format!("{} warps, at most 16 fit their registers", config.num_warps()));
    }
    if ![2, 4].contains(&config.tiles_per_warp())
        || config.tile_n != 16 * config.tiles_per_warp() * config.warps_n
    {
        return illegal(format!(
            "tile_n {} over {} warps: a warp owns 32 or 64 channels",
            config.tile_n, config.warps_n
        ));
    }
    if config.num_threads() < config.tile_n / 4 {
        return illegal(format!(
            "{} threads for rows of {} outputs: the epilogue wants a thread per 4",
            config.num_threads(),
            config.tile_n
        ));
    }
    if !(2..=12).contains(&config.stages) {
        return illegal(format!("{} stages, 2 to 12 are supported", config.stages));
    }
    if config.ctas_per_sm == 0 {
        return illegal("0 CTAs per SM".into());
    }
    if config.reduction == Reduction::F16InPlace && config.rows == Rows::Element {
        return illegal("in-place reduction reads C by 8 bytes, rows allow single elements".into());
    }
    if let Group::Size(size) = config.group
        && !Group::SIZES.contains(&size)
    {
        return illegal(format!("group {size}, kernels have {:?}", Group::SIZES));
    }
    let smem = family.smem_bytes(config);
    if smem > spec.smem_per_cta_bytes {
        return illegal(format!(
            "{smem} bytes of shared memory, a CTA has {}",
            spec.smem_per_cta_bytes
        ));
    }
    let fit = spec.ctas_that_fit(config.num_threads(), 1, smem);
    if fit < config.ctas_per_sm {
        return illegal(format!(
            "{} CTAs of {smem} bytes and {} threads per SM, {fit} fit",
            config.ctas_per_sm,
            config.num_threads()
        ));
    }
    let regs = spec.regs_per_sm / (config.ctas_per_sm * config.num_threads());
    let needed = registers_needed(config);
    if regs.min(255) < needed {
        return illegal(format!("about {needed} registers a thread, {regs} are available"));
    }
    Ok(())
}

/// An estimate of a thread's registers: accumulators, the group's sums, B fragments, two rounds of words,
/// and addresses. With fewer the assembler spills.
fn registers_needed(config: &Config) -> u32 {
    let accumulators = 4 * config.tiles_per_warp() * config.tile_m.div_ceil(8);
    let promotes = config.scaling == Scaling::Promote && config.group != Group::PerColumn;
    let sums = if promotes { accumulators } else { 0 };
    let batch = 4 * config.tile_m.div_ceil(8);
    accumulators + sums + batch + 8 * config.tiles_per_warp() + 48
}

/// Rows of C per CTA for a batch of `m` rows: the smallest step that holds it, 64 for large ones.
pub fn tile_m_for(m: u64) -> u32 {
    TILE_MS.into_iter().find(|tile| u64::from(*tile) >= m).unwrap_or(64)
}

/// Every legal configuration of every family for a problem on a target, in the preferred numerics:
/// single-precision reduction, no eviction policy.
pub fn candidates(problem: &Problem, target: SmArch) -> Vec<Config> {
    let tile_m = tile_m_for(problem.m);
    let mut candidates = Vec::new();
    for family in FAMILIES {
        for (warps_n, warps_k) in [1u32, 2, 4, 8]
            .into_iter()
            .flat_map(|n| [1u32, 2, 4, 8, 16].map(|k| (n, k)))
            .filter(|(n, k)| (4..=16).contains(&(n * k)))
        {
            for tiles_per_warp in [2, 4] {
                for (stages, ctas_per_sm) in
                    [2u32, 3, 4, 5, 6, 8].into_iter().flat_map(|s| [1u32, 2].map(|c| (s, c)))
                {
                    for scaling in [Scaling::Promote, Scaling::Fragment] {
                        let config = Config {
                            family: family.name(),
                            format: "u4b8",
                            group: problem.group,
                            tile_m,
                            tile_n: 16 * tiles_per_warp * warps_n,
                            warps_n,
                            warps_k,
                            stages,
                            ctas_per_sm,
                            scaling,
                            reduction: Reduction::F32,
                            rows: problem.rows,
                            evict_first: false,
                        };
                        // Without groups there is nothing to scale in the loop.
                        let same =
                            scaling == Scaling::Fragment && problem.group == Group::PerColumn;
                        if !same && check(&config, target).is_ok() {
                            candidates.push(config);
                        }
                    }
                }
            }
        }
    }
    candidates
}

/// What a plan is predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Microseconds in all.
    pub total_us: f64,
    /// Microseconds that memory needs for the bytes.
    pub memory_us: f64,
    /// Microseconds that the busiest scheduler needs to issue its instructions.
    pub issue_us: f64,
    /// Microseconds of launch, filling the pipeline, reductions and output.
    pub fixed_us: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} us (memory {:.1}, issue {:.1}, fixed {:.1})",
            self.total_us, self.memory_us, self.issue_us, self.fixed_us
        )
    }
}

/// The sizes of a problem in tiles of a configuration.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    num_tiles: u64,
    k_tiles: u64,
    row_tiles: u64,
}

impl Tiling {
    fn new(config: &Config, problem: &Problem) -> Self {
        Self {
            num_tiles: u64::from(problem.n.div_ceil(config.tile_n)),
            k_tiles: u64::from(problem.k.div_ceil(128)),
            row_tiles: problem.m.div_ceil(config.tile_m.into()),
        }
    }
}

/// Stripe lengths worth considering: whole tiles, halves to eighths of a tile, and an even share for each
/// CTA slot of the card.
fn stripes(tiling: &Tiling, config: &Config, device: &DeviceSpec) -> Vec<u32> {
    let slots = u64::from(device.num_sms * config.ctas_per_sm);
    let mut stripes: Vec<u64> = vec![tiling.k_tiles];
    // Row tiles already fill a card that many times: partial sums would only cost.
    if tiling.row_tiles * tiling.num_tiles < 4 * slots {
        stripes.extend((2..=8).map(|parts| tiling.k_tiles.div_ceil(parts)));
        let runs = tiling.num_tiles * tiling.k_tiles;
        for waves in 1..=2 {
            stripes.push((runs * tiling.row_tiles).div_ceil(slots * waves).clamp(1, runs));
        }
    }
    stripes.sort_unstable();
    stripes.dedup();
    stripes.into_iter().map(|stripe| stripe as u32).collect()
}

/// The launches of a configuration for a problem, with the stripe length given. Several only where the
/// batch has more rows than a grid can have tiles.
pub fn plans(
    config: &Config,
    problem: &Problem,
    stripe: u32,
) -> impl Iterator<Item = Plan> + use<> {
    let rows_per_launch = MAX_ROW_TILES * u64::from(config.tile_m);
    let tiling = Tiling::new(config, problem);
    let config = *config;
    let m = problem.m;
    (0..m.div_ceil(rows_per_launch)).map(move |launch| {
        let first_row = launch * rows_per_launch;
        let num_rows = (m - first_row).min(rows_per_launch);
        let row_tiles = num_rows.div_ceil(config.tile_m.into());
        let num_stripes = (tiling.num_tiles * tiling.k_tiles).div_ceil(stripe.into());
        let shares = u64::from(stripe) % tiling.k_tiles != 0;
        let slot_bytes = 4 * u64::from(config.tile_m * config.tile_n);
        let scratch = shares && config.reduction == Reduction::F32;
        Plan {
            grid: [num_stripes as u32, row_tiles as u32],
            stripe,
            scratch_bytes: if scratch { num_stripes * row_tiles * slot_bytes } else { 0 },
            // In-place reduction asks its lock even where nobody else adds.
            num_locks: if shares || config.reduction == Reduction::F16InPlace {
                tiling.num_tiles * row_tiles
            } else {
                0
            },
            first_row,
            num_rows: num_rows as u32,
        }
    })
}

/// The constants of the cost model for one architecture.
struct CostModel {
    /// Bytes per microsecond that a kernel reads at best.
    bytes_per_us: f64,
    /// Clocks per microsecond of an SM under load.
    clocks_per_us: f64,
    /// Clocks per mma that no other instruction of the scheduler can use, beyond its issue slot.
    mma_clocks: f64,
    /// Launch, prologue, first bytes.
    start_us: f64,
    /// One reduction hop.
    hop_us: f64,
}

/// Fitted on the H200; other cards are compared by the same shape of curve.
const MODEL: CostModel = CostModel {
    bytes_per_us: 4.4e6,
    clocks_per_us: 1750.0,
    mma_clocks: 5.1,
    start_us: 2.6,
    hop_us: 1.6,
};

/// Predicts one launch.
pub fn cost(config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
    let tiling = Tiling::new(config, problem);
    let model = &MODEL;
    let runs = tiling.num_tiles * tiling.k_tiles;
    let stripe = u64::from(stripe);
    let ctas = runs.div_ceil(stripe) * tiling.row_tiles;
    let slots = u64::from(device.num_sms * config.ctas_per_sm);
    let waves = ctas.div_ceil(slots);
    let ctas_on_sm = ctas.div_ceil(u64::from(device.num_sms)).min(u64::from(config.ctas_per_sm));

    // Issue: instructions of one warp and run, on the scheduler with the most warps.
    let tiles = f64::from(config.tiles_per_warp());
    let row_tiles = f64::from(config.tile_m.div_ceil(8));
    let mma = 8.0 * tiles * row_tiles;
    let scale = match (config.group, config.scaling) {
        (Group::PerColumn, _) => 0.0,
        (_, Scaling::Promote) => tiles * (4.0 * row_tiles + 4.0),
        (_, Scaling::Fragment) => 8.0 * tiles * 4.0 + 2.0 * tiles,
    };
    let copies = tiles * 2.25 + 3.0 * f64::from(config.tile_m) / 2.0 / f64::from(config.warps_n);
    let loads = 3.0 * tiles + 4.0 * row_tiles;
    let per_run =
        8.0 * tiles * 9.0 + mma * (1.0 + model.mma_clocks) + scale + copies + loads + 25.0;
    let warps = config.num_warps() as u64 * ctas_on_sm;
    let warps_per_scheduler = warps.div_ceil(4) as f64;
    // Fewer warps than that leave latencies exposed.
    let per_run = per_run.max(900.0 / warps_per_scheduler);
    let rounds = stripe.div_ceil(config.warps_k.into()) * waves;
    let issue_us = rounds as f64 * per_run * warps_per_scheduler / model.clocks_per_us;

    // Memory: weights once for each row tile that does not find them in L2, activations from L2.
    let weight_bytes = problem.n as f64 * problem.k as f64 * 0.516;
    let rereads = if weight_bytes < 0.6 * device.l2_bytes as f64 { 0.25 } else { 1.0 };
    let passes = 1.0 + rereads * (tiling.row_tiles as f64 - 1.0);
    let a_bytes = 2.0 * problem.k as f64 * (problem.m as f64) * tiling.num_tiles as f64;
    let memory_us = (weight_bytes * passes + 0.12 * a_bytes) / model.bytes_per_us;
    let in_flight = ctas_on_sm as f64
        * f64::from((config.stages - 1) * config.num_warps() * config.tiles_per_warp())
        * 1056.0;
    let starved = (40_000.0 / in_flight).max(1.0);
    let busy_sms = (ctas.min(u64::from(device.num_sms)) as f64) / f64::from(device.num_sms);
    let memory_us = memory_us * starved / busy_sms.max(0.3).min(0.85) * 0.85;

    let shares = stripe % tiling.k_tiles != 0;
    let epilogue_us = f64::from(epilogue_bytes(config)) / 128_000.0 * 0.5;
    let segments = (stripe as f64 / tiling.k_tiles as f64).ceil() * waves as f64;
    let hop_us = if shares { model.hop_us } else { 0.0 };
    let fixed_us = model.start_us + hop_us + segments * (0.5 + epilogue_us);
    let total_us = memory_us.max(issue_us) + 0.25 * memory_us.min(issue_us) + fixed_us;
    Cost { total_us, memory_us, issue_us, fixed_us }
}

/// A configuration and a stripe length with their predicted cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The kernel.
    pub config: Config,
    /// Runs of 128 inputs per CTA.
    pub stripe: u32,
    /// The prediction.
    pub cost: Cost,
}

/// No kernel takes the problem on the device. Holds every reason once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no kernel takes {problem} on {device}: {reasons}")]
pub struct NoKernel {
    problem: String,
    device: String,
    reasons: String,
}

/// All choices for a problem on a device, cheapest first.
pub fn ranked(problem: &Problem, device: &DeviceSpec) -> Vec<Choice> {
    let mut choices: Vec<Choice> = candidates(problem, device.arch)
        .into_iter()
        .flat_map(|config| {
            stripes(&Tiling::new(&config, problem), &config, device).into_iter().map(
                move |stripe| Choice {
                    config,
                    stripe,
                    cost: cost(&config, problem, device, stripe),
                },
            )
        })
        .filter(|choice| divisible(&choice.config, problem))
        .collect();
    choices
        .sort_by(|a, b| a.cost.total_us.total_cmp(&b.cost.total_us).then(a.config.cmp(&b.config)));
    choices
}

/// Whether the run count is within what the kernel's division covers.
fn divisible(config: &Config, problem: &Problem) -> bool {
    let tiling = Tiling::new(config, problem);
    tiling.num_tiles * tiling.k_tiles < 1 << 30
}

/// The cheapest choice.
///
/// # Errors
/// [`NoKernel`] if no family has a legal configuration, with each family's reason.
pub fn choose(problem: &Problem, device: &DeviceSpec) -> Result<Choice, NoKernel> {
    ranked(problem, device).first().copied().ok_or_else(|| {
        let reason = |family: &&dyn KernelFamily| {
            let why = match family.runs_on(device.arch) {
                false => format!("does not run on {}", device.arch),
                true => "has no configuration that fits".to_owned(),
            };
            format!("{} {why}", family.name())
        };
        NoKernel {
            problem: format!("{problem:?}"),
            device: format!("{} ({})", device.name, device.arch),
            reasons: FAMILIES.iter().map(reason).collect::<Vec<_>>().join("; "),
        }
    })
}

/// The magic numbers of a launch: for `k_tiles` and for the stripe length.
pub fn magics(problem: &Problem, stripe: u32) -> [(u32, u32); 2] {
    [magic(problem.k.div_ceil(128)), magic(stripe)]
}
