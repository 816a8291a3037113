//! Launches: what is refused before the driver is called, and what reaches it.

use std::sync::Arc;
use std::{fs, thread};

use makaira::driver::{
    Args, Context, Cubin, Device, DeviceBuffer, DevicePtr, Error, JitOptions, LaunchAttrs,
    LaunchShape, Module, Stream, StreamRef, TensorMap, TiledMatrix,
};

use crate::build::stub;
use crate::opened::{context, open};
use crate::{add_one, args, two_buffers};

#[test]
fn unknown_error_codes_are_representable() {
    let Some(driver) = open(stub("codes", &[], &[])) else { return };
    let context = context(driver, 0);
    let (src, dst) = two_buffers(&context);
    let shape = LaunchShape::linear(4242, 64, 0);
    let error = add_one(&context)
        .launch(StreamRef::DEFAULT, &shape, &args(&dst, &src))
        .expect_err("the stand-in refuses this grid");
    assert_eq!(error.code(), Some(4242));
    assert_eq!(error.to_string(), "cuLaunchKernel failed: unknown error code (4242)");
    let known = DeviceBuffer::<u32>::new(&context, 1 << 30).expect_err("too much");
    assert_eq!(known.code(), Some(2));
    let error = Device::nth(driver, 7).expect_err("there are two");
    assert_eq!(error, Error::NoDevice { ordinal: 7, count: 2 });
}

/// Fault B65: more shared memory than the device has, or than was allowed, is an error of the call
/// itself, and the output is untouched.
#[test]
fn b65_limits_are_checked_before_the_driver_is_called() {
    let Some(driver) = open(stub("b65", &["full"], &[])) else { return };
    let context = context(driver, 0);
    let function = add_one(&context);
    let (src, dst) = two_buffers(&context);
    let launch = |grid, threads, dynamic_smem_bytes, args: &Args| {
        let shape = LaunchShape { grid, threads, dynamic_smem_bytes };
        function.launch(StreamRef::DEFAULT, &shape, args)
    };
    let good = args(&dst, &src);
    let limits = |error: Error| match error {
        Error::Limit { requested, limit, .. } => (requested, limit),
        other => panic!("{other}"),
    };
    let refused = |grid, threads, smem| {
        limits(launch(grid, threads, smem, &good).expect_err("beyond a limit"))
    };
    assert_eq!(refused([1, 1, 1], [64, 1, 1], 64 << 10), (65536, 48128));
    assert_eq!(refused([0, 1, 1], [64, 1, 1], 0), (0, i32::MAX as u64));
    assert_eq!(refused([1, 65536, 1], [64, 1, 1], 0), (65536, 65535));
    assert_eq!(refused([1, 1, 1], [1, 1, 65], 0), (65, 64));
    assert_eq!(refused([1, 1, 1], [256, 2, 2], 0), (1024, 512));
    let error = function.allow_dynamic_smem(232448).expect_err("static shared memory counts");
    assert_eq!(
        error.to_string(),
        "dynamic shared memory of a CTA, in bytes: 232448 requested, the limit is 231424; \
         choose a configuration with fewer stages or a smaller tile"
    );
    let refused =
        |args: &Args| launch([1, 1, 1], [64, 1, 1], 0, args).expect_err("other arguments");
    let error = refused(&Args::new().with(dst.ptr()).with(64_u32).with(src.ptr()));
    assert_eq!(
        error.to_string(),
        "argument 1 of `add_one`: 4 bytes at offset 8 given, 8 bytes at offset 8 declared; pass the \
         kernel's parameters in order"
    );
    assert_eq!(refused(&Args::new().with(dst.ptr()).with(src.ptr())).code(), Some(1));
    assert_eq!(dst.to_vec().expect("a download"), vec![0; 64]);

    function.allow_dynamic_smem(100 << 10).expect("within the device's limit");
    function.allow_dynamic_smem(10 << 10).expect("never lowered");
    assert_eq!(function.max_dynamic_smem_bytes(), 100 << 10);
    launch([1, 1, 1], [64, 1, 1], 100 << 10, &good).expect("now allowed");
    assert_ne!(dst.to_vec().expect("a download"), vec![0; 64]);
}

