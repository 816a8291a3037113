//! The driver room against a stand-in for libcuda, and against the real one where there is a GPU.
//!
//! The stand-in (`tests/stub/libcuda.rs`) is compiled at run time with rustc; without rustc those
//! tests say that they are skipped. `exercise` is the same function for both: it uses whatever CUDA
//! 11.0 offers.

#[path = "stub/build.rs"]
mod build;
#[path = "stub/open.rs"]
mod opened;

use std::process::Command;
use std::sync::Arc;
use std::{env, thread};

use build::stub;
use opened::{context, open};

use makaira::driver::{
    Args, CaptureMode, Context, Cubin, Device, DeviceBuffer, Driver, DriverVersion, Error, Event,
    Function, JitOptions, LaunchAttrs, LaunchShape, Module, PinnedBuffer, Stream, StreamRef,
};
use makaira::jit::{Loader, Origin, Store};
use makaira::target::PtxIsa;

/// `dst[i] = src[i] + 1` for `i < n`, one CTA of at most 512 threads.
const ADD_ONE: &str = include_str!("stub/add_one.ptx");

fn add_one(context: &Context) -> Function {
    let cubin = Cubin::assemble(context, ADD_ONE, &JitOptions::default()).expect("it assembles");
    let module = Module::from_cubin(context, &cubin).expect("it loads");
    module.function("add_one").expect("the kernel is there")
}

/// Numbers that differ from run to run.
fn fresh_numbers(count: usize) -> Vec<u32> {
    use std::hash::{BuildHasher, RandomState};
    let seed = RandomState::new();
    (0..count).map(|idx| seed.hash_one(idx) as u32).collect()
}

fn args(dst: &DeviceBuffer<u32>, src: &DeviceBuffer<u32>) -> Args {
    Args::new().with(dst.ptr()).with(src.ptr()).with(src.len() as u32)
}

/// Everything that the minimum set of symbols must suffice for.
fn exercise(driver: &'static Driver) {
    let context = context(driver, 0);
    let info = context.info();
    assert!(info.num_sms > 0 && info.arch.sm >= 50 && !info.name.is_empty(), "{info}");
    let function = add_one(&context);
    assert_eq!(function.attrs().local_bytes, 0);
    assert!(function.ctas_per_sm(512, 0).expect("an occupancy") >= 1);
    let module = Module::from_ptx(&context, ADD_ONE, &JitOptions::default()).expect("it loads");
    assert_eq!(module.function("add_one").expect("the kernel").attrs(), function.attrs());
    assert!(matches!(module.function("absent"), Err(Error::Call { code: 500, .. })));

    let numbers = fresh_numbers(300);
    let expected: Vec<u32> = numbers.iter().map(|number| number.wrapping_add(1)).collect();
    let src = DeviceBuffer::from_slice(&context, &numbers).expect("an upload");
    let dst = DeviceBuffer::<u32>::zeroed(&context, 300).expect("an allocation");
    assert_eq!(dst.to_vec().expect("a download"), vec![0; 300]);
    let stream = Stream::new(&context).expect("a stream");
    assert!(!context.is_capturing(stream.borrow()).expect("an answer"));
    let start = Event::timed(&context).expect("an event");
    let end = Event::timed(&context).expect("an event");
    let shape = LaunchShape::linear(1, 320, 0);
    start.record(stream.borrow()).expect("a record");
    function.launch(stream.borrow(), &shape, &args(&dst, &src)).expect("a launch");
    end.record(stream.borrow()).expect("a record");
    context.wait_event(stream.borrow(), &end).expect("a wait");
    end.synchronize().expect("the kernel ran");
    assert!(end.is_reached().expect("an answer"));
    assert!(end.milliseconds_since(&start).expect("a time") >= 0.0);
    assert_eq!(dst.to_vec().expect("a download"), expected);

    let mut pinned = PinnedBuffer::<u32>::zeroed(&context, 300).expect("pinned memory");
    assert!(pinned.iter().all(|value| *value == 0));
    dst.fill_bytes_async(0x11, stream.borrow()).expect("a fill");
    dst.download_on(&mut pinned, stream.borrow()).expect("a download");
    assert!(pinned.iter().all(|value| *value == 0x1111_1111));
    dst.copy_from_async(&src, stream.borrow()).expect("a copy");
    stream.synchronize().expect("the copy ran");
    assert!(context.stream_is_idle(stream.borrow()).expect("an answer"));
    assert_eq!(dst.to_vec().expect("a download"), numbers);
    src.upload_on(&expected, stream.borrow()).expect("an upload");
    assert_eq!(src.to_vec().expect("a download"), expected);
    assert!(matches!(src.upload(&expected[1..]), Err(Error::Length { .. })));
    let nothing = DeviceBuffer::<u32>::zeroed(&context, 0).expect("no memory");
    assert!(nothing.to_vec().expect("no download").is_empty());
    let (free, total) = context.memory_info().expect("an answer");
    assert!(free <= total && total > 0);
    context.synchronize().expect("nothing failed");

    let broken = ADD_ONE.replace("mov.u32 %r1, %tid.x", "bad.u32 %r1, %tid.x");
    for outcome in [
        Cubin::assemble(&context, &broken, &JitOptions::default()).map(drop),
        Module::from_ptx(&context, &broken, &JitOptions::default()).map(drop),
    ] {
        let error = outcome.expect_err("the text is wrong");
        let Error::Jit { ref log, ref lines, .. } = error else { panic!("{error}") };
        assert!(log.contains("line 13"), "{error}");
        assert_eq!((lines[0].number, &*lines[0].text), (13, "bad.u32 %r1, %tid.x;"));
        assert!(error.to_string().contains("13 | bad.u32"), "{error}");
    }
    let nul = Cubin::assemble(&context, "a\0b", &JitOptions::default());
    assert_eq!(nul, Err(Error::Nul { what: "the PTX text", position: 1 }));
}

