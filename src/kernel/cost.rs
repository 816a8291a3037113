//! What a launch is predicted to take.
//!
//! A prediction in microseconds from the work that each scheduler of the busiest SM has to issue, the bytes
//! that must come from memory, and fixed costs; its constants were fitted to measurements recorded in
//! `benches/NOTES.md`. Families have constants of their own, and say what a run takes and how many are in flight.

use std::fmt;

use super::epilogue::epilogue_bytes;
use super::problem::{Config, Conversion, Kind, Problem, Scaling};
use super::select::family_of;
use crate::target::DeviceSpec;
use crate::weights::{Group, ScaleRow, TILE_CHANNELS, TILE_K};

/// Bytes of a packed tile as the prediction counts them: scales of two bytes count once a tile.
pub(super) fn tile_bytes(kind: &Kind, group: Group) -> f64 {
    let group = match kind.scales {
        ScaleRow::F16 => Group::Size(TILE_K as u32),
        ScaleRow::E5m3 => group,
    };
    kind.tile().tile_bytes(group) as f64
}

/// Bytes of a problem's weights, and a little.
pub(super) fn weight_bytes(problem: &Problem) -> f64 {
    let per_weight =
        1.0007 * tile_bytes(&problem.kind, problem.group) / (TILE_CHANNELS * TILE_K) as f64;
    f64::from(problem.n) * f64::from(problem.k) * per_weight
}

/// What a plan is predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Microseconds in all, after the kernel before it has ended.
    pub total_us: f64,
    /// The same with early launch.
    pub early_us: f64,
    /// Microseconds that memory needs for the bytes.
    pub memory_us: f64,
    /// Microseconds that the busiest scheduler needs to issue its instructions.
    pub issue_us: f64,
    /// Microseconds of launch, filling the pipeline, reductions and output.
    pub fixed_us: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.1} us (memory {:.1}, issue {:.1}, fixed {:.1})",
            self.total_us, self.memory_us, self.issue_us, self.fixed_us
        )
    }
}

impl Cost {
    /// What early launch saves: the launch and the first bytes hide behind the kernel before.
    const EARLY_GAIN_US: f64 = 1.1;
    /// What a stream loses, for each microsecond that it takes, when several CTAs of a grid may land on one SM.
    const EARLY_CROWD: f64 = 0.12;
    /// Streams up to this long do not suffer, those of twice that fully.
    const EARLY_SHORT_US: f64 = 3.5;

    /// The prediction with early launch of what takes `total_us` without.
    ///
    /// CTAs begin wherever the grid before leaves room. Where more than one of them fits on an SM (`fit`), some SMs get
    /// several and others none.
    pub(super) fn early(total_us: f64, memory_us: f64, fit: f64) -> f64 {
        let long = ((memory_us - Self::EARLY_SHORT_US) / Self::EARLY_SHORT_US).clamp(0.0, 1.0);
        let crowd = if fit > 1.0 { Self::EARLY_CROWD * long * memory_us } else { 0.0 };
        (total_us - Self::EARLY_GAIN_US).max(memory_us) + crowd
    }
}

/// The sizes of a problem in tiles of a configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    pub(super) num_tiles: u64,
    pub(super) k_tiles: u64,
    pub(super) row_tiles: u64,
}

impl Tiling {
    pub(super) fn new(config: &Config, problem: &Problem) -> Self {
        Self {
            num_tiles: u64::from(problem.n.div_ceil(config.tile_n)),
            k_tiles: u64::from(problem.k.div_ceil(128)),
            row_tiles: problem.m.div_ceil(config.tile_m.into()),
        }
    }
}

