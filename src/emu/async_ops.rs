//! Asynchronous copies between their issue and the wait that covers them.
//!
//! The model is adversarial: the destination may change at any moment between issue and wait, so while a
//! copy is in flight nobody may touch its bytes, and only the issuing lane's wait makes them appear, as if
//! that lane had written them at that moment. The source is read when the copy is issued. Copies that are
//! still in flight when their lane ends stay in flight: to touch their bytes is an error for good.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy".

use std::collections::VecDeque;

use super::clock::Stamp;

/// A copy in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    /// First destination byte, from the start of the CTA's shared memory.
    pub at: u32,
    /// Bytes written.
    pub bytes: u32,
    /// What will be written.
    pub data: [u8; 16],
    /// Who issued it.
    pub stamp: Stamp,
}

/// The copies of a CTA.
#[derive(Debug)]
pub(super) struct Flights {
    slots: Vec<Flight>,
    free: Vec<u32>,
    /// For each shared word one more than the slot of the copy that will write it, 0 if none.
    words: Vec<u32>,
    lanes: Vec<LaneQueue>,
}

/// A thread's copies in order of issue, each with the number of its group.
#[derive(Clone, Debug, Default)]
struct LaneQueue {
    copies: VecDeque<(u32, u32)>,
    /// Groups closed so far, which is also the number of the open one.
    closed: u32,
}

impl Flights {
    pub fn new(smem_bytes: u32, threads: u32) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            words: vec![0; smem_bytes.div_ceil(4) as usize],
            lanes: vec![LaneQueue::default(); threads as usize],
        }
    }

    /// A copy in flight that will write one of these bytes.
    #[inline]
    pub fn over(&self, at: usize, size: usize) -> Option<&Flight> {
        let words = &self.words[at / 4..(at + size).div_ceil(4)];
        if words.iter().fold(0, |any, word| any | word) == 0 {
            return None;
        }
        let slot = words.iter().find(|word| **word != 0)?;
        self.slots.get(*slot as usize - 1)
    }

    /// A thread issues a copy whose destination words are free, in its open group.
    pub fn issue(&mut self, thread: u32, flight: Flight) {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = flight;
                slot
            }
            None => {
                self.slots.push(flight);
                self.slots.len() as u32 - 1
            }
        };
        let words = flight.at / 4..(flight.at + flight.bytes).div_ceil(4);
        self.words[words.start as usize..words.end as usize].fill(slot + 1);
        let queue = &mut self.lanes[thread as usize];
        queue.copies.push_back((queue.closed, slot));
    }

    /// Closes a thread's open group.
    pub fn commit(&mut self, thread: u32) {
        self.lanes[thread as usize].closed += 1;
    }

    /// The thread's next copy that a wait for all but the newest `pending` groups completes.
    pub fn complete(&mut self, thread: u32, pending: u32) -> Option<Flight> {
        let queue = &mut self.lanes[thread as usize];
        let (group, slot) = *queue.copies.front()?;
        if group.saturating_add(pending) >= queue.closed {
            return None;
        }
        queue.copies.pop_front();
        let flight = self.slots[slot as usize];
        self.free.push(slot);
        let words = flight.at / 4..(flight.at + flight.bytes).div_ceil(4);
        self.words[words.start as usize..words.end as usize].fill(0);
        Some(flight)
    }
}
