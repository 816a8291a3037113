//! A warp's own ring of weights: bulk copies by one lane, one mbarrier a slot.
//!
//! A slot's barrier expects one arrival and the bytes of the copy; the arrival is the asking lane's, with the
//! count of bytes. The ring is never begun anew, so the parity of a phase follows from the loop's passes
//! through it. Nobody else reads a slot, so a warp barrier after the warp's last read is all that must precede the next copy into it.
//! Source: PTX ISA, "cp.async.bulk", "mbarrier", "elect.sync".

use std::cell::RefCell;

use crate::asm::Asm;
use crate::asm::reg::{Label, Reg, Region, SharedAddr};
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
    /// Parity of the phases that the loop's first pass through the ring waits for, if it changes: with an even
    /// number of passes it does not.
    parity: Option<Reg<B32>>,
    /// Runs of the segment not yet computed.
    pub(super) num_runs: Reg<B32>,
    /// Runs not yet asked for of the segment that is being asked for.
    to_ask: Reg<B32>,
    /// Its tile.
    tile: Reg<B32>,
    /// Runs of the stripe after it.
    rest: Reg<B32>,
    /// Global address of the weights that position 0 of the loop asks for, by chunk column of the warp.
    from: Vec<Reg<B64>>,
    /// What is emitted behind the program: see [`WeightRing::emit_ask`].
    detours: RefCell<Vec<Detour>>,
}

