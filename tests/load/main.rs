//! Loading: what arrives on the emulator, on a stand-in for the driver and on a GPU is what was packed, however it went there.

mod bounds;
#[path = "../stub/build.rs"]
mod build;
#[path = "../fixtures/mod.rs"]
mod fixtures;
#[path = "../stub/open.rs"]
mod opened;
#[path = "../store/support.rs"]
#[allow(dead_code)]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use build::stub;
use fixtures::{fixture, weights_of};
use makaira::asm::Module;
use makaira::backend::{Backend, DevicePtr, Error as BackendError, Kernel, Launch, Stream};
use makaira::checkpoint::Checkpoint;
use makaira::driver::{Context, DeviceBuffer, StagingRing};
use makaira::emu::EmuBackend;
use makaira::gemm::Gemm;
use makaira::jit::{GpuBackend, Loader as Modules, Store};
use makaira::load::{Error, LoadOptions, Loaded, Loader};
use makaira::reference::Random;
use makaira::store::{PackOptions, PackedStore, pack};
use makaira::target::DeviceSpec;
use makaira::weights::{PackedWeights, Part};
use opened::{context, open};
use support::{Packed, below, model, write_model};

/// The emulator, the stand-in behind the GPU's backend where there is a compiler for it, and a GPU where there is one.
fn backends() -> Vec<(Arc<dyn Backend>, Option<tempfile::TempDir>)> {
    let mut backends: Vec<(Arc<dyn Backend>, _)> = vec![(Arc::new(EmuBackend::h200_like(2)), None)];
    if let Some(driver) = open(stub("loading", &["full"], &[])) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let modules = Modules::new(Store::at(folder.path()));
        backends.push((Arc::new(GpuBackend::new(context(driver, 0), modules)), Some(folder)));
    }
    match GpuBackend::open(0) {
        Ok(gpu) => backends.push((Arc::new(gpu), None)),
        Err(error) => eprintln!("skipped: loading on a GPU ({error})"),
    }
    backends
}

fn on_device(backend: &dyn Backend, ptr: DevicePtr, bytes: usize) -> Vec<u8> {
    let mut found = vec![0x5a; bytes];
    backend.download(ptr, &mut found).expect("allocated");
    found
}

/// Small buffers, so that layers take many, and all kinds of turns.
fn options(random: &mut Random) -> LoadOptions {
    LoadOptions {
        threads: 1 + below(random, 4),
        buffers: 1 + below(random, 3),
        buffer_bytes: LoadOptions::LEAST_BYTES + 16 * below(random, 500),
        reads: below(random, 2) == 0,
        others: true,
    }
}

fn assert_loaded(backend: &dyn Backend, loaded: &Loaded, expected: &[(String, PackedWeights)]) {
    assert_eq!((loaded.weights.len(), loaded.report.num_layers), (expected.len(), expected.len()));
    let mut bytes = 0;
    for (name, packed) in expected {
        let weight = loaded.weight(name).expect(name);
        let found = on_device(backend, weight.ptr(), packed.bytes().len());
        assert!(found == packed.bytes(), "{name}");
        assert_eq!(weight.factor().to_bits(), packed.factor().to_bits(), "{name}");
        assert_eq!(weight.source_inputs(), packed.source_inputs(), "{name}");
        bytes += found.len() as u64;
    }
    assert_eq!(loaded.report.layer_bytes, bytes);
}

fn packed_layers(checkpoint: &Checkpoint) -> Vec<(String, PackedWeights)> {
    let layers = checkpoint.layers().iter().map(|layer| {
        let weight = checkpoint.load(&layer.name, 2).expect("legal");
        (layer.name.clone(), PackedWeights::pack(&weight.view(), 1).expect("packs"))
    });
    layers.collect()
}

