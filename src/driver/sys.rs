//! The driver's functions, resolved at run time, with integers where C has enums.
//!
//! Owns the one table of function pointers and the constants. Each row of [`driver_api`] becomes a
//! field and a method of the same name as the exported symbol (versioned where the driver versions
//! it), whose result code is already turned into an [`Error`]. Rows under `required` are those of
//! CUDA 11.0: a driver without one of them is refused at load. Rows under `optional` may be absent;
//! calling such a method then is `Error::MissingSymbol`. A library once opened stays open for the
//! life of the process.
//!
//! Source: CUDA Driver API reference; `cuda.h` of CUDA 13.5 for values and layouts.
#![allow(non_snake_case, clippy::too_many_arguments)]

use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use libloading::Library;

use super::error::{Error, Result};
use crate::target::PtxIsa;

#[cfg(feature = "cuda-driver-sys")]
pub(super) use cuda_driver_sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUlinkState,
    CUmodule, CUstream,
};

#[cfg(not(feature = "cuda-driver-sys"))]
pub(super) use own_aliases::*;

/// The same aliases for programs that get libcuda by another route.
#[cfg(not(feature = "cuda-driver-sys"))]
mod own_aliases {
    use std::ffi::{c_int, c_ulonglong, c_void};
    pub type CUdevice = c_int;
    pub type CUdeviceptr = c_ulonglong;
    pub type CUcontext = *mut c_void;
    pub type CUmodule = *mut c_void;
    pub type CUfunction = *mut c_void;
    pub type CUstream = *mut c_void;
    pub type CUevent = *mut c_void;
    pub type CUgraph = *mut c_void;
    pub type CUgraphExec = *mut c_void;
    pub type CUlinkState = *mut c_void;
}

// Result codes that we decide on.
pub(super) const ERROR_INVALID_IMAGE: i32 = 200;
pub(super) const ERROR_UNSUPPORTED_PTX_VERSION: i32 = 222;
pub(super) const ERROR_NOT_READY: i32 = 600;
pub(super) const ERROR_STREAM_CAPTURE_IMPLICIT: i32 = 906;

// CUdevice_attribute.
pub(super) const DEVICE_MAX_THREADS_PER_CTA: i32 = 1;
/// First of three consecutive attributes: x, y, z.
pub(super) const DEVICE_MAX_CTA_DIM_X: i32 = 2;
/// First of three consecutive attributes: x, y, z.
pub(super) const DEVICE_MAX_GRID_DIM_X: i32 = 5;
pub(super) const DEVICE_CLOCK_RATE_KHZ: i32 = 13;
pub(super) const DEVICE_NUM_SMS: i32 = 16;
pub(super) const DEVICE_MEMORY_CLOCK_RATE_KHZ: i32 = 36;
pub(super) const DEVICE_MEMORY_BUS_WIDTH_BITS: i32 = 37;
pub(super) const DEVICE_L2_BYTES: i32 = 38;
pub(super) const DEVICE_CAPABILITY_MAJOR: i32 = 75;
pub(super) const DEVICE_CAPABILITY_MINOR: i32 = 76;
pub(super) const DEVICE_SMEM_PER_SM_BYTES: i32 = 81;
pub(super) const DEVICE_SMEM_PER_CTA_OPTIN_BYTES: i32 = 97;
pub(super) const DEVICE_CLUSTER_LAUNCH: i32 = 120;

// CUfunction_attribute.
pub(super) const FUNC_MAX_THREADS_PER_CTA: i32 = 0;
pub(super) const FUNC_STATIC_SMEM_BYTES: i32 = 1;
pub(super) const FUNC_CONST_BYTES: i32 = 2;
pub(super) const FUNC_LOCAL_BYTES: i32 = 3;
pub(super) const FUNC_NUM_REGS: i32 = 4;
pub(super) const FUNC_PTX_VERSION: i32 = 5;
pub(super) const FUNC_BINARY_VERSION: i32 = 6;
pub(super) const FUNC_MAX_DYNAMIC_SMEM_BYTES: i32 = 8;
pub(super) const FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: i32 = 14;

// CUjit_option and CUjitInputType.
pub(super) const JIT_MAX_REGISTERS: i32 = 0;
pub(super) const JIT_INFO_LOG_BUFFER: i32 = 3;
pub(super) const JIT_INFO_LOG_BUFFER_SIZE_BYTES: i32 = 4;
pub(super) const JIT_ERROR_LOG_BUFFER: i32 = 5;
pub(super) const JIT_ERROR_LOG_BUFFER_SIZE_BYTES: i32 = 6;
pub(super) const JIT_OPTIMIZATION_LEVEL: i32 = 7;
pub(super) const JIT_LOG_VERBOSE: i32 = 12;
pub(super) const JIT_GENERATE_LINE_INFO: i32 = 13;
pub(super) const JIT_INPUT_PTX: i32 = 1;

