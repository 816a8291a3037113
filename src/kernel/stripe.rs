//! Striped partitioning: which part of which tiles a CTA computes.
//!
//! **Stripes.** The layer is `num_tiles` tiles of `tile_n` columns, each `k_tiles` runs of 128 inputs
//! deep. Stripe `s` is runs `[s * stripe, (s + 1) * stripe)` of that order, so it covers the end of one
//! tile, whole tiles, and the start of another. The CTA that begins a tile owns it; every later stripe
//! that holds a part of it contributes that part as the first thing it does. A CTA therefore contributes
//! at most once, and stripe `s` has partial-sum slot `s`.
//! **Dealt tiles.** A family whose stripes run over the rows too deals whole tiles out first, tile
//! `first + i * CTAs + s` to stripe `s`, so that CTAs stay in step and read neighbouring tiles at the same time; only
//! the tiles before `first` are cut into shares as above. A CTA computes its share before its whole tiles: by the
//! time it is done, nobody waits for a sum. [`Deal`] says how many of each.
//! **Progress.** Owners wait for stripes with larger numbers. CTAs are numbered against the launch order
//! (`stripe = last - ctaid`), so what an owner waits for was launched before it: a grid larger than the
//! card, or two grids sharing it, cannot lock up.
//! **Order.** The owner adds the parts in stripe order, whatever order they arrive in: the result is the
//! same bits from run to run.
//! **Clusters.** Where CTAs work in clusters a stripe is a cluster's, and all of the above holds for clusters; how
//! the CTAs of one share its segments is the family's.
//! Source of the partition: Marlin paper, "Striped partitioning".

use super::experts::{Block, Items};
use super::params::{Params, emit_div, load_u32};
use crate::asm::Asm;
use crate::asm::reg::{Param, Reg};
use crate::asm::types::{B32, Cmp, Pred, Special};

/// How a grid's tiles are divided between shares and whole tiles. All in units of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Tiles that are cut into shares; those after them are dealt out whole.
    pub shared_tiles: u32,
    /// Runs of a share; 0 if no tile is shared.
    pub share: u32,
}

impl Deal {
    /// Everything is cut into stripes of `stripe` runs.
    pub fn stripes(num_tiles: u32, stripe: u32) -> Self {
        Self { shared_tiles: num_tiles, share: stripe }
    }

    /// Each of `num_ctas` CTAs takes `stripe` runs of tiles of `k_tiles`: whole tiles, and a share of at least half a
    /// tile, because a tile in more parts costs more sums than it saves time.
    pub fn whole_first(num_tiles: u32, num_ctas: u32, stripe: u32, k_tiles: u32) -> Self {
        let (mut whole, mut share) = (stripe / k_tiles, stripe % k_tiles);
        if share == 0 {
            return Self { shared_tiles: 0, share: 0 };
        }
        if whole > 0 && 2 * share < k_tiles {
            whole -= 1;
            share += k_tiles;
        }
        Self { shared_tiles: num_tiles.saturating_sub(whole.saturating_mul(num_ctas)), share }
    }
}

/// Where the tiles that are dealt out whole lie: entry parameters, and who takes them.
#[derive(Clone, Copy, Debug)]
pub struct Dealt {
    /// The first of them: [`Deal::shared_tiles`].
    pub first: Param,
    /// One past the last.
    pub end: Param,
    /// CTAs that take one together, a power of two.
    pub cluster: u32,
}

impl Dealt {
    /// The number of this CTA, or of its cluster, and of all of them.
    fn emit_place(&self, a: &mut Asm) -> [Reg<B32>; 2] {
        let [idx, count] = a.regs();
        a.mov_u32_special(idx, Special::CtaidX);
        a.mov_u32_special(count, Special::NctaidX);
        if self.cluster > 1 {
            a.shr_u32(idx, idx, self.cluster.ilog2());
            a.shr_u32(count, count, self.cluster.ilog2());
        }
        [idx, count]
    }

    /// The whole tile after a segment that ends a share or is a whole tile, and whether there is one.
    fn emit_whole_after(&self, a: &mut Asm, segment: &Segment) -> (Reg<B32>, Reg<Pred>) {
        let first = load_u32(a, self.first);
        let num_tiles = load_u32(a, self.end);
        let [_, count] = self.emit_place(a);
        let [after_share, whole] = a.regs();
        a.add_u32(after_share, first, segment.stripe_idx);
        a.add_u32(whole, segment.tile, count);
        let in_share = a.test_u32(Cmp::Lt, segment.tile, first);
        a.selp_b32(whole, after_share, whole, in_share);
        let exists = a.test_u32(Cmp::Lt, whole, num_tiles);
        (whole, exists)
    }
}

/// The part of a stripe that lies in one tile, and what the CTA needs to know about its stripe.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The stripe's number.
    pub stripe_idx: Reg<B32>,
    /// The tile along n.
    pub tile: Reg<B32>,
    /// First run of 128 inputs, within the tile.
    pub begin: Reg<B32>,
    /// One past the last run, within the tile.
    pub end: Reg<B32>,
    /// Runs of a whole tile.
    pub k_tiles: Reg<B32>,
    /// The rows, if there are experts; else the grid says which.
    pub block: Option<Block>,
}

/// What is left of a CTA's stripe after a segment.
#[derive(Clone, Copy, Debug)]
// A few of them while a kernel is emitted.
#[allow(clippy::large_enum_variant)]
pub enum Stripe {
    /// Runs of 128 inputs after the segment, whole tiles that are dealt out apart.
    Runs {
        /// How many.
        left: Reg<B32>,
        /// Those whole tiles.
        dealt: Option<Dealt>,
    },
    /// Items of a product with experts.
    Items(Items),
}

