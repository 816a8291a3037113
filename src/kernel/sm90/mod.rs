//! Family `sm90`: up to 16 rows on Hopper, weights by bulk copies through rings that belong to one warp each.
//!
//! The CTA is that of `sm80`: teams of warps along n, each team on every `warps_k`-th run of 128 inputs, the
//! weights as the m16 operand. What is new is how bytes arrive. A warp's weights of a run are one bulk copy
//! into one slot of its own ring, which counts its bytes on the slot's mbarrier; nobody else reads the slot,
//! so a warp that has read it asks for the next run itself, in the middle of its arithmetic, and no barrier
//! says that a slot is empty. Activations come by `cp.async` as in `sm80`, several runs ahead.
//!
//! ```text
//! global   weights: one chunk a warp and run                       activations: tile_m rows x 256 B a team
//!    | cp.async.bulk by one lane, `stages` runs ahead                 | cp.async by the team's lanes
//! shared   a ring a warp, one mbarrier a slot                      a ring a team, rows xor-swizzled
//!    | try_wait; ld.shared.v4                                         | wait_group; ldmatrix.x4
//! registers  pair of tiles after pair: word --and--> A fragment    B fragments of the whole run
//!    | mma, fp32, from -8 * sum(x) of the group; acc += scale * sum
//!    |    in the middle: all weights are read -> the lane asks for the run `stages` further on
//! ```
//!
//! Grids may overlap: weights are requested before `griddepcontrol.wait`, everything else is touched after
//! it; the next grid may begin when all warps have requested their last weights. Shared memory is padded so that no
//! CTA of the next grid shares an SM with this one's: it begins where one has ended. Where two fit, some SMs get two of
//! the same grid and others none, and the grid takes as long as those two.
//!
//! Per run and warp of 64 channels, subnormal codes, by the offline assembler: 284 instructions at 8 rows, 36
//! of them HMMA, and 352 with 72 at 16 rows; values take 113 and 98 more. Counted before a run's reads were fenced: the
//! fence and its guards are up to five more.
//!
//! Measured, H200, 2026-11-30, group 128, in a graph and, in brackets, with grids that overlap: 4096 x 4096 at
//! M = 1 in 4.5 (3.5) us by `m1n32k1024_g128_w1_s2_c1`, 57344 x 8192 in 58.3 (56.8) us by
//! `m1n448k256_g128_w7_s2_c1_sn`, at M = 16 in 64.2 (62.2) us by `m16n512k256_g128_w4_s2_c1_sn`.

mod rows;
mod weights;

use self::rows::RowRing;
use self::weights::{Warp, WeightRing};
use super::cost::{Cost, CostModel, MmaTerms, Work, of_mma};
use super::epilogue::{Accumulators, Epilogue, Thread, epilogue_bytes};
use super::params::Params;
use super::problem::{Config, Conversion, Problem, Rows, Scaling, Start};
use super::stream::{
    Arithmetic, Bias, Geometry, Part, broken_rule, candidates, emit_row_tile, emit_rows_lane,
    emit_woven,
};
use super::stripe::emit_stripe;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, Cmp};
use crate::asm::{Asm, Module, Stream};
use crate::target::{DeviceSpec, PtxIsa, SmArch};
use crate::weights::{Activation, Group};

/// Shared memory of an SM, of which the system keeps a part for each CTA.
const SM_BYTES: u32 = 228 << 10;
const RESERVED_BYTES: u32 = 1 << 10;

/// How a configuration's shared memory is used.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Slots of activations: a multiple of the stages, or one.
    row_slots: u32,
    /// Whether the partial sums have a place of their own; else they lie on the activations.
    sums_apart: bool,
    /// Bytes in all.
    bytes: u32,
}

