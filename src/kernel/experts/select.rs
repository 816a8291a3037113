//! From a batch and a stack of experts to row blocks, a configuration and a grid.
//!
//! How many rows each expert gets only the device knows. The host knows how many there are in all, which bounds the
//! blocks ([`max_blocks`]), and how many an expert gets on average, from which blocks get their height ([`tile_m`]).
//! The product then is as good as one of a layer: blocks of as many rows as a tile, side by side. So the families' own
//! candidates and costs choose.

use crate::kernel::problem::{Config, Kind, Problem, Rows};
use crate::kernel::select::{NoKernel, check};
use crate::kernel::{Cost, FAMILIES};
use crate::target::DeviceSpec;
use crate::weights::Group;

/// Rows of the list that one product may have.
pub const MAX_LIST_ROWS: u64 = 1 << 30;
/// Items of one launch: what the kernel's division covers.
const MAX_ITEMS: u64 = 1 << 30;
/// Rows of a block: powers of two.
pub const BLOCK_ROWS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Rows of a block for a list of `rows` rows of `tokens` tokens: what holds half as much again as an expert gets on
/// average, but not more than a token's one row for each token.
///
/// Up to 8 rows cost the same tensor work, so that blocks are lower only where no expert can have more.
pub fn tile_m(rows: u64, tokens: u64, num_experts: u32) -> u32 {
    let experts = u64::from(num_experts).clamp(1, rows.max(1));
    let wanted = (3 * rows).div_ceil(2 * experts).max(8).min(tokens);
    BLOCK_ROWS.into_iter().find(|tile_m| u64::from(*tile_m) >= wanted).unwrap_or(64)
}

/// Row blocks that a list can have: each expert's last one may be short, if it has rows at all.
pub fn max_blocks(rows: u64, num_experts: u32, tile_m: u32) -> u64 {
    let (tile_m, experts) = (u64::from(tile_m), rows.min(num_experts.into()));
    (rows + experts * (tile_m - 1)) / tile_m
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
        let family = crate::kernel::select::family_of(config);
        let cost = family.cost(config, &side_by_side, device, stripe);
        Ok(ExpertChoice { config: *config, num_ctas: items.clamp(1, slots) as u32, cost })
    }

    /// All choices for a device, cheapest first.
    ///
    /// # Errors
    /// [`NoKernel`] if there are none, with the reason.
    pub fn ranked(&self, device: &DeviceSpec) -> Result<Vec<ExpertChoice>, NoKernel> {
        let block = self.block();
        let mut reason = format!("no family with experts runs on {} or fits", device.arch);
        let mut choices = Vec::new();
        for family in FAMILIES.iter().filter(|family| family.takes_experts()) {
            if !family.runs_on(device.arch) || family.isa() > device.isa {
                continue;
            }
            for preferred in family.candidates(&block) {
                let legal = |config: &Config| check(config, device.arch).is_ok();
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
