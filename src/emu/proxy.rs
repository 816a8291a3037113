//! Accesses of agents, and the fences between the generic and the asynchronous proxy.
//!
//! Bulk copies and warpgroup products reach memory through the asynchronous proxy. Bytes that threads wrote
//! must pass a proxy fence before it reads or overwrites them. PTX asks for the fence anywhere on the way
//! from the write to the asynchronous access; here it must be in the thread that wrote, after the write and
//! before whatever orders it, which is where the vendor's manuals put it and where it cannot be too late.
//! Bytes that threads read must have left the memory pipeline before a copy overwrites them: loads can wait in it
//! behind another CTA's fences while the copy takes another way. A fence in the reading thread says so, or a
//! completed phase of a barrier in shared memory, whose arrivals went through the pipeline behind the loads; a
//! barrier of the warp or the CTA alone does not, as a chip has shown. `st.async` writes asynchronously in the generic proxy.
//! Source: PTX ISA, "Memory Consistency Model: Proxies", "Async proxy".

use std::ops::Range;
use std::sync::Arc;

use super::check::{LINE, View};
use super::clock::{ASYNC, Stamp, WRITE};
use super::machine::{CtaState, Executor, Stop};
use super::report::{Fault, FaultKind};
use crate::asm::isa::{ProxyFence, SharedAt};

/// What is added to a shared address for each rank, from the second on, of the cluster's window.
pub(super) const PEER_STRIDE: u32 = 1 << 24;

/// The part of `at..end` that lies in the line of `at`.
fn piece(at: usize, end: usize) -> usize {
    (LINE - at % LINE).min(end - at)
}

