//! Streams: our own, and borrowed ones of the caller.
//!
//! [`StreamRef`] is what calls take: a handle that somebody keeps alive. It carries no context; the
//! object that uses it makes its own context current, which must be the stream's.
//!
//! Source: CUDA Driver API, "Stream Management".

use std::ffi::c_void;
use std::marker::PhantomData;

use super::context::Context;
use super::error::{Error, Result};
use super::event::Event;
use super::graph::{CaptureMode, Graph};
use super::sys::{self, CUstream};

/// A stream that lives at least as long as `'s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRef<'s> {
    pub(super) raw: CUstream,
    alive: PhantomData<&'s ()>,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for StreamRef<'_> {}
// SAFETY: as above; the handle is a plain value.
unsafe impl Sync for StreamRef<'_> {}

impl StreamRef<'static> {
    /// The legacy default stream, which waits for and is waited for by all blocking streams.
    pub const DEFAULT: Self = Self { raw: std::ptr::null_mut(), alive: PhantomData };
}

impl<'s> StreamRef<'s> {
    /// Adopts a raw `CUstream` (or `cudaStream_t`, which is the same).
    ///
    /// # Safety
    /// `raw` is null (the default stream), one of CUDA's special values, or a stream that
    /// stays alive for `'s` and belongs to the context of the objects that it will be used with.
    pub unsafe fn from_raw(raw: *mut c_void) -> Self {
        Self { raw: raw.cast(), alive: PhantomData }
    }

    /// A stream for which somebody has already promised what [`StreamRef::from_raw`] asks: it came out of a
    /// backend, which takes streams only from `StreamRef`s.
    pub(crate) fn promised(raw: usize) -> Self {
        Self { raw: std::ptr::with_exposed_provenance_mut(raw), alive: PhantomData }
    }

    /// The raw `CUstream`.
    pub fn as_raw(self) -> *mut c_void {
        self.raw.cast()
    }
}

/// A stream of our own that does not synchronise with the default stream.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: CUstream,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks; the handle does not change.
unsafe impl Sync for Stream {}

impl Stream {
    /// Makes a non-blocking stream.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn new(context: &Context) -> Result<Self> {
        let _current = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        unsafe { context.api().cuStreamCreate(&mut raw, sys::STREAM_NON_BLOCKING) }?;
        Ok(Self { context: context.clone(), raw })
    }

    /// The handle that calls take.
    #[inline]
    pub fn borrow(&self) -> StreamRef<'_> {
        StreamRef { raw: self.raw, alive: PhantomData }
    }

    /// The context of this stream.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Waits for the work enqueued so far.
    ///
    /// # Errors
    /// Those of the driver call, among them the errors of kernels launched earlier.
    pub fn synchronize(&self) -> Result<()> {
        self.context.synchronize_stream(self.borrow())
    }

    /// Records the work that `enqueue` puts on this stream into a graph, instead of running it. The
    /// capture is ended in every case, also when `enqueue` fails; its error then comes first.
    ///
    /// # Errors
    /// `MissingSymbol` on drivers without capture, those of the driver calls, those of `enqueue`.
    pub fn capture<E: From<Error>>(
        &self,
        mode: CaptureMode,
        enqueue: impl FnOnce(StreamRef<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        Graph::capture(&self.context, self.borrow(), mode, enqueue)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us, not used after this; pending work completes first, in the driver.
        self.context.on_drop("a stream", |api| unsafe { api.cuStreamDestroy_v2(self.raw) });
    }
}

impl Context {
    /// Waits for the work that is on a stream now.
    ///
    /// # Errors
    /// Those of the driver call, among them the errors of kernels launched earlier.
    pub fn synchronize_stream(&self, stream: StreamRef<'_>) -> Result<()> {
        let _current = self.bind()?;
        // SAFETY: the stream is alive.
        unsafe { self.api().cuStreamSynchronize(stream.raw) }
    }

    /// Whether all work on a stream is done.
    ///
    /// # Errors
    /// Those of kernels launched earlier.
    pub fn stream_is_idle(&self, stream: StreamRef<'_>) -> Result<bool> {
        let _current = self.bind()?;
        // SAFETY: the stream is alive.
        done(unsafe { self.api().cuStreamQuery(stream.raw) })
    }

    /// Whether a stream is being captured into a graph, so that nothing may be allocated, loaded or
    /// waited for on its behalf (fault B43).
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn is_capturing(&self, stream: StreamRef<'_>) -> Result<bool> {
        let _current = self.bind()?;
        let mut status = sys::CAPTURE_STATUS_NONE;
        // SAFETY: the driver writes one int; the stream is alive.
        match unsafe { self.api().cuStreamIsCapturing(stream.raw, &mut status) } {
            Ok(()) => Ok(status != sys::CAPTURE_STATUS_NONE),
            // Asked of the default stream while a stream that synchronises with it is captured.
            Err(error) if error.code() == Some(sys::ERROR_STREAM_CAPTURE_IMPLICIT) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Makes later work on `stream` wait for `event`, on the device.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn wait_event(&self, stream: StreamRef<'_>, event: &Event) -> Result<()> {
        let _current = self.bind()?;
        // SAFETY: both are alive; flags must be zero.
        unsafe { self.api().cuStreamWaitEvent(stream.raw, event.raw, 0) }
    }

    /// Whether a stream belongs to this context. A driver that cannot tell says yes.
    ///
    /// # Errors
    /// Those of the driver call, for instance while the stream is being captured.
    pub fn owns_stream(&self, stream: StreamRef<'_>) -> Result<bool> {
        if !self.api().has("cuStreamGetCtx") {
            return Ok(true);
        }
        let _current = self.bind()?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes one handle; the stream is alive.
        unsafe { self.api().cuStreamGetCtx(stream.raw, &mut context) }?;
        Ok(context.cast() == self.as_raw())
    }
}

/// "Not ready" is an answer and no error.
pub(super) fn done(outcome: Result<()>) -> Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(sys::ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}
