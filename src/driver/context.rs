//! The device's primary context, shared with everything else in the process.
//!
//! The driver works on whatever context is current on the calling thread. [`Context::bind`] makes
//! ours current for the time of a call and puts the caller's back, so that our objects work from
//! any thread and beside code that uses other contexts (fault B49). No context is ever created:
//! [`Context::primary`] retains the one that the CUDA runtime, candle and cudarc use too,
//! [`Context::adopt_current`] takes the caller's.
//!
//! Source: CUDA Driver API, "Primary Context Management", "Context Management".

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::device::{Device, DeviceInfo};
use super::error::{Error, Result};
use super::sys::{self, Api, CUcontext, Driver};

/// A context of a device, cheap to clone; the primary one is released with the last clone.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    info: DeviceInfo,
    raw: CUcontext,
    retained: bool,
}

// SAFETY: a context handle may be used from any thread; the driver locks.
unsafe impl Send for Inner {}
// SAFETY: as above; nothing in it changes after construction.
unsafe impl Sync for Inner {}

impl Context {
    /// The primary context of a device, retained.
    ///
    /// # Errors
    /// Those of the driver calls.
    pub fn primary(device: Device) -> Result<Self> {
        let info = device.info()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { device.driver.api.cuDevicePrimaryCtxRetain(&mut raw, device.raw) }?;
        Ok(Self { inner: Arc::new(Inner { device, info, raw, retained: true }) })
    }

    /// The context that is current on the calling thread, if any. It is not retained: whoever made
    /// it keeps it alive as long as this object and everything made from it.
    ///
    /// # Errors
    /// Those of the driver calls.
    pub fn adopt_current(driver: &'static Driver) -> Result<Option<Self>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle, null if none is current.
        unsafe { driver.api.cuCtxGetCurrent(&mut raw) }?;
        if raw.is_null() {
            return Ok(None);
        }
        let mut device = 0;
        // SAFETY: the driver writes one device number; a context is current.
        unsafe { driver.api.cuCtxGetDevice(&mut device) }?;
        let device = Device::of_raw(driver, device);
        let info = device.info()?;
        Ok(Some(Self { inner: Arc::new(Inner { device, info, raw, retained: false }) }))
    }

    /// Opens the driver and the primary context of one device: [`Driver::get`], [`Device::nth`],
    /// [`Context::primary`].
    ///
    /// # Errors
    /// [`Error::is_unavailable`] tells "no GPU here" from a failed operation.
    pub fn open(ordinal: u32) -> Result<Self> {
        Self::primary(Device::nth(Driver::get()?, ordinal)?)
    }

    /// The device of this context.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// The numbers of that device.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// The driver.
    pub fn driver(&self) -> &'static Driver {
        self.inner.device.driver
    }

    /// The raw `CUcontext`.
    pub fn as_raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    #[inline]
    pub(super) fn api(&self) -> &'static Api {
        &self.inner.device.driver.api
    }

    /// Makes this context current on the calling thread until the guard goes out of scope; then the
    /// one that was current before is again. Methods of this room do so themselves.
    ///
    /// # Errors
    /// Those of the driver calls.
    #[inline]
    pub fn bind(&self) -> Result<Current<'_>> {
        let api = self.api();
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { api.cuCtxGetCurrent(&mut current) }?;
        let pushed = current != self.inner.raw;
        if pushed {
            // SAFETY: the handle is alive, retained or kept so by the one who lent it.
            unsafe { api.cuCtxPushCurrent_v2(self.inner.raw) }?;
        }
        Ok(Current { api, pushed, context: PhantomData, thread: PhantomData })
    }

    /// Waits for all work of this context.
    ///
    /// # Errors
    /// Those of the driver call, among them the errors of kernels launched earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.bind()?;
        // SAFETY: no arguments; our context is current.
        unsafe { self.api().cuCtxSynchronize() }
    }

    /// Free and total device memory, in bytes.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn memory_info(&self) -> Result<(u64, u64)> {
        let _current = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two sizes.
        unsafe { self.api().cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok((free as u64, total as u64))
    }

    /// Checks that the driver has an optional function, before work that cannot be undone starts.
    pub(super) fn require(&self, symbol: &'static str) -> Result<()> {
        match self.api().has(symbol) {
            true => Ok(()),
            false => Err(Error::MissingSymbol { symbol, driver_version: self.driver().version() }),
        }
    }

    /// Logs what a destructor could not do: it must neither fail nor panic, and at process exit the
    /// driver may be gone already.
    pub(super) fn on_drop(&self, what: &str, work: impl FnOnce(&Api) -> Result<()>) {
        if let Err(error) = self.bind().and_then(|_current| work(self.api())) {
            log::debug!("cannot free {what}: {error}");
        }
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.inner.raw == other.inner.raw
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:p} on {})", self.inner.raw, self.inner.info)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.retained {
            let sys::Driver { api, .. } = self.device.driver;
            // SAFETY: retained once by us.
            if let Err(error) = unsafe { api.cuDevicePrimaryCtxRelease_v2(self.device.raw) } {
                log::debug!("cannot release the primary context: {error}");
            }
        }
    }
}

/// Keeps a context current on this thread; made by [`Context::bind`]. Guards end in the reverse
/// order of their making.
#[must_use = "the context is current only as long as the guard lives"]
pub struct Current<'c> {
    api: &'static Api,
    pushed: bool,
    context: PhantomData<&'c Context>,
    /// The stack of contexts is the thread's: the guard must end where it began.
    thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: pushed by `bind` on this thread.
            if let Err(error) = unsafe { self.api.cuCtxPopCurrent_v2(&mut popped) } {
                log::debug!("cannot restore the caller's context: {error}");
            }
        }
    }
}
