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
//! instructions, 32 HMMA, 16 FFMA, 9 + 4 LDGSTS; 404 instructions in all by the offline assembler.
//!
//! Measured, H200, 2026-11-30, group 128, `makaira bench`: 4096 x 4096 in 4.4 us at M = 1
//! (`m1n32k1024_g128_w1_s3_c2`) and 5.3 us at M = 16; 57344 x 8192 in 59.0 us at M = 1 and 164 us at M = 64.

mod ring;
pub(super) mod run;

use self::ring::Cursor;
use self::run::emit_rows_lane;
use super::epilogue::{Accumulators, Epilogue, Thread, epilogue_bytes};
use super::params::{Params, load_u32};
use super::problem::Config;
use super::stripe::emit_stripe;
use crate::asm::reg::{Imm, Reg, Region};
use crate::asm::types::{B32, B64, Cmp, F32, Pred, Special};
use crate::asm::{Asm, Module};
use crate::target::SmArch;
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES, TILE_K};

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
    let cursor = a.section("stripe", |a| kernel.emit_cursor(a));
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
    // Its last barrier lies between the reads of the sums and the copies of the next segment that land
    // on them. Sums at the start of the ring need it: their slots are filled next. Sums in the last slot
    // need it too: the main loop's first run refills that slot when one team has met, and other teams
    // may still be reading. Only two kinds of sums in the last slot would do without: those of a single
    // team, whose own barrier is the CTA's, and those that lie in team 0's codes and that team 0 alone
    // reads. In-place reduction releases its lock behind that barrier and always needs it.
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

    /// Emits the loop over the team's runs of a segment; the warp's accumulators.
    fn emit_main_loop(&self, a: &mut Asm, cursor: &Cursor) -> Accumulators {
        let stages = self.config.stages;
        let acc: Accumulators = (0..self.config.tiles_per_warp())
            .map(|_| (0..self.geometry.row_tiles).map(|_| a.regs()).collect())
            .collect();
        a.section("main loop", |a| {
            acc.iter().flatten().flatten().for_each(|value| a.mov_f32(*value, 0.0));
        });

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
        a.section("main loop", |a| a.bra(next));
        a.bind(done);
        acc
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