#[test]
fn stores_and_checkpoints_arrive_whole() {
    let mut random = Random::new(Random::fresh_seed());
    let folder = tempfile::tempdir().expect("a temporary directory");
    let crafted = folder.path().join("crafted");
    write_model(&crafted, &model(7, &mut random));
    let names = ["awq-g128", "gptq-g128-actorder", "gptq-channelwise", "ct-nvfp4a16", "tiny-llama"];
    let fixtures = names.into_iter().filter_map(fixture).map(weights_of);
    for (at, path) in [crafted].into_iter().chain(fixtures).enumerate() {
        let checkpoint = Checkpoint::open(&path).expect("readable");
        let expected = packed_layers(&checkpoint);
        let target = folder.path().join(format!("store-{at}"));
        let pack_options = PackOptions { file_bytes: 1_000_000, ..PackOptions::default() };
        pack(&checkpoint, &target, &pack_options, &mut |_| ()).expect("packs");
        let store = PackedStore::open(&target).expect("opens");
        for (backend, _folder) in backends() {
            let gemm = Gemm::new(backend.clone());
            for _ in 0..3 {
                let options = options(&mut random);
                let loader = Loader::new(&gemm, options).expect("legal");
                let from_store = loader.store(&store).expect("loads");
                let from_checkpoint = loader.checkpoint(&checkpoint).expect("loads");
                for loaded in [&from_store, &from_checkpoint] {
                    assert_loaded(&*backend, loaded, &expected);
                    let mut bytes = 0;
                    for tensor in &loaded.tensors {
                        let theirs = checkpoint.tensors().get(&tensor.name).expect("carried over");
                        assert_eq!((tensor.dtype, &tensor.shape[..]), (theirs.dtype, theirs.shape));
                        let found = on_device(&*backend, tensor.ptr, theirs.bytes.len());
                        assert!(found == theirs.bytes, "{}: {options:?}", tensor.name);
                        bytes += found.len() as u64;
                    }
                    assert_eq!(loaded.report.other_bytes, bytes);
                    assert_eq!(loaded.tensors.len(), store.carried().count());
                }
            }
        }
    }
}

#[test]
fn ranks_load_their_parts() {
    let mut random = Random::new(Random::fresh_seed());
    let packed = Packed::new(6, u64::MAX, &mut random);
    let store = packed.open().expect("opens");
    for (backend, _folder) in backends() {
        let gemm = Gemm::new(backend.clone());
        let options = LoadOptions { others: false, ..options(&mut random) };
        let loader = Loader::new(&gemm, options).expect("legal");
        let part_of = |spec: &makaira::weights::PackedSpec| -> Part {
            let ranks = *spec.ranks_by_inputs().last().expect("one at least");
            spec.part_by_inputs(ranks - 1, ranks).expect("divides")
        };
        let loaded = loader.store_parts(&store, |layer| Ok(Some(part_of(&layer.spec))));
        let expected: Vec<_> = store
            .layers()
            .iter()
            .map(|layer| {
                let view = store.packed(&layer.name).expect("there");
                let shard = view.shard(part_of(&layer.spec)).expect("legal");
                (layer.name.clone(), shard.to_packed())
            })
            .collect();
        assert_loaded(&*backend, &loaded.expect("loads"), &expected);
        let refused =
            loader.store_parts(&store, |layer| layer.spec.part_by_outputs(0, 7).map(Some));
        let Err(Error::Weight { source, .. }) = refused else { panic!("nothing has 7 parts") };
        assert!(source.to_string().contains("cannot be cut into 7"), "{source}");
    }
}

#[test]
fn too_much_or_too_little_memory_is_refused() {
    let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2)));
    let legal = LoadOptions::default();
    for options in [
        LoadOptions { threads: 0, ..legal },
        LoadOptions { buffers: 0, ..legal },
        LoadOptions { buffer_bytes: 0, ..legal },
        LoadOptions { buffer_bytes: LoadOptions::LEAST_BYTES - 16, ..legal },
        LoadOptions { buffer_bytes: LoadOptions::LEAST_BYTES + 1, ..legal },
        LoadOptions { threads: 4, buffers: 4, buffer_bytes: (16 << 20) + 16, ..legal },
        LoadOptions { threads: usize::MAX, buffers: usize::MAX, ..legal },
    ] {
        let refused = Loader::new(&gemm, options).map(|_| ()).expect_err("out of bounds");
        assert!(matches!(refused, Error::Options { .. }), "{refused}");
    }
}

/// The emulator, of which some call fails, and which counts what is alive.
struct Failing {
    inner: EmuBackend,
    calls_left: AtomicUsize,
    alive: AtomicUsize,
}

impl Failing {
    fn call(&self) -> Result<(), BackendError> {
        let count = |left: usize| left.checked_sub(1);
        let outcome = self.calls_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, count);
        outcome.map(|_| ()).map_err(|_| BackendError::new("a call", "the device is tired"))
    }
}

impl Backend for Failing {
    fn device(&self) -> &DeviceSpec {
        self.inner.device()
    }
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, BackendError> {
        self.call()?;
        self.alive.fetch_add(1, Ordering::SeqCst);
        self.inner.alloc(bytes)
    }
    fn free(&self, ptr: DevicePtr) -> Result<(), BackendError> {
        self.alive.fetch_sub(1, Ordering::SeqCst);
        self.inner.free(ptr)
    }
    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), BackendError> {
        self.call()?;
        self.inner.upload(ptr, bytes)
    }
    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.inner.download(ptr, bytes)
    }
    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, BackendError> {
        self.inner.load(module)
    }
    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), BackendError> {
        self.inner.launch(kernel, launch)
    }
    fn synchronize(&self, stream: Stream) -> Result<(), BackendError> {
        self.inner.synchronize(stream)
    }
}

