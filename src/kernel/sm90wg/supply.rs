//! The supply of the ring: each warpgroup requests its own weights and its share of its team's activations.
//!
//! There is no producer warp: it would take registers that the sums need, and moving them with `setmaxnreg`
//! is something that the driver ignores when it compiles to a file. One warp of each warpgroup, another
//! scheduler's for each, asks for the stage that all consumers have just left.
//! Weights of a stage are one bulk copy a column of 64 channels: its chunks lie one after the other along K.
//! Activations are one tensor copy per 64 inputs; rows and inputs that do not exist arrive as zeros and count
//! as bytes. The first stages' weights are requested before the kernel before this one has ended.
//! Source: PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor", "mbarrier", "griddepcontrol".

use super::{BOX_K, Wg};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, B64, Cmp, Pred};
use crate::kernel::params::{load_u32, load_u64};
use crate::kernel::stripe::{Segment, Stripe};

/// L2 policy of the weight stream: evict first. Source: what `createpolicy.fractional.L2::evict_first` gives.
const EVICT_FIRST: u64 = 0x12f0_0000_0000_0000;

/// What a warpgroup requests, and how far it is: some stages ahead of what the consumers compute, and maybe
/// in a later segment.
pub(super) struct Supply<'a> {
    wg: &'a Wg<'a>,
    /// Tiles of 64 channels of the warpgroup.
    tiles: u32,
    /// Boxes of a stage that a warpgroup requests at most.
    boxes: u32,
    /// Whether this warp requests.
    supplies: Reg<Pred>,
    stripe: Stripe,
    segment: Segment,
    /// Stages of the segment not yet requested; 0 when all of the stripe is, and in warps that do not request.
    to_request: Reg<B32>,
    /// The warpgroup's place in its team, and its team's first run of a stage.
    group: Reg<B32>,
    first_run: Reg<B32>,
    /// The stage to request into: where its weights and its first box go, its barrier, and the parity of the
    /// phase that frees it. Fresh barriers are free.
    weights_to: Reg<B32>,
    rows_to: Reg<B32>,
    full: Reg<B32>,
    parity: Reg<B32>,
    /// One past the last stage's barrier.
    full_end: Reg<B32>,
    /// Bytes that complete its part of a stage.
    bytes: Reg<B32>,
    /// The next stage's weights, per tile of 64 channels.
    weights: Vec<Reg<B64>>,
    /// First input and first row of its next boxes.
    x: Reg<B32>,
    y: Reg<B32>,
    map: Reg<B64>,
}

impl<'a> Supply<'a> {
    /// Emits what does not change from stage to stage.
    pub(super) fn new(a: &mut Asm, wg: &'a Wg<'a>) -> Self {
        let (config, geometry) = (wg.config, wg.geometry);
        let groups = config.warps_n / 4;
        let tiles = config.tiles_per_warp();
        let team_boxes = 2 * config.runs_per_stage;
        let boxes = team_boxes.div_ceil(groups);
        let [warpgroup, in_group, turn, team, group] = a.regs();
        a.shr_u32(warpgroup, wg.warp, 2);
        a.and_b32(in_group, wg.warp, 3);
        a.and_b32(turn, warpgroup, 3);
        let supplies = a.test_u32(Cmp::Eq, in_group, turn);
        if config.warps_k == 1 {
            a.mov_b32(team, 0);
            a.mov_b32(group, warpgroup);
        } else {
            a.shr_u32(team, warpgroup, groups.ilog2());
            a.and_b32(group, warpgroup, groups - 1);
        }
        let [first_run, weights_to, rows_to, box_index, bytes] = a.regs();
        a.mul_lo_u32(first_run, team, config.runs_per_stage);
        a.mad_lo_u32(weights_to, group, tiles * geometry.column_bytes, wg.smem);
        a.mad_lo_u32(weights_to, first_run, geometry.chunk_bytes, weights_to);
        a.add_u32(weights_to, weights_to, geometry.rows_bytes);
        a.mad_lo_u32(box_index, team, team_boxes, group);
        a.mad_lo_u32(rows_to, box_index, geometry.box_bytes, wg.smem);
        a.mov_b32(bytes, tiles * config.runs_per_stage * geometry.chunk_bytes);
        for n in 0..boxes {
            let has = a.test_u32(Cmp::Lt, group, team_boxes.saturating_sub(n * groups).min(groups));
            a.when(has, |a| a.add_u32(bytes, bytes, geometry.box_bytes));
        }
        let map = a.reg();
        a.cvta_param_u64(map, wg.extra.a_map);
        let [full, full_end, parity] = a.regs();
        a.add_u32(full, wg.smem, wg.plan.full.start);
        a.add_u32(full_end, full, 8 * config.stages);
        a.mov_b32(parity, 1);
        let (stripe, segment) = wg.emit_stripe(a);
        let supply = Self {
            wg,
            tiles,
            boxes,
            supplies,
            stripe,
            segment,
            to_request: a.reg(),
            group,
            first_run,
            weights_to,
            rows_to,
            full,
            parity,
            full_end,
            bytes,
            weights: (0..tiles).map(|_| a.reg()).collect(),
            x: a.reg(),
            y: a.reg(),
            map,
        };
        supply.emit_point(a);
        supply
    }

