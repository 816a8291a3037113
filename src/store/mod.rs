//! Stores of packed weights: a checkpoint packed once, so that loading it is copying bytes.
//!
//! A store is a directory of ordinary safetensors files with an index, which any reader can list. A layer's weight is
//! the tensor `<layer>.packed`, byte for byte the buffer of [`PackedWeights`](crate::weights::PackedWeights); where
//! inputs have an order of their own, `<layer>.packed_inputs` and `<layer>.packed_groups` hold it. Everything else of
//! the checkpoint (embeddings, norms, biases) is carried over as it was. What the layers are stands in the files'
//! metadata (see `description.rs`), with a checksum of every tensor; the index holds a checksum of every header.
//!
//! [`pack`] writes files under other names, syncs and renames them, and the index last. So a directory is a store or
//! does not open; and a run that was killed goes on with the files that were finished, once they have been checked.
//!
//! [`PackedStore::open`] maps the files and trusts nothing in them: versions, places, types, sizes, orders and
//! descriptions are checked, and with them everything that could lead a reader or a kernel out of bounds. The weights
//! themselves are not read: any bytes are weights. [`PackedStore::check`] reads them and compares the checksums.

mod description;
mod error;
mod pack;
mod plan;
mod tensors;
mod write;
mod xxh64;

pub use description::{LayerSource, StoredLayer};
pub use error::Error;
pub use pack::{PackOptions, PackReport, Progress, pack};
pub use tensors::ALIGNMENT;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::checkpoint::{
    Dtype, INDEX, PACKED_KEY, Tensor, Tensors, check_dtype, check_shape, no_layer,
};
use crate::weights::PackedView;
use tensors::{FILLER, GROUPS, INPUTS, PACKED};
use xxh64::xxh64;

/// In the index: the checksum of each file's header.
const HEADERS: &str = "makaira.headers";

/// An open store.
#[derive(Debug)]
pub struct PackedStore {
    tensors: Tensors,
    /// Sorted by name.
    layers: Vec<StoredLayer>,
    /// By tensor.
    checksums: BTreeMap<String, u64>,
}

impl PackedStore {
    /// Whether the path leads to files that say that they are a store's, of whatever version, or to a directory into
    /// which one is being packed.
    pub fn is_at(path: &Path) -> bool {
        pack::is_unfinished(path) || Tensors::open(path).is_ok_and(|tensors| tensors.are_packed())
    }

