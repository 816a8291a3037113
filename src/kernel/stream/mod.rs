//! What the families that stream weights past `mma.sync` share.
//!
//! Their CTAs are the same: teams of warps side by side along n, each team on every `warps_k`-th run of 128
//! inputs; the weights are the m16 operand and the batch is the n8 one. They differ in how bytes reach shared
//! memory. This room owns what follows once they are there: the sizes, the lanes' addresses, the arithmetic
//! of a run ([`run`]) and the places that activations are copied to ([`RowCopies`]).

mod bias;
mod run;

pub(super) use bias::Bias;
pub(super) use run::{Arithmetic, Part, emit_rows_lane, emit_woven};

use super::params::{Params, load_u32};
use super::problem::{Config, Conversion, Problem, Reduction, Scaling, Start};
use super::select::{TILE_MS, tile_m_for};
use super::tile::Tile;
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, Cmp, Pred, Special};
use crate::layout::swizzle_unit;
use crate::weights::{Group, TILE_K};

/// Bytes of one row of activations in a slot: 128 inputs.
pub(super) const ROW_BYTES: u32 = 2 * TILE_K as u32;
/// 16-byte units of that row.
const ROW_UNITS: u32 = ROW_BYTES / 16;

/// Bytes of weights in flight on an SM that the stream is given where shared memory allows: enough to cover
/// the loaded latency of memory, and not so much that the first bytes wait for all the others.
const IN_FLIGHT_BYTES: u32 = 64 << 10;

/// Configurations of a family for these splits into warps (`warps_n`, `warps_k`) and these pairs of tiles a warp
/// and CTAs an SM. The ring has as many slots as put `IN_FLIGHT_BYTES` in flight, at least two; `computed` of
/// them are being computed on. Fewer are the next preference.
pub(super) fn candidates(
    family: &'static str,
    problem: &Problem,
    warps: &[(u32, u32)],
    tiles_and_ctas: &[(u32, u32)],
    computed: u32,
    variants: &[(Conversion, Scaling)],
) -> Vec<Vec<Config>> {
    let mut candidates = Vec::new();
    for &(warps_n, warps_k) in warps {
        for &(tiles_per_warp, ctas_per_sm) in tiles_and_ctas {
            let tile_bytes = problem.kind.tile().tile_bytes(Group::Size(128)) as u32;
            let slot_bytes = ctas_per_sm * warps_n * warps_k * tiles_per_warp * tile_bytes;
            let stages = computed + IN_FLIGHT_BYTES.div_ceil(slot_bytes).max(2);
            for &(conversion, scaling) in variants {
                // Without groups there is nothing to scale in the loop.
                if scaling == Scaling::Fragment && problem.group == Group::PerColumn {
                    continue;
                }
                let config = |stages| Config {
                    family,
                    kind: problem.kind,
                    group: problem.group,
                    tile_m: tile_m_for(problem.m),
                    tile_n: 16 * tiles_per_warp * warps_n,
                    warps_n,
                    warps_k,
                    stages,
                    runs_per_stage: 1,
                    ctas_per_sm,
                    cluster_k: 1,
                    start: Start::Full,
                    conversion,
                    scaling,
                    reduction: Reduction::F32,
                    rows: problem.rows,
                    evict_first: false,
                };
                candidates.push((2..=stages).rev().map(config).collect());
            }
        }
    }
    candidates
}

/// Sizes that follow from a configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    /// The packed tile.
    pub(super) tile: Tile,
    /// Bytes of one run's weights of a warp.
    pub(super) warp_bytes: u32,
    /// Bytes of one run's activations of a team.
    pub(super) rows_bytes: u32,
    /// 8-row tiles of the batch.
    pub(super) row_tiles: u32,
    /// k16 steps of one `ldmatrix.x4`: 1 of two row tiles, or 2 of one.
    pub(super) steps_per_load: u32,
}

