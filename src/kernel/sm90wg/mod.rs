//! Family `sm90wg`: wgmma with weights dequantised into the A registers, from 9 rows to any batch, on sm_90a.
//!
//! The weights are the m64 operand, which wgmma takes from registers, so a packed word is dequantised where it
//! is used and never written back; the batch is the n operand, read from shared memory as the tensor copies
//! laid it down. A CTA has one producer warp, and `warps_k` x `warps_n / 4` warpgroups of consumers.
//!
//! ```text
//! producer   for each stage: wait empty, expect bytes, bulk copies of weights, tensor copies of activations
//!    |  before the first activations: griddepcontrol.wait. Weights belong to nobody else and go ahead.
//! stage      [activations: k64 boxes of tile_m rows, 128B-swizzled][weights: 64-channel columns of chunks]
//!    |  mbarrier full (bytes), mbarrier empty (one arrival a consumer warp)
//! consumers  ld.shared.v4 --lop3, sub--> A set | 4 wgmma | next A set | 4 wgmma ...; one group in flight
//!            Promote: drain once a run of 128 inputs, acc += scale * sum.  Fragment: never drain.
//! ```
//!
//! CTAs take stripes of runs over all tiles of the layer and the batch, rows fastest, see [`super::stripe`];
//! partial sums go through scratch memory in fragment order.

mod consumer;
mod output;
mod producer;

use super::params::{Arguments, Params, load_u32, load_u64, magic};
use super::problem::{Config, Reduction, Rows, Scaling};
use super::stripe::{Segment, emit_stripe};
use crate::asm::reg::{Param, Reg, Region};
use crate::asm::types::{B32, B64, Cmp, Pred, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, DevicePtr, Swizzle, TensorMap};
use crate::target::SmArch;
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES, TILE_K};

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
    /// Bytes of one packed tile: codes and scales.
    tile_bytes: u32,
    /// Groups in a run, at least 1.
    groups_per_run: u32,
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
        let scale_rows = match config.group {
            Group::PerColumn => 0,
            Group::Size(size) => TILE_K as u32 / size,
        };
        let tile_bytes = CODE_BYTES_PER_TILE as u32 + scale_rows * SCALE_ROW_BYTES as u32;
        let chunk_bytes = 4 * tile_bytes;
        let stage_runs = config.warps_k * config.runs_per_stage;
        let box_bytes = config.tile_m * BOX_ROW_BYTES;
        let rows_bytes = stage_runs * 2 * box_bytes;
        let columns = config.tile_n / 64;
        let column_bytes = stage_runs * chunk_bytes;
        Self {
            tile_bytes,
            groups_per_run: scale_rows.max(1),
            chunk_bytes,
            stage_runs,
            box_bytes,
            rows_bytes,
            columns,
            column_bytes,
            stage_bytes: (rows_bytes + columns * column_bytes).next_multiple_of(1024),
        }
    }

    /// Bytes that complete a stage.
    fn transaction_bytes(&self) -> u32 {
        self.rows_bytes + self.columns * self.column_bytes
    }
}

/// The CTA's shared memory.
#[derive(Clone, Copy, Debug)]
struct Plan {
    ring: Region,
    /// Output tiles on their way from fragments to rows, a part for each warpgroup that owns sums.
    staging: Region,
    /// Sums of the teams that do not own, in fragment order.
    exchange: Region,
    full: Region,
    empty: Region,
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
        }
    }
}

/// Bytes of shared memory of a configuration.
pub fn smem_bytes(config: &Config) -> u32 {
    let mut a = Asm::new();
    Plan::new(&mut a, config);
    a.smem.bytes()
}

/// Threads of a CTA: the consumers and the producer's warpgroup.
pub fn num_threads(config: &Config) -> u32 {
    config.num_threads() + 128
}

/// Registers a thread of the producer keeps.
const PRODUCER_REGISTERS: u32 = 40;

