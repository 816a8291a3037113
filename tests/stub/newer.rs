//! What newer drivers have: capture, graphs, the launch call with attributes.

use super::*;

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: i32) -> i32 {
    if stream == 0 || !(0..3).contains(&mode) {
        return INVALID_VALUE;
    }
    state().capturing.insert(stream, Vec::new());
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: Handle, out: *mut Handle) -> i32 {
    let mut state = state();
    let Some(recorded) = state.capturing.remove(&stream) else { return 903 };
    *out = fresh(&mut state);
    state.graphs.insert(*out, recorded);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    graph: Handle,
    nodes: *const c_void,
    count: *mut usize,
) -> i32 {
    *count = state().graphs.get(&graph).map_or(0, Vec::len);
    if nodes.is_null() { 0 } else { INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiate_v2(
    out: *mut Handle,
    graph: Handle,
    _node: *const c_void,
    _log: *const c_char,
    _bytes: usize,
) -> i32 {
    let mut state = state();
    let Some(recorded) = state.graphs.get(&graph).cloned() else { return INVALID_VALUE };
    *out = fresh(&mut state);
    state.graphs.insert(*out, recorded);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: Handle, stream: Handle) -> i32 {
    let recorded = state().graphs.get(&exec).cloned();
    let Some(recorded) = recorded else { return INVALID_VALUE };
    recorded.iter().map(execute).fold(use_handle(stream), i32::max)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: Handle) -> i32 {
    state().graphs.remove(&graph).map_or(INVALID_VALUE, |_| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: Handle) -> i32 {
    cuGraphDestroy(exec)
}

#[repr(C)]
pub struct Attribute {
    id: u32,
    pad: [u8; 4],
    value: [u8; 64],
}

#[repr(C)]
pub struct Config {
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    threads_x: u32,
    threads_y: u32,
    threads_z: u32,
    smem: u32,
    stream: Handle,
    attributes: *const Attribute,
    num: u32,
}

/// The attributes of a launch: CTAs of a cluster, early start. `None` if there is one of another kind, one
/// twice, or a value that none has.
unsafe fn attributes(config: &Config) -> Option<(u32, bool)> {
    let (mut cluster, mut early) = (None, None);
    for attribute in std::slice::from_raw_parts(config.attributes, config.num as usize) {
        let words: [u32; 16] = std::mem::transmute(attribute.value);
        let twice = match (attribute.id, &words) {
            (4, [x, 1, 1, ..]) if (1..=8).contains(x) => cluster.replace(*x).is_some(),
            (6, [1, ..]) => early.replace(true).is_some(),
            _ => return None,
        };
        if twice {
            return None;
        }
    }
    Some((cluster.unwrap_or(1), early.unwrap_or(false)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const Config,
    function: Handle,
    _params: *const *mut c_void,
    extra: *const *mut c_void,
) -> i32 {
    let config = &*config;
    let Some((cluster, early)) = attributes(config) else { return INVALID_VALUE };
    let sizes = [config.threads_y, config.threads_z, config.grid_z];
    if config.threads_x == 0 || config.grid_y == 0 || sizes != [1, 1, 1] {
        return INVALID_VALUE;
    }
    if config.grid_x % cluster != 0 {
        return INVALID_CLUSTER_SIZE;
    }
    let early = if early { "early" } else { "in order" };
    let how = format!("cluster {cluster}, {early}");
    launch(function, config.grid_x, config.smem, config.stream, extra, &how)
}

/// As many as shared memory lets, on 132 SMs in groups of at most 16.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveClusters(
    out: *mut i32,
    _function: Handle,
    config: *const Config,
) -> i32 {
    let config = &*config;
    let Some((cluster, _)) = attributes(config) else { return INVALID_VALUE };
    let smem = config.smem as i32 + STATIC_SMEM + 1024;
    let per_sm = (233472 / smem).min(2048 / config.threads_x as i32);
    *out = (132 / 16) * (16 * per_sm / cluster as i32) + (132 % 16) * per_sm / cluster as i32;
    0
}

/// Writes its arguments, so that tests can read them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    out: *mut [u64; 16],
    data_type: i32,
    rank: u32,
    address: Address,
    sizes: *const u64,
    strides: *const u64,
    tile: *const u32,
    steps: *const u32,
    interleave: i32,
    swizzle: i32,
    l2_promotion: i32,
    outside: i32,
) -> i32 {
    need_context!();
    if rank != 2 || out as usize % 64 != 0 || address % 16 != 0 || *strides % 16 != 0 {
        return INVALID_VALUE;
    }
    let options = [data_type, interleave, swizzle, l2_promotion, outside].map(|value| value as u64);
    let mut map = [0; 16];
    map[..4].copy_from_slice(&[address, *sizes, *sizes.add(1), *strides]);
    map[4..8].copy_from_slice(&[*tile, *tile.add(1), *steps, *steps.add(1)].map(u64::from));
    map[8..13].copy_from_slice(&options);
    out.write(map);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    function: Handle,
    index: usize,
    offset: *mut usize,
    bytes: *mut usize,
) -> i32 {
    let state = &mut *state();
    let asked = state.asked.entry((function, index)).or_default();
    *asked += 1;
    let found = state.functions.get(&function).and_then(|(_, params)| params.get(index));
    state.misused |= found.is_none() || *asked > 8;
    let Some(found) = found else { return INVALID_VALUE };
    (*offset, *bytes) = *found;
    0
}
