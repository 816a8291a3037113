//! After the main loop: sums of teams and of CTAs are added in fragment order, and rows are written.
//!
//! Teams other than the first hand their sums over through shared memory, CTAs that do not own the tile
//! through scratch memory; both are written and read by the same thread positions, 16 bytes at a time. The
//! owner rounds to fp16, transposes 8x8 fragments into rows of a staging buffer and writes those.
//! Source: PTX ISA, "stmatrix", "Memory Consistency Model" (release and acquire patterns).

use super::{CONSUMERS, OWNERS, Place, WARPGROUP, Wg};
use crate::asm::Asm;
use crate::asm::reg::{Param, Reg};
use crate::asm::types::{B32, B64, Cmp, F32, Pred};
use crate::kernel::elements::{emit_load_element, emit_round_into};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::experts::RowWeights;
use crate::kernel::params::{load_u32, load_u64};
use crate::kernel::problem::{Config, Kind};
use crate::kernel::reduction::{emit_lock_ptr_in, emit_num_helpers, emit_spin};
use crate::kernel::stripe::{Segment, Stripe};
use crate::weights::{Activation, Group};

/// Rows of the tile that this CTA writes: CTAs of a cluster own equal parts.
pub(super) fn own_rows(config: &Config) -> u32 {
    config.tile_m / config.cluster_k
}

/// Rows of C in the staging buffer at a time.
fn staging_rows(config: &Config) -> u32 {
    own_rows(config).next_multiple_of(16).min(if own_rows(config) > 128 { 16 } else { 32 })
}

/// Bytes of a staging row: the channels of a warpgroup, and 16 bytes so that 8 rows lie in 32 banks.
fn staging_pitch(config: &Config) -> u32 {
    2 * 64 * config.tiles_per_warp() + 16
}

pub(super) fn staging_bytes(config: &Config) -> u32 {
    config.warps_n / 4 * staging_rows(config) * staging_pitch(config)
}

/// Items of 16 bytes that a thread's sums of the own rows are.
pub(super) fn num_items(config: &Config) -> u32 {
    config.tiles_per_warp() * own_rows(config) / 8
}

pub(super) fn exchange_bytes(config: &Config) -> u32 {
    let slots = config.warps_k * config.cluster_k - 1;
    slots * num_items(config) * 16 * 32 * config.warps_n
}

