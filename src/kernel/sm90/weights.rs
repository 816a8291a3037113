//! A warp's own ring of weights: bulk copies by one lane, one mbarrier a slot.
//!
//! A slot's barrier expects one arrival and the bytes of the copy; the arrival is the asking lane's, with the
//! count of bytes. Every wait flips the parity that the slot's next wait names. Nobody else reads a slot, so
//! a warp barrier after the warp's last read is all that must precede the next copy into it.
//! Source: PTX ISA, "cp.async.bulk", "mbarrier", "elect.sync".

use crate::asm::Asm;
use crate::asm::reg::{Reg, Region, SharedAddr};
use crate::asm::types::{B32, B64, Cmp, Pred, Special};
use crate::kernel::params::{Params, load_u32, load_u64};
use crate::kernel::problem::{Config, Start};
use crate::kernel::stream::{Geometry, emit_divide};
use crate::kernel::stripe::{Segment, Stripe};
use crate::weights::CHUNK_CHANNELS;

/// Bytes of an mbarrier.
const BARRIER_BYTES: u32 = 8;

/// Which warp this is, in registers that are the same in all its lanes.
pub(super) struct Warp {
    pub(super) smem: Reg<B32>,
    pub(super) tid: Reg<B32>,
    pub(super) warp: Reg<B32>,
    /// The team's number, `warp / warps_n`.
    pub(super) team: Reg<B32>,
    /// The warp's place in its team.
    warp_n: Reg<B32>,
    /// Shared address of the warp's weights, less their place in the plan.
    pub(super) weights: Reg<B32>,
    /// Shared address of the warp's barriers, less their place in the plan.
    barriers: Reg<B32>,
    /// True in the lane that asks for copies.
    elected: Reg<Pred>,
}

impl Warp {
    pub(super) fn new(a: &mut Asm, config: &Config) -> Self {
        let [smem, tid, of_lane, warp, weights, barriers] = a.regs();
        a.mov_u32_smem(smem);
        a.mov_u32_special(tid, Special::TidX);
        a.shr_u32(of_lane, tid, 5);
        // The assembler knows by this that the number is the same in all lanes.
        a.shfl_sync_idx_b32(warp, of_lane, 0);
        let [team, warp_n] = emit_divide(a, warp, config.warps_n);
        a.mad_lo_u32(weights, warp, Geometry::new(config).warp_bytes, smem);
        a.mad_lo_u32(barriers, warp, BARRIER_BYTES, smem);
        let elected = a.reg();
        a.elect_sync(elected);
        Self { smem, tid, warp, team, warp_n, weights, barriers, elected }
    }
}

/// One slot of all warps' rings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    /// Codes and scales.
    pub(super) codes: Region,
    barriers: Region,
}

/// The ring, its barriers and what advances from run to run.
pub(super) struct WeightRing<'a> {
    config: &'a Config,
    geometry: Geometry,
    pub(super) slots: Vec<Slot>,
    params: Params,
    team: Reg<B32>,
    warp_n: Reg<B32>,
    weights: Reg<B32>,
    barriers: Reg<B32>,
    elected: Reg<Pred>,
    policy: Option<Reg<B64>>,
    /// Parity of each slot's next phase.
    parities: Vec<Reg<B32>>,
    /// Runs not yet computed.
    pub(super) num_runs: Reg<B32>,
    /// When no more than so many runs are left, this warp has requested all its weights.
    quiet_at: Reg<B32>,
    /// Global address of the weights that the loop's first run asks for, by chunk column of the warp.
    from: Vec<Reg<B64>>,
}

impl<'a> WeightRing<'a> {
    /// The ring's shared memory.
    pub(super) fn plan(a: &mut Asm, config: &Config) -> Vec<Slot> {
        let bytes = config.num_warps() * Geometry::new(config).warp_bytes;
        let codes: Vec<_> = (0..config.stages)
            .map(|slot| a.smem.region(&format!("slot {slot}: weights"), bytes, 16))
            .collect();
        // The verifier takes both addresses of a copy for those of 16-byte accesses.
        let bytes = config.num_warps() * BARRIER_BYTES;
        let slot = |(slot, codes)| Slot {
            codes,
            barriers: a.smem.region(&format!("slot {slot}: barriers"), bytes, 16),
        };
        codes.into_iter().enumerate().map(slot).collect()
    }

    /// Bytes of [`WeightRing::plan`].
    pub(super) fn bytes(config: &Config) -> u32 {
        let codes = config.num_warps() * Geometry::new(config).warp_bytes;
        let barriers = (config.num_warps() * BARRIER_BYTES).next_multiple_of(16);
        config.stages * (codes + barriers)
    }