/// The constants of the cost model, for one family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Launch, prologue, first bytes, in microseconds.
    pub start_us: f64,
    /// Each further wave of CTAs.
    pub wave_us: f64,
    /// Bytes per microsecond of the weight stream.
    pub bytes_per_us: f64,
    /// Share of the activations' bytes, read again by each tile, that slows the weight stream.
    pub activation_share: f64,
    /// Bytes in flight on an SM below which the stream starves.
    pub in_flight_bytes: f64,
    /// How much of an SM's surplus of work over the average the stream waits for.
    pub imbalance: f64,
    /// What stripes that neither divide tiles nor are whole ones cost the stream, as a share.
    pub uneven: f64,
    /// Instructions that a scheduler issues in a microsecond.
    pub issue_per_us: f64,
    /// Instructions' worth of one mma, beside its own issue.
    pub mma_weight: f64,
    /// Further instructions' worth of a round, exposed because few warps hide each other's latencies: a share of
    /// one warp's round.
    pub exposed_share: f64,
    /// A floor for the round, in instructions.
    pub round_floor: f64,
    /// Instructions' worth of a round that no warp hides.
    pub round_overhead: f64,
    /// What bytes in flight on an SM beyond 64 KiB cost, for as much again: the first wait for the others.
    pub crowd_us: f64,
    /// The segment's epilogue.
    pub epilogue_us: f64,
    /// The same per 100 kB of partial sums in shared memory.
    pub epilogue_us_per_100kb: f64,
    /// The reduction hop.
    pub hop_us: f64,
    /// Each helper of it.
    pub helper_us: f64,
    /// The same per 100 kB of its partial sums.
    pub helper_us_per_100kb: f64,
    /// Exponent with which memory and issue time add up: larger means that they overlap better.
    pub overlap: f64,
}

/// What one warp issues for one run of 128 inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// Instructions, mma apart.
    pub instructions: f64,
    /// `mma.m16n8k16`.
    pub mma: f64,
}

impl Work {
    /// The arithmetic of a run: shared loads, conversion, scales. What the ring takes is the family's.
    pub(super) fn of_run(config: &Config) -> Self {
        let tiles = f64::from(config.tiles_per_warp());
        let row_tiles = f64::from(config.tile_m.div_ceil(8));
        let (kind, tile) = (&config.kind, config.kind.tile());
        let (per_step, bias) = match config.conversion {
            Conversion::Value => {
                (f64::from(kind.fragments().num_instructions(kind.activation)), 0.0)
            }
            Conversion::Subnormal => (5.0, 5.0 * row_tiles),
        };
        let bias_mma = if bias > 0.0 { 4.0 * row_tiles } else { 0.0 };
        let conversion = 8.0 * tiles * per_step + bias;
        let scaling = match (config.group, config.scaling) {
            (Group::PerColumn, _) => 0.0,
            (_, Scaling::Promote) => tiles * (4.0 * row_tiles + 4.0),
            (_, Scaling::Fragment) => 8.0 * tiles * 4.0 + 2.0 * tiles,
        };
        let vectors = 2.0 * tile.words_per_fragment() as f64;
        let zeros = 3.0 * tile.zero_rows(config.group) as f64;
        let loads = (vectors + zeros + 1.0) * tiles + 4.0 * row_tiles;
        Self { instructions: conversion + scaling + loads, mma: 8.0 * tiles * row_tiles + bias_mma }
    }
}

/// What the prediction wants to know of a family that uses `mma.m16n8k16`.
pub(super) struct MmaTerms {
    /// What one warp issues for one run.
    pub work: Work,
    /// Runs of a team whose weights are on their way while one is computed.
    pub runs_in_flight: u32,
    /// The constants.
    pub model: &'static CostModel,
    /// What the prediction is multiplied by.
    pub factor: f64,
}

/// Predicts one launch.
pub fn cost(config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
    family_of(config).cost(config, problem, device, stripe)
}