/// Fault B63: only the minimum set of symbols; everything else works, and an absent function is an
/// error at its use.
#[test]
fn b63_the_minimum_set_of_symbols_suffices() {
    let Some(driver) = open(stub("b63", &[], &[])) else { return };
    exercise(driver);
    let context = context(driver, 0);
    let stream = Stream::new(&context).expect("a stream");
    let (src, dst) = two_buffers(&context);
    let function = add_one(&context);
    let missing = |symbol| Error::MissingSymbol { symbol, driver_version: DriverVersion(13000) };
    let shape = LaunchShape::linear(2, 64, 0);
    let attrs = LaunchAttrs { cluster: Some([2, 1, 1]), ..LaunchAttrs::default() };
    let error = function
        .launch_with(stream.borrow(), &shape, &attrs, &args(&dst, &src))
        .expect_err("the function is absent");
    assert_eq!(error, missing("cuLaunchKernelEx"));
    assert_eq!(
        error.to_string(),
        "the driver (CUDA 13.0) has no function `cuLaunchKernelEx`; a newer driver is needed"
    );
    let graph = stream.capture(CaptureMode::ThreadLocal, |_| Ok::<(), Error>(()));
    assert_eq!(graph.expect_err("absent"), missing("cuStreamBeginCapture_v2"));
    let pooled = DeviceBuffer::<u32>::new_on(&context, 4, stream.borrow());
    assert_eq!(pooled.expect_err("absent"), missing("cuMemAllocAsync"));
    let clusters = function.clusters_on_device(&shape, &attrs);
    assert_eq!(clusters, Err(missing("cuOccupancyMaxActiveClusters")));
    assert!(driver.missing().contains(&"cuLaunchKernelEx"));
    assert!(context.owns_stream(stream.borrow()).expect("believed"));
}

/// Fault B64: a profiler's library without newer symbols. The child finds it as the system's driver
/// would be found.
#[test]
fn b64_a_program_runs_with_a_replaced_libcuda() {
    let Some(library) = stub("b64", &[], &[("STUB_DRIVER_VERSION", "11000")]) else { return };
    let report = child_report(library.to_str().expect("a plain path"));
    assert!(report.contains("driver found: CUDA 11.0"), "{report}");
}

#[test]
fn no_driver_is_a_value() {
    let absent = "/nonexistent/libcuda.so.1";
    let error = Driver::open(absent).expect_err("there is no such library");
    assert!(error.is_unavailable());
    let Error::DriverUnavailable { why } = &error else { panic!("{error}") };
    assert!(why.contains(absent), "{error}");
    assert!(error.to_string().contains("MAKAIRA_LIBCUDA"), "{error}");
    let report = child_report(absent);
    assert!(report.contains("no driver: ") && report.contains(absent), "{report}");
}

