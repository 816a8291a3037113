//! Drivers that are absent, old, replaced, or lack functions.

use std::env;
use std::process::Command;

use makaira::driver::{
    CaptureMode, DeviceBuffer, Driver, DriverVersion, Error, LaunchAttrs, LaunchShape, Stream,
};

use crate::build::stub;
use crate::exercise::{exercise, exercise_newer};
use crate::opened::{context, open};
use crate::{add_one, args, two_buffers};

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
        .args(["--exact", "presence::the_process_driver_is_found_or_an_error", "--nocapture"])
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
