//! Readers by bulk copies (Hopper): whole chunks to shared memory, in rings of each warp's own.
//!
//! One lane of a warp requests a chunk and says on the slot's mbarrier how many bytes come; when they have
//! come it requests the next chunk for that slot. Chunks are dealt to the warps of the grid in turn, so
//! that all of them read side by side. Nobody looks at the bytes unless the sum is wanted.

use std::fmt;

use makaira::asm::reg::{Reg, SharedAddr};
use makaira::asm::types::{B32, B64, Cmp, Pred};
use makaira::asm::{Asm, Module};
use makaira::target::SmArch;

use super::{Prologue, UNIT_BYTES};

/// Bytes from one slot's mbarrier to the next.
const BARRIER_BYTES: u32 = 8;

/// A reader by bulk copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bulk {
    /// Warps of a CTA, each with a ring.
    pub warps: u32,
    /// Chunks in a ring.
    pub slots: u32,
    /// Bytes of a chunk, a multiple of 16.
    pub chunk_bytes: u32,
    /// CTAs per SM.
    pub ctas_per_sm: u32,
}

impl fmt::Display for Bulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { warps, slots, chunk_bytes, ctas_per_sm } = self;
        write!(f, "bulk_w{warps}_s{slots}_b{chunk_bytes}_x{ctas_per_sm}")
    }
}

/// What a warp needs to request chunks.
struct Ring {
    /// The first slot and the first barrier of this warp.
    slots: Reg<B32>,
    barriers: Reg<B32>,
    /// One lane of the warp.
    leader: Reg<Pred>,
    num_chunks: Reg<B32>,
}

impl Bulk {
    /// The ones that are timed: 64 to 192 KiB in flight on an SM, one requesting warp or many.
    pub fn all() -> Vec<Self> {
        [(1, 2, 32768), (1, 4, 32768), (1, 6, 32768), (2, 4, 16384), (8, 2, 4224), (16, 2, 4224)]
            .map(|(warps, slots, chunk_bytes)| Bulk { warps, slots, chunk_bytes, ctas_per_sm: 1 })
            .to_vec()
    }

    fn units(&self) -> u32 {
        self.chunk_bytes / UNIT_BYTES
    }

    /// Chunks of `num_units` units, the last one perhaps shorter.
    pub(super) fn chunks(&self, num_units: u32) -> u32 {
        num_units.div_ceil(self.units())
    }

    pub(super) fn build(&self, name: &str, num_ctas: u32, target: SmArch) -> Module {
        let Self { warps, slots, chunk_bytes, ctas_per_sm } = *self;
        let mut a = Asm::new();
        let prologue = Prologue::emit(&mut a);
        let step = warps * num_ctas;
        let data = a.smem.region("rings", warps * slots * chunk_bytes, 128);
        let barriers = a.smem.region("barriers", warps * slots * BARRIER_BYTES, BARRIER_BYTES);
        let [smem, warp, lane, chunk] = a.regs();
        a.mov_u32_smem(smem);
        a.shr_u32(warp, prologue.tid, 5);
        a.and_b32(lane, prologue.tid, 31);
        a.mad_lo_u32(chunk, prologue.cta, warps, warp);
        let ring = Ring { slots: a.reg(), barriers: a.reg(), leader: a.reg(), num_chunks: a.reg() };
        a.mad_lo_u32(ring.slots, warp, slots * chunk_bytes, smem);
        a.mad_lo_u32(ring.barriers, warp, slots * BARRIER_BYTES, smem);
        a.ld_param_u32(ring.num_chunks, prologue.share);
        a.elect_sync(ring.leader);
        let slot_at = |slot: u32| ring.slots.at(data.start + slot * chunk_bytes).within(data);
        let barrier_at =
            |slot: u32| ring.barriers.at(barriers.start + BARRIER_BYTES * slot).within(barriers);
        a.section("barriers", |a| {
            a.when(ring.leader, |a| {
                for slot in 0..slots {
                    a.mbarrier_init_shared_b64(barrier_at(slot), 1);
                }
                a.fence_mbarrier_init_release_cluster();
            });
            a.bar_warp_sync(u32::MAX);
        });
        a.section("first requests", |a| {
            for slot in 0..slots {
                let wanted = a.reg();
                a.add_u32(wanted, chunk, slot * step);
                self.request(a, &prologue, &ring, wanted, slot_at(slot), barrier_at(slot));
            }
        });
        let [flush, parity] = a.regs();
        a.ld_param_u32(flush, prologue.flush);
        let flush = a.test_u32(Cmp::Ne, flush, 0);
        a.mov_b32(parity, 0);
        let [next, done] = ["next", "done"].map(|name| a.label(name));
        a.section("chunks", |a| {
            a.bind(next);
            for slot in 0..slots {
                let exists = a.test_u32(Cmp::Lt, chunk, ring.num_chunks);
                a.unless(exists, |a| a.bra(done));
                let wait = a.label("wait");
                a.bind(wait);
                let complete = a.reg();
                a.mbarrier_try_wait_parity_shared_cta_b64(complete, barrier_at(slot), parity);
                a.unless(complete, |a| a.bra(wait));
                let counted = a.label("counted");
                a.unless(flush, |a| a.bra(counted));
                self.sum(a, &prologue, chunk, lane, slot_at(slot));
                a.bind(counted);
                a.fence_proxy_async_shared_cta();
                a.bar_warp_sync(u32::MAX);
                let wanted = a.reg();
                a.add_u32(wanted, chunk, slots * step);
                self.request(a, &prologue, &ring, wanted, slot_at(slot), barrier_at(slot));
                a.add_u32(chunk, chunk, step);
            }
            a.xor_b32(parity, parity, 1);
            a.bra(next);
        });
        a.bind(done);
        prologue.finish(&mut a);
        a.finish(name, target, 32 * warps, ctas_per_sm)
    }