/// Registers a thread: at entry, and of the consumers once the producer has given its own back. A scheduler
/// has 512 warp registers for its warps; the pool that `setmaxnreg` moves is what the CTA had at entry.
/// Source: PTX ISA, "setmaxnreg"; the pool's size is measured.
fn registers(config: &Config) -> (u32, u32) {
    let consumers = config.num_warps() / 4;
    let entry = (512 / ((consumers + 1) * config.ctas_per_sm)).min(255) / 8 * 8;
    let most = (entry * (consumers + 1) - PRODUCER_REGISTERS) / consumers / 8 * 8;
    (entry, most.min(248))
}

/// The entry parameters beside [`Params`].
#[derive(Clone, Copy, Debug)]
struct Extra {
    /// Activations as a tensor of rows.
    a_map: Param,
    /// Row tiles of the batch.
    row_tiles: Param,
    /// Division by `row_tiles`.
    row_tiles_magic: Param,
    /// Its shift.
    row_tiles_shift: Param,
}

impl Extra {
    fn declare(a: &mut Asm) -> Self {
        Self {
            a_map: a.param_tensor_map("a_map"),
            row_tiles: a.param_u32("row_tiles"),
            row_tiles_magic: a.param_u32("row_tiles_magic"),
            row_tiles_shift: a.param_u32("row_tiles_shift"),
        }
    }
}

/// The arguments for the entry parameters beside [`Params`].
pub fn extra_arguments(config: &Config, arguments: &Arguments) -> Vec<Arg> {
    let row_tiles = arguments.m.div_ceil(config.tile_m);
    let (multiplier, shift) = magic(row_tiles);
    let a_map = TensorMap {
        base: DevicePtr(arguments.a_ptr),
        elements: [arguments.k.into(), arguments.m.into()],
        row_bytes: arguments.a_stride_bytes.into(),
        tile: [BOX_K, config.tile_m],
        swizzle: Swizzle::B128,
    };
    vec![Arg::TensorMap(a_map), Arg::U32(row_tiles), Arg::U32(multiplier), Arg::U32(shift)]
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
    /// True in the thread that issues the copies.
    issues: Reg<Pred>,
}

/// Where a segment's tile lies.
struct Place {
    /// Tile along n.
    column_tile: Reg<B32>,
    /// First row.
    row_begin: Reg<B32>,
}

impl Wg<'_> {
    /// The segment's tile as a place: rows are fastest.
    fn emit_place(&self, a: &mut Asm, segment: &Segment) -> Place {
        let row_tiles = load_u32(a, self.extra.row_tiles);
        let multiplier = load_u32(a, self.extra.row_tiles_magic);
        let shift = load_u32(a, self.extra.row_tiles_shift);
        let column_tile = super::params::emit_div(a, segment.tile, multiplier, shift);
        let [before, row_begin] = a.regs();
        a.mul_lo_u32(before, column_tile, row_tiles);
        a.sub_u32(row_begin, segment.tile, before);
        a.mul_lo_u32(row_begin, row_begin, self.config.tile_m);
        Place { column_tile, row_begin }
    }

    /// Stages' worth of runs in a segment.
    fn emit_rounds(&self, a: &mut Asm, segment: &Segment, rounds: Reg<B32>) {
        a.sub_u32(rounds, segment.end, segment.begin);
        a.shr_u32(rounds, rounds, self.geometry.stage_runs.ilog2());
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
    let params = Params::declare(&mut a);
    let extra = Extra::declare(&mut a);
    let plan = Plan::new(&mut a, config);
    let (wg, is_producer, leads) = a.section("who is who", |a| {
        let [smem, tid, lane, own, warp] = a.regs();
        a.mov_u32_smem(smem);
        a.mov_u32_special(tid, Special::TidX);
        a.and_b32(lane, tid, 31);
        a.shr_u32(own, tid, 5);
        // One value for the warp, so that the assembler may keep what follows from it uniform.
        a.shfl_sync_idx_b32(warp, own, 0);
        let elected = a.reg();
        a.elect_sync(elected);
        let is_producer = a.test_u32(Cmp::Ge, warp, config.num_warps());
        let leads = a.test_u32(Cmp::Eq, warp, config.num_warps());
        let issues = a.reg();
        a.and_pred(issues, leads, elected);
        let geometry = Geometry::new(config);
        let wg =
            Wg { config, geometry, plan, params, extra, smem, tid, lane, warp, elected, issues };
        (wg, is_producer, leads)
    });
    let [consume, end] = ["consume", "end"].map(|name| a.label(name));
    let (stripe, segment) = a.section("stripe", |a| emit_stripe(a, &params));
    let (_, consumer_registers) = registers(config);
    a.unless(is_producer, |a| a.bra(consume));
    let cursor = wg.emit_start(&mut a, &segment);
    a.section("barriers are ready", |a| {
        a.bar_sync(0);
        a.setmaxnreg_dec_sync_aligned_u32(PRODUCER_REGISTERS);
        // The other three warps are there because registers belong to warpgroups.
        a.unless(leads, |a| a.bra(end));
    });
    wg.emit_produce(&mut a, &stripe, &segment, &cursor);
    a.bind(end);
    a.exit();
    a.bind(consume);
    a.section("barriers are ready", |a| {
        a.bar_sync(0);
        a.setmaxnreg_inc_sync_aligned_u32(consumer_registers);
    });
    wg.emit_consume(&mut a, &stripe, &segment);
    a.exit();
    let target = SmArch::specific(90);
    a.finish(&config.to_string(), target, num_threads(config), config.ctas_per_sm)
}

