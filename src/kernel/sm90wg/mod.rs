//! Family `sm90wg`: wgmma with weights dequantised into the A registers, from 9 rows to any batch, on sm_90a.
//!
//! The weights are the m64 operand, which wgmma takes from registers, so a packed word is dequantised where it
//! is used and never written back; the batch is the n operand, read from shared memory as the tensor copies
//! laid it down. A CTA is `warps_k` teams of `warps_n / 4` warpgroups; a team takes its share of the runs of
//! each stage, its warpgroups stand side by side along n.
//!
//! ```text
//! one warp of each warpgroup   wait empty, expect bytes, bulk copies of its weights, tensor copies of its
//!    |  share of the activations; weights go ahead of griddepcontrol.wait
//! stage   [activations: k64 boxes of tile_m rows, 128B-swizzled][weights: 64-channel columns of chunks]
//!    |  mbarrier full (bytes; one arrival a warpgroup), mbarrier empty (one arrival a warp)
//! warpgroups   ld.shared.v4 --lop3, sub--> A set | 4 wgmma | next A set | 4 wgmma ...; one group in flight
//!              Promote: drain once a run of 128 inputs, acc += scale * sum.  Fragment: never drain.
//! ```
//!
//! Tiles of the layer and the batch, rows fastest, are dealt out whole, the rest in shares, see [`super::stripe`];
//! partial sums go through scratch memory in fragment order. In clusters two CTAs share each segment, see `cluster.rs`.

mod cluster;
mod consumer;
mod output;
mod select;
mod supply;

use self::supply::Supply;
use super::MatrixInstruction;
use super::cost::Cost;
use super::experts::{Block, Support, emit_items};
use super::params::{Arguments, Params, load_u32, magic};
use super::problem::{Config, Conversion, Problem, Reduction, Rows, Scaling, Start};
use super::stripe::{Dealt, Segment, Stripe, emit_dealt_stripe};
use super::tile::Tile;
use crate::asm::reg::{Param, Reg, Region};
use crate::asm::types::{B32, Cmp, Pred, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, ArgList, DevicePtr, Swizzle, TensorMap};
use crate::target::{DeviceSpec, PtxIsa, SmArch};
use crate::weights::Group;

/// Inputs of one box of activations: 128 bytes, the width of the swizzle.
const BOX_K: u32 = 64;
/// Bytes of one row of a box.
const BOX_ROW_BYTES: u32 = 2 * BOX_K;
/// Barrier of all consumers.
const CONSUMERS: u32 = 1;
/// Barrier of the consumers that own sums.
const OWNERS: u32 = 2;
/// Barrier of the first warpgroup; the others' follow.
const WARPGROUP: u32 = 3;

/// Sizes that follow from a configuration.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    /// The packed tile.
    tile: Tile,
    /// Bytes of a chunk: four tiles.
    chunk_bytes: u32,
    /// Runs of 128 inputs in a stage, over all teams.
    stage_runs: u32,
    /// Bytes of one box of activations.
    box_bytes: u32,
    /// Bytes of a stage's activations.
    rows_bytes: u32,
    /// Columns of 64 channels in a tile.
    columns: u32,
    /// Bytes of one column's weights in a stage.
    column_bytes: u32,
    /// Bytes of a stage.
    stage_bytes: u32,
}

impl Geometry {
    fn new(config: &Config) -> Self {
        let tile = Tile::new(config);
        let chunk_bytes = 4 * tile.bytes;
        let stage_runs = config.warps_k * config.runs_per_stage;
        let box_bytes = config.tile_m * BOX_ROW_BYTES;
        let rows_bytes = stage_runs * 2 * box_bytes;
        let columns = config.tile_n / 64;
        let column_bytes = stage_runs * chunk_bytes;
        Self {
            tile,
            chunk_bytes,
            stage_runs,
            box_bytes,
            rows_bytes,
            columns,
            column_bytes,
            stage_bytes: (rows_bytes + columns * column_bytes).next_multiple_of(1024),
        }
    }
}