/// Emits this CTA's stripe: its first segment and what follows it.
pub fn emit_stripe(a: &mut Asm, params: &Params) -> (Stripe, Segment) {
    let k_tiles = load_u32(a, params.k_tiles);
    let stripe = load_u32(a, params.stripe);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let [ctaid, num_ctas, stripe_idx, first, left, begin, end, before] = a.regs();
    a.mov_u32_special(ctaid, Special::CtaidX);
    a.mov_u32_special(num_ctas, Special::NctaidX);
    a.sub_u32(stripe_idx, num_ctas, ctaid);
    a.sub_u32(stripe_idx, stripe_idx, 1);
    a.mul_lo_u32(first, stripe_idx, stripe);
    a.sub_u32(left, num_runs, first);
    a.min_u32(left, left, stripe);
    let tile = emit_div(a, first, multiplier, shift);
    a.mul_lo_u32(before, tile, k_tiles);
    a.sub_u32(begin, first, before);
    a.add_u32(end, begin, left);
    a.min_u32(end, end, k_tiles);
    a.add_u32(left, left, begin);
    a.sub_u32(left, left, end);
    let segment = Segment { stripe_idx, tile, begin, end, k_tiles, block: None };
    (Stripe::Runs { left, dealt: None }, segment)
}

/// The same for a grid that deals whole tiles out; the stripe is the cluster's where CTAs take tiles together.
pub fn emit_dealt_stripe(a: &mut Asm, params: &Params, dealt: Dealt) -> (Stripe, Segment) {
    let k_tiles = load_u32(a, params.k_tiles);
    let share = load_u32(a, params.stripe);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let first_whole = load_u32(a, dealt.first);
    let [idx, count] = dealt.emit_place(a);
    let [stripe_idx, first, left, tile, begin, end, before, whole] = a.regs();
    a.sub_u32(stripe_idx, count, idx);
    a.sub_u32(stripe_idx, stripe_idx, 1);
    a.mul_lo_u32(first, stripe_idx, share);
    a.min_u32(first, first, num_runs);
    a.sub_u32(left, num_runs, first);
    a.min_u32(left, left, share);
    let shared = emit_div(a, first, multiplier, shift);
    a.mul_lo_u32(before, shared, k_tiles);
    a.sub_u32(begin, first, before);
    a.add_u32(end, begin, left);
    a.min_u32(end, end, k_tiles);
    // Without a share the first segment is a whole tile.
    let no_share = a.test_u32(Cmp::Eq, left, 0);
    a.add_u32(left, left, begin);
    a.sub_u32(left, left, end);
    a.add_u32(whole, first_whole, stripe_idx);
    a.selp_b32(tile, whole, shared, no_share);
    a.selp_b32(begin, 0u32, begin, no_share);
    a.selp_b32(end, k_tiles, end, no_share);
    a.selp_b32(left, 0u32, left, no_share);
    let segment = Segment { stripe_idx, tile, begin, end, k_tiles, block: None };
    (Stripe::Runs { left, dealt: Some(dealt) }, segment)
}

impl Stripe {
    /// Emits the segment after `segment`: the start of the next tile, empty if nothing is left.
    pub fn emit_next(&self, a: &mut Asm, segment: &Segment) -> Segment {
        let (left, dealt) = match *self {
            Stripe::Runs { left, dealt } => (left, dealt),
            Stripe::Items(items) => return items.emit_next(a, segment),
        };
        let [tile, begin, end] = a.regs();
        a.add_u32(tile, segment.tile, 1);
        a.mov_b32(begin, 0);
        a.min_u32(end, left, segment.k_tiles);
        a.sub_u32(left, left, end);
        if let Some(dealt) = dealt {
            // Once the share is done, the next whole tile, if there is one.
            let (whole, takes) = dealt.emit_whole_after(a, segment);
            let done = a.test_u32(Cmp::Eq, end, 0);
            a.and_pred(takes, takes, done);
            a.selp_b32(tile, whole, tile, takes);
            a.selp_b32(end, segment.k_tiles, end, takes);
        }
        Segment { tile, begin, end, ..*segment }
    }

    /// Emits whether there is a segment after `segment`, the newest one.
    pub fn emit_has_next(&self, a: &mut Asm, segment: &Segment) -> Reg<Pred> {
        let (left, dealt) = match *self {
            Stripe::Runs { left, dealt } => (left, dealt),
            Stripe::Items(items) => return items.emit_has_next(a),
        };
        let more = a.test_u32(Cmp::Ne, left, 0);
        if let Some(dealt) = dealt {
            let (_, exists) = dealt.emit_whole_after(a, segment);
            a.or_pred(more, more, exists);
        }
        more
    }

    /// Emits one value if nothing is left after the newest segment and another if something is.
    pub fn emit_by_rest(&self, a: &mut Asm, value: Reg<B32>, nothing: u32, something: u32) {
        let last = match *self {
            Stripe::Runs { left, .. } => a.test_u32(Cmp::Eq, left, 0),
            Stripe::Items(items) => items.emit_is_last(a),
        };
        a.selp_b32(value, nothing, something, last);
    }
}

impl Segment {
    /// Emits `self = next` and whether there is such a segment.
    pub fn emit_become(&self, a: &mut Asm, next: &Segment) -> Reg<Pred> {
        a.mov_b32(self.tile, next.tile);
        a.mov_b32(self.begin, next.begin);
        a.mov_b32(self.end, next.end);
        if let (Some(block), Some(next)) = (self.block, next.block) {
            block.emit_become(a, &next);
        }
        a.test_u32(Cmp::Ne, self.end, 0)
    }
}
