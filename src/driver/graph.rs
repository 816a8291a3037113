//! Graphs: work recorded from a stream once and replayed with one call.
//!
//! Source: CUDA Driver API, "Stream Management" (capture), "Graph Management".

use super::context::Context;
use super::error::{Error, Result};
use super::stream::StreamRef;
use super::sys::{CUgraph, CUgraphExec, GRAPH_EDGE_PROGRAMMATIC, GraphEdge};

/// Which calls are refused while a capture is going on (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// Unsafe calls (allocation, module load) of any thread.
    Global,
    /// Unsafe calls of the capturing thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

/// Work recorded from a stream.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: CUgraph,
}

// SAFETY: the handle may move between threads; the driver does not lock graphs, hence no `Sync`.
unsafe impl Send for Graph {}

impl Graph {
    pub(super) fn capture<E: From<Error>>(
        context: &Context,
        stream: StreamRef<'_>,
        mode: CaptureMode,
        enqueue: impl FnOnce(StreamRef<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<Self, E> {
        for symbol in ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"] {
            context.require(symbol)?;
        }
        let api = context.api();
        {
            let _current = context.bind()?;
            // SAFETY: the stream is alive; the mode is one of the three.
            unsafe { api.cuStreamBeginCapture_v2(stream.raw, mode as i32) }?;
        }
        // Ends the capture also if `enqueue` unwinds: the stream must be usable afterwards.
        let mut open = OpenCapture { context, stream, ended: false };
        let enqueued = enqueue(stream);
        let raw = open.end();
        let graph = raw.map(|raw| Self { context: context.clone(), raw });
        enqueued?;
        Ok(graph?)
    }

    /// How many nodes (launches, copies) the graph has.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn num_nodes(&self) -> Result<usize> {
        let _current = self.context.bind()?;
        let mut count = 0;
        let api = self.context.api();
        // SAFETY: with a null array the driver writes the count alone.
        unsafe { api.cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut count) }?;
        Ok(count)
    }

    /// How many of its edges let the later kernel start early.
    ///
    /// # Errors
    /// `MissingSymbol` before CUDA 12.3; those of the driver call.
    pub fn num_programmatic_edges(&self) -> Result<usize> {
        let _current = self.context.bind()?;
        let api = self.context.api();
        let mut count = 0;
        let none = std::ptr::null_mut();
        // SAFETY: with null arrays the driver writes the count alone.
        unsafe { api.cuGraphGetEdges_v2(self.raw, none, none, none.cast(), &mut count) }?;
        let (mut from, mut to) = (vec![none.cast(); count], vec![none.cast(); count]);
        let mut edges = vec![GraphEdge::default(); count];
        let (from, to) = (from.as_mut_ptr(), to.as_mut_ptr());
        // SAFETY: the driver writes as many elements as it said, no more than `count`.
        unsafe { api.cuGraphGetEdges_v2(self.raw, from, to, edges.as_mut_ptr(), &mut count) }?;
        let edges = edges.iter().take(count);
        Ok(edges.filter(|edge| edge.kind == GRAPH_EDGE_PROGRAMMATIC).count())
    }

    /// Makes the graph launchable.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn instantiate(&self) -> Result<GraphExec> {
        self.context.require("cuGraphLaunch")?;
        self.context.require("cuGraphExecDestroy")?;
        let _current = self.context.bind()?;
        let api = self.context.api();
        let mut raw = std::ptr::null_mut();
        if api.has("cuGraphInstantiateWithFlags") {
            // SAFETY: the driver writes one handle; the graph is alive; no flags.
            unsafe { api.cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) }?;
        } else {
            let (no_node, no_log) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: as above; the error node and the log may be null.
            unsafe { api.cuGraphInstantiate_v2(&mut raw, self.raw, no_node, no_log, 0) }?;
        }
        Ok(GraphExec { context: self.context.clone(), raw })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by us, not used after this.
        self.context.on_drop("a graph", |api| unsafe { api.cuGraphDestroy(self.raw) });
    }
}

/// A capture that is going on.
struct OpenCapture<'c> {
    context: &'c Context,
    stream: StreamRef<'c>,
    ended: bool,
}

impl OpenCapture<'_> {
    fn end(&mut self) -> Result<CUgraph> {
        self.ended = true;
        let _current = self.context.bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the driver writes one handle, null if the capture was invalidated.
        unsafe { self.context.api().cuStreamEndCapture(self.stream.raw, &mut graph) }?;
        Ok(graph)
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            match self.end() {
                // SAFETY: made by the call above and used nowhere else.
                Ok(raw) => self
                    .context
                    .on_drop("an unfinished graph", |api| unsafe { api.cuGraphDestroy(raw) }),
                Err(error) => log::debug!("cannot end a capture: {error}"),
            }
        }
    }
}

/// A graph that can be launched.
///
/// It holds the addresses that its kernels were recorded with: buffers and modules used during the
/// capture must outlive it.
#[derive(Debug)]
pub struct GraphExec {
    context: Context,
    raw: CUgraphExec,
}

// SAFETY: the handle may move between threads; the driver does not lock graphs, hence no `Sync`.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Enqueues the whole graph.
    ///
    /// # Errors
    /// Those of the driver call.
    pub fn launch(&self, stream: StreamRef<'_>) -> Result<()> {
        let _current = self.context.bind()?;
        // SAFETY: both are alive.
        unsafe { self.context.api().cuGraphLaunch(self.raw, stream.raw) }
    }

    /// Brings the graph to the device ahead of its first launch.
    ///
    /// # Errors
    /// `MissingSymbol` on drivers before CUDA 11.1, those of the driver call.
    pub fn upload(&self, stream: StreamRef<'_>) -> Result<()> {
        let _current = self.context.bind()?;
        // SAFETY: both are alive.
        unsafe { self.context.api().cuGraphUpload(self.raw, stream.raw) }
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: made by us, not used after this; the driver defers the end of a running one.
        self.context
            .on_drop("a launchable graph", |api| unsafe { api.cuGraphExecDestroy(self.raw) });
    }
}
