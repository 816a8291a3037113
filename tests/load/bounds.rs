//! Fault B81: host memory of a load does not grow with what is loaded.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use makaira::asm::Module;
use makaira::backend::{Backend, DevicePtr, Error, Kernel, Launch, Staging, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::Gemm;
use makaira::load::{LoadOptions, Loader};
use makaira::reference::Random;
use makaira::target::DeviceSpec;

use crate::support::Packed;

/// The emulator, counting the staging memory that was asked for and the largest copy that went another way.
struct Counting {
    inner: EmuBackend,
    rings: AtomicUsize,
    staged_bytes: AtomicUsize,
    largest_upload: AtomicUsize,
}

impl Backend for Counting {
    fn device(&self) -> &DeviceSpec {
        self.inner.device()
    }
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        self.inner.alloc(bytes)
    }
    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        self.inner.free(ptr)
    }
    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        self.largest_upload.fetch_max(bytes.len(), Ordering::SeqCst);
        self.inner.upload(ptr, bytes)
    }
    fn staging(&self, count: usize, bytes: usize) -> Result<Box<dyn Staging + '_>, Error> {
        self.rings.fetch_add(1, Ordering::SeqCst);
        self.staged_bytes.fetch_add(count * bytes, Ordering::SeqCst);
        self.inner.staging(count, bytes)
    }
    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        self.inner.download(ptr, bytes)
    }
    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error> {
        self.inner.load(module)
    }
    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error> {
        self.inner.launch(kernel, launch)
    }
    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.inner.synchronize(stream)
    }
}

#[test]
fn b81_host_memory_is_bounded_whatever_is_loaded() {
    let mut random = Random::new(Random::fresh_seed());
    let options = LoadOptions {
        threads: 2,
        buffers: 3,
        buffer_bytes: LoadOptions::LEAST_BYTES,
        reads: false,
        others: true,
    };
    let most = options.threads * options.buffers * options.buffer_bytes;
    for num_layers in [3, 120] {
        let packed = Packed::new(num_layers, u64::MAX, &mut random);
        let (store, checkpoint) = (packed.open().expect("opens"), packed.checkpoint());
        for packed_already in [true, false] {
            let backend = Arc::new(Counting {
                inner: EmuBackend::h200_like(1),
                rings: AtomicUsize::new(0),
                staged_bytes: AtomicUsize::new(0),
                largest_upload: AtomicUsize::new(0),
            });
            let gemm = Gemm::new(backend.clone() as Arc<dyn Backend>);
            let loader = Loader::new(&gemm, options).expect("legal");
            let loaded = match packed_already {
                true => loader.store(&store),
                false => loader.checkpoint(&checkpoint),
            };
            assert_eq!(loaded.expect("loads").weights.len(), num_layers);
            // Rings are made once, not for each tensor.
            let rings = backend.rings.load(Ordering::SeqCst);
            assert!((1..=options.threads).contains(&rings), "{rings} rings");
            let staged = backend.staged_bytes.load(Ordering::SeqCst);
            assert!(staged <= most, "{staged} bytes of staging memory, {most} were allowed");
            let largest = backend.largest_upload.load(Ordering::SeqCst);
            assert!(largest <= options.buffer_bytes, "a copy of {largest} bytes in one piece");
        }
    }
    let default = LoadOptions::default();
    let bytes = default.threads * default.buffers * default.buffer_bytes;
    assert!(bytes <= LoadOptions::MOST_BYTES && LoadOptions::MOST_BYTES <= 256 << 20);
    let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(1)));
    let more =
        LoadOptions { buffers: 1 + LoadOptions::MOST_BYTES / default.buffer_bytes, ..default };
    assert!(Loader::new(&gemm, more).is_err(), "more than the most");
}
