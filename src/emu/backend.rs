//! `EmuBackend`: the emulator behind the calls that a GPU answers to.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard};

use super::grid::{self, Options};
use super::memory::{Memory, MemoryError};
use super::program::Program;
use super::report::{Fault, LaunchReport};
use crate::asm::{Diagnostics, Module};
use crate::backend::{
    Arg, ArgumentsError, Backend, DevicePtr, Error, Kernel, Launch, Stream, TensorMapError,
};
use crate::target::{DeviceSpec, PtxIsa, SmArch};

/// Why a module was not loaded or a launch refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmuError {
    /// The kernel did something wrong, or the emulator could not go on.
    #[error(transparent)]
    Fault(#[from] Box<Fault>),
    /// Device memory was addressed wrongly by the host.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The module breaks a rule or does not fit the device.
    #[error(transparent)]
    Refused(#[from] Diagnostics),
    /// The CTA is empty or too large.
    #[error("{module} has {threads} threads per CTA; choose 1 to {MAX_THREADS}")]
    Threads {
        /// The entry's name.
        module: String,
        /// Threads of a CTA.
        threads: u32,
    },
    /// The arguments are not those of the entry.
    #[error(transparent)]
    Arguments(#[from] ArgumentsError),
    /// A tensor map breaks a rule of the hardware.
    #[error(transparent)]
    TensorMap(#[from] TensorMapError),
    /// The grid does not consist of whole clusters.
    #[error("{module} launched with {x} CTAs in x; its clusters have {cluster}: use a multiple")]
    Cluster {
        /// The entry's name.
        module: String,
        /// CTAs in x.
        x: u32,
        /// CTAs of a cluster.
        cluster: u32,
    },
    /// The grid is empty or beyond what is kept resident.
    #[error(
        "{module} launched with a grid of ({x}, {y}); each must be at least 1 and their product at \
         most {MAX_CTAS}: all CTAs are resident"
    )]
    Grid {
        /// The entry's name.
        module: String,
        /// CTAs in x.
        x: u32,
        /// CTAs in y.
        y: u32,
    },
    /// The kernel was loaded by another backend.
    #[error("kernel {0} was not loaded by an emulator; load its module here")]
    ForeignKernel(String),
}

/// Most CTAs of a launch.
const MAX_CTAS: u64 = 1 << 16;
/// Most threads of a CTA. Source: CUDA C++ Programming Guide, "Compute Capabilities".
const MAX_THREADS: u32 = 1024;

/// A kernel that the emulator has loaded.
#[derive(Debug)]
pub struct EmuKernel {
    program: Program,
}

impl EmuKernel {
    /// Decodes a module without verifying it: what a program does is what its run reports.
    pub fn new(module: &Module) -> Self {
        Self { program: Program::new(module) }
    }

    /// Runs a grid.
    ///
    /// # Errors
    /// A fault, or arguments that are not the entry's.
    pub fn run(
        &self,
        grid: [u32; 2],
        args: &[Arg],
        memory: &mut Memory,
        options: &Options,
    ) -> Result<LaunchReport, EmuError> {
        let module = || self.program.name.clone();
        let threads = self.program.threads;
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(EmuError::Threads { module: module(), threads });
        }
        let num_ctas = u64::from(grid[0]) * u64::from(grid[1]);
        if !(1..=MAX_CTAS).contains(&num_ctas) {
            return Err(EmuError::Grid { module: module(), x: grid[0], y: grid[1] });
        }
        if !grid[0].is_multiple_of(self.program.cluster) {
            let cluster = self.program.cluster;
            return Err(EmuError::Cluster { module: module(), x: grid[0], cluster });
        }
        ArgumentsError::check(&self.program.name, &self.program.params, args)?;
        let mut values = Vec::with_capacity(args.len());
        let mut maps = Vec::with_capacity(args.len());
        for arg in args {
            let (value, map) = match arg {
                Arg::U32(value) => (u64::from(*value), None),
                Arg::U64(value) => (*value, None),
                Arg::TensorMap(map) => {
                    map.check()?;
                    (0, Some(*map))
                }
            };
            values.push(value);
            maps.push(map);
        }
        Ok(grid::run(&self.program, grid, &values, &maps, memory, options)?)
    }
}