/// The CTA's shared memory.
#[derive(Clone, Copy, Debug)]
struct Plan {
    ring: Region,
    /// Output tiles on their way from fragments to rows, a part for each warpgroup that owns sums.
    staging: Region,
    /// Sums of the teams that do not own, in fragment order; in clusters also those of the other CTA.
    exchange: Region,
    full: Region,
    empty: Region,
    /// In clusters: the barriers of [`cluster`], 16 bytes.
    handover: Region,
}

impl Plan {
    fn new(a: &mut Asm, config: &Config) -> Self {
        let geometry = Geometry::new(config);
        let smem = &mut a.smem;
        let mut region = |name, bytes, align| smem.region(name, bytes, align);
        Self {
            ring: region("ring", config.stages * geometry.stage_bytes, 1024),
            staging: region("staging", output::staging_bytes(config), 16),
            exchange: region("exchange", output::exchange_bytes(config), 16),
            full: region("full barriers", 8 * config.stages, 8),
            empty: region("empty barriers", 8 * config.stages, 8),
            handover: region("handover barriers", if config.cluster_k > 1 { 16 } else { 0 }, 8),
        }
    }
}

/// Bytes of shared memory of a configuration.
pub fn smem_bytes(config: &Config) -> u32 {
    let mut a = Asm::new();
    Plan::new(&mut a, config);
    a.smem.bytes()
}

/// Registers that a thread may have: a scheduler has 512 for each lane of its warps.
fn registers(config: &Config) -> u32 {
    let warps = (config.num_warps() * config.ctas_per_sm).div_ceil(4);
    (512 / warps).min(255) / 8 * 8
}

/// Whether sums are scaled, in single precision, and not fragments. One scale a column is applied at the end.
fn promotes(config: &Config) -> bool {
    config.group != Group::PerColumn && config.scaling == Scaling::Promote
}

/// The entry parameters beside [`Params`].
#[derive(Clone, Copy, Debug)]
struct Extra {
    /// Activations as a tensor of rows.
    a_map: Param,
    /// How tiles are dealt out; blocks of experts are items instead.
    tiling: Option<Tiling>,
}

/// The entry parameters that say which tile is where.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    /// Row tiles of the batch.
    row_tiles: Param,
    /// Division by `row_tiles`.
    row_tiles_magic: Param,
    /// Its shift.
    row_tiles_shift: Param,
    /// The tiles that are dealt out whole.
    dealt: Dealt,
}

impl Extra {
    fn declare(a: &mut Asm, config: &Config) -> Self {
        let a_map = a.param_tensor_map("a_map");
        let tiling = (!config.kind.experts).then(|| Tiling {
            row_tiles: a.param_u32("row_tiles"),
            row_tiles_magic: a.param_u32("row_tiles_magic"),
            row_tiles_shift: a.param_u32("row_tiles_shift"),
            dealt: Dealt {
                first: a.param_u32("first_whole"),
                end: a.param_u32("num_tiles"),
                cluster: config.cluster_k,
            },
        });
        Self { a_map, tiling }
    }
}

/// The arguments for the entry parameters beside [`Params`].
pub fn extra_arguments(config: &Config, arguments: &Arguments, list: &mut ArgList) {
    let a_map = TensorMap {
        base: DevicePtr(arguments.a_ptr),
        elements: [arguments.k.into(), arguments.m.into()],
        row_bytes: arguments.a_stride_bytes.into(),
        tile: [BOX_K, config.tile_m],
        swizzle: Swizzle::B128,
    };
    list.push(Arg::TensorMap(a_map));
    if config.kind.experts {
        return;
    }
    let row_tiles = arguments.m.div_ceil(config.tile_m);
    let (multiplier, shift) = magic(row_tiles);
    let first_whole = arguments.num_runs / arguments.k_tiles;
    let num_tiles = arguments.n.div_ceil(config.tile_n) * row_tiles;
    let numbers = [row_tiles, multiplier, shift, first_whole, num_tiles];
    numbers.map(Arg::U32).into_iter().for_each(|arg| list.push(arg));
}