impl Layout {
    fn new(config: &Config) -> Self {
        let geometry = Geometry::new(config);
        let weights = WeightRing::bytes(config);
        let slot = config.warps_k * geometry.rows_bytes;
        let sums = epilogue_bytes(config);
        let ctas = config.ctas_per_sm;
        // What a CTA may take, and more than what would let another one in.
        let (room, least) = (SM_BYTES / ctas - RESERVED_BYTES, SM_BYTES / (ctas + 1));
        let bytes = |row_slots: u32, apart: bool| {
            let rows = row_slots * slot;
            weights.next_multiple_of(128) + if apart { rows + sums } else { rows.max(sums) }
        };
        // Two runs are few to hide the latency of L2, but for a warp alone, which asks a run earlier; one will do
        // where there is no room for more.
        let row_slots = match (config.warps_n, config.stages) {
            (1, stages) if bytes(stages, false) > room => 1,
            (2.., 2) if bytes(4, false) <= room => 4,
            (_, stages) => stages,
        };
        let sums_apart = bytes(row_slots, true) <= room;
        Self { row_slots, sums_apart, bytes: bytes(row_slots, sums_apart).max(least) }
    }
}

/// Bytes of shared memory that a configuration needs.
pub fn smem_bytes(config: &Config) -> u32 {
    Layout::new(config).bytes
}

/// The kernel of a configuration. The configuration must be legal: see [`super::select::check`].
pub fn build(config: &Config, target: SmArch) -> Module {
    let mut a = Asm::new();
    let params = Params::declare(&mut a, &config.kind);
    let layout = Layout::new(config);
    let weights_slots = WeightRing::plan(&mut a, config);
    let row_slots = RowRing::plan(&mut a, config, layout.row_slots);
    let sums = match layout.sums_apart {
        true => a.smem.region("partial sums", epilogue_bytes(config), 16),
        false => {
            let start = row_slots[0].start;
            a.smem.reserve(start + epilogue_bytes(config));
            a.smem.overlay("partial sums (after the loop)", start, epilogue_bytes(config))
        }
    };
    a.smem.reserve(layout.bytes);

    // As little as possible stands before the first copies.
    let warp = a.section("who is who", |a| Warp::new(a, config));
    let weights = WeightRing::new(&mut a, config, &params, weights_slots, &warp);
    let (stripe, segment) = a.section("stripe", |a| emit_stripe(a, &params));
    weights.emit_first_fill(&mut a, &stripe, &segment);
    let (thread, arithmetic, rows) = a.section("who is who", |a| {
        let lane = a.reg();
        a.and_b32(lane, warp.tid, 31);
        let [row_begin, num_rows] = emit_row_tile(a, config, &params);
        let thread = Thread { tid: warp.tid, lane, warp: warp.warp, row_begin, num_rows };
        let arithmetic = emit_arithmetic(a, config, &warp, lane);
        let rows = RowRing::new(a, config, &params, row_slots, &warp, &thread);
        (thread, arithmetic, rows)
    });
    let kernel = Sm90 { config, weights, rows, arithmetic };
    a.section("fill the activations' ring", |a| a.griddepcontrol_wait());
    kernel.rows.emit_fill(&mut a, &segment, kernel.weights.num_runs);
    kernel.weights.emit_rest_of_fill(&mut a);

    let next_segment = a.label("segment");
    a.bind(next_segment);
    let acc = kernel.emit_main_loop(&mut a);
    let (next, more) = a.section("next segment", |a| {
        let next = stripe.emit_next(a, &segment);
        let more = a.test_u32(Cmp::Ne, next.end, 0);
        (next, more)
    });
    let last = a.label("last_segment");
    a.unless(more, |a| a.bra(last));
    // Nobody but this warp reads its weights, and it has read them.
    kernel.weights.emit_fill(&mut a, &stripe, &next);
    if layout.sums_apart {
        // The team has finished with the activations; a team of one has met in the middle of its last run.
        if config.warps_n > 1 {
            a.section("next segment", |a| kernel.rows.emit_barrier(a));
        }
        kernel.rows.emit_fill(&mut a, &next, kernel.weights.num_runs);
    }
    a.bind(last);
    let epilogue = Epilogue {
        config,
        params: &params,
        region: sums,
        smem: warp.smem,
        thread,
        segment: &segment,
    };
    // Sums on the activations lie where any team may still read; sums in a place of their own were read
    // before the last epilogue's last barrier.
    epilogue.emit(&mut a, &acc, layout.sums_apart);
    let end = a.label("end");
    a.section("next segment", |a| {
        let more = segment.emit_become(a, &next);
        a.unless(more, |a| a.bra(end));
    });
    if !layout.sums_apart {
        kernel.rows.emit_fill(&mut a, &next, kernel.weights.num_runs);
    }
    a.bra(next_segment);
    a.bind(end);
    a.exit();
    a.finish(&config.to_string(), target, config.num_threads(), config.ctas_per_sm)
}

