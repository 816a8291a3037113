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

use self::ring::Cursor;
use super::cost::{Cost, CostModel, MmaTerms, Work, of_mma};
use super::epilogue::{Accumulators, Epilogue, Thread, epilogue_bytes};
use super::experts::{Block, Support, emit_items};
use super::params::{Params, load_u32};
use super::problem::{Config, Conversion, Problem, Rows, Scaling, Start};
use super::stream::{
    Arithmetic, Bias, Geometry, Part, RowCopies, broken_rule, candidates, emit_row_tile,
    emit_rows_lane, emit_team_barrier, emit_woven,
};
use super::stripe::emit_stripe;
use crate::asm::reg::{Imm, Reg, Region};
use crate::asm::types::{B32, B64, Cmp, Pred, Special};
use crate::asm::{Asm, Module, Pattern, Stream};
use crate::target::{DeviceSpec, PtxIsa, SmArch};
use crate::weights::Group;

/// Bytes of one run's weights of a team.
fn team_bytes(config: &Config, geometry: &Geometry) -> u32 {
    config.warps_n * geometry.warp_bytes
}

/// Bytes of a slot: all teams' weights, then all teams' activations.
fn slot_bytes(config: &Config, geometry: &Geometry) -> u32 {
    config.warps_k * (team_bytes(config, geometry) + geometry.rows_bytes)
}

