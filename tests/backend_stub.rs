//! `GpuBackend` against the stand-in for libcuda: what it refuses before the driver is called.

#[path = "stub/build.rs"]
mod build;
#[path = "stub/open.rs"]
mod opened;

use std::error::Error as _;
use std::process::Command;
use std::sync::Arc;
use std::{env, fs};

use build::stub;
use makaira::asm::{Asm, Module, Rule};
use makaira::backend::{Arg, Backend, DevicePtr, Error, Launch, Stream, Swizzle, TensorMap};
use makaira::emu::EmuBackend;
use makaira::gemm::Gemm;
use makaira::jit::{GpuBackend, GpuError, Loader, Store};
use makaira::kernel::{Config, GOLDENS, Kind, Problem, Rows, gather, select};
use makaira::target::SmArch;
use makaira::weights::{Dense, Group, PackedWeights, quantize};
use opened::{context, open};

/// A backend on a stand-in with these settings, and a store that goes with the folder.
fn backend(
    name: &str,
    cfgs: &[&str],
    variables: &[(&str, &str)],
) -> Option<(Arc<GpuBackend>, tempfile::TempDir)> {
    let driver = open(stub(name, cfgs, variables))?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let loader = Loader::new(Store::at(folder.path()));
    Some((Arc::new(GpuBackend::new(context(driver, 0), loader)), folder))
}

/// An entry with the parameters of the stand-in's kernel.
fn add_one(target: SmArch) -> Module {
    let mut a = Asm::new();
    a.param_u64("dst");
    a.param_u64("src");
    a.param_u32("n");
    a.exit();
    a.finish("add_one", target, 64, 1)
}

/// A kernel that needs sm_80, built for another target.
fn product(target: SmArch) -> Module {
    let config: Config = "marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1".parse().expect("a name");
    select::family_of(&config).build(&config, target)
}

/// A small packed layer of numbers that differ from run to run.
fn layer() -> PackedWeights {
    use std::hash::{BuildHasher, RandomState};
    let (n, k, seed) = (64, 256, RandomState::new());
    let value = |i| (seed.hash_one(i) % 2000) as f32 / 1000.0 - 1.0005;
    let dense: Vec<f32> = (0..n * k).map(value).collect();
    let group = Group::new(k, 128).expect("a group size that kernels have");
    let dense = Dense::F32(bytemuck::cast_slice(&dense));
    PackedWeights::pack(&quantize(dense, n, k, group, 1).expect("finite").view(), 1).expect("fits")
}

/// The verifier's verdict behind an error.
fn verdict(error: &Error) -> Vec<(Rule, String)> {
    match error.source.downcast_ref() {
        Some(GpuError::Refused(found)) => {
            found.iter().map(|diagnostic| (diagnostic.rule, diagnostic.what.clone())).collect()
        }
        _ => panic!("not refused by the verifier: {error}: {:?}", error.source()),
    }
}

/// Fault B55: on every driver the kernels are emitted with a version that it assembles; a module that needs
/// more is refused before the driver sees it, with driver, PTX version and remedy.
#[test]
fn b55_a_module_too_new_for_the_driver_is_refused_by_name() {
    let drivers = [("11040", "74", "80"), ("11080", "78", "90"), ("12000", "80", "90")];
    for (version, ceiling, capability) in drivers {
        let variables = [
            ("STUB_DRIVER_VERSION", version),
            ("STUB_PTX_CEILING", ceiling),
            ("STUB_CAPABILITY", capability),
        ];
        let Some((gpu, _folder)) = backend(&format!("ptx_{version}"), &[], &variables) else {
            return;
        };
        let gemm = Gemm::new(gpu);
        let weight = gemm.upload(&layer()).expect("it fits");
        gemm.prepare(&weight, 64).expect("the stand-in assembles what its version allows");
    }
    let variables = [("STUB_DRIVER_VERSION", "11040"), ("STUB_PTX_CEILING", "74")];
    let Some((gpu, _folder)) = backend("ptx_old", &[], &variables) else { return };
    let error = gpu.load(&add_one(SmArch::baseline(90))).expect_err("sm_90 is younger");
    assert_eq!(error.to_string(), "loading add_one on Stand-in 0 with the driver of CUDA 11.4");
    let what =
        "sm_90 needs PTX 7.8, the driver speaks up to 7.4: install a driver of CUDA 11.8 or newer";
    assert_eq!(verdict(&error), [(Rule::Version, what.to_owned())]);
    gpu.load(&add_one(SmArch::baseline(80))).expect("the same for sm_80 is old enough");
}

