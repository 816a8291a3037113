//! `Backend`: what runs modules. The emulator and the GPU answer to the same calls.
//!
//! Device memory is named by 64-bit addresses in both, so a kernel's arguments are the same bytes whether
//! it runs on a card or on the CPU. Launches are ordered within a stream; nothing here synchronises unless
//! its documentation says so.

use std::fmt;
use std::sync::Arc;

use crate::asm::Module;
use crate::target::DeviceSpec;

/// Something went wrong in a backend. The cause is the room's own error (a driver error, an emulator fault).
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    /// What was being done.
    pub what: String,
    /// Why it failed.
    #[source]
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

impl Error {
    /// Wraps a room's error with what was being done.
    pub fn new(
        what: impl fmt::Display,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { what: what.to_string(), source: source.into() }
    }
}

/// An address in a backend's device memory.
///
/// It comes from [`Backend::alloc`] or, for memory of the caller's own, from a driver address that the
/// caller has vouched for (`driver::DevicePtr::from_raw`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(pub(crate) u64);

impl DevicePtr {
    /// The address as an integer.
    pub fn addr(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on.
    pub fn offset(self, bytes: u64) -> Self {
        DevicePtr(self.0 + bytes)
    }
}

/// A stream: the default one, or one of the driver's that the caller has vouched for (by
/// `driver::StreamRef`). Holds the driver's handle as an integer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stream(pub(crate) usize);

/// One kernel argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A 32-bit value.
    U32(u32),
    /// A 64-bit value or address.
    U64(u64),
}

impl From<DevicePtr> for Arg {
    fn from(ptr: DevicePtr) -> Self {
        Arg::U64(ptr.0)
    }
}

/// A kernel that a backend has loaded. Its entry, CTA size and shared memory are those of the module.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// The entry's name.
    fn name(&self) -> &str;
    /// Registers per thread, where the backend knows.
    fn num_regs(&self) -> Option<u32>;
    /// Bytes of local memory per thread (spills), where the backend knows.
    fn local_bytes(&self) -> Option<u32>;
    /// The backend's own object.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// What runs modules.
pub trait Backend: Send + Sync {
    /// The device.
    fn device(&self) -> &DeviceSpec;

    /// Allocates device memory, aligned to 256 bytes; its contents are undefined.
    ///
    /// # Errors
    /// If there is not enough.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error>;

    /// Frees an allocation. Work that uses it must have been waited for.
    ///
    /// # Errors
    /// If `ptr` is not the start of a live allocation.
    fn free(&self, ptr: DevicePtr) -> Result<(), Error>;

    /// Copies host bytes to the device and waits for it.
    ///
    /// # Errors
    /// If the range is not allocated, or an earlier launch failed.
    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error>;

    /// Waits for all work and copies device bytes to the host.
    ///
    /// # Errors
    /// If the range is not allocated, or an earlier launch failed.
    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error>;

    /// Makes a module ready to launch: verifies, compiles, sets the limits.
    ///
    /// # Errors
    /// If the module breaks a rule or does not fit the device.
    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error>;

    /// Enqueues a grid of `grid` CTAs (x, y). Does not allocate and does not wait on a GPU; the emulator
    /// has finished when it returns.
    ///
    /// # Errors
    /// If the arguments do not match the entry's parameters or the launch is refused.
    fn launch(
        &self,
        kernel: &dyn Kernel,
        grid: [u32; 2],
        args: &[Arg],
        stream: Stream,
    ) -> Result<(), Error>;

    /// Waits for a stream's work.
    ///
    /// # Errors
    /// If that work failed.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
}
