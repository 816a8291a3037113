//! After the main loop: the teams' sums are added and the tile is written.
//!
//! Each warp stores its accumulators to shared memory, where fragments turn into rows; then every thread
//! owns *items*, four neighbouring channels of one row, adds the teams' parts of an item in team order, and
//! hands the sum to the reduction over CTAs (`reduction.rs`) and to the output. Only memory
//! instructions are guarded, and guarded loads are preceded by zeros: see `emit_zeros`.

use super::elements::{emit_load_element, emit_load_quad, emit_round, emit_round_pair};
use super::experts::{Block, RowWeights};
use super::params::{Params, load_u32, load_u64};
use super::problem::{Config, Kind, Reduction, Rows};
use super::reduction;
use super::stream::emit_divide;
use super::stripe::Segment;
use crate::asm::Asm;
use crate::asm::reg::{Reg, Region};
use crate::asm::types::{B32, B64, Cmp, F32, Pred, Special};
use crate::weights::{Activation, Group};

/// The accumulators of one warp: `[16-channel tile][8-row tile][4]`, fragments of `mma.m16n8k16` whose
/// rows are channels and whose columns are rows of C.
pub type Accumulators = Vec<Vec<[Reg<F32>; 4]>>;

/// Who this thread is, for the epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Thread {
    /// Thread in the CTA.
    pub tid: Reg<B32>,
    /// Lane in the warp.
    pub lane: Reg<B32>,
    /// Warp in the CTA: `warps_n * team + position in the team`.
    pub warp: Reg<B32>,
    /// First row of this CTA's tile.
    pub row_begin: Reg<B32>,
    /// Rows of the tile that exist.
    pub num_rows: Reg<B32>,
}

/// Bytes of shared memory that the epilogue needs.
pub fn epilogue_bytes(config: &Config) -> u32 {
    config.num_warps() * warp_sums_bytes(config)
}

/// Floats from one row of a warp's partial sums to the next. Four more than the channels: a fragment's
/// lanes then store to 32 different banks (2 rows apart is 8 banks, 8 channels fill them).
fn sums_pitch(config: &Config) -> u32 {
    16 * config.tiles_per_warp() + 4
}

fn warp_sums_bytes(config: &Config) -> u32 {
    let floats = config.tile_m * sums_pitch(config);
    // Eight threads read four items of one warp and four of the next: half the banks apart.
    let apart =
        if config.tiles_per_warp() == 1 { floats.next_multiple_of(16) | 16 } else { floats };
    4 * apart
}

/// What the epilogue of one kernel works with.
pub struct Epilogue<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// The entry's parameters.
    pub params: &'a Params,
    /// Shared memory of [`epilogue_bytes`] that the main loop has finished with once all its threads have.
    pub region: Region,
    /// Address of shared memory.
    pub smem: Reg<B32>,
    /// Who this thread is.
    pub thread: Thread,
    /// The segment whose sums these are.
    pub segment: &'a Segment,
}

impl Epilogue<'_> {
    /// Emits everything after the main loop: the teams' sums are added through shared memory, the CTAs' sums
    /// through scratch memory or the output, and the owner scales, adds what is to be added, and writes elements.
    ///
    /// Begins with a barrier, unless all threads have `met` since they left the main loop, and ends with
    /// one, so the main loop may use the region again afterwards.
    pub fn emit(&self, a: &mut Asm, acc: &Accumulators, met: bool) {
        a.section("partial sums to shared memory", |a| {
            if !met {
                a.bar_sync(0);
            }
            emit_store_fragments(a, self, acc);
            a.bar_sync(0);
        });
        let (items, sums) = a.section("items", |a| {
            // The top bit of a tile's number, 0, but the assembler cannot know: it would otherwise move the
            // addresses below out of the loop over segments and keep them in registers during the main
            // loop.
            let [zero, tid] = a.regs();
            a.shr_u32(zero, self.segment.tile, 31);
            a.add_u32(tid, self.thread.tid, zero);
            let items = Items::new(a, self, tid);
            let sums = items.emit_sums(a, self);
            (items, sums)
        });
        match self.config.reduction {
            _ if self.config.kind.experts => reduction::emit_whole(a, self, &items, sums),
            Reduction::F32 => reduction::emit_f32(a, self, &items, sums),
            Reduction::F16InPlace => reduction::emit_f16(a, self, &items, sums),
        }
    }
}