/// Fault B61: on the oldest driver that has the card every kernel loads, not the products alone; those with younger
/// instructions say so, and none of them is ever chosen there.
#[test]
fn b61_every_kernel_loads_on_the_oldest_driver() {
    let drivers = [("11000", "70", 80), ("11080", "78", 90), ("12000", "80", 90)];
    for (version, ceiling, target) in drivers {
        let capability = target.to_string();
        let variables = [
            ("STUB_DRIVER_VERSION", version),
            ("STUB_PTX_CEILING", ceiling),
            ("STUB_CAPABILITY", &capability),
        ];
        let Some((gpu, _folder)) = backend(&format!("oldest_{version}"), &[], &variables) else {
            return;
        };
        let (arch, isa) = (gpu.device().arch, gpu.device().isa);
        let is_old_enough = |config: &Config| select::family_of(config).config_isa(config) <= isa;
        let mut loaded = 0;
        for (name, ..) in GOLDENS {
            let config: Config = name.parse().expect("a name");
            let family = select::family_of(&config);
            if !family.runs_on(arch) || select::check(&config, arch).is_err() {
                continue;
            }
            match (gpu.load(&family.build(&config, arch)), is_old_enough(&config)) {
                (Ok(_), true) => loaded += 1,
                (Ok(_), false) => panic!("{name} is older than it says"),
                (Err(error), false) => {
                    let why = &verdict(&error)[0].1;
                    assert!(why.contains("needs PTX") && why.contains("install a driver"), "{why}");
                }
                (Err(error), true) => panic!("{name}: {error}: {:?}", verdict(&error)),
            }
        }
        assert!(loaded >= 8, "{loaded} of the goldens for {arch}");
        gpu.load(&gather::build(arch)).expect("the gathering of activations is as old");
        for m in [1, 16, 64, 512] {
            let (group, rows) = (Group::Size(128), Rows::Whole);
            let problem = Problem { kind: Kind::U4B8, m, n: 4096, k: 4096, group, rows };
            let ranked = select::ranked(&problem, gpu.device());
            assert!(ranked.iter().all(|choice| is_old_enough(&choice.config)), "m={m}");
        }
    }
}

/// Fault B57: cards below sm_80 are refused by name, and so is a kernel built for them.
#[test]
fn b57_cards_below_sm_80_are_refused_by_name() {
    for capability in ["70", "75"] {
        let variables = [("STUB_CAPABILITY", capability)];
        let Some((gpu, _folder)) = backend(&format!("sm_{capability}"), &[], &variables) else {
            return;
        };
        let sm = format!("sm_{capability}");
        let error = gpu.load(&product(SmArch::baseline(80))).expect_err("too old");
        let what =
            format!("Stand-in 0 has {sm}, which does not run code for sm_80: build for {sm}");
        assert_eq!(verdict(&error), [(Rule::Target, what)]);
        let error = gpu.load(&product(sm.parse().expect("a target"))).expect_err("no such mma");
        let mma =
            format!("sm_80 or higher, the target is {sm}: this kernel cannot run on older cards");
        let found = verdict(&error);
        assert!(
            found.iter().any(|(rule, what)| {
                *rule == Rule::Target && what.starts_with("`mma.sync") && what.ends_with(&mma)
            }),
            "{found:?}"
        );
        let gemm = Gemm::new(gpu);
        let weight = gemm.upload(&layer()).expect("it fits");
        let error = gemm.prepare(&weight, 1).expect_err("no kernel for this card").to_string();
        assert!(error.contains(&sm), "{error}");
    }
}

/// A module that breaks a rule is refused with all its problems.
#[test]
fn a_module_is_verified_before_it_is_loaded() {
    let Some((gpu, _folder)) = backend("verify", &[], &[]) else { return };
    let mut a = Asm::new();
    let (sum, unset) = (a.reg(), a.reg());
    a.add_u32(sum, unset, 1u32);
    let module = a.finish("add_one", SmArch::baseline(80), 48, 1);
    let rules: Vec<Rule> = verdict(&gpu.load(&module).expect_err("wrong in three ways"))
        .into_iter()
        .map(|(rule, _)| rule)
        .collect();
    assert_eq!(rules, [Rule::Launch, Rule::Flow, Rule::Definition]);
}

