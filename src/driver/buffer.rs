//! Device memory and pinned host memory.
//!
//! Relies on the driver's stream order. Invariant: a blocking copy or fill is complete when it
//! returns, for every stream. The driver alone does not promise that: its blocking calls run on the
//! default stream, which our streams do not wait for, and a copy from pageable memory returns once
//! the source is staged. So these calls wait for the default stream at their end. Host writes to a
//! buffer take `&self`: what is in device memory is not Rust's, kernels write it behind any borrow.
//!
//! Source: CUDA Driver API, "Memory Management", "API synchronization behavior".

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

use super::context::Context;
use super::error::{Error, Result};
use super::stream::StreamRef;

/// An address in device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::NoUninit)]
#[repr(transparent)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// The null address, for a kernel parameter that is not used.
    pub const NULL: Self = Self(0);

    /// Adopts a raw `CUdeviceptr`.
    ///
    /// # Safety
    /// Whatever is done through the address (copies, kernels) stays within an allocation
    /// of the context it is done in, which lives until that work is complete; no Rust reference to
    /// that memory is used meanwhile.
    pub const unsafe fn from_raw(address: u64) -> Self {
        Self(address)
    }

    /// An address for which somebody has already promised what [`DevicePtr::from_raw`] asks: it came out
    /// of a backend, which takes addresses only from that function and from its own allocations.
    pub(crate) const fn promised(address: u64) -> Self {
        Self(address)
    }

    /// The raw `CUdeviceptr`.
    pub const fn as_raw(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on, which must be in the same allocation.
    pub const fn byte_add(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DevicePtr({:#x})", self.0)
    }
}

/// An array in device memory.
pub struct DeviceBuffer<T> {
    context: Context,
    ptr: DevicePtr,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Allocates `len` elements with unspecified contents.
    ///
    /// # Errors
    /// `Call` with code 2 when the device has no room.
    pub fn new(context: &Context, len: usize) -> Result<Self> {
        let bytes = checked_bytes::<T>(len)?;
        let mut raw = 0;
        // The driver refuses to allocate nothing; nothing is at null.
        if bytes > 0 {
            let _current = context.bind()?;
            // SAFETY: the driver writes one address.
            unsafe { context.api().cuMemAlloc_v2(&mut raw, bytes) }?;
        }
        let (context, ptr) = (context.clone(), DevicePtr(raw));
        Ok(Self { context, ptr, len, element: PhantomData })
    }

    /// Allocates `len` elements in stream order, from the device's memory pool: cheap, but only
    /// work that the stream comes to later may use the memory.
    ///
    /// # Errors
    /// `MissingSymbol` before CUDA 11.2, `Call` with code 2 when the device has no room.
    pub fn new_on(context: &Context, len: usize, stream: StreamRef<'_>) -> Result<Self> {
        let bytes = checked_bytes::<T>(len)?;
        let mut raw = 0;
        if bytes > 0 {
            let _current = context.bind()?;
            // SAFETY: the driver writes one address; the stream is alive.
            unsafe { context.api().cuMemAllocAsync(&mut raw, bytes, stream.raw) }?;
        }
        let (context, ptr) = (context.clone(), DevicePtr(raw));
        Ok(Self { context, ptr, len, element: PhantomData })
    }

    /// Allocates `len` elements of zero bytes.
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and of the fill.
    pub fn zeroed(context: &Context, len: usize) -> Result<Self> {
        let buffer = Self::new(context, len)?;
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// Allocates and fills with a copy of `source`.
    ///
    /// # Errors
    /// Those of [`new`](Self::new) and of the copy.
    pub fn from_slice(context: &Context, source: &[T]) -> Result<Self> {
        let buffer = Self::new(context, source.len())?;
        buffer.upload(source)?;
        Ok(buffer)
    }

    /// Copies from host memory and waits.
    ///
    /// # Errors
    /// `Length` unless the lengths agree; those of the driver call.
    pub fn upload(&self, source: &[T]) -> Result<()> {
        self.check_len(source.len())?;
        self.context.write(self.ptr, bytemuck::cast_slice(source))
    }

    /// Copies to host memory and waits. Work of our own streams is not waited for: synchronise them
    /// first.
    ///
    /// # Errors
    /// `Length` unless the lengths agree; those of the driver call.
    pub fn download(&self, target: &mut [T]) -> Result<()> {
        self.check_len(target.len())?;
        // SAFETY: `Pod` takes any bytes.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(target.as_mut_ptr().cast(), size_of_val(target))
        };
        self.context.read(self.ptr, bytes)
    }

    /// A copy in host memory; see [`download`](Self::download).
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut target = vec![T::zeroed(); self.len];
        self.download(&mut target)?;
        Ok(target)
    }

    /// Enqueues a copy from host memory.
    ///
    /// # Safety
    /// `source` stays alive and unchanged until the stream has passed the copy.
    ///
    /// # Errors
    /// `Length` unless the lengths agree; those of the driver call.
    pub unsafe fn upload_async(&self, source: &[T], stream: StreamRef<'_>) -> Result<()> {
        self.check_len(source.len())?;
        if source.is_empty() {
            return Ok(());
        }
        let _current = self.context.bind()?;
        let (from, bytes) = (source.as_ptr().cast(), size_of_val(source));
        // SAFETY: lengths agree; the caller keeps the source.
        unsafe { self.context.api().cuMemcpyHtoDAsync_v2(self.ptr.0, from, bytes, stream.raw) }
    }

    /// Enqueues a copy to host memory.
    ///
    /// # Safety
    /// `target` stays alive and is not touched until the stream has passed the copy.
    ///
    /// # Errors
    /// `Length` unless the lengths agree; those of the driver call.
    pub unsafe fn download_async(&self, target: &mut [T], stream: StreamRef<'_>) -> Result<()> {
        self.check_len(target.len())?;
        if target.is_empty() {
            return Ok(());
        }
        let _current = self.context.bind()?;
        let (to, bytes) = (target.as_mut_ptr().cast(), size_of_val(target));
        // SAFETY: lengths agree; the caller keeps the target.
        unsafe { self.context.api().cuMemcpyDtoHAsync_v2(to, self.ptr.0, bytes, stream.raw) }
    }

    /// Copies from host memory in stream order, and waits for the stream.
    ///
    /// # Errors
    /// Those of [`upload_async`](Self::upload_async) and of the wait.
    pub fn upload_on(&self, source: &[T], stream: StreamRef<'_>) -> Result<()> {
        // SAFETY: the borrow lasts beyond the wait.
        let enqueued = unsafe { self.upload_async(source, stream) };
        enqueued.and(self.context.synchronize_stream(stream))
    }

    /// Copies to host memory in stream order, and waits for the stream.
    ///
    /// # Errors
    /// Those of [`download_async`](Self::download_async) and of the wait.
    pub fn download_on(&self, target: &mut [T], stream: StreamRef<'_>) -> Result<()> {
        // SAFETY: the borrow lasts beyond the wait.
        let enqueued = unsafe { self.download_async(target, stream) };
        enqueued.and(self.context.synchronize_stream(stream))
    }

    /// Enqueues a copy from another buffer.
    ///
    /// # Errors
    /// `Length` unless the lengths agree; those of the driver call.
    pub fn copy_from_async(&self, source: &Self, stream: StreamRef<'_>) -> Result<()> {
        self.check_len(source.len)?;
        if self.len == 0 {
            return Ok(());
        }
        let _current = self.context.bind()?;
        let (api, bytes) = (self.context.api(), self.size_bytes());
        // SAFETY: both allocations have this many bytes; freeing one waits for the copy.
        unsafe { api.cuMemcpyDtoDAsync_v2(self.ptr.0, source.ptr.0, bytes, stream.raw) }
    }

    /// Sets every byte and waits.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn fill_bytes(&self, value: u8) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let _current = self.context.bind()?;
        let api = self.context.api();
        // SAFETY: within the allocation.
        unsafe { api.cuMemsetD8_v2(self.ptr.0, value, self.size_bytes()) }?;
        self.context.synchronize_stream(StreamRef::DEFAULT)
    }

    /// Enqueues setting every byte.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn fill_bytes_async(&self, value: u8, stream: StreamRef<'_>) -> Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        let _current = self.context.bind()?;
        let (api, bytes) = (self.context.api(), self.size_bytes());
        // SAFETY: within the allocation; freeing it waits for the fill.
        unsafe { api.cuMemsetD8Async(self.ptr.0, value, bytes, stream.raw) }
    }

    fn check_len(&self, found: usize) -> Result<()> {
        if found == self.len {
            return Ok(());
        }
        let (expected, found) = (self.len as u64, found as u64);
        Err(Error::Length { what: "host and device lengths differ, in elements", expected, found })
    }
}