impl Wg<'_> {
    /// Adds up and writes a segment's sums. The consumers leave it together.
    pub(super) fn emit_output(
        &self,
        a: &mut Asm,
        sums: &Accumulators,
        stripe: &Stripe,
        segment: &Segment,
        place: &Place,
    ) {
        let done = a.label("output_done");
        let config = self.config;
        let owner_threads = 32 * config.warps_n;
        let in_team = a.reg();
        let mut sums = sums.clone();
        if let Some(member) = &self.member {
            a.section("sums of the cluster", |a| {
                sums = self.emit_handover(a, member, &sums, (stripe, segment), in_team, done);
                a.mad_lo_u32(place.row_begin, member.rank, own_rows(config), place.row_begin);
                // The second CTA's rows may all lie past the last one.
                let m = load_u32(a, self.params.m);
                a.min_u32(place.row_begin, place.row_begin, m);
            });
        } else if config.warps_k > 1 {
            a.section("sums of the other teams", |a| {
                self.emit_exchange(a, &sums, in_team, done);
            });
        } else {
            a.mov_b32(in_team, self.tid);
        }
        if segment.block.is_some() {
            // No other CTA has a part of the tile.
            a.section("output", |a| self.emit_rows_out(a, &sums, place));
            if config.warps_k > 1 {
                a.bind(done);
            }
            return;
        }
        let [own, output] = ["own", "output"].map(|name| a.label(name));
        let first = a.section("whose tile", |a| {
            let first = a.test_u32(Cmp::Eq, in_team, 0);
            let owns = a.test_u32(Cmp::Eq, segment.begin, 0);
            a.when(owns, |a| a.bra(own));
            first
        });
        let slot_bytes = 4 * config.tile_m * config.tile_n;
        let own_bytes = slot_bytes / config.cluster_k;
        let items: Vec<&[Reg<F32>; 4]> = sums.iter().flatten().collect();
        let item_bytes = 16 * owner_threads;
        let slot_ptr = |a: &mut Asm, slot: Reg<B32>| {
            let scratch = load_u64(a, self.params.scratch_ptr);
            let ptr: Reg<B64> = a.reg();
            a.mad_wide_u32(ptr, slot, slot_bytes, scratch);
            a.mad_wide_u32(ptr, in_team, 16, ptr);
            if let Some(member) = &self.member {
                a.mad_wide_u32(ptr, member.rank, own_bytes, ptr);
            }
            ptr
        };
        // Each CTA of a cluster adds up its own part of a tile: with a lock of its own.
        let lock_ptr = |a: &mut Asm| {
            let row = self.member.map(|member| member.rank);
            emit_lock_ptr_in(a, &self.params, segment, row)
        };
        a.section("contribute to another CTA's tile", |a| {
            let slot = slot_ptr(a, segment.stripe_idx);
            for (n, item) in items.iter().enumerate() {
                a.st_global_v4_f32(slot.at((n as u32 * item_bytes) as i32), **item);
            }
            let lock = lock_ptr(a);
            a.bar_sync_n(OWNERS, owner_threads);
            a.when(first, |a| a.red_release_gpu_global_add_u32(lock, 1u32));
            a.bra(done);
        });
        a.bind(own);
        a.section("wait for the other CTAs", |a| {
            let num_helpers = emit_num_helpers(a, &self.params, segment);
            let alone = a.test_u32(Cmp::Eq, num_helpers, 0);
            a.when(alone, |a| a.bra(output));
            let lock = lock_ptr(a);
            let [spin, locked] = ["spin", "locked"].map(|name| a.label(name));
            a.unless(first, |a| a.bra(locked));
            emit_spin(a, spin, lock, num_helpers);
            a.bind(locked);
            a.bar_sync_n(OWNERS, owner_threads);
            a.when(first, |a| a.st_global_b32(lock, 0u32));
            let next_slot = a.reg();
            a.add_u32(next_slot, segment.stripe_idx, 1);
            let slot = slot_ptr(a, next_slot);
            let next = a.label("next_part");
            a.bind(next);
            for (n, item) in items.iter().enumerate() {
                let part: [Reg<F32>; 4] = a.regs();
                a.ld_global_v4_f32(part, slot.at((n as u32 * item_bytes) as i32));
                for (sum, part) in item.iter().zip(part) {
                    a.add_f32(*sum, *sum, part);
                }
            }
            a.add_u64(slot, slot, u64::from(slot_bytes));
            a.sub_u32(num_helpers, num_helpers, 1);
            let more = a.test_u32(Cmp::Ne, num_helpers, 0);
            a.when(more, |a| a.bra(next));
        });
        a.bind(output);
        a.section("output", |a| self.emit_rows_out(a, &sums, place));
        a.bind(done);
    }

    /// Teams other than the first store their sums and are done; the first adds them in team order.
    fn emit_exchange(
        &self,
        a: &mut Asm,
        sums: &Accumulators,
        in_team: Reg<B32>,
        done: crate::asm::reg::Label,
    ) {
        let config = self.config;
        let team_threads = 32 * config.warps_n;
        let threads = config.num_threads();
        let team_bytes = num_items(config) * 16 * team_threads;
        let [team, base] = a.regs();
        a.shr_u32(team, self.tid, team_threads.ilog2());
        a.and_b32(in_team, self.tid, team_threads - 1);
        a.mad_lo_u32(base, in_team, 16, self.smem);
        // All teams meet at the same two barriers: around the sums in shared memory.
        let [stored, added] = ["stored", "added"].map(|name| a.label(name));
        let is_first = a.test_u32(Cmp::Eq, team, 0);
        a.when(is_first, |a| a.bra(stored));
        let region = self.plan.exchange;
        let [before, to] = a.regs();
        a.sub_u32(before, team, 1);
        a.mad_lo_u32(to, before, team_bytes, base);
        for (n, item) in sums.iter().flatten().enumerate() {
            let place = to.at(region.start + n as u32 * 16 * team_threads).within(region);
            a.st_shared_v4_f32(place, *item);
        }
        a.bind(stored);
        a.bar_sync_n(CONSUMERS, threads);
        a.unless(is_first, |a| a.bra(added));
        for other in 0..config.warps_k - 1 {
            for (n, item) in sums.iter().flatten().enumerate() {
                let offset = region.start + other * team_bytes + n as u32 * 16 * team_threads;
                let part: [Reg<F32>; 4] = a.regs();
                a.ld_shared_v4_f32(part, base.at(offset).within(region));
                for (sum, part) in item.iter().zip(part) {
                    a.add_f32(*sum, *sum, part);
                }
            }
        }
        a.bind(added);
        a.bar_sync_n(CONSUMERS, threads);
        a.unless(is_first, |a| a.bra(done));
    }

    /// Rounds, transposes and writes the tile.
    fn emit_rows_out(&self, a: &mut Asm, sums: &Accumulators, place: &Place) {
        let config = self.config;
        let tiles = config.tiles_per_warp();
        let pitch = staging_pitch(config);
        let staging = self.plan.staging;
        let [group, warp, matrix, row, half, store, load, in_group] = a.regs();
        // The warpgroup's part of the staging buffer.
        a.shr_u32(group, self.warp, 2);
        a.and_b32(warp, self.warp, 3);
        let part = a.reg();
        a.mad_lo_u32(part, group, staging_rows(config) * pitch, self.smem);
        // stmatrix: lane 8 i + r gives row r of matrix i: channels 8 (i % 2), rows 8 (i / 2).
        a.shr_u32(matrix, self.lane, 3);
        a.and_b32(row, self.lane, 7);
        a.and_b32(half, matrix, 1);
        a.shr_u32(matrix, matrix, 1);
        a.mad_lo_u32(row, matrix, 8, row);
        a.mad_lo_u32(store, row, pitch, part);
        a.mad_lo_u32(store, half, 16, store);
        a.mad_lo_u32(store, warp, 32 * tiles, store);
        // Rows out: 8 bytes, four channels, a thread.
        let quads = 16 * tiles;
        let rows_per_pass = 128 / quads;
        let [quad, out_row, channel, left] = a.regs();
        a.and_b32(in_group, self.tid, 127);
        a.and_b32(quad, in_group, quads - 1);
        a.shr_u32(out_row, in_group, quads.ilog2());
        a.mad_lo_u32(load, out_row, pitch, part);
        a.mad_lo_u32(load, quad, 8, load);
        let n = load_u32(a, self.params.n);
        let m = place.block.is_none().then(|| load_u32(a, self.params.m));
        let stride = load_u32(a, self.params.c_stride_bytes);
        let c_ptr = load_u64(a, self.params.c_ptr);
        a.mul_lo_u32(channel, place.column_tile, config.tile_n);
        a.mad_lo_u32(channel, group, 64 * tiles, channel);
        a.mad_lo_u32(channel, quad, 4, channel);
        // Rows that exist from this thread's first one on, none if its channels do not exist.
        let exists = a.test_u32(Cmp::Lt, channel, n);
        match (place.block, m) {
            (Some(block), _) => a.mov_b32(left, block.num_rows),
            (None, Some(m)) => a.sub_u32(left, m, place.row_begin),
            (None, None) => unreachable!("rows end with the block or with the batch"),
        }
        a.selp_b32(left, left, 0u32, exists);
        let out: Reg<B64> = a.reg();
        let first_row = a.reg();
        a.add_u32(first_row, place.row_begin, out_row);
        a.mad_wide_u32(out, first_row, stride, c_ptr);
        a.mad_wide_u32(out, channel, 2, out);
        let step: Reg<B64> = a.reg();
        a.mul_wide_u32(step, stride, rows_per_pass);
        let activation = config.kind.activation;
        let finish = Finish::new(a, self, place);
        let barrier = a.reg();
        a.add_u32(barrier, group, WARPGROUP);
        let fragments = own_rows(config) / 8;
        let per_batch = staging_rows(config) / 8;
        for first in (0..fragments).step_by(per_batch as usize) {
            let count = per_batch.min(fragments - first);
            a.bar_sync_n(barrier, 128);
            for pair in (0..count).step_by(2) {
                for (tile, sums) in sums.iter().enumerate() {
                    let words: [Reg<B32>; 4] = a.regs();
                    for j in 0..2 {
                        // An odd last fragment stands in for the missing one; nobody reads those rows.
                        let index = (first + pair + j).min(fragments - 1) as usize;
                        let [d0, d1, d2, d3] = finish.emit(a, (tile, index), sums[index]);
                        emit_round_into(a, activation, words[2 * j as usize], d1, d0);
                        emit_round_into(a, activation, words[2 * j as usize + 1], d3, d2);
                    }
                    let offset = staging.start + 8 * pair * pitch + 32 * tile as u32;
                    let to = store.at(offset).within(staging);
                    a.stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(to, words);
                }
            }
            a.bar_sync_n(barrier, 128);
            for pass in 0..(8 * count) / rows_per_pass {
                let row = a.reg();
                a.add_u32(row, out_row, 8 * first + pass * rows_per_pass);
                let writes = a.test_u32(Cmp::Lt, row, left);
                let words: [Reg<B32>; 2] = a.regs();
                let from = load.at(staging.start + pass * rows_per_pass * pitch).within(staging);
                a.ld_shared_v2_b32(words, from);
                a.when(writes, |a| a.st_global_v2_b32(out, words));
                a.add_u64(out, out, step);
            }
        }
    }
}

