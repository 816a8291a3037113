//! A stand-in for libcuda, compiled by the tests with rustc alone; no part of the crate.
//!
//! Two devices; device memory is host memory that belongs to a context; the kernels `add_one(dst, src, n)`
//! and `echo_map(dst, map)`, which writes the map's 128 bytes to `dst`, run when they are launched, any
//! other one does nothing. Like the real driver it refuses calls without a
//! current context and handles of another one. Copies from host memory on a stream of one's own happen as late as they may:
//! when that stream, or an event on it, is waited for or used. With `--cfg full` it also has capture, graphs and
//! the newer launch call; without, it exports what CUDA 11.0 has and we require, no more. `--cfg
//! no_link` takes the linker away, `--cfg no_param_info` the question for parameters.
//!
//! Tools that watch the driver report refused questions that a program answers for itself; here
//! `cuCtxSynchronize` fails with 4243 after one about a parameter that a kernel does not have, and after
//! the same question asked more than a few times.
//!
//! STUB_DRIVER_VERSION (13000), STUB_PTX_CEILING (90), STUB_CAPABILITY (90) and STUB_LAUNCH_LOG (a file that
//! each launch adds a line to) are read when it is compiled.
#![allow(non_snake_case, unsafe_op_in_unsafe_fn, clippy::missing_safety_doc)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::Mutex;

type Address = u64;
type Handle = usize;

const INVALID_VALUE: i32 = 1;
const NO_DEVICE: i32 = 101;
const INVALID_IMAGE: i32 = 200;
const INVALID_CONTEXT: i32 = 201;
const INVALID_PTX: i32 = 218;
const UNSUPPORTED_PTX_VERSION: i32 = 222;
const INVALID_HANDLE: i32 = 400;
const NOT_FOUND: i32 = 500;
const NOT_PERMITTED: i32 = 800;
const INVALID_CLUSTER_SIZE: i32 = 912;
/// A code that no header knows.
const UNHEARD_OF: i32 = 4242;
const MISUSED: i32 = 4243;

const DEVICES: i32 = 2;
const STATIC_SMEM: i32 = 1024;
const OPT_IN_SMEM: i32 = 232448;

struct State {
    retained: [i32; DEVICES as usize],
    allocations: BTreeMap<Address, (usize, Handle)>,
    /// Sizes of pinned host memory.
    pinned: BTreeMap<usize, usize>,
    /// Copies from host memory on each stream that nobody has waited for: target, source, bytes.
    pending: BTreeMap<Handle, Vec<(Address, usize, usize)>>,
    /// The stream that each event was recorded on last.
    recorded: BTreeMap<Handle, Handle>,
    capturing: BTreeMap<Handle, Vec<Launch>>,
    graphs: BTreeMap<Handle, Vec<Launch>>,
    /// Parameters, as offset and size, of each kernel that was assembled, and of each function.
    kernels: BTreeMap<String, Vec<(usize, usize)>>,
    functions: BTreeMap<Handle, (String, Vec<(usize, usize)>)>,
    /// How often each parameter was asked for.
    asked: BTreeMap<(Handle, usize), u32>,
    misused: bool,
    max_dynamic_smem: i32,
    next: Handle,
}

/// A launch, as a graph keeps it.
#[derive(Clone)]
struct Launch {
    work: Work,
    /// Its line in the log.
    line: String,
}

/// What a kernel does.
#[derive(Clone)]
enum Work {
    AddOne { dst: Address, src: Address, n: u32 },
    EchoMap { dst: Address, map: [u64; 16] },
    Nothing,
}

static STATE: Mutex<State> = Mutex::new(State {
    retained: [0; DEVICES as usize],
    allocations: BTreeMap::new(),
    pinned: BTreeMap::new(),
    pending: BTreeMap::new(),
    recorded: BTreeMap::new(),
    capturing: BTreeMap::new(),
    graphs: BTreeMap::new(),
    kernels: BTreeMap::new(),
    functions: BTreeMap::new(),
    asked: BTreeMap::new(),
    misused: false,
    max_dynamic_smem: 49152 - STATIC_SMEM,
    next: 0x100,
});

