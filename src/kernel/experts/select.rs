//! From a batch and a stack of experts to row blocks, a configuration and a grid.
//!
//! How many rows each expert gets only the device knows. The host knows how many there are in all, which bounds the
//! blocks ([`max_blocks`]), and how many an expert gets on average, from which blocks get their height ([`tile_m`]).
//! The product then is as good as one of a layer: blocks of as many rows as a tile, side by side. So the families' own
//! candidates and costs choose.

use super::Support;
use crate::kernel::problem::{Config, Kind, Problem, Rows};
use crate::kernel::select::{NoKernel, check, family_of};
use crate::kernel::{Cost, FAMILIES, KernelFamily};
use crate::target::DeviceSpec;
use crate::weights::Group;

/// Rows of the list that one product may have.
pub const MAX_LIST_ROWS: u64 = 1 << 30;
/// Items of one launch: what the kernel's division covers.
pub const MAX_ITEMS: u64 = 1 << 30;
/// Rows of a block: powers of two.
pub const BLOCK_ROWS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
/// Rows of a block that every device and every row layout has kernels for.
pub const COMMON_BLOCK_ROWS: u32 = 64;
/// What bringing rows into the list's order takes: a launch, and bytes per microsecond that are read and written.
const ORDER_US: f64 = 2.5;
const ORDER_BYTES_PER_US: f64 = 3.0e6;

/// The families that have kernels for experts on a device.
fn families(device: &DeviceSpec) -> impl Iterator<Item = (&'static dyn KernelFamily, Support)> {
    let runs = |family: &&&'static dyn KernelFamily| {
        family.runs_on(device.arch) && family.isa() <= device.isa
    };
    FAMILIES.iter().filter(runs).filter_map(|family| Some((*family, family.experts()?)))
}

/// Most rows of a block on a device.
pub fn tallest(device: &DeviceSpec) -> u32 {
    families(device).map(|(_, support)| support.tallest).max().unwrap_or(COMMON_BLOCK_ROWS)
}

/// Whether a device has kernels that want A in the list's order.
pub fn may_want_order(device: &DeviceSpec) -> bool {
    families(device).any(|(_, support)| support.in_order)
}

/// Rows of a block, at most `tallest`, for a list of `rows` rows of `tokens` tokens.
///
/// Low blocks cost about the same whatever their height, since the weights are converted for each, so they hold half as
/// much again as an expert gets on average, but not more than a token's one row for each token. Tall ones cost by
/// their rows, and on average half of an expert's last one is empty.
pub fn tile_m(rows: u64, tokens: u64, num_experts: u32, tallest: u32) -> u32 {
    let experts = u64::from(num_experts).clamp(1, rows.max(1));
    let wanted = match rows / experts {
        // Up to 8 rows cost the same tensor work.
        0..=42 => (3 * rows).div_ceil(2 * experts).max(8),
        43..=128 => 64,
        129..=512 => 128,
        _ => 256,
    };
    let fits = |tile_m: &u32| *tile_m == tallest || u64::from(*tile_m) >= wanted.min(tokens);
    BLOCK_ROWS.into_iter().find(fits).unwrap_or(COMMON_BLOCK_ROWS)
}

/// Row blocks that a list can have: each expert's last one may be short, if it has rows at all.
pub fn max_blocks(rows: u64, num_experts: u32, tile_m: u32) -> u64 {
    let (tile_m, experts) = (u64::from(tile_m), rows.min(num_experts.into()));
    (rows + experts * (tile_m - 1)) / tile_m
}

/// Whether a configuration wants A in the list's order.
pub fn wants_order(config: &Config) -> bool {
    family_of(config).experts().is_some_and(|support| support.in_order)
}

/// A product with experts to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertProblem {
    /// The operands.
    pub kind: Kind,
    /// Columns of C, outputs of an expert.
    pub n: u32,
    /// Columns of A, inputs of an expert.
    pub k: u32,
    /// How inputs share scales.
    pub group: Group,
    /// How rows of A and C can be accessed.
    pub rows: Rows,
    /// Rows of a block.
    pub tile_m: u32,
    /// Blocks that there can be.
    pub max_blocks: u64,
    /// Whether rows of A are looked up in the list, which has up to so many rows.
    pub listed_rows: Option<u64>,
}

/// A configuration for a product with experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertChoice {
    /// The kernel.
    pub config: Config,
    /// CTAs.
    pub num_ctas: u32,
    /// The prediction.
    pub cost: Cost,
}

impl ExpertProblem {
    /// One block, as a layer.
    fn block(&self) -> Problem {
        let Self { kind, n, k, group, rows, tile_m, .. } = *self;
        Problem { kind, m: tile_m.into(), n, k, group, rows }
    }

    /// The launch of a configuration: as many CTAs as a card holds at a time, or fewer.
    ///
    /// # Errors
    /// In words, if there are more items than the kernel counts.
    pub fn choice(&self, config: &Config, device: &DeviceSpec) -> Result<ExpertChoice, String> {
        let column_tiles = u64::from(self.n.div_ceil(config.tile_n));
        let items = column_tiles * self.max_blocks;
        if items > MAX_ITEMS {
            return Err(format!("{items} tiles, at most {MAX_ITEMS}: split the batch"));
        }
        let slots = u64::from(device.num_sms * config.ctas_per_sm).max(1);
        let stripe = u64::from(self.k.div_ceil(128)) * items.div_ceil(slots).max(1);
        // As many columns as all blocks have together; what a prediction is for is far below the cap.
        let n = (items * u64::from(config.tile_n)).clamp(1, 1 << 30) as u32;
        let stripe = stripe.min(u32::MAX.into()) as u32;
        let side_by_side = Problem { n, ..self.block() };
        let mut cost = family_of(config).cost(config, &side_by_side, device, stripe);
        if let Some(rows) = self.listed_rows.filter(|_| wants_order(config)) {
            let us = ORDER_US + 4.0 * rows as f64 * f64::from(self.k) / ORDER_BYTES_PER_US;
            (cost.total_us, cost.early_us) = (cost.total_us + us, cost.early_us + us);
            cost.fixed_us += us;
        }
        let num_ctas = items.clamp(1, slots) as u32;
        Ok(ExpertChoice { config: *config, num_ctas, cost })
    }

    /// All choices for a device, cheapest first.
    ///
    /// # Errors
    /// [`NoKernel`] if there are none, with the reason.
    pub fn ranked(&self, device: &DeviceSpec) -> Result<Vec<ExpertChoice>, NoKernel> {
        let block = self.block();
        let mut reason = format!("no family with experts runs on {} or fits", device.arch);
        let mut choices = Vec::new();
        let k_tiles = self.k.div_ceil(128);
        for (family, support) in families(device) {
            if self.tile_m > support.tallest {
                continue;
            }
            for preferred in family.candidates(&block) {
                let legal = |config: &Config| {
                    config.tile_m == self.tile_m
                        && k_tiles.is_multiple_of(family.stripe_step(config))
                        && check(config, device.arch).is_ok()
                };
                let Some(config) = preferred.into_iter().find(legal) else { continue };
                match self.choice(&config, device) {
                    Ok(choice) => choices.push(choice),
                    Err(why) => reason = why,
                }
            }
        }
        if choices.is_empty() {
            return Err(NoKernel::new(&block, device, reason));
        }
        let us = |choice: &ExpertChoice| choice.cost.total_us;
        choices.sort_by(|a, b| us(a).total_cmp(&us(b)).then(a.config.cmp(&b.config)));
        Ok(choices)
    }
}