/// What every warp of the CTA knows.
struct Wg<'a> {
    config: &'a Config,
    geometry: Geometry,
    plan: Plan,
    params: Params,
    extra: Extra,
    smem: Reg<B32>,
    tid: Reg<B32>,
    lane: Reg<B32>,
    /// The warp's number, the same register value in all lanes.
    warp: Reg<B32>,
    /// True in one lane of each warp.
    elected: Reg<Pred>,
    /// What the CTAs of a cluster know of each other, if there are clusters.
    member: Option<cluster::Member>,
}

/// Where a segment's tile lies.
struct Place {
    /// Tile along n.
    column_tile: Reg<B32>,
    /// First row.
    row_begin: Reg<B32>,
    /// The rows, if there are experts; else the batch ends them.
    block: Option<Block>,
}

impl Wg<'_> {
    /// Emits this CTA's part of the tiles.
    fn emit_stripe(&self, a: &mut Asm) -> (Stripe, Segment) {
        match (self.extra.tiling, self.params.optional.experts) {
            (Some(tiling), _) => emit_dealt_stripe(a, &self.params, tiling.dealt),
            (None, Some(experts)) => emit_items(a, self.params.k_tiles, experts),
            (None, None) => unreachable!("kernels without experts have a tiling"),
        }
    }

    /// The segment's tile as a place: rows are fastest.
    fn emit_place(&self, a: &mut Asm, segment: &Segment) -> Place {
        let Some(tiling) = self.extra.tiling else {
            let block = segment.block.expect("kernels with experts have blocks");
            return Place {
                column_tile: segment.tile,
                row_begin: block.row_begin,
                block: Some(block),
            };
        };
        let row_tiles = load_u32(a, tiling.row_tiles);
        let multiplier = load_u32(a, tiling.row_tiles_magic);
        let shift = load_u32(a, tiling.row_tiles_shift);
        let column_tile = super::params::emit_div(a, segment.tile, multiplier, shift);
        let [before, row_begin] = a.regs();
        a.mul_lo_u32(before, column_tile, row_tiles);
        a.sub_u32(row_begin, segment.tile, before);
        a.mul_lo_u32(row_begin, row_begin, self.config.tile_m);
        Place { column_tile, row_begin, block: None }
    }

    /// Stages' worth of runs in a segment, of this CTA's share.
    fn emit_rounds(&self, a: &mut Asm, segment: &Segment, rounds: Reg<B32>) {
        a.sub_u32(rounds, segment.end, segment.begin);
        a.shr_u32(rounds, rounds, (self.geometry.stage_runs * self.config.cluster_k).ilog2());
    }

    /// Makes the barriers, a stage's in one thread each: an initialisation takes 20 clocks. A CTA barrier must follow.
    fn emit_barriers(&self, a: &mut Asm) {
        let (warps, stages) = (self.config.num_warps(), self.config.stages);
        let own = a.reg();
        a.mad_lo_u32(own, self.warp, 8, self.smem);
        for first in (0..stages).step_by(warps as usize) {
            let has = a.test_u32(Cmp::Lt, self.warp, stages - first);
            a.and_pred(has, has, self.elected);
            a.when(has, |a| {
                for (barriers, arrivals) in [(self.plan.full, warps / 4), (self.plan.empty, warps)]
                {
                    let barrier = own.at(barriers.start + 8 * first);
                    a.mbarrier_init_shared_b64(barrier, arrivals);
                }
            });
        }
        if self.config.cluster_k > 1 {
            let is_last = a.test_u32(Cmp::Eq, self.warp, warps - 1);
            a.and_pred(is_last, is_last, self.elected);
            a.when(is_last, |a| self.emit_handover_barriers(a));
        }
        a.when(self.elected, |a| a.fence_mbarrier_init_release_cluster());
    }

    /// Waits until the phase of `parity` of a barrier has completed.
    fn emit_wait(&self, a: &mut Asm, barrier: crate::asm::reg::SharedAddr, parity: Reg<B32>) {
        let again = a.label("wait");
        a.bind(again);
        let done: Reg<Pred> = a.reg();
        a.mbarrier_try_wait_parity_shared_cta_b64(done, barrier, parity);
        a.unless(done, |a| a.bra(again));
    }
}

