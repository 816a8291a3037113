//! From files to a device: packed weights as they are, a checkpoint's layers packed on the way.
//!
//! Several threads each fill a few host buffers and send them ([`Backend::staging`]); on a GPU these are pinned and the
//! copies asynchronous, so that reading or packing one buffer and copying another happen at the same time. Buffers are
//! the only host memory, bounded by [`LoadOptions::MOST_BYTES`], but for layers of plain checkpoints, which are rounded
//! one at a time. A store's bytes are copied once, from the mapping or, with [`LoadOptions::reads`], from the file.
//!
//! Invariant: what a [`Loaded`] holds has arrived, and no file had changed by then.
//!
//! ```
//! use std::sync::Arc;
//! use makaira::load::{LoadOptions, Loader};
//! use makaira::{Checkpoint, EmuBackend, Gemm};
//! let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(8))); // or GpuBackend::open(0)?
//! let checkpoint = Checkpoint::open("assets/demo".as_ref())?;
//! let loaded = Loader::new(&gemm, LoadOptions::default())?.checkpoint(&checkpoint)?;
//! let weight = loaded.weight("model.layers.0.self_attn.k_proj").expect("a layer of it");
//! assert_eq!((weight.layout().n, loaded.report.num_layers), (128, 1));
//! # Ok::<(), makaira::Error>(())
//! ```

mod error;
mod ring;

pub use error::Error;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{Backend, DevicePtr};
use crate::checkpoint::{Checkpoint, Dtype, LayerInfo, LayerWeight, Tensors};
use crate::gemm::{Gemm, Weight};
use crate::store::{PackedStore, StoredLayer};
use crate::weights::{
    self, PackedLayout, PackedSpec, PackedWeights, Packing, Part, default_threads,
};
use ring::{Item, Queue, Source, Stopped};

/// How to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Threads that fill buffers.
    pub threads: usize,
    /// Buffers of each thread.
    pub buffers: usize,
    /// Bytes of a buffer.
    pub buffer_bytes: usize,
    /// Whether bytes that are copied as they are are read from the files, past the mapping.
    pub reads: bool,
    /// Whether everything else (embeddings, norms, biases) is loaded too.
    pub others: bool,
}

impl Default for LoadOptions {
    /// Up to eight threads with three buffers of 4 MiB each.
    fn default() -> Self {
        let threads = default_threads().min(8);
        Self { threads, buffers: 3, buffer_bytes: 4 << 20, reads: false, others: false }
    }
}

impl LoadOptions {
    /// The most that all buffers may have.
    pub const MOST_BYTES: usize = 256 << 20;
    /// The least that a buffer may have: a chunk of any layout fits.
    pub const LEAST_BYTES: usize = 64 << 10;
}

/// What was loaded, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Layers.
    pub num_layers: usize,
    /// Bytes of the layers on the device.
    pub layer_bytes: u64,
    /// Bytes of everything else on the device.
    pub other_bytes: u64,
    /// From the first allocation until everything had arrived and was checked.
    pub time: Duration,
}

/// A tensor on a device, as its file has it. Freed when dropped.
pub struct LoadedTensor {
    backend: Arc<dyn Backend>,
    /// The name.
    pub name: String,
    /// The element type.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: Vec<usize>,
    /// Where it lies.
    pub ptr: DevicePtr,
}

impl Drop for LoadedTensor {
    fn drop(&mut self) {
        if let Err(error) = self.backend.free(self.ptr) {
            log::debug!("freeing tensor {}: {error}", self.name);
        }
    }
}

/// What is on the device.
pub struct Loaded {
    /// The layers, by name.
    pub weights: Vec<(String, Weight)>,
    /// Everything else, by name, if it was asked for.
    pub tensors: Vec<LoadedTensor>,
    /// The figures.
    pub report: LoadReport,
}

impl Loaded {
    /// The layer of that name.
    pub fn weight(&self, name: &str) -> Option<&Weight> {
        let at = self.weights.binary_search_by(|(layer, _)| layer.as_str().cmp(name)).ok()?;
        Some(&self.weights[at].1)
    }
}

/// Loads for one [`Gemm`].
#[derive(Clone, Copy)]
pub struct Loader<'g> {
    gemm: &'g Gemm,
    options: LoadOptions,
}

impl<'g> Loader<'g> {
    /// A loader.
    ///
    /// # Errors
    /// [`Error::Options`] for buffers that are too small, or too large together.
    pub fn new(gemm: &'g Gemm, options: LoadOptions) -> Result<Self, Error> {
        let LoadOptions { threads, buffers, buffer_bytes, .. } = options;
        let (least_bytes, most_bytes) = (LoadOptions::LEAST_BYTES, LoadOptions::MOST_BYTES);
        let all = threads.checked_mul(buffers).and_then(|count| count.checked_mul(buffer_bytes));
        let fits = all.is_some_and(|bytes| (1..=most_bytes).contains(&bytes));
        if !fits || buffer_bytes < least_bytes || !buffer_bytes.is_multiple_of(16) {
            return Err(Error::Options { threads, buffers, buffer_bytes, least_bytes, most_bytes });
        }
        Ok(Self { gemm, options })
    }