impl Executor<'_> {
    /// A CTA of the cluster.
    #[inline]
    pub(super) fn state(&mut self, rank: usize) -> &mut CtaState {
        match rank.cmp(&self.rank) {
            std::cmp::Ordering::Less => &mut self.peers.0[rank],
            std::cmp::Ordering::Equal => self.cta,
            std::cmp::Ordering::Greater => &mut self.peers.1[rank - self.rank - 1],
        }
    }

    /// CTAs of the cluster.
    pub(super) fn cluster_size(&self) -> usize {
        self.peers.0.len() + 1 + self.peers.1.len()
    }

    /// The rank of an address of the cluster's window, and the same address in that CTA's own.
    pub(super) fn split_address(&self, addr: u32) -> (usize, u32) {
        match (addr / PEER_STRIDE) as usize {
            0 => (self.rank, addr),
            rank => (rank - 1, addr % PEER_STRIDE),
        }
    }

    /// The CTA and place of `bytes` bytes at a shared address of the cluster: bounds, promise, alignment.
    pub(super) fn shared_range(
        &mut self,
        lane: u32,
        deed: &str,
        at: SharedAt,
        bytes: usize,
        align: u32,
    ) -> Result<(usize, usize), Stop> {
        let (rank, addr) = self.split_address(at.addr);
        let start = u64::from(addr).wrapping_sub(self.launch.program.smem_base.into());
        let len = self.cta.shared.len() as u64;
        if rank >= self.cluster_size() || start > len || len - start < bytes as u64 {
            return Err(self.outside_shared(lane, deed, at.addr.into(), bytes));
        }
        if let Some(region) = at.region {
            let (first, end) = (u64::from(region.start), u64::from(region.start + region.bytes));
            if start < first || start + bytes as u64 > end {
                return Err(self.broken_promise(lane, deed, addr.into(), bytes, region));
            }
        }
        if !addr.is_multiple_of(align) {
            return Err(self.misaligned(lane, deed, addr.into(), align as usize));
        }
        Ok((rank, start as usize))
    }

    /// A proxy fence of one lane.
    pub(super) fn fence_proxy(&mut self, lane: u32, fence: ProxyFence) {
        if fence == ProxyFence::Async {
            self.cta.threads.proxy_fence(self.thread(lane));
        }
        self.fence_inits(lane);
    }

    /// Shared bytes that an agent touches, as `lane` issues it: no race, nothing in flight, and fenced
    /// from what threads wrote if the access is of the asynchronous proxy.
    pub(super) fn touch_async(
        &mut self,
        lane: u32,
        rank: usize,
        range: Range<usize>,
        stamp: Stamp,
        is_proxy: bool,
    ) -> Result<(), Stop> {
        let thread = self.thread(lane);
        if is_proxy {
            self.check_proxy(lane, rank, range.clone(), &stamp)?;
            if stamp.flags & WRITE != 0 {
                self.check_settled(lane, rank, range.clone(), &stamp)?;
            }
        }
        let known = Arc::clone(&self.cta.threads.get(thread).known);
        let view = View { known: &known, cta: self.cta.index, thread: thread as u16 };
        let state = self.state(rank);
        let mut at = range.start;
        let mut found = Ok(());
        while at < range.end {
            let size = piece(at, range.end);
            if let Some(flight) = state.flights.over(at, size) {
                let flight = *flight;
                return Err(self.in_flight(lane, stamp, flight, at));
            }
            found = state.shared.line(at).access(at % LINE, size, stamp, view);
            if found.is_err() {
                break;
            }
            at += size;
        }
        found.map_err(|earlier| self.race(lane, stamp, earlier, format!("shared byte {at}")))
    }

    /// The last writes of threads to shared bytes have passed a proxy fence.
    fn check_proxy(
        &mut self,
        lane: u32,
        rank: usize,
        range: Range<usize>,
        stamp: &Stamp,
    ) -> Result<(), Stop> {
        let mut writes: Vec<(usize, Stamp)> = Vec::new();
        let state = self.state(rank);
        for at in (range.start / LINE * LINE..range.end).step_by(LINE) {
            state.shared.line(at).writes(|write| {
                let is_thread = write.flags & ASYNC == 0 && write.cta != u32::MAX;
                if is_thread && writes.last().is_none_or(|(_, last)| last != write) {
                    writes.push((at, *write));
                }
            });
        }
        for (at, write) in writes {
            self.check_fenced(lane, &write, stamp, at)?;
        }
        Ok(())
    }

    /// Reads of threads that the issuing lane knows of have left the memory pipeline.
    fn check_settled(
        &mut self,
        lane: u32,
        rank: usize,
        range: Range<usize>,
        stamp: &Stamp,
    ) -> Result<(), Stop> {
        let mut reads: Vec<(usize, Stamp)> = Vec::new();
        let state = self.state(rank);
        let mut at = range.start;
        while at < range.end {
            let size = piece(at, range.end);
            state.shared.line(at).reads(at % LINE, size, |read| {
                let is_thread = read.flags & ASYNC == 0;
                if is_thread && reads.last().is_none_or(|(_, last)| last != read) {
                    reads.push((at, *read));
                }
            });
            at += size;
        }
        let thread = self.thread(lane);
        for (at, read) in reads {
            if self.cta.threads.is_settled(thread, &read) {
                continue;
            }
            let clock = self.cta.threads.get(thread);
            let until = match read.cta == self.cta.index && u32::from(read.thread) == thread {
                true => clock.epoch,
                false => clock.known.epoch_of(read.cta, read.thread),
            };
            let first = self.cta.index - self.rank as u32;
            let reader = self.state((read.cta - first) as usize);
            // What the lane does not know of is a race, found elsewhere.
            if until < read.epoch || reader.threads.is_fenced(read.thread, read.epoch, until) {
                continue;
            }
            return Err(self.unsettled(lane, &read, stamp, format!("shared byte {at}")));
        }
        Ok(())
    }

    #[cold]
    fn unsettled(&self, lane: u32, read: &Stamp, stamp: &Stamp, place: String) -> Stop {
        let deed = self.deed(stamp);
        let accesses =
            vec![self.here(lane, deed), self.site_of(read, "read by a thread, maybe not yet,")];
        Box::new(Fault {
            kind: FaultKind::MissingProxyFence,
            what: format!("{deed} of {place}, whose read may still wait in the memory pipeline"),
            accesses,
            help: "execute `fence.proxy.async` in the reading thread before what orders the two, or arrive at \
                   an mbarrier after the read and wait for its phase before the copy"
                .into(),
        })
    }

    /// A thread's write that an asynchronous access follows has passed a proxy fence of that thread, if the
    /// issuing lane knows of it at all; else the race is found elsewhere.
    pub(super) fn check_fenced(
        &mut self,
        lane: u32,
        write: &Stamp,
        stamp: &Stamp,
        at: usize,
    ) -> Result<(), Stop> {
        let thread = self.thread(lane);
        let clock = self.cta.threads.get(thread);
        let until = match write.cta == self.cta.index && u32::from(write.thread) == thread {
            true => clock.epoch,
            false => clock.known.epoch_of(write.cta, write.thread),
        };
        if until < write.epoch {
            return Ok(());
        }
        let first = self.cta.index - self.rank as u32;
        let writer = self.state((write.cta - first) as usize);
        if writer.threads.is_fenced(write.thread, write.epoch, until) {
            return Ok(());
        }
        Err(self.unfenced(lane, write, stamp, format!("shared byte {at}")))
    }

    #[cold]
    pub(super) fn unfenced(&self, lane: u32, write: &Stamp, stamp: &Stamp, place: String) -> Stop {
        let deed = self.deed(stamp);
        let accesses = vec![
            self.here(lane, deed),
            self.site_of(write, "written by a thread, not fenced since,"),
        ];
        Box::new(Fault {
            kind: FaultKind::MissingProxyFence,
            what: format!("{deed} of {place}, which a thread wrote through the generic proxy"),
            accesses,
            help: "execute `fence.proxy.async` in the writing thread after the write and before the \
                   barrier that orders the two; written device memory is not copied in the same launch"
                .into(),
        })
    }

    /// Device bytes that an agent touches, as `lane` issues it.
    pub(super) fn touch_async_global(
        &mut self,
        lane: u32,
        addr: u64,
        bytes: usize,
        stamp: Stamp,
    ) -> Result<(), Stop> {
        let thread = self.thread(lane);
        if self.launch.overlap {
            self.check_early(lane, addr, bytes, &stamp)?;
        }
        let known = Arc::clone(&self.cta.threads.get(thread).known);
        let view = View { known: &known, cta: self.cta.index, thread: thread as u16 };
        let (allocation, start) = match self.memory.find(addr, bytes) {
            Ok(found) => found,
            Err(error) => return Err(self.memory_fault(lane, self.deed(&stamp), &error)),
        };
        let (mut at, end) = (start, start + bytes);
        while at < end {
            let size = piece(at, end);
            let line = allocation.bytes.line(at);
            let mut unfenced = None;
            line.writes(|write| {
                if write.flags & ASYNC == 0 && write.cta != u32::MAX {
                    unfenced = Some(*write);
                }
            });
            let found = line.access(at % LINE, size, stamp, view);
            let place = addr + (at - start) as u64;
            if let Err(earlier) = found {
                return Err(self.race(lane, stamp, earlier, format!("address {place:#x}")));
            }
            if let Some(write) = unfenced {
                return Err(self.unfenced(lane, &write, &stamp, format!("address {place:#x}")));
            }
            at += size;
        }
        Ok(())
    }

    /// Reads device bytes, all defined.
    pub(super) fn read_global_range(
        &mut self,
        lane: u32,
        addr: u64,
        buf: &mut [u8],
    ) -> Result<(), Stop> {
        let mut at = 0;
        while at < buf.len() {
            let size = (LINE - (addr as usize + at) % LINE).min(buf.len() - at);
            self.read_global(lane, addr + at as u64, &mut buf[at..at + size])?;
            at += size;
        }
        Ok(())
    }
}