/// Whichever call fails, the failure comes out, nobody waits for ever, and nothing stays allocated.
#[test]
fn a_device_that_fails_anywhere_ends_the_load() {
    let mut random = Random::new(Random::fresh_seed());
    let packed = Packed::new(12, u64::MAX, &mut random);
    let (store, checkpoint) = (packed.open().expect("opens"), packed.checkpoint());
    let mut num_done = 0;
    for calls in (0..80).step_by(3) {
        let backend = Arc::new(Failing {
            inner: EmuBackend::h200_like(2),
            calls_left: AtomicUsize::new(calls),
            alive: AtomicUsize::new(0),
        });
        let gemm = Gemm::new(backend.clone() as Arc<dyn Backend>);
        let loader = Loader::new(&gemm, options(&mut random)).expect("legal");
        for packed_already in [true, false] {
            let loaded = match packed_already {
                true => loader.store(&store),
                false => loader.checkpoint(&checkpoint),
            };
            match loaded.map(drop) {
                Ok(()) => num_done += 1,
                Err(error) => {
                    let mut text = error.to_string();
                    let mut cause = std::error::Error::source(&error);
                    while let Some(error) = cause {
                        text.push_str(&error.to_string());
                        cause = error.source();
                    }
                    assert!(text.contains("tired"), "{text}");
                }
            }
            assert_eq!(backend.alive.load(Ordering::SeqCst), 0, "after {calls} calls");
        }
    }
    assert!(num_done > 0, "no run got through");
}

#[test]
fn files_that_shrink_before_they_are_read_end_the_load() {
    let mut random = Random::new(Random::fresh_seed());
    for reads in [false, true] {
        let packed = Packed::new(5, u64::MAX, &mut random);
        let (store, checkpoint) = (packed.open().expect("opens"), packed.checkpoint());
        let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2)));
        let loader = Loader::new(&gemm, LoadOptions { reads, ..options(&mut random) });
        let loader = loader.expect("legal");
        for path in [packed.file(), packed.folder.path().join("model/model.safetensors")] {
            let file = std::fs::File::options().write(true).open(path).expect("there");
            file.set_len(file.metadata().expect("a size").len() / 3).expect("shorter");
        }
        for loaded in [loader.store(&store), loader.checkpoint(&checkpoint)] {
            let error = loaded.map(|_| ()).expect_err("it shrank");
            assert!(matches!(error, Error::Checkpoint(_) | Error::Store(_)), "{error}");
        }
    }
}

/// The ring alone: copies happen as late as they may on the stand-in, so a buffer that is given too early shows.
#[test]
fn buffers_of_a_ring_wait_for_their_copies() {
    if let Some(driver) = open(stub("ring", &[], &[])) {
        turn_rings(&context(driver, 0));
    }
    match Context::open(0) {
        Ok(context) => turn_rings(&context),
        Err(error) => eprintln!("skipped: rings on a GPU ({error})"),
    }
}

fn turn_rings(context: &Context) {
    let mut random = Random::new(Random::fresh_seed());
    for count in [1, 2, 5] {
        let (bytes, turns) = (1000, 40);
        let target = DeviceBuffer::<u8>::zeroed(context, bytes * turns).expect("fits");
        let expected: Vec<u8> = (0..bytes * turns).map(|_| (random.bits() >> 7) as u8).collect();
        let mut ring = StagingRing::new(context, count, bytes).expect("fits");
        for (turn, part) in expected.chunks(bytes).enumerate() {
            let used = if turn % 3 == 0 { bytes / 2 } else { bytes };
            ring.buffer().expect("free")[..used].copy_from_slice(&part[..used]);
            ring.send(target.ptr_at(turn * bytes), used).expect("enqueued");
            if used < bytes {
                ring.buffer().expect("free")[..bytes - used].copy_from_slice(&part[used..]);
                ring.send(target.ptr_at(turn * bytes + used), bytes - used).expect("enqueued");
            }
        }
        assert!(ring.send(target.ptr(), bytes + 1).is_err(), "more than a buffer has");
        match count {
            1 => ring.finish().expect("arrived"),
            // A ring that goes waits as well.
            _ => drop(ring),
        }
        assert!(target.to_vec().expect("a download") == expected, "{count} buffers");
    }
}
