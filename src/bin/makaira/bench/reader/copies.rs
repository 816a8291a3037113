//! Readers by `cp.async`: 16-byte copies to shared memory, in rings.
//!
//! The grid reads side by side. In each turn a thread requests `unroll` units and looks at those that it
//! requested `stages - 1` turns ago; only it uses its slots, so no barrier is needed. All threads take the
//! same number of turns, a multiple of the ring's length: a unit that does not exist is a copy of nothing.

use std::fmt;

use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp};
use makaira::asm::{Asm, Module};
use makaira::target::SmArch;

use super::{Prologue, UNIT_BYTES};

/// A reader by asynchronous copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// Units that a thread requests in a turn.
    pub unroll: u32,
    /// Turns in the ring.
    pub stages: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM.
    pub ctas_per_sm: u32,
}

impl fmt::Display for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unroll, stages, threads, ctas_per_sm } = self;
        write!(f, "copies_u{unroll}_s{stages}_t{threads}_x{ctas_per_sm}")
    }
}

impl Copies {
    /// The ones that are timed: 32, 64, 64, 96 and 128 KiB of slots on an SM.
    pub fn all() -> Vec<Self> {
        [(2, 4, 256, 1), (2, 4, 256, 2), (4, 4, 256, 1), (2, 6, 256, 2), (4, 4, 512, 1)]
            .map(|(unroll, stages, threads, ctas_per_sm)| Copies {
                unroll,
                stages,
                threads,
                ctas_per_sm,
            })
            .to_vec()
    }

    /// Turns that every thread takes to read `num_units` units.
    pub(super) fn turns(&self, num_units: u32, num_ctas: u32) -> u32 {
        num_units.div_ceil(num_ctas * self.threads * self.unroll).next_multiple_of(self.stages)
    }

    pub(super) fn build(&self, name: &str, num_ctas: u32, target: SmArch) -> Module {
        let Self { unroll, stages, threads, ctas_per_sm } = *self;
        let mut a = Asm::new();
        let prologue = Prologue::emit(&mut a);
        let step = threads * num_ctas;
        // A slot is [unit of the turn][thread].
        let slot_bytes = unroll * threads * UNIT_BYTES;
        let ring = a.smem.region("ring", stages * slot_bytes, 16);
        let [next, own] = a.regs();
        a.mad_lo_u32(next, prologue.cta, threads, prologue.tid);
        let smem = a.reg();
        a.mov_u32_smem(smem);
        a.mad_lo_u32(own, prologue.tid, UNIT_BYTES, smem);
        let at = |stage: u32, u: u32| {
            own.at(ring.start + stage * slot_bytes + u * threads * UNIT_BYTES).within(ring)
        };
        // Requests the next units; those behind the end copy nothing, from the first address.
        let request = |a: &mut Asm, stage: u32| {
            for u in 0..unroll {
                let [unit, bytes]: [Reg<B32>; 2] = a.regs();
                if u == 0 {
                    a.mov_b32(unit, next);
                } else {
                    a.add_u32(unit, next, u * step);
                }
                let exists = a.test_u32(Cmp::Lt, unit, prologue.num_units);
                a.selp_b32(unit, unit, 0, exists);
                a.selp_b32(bytes, UNIT_BYTES, 0, exists);
                let ptr: Reg<B64> = a.reg();
                a.mad_wide_u32(ptr, unit, UNIT_BYTES, prologue.data);
                a.cp_async_cg_16_zfill(at(stage, u), ptr, bytes);
            }
            a.cp_async_commit_group();
            a.add_u32(next, next, unroll * step);
        };
        a.section("first requests", |a| {
            for stage in 0..stages - 1 {
                request(a, stage);
            }
        });
        let left: Reg<B32> = a.reg();
        a.ld_param_u32(left, prologue.share);
        let turns = a.label("turns");
        a.section("turns", |a| {
            a.bind(turns);
            for stage in 0..stages {
                request(a, (stage + stages - 1) % stages);
                a.cp_async_wait_group(stages - 1);
                for u in 0..unroll {
                    let unit: [Reg<B32>; 4] = a.regs();
                    a.ld_shared_v4_b32(unit, at(stage, u));
                    prologue.add(a, &unit);
                }
            }
            a.sub_u32(left, left, stages);
            let more = a.test_u32(Cmp::Ne, left, 0);
            a.when(more, |a| a.bra(turns));
        });
        a.cp_async_wait_group(0);
        prologue.finish(&mut a);
        a.finish(name, target, threads, ctas_per_sm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_cover_the_units_by_whole_rings() {
        for copies in Copies::all() {
            let per_turn = 264 * copies.threads * copies.unroll;
            for num_units in [1, per_turn, per_turn + 1, 15_138_816] {
                let turns = copies.turns(num_units, 264);
                assert!(turns.is_multiple_of(copies.stages) && turns * per_turn >= num_units);
                assert!((turns - copies.stages) * per_turn < num_units);
            }
        }
    }
}
