//! Barriers in shared memory: phases, arrivals, transaction counts, and what a completed phase tells.
//!
//! A copy is counted on the phase that is current when it is issued, for that phase cannot end without it:
//! its bytes are already missing from the transaction count, or the arrival that announces them is still to
//! come. A phase whose arrivals are complete while fewer bytes were announced than copied ends too early on
//! some schedule, so that is a fault; one with bytes still to come simply does not end. An announcement alone
//! (`expect_tx`) holds no phase up, so an arrival of the phase must be known to come after it.
//! A waiter learns what the arriving threads published and that the phase's copies have landed. An arrival
//! from another CTA without cluster scope tells only what is over: it releases what was read.
//! Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

use std::sync::Arc;

use super::agents::Agent;
use super::clock::{Knowledge, Stamp, WRITE};
use super::machine::{Executor, Stop, Wait};
use super::report::{Fault, FaultKind};
use crate::asm::isa::{BarrierOp, SharedAt};

/// Most arrivals, and most bytes, of a phase.
const MAX_COUNT: u32 = (1 << 20) - 1;
/// The epoch of an access that is over for nobody.
pub(super) const NEVER: u32 = u32::MAX;

/// One barrier.
#[derive(Debug)]
pub(super) struct Mbarrier {
    /// Its first byte, from the start of the CTA's shared memory.
    pub at: u32,
    /// Arrivals that each phase expects, and those that this phase still waits for.
    pub count: u32,
    pub pending: u32,
    /// Bytes announced less bytes copied, in this phase.
    pub tx: i64,
    /// Phases that have completed.
    pub phase: u32,
    /// Who initialised it; the same as the fence for initialisations knows it.
    pub init: Stamp,
    pub fenced_init: Stamp,
    /// The agent of the copies that complete here.
    pub agent: u16,
    /// What the arrivals of this phase published.
    arrived: Option<Arc<Knowledge>>,
    /// What a waiter for the last completed phase learns.
    last: Option<Arc<Knowledge>>,
    /// The newest phase, counted from 1, that a thread of the CTA has seen complete.
    pub seen: u32,
    /// The newest phase, counted from 1, with copies, and the last of them.
    pub traffic: Option<Stamp>,
    /// Who announced bytes in this phase without arriving.
    announced: Vec<Stamp>,
}

impl Mbarrier {
    /// The state in words.
    pub fn text(&self) -> String {
        format!(
            "the mbarrier at shared byte {}: phase {} (parity {}), {} of {} arrivals missing, {} bytes to come",
            self.at,
            self.phase,
            self.phase & 1,
            self.pending,
            self.count,
            self.tx
        )
    }

    /// Ends the phase if nothing is missing.
    ///
    /// # Errors
    /// An announcement of bytes that no arrival waited for: the phase may end without it.
    fn settle(&mut self, fallback: impl FnOnce() -> Knowledge) -> Result<(), Stamp> {
        if self.pending != 0 || self.tx != 0 {
            return Ok(());
        }
        self.phase += 1;
        self.pending = self.count;
        let mut news = self.arrived.take().unwrap_or_else(|| Arc::new(fallback()));
        let loose = self.announced.iter().copied().find(|stamp| !news.covers(stamp));
        self.announced.clear();
        Arc::make_mut(&mut news).raise(self.agent, self.phase);
        self.last = Some(news);
        loose.map_or(Ok(()), Err)
    }
}

/// The barriers of a CTA.
#[derive(Debug, Default)]
pub(super) struct Mbarriers {
    pub list: Vec<Mbarrier>,
    /// For each 8 bytes of shared memory one more than the number of the barrier there; empty without any.
    words: Vec<u16>,
}

impl Mbarriers {
    fn find(&self, at: usize) -> Option<usize> {
        let number = *self.words.get(at / 8)?;
        usize::from(number).checked_sub(1)
    }