    /// Loads a store: every byte is copied as it is.
    ///
    /// # Errors
    /// [`Error::Gemm`] and [`Error::Backend`] if the device fails or has too little memory, [`Error::Store`] if a file
    /// changed meanwhile, [`Error::Checkpoint`] if it cannot be read.
    pub fn store(&self, store: &PackedStore) -> Result<Loaded, Error> {
        self.store_parts(store, |_| Ok(None))
    }

    /// Loads a part of every layer of a store for which `cut` gives one, and all of the others. The rest is not read.
    /// Parts of layers with activation order take the activations of the whole layer.
    ///
    /// # Errors
    /// Those of [`Loader::store`], and what `cut` refuses in [`Error::Weight`].
    pub fn store_parts(
        &self,
        store: &PackedStore,
        mut cut: impl FnMut(&StoredLayer) -> Result<Option<Part>, weights::Error>,
    ) -> Result<Loaded, Error> {
        let others: Vec<&str> = store.carried().filter(|_| self.options.others).collect();
        self.load(store.tensors(), others, |queue, weights| {
            let mut layers = store.layers().iter();
            layers.try_for_each(|layer| self.stored(store, layer, &mut cut, queue, weights))
        })
    }

    /// Loads a checkpoint: layers are packed into the buffers.
    ///
    /// # Errors
    /// Those of [`Loader::store`], and the refusal of any layer.
    pub fn checkpoint(&self, checkpoint: &Checkpoint) -> Result<Loaded, Error> {
        let tensors = checkpoint.tensors();
        let mut others: Vec<&str> = Vec::new();
        if self.options.others {
            let of_layers: std::collections::BTreeSet<&str> = checkpoint
                .layers()
                .iter()
                .flat_map(|layer| checkpoint.tensors_of(layer))
                .map(|tensor| tensor.name)
                .collect();
            others.extend(tensors.names().filter(|name| !of_layers.contains(name)));
        }
        self.load(tensors, others, |queue, weights| {
            let mut layers = checkpoint.layers().iter();
            layers.try_for_each(|layer| self.packed(checkpoint, layer, queue, weights))
        })
    }

