//! The family's configurations and what they are predicted to take.
//!
//! A product of 64 channels and `tile_m` rows takes the tensor cores `tile_m / 2` clocks of an SM, at least 13.1:
//! fetching A from registers takes that long. Around it stand what a scheduler issues for it (the fetch again,
//! the conversion, scales), and the chain of one warpgroup: its products, the wait, the conversion. The three,
//! the weights' bytes and the bytes that pass from L2 to the SMs bound a launch; constants are fitted to
//! measurements of one H200, see `benches/NOTES.md`.

use super::Geometry;
use crate::kernel::cost::{Cost, Tiling, weight_bytes};
use crate::kernel::problem::{Config, Conversion, Problem, Reduction, Rows, Scaling, Start};
use crate::target::DeviceSpec;
use crate::weights::Group;

/// Warpgroups: channels of a tile, warps side by side, teams.
const SHAPES: [(u32, u32, u32); 11] = [
    (64, 4, 1),
    (64, 4, 2),
    (64, 4, 4),
    (128, 4, 1),
    (128, 4, 2),
    (128, 8, 1),
    (128, 8, 2),
    (192, 12, 1),
    (256, 8, 1),
    (256, 16, 1),
    (256, 8, 2),
];

/// CTAs on an SM, runs in a stage, CTAs of a cluster.
const PIPELINES: [(u32, u32, u32); 8] =
    [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)];

/// Tiles of a layer and batch up to which clusters are worth considering: two for each SM of the largest cards.
const MOST_SHARED_TILES: u64 = 264;

/// Bytes of weights on their way beyond which more stages bring nothing.
const IN_FLIGHT_BYTES: u32 = 110 << 10;
/// Stages of a ring, at least and at most: with two, copies and products take turns.
const MIN_STAGES: u32 = 3;
const MAX_STAGES: u32 = 6;

/// Row tiles for a batch: the batch itself in steps of 8, or for large ones what fits evenly.
fn tile_ms(problem: &Problem) -> Vec<u32> {
    // Half the rows convert every weight twice, but are twice the tiles: for layers that want more of them.
    let wants_tiles = u64::from(problem.n) * u64::from(problem.k) < 100_000_000;
    match problem.m {
        m @ 0..=64 => vec![(m.max(1) as u32).next_multiple_of(8)],
        65..=96 => vec![96],
        97..=128 if wants_tiles => vec![128, 64],
        97..=128 => vec![128],
        129..=192 => vec![192, 96],
        _ => vec![256, 128],
    }
}

/// Sums of a thread, in registers.
fn sums(config: &Config) -> u32 {
    let copies = if super::promotes(config) { 2 } else { 1 };
    copies * config.tile_m / 2 * config.tiles_per_warp()
}

/// What a thread needs; beside its sums fitted to what the assembler takes.
pub(super) fn registers_needed(config: &Config) -> u32 {
    let others = match (super::promotes(config), config.runs_per_stage) {
        (true, _) => 56,
        (false, 1) => 66,
        (false, _) => 90,
    };
    // Items of experts are read ahead, by supply and consumers.
    let items = if config.kind.experts { 16 } else { 0 };
    sums(config) + others + items
}