thread_local! {
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

fn state() -> std::sync::MutexGuard<'static, State> {
    STATE.lock().unwrap()
}

fn current() -> Option<Handle> {
    STACK.with(|stack| stack.borrow().last().copied()).filter(|context| *context != 0)
}

fn context_of(device: i32) -> Handle {
    0xc0de_0000 + device as usize
}

fn version() -> i32 {
    option_env!("STUB_DRIVER_VERSION").unwrap_or("13000").parse().unwrap()
}

fn capability() -> i32 {
    option_env!("STUB_CAPABILITY").unwrap_or("90").parse().unwrap()
}

fn fresh(state: &mut State) -> Handle {
    state.next += 1;
    state.next
}

macro_rules! need_context {
    () => {
        match current() {
            Some(context) => context,
            None => return INVALID_CONTEXT,
        }
    };
}

// After the macro, which they use.
mod kernels;
#[cfg(not(no_link))]
mod link;
mod memory;
#[cfg(full)]
mod newer;

#[cfg(full)]
use kernels::{execute, launch};
use memory::{owns, settle};

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> i32 {
    if flags == 0 { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(out: *mut i32) -> i32 {
    *out = version();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: i32, out: *mut *const c_char) -> i32 {
    let name = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        NO_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
        UNSUPPORTED_PTX_VERSION => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        _ => {
            *out = std::ptr::null();
            return INVALID_VALUE;
        }
    };
    *out = name.as_ptr();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: i32, out: *mut *const c_char) -> i32 {
    let known = cuGetErrorName(code, out);
    if known == 0 {
        *out = c"text of the stand-in".as_ptr();
    }
    known
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(out: *mut i32) -> i32 {
    *out = DEVICES;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(out: *mut i32, ordinal: i32) -> i32 {
    *out = ordinal;
    if (0..DEVICES).contains(&ordinal) { 0 } else { NO_DEVICE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(out: *mut c_char, len: i32, device: i32) -> i32 {
    let name = CString::new(format!("Stand-in {device}")).unwrap();
    let bytes = name.as_bytes_with_nul();
    if bytes.len() > len as usize {
        return INVALID_VALUE;
    }
    std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len());
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(out: *mut usize, _device: i32) -> i32 {
    *out = 8 << 30;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(out: *mut i32, attribute: i32, _device: i32) -> i32 {
    *out = match attribute {
        1 | 2 | 3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        16 => 132,
        38 => 50 << 20,
        75 => capability() / 10,
        76 => capability() % 10,
        81 => 233472,
        97 => OPT_IN_SMEM,
        120 if cfg!(full) => (capability() >= 90) as i32,
        // Clocks, bus width and, in an old driver, clusters: it does not know them.
        _ => return INVALID_VALUE,
    };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut Handle, device: i32) -> i32 {
    state().retained[device as usize] += 1;
    *out = context_of(device);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> i32 {
    state().retained[device as usize] -= 1;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(out: *mut Handle) -> i32 {
    *out = current().unwrap_or(0);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(out: *mut i32) -> i32 {
    let context = need_context!();
    *out = (context & 0xffff) as i32;
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> i32 {
    STACK.with(|stack| stack.borrow_mut().push(context));
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(out: *mut Handle) -> i32 {
    match STACK.with(|stack| stack.borrow_mut().pop()) {
        Some(context) => {
            *out = context;
            0
        }
        None => INVALID_CONTEXT,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> i32 {
    need_context!();
    settle(None);
    if state().misused { MISUSED } else { 0 }
}

/// A stream or an event: the context is in its upper half.
unsafe fn create(out: *mut Handle) -> i32 {
    let context = need_context!();
    *out = fresh(&mut state()) | (context << 32);
    0
}

fn check_handle(handle: Handle) -> i32 {
    let context = need_context!();
    if handle == 0 || handle >> 32 == context { 0 } else { INVALID_HANDLE }
}

/// Checks a stream or an event and lets everything that it stands for happen.
fn use_handle(handle: Handle) -> i32 {
    let stream = state().recorded.get(&handle).copied().unwrap_or(handle);
    settle(Some(stream));
    check_handle(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut Handle, flags: u32) -> i32 {
    if flags > 1 { INVALID_VALUE } else { create(out) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> i32 {
    use_handle(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Handle) -> i32 {
    if state().capturing.contains_key(&stream) { NOT_PERMITTED } else { use_handle(stream) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Handle) -> i32 {
    use_handle(stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: u32) -> i32 {
    if flags != 0 { INVALID_VALUE } else { use_handle(stream).max(use_handle(event)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, out: *mut i32) -> i32 {
    *out = state().capturing.contains_key(&stream) as i32;
    use_handle(stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut Handle, flags: u32) -> i32 {
    if flags & !2 != 0 { INVALID_VALUE } else { create(out) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> i32 {
    check_handle(event)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> i32 {
    state().recorded.insert(event, stream);
    check_handle(event).max(check_handle(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Handle) -> i32 {
    use_handle(event)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> i32 {
    use_handle(event)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(out: *mut f32, start: Handle, end: Handle) -> i32 {
    *out = 0.25;
    use_handle(start).max(use_handle(end))
}

/// Writes into the log buffer that an option names (3 information, 5 errors).
unsafe fn write_log(
    which: i32,
    text: &str,
    num: u32,
    options: *const i32,
    values: *const *mut c_void,
) {
    let option = |wanted| (0..num as usize).find(|idx| *options.add(*idx) == wanted);
    if let (Some(buffer), Some(size)) = (option(which), option(which + 1)) {
        let (buffer, size) = ((*values.add(buffer)).cast::<u8>(), *values.add(size) as usize);
        let len = text.len().min(size - 1);
        std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, len);
        *buffer.add(len) = 0;
    }
}

/// Name and parameters of the first entry of a text.
fn entry_of(ptx: &str) -> Option<(String, Vec<(usize, usize)>)> {
    let (name, rest) = ptx.split_once(".entry ")?.1.split_once('(')?;
    let mut params: Vec<(usize, usize)> = Vec::new();
    for param in rest.split_once(')')?.0.split(".param").skip(1) {
        let (bytes, align) = match param {
            map if map.contains(".b8") && map.contains("[128]") => (128, 64),
            wide if wide.contains("64") => (8, 8),
            _ => (4, 4),
        };
        let end = params.last().map_or(0, |(offset, bytes)| offset + bytes);
        // Parameters begin in the middle of a line of the constant bank, on sm_90 at 0x210.
        let bank = if capability() == 90 { 0x210 } else { 0x380 };
        params.push(((bank + end).next_multiple_of(align) - bank, bytes));
    }
    Some((name.to_owned(), params))
}

/// Judges PTX as an assembler: version, then lines with `bad`.
unsafe fn assemble(ptx: &str, num: u32, options: *const i32, values: *const *mut c_void) -> i32 {
    let ceiling: u32 = option_env!("STUB_PTX_CEILING").unwrap_or("90").parse().unwrap();
    let line = ptx.lines().find_map(|line| line.strip_prefix(".version ")).unwrap_or("9.9");
    let wanted: u32 = line.trim().replace('.', "").parse().unwrap_or(99);
    if wanted > ceiling {
        return UNSUPPORTED_PTX_VERSION;
    }
    if let Some(idx) = ptx.lines().position(|line| line.contains("bad")) {
        let log = format!("ptxas application ptx input, line {}; error   : Unknown", idx + 1);
        write_log(5, &log, num, options, values);
        return INVALID_PTX;
    }
    state().kernels.extend(entry_of(ptx));
    let advisory = if ptx.contains("wgmma") { "ptxas info : (C7510) serialized\n" } else { "" };
    let info = format!("ptxas info : Used 40 registers\n{advisory}");
    write_log(3, &info, num, options, values);
    0
}