/// What is done to sums before they are rounded: they are multiplied by their columns' scales, if those are per column,
/// and the layer's factor; bias and residual are added. One fragment after the other, so that few values live at a time.
struct Finish {
    /// Of each tile, channels g and g + 8. None if nothing is done.
    columns: Vec<[Column; 2]>,
    residual: Option<Residual>,
    /// What rows are multiplied by after all of that, and how many exist from the thread's first one on.
    row_weights: Option<(RowWeights, Reg<B32>)>,
}

impl Finish {
    fn new(a: &mut Asm, wg: &Wg<'_>, place: &Place) -> Self {
        let config = wg.config;
        let per_column = config.group == Group::PerColumn;
        let optional = wg.params.optional;
        let Kind { activation, factor, bias, residual, experts, .. } = config.kind;
        if !(per_column || factor || bias || residual || experts) {
            return Self { columns: Vec::new(), residual: None, row_weights: None };
        }
        let tiles = config.tiles_per_warp();
        let block = place.block.as_ref();
        let scales_ptr = per_column.then(|| {
            let base = load_u64(a, wg.params.column_scales_ptr);
            wg.params.emit_base(a, base, block)
        });
        let n = load_u32(a, wg.params.n);
        // The owners are the first team.
        let warp_n = wg.warp;
        let [channel, g] = a.regs();
        a.shr_u32(g, wg.lane, 2);
        a.mul_lo_u32(channel, place.column_tile, config.tile_n);
        a.mad_lo_u32(channel, warp_n, 16 * tiles, channel);
        a.add_u32(channel, channel, g);
        let factor = optional.emit_factor(a, block);
        let pointer = |a: &mut Asm, base: Reg<B64>| {
            let from: Reg<B64> = a.reg();
            a.mad_wide_u32(from, channel, 2, base);
            from
        };
        let scales_from = scales_ptr.map(|base| pointer(a, base));
        let bias_from = optional.bias_ptr.map(|param| {
            let base = load_u64(a, param);
            let from = pointer(a, base);
            block.into_iter().for_each(|block| block.emit_row_of(a, from, n));
            from
        });
        let residual = optional.residual.map(|params| Residual::new(a, wg, params, place, channel));
        let columns = (0..tiles).map(|tile| {
            std::array::from_fn(|high| {
                let offset = 16 * tile + 8 * high as u32;
                let column = a.reg();
                a.add_u32(column, channel, offset);
                let exists = a.test_u32(Cmp::Lt, column, n);
                let mut load = |activation, from: Reg<B64>| {
                    emit_load_element(a, activation, exists, from, 2 * offset as i32)
                };
                let scale = scales_from.map(|from| load(Activation::F16, from));
                let bias = bias_from.map(|from| load(activation, from));
                let scale = match (scale, factor) {
                    (Some(scale), Some(factor)) => {
                        let product = a.reg();
                        a.mul_f32(product, scale, factor);
                        Some(product)
                    }
                    (scale, factor) => scale.or(factor),
                };
                Column { exists, scale, bias }
            })
        });
        let columns = columns.collect();
        let row_weights = optional.experts.zip(place.block).map(|(experts, block)| {
            // Lane (g, c) has rows 2 c and 2 c + 1 of every 8.
            let [first, row, left] = a.regs();
            a.and_b32(first, wg.lane, 3);
            a.add_u32(first, first, first);
            a.add_u32(row, block.row_begin, first);
            a.min_u32(left, first, block.num_rows);
            a.sub_u32(left, block.num_rows, left);
            (experts.emit_row_weights(a, row), left)
        });
        Self { columns, residual, row_weights }
    }

