//! Gathers activations into the order of a packed weight's inputs: see [`InputOrder`].
//!
//! A thread has eight neighbouring columns of the result and as many rows as its place in the grid gives it: it reads
//! eight indices once, then eight elements a row, which lie anywhere in that row and mostly in L2 or L1, and writes 16
//! bytes. Columns of inputs that do not exist become zeros. Elements are 16 bits, whatever they mean.
//! Where grids may overlap it waits for the one before it, which may be writing the activations.

use crate::asm::reg::Reg;
use crate::asm::types::{B16, B32, B64, Cmp, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, ArgList};
use crate::kernel::params::{load_u32, load_u64};
use crate::target::SmArch;
use crate::weights::InputOrder;

/// Threads of a CTA.
const THREADS: u32 = 128;
/// Columns of a thread.
const COLUMNS: u32 = 8;
/// CTAs that are as many as most cards run at a time: more rows than these cover are taken in turns.
const CTAS: u64 = 2048;

/// What a launch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatherArguments {
    /// Activations.
    pub from_ptr: u64,
    /// Bytes from one row of them to the next.
    pub from_stride_bytes: u32,
    /// The input of each column of the result, at a multiple of 16 bytes.
    pub inputs_ptr: u64,
    /// The result, at a multiple of 16 bytes, its rows one after the other.
    pub to_ptr: u64,
    /// Columns of the result, a multiple of 8.
    pub columns: u32,
    /// Rows.
    pub rows: u32,
}

impl GatherArguments {
    /// The kernel's arguments, in the order of the entry's parameters.
    pub fn list(&self) -> ArgList {
        ArgList::new(&[
            Arg::U64(self.from_ptr),
            Arg::U64(self.inputs_ptr),
            Arg::U64(self.to_ptr),
            Arg::U32(self.from_stride_bytes),
            Arg::U32(self.columns),
            Arg::U32(self.rows),
        ])
    }

    /// CTAs of the launch: columns, rows.
    pub fn grid(&self) -> [u32; 2] {
        let across = self.columns.div_ceil(THREADS * COLUMNS);
        let down = u64::from(self.rows).min(CTAS.div_ceil(across.into())).max(1);
        [across, down as u32]
    }
}

/// The kernel for a target.
pub fn build(target: SmArch) -> Module {
    let mut a = Asm::new();
    let [from, inputs, to] = ["from_ptr", "inputs_ptr", "to_ptr"].map(|name| a.param_u64(name));
    let [stride, columns, rows] =
        ["from_stride_bytes", "columns", "rows"].map(|name| a.param_u32(name));
    let end = a.label("end");
    let (column, row) = a.section("who is who", |a| {
        let [tid, cta, column, row]: [Reg<B32>; 4] = a.regs();
        a.mov_u32_special(tid, Special::TidX);
        a.mov_u32_special(cta, Special::CtaidX);
        a.mad_lo_u32(column, cta, THREADS, tid);
        a.mul_lo_u32(column, column, COLUMNS);
        a.mov_u32_special(row, Special::CtaidY);
        (column, row)
    });
    let columns = load_u32(&mut a, columns);
    let outside = a.test_u32(Cmp::Ge, column, columns);
    a.when(outside, |a| a.bra(end));
    let indices = a.section("indices", |a| {
        let (base, at): (_, Reg<B64>) = (load_u64(a, inputs), a.reg());
        a.mad_wide_u32(at, column, 4, base);
        let [low, high]: [[Reg<B32>; 4]; 2] = [a.regs(), a.regs()];
        a.ld_global_v4_b32(low, at);
        a.ld_global_v4_b32(high, at.at(16));
        [low, high].concat()
    });
    let exists: Vec<_> =
        indices.iter().map(|index| a.test_u32(Cmp::Ne, *index, InputOrder::NONE)).collect();
    if target.sm >= 90 {
        a.griddepcontrol_wait();
        a.griddepcontrol_launch_dependents();
    }
    let (from, to) = (load_u64(&mut a, from), load_u64(&mut a, to));
    let (stride, rows) = (load_u32(&mut a, stride), load_u32(&mut a, rows));
    let step: Reg<B32> = a.reg();
    a.mov_u32_special(step, Special::NctaidY);
    let to_stride: Reg<B32> = a.reg();
    a.add_u32(to_stride, columns, columns);
    let (next, out): (_, Reg<B64>) = (a.label("next_row"), a.reg());
    a.mad_wide_u32(out, column, 2, to);
    a.section("rows", |a| {
        a.bind(next);
        let finished = a.test_u32(Cmp::Ge, row, rows);
        a.when(finished, |a| a.bra(end));
        let source: Reg<B64> = a.reg();
        a.mad_wide_u32(source, row, stride, from);
        let halves: [Reg<B16>; 8] = a.regs();
        let zero: Reg<B32> = a.reg();
        a.mov_b32(zero, 0);
        for pair in halves.chunks(2) {
            a.mov_b32_unpack([pair[0], pair[1]], zero);
        }
        for ((half, index), exists) in halves.iter().zip(&indices).zip(&exists) {
            let at: Reg<B64> = a.reg();
            a.mad_wide_u32(at, *index, 2, source);
            a.when(*exists, |a| a.ld_global_b16(*half, at));
        }
        let words: [Reg<B32>; 4] = a.regs();
        for (word, pair) in words.iter().zip(halves.chunks(2)) {
            a.mov_b32_pack(*word, [pair[0], pair[1]]);
        }
        let place: Reg<B64> = a.reg();
        a.mad_wide_u32(place, row, to_stride, out);
        a.st_global_v4_b32(place, words);
        a.add_u32(row, row, step);
        a.bra(next);
    });
    a.bind(end);
    a.exit();
    a.finish("makaira_gather", target, THREADS, 1)
}
