//! Early launch of products (fault B46): the same bits with it and without, on a GPU; on the stand-in for
//! libcuda, that the permission reaches the driver's call.
//!
//! A program of its own, because waiting for the context (which every download does) is refused while any
//! stream of the context is being captured.

#[path = "stub/build.rs"]
mod build;
#[path = "gemm/lane.rs"]
mod lane;
#[path = "stub/open.rs"]
mod opened;
#[path = "gemm/support.rs"]
mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::{fs, iter};

use half::f16;
use makaira::backend::{DevicePtr, Enqueue, Stream};
use makaira::driver::{self, CaptureMode};
use makaira::gemm::{Matrix, Prepared, Workspace};
use makaira::jit::{GpuBackend, GpuKernel, Loader, Store};
use makaira::kernel::{Rows, select};

use build::stub;
use opened::{context, open};
use support::{Device, Fill, Layer, Random, Setup, activations, chain, gpu, skipped};

/// Pairs of products, one after the other on one stream of a GPU.
const PAIRS: usize = 1000;
/// Different activations, taken in turn: a product that reads what the pair before it left is seen.
const INPUTS: usize = 5;

/// Two layers, the second of which reads what the first writes, and one workspace for both.
struct Pair {
    first: Setup,
    second: Setup,
    m: usize,
    num_pairs: usize,
    inputs: Vec<DevicePtr>,
    between: DevicePtr,
    /// `[num_pairs][m][second.n]`.
    outputs: DevicePtr,
}

impl Pair {
    fn new(device: &Device, m: usize, random: &mut Random) -> Self {
        let (hidden, inner, num_pairs) = device.size((256, 512, 4), (2048, 3072, PAIRS));
        // Products of products stay in the range of fp16.
        let layer = |n, k, random: &mut Random| Layer::new(n, k, 128, Fill::Random, random);
        let first = Setup::new(device, layer(inner, hidden, random));
        let second = Setup::new(device, layer(hidden, inner, random));
        let backend = &device.backend;
        let input = |_| {
            let a = activations(m, hidden, Fill::Random, random);
            let ptr = backend.alloc(2 * a.len() as u64).expect("fits");
            backend.upload(ptr, bytemuck::cast_slice(&a)).expect("fits");
            ptr
        };
        let inputs = (0..INPUTS).map(input).collect();
        let between = backend.alloc((2 * m * inner) as u64).expect("fits");
        let outputs = backend.alloc((2 * num_pairs * m * hidden) as u64).expect("fits");
        Self { first, second, m, num_pairs, inputs, between, outputs }
    }

