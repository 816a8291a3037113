//! Striped partitioning: which part of which tiles a CTA computes.
//!
//! **Stripes.** The layer is `num_tiles` tiles of `tile_n` columns, each `k_tiles` runs of 128 inputs
//! deep. Stripe `s` is runs `[s * stripe, (s + 1) * stripe)` of that order, so it covers the end of one
//! tile, whole tiles, and the start of another. The CTA that begins a tile owns it; every later stripe
//! that holds a part of it contributes that part as the first thing it does. A CTA therefore contributes
//! at most once, and stripe `s` has partial-sum slot `s`.
//! **Progress.** Owners wait for stripes with larger numbers. CTAs are numbered against the launch order
//! (`stripe = last - ctaid`), so what an owner waits for was launched before it: a grid larger than the
//! card, or two grids sharing it, cannot lock up.
//! **Order.** The owner adds the parts in stripe order, whatever order they arrive in: the result is the
//! same bits from run to run.
//! **Clusters.** Where CTAs work in clusters a stripe is a cluster's, and all of the above holds for clusters; how
//! the CTAs of one share its segments is the family's.
//! Source of the partition: Marlin paper, "Striped partitioning".

use super::params::{Params, emit_div, load_u32};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, Cmp, Pred, Special};

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
}

/// What is left of a CTA's stripe after a segment.
#[derive(Clone, Copy, Debug)]
pub struct Stripe {
    /// Runs of 128 inputs after the segment.
    left: Reg<B32>,
}

/// Emits the stripe of this CTA, or of its cluster if that has `cluster` CTAs, a power of two: its first segment
/// and what follows it.
pub fn emit_stripe(a: &mut Asm, params: &Params, cluster: u32) -> (Stripe, Segment) {
    let k_tiles = load_u32(a, params.k_tiles);
    let stripe = load_u32(a, params.stripe);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let [ctaid, num_ctas, stripe_idx, first, left, begin, end, before] = a.regs();
    a.mov_u32_special(ctaid, Special::CtaidX);
    a.mov_u32_special(num_ctas, Special::NctaidX);
    if cluster > 1 {
        a.shr_u32(ctaid, ctaid, cluster.ilog2());
        a.shr_u32(num_ctas, num_ctas, cluster.ilog2());
    }
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
    (Stripe { left }, Segment { stripe_idx, tile, begin, end, k_tiles })
}

impl Stripe {
    /// Emits the segment after `segment`: the start of the next tile, empty if nothing is left.
    pub fn emit_next(&self, a: &mut Asm, segment: &Segment) -> Segment {
        let [tile, begin, end] = a.regs();
        a.add_u32(tile, segment.tile, 1);
        a.mov_b32(begin, 0);
        a.min_u32(end, self.left, segment.k_tiles);
        a.sub_u32(self.left, self.left, end);
        Segment { tile, begin, end, ..*segment }
    }

    /// Emits the runs of the segment and of all that is left after it.
    pub fn emit_runs(&self, a: &mut Asm, segment: &Segment) -> Reg<B32> {
        let runs = a.reg();
        a.sub_u32(runs, segment.end, segment.begin);
        a.add_u32(runs, runs, self.left);
        runs
    }

    /// Emits whether there is a segment after the newest one.
    pub fn emit_has_next(&self, a: &mut Asm) -> Reg<Pred> {
        a.test_u32(Cmp::Ne, self.left, 0)
    }

    /// Emits one value if nothing is left after the newest segment and another if something is.
    pub fn emit_by_rest(&self, a: &mut Asm, value: Reg<B32>, nothing: u32, something: u32) {
        let last = a.test_u32(Cmp::Eq, self.left, 0);
        a.selp_b32(value, nothing, something, last);
    }
}

impl Segment {
    /// Emits `self = next` and whether there is such a segment.
    pub fn emit_become(&self, a: &mut Asm, next: &Segment) -> Reg<Pred> {
        a.mov_b32(self.tile, next.tile);
        a.mov_b32(self.begin, next.begin);
        a.mov_b32(self.end, next.end);
        a.test_u32(Cmp::Ne, self.end, 0)
    }
}
