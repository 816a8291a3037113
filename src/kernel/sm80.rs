//! Family `sm80`: dense GEMM with `cp.async`, `ldmatrix` and `mma.m16n8k16`, from sm_80 up.
//!
//! The weights are the m16 operand and the batch is the n8 one ("swapped operands"): one packed word is
//! one lane's A fragment of a 16-channel x k16 step, and a batch costs tensor work in steps of 8 rows
//! instead of 16.
//!
//! A CTA computes `tile_m x tile_n` of C over one stripe of K. Its warps form `warps_k` teams of `warps_n`
//! warps; a team takes every `warps_k`-th run of 128 inputs, its warps stand side by side along n, 32 or 64
//! channels each, and share the run's activations. Each team streams through a ring of its own, so teams
//! meet only when their sums are added at the end of a tile.
//!
//! ```text
//! global   weights: one chunk of 16-byte pieces a warp and run     activations: tile_m rows x 256 B a team
//!    | cp.async, stages - 1 runs ahead
//! shared   ring of `stages` slots; activation rows xor-swizzled by 16-byte unit
//!    | ld.shared.v4 (4 k16 steps of a tile)      | ldmatrix.x4 (2 k16 steps of 8 rows)
//! registers  word --lop3, sub--> A fragment       B fragment
//!    | mma, fp32; per group: acc += scale * sum (Promote), or fragments scaled before (Fragment)
//! ```
//!
//! Per run and warp of 64 channels at 8 rows: 8 LDS.128, 4 LDSM, 32 words x 9 dequantisation
//! instructions, 32 HMMA, 16 FFMA, 9 + 4 LDGSTS.

use super::epilogue::{Accumulators, Epilogue, Thread, epilogue_bytes};
use super::params::{Params, load_u32, load_u64};
use super::problem::{Config, Rows, Scaling};
use super::stripe::{Segment, emit_stripe};
use crate::asm::reg::{Imm, Reg, Region};
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred, Special};
use crate::asm::{Asm, Module, Pattern, Stream};
use crate::layout::swizzle_unit;
use crate::target::SmArch;
use crate::weights::{CHUNK_CHANNELS, CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES, TILE_K};

/// Bytes of one row of activations in a slot: 128 inputs.
const ROW_BYTES: u32 = 2 * TILE_K as u32;
/// 16-byte units of that row.
const ROW_UNITS: u32 = ROW_BYTES / 16;

/// Sizes that follow from a configuration.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    /// Bytes of one packed tile: codes and scales.
    tile_bytes: u32,
    /// Bytes of one run's weights of a warp.
    warp_bytes: u32,
    /// Bytes of one run's weights of a team.
    team_bytes: u32,
    /// Bytes of one run's activations of a team.
    rows_bytes: u32,
    /// Bytes of a slot: all teams' weights, then all teams' activations.
    slot_bytes: u32,
    /// 8-row tiles of the batch.
    row_tiles: u32,
    /// k16 steps of one `ldmatrix.x4`: 1 with two row tiles, 2 with one.
    steps_per_load: u32,
    /// Groups in a run, at least 1.
    groups_per_run: u32,
}

impl Geometry {
    fn new(config: &Config) -> Self {
        let scale_rows = match config.group {
            Group::PerColumn => 0,
            Group::Size(size) => TILE_K as u32 / size,
        };
        let tile_bytes = CODE_BYTES_PER_TILE as u32 + scale_rows * SCALE_ROW_BYTES as u32;
        let warp_bytes = config.tiles_per_warp() * tile_bytes;
        let team_bytes = config.warps_n * warp_bytes;
        let rows_bytes = config.tile_m * ROW_BYTES;
        Self {
            tile_bytes,
            warp_bytes,
            team_bytes,
            rows_bytes,
            slot_bytes: config.warps_k * (team_bytes + rows_bytes),
            row_tiles: config.tile_m.div_ceil(8),
            steps_per_load: if config.tile_m > 8 { 1 } else { 2 },
            groups_per_run: scale_rows.max(1),
        }
    }
}

/// Bytes of shared memory that a configuration needs.
pub fn smem_bytes(config: &Config) -> u32 {
    let ring = config.stages * Geometry::new(config).slot_bytes;
    ring.max(epilogue_bytes(config))
}

