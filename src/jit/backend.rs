//! `GpuBackend`: the GPU behind the calls that the emulator answers to as well.
//!
//! Owns the primary context of one device and the loader of compiled modules. A launch packs its arguments
//! on the stack and enqueues; it neither allocates nor waits. Addresses and streams are trusted, because
//! the types that carry them are made only from allocations of ours and from driver types whose makers
//! gave their word. Invariant: the driver sees no module that the verifier refuses for this device, and no
//! argument list that is not the module's.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::{LoadedFunction, Loader, loader};
use crate::asm::reg::Param;
use crate::asm::{Diagnostics, Module, PrintOptions};
use crate::backend::{
    Arg, ArgumentsError, Backend, ClusterError, DevicePtr, Enqueue, Error, Kernel, Launch, Staging,
    Stream, Swizzle, TensorMap, TensorMapError,
};
use crate::driver::{
    self, Args, Context, DeviceBuffer, JitOptions, LaunchAttrs, LaunchShape, StagingRing, StreamRef,
};
use crate::target::DeviceSpec;

impl From<driver::DevicePtr> for DevicePtr {
    fn from(ptr: driver::DevicePtr) -> Self {
        DevicePtr(ptr.as_raw())
    }
}

impl From<StreamRef<'_>> for Stream {
    fn from(stream: StreamRef<'_>) -> Self {
        Stream(stream.as_raw().expose_provenance())
    }
}

impl From<StreamRef<'_>> for Enqueue {
    fn from(stream: StreamRef<'_>) -> Self {
        Stream::from(stream).into()
    }
}

/// Why a module or a launch was refused, beyond what the driver says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The module breaks a rule or does not fit the device or its driver.
    #[error(transparent)]
    Refused(#[from] Diagnostics),
    /// The arguments are not those of the entry.
    #[error(transparent)]
    Arguments(#[from] ArgumentsError),
    /// The grid is not made of whole clusters.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The kernel has clusters and the device cannot run one.
    #[error(
        "{kernel} runs in clusters of {cluster} CTAs, {why}; choose a configuration with smaller clusters"
    )]
    NoCluster {
        /// The entry's name.
        kernel: String,
        /// CTAs of a cluster.
        cluster: u32,
        /// What the device lacks.
        why: &'static str,
    },
    /// A tensor map that the hardware cannot have.
    #[error(transparent)]
    TensorMap(#[from] TensorMapError),
    /// The kernel was loaded by another backend.
    #[error("kernel {0} was not loaded by a GPU; load its module here")]
    ForeignKernel(String),
    /// The address is not the start of an allocation made here.
    #[error("{0:#x} is not the start of a live allocation")]
    NotAllocated(u64),
}

/// A kernel on the GPU.
#[derive(Debug)]
pub struct GpuKernel {
    loaded: Arc<LoadedFunction>,
    params: Vec<Param>,
    threads: u32,
    smem_bytes: u32,
    /// CTAs of a cluster, 1 without.
    cluster: u32,
    max_active_clusters: Option<u32>,
    /// It waits by itself for the kernel before it.
    waits_for_previous: bool,
}

impl GpuKernel {
    /// The driver's function and how it was come by.
    pub fn loaded(&self) -> &LoadedFunction {
        &self.loaded
    }

    /// Whether it waits by itself for the kernel before it, so that it may start early.
    pub fn waits_for_previous(&self) -> bool {
        self.waits_for_previous
    }
}

impl Kernel for GpuKernel {
    fn name(&self) -> &str {
        self.loaded.function.name()
    }

    fn num_regs(&self) -> Option<u32> {
        Some(self.loaded.function.attrs().num_regs)
    }

    fn local_bytes(&self) -> Option<u32> {
        Some(self.loaded.function.attrs().local_bytes)
    }