/// What a position of the loop does when the segment that is being asked for has no more runs.
struct Detour {
    position: u32,
    /// Where it begins.
    begin: Label,
    /// Where it goes when there is another segment, and when there is none.
    ask: Label,
    asked: Label,
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
        unrolled: u32,
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
            parity: (unrolled / config.stages % 2 == 1).then(|| a.reg()),
            slots,
            num_runs: a.reg(),
            to_ask: a.reg(),
            tile: a.reg(),
            rest: a.reg(),
            detours: RefCell::default(),
            from: (0..config.tiles_per_warp().div_ceil(4)).map(|_| a.reg()).collect(),
        };
        a.section("barriers", |a| {
            if let Some(policy) = policy {
                a.createpolicy_fractional_l2_evict_first_b64(policy);
            }
            ring.parity.iter().for_each(|parity| a.mov_b32(*parity, 0));
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
        4 * self.geometry.tile_bytes * self.config.warps_k
    }

    /// Asks for the CTA's first runs, as many as there are slots, or as [`Start`] says.
    pub(super) fn emit_fill(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let stages = self.config.stages;
        a.section("fill the weights' ring", |a| {
            let first = a.reg();
            a.add_u32(first, segment.begin, self.team);
            self.emit_num_runs(a, first, segment.end);
            a.mov_b32(self.to_ask, self.num_runs);
            a.mov_b32(self.tile, segment.tile);
            let rest = stripe.emit_left(a);
            a.mov_b32(self.rest, rest);
            self.emit_point(a, first, 0);
            (0..self.first_slots()).for_each(|slot| self.emit_ask(a, slot, slot));
            if self.config.start == Start::Prefetched {
                self.emit_elected(a, |a| self.emit_prefetch(a));
            }
            if self.first_slots() == stages {
                self.emit_advance(a, stages);
            }
        });
    }

    /// Slots that are asked for at once.
    fn first_slots(&self) -> u32 {
        match self.config.start {
            Start::Ramped => self.config.stages.div_ceil(2),
            Start::Full | Start::Prefetched => self.config.stages,
        }
    }

    /// Brings the segment's next runs into L2, as many as there are slots.
    fn emit_prefetch(&self, a: &mut Asm) {
        let bytes = self.geometry.warp_bytes / self.from.len() as u32;
        for run in 0..self.config.stages {
            let exists = a.test_u32(Cmp::Gt, self.to_ask, run);
            for from in &self.from {
                let from = from.at(((self.config.stages + run) * self.step()) as i32);
                a.when(exists, |a| a.cp_async_bulk_prefetch_l2_global(from, bytes));
            }
        }
    }

    /// Asks for the rest of the ring when its first slot has arrived, if not all was asked for at once; then the
    /// next grid may begin, if that was all.
    pub(super) fn emit_rest_of_fill(&self, a: &mut Asm) {
        let stages = self.config.stages;
        a.section("fill the rest of the weights' ring", |a| {
            if self.first_slots() < stages {
                let none = a.label("none");
                let exists = a.test_u32(Cmp::Ne, self.num_runs, 0);
                a.unless(exists, |a| a.bra(none));
                // What the elected lane did to the barriers is known to the others from here on.
                a.bar_warp_sync(0xffff_ffffu32);
                self.emit_wait(a, 0);
                a.bind(none);
                (self.first_slots()..stages).for_each(|slot| self.emit_ask(a, slot, slot));
                self.emit_advance(a, stages);
            }
            let left = a.reg();
            a.or_b32(left, self.to_ask, self.rest);
            let none = a.test_u32(Cmp::Eq, left, 0);
            a.when(none, |a| a.griddepcontrol_launch_dependents());
        });
    }

    /// Emits the team's runs `first`, `first + warps_k`, … below `end`; team < warps_k, so this does not wrap.
    fn emit_num_runs(&self, a: &mut Asm, first: Reg<B32>, end: Reg<B32>) {
        self.emit_count(a, self.num_runs, first, end);
    }

    fn emit_count(&self, a: &mut Asm, count: Reg<B32>, first: Reg<B32>, end: Reg<B32>) {
        a.sub_u32(count, end, first);
        a.add_u32(count, count, self.config.warps_k - 1);
        a.shr_u32(count, count, self.config.warps_k.ilog2());
    }

    /// Emits the runs to compute of a segment that begins with its tile.
    pub(super) fn emit_next(&self, a: &mut Asm, next: &Segment) {
        self.emit_num_runs(a, self.team, next.end);
    }

    /// Points at run `first` of the tile, for position `position` of the loop.
    fn emit_point(&self, a: &mut Asm, first: Reg<B32>, position: u32) {
        let (config, geometry) = (self.config, self.geometry);
        // The warp's channels begin in some chunk column, some tiles into the chunk, or are those of two columns.
        let chunk_bytes = 4 * geometry.tile_bytes;
        let num_columns = load_u32(a, self.params.num_chunk_columns);
        let k_tiles = load_u32(a, self.params.k_tiles);
        let b_ptr = load_u64(a, self.params.b_ptr);
        let [warp_column, last_column] = a.regs();
        a.mad_lo_u32(warp_column, self.tile, config.warps_n, self.warp_n);
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
            a.mad_lo_u32(run, column, k_tiles, first);
            a.mad_wide_u32(*from, run, chunk_bytes, b_ptr);
            if warps_per_chunk > 1 {
                let part = a.reg();
                a.and_b32(part, warp_column, warps_per_chunk - 1);
                a.mad_wide_u32(*from, part, geometry.warp_bytes, *from);
            }
            if position > 0 {
                a.add_u64(*from, *from, u64::from(position * self.step()).wrapping_neg());
            }
        }
    }

    /// Asks for the next run of the stripe into a slot, at a position of the loop. Where the segment that is being
    /// asked for has ended it takes a detour by the next one, so that the ring runs on while sums are reduced.
    fn emit_ask(&self, a: &mut Asm, slot: u32, position: u32) {
        let [begin, ask, asked] = ["next_segment_asked", "ask", "asked"].map(|name| a.label(name));
        let ended = a.test_u32(Cmp::Eq, self.to_ask, 0);
        a.when(ended, |a| a.bra(begin));
        a.bind(ask);
        a.sub_u32(self.to_ask, self.to_ask, 1);
        a.unless(self.elected, |a| a.bra(asked));
        self.emit_copy(a, slot, position);
        a.bind(asked);
        self.detours.borrow_mut().push(Detour { position, begin, ask, asked });
    }

    /// Emits the detours, behind the program's end.
    pub(super) fn emit_detours(&self, a: &mut Asm) {
        for Detour { position, begin, ask, asked } in self.detours.take() {
            a.section("the next segment's weights", |a| {
                let another = a.label("another");
                a.bind(begin);
                let more = a.test_u32(Cmp::Ne, self.rest, 0);
                a.when(more, |a| a.bra(another));
                // This warp has asked for all its weights.
                a.griddepcontrol_launch_dependents();
                a.bra(asked);
                a.bind(another);
                let k_tiles = load_u32(a, self.params.k_tiles);
                let end = a.reg();
                a.add_u32(self.tile, self.tile, 1);
                a.min_u32(end, self.rest, k_tiles);
                a.sub_u32(self.rest, self.rest, end);
                self.emit_count(a, self.to_ask, self.team, end);
                self.emit_point(a, self.team, position);
                // A short segment may have no run for this team.
                let none = a.test_u32(Cmp::Eq, self.to_ask, 0);
                a.when(none, |a| a.bra(begin));
                a.bra(ask);
            });
        }
    }

    /// Emits what the elected lane does.
    fn emit_elected(&self, a: &mut Asm, emit: impl FnOnce(&mut Asm)) {
        let done = a.label("elected_done");
        a.unless(self.elected, |a| a.bra(done));
        emit(a);
        a.bind(done);
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

    /// Waits until the weights of a position of the loop are there. What the elected lane did to the barriers must
    /// be known: the team has met since.
    pub(super) fn emit_wait(&self, a: &mut Asm, position: u32) {
        let stages = self.config.stages;
        let barrier = self.barrier(position % stages);
        let again = a.label("again");
        a.bind(again);
        let arrived = a.reg();
        match self.parity {
            Some(parity) => a.mbarrier_try_wait_parity_shared_cta_b64(arrived, barrier, parity),
            None => {
                let parity = position / stages % 2;
                a.mbarrier_try_wait_parity_shared_cta_b64(arrived, barrier, parity);
            }
        }
        a.unless(arrived, |a| a.bra(again));
    }

    /// Ends a pass of the loop.
    pub(super) fn emit_end_pass(&self, a: &mut Asm, unrolled: u32) {
        self.emit_advance(a, unrolled);
        if let Some(parity) = self.parity {
            a.xor_b32(parity, parity, 1);
        }
    }

    /// Asks for the run `stages` after this one, at a position of the loop, into the slot that the warp has read.
    pub(super) fn emit_request(&self, a: &mut Asm, slot: u32, position: u32) {
        a.bar_warp_sync(0xffff_ffffu32);
        self.emit_ask(a, slot, position);
    }

    /// Moves on by some runs.
    fn emit_advance(&self, a: &mut Asm, runs: u32) {
        for from in &self.from {
            a.add_u64(*from, *from, u64::from(runs * self.step()));
        }
    }
}