    /// Points at the start of its segment.
    fn emit_point(&self, a: &mut Asm) {
        let (wg, geometry, segment) = (self.wg, self.wg.geometry, &self.segment);
        let rounds = a.reg();
        wg.emit_rounds(a, segment, rounds);
        a.selp_b32(self.to_request, rounds, 0u32, self.supplies);
        let place = wg.emit_place(a, segment);
        let num_columns = load_u32(a, wg.params.num_chunk_columns);
        let b_ptr = load_u64(a, wg.params.b_ptr);
        let b_ptr = wg.params.emit_base(a, b_ptr, segment.block.as_ref());
        let [first_column, last_column, first] = a.regs();
        a.mul_lo_u32(first_column, place.column_tile, geometry.columns);
        a.mad_lo_u32(first_column, self.group, self.tiles, first_column);
        a.sub_u32(last_column, num_columns, 1);
        a.add_u32(first, segment.begin, self.first_run);
        if let Some(member) = &wg.member {
            // The second CTA of a cluster has the second half of the segment.
            let half = a.reg();
            a.sub_u32(half, segment.end, segment.begin);
            a.shr_u32(half, half, 1);
            a.mad_lo_u32(first, half, member.rank, first);
        }
        for (tile, weights) in self.weights.iter().enumerate() {
            // Columns past the last one repeat it; their results are never stored.
            let [column, chunk] = a.regs();
            a.add_u32(column, first_column, tile as u32);
            a.min_u32(column, column, last_column);
            a.mad_lo_u32(chunk, column, segment.k_tiles, first);
            a.mad_wide_u32(*weights, chunk, geometry.chunk_bytes, b_ptr);
        }
        a.mul_lo_u32(self.x, first, 128);
        a.mad_lo_u32(self.x, self.group, BOX_K, self.x);
        a.mov_b32(self.y, place.row_begin);
    }

    /// Requests the stripe's first stages, all but one, as far as the first segment has them. The weights go
    /// ahead of the wait for the kernel before this one.
    pub(super) fn emit_fill(&self, a: &mut Asm) {
        let geometry = self.wg.geometry;
        let most = self.wg.config.stages - 1;
        let [weights_done, rows_done] = ["weights_done", "rows_done"].map(|name| a.label(name));
        for stage in 0..most {
            let finished = a.test_u32(Cmp::Le, self.to_request, stage);
            a.when(finished, |a| a.bra(weights_done));
            self.emit_weights(a, stage);
        }
        a.bind(weights_done);
        // What the kernel before this one wrote may be read, and what it reads written, from here on.
        a.griddepcontrol_wait();
        for stage in 0..most {
            let finished = a.test_u32(Cmp::Le, self.to_request, stage);
            a.when(finished, |a| a.bra(rows_done));
            self.emit_rows(a, stage);
        }
        a.bind(rows_done);
        let requested = a.reg();
        a.min_u32(requested, self.to_request, most);
        a.sub_u32(self.to_request, self.to_request, requested);
        a.mad_lo_u32(self.weights_to, requested, geometry.stage_bytes, self.weights_to);
        a.mad_lo_u32(self.rows_to, requested, geometry.stage_bytes, self.rows_to);
        a.mad_lo_u32(self.full, requested, 8, self.full);
        self.emit_go_on(a);
        // A short first segment leaves stages to those after it.
        let [again, filled] = ["fill", "filled"].map(|name| a.label(name));
        let left = a.reg();
        a.sub_u32(left, requested, most);
        a.bind(again);
        let full = a.test_u32(Cmp::Eq, left, 0);
        let done = a.test_u32(Cmp::Eq, self.to_request, 0);
        a.or_pred(done, done, full);
        a.when(done, |a| a.bra(filled));
        self.emit_refill(a);
        a.add_u32(left, left, 1);
        a.bra(again);
        a.bind(filled);
    }

