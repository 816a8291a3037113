//! The workers: each has staging buffers of its own, which it fills and sends in turn.
//!
//! One thread says what is to be copied; the queue between is short, so that it never runs far ahead. The first failure
//! stops everybody: what is left in the queue is thrown away, and whoever adds to it is told.

use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Error, LoadOptions};
use crate::backend::{Backend, DevicePtr, Staging};
use crate::checkpoint::Tensors;
use crate::weights::{PackedWeights, Packing};

/// What fills one buffer.
pub(super) enum Source<'a> {
    /// Pieces of a file, one after the other.
    File { tensors: &'a Tensors, file: usize, ranges: Vec<Range<usize>> },
    /// Chunks of a layer, from this one on, which are packed into the buffer.
    Chunks(Arc<Packing<'a>>, usize),
    /// What follows the chunks of a layer, from the scale of this output on.
    Tail(Arc<Packing<'a>>, usize),
    /// A part of a weight that was packed on the way.
    Packed(Arc<PackedWeights>, usize),
}

/// One buffer's way to the device.
pub(super) struct Item<'a> {
    pub(super) to: DevicePtr,
    pub(super) bytes: usize,
    pub(super) source: Source<'a>,
}

/// Where items go.
pub(super) struct Queue<'q, 'a> {
    sender: SyncSender<Item<'a>>,
    failure: &'q Mutex<Option<Error>>,
}

/// Somebody failed, and kept the reason.
pub(super) struct Stopped;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere while the lock was held leaves plain data behind.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl<'a> Queue<'_, 'a> {
    /// Adds an item; waits while the queue is full.
    pub(super) fn push(&self, item: Item<'a>) -> Result<(), Stopped> {
        let failed = locked(self.failure).is_some();
        if failed || self.sender.send(item).is_err() { Err(Stopped) } else { Ok(()) }
    }

    /// Keeps the first failure.
    pub(super) fn fail(&self, error: impl Into<Error>) -> Stopped {
        locked(self.failure).get_or_insert_with(|| error.into());
        Stopped
    }
}

/// Runs workers until everything that `produce` adds has been copied.
pub(super) fn run<'a>(
    backend: &dyn Backend,
    options: &LoadOptions,
    produce: impl FnOnce(&Queue<'_, 'a>) -> Result<(), Stopped>,
) -> Result<(), Error> {
    let failure = Mutex::new(None);
    let (sender, receiver) = sync_channel(2 * options.threads);
    let receiver = Mutex::new(receiver);
    std::thread::scope(|scope| {
        for _ in 0..options.threads {
            scope.spawn(|| {
                if let Err(error) = work(backend, options, &receiver, &failure) {
                    locked(&failure).get_or_insert(error);
                    // The others, and who adds, must not wait for this one.
                    while next(&receiver).is_some() {}
                }
            });
        }
        // Nothing is returned: a failure is in its place.
        let _ = produce(&Queue { sender, failure: &failure });
    });
    match failure.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn next<'a>(receiver: &Mutex<Receiver<Item<'a>>>) -> Option<Item<'a>> {
    locked(receiver).recv().ok()
}

fn work(
    backend: &dyn Backend,
    options: &LoadOptions,
    receiver: &Mutex<Receiver<Item<'_>>>,
    failure: &Mutex<Option<Error>>,
) -> Result<(), Error> {
    let mut staging = backend.staging(options.buffers, options.buffer_bytes)?;
    while let Some(item) = next(receiver) {
        if locked(failure).is_none() {
            send(staging.as_mut(), &item, options.reads)?;
        }
    }
    Ok(staging.finish()?)
}

fn send(staging: &mut dyn Staging, item: &Item<'_>, reads: bool) -> Result<(), Error> {
    let buffer = &mut staging.buffer()?[..item.bytes];
    match &item.source {
        Source::File { tensors, file, ranges } => {
            let mut rest = buffer;
            for range in ranges {
                let (target, after) = rest.split_at_mut(range.len());
                match reads {
                    true => tensors.read_at(*file, range.start, target)?,
                    false => target.copy_from_slice(&tensors.bytes(*file)[range.clone()]),
                }
                rest = after;
            }
        }
        Source::Chunks(packing, first) => {
            packing.fill_chunks(*first, bytemuck::cast_slice_mut(buffer));
        }
        Source::Tail(packing, first) => packing.fill_tail(*first, buffer),
        Source::Packed(packed, at) => {
            buffer.copy_from_slice(&packed.bytes()[*at..*at + item.bytes]);
        }
    }
    Ok(staging.send(item.to, item.bytes)?)
}
