//! The same calls on the stand-in and on a real driver.
//!
//! `exercise` uses whatever CUDA 11.0 offers, `exercise_newer` what newer drivers add.

use makaira::driver::{
    CaptureMode, Cubin, DeviceBuffer, Driver, Error, Event, JitOptions, LaunchAttrs, LaunchShape,
    Module, PinnedBuffer, Stream,
};

use crate::build::stub;
use crate::opened::{context, open};
use crate::{ADD_ONE, add_one, args, fresh_numbers, two_buffers};

/// Everything that the minimum set of symbols must suffice for.
pub fn exercise(driver: &'static Driver) {
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

/// What newer drivers offer: capture and graphs, launch attributes, memory in stream order.
pub fn exercise_newer(driver: &'static Driver) {
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