    fn add(&mut self, smem_bytes: usize, barrier: Mbarrier) {
        if self.words.is_empty() {
            self.words = vec![0; smem_bytes.div_ceil(8)];
        }
        let at = barrier.at as usize;
        self.list.push(barrier);
        self.words[at / 8] = self.list.len() as u16;
    }
}

impl Executor<'_> {
    /// What a row asks of a barrier.
    pub(super) fn mbarrier_op(
        &mut self,
        lane: u32,
        at: SharedAt,
        op: BarrierOp,
    ) -> Result<bool, Stop> {
        if let BarrierOp::Init(count) = op {
            self.mbarrier_init(lane, at, count)?;
            return Ok(true);
        }
        let (rank, index) = self.barrier_at(lane, at, op == BarrierOp::ArriveCluster)?;
        match op {
            BarrierOp::Init(_) => {}
            BarrierOp::ExpectTx(bytes) => {
                self.expect(lane, rank, index, bytes)?;
                let stamp = self.stamp(lane, 0);
                self.cta.barriers.list[index].announced.push(stamp);
            }
            BarrierOp::Arrive(bytes) => {
                self.expect(lane, rank, index, bytes)?;
                self.arrive(lane, rank, index)?;
            }
            BarrierOp::ArriveCluster => self.arrive(lane, rank, index)?,
            BarrierOp::Test(parity) => return self.test(lane, index, parity),
        }
        Ok(true)
    }

    fn mbarrier_init(&mut self, lane: u32, at: SharedAt, count: u32) -> Result<(), Stop> {
        let (rank, place) = self.shared_range(lane, "barrier initialised", at, 8, 8)?;
        if rank != self.rank {
            let what = "a barrier of another CTA is initialised".into();
            let help = "each CTA initialises its own barriers";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "initialised", what, help));
        }
        if !(1..=MAX_COUNT).contains(&count) {
            let what = format!("a barrier of {count} arrivals");
            let help = "a phase expects 1 to 2^20 - 1 arrivals";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "initialised", what, help));
        }
        if let Some(index) = self.cta.barriers.find(place) {
            let what = format!("{} is initialised again", self.cta.barriers.list[index].text());
            let help = "initialise each barrier once; its phases go on by themselves";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "initialised", what, help));
        }
        let init = self.stamp(lane, WRITE);
        self.touch_shared(lane, place, 8, init)?;
        let thread = self.thread(lane);
        let agent = self.cta.agents.id(Agent::Barrier(place as u32));
        // From here on the bytes belong to the barrier: ordinary accesses are ordered after this by nobody.
        let owned = Stamp::of_agent(self.cta.index, agent, NEVER, thread, WRITE, self.pc);
        self.touch_async(lane, rank, place..place + 8, owned, false)?;
        let inits = self.cta.agents.id(Agent::Inits(thread));
        let fences = self.cta.init_fences.entry(thread).or_insert(1);
        let fenced_init = Stamp::of_agent(self.cta.index, inits, *fences, thread, WRITE, self.pc);
        let barrier = Mbarrier {
            at: place as u32,
            count,
            pending: count,
            tx: 0,
            phase: 0,
            init,
            fenced_init,
            agent,
            arrived: None,
            last: None,
            seen: 0,
            traffic: None,
            announced: Vec::new(),
        };
        self.cta.barriers.add(self.cta.shared.len(), barrier);
        self.progress = true;
        Ok(())
    }

    /// A fence that ends the initialisation of this thread's barriers for the other CTAs and the
    /// asynchronous proxy.
    pub(super) fn fence_inits(&mut self, lane: u32) {
        let thread = self.thread(lane);
        let Some(fences) = self.cta.init_fences.get_mut(&thread) else { return };
        *fences += 1;
        let epoch = *fences - 1;
        let agent = self.cta.agents.id(Agent::Inits(thread));
        self.cta.threads.raise(std::iter::once(thread), agent, epoch);
    }

    /// The barrier at an address, as `(rank, number)`, for a thread; `cluster` if it may be another CTA's.
    fn barrier_at(
        &mut self,
        lane: u32,
        at: SharedAt,
        cluster: bool,
    ) -> Result<(usize, usize), Stop> {
        let (rank, index) = self.find_barrier(lane, at)?;
        if rank != self.rank {
            if !cluster {
                return Err(self.outside_shared(lane, "use of a barrier", at.addr.into(), 8));
            }
            self.check_fenced_init(lane, rank, index)?;
            return Ok((rank, index));
        }
        let Mbarrier { init, fenced_init, .. } = self.cta.barriers.list[index];
        let thread = self.thread(lane);
        let known = &self.cta.threads.get(thread).known;
        let is_known = known.covers(&init) || known.covers(&fenced_init);
        if u32::from(init.thread) != thread && !is_known {
            return Err(self.unseen_init(lane, init, "put a barrier between the two"));
        }
        Ok((rank, index))
    }

    /// The initialised barrier at an address.
    pub(super) fn find_barrier(&mut self, lane: u32, at: SharedAt) -> Result<(usize, usize), Stop> {
        let (rank, place) = self.shared_range(lane, "use of a barrier", at, 8, 8)?;
        if rank != self.rank {
            self.check_peer(lane, rank, "use of a barrier")?;
        }
        match self.state(rank).barriers.find(place) {
            Some(index) => Ok((rank, index)),
            None => Err(self.fault(
                FaultKind::MbarrierMisuse,
                lane,
                "use of a barrier",
                format!("shared byte {place} holds no initialised mbarrier"),
                "initialise it and put a barrier between that and its first use",
            )),
        }
    }

    /// Whether the initialisation is visible to the asynchronous proxy, or to another CTA.
    pub(super) fn check_fenced_init(
        &mut self,
        lane: u32,
        rank: usize,
        index: usize,
    ) -> Result<(), Stop> {
        let init = self.state(rank).barriers.list[index].fenced_init;
        let thread = self.thread(lane);
        if self.cta.threads.get(thread).known.covers(&init) {
            return Ok(());
        }
        let help = "execute `fence.mbarrier_init` in the thread that initialised it, then a barrier \
                    (of the cluster, for its other CTAs)";
        Err(self.unseen_init(lane, init, help))
    }

    #[cold]
    fn unseen_init(&self, lane: u32, init: Stamp, help: &str) -> Stop {
        let (cta, thread) = (init.cta, u32::from(init.issuer()));
        let earlier = self.site(cta, thread, init.pc, "initialised, in no order with it,".into());
        Box::new(Fault {
            kind: FaultKind::MbarrierMisuse,
            what: "an mbarrier is used that this thread does not know to be initialised".into(),
            accesses: vec![self.here(lane, "used"), earlier],
            help: help.into(),
        })
    }

    /// Announces bytes.
    fn expect(&mut self, lane: u32, rank: usize, index: usize, bytes: u32) -> Result<(), Stop> {
        self.count_bytes(lane, rank, index, i64::from(bytes))
    }

    /// Changes the transaction count.
    fn count_bytes(
        &mut self,
        lane: u32,
        rank: usize,
        index: usize,
        bytes: i64,
    ) -> Result<(), Stop> {
        let barrier = &mut self.state(rank).barriers.list[index];
        barrier.tx += bytes;
        if barrier.tx.unsigned_abs() > u64::from(MAX_COUNT) {
            let what = format!("transaction count out of range: {}", barrier.text());
            let help = "announce and copy at most 2^20 - 1 bytes a phase";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "counted", what, help));
        }
        Ok(())
    }

    /// One arrival.
    fn arrive(&mut self, lane: u32, rank: usize, index: usize) -> Result<(), Stop> {
        let thread = self.thread(lane);
        let news = self.cta.threads.publish(thread);
        if rank != self.rank {
            let epoch = self.cta.threads.get(thread).epoch - 1;
            let arrival = Stamp { epoch, ..self.stamp(lane, 0) };
            self.state(rank).note_remote(arrival);
        }
        let is_own = rank == self.rank;
        let state = self.state(rank);
        let own = state.index;
        let len = state.threads.len();
        let barrier = &mut state.barriers.list[index];
        if barrier.pending == 0 {
            let what = format!("one arrival too many: {}", barrier.text());
            let help = "arrive as often in each phase as the barrier was initialised for; a thread \
                        that waits for the phase arrives once";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "arrived", what, help));
        }
        barrier.pending -= 1;
        match (&mut barrier.arrived, is_own) {
            (Some(arrived), true) => Arc::make_mut(arrived).join(&news),
            (arrived @ None, true) => *arrived = Some(news),
            (arrived, false) => {
                let arrived = arrived.get_or_insert_with(|| Arc::new(Knowledge::none(own, len)));
                Arc::make_mut(arrived).join_what_is_over(&news);
            }
        }
        self.progress = true;
        self.settle_barrier(lane, rank, index)
    }

    /// Counts the bytes of a copy as landed.
    pub(super) fn land(
        &mut self,
        lane: u32,
        rank: usize,
        index: usize,
        bytes: u32,
        stamp: Stamp,
    ) -> Result<(), Stop> {
        self.count_bytes(lane, rank, index, -i64::from(bytes))?;
        self.state(rank).barriers.list[index].traffic = Some(stamp);
        self.progress = true;
        self.settle_barrier(lane, rank, index)
    }

    fn settle_barrier(&mut self, lane: u32, rank: usize, index: usize) -> Result<(), Stop> {
        let state = self.state(rank);
        let (own, len) = (state.index, state.threads.len());
        let barrier = &mut state.barriers.list[index];
        if let Err(loose) = barrier.settle(|| Knowledge::none(own, len)) {
            let what = "bytes are announced in no order with the phase's arrivals";
            let there = self.site(own, loose.issuer().into(), loose.pc, "announced".into());
            return Err(Box::new(Fault {
                kind: FaultKind::MbarrierMisuse,
                what: what.into(),
                accesses: vec![self.here(lane, "the phase ends: counted"), there],
                help:
                    "announce before an arrival of the same phase: in the same thread, or before \
                       a barrier that leads to one"
                        .into(),
            }));
        }
        let barrier = &mut self.state(rank).barriers.list[index];
        if barrier.pending == 0 && barrier.tx < 0 {
            let what = format!("more bytes were copied than announced: {}", barrier.text());
            let help = "announce with `expect_tx` all bytes that land in the phase, tiles in full \
                        also where they leave their tensor, before the phase's last arrival";
            return Err(self.fault(FaultKind::MbarrierMisuse, lane, "counted", what, help));
        }
        Ok(())
    }

    /// Whether the phase of a parity has completed.
    fn test(&mut self, lane: u32, index: usize, parity: u32) -> Result<bool, Stop> {
        if parity > 1 {
            let what = format!("parity {parity}");
            let help = "a phase has parity 0 or 1";
            return Err(self.fault(FaultKind::BadOperand, lane, "waited", what, help));
        }
        let thread = self.thread(lane);
        let barrier = &mut self.cta.barriers.list[index];
        if barrier.phase & 1 == parity {
            let wait = Wait::Mbarrier { index, phase: barrier.phase };
            self.failed_tests += 1;
            self.parked = Some(wait);
            return Ok(false);
        }
        barrier.seen = barrier.phase;
        let known = &self.cta.threads.get(thread).known;
        if let Some(last) = &barrier.last
            && known.epoch_of(self.cta.index, barrier.agent) < barrier.phase
        {
            self.cta.threads.learn(thread, last);
            self.cta.threads.settle(thread, last);
        }
        Ok(true)
    }
}
