//! What can go wrong between files and a device.

use crate::{backend, checkpoint, gemm, store, weights};

/// A failure of loading.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] backend::Error),
    /// The checkpoint was refused, or changed.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// A weight has no room on the device.
    #[error(transparent)]
    Gemm(#[from] gemm::Error),
    /// The store was refused, or changed.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A layer cannot be packed, or cut as it was asked for.
    #[error("layer {layer} cannot be used")]
    Weight {
        /// The layer.
        layer: String,
        /// The rule that it breaks.
        source: weights::Error,
    },
    /// The options ask for too much memory, or for none.
    #[error(
        "{threads} threads with {buffers} buffers of {buffer_bytes} bytes each: use one thread at least, one buffer of \
         at least {least_bytes} bytes, a multiple of 16, and {most_bytes} bytes in all"
    )]
    Options {
        /// Threads.
        threads: usize,
        /// Buffers of each.
        buffers: usize,
        /// Bytes of each of those.
        buffer_bytes: usize,
        /// The least that a buffer may have.
        least_bytes: usize,
        /// The most that all may have together.
        most_bytes: usize,
    },
}