/// One slot of the ring.
#[derive(Clone, Copy, Debug)]
struct Slot {
    weights: Region,
    rows: Region,
}

/// The kernel of a configuration. The configuration must be legal: see [`super::select::check`].
pub fn build(config: &Config, target: SmArch) -> Module {
    let mut a = Asm::new();
    let params = Params::declare(&mut a);
    let geometry = Geometry::new(config);
    let slots = (0..config.stages)
        .map(|slot| {
            let weights = config.warps_k * geometry.team_bytes;
            Slot {
                weights: a.smem.region(&format!("slot {slot}: weights"), weights, 16),
                rows: a.smem.region(
                    &format!("slot {slot}: activations"),
                    config.warps_k * geometry.rows_bytes,
                    16,
                ),
            }
        })
        .collect();
    a.smem.reserve(smem_bytes(config));
    // The partial sums of a tile lie in the last slot if they fit: the fill of the ring for the next
    // segment leaves that one alone and goes on beneath the epilogue.
    let sums_bytes = epilogue_bytes(config);
    let overlaps = sums_bytes <= geometry.slot_bytes;
    let sums_start = if overlaps { (config.stages - 1) * geometry.slot_bytes } else { 0 };
    let sums = a.smem.overlay("partial sums (after the loop)", sums_start, sums_bytes);

    let kernel = Sm80::prologue(&mut a, config, geometry, slots, &params);
    let (stripe, segment) = a.section("stripe", |a| emit_stripe(a, &params));
    let cursor = kernel.emit_cursor(&mut a);
    kernel.emit_fill(&mut a, &segment, &cursor);
    let next_segment = a.label("segment");
    a.bind(next_segment);
    let acc = kernel.emit_main_loop(&mut a, &cursor);
    let next = a.section("next segment", |a| stripe.emit_next(a, &segment));
    if overlaps {
        // The team has finished with the ring.
        a.section("next segment", |a| kernel.emit_team_barrier(a));
        kernel.emit_fill(&mut a, &next, &cursor);
    }
    // One team that has met has finished with the last slot as well.
    let met = overlaps && config.warps_k == 1;
    let epilogue = Epilogue {
        config,
        params: &params,
        region: sums,
        smem: kernel.smem,
        thread: kernel.thread,
        segment: &segment,
    };
    epilogue.emit(&mut a, &acc, met);
    if !overlaps {
        kernel.emit_fill(&mut a, &next, &cursor);
    }
    a.section("next segment", |a| {
        let more = segment.emit_become(a, &next);
        a.when(more, |a| a.bra(next_segment));
        a.exit();
    });
    a.finish(&config.to_string(), target, config.num_threads(), config.ctas_per_sm)
}

/// The registers that live through the kernel.
struct Sm80<'a> {
    config: &'a Config,
    geometry: Geometry,
    slots: Vec<Slot>,
    params: Params,
    smem: Reg<B32>,
    thread: Thread,
    /// The team's number, `warp / warps_n`.
    team: Reg<B32>,
    /// The warp's place in its team.
    warp_n: Reg<B32>,
    /// Shared address of the lane's first 16 bytes of weights in slot 0.
    weights_lane: Reg<B32>,
    /// Shared address of the lane's scale word of tile 0 in slot 0.
    scales_lane: Reg<B32>,
    /// Shared addresses of the lane's `ldmatrix` row in slot 0. One `ldmatrix.x4` covers `steps_per_load` k16
    /// steps; load `n` uses address `n % len`, since a row's swizzle repeats every 128 bytes.
    rows_lane: Vec<Reg<B32>>,
    /// Shared addresses that the lane copies activations to, by copy modulo their number.
    rows_to: Vec<Reg<B32>>,
    /// Rows from one activation copy of a lane to the next.
    copy_rows: u32,
    /// The lane's 16-byte unit of a row.
    copy_unit: Reg<B32>,
    /// Bytes from the tile's first row of A to the row that each activation copy reads: rows past the last
    /// one repeat it, and their results are never stored. 32 bits, so that they take one register each.
    copy_from: Vec<Reg<B32>>,
    /// Whether the lane takes part in activation copies, if not all lanes of the team do.
    copies_rows: Option<Reg<Pred>>,
    /// Bytes from one row of A to the next.
    row_stride: Reg<B32>,
    /// Whether the lane copies the last, partial 512 bytes of its warp's weights.
    copies_rest: Reg<Pred>,
    /// L2 policy of the weight stream.
    policy: Option<Reg<B64>>,
    zero: Reg<F32>,
    /// What the weight type's conversion wants in registers.
    constants: Vec<Reg<B32>>,
}