impl Geometry {
    pub(super) fn new(config: &Config) -> Self {
        let tile = Tile::new(config);
        Self {
            tile,
            warp_bytes: config.tiles_per_warp() * tile.bytes,
            rows_bytes: config.tile_m * ROW_BYTES,
            row_tiles: config.tile_m.div_ceil(8),
            // For bare codes a load is also what one mma adds up: one row tile.
            steps_per_load: match config.conversion {
                Conversion::Value if config.tile_m > 8 => 1,
                _ => 2,
            },
        }
    }
}

/// Emits `x / d` and the rest, for an `x` below 2048.
///
/// With `m = ceil(2^20 / d)` the quotient `x m / 2^20` is too large by less than `x / 2^20`, which is less than the
/// `1 / d` that would carry it over, for any `d` up to 512.
pub(super) fn emit_divide(a: &mut Asm, x: Reg<B32>, d: u32) -> [Reg<B32>; 2] {
    let [quotient, rest] = a.regs();
    if d.is_power_of_two() {
        a.shr_u32(quotient, x, d.ilog2());
        a.and_b32(rest, x, d - 1);
    } else {
        a.mul_lo_u32(quotient, x, (1u32 << 20).div_ceil(d));
        a.shr_u32(quotient, quotient, 20);
        a.mul_lo_u32(rest, quotient, d);
        a.sub_u32(rest, x, rest);
    }
    [quotient, rest]
}

/// Emits the CTA's row tile: its first row and how many of its rows exist.
pub(super) fn emit_row_tile(a: &mut Asm, config: &Config, params: &Params) -> [Reg<B32>; 2] {
    let [row_tile, row_begin, num_rows] = a.regs();
    let m = load_u32(a, params.m);
    a.mov_u32_special(row_tile, Special::CtaidY);
    a.mul_lo_u32(row_begin, row_tile, config.tile_m);
    a.sub_u32(num_rows, m, row_begin);
    // The epilogue's passes may be taller than the tile.
    a.min_u32(num_rows, num_rows, config.tile_m);
    [row_begin, num_rows]
}

/// Which 16-byte units of activations a lane copies in each run, and where to: rows are xor-swizzled by unit.
/// Copy `c` is of row `row + c * copy_rows`.
pub(super) struct RowCopies {
    /// The lane's first row.
    pub(super) row: Reg<B32>,
    /// The lane's 16-byte unit of a row.
    pub(super) unit: Reg<B32>,
    /// Rows from one copy of a lane to the next.
    pub(super) copy_rows: u32,
    /// Copies of a lane.
    pub(super) num_copies: u32,
    /// Whether the lane takes part, if not all lanes of the team do.
    pub(super) takes_part: Option<Reg<Pred>>,
    /// Shared addresses in slot 0 less the rows' own offset, by copy modulo their number.
    to: Vec<Reg<B32>>,
}

impl RowCopies {
    /// Emits the plan of a thread; `rows` is the address of slot 0's rows less their place in the plan.
    pub(super) fn new(
        a: &mut Asm,
        config: &Config,
        geometry: &Geometry,
        smem: Reg<B32>,
        tid: Reg<B32>,
        team: Reg<B32>,
    ) -> Self {
        let team_threads = 32 * config.warps_n;
        let [in_team, row, unit, row_base] = a.regs();
        if team_threads.is_power_of_two() {
            a.and_b32(in_team, tid, team_threads - 1);
        } else {
            a.mul_lo_u32(in_team, team, team_threads);
            a.sub_u32(in_team, tid, in_team);
        }
        a.shr_u32(row, in_team, ROW_UNITS.ilog2());
        a.and_b32(unit, in_team, ROW_UNITS - 1);
        // A power of two, so that the swizzle repeats; of other teams the last warps do not copy.
        let copy_rows = 2 << config.warps_n.ilog2();
        let num_copies = config.tile_m.div_ceil(copy_rows);
        let first_rows = copy_rows.min(config.tile_m);
        let takes_part =
            (first_rows < team_threads / ROW_UNITS).then(|| a.test_u32(Cmp::Lt, row, first_rows));
        a.mad_lo_u32(row_base, team, geometry.rows_bytes, smem);
        a.mad_lo_u32(row_base, row, ROW_BYTES, row_base);
        // copy_rows divides 8 or is a multiple of it, so the swizzle of a copy's row is the first row's,
        // xored with a constant that repeats.
        let to = (0..num_copies.min((8 / copy_rows).max(1))).map(|c| {
            let to = a.reg();
            a.xor_b32(to, unit, swizzle_unit(c * copy_rows, 0));
            let low = a.reg();
            a.and_b32(low, row, 7);
            a.xor_b32(to, to, low);
            a.mad_lo_u32(to, to, 16, row_base);
            to
        });
        let to = to.collect();
        Self { row, unit, copy_rows, num_copies, takes_part, to }
    }