fn emit_store_fragments(a: &mut Asm, epilogue: &Epilogue<'_>, acc: &Accumulators) {
    let Epilogue { config, region, smem, ref thread, segment, .. } = *epilogue;
    // Lane (g, c) holds channels g and g + 8 of each tile, rows 2 c and 2 c + 1 of each row tile.
    let pitch = 4 * sums_pitch(config);
    let [g, c, base, row, lane, zero] = a.regs();
    a.shr_u32(zero, segment.tile, 31);
    a.add_u32(lane, thread.lane, zero);
    a.shr_u32(g, lane, 2);
    a.and_b32(c, lane, 3);
    a.add_u32(row, c, c);
    a.mad_lo_u32(base, thread.warp, warp_sums_bytes(config), smem);
    a.mad_lo_u32(base, row, pitch, base);
    a.mad_lo_u32(base, g, 4, base);
    // A tile of fewer than 8 rows keeps only those.
    let keeps: Vec<Option<Reg<Pred>>> = (0..2)
        .map(|odd| {
            (config.tile_m < 8).then(|| a.test_u32(Cmp::Lt, row, config.tile_m.saturating_sub(odd)))
        })
        .collect();
    for (t, row_tiles) in acc.iter().enumerate() {
        for (j, fragment) in row_tiles.iter().enumerate() {
            for (r, value) in fragment.iter().enumerate() {
                let (odd, high) = (r as u32 % 2, r as u32 / 2);
                let offset =
                    (8 * j as u32 + odd) * pitch + 4 * (16 * t as u32 + 8 * high) + region.start;
                let place = base.at(offset).within(region);
                match keeps[odd as usize] {
                    Some(keep) => a.when(keep, |a| a.st_shared_f32(place, *value)),
                    None => a.st_shared_f32(place, *value),
                }
            }
        }
    }
}

/// The warps' partial sums in shared memory.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    region: Region,
    /// Address of the thread's first item in team 0's sums.
    base: Reg<B32>,
}

/// One item with its sum in registers; zero where it does not exist.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub(super) pass: u32,
    pub(super) exists: Reg<Pred>,
    pub(super) sum: [Reg<F32>; 4],
}

/// The output tile as this thread sees it: in each pass one item, four channels of one row.
pub(super) struct Items {
    rows: Rows,
    kind: Kind,
    group: Group,
    /// Rows per pass.
    rows_per_pass: u32,
    /// Byte of the thread's first item in a partial-sum slot.
    slot_byte: Reg<B32>,
    /// Bytes of one pass in a slot.
    pub(super) pass_bytes: u32,
    /// Bytes of a slot.
    pub(super) slot_bytes: u32,
    /// The thread's first row in the tile.
    row: Reg<B32>,
    /// Its channels' place: warp of the team, byte in the warp's row.
    warp_n: Reg<B32>,
    warp_byte: Reg<B32>,
    /// First of its four columns of C.
    column: Reg<B32>,
    /// Passes over the tile.
    num_passes: u32,
    /// Rows of the tile that exist, none if the thread's first column does not.
    num_rows: Reg<B32>,
    /// The rows' expert, if there are experts.
    block: Option<Block>,
}

/// Passes whose sums are in registers at a time: enough loads in flight to hide their latency.
const PASSES_AT_ONCE: usize = 4;