    /// Emits what is done to fragment `j` of a tile.
    fn emit(&self, a: &mut Asm, (tile, j): (usize, usize), sums: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
        let Some(columns) = self.columns.get(tile) else { return sums };
        let row_weights: Option<[Reg<F32>; 2]> = self.row_weights.map(|(weights, left)| {
            std::array::from_fn(|odd| {
                let row = (8 * j + odd) as u32;
                let exists = a.test_u32(Cmp::Gt, left, row);
                weights.emit_load(a, exists, row)
            })
        });
        std::array::from_fn(|r| {
            let column = &columns[r / 2];
            let mut value = sums[r];
            if let Some(scale) = column.scale {
                let product = a.reg();
                a.mul_f32(product, value, scale);
                value = product;
            }
            let residual = self
                .residual
                .as_ref()
                .map(|residual| residual.emit_load(a, (tile, r / 2), 8 * j + r % 2, column.exists));
            for added in [column.bias, residual].into_iter().flatten() {
                let sum = a.reg();
                a.add_f32(sum, value, added);
                value = sum;
            }
            if let Some(weights) = row_weights {
                let product = a.reg();
                a.mul_f32(product, value, weights[r % 2]);
                value = product;
            }
            value
        })
    }
}

/// One of the two columns of C that a thread has of a tile of 16 channels.
struct Column {
    exists: Reg<Pred>,
    /// What its sums are multiplied by.
    scale: Option<Reg<F32>>,
    /// What is added to them.
    bias: Option<Reg<F32>>,
}