/// The argument list is compared with the module's parameters, in the emulator's words, and the driver is
/// not asked about them beyond the last one.
#[test]
fn arguments_are_those_of_the_module() {
    let Some((gpu, _folder)) = backend("arguments", &["full"], &[]) else { return };
    let module = add_one(SmArch::baseline(80));
    let ptr = Arg::from(gpu.alloc(256).expect("memory"));
    let kernel = gpu.load(&module).expect("it loads");
    let launch = |args: &[Arg]| gpu.launch(&*kernel, &Launch::new([1, 1], args, Stream::default()));
    let emu = EmuBackend::h200_like(1);
    let emulated = emu.load(&module).expect("it loads");
    let wrong: [&[Arg]; 4] =
        [&[], &[ptr, ptr], &[ptr, Arg::U32(1), Arg::U32(1)], &[ptr, ptr, Arg::U32(1), Arg::U32(1)]];
    for args in wrong {
        let error = launch(args).expect_err("not the parameters");
        assert!(matches!(error.source.downcast_ref::<GpuError>(), Some(GpuError::Arguments(_))));
        let launch = Launch::new([1, 1], args, Stream::default());
        let other = emu.launch(&*emulated, &launch).expect_err("likewise");
        assert_eq!(error.source.to_string(), other.source.to_string());
    }
    let error = launch(&[ptr, ptr]).expect_err("one is missing");
    assert_eq!(
        error.source.to_string(),
        "add_one takes (dst: u64, src: u64, n: u32), given (u64, u64); pass its parameters in order"
    );
    for _ in 0..100 {
        launch(&[ptr, ptr, Arg::U32(64)]).expect("the parameters");
    }
    gpu.context().synchronize().expect("no refused question");
}

/// Run here it says that it is skipped; started by the test below it loads a kernel as `open` makes it.
#[test]
fn a_child_loads_a_kernel() {
    if env::var_os("MAKAIRA_TEST_CHILD").is_none() {
        eprintln!("skipped: a_child_loads_a_kernel is started by line_info_by_the_environment");
        return;
    }
    let gpu = GpuBackend::open(0).expect("the stand-in");
    gpu.load(&add_one(SmArch::baseline(80))).expect("it loads");
}

#[test]
fn line_info_by_the_environment() {
    let Some(library) = stub("lines", &[], &[]) else { return };
    for (value, wanted) in [("1", true), ("0", false), ("", false)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = Command::new(env::current_exe().expect("this test has a path"))
            .args(["--exact", "a_child_loads_a_kernel"])
            .env("MAKAIRA_TEST_CHILD", "1")
            .env("MAKAIRA_LIBCUDA", &library)
            .env("MAKAIRA_CACHE_DIR", folder.path())
            .env("MAKAIRA_NO_CACHE", "0")
            .env("MAKAIRA_LINEINFO", value)
            .output()
            .expect("this test starts again");
        assert!(output.status.success(), "{output:?}");
        let entries = fs::read_dir(folder.path())
            .expect("the store")
            .map(|entry| fs::read(entry.expect("an entry").path()).expect("a file"));
        let entries: Vec<String> =
            entries.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect();
        assert!(entries.iter().any(|entry| entry.contains("add_one")), "nothing was stored");
        let has_lines = entries.iter().any(|entry| entry.contains(".loc 1 "));
        assert_eq!(has_lines, wanted, "MAKAIRA_LINEINFO={value:?}");
    }
}

/// An entry for tile copies, of one CTA or in clusters.
fn echo_map(cluster: u32) -> Module {
    let mut a = Asm::new();
    a.param_u64("dst");
    a.param_tensor_map("map");
    a.cluster = cluster;
    a.exit();
    a.finish("echo_map", SmArch::baseline(90), 64, 1)
}

/// A matrix that keeps the rules.
fn matrix(base: DevicePtr) -> TensorMap {
    let (elements, tile) = ([100, 7], [64, 8]);
    TensorMap { base, elements, row_bytes: 208, tile, swizzle: Swizzle::B128 }
}

/// What a failed call says, its own words and its cause's.
fn told(outcome: Result<(), Error>) -> String {
    let error = outcome.expect_err("it must be refused");
    format!("{error}: {}", error.source)
}