/// The driver is not asked for absent parameters, nor at every launch: tools that watch its calls
/// would report the refusals. One argument too many is worth the question.
#[test]
fn parameters_are_compared_once_and_not_past_the_last() {
    let Some(driver) = open(stub("params", &["full"], &[])) else { return };
    let context = context(driver, 0);
    let function = add_one(&context);
    let (src, dst) = two_buffers(&context);
    let shape = LaunchShape::linear(1, 64, 0);
    let launch = |args: &Args| function.launch(StreamRef::DEFAULT, &shape, args);
    for _ in 0..100 {
        launch(&args(&dst, &src)).expect("a launch");
    }
    context.synchronize().expect("the stand-in has nothing to complain of");
    let error = launch(&args(&dst, &src).with(1_u32)).expect_err("one too many");
    assert_eq!(
        error.to_string(),
        "argument 3 of `add_one`: 4 bytes at offset 20 given, none declared; pass the kernel's \
         parameters in order"
    );
    assert_eq!(context.synchronize().expect_err("the stand-in noticed").code(), Some(4243));
}

/// Fault B49: made on one thread, used on others that have no context; two devices in turn on one
/// thread.
#[test]
fn b49_calls_work_from_any_thread_and_beside_other_contexts() {
    let Some(driver) = open(stub("b49", &[], &[])) else { return };
    let first = context(driver, 0);
    let function = Arc::new(add_one(&first));
    let (src, dst) = two_buffers(&first);
    let expected: Vec<u32> =
        src.to_vec().expect("a download").iter().map(|number| number.wrapping_add(1)).collect();
    let buffers = Arc::new((src, dst));
    for _ in 0..2 {
        let (function, buffers) = (function.clone(), buffers.clone());
        let worker = move || {
            buffers.1.fill_bytes(0).expect("a fill");
            let shape = LaunchShape::linear(1, 64, 0);
            function
                .launch(StreamRef::DEFAULT, &shape, &args(&buffers.1, &buffers.0))
                .expect("a launch from a thread without a context");
            buffers.1.to_vec().expect("a download")
        };
        assert_eq!(thread::spawn(worker).join().expect("no panic"), expected);
    }
    let second = context(driver, 1);
    assert_ne!(first, second);
    assert_eq!(Context::adopt_current(driver).expect("an answer"), None);
    let outer = first.bind().expect("a binding");
    for round in 0..3 {
        let other = DeviceBuffer::from_slice(&second, &[round; 8]).expect("on the second device");
        assert_eq!(other.to_vec().expect("a download"), [round; 8]);
        let adopted = Context::adopt_current(driver).expect("an answer").expect("one is current");
        assert_eq!((&adopted, adopted.device().ordinal()), (&first, 0));
        buffers.1.fill_bytes(round as u8).expect("on the first device");
    }
    drop(outer);
    assert_eq!(Context::adopt_current(driver).expect("an answer"), None);
}

/// A copy of `echo_map`'s text that a real assembler would take as well.
const ECHO_MAP: &str = "\
.version 8.0
.target sm_90
.address_size 64
.visible .entry echo_map(
    .param .u64 dst,
    .param .align 64 .b8 map[128]
)
{
    ret;
}
";