/// The residual as a thread reads it, in fragment order.
struct Residual {
    activation: Activation,
    /// Address of the thread's first element.
    from: Reg<B64>,
    /// Bytes from one row to the next.
    stride: Reg<B32>,
    /// Rows that exist from the thread's first one on.
    rows: Reg<B32>,
}

impl Residual {
    /// For the threads whose first channel is `channel`.
    fn new(
        a: &mut Asm,
        wg: &Wg<'_>,
        (base, stride): (Param, Param),
        place: &Place,
        channel: Reg<B32>,
    ) -> Self {
        let (base, stride) = (load_u64(a, base), load_u32(a, stride));
        let m = load_u32(a, wg.params.m);
        let [first, row, rows] = a.regs();
        // Lane (g, c) has rows 2 c and 2 c + 1 of every 8.
        a.and_b32(first, wg.lane, 3);
        a.add_u32(first, first, first);
        a.add_u32(row, place.row_begin, first);
        // None is left where that is past the last one.
        a.min_u32(rows, row, m);
        a.sub_u32(rows, m, rows);
        let from: Reg<B64> = a.reg();
        a.mad_wide_u32(from, row, stride, base);
        a.mad_wide_u32(from, channel, 2, from);
        Self { activation: wg.config.kind.activation, from, stride, rows }
    }

    /// Emits the element `row` rows further on, of channel 16 `tile` + 8 `high`.
    fn emit_load(
        &self,
        a: &mut Asm,
        (tile, high): (usize, usize),
        row: usize,
        column_exists: Reg<Pred>,
    ) -> Reg<F32> {
        let exists = a.test_u32(Cmp::Gt, self.rows, row as u32);
        a.and_pred(exists, exists, column_exists);
        let at: Reg<B64> = a.reg();
        a.mad_wide_u32(at, self.stride, row as u32, self.from);
        let offset = 2 * (16 * tile + 8 * high) as i32;
        emit_load_element(a, self.activation, exists, at, offset)
    }
}