    /// Loads `others` and what `layers` adds.
    fn load<'a>(
        &self,
        tensors: &'a Tensors,
        others: Vec<&str>,
        layers: impl FnOnce(&Queue<'_, 'a>, &mut Vec<(String, Weight)>) -> Result<(), Stopped>,
    ) -> Result<Loaded, Error> {
        let start = Instant::now();
        let (weights, report) = (Vec::new(), LoadReport::default());
        // Outlives the workers, who write to what it owns.
        let mut loaded = Loaded { weights, tensors: Vec::new(), report };
        ring::run(&**self.gemm.backend(), &self.options, |queue| {
            for name in others {
                self.other(tensors, name, queue, &mut loaded)?;
            }
            layers(queue, &mut loaded.weights)
        })?;
        tensors.check_unchanged()?;
        let sizes = loaded.weights.iter().map(|(_, weight)| weight.layout().total_bytes as u64);
        loaded.report.layer_bytes = sizes.sum();
        loaded.report.num_layers = loaded.weights.len();
        loaded.report.time = start.elapsed();
        Ok(loaded)
    }

    /// Adds pieces of a file, so many to a buffer as fit.
    fn push_ranges<'a>(
        &self,
        queue: &Queue<'_, 'a>,
        (tensors, file): (&'a Tensors, usize),
        all: impl Iterator<Item = Range<usize>>,
        mut to: DevicePtr,
    ) -> Result<(), Stopped> {
        let most = self.options.buffer_bytes;
        let (mut ranges, mut bytes) = (Vec::new(), 0);
        let mut push = |ranges: &mut Vec<Range<usize>>, bytes: &mut usize| {
            let source = Source::File { tensors, file, ranges: std::mem::take(ranges) };
            let item = Item { to, bytes: std::mem::take(bytes), source };
            to = to.offset(item.bytes as u64);
            queue.push(item)
        };
        for mut range in all {
            while !range.is_empty() {
                let count = range.len().min(most - bytes);
                ranges.push(range.start..range.start + count);
                range.start += count;
                bytes += count;
                if bytes == most {
                    push(&mut ranges, &mut bytes)?;
                }
            }
        }
        if bytes > 0 { push(&mut ranges, &mut bytes) } else { Ok(()) }
    }

    fn other<'a>(
        &self,
        tensors: &'a Tensors,
        name: &str,
        queue: &Queue<'_, 'a>,
        loaded: &mut Loaded,
    ) -> Result<(), Stopped> {
        let tensor = tensors.get(name).expect("listed");
        let (file, range) = tensors.place(name).expect("listed");
        let backend = self.gemm.backend().clone();
        let bytes = range.len() as u64;
        let ptr = backend.alloc(bytes.max(1)).map_err(|error| queue.fail(error))?;
        let (name, dtype, shape) = (name.to_owned(), tensor.dtype, tensor.shape.to_vec());
        loaded.tensors.push(LoadedTensor { backend, name, dtype, shape, ptr });
        loaded.report.other_bytes += bytes;
        self.push_ranges(queue, (tensors, file), [range].into_iter(), ptr)
    }

    /// Room for a layer, which from now on outlives the workers; its address.
    fn reserve(
        &self,
        name: &str,
        spec: &PackedSpec,
        queue: &Queue<'_, '_>,
        weights: &mut Vec<(String, Weight)>,
    ) -> Result<DevicePtr, Stopped> {
        let weight = self.gemm.reserve_for(spec).map_err(|error| queue.fail(error))?;
        let ptr = weight.ptr();
        weights.push((name.to_owned(), weight));
        Ok(ptr)
    }

    fn stored<'a>(
        &self,
        store: &'a PackedStore,
        layer: &StoredLayer,
        cut: &mut impl FnMut(&StoredLayer) -> Result<Option<Part>, weights::Error>,
        queue: &Queue<'_, 'a>,
        weights: &mut Vec<(String, Weight)>,
    ) -> Result<(), Stopped> {
        let refuse = |source| queue.fail(Error::Weight { layer: layer.name.clone(), source });
        let tensors = store.tensors();
        let (file, whole) = tensors.place(&store.tensor_of(layer)).expect("checked when opened");
        let Some(part) = cut(layer).map_err(refuse)? else {
            let to = self.reserve(&layer.name, &layer.spec, queue, weights)?;
            return self.push_ranges(queue, (tensors, file), [whole].into_iter(), to);
        };
        let packed = store.packed(&layer.name).map_err(|error| queue.fail(error))?;
        let shard = packed.shard(part).map_err(refuse)?;
        let to = self.reserve(&layer.name, shard.spec(), queue, weights)?;
        let first = whole.start;
        let ranges = shard.ranges().map(|range| range.start + first..range.end + first);
        self.push_ranges(queue, (tensors, file), ranges, to)
    }

    fn packed<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        layer: &LayerInfo,
        queue: &Queue<'_, 'a>,
        weights: &mut Vec<(String, Weight)>,
    ) -> Result<(), Stopped> {
        let LoadOptions { threads, buffer_bytes, .. } = self.options;
        let refuse = |source| queue.fail(Error::Weight { layer: layer.name.clone(), source });
        let weight = checkpoint.load(&layer.name, threads).map_err(|error| queue.fail(error))?;
        let matrix = match weight {
            LayerWeight::Stored(matrix) => matrix,
            LayerWeight::Rounded(quantized) => {
                let packed = PackedWeights::pack(&quantized.view(), threads).map_err(refuse)?;
                let to = self.reserve(&layer.name, packed.spec(), queue, weights)?;
                let (all, packed) = (packed.layout().total_bytes, Arc::new(packed));
                return (0..all).step_by(buffer_bytes).try_for_each(|at| {
                    let bytes = buffer_bytes.min(all - at);
                    let source = Source::Packed(packed.clone(), at);
                    queue.push(Item { to: to.offset(at as u64), bytes, source })
                });
            }
        };
        let packing = Arc::new(Packing::of(&matrix).map_err(refuse)?);
        let to = self.reserve(&layer.name, packing.spec(), queue, weights)?;
        let PackedLayout { chunk_bytes, codes_bytes, total_bytes, .. } = *packing.spec().layout();
        let run = buffer_bytes / chunk_bytes;
        let num_chunks = codes_bytes / chunk_bytes;
        for first in (0..num_chunks).step_by(run) {
            let bytes = run.min(num_chunks - first) * chunk_bytes;
            let to = to.offset((first * chunk_bytes) as u64);
            queue.push(Item { to, bytes, source: Source::Chunks(packing.clone(), first) })?;
        }
        // Scales of whole columns, two bytes each.
        (codes_bytes..total_bytes).step_by(buffer_bytes).try_for_each(|at| {
            let (first, bytes) = ((at - codes_bytes) / 2, buffer_bytes.min(total_bytes - at));
            let source = Source::Tail(packing.clone(), first);
            queue.push(Item { to: to.offset(at as u64), bytes, source })
        })
    }
}