/// The kernel of a configuration. The configuration must be legal: see [`super::select::check`].
pub fn build(config: &Config, _target: SmArch) -> Module {
    let mut a = Asm::new();
    let params = Params::declare(&mut a, &config.kind);
    let extra = Extra::declare(&mut a, config);
    let plan = Plan::new(&mut a, config);
    let wg = a.section("who is who", |a| {
        let [smem, tid, lane, own, warp] = a.regs();
        a.mov_u32_smem(smem);
        a.mov_u32_special(tid, Special::TidX);
        a.and_b32(lane, tid, 31);
        a.shr_u32(own, tid, 5);
        // One value for the warp, so that the assembler may keep what follows from it uniform.
        a.shfl_sync_idx_b32(warp, own, 0);
        let elected = a.reg();
        a.elect_sync(elected);
        let geometry = Geometry::new(config);
        let member = (config.cluster_k > 1).then(|| cluster::Member::new(a));
        Wg { config, geometry, plan, params, extra, smem, tid, lane, warp, elected, member }
    });
    a.section("barriers", |a| wg.emit_barriers(a));
    a.section("tensor map", |a| {
        // The first copies of activations look it up, maybe after a wait for the kernel before this one.
        let (map, is_first) = (a.reg(), a.test_u32(Cmp::Eq, wg.warp, 0));
        a.cvta_param_u64(map, extra.a_map);
        a.and_pred(is_first, is_first, wg.elected);
        a.when(is_first, |a| a.prefetch_tensormap(map));
    });
    if config.cluster_k > 1 {
        a.cluster = config.cluster_k;
        a.section("cluster", |a| a.barrier_cluster_arrive_relaxed_aligned());
    }
    if config.kind.experts {
        // The kernel before may be writing the row blocks.
        a.section("stripe", |a| a.griddepcontrol_wait());
    }
    let (stripe, segment) = a.section("stripe", |a| wg.emit_stripe(a));
    let end = segment.block.map(|block| {
        let (end, idle) = (a.label("end"), a.test_u32(Cmp::Eq, block.num_rows, 0));
        a.when(idle, |a| a.bra(end));
        end
    });
    let supply = a.section("supply", |a| {
        let supply = Supply::new(a, &wg);
        a.bar_sync(0);
        supply.emit_fill(a);
        supply
    });
    if config.cluster_k > 1 {
        // The other CTA has begun long since.
        a.section("cluster", |a| a.barrier_cluster_wait_acquire_aligned());
    }
    wg.emit_consume(&mut a, &stripe, &segment, &supply);
    end.into_iter().for_each(|end| a.bind(end));
    a.exit();
    let target = SmArch::specific(90);
    a.finish(&config.to_string(), target, config.num_threads(), config.ctas_per_sm)
}

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Sm90WgFamily;