// CUlaunchAttributeID.
pub(super) const LAUNCH_COOPERATIVE: u32 = 2;
pub(super) const LAUNCH_CLUSTER_DIMENSION: u32 = 4;
pub(super) const LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;

// CUtensorMapDataType, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion and
// CUtensorMapFloatOOBfill.
pub(super) const TENSOR_FLOAT16: i32 = 6;
pub(super) const TENSOR_NO_INTERLEAVE: i32 = 0;
pub(super) const TENSOR_NO_SWIZZLE: i32 = 0;
pub(super) const TENSOR_SWIZZLE_128B: i32 = 3;
pub(super) const TENSOR_L2_PROMOTION_256B: i32 = 3;
pub(super) const TENSOR_ZEROS_OUTSIDE: i32 = 0;

// Stream and event flags, CUstreamCaptureMode, CUstreamCaptureStatus.
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
pub(super) const EVENT_DEFAULT: u32 = 0;
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
pub(super) const CAPTURE_STATUS_NONE: i32 = 0;

// Keys of the `extra` array of a launch.
pub(super) const LAUNCH_PARAM_END: *mut c_void = std::ptr::null_mut();
pub(super) const LAUNCH_PARAM_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
pub(super) const LAUNCH_PARAM_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);

/// `CUlaunchAttribute`: a 4-byte id, 4 bytes of padding and a 64-byte union, 8-byte aligned.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LaunchAttribute {
    pub id: u32,
    pub padding: u32,
    /// The union as words: the members that we use are int or three unsigned ints, at its start.
    pub value: [u64; 8],
}

impl LaunchAttribute {
    pub(super) const IGNORE: Self = Self { id: 0, padding: 0, value: [0; 8] };

    /// An attribute whose value starts with three 32-bit words.
    pub(super) fn of_words(id: u32, words: [u32; 3]) -> Self {
        let mut value = [0; 8];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut value);
        bytes[..12].copy_from_slice(bytemuck::bytes_of(&words));
        Self { id, padding: 0, value }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub smem_bytes: u32,
    pub stream: CUstream,
    pub attrs: *const LaunchAttribute,
    pub num_attrs: u32,
}

const _: () = {
    assert!(size_of::<LaunchAttribute>() == 72 && align_of::<LaunchAttribute>() == 8);
    // Layouts of a 64-bit system, as a C compiler lays out the header's structs.
    #[cfg(target_pointer_width = "64")]
    assert!(size_of::<LaunchConfig>() == 56 && std::mem::offset_of!(LaunchConfig, stream) == 32);
    #[cfg(target_pointer_width = "64")]
    assert!(std::mem::offset_of!(LaunchConfig, num_attrs) == 48);
    assert!(size_of::<CUdevice>() == 4 && size_of::<CUdeviceptr>() == 8);
};

macro_rules! driver_api {
    (
        required { $( $required:ident($( $rarg:ident: $rtype:ty ),*); )* }
        optional { $( $optional:ident($( $oarg:ident: $otype:ty ),*); )* }
    ) => {
        /// The function table of one driver library.
        pub(super) struct Api {
            version: DriverVersion,
            $( $required: unsafe extern "system" fn($($rtype),*) -> i32, )*
            $( $optional: Option<unsafe extern "system" fn($($otype),*) -> i32>, )*
        }

        // Some rows are called through their field alone.
        #[allow(dead_code)]
        impl Api {
            fn resolve(library: &Library, version: DriverVersion) -> Result<Self> {
                Ok(Self {
                    version,
                    $( $required: {
                        // SAFETY: the symbol is this driver function; the row gives its signature.
                        let symbol = unsafe { library.get(concat!(stringify!($required), "\0")) };
                        *symbol.map_err(|_| Error::MissingSymbol {
                            symbol: stringify!($required),
                            driver_version: version,
                        })?
                    }, )*
                    $( $optional: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(concat!(stringify!($optional), "\0")) };
                        symbol.ok().map(|symbol| *symbol)
                    }, )*
                })
            }

            $(
                #[inline]
                pub(super) unsafe fn $required(&self, $($rarg: $rtype),*) -> Result<()> {
                    // SAFETY: the caller vouches for the arguments.
                    let code = unsafe { (self.$required)($($rarg),*) };
                    self.check(stringify!($required), code)
                }
            )*
            $(
                #[inline]
                pub(super) unsafe fn $optional(&self, $($oarg: $otype),*) -> Result<()> {
                    let Some(function) = self.$optional else {
                        return Err(Error::MissingSymbol {
                            symbol: stringify!($optional),
                            driver_version: self.version,
                        });
                    };
                    // SAFETY: the caller vouches for the arguments.
                    let code = unsafe { function($($oarg),*) };
                    self.check(stringify!($optional), code)
                }
            )*

            /// Whether the driver has this optional function.
            pub(super) fn has(&self, symbol: &str) -> bool {
                match symbol {
                    $( stringify!($optional) => self.$optional.is_some(), )*
                    _ => false,
                }
            }
        }

        /// Functions that every driver must have, and those that may be absent.
        pub(super) const REQUIRED: &[&str] = &[$(stringify!($required)),*];
        pub(super) const OPTIONAL: &[&str] = &[$(stringify!($optional)),*];
    };
}