impl<T> DeviceBuffer<T> {
    /// Address of the first element.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Address of element `index`, at most the length.
    ///
    /// # Panics
    /// Beyond the length.
    pub fn ptr_at(&self, index: usize) -> DevicePtr {
        assert!(index <= self.len, "element {index} of a device buffer of {}", self.len);
        self.ptr.byte_add((index * size_of::<T>()) as u64)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The context of this memory.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Size of `len` elements in bytes.
fn checked_bytes<T>(len: usize) -> Result<usize> {
    len.checked_mul(size_of::<T>()).ok_or(Error::Limit {
        what: "size of a buffer, in elements",
        requested: len as u64,
        limit: (usize::MAX / size_of::<T>().max(1)) as u64,
        remedy: "allocate less",
    })
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({:?}, {} elements)", self.ptr, self.len)
    }
}

impl<T> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        if self.ptr != DevicePtr::NULL {
            // SAFETY: allocated by us; the driver waits for work that uses it.
            self.context.on_drop("device memory", |api| unsafe { api.cuMemFree_v2(self.ptr.0) });
        }
    }
}

impl Context {
    /// Copies bytes to an address and waits.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn write(&self, to: DevicePtr, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.bind()?;
        // SAFETY: the source is borrowed; the one who made the address vouches for the target.
        unsafe { self.api().cuMemcpyHtoD_v2(to.0, from.as_ptr().cast(), from.len()) }?;
        self.synchronize_stream(StreamRef::DEFAULT)
    }

    /// Enqueues a copy to an address.
    ///
    /// # Safety
    /// `from` stays alive and unchanged until the stream has passed the copy.
    ///
    /// # Errors
    /// Those of the driver call.
    pub(super) unsafe fn write_async(
        &self,
        to: DevicePtr,
        from: &[u8],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        let _current = self.bind()?;
        let (source, bytes) = (from.as_ptr().cast(), from.len());
        // SAFETY: the caller keeps the source; the one who made the address vouches for the target.
        unsafe { self.api().cuMemcpyHtoDAsync_v2(to.0, source, bytes, stream.raw) }
    }

    /// Copies bytes from an address and waits. Work of our own streams is not waited for.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn read(&self, from: DevicePtr, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        let _current = self.bind()?;
        // SAFETY: the target is borrowed; the one who made the address vouches for the source.
        unsafe { self.api().cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from.0, to.len()) }
    }
}