    /// Where copy `c` goes: base and offset within the slot's rows.
    pub(super) fn to(&self, c: u32) -> (Reg<B32>, u32) {
        (self.to[c as usize % self.to.len()], c * self.copy_rows * ROW_BYTES)
    }

    /// Emits the row of the tile that each copy reads: rows past the last one repeat it, and their results are
    /// never stored. In bytes from the tile's first row.
    pub(super) fn emit_from(
        &self,
        a: &mut Asm,
        num_rows: Reg<B32>,
        stride: Reg<B32>,
    ) -> Vec<Reg<B32>> {
        let last_row = a.reg();
        a.sub_u32(last_row, num_rows, 1);
        (0..self.num_copies)
            .map(|c| {
                let from = a.reg();
                a.add_u32(from, self.row, c * self.copy_rows);
                a.min_u32(from, from, last_row);
                a.mul_lo_u32(from, from, stride);
                from
            })
            .collect()
    }
}

/// The threads of a team meet. A team of one warp needs no CTA barrier.
pub(super) fn emit_team_barrier(a: &mut Asm, config: &Config, team: Reg<B32>) {
    if config.warps_n == 1 {
        a.bar_warp_sync(0xffff_ffffu32);
    } else {
        let id = a.reg();
        a.add_u32(id, team, 1);
        a.bar_sync_n(id, 32 * config.warps_n);
    }
}

/// The first rule of the families that use `mma.m16n8k16` that a configuration breaks, with its numbers.
pub(super) fn broken_rule(config: &Config) -> Option<String> {
    if !(TILE_MS.contains(&config.tile_m)) {
        return Some(format!("tile_m is {}, it must be one of {TILE_MS:?}", config.tile_m));
    }
    if config.cluster_k != 1 {
        return Some("clusters share a tile in family sm90wg only".into());
    }
    if !(1..=8).contains(&config.warps_n) || ![1, 2, 4, 8, 16].contains(&config.warps_k) {
        return Some(format!(
            "{} x {} warps: 1 to 8 side by side, teams a power of two up to 16",
            config.warps_n, config.warps_k
        ));
    }
    if config.num_warps() > 16 {
        return Some(format!("{} warps, at most 16 fit their registers", config.num_warps()));
    }
    if ![1, 2, 4, 8].contains(&config.tiles_per_warp())
        || config.tile_n != 16 * config.tiles_per_warp() * config.warps_n
    {
        return Some(format!(
            "tile_n {} over {} warps: a warp owns 16, 32, 64 or 128 channels",
            config.tile_n, config.warps_n
        ));
    }
    if config.num_threads() < config.tile_n / 4 {
        return Some(format!(
            "{} threads for rows of {} outputs: the epilogue wants a thread per 4",
            config.num_threads(),
            config.tile_n
        ));
    }
    if !(2..=12).contains(&config.stages) {
        return Some(format!("{} stages, 2 to 12 are supported", config.stages));
    }
    (config.runs_per_stage != 1).then(|| {
        format!("{} runs of a team in a stage, these families have 1", config.runs_per_stage)
    })
}