    /// Opens the store in the directory at `path`, or the layers of one of its files. Reads the headers and the orders
    /// of inputs, no weight.
    ///
    /// # Errors
    /// Those of [`Tensors::open`]; [`Error::Unfinished`], [`Error::NotAStore`], [`Error::Version`]; and for files that
    /// are damaged or made up [`Error::Header`], [`Error::Description`], [`Error::Misaligned`],
    /// [`Error::MissingTensor`], [`Error::Weight`] and, of [`Error::Checkpoint`], wrong types and shapes.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if pack::is_unfinished(path) {
            return Err(Error::Unfinished { path: path.to_owned() });
        }
        let tensors = Tensors::open(path)?;
        let files: Vec<PathBuf> = tensors.files().map(|(file, _)| file.to_owned()).collect();
        let index = path.join(INDEX);
        if index.is_file() {
            check_headers(&index, &files, &tensors)?;
        }
        check_places(&files, &tensors)?;
        let (mut layers, mut checksums) = (Vec::new(), BTreeMap::new());
        for (at, file) in files.iter().enumerate() {
            let (more, sums) = description::read(file, tensors.metadata(at), &tensors)?;
            layers.extend(more);
            checksums.extend(sums);
        }
        layers.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = layers.windows(2).find(|pair| pair[0].name == pair[1].name) {
            let reason = format!("layer {} is described twice", pair[0].name);
            return Err(Error::Description { path: path.to_owned(), reason });
        }
        let store = Self { tensors, layers, checksums };
        for layer in &store.layers {
            store.weight(layer)?;
            store.bias_of(layer)?;
        }
        store.tensors.check_lost()?;
        Ok(store)
    }

    /// The packed layers, sorted by name.
    pub fn layers(&self) -> &[StoredLayer] {
        &self.layers
    }

    /// The layer of that name.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] with the nearest name there is.
    pub fn layer(&self, name: &str) -> Result<&StoredLayer, Error> {
        match self.layers.binary_search_by(|layer| layer.name.as_str().cmp(name)) {
            Ok(at) => Ok(&self.layers[at]),
            Err(_) => Err(no_layer(name, self.layers.iter().map(|l| l.name.as_str())).into()),
        }
    }

    /// The packed weight of the layer of that name: a view of the mapping.
    ///
    /// # Errors
    /// Those of [`PackedStore::layer`], and [`Error::Checkpoint`] if the file is known to have shrunk.
    pub fn packed(&self, name: &str) -> Result<PackedView<'_>, Error> {
        let view = self.weight(self.layer(name)?)?;
        self.tensors.check_lost()?;
        Ok(view)
    }

    fn weight<'s>(&'s self, layer: &'s StoredLayer) -> Result<PackedView<'s>, Error> {
        let tensor = self.required(layer, format!("{}{PACKED}", layer.name))?;
        check_dtype(&tensor, &[Dtype::U8])?;
        check_shape(&tensor, &[layer.spec.layout().total_bytes])?;
        PackedView::new(&layer.spec, tensor.bytes)
            .map_err(|source| Error::Weight { layer: layer.name.clone(), source })
    }

    fn required(&self, layer: &StoredLayer, tensor: String) -> Result<Tensor<'_>, Error> {
        match self.tensors.get(&tensor) {
            Some(found) => Ok(found),
            None => Err(Error::MissingTensor { tensor, layer: layer.name.clone() }),
        }
    }

    /// The name of the tensor that holds a layer's packed weight.
    pub fn tensor_of(&self, layer: &StoredLayer) -> String {
        format!("{}{PACKED}", layer.name)
    }

    /// The bias of the layer of that name, `[N]`, as the checkpoint had it; none if it had none, or if only the
    /// quantised layers were packed.
    ///
    /// # Errors
    /// Those of [`PackedStore::layer`].
    pub fn bias(&self, name: &str) -> Result<Option<Tensor<'_>>, Error> {
        self.bias_of(self.layer(name)?)
    }

    fn bias_of(&self, layer: &StoredLayer) -> Result<Option<Tensor<'_>>, Error> {
        let Some(bias) = &layer.bias else { return Ok(None) };
        let n = layer.spec.layout().n;
        let tensor = self.required(layer, bias.tensor.clone())?;
        let Some(expert) = bias.expert else {
            check_shape(&tensor, &[n])?;
            return Ok(Some(tensor));
        };
        let num_experts = tensor.shape.first().copied().unwrap_or(0);
        check_shape(&tensor, &[num_experts.max(expert.saturating_add(1)), n])?;
        let bytes_each = tensor.bytes.len() / num_experts;
        let bytes = &tensor.bytes[expert * bytes_each..(expert + 1) * bytes_each];
        Ok(Some(Tensor { shape: &tensor.shape[1..], bytes, ..tensor }))
    }

    /// All tensors, packed ones and those that were carried over.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The names of tensors that were carried over from the checkpoint, sorted.
    pub fn carried(&self) -> impl Iterator<Item = &str> {
        let is_own = |name: &&str| {
            let suffixes = [PACKED, INPUTS, GROUPS].into_iter();
            let mut stems = suffixes.filter_map(|suffix| name.strip_suffix(suffix));
            name.starts_with(FILLER)
                || stems.any(|stem| {
                    self.layers.binary_search_by(|layer| layer.name.as_str().cmp(stem)).is_ok()
                })
        };
        self.tensors.names().filter(move |name| !is_own(name))
    }

    /// What a file says of where it comes from, by the keys that `description.rs` lists.
    pub fn provenance(&self) -> &BTreeMap<String, String> {
        self.tensors.metadata(0)
    }

    /// Reads everything with up to `threads` threads and compares the checksums.
    ///
    /// # Errors
    /// [`Error::Checksum`], and [`Error::Description`] for a tensor without one; the first by name.
    pub fn check(&self, threads: usize) -> Result<(), Error> {
        let names: Vec<&str> =
            self.tensors.names().filter(|name| !name.starts_with(FILLER)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut failures = Vec::new();
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                failures.extend(self.check_tensor(name).err().map(|error| (*name, error)));
            }
            failures
        };
        let mut failures: Vec<(&str, Error)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .flat_map(|worker| worker.join().expect("no panic while it adds up"))
                .collect()
        });
        self.check_unchanged()?;
        failures.sort_by_key(|(name, _)| *name);
        failures.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }

    fn check_tensor(&self, name: &str) -> Result<(), Error> {
        let tensor = self.tensors.get(name).expect("listed");
        let Some(&expected) = self.checksums.get(name) else {
            let (file, _) = self.tensors.place(name).expect("listed");
            let path = self.tensors.files().nth(file).expect("it was opened").0.to_owned();
            let reason = format!("there is no checksum of tensor {name}");
            return Err(Error::Description { path, reason });
        };
        let found = xxh64(tensor.bytes);
        if found != expected {
            let [expected, found] = [expected, found].map(|sum| format!("{sum:016x}"));
            return Err(Error::Checksum { tensor: name.to_owned(), expected, found });
        }
        Ok(())
    }

    /// Checks that every file is as it was when it was opened. Call it when all that is wanted has been read.
    ///
    /// # Errors
    /// Those of [`Tensors::check_unchanged`].
    pub fn check_unchanged(&self) -> Result<(), Error> {
        Ok(self.tensors.check_unchanged()?)
    }
}

/// Refuses files that the index was not written for.
fn check_headers(index: &Path, files: &[PathBuf], tensors: &Tensors) -> Result<(), Error> {
    let io_error = |source| Error::Io { action: "read", path: index.to_owned(), source };
    let text = std::fs::read(index).map_err(io_error)?;
    let value: Value = serde_json::from_slice(&text).unwrap_or_default();
    let Some(headers) = value.pointer(&format!("/metadata/{HEADERS}")) else {
        return match tensors.are_packed() {
            false => Err(Error::NotAStore { path: index.to_owned() }),
            true => {
                let reason = format!("its metadata has no {HEADERS}");
                Err(Error::Description { path: index.to_owned(), reason })
            }
        };
    };
    for (at, file) in files.iter().enumerate() {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let expected = headers.get(&*name).and_then(Value::as_str).unwrap_or("none").to_owned();
        let found = format!("{:016x}", xxh64(tensors.header(at)));
        if found != expected {
            return Err(Error::Header { path: file.clone(), expected, found });
        }
    }
    Ok(())
}

/// Refuses tensors that do not start at a multiple of [`ALIGNMENT`].
fn check_places(files: &[PathBuf], tensors: &Tensors) -> Result<(), Error> {
    for name in tensors.names().filter(|name| !name.starts_with(FILLER)) {
        let (file, range) = tensors.place(name).expect("listed");
        let of_store = tensors.metadata(file).contains_key(PACKED_KEY);
        if of_store && !range.start.is_multiple_of(ALIGNMENT) {
            let (path, tensor) = (files[file].clone(), name.to_owned());
            return Err(Error::Misaligned {
                path,
                tensor,
                offset: range.start,
                alignment: ALIGNMENT,
            });
        }
    }
    Ok(())
}
