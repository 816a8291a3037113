//! Clusters: the barrier of their CTAs, each other's shared memory, and when a CTA may end. Also what a
//! thread does about other grids, and the registers that the threads of a CTA share out.
//!
//! A CTA's memory may be reached once it is known to run: after a wait at the cluster's barrier, or by word of
//! a thread that has waited. A relaxed arrival tells that, and which barriers were initialised and fenced, and
//! nothing else. A CTA must not end before everything that others do to its memory is known to be over.
//! A grid that begins early may not touch what the grids before it wrote, nor write anything, before
//! `griddepcontrol.wait`; nor may one of its CTAs end without that wait, for the next grid counts on it.
//! Source: PTX ISA, "barrier.cluster", "mapa", "st.async", "griddepcontrol", "setmaxnreg", "elect.sync".

use super::agents::Agent;
use super::clock::{ASYNC, COPY, Knowledge, Stamp, WRITE};
use super::machine::{CtaState, Executor, Stop, Wait};
use super::proxy::PEER_STRIDE;
use super::report::{Fault, FaultKind};
use crate::asm::isa::{ClusterOp, GridOp, SharedAt, lanes};

/// The barrier of a cluster.
#[derive(Debug, Default)]
pub(super) struct ClusterBarrier {
    /// Times that it has completed.
    pub generation: u32,
    /// Warps that have arrived since.
    pub arrived: usize,
    /// Warps of the cluster that have not ended.
    pub live: usize,
    /// What the arrivals published, and what those of the last time did.
    news: Vec<Knowledge>,
    last: Vec<Knowledge>,
}

impl ClusterBarrier {
    /// A barrier of so many warps.
    pub fn new(warps: usize) -> Self {
        Self { live: warps, ..Self::default() }
    }

    /// A warp ends, that arrived in generation `arrival` if it did.
    pub fn leave(&mut self, arrival: Option<u32>) {
        self.live -= 1;
        if arrival == Some(self.generation) {
            self.arrived -= 1;
        }
        self.settle();
    }

    /// Completes if nobody is missing.
    fn settle(&mut self) {
        if self.arrived > 0 && self.arrived == self.live {
            self.arrived = 0;
            self.generation += 1;
            self.last = std::mem::take(&mut self.news);
        }
    }
}

/// The registers that the warps of a CTA have not taken.
#[derive(Debug)]
pub(super) struct Pool {
    pub free: u32,
}

impl CtaState {
    /// Another CTA did something to this one's memory; only a thread's newest deed counts.
    pub fn note_remote(&mut self, stamp: Stamp) {
        match self.remote.iter_mut().find(|known| known.same_thread(&stamp)) {
            Some(known) => *known = stamp,
            None => self.remote.push(stamp),
        }
    }

    /// What its threads know together.
    pub fn knowledge(&self) -> Knowledge {
        let mut all = (*self.threads.get(0).known).clone();
        for thread in 1..self.threads.len() as u32 {
            let known = &self.threads.get(thread).known;
            if !std::sync::Arc::ptr_eq(known, &self.threads.get(thread - 1).known) {
                all.join(known);
            }
        }
        all
    }
}

