//! Row blocks from the offsets of a list that is sorted by expert: what one CTA writes down for the product.
//!
//! A thread has one expert at a time. How many blocks the experts before it have is a prefix sum in shared memory.
//! Offsets are taken as they are, except that no row past the list's last one and no record past the last one is
//! ever named: whatever a caller's offsets are, memory is safe.
//! Source of the prefix sum: Hillis and Steele, "Data parallel algorithms".

use super::{BLOCK_BYTES, THREADS};
use crate::asm::reg::{Param, Reg, Region};
use crate::asm::types::{B32, B64, Cmp, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, ArgList};
use crate::kernel::params::{load_u32, load_u64};
use crate::target::SmArch;

/// Prefix sums over the threads of a CTA.
pub(super) struct Scan {
    /// Words of the threads, after half as many zeros; twice, by turns.
    rooms: [Region; 2],
    /// Address of the thread's word, less its place in the plan.
    thread_word: Reg<B32>,
    /// Address of shared memory.
    smem: Reg<B32>,
}

/// Zeros before the threads' words.
const ZEROS: u32 = THREADS / 2;

impl Scan {
    /// Emits what all sums have in common.
    pub(super) fn new(a: &mut Asm, tid: Reg<B32>) -> Self {
        let rooms =
            ["even sums", "odd sums"].map(|name| a.smem.region(name, 4 * (ZEROS + THREADS), 16));
        let [smem, thread_word] = a.regs();
        a.mov_u32_smem(smem);
        a.mad_lo_u32(thread_word, tid, 4, smem);
        let clears = a.test_u32(Cmp::Lt, tid, ZEROS);
        for room in rooms {
            let place = thread_word.at(room.start).within(room);
            a.when(clears, |a| a.st_shared_b32(place, 0u32));
        }
        Self { rooms, thread_word, smem }
    }

    /// Emits the sum of the values of the threads before this one, and of all. All threads take part.
    pub(super) fn emit_sum(&self, a: &mut Asm, value: Reg<B32>) -> [Reg<B32>; 2] {
        let [sum, total, before] = a.regs();
        a.mov_b32(sum, value);
        let word =
            |room: Region, place: u32| self.thread_word.at(room.start + 4 * place).within(room);
        let steps = THREADS.ilog2();
        for step in 0..=steps {
            let [from, to] = [self.rooms[step as usize % 2], self.rooms[(step as usize + 1) % 2]];
            if step > 0 {
                let part = a.reg();
                a.ld_shared_b32(part, word(from, ZEROS - (1 << (step - 1))));
                a.add_u32(sum, sum, part);
            }
            a.st_shared_b32(word(to, ZEROS), sum);
            a.bar_sync(0);
        }
        let last = self.rooms[(steps as usize + 1) % 2];
        let place = last.start + 4 * (ZEROS + THREADS - 1);
        a.ld_shared_b32(total, self.smem.at(place).within(last));
        a.sub_u32(before, sum, value);
        // The next sum may overwrite it.
        a.bar_sync(0);
        [before, total]
    }
}

/// The entry parameters of what writes row blocks.
#[derive(Clone, Copy)]
pub(super) struct BlockParams {
    offsets_ptr: Param,
    blocks_ptr: Param,
    num_experts: Param,
    max_rows: Param,
    tile_shift: Param,
    max_blocks: Param,
}

/// What a launch takes that writes row blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockArguments {
    /// Where each expert's rows begin, and where the last one's end: `num_experts + 1` words.
    pub offsets_ptr: u64,
    /// Room for the records, at a multiple of 16 bytes.
    pub blocks_ptr: u64,
    /// Experts.
    pub num_experts: u32,
    /// Rows of the list, or more.
    pub max_rows: u32,
    /// Rows of a block, as a power of two.
    pub tile_shift: u32,
    /// Records that there is room for: see [`super::select::max_blocks`].
    pub max_blocks: u32,
}

impl BlockArguments {
    pub(super) fn append(&self, list: &mut ArgList) {
        list.push(Arg::U64(self.offsets_ptr));
        list.push(Arg::U64(self.blocks_ptr));
        for value in [self.num_experts, self.max_rows, self.tile_shift, self.max_blocks] {
            list.push(Arg::U32(value));
        }
    }

    /// The arguments of [`build`], in order.
    pub fn list(&self) -> ArgList {
        let mut list = ArgList::new(&[]);
        self.append(&mut list);
        list
    }
}

impl BlockParams {
    pub(super) fn declare(a: &mut Asm) -> Self {
        Self {
            offsets_ptr: a.param_u64("offsets_ptr"),
            blocks_ptr: a.param_u64("blocks_ptr"),
            num_experts: a.param_u32("num_experts"),
            max_rows: a.param_u32("max_rows"),
            tile_shift: a.param_u32("tile_shift"),
            max_blocks: a.param_u32("max_blocks"),
        }
    }