/// The prediction for families that use `mma.m16n8k16`.
pub(super) fn of_mma(
    config: &Config,
    problem: &Problem,
    device: &DeviceSpec,
    stripe: u32,
    terms: &MmaTerms,
) -> Cost {
    let family = family_of(config);
    let (tiling, model) = (Tiling::new(config, problem), terms.model);
    let num_sms = f64::from(device.num_sms);
    let stripe = f64::from(stripe);
    let k_tiles = tiling.k_tiles as f64;
    let runs = (tiling.num_tiles * tiling.k_tiles) as f64;
    let ctas = (runs / stripe).ceil() * tiling.row_tiles as f64;
    let smem = family.smem_bytes(config);
    let spec = device.arch.spec();
    let fit = spec.map_or(1, |spec| {
        spec.ctas_that_fit(config.num_threads(), family.registers_needed(config), smem)
    });
    let fit = f64::from(fit.max(config.ctas_per_sm));
    let ctas_per_sm = (ctas / num_sms).ceil();
    let resident = ctas_per_sm.min(fit);
    let waves = (ctas / (num_sms * fit)).ceil();

    // Issue: what the busiest scheduler has to issue.
    let work = terms.work;
    let per_run = work.instructions + (1.0 + model.mma_weight) * work.mma;
    let warps = (f64::from(config.num_warps()) * resident / 4.0).ceil();
    let round = (per_run * (warps + model.exposed_share)).max(model.round_floor);
    let rounds = (stripe / f64::from(config.warps_k)).ceil();
    let issue_us = waves * rounds * (round + model.round_overhead) / model.issue_per_us;

    // Memory: the weights, once for each row tile that no longer finds them in L2.
    let weight_bytes = weight_bytes(problem);
    let in_l2 = weight_bytes < 0.6 * device.l2_bytes as f64;
    let passes = 1.0 + (tiling.row_tiles as f64 - 1.0) * if in_l2 { 0.25 } else { 1.0 };
    let a_bytes = 2.0 * f64::from(problem.k) * (tiling.num_tiles * tiling.row_tiles) as f64;
    let a_bytes = a_bytes * f64::from(config.tile_m);
    let bytes = weight_bytes * passes + model.activation_share * a_bytes;
    let in_flight = resident
        * f64::from(terms.runs_in_flight * config.num_warps() * config.tiles_per_warp())
        * tile_bytes(&config.kind, config.group);
    let starved = (model.in_flight_bytes / in_flight).max(1.0);
    let busiest = ctas_per_sm * stripe * num_sms / (runs * tiling.row_tiles as f64);
    let uneven = 1.0 + model.imbalance * (busiest.max(1.0) - 1.0);
    let in_step = stripe % k_tiles == 0.0 || k_tiles % stripe == 0.0;
    let out_of_step = if in_step { 1.0 } else { 1.0 + model.uneven };
    let memory_us = bytes / model.bytes_per_us * starved * uneven * out_of_step;

    // Fixed: start, waves, epilogues, reduction.
    let segments = (stripe / k_tiles).ceil();
    let sums = f64::from(epilogue_bytes(config)) / 1e5;
    let shares = stripe % k_tiles != 0.0;
    let helpers = if stripe < k_tiles { (k_tiles / stripe).ceil() - 1.0 } else { 1.0 };
    let tile = f64::from(4 * config.tile_m * config.tile_n) / 1e5;
    let reduction_us = if shares {
        model.hop_us + helpers * (model.helper_us + model.helper_us_per_100kb * tile)
    } else {
        0.0
    };
    let epilogue_us = model.epilogue_us + model.epilogue_us_per_100kb * sums;
    let crowd_us = model.crowd_us * (in_flight / 65536.0 - 1.0).max(0.0);
    let start_us = model.start_us + model.wave_us * (waves - 1.0) + crowd_us;
    let fixed_us = start_us + segments * epilogue_us + reduction_us;

    let norm =
        |a: f64, b: f64| (a.powf(model.overlap) + b.powf(model.overlap)).powf(1.0 / model.overlap);
    let total_us = terms.factor * (fixed_us + norm(memory_us, issue_us));
    let early_us = Cost::early(total_us, memory_us, fit);
    Cost { total_us, early_us, memory_us, issue_us, fixed_us }
}
