//! `Backend`: what runs modules. The emulator and the GPU answer to the same calls.
//!
//! Device memory is named by 64-bit addresses in both, so a kernel's arguments are the same bytes whether
//! it runs on a card or on the CPU. Launches are ordered within a stream; nothing here synchronises unless
//! its documentation says so.

mod staging;
mod tensor_map;

use std::fmt;
use std::sync::Arc;

use crate::asm::Module;
use crate::asm::reg::Param;
use crate::target::DeviceSpec;
use staging::PlainStaging;

pub use staging::Staging;
pub use tensor_map::{Swizzle, TensorMap, TensorMapError};

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

impl Stream {
    /// Work on this stream that may start early: see [`Enqueue::overlap_previous`].
    pub const fn early(self) -> Enqueue {
        Enqueue { stream: self, overlap_previous: true }
    }
}

/// How a call enqueues its kernels. A [`Stream`] turns into one in plain order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enqueue {
    /// The stream.
    pub stream: Stream,
    /// Early launch (programmatic dependent launch): the kernels may start while the kernel before them
    /// on the stream still runs. They request their packed weights at once and wait for that kernel to end
    /// before they read, write or lock anything else. So the kernel before may be anybody's and may write
    /// the activations, read the output or share the workspace; it must not write the packed weights.
    ///
    /// Off by default, because only the caller knows the kernel before: whoever packs weights by a kernel
    /// of his own would read them half-written. Copies, fills, events and everything else that is no kernel
    /// are waited for in any case. Capture into a graph keeps the permission. It is ignored where the device
    /// (before Hopper), the driver (before CUDA 11.8) or the kernel (one that waits for nobody) has no early
    /// launch.
    pub overlap_previous: bool,
}

impl From<Stream> for Enqueue {
    fn from(stream: Stream) -> Self {
        Self { stream, overlap_previous: false }
    }
}

/// One kernel argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A 32-bit value.
    U32(u32),
    /// A 64-bit value or address.
    U64(u64),
    /// A matrix for tile copies.
    TensorMap(TensorMap),
}

impl Arg {
    /// Its size as a parameter of the entry, in bytes.
    pub const fn bytes(&self) -> u32 {
        match self {
            Arg::U32(_) => 4,
            Arg::U64(_) => 8,
            Arg::TensorMap(_) => TensorMap::PARAM_BYTES,
        }
    }
}

/// The arguments of a launch, collected without an allocation.
#[derive(Clone, Copy, Debug)]
pub struct ArgList {
    args: [Arg; Self::ROOM],
    len: usize,
}

impl ArgList {
    /// Most arguments of a list.
    pub const ROOM: usize = 32;

    /// The first arguments.
    ///
    /// # Panics
    /// If there are more than [`ArgList::ROOM`]: a bug in the kernel's host side.
    pub fn new(first: &[Arg]) -> Self {
        let mut list = Self { args: [Arg::U32(0); Self::ROOM], len: 0 };
        first.iter().for_each(|arg| list.push(*arg));
        list
    }

    /// Appends one.
    ///
    /// # Panics
    /// Beyond [`ArgList::ROOM`]: a bug in the kernel's host side.
    pub fn push(&mut self, arg: Arg) {
        self.args[self.len] = arg;
        self.len += 1;
    }
}

impl std::ops::Deref for ArgList {
    type Target = [Arg];

    fn deref(&self) -> &[Arg] {
        &self.args[..self.len]
    }
}

/// How messages call a parameter or argument of a size.
const fn kind(bytes: u32) -> &'static str {
    match bytes {
        4 => "u32",
        8 => "u64",
        _ => "tensor map",
    }
}

/// One launch: how many CTAs, on what, where in the order of things.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// CTAs in x and y.
    pub grid: [u32; 2],
    /// The entry's parameters, in order.
    pub args: &'a [Arg],
    /// The stream that the launch is ordered in.
    pub stream: Stream,
    /// Early launch: the kernel may start while the kernel before it on the stream still runs, and waits
    /// for that one itself (`griddepcontrol.wait`). It is a permission: a device, a driver or a kernel
    /// without it runs in plain order, and so does the emulator.
    pub overlap_previous: bool,
}

impl<'a> Launch<'a> {
    /// A launch in plain order: it starts when everything before it on the stream has ended.
    pub const fn new(grid: [u32; 2], args: &'a [Arg], stream: Stream) -> Self {
        Self { grid, args, stream, overlap_previous: false }
    }
}

impl From<DevicePtr> for Arg {
    fn from(ptr: DevicePtr) -> Self {
        Arg::U64(ptr.0)
    }
}

/// The arguments of a launch are not the entry's parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kernel} takes {expected}, given {given}; pass its parameters in order")]
pub struct ArgumentsError {
    /// The entry's name.
    pub kernel: String,
    /// The parameters.
    pub expected: String,
    /// The arguments.
    pub given: String,
}