/// Configurations for a problem: each with as many stages as fit, down to the fewest that overlap. Without `all`
/// those that gain by their rows.
pub(super) fn candidates(problem: &Problem, all: bool) -> Vec<Vec<Config>> {
    let mut lists = Vec::new();
    if problem.rows == Rows::Element || (problem.m < 9 && !all) {
        return lists;
    }
    let scalings: &[Scaling] = match problem.group {
        Group::PerColumn => &[Scaling::Promote],
        Group::Size(128) => &[Scaling::Promote, Scaling::Fragment],
        Group::Size(_) => &[Scaling::Fragment],
    };
    for tile_m in tile_ms(problem) {
        for (tile_n, warps_n, warps_k) in SHAPES {
            for (ctas_per_sm, runs_per_stage, cluster_k) in PIPELINES {
                for &scaling in scalings {
                    let config = |stages| Config {
                        family: "sm90wg",
                        kind: problem.kind,
                        group: problem.group,
                        tile_m: tile_m.next_multiple_of(8 * cluster_k),
                        tile_n,
                        warps_n,
                        warps_k,
                        stages,
                        runs_per_stage,
                        ctas_per_sm,
                        cluster_k,
                        start: Start::Full,
                        conversion: Conversion::Value,
                        scaling,
                        reduction: Reduction::F32,
                        rows: problem.rows,
                        evict_first: false,
                    };
                    let geometry = Geometry::new(&config(2));
                    let weights = geometry.columns * geometry.column_bytes * ctas_per_sm;
                    let most =
                        (1 + IN_FLIGHT_BYTES.div_ceil(weights)).clamp(MIN_STAGES, MAX_STAGES);
                    // Few rows gain nothing by scaled fragments, many nothing by promoted sums.
                    let gains = match scaling {
                        // With one scale a column none are promoted.
                        Scaling::Promote => tile_m <= 96 || problem.group == Group::PerColumn,
                        Scaling::Fragment => tile_m >= 48 || problem.group != Group::Size(128),
                    };
                    let step = geometry.stage_runs * cluster_k;
                    let whole = problem.k.div_ceil(128).is_multiple_of(step);
                    // Tall tiles: two warpgroups of two tiles each measured better than four of one.
                    let crowded = tile_m > 96 && warps_n * warps_k > 12;
                    // Clusters share tiles that are too few for a CTA each to fill the card.
                    let tiles =
                        u64::from(problem.n.div_ceil(tile_n)) * problem.m.div_ceil(tile_m.into());
                    let shares = cluster_k == 1 || (tile_m <= 128 && tiles <= MOST_SHARED_TILES);
                    let deep = runs_per_stage == 1 || tile_m <= 64;
                    if whole && deep && (all || (gains && !crowded && shares)) {
                        lists.push((MIN_STAGES..=most).rev().map(config).collect());
                    }
                }
            }
        }
    }
    lists
}

/// The constants of the prediction.
struct Model {
    /// Launch, prologue, first bytes, and each further wave of CTAs, in microseconds.
    start_us: f64,
    wave_us: f64,
    /// Bytes per microsecond: of memory, and from L2 to all SMs, weights and rows. CTAs in step share a row's.
    memory_bytes_per_us: f64,
    weights_l2_bytes_per_us: f64,
    rows_l2_bytes_per_us: f64,
    /// Clocks per microsecond.
    clocks_per_us: f64,
    /// Clocks that a scheduler issues for a product, beside the fetch of A: conversion, with scaled fragments,
    /// promotion of one sum, and what a stage takes.
    value: f64,
    fragment: f64,
    promotion: f64,
    stage: f64,
    /// Clocks from a product's end to the next one's begin in the same warpgroup.
    latency: f64,
    /// Clocks that the tensor cores lose with a product, whatever its rows, and the share of it with two tiles of
    /// 64 channels a warpgroup.
    gap: f64,
    gap_of_second: f64,
    /// What stripes that do not divide tiles evenly cost, as a share: their CTAs read different inputs at a time.
    uneven: f64,
    /// Bytes in flight on an SM below which the stream starves.
    in_flight_bytes: f64,
    /// Reduction: a hop, and per 100 kB of a helper's sums; the epilogue of a segment, fixed and per 100 kB.
    hop_us: f64,
    helper_us_per_100kb: f64,
    epilogue_us: f64,
    epilogue_us_per_100kb: f64,
    /// The exchange of a cluster in a segment, fixed and per 100 kB of the tile's sums.
    exchange_us: f64,
    exchange_us_per_100kb: f64,
    /// What a gigabyte of rows costs a launch that is long enough to be held by the card's power.
    power_us_per_gb: f64,
    /// Exponents with which bounds add up: of an SM's clocks, of clocks and memory, and of both with L2.
    sharp: f64,
    overlap: f64,
    l2_overlap: f64,
}

const MODEL: Model = Model {
    start_us: 3.07,
    wave_us: 4.55,
    memory_bytes_per_us: 4.8e6,
    weights_l2_bytes_per_us: 6.29e6,
    rows_l2_bytes_per_us: 46.5e6,
    clocks_per_us: 1712.0,
    value: 4.95,
    fragment: 16.9,
    promotion: 1.86,
    stage: 40.6,
    latency: 17.1,
    gap: 6.26,
    gap_of_second: 0.30,
    uneven: 0.079,
    in_flight_bytes: 43.3e3,
    hop_us: 1.10,
    helper_us_per_100kb: 1.50,
    epilogue_us: 0.336,
    epilogue_us_per_100kb: 0.745,
    exchange_us: 0.507,
    exchange_us_per_100kb: 0.50,
    power_us_per_gb: 20.0,
    sharp: 3.70,
    overlap: 10.0,
    l2_overlap: 2.0,
};