driver_api! {
    required {
        cuInit(flags: u32);
        cuGetErrorName(code: i32, name: *mut *const c_char);
        cuGetErrorString(code: i32, text: *mut *const c_char);
        cuDeviceGetCount(count: *mut i32);
        cuDeviceGet(device: *mut CUdevice, ordinal: i32);
        cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice);
        cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: CUdevice);
        cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        cuCtxGetCurrent(context: *mut CUcontext);
        cuCtxGetDevice(device: *mut CUdevice);
        cuCtxPushCurrent_v2(context: CUcontext);
        cuCtxPopCurrent_v2(context: *mut CUcontext);
        cuCtxSynchronize();
        cuStreamCreate(stream: *mut CUstream, flags: u32);
        cuStreamDestroy_v2(stream: CUstream);
        cuStreamSynchronize(stream: CUstream);
        cuStreamQuery(stream: CUstream);
        cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
        cuStreamIsCapturing(stream: CUstream, status: *mut i32);
        cuEventCreate(event: *mut CUevent, flags: u32);
        cuEventDestroy_v2(event: CUevent);
        cuEventRecord(event: CUevent, stream: CUstream);
        cuEventSynchronize(event: CUevent);
        cuEventQuery(event: CUevent);
        cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
        cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize);
        cuMemFree_v2(pointer: CUdeviceptr);
        cuMemAllocHost_v2(pointer: *mut *mut c_void, bytes: usize);
        cuMemFreeHost(pointer: *mut c_void);
        cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize);
        cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize);
        cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        cuMemsetD8_v2(to: CUdeviceptr, value: u8, count: usize);
        cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream);
        cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, num_options: u32, options: *mut i32, values: *mut *mut c_void);
        cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        cuModuleUnload(module: CUmodule);
        cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        cuFuncGetAttribute(value: *mut i32, attribute: i32, function: CUfunction);
        cuFuncSetAttribute(function: CUfunction, attribute: i32, value: i32);
        cuLaunchKernel(function: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, threads_x: u32, threads_y: u32, threads_z: u32, smem_bytes: u32, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(count: *mut i32, function: CUfunction, threads: i32, smem_bytes: usize);
        cuLinkCreate_v2(num_options: u32, options: *mut i32, values: *mut *mut c_void, state: *mut CUlinkState);
        cuLinkAddData_v2(state: CUlinkState, kind: i32, data: *mut c_void, bytes: usize, name: *const c_char, num_options: u32, options: *mut i32, values: *mut *mut c_void);
        cuLinkComplete(state: CUlinkState, image: *mut *mut c_void, bytes: *mut usize);
        cuLinkDestroy(state: CUlinkState);
    }
    optional {
        cuStreamBeginCapture_v2(stream: CUstream, mode: i32);
        cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
        cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
        cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64);
        cuGraphInstantiate_v2(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut *mut c_void, log: *mut c_char, log_bytes: usize);
        cuGraphGetNodes(graph: CUgraph, nodes: *mut *mut c_void, count: *mut usize);
        cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
        cuGraphUpload(exec: CUgraphExec, stream: CUstream);
        cuGraphDestroy(graph: CUgraph);
        cuGraphExecDestroy(exec: CUgraphExec);
        cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream);
        cuLaunchKernelEx(config: *const LaunchConfig, function: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void);
        cuOccupancyMaxActiveClusters(count: *mut i32, function: CUfunction, config: *const LaunchConfig);
        cuTensorMapEncodeTiled(map: *mut u64, data_type: i32, rank: u32, address: CUdeviceptr, sizes: *const u64, strides: *const u64, tile: *const u32, steps: *const u32, interleave: i32, swizzle: i32, l2_promotion: i32, outside: i32);
        cuFuncLoad(function: CUfunction);
        cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize);
    }
}