impl ArgumentsError {
    /// Compares number and sizes.
    pub(crate) fn check(kernel: &str, params: &[Param], args: &[Arg]) -> Result<(), Self> {
        let fits = |(param, arg): (&Param, &Arg)| param.bytes == arg.bytes();
        if params.len() == args.len() && params.iter().zip(args).all(fits) {
            return Ok(());
        }
        let expected = params.iter().map(|param| format!("{}: {}", param.name, kind(param.bytes)));
        let given = args.iter().map(|arg| kind(arg.bytes()));
        Err(Self {
            kernel: kernel.to_owned(),
            expected: format!("({})", expected.collect::<Vec<_>>().join(", ")),
            given: format!("({})", given.collect::<Vec<_>>().join(", ")),
        })
    }
}

/// A grid cannot be cut into the kernel's clusters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{kernel} launched with {grid_x} CTAs along x, its clusters have {cluster}; launch a multiple of that"
)]
pub struct ClusterError {
    /// The entry's name.
    pub kernel: String,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// CTAs along x.
    pub grid_x: u32,
}

impl ClusterError {
    /// Compares the grid with the clusters.
    pub(crate) fn check(kernel: &str, cluster: u32, grid: [u32; 2]) -> Result<(), Self> {
        if grid[0].is_multiple_of(cluster) {
            return Ok(());
        }
        Err(Self { kernel: kernel.to_owned(), cluster, grid_x: grid[0] })
    }
}

/// A kernel that a backend has loaded. Its entry, CTA and cluster size and shared memory are those of the
/// module.
pub trait Kernel: Send + Sync + fmt::Debug {
    /// The entry's name.
    fn name(&self) -> &str;
    /// Registers per thread, where the backend knows.
    fn num_regs(&self) -> Option<u32>;
    /// Bytes of local memory per thread (spills), where the backend knows.
    fn local_bytes(&self) -> Option<u32>;
    /// How many of its clusters run at once on the device, for a kernel with clusters and where the
    /// backend knows. A grid of more clusters runs in waves.
    fn max_active_clusters(&self) -> Option<u32> {
        None
    }
    /// The backend's own object.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// What runs modules.
pub trait Backend: Send + Sync {
    /// The device.
    fn device(&self) -> &DeviceSpec;

    /// What times measured on this device are kept under: the card and its driver. `None` where time means
    /// nothing, as in the emulator.
    fn timing_identity(&self) -> Option<String> {
        None
    }

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

    /// A way to the device for one thread, with `count` buffers of `bytes` each. A backend whose copies need none has a
    /// single one.
    ///
    /// # Errors
    /// If there is not enough memory.
    fn staging(&self, count: usize, bytes: usize) -> Result<Box<dyn Staging + '_>, Error> {
        let _ = count;
        Ok(Box::new(PlainStaging::new(bytes, |ptr, bytes: &[u8]| self.upload(ptr, bytes))))
    }

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

    /// [`Backend::load`] on behalf of work on a stream. While that stream is being captured into a graph
    /// only what was loaded before can be had, because loading would break the capture.
    ///
    /// # Errors
    /// Those of [`Backend::load`], and a refusal during a capture.
    fn load_for(&self, module: &Module, stream: Stream) -> Result<Arc<dyn Kernel>, Error> {
        let _ = stream;
        self.load(module)
    }

    /// Enqueues a kernel. Does not allocate and does not wait on a GPU; the emulator has finished when it
    /// returns.
    ///
    /// # Errors
    /// If the arguments do not match the entry's parameters or the launch is refused.
    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error>;

    /// Waits for a stream's work.
    ///
    /// # Errors
    /// If that work failed.
    fn synchronize(&self, stream: Stream) -> Result<(), Error>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_what_was_put_in_and_no_more() {
        let mut list = ArgList::new(&[Arg::U32(1), Arg::U64(2)]);
        list.push(Arg::U32(3));
        assert_eq!(*list, [Arg::U32(1), Arg::U64(2), Arg::U32(3)]);
        let bytes: Vec<u32> = list.iter().map(Arg::bytes).collect();
        assert_eq!(bytes, [4, 8, 4]);
        assert!(ArgList::new(&[]).is_empty());
    }

    #[test]
    fn a_stream_is_in_plain_order_unless_it_is_early() {
        let stream = Stream(7);
        assert_eq!(Enqueue::from(stream), Enqueue { stream, overlap_previous: false });
        assert_eq!(stream.early(), Enqueue { stream, overlap_previous: true });
        assert!(!Launch::new([1, 1], &[], stream).overlap_previous);
    }

    #[test]
    fn grids_are_whole_clusters() {
        assert_eq!(ClusterError::check("k", 1, [7, 1]), Ok(()));
        assert_eq!(ClusterError::check("k", 4, [8, 3]), Ok(()));
        let error = ClusterError::check("k", 4, [6, 4]).expect_err("one and a half");
        assert!(error.to_string().starts_with("k launched with 6 CTAs along x"), "{error}");
    }
}