/// Fitted to what the assembler needs without spills: accumulators, a pair's sums, the batch's fragments, the
/// words of a pair, pointers, addresses; with several groups a run what the sums of each begin with.
fn registers_needed(config: &Config) -> u32 {
    let (tiles, row_tiles) = (config.tiles_per_warp(), config.tile_m.div_ceil(8));
    let copies = config.tile_m.div_ceil(2 * config.warps_n);
    let more_groups = Geometry::new(config).tile.groups - 1;
    let constants = if config.conversion == Conversion::Value { 2 } else { 0 };
    let cut_rows = if config.rows == Rows::Whole { 0 } else { 4 };
    let sums = 4 * tiles * row_tiles + (20 + 4 * more_groups) * row_tiles;
    sums + 2 * tiles + copies + constants + cut_rows + 40
}

/// The addresses and constants of a warp's arithmetic.
fn emit_arithmetic<'a>(
    a: &mut Asm,
    config: &'a Config,
    warp: &Warp,
    lane: Reg<B32>,
) -> Arithmetic<'a> {
    let geometry = Geometry::new(config);
    let [weights_lane, scales_lane, quad] = a.regs();
    a.mad_lo_u32(weights_lane, lane, 16, warp.weights);
    a.shr_u32(quad, lane, 2);
    a.mad_lo_u32(scales_lane, quad, geometry.tile.scale_bytes_per_row(), warp.weights);
    let rows_lane = emit_rows_lane(a, config, &geometry, warp.smem, lane, warp.team);
    let zero = a.reg();
    a.mov_f32(zero, 0.0);
    let (constants, bias) = Bias::or_constants(a, config, geometry.row_tiles, lane);
    Arithmetic { config, geometry, weights_lane, scales_lane, rows_lane, zero, constants, bias }
}

/// What lives through the kernel.
struct Sm90<'a> {
    config: &'a Config,
    weights: WeightRing<'a>,
    rows: RowRing<'a>,
    arithmetic: Arithmetic<'a>,
}

impl Sm90<'_> {
    /// Emits the loop over the team's runs of a segment; the warp's accumulators.
    fn emit_main_loop(&self, a: &mut Asm) -> Accumulators {
        let acc = self.arithmetic.emit_accumulators(a);
        let num_runs = self.weights.num_runs;
        let [next, done] = ["main_loop", "main_loop_done"].map(|name| a.label(name));
        a.bind(next);
        let unrolled = self.rows.num_slots().max(self.config.stages);
        for run in 0..unrolled {
            a.section(&format!("main loop, run {run}"), |a| {
                let finished = a.test_u32(Cmp::Eq, num_runs, 0);
                a.when(finished, |a| a.bra(done));
                let slot = run % self.config.stages;
                let weights = self.weights.slots[slot as usize].codes;
                let rows = self.rows.slots[(run % self.rows.num_slots()) as usize];
                let (loads, mut parts) = self.arithmetic.emit_pairs(a, weights, rows, &acc);
                let loads = self.rows.emit_begin_run(a, run, num_runs, loads);
                self.weights.emit_launch_dependents(a);
                self.weights.emit_wait(a, slot);
                // All loads come before the last pair's arithmetic, where the slot is asked for anew.
                let mut second = parts.split_off(parts.len().saturating_sub(2).max(1));
                let later = second.iter_mut().map(|part| std::mem::take(&mut part.loads));
                let later =
                    later.map(|loads| Part { loads, ..Part::default() }).collect::<Vec<_>>();
                emit_woven(a, loads, parts.into_iter().chain(later));
                self.weights.emit_request(a, slot, run);
                emit_woven(a, Stream::new(), second);
                a.sub_u32(num_runs, num_runs, 1);
            });
        }
        a.section("main loop", |a| {
            self.weights.emit_advance(a, unrolled);
            self.rows.emit_advance(a, unrolled);
            a.bra(next);
        });
        a.bind(done);
        self.arithmetic.emit_finish(a, &acc);
        acc
    }
}

