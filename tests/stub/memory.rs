//! Memory: allocations of a context, copies and fills within them.

use super::*;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut Address, bytes: usize) -> i32 {
    let context = need_context!();
    if bytes == 0 {
        return INVALID_VALUE;
    }
    if bytes > 1 << 30 {
        return 2;
    }
    // Not zero, so that a forgotten fill shows.
    let memory = Box::leak(vec![0xa5_u64; bytes.div_ceil(8)].into_boxed_slice());
    *out = memory.as_mut_ptr() as Address;
    state().allocations.insert(*out, (bytes, context));
    0
}

/// Whether this context owns these bytes.
pub fn owns(address: Address, bytes: usize) -> bool {
    let state = state();
    let found = state.allocations.range(..=address).next_back();
    found.is_some_and(|(start, (size, context))| {
        Some(*context) == current() && address + bytes as u64 <= start + *size as u64
    })
}

/// Makes the copies that wait on a stream, or on all.
pub fn settle(stream: Option<Handle>) {
    let mut state = state();
    let pending = match stream {
        Some(stream) => state.pending.remove(&stream).unwrap_or_default(),
        None => std::mem::take(&mut state.pending).into_values().flatten().collect(),
    };
    for (to, from, bytes) in pending {
        // SAFETY: both ranges were there when the copy was asked for, and memory of this stand-in is never given back.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes) };
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: Address) -> i32 {
    settle(None);
    if !owns(address, 1) {
        return INVALID_VALUE;
    }
    state().allocations.remove(&address).map_or(INVALID_VALUE, |_| 0)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) -> i32 {
    need_context!();
    *out = Box::leak(vec![0xa5_u64; bytes.div_ceil(8)].into_boxed_slice()).as_mut_ptr().cast();
    state().pinned.insert(*out as usize, bytes);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(memory: *mut c_void) -> i32 {
    need_context!();
    let Some(bytes) = state().pinned.remove(&(memory as usize)) else { return INVALID_VALUE };
    // Whatever is still copied from it gets this.
    memory.cast::<u8>().write_bytes(0xee, bytes);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32 {
    need_context!();
    (*free, *total) = (7 << 30, 8 << 30);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: Address, from: *const u8, bytes: usize) -> i32 {
    if !owns(to, bytes) {
        return INVALID_VALUE;
    }
    std::ptr::copy(from, to as *mut u8, bytes);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut u8, from: Address, bytes: usize) -> i32 {
    if !owns(from, bytes) {
        return INVALID_VALUE;
    }
    std::ptr::copy(from as *const u8, to, bytes);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: Address,
    from: *const u8,
    bytes: usize,
    stream: Handle,
) -> i32 {
    if stream == 0 {
        return cuMemcpyHtoD_v2(to, from, bytes);
    }
    if !owns(to, bytes) {
        return INVALID_VALUE;
    }
    state().pending.entry(stream).or_default().push((to, from as usize, bytes));
    check_handle(stream)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut u8,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> i32 {
    use_handle(stream).max(cuMemcpyDtoH_v2(to, from, bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: Address,
    from: Address,
    bytes: usize,
    stream: Handle,
) -> i32 {
    if !owns(from, bytes) {
        return INVALID_VALUE;
    }
    use_handle(stream).max(cuMemcpyHtoD_v2(to, from as *const u8, bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8_v2(to: Address, value: u8, count: usize) -> i32 {
    if !owns(to, count) {
        return INVALID_VALUE;
    }
    (to as *mut u8).write_bytes(value, count);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemsetD8Async(
    to: Address,
    value: u8,
    count: usize,
    stream: Handle,
) -> i32 {
    use_handle(stream).max(cuMemsetD8_v2(to, value, count))
}