impl Executor<'_> {
    /// The address of a place of this CTA in that of another rank.
    pub(super) fn address_in(&self, rank: usize, addr: u32) -> u32 {
        (rank as u32 + 1) * PEER_STRIDE + addr % PEER_STRIDE
    }

    pub(super) fn mapped(&mut self, lane: u32, addr: u32, rank: u32) -> Result<u32, Stop> {
        let size = self.cluster_size();
        if rank as usize >= size {
            let what = format!("CTA {rank} of a cluster of {size}");
            let help = "ranks count from 0";
            return Err(self.fault(FaultKind::BadOperand, lane, "address mapped", what, help));
        }
        if addr >= PEER_STRIDE {
            let what = format!("{addr:#x} is no address of this CTA's shared memory");
            let help = "map the address that the CTA itself uses";
            return Err(self.fault(FaultKind::BadOperand, lane, "address mapped", what, help));
        }
        Ok(self.address_in(rank as usize, addr))
    }

    /// Another CTA's memory may be touched: it runs, as this lane knows, and has not ended.
    pub(super) fn check_peer(&mut self, lane: u32, rank: usize, deed: &str) -> Result<(), Stop> {
        let (peer, has_ended) = {
            let state = self.state(rank);
            (state.index, state.has_ended)
        };
        if has_ended {
            let what = format!("CTA {rank} of the cluster has ended");
            let help = "let no CTA end before its last visitor: arrive and wait at the cluster's \
                        barrier, or wait for an mbarrier that the visitors complete";
            return Err(self.fault(FaultKind::EarlyExit, lane, deed, what, help));
        }
        let running = self.cta.agents.running();
        if self.cta.threads.get(self.thread(lane)).known.epoch_of(peer, running) == 0 {
            let what = format!("CTA {rank} of the cluster may not have begun");
            let help = "arrive and wait at the cluster's barrier before the first access";
            return Err(self.fault(FaultKind::PeerNotRunning, lane, deed, what, help));
        }
        Ok(())
    }

    /// What a row asks of the cluster's barrier.
    pub(super) fn cluster_op(&mut self, op: ClusterOp) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let misuse = |what: &str, help: &str| {
            self.fault(FaultKind::BarrierMisuse, lane, "cluster barrier", what.to_owned(), help)
        };
        match (op, self.warp.cluster_arrival) {
            (ClusterOp::Arrive { .. }, Some(_)) => {
                Err(misuse("the warp arrives twice", "wait between two arrivals"))
            }
            (ClusterOp::Wait, None) => Err(misuse("the warp has not arrived", "arrive first")),
            (ClusterOp::Arrive { release }, None) => {
                self.arrive_at_cluster(release);
                Ok(())
            }
            (ClusterOp::Wait, Some(generation)) if generation == self.barrier.generation => {
                self.retry = Some(Wait::Cluster { generation });
                Ok(())
            }
            (ClusterOp::Wait, Some(_)) => {
                self.warp.cluster_arrival = None;
                let news = self.barrier.last.split_first().map(|(first, rest)| {
                    let mut all = Knowledge::none(self.cta.index, self.cta.threads.len());
                    all.join(first);
                    rest.iter().for_each(|known| all.join(known));
                    std::sync::Arc::new(all)
                });
                if let Some(news) = news {
                    for lane in lanes(self.active) {
                        self.cta.threads.learn(self.warp.index * 32 + lane, &news);
                    }
                }
                Ok(())
            }
        }
    }

    fn arrive_at_cluster(&mut self, release: bool) {
        let first = self.warp.index * 32;
        let members = lanes(self.active).map(|lane| first + lane).collect::<Vec<_>>();
        let agents = &self.cta.agents;
        let news = match release {
            true => self.cta.threads.publish_all(members.into_iter()),
            false => {
                // Which CTAs run and which barriers they have: nothing that memory holds.
                let keep =
                    |id: u16| matches!(agents.get(id), Some(Agent::Running | Agent::Inits(_)));
                let parts = members.iter().map(|thread| self.cta.threads.get(*thread));
                let mut parts = parts.map(|thread| thread.known.only(keep));
                let mut news = parts.next().expect("a warp that executes has a lane");
                parts.for_each(|part| news.join(&part));
                news
            }
        };
        match self.barrier.news.iter_mut().find(|known| known.is_of(self.cta.index)) {
            Some(known) => known.join(&news),
            None => self.barrier.news.push(news),
        }
        self.warp.cluster_arrival = Some(self.barrier.generation);
        self.barrier.arrived += 1;
        self.barrier.settle();
        self.progress = true;
    }

    /// 16 bytes to a CTA of the cluster, counted there.
    pub(super) fn async_store(
        &mut self,
        lane: u32,
        at: SharedAt,
        value: [u8; 16],
        bar: SharedAt,
    ) -> Result<(), Stop> {
        let deed = "asynchronous store";
        let (rank, place) = self.shared_range(lane, deed, at, 16, 16)?;
        let (bar_rank, index) = self.find_barrier(lane, bar)?;
        if bar_rank != rank {
            let what = format!("place in CTA {rank} of the cluster, barrier in {bar_rank}");
            let help = "the store completes on a barrier of the CTA that it writes to";
            return Err(self.fault(FaultKind::BadOperand, lane, deed, what, help));
        }
        if rank != self.rank {
            self.check_peer(lane, rank, deed)?;
        }
        self.check_fenced_init(lane, rank, index)?;
        let stamp = self.barrier_stamp(lane, rank, index, WRITE);
        self.touch_async(lane, rank, place..place + 16, stamp, false)?;
        self.state(rank).shared.write(place, &value);
        self.land(lane, rank, index, 16, stamp)
    }

    /// What a row asks about other grids.
    pub(super) fn grid_op(&mut self, lane: u32, op: GridOp) {
        if op == GridOp::Wait {
            let (thread, grids) = (self.thread(lane), self.cta.agents.grids());
            self.cta.threads.raise(std::iter::once(thread), grids, 1);
        }
    }

    /// Device memory before the wait for earlier grids: only what they have not written may be read.
    pub(super) fn check_early(
        &mut self,
        lane: u32,
        addr: u64,
        bytes: usize,
        stamp: &Stamp,
    ) -> Result<(), Stop> {
        let (thread, grids) = (self.thread(lane), self.cta.agents.grids());
        if self.cta.threads.get(thread).known.epoch_of(self.cta.index, grids) > 0 {
            return Ok(());
        }
        let is_write = stamp.flags & WRITE != 0;
        let is_fresh = self
            .memory
            .find(addr, bytes)
            .is_ok_and(|(allocation, at)| allocation.is_fresh(at, bytes));
        if !is_write && !is_fresh {
            return Ok(());
        }
        let what = match is_write {
            true => format!("address {addr:#x} is written while earlier grids may still run"),
            false => format!("address {addr:#x} was written by a grid that may still run"),
        };
        let help = "execute `griddepcontrol.wait` before it, in this thread or before a barrier";
        Err(self.fault(FaultKind::EarlyAccess, lane, self.deed(stamp), what, help))
    }

    /// The warp's threads take registers from the CTA's pool or give them back.
    pub(super) fn change_registers(&mut self, n: u32, more: bool) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let now = self.warp.regs;
        let misuse = |what: String, help: &str| {
            self.fault(FaultKind::RegisterPool, lane, "registers set", what, help)
        };
        if !(24..=256).contains(&n) || !n.is_multiple_of(8) {
            return Err(misuse(format!("{n} registers"), "use a multiple of 8 from 24 to 256"));
        }
        if more != (n > now) && n != now {
            let what = format!("{n} registers asked for by a thread that has {now}");
            return Err(misuse(what, "`inc` to a larger number, `dec` to a smaller one"));
        }
        if more {
            let need = (n - now) * 32;
            if self.cta.pool.free < need {
                self.retry = Some(Wait::Pool { need });
                return Ok(());
            }
            self.cta.pool.free -= need;
        } else {
            self.cta.pool.free += (now - n) * 32;
            self.progress = true;
        }
        self.follow_group((n.into(), more))?;
        self.warp.regs = n;
        Ok(())
    }

    /// The last warp of the CTA has ended: nothing may still be done to its memory.
    pub(super) fn check_end(&mut self) -> Result<(), Stop> {
        let all = self.cta.knowledge();
        let mut left: Vec<Stamp> = Vec::new();
        for barrier in &self.cta.barriers.list {
            left.extend(barrier.traffic.filter(|stamp| stamp.epoch > barrier.seen));
        }
        let stores = self.cta.bulk_groups.values().filter_map(|groups| groups.last);
        left.extend(stores.filter(|stamp| !all.covers(stamp)));
        left.extend(self.cta.remote.iter().filter(|stamp| !all.covers(stamp)));
        // Any order would do; reports are the same in every run.
        left.sort_by_key(|stamp| (stamp.cta, stamp.thread, stamp.epoch));
        if let Some(stamp) = left.first() {
            return Err(self.ended_early(stamp));
        }
        let grids = self.cta.agents.grids();
        if self.launch.overlap && all.epoch_of(self.cta.index, grids) == 0 {
            let what = "a CTA of a grid that began early has ended without `griddepcontrol.wait`";
            let help = "execute it on every path: the grid after this one takes this one's end for \
                        the end of all before it";
            let lane = 0;
            return Err(self.fault(FaultKind::EarlyExit, lane, "ended", what.into(), help));
        }
        self.check_groups_end()?;
        self.cta.has_ended = true;
        Ok(())
    }

    #[cold]
    fn ended_early(&self, stamp: &Stamp) -> Stop {
        let (what, help) = match (stamp.flags & ASYNC != 0, stamp.flags & (WRITE | COPY)) {
            (true, COPY) => (
                "a CTA has ended while a bulk store may still read its shared memory",
                "execute `cp.async.bulk.wait_group.read 0` in the thread that issued it",
            ),
            (true, _) => (
                "a CTA has ended while a copy into its shared memory may still be under way",
                "wait for the phase of the barrier that counts it",
            ),
            _ => (
                "a CTA has ended while another one of its cluster may still arrive at its barrier",
                "wait for that phase, or arrive (with release) and wait at the cluster's barrier",
            ),
        };
        let accesses = vec![self.here(0, "ended"), self.site_of(stamp, "issued")];
        Box::new(Fault {
            kind: FaultKind::EarlyExit,
            what: what.into(),
            accesses,
            help: help.into(),
        })
    }
}