/// A tensor map comes to the kernel as the driver encoded it, at the next multiple of 64 bytes.
#[test]
fn a_tensor_map_reaches_the_kernel() {
    let Some(driver) = open(stub("map", &["full"], &[])) else { return };
    let context = context(driver, 0);
    let cubin = Cubin::assemble(&context, ECHO_MAP, &JitOptions::default()).expect("it assembles");
    let module = Module::from_cubin(&context, &cubin).expect("it loads");
    let function = module.function("echo_map").expect("the kernel is there");
    let base = DeviceBuffer::<u64>::zeroed(&context, 1024).expect("an allocation");
    let found = DeviceBuffer::<u64>::zeroed(&context, 16).expect("an allocation");
    let matrix = TiledMatrix {
        base: base.ptr(),
        elements: [100, 7],
        row_bytes: 208,
        tile: [64, 8],
        swizzle_128b: true,
    };
    let launch = |matrix: &TiledMatrix| {
        let map = TensorMap::encode(&context, matrix).expect("it keeps the rules");
        let args = Args::new().with(found.ptr()).with(map);
        assert_eq!(args.size_bytes(), 192);
        let shape = LaunchShape::linear(1, 32, 0);
        function.launch(StreamRef::DEFAULT, &shape, &args).expect("a launch");
        found.to_vec().expect("a download")
    };
    // Address, sizes, distance of rows, tile, steps; fp16, not interleaved, 128-byte swizzle, lines by
    // 256 bytes, zeros outside.
    let address = base.ptr().as_raw();
    let expected = [address, 100, 7, 208, 64, 8, 1, 1, 6, 0, 3, 3, 0, 0, 0, 0];
    assert_eq!(launch(&matrix), expected);
    assert_eq!(launch(&TiledMatrix { swizzle_128b: false, ..matrix })[10], 0);
    let odd = TiledMatrix { row_bytes: 200, ..matrix };
    assert_eq!(TensorMap::encode(&context, &odd).expect_err("refused").code(), Some(1));
    // Sizes alone do not tell a map from other arguments: its place does.
    let shape = LaunchShape::linear(1, 32, 0);
    let map = TensorMap::encode(&context, &matrix).expect("it keeps the rules");
    let swapped = Args::new().with(map).with(found.ptr());
    let error = function.launch(StreamRef::DEFAULT, &shape, &swapped).expect_err("swapped");
    assert_eq!(
        error.to_string(),
        "argument 0 of `echo_map`: 128 bytes at offset 0 given, 8 bytes at offset 0 declared; pass \
         the kernel's parameters in order"
    );
}

#[test]
fn a_driver_without_tensor_maps_says_so() {
    let Some(driver) = open(stub("no_map", &[], &[])) else { return };
    let matrix = TiledMatrix {
        base: DevicePtr::NULL,
        elements: [8, 1],
        row_bytes: 16,
        tile: [8, 1],
        swizzle_128b: false,
    };
    let error = TensorMap::encode(&context(driver, 0), &matrix).expect_err("absent");
    assert!(error.to_string().contains("no function `cuTensorMapEncodeTiled`"), "{error}");
}

/// Attributes reach the driver's call, each alone and together; without any the old call is made.
#[test]
fn attributes_reach_the_launch() {
    let log = tempfile::NamedTempFile::new().expect("a temporary file");
    let path = log.path().to_str().expect("a plain path");
    let Some(library) = stub("attributes", &["full"], &[("STUB_LAUNCH_LOG", path)]) else { return };
    let Some(driver) = open(Some(library)) else { return };
    let context = context(driver, 0);
    let stream = Stream::new(&context).expect("a stream");
    let (src, dst) = two_buffers(&context);
    let function = add_one(&context);
    let launch = |grid, cluster: Option<u32>, overlap_previous| {
        let cluster = cluster.map(|x| [x, 1, 1]);
        let attrs = LaunchAttrs { cluster, overlap_previous, ..LaunchAttrs::default() };
        let shape = LaunchShape::linear(grid, 64, 0);
        function.launch_with(stream.borrow(), &shape, &attrs, &args(&dst, &src))
    };
    launch(3, None, false).expect("a plain launch");
    launch(3, None, true).expect("an early launch");
    launch(4, Some(4), false).expect("a cluster");
    launch(6, Some(2), true).expect("both");
    let lines = fs::read_to_string(path).expect("the log");
    let expected = [
        "add_one x3 plain",
        "add_one x3 cluster 1, early",
        "add_one x4 cluster 4, in order",
        "add_one x6 cluster 2, early",
    ];
    assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
    assert_eq!(launch(3, Some(2), false).expect_err("no whole clusters").code(), Some(912));
}
