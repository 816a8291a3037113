//! The ring: who copies what where, one run of 128 inputs ahead of another.
//!
//! Each team has slots of its own: its warps' weights as they lie in the packed buffer, and its rows of
//! activations, xor-swizzled by 16-byte unit. A slot's copies are one group; a slot is refilled after the
//! team has met, which says both that all its copies into the next slot are complete and that all its reads
//! of this one are over.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy".

use super::{Slot, Sm80};
use crate::asm::Asm;
use crate::asm::reg::{Reg, SharedAddr};
use crate::asm::types::{B16, B32, B64, Cmp, Pred};
use crate::kernel::params::{load_u32, load_u64};
use crate::kernel::problem::Rows;
use crate::kernel::stream::ROW_BYTES;
use crate::kernel::stripe::{Segment, Stripe};
use crate::weights::CHUNK_CHANNELS;

/// What advances from run to run.
pub(super) struct Cursor {
    /// Runs not yet computed.
    pub(super) num_runs: Reg<B32>,
    /// Global address of the lane's next weights.
    weights: Reg<B64>,
    weights_step: Reg<B64>,
    /// Global address of the lane's next activations, in the tile's first row.
    rows: Reg<B64>,
    /// Inputs left from the lane's next activations on, in bytes of a row.
    row_bytes_left: Option<Reg<B32>>,
    /// Runs not yet requested.
    to_request: Reg<B32>,
    /// What `to_request` is when the CTA has requested all its weights: none, or never in this segment.
    quiet_at: Option<Reg<B32>>,
}