impl Items {
    fn new(a: &mut Asm, epilogue: &Epilogue<'_>, tid: Reg<B32>) -> Self {
        let Epilogue { config, params, ref thread, segment, .. } = *epilogue;
        let quads = config.tile_n / 4;
        let quads_per_warp = 4 * config.tiles_per_warp();
        let rows_per_pass = config.num_threads() / quads;
        let num_passes = config.tile_m.div_ceil(rows_per_pass);
        let [row, quad] = emit_divide(a, tid, quads);
        let [warp_n, in_warp, warp_byte, column, slot_byte] = a.regs();
        a.shr_u32(warp_n, quad, quads_per_warp.ilog2());
        a.and_b32(in_warp, quad, quads_per_warp - 1);
        a.shl_b32(warp_byte, in_warp, 4);
        a.shl_b32(column, quad, 2);
        a.mad_lo_u32(column, segment.tile, config.tile_n, column);
        a.shl_b32(slot_byte, tid, 4);
        let n = load_u32(a, params.n);
        let has_columns = a.test_u32(Cmp::Lt, column, n);
        let num_rows = a.reg();
        a.selp_b32(num_rows, thread.num_rows, 0u32, has_columns);
        Items {
            rows: config.rows,
            kind: config.kind,
            group: config.group,
            rows_per_pass,
            slot_byte,
            pass_bytes: 16 * config.num_threads(),
            slot_bytes: 4 * config.tile_m * config.tile_n,
            row,
            warp_n,
            warp_byte,
            column,
            num_passes,
            num_rows,
            block: segment.block,
        }
    }

    /// The passes in batches whose sums fit in registers.
    pub(super) fn batches(&self) -> Vec<Vec<u32>> {
        let passes: Vec<u32> = (0..self.num_passes).collect();
        passes.chunks(PASSES_AT_ONCE).map(<[u32]>::to_vec).collect()
    }

    /// Whether the thread has an item in a pass: its row and its first column exist.
    fn emit_exists(&self, a: &mut Asm, pass: u32) -> Reg<Pred> {
        let row = a.reg();
        a.add_u32(row, self.row, pass * self.rows_per_pass);
        a.test_u32(Cmp::Lt, row, self.num_rows)
    }

    /// The sums over the teams, in team order, for some passes.
    pub(super) fn emit_add_teams(
        &self,
        a: &mut Asm,
        config: &Config,
        sums: &Sums,
        passes: &[u32],
    ) -> Vec<Item> {
        let team_bytes = config.warps_n * warp_sums_bytes(config);
        let mut items = Vec::new();
        for pass in passes {
            let exists = self.emit_exists(a, *pass);
            let pass_byte = pass * self.rows_per_pass * 4 * sums_pitch(config);
            let mut sum = emit_zeros(a);
            for team in 0..config.warps_k {
                let offset = sums.region.start + pass_byte + team * team_bytes;
                let place = sums.base.at(offset).within(sums.region);
                let part = if team == 0 { sum } else { emit_zeros(a) };
                a.when(exists, |a| a.ld_shared_v4_f32(part, place));
                if team > 0 {
                    sum = emit_add(a, sum, part);
                }
            }
            items.push(Item { pass: *pass, exists, sum });
        }
        items
    }

    /// Where the thread's items lie among the warps' partial sums.
    fn emit_sums(&self, a: &mut Asm, epilogue: &Epilogue<'_>) -> Sums {
        let Epilogue { config, region, smem, .. } = *epilogue;
        let base = a.reg();
        a.mad_lo_u32(base, self.warp_n, warp_sums_bytes(config), smem);
        a.mad_lo_u32(base, self.row, 4 * sums_pitch(config), base);
        a.add_u32(base, base, self.warp_byte);
        Sums { region, base }
    }