impl Api {
    #[inline]
    fn check(&self, call: &'static str, code: i32) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: i32) -> Error {
        let name = self.text_of(self.cuGetErrorName, code);
        Error::Call {
            call,
            code,
            name: name.unwrap_or_else(|| "unknown error code".to_owned()),
            text: self.text_of(self.cuGetErrorString, code).unwrap_or_default(),
        }
    }

    fn text_of(
        &self,
        function: unsafe extern "system" fn(i32, *mut *const c_char) -> i32,
        code: i32,
    ) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: the driver writes one pointer; for an unknown code it returns an error and null.
        let status = unsafe { function(code, &mut text) };
        if status != 0 || text.is_null() {
            return None;
        }
        // SAFETY: a string constant of the library, which is never closed.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

/// A CUDA version as `cuDriverGetVersion` gives it: 1000 * major + 10 * minor. Zero is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverVersion(pub i32);

impl fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("version unknown"),
            version => write!(f, "{}.{}", version / 1000, version % 1000 / 10),
        }
    }
}

/// A CUDA driver library, opened and initialised.
pub struct Driver {
    pub(super) api: Api,
    library: String,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({}, CUDA {})", self.library, self.version())
    }
}

impl Driver {
    /// The driver of this process, opened at the first call: the library that `MAKAIRA_LIBCUDA`
    /// names, else the system's. The outcome is kept, also when it is an error.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<&'static Driver>> = OnceLock::new();
        DRIVER.get_or_init(Self::find).clone()
    }

    fn find() -> Result<&'static Self> {
        if let Some(name) = std::env::var_os("MAKAIRA_LIBCUDA") {
            return Self::open(name);
        }
        const NAMES: &[&str] =
            if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
        let mut reasons = Vec::new();
        for name in NAMES {
            match Self::open(name) {
                Err(Error::DriverUnavailable { why }) => reasons.push(why),
                outcome => return outcome,
            }
        }
        Err(Error::DriverUnavailable { why: reasons.join("; ") })
    }

    /// Opens the driver library of this name or path and initialises it. [`get`](Self::get) is what
    /// a program wants; this is for several drivers in one process (compatibility libraries,
    /// tests). The library stays open until the process ends.
    ///
    /// # Errors
    /// `DriverUnavailable` if it cannot be opened, `MissingSymbol` if it lacks a function
    /// of CUDA 11.0, `Call` if `cuInit` fails (for instance: no device).
    pub fn open(library: impl AsRef<Path>) -> Result<&'static Self> {
        let path = library.as_ref();
        // SAFETY: the library is the CUDA driver or a stand-in chosen by the user; its initialisers
        // are those that any CUDA program runs.
        let handle = unsafe { Library::new(path) }.map_err(|error| {
            let reason = error.to_string();
            let name = path.display().to_string();
            let why = if reason.contains(&name) { reason } else { format!("{name}: {reason}") };
            Error::DriverUnavailable { why }
        })?;
        // A CUDA library cannot be unloaded safely: handles and threads of its own outlive any
        // user.
        let handle: &'static Library = Box::leak(Box::new(handle));
        let api = Api::resolve(handle, version_of(handle)?)?;
        // SAFETY: flags must be zero.
        unsafe { api.cuInit(0) }?;
        log::debug!("driver {}: CUDA {}", path.display(), api.version);
        Ok(Box::leak(Box::new(Self { api, library: path.display().to_string() })))
    }

    /// The CUDA version that the driver implements.
    pub fn version(&self) -> DriverVersion {
        self.api.version
    }

    /// The newest PTX ISA that the driver assembles; `None` for a driver older than CUDA 11.0.
    pub fn ptx_ceiling(&self) -> Option<PtxIsa> {
        PtxIsa::of_driver(self.api.version.0)
    }

    /// Name or path under which the library was opened.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Functions that we can use and this driver lacks, by exported name.
    pub fn missing(&self) -> Vec<&'static str> {
        OPTIONAL.iter().copied().filter(|symbol| !self.api.has(symbol)).collect()
    }

    /// Functions without which no driver is accepted, by exported name.
    pub fn required() -> &'static [&'static str] {
        REQUIRED
    }
}

/// What the library reports, before anything else is resolved, so that errors can name it.
fn version_of(library: &Library) -> Result<DriverVersion> {
    let missing = |_| Error::MissingSymbol {
        symbol: "cuDriverGetVersion",
        driver_version: DriverVersion::default(),
    };
    let mut version = 0;
    // SAFETY: the signature of this function, which needs no initialisation and writes one int.
    let code = unsafe {
        let function: libloading::Symbol<unsafe extern "system" fn(*mut i32) -> i32> =
            library.get("cuDriverGetVersion\0").map_err(missing)?;
        function(&mut version)
    };
    Ok(DriverVersion(if code == 0 { version } else { 0 }))
}
