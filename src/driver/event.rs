//! Events: points on a stream, for ordering and for device time.
//!
//! Source: CUDA Driver API, "Event Management".

use super::context::Context;
use super::error::Result;
use super::stream::{StreamRef, done};
use super::sys::{self, CUevent};

/// A point on a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    pub(super) raw: CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver locks; the handle does not change.
unsafe impl Sync for Event {}

impl Event {
    /// An event that keeps the time at which it was reached.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn timed(context: &Context) -> Result<Self> {
        Self::with_flags(context, sys::EVENT_DEFAULT)
    }

    /// An event for ordering alone, which costs the device less.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn untimed(context: &Context) -> Result<Self> {
        Self::with_flags(context, sys::EVENT_DISABLE_TIMING)
    }

    fn with_flags(context: &Context, flags: u32) -> Result<Self> {
        let _current = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { context.api().cuEventCreate(&mut raw, flags) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// Moves the event to the end of what is on the stream now.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn record(&self, stream: StreamRef<'_>) -> Result<()> {
        let _current = self.context.bind()?;
        // SAFETY: both are alive.
        unsafe { self.context.api().cuEventRecord(self.raw, stream.raw) }
    }

    /// Waits until the event is reached.
    ///
    /// # Errors
    /// Those of the driver call, among them the errors of kernels launched earlier.
    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { self.context.api().cuEventSynchronize(self.raw) }
    }

    /// Whether the event is reached; an event never recorded is.
    ///
    /// # Errors
    /// Those of kernels launched earlier.
    pub fn is_reached(&self) -> Result<bool> {
        let _current = self.context.bind()?;
        // SAFETY: the event is alive.
        done(unsafe { self.context.api().cuEventQuery(self.raw) })
    }

    /// Device time from `start` to this event, in milliseconds; both were recorded, timed and
    /// reached.
    ///
    /// # Errors
    /// Those of the driver call, for instance 600 if one of them is not reached yet.
    pub fn milliseconds_since(&self, start: &Event) -> Result<f32> {
        let _current = self.context.bind()?;
        let mut milliseconds = 0.0;
        let api = self.context.api();
        // SAFETY: the driver writes one float; both events are alive.
        unsafe { api.cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) }?;
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us, not used after this.
        self.context.on_drop("an event", |api| unsafe { api.cuEventDestroy_v2(self.raw) });
    }
}