/// The address of the activations' tensor map.
fn emit_map(a: &mut Asm, param: Param) -> Reg<B64> {
    let map = a.reg();
    a.cvta_param_u64(map, param);
    map
}

/// The packed weights.
fn emit_weights_ptr(a: &mut Asm, params: &Params) -> Reg<B64> {
    load_u64(a, params.b_ptr)
}

/// The family.
#[derive(Clone, Copy, Debug)]
pub struct Sm90WgFamily;

impl super::KernelFamily for Sm90WgFamily {
    fn name(&self) -> &'static str {
        "sm90wg"
    }

    fn runs_on(&self, target: SmArch) -> bool {
        target.sm == 90
    }

    fn smem_bytes(&self, config: &Config) -> u32 {
        smem_bytes(config)
    }

    fn check(&self, config: &Config) -> Result<(), String> {
        if !config.tile_m.is_multiple_of(8) || !(8..=256).contains(&config.tile_m) {
            return Err(format!(
                "tile_m is {}, a multiple of 8 up to 256 is wanted",
                config.tile_m
            ));
        }
        if !config.warps_n.is_multiple_of(4) || ![1, 2].contains(&config.tiles_per_warp()) {
            return Err(format!(
                "tile_n {} over {} warps: warpgroups own 64 or 128 channels",
                config.tile_n, config.warps_n
            ));
        }
        if config.warps_k > 1 && !config.warps_n.is_power_of_two() {
            return Err(format!(
                "{} teams of {} warps: a power of two",
                config.warps_k, config.warps_n
            ));
        }
        if ![1, 2, 4].contains(&config.warps_k) || config.num_warps() > 16 {
            return Err(format!(
                "{} x {} warps: at most 16, in 1, 2 or 4 teams",
                config.warps_n, config.warps_k
            ));
        }
        if config.rows == Rows::Element || config.reduction != Reduction::F32 {
            return Err("rows by elements and in-place reduction are left to family sm80".into());
        }
        if config.scaling == Scaling::Promote
            && !matches!(config.group, Group::PerColumn | Group::Size(128))
        {
            return Err(
                "sums are promoted once in 128 inputs: smaller groups scale fragments".into()
            );
        }
        Ok(())
    }

    fn registers_needed(&self, _config: &Config) -> u32 {
        32
    }

    fn num_threads(&self, config: &Config) -> u32 {
        num_threads(config)
    }

    fn extra_arguments(&self, config: &Config, arguments: &Arguments) -> Vec<Arg> {
        extra_arguments(config, arguments)
    }

    fn stripes_cover_rows(&self) -> bool {
        true
    }

    fn build(&self, config: &Config, target: SmArch) -> Module {
        build(config, target)
    }
}
