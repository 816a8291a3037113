//! Brings rows of A into the list's order, for families that copy boxes of rows.
//!
//! A thread has 16 bytes of a row and as many rows as its place in the grid gives it. Rows behind the list's last one
//! become zeros: where the list ends only the device knows.
//! Where grids may overlap it waits for the one before it, which may be writing the list or the activations.

use crate::asm::reg::Reg;
use crate::asm::types::{B32, B64, Cmp, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, ArgList};
use crate::kernel::params::{load_u32, load_u64};
use crate::target::SmArch;

/// Threads of a CTA.
const THREADS: u32 = 128;
/// Bytes of a thread.
const BYTES: u32 = 16;
/// CTAs that are as many as most cards run at a time: more rows than these cover are taken in turns.
const CTAS: u32 = 2048;

/// What a launch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowsArguments {
    /// Activations, at a multiple of 16 bytes.
    pub from_ptr: u64,
    /// Bytes from one row of them to the next, a multiple of 16.
    pub from_stride_bytes: u32,
    /// The row of A of each row of the list.
    pub token_ids_ptr: u64,
    /// Rows of A.
    pub num_tokens: u32,
    /// Rows of the list: a word on the device.
    pub end_ptr: u64,
    /// The result, at a multiple of 16 bytes, its rows one after the other.
    pub to_ptr: u64,
    /// Bytes of a row of the result, a multiple of 16.
    pub row_bytes: u32,
    /// Rows of the result.
    pub rows: u32,
}

impl RowsArguments {
    /// The kernel's arguments, in the order of the entry's parameters.
    pub fn list(&self) -> ArgList {
        ArgList::new(&[
            Arg::U64(self.from_ptr),
            Arg::U64(self.token_ids_ptr),
            Arg::U64(self.end_ptr),
            Arg::U64(self.to_ptr),
            Arg::U32(self.from_stride_bytes),
            Arg::U32(self.num_tokens),
            Arg::U32(self.row_bytes),
            Arg::U32(self.rows),
        ])
    }

    /// CTAs of the launch: pieces of a row, rows.
    pub fn grid(&self) -> [u32; 2] {
        let across = self.row_bytes.div_ceil(THREADS * BYTES);
        [across, self.rows.min(CTAS.div_ceil(across)).max(1)]
    }
}

/// The kernel for a target.
pub fn build(target: SmArch) -> Module {
    let mut a = Asm::new();
    let [from, token_ids, end_ptr, to] =
        ["from_ptr", "token_ids_ptr", "end_ptr", "to_ptr"].map(|name| a.param_u64(name));
    let [stride, num_tokens, row_bytes, rows] =
        ["from_stride_bytes", "num_tokens", "row_bytes", "rows"].map(|name| a.param_u32(name));
    let end = a.label("end");
    let (byte, row) = a.section("who is who", |a| {
        let [tid, cta, byte, row]: [Reg<B32>; 4] = a.regs();
        a.mov_u32_special(tid, Special::TidX);
        a.mov_u32_special(cta, Special::CtaidX);
        a.mad_lo_u32(byte, cta, THREADS, tid);
        a.mul_lo_u32(byte, byte, BYTES);
        a.mov_u32_special(row, Special::CtaidY);
        (byte, row)
    });
    let row_bytes = load_u32(&mut a, row_bytes);
    let outside = a.test_u32(Cmp::Ge, byte, row_bytes);
    a.when(outside, |a| a.bra(end));
    if target.sm >= 90 {
        a.griddepcontrol_wait();
        a.griddepcontrol_launch_dependents();
    }
    let [from, token_ids, end_ptr, to] =
        [from, token_ids, end_ptr, to].map(|param| load_u64(&mut a, param));
    let [stride, num_tokens, rows] =
        [stride, num_tokens, rows].map(|param| load_u32(&mut a, param));
    let [last_token, listed, step]: [Reg<B32>; 3] = a.regs();
    a.sub_u32(last_token, num_tokens, 1);
    a.ld_global_b32(listed, end_ptr);
    a.mov_u32_special(step, Special::NctaidY);
    let next = a.label("next_row");
    a.section("rows", |a| {
        a.bind(next);
        let finished = a.test_u32(Cmp::Ge, row, rows);
        a.when(finished, |a| a.bra(end));
        let exists = a.test_u32(Cmp::Lt, row, listed);
        let (token, at): (_, Reg<B64>) = (a.reg(), a.reg());
        a.mov_b32(token, 0);
        a.mad_wide_u32(at, row, 4, token_ids);
        a.when(exists, |a| a.ld_global_b32(token, at));
        a.min_u32(token, token, last_token);
        let [source, place]: [Reg<B64>; 2] = a.regs();
        a.mad_wide_u32(source, token, stride, from);
        a.mad_wide_u32(source, byte, 1, source);
        let words: [Reg<B32>; 4] = a.regs();
        words.into_iter().for_each(|word| a.mov_b32(word, 0));
        a.when(exists, |a| a.ld_global_v4_b32(words, source));
        a.mad_wide_u32(place, row, row_bytes, to);
        a.mad_wide_u32(place, byte, 1, place);
        a.st_global_v4_b32(place, words);
        a.add_u32(row, row, step);
        a.bra(next);
    });
    a.bind(end);
    a.exit();
    a.finish("makaira_list_rows", target, THREADS, 1)
}