    fn max_active_clusters(&self) -> Option<u32> {
        self.max_active_clusters
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// One GPU.
pub struct GpuBackend {
    context: Context,
    device: DeviceSpec,
    loader: Loader,
    line_info: bool,
    /// Device and driver know early launch.
    overlaps: bool,
    allocations: Mutex<HashMap<u64, DeviceBuffer<u8>>>,
}

impl GpuBackend {
    /// The GPU of that ordinal, in its primary context, with the module store of the environment. With
    /// `MAKAIRA_LINEINFO` set to anything but `0` it compiles [with line info](Self::with_line_info).
    ///
    /// # Errors
    /// [`driver::Error`]; `is_unavailable` says that there is no driver at all.
    pub fn open(ordinal: u32) -> Result<Self, driver::Error> {
        let asked = std::env::var_os("MAKAIRA_LINEINFO");
        let line_info = asked.is_some_and(|value| !value.is_empty() && value != "0");
        Ok(Self { line_info, ..Self::new(Context::open(ordinal)?, Loader::from_env()) })
    }

    /// The device of a context, with a loader of the caller's.
    pub fn new(context: Context, loader: Loader) -> Self {
        let info = context.info();
        let device = DeviceSpec {
            name: info.name.clone(),
            arch: info.arch,
            isa: context.driver().ptx_ceiling().unwrap_or(crate::target::PtxIsa::new(7, 0)),
            num_sms: info.num_sms,
            l2_bytes: info.l2_bytes,
            smem_per_cta_bytes: info.smem_per_cta_bytes,
        };
        let overlaps =
            device.arch.sm >= 90 && !context.driver().missing().contains(&"cuLaunchKernelEx");
        let allocations = Mutex::default();
        Self { context, device, loader, line_info: false, overlaps, allocations }
    }

    /// Compiles modules with the Rust lines that emitted them, for a profiler's source page.
    pub fn with_line_info(self) -> Self {
        Self { line_info: true, ..self }
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The loader of compiled modules.
    pub fn loader(&self) -> &Loader {
        &self.loader
    }

    /// Has the driver encode a tensor map, if it keeps the rules.
    fn encode(&self, map: &TensorMap) -> Result<driver::TensorMap, Error> {
        let what = "encoding a tensor map";
        map.check().map_err(|source| Error::new(what, GpuError::from(source)))?;
        let matrix = driver::TiledMatrix {
            base: driver::DevicePtr::promised(map.base.addr()),
            elements: map.elements,
            row_bytes: map.row_bytes,
            tile: map.tile,
            swizzle_128b: map.swizzle == Swizzle::B128,
        };
        driver::TensorMap::encode(&self.context, &matrix).map_err(|source| Error::new(what, source))
    }

    /// How many clusters of a loaded kernel run at once; `None` without clusters, or if the driver is too
    /// old to say.
    fn max_active_clusters(
        &self,
        module: &Module,
        loaded: &LoadedFunction,
    ) -> Result<Option<u32>, Error> {
        let (name, cluster) = (&module.entry.name, module.entry.cluster);
        if cluster <= 1 {
            return Ok(None);
        }
        let what = || format!("asking how many clusters of {name} fit on {}", self.device.name);
        let refused = |why| {
            let kernel = name.clone();
            Err(Error::new(what(), GpuError::NoCluster { kernel, cluster, why }))
        };
        if !self.context.info().cluster_launch {
            return refused("the device launches none");
        }
        if self.lacks("cuOccupancyMaxActiveClusters") {
            return Ok(None);
        }
        let shape = LaunchShape::linear(cluster, module.entry.threads, module.entry.smem.bytes());
        let attrs = LaunchAttrs { cluster: Some([cluster, 1, 1]), ..LaunchAttrs::default() };
        match loaded.function.clusters_on_device(&shape, &attrs) {
            Ok(0) => refused("none fits on the device"),
            Ok(count) => Ok(Some(count)),
            Err(source) => Err(Error::new(what(), source)),
        }
    }

    /// Whether the driver lacks this optional function.
    fn lacks(&self, symbol: &str) -> bool {
        self.context.driver().missing().contains(&symbol)
    }

    /// Verifies a module, has `get` load its text, sets its limits.
    fn load_with(
        &self,
        module: &Module,
        get: impl FnOnce(&str, &JitOptions) -> Result<Arc<LoadedFunction>, loader::Error>,
    ) -> Result<Arc<dyn Kernel>, Error> {
        let (name, driver) = (&module.entry.name, self.context.driver().version());
        let what =
            || format!("loading {name} on {} with the driver of CUDA {driver}", self.device.name);
        module
            .verify_for(&self.device)
            .map_err(|source| Error::new(what(), GpuError::from(source)))?;
        let ptx = module.to_ptx(PrintOptions { line_info: self.line_info });
        let options = JitOptions { line_info: self.line_info, ..JitOptions::default() };
        let loaded = get(&ptx, &options).map_err(|source| Error::new(what(), source))?;
        let smem_bytes = module.entry.smem.bytes();
        loaded
            .function
            .allow_dynamic_smem(smem_bytes)
            .map_err(|source| Error::new(format!("giving {name} its shared memory"), source))?;
        let max_active_clusters = self.max_active_clusters(module, &loaded)?;
        Ok(Arc::new(GpuKernel {
            loaded,
            params: module.entry.params.clone(),
            threads: module.entry.threads,
            smem_bytes,
            cluster: module.entry.cluster,
            max_active_clusters,
            waits_for_previous: module.waits_for_previous(),
        }))
    }
}

/// Pinned buffers on a stream of their own.
struct GpuStaging(StagingRing);

impl Staging for GpuStaging {
    fn buffer(&mut self) -> Result<&mut [u8], Error> {
        self.0.buffer().map_err(|source| Error::new("waiting for a copy", source))
    }

    fn send(&mut self, to: DevicePtr, bytes: usize) -> Result<(), Error> {
        let fail = |source| Error::new(format!("sending {bytes} bytes"), source);
        self.0.send(driver::DevicePtr::promised(to.addr()), bytes).map_err(fail)
    }

    fn finish(&mut self) -> Result<(), Error> {
        self.0.finish().map_err(|source| Error::new("waiting for copies", source))
    }
}

impl Backend for GpuBackend {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn timing_identity(&self) -> Option<String> {
        let DeviceSpec { name, arch, num_sms, .. } = &self.device;
        let driver = self.context.driver().version();
        Some(format!("{name}, {arch}, {num_sms} SMs, driver of CUDA {driver}"))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let fail = |source| Error::new(format!("allocating {bytes} bytes"), source);
        let buffer = DeviceBuffer::new(&self.context, bytes.max(1) as usize).map_err(fail)?;
        let ptr = DevicePtr::from(buffer.ptr());
        let mut allocations = self.allocations.lock().expect("no panic holds it");
        allocations.insert(ptr.addr(), buffer);
        Ok(ptr)
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        let mut allocations = self.allocations.lock().expect("no panic holds it");
        match allocations.remove(&ptr.addr()) {
            Some(_) => Ok(()),
            None => Err(Error::new("freeing", GpuError::NotAllocated(ptr.addr()))),
        }
    }

    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        let fail = |source| Error::new(format!("uploading {} bytes", bytes.len()), source);
        self.context.write(driver::DevicePtr::promised(ptr.addr()), bytes).map_err(fail)
    }

    fn staging(&self, count: usize, bytes: usize) -> Result<Box<dyn Staging + '_>, Error> {
        let what = format!("locking {count} host buffers of {bytes} bytes");
        let ring = StagingRing::new(&self.context, count, bytes);
        Ok(Box::new(GpuStaging(ring.map_err(|source| Error::new(what, source))?)))
    }

    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        let what = format!("downloading {} bytes", bytes.len());
        let fail = |source| Error::new(&what, source);
        self.context.synchronize().map_err(fail)?;
        self.context.read(driver::DevicePtr::promised(ptr.addr()), bytes).map_err(fail)
    }

    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error> {
        self.load_with(module, |ptx, options| {
            self.loader.load(&self.context, &module.entry.name, ptx, options)
        })
    }

