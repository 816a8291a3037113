//! The producer: one warp that requests every stage of the CTA's stripe; one of its lanes issues.
//!
//! Weights of a stage are one bulk copy a column of 64 channels: its chunks lie one after the other along K.
//! Activations are one tensor copy per 64 inputs; rows and inputs that do not exist arrive as zeros and count
//! as bytes. The first stages' weights are requested before the kernel before this one has ended.
//! Source: PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor", "mbarrier", "griddepcontrol".

use super::{Wg, emit_map, emit_weights_ptr};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, B64, Cmp};
use crate::kernel::params::load_u32;
use crate::kernel::stripe::{Segment, Stripe};

/// L2 policy of the weight stream: evict first. Source: what `createpolicy.fractional.L2::evict_first` gives.
const EVICT_FIRST: u64 = 0x12f0_0000_0000_0000;

/// What advances from stage to stage.
pub(super) struct Cursor {
    /// Stages of the segment not yet requested.
    rounds: Reg<B32>,
    /// First chunk of the next stage in the tile's first column.
    weights: Reg<B64>,
    /// The tile's last column that exists.
    last_column: Reg<B32>,
    /// Bytes from one column to the next.
    column_stride: Reg<B32>,
    /// First input and first row of the next stage's activations.
    x: Reg<B32>,
    y: Reg<B32>,
    /// Stages requested before the main loop.
    filled: Reg<B32>,
}