#[test]
fn tensor_maps_are_encoded_at_the_launch_or_refused_by_rule() {
    let Some((gpu, _folder)) = backend("backend_map", &["full"], &[]) else { return };
    let kernel = gpu.load(&echo_map(1)).expect("it loads");
    let dst = gpu.alloc(1024).expect("memory");
    let launch = |args: &[Arg]| gpu.launch(&*kernel, &Launch::new([1, 1], args, Stream::default()));
    let map = matrix(dst.offset(512));
    launch(&[dst.into(), Arg::TensorMap(map)]).expect("a launch");
    let mut words = [0u64; 16];
    gpu.download(dst, bytemuck::cast_slice_mut(&mut words)).expect("it ran");
    // As the stand-in encodes: address, sizes, distance of rows, tile, steps, options.
    let expected = [map.base.addr(), 100, 7, 208, 64, 8, 1, 1, 6, 0, 3, 3, 0, 0, 0, 0];
    assert_eq!(words, expected);
    let odd = TensorMap { row_bytes: 216, ..map };
    assert_eq!(
        told(launch(&[dst.into(), Arg::TensorMap(odd)])),
        "encoding a tensor map: tensor map: distance of rows in bytes 216, must be a multiple of 16; \
         copy the matrix to rows of whole 16-byte pieces"
    );
    assert_eq!(
        told(launch(&[Arg::TensorMap(map), dst.into()])),
        "launching echo_map: echo_map takes (dst: u64, map: tensor map), given (tensor map, u64); pass \
         its parameters in order"
    );
    let Some((old, _folder)) = backend("backend_no_map", &[], &[]) else { return };
    let kernel = old.load(&echo_map(1)).expect("it loads");
    let args = [Arg::U64(0), Arg::TensorMap(map)];
    let outcome = old.launch(&*kernel, &Launch::new([1, 1], &args, Stream::default()));
    assert!(told(outcome).contains("no function `cuTensorMapEncodeTiled`"));
}

#[test]
fn clusters_fit_the_device_and_the_grid() {
    let Some((gpu, _folder)) = backend("clusters", &["full"], &[]) else { return };
    let kernel = gpu.load(&echo_map(4)).expect("it loads");
    // The stand-in has 132 SMs, its kernels 32 CTAs on each.
    assert_eq!(kernel.max_active_clusters(), Some(132 * 32 / 4));
    assert_eq!(gpu.load(&echo_map(1)).expect("it loads").max_active_clusters(), None);
    let dst = gpu.alloc(1024).expect("memory");
    let args = [dst.into(), Arg::TensorMap(matrix(dst))];
    let launch = |grid| gpu.launch(&*kernel, &Launch::new(grid, &args, Stream::default()));
    launch([8, 3]).expect("whole clusters");
    assert_eq!(
        told(launch([6, 4])),
        "launching echo_map: echo_map launched with 6 CTAs along x, its clusters have 4; launch a \
         multiple of that"
    );
    let Some((old, _folder)) = backend("no_clusters", &[], &[]) else { return };
    let refused = told(old.load(&echo_map(2)).map(drop));
    let why =
        "echo_map runs in clusters of 2 CTAs, the device launches none; choose a configuration";
    assert!(refused.contains(why), "{refused}");
}

/// Fault B46: a launch starts early only where the caller allows it, the kernel waits by itself, and
/// device and driver know how.
#[test]
fn b46_only_kernels_that_wait_start_early() {
    let waiting = |waits: bool| {
        let mut a = Asm::new();
        if waits {
            a.griddepcontrol_wait();
        }
        a.exit();
        a.finish("step", SmArch::baseline(90), 64, 1)
    };
    let lines = |name: &str, cfgs: &[&str]| {
        let log = tempfile::NamedTempFile::new().expect("a temporary file");
        let path = log.path().to_str().expect("a plain path");
        let (gpu, _folder) = backend(name, cfgs, &[("STUB_LAUNCH_LOG", path)])?;
        for waits in [true, false] {
            let kernel = gpu.load(&waiting(waits)).expect("it loads");
            for overlap_previous in [false, true] {
                let plain = Launch::new([2, 1], &[], Stream::default());
                gpu.launch(&*kernel, &Launch { overlap_previous, ..plain }).expect("a launch");
            }
        }
        let text = fs::read_to_string(path).expect("the log");
        Some(text.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let plain = "step x2 plain";
    let Some(found) = lines("early", &["full"]) else { return };
    assert_eq!(found, [plain, "step x2 cluster 1, early", plain, plain]);
    let Some(found) = lines("never_early", &[]) else { return };
    assert_eq!(found, [plain; 4]);
}