/// An array in page-locked host memory, which the device copies from and to without staging.
pub struct PinnedBuffer<T> {
    context: Context,
    ptr: *mut T,
    len: usize,
}

// SAFETY: it owns its memory, like a Vec.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}
// SAFETY: as above; `&self` only reads.
unsafe impl<T: Sync> Sync for PinnedBuffer<T> {}

impl<T: Pod> PinnedBuffer<T> {
    /// Allocates `len` elements of zero bytes.
    ///
    /// # Errors
    /// `Call` with code 2 when the system cannot lock so much memory.
    pub fn zeroed(context: &Context, len: usize) -> Result<Self> {
        let bytes = checked_bytes::<T>(len)?;
        let mut raw: *mut c_void = std::ptr::NonNull::<T>::dangling().as_ptr().cast();
        if bytes > 0 {
            let _current = context.bind()?;
            // SAFETY: the driver writes one address, of page-aligned memory.
            unsafe { context.api().cuMemAllocHost_v2(&mut raw, bytes) }?;
            // SAFETY: so many bytes were allocated.
            unsafe { raw.cast::<u8>().write_bytes(0, bytes) };
        }
        Ok(Self { context: context.clone(), ptr: raw.cast(), len })
    }
}

impl<T> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: allocated with this length, zeroed at least; dangling but aligned if empty.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({:p}, {} elements)", self.ptr, self.len)
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        if self.len * size_of::<T>() > 0 {
            let raw = self.ptr.cast();
            // SAFETY: allocated by us, with no borrow left.
            self.context.on_drop("pinned memory", |api| unsafe { api.cuMemFreeHost(raw) });
        }
    }
}