impl Sm80<'_> {
    /// Points the cursor at a segment and requests its first runs.
    pub(super) fn emit_fill(
        &self,
        a: &mut Asm,
        stripe: &Stripe,
        segment: &Segment,
        cursor: &Cursor,
    ) {
        a.section("fill the ring", |a| {
            self.emit_rewind(a, stripe, segment, cursor);
            if let (Some(experts), Some(block)) = (self.params.optional.experts, &segment.block) {
                // The weights are on their way while the rows are looked up.
                return self.emit_fill_in_turn(a, cursor, |a| {
                    experts.emit_tokens(a, &self.copies, block, &self.copy_from);
                });
            }
            for slot in 0..self.config.stages - 1 {
                self.emit_request(a, slot, cursor);
                a.cp_async_commit_group();
            }
        });
    }

    /// The first fill of all. Where grids may overlap, the weights are requested before the wait for the grid
    /// that may still be writing the activations.
    pub(super) fn emit_first_fill(
        &self,
        a: &mut Asm,
        stripe: &Stripe,
        segment: &Segment,
        cursor: &Cursor,
    ) {
        if !self.overlaps_grids || segment.block.is_some() {
            return self.emit_fill(a, stripe, segment, cursor);
        }
        a.section("fill the ring", |a| {
            self.emit_rewind(a, stripe, segment, cursor);
            self.emit_fill_in_turn(a, cursor, Asm::griddepcontrol_wait);
        });
    }

    /// Requests the first runs: the weights, then, after something else, the activations.
    fn emit_fill_in_turn(&self, a: &mut Asm, cursor: &Cursor, between: impl FnOnce(&mut Asm)) {
        let more: Vec<_> = (0..self.config.stages - 1)
            .map(|slot| {
                let more = self.emit_take(a, cursor);
                self.emit_request_weights(a, slot, cursor, more);
                a.add_u64(cursor.weights, cursor.weights, cursor.weights_step);
                more
            })
            .collect();
        between(a);
        for (slot, more) in more.into_iter().enumerate() {
            self.emit_request_rows(a, slot as u32, cursor, more);
            a.cp_async_commit_group();
        }
    }

    /// The registers of a cursor.
    pub(super) fn emit_cursor(&self, a: &mut Asm) -> Cursor {
        let weights_step: Reg<B64> = a.reg();
        let chunk_bytes = 4 * self.geometry.tile.bytes;
        a.mov_b64(weights_step, u64::from(chunk_bytes * self.config.warps_k));
        Cursor {
            num_runs: a.reg(),
            to_request: a.reg(),
            weights: a.reg(),
            weights_step,
            rows: a.reg(),
            row_bytes_left: (self.config.rows != Rows::Whole).then(|| a.reg()),
            quiet_at: self.overlaps_grids.then(|| a.reg()),
        }
    }

    /// Points the cursor at the team's first run of a segment.
    fn emit_rewind(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment, cursor: &Cursor) {
        let (config, geometry) = (self.config, self.geometry);
        let &Cursor { num_runs, to_request, weights, rows, row_bytes_left, .. } = cursor;
        let first = a.reg();
        a.add_u32(first, segment.begin, self.team);
        // Runs begin + team, begin + team + warps_k, … below end; team < warps_k, so this does not wrap.
        a.sub_u32(num_runs, segment.end, first);
        a.add_u32(num_runs, num_runs, config.warps_k - 1);
        a.shr_u32(num_runs, num_runs, config.warps_k.ilog2());
        a.mov_b32(to_request, num_runs);
        if let Some(quiet_at) = cursor.quiet_at {
            stripe.emit_by_rest(a, quiet_at, 0, u32::MAX);
        }

        // Weights: the warp's channels begin in chunk column `column`, some tiles into the chunk.
        let chunk_bytes = 4 * geometry.tile.bytes;
        let num_columns = load_u32(a, self.params.num_chunk_columns);
        let b_ptr = load_u64(a, self.params.b_ptr);
        let b_ptr = self.params.emit_base(a, b_ptr, segment.block.as_ref());
        let [warp_column, column, run] = a.regs();
        a.mad_lo_u32(warp_column, segment.tile, config.warps_n, self.warp_n);
        let warps_per_chunk = CHUNK_CHANNELS as u32 / 16 / config.tiles_per_warp();
        a.shr_u32(column, warp_column, warps_per_chunk.ilog2());
        // A tile may reach past the last column: those warps read the last one and write nothing.
        let last_column = a.reg();
        a.sub_u32(last_column, num_columns, 1);
        a.min_u32(column, column, last_column);
        a.mad_lo_u32(run, column, segment.k_tiles, first);
        a.mad_wide_u32(weights, run, chunk_bytes, b_ptr);
        if warps_per_chunk > 1 {
            let part = a.reg();
            a.and_b32(part, warp_column, warps_per_chunk - 1);
            a.mad_wide_u32(weights, part, geometry.warp_bytes, weights);
        }
        a.mad_wide_u32(weights, self.thread.lane, 16, weights);

        // Activations: the lane's unit in the tile's first row.
        let a_ptr = load_u64(a, self.params.a_ptr);
        let row_byte = a.reg();
        a.mul_lo_u32(row_byte, first, ROW_BYTES);
        a.mad_lo_u32(row_byte, self.copies.unit, 16, row_byte);
        let first_row = match segment.block {
            // Rows of the list are looked up.
            Some(_) => a_ptr,
            None => {
                a.mad_wide_u32(rows, self.thread.row_begin, self.row_stride, a_ptr);
                rows
            }
        };
        a.mad_wide_u32(rows, row_byte, 1, first_row);
        if let Some(left) = row_bytes_left {
            let k = load_u32(a, self.params.k);
            a.add_u32(left, k, k);
            a.sub_u32(left, left, row_byte);
        }
    }

    /// Requests the cursor's run into a slot, if there is one left, and advances the cursor. Inputs that
    /// do not exist become zeros.
    pub(super) fn emit_request(&self, a: &mut Asm, slot: u32, cursor: &Cursor) {
        let more = self.emit_take(a, cursor);
        if let Some(quiet_at) = cursor.quiet_at {
            let quiet = a.test_u32(Cmp::Eq, cursor.to_request, quiet_at);
            a.when(quiet, |a| a.griddepcontrol_launch_dependents());
        }
        self.emit_request_weights(a, slot, cursor, more);
        self.emit_request_rows(a, slot, cursor, more);
        a.add_u64(cursor.weights, cursor.weights, cursor.weights_step);
    }

    /// Takes a run from those to request; whether there is one.
    fn emit_take(&self, a: &mut Asm, cursor: &Cursor) -> Reg<Pred> {
        let more = a.test_u32(Cmp::Ne, cursor.to_request, 0);
        a.when(more, |a| a.sub_u32(cursor.to_request, cursor.to_request, 1));
        more
    }

    fn emit_request_weights(&self, a: &mut Asm, slot: u32, cursor: &Cursor, more: Reg<Pred>) {
        let geometry = self.geometry;
        let Slot { weights, .. } = self.slots[slot as usize];
        let full_pieces = geometry.warp_bytes / 512;
        let copy_weights = |a: &mut Asm, piece: u32| {
            let to = self.arithmetic.weights_lane.at(weights.start + 512 * piece).within(weights);
            let from = cursor.weights.at(512 * piece as i32);
            match self.policy {
                Some(policy) => a.cp_async_cg_16_hint(to, from, policy),
                None => a.cp_async_cg_16(to, from),
            }
        };
        a.when(more, |a| (0..full_pieces).for_each(|piece| copy_weights(a, piece)));
        if !geometry.warp_bytes.is_multiple_of(512) {
            let rest = a.reg();
            a.and_pred(rest, more, self.copies_rest);
            a.when(rest, |a| copy_weights(a, full_pieces));
        }
    }

    fn emit_request_rows(&self, a: &mut Asm, slot: u32, cursor: &Cursor, more: Reg<Pred>) {
        let config = self.config;
        let Slot { rows, .. } = self.slots[slot as usize];
        let guard = match self.copies.takes_part {
            Some(copies) => {
                let guard = a.reg();
                a.and_pred(guard, more, copies);
                guard
            }
            None => more,
        };
        // Bytes of the lane's unit that lie inside the row: 0 to 16.
        let inside = cursor.row_bytes_left.map(|left| {
            let inside = a.reg();
            a.max_s32(inside, left, 0);
            a.min_u32(inside, inside, 16);
            a.sub_u32(left, left, config.warps_k * ROW_BYTES);
            inside
        });
        for (c, copy_from) in self.copy_from.iter().enumerate() {
            let from = match config.kind.experts {
                false => {
                    let [wide, from] = a.regs();
                    a.cvt_u64_u32(wide, *copy_from);
                    a.add_u64(from, cursor.rows, wide);
                    from
                }
                true => {
                    let from = a.reg();
                    a.mad_wide_u32(from, *copy_from, self.row_stride, cursor.rows);
                    from
                }
            };
            let (base, offset) = self.copies.to(c as u32);
            let to = base.at(rows.start + offset).within(rows);
            match (config.rows, inside) {
                (Rows::Element, Some(inside)) => {
                    self.emit_copy_elements(a, guard, to, from, inside);
                }
                (_, Some(inside)) => a.when(guard, |a| a.cp_async_cg_16_zfill(to, from, inside)),
                (_, None) => a.when(guard, |a| a.cp_async_cg_16(to, from)),
            }
        }
        let row_step = u64::from(config.warps_k * ROW_BYTES);
        a.add_u64(cursor.rows, cursor.rows, row_step);
    }

    /// Copies up to 8 elements one by one through registers, zeros after them.
    fn emit_copy_elements(
        &self,
        a: &mut Asm,
        guard: Reg<Pred>,
        to: SharedAddr,
        from: Reg<B64>,
        bytes: Reg<B32>,
    ) {
        let halves: [Reg<B16>; 8] = a.regs();
        let zero: Reg<B32> = a.reg();
        a.mov_b32(zero, 0);
        for (e, pair) in halves.chunks(2).enumerate() {
            a.mov_b32_unpack([pair[0], pair[1]], zero);
            for (n, half) in pair.iter().enumerate() {
                let byte = 4 * e as u32 + 2 * n as u32;
                let inside = a.test_u32(Cmp::Gt, bytes, byte);
                a.and_pred(inside, inside, guard);
                a.when(inside, |a| a.ld_global_b16(*half, from.at(byte as i32)));
            }
        }
        let words: [Reg<B32>; 4] = a.regs();
        for (word, pair) in words.iter().zip(halves.chunks(2)) {
            a.mov_b32_pack(*word, [pair[0], pair[1]]);
        }
        a.when(guard, |a| a.st_shared_v4_b32(to, words));
    }
}