    fn load_for(&self, module: &Module, stream: Stream) -> Result<Arc<dyn Kernel>, Error> {
        let stream = StreamRef::promised(stream.0);
        self.load_with(module, |ptx, options| {
            self.loader.load_for(&self.context, stream, &module.entry.name, ptx, options)
        })
    }

    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error> {
        let Some(kernel) = kernel.as_any().downcast_ref::<GpuKernel>() else {
            let foreign = GpuError::ForeignKernel(kernel.name().to_owned());
            return Err(Error::new("launching", foreign));
        };
        ArgumentsError::check(kernel.name(), &kernel.params, launch.args).map_err(|source| {
            Error::new(format!("launching {}", kernel.name()), GpuError::from(source))
        })?;
        ClusterError::check(kernel.name(), kernel.cluster, launch.grid).map_err(|source| {
            Error::new(format!("launching {}", kernel.name()), GpuError::from(source))
        })?;
        let mut packed = Args::new();
        for arg in launch.args {
            match arg {
                Arg::U32(value) => packed.push(*value),
                Arg::U64(value) => packed.push(*value),
                Arg::TensorMap(map) => packed.push(self.encode(map)?),
            }
        }
        let shape = LaunchShape {
            grid: [launch.grid[0], launch.grid[1], 1],
            threads: [kernel.threads, 1, 1],
            dynamic_smem_bytes: kernel.smem_bytes,
        };
        // A kernel that does not wait would read what its predecessor has not written yet.
        let overlap_previous =
            launch.overlap_previous && self.overlaps && kernel.waits_for_previous;
        let attrs = LaunchAttrs { overlap_previous, ..LaunchAttrs::default() };
        let stream = StreamRef::promised(launch.stream.0);
        kernel
            .loaded
            .function
            .launch_with(stream, &shape, &attrs, &packed)
            .map_err(|source| Error::new(format!("launching {}", kernel.name()), source))
    }

    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.context
            .synchronize_stream(StreamRef::promised(stream.0))
            .map_err(|source| Error::new("waiting for a stream", source))
    }
}
