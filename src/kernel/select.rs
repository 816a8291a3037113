//! From a problem and a device to a configuration and a launch: legality rules, then a cost.
//!
//! Everything here is a pure function of its arguments, so every choice can be tested, and explained to
//! a user, without a GPU. The cost is a prediction in microseconds from the work that each scheduler of
//! the busiest SM has to issue, the bytes that must come from memory, and fixed costs; its constants were
//! fitted to measurements recorded in `benches/NOTES.md`.

use std::fmt;

use super::epilogue::epilogue_bytes;
use super::params::magic;
use super::problem::{Config, Conversion, Plan, Problem, Reduction, Rows, Scaling};
use super::{FAMILIES, KernelFamily};
use crate::target::{DeviceSpec, SmArch};
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES};

/// Row tiles that one launch covers: the y dimension of a grid has 16 bits.
const MAX_ROW_TILES: u64 = 65535;
/// Strides up to here keep offsets inside a tile of 64 rows in 32 bits.
pub const MAX_ROW_STRIDE_BYTES: u64 = u32::MAX as u64 / 64;
/// Rows that one product may have: far above any memory, far below what sizes and addresses overflow at.
pub const MAX_ROWS: u64 = 1 << 40;
/// Bytes of a packed tile with one group of scales.
const TILE_BYTES: u32 = (CODE_BYTES_PER_TILE + SCALE_ROW_BYTES) as u32;
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
    if !(1..=8).contains(&config.warps_n) || ![1, 2, 4, 8, 16].contains(&config.warps_k) {
        return illegal(format!(
            "{} x {} warps: 1 to 8 side by side, teams a power of two up to 16",
            config.warps_n, config.warps_k
        ));
    }
    if config.num_warps() > 16 {
        return illegal(format!("{} warps, at most 16 fit their registers", config.num_warps()));
    }
    if ![1, 2, 4].contains(&config.tiles_per_warp())
        || config.tile_n != 16 * config.tiles_per_warp() * config.warps_n
    {
        return illegal(format!(
            "tile_n {} over {} warps: a warp owns 16, 32 or 64 channels",
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
    if config.conversion == Conversion::Subnormal {
        if config.weight_format().subnormal().is_none() {
            return illegal(format!("{} has no subnormal conversion", config.format));
        }
        if config.group != Group::PerColumn && config.scaling == Scaling::Fragment {
            return illegal("subnormal fragments cannot be scaled in half precision".into());
        }
    }
    if let Some(rule) = family.broken_rule(config) {
        return illegal(rule);
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
    let needed = family.registers_needed(config);
    if regs.min(255) < needed {
        return illegal(format!("about {needed} registers a thread, {regs} are available"));
    }
    Ok(())
}

/// Rows of C per CTA for a batch of `m` rows: the smallest step that holds it, 64 for large ones.
pub fn tile_m_for(m: u64) -> u32 {
    TILE_MS.into_iter().find(|tile| u64::from(*tile) >= m).unwrap_or(64)
}

/// The batch rounded up to a step that choices distinguish: the row tiles up to 64, then powers of two.
pub fn step(m: u64) -> u64 {
    if m <= 64 { tile_m_for(m).into() } else { m.min(MAX_ROWS).next_power_of_two() }
}

/// Bytes of weights in flight on an SM that the stream is given where shared memory allows: enough to cover
/// the loaded latency of memory, and not so much that the first bytes wait for all the others.
const IN_FLIGHT_BYTES: u32 = 64 << 10;

/// Every configuration of every family that is worth considering for a problem on a target, in the
/// preferred numerics: single-precision reduction, no eviction policy. The ring has as many slots as put
/// `IN_FLIGHT_BYTES` in flight, or as many as fit.
pub fn candidates(problem: &Problem, target: SmArch) -> Vec<Config> {
    let tile_m = tile_m_for(problem.m);
    let mut candidates = Vec::new();
    for family in FAMILIES {
        for (warps_n, warps_k) in [(1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
            .map(|(n, k)| (n as u32, k as u32))
        {
            for (tiles_per_warp, ctas_per_sm) in [(2u32, 1u32), (2, 2), (4, 1), (4, 2)] {
                let slot_bytes = ctas_per_sm * warps_n * warps_k * tiles_per_warp * TILE_BYTES;
                let stages = 1 + IN_FLIGHT_BYTES.div_ceil(slot_bytes).max(2);
                for scaling in [Scaling::Promote, Scaling::Fragment] {
                    // Without groups there is nothing to scale in the loop.
                    if scaling == Scaling::Fragment && problem.group == Group::PerColumn {
                        continue;
                    }
                    let config = |stages| Config {
                        family: family.name(),
                        format: problem.format,
                        group: problem.group,
                        tile_m,
                        tile_n: 16 * tiles_per_warp * warps_n,
                        warps_n,
                        warps_k,
                        stages,
                        ctas_per_sm,
                        conversion: Conversion::Value,
                        scaling,
                        reduction: Reduction::F32,
                        rows: problem.rows,
                        evict_first: false,
                    };
                    let legal = |config: &Config| check(config, target).is_ok();
                    candidates.extend((2..=stages).rev().map(config).find(legal));
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

/// The constants of the cost model.
struct CostModel {
    /// Launch, prologue, first bytes, in microseconds.
    start_us: f64,
    /// Each further wave of CTAs.
    wave_us: f64,
    /// Bytes per microsecond of the weight stream.
    bytes_per_us: f64,
    /// Share of the activations' bytes, read again by each tile, that slows the weight stream.
    activation_share: f64,
    /// Bytes in flight on an SM below which the stream starves.
    in_flight_bytes: f64,
    /// How much of an SM's surplus of work over the average the stream waits for.
    imbalance: f64,
    /// Instructions that a scheduler issues in a microsecond.
    issue_per_us: f64,
    /// Instructions' worth of one mma, beside its own issue.
    mma_weight: f64,
    /// Further instructions' worth of a round, exposed because few warps hide each other's latencies:
    /// a share of one warp's round, and a floor for the round.
    exposed_share: f64,
    round_floor: f64,
    /// Instructions' worth of a round that no warp hides.
    round_overhead: f64,
    /// The segment's epilogue: fixed, and per 100 kB of partial sums in shared memory.
    epilogue_us: f64,
    epilogue_us_per_100kb: f64,
    /// The reduction hop, and per helper: fixed, and per 100 kB of its partial sums.
    hop_us: f64,
    helper_us: f64,
    helper_us_per_100kb: f64,
    /// Exponent with which memory and issue time add up: larger means that they overlap better.
    overlap: f64,
}

/// Fitted to 1100 measurements on one H200: see `benches/NOTES.md`. Other cards are ranked by the same
/// curves; their rates differ, the order of configurations less so.
const MODEL: CostModel = CostModel {
    start_us: 2.07,
    wave_us: 1.82,
    bytes_per_us: 4.69e6,
    activation_share: 0.112,
    in_flight_bytes: 20.9e3,
    imbalance: 0.23,
    issue_per_us: 2315.0,
    mma_weight: 8.66,
    exposed_share: 0.243,
    round_floor: 785.0,
    round_overhead: 27.0,
    epilogue_us: 0.278,
    epilogue_us_per_100kb: 0.441,
    hop_us: 1.54,
    helper_us: 0.135,
    helper_us_per_100kb: 1.18,
    overlap: 3.1,
};

/// Instructions of one warp for one run of 128 inputs, mma apart, and its number of mma.
fn instructions_per_run(config: &Config) -> (f64, f64) {
    let tiles = f64::from(config.tiles_per_warp());
    let row_tiles = f64::from(config.tile_m.div_ceil(8));
    let dequantisation = 8.0 * tiles * 9.0;
    let scaling = match (config.group, config.scaling) {
        (Group::PerColumn, _) => 0.0,
        (_, Scaling::Promote) => tiles * (4.0 * row_tiles + 4.0),
        (_, Scaling::Fragment) => 8.0 * tiles * 4.0 + 2.0 * tiles,
    };
    let copies = 2.25 * tiles + 1.5 * f64::from(config.tile_m) / f64::from(config.warps_n);
    let loads = 3.0 * tiles + 4.0 * row_tiles;
    (dequantisation + scaling + copies + loads + 25.0, 8.0 * tiles * row_tiles)
}

/// Predicts one launch.
pub fn cost(config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
    let (tiling, model) = (Tiling::new(config, problem), &MODEL);
    let num_sms = f64::from(device.num_sms);
    let stripe = f64::from(stripe);
    let k_tiles = tiling.k_tiles as f64;
    let runs = (tiling.num_tiles * tiling.k_tiles) as f64;
    let ctas = (runs / stripe).ceil() * tiling.row_tiles as f64;
    let family = family_of(config);
    let smem = family.smem_bytes(config);
    let spec = device.arch.spec();
    let fit = spec.map_or(1, |spec| {
        spec.ctas_that_fit(config.num_threads(), family.registers_needed(config), smem)
    });
    let fit = f64::from(fit.max(config.ctas_per_sm));
    let ctas_per_sm = (ctas / num_sms).ceil();
    let resident = ctas_per_sm.min(fit);
    let waves = (ctas / (num_sms * fit)).ceil();

    // Issue: what the busiest scheduler has to issue.
    let (instructions, mma) = instructions_per_run(config);
    let per_run = instructions + (1.0 + model.mma_weight) * mma;
    let warps = (f64::from(config.num_warps()) * resident / 4.0).ceil();
    let round = (per_run * (warps + model.exposed_share)).max(model.round_floor);
    let rounds = (stripe / f64::from(config.warps_k)).ceil();
    let issue_us = waves * rounds * (round + model.round_overhead) / model.issue_per_us;

    // Memory: the weights, once for each row tile that no longer finds them in L2.
    let weight_bytes = f64::from(problem.n) * f64::from(problem.k) * 0.516;
    let in_l2 = weight_bytes < 0.6 * device.l2_bytes as f64;
    let passes = 1.0 + (tiling.row_tiles as f64 - 1.0) * if in_l2 { 0.25 } else { 1.0 };
    let a_bytes = 2.0 * f64::from(problem.k) * (tiling.num_tiles * tiling.row_tiles) as f64;
    let a_bytes = a_bytes * f64::from(config.tile_m);
    let bytes = weight_bytes * passes + model.activation_share * a_bytes;
    let in_flight = resident
        * f64::from((config.stages - 1) * config.num_warps() * config.tiles_per_warp())
        * f64::from(TILE_BYTES);
    let starved = (model.in_flight_bytes / in_flight).max(1.0);
    let busiest = ctas_per_sm * stripe * num_sms / (runs * tiling.row_tiles as f64);
    let uneven = 1.0 + model.imbalance * (busiest.max(1.0) - 1.0);
    let memory_us = bytes / model.bytes_per_us * starved * uneven;

    // Fixed: start, waves, epilogues, reduction.
    let segments = (stripe / k_tiles).ceil();
    let sums = f64::from(epilogue_bytes(config)) / 1e5;
    let shares = stripe % k_tiles != 0.0;
    let helpers = if stripe < k_tiles { (k_tiles / stripe).ceil() - 1.0 } else { 1.0 };
    let tile = f64::from(4 * config.tile_m * config.tile_n) / 1e5;
    let reduction_us = if shares {
        model.hop_us + helpers * (model.helper_us + model.helper_us_per_100kb * tile)
    } else {
        0.0
    };
    let epilogue_us = model.epilogue_us + model.epilogue_us_per_100kb * sums;
    let fixed_us =
        model.start_us + model.wave_us * (waves - 1.0) + segments * epilogue_us + reduction_us;

    let norm =
        |a: f64, b: f64| (a.powf(model.overlap) + b.powf(model.overlap)).powf(1.0 / model.overlap);
    let total_us = family.time_factor() * (fixed_us + norm(memory_us, issue_us));
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

/// The cheapest choice for the problem's [`step`] of the batch.
///
/// # Errors
/// [`NoKernel`] if the problem is too large or no family has a legal configuration, with each reason.
pub fn choose(problem: &Problem, device: &DeviceSpec) -> Result<Choice, NoKernel> {
    let no_kernel = |reasons: String| NoKernel {
        problem: problem.to_string(),
        device: format!("{} ({})", device.name, device.arch),
        reasons,
    };
    let most = MAX_ROW_STRIDE_BYTES / 2;
    if problem.m > MAX_ROWS || u64::from(problem.n.max(problem.k)) > most {
        return Err(no_kernel(format!(
            "at most {MAX_ROWS} rows, {most} outputs and {most} inputs"
        )));
    }
    let stepped = Problem { m: step(problem.m), ..*problem };
    ranked(&stepped, device).first().copied().ok_or_else(|| {
        let reason = |family: &&dyn KernelFamily| {
            let why = match family.runs_on(device.arch) {
                false => format!("does not run on {}", device.arch),
                true => "has no configuration that fits".to_owned(),
            };
            format!("{} {why}", family.name())
        };
        no_kernel(FAMILIES.iter().map(reason).collect::<Vec<_>>().join("; "))
    })
}

/// The magic numbers of a launch: for `k_tiles` and for the stripe length.
pub fn magics(problem: &Problem, stripe: u32) -> [(u32, u32); 2] {
    [magic(problem.k.div_ceil(128)), magic(stripe)]
}
