//! Emission paragraphs that kernel families share: entry parameters, striped partitioning, reduction and
//! output.
//!
//! **Stripes.** The layer is `num_tiles` tiles of `tile_n` columns, each `k_tiles` runs of 128 inputs
//! deep. Stripe `s` is runs `[s * stripe, (s + 1) * stripe)` of that order, so it covers the end of one
//! tile, whole tiles, and the start of another. The CTA that begins a tile owns it; every later stripe
//! that holds a part of it contributes that part as the first thing it does. A CTA therefore contributes
//! at most once, and stripe `s` has partial-sum slot `s`.
//! **Progress.** Owners wait for stripes with larger numbers. CTAs are numbered against the launch order
//! (`stripe = last - ctaid`), so what an owner waits for was launched before it: a grid larger than the
//! card, or two grids sharing it, cannot lock up.
//! **Order.** The owner adds the parts in stripe order, whatever order they arrive in: the result is the
//! same bits from run to run.
//! Source of the partition: Marlin paper, "Striped partitioning"; one hop in parallel here, where the
//! original chains one hop per participant.

use super::problem::{Config, Reduction, Rows};
use crate::asm::Asm;
use crate::asm::reg::{Param, Reg, Region};
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred, Special};
use crate::weights::Group;

/// Declares the entry parameters. The host fills them in the same order: see [`super::Arguments`].
macro_rules! params {
    ($($(#[$doc:meta])* $name:ident: $width:ident),* $(,)?) => {
        /// The entry parameters of a GEMM kernel.
        #[derive(Clone, Copy, Debug)]
        pub struct Params { $($(#[$doc])* pub $name: Param),* }

        impl Params {
            /// Declares them in order.
            pub fn declare(a: &mut Asm) -> Self {
                Self { $($name: a.$width(stringify!($name))),* }
            }
        }

        /// The values of the entry parameters of a GEMM kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Arguments { $($(#[$doc])* pub $name: params!(@type $width)),* }

        impl Arguments {
            /// The kernel arguments, in the order of the entry's parameters.
            pub fn list(&self) -> [crate::backend::Arg; params!(@count $($name)*)] {
                [$(params!(@arg $width self.$name)),*]
            }
        }
    };
    (@type param_u64) => { u64 };
    (@type param_u32) => { u32 };
    (@arg param_u64 $value:expr) => { crate::backend::Arg::U64($value) };
    (@arg param_u32 $value:expr) => { crate::backend::Arg::U32($value) };
    (@count) => { 0 };
    (@count $head:ident $($tail:ident)*) => { 1 + params!(@count $($tail)*) };
}

params! {
    /// Activations, fp16 `[m][k]`.
    a_ptr: param_u64,
    /// Packed weights.
    b_ptr: param_u64,
    /// Output, fp16 `[m][n]`.
    c_ptr: param_u64,
    /// Per-column scales, fp16 `[n_padded]`; unused with grouped scales.
    column_scales_ptr: param_u64,
    /// Partial sums, one slot of `tile_m * tile_n` floats per CTA.
    scratch_ptr: param_u64,
    /// One lock word per output tile.
    locks_ptr: param_u64,
    /// Rows of A and C.
    m: param_u32,
    /// Columns of C.
    n: param_u32,
    /// Columns of A.
    k: param_u32,
    /// Bytes from one row of A to the next.
    a_stride_bytes: param_u32,
    /// Bytes from one row of C to the next.
    c_stride_bytes: param_u32,
    /// Groups of 64 columns in the packed weights.
    num_chunk_columns: param_u32,
    /// Runs of 128 inputs in the packed weights.
    k_tiles: param_u32,
    /// Runs of 128 inputs in all tiles together.
    num_runs: param_u32,
    /// Runs of 128 inputs per stripe.
    stripe: param_u32,
    /// Division by `k_tiles`: see [`magic`].
    k_tiles_magic: param_u32,
    /// Its shift.
    k_tiles_shift: param_u32,
    /// Division by `stripe`.
    stripe_magic: param_u32,
    /// Its shift.
    stripe_shift: param_u32,
}

/// Multiplier and shift with `x / d == mulhi(2 * x, multiplier) >> shift` for `x < 2^31`.
///
/// With `shift = ceil(log2 d)` and `multiplier = ceil(2^(31 + shift) / d)`, which lies in `[2^31, 2^32)`, the
/// multiplier is too large by less than `d <= 2^shift` parts in `2^(31 + shift)`: too little to carry a
/// quotient of `x < 2^31` to the next integer.
pub fn magic(d: u32) -> (u32, u32) {
    let shift = d.next_power_of_two().ilog2();
    let multiplier = (1u64 << (31 + shift)).div_ceil(u64::from(d));
    (multiplier as u32, shift)
}

/// Emits `x / d` for a divisor whose [`magic`] is in `multiplier` and `shift`.
pub fn emit_div(a: &mut Asm, x: Reg<B32>, multiplier: Reg<B32>, shift: Reg<B32>) -> Reg<B32> {
    let [twice, high, quotient] = a.regs();
    a.add_u32(twice, x, x);
    a.mul_hi_u32(high, twice, multiplier);
    a.shr_u32(quotient, high, shift);
    quotient
}

/// A 32-bit entry parameter in a register.
pub fn load_u32(a: &mut Asm, param: Param) -> Reg<B32> {
    let reg = a.reg();
    a.ld_param_u32(reg, param);
    reg
}

/// A 64-bit entry parameter in a register.
pub fn load_u64(a: &mut Asm, param: Param) -> Reg<B64> {
    let reg = a.reg();
    a.ld_param_u64(reg, param);
    reg
}

/// The part of a stripe that lies in one tile, and what the CTA needs to know about its stripe.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The stripe's number.
    pub stripe_idx: Reg<B32>,
    /// The tile along n.
    pub tile: Reg<B32>,
    /// First run of 128 inputs, within the tile.
    pub begin: Reg<B32>,
    /// One past the last run, within the tile.
    pub end: Reg<B32>,
    /// Runs of a whole tile.
    pub k_tiles: Reg<B32>,
}

/// What is left of a CTA's stripe after a segment.
#[derive(Clone, Copy, Debug)]
pub struct Stripe {
    /// Runs of 128 inputs after the segment.
    left: Reg<B32>,
}

/// Emits this CTA's stripe: its first segment and what follows it.
pub fn emit_stripe(a: &mut Asm, params: &Params) -> (Stripe, Segment) {
    let k_tiles = load_u32(a, params.k_tiles);
    let stripe = load_u32(a, params.stripe);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let [ctaid, num_ctas, stripe_idx, first, left, begin, end, before] = a.regs();
    a.mov_u32_special(ctaid, Special::CtaidX);
    a.mov_u32_special(num_ctas, Special::NctaidX);
    a.sub_u32(stripe_idx, num_ctas, ctaid);
    a.sub_u32(stripe_idx, stripe_idx, 1);
    a.mul_lo_u32(first, stripe_idx, stripe);
    a.sub_u32(left, num_runs, first);
    a.min_u32(left, left, stripe);
    let tile = emit_div(a, first, multiplier, shift);
    a.mul_lo_u32(before, tile, k_tiles);
    a.sub_u32(begin, first, before);
    a.add_u32(end, begin, left);
    a.min_u32(end, end, k_tiles);
    a.add_u32(left, left, begin);
    a.sub_u32(left, left, end);
    (Stripe { left }, Segment { stripe_idx, tile, begin, end, k_tiles })
}

impl Stripe {
    /// Emits the segment after `segment`: the start of the next tile, empty if nothing is left.
    pub fn emit_next(&self, a: &mut Asm, segment: &Segment) -> Segment {
        let [tile, begin, end] = a.regs();
        a.add_u32(tile, segment.tile, 1);
        a.mov_b32(begin, 0);
        a.min_u32(end, self.left, segment.k_tiles);
        a.sub_u32(self.left, self.left, end);
        Segment { tile, begin, end, ..*segment }
    }
}

impl Segment {
    /// Emits `self = next` and whether there is such a segment.
    pub fn emit_become(&self, a: &mut Asm, next: &Segment) -> Reg<Pred> {
        a.mov_b32(self.tile, next.tile);
        a.mov_b32(self.begin, next.begin);
        a.mov_b32(self.end, next.end);
        a.test_u32(Cmp::Ne, self.end, 0)
    }
}

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
    4 * config.tile_m * sums_pitch(config)
}

/// Emits everything after the main loop: the teams' sums are added through shared memory, the CTAs' sums
/// through scratch memory or the output, and the owner writes fp16.
///
/// `region` is shared memory of [`epilogue_bytes`] that the main loop has finished with once all its threads
/// have: this begins with a barrier, unless they have `met` since, and ends with one, so the main loop may use
/// it again afterwards.
pub fn emit_epilogue(
    a: &mut Asm,
    config: &Config,
    params: &Params,
    region: Region,
    smem: Reg<B32>,
    thread: &Thread,
    segment: &Segment,
    acc: &Accumulators,
    met: bool,
) {
    a.section("partial sums to shared memory", |a| {
        if !met {
            a.bar_sync(0);
        }
        emit_store_fragments(a, config, region, smem, thread, segment, acc);
        a.bar_sync(0);
    });
    let (items, sums) = a.section("items", |a| {
        // The top bit of a tile's number, 0, but the assembler cannot know: it would otherwise move the
        // addresses below out of the loop over segments and keep them in registers during the main loop.
        let [zero, tid] = a.regs();
        a.shr_u32(zero, segment.tile, 31);
        a.add_u32(tid, thread.tid, zero);
        let thread = &Thread { tid, ..*thread };
        let items = Items::new(a, config, params, thread, segment);
        let sums = items.emit_sums(a, config, region, smem);
        (items, sums)
    });
    match config.reduction {
        Reduction::F32 => emit_reduce_f32(a, config, params, thread, segment, &items, sums),
        Reduction::F16InPlace => emit_reduce_f16(a, config, params, thread, segment, &items, sums),
    }
}

fn emit_store_fragments(
    a: &mut Asm,
    config: &Config,
    region: Region,
    smem: Reg<B32>,
    thread: &Thread,
    segment: &Segment,
    acc: &Accumulators,
) {
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
struct Sums {
    region: Region,
    /// Address of the thread's first item in team 0's sums.
    base: Reg<B32>,
}

/// One item with its sum in registers; zero where it does not exist.
#[derive(Clone, Copy)]
struct Item {
    pass: u32,
    exists: Reg<Pred>,
    sum: [Reg<F32>; 4],
}

/// The output tile as this thread sees it: in each pass one item, four channels of one row.
struct Items {
    rows: Rows,
    group: Group,
    /// Rows per pass.
    rows_per_pass: u32,
    /// Byte of the thread's first item in a partial-sum slot.
    slot_byte: Reg<B32>,
    /// Bytes of one pass in a slot.
    pass_bytes: u32,
    /// Bytes of a slot.
    slot_bytes: u32,
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
}

/// Passes whose sums are in registers at a time: enough loads in flight to hide their latency.
const PASSES_AT_ONCE: usize = 4;

impl Items {
    fn new(
        a: &mut Asm,
        config: &Config,
        params: &Params,
        thread: &Thread,
        segment: &Segment,
    ) -> Self {
        let quads = config.tile_n / 4;
        let quads_per_warp = 4 * config.tiles_per_warp();
        let rows_per_pass = config.num_threads() / quads;
        let num_passes = config.tile_m.div_ceil(rows_per_pass);
        let [row, quad, warp_n, in_warp, warp_byte, column, slot_byte] = a.regs();
        a.shr_u32(row, thread.tid, quads.ilog2());
        a.and_b32(quad, thread.tid, quads - 1);
        a.shr_u32(warp_n, quad, quads_per_warp.ilog2());
        a.and_b32(in_warp, quad, quads_per_warp - 1);
        a.shl_b32(warp_byte, in_warp, 4);
        a.shl_b32(column, quad, 2);
        a.mad_lo_u32(column, segment.tile, config.tile_n, column);
        a.shl_b32(slot_byte, thread.tid, 4);
        let n = load_u32(a, params.n);
        let has_columns = a.test_u32(Cmp::Lt, column, n);
        let num_rows = a.reg();
        a.selp_b32(num_rows, thread.num_rows, 0u32, has_columns);
        Items {
            rows: config.rows,
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
        }
    }

    /// The passes in batches whose sums fit in registers.
    fn batches(&self) -> Vec<Vec<u32>> {
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
    fn emit_add_teams(
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
    fn emit_sums(&self, a: &mut Asm, config: &Config, region: Region, smem: Reg<B32>) -> Sums {
        let base = a.reg();
        a.mad_lo_u32(base, self.warp_n, warp_sums_bytes(config), smem);
        a.mad_lo_u32(base, self.row, 4 * sums_pitch(config), base);
        a.add_u32(base, base, self.warp_byte);
        Sums { region, base }
    }

    /// The address of the thread's first item in slot `slot` of the partial sums; slots of row tile
    /// `ctaid.y` follow those of the row tile before.
    fn emit_slot_ptr(&self, a: &mut Asm, params: &Params, slot: Reg<B32>) -> Reg<B64> {
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

    /// Writes items as fp16. Except in [`Rows::Element`] N is a multiple of 4, so an item's columns exist
    /// together. `at` is advanced from pass to pass.
    fn emit_output(&self, a: &mut Asm, params: &Params, output: &Output, items: &[Item]) {
        for Item { pass, exists, sum } in items {
            if *pass > 0 {
                a.add_u64(output.ptr, output.ptr, output.step);
            }
            let sum = output.emit_scaled(a, *sum);
            match self.rows {
                Rows::Whole | Rows::Vector => {
                    let halves: [Reg<B32>; 2] = a.regs();
                    a.cvt_rn_f16x2_f32(halves[0], sum[1], sum[0]);
                    a.cvt_rn_f16x2_f32(halves[1], sum[3], sum[2]);
                    a.when(*exists, |a| a.st_global_v2_b32(output.ptr, halves));
                }
                Rows::Element => {
                    let n = load_u32(a, params.n);
                    for (channel, sum) in sum.iter().enumerate() {
                        let column = a.reg();
                        a.add_u32(column, self.column, channel as u32);
                        let writes = a.test_u32(Cmp::Lt, column, n);
                        a.and_pred(writes, writes, *exists);
                        let half: Reg<B16> = a.reg();
                        a.cvt_rn_f16_f32(half, *sum);
                        let place = output.ptr.at(2 * channel as i32);
                        a.when(writes, |a| a.st_global_b16(place, half));
                    }
                }
            }
        }
    }

    /// Where the thread's items go in C.
    fn emit_output_place(&self, a: &mut Asm, params: &Params, thread: &Thread) -> Output {
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
        Output { ptr, step, scales }
    }

    /// The scales of the item's four columns; the packed weights hold them for every padded column, and
    /// columns past those belong to no item.
    fn emit_column_scales(&self, a: &mut Asm, params: &Params) -> [Reg<F32>; 4] {
        let n = load_u32(a, params.n);
        let scales_ptr = load_u64(a, params.column_scales_ptr);
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, self.column, 2, scales_ptr);
        let in_range = a.test_u32(Cmp::Lt, self.column, n);
        emit_load_halves(a, in_range, ptr)
    }
}

/// Where a thread's items go in C.
struct Output {
    /// Address of the first item; advanced from pass to pass.
    ptr: Reg<B64>,
    /// Bytes from one pass to the next.
    step: Reg<B64>,
    /// Scales of the four columns, if they are per column.
    scales: Option<[Reg<F32>; 4]>,
}

impl Output {
    /// The sum times its columns' scales, if they are per column.
    fn emit_scaled(&self, a: &mut Asm, sum: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
        let Some(scales) = self.scales else { return sum };
        let scaled: [Reg<F32>; 4] = a.regs();
        for (scaled, (sum, scale)) in scaled.into_iter().zip(sum.into_iter().zip(scales)) {
            a.mul_f32(scaled, sum, scale);
        }
        scaled
    }
}

/// The lock of this CTA's output tile.
fn emit_lock_ptr(a: &mut Asm, params: &Params, segment: &Segment) -> Reg<B64> {
    let locks = load_u64(a, params.locks_ptr);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let num_tiles = emit_div(a, num_runs, multiplier, shift);
    let [row_tile, index] = a.regs();
    a.mov_u32_special(row_tile, Special::CtaidY);
    a.mad_lo_u32(index, row_tile, num_tiles, segment.tile);
    let ptr: Reg<B64> = a.reg();
    a.mad_wide_u32(ptr, index, 4, locks);
    ptr
}

/// How many later stripes hold a part of the segment's tile, 0 if this one reaches its end.
fn emit_num_helpers(a: &mut Asm, params: &Params, segment: &Segment) -> Reg<B32> {
    // The rest of the tile, in stripes rounded up.
    let stripe = load_u32(a, params.stripe);
    let multiplier = load_u32(a, params.stripe_magic);
    let shift = load_u32(a, params.stripe_shift);
    let rest = a.reg();
    a.sub_u32(rest, segment.k_tiles, segment.end);
    a.add_u32(rest, rest, stripe);
    a.sub_u32(rest, rest, 1);
    emit_div(a, rest, multiplier, shift)
}

/// Thread 0 waits until the lock holds `value`; then the CTA goes on.
fn emit_wait_lock(a: &mut Asm, thread: &Thread, lock: Reg<B64>, value: Reg<B32>) {
    let others = a.test_u32(Cmp::Ne, thread.tid, 0);
    let [spin, done] = ["spin", "locked"].map(|name| a.label(name));
    a.when(others, |a| a.bra(done));
    a.bind(spin);
    let seen = a.reg();
    a.ld_acquire_gpu_global_u32(seen, lock);
    let early = a.test_u32(Cmp::Ne, seen, value);
    a.when(early, |a| a.bra(spin));
    a.bind(done);
    a.bar_sync(0);
}

fn emit_reduce_f32(
    a: &mut Asm,
    config: &Config,
    params: &Params,
    thread: &Thread,
    segment: &Segment,
    items: &Items,
    sums: Sums,
) {
    let [own, output, done] = ["own", "output", "tile_done"].map(|name| a.label(name));
    let first = a.test_u32(Cmp::Eq, thread.tid, 0);
    let owns = a.test_u32(Cmp::Eq, segment.begin, 0);
    a.when(owns, |a| a.bra(own));
    a.section("contribute to another CTA's tile", |a| {
        let slot = items.emit_slot_ptr(a, params, segment.stripe_idx);
        for passes in items.batches() {
            for item in items.emit_add_teams(a, config, &sums, &passes) {
                let place = slot.at((item.pass * items.pass_bytes) as i32);
                a.when(item.exists, |a| a.st_global_v4_f32(place, item.sum));
            }
        }
        let lock = emit_lock_ptr(a, params, segment);
        a.bar_sync(0);
        a.when(first, |a| a.red_release_gpu_global_add_u32(lock, 1u32));
        a.bra(done);
    });
    a.bind(own);
    let num_helpers = a.section("wait for the other CTAs", |a| {
        let num_helpers = emit_num_helpers(a, params, segment);
        let alone = a.test_u32(Cmp::Eq, num_helpers, 0);
        a.when(alone, |a| a.bra(output));
        let lock = emit_lock_ptr(a, params, segment);
        emit_wait_lock(a, thread, lock, num_helpers);
        a.when(first, |a| a.st_global_b32(lock, 0u32));
        num_helpers
    });
    a.bind(output);
    a.section("output", |a| {
        let first_slot = a.reg();
        a.add_u32(first_slot, segment.stripe_idx, 1);
        let slots = items.emit_slot_ptr(a, params, first_slot);
        let output = items.emit_output_place(a, params, thread);
        for passes in items.batches() {
            let batch = items.emit_add_teams(a, config, &sums, &passes);
            emit_add_helpers(a, items, slots, num_helpers, &batch);
            items.emit_output(a, params, &output, &batch);
        }
    });
    a.bind(done);
    a.bar_sync(0);
}

/// Adds the helpers' parts of a batch of items, in stripe order.
fn emit_add_helpers(
    a: &mut Asm,
    items: &Items,
    slots: Reg<B64>,
    num_helpers: Reg<B32>,
    batch: &[Item],
) {
    let [next, added] = ["next_part", "parts_added"].map(|name| a.label(name));
    let slot: Reg<B64> = a.reg();
    let left = a.reg();
    a.mov_b64(slot, slots);
    a.mov_b32(left, num_helpers);
    a.bind(next);
    let finished = a.test_u32(Cmp::Eq, left, 0);
    a.when(finished, |a| a.bra(added));
    for item in batch {
        let place = slot.at((item.pass * items.pass_bytes) as i32);
        let part = emit_zeros(a);
        a.when(item.exists, |a| a.ld_global_v4_f32(part, place));
        for (sum, part) in item.sum.iter().zip(part) {
            a.add_f32(*sum, *sum, part);
        }
    }
    a.add_u64(slot, slot, u64::from(items.slot_bytes));
    a.sub_u32(left, left, 1);
    a.bra(next);
    a.bind(added);
}

/// The paper's reduction: participants of a tile in turn, from the bottom of the tile to its top, add
/// their sums to what the one before left in C.
fn emit_reduce_f16(
    a: &mut Asm,
    config: &Config,
    params: &Params,
    thread: &Thread,
    segment: &Segment,
    items: &Items,
    sums: Sums,
) {
    let (num_helpers, lock) = a.section("wait for the turn", |a| {
        let num_helpers = emit_num_helpers(a, params, segment);
        let lock = emit_lock_ptr(a, params, segment);
        emit_wait_lock(a, thread, lock, num_helpers);
        (num_helpers, lock)
    });
    a.section("add to the output", |a| {
        let is_bottom = a.test_u32(Cmp::Eq, num_helpers, 0);
        let output = items.emit_output_place(a, params, thread);
        let from: Reg<B64> = a.reg();
        a.mov_b64(from, output.ptr);
        for passes in items.batches() {
            let mut added = Vec::new();
            for item in &items.emit_add_teams(a, config, &sums, &passes) {
                if item.pass > 0 {
                    a.add_u64(from, from, output.step);
                }
                // What C holds is scaled already: per-column scales go on this part first.
                let part = output.emit_scaled(a, item.sum);
                let reads = a.reg();
                a.not_pred(reads, is_bottom);
                a.and_pred(reads, reads, item.exists);
                let before = emit_load_halves(a, reads, from);
                let sum = emit_add(a, before, part);
                added.push(Item { sum, ..*item });
            }
            items.emit_output(a, params, &Output { scales: None, ..output }, &added);
        }
        a.bar_sync(0);
        // The lock counts the participants that are through; the top one leaves it at zero.
        let first = a.test_u32(Cmp::Eq, thread.tid, 0);
        let is_top = a.test_u32(Cmp::Eq, segment.begin, 0);
        let turn = a.reg();
        a.add_u32(turn, num_helpers, 1);
        a.selp_b32(turn, 0u32, turn, is_top);
        a.when(first, |a| a.st_release_gpu_global_u32(lock, turn));
    });
}

/// Four zeros. A guarded load writes into zeros: without them the assembler would take the register's
/// value to come from before the main loop, and keep it through.
fn emit_zeros(a: &mut Asm) -> [Reg<F32>; 4] {
    let zeros: [Reg<F32>; 4] = a.regs();
    zeros.into_iter().for_each(|zero| a.mov_f32(zero, 0.0));
    zeros
}

fn emit_add(a: &mut Asm, x: [Reg<F32>; 4], y: [Reg<F32>; 4]) -> [Reg<F32>; 4] {
    let sums: [Reg<F32>; 4] = a.regs();
    for (sum, (x, y)) in sums.into_iter().zip(x.into_iter().zip(y)) {
        a.add_f32(sum, x, y);
    }
    sums
}

/// Four fp16 values from global memory where `guard` holds, zeros elsewhere.
fn emit_load_halves(a: &mut Asm, guard: Reg<Pred>, from: Reg<B64>) -> [Reg<F32>; 4] {
    let words: [Reg<B32>; 2] = a.regs();
    words.into_iter().for_each(|word| a.mov_b32(word, 0));
    a.when(guard, |a| a.ld_global_v2_b32(words, from));
    let values: [Reg<F32>; 4] = a.regs();
    for (word, values) in words.into_iter().zip(values.chunks(2)) {
        let halves: [Reg<B16>; 2] = a.regs();
        a.mov_b32_unpack(halves, word);
        a.cvt_f32_f16(values[0], halves[0]);
        a.cvt_f32_f16(values[1], halves[1]);
    }
    values
}