impl Wg<'_> {
    /// Makes the barriers and requests the weights of the first stages.
    pub(super) fn emit_start(&self, a: &mut Asm, segment: &Segment) -> Cursor {
        let stages = self.config.stages;
        a.section("barriers", |a| {
            a.when(self.issues, |a| {
                for stage in 0..stages {
                    a.mbarrier_init_shared_b64(self.smem.at(self.plan.full.start + 8 * stage), 1);
                    let arrivals = self.config.num_warps();
                    let empty = self.smem.at(self.plan.empty.start + 8 * stage);
                    a.mbarrier_init_shared_b64(empty, arrivals);
                }
                a.fence_mbarrier_init_release_cluster();
            });
        });
        a.section("weights of the first stages", |a| {
            let column_stride = a.reg();
            a.mul_lo_u32(column_stride, segment.k_tiles, self.geometry.chunk_bytes);
            let cursor = Cursor {
                rounds: a.reg(),
                weights: a.reg(),
                last_column: a.reg(),
                column_stride,
                x: a.reg(),
                y: a.reg(),
                filled: a.reg(),
            };
            self.emit_point(a, segment, &cursor);
            a.min_u32(cursor.filled, cursor.rounds, stages);
            let [stage, full, left] = a.regs();
            let weights: Reg<B64> = a.reg();
            a.mov_b64(weights, cursor.weights);
            a.mov_b32(stage, self.smem);
            a.add_u32(full, self.smem, self.plan.full.start);
            a.mov_b32(left, cursor.filled);
            let again = a.label("fill");
            a.bind(again);
            self.emit_weights(a, &cursor, weights, stage, full);
            a.add_u64(weights, weights, u64::from(self.geometry.column_bytes));
            a.add_u32(stage, stage, self.geometry.stage_bytes);
            a.add_u32(full, full, 8);
            a.sub_u32(left, left, 1);
            let more = a.test_u32(Cmp::Ne, left, 0);
            a.when(more, |a| a.bra(again));
            a.mov_b64(cursor.weights, weights);
            a.sub_u32(cursor.rounds, cursor.rounds, cursor.filled);
            cursor
        })
    }

    /// Points the cursor at a segment.
    fn emit_point(&self, a: &mut Asm, segment: &Segment, cursor: &Cursor) {
        let geometry = self.geometry;
        self.emit_rounds(a, segment, cursor.rounds);
        let place = self.emit_place(a, segment);
        let num_columns = load_u32(a, self.params.num_chunk_columns);
        let [column, chunk] = a.regs();
        a.mul_lo_u32(column, place.column_tile, geometry.columns);
        a.sub_u32(cursor.last_column, num_columns, column);
        a.sub_u32(cursor.last_column, cursor.last_column, 1);
        a.mad_lo_u32(chunk, column, segment.k_tiles, segment.begin);
        let ptr = emit_weights_ptr(a, &self.params);
        a.mad_wide_u32(cursor.weights, chunk, geometry.chunk_bytes, ptr);
        a.mul_lo_u32(cursor.x, segment.begin, 128);
        a.mov_b32(cursor.y, place.row_begin);
    }

    /// Arms a stage's barrier for all its bytes and requests its weights.
    fn emit_weights(
        &self,
        a: &mut Asm,
        cursor: &Cursor,
        weights: Reg<B64>,
        stage: Reg<B32>,
        full: Reg<B32>,
    ) {
        let geometry = self.geometry;
        a.when(self.issues, |a| {
            a.mbarrier_arrive_expect_tx_shared_cta_b64(full, geometry.transaction_bytes());
        });
        for column in 0..geometry.columns {
            let to = stage.at(geometry.rows_bytes + column * geometry.column_bytes);
            let from = match column {
                0 => weights,
                _ => {
                    // Columns past the last one repeat it; their results are never stored.
                    let exists = a.reg();
                    a.min_u32(exists, cursor.last_column, column);
                    let from = a.reg();
                    a.mad_wide_u32(from, exists, cursor.column_stride, weights);
                    from
                }
            };
            let bytes = geometry.column_bytes;
            a.when(self.issues, |a| {
                a.cp_async_bulk_shared_global_hint(to, from, bytes, full, EVICT_FIRST);
            });
        }
    }

    /// Requests a stage's activations from input `x` on.
    fn emit_rows(
        &self,
        a: &mut Asm,
        map: Reg<B64>,
        x: Reg<B32>,
        y: Reg<B32>,
        stage: Reg<B32>,
        full: Reg<B32>,
    ) {
        let geometry = self.geometry;
        for n in 0..2 * geometry.stage_runs {
            let to = stage.at(n * geometry.box_bytes);
            let at = a.reg();
            a.add_u32(at, x, n * super::BOX_K);
            a.when(self.issues, |a| {
                a.cp_async_bulk_tensor_2d_shared_global(to, map, at, y, full);
            });
        }
    }

    /// Requests everything that is left, as stages become free.
    pub(super) fn emit_produce(
        &self,
        a: &mut Asm,
        stripe: &Stripe,
        segment: &Segment,
        cursor: &Cursor,
    ) {
        let (geometry, stages) = (self.geometry, self.config.stages);
        let step_k = 128 * geometry.stage_runs;
        let [stage, full, empty, left, parity] = a.regs();
        let map = emit_map(a, self.extra.a_map);
        a.section("activations of the first stages", |a| {
            // What the kernel before this one wrote may be read from here on.
            a.griddepcontrol_wait();
            a.mov_b32(stage, self.smem);
            a.add_u32(full, self.smem, self.plan.full.start);
            a.mov_b32(left, cursor.filled);
            let again = a.label("fill_rows");
            a.bind(again);
            self.emit_rows(a, map, cursor.x, cursor.y, stage, full);
            a.add_u32(cursor.x, cursor.x, step_k);
            a.add_u32(stage, stage, geometry.stage_bytes);
            a.add_u32(full, full, 8);
            a.sub_u32(left, left, 1);
            let more = a.test_u32(Cmp::Ne, left, 0);
            a.when(more, |a| a.bra(again));
        });
        let [round, new_segment, done] =
            ["round", "new_segment", "requested"].map(|name| a.label(name));
        let last_full = a.reg();
        let [index, phases, bit] = a.regs();
        a.section("ring", |a| {
            a.add_u32(last_full, self.smem, self.plan.full.start + 8 * stages);
            // Bit per stage: parity of the phase that frees it; stages are free to begin with.
            a.mov_b32(phases, u32::MAX);
            a.mov_b32(bit, 1);
            a.shl_b32(bit, bit, cursor.filled);
            a.sub_u32(bit, bit, 1);
            a.xor_b32(phases, phases, bit);
            a.mov_b32(index, cursor.filled);
            self.emit_wrap(a, stage, full, index, last_full);
            a.bind(round);
            let finished = a.test_u32(Cmp::Eq, cursor.rounds, 0);
            a.when(finished, |a| a.bra(new_segment));
            a.add_u32(empty, full, self.plan.empty.start - self.plan.full.start);
            a.shr_u32(parity, phases, index);
            a.and_b32(parity, parity, 1);
            a.mov_b32(bit, 1);
            a.shl_b32(bit, bit, index);
            a.xor_b32(phases, phases, bit);
            self.emit_wait(a, empty.into(), parity);
            self.emit_weights(a, cursor, cursor.weights, stage, full);
            self.emit_rows(a, map, cursor.x, cursor.y, stage, full);
            a.add_u64(cursor.weights, cursor.weights, u64::from(geometry.column_bytes));
            a.add_u32(cursor.x, cursor.x, step_k);
            a.sub_u32(cursor.rounds, cursor.rounds, 1);
            a.add_u32(stage, stage, geometry.stage_bytes);
            a.add_u32(full, full, 8);
            a.add_u32(index, index, 1);
            self.emit_wrap(a, stage, full, index, last_full);
            a.bra(round);
            a.bind(new_segment);
            let next = stripe.emit_next(a, segment);
            let more = segment.emit_become(a, &next);
            a.unless(more, |a| a.bra(done));
            self.emit_point(a, segment, cursor);
            // Every segment begins at the first stage.
            self.emit_first_stage(a, stage, full, index);
            a.bra(round);
            a.bind(done);
            a.griddepcontrol_launch_dependents();
        });
    }

    fn emit_first_stage(&self, a: &mut Asm, stage: Reg<B32>, full: Reg<B32>, index: Reg<B32>) {
        a.mov_b32(stage, self.smem);
        a.add_u32(full, self.smem, self.plan.full.start);
        a.mov_b32(index, 0);
    }

    /// After the last stage comes the first.
    fn emit_wrap(
        &self,
        a: &mut Asm,
        stage: Reg<B32>,
        full: Reg<B32>,
        index: Reg<B32>,
        last_full: Reg<B32>,
    ) {
        let wraps = a.test_u32(Cmp::Eq, full, last_full);
        a.when(wraps, |a| self.emit_first_stage(a, stage, full, index));
    }
}
