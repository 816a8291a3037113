//! From text to kernel: versions, the assembler's log, first compilations at the wrong time.

use std::sync::Arc;

use makaira::driver::{
    CaptureMode, Cubin, Error, JitOptions, LaunchShape, Module, Stream, StreamRef,
};
use makaira::jit::{Loader, Origin, Store};
use makaira::target::PtxIsa;

use crate::build::stub;
use crate::opened::{context, open};
use crate::{ADD_ONE, args, two_buffers};

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