/// Bytes of shared memory that a configuration needs.
pub fn smem_bytes(config: &Config) -> u32 {
    let ring = config.stages * slot_bytes(config, &Geometry::new(config));
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
    let params = Params::declare(&mut a, &config.kind);
    let geometry = Geometry::new(config);
    let slot_bytes = slot_bytes(config, &geometry);
    let slots = (0..config.stages)
        .map(|slot| {
            let weights = config.warps_k * team_bytes(config, &geometry);
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
    let overlaps = sums_bytes <= slot_bytes;
    let sums_start = if overlaps { (config.stages - 1) * slot_bytes } else { 0 };
    let sums = a.smem.overlay("partial sums (after the loop)", sums_start, sums_bytes);

    let overlaps_grids = target.sm >= 90;
    let items = params.optional.experts.map(|experts| {
        a.section("items", |a| {
            if overlaps_grids {
                // The kernel before may be writing the row blocks.
                a.griddepcontrol_wait();
            }
            emit_items(a, params.k_tiles, experts)
        })
    });
    let block = items.and_then(|(_, segment)| segment.block);
    let kernel = Sm80::prologue(&mut a, config, geometry, slots, &params, (block, overlaps_grids));
    let (stripe, segment) =
        items.unwrap_or_else(|| a.section("stripe", |a| emit_stripe(a, &params)));
    let cursor = a.section("stripe", |a| kernel.emit_cursor(a));
    let end = block.map(|block| {
        let (end, idle) = (a.label("end"), a.test_u32(Cmp::Eq, block.num_rows, 0));
        a.when(idle, |a| a.bra(end));
        end
    });
    kernel.emit_first_fill(&mut a, &stripe, &segment, &cursor);
    let next_segment = a.label("segment");
    a.bind(next_segment);
    let acc = kernel.emit_main_loop(&mut a, &cursor);
    let next = a.section("next segment", |a| stripe.emit_next(a, &segment));
    if overlaps {
        // The team has finished with the ring.
        a.section("next segment", |a| emit_team_barrier(a, config, kernel.team));
        kernel.emit_fill(&mut a, &stripe, &next, &cursor);
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
        kernel.emit_fill(&mut a, &stripe, &next, &cursor);
    }
    a.section("next segment", |a| {
        let more = segment.emit_become(a, &next);
        a.when(more, |a| a.bra(next_segment));
        end.into_iter().for_each(|end| a.bind(end));
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
    arithmetic: Arithmetic<'a>,
    copies: RowCopies,
    /// Bytes from the tile's first row of A to the row that each activation copy reads; with experts that row
    /// itself. 32 bits, so that they take one register each.
    copy_from: Vec<Reg<B32>>,
    /// Bytes from one row of A to the next.
    row_stride: Reg<B32>,
    /// Whether the lane copies the last, partial 512 bytes of its warp's weights.
    copies_rest: Reg<Pred>,
    /// L2 policy of the weight stream.
    policy: Option<Reg<B64>>,
    /// Whether grids may overlap: this one waits for the one before it, and lets the next one begin.
    overlaps_grids: bool,
}

impl<'a> Sm80<'a> {
    fn prologue(
        a: &mut Asm,
        config: &'a Config,
        geometry: Geometry,
        slots: Vec<Slot>,
        params: &Params,
        (block, overlaps_grids): (Option<Block>, bool),
    ) -> Self {
        a.section("who is who", |a| {
            let [smem, tid, lane, warp, team, warp_n] = a.regs();
            a.mov_u32_smem(smem);
            a.mov_u32_special(tid, Special::TidX);
            a.and_b32(lane, tid, 31);
            a.shr_u32(warp, tid, 5);
            a.shr_u32(team, warp, config.warps_n.ilog2());
            a.and_b32(warp_n, warp, config.warps_n - 1);
            let [row_begin, num_rows] = match block {
                Some(block) => [block.row_begin, block.num_rows],
                None => emit_row_tile(a, config, params),
            };
            let thread = Thread { tid, lane, warp, row_begin, num_rows };
            // Weights: a warp's pieces lie one after the other.
            let [weights_base, weights_lane, scales_lane, quad] = a.regs();
            a.mad_lo_u32(weights_base, warp, geometry.warp_bytes, smem);
            a.mad_lo_u32(weights_lane, lane, 16, weights_base);
            a.shr_u32(quad, lane, 2);
            a.mad_lo_u32(scales_lane, quad, geometry.tile.scale_bytes_per_row(), weights_base);
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
            let row_stride = load_u32(a, params.a_stride_bytes);
            let (constants, bias) = Bias::or_constants(a, config, geometry.row_tiles, lane);
            let copies = RowCopies::new(a, config, &geometry, smem, tid, team);
            let copy_from = match block {
                Some(_) => (0..copies.num_copies).map(|_| a.reg()).collect(),
                None => copies.emit_from(a, num_rows, row_stride),
            };
            Self {
                config,
                geometry,
                slots,
                params: *params,
                smem,
                thread,
                team,
                warp_n,
                arithmetic: Arithmetic {
                    config,
                    geometry,
                    weights_lane,
                    scales_lane,
                    rows_lane,
                    zero,
                    constants,
                    bias,
                },
                copies,
                copy_from,
                row_stride,
                copies_rest,
                policy,
                overlaps_grids,
            }
        })
    }

    /// Emits the loop over the team's runs of a segment; the warp's accumulators.
    fn emit_main_loop(&self, a: &mut Asm, cursor: &Cursor) -> Accumulators {
        let stages = self.config.stages;
        let acc = self.arithmetic.emit_accumulators(a);
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
                emit_team_barrier(a, self.config, self.team);
                let refilled = (slot + stages - 1) % stages;
                // The copies stand together: where a shared load precedes a copy, the assembler guards
                // the copy with three dummy loads of its own.
                self.emit_request(a, refilled, cursor);
                let Slot { weights, rows } = self.slots[slot as usize];
                match self.config.conversion {
                    Conversion::Value => {
                        let steps = self.arithmetic.emit_steps(a, weights, rows, &acc);
                        self.emit_woven_steps(a, steps);
                    }
                    Conversion::Subnormal => {
                        let (loads, parts) = self.arithmetic.emit_pairs(a, weights, rows, &acc);
                        emit_woven(a, loads, parts);
                    }
                }
                a.cp_async_commit_group();
            });
        }
        a.section("main loop", |a| a.bra(next));
        a.bind(done);
        self.arithmetic.emit_finish(a, &acc);
        acc
    }

    /// Weaves the steps of a run. Short batches: one weave, the assembler has registers to spare. Tall ones:
    /// a window a step, in which the shared loads of the step after next, the dequantisation of the next
    /// and the mma of this one run side by side; a warp barrier between windows keeps the assembler from
    /// hoisting loads out of theirs, which would cost it more registers than there are.
    fn emit_woven_steps(&self, a: &mut Asm, steps: Vec<Part>) {
        if self.geometry.row_tiles < 4 {
            return emit_woven(a, Stream::new(), steps);
        }
        let [mut loads, mut dequant, mut mma] = [(); 3].map(|()| Vec::new());
        for step in steps {
            loads.push(step.loads);
            dequant.push(step.dequant);
            mma.push(step.mma);
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

/// Fitted to 1100 measurements on one H200: see `benches/NOTES.md`. Other cards are ranked by the same
/// curves; their rates differ, the order of configurations less so.
static MODEL: CostModel = CostModel {
    start_us: 2.07,
    wave_us: 1.82,
    bytes_per_us: 4.69e6,
    activation_share: 0.112,
    in_flight_bytes: 20.9e3,
    imbalance: 0.23,
    uneven: 0.0,
    issue_per_us: 2315.0,
    mma_weight: 8.66,
    exposed_share: 0.243,
    round_floor: 785.0,
    round_overhead: 27.0,
    crowd_us: 0.0,
    epilogue_us: 0.278,
    epilogue_us_per_100kb: 0.441,
    hop_us: 1.54,
    helper_us: 0.135,
    helper_us_per_100kb: 1.18,
    overlap: 3.1,
};

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Sm80Family;

impl super::KernelFamily for Sm80Family {
    fn name(&self) -> &'static str {
        "sm80"
    }

    fn isa(&self) -> PtxIsa {
        PtxIsa::new(7, 0)
    }

    fn config_isa(&self, config: &Config) -> PtxIsa {
        // `createpolicy` and the hint of a copy.
        if config.evict_first { PtxIsa::new(7, 4) } else { self.isa() }
    }

    fn runs_on(&self, target: SmArch) -> bool {
        target.sm >= 80
    }

    fn broken_rule(&self, config: &Config) -> Option<String> {
        if let Some(rule) = broken_rule(config) {
            return Some(rule);
        }
        if !config.warps_n.is_power_of_two() {
            return Some(format!("{} warps side by side, not a power of two", config.warps_n));
        }
        if config.start != Start::Full {
            return Some("the ring is requested in full, beside whatever is on the SM".into());
        }
        if ![2, 4].contains(&config.tiles_per_warp()) {
            return Some(format!("a warp owns {} tiles, not 2 or 4", config.tiles_per_warp()));
        }
        (config.conversion == Conversion::Subnormal && config.tile_m > 16)
            .then(|| format!("subnormal codes for {} rows, up to 16 gain by them", config.tile_m))
    }

    fn candidates(&self, problem: &Problem) -> Vec<Vec<Config>> {
        let warps = [(1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)];
        let tiles_and_ctas = [(2, 1), (2, 2), (4, 1), (4, 2)];
        let variants =
            [Scaling::Promote, Scaling::Fragment].map(|scaling| (Conversion::Value, scaling));
        candidates(self.name(), problem, &warps, &tiles_and_ctas, 1, &variants)
    }

    fn runs_in_flight(&self, config: &Config) -> u32 {
        config.stages - 1
    }

    fn experts(&self) -> Option<Support> {
        Some(Support { tallest: 64, in_order: false })
    }

    fn cost(&self, config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
        let run = Work::of_run(config);
        let copies = 2.25 * f64::from(config.tiles_per_warp())
            + 1.5 * f64::from(config.tile_m) / f64::from(config.warps_n);
        let work = Work { instructions: run.instructions + copies + 25.0, ..run };
        let runs_in_flight = self.runs_in_flight(config);
        // On Hopper the families of its own are as fast in small layers, and much faster where grids may overlap.
        let factor = if device.arch.sm == 90 { 1.12 } else { 1.0 };
        let terms = MmaTerms { work, runs_in_flight, model: &MODEL, factor };
        of_mma(config, problem, device, stripe, &terms)
    }

    fn smem_bytes(&self, config: &Config) -> u32 {
        smem_bytes(config)
    }

    /// Fitted to what the assembler takes: accumulators, the sums of the groups that live at a time, B
    /// fragments, two rounds of words, addresses, and what each copy of rows of A keeps; copies by elements, and
    /// of rows that are looked up, keep more.
    fn registers_needed(&self, config: &Config) -> u32 {
        let accumulators = 4 * config.tiles_per_warp() * config.tile_m.div_ceil(8);
        let sums = match config.group {
            Group::Size(size) if config.scaling == Scaling::Promote => match size {
                128 => 4 * accumulators / 3,
                64 => 2 * accumulators,
                _ => 5 * accumulators / 2,
            },
            _ => 0,
        };
        let batch = 2 * config.tile_m.div_ceil(8);
        let halves_per_copy = match (config.rows, config.kind.experts) {
            (Rows::Element, _) => 11,
            (_, true) => 7,
            (_, false) => 5,
        };
        let copies = halves_per_copy * config.tile_m.div_ceil(2 * config.warps_n) / 2;
        let items = if config.kind.experts { 8 } else { 0 };
        accumulators + sums + batch + copies + 8 * config.tiles_per_warp() + 48 + items
    }

    fn build(&self, config: &Config, target: SmArch) -> Module {
        build(config, target)
    }
}