impl Kernel for EmuKernel {
    fn name(&self) -> &str {
        &self.program.name
    }

    fn num_regs(&self) -> Option<u32> {
        None
    }

    fn local_bytes(&self) -> Option<u32> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Runs a module's grid once on `memory`.
///
/// # Errors
/// A fault, or arguments that are not the entry's.
pub fn run(
    module: &Module,
    grid: [u32; 2],
    args: &[Arg],
    memory: &mut Memory,
    options: &Options,
) -> Result<LaunchReport, EmuError> {
    EmuKernel::new(module).run(grid, args, memory, options)
}

/// The emulator as a device.
#[derive(Debug)]
pub struct EmuBackend {
    device: DeviceSpec,
    options: Options,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    report: Option<LaunchReport>,
}

impl EmuBackend {
    /// An emulator that claims to be `device`.
    pub fn new(device: DeviceSpec) -> Self {
        Self { device, options: Options::default(), state: Mutex::default() }
    }

    /// An Ampere card, with an A100's shared memory, cut down to `num_sms`.
    pub fn like_sm80(num_sms: u32) -> Self {
        Self::like(80, num_sms)
    }

    /// A Hopper card, with an H200's shared memory, cut down to `num_sms`.
    pub fn h200_like(num_sms: u32) -> Self {
        Self::like(90, num_sms)
    }

    fn like(sm: u16, num_sms: u32) -> Self {
        let arch = SmArch::baseline(sm);
        let spec = arch.spec().expect("the architectures of the presets are in the table");
        Self::new(DeviceSpec {
            name: format!("emulated {arch}, {num_sms} SMs"),
            arch,
            isa: PtxIsa::of_driver(i32::MAX).expect("the table of drivers is not empty"),
            num_sms,
            l2_bytes: 40 << 20,
            smem_per_cta_bytes: spec.smem_per_cta_bytes,
        })
    }

    /// The same with other options.
    pub fn with_options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// The figures of the last launch that finished.
    pub fn last_report(&self) -> Option<LaunchReport> {
        self.state().report.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere while the lock was held leaves plain data behind.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Backend for EmuBackend {
    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let ptr = self.state().memory.alloc(bytes);
        ptr.map(DevicePtr).map_err(|e| Error::new("cannot allocate device memory", e))
    }

    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        let freed = self.state().memory.free(ptr.0);
        freed.map_err(|e| Error::new("cannot free device memory", e))
    }

    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        let done = self.state().memory.upload(ptr.0, bytes);
        done.map_err(|e| Error::new("cannot upload", e))
    }

    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        let mut state = self.state();
        state.memory.settle();
        let done = state.memory.download(ptr.0, bytes);
        done.map_err(|e| Error::new("cannot download", e))
    }

    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error> {
        let what = || format!("cannot load {}", module.entry.name);
        module.verify_for(&self.device).map_err(|e| Error::new(what(), EmuError::from(e)))?;
        Ok(Arc::new(EmuKernel::new(module)))
    }

    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error> {
        let failed = |e: EmuError| Error::new(format!("cannot run {}", kernel.name()), e);
        let foreign = || failed(EmuError::ForeignKernel(kernel.name().to_owned()));
        let ours = kernel.as_any().downcast_ref::<EmuKernel>().ok_or_else(foreign)?;
        let mut state = self.state();
        let overlap = self.options.overlap || launch.overlap_previous;
        let options = Options { overlap, ..self.options.clone() };
        let ran = ours.run(launch.grid, launch.args, &mut state.memory, &options);
        let report = ran.map_err(failed)?;
        state.report = Some(report);
        Ok(())
    }

    fn synchronize(&self, _stream: Stream) -> Result<(), Error> {
        self.state().memory.settle();
        Ok(())
    }
}
