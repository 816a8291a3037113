//! The order of summation, and choices that keep it whatever the batch is.
//!
//! Two configurations of equal [`Summation`] add the products of a row and a column in the same order, in the same
//! instructions, if nobody shares a tile: the row then has the same bits, whatever else is in the batch. What they may
//! differ in is all that does not touch the order: rows and columns of a tile, warps side by side, stages, CTAs an SM,
//! which tile is computed where. So a batch-invariant product takes one order for a layer, and for each batch the
//! fastest configuration that has it.
//!
//! The order of a layer is the one that is fastest over all batches together ([`BATCHES`], each with the same weight):
//! a decode kernel's order alone would leave prefill at the speed of `mma.sync`, a prefill kernel's alone would cost
//! small layers most of their time. It is a function of the layer and the device, not of the batch.

use std::collections::BTreeMap;

use super::cost::Tiling;
use super::problem::{Config, Conversion, Problem, Scaling};
use super::select::{
    Choice, NoKernel, check, check_size, choice, family_of, no_family, rank, step, time_us,
};
use super::{FAMILIES, KernelFamily};
use crate::target::DeviceSpec;
use crate::weights::Group;

/// The instruction that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixInstruction {
    /// `mma.sync.m16n8k16`.
    Mma,
    /// `wgmma.mma_async.m64nNk16`, whatever N is.
    Wgmma,
}

/// What decides the order in which a kernel adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Summation {
    /// What multiplies and adds 16 inputs at a time.
    pub instruction: MatrixInstruction,
    /// How codes become numbers: subnormal ones are made up for in the sums.
    pub conversion: Conversion,
    /// Whether fragments are scaled or sums.
    pub scaling: Scaling,
    /// Teams, each of which sums its own runs of 128 inputs; their sums are added in order.
    pub warps_k: u32,
    /// Runs in a row that a team takes.
    pub runs: u32,
    /// CTAs that sum a part of the inputs each.
    pub cluster_k: u32,
}

impl Summation {
    /// The order of a configuration for tiles that it computes whole.
    pub fn of(config: &Config) -> Self {
        let instruction = family_of(config).instruction();
        Self {
            instruction,
            conversion: config.conversion,
            scaling: match config.group {
                Group::PerColumn => Scaling::Promote,
                Group::Size(_) => config.scaling,
            },
            warps_k: config.warps_k,
            // One team takes all runs in order; with several the family decides who takes which.
            runs: match (instruction, config.warps_k) {
                (_, 1) | (MatrixInstruction::Mma, _) => 1,
                (MatrixInstruction::Wgmma, _) => config.runs_per_stage,
            },
            cluster_k: config.cluster_k,
        }
    }
}

/// Batches over which the order of a layer is the fastest.
pub const BATCHES: [u64; 12] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096];

/// The fastest choice of each order for a problem, among those in which no CTAs but those of a cluster share a tile.
fn by_order(problem: &Problem, device: &DeviceSpec) -> BTreeMap<Summation, Choice> {
    let mut best: BTreeMap<Summation, Choice> = BTreeMap::new();
    for family in FAMILIES.iter().filter(|family| family.runs_on(device.arch)) {
        let legal = |config: &Config| check(config, device.arch).is_ok();
        let lists = family.all_candidates(problem).into_iter();
        let configs = lists
            .filter_map(|preferred| preferred.into_iter().find(legal))
            .filter(|config| family.config_isa(config) <= device.isa);
        for config in configs {
            for stripe in whole_stripes(*family, &config, problem, device) {
                let Some(choice) = choice(&config, problem, device, stripe) else { continue };
                let known = best.entry(Summation::of(&config)).or_insert(choice);
                if rank(&choice, known, device).is_lt() {
                    *known = choice;
                }
            }
        }
    }
    best
}

/// Stripes of whole tiles: of one, and of as many as each slot of the card gets.
fn whole_stripes(
    family: &dyn KernelFamily,
    config: &Config,
    problem: &Problem,
    device: &DeviceSpec,
) -> Vec<u32> {
    let tiling = Tiling::new(config, problem);
    let slots = u64::from((device.num_sms * config.ctas_per_sm / config.cluster_k).max(1));
    let per_slot = match family.stripes_cover_rows() {
        true => (tiling.num_tiles * tiling.row_tiles).div_ceil(slots),
        false => 1,
    };
    let mut tiles = vec![1, per_slot];
    tiles.dedup();
    tiles.into_iter().map(|tiles| (tiles * tiling.k_tiles) as u32).collect()
}

/// The order in which all products with a layer are summed in batch-invariant mode; the problem's batch does not
/// matter. Of the orders that have a kernel for every batch it is the one with the lowest mean logarithm of the time.
///
/// # Errors
/// [`NoKernel`] if the problem is too large or no order has kernels for all batches.
pub fn invariant_order(problem: &Problem, device: &DeviceSpec) -> Result<Summation, NoKernel> {
    check_size(problem, device)?;
    let mut totals: BTreeMap<Summation, (usize, f64)> = BTreeMap::new();
    for m in BATCHES {
        for (order, choice) in by_order(&Problem { m, ..*problem }, device) {
            let total = totals.entry(order).or_default();
            *total = (total.0 + 1, total.1 + time_us(&choice, device).ln());
        }
    }
    let complete = totals.iter().filter(|(_, (batches, _))| *batches == BATCHES.len());
    let best = complete.min_by(|(_, (_, a)), (_, (_, b))| a.total_cmp(b));
    best.map(|(order, _)| *order).ok_or_else(|| no_family(problem, device))
}

/// The cheapest choice for the problem's batch that sums in an order.
///
/// # Errors
/// [`NoKernel`] if there is none: the order is not one of [`invariant_order`] for this layer and device.
pub fn choose_in_order(
    problem: &Problem,
    device: &DeviceSpec,
    order: &Summation,
) -> Result<Choice, NoKernel> {
    check_size(problem, device)?;
    let stepped = Problem { m: step(problem.m), ..*problem };
    by_order(&stepped, device).remove(order).ok_or_else(|| no_family(problem, device))
}