    /// Emits the barriers' first phase.
    pub(super) fn new(
        a: &mut Asm,
        config: &'a Config,
        params: &Params,
        slots: Vec<Slot>,
        warp: &Warp,
    ) -> Self {
        let policy = config.evict_first.then(|| a.reg());
        let ring = Self {
            config,
            geometry: Geometry::new(config),
            params: *params,
            team: warp.team,
            warp_n: warp.warp_n,
            weights: warp.weights,
            barriers: warp.barriers,
            elected: warp.elected,
            policy,
            parities: slots.iter().map(|_| a.reg()).collect(),
            slots,
            num_runs: a.reg(),
            quiet_at: a.reg(),
            from: (0..config.tiles_per_warp().div_ceil(4)).map(|_| a.reg()).collect(),
        };
        a.section("barriers", |a| {
            if let Some(policy) = policy {
                a.createpolicy_fractional_l2_evict_first_b64(policy);
            }
            ring.parities.iter().for_each(|parity| a.mov_b32(*parity, 0));
            ring.emit_elected(a, |a| {
                for slot in 0..config.stages {
                    a.mbarrier_init_shared_b64(ring.barrier(slot), 1);
                }
                a.fence_mbarrier_init_release_cluster();
            });
        });
        ring
    }

    fn barrier(&self, slot: u32) -> SharedAddr {
        let Slot { barriers, .. } = self.slots[slot as usize];
        self.barriers.at(barriers.start).within(barriers)
    }

    /// Bytes from one run of the team to its next.
    fn step(&self) -> u32 {
        4 * self.geometry.tile.bytes * self.config.warps_k
    }

    /// Emits the warp's way through a segment and asks for its first runs, as many as there are slots.
    pub(super) fn emit_fill(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        a.section("fill the weights' ring", |a| {
            self.emit_rewind(a, stripe, segment);
            self.emit_ask(a, 0, self.config.stages);
            self.emit_advance(a, self.config.stages);
        });
    }

    /// The same for the kernel's first segment, of which [`Start`] says how it begins.
    pub(super) fn emit_first_fill(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let stages = self.config.stages;
        a.section("fill the weights' ring", |a| {
            self.emit_rewind(a, stripe, segment);
            let slots = match self.config.start {
                Start::Ramped => stages.div_ceil(2),
                Start::Full => stages,
            };
            self.emit_ask(a, 0, slots);
            self.emit_advance(a, slots);
        });
    }

    /// Asks for the rest of the ring when its first slot has arrived, if not all was asked for at once.
    pub(super) fn emit_rest_of_fill(&self, a: &mut Asm) {
        if self.config.start != Start::Ramped {
            return;
        }
        a.section("fill the rest of the weights' ring", |a| {
            let none = a.label("no_rest");
            let (stages, asked) = (self.config.stages, self.config.stages.div_ceil(2));
            let exists = a.test_u32(Cmp::Gt, self.num_runs, asked);
            a.unless(exists, |a| a.bra(none));
            // What the elected lane did to the barriers is known to the others from here on.
            a.bar_warp_sync(0xffff_ffffu32);
            self.emit_await(a, 0);
            self.emit_ask(a, asked, stages);
            a.bind(none);
            self.emit_advance(a, stages - asked);
        });
    }

    /// Asks for runs into slots `first ..` up to `end`, as many as there are; `from` points at the first.
    fn emit_ask(&self, a: &mut Asm, first: u32, end: u32) {
        self.emit_elected(a, |a| {
            for slot in first..end {
                let exists = a.test_u32(Cmp::Gt, self.num_runs, slot);
                a.when(exists, |a| self.emit_copy(a, slot, slot - first));
            }
        });
    }

    /// Emits what the elected lane does.
    fn emit_elected(&self, a: &mut Asm, emit: impl FnOnce(&mut Asm)) {
        let done = a.label("asked");
        a.unless(self.elected, |a| a.bra(done));
        emit(a);
        a.bind(done);
    }