    /// Where an expert's rows begin.
    pub(super) fn emit_offset_place(&self, a: &mut Asm, expert: Reg<B32>) -> Reg<B64> {
        let (base, at) = (load_u64(a, self.offsets_ptr), a.reg());
        a.mad_wide_u32(at, expert, 4, base);
        at
    }

    pub(super) fn emit_num_experts(&self, a: &mut Asm) -> Reg<B32> {
        load_u32(a, self.num_experts)
    }

    /// Emits the writing of all records by the threads of one CTA.
    pub(super) fn emit_blocks(&self, a: &mut Asm, scan: &Scan, tid: Reg<B32>) {
        let num_experts = self.emit_num_experts(a);
        let max_rows = load_u32(a, self.max_rows);
        let max_blocks = load_u32(a, self.max_blocks);
        let shift = load_u32(a, self.tile_shift);
        let blocks = load_u64(a, self.blocks_ptr);
        let [one, tile_m, round, chunk, base, zero] = a.regs();
        a.mov_b32(one, 1);
        a.shl_b32(tile_m, one, shift);
        a.sub_u32(round, tile_m, 1);
        a.mov_b32(chunk, 0);
        a.mov_b32(base, 0);
        a.mov_b32(zero, 0);
        let [next, done] = ["experts", "experts_done"].map(|name| a.label(name));
        a.bind(next);
        let finished = a.test_u32(Cmp::Ge, chunk, num_experts);
        a.when(finished, |a| a.bra(done));
        let expert = a.reg();
        a.add_u32(expert, chunk, tid);
        let exists = a.test_u32(Cmp::Lt, expert, num_experts);
        let at = self.emit_offset_place(a, expert);
        let [begin, end, left, num] = a.regs();
        for (offset, word) in [begin, end].into_iter().enumerate() {
            a.mov_b32(word, 0);
            a.when(exists, |a| a.ld_global_b32(word, at.at(4 * offset as i32)));
        }
        for word in [begin, end] {
            a.min_u32(word, word, max_rows);
        }
        a.max_u32(end, end, begin);
        a.sub_u32(left, end, begin);
        a.add_u32(num, left, round);
        a.shr_u32(num, num, shift);
        let [before, total] = scan.emit_sum(a, num);
        let (idx, place): (_, Reg<B64>) = (a.reg(), a.reg());
        a.add_u32(idx, base, before);
        a.add_u32(base, base, total);
        a.mad_wide_u32(place, idx, BLOCK_BYTES as u32, blocks);
        let [next_block, blocks_done] = ["blocks", "blocks_done"].map(|name| a.label(name));
        a.bind(next_block);
        let finished = a.test_u32(Cmp::Eq, left, 0);
        a.when(finished, |a| a.bra(blocks_done));
        let rows = a.reg();
        a.min_u32(rows, left, tile_m);
        let fits = a.test_u32(Cmp::Lt, idx, max_blocks);
        a.when(fits, |a| a.st_global_v4_b32(place, [expert, begin, rows, zero]));
        a.add_u32(begin, begin, rows);
        a.sub_u32(left, left, rows);
        a.add_u32(idx, idx, 1);
        a.add_u64(place, place, BLOCK_BYTES);
        a.bra(next_block);
        a.bind(blocks_done);
        a.add_u32(chunk, chunk, THREADS);
        a.bra(next);
        a.bind(done);
        // Empty records up to the last one.
        let (idx, place): (_, Reg<B64>) = (a.reg(), a.reg());
        let [next, done] = ["empty", "empty_done"].map(|name| a.label(name));
        a.add_u32(idx, base, tid);
        a.mad_wide_u32(place, idx, BLOCK_BYTES as u32, blocks);
        a.bind(next);
        let finished = a.test_u32(Cmp::Ge, idx, max_blocks);
        a.when(finished, |a| a.bra(done));
        a.st_global_v4_b32(place, [zero; 4]);
        a.add_u32(idx, idx, THREADS);
        a.add_u64(place, place, BLOCK_BYTES * u64::from(THREADS));
        a.bra(next);
        a.bind(done);
    }
}

/// The kernel that writes the row blocks of a caller's offsets, for a target: one CTA.
pub fn build(target: SmArch) -> Module {
    let mut a = Asm::new();
    let params = BlockParams::declare(&mut a);
    let (tid, scan) = a.section("who is who", |a| {
        let tid = a.reg();
        a.mov_u32_special(tid, Special::TidX);
        (tid, Scan::new(a, tid))
    });
    if target.sm >= 90 {
        a.griddepcontrol_wait();
        a.griddepcontrol_launch_dependents();
    }
    a.section("row blocks", |a| params.emit_blocks(a, &scan, tid));
    a.exit();
    a.finish("makaira_row_blocks", target, THREADS, 1)
}
