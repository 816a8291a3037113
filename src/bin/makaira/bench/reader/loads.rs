//! Readers by 16-byte loads to registers.
//!
//! A grid of `ctas_per_sm` CTAs for each SM whose threads add up the layer, `unroll` loads in flight each.

use std::fmt;

use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp};
use makaira::asm::{Asm, Module};
use makaira::target::SmArch;

use super::{Prologue, UNIT_BYTES};

/// Which CTA reads what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The whole grid side by side.
    Interleaved,
    /// One contiguous slab per CTA.
    Slab,
}

/// A reader by loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loads {
    /// Which CTA reads what.
    pub order: Order,
    /// Loads in flight per thread.
    pub unroll: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM.
    pub ctas_per_sm: u32,
}

impl fmt::Display for Loads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { order, unroll, threads, ctas_per_sm } = self;
        let order = match order {
            Order::Interleaved => "inter",
            Order::Slab => "slab",
        };
        write!(f, "{order}_u{unroll}_t{threads}_x{ctas_per_sm}")
    }
}

impl Loads {
    /// The ones that are timed.
    pub fn all() -> Vec<Self> {
        let with = |order| {
            move |(unroll, threads, ctas_per_sm)| Loads { order, unroll, threads, ctas_per_sm }
        };
        let interleaved =
            [(4, 256, 8), (8, 256, 8), (4, 512, 4), (8, 512, 4), (4, 1024, 2), (8, 1024, 1)];
        let slabs = [(4, 1024, 2), (8, 512, 4), (4, 512, 2)];
        let slabs = slabs.map(with(Order::Slab));
        interleaved.map(with(Order::Interleaved)).into_iter().chain(slabs).collect()
    }

    pub(super) fn build(&self, name: &str, num_ctas: u32, target: SmArch) -> Module {
        let Self { order, unroll, threads, ctas_per_sm } = *self;
        let mut a = Asm::new();
        let prologue = Prologue::emit(&mut a);
        let Prologue { tid, cta, num_units, share, data, .. } = prologue;
        // Units of this thread: next, next + step, … below end.
        let [next, end] = a.regs();
        let step = match order {
            Order::Interleaved => {
                a.mad_lo_u32(next, cta, threads, tid);
                a.mov_b32(end, num_units);
                threads * num_ctas
            }
            Order::Slab => {
                let size = a.reg();
                a.ld_param_u32(size, share);
                a.mad_lo_u32(next, cta, size, tid);
                a.mad_lo_u32(end, cta, size, size);
                a.min_u32(end, end, num_units);
                threads
            }
        };
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, next, UNIT_BYTES, data);
        let values: Vec<[Reg<B32>; 4]> = (0..unroll).map(|_| a.regs()).collect();
        let offset = |u: u32| (u * step * UNIT_BYTES) as i32;

        let [whole, rest] = ["whole", "rest"].map(|name| a.label(name));
        a.section("whole rounds", |a| {
            a.bind(whole);
            let last = a.reg();
            a.add_u32(last, next, (unroll - 1) * step);
            let fits = a.test_u32(Cmp::Lt, last, end);
            a.unless(fits, |a| a.bra(rest));
            for (u, value) in (0..).zip(&values) {
                a.ld_global_v4_b32(*value, ptr.at(offset(u)));
            }
            values.iter().for_each(|value| prologue.add(a, value));
            a.add_u32(next, next, unroll * step);
            a.add_u64(ptr, ptr, u64::from(unroll * step * UNIT_BYTES));
            a.bra(whole);
        });
        a.bind(rest);
        a.section("the last round", |a| {
            for (u, value) in (0..).zip(&values) {
                let unit = a.reg();
                a.add_u32(unit, next, u * step);
                let exists = a.test_u32(Cmp::Lt, unit, end);
                value.iter().for_each(|value| a.mov_b32(*value, 0));
                a.when(exists, |a| a.ld_global_v4_b32(*value, ptr.at(offset(u))));
            }
            values.iter().for_each(|value| prologue.add(a, value));
        });
        prologue.finish(&mut a);
        // 32 registers hold four loads and the addresses, 64 hold eight.
        let resident_threads = if unroll <= 4 { 2048 } else { 1024 };
        let min_ctas = ctas_per_sm.min(resident_threads / threads);
        a.finish(name, target, threads, min_ctas)
    }
}
