//! The gates that every access passes, and the faults that they end in.
//!
//! An access is asked in this order: bounds, promise, alignment, copies in flight, races, definedness. Each
//! gate's fault is written beside it, out of the hot path.

use super::async_ops::Flight;
use super::check::View;
use super::clock::{ASYNC, ATOMIC, COPY, Stamp, WRITE};
use super::machine::{Executor, Stop};
use super::mbarrier::NEVER;
use super::memory::MemoryError;
use super::report::{Fault, FaultKind, Site};
use crate::asm::isa::{Inst, bulk::Bulk};
use crate::asm::reg::{AnyReg, Region};

/// What a thread did with memory, in words.
fn deed(stamp: &Stamp) -> &'static str {
    match (stamp.flags & COPY != 0, stamp.flags & ATOMIC != 0, stamp.flags & WRITE != 0) {
        (true, ..) => "asynchronous copy",
        (_, true, true) => "atomic write",
        (_, true, false) => "atomic read",
        (_, false, true) => "write",
        (_, false, false) => "read",
    }
}

impl Executor<'_> {
    pub(super) fn thread(&self, lane: u32) -> u32 {
        self.warp.index * 32 + lane
    }

    pub(super) fn site(&self, cta: u32, thread: u32, pc: u32, what: String) -> Site {
        self.launch.site(cta, thread, pc, what)
    }

    pub(super) fn here(&self, lane: u32, what: &str) -> Site {
        self.site(self.cta.index, self.thread(lane), self.pc, what.to_owned())
    }

    pub(super) fn fault(
        &self,
        kind: FaultKind,
        lane: u32,
        deed: &str,
        what: String,
        help: &str,
    ) -> Stop {
        let accesses = vec![self.here(lane, deed)];
        Box::new(Fault { kind, what, accesses, help: help.to_owned() })
    }

    #[cold]
    pub(super) fn undefined_register(&self, lane: u32, reg: AnyReg) -> Stop {
        self.fault(
            FaultKind::UndefinedRegister,
            lane,
            "read",
            format!("{reg} has no value in lane {lane}"),
            "write the register on every path to this instruction; a guarded write leaves it \
             undefined where the guard is false",
        )
    }

    #[cold]
    pub(super) fn memory_fault(&self, lane: u32, deed: &str, error: &MemoryError) -> Stop {
        let kind = match error {
            MemoryError::Freed { .. } => FaultKind::UseAfterFree,
            _ => FaultKind::OutOfBounds,
        };
        let help = "check the base pointer and the index arithmetic of this address";
        self.fault(kind, lane, deed, error.to_string(), help)
    }

    #[inline]
    pub(super) fn stamp(&self, lane: u32, flags: u16) -> Stamp {
        let thread = self.thread(lane);
        Stamp {
            cta: self.cta.index,
            thread: thread as u16,
            flags,
            epoch: self.cta.threads.get(thread).epoch,
            pc: self.pc,
        }
    }

    /// What an access was, in words.
    pub(super) fn deed(&self, stamp: &Stamp) -> &'static str {
        if stamp.flags & ASYNC == 0 {
            return deed(stamp);
        }
        match &self.launch.program.node(stamp.pc).inst {
            Inst::Bulk(_) => "bulk copy",
            Inst::Wgmma(_) => "warpgroup product",
            Inst::Mbarrier(_) => "initialisation of an mbarrier",
            _ => "asynchronous store",
        }
    }

    /// Where an access was made or issued.
    pub(super) fn site_of(&self, stamp: &Stamp, what: &str) -> Site {
        self.site(
            stamp.cta,
            stamp.issuer().into(),
            stamp.pc,
            format!("{} {what}", self.deed(stamp)),
        )
    }

    /// An access to what an agent has not been waited for.
    #[cold]
    fn not_waited_for(&self, lane: u32, now: Stamp, earlier: Stamp, place: &str) -> Stop {
        let (kind, help) = match &self.launch.program.node(earlier.pc).inst {
            _ if earlier.epoch == NEVER => (
                FaultKind::MbarrierMisuse,
                "the bytes of an mbarrier are for its own instructions: give it a place of its own",
            ),
            Inst::Wgmma(_) => (
                FaultKind::MissingWait,
                "a product reads its operand until a `wgmma.wait_group` covers its group; tell \
                 others after that wait",
            ),
            Inst::Bulk(Bulk::CpAsyncBulkTensor2dStore(_)) => (
                FaultKind::MissingWait,
                "a bulk store reads its source until `cp.async.bulk.wait_group.read`, and writes \
                 until `cp.async.bulk.wait_group`, in the thread that issued it",
            ),
            _ => (
                FaultKind::MissingWait,
                "wait for the phase of the barrier that counts the copy, with that phase's parity, \
                 in this thread or before a barrier of threads; announce the bytes with `expect_tx`",
            ),
        };
        let what =
            format!("{} of {place} before the {} is over", self.deed(&now), self.deed(&earlier));
        let accesses = vec![
            self.here(lane, self.deed(&now)),
            self.site_of(&earlier, "issued earlier, not known to be over,"),
        ];
        Box::new(Fault { kind, what, accesses, help: help.into() })
    }

    /// Two accesses that nothing orders.
    #[cold]
    pub(super) fn race(&self, lane: u32, now: Stamp, earlier: Stamp, place: String) -> Stop {
        if earlier.flags & ASYNC != 0 {
            return self.not_waited_for(lane, now, earlier, &place);
        }
        let one_warp =
            earlier.cta == self.cta.index && u32::from(earlier.thread) / 32 == self.warp.index;
        let in_cluster = earlier.cta / self.launch.program.cluster
            == self.cta.index / self.launch.program.cluster;
        let help = if earlier.cta != self.cta.index && in_cluster && now.flags & ASYNC != 0 {
            "another CTA of the cluster used the bytes: let it arrive (after its last use) at an \
             mbarrier of this CTA, or at the cluster's barrier with release, and wait for that"
        } else if earlier.cta != self.cta.index {
            "order the CTAs: publish after the first access with a release (or fence and atomic), \
             acquire the same word before the second, with a barrier between the flag and the \
             other threads of each CTA"
        } else if earlier.flags & COPY != 0 {
            "a copy is visible to its own lane after the wait, to other threads only after a \
             barrier that follows that wait"
        } else if now.flags & ASYNC != 0 {
            "tell the issuing thread that the bytes are no longer used: each thread that used them \
             arrives at an mbarrier that it waits for, or meets it at a barrier; lanes that one \
             lane arrives for meet it first (`bar.warp.sync`)"
        } else if now.flags & COPY != 0 {
            "the copy overwrites what other threads may still be using: put a barrier between \
             their last access and the copy"
        } else if one_warp {
            "lanes of a warp are not ordered by running in step: put `bar.warp.sync` between"
        } else {
            "put `bar.sync` between the two accesses"
        };
        let kinds = format!("{} and {} of {place}", self.deed(&now), deed(&earlier));
        let accesses = vec![
            self.here(lane, self.deed(&now)),
            self.site(
                earlier.cta,
                earlier.thread.into(),
                earlier.pc,
                format!("{} earlier, in no order with it,", deed(&earlier)),
            ),
        ];
        Box::new(Fault { kind: FaultKind::Race, what: kinds, accesses, help: help.into() })
    }

    #[cold]
    pub(super) fn in_flight(&self, lane: u32, now: Stamp, flight: Flight, at: usize) -> Stop {
        let known = &self.cta.threads.get(self.thread(lane)).known;
        if !flight.stamp.same_thread(&now) && !known.covers(&flight.stamp) {
            return self.race(lane, now, flight.stamp, format!("shared byte {at}"));
        }
        let issue = flight.stamp;
        let accesses = vec![
            self.here(lane, self.deed(&now)),
            self.site(issue.cta, issue.thread.into(), issue.pc, "copy in flight, issued".into()),
        ];
        Box::new(Fault {
            kind: FaultKind::MissingWait,
            what: format!(
                "{} of shared byte {at} while an asynchronous copy to bytes {}..{} is in flight",
                self.deed(&now),
                flight.at,
                flight.at + flight.bytes
            ),
            accesses,
            help: "commit the copy's group and wait for it in the lane that issued it: a \
                   `cp.async.wait_group` whose count leaves that group out waits too little"
                .into(),
        })
    }

    #[cold]
    pub(super) fn misaligned(&self, lane: u32, deed: &str, addr: u64, size: usize) -> Stop {
        let what = format!("{addr:#x} is no multiple of {size}, the size of the access in bytes");
        let help = "align the base and the offsets, or use narrower accesses";
        self.fault(FaultKind::Misaligned, lane, deed, what, help)
    }

    #[cold]
    pub(super) fn undefined_memory(&self, lane: u32, place: String) -> Stop {
        let what = format!("{place} was never written");
        let help = "write or upload it before it is read; shared memory has no value at the start";
        self.fault(FaultKind::UndefinedMemory, lane, "read", what, help)
    }

    #[cold]
    pub(super) fn outside_shared(&self, lane: u32, deed: &str, addr: u64, size: usize) -> Stop {
        let what = format!(
            "{size} bytes at shared address {addr:#x} ({:+} from the start) leave the CTA's {} bytes",
            addr as i64 - i64::from(self.launch.program.smem_base),
            self.cta.shared.len()
        );
        let help = "add the base that `mov.u32 %r, smem` gives, and check the offset";
        self.fault(FaultKind::OutOfBounds, lane, deed, what, help)
    }

    #[cold]
    pub(super) fn broken_promise(
        &self,
        lane: u32,
        deed: &str,
        addr: u64,
        size: usize,
        region: Region,
    ) -> Stop {
        let at = addr as i64 - i64::from(self.launch.program.smem_base);
        let what = format!(
            "{size} bytes at shared byte {at} leave the promised region {}..{}",
            region.start,
            region.start + region.bytes
        );
        let help = "state the region that the address really stays in, or mend the address: the \
                    weaver relies on the promise";
        self.fault(FaultKind::BrokenPromise, lane, deed, what, help)
    }

    /// The place of a shared access from the start of the CTA's shared memory.
    #[inline]
    pub(super) fn shared_place(
        &self,
        lane: u32,
        deed: &str,
        addr: u64,
        region: Option<Region>,
        size: usize,
    ) -> Result<usize, Stop> {
        let at = addr.wrapping_sub(self.launch.program.smem_base.into());
        let inside = |start: u64, len: u64| at >= start && at - start + size as u64 <= len;
        if at > self.cta.shared.len() as u64 || !inside(0, self.cta.shared.len() as u64) {
            return Err(self.outside_shared(lane, deed, addr, size));
        }
        if let Some(region) = region
            && !inside(region.start.into(), region.bytes.into())
        {
            return Err(self.broken_promise(lane, deed, addr, size, region));
        }
        if !at.is_multiple_of(size as u64) {
            return Err(self.misaligned(lane, deed, addr, size));
        }
        Ok(at as usize)
    }

    /// Shared bytes that `stamp` touches: nothing in flight, no race.
    #[inline]
    pub(super) fn touch_shared(
        &mut self,
        lane: u32,
        at: usize,
        size: usize,
        stamp: Stamp,
    ) -> Result<(), Stop> {
        if let Some(flight) = self.cta.flights.over(at, size) {
            return Err(self.in_flight(lane, stamp, *flight, at));
        }
        let known = &self.cta.threads.get(stamp.thread.into()).known;
        let line = self.cta.shared.line(at);
        line.access(at % 16, size, stamp, View { known, cta: stamp.cta, thread: stamp.thread })
            .map_err(|earlier| self.race(lane, stamp, earlier, format!("shared byte {at}")))
    }

    /// Device bytes that `stamp` touches: bounds, alignment, no race. Gives their offset.
    #[inline]
    pub(super) fn touch_global(
        &mut self,
        lane: u32,
        addr: u64,
        size: usize,
        stamp: Stamp,
    ) -> Result<(), Stop> {
        if !addr.is_multiple_of(size as u64) {
            return Err(self.misaligned(lane, deed(&stamp), addr, size));
        }
        if self.launch.overlap {
            self.check_early(lane, addr, size, &stamp)?;
        }
        let known = &self.cta.threads.get(stamp.thread.into()).known;
        match self.memory.find(addr, size) {
            Ok((allocation, at)) => {
                let view = View { known, cta: stamp.cta, thread: stamp.thread };
                allocation.bytes.line(at).access(at % 16, size, stamp, view).map_err(|earlier| {
                    self.race(lane, stamp, earlier, format!("address {addr:#x}"))
                })
            }
            Err(error) => Err(self.memory_fault(lane, deed(&stamp), &error)),
        }
    }

    #[inline]
    pub(super) fn read_global(&mut self, lane: u32, addr: u64, buf: &mut [u8]) -> Result<(), Stop> {
        match self.memory.find(addr, buf.len()) {
            Ok((allocation, at)) => {
                let start = allocation.start;
                allocation.bytes.read(at, buf).map_err(|byte| {
                    let place = format!("byte {byte} of the allocation at {start:#x}");
                    self.undefined_memory(lane, place)
                })
            }
            Err(error) => Err(self.memory_fault(lane, "read", &error)),
        }
    }

    #[inline]
    pub(super) fn write_global(&mut self, lane: u32, addr: u64, buf: &[u8]) -> Result<(), Stop> {
        match self.memory.find(addr, buf.len()) {
            Ok((allocation, at)) => allocation.write(at, buf),
            Err(error) => return Err(self.memory_fault(lane, "write", &error)),
        }
        self.progress = true;
        Ok(())
    }

    /// Writes any range of device bytes.
    pub(super) fn write_global_range(
        &mut self,
        lane: u32,
        addr: u64,
        buf: &[u8],
    ) -> Result<(), Stop> {
        let mut at = 0;
        while at < buf.len() {
            let size = (16 - (addr as usize + at) % 16).min(buf.len() - at);
            self.write_global(lane, addr + at as u64, &buf[at..at + size])?;
            at += size;
        }
        Ok(())
    }
}
