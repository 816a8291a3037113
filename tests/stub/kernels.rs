//! Modules, functions and launches.

use std::io::Write;

use super::*;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    out: *mut Handle,
    image: *const c_char,
    num: u32,
    options: *const i32,
    values: *const *mut c_void,
) -> i32 {
    need_context!();
    *out = fresh(&mut state());
    assemble(&CStr::from_ptr(image).to_string_lossy(), num, options, values)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(out: *mut Handle, image: *const u8) -> i32 {
    need_context!();
    *out = fresh(&mut state());
    let magic = std::slice::from_raw_parts(image, 4);
    if magic == b"\x7fELF" { 0 } else { INVALID_IMAGE }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(_module: Handle) -> i32 {
    need_context!();
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    out: *mut Handle,
    _module: Handle,
    name: *const c_char,
) -> i32 {
    need_context!();
    let name = CStr::from_ptr(name).to_string_lossy().into_owned();
    let state = &mut *state();
    // The one that may come out of a file, from an earlier process.
    let add_one = (name == "add_one").then(|| vec![(0, 8), (8, 8), (16, 4)]);
    let Some(params) = add_one.or_else(|| state.kernels.get(&name).cloned()) else {
        return NOT_FOUND;
    };
    *out = fresh(state);
    state.functions.insert(*out, (name, params));
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(out: *mut i32, attribute: i32, _f: Handle) -> i32 {
    *out = match attribute {
        0 => 512,
        1 => STATIC_SMEM,
        2 | 3 => 0,
        4 => 40,
        5 => 70,
        6 => 90,
        8 => state().max_dynamic_smem,
        _ => return INVALID_VALUE,
    };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_f: Handle, attribute: i32, value: i32) -> i32 {
    need_context!();
    if attribute != 8 || value > OPT_IN_SMEM - STATIC_SMEM {
        return INVALID_VALUE;
    }
    state().max_dynamic_smem = value;
    0
}

pub fn execute(launch: &Launch) -> i32 {
    if let Some(log) = option_env!("STUB_LAUNCH_LOG") {
        let file = std::fs::File::options().create(true).append(true).open(log);
        file.and_then(|mut file| writeln!(file, "{}", launch.line)).expect("the log is writable");
    }
    match launch.work {
        Work::AddOne { n: 0, .. } | Work::Nothing => {}
        Work::AddOne { dst, src, n } => {
            let bytes = n as usize * 4;
            if !owns(dst, bytes) || !owns(src, bytes) {
                return 700;
            }
            for idx in 0..n as usize {
                unsafe {
                    let value = (src as *const u32).add(idx).read();
                    (dst as *mut u32).add(idx).write(value.wrapping_add(1));
                }
            }
        }
        Work::EchoMap { dst, map } => {
            if !owns(dst, 128) {
                return 700;
            }
            unsafe { (dst as *mut [u64; 16]).write(map) };
        }
    }
    0
}

/// `how` is what the log says of the launch beside kernel and grid.
pub unsafe fn launch(
    function: Handle,
    grid_x: u32,
    smem: u32,
    stream: Handle,
    extra: *const *mut c_void,
    how: &str,
) -> i32 {
    let Some((name, params)) = state().functions.get(&function).cloned() else {
        return INVALID_HANDLE;
    };
    let wanted = params.last().map_or(0, |(offset, bytes)| offset + bytes);
    // Key 1 is the buffer, key 2 a pointer to its size, 0 ends.
    let (keys, bytes) = (std::slice::from_raw_parts(extra, 5), *(*extra.add(3)).cast::<usize>());
    if keys[0] as usize != 1 || keys[2] as usize != 2 || !keys[4].is_null() || bytes != wanted {
        return INVALID_VALUE;
    }
    let handle = use_handle(stream);
    if handle != 0 || grid_x == 4242 {
        return handle.max(if grid_x == 4242 { UNHEARD_OF } else { 0 });
    }
    if smem as i32 > state().max_dynamic_smem {
        return INVALID_VALUE;
    }
    let words = keys[1].cast::<u64>();
    let work = match &*name {
        "add_one" => Work::AddOne { dst: *words, src: *words.add(1), n: *words.add(2) as u32 },
        // The map is at the next multiple of 64.
        "echo_map" => Work::EchoMap { dst: *words, map: words.add(8).cast::<[u64; 16]>().read() },
        _ => Work::Nothing,
    };
    let launch = Launch { work, line: format!("{name} x{grid_x} {how}") };
    if let Some(recorded) = state().capturing.get_mut(&stream) {
        recorded.push(launch);
        return 0;
    }
    execute(&launch)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: u32,
    _grid_y: u32,
    _grid_z: u32,
    _threads_x: u32,
    _threads_y: u32,
    _threads_z: u32,
    smem: u32,
    stream: Handle,
    params: *const *mut c_void,
    extra: *const *mut c_void,
) -> i32 {
    need_context!();
    if !params.is_null() {
        return INVALID_VALUE;
    }
    launch(function, grid_x, smem, stream, extra, "plain")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    out: *mut i32,
    _function: Handle,
    threads: i32,
    _smem: usize,
) -> i32 {
    *out = 2048 / threads;
    0
}