/// What advances from run to run.
struct Cursor {
    /// Runs not yet computed.
    num_runs: Reg<B32>,
    /// Global address of the lane's next weights.
    weights: Reg<B64>,
    weights_step: Reg<B64>,
    /// Global address of the lane's next activations, in the tile's first row.
    rows: Reg<B64>,
    /// Inputs left from the lane's next activations on, in bytes of a row.
    row_bytes_left: Option<Reg<B32>>,
    /// Runs not yet requested.
    to_request: Reg<B32>,
}

impl<'a> Sm80<'a> {
    fn prologue(
        a: &mut Asm,
        config: &'a Config,
        geometry: Geometry,
        slots: Vec<Slot>,
        params: &Params,
    ) -> Self {
        a.section("who is who", |a| {
            let [smem, tid, lane, warp, team, warp_n] = a.regs();
            a.mov_u32_smem(smem);
            a.mov_u32_special(tid, Special::TidX);
            a.and_b32(lane, tid, 31);
            a.shr_u32(warp, tid, 5);
            a.shr_u32(team, warp, config.warps_n.ilog2());
            a.and_b32(warp_n, warp, config.warps_n - 1);
            // Row tile.
            let [row_tile, row_begin, num_rows] = a.regs();
            let m = load_u32(a, params.m);
            a.mov_u32_special(row_tile, Special::CtaidY);
            a.mul_lo_u32(row_begin, row_tile, config.tile_m);
            a.sub_u32(num_rows, m, row_begin);
            // The epilogue's passes may be taller than the tile.
            a.min_u32(num_rows, num_rows, config.tile_m);
            let thread = Thread { tid, lane, warp, row_begin, num_rows };
            // Weights: a warp's pieces lie one after the other.
            let [weights_base, weights_lane, scales_lane, quad] = a.regs();
            a.mad_lo_u32(weights_base, warp, geometry.warp_bytes, smem);
            a.mad_lo_u32(weights_lane, lane, 16, weights_base);
            a.shr_u32(quad, lane, 2);
            a.mad_lo_u32(scales_lane, quad, 4, weights_base);
            let rows_lane = emit_rows_lane(a, config, &geometry, smem, lane, team);
            let policy = config.evict_first.then(|| {
                let policy = a.reg();
                a.createpolicy_fractional_l2_evict_first_b64(policy);
                policy
            });
            let zero = a.reg();
            a.mov_f32(zero, 0.0);
            let rest_units = geometry.warp_bytes % 512 / 16;
            let copies_rest = a.test_u32(Cmp::Lt, lane, rest_units);
            let mut kernel = Self {
                config,
                geometry,
                slots,
                params: *params,
                smem,
                thread,
                team,
                warp_n,
                weights_lane,
                scales_lane,
                rows_lane,
                rows_to: Vec::new(),
                copy_rows: 0,
                copy_unit: lane,
                copy_from: Vec::new(),
                copies_rows: None,
                row_stride: load_u32(a, params.a_stride_bytes),
                copies_rest,
                policy,
                zero,
                constants: config.weight_format().emit_constants(a),
            };
            kernel.emit_copy_plan(a);
            kernel
        })
    }