/// What [`the_process_driver_is_found_or_an_error`] prints in a process with this driver library.
fn child_report(library: &str) -> String {
    let output = Command::new(env::current_exe().expect("this test has a path"))
        .args(["--exact", "the_process_driver_is_found_or_an_error", "--nocapture"])
        .env("MAKAIRA_LIBCUDA", library)
        .output()
        .expect("this test starts again");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Run here with whatever the machine has, and again by the tests above.
#[test]
fn the_process_driver_is_found_or_an_error() {
    match Driver::get() {
        Ok(driver) => {
            eprintln!("driver found: CUDA {} in {}", driver.version(), driver.library());
            exercise(driver);
            if driver.missing().contains(&"cuStreamBeginCapture_v2") {
                eprintln!("skipped: this driver has no capture");
            } else {
                exercise_newer(driver);
            }
        }
        Err(error) => {
            eprintln!("skipped: no driver: {error}");
            assert!(error.is_unavailable(), "{error}");
            let again = Driver::get().expect_err("the outcome is kept");
            assert_eq!(again, error);
        }
    }
}

#[test]
fn a_driver_without_a_required_function_is_refused() {
    let Some(library) = stub("old", &["no_link"], &[("STUB_DRIVER_VERSION", "10020")]) else {
        return;
    };
    let driver_version = DriverVersion(10020);
    let error = Driver::open(library).expect_err("the linker is required");
    assert_eq!(error, Error::MissingSymbol { symbol: "cuLinkCreate_v2", driver_version });
}

fn two_buffers(context: &Context) -> (DeviceBuffer<u32>, DeviceBuffer<u32>) {
    let src = DeviceBuffer::from_slice(context, &fresh_numbers(64)).expect("an upload");
    (src, DeviceBuffer::zeroed(context, 64).expect("an allocation"))
}

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

/// Fault B55: the newest PTX of each simulated driver, and a refusal that names driver, PTX and
/// remedy.
#[test]
fn b55_a_text_too_new_for_the_driver_names_both_and_the_fix() {
    let drivers = [
        ("11040", "74", "11.4", PtxIsa::new(7, 4)),
        ("11080", "78", "11.8", PtxIsa::new(7, 8)),
        ("12000", "80", "12.0", PtxIsa::new(8, 0)),
        ("12040", "84", "12.4", PtxIsa::new(8, 4)),
        ("12080", "87", "12.8", PtxIsa::new(8, 7)),
        ("13000", "90", "13.0", PtxIsa::new(9, 0)),
    ];
    for (version, ceiling, printed, isa) in drivers {
        let variables = [("STUB_DRIVER_VERSION", version), ("STUB_PTX_CEILING", ceiling)];
        let Some(driver) = open(stub(&format!("b55_{version}"), &[], &variables)) else { return };
        assert_eq!(driver.version().to_string(), printed);
        assert_eq!(driver.ptx_ceiling(), Some(isa));
        let context = context(driver, 0);
        let options = JitOptions::default();
        let newest = ADD_ONE.replace(".version 7.0", &format!(".version {isa}"));
        Cubin::assemble(&context, &newest, &options).expect("the driver's own version");
        let next = PtxIsa::new(isa.major, isa.minor + 1);
        let too_new = ADD_ONE.replace(".version 7.0", &format!(".version {next}"));
        for outcome in [
            Cubin::assemble(&context, &too_new, &options).map(drop),
            Module::from_ptx(&context, &too_new, &options).map(drop),
        ] {
            let error = outcome.expect_err("too new");
            assert_eq!(
                error.to_string(),
                format!(
                    "the driver (CUDA {printed}) assembles PTX up to {isa}, the text says .version \
                     {next}; emit a lower version or update the driver"
                )
            );
            assert_eq!(error.code(), Some(222));
        }
    }
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

/// What newer drivers offer: capture and graphs, launch attributes, memory in stream order.
fn exercise_newer(driver: &'static Driver) {
    let missing = driver.missing();
    let context = context(driver, 0);
    let stream = Stream::new(&context).expect("a stream");
    let function = add_one(&context);
    let (src, dst) = two_buffers(&context);
    let shape = LaunchShape::linear(2, 64, 0);
    let graph = stream
        .capture(CaptureMode::ThreadLocal, |stream| {
            assert!(context.is_capturing(stream)?);
            function.launch(stream, &shape, &args(&dst, &src))?;
            function.launch(stream, &LaunchShape::linear(1, 64, 0), &args(&dst, &dst))
        })
        .expect("a capture");
    assert!(!context.is_capturing(stream.borrow()).expect("an answer"));
    assert_eq!(graph.num_nodes().expect("a count"), 2);
    assert_eq!(dst.to_vec().expect("a download"), vec![0; 64], "captured, not run");
    let replay = graph.instantiate().expect("a graph");
    if !missing.contains(&"cuGraphUpload") {
        replay.upload(stream.borrow()).expect("an upload");
    }
    replay.launch(stream.borrow()).expect("a replay");
    stream.synchronize().expect("the replay ran");
    let plus = |by: u32| -> Vec<u32> {
        let numbers = src.to_vec().expect("a download");
        numbers.iter().map(|number| number.wrapping_add(by)).collect()
    };
    assert_eq!(dst.to_vec().expect("a download"), plus(2));

    // A failure inside, and a panic inside: the stream is usable afterwards.
    let inner = Error::NoDevice { ordinal: 9, count: 0 };
    let failed = stream.capture(CaptureMode::Global, |_| Err(inner.clone()));
    assert_eq!(failed.expect_err("passed on"), inner);
    assert!(!context.is_capturing(stream.borrow()).expect("an answer"));
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        stream.capture(CaptureMode::Relaxed, |_| -> Result<(), Error> { panic!("on purpose") })
    }));
    assert!(unwound.is_err());
    assert!(!context.is_capturing(stream.borrow()).expect("an answer"));

    let attrs =
        LaunchAttrs { cluster: Some([2, 1, 1]), overlap_previous: true, cooperative: false };
    if context.info().arch.sm >= 90 && !missing.contains(&"cuLaunchKernelEx") {
        function
            .launch_with(stream.borrow(), &shape, &attrs, &args(&dst, &src))
            .expect("a launch with attributes");
        stream.synchronize().expect("the kernel ran");
        assert_eq!(dst.to_vec().expect("a download"), plus(1));
    }
    if context.info().arch.sm >= 90 && !missing.contains(&"cuOccupancyMaxActiveClusters") {
        assert!(function.clusters_on_device(&shape, &attrs).expect("a count") > 0);
    }
    if !missing.contains(&"cuMemAllocAsync") {
        let pooled = DeviceBuffer::new_on(&context, 64, stream.borrow()).expect("pool memory");
        pooled.upload_on(&plus(5), stream.borrow()).expect("an upload");
        let mut target = vec![0; 64];
        pooled.download_on(&mut target, stream.borrow()).expect("a download");
        assert_eq!(target, plus(5));
    }
    assert!(context.owns_stream(stream.borrow()).expect("an answer"));
}