    /// Units of chunk number `chunk`.
    fn units_of(&self, a: &mut Asm, prologue: &Prologue, chunk: Reg<B32>) -> Reg<B32> {
        let [first, units] = a.regs();
        a.mul_lo_u32(first, chunk, self.units());
        a.sub_u32(units, prologue.num_units, first);
        a.min_u32(units, units, self.units());
        units
    }

    /// Requests a chunk for a slot, if it exists.
    fn request(
        &self,
        a: &mut Asm,
        prologue: &Prologue,
        ring: &Ring,
        chunk: Reg<B32>,
        slot: SharedAddr,
        barrier: SharedAddr,
    ) {
        let bytes = self.units_of(a, prologue, chunk);
        a.shl_b32(bytes, bytes, UNIT_BYTES.trailing_zeros());
        let ptr: Reg<B64> = a.reg();
        a.mad_wide_u32(ptr, chunk, self.chunk_bytes, prologue.data);
        let exists = a.test_u32(Cmp::Lt, chunk, ring.num_chunks);
        let ours = a.reg();
        a.and_pred(ours, exists, ring.leader);
        a.when(ours, |a| {
            a.mbarrier_arrive_expect_tx_shared_cta_b64(barrier, bytes);
            a.cp_async_bulk_shared_global(slot, ptr, bytes, barrier);
        });
    }

    /// Adds the units of a chunk, lane by lane.
    fn sum(
        &self,
        a: &mut Asm,
        prologue: &Prologue,
        chunk: Reg<B32>,
        lane: Reg<B32>,
        slot: SharedAddr,
    ) {
        let units = self.units_of(a, prologue, chunk);
        let [unit, base] = a.regs();
        a.mov_b32(unit, lane);
        a.mad_lo_u32(base, lane, UNIT_BYTES, slot.base);
        let [more, end] = ["units", "no_units"].map(|name| a.label(name));
        a.bind(more);
        let exists = a.test_u32(Cmp::Lt, unit, units);
        a.unless(exists, |a| a.bra(end));
        let words: [Reg<B32>; 4] = a.regs();
        a.ld_shared_v4_b32(words, SharedAddr { base, ..slot });
        prologue.add(a, &words);
        a.add_u32(unit, unit, 32);
        a.add_u32(base, base, 32 * UNIT_BYTES);
        a.bra(more);
        a.bind(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_and_chunks_cover_the_units() {
        for bulk in Bulk::all() {
            let smem = bulk.warps * bulk.slots * (bulk.chunk_bytes + BARRIER_BYTES);
            assert!(smem * bulk.ctas_per_sm <= 227 << 10, "{bulk}");
            assert!(bulk.chunk_bytes.is_multiple_of(UNIT_BYTES), "{bulk}");
            for num_units in [1, bulk.units(), bulk.units() + 1, 15_138_816] {
                let chunks = bulk.chunks(num_units);
                assert!((chunks - 1) * bulk.units() < num_units);
                assert!(chunks * bulk.units() >= num_units);
            }
        }
    }
}
