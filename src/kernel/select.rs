//! From a problem and a device to a configuration and a launch: legality rules, then a cost.
//!
//! Everything here is a pure function of its arguments, so every choice can be tested, and explained to
//! a user, without a GPU. The cost is that of `cost.rs`.

use std::cmp::Ordering;

use super::cost::Tiling;
use super::params::magic;
use super::problem::{Config, Conversion, Plan, Problem, Reduction, Rows, Scaling};
use super::stripe::Deal;
use super::{FAMILIES, KernelFamily};
use crate::target::{DeviceSpec, SmArch};
use crate::weights::{Activation, Group};

pub use super::cost::{Cost, cost};

/// Row tiles that one launch covers: the y dimension of a grid has 16 bits.
const MAX_ROW_TILES: u64 = 65535;
/// Strides up to here keep offsets inside a tile of 64 rows in 32 bits.
pub const MAX_ROW_STRIDE_BYTES: u64 = u32::MAX as u64 / 64;
/// Rows that one product may have: far above any memory, far below what sizes and addresses overflow at.
pub const MAX_ROWS: u64 = 1 << 40;
/// Rows of C per CTA, by batch: see [`tile_m_for`].
pub(super) const TILE_MS: [u32; 8] = [1, 2, 4, 8, 16, 32, 48, 64];

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
    if let Some(rule) = config.kind.broken_rule(config.group) {
        return illegal(rule);
    }
    let whole = config.reduction == Reduction::F32 && config.cluster_k == 1;
    if config.kind.experts && (family.experts().is_none() || !whole) {
        return illegal("experts, which sm80 and sm90wg have, each tile whole in one CTA".into());
    }
    if config.reduction == Reduction::F16InPlace
        && (config.kind.bias || config.kind.residual || config.kind.activation != Activation::F16)
    {
        return illegal("in-place reduction adds up in fp16, and nothing else to it".into());
    }
    if config.conversion == Conversion::Subnormal {
        if config.kind.weight_format().subnormal().is_none() {
            return illegal(format!("{} has no subnormal conversion", config.kind.format));
        }
        if config.kind.activation != Activation::F16 || config.group == Group::Size(16) {
            let what = config.kind.activation.name();
            return illegal(format!(
                "subnormal codes are fp16 numbers, in groups of 32 or more, not {what} in {:?}",
                config.group
            ));
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
    let threads = config.num_threads();
    let fit = spec.ctas_that_fit(threads, 1, smem);
    if fit < config.ctas_per_sm {
        return illegal(format!(
            "{} CTAs of {smem} bytes and {threads} threads per SM, {fit} fit",
            config.ctas_per_sm,
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

/// Batches that choices distinguish, before powers of two.
const STEPS: [u64; 13] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// The batch rounded up to a step that choices distinguish.
pub fn step(m: u64) -> u64 {
    let known = STEPS.into_iter().find(|step| *step >= m);
    known.unwrap_or_else(|| m.min(MAX_ROWS).next_power_of_two())
}

/// Every configuration of every family that is worth considering for a problem on a target, in the
/// preferred numerics: single-precision reduction, no eviction policy.
pub fn candidates(problem: &Problem, target: SmArch) -> Vec<Config> {
    let legal = |config: &Config| check(config, target).is_ok();
    FAMILIES
        .iter()
        .filter(|family| family.runs_on(target))
        .flat_map(|family| family.candidates(problem))
        .filter_map(|preferred| preferred.into_iter().find(legal))
        .collect()
}

/// Stripe lengths worth considering: whole tiles, one or as many as each slot of the card for a CTA or cluster gets,
/// halves to eighths of a tile, and an even share for each slot.
fn stripes(tiling: &Tiling, config: &Config, device: &DeviceSpec) -> Vec<u32> {
    let slots = u64::from(device.num_sms * config.ctas_per_sm / config.cluster_k);
    let all_tiles = tiling.num_tiles * tiling.row_tiles;
    let tiles_per_slot = all_tiles.div_ceil(slots);
    let mut stripes: Vec<u64> = vec![tiling.k_tiles];
    // Stripes run over the row tiles or lie in one.
    let covers_rows = family_of(config).stripes_cover_rows();
    let num_tiles = if covers_rows { all_tiles } else { tiling.num_tiles };
    // Row tiles already fill a card that many times: partial sums would only cost.
    let few = all_tiles < 4 * slots;
    if few {
        stripes.extend((2..=8).map(|parts| tiling.k_tiles.div_ceil(parts)));
        for waves in 1..=2 {
            let even = (all_tiles * tiling.k_tiles).div_ceil(slots * waves);
            stripes.push(even.clamp(1, num_tiles * tiling.k_tiles));
        }
    }
    if few || covers_rows {
        stripes.push(tiling.k_tiles * tiles_per_slot.min(num_tiles));
    }
    let step = u64::from(family_of(config).stripe_step(config));
    stripes.iter_mut().for_each(|stripe| *stripe = stripe.next_multiple_of(step));
    stripes.sort_unstable();
    stripes.dedup();
    stripes.into_iter().map(|stripe| stripe as u32).collect()
}

/// Tiles that the stripes of one launch of `num_rows` rows run over.
pub fn num_tiles(config: &Config, problem: &Problem, num_rows: u64) -> u64 {
    let num_tiles = u64::from(problem.n.div_ceil(config.tile_n));
    match family_of(config).stripes_cover_rows() {
        true => num_tiles * num_rows.div_ceil(config.tile_m.into()),
        false => num_tiles,
    }
}

/// How one launch's tiles are divided between shares and whole tiles.
pub fn deal(config: &Config, plan: &Plan, num_tiles: u32, k_tiles: u32) -> Deal {
    match family_of(config).stripes_cover_rows() {
        true => Deal::whole_first(num_tiles, plan.grid[0] / config.cluster_k, plan.stripe, k_tiles),
        false => Deal::stripes(num_tiles, plan.stripe),
    }
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
    let covers_rows = family_of(&config).stripes_cover_rows();
    (0..m.div_ceil(rows_per_launch)).map(move |launch| {
        let first_row = launch * rows_per_launch;
        let num_rows = (m - first_row).min(rows_per_launch);
        let row_tiles = num_rows.div_ceil(config.tile_m.into());
        let (num_tiles, grid_rows) = match covers_rows {
            true => (tiling.num_tiles * row_tiles, 1),
            false => (tiling.num_tiles, row_tiles),
        };
        let num_stripes = (num_tiles * tiling.k_tiles).div_ceil(stripe.into());
        let shares = u64::from(stripe) % tiling.k_tiles != 0;
        let slot_bytes = 4 * u64::from(config.tile_m * config.tile_n);
        let scratch = shares && config.reduction == Reduction::F32;
        Plan {
            grid: [num_stripes as u32 * config.cluster_k, grid_rows as u32],
            stripe,
            scratch_bytes: if scratch { num_stripes * grid_rows * slot_bytes } else { 0 },
            // In-place reduction asks its lock even where nobody else adds. CTAs of a cluster own parts of a tile.
            num_locks: if shares || config.reduction == Reduction::F16InPlace {
                num_tiles * grid_rows * u64::from(config.cluster_k)
            } else {
                0
            },
            first_row,
            num_rows: num_rows as u32,
        }
    })
}

/// A configuration and a stripe length with their predicted cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The kernel.
    pub config: Config,
    /// Runs of 128 inputs per CTA, or per cluster of CTAs.
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

impl NoKernel {
    pub(super) fn new(problem: &Problem, device: &DeviceSpec, reasons: String) -> Self {
        let device = format!("{} ({})", device.name, device.arch);
        Self { problem: problem.to_string(), device, reasons }
    }
}

/// All choices for a problem on a device, cheapest first: by their time, where grids may overlap by the sum of their
/// times in plain order and with early launch.
pub fn ranked(problem: &Problem, device: &DeviceSpec) -> Vec<Choice> {
    let mut choices: Vec<Choice> = candidates(problem, device.arch)
        .into_iter()
        .filter(|config| family_of(config).config_isa(config) <= device.isa)
        .flat_map(|config| {
            let stripes = stripes(&Tiling::new(&config, problem), &config, device);
            stripes.into_iter().filter_map(move |stripe| choice(&config, problem, device, stripe))
        })
        .collect();
    choices.sort_by(|a, b| rank(a, b, device));
    choices
}

/// A configuration with a stripe length as a choice, if its runs are within what the kernel's division covers.
pub(super) fn choice(
    config: &Config,
    problem: &Problem,
    device: &DeviceSpec,
    stripe: u32,
) -> Option<Choice> {
    let choice = || Choice { config: *config, stripe, cost: cost(config, problem, device, stripe) };
    divisible(config, problem).then(choice)
}

/// Which of two choices comes first.
pub(super) fn rank(a: &Choice, b: &Choice, device: &DeviceSpec) -> Ordering {
    time_us(a, device).total_cmp(&time_us(b, device)).then(a.config.cmp(&b.config))
}

/// What choices are ranked by, in microseconds.
pub(super) fn time_us(Choice { cost, .. }: &Choice, device: &DeviceSpec) -> f64 {
    match device.arch.sm >= 90 {
        true => cost.total_us + cost.early_us,
        false => cost.total_us,
    }
}

/// Whether the run count is within what the kernel's division covers.
fn divisible(config: &Config, problem: &Problem) -> bool {
    let tiling = Tiling::new(config, problem);
    let tiles = num_tiles(config, problem, problem.m.min(MAX_ROW_TILES * u64::from(config.tile_m)));
    tiles * tiling.k_tiles < 1 << 30
        && tiling.k_tiles.is_multiple_of(family_of(config).stripe_step(config).into())
}

/// The cheapest choice for the problem's [`step`] of the batch. It is the same with early launch as without, so
/// that both give the same bits: what counts is the sum of both times.
///
/// # Errors
/// [`NoKernel`] if the problem is too large or no family has a legal configuration, with each reason.
pub fn choose(problem: &Problem, device: &DeviceSpec) -> Result<Choice, NoKernel> {
    check_size(problem, device)?;
    let stepped = Problem { m: step(problem.m), ..*problem };
    ranked(&stepped, device).first().copied().ok_or_else(|| no_family(problem, device))
}

/// Refuses a problem that numbers of 32 bits do not reach.
pub(super) fn check_size(problem: &Problem, device: &DeviceSpec) -> Result<(), NoKernel> {
    let most = MAX_ROW_STRIDE_BYTES / 2;
    if problem.m > MAX_ROWS || u64::from(problem.n.max(problem.k)) > most {
        let reasons = format!("at most {MAX_ROWS} rows, {most} outputs and {most} inputs");
        return Err(NoKernel::new(problem, device, reasons));
    }
    Ok(())
}

/// Why none of the families takes a problem.
pub(super) fn no_family(problem: &Problem, device: &DeviceSpec) -> NoKernel {
    let reason = |family: &&dyn KernelFamily| {
        let why = match family.runs_on(device.arch) {
            false => format!("does not run on {}", device.arch),
            true if family.isa() > device.isa => format!(
                "needs PTX {}, the driver speaks up to {}: install a newer driver",
                family.isa(),
                device.isa
            ),
            true => "has no configuration that fits".to_owned(),
        };
        format!("{} {why}", family.name())
    };
    let reasons = FAMILIES.iter().map(reason).collect::<Vec<_>>().join("; ");
    NoKernel::new(problem, device, reasons)
}

/// The magic numbers of a launch: for `k_tiles` and for the stripe length.
pub fn magics(problem: &Problem, stripe: u32) -> [(u32, u32); 2] {
    [magic(problem.k.div_ceil(128)), magic(stripe)]
}