#[test]
fn graphs_and_launch_attributes_work_where_the_driver_has_them() {
    if let Some(driver) = open(stub("full", &["full"], &[])) {
        exercise_newer(driver);
    }
}

#[test]
fn advisories_of_the_assembler_are_surfaced() {
    let Some(driver) = open(stub("advice", &[], &[])) else { return };
    let context = context(driver, 0);
    let text = format!("{ADD_ONE}// wgmma\n");
    let options = JitOptions::default();
    let cubin = Cubin::assemble(&context, &text, &options).expect("it assembles");
    assert_eq!(cubin.advisories(), ["ptxas info : (C7510) serialized"]);
    let module = Module::from_cubin(&context, &cubin).expect("it loads");
    assert_eq!(module.advisories(), cubin.advisories());
    assert!(module.info_log().contains("Used 40 registers"));
    let module = Module::from_ptx(&context, &text, &options).expect("it loads");
    assert_eq!(module.advisories(), cubin.advisories());
    let mut damaged = cubin.clone();
    damaged.image.truncate(40);
    assert_eq!(Module::from_cubin(&context, &damaged).expect_err("no ELF").code(), Some(200));
}

/// Fault B43: a kernel asked for the first time during a capture is refused with the remedy, the
/// capture survives, and a prepared kernel is served.
#[test]
fn b43_a_first_compilation_during_a_capture_is_refused() {
    let Some(driver) = open(stub("b43", &["full"], &[])) else { return };
    let context = context(driver, 0);
    let stream = Stream::new(&context).expect("a stream");
    let (src, dst) = two_buffers(&context);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let loader = Loader::new(Store::at(folder.path()));
    let options = JitOptions::default();
    let ask =
        |stream: StreamRef<'_>| loader.load_for(&context, stream, "add_one", ADD_ONE, &options);
    let shape = LaunchShape::linear(1, 64, 0);
    let graph = stream
        .capture(CaptureMode::ThreadLocal, |stream| {
            let error = ask(stream).expect_err("this is no time to compile");
            assert_eq!(
                error.to_string(),
                "kernel `add_one` is not loaded yet and its stream is being captured; prepare it \
                 before the capture begins"
            );
            let prepared = loader.load(&context, "add_one", ADD_ONE, &options);
            let prepared = prepared.expect("the caller insists");
            prepared.function.launch(stream, &shape, &args(&dst, &src))?;
            assert!(Arc::ptr_eq(&ask(stream).expect("it is loaded"), &prepared));
            Ok::<(), Error>(())
        })
        .expect("the capture is whole");
    assert_eq!(graph.num_nodes().expect("a count"), 1);
    assert_eq!(loader.store().list().expect("a listing").len(), 1);
    let again = Loader::new(Store::at(folder.path()));
    let warm = again.load_for(&context, stream.borrow(), "add_one", ADD_ONE, &options);
    assert_eq!(warm.expect("from the store").origin, Origin::Store);
    let broken = ADD_ONE.replace("add.u32", "bad.u32");
    let error = again.load(&context, "add_one", &broken, &options).expect_err("it is wrong");
    let source = std::error::Error::source(&error).expect("the driver's error");
    assert!(source.to_string().contains("bad.u32"), "{source}");
}