    /// Which 16-byte units of activations this lane copies, and where to.
    fn emit_copy_plan(&mut self, a: &mut Asm) {
        let (config, geometry) = (self.config, self.geometry);
        let team_threads = 32 * config.warps_n;
        let [in_team, row, unit, row_base] = a.regs();
        a.and_b32(in_team, self.thread.tid, team_threads - 1);
        a.shr_u32(row, in_team, ROW_UNITS.ilog2());
        a.and_b32(unit, in_team, ROW_UNITS - 1);
        self.copy_unit = unit;
        self.copy_rows = team_threads / ROW_UNITS;
        let num_copies = config.tile_m.div_ceil(self.copy_rows);
        if config.tile_m < self.copy_rows {
            self.copies_rows = Some(a.test_u32(Cmp::Lt, row, config.tile_m));
        }
        a.mad_lo_u32(row_base, self.team, geometry.rows_bytes, self.smem);
        a.mad_lo_u32(row_base, row, ROW_BYTES, row_base);
        // Copy c goes to row `row + c * copy_rows`; copy_rows divides 8 or is a multiple of it, so the
        // swizzle of that row is the first row's, xored with a constant that repeats.
        for c in 0..num_copies.min((8 / self.copy_rows).max(1)) {
            let to = a.reg();
            a.xor_b32(to, unit, swizzle_unit(c * self.copy_rows, 0));
            let low = a.reg();
            a.and_b32(low, row, 7);
            a.xor_b32(to, to, low);
            a.mad_lo_u32(to, to, 16, row_base);
            self.rows_to.push(to);
        }
        let last_row = a.reg();
        a.sub_u32(last_row, self.thread.num_rows, 1);
        for c in 0..num_copies {
            let from = a.reg();
            a.add_u32(from, row, c * self.copy_rows);
            a.min_u32(from, from, last_row);
            a.mul_lo_u32(from, from, self.row_stride);
            self.copy_from.push(from);
        }
    }

    /// Points the cursor at a segment and requests its first runs.
    fn emit_fill(&self, a: &mut Asm, segment: &Segment, cursor: &Cursor) {
        a.section("fill the ring", |a| {
            self.emit_rewind(a, segment, cursor);
            for slot in 0..self.config.stages - 1 {
                self.emit_request(a, slot, cursor);
                a.cp_async_commit_group();
            }
        });
    }

    /// Emits the loop over the team's runs of a segment; the warp's accumulators.
    fn emit_main_loop(&self, a: &mut Asm, cursor: &Cursor) -> Accumulators {
        let stages = self.config.stages;
        let acc: Accumulators = (0..self.config.tiles_per_warp())
            .map(|_| (0..self.geometry.row_tiles).map(|_| a.regs()).collect())
            .collect();
        acc.iter().flatten().flatten().for_each(|value| a.mov_f32(*value, 0.0));

        let [next, done] = ["main_loop", "main_loop_done"].map(|name| a.label(name));
        a.bind(next);
        for slot in 0..stages {
            a.section(&format!("main loop, slot {slot}"), |a| {
                let finished = a.test_u32(Cmp::Eq, cursor.num_runs, 0);
                a.when(finished, |a| a.bra(done));
                a.sub_u32(cursor.num_runs, cursor.num_runs, 1);
                // This slot's copies are complete in every thread of the team, and the team has
                // finished with the slot before, which is refilled now.
                a.cp_async_wait_group(Imm(stages - 2));
                self.emit_team_barrier(a);
                let refilled = (slot + stages - 1) % stages;
                // The copies stand together: where a shared load precedes a copy, the assembler guards
                // the copy with three dummy loads of its own.
                self.emit_request(a, refilled, cursor);
                let steps = self.emit_run(a, slot, &acc);
                self.emit_woven(a, steps);
                a.cp_async_commit_group();
            });
        }
        a.bra(next);
        a.bind(done);
        acc
    }

    /// The registers of a cursor.
    fn emit_cursor(&self, a: &mut Asm) -> Cursor {
        let weights_step: Reg<B64> = a.reg();
        let chunk_bytes = 4 * self.geometry.tile_bytes;
        a.mov_b64(weights_step, u64::from(chunk_bytes * self.config.warps_k));
        Cursor {
            num_runs: a.reg(),
            to_request: a.reg(),
            weights: a.reg(),
            weights_step,
            rows: a.reg(),
            row_bytes_left: (self.config.rows != Rows::Whole).then(|| a.reg()),
        }
    }

    /// Points the cursor at the team's first run of a segment.
    fn emit_rewind(&self, a: &mut Asm, segment: &Segment, cursor: &Cursor) {
        let (config, geometry) = (self.config, self.geometry);
        let &Cursor { num_runs, to_request, weights, rows, row_bytes_left, .. } = cursor;
        let first = a.reg();
        a.add_u32(first, segment.begin, self.team);
        // Runs begin + team, begin + team + warps_k, … below end; team < warps_k, so this does not wrap.
        a.sub_u32(num_runs, segment.end, first);
        a.add_u32(num_runs, num_runs, config.warps_k - 1);
        a.shr_u32(num_runs, num_runs, config.warps_k.ilog2());
        a.mov_b32(to_request, num_runs);

        // Weights: the warp's channels begin in chunk column `column`, some tiles into the chunk.
        let chunk_bytes = 4 * geometry.tile_bytes;
        let num_columns = load_u32(a, self.params.num_chunk_columns);
        let b_ptr = load_u64(a, self.params.b_ptr);
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
        a.mad_lo_u32(row_byte, self.copy_unit, 16, row_byte);
        a.mad_wide_u32(rows, self.thread.row_begin, self.row_stride, a_ptr);
        a.mad_wide_u32(rows, row_byte, 1, rows);
        if let Some(left) = row_bytes_left {
            let k = load_u32(a, self.params.k);
            a.add_u32(left, k, k);
            a.sub_u32(left, left, row_byte);
        }
    }