    /// Enqueues the pair of number `idx`.
    fn enqueue(
        &self,
        idx: usize,
        kernels: Option<&[Prepared; 2]>,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<(), makaira::gemm::Error> {
        let (hidden, inner) = (self.first.layer.k as u64, self.first.layer.n as u64);
        let m = self.m as u64;
        let a = Matrix { ptr: self.inputs[idx % INPUTS], stride: hidden };
        let between = Matrix { ptr: self.between, stride: inner };
        let c = self.outputs.offset(2 * idx as u64 * m * hidden);
        let c = Matrix { ptr: c, stride: hidden };
        let steps = [(&self.first, a, between), (&self.second, between, c)];
        for (idx, (setup, a, c)) in steps.into_iter().enumerate() {
            let (gemm, weight) = (&setup.gemm, &setup.weight);
            match kernels {
                Some(kernels) => {
                    gemm.matmul_with(&kernels[idx], a, weight, c, m, workspace, order)?;
                }
                None => gemm.matmul(a, weight, c, m, workspace, order)?,
            }
        }
        Ok(())
    }

    /// What the chosen kernels of both layers need.
    fn workspace(&self) -> Workspace {
        let needs = [&self.first, &self.second].map(|setup| {
            let workspace = setup.gemm.workspace(&setup.weight, self.m as u64).expect("fits");
            (workspace.scratch_bytes(), workspace.num_locks())
        });
        let [(a_bytes, a_locks), (b_bytes, b_locks)] = needs;
        let gemm = &self.first.gemm;
        gemm.workspace_of(a_bytes.max(b_bytes), a_locks.max(b_locks)).expect("fits")
    }

    /// All outputs, and NaNs in their place.
    fn take(&self) -> Vec<f16> {
        let backend = &self.first.device.backend;
        let mut outputs = vec![f16::ZERO; self.num_pairs * self.m * self.first.layer.k];
        backend.download(self.outputs, bytemuck::cast_slice_mut(&mut outputs)).expect("it ran");
        backend.upload(self.outputs, &vec![0xff; 2 * outputs.len()]).expect("fits");
        backend.upload(self.between, &vec![0xff; 2 * self.m * self.first.layer.n]).expect("fits");
        outputs
    }

    /// The best kernels of each family for both layers, and what each pair of them needs.
    fn kernels(&self) -> Vec<([Prepared; 2], Workspace)> {
        let device = self.first.device.backend.device();
        let ranked = [&self.first, &self.second]
            .map(|setup| select::ranked(&setup.problem(self.m, Rows::Whole), device));
        let families: BTreeSet<&str> =
            ranked[0].iter().map(|choice| choice.config.family).collect();
        let of_family = |family: &str| {
            let mut needs = (0, 0);
            let mut kernels = Vec::new();
            for (setup, ranked) in iter::zip([&self.first, &self.second], &ranked) {
                let choice = *ranked.iter().find(|choice| choice.config.family == family)?;
                let problem = setup.problem(self.m, choice.config.rows);
                for plan in select::plans(&choice.config, &problem, choice.stripe) {
                    needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
                }
                kernels.push(setup.gemm.prepare_choice(choice).expect("it compiles"));
            }
            let workspace = self.first.gemm.workspace_of(needs.0, needs.1).expect("fits");
            Some((<[Prepared; 2]>::try_from(kernels).ok()?, workspace))
        };
        families.into_iter().filter_map(of_family).collect()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for ptr in self.inputs.iter().chain([&self.between, &self.outputs]) {
            self.first.device.backend.free(*ptr).expect("allocated above");
        }
    }
}

/// Whether a loaded kernel can start early.
fn waits(kernel: &Prepared) -> bool {
    let kernel: &GpuKernel = kernel.kernel.as_any().downcast_ref().expect("a GPU's kernel");
    kernel.waits_for_previous()
}

/// In the emulator a kernel that starts early must not touch what the kernel before it may still touch.
#[test]
fn b46_early_launch_is_clean_in_the_emulator() {
    let device = Device::hopper();
    let mut random = Random(462);
    for m in [1, 16, 40] {
        let pair = Pair::new(&device, m, &mut random);
        for (kernels, workspace) in pair.kernels() {
            let name = format!("m = {m}, {}", kernels[0].choice.config);
            let run = |order: Enqueue| {
                for idx in 0..pair.num_pairs {
                    pair.enqueue(idx, Some(&kernels), &workspace, order)
                        .unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
                }
                pair.take()
            };
            pair.take();
            let wanted = run(Stream::default().into());
            assert!(wanted.iter().any(|c| *c != f16::ZERO), "{name}: nothing but zeros");
            assert!(run(Stream::default().early()) == wanted, "{name}: other bits");
        }
    }
}

#[test]
fn b46_early_launch_gives_the_same_bits() {
    let Some(gpu) = gpu() else {
        return skipped("b46 early launch: it takes a GPU");
    };
    let device = Device { backend: gpu.clone(), emu: None };
    let mut random = Random(46);
    let stream = driver::Stream::new(gpu.context()).expect("a stream");
    let plain = Enqueue::from(stream.borrow());
    let early = Stream::from(stream.borrow()).early();
    for m in [1, 16, 64] {
        let pair = Pair::new(&device, m, &mut random);
        for (kernels, workspace) in pair.kernels() {
            let name = format!("m = {m}, {}", kernels[0].choice.config);
            let run = |order: Enqueue| {
                for idx in 0..PAIRS {
                    pair.enqueue(idx, Some(&kernels), &workspace, order)
                        .unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
                }
                stream.synchronize().unwrap_or_else(|error| panic!("{name}: {error}"));
                pair.take()
            };
            pair.take();
            let wanted = run(plain);
            assert!(wanted.iter().all(|c| c.is_finite()), "{name}: not a product");
            assert!(wanted.iter().any(|c| *c != f16::ZERO), "{name}: nothing but zeros");
            assert!(run(early) == wanted, "{name}: other bits with early launch");
            assert!(run(plain) == wanted, "{name}: other bits in plain order");
            // As one graph, which keeps the permission.
            let capture = |order: Enqueue| {
                let graph = stream.capture(CaptureMode::ThreadLocal, |_| {
                    (0..PAIRS).try_for_each(|idx| {
                        pair.enqueue(idx, Some(&kernels), &workspace, order)
                            .map_err(Box::<dyn std::error::Error>::from)
                    })
                });
                graph.unwrap_or_else(|error| panic!("{name}: {}", chain(&*error)))
            };
            let graph = capture(early);
            match graph.num_programmatic_edges() {
                Ok(count) => {
                    // The first launch has none before it.
                    let early = [1, 0].map(|idx: usize| usize::from(waits(&kernels[idx])) * PAIRS);
                    let expected = (early[0] + early[1]).saturating_sub(waits(&kernels[0]).into());
                    assert_eq!(count, expected, "{name}: edges of early launches");
                }
                Err(error) => skipped(&format!("edges of the graph: {error}")),
            }
            let replay = graph.instantiate().expect("a graph");
            for _ in 0..2 {
                replay.launch(stream.borrow()).expect("replays");
                stream.synchronize().unwrap_or_else(|error| panic!("{name}: {error}"));
                assert!(pair.take() == wanted, "{name}: other bits from a graph");
            }
        }
    }
}

/// As users call it: the kernels of the library's choice.
#[test]
fn b46_chosen_kernels_give_the_same_bits_early() {
    let Some(gpu) = gpu() else {
        return skipped("b46 early launch of chosen kernels: it takes a GPU");
    };
    let device = Device { backend: gpu.clone(), emu: None };
    let mut random = Random(4600);
    let m = 8;
    let pair = Pair::new(&device, m, &mut random);
    let workspace = pair.workspace();
    let run = |order: Enqueue| {
        for idx in 0..PAIRS {
            pair.enqueue(idx, None, &workspace, order)
                .unwrap_or_else(|error| panic!("{}", chain(&error)));
        }
        gpu.context().synchronize().expect("it runs");
        pair.take()
    };
    pair.take();
    let wanted = run(Stream::default().into());
    assert!(run(Stream::default().early()) == wanted, "other bits with early launch");
}

/// The permission reaches the driver for every kernel that waits, and for no other.
#[test]
fn b46_early_products_reach_the_driver() {
    let log = tempfile::NamedTempFile::new().expect("a temporary file");
    let path = log.path().to_str().expect("a plain path");
    let variables = [("STUB_LAUNCH_LOG", path)];
    let Some(driver) = open(stub("early_products", &["full"], &variables)) else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let gpu = GpuBackend::new(context(driver, 0), Loader::new(Store::at(folder.path())));
    let device = Device { backend: Arc::new(gpu), emu: None };
    let mut random = Random(461);
    for m in [1, 16, 64] {
        let pair = Pair::new(&device, m, &mut random);
        for (kernels, workspace) in pair.kernels() {
            for (order, how) in
                [(Stream::default().into(), "in order"), (Stream::default().early(), "early")]
            {
                fs::write(path, "").expect("the log is writable");
                pair.enqueue(0, Some(&kernels), &workspace, order)
                    .unwrap_or_else(|error| panic!("{}", chain(&error)));
                let lines = fs::read_to_string(path).expect("the log");
                let lines: Vec<&str> = lines.lines().collect();
                assert_eq!(lines.len(), 2, "{lines:?}");
                for (line, kernel) in lines.iter().zip(&kernels) {
                    let name = kernel.choice.config.to_string();
                    let early = how == "early" && waits(kernel);
                    assert!(line.starts_with(&name), "{line} is no launch of {name}");
                    assert_eq!(line.ends_with("early"), early, "{line}, called {how}");
                }
            }
        }
        let workspace = pair.workspace();
        pair.enqueue(0, None, &workspace, Stream::default().early()).expect("the chosen kernels");
    }
}