    /// Requests the next stage, if there is one, once all consumers have left the slot it goes to.
    pub(super) fn emit_refill(&self, a: &mut Asm) {
        let (wg, geometry) = (self.wg, self.wg.geometry);
        let skip = a.label("no_refill");
        let finished = a.test_u32(Cmp::Eq, self.to_request, 0);
        a.when(finished, |a| a.bra(skip));
        let empty = self.full.at(wg.plan.empty.start - wg.plan.full.start);
        wg.emit_wait(a, empty, self.parity);
        self.emit_weights(a, 0);
        self.emit_rows(a, 0);
        a.sub_u32(self.to_request, self.to_request, 1);
        a.add_u32(self.weights_to, self.weights_to, geometry.stage_bytes);
        a.add_u32(self.rows_to, self.rows_to, geometry.stage_bytes);
        a.add_u32(self.full, self.full, 8);
        let wraps = a.test_u32(Cmp::Eq, self.full, self.full_end);
        a.when(wraps, |a| {
            let ring = wg.config.stages * geometry.stage_bytes;
            a.sub_u32(self.weights_to, self.weights_to, ring);
            a.sub_u32(self.rows_to, self.rows_to, ring);
            a.sub_u32(self.full, self.full, 8 * wg.config.stages);
            a.xor_b32(self.parity, self.parity, 1);
        });
        self.emit_go_on(a);
        a.bind(skip);
    }

    /// After a segment's last stage comes the next segment, after the last of those the next kernel, which
    /// may request its own weights.
    fn emit_go_on(&self, a: &mut Asm) {
        let on = a.label("on");
        let more = a.test_u32(Cmp::Ne, self.to_request, 0);
        a.when(more, |a| a.bra(on));
        let next = self.stripe.emit_next(a, &self.segment);
        let exists = self.segment.emit_become(a, &next);
        self.emit_point(a);
        let last = a.reg();
        a.not_pred(last, exists);
        a.and_pred(last, last, self.supplies);
        a.when(last, |a| a.griddepcontrol_launch_dependents());
        a.bind(on);
    }

    /// Arms the barrier of the stage `ahead` for the warpgroup's bytes and requests its weights.
    fn emit_weights(&self, a: &mut Asm, ahead: u32) {
        let (wg, geometry) = (self.wg, self.wg.geometry);
        let full = self.full.at(8 * ahead);
        a.when(wg.elected, |a| {
            a.mbarrier_arrive_expect_tx_shared_cta_b64(full, self.bytes);
            for (tile, weights) in self.weights.iter().enumerate() {
                let offset = ahead * geometry.stage_bytes + tile as u32 * geometry.column_bytes;
                let bytes = wg.config.runs_per_stage * geometry.chunk_bytes;
                let to = self.weights_to.at(offset);
                a.cp_async_bulk_shared_global_hint(to, *weights, bytes, full, EVICT_FIRST);
            }
        });
        for weights in &self.weights {
            let step = u64::from(geometry.stage_runs * geometry.chunk_bytes);
            a.add_u64(*weights, *weights, step);
        }
    }

    /// Requests the warpgroup's share of the activations of the stage `ahead`.
    fn emit_rows(&self, a: &mut Asm, ahead: u32) {
        let (wg, geometry) = (self.wg, self.wg.geometry);
        let groups = wg.config.warps_n / 4;
        let team_boxes = 2 * wg.config.runs_per_stage;
        let full = self.full.at(8 * ahead);
        for n in 0..self.boxes {
            let at = a.reg();
            a.add_u32(at, self.x, n * groups * BOX_K);
            let left = team_boxes.saturating_sub(n * groups).min(groups);
            let issues = match left == groups {
                true => wg.elected,
                false => {
                    let has = a.test_u32(Cmp::Lt, self.group, left);
                    a.and_pred(has, has, wg.elected);
                    has
                }
            };
            let offset = ahead * geometry.stage_bytes + n * groups * geometry.box_bytes;
            let to = self.rows_to.at(offset);
            a.when(issues, |a| {
                a.cp_async_bulk_tensor_2d_shared_global(to, self.map, at, self.y, full);
            });
        }
        a.add_u32(self.x, self.x, 128 * geometry.stage_runs);
    }
}