    /// Requests the cursor's run into a slot, if there is one left, and advances the cursor. Inputs that
    /// do not exist become zeros.
    fn emit_request(&self, a: &mut Asm, slot: u32, cursor: &Cursor) {
        let (config, geometry) = (self.config, self.geometry);
        let Slot { weights, rows } = self.slots[slot as usize];
        let more = a.test_u32(Cmp::Ne, cursor.to_request, 0);
        a.when(more, |a| a.sub_u32(cursor.to_request, cursor.to_request, 1));
        let full_pieces = geometry.warp_bytes / 512;
        let copy_weights = |a: &mut Asm, piece: u32| {
            let to = self.weights_lane.at(weights.start + 512 * piece).within(weights);
            let from = cursor.weights.at(512 * piece as i32);
            match self.policy {
                Some(policy) => a.cp_async_cg_16_hint(to, from, policy),
                None => a.cp_async_cg_16(to, from),
            }
        };
        a.when(more, |a| (0..full_pieces).for_each(|piece| copy_weights(a, piece)));
        if geometry.warp_bytes % 512 != 0 {
            let rest = a.reg();
            a.and_pred(rest, more, self.copies_rest);
            a.when(rest, |a| copy_weights(a, full_pieces));
        }
        let guard = match self.copies_rows {
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
        for (c, offset) in self.copy_from.iter().enumerate() {
            let [wide, from] = a.regs();
            a.cvt_u64_u32(wide, *offset);
            a.add_u64(from, cursor.rows, wide);
            let to = self.rows_to[c % self.rows_to.len()]
                .at(rows.start + c as u32 * self.copy_rows * ROW_BYTES)
                .within(rows);
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
        a.add_u64(cursor.weights, cursor.weights, cursor.weights_step);
    }

    /// Copies up to 8 elements one by one through registers, zeros after them.
    fn emit_copy_elements(
        &self,
        a: &mut Asm,
        guard: Reg<Pred>,
        to: crate::asm::reg::SharedAddr,
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

    /// The threads of the team meet. A team of one warp needs no CTA barrier.
    fn emit_team_barrier(&self, a: &mut Asm) {
        if self.config.warps_n == 1 {
            a.bar_warp_sync(0xffff_ffffu32);
        } else {
            let id = a.reg();
            a.add_u32(id, self.team, 1);
            a.bar_sync_n(id, 32 * self.config.warps_n);
        }
    }

    /// The arithmetic of one run: for each k16 step its shared loads, its dequantisation and its mma.
    fn emit_run(&self, a: &mut Asm, slot: u32, acc: &Accumulators) -> Vec<[Stream; 3]> {
        let (config, geometry) = (self.config, self.geometry);
        let Slot { weights, rows } = self.slots[slot as usize];
        let tiles = config.tiles_per_warp();
        let format = config.weight_format();
        let grouped = config.group != Group::PerColumn;
        let promote = grouped && config.scaling == Scaling::Promote;
        let steps_per_group = 8 / geometry.groups_per_run;
        let mut words: Vec<[Reg<B32>; 4]> = Vec::new();
        let mut batch: Vec<[Reg<B32>; 2]> = Vec::new();
        let mut next_batch: Vec<[Reg<B32>; 2]> = Vec::new();
        let mut scales: Vec<Reg<B32>> = Vec::new();
        let mut sums: Accumulators = Vec::new();
        let mut steps = Vec::new();
        for step in 0..8 {
            let [mut loads, mut dequant, mut mma] = [const { Stream::new() }; 3];
            if step % 4 == 0 {
                // Four k16 steps of each tile.
                words = (0..tiles)
                    .map(|tile| {
                        let words = a.regs();
                        let offset = tile * geometry.tile_bytes + 512 * (step / 4);
                        let from = self.weights_lane.at(weights.start + offset).within(weights);
                        loads.extend(a.capture(|a| a.ld_shared_v4_b32(words, from)));
                        words
                    })
                    .collect();
            }
            if step % geometry.steps_per_load == 0 {
                loads.extend(a.capture(|a| {
                    [batch, next_batch] = self.emit_load_batch(a, rows, step);
                }));
            } else {
                batch.clone_from(&next_batch);
            }
            let new_group = step % steps_per_group == 0;
            if grouped && new_group {
                let group = step / steps_per_group;
                scales = (0..tiles)
                    .map(|tile| {
                        let word = a.reg();
                        let offset = tile * geometry.tile_bytes
                            + CODE_BYTES_PER_TILE as u32
                            + group * SCALE_ROW_BYTES as u32;
                        let from = self.scales_lane.at(weights.start + offset).within(weights);
                        loads.extend(a.capture(|a| a.ld_shared_b32(word, from)));
                        word
                    })
                    .collect();
            }
            if promote && new_group {
                sums = acc.iter().map(|row| row.iter().map(|_| a.regs()).collect()).collect();
            }
            for tile in 0..tiles as usize {
                let word = words[tile][step as usize % 4];
                let mut fragment = [word; 4];
                dequant.extend(a.capture(|a| {
                    fragment = format.emit_fragment(a, &self.constants, word);
                    if grouped && !promote {
                        fragment = emit_scale_fragment(a, fragment, scales[tile]);
                    }
                }));
                for (j, b) in batch.iter().enumerate() {
                    let sum = if promote { sums[tile][j] } else { acc[tile][j] };
                    let before = if promote && new_group { [self.zero; 4] } else { sum };
                    mma.extend(a.capture(|a| a.mma_m16n8k16_f32_f16(sum, fragment, *b, before)));
                }
            }
            if promote && (step + 1) % steps_per_group == 0 {
                for tile in 0..tiles as usize {
                    let (acc, sums) = (&acc[tile], &sums[tile]);
                    mma.extend(a.capture(|a| emit_promote(a, acc, sums, scales[tile])));
                }
            }
            steps.push([loads, dequant, mma]);
        }
        steps
    }

    /// Loads the B fragments of the `steps_per_load` k16 steps from `step` on: per step and row tile.
    fn emit_load_batch(&self, a: &mut Asm, rows: Region, step: u32) -> [Vec<[Reg<B32>; 2]>; 2] {
        let geometry = self.geometry;
        let load = step / geometry.steps_per_load;
        let len = self.rows_lane.len() as u32;
        let base = self.rows_lane[(load % len) as usize];
        let offset = rows.start + 128 * (load / len);
        let mut steps = [Vec::new(), Vec::new()];
        let row_tiles_per_load = 2 / geometry.steps_per_load;
        for j in (0..geometry.row_tiles).step_by(row_tiles_per_load as usize) {
            let f: [Reg<B32>; 4] = a.regs();
            let from = base.at(offset + 8 * j * ROW_BYTES).within(rows);
            a.ldmatrix_sync_aligned_m8n8_x4_shared_b16(f, from);
            match geometry.steps_per_load {
                1 => steps[0].extend([[f[0], f[1]], [f[2], f[3]]]),
                _ => {
                    steps[0].push([f[0], f[1]]);
                    steps[1].push([f[2], f[3]]);
                }
            }
        }
        steps
    }

    /// Weaves the steps of a run. Short batches: one weave, the assembler has registers to spare. Tall ones:
    /// a window a step, in which the shared loads of the step after next, the dequantisation of the next
    /// and the mma of this one run side by side; a warp barrier between windows keeps the assembler from
    /// hoisting loads out of theirs, which would cost it more registers than there are.
    fn emit_woven(&self, a: &mut Asm, steps: Vec<[Stream; 3]>) {
        let [mut loads, mut dequant, mut mma] = [(); 3].map(|()| Vec::new());
        for [l, d, m] in steps {
            loads.push(l);
            dequant.push(d);
            mma.push(m);
        }
        if self.geometry.row_tiles < 4 {
            let whole = [loads, dequant, mma].map(|streams| {
                let mut whole = Stream::new();
                streams.into_iter().for_each(|stream| whole.extend(stream));
                whole
            });
            a.weave(Pattern::EvenHeldBack, whole);
            return;
        }
        let ahead = 1;
        let mut loads = loads.into_iter();
        let mut dequant = dequant.into_iter();
        loads.by_ref().take(1 + ahead).for_each(|stream| a.append(stream));
        dequant.by_ref().take(1).for_each(|stream| a.append(stream));
        for mma in mma {
            a.bar_warp_sync(0xffff_ffffu32);
            let loads = loads.next().unwrap_or_default();
            let dequant = dequant.next().unwrap_or_default();
            // The mma of this step come first in the order that counts: they read what is there.
            a.weave(Pattern::EvenHeldBack, [mma, loads, dequant]);
        }
    }
}

/// The addresses of `ldmatrix` rows: see [`Sm80::rows_lane`]. Lane `8 i + r` names row `r` of matrix `i`.
fn emit_rows_lane(
    a: &mut Asm,
    config: &Config,
    geometry: &Geometry,
    smem: Reg<B32>,
    lane: Reg<B32>,
    team: Reg<B32>,
) -> Vec<Reg<B32>> {
    let [r, i, unit, row_base] = a.regs();
    // Rows past the kept ones repeat.
    a.and_b32(r, lane, config.tile_m.min(8) - 1);
    a.shr_u32(i, lane, 3);
    a.mad_lo_u32(row_base, team, geometry.rows_bytes, smem);
    a.mad_lo_u32(row_base, r, ROW_BYTES, row_base);
    if geometry.steps_per_load == 1 {
        // Matrices: (row tile 0, unit 0), (0, 1), (1, 0), (1, 1).
        let row_tile = a.reg();
        a.shr_u32(row_tile, i, 1);
        a.mad_lo_u32(row_base, row_tile, 8 * ROW_BYTES, row_base);
        a.and_b32(i, i, 1);
    }
    a.xor_b32(unit, i, r);
    let units_per_load = 2 * geometry.steps_per_load;
    (0..8 / units_per_load)
        .map(|load| {
            let [at, address] = a.regs();
            a.xor_b32(at, unit, swizzle_unit(0, units_per_load * load));
            a.mad_lo_u32(address, at, 16, row_base);
            address
        })
        .collect()
}

/// Multiplies the rows of an A fragment by their channels' scales: registers 0 and 2 hold channel g,
/// 1 and 3 channel g + 8; the scale word has g's in its low half.
fn emit_scale_fragment(a: &mut Asm, fragment: [Reg<B32>; 4], scale: Reg<B32>) -> [Reg<B32>; 4] {
    let both: [Reg<B32>; 2] = a.regs();
    a.prmt_b32(both[0], scale, scale, 0x1010u32);
    a.prmt_b32(both[1], scale, scale, 0x3232u32);
    let scaled = a.regs();
    for (n, (scaled, value)) in scaled.into_iter().zip(fragment).enumerate() {
        a.mul_f16x2(scaled, value, both[n % 2]);
    }
    scaled
}

/// `acc += scale * sum` in single precision, for one tile. Accumulator registers 0 and 1 are channel g,
/// 2 and 3 channel g + 8.
fn emit_promote(a: &mut Asm, acc: &[[Reg<F32>; 4]], sums: &[[Reg<F32>; 4]], scale: Reg<B32>) {
    let halves: [Reg<B16>; 2] = a.regs();
    a.mov_b32_unpack(halves, scale);
    let scales: [Reg<F32>; 2] = a.regs();
    a.cvt_f32_f16(scales[0], halves[0]);
    a.cvt_f32_f16(scales[1], halves[1]);
    for (acc, sums) in acc.iter().zip(sums) {
        for (n, (acc, sum)) in acc.iter().zip(sums).enumerate() {
            a.fma_rn_f32(*acc, *sum, scales[n / 2], *acc);
        }
    }
}

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Sm80Family;

impl super::KernelFamily for Sm80Family {
    fn name(&self) -> &'static str {
        "sm80"
    }

    fn runs_on(&self, target: SmArch) -> bool {
        target.sm >= 80
    }

    fn smem_bytes(&self, config: &Config) -> u32 {
        smem_bytes(config)
    }

    fn build(&self, config: &Config, target: SmArch) -> Module {
        build(config, target)
    }
}