    /// The address of the thread's first item in slot `slot` of the partial sums; slots of row tile
    /// `ctaid.y` follow those of the row tile before.
    pub(super) fn emit_slot_ptr(&self, a: &mut Asm, params: &Params, slot: Reg<B32>) -> Reg<B64> {
        let scratch = load_u64(a, params.scratch_ptr);
        let [row_tile, num_slots, index] = a.regs();
        a.mov_u32_special(row_tile, Special::CtaidY);
        a.mov_u32_special(num_slots, Special::NctaidX);
        a.mad_lo_u32(index, row_tile, num_slots, slot);
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, index, self.slot_bytes, scratch);
        let offset: Reg<B64> = a.reg();
        a.cvt_u64_u32(offset, self.slot_byte);
        a.add_u64(ptr, ptr, offset);
        ptr
    }

    /// Writes items as elements of C. Except in [`Rows::Element`] N is a multiple of 4, so an item's columns exist
    /// together. `at` is advanced from pass to pass.
    pub(super) fn emit_output(
        &self,
        a: &mut Asm,
        params: &Params,
        output: &Output,
        items: &[Item],
    ) {
        for Item { pass, exists, sum } in items {
            if *pass > 0 {
                a.add_u64(output.ptr, output.ptr, output.step);
                if let Some(residual) = output.residual {
                    a.add_u64(residual.ptr, residual.ptr, residual.step);
                }
            }
            let mut sum = output.emit_scaled(a, *sum);
            if let Some(bias) = output.bias {
                sum = emit_add(a, sum, bias);
            }
            if let Some(residual) = output.residual {
                let added = self.emit_load_columns(a, params, *exists, residual.ptr);
                sum = emit_add(a, sum, added);
            }
            if let Some(weights) = output.row_weights {
                let weight = weights.emit_load(a, *exists, pass * self.rows_per_pass);
                sum = emit_multiply(a, sum, [weight; 4]);
            }
            let activation = self.kind.activation;
            match self.rows {
                Rows::Whole | Rows::Vector => {
                    let halves = [(1, 0), (3, 2)]
                        .map(|(high, low)| emit_round_pair(a, activation, sum[high], sum[low]));
                    a.when(*exists, |a| a.st_global_v2_b32(output.ptr, halves));
                }
                Rows::Element => {
                    let n = load_u32(a, params.n);
                    for (channel, sum) in sum.iter().enumerate() {
                        let column = a.reg();
                        a.add_u32(column, self.column, channel as u32);
                        let writes = a.test_u32(Cmp::Lt, column, n);
                        a.and_pred(writes, writes, *exists);
                        let half = emit_round(a, activation, *sum);
                        let place = output.ptr.at(2 * channel as i32);
                        a.when(writes, |a| a.st_global_b16(place, half));
                    }
                }
            }
        }
    }

    /// Where the thread's items go in C.
    pub(super) fn emit_output_place(
        &self,
        a: &mut Asm,
        params: &Params,
        thread: &Thread,
    ) -> Output {
        let c_ptr = load_u64(a, params.c_ptr);
        let stride = load_u32(a, params.c_stride_bytes);
        let row = a.reg();
        a.add_u32(row, thread.row_begin, self.row);
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, row, stride, c_ptr);
        a.mad_wide_u32(ptr, self.column, 2, ptr);
        let step: Reg<B64> = a.reg();
        a.mul_wide_u32(step, stride, self.rows_per_pass);
        let scales = (self.group == Group::PerColumn).then(|| self.emit_column_scales(a, params));
        let scales = match (scales, params.optional.emit_factor(a, self.block.as_ref())) {
            (scales, None) => scales,
            (None, Some(factor)) => Some([factor; 4]),
            (Some(scales), Some(factor)) => Some(emit_multiply(a, scales, [factor; 4])),
        };
        let has_columns = |a: &mut Asm| {
            let n = load_u32(a, params.n);
            a.test_u32(Cmp::Lt, self.column, n)
        };
        let bias = params.optional.bias_ptr.map(|bias_ptr| {
            let (bias, at, guard) = (load_u64(a, bias_ptr), a.reg(), has_columns(a));
            a.mad_wide_u32(at, self.column, 2, bias);
            if let Some(block) = self.block {
                let n = load_u32(a, params.n);
                block.emit_row_of(a, at, n);
            }
            self.emit_load_columns(a, params, guard, at)
        });
        let residual = params.optional.residual.map(|(base, stride)| {
            let (base, stride) = (load_u64(a, base), load_u32(a, stride));
            let [ptr, step]: [Reg<B64>; 2] = a.regs();
            a.mad_wide_u32(ptr, row, stride, base);
            a.mad_wide_u32(ptr, self.column, 2, ptr);
            a.mul_wide_u32(step, stride, self.rows_per_pass);
            Advancing { ptr, step }
        });
        let row_weights = params.optional.experts.map(|experts| experts.emit_row_weights(a, row));
        Output { ptr, step, scales, bias, residual, row_weights }
    }

    /// The elements at `from` of the item's four columns where `guard` holds and the column exists, else zeros.
    fn emit_load_columns(
        &self,
        a: &mut Asm,
        params: &Params,
        guard: Reg<Pred>,
        from: Reg<B64>,
    ) -> [Reg<F32>; 4] {
        let activation = self.kind.activation;
        if self.rows != Rows::Element {
            return emit_load_quad(a, activation, guard, from);
        }
        let n = load_u32(a, params.n);
        std::array::from_fn(|channel| {
            let column = a.reg();
            a.add_u32(column, self.column, channel as u32);
            let reads = a.test_u32(Cmp::Lt, column, n);
            a.and_pred(reads, reads, guard);
            emit_load_element(a, activation, reads, from, 2 * channel as i32)
        })
    }

    /// The scales of the item's four columns; the packed weights hold them for every padded column, and
    /// columns past those belong to no item.
    fn emit_column_scales(&self, a: &mut Asm, params: &Params) -> [Reg<F32>; 4] {
        let n = load_u32(a, params.n);
        let scales_ptr = load_u64(a, params.column_scales_ptr);
        let scales_ptr = params.emit_base(a, scales_ptr, self.block.as_ref());
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, self.column, 2, scales_ptr);
        let in_range = a.test_u32(Cmp::Lt, self.column, n);
        emit_load_quad(a, Activation::F16, in_range, ptr)
    }
}