impl super::KernelFamily for Sm90WgFamily {
    fn name(&self) -> &'static str {
        "sm90wg"
    }

    fn isa(&self) -> PtxIsa {
        PtxIsa::new(8, 0)
    }

    fn config_isa(&self, config: &Config) -> PtxIsa {
        // `st.async`.
        if config.cluster_k > 1 { PtxIsa::new(8, 1) } else { self.isa() }
    }

    fn runs_on(&self, target: SmArch) -> bool {
        target.sm == 90
    }

    fn smem_bytes(&self, config: &Config) -> u32 {
        smem_bytes(config)
    }

    fn broken_rule(&self, config: &Config) -> Option<String> {
        if !config.tile_m.is_multiple_of(8) || !(8..=256).contains(&config.tile_m) {
            return Some(format!(
                "tile_m is {}, a multiple of 8 up to 256 is wanted",
                config.tile_m
            ));
        }
        if !config.warps_n.is_multiple_of(4) || ![1, 2].contains(&config.tiles_per_warp()) {
            return Some(format!(
                "tile_n {} over {} warps: warpgroups own 64 or 128 channels",
                config.tile_n, config.warps_n
            ));
        }
        if config.warps_k > 1 && !config.warps_n.is_power_of_two() {
            return Some(format!(
                "{} teams of {} warps: a power of two",
                config.warps_k, config.warps_n
            ));
        }
        if ![1, 2, 4].contains(&config.warps_k) || config.num_warps() > 16 {
            return Some(format!(
                "{} x {} warps: at most 16, in 1, 2 or 4 teams",
                config.warps_n, config.warps_k
            ));
        }
        if config.kind.experts && config.num_warps() > 12 {
            return Some(format!(
                "{} warps: items of experts take registers that descriptors want, at most 12",
                config.num_warps()
            ));
        }
        if ![1, 2].contains(&config.cluster_k) {
            return Some(format!("clusters of {}: 1 or 2 CTAs share a tile", config.cluster_k));
        }
        if !config.tile_m.is_multiple_of(8 * config.cluster_k) {
            return Some(format!(
                "{} rows: the CTAs of a cluster own 8 or a multiple each",
                config.tile_m
            ));
        }
        if config.rows == Rows::Element || config.reduction != Reduction::F32 {
            return Some("rows by elements and in-place reduction are left to family sm80".into());
        }
        if config.start != Start::Full || config.evict_first {
            return Some("other starts and the L2 policy are for the other families".into());
        }
        if config.conversion != Conversion::Value {
            return Some(
                "subnormal codes want the sums of the batch, which no warp has here".into(),
            );
        }
        if !(1..=4).contains(&config.runs_per_stage) || !config.runs_per_stage.is_power_of_two() {
            return Some(format!("{} runs of a team in a stage: 1, 2 or 4", config.runs_per_stage));
        }
        if config.scaling == Scaling::Promote
            && !matches!(config.group, Group::PerColumn | Group::Size(128))
        {
            return Some(
                "sums are promoted once in 128 inputs: smaller groups scale fragments".into(),
            );
        }
        None
    }

    fn candidates(&self, problem: &Problem) -> Vec<Vec<Config>> {
        select::candidates(problem, false)
    }

    fn all_candidates(&self, problem: &Problem) -> Vec<Vec<Config>> {
        select::candidates(problem, true)
    }

    fn instruction(&self) -> MatrixInstruction {
        MatrixInstruction::Wgmma
    }

    fn experts(&self) -> Option<Support> {
        Some(Support { tallest: 256, in_order: true })
    }

    fn stripe_step(&self, config: &Config) -> u32 {
        Geometry::new(config).stage_runs * config.cluster_k
    }

    fn cost(&self, config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost {
        select::cost(config, problem, device, stripe)
    }

    fn runs_in_flight(&self, config: &Config) -> u32 {
        (config.stages - 1) * config.runs_per_stage
    }

    fn registers_needed(&self, config: &Config) -> u32 {
        select::registers_needed(config)
    }

    fn extra_arguments(&self, config: &Config, arguments: &Arguments, list: &mut ArgList) {
        extra_arguments(config, arguments, list);
    }

    fn stripes_cover_rows(&self) -> bool {
        true
    }

    fn build(&self, config: &Config, target: SmArch) -> Module {
        build(config, target)
    }
}
