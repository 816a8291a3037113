//! A ring of pinned host buffers on a stream of its own, for copies that run while the next buffer is filled.
//!
//! Invariant: a buffer is given to be written only when the copy from it is over, and pinned memory is freed only when
//! the stream is.
//!
//! Source: CUDA Driver API, "Memory Management", "Event Management".

use super::buffer::{DevicePtr, PinnedBuffer};
use super::context::Context;
use super::error::{Error, Result};
use super::event::Event;
use super::stream::Stream;

/// Pinned buffers of one size that take turns.
#[derive(Debug)]
pub struct StagingRing {
    stream: Stream,
    slots: Vec<Slot>,
    /// The slot that was given last, or will be given next.
    at: usize,
}

#[derive(Debug)]
struct Slot {
    buffer: PinnedBuffer<u8>,
    /// The last copy from it is over.
    copied: Event,
}

impl StagingRing {
    /// Allocates `count` buffers of `bytes` each, one at least.
    ///
    /// # Errors
    /// `Call` with code 2 when the system cannot lock so much memory; those of the other driver calls.
    pub fn new(context: &Context, count: usize, bytes: usize) -> Result<Self> {
        let slot = |_| {
            let buffer = PinnedBuffer::zeroed(context, bytes)?;
            Ok(Slot { buffer, copied: Event::untimed(context)? })
        };
        let slots = (0..count.max(1)).map(slot).collect::<Result<_>>()?;
        Ok(Self { stream: Stream::new(context)?, slots, at: 0 })
    }

    /// The next buffer; waits for the copy from it.
    ///
    /// # Errors
    /// Those of the driver call, among them those of copies before.
    pub fn buffer(&mut self) -> Result<&mut [u8]> {
        let slot = &mut self.slots[self.at];
        slot.copied.synchronize()?;
        Ok(&mut slot.buffer)
    }

    /// Enqueues copying the first `bytes` of the buffer that was given last to an address, and turns to the next buffer.
    ///
    /// # Errors
    /// `Length` for more bytes than the buffer has; those of the driver calls.
    pub fn send(&mut self, to: DevicePtr, bytes: usize) -> Result<()> {
        let slot = &self.slots[self.at];
        if bytes > slot.buffer.len() {
            let (expected, found) = (slot.buffer.len() as u64, bytes as u64);
            return Err(Error::Length {
                what: "more bytes than a staging buffer has",
                expected,
                found,
            });
        }
        // A copy of the same buffer that is still under way reads what it reads: nobody has written since.
        let context = self.stream.context();
        let stream = self.stream.borrow();
        // SAFETY: the buffer is not written and not freed before its event, or the stream, has been waited for; whoever
        // made the address vouches for the target.
        unsafe { context.write_async(to, &slot.buffer[..bytes], stream) }?;
        if let Err(error) = slot.copied.record(stream) {
            // Without the event only the end of all copies tells when the buffer is free.
            self.stream.synchronize()?;
            return Err(error);
        }
        self.at = (self.at + 1) % self.slots.len();
        Ok(())
    }

    /// Waits for all copies.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for StagingRing {
    fn drop(&mut self) {
        // Copies read the pinned memory until they are over.
        if let Err(error) = self.finish() {
            log::debug!("waiting for copies: {error}");
        }
    }
}