    /// Points at the team's first run of a segment.
    fn emit_rewind(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        stripe.emit_by_rest(a, self.quiet_at, self.config.stages, 0);
        let (config, geometry) = (self.config, self.geometry);
        let first = a.reg();
        a.add_u32(first, segment.begin, self.team);
        // Runs begin + team, begin + team + warps_k, … below end; team < warps_k, so this does not wrap.
        a.sub_u32(self.num_runs, segment.end, first);
        a.add_u32(self.num_runs, self.num_runs, config.warps_k - 1);
        a.shr_u32(self.num_runs, self.num_runs, config.warps_k.ilog2());
        // The warp's channels begin in some chunk column, some tiles into the chunk, or are those of two columns.
        let chunk_bytes = 4 * geometry.tile.bytes;
        let num_columns = load_u32(a, self.params.num_chunk_columns);
        let b_ptr = load_u64(a, self.params.b_ptr);
        let [warp_column, last_column] = a.regs();
        a.mad_lo_u32(warp_column, segment.tile, config.warps_n, self.warp_n);
        // A tile may reach past the last column: those warps read the last one and write nothing.
        a.sub_u32(last_column, num_columns, 1);
        let warps_per_chunk = CHUNK_CHANNELS as u32 / 16 / config.tiles_per_warp();
        for (idx, from) in self.from.iter().enumerate() {
            let [column, run] = a.regs();
            match warps_per_chunk {
                0 => a.mad_lo_u32(column, warp_column, self.from.len() as u32, idx as u32),
                _ => a.shr_u32(column, warp_column, warps_per_chunk.ilog2()),
            }
            a.min_u32(column, column, last_column);
            a.mad_lo_u32(run, column, segment.k_tiles, first);
            a.mad_wide_u32(*from, run, chunk_bytes, b_ptr);
            if warps_per_chunk > 1 {
                let part = a.reg();
                a.and_b32(part, warp_column, warps_per_chunk - 1);
                a.mad_wide_u32(*from, part, geometry.warp_bytes, *from);
            }
        }
    }

    /// The elected lane asks for the weights of the run `ahead` runs past `from`.
    fn emit_copy(&self, a: &mut Asm, slot: u32, ahead: u32) {
        let Slot { codes, .. } = self.slots[slot as usize];
        let (bytes, barrier) = (self.geometry.warp_bytes, self.barrier(slot));
        a.mbarrier_arrive_expect_tx_shared_cta_b64(barrier, bytes);
        let piece = bytes / self.from.len() as u32;
        for (idx, from) in self.from.iter().enumerate() {
            let to = self.weights.at(codes.start + idx as u32 * piece).within(codes);
            let from = from.at((ahead * self.step()) as i32);
            match self.policy {
                Some(policy) => {
                    a.cp_async_bulk_shared_global_hint(to, from, piece, barrier, policy);
                }
                None => a.cp_async_bulk_shared_global(to, from, piece, barrier),
            }
        }
    }

    /// Waits until a slot's weights are there. What the elected lane did to the barriers must be known: the
    /// team has met since.
    pub(super) fn emit_wait(&self, a: &mut Asm, slot: u32) {
        self.emit_await(a, slot);
        let parity = self.parities[slot as usize];
        a.xor_b32(parity, parity, 1);
    }

    fn emit_await(&self, a: &mut Asm, slot: u32) {
        let parity = self.parities[slot as usize];
        let again = a.label("again");
        a.bind(again);
        let arrived = a.reg();
        a.mbarrier_try_wait_parity_shared_cta_b64(arrived, self.barrier(slot), parity);
        a.unless(arrived, |a| a.bra(again));
    }

    /// Lets the next grid begin if this warp has asked for all its weights.
    pub(super) fn emit_launch_dependents(&self, a: &mut Asm) {
        let quiet = a.test_u32(Cmp::Le, self.num_runs, self.quiet_at);
        a.when(quiet, |a| a.griddepcontrol_launch_dependents());
    }

    /// Asks for the run `stages` after this one, the loop's number `run`, if there is one, into the slot that
    /// the warp has read.
    pub(super) fn emit_request(&self, a: &mut Asm, slot: u32, run: u32) {
        let asked = a.label("asked");
        // The loads may still wait in the memory pipeline, behind another CTA's fences for microseconds, while the
        // copy takes another way: that all lanes have come here is not enough, see `benches/NOTES.md`. It is fenced
        // whether or not there is a next run, for the next segment's copies come without.
        a.fence_proxy_async_shared_cta();
        a.bar_warp_sync(0xffff_ffffu32);
        let more = a.test_u32(Cmp::Gt, self.num_runs, self.config.stages);
        a.and_pred(more, more, self.elected);
        a.unless(more, |a| a.bra(asked));
        self.emit_copy(a, slot, run);
        a.bind(asked);
    }

    /// Moves on by some runs.
    pub(super) fn emit_advance(&self, a: &mut Asm, runs: u32) {
        for from in &self.from {
            a.add_u64(*from, *from, u64::from(runs * self.step()));
        }
    }
}