/// Fitted to 614 measurements on one H200: see `benches/NOTES.md`.
static MODEL: CostModel = CostModel {
    start_us: 2.47,
    wave_us: 1.0,
    bytes_per_us: 4.571e6,
    activation_share: 0.123,
    in_flight_bytes: 20.9e3,
    imbalance: 0.0965,
    uneven: 0.05,
    issue_per_us: 2309.0,
    mma_weight: 7.44,
    exposed_share: 0.382,
    round_floor: 859.0,
    round_overhead: 29.3,
    crowd_us: 0.275,
    epilogue_us: 0.204,
    epilogue_us_per_100kb: 0.928,
    hop_us: 1.09,
    helper_us: 0.13,
    helper_us_per_100kb: 1.66,
    overlap: 4.18,
};

/// What the prediction is multiplied by: as fast as `sm80` in small layers, but much faster where grids may
/// overlap, so it wins near ties.
const TIME_FACTOR: f64 = 0.95;

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Sm90Family;

impl super::KernelFamily for Sm90Family {
    fn name(&self) -> &'static str {
        "sm90"
    }

    fn isa(&self) -> PtxIsa {
        PtxIsa::new(8, 0)
    }

    fn runs_on(&self, target: SmArch) -> bool {
        target.sm == 90
    }

    fn broken_rule(&self, config: &Config) -> Option<String> {
        if let Some(rule) = broken_rule(config) {
            return Some(rule);
        }
        if config.tile_m > 16 {
            return Some(format!("{} rows, the family has up to 16", config.tile_m));
        }
        (config.rows == Rows::Element)
            .then(|| "rows are copied by 16 bytes, these allow single elements".into())
    }

    fn candidates(&self, problem: &Problem) -> Vec<Vec<Config>> {
        // Odd numbers of warps side by side: the layers of well-known models fall into as many equal tiles as
        // there are SMs.
        let mut warps = vec![(1, 4), (1, 8), (1, 16), (2, 2), (2, 4), (2, 8), (3, 2), (3, 4)];
        warps.extend([(4, 1), (4, 2), (4, 4), (5, 2), (7, 1), (7, 2), (8, 1)]);
        let mut tiles_and_ctas = vec![(2, 1), (2, 2), (4, 1), (4, 2)];
        match problem.m {
            // One row: mma are cheap.
            ..=1 => tiles_and_ctas.push((1, 1)),
            2..=8 => {}
            // The batch's fragments and sums are dear.
            _ => tiles_and_ctas.push((8, 1)),
        }
        let mut variants = vec![(Conversion::Value, Scaling::Promote)];
        let format = problem.kind.weight_format();
        if format.subnormal().is_some()
            && problem.kind.activation == Activation::F16
            && problem.group != Group::Size(16)
        {
            variants.push((Conversion::Subnormal, Scaling::Promote));
        }
        let mut lists = candidates(self.name(), problem, &warps, &tiles_and_ctas, 0, &variants);
        for config in lists.iter_mut().flatten() {
            // Better than the full ring in nearly every layer, and never much worse.
            config.start = Start::Ramped;
        }
        lists
    }

    fn runs_in_flight(&self, config: &Config) -> u32 {
        config.stages
    }

    fn cost(&self, config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
        let run = Work::of_run(config);
        let copies = 0.75 * f64::from(config.tile_m) / f64::from(config.warps_n);
        let work = Work { instructions: run.instructions + copies + 40.0, ..run };
        let runs_in_flight = self.runs_in_flight(config);
        let terms = MmaTerms { work, runs_in_flight, model: &MODEL, factor: TIME_FACTOR };
        of_mma(config, problem, device, stripe, &terms)
    }

    fn smem_bytes(&self, config: &Config) -> u32 {
        smem_bytes(config)
    }

    fn registers_needed(&self, config: &Config) -> u32 {
        registers_needed(config)
    }

    fn build(&self, config: &Config, target: SmArch) -> Module {
        build(config, target)
    }
}