/// Where a thread's items go in C.
pub(super) struct Output {
    /// Address of the first item; advanced from pass to pass.
    pub(super) ptr: Reg<B64>,
    /// Bytes from one pass to the next.
    pub(super) step: Reg<B64>,
    /// What the four columns' sums are multiplied by: scales, if they are per column, and the layer's factor.
    pub(super) scales: Option<[Reg<F32>; 4]>,
    /// What is added to them.
    pub(super) bias: Option<[Reg<F32>; 4]>,
    /// The residual's first item.
    pub(super) residual: Option<Advancing>,
    /// What rows are multiplied by after all of that.
    pub(super) row_weights: Option<RowWeights>,
}

/// An address that goes on from pass to pass.
#[derive(Clone, Copy)]
pub(super) struct Advancing {
    ptr: Reg<B64>,
    /// Bytes from one pass to the next.
    step: Reg<B64>,
}

impl Output {
    /// The sum times what its columns are multiplied by.
    pub(super) fn emit_scaled(&self, a: &mut Asm, sum: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
        match self.scales {
            Some(scales) => emit_multiply(a, sum, scales),
            None => sum,
        }
    }
}

fn emit_multiply(a: &mut Asm, x: [Reg<F32>; 4], y: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
    let products: [Reg<F32>; 4] = a.regs();
    for (product, (x, y)) in products.into_iter().zip(x.into_iter().zip(y)) {
        a.mul_f32(product, x, y);
    }
    products
}

/// Four zeros. A guarded load writes into zeros: without them the assembler would take the register's
/// value to come from before the main loop, and keep it through.
pub(super) fn emit_zeros(a: &mut Asm) -> [Reg<F32>; 4] {
    let zeros: [Reg<F32>; 4] = a.regs();
    zeros.into_iter().for_each(|zero| a.mov_f32(zero, 0.0));
    zeros
}

pub(super) fn emit_add(a: &mut Asm, x: [Reg<F32>; 4], y: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
    let sums: [Reg<F32>; 4] = a.regs();
    for (sum, (x, y)) in sums.into_iter().zip(x.into_iter().zip(y)) {
        a.add_f32(sum, x, y);
    }
    sums
}