/// Clocks that fetching A from registers takes, whatever the columns. Measured.
const FETCH_CLOCKS: f64 = 13.1;

/// Predicts one launch.
pub(super) fn cost(config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
    let (tiling, model) = (Tiling::new(config, problem), &MODEL);
    let (num_sms, stripe) = (f64::from(device.num_sms), f64::from(stripe));
    let k_tiles = tiling.k_tiles as f64;
    let cluster = f64::from(config.cluster_k);
    let stripes = ((tiling.num_tiles * tiling.row_tiles) as f64 * k_tiles / stripe).ceil();
    let ctas = cluster * stripes;
    let per_sm = (ctas / num_sms).ceil();
    let resident = per_sm.min(f64::from(config.ctas_per_sm));
    let waves = (ctas / (num_sms * f64::from(config.ctas_per_sm))).ceil();

    // Clocks of the busiest SM.
    let norm = |values: &[f64], q: f64| {
        values.iter().map(|value| value.powf(q)).sum::<f64>().powf(1.0 / q)
    };
    let warpgroups = f64::from(config.num_warps() / 4);
    let products = stripe / cluster / f64::from(config.warps_k)
        * 8.0
        * f64::from(config.tiles_per_warp())
        * warpgroups
        * per_sm;
    let half_rows = f64::from(config.tile_m) / 2.0;
    let gap = if config.tiles_per_warp() > 1 { model.gap * model.gap_of_second } else { model.gap };
    let tensor = half_rows.max(FETCH_CLOCKS) + gap;
    let conversion = match super::promotes(config) {
        true => model.value + model.promotion * half_rows / 8.0,
        false => model.fragment,
    };
    let issue = FETCH_CLOCKS + conversion + model.stage / f64::from(config.runs_per_stage) / 8.0;
    let chain = (tensor.max(issue) + model.latency) / (warpgroups * resident);
    let clocks = products * norm(&[tensor, issue, chain], model.sharp);
    let issue_us = clocks / model.clocks_per_us;

    // Bytes.
    let weights = weight_bytes(problem);
    let rows = 2.0 * problem.m as f64 * f64::from(problem.k) * tiling.num_tiles as f64;
    let geometry = Geometry::new(config);
    let in_flight = f64::from((config.stages - 1) * geometry.stage_bytes) * resident;
    let starved = (model.in_flight_bytes / in_flight).max(1.0);
    let memory_us = weights / model.memory_bytes_per_us * starved;
    let l2_us = weights * tiling.row_tiles as f64 / model.weights_l2_bytes_per_us
        + rows / model.rows_l2_bytes_per_us;

    // Fixed.
    let shares = stripe % k_tiles != 0.0;
    let helpers = if stripe < k_tiles { (k_tiles / stripe).ceil() - 1.0 } else { 1.0 };
    let tile = f64::from(4 * config.tile_m * config.tile_n) / 1e5;
    let reduction_us =
        if shares { model.hop_us + model.helper_us_per_100kb * helpers * tile } else { 0.0 };
    let segments = (stripe / k_tiles).ceil() + if shares && stripe > k_tiles { 1.0 } else { 0.0 };
    let exchange_us = match config.cluster_k {
        1 => 0.0,
        _ => model.exchange_us + model.exchange_us_per_100kb * tile,
    };
    let epilogue_us =
        model.epilogue_us + model.epilogue_us_per_100kb * tile / cluster + exchange_us;
    let fixed_us =
        model.start_us + model.wave_us * (waves - 1.0) + reduction_us + segments * epilogue_us;
    let in_step = stripe % k_tiles == 0.0 || k_tiles % stripe == 0.0;
    let uneven = if in_step { 1.0 } else { 1.0 + model.uneven };
    let body_us = norm(&[norm(&[issue_us, memory_us], model.overlap), l2_us], model.l2_overlap);
    // Long launches run at the power limit, where moving rows costs clocks.
    let sustained = ((issue_us - 200.0) / 400.0).clamp(0.0, 1.0);
    let power_us = sustained * rows / 1e9 * model.power_us_per_gb;
    let total_us = fixed_us + uneven * body_us + power_us;
    // Its rings leave no room for another CTA.
    let early_us = Cost::early(total_us, memory_us, 1.0);
    Cost { total_us, early_us, memory_us: memory_us.max(l2_us), issue_us, fixed_us }
}
