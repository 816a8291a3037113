//! What products keep on a device: packed weights, and scratch memory with locks.

use std::sync::Arc;

use super::Error;
use crate::backend::{Backend, DevicePtr};
use crate::weights::PackedLayout;

/// A packed weight on a device. Freed when dropped.
pub struct Weight {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) layout: PackedLayout,
    pub(super) ptr: DevicePtr,
    pub(super) format: &'static str,
}

impl Weight {
    /// The layout: sizes, group rule, padding.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// Where it lies.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The weight type's name.
    pub fn format(&self) -> &'static str {
        self.format
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        if let Err(error) = self.backend.free(self.ptr) {
            log::debug!("freeing a weight: {error}");
        }
    }
}

/// Scratch memory and locks for products on one stream. Freed when dropped.
pub struct Workspace {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) scratch: Option<DevicePtr>,
    pub(super) scratch_bytes: u64,
    pub(super) locks: Option<DevicePtr>,
    pub(super) num_locks: u64,
}

impl Workspace {
    /// Zeroes the locks again, as they are after every completed launch. Needed only if a launch was
    /// aborted or the memory was written by somebody else.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn reset(&mut self) -> Result<(), Error> {
        if let Some(locks) = self.locks {
            self.backend.upload(locks, &vec![0; 4 * self.num_locks as usize])?;
        }
        Ok(())
    }

    /// Bytes of scratch memory.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_bytes
    }

    /// Lock words.
    pub fn num_locks(&self) -> u64 {
        self.num_locks
    }

    /// Address of the lock words, if there are any.
    pub fn locks_ptr(&self) -> Option<DevicePtr> {
        self.locks
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        for ptr in [self.scratch, self.locks].into_iter().flatten() {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing a workspace: {error}");
            }
        }
    }
}
