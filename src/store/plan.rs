//! What goes where: the files of a store, decided before a byte is written.
//!
//! Sizes and factors follow from headers, scales and group indices, so every header is known but for the checksums,
//! which have a fixed length. A plan depends on the checkpoint and the options alone: whoever goes on with an
//! interrupted run makes the same one.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde_json::{Map, Value, json};

use super::description::{
    Bias, CHECKSUMS_KEY, CONFIG_KEY, LAYERS_KEY, LAYOUT_KEY, LayerSource, SOURCE_KEY,
    STORE_VERSION, StoredLayer, TOOL_KEY,
};
use super::tensors::{ALIGNMENT, FILLER, GROUPS, INPUTS, PACKED, shape_bytes};
use super::{Error, HEADERS};
use crate::checkpoint::{Checkpoint, Dtype, LayerInfo, PACKED_KEY};
use crate::weights::{LAYOUT_VERSION, Packing};

/// Bytes of a safetensors file before its header.
const PREFIX_BYTES: usize = 8;

/// Where a tensor's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// The packed weight of a layer, by its place in the plan.
    Packed(usize),
    /// The inputs of a layer's order.
    Inputs(usize),
    /// The groups of a layer's order.
    Groups(usize),
    /// The checkpoint's tensor of the same name.
    Carried,
    /// Zeros.
    Filler,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where it lies behind the header.
    pub(super) range: Range<u64>,
    pub(super) contents: Contents,
}

/// A file of the store.
#[derive(Clone, Debug)]
pub(super) struct PlannedFile {
    pub(super) name: String,
    pub(super) tensors: Vec<PlannedTensor>,
    metadata: BTreeMap<&'static str, String>,
}

/// A layer to pack.
#[derive(Debug)]
pub(super) struct PlannedLayer {
    pub(super) info: LayerInfo,
    pub(super) stored: StoredLayer,
}

/// All files.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) layers: Vec<PlannedLayer>,
    pub(super) files: Vec<PlannedFile>,
}

/// The tensors that must lie in one file, and the layer that they are.
struct Item {
    name: String,
    layer: Option<usize>,
    tensors: Vec<(String, Dtype, Vec<usize>, Contents)>,
}

impl Plan {
    /// The plan for a checkpoint: files of up to `file_bytes`, but of one layer at least; `config` is the text of its
    /// configuration.
    ///
    /// # Errors
    /// The refusal of any layer, before anything is written.
    pub(super) fn of(
        checkpoint: &Checkpoint,
        file_bytes: u64,
        only_layers: bool,
        config: Option<&str>,
        threads: usize,
    ) -> Result<Self, Error> {
        let layers: Vec<PlannedLayer> = checkpoint
            .layers()
            .iter()
            .map(|info| plan_layer(checkpoint, info, only_layers, threads))
            .collect::<Result<_, _>>()?;
        let items = items(checkpoint, &layers, only_layers);
        let mut names = BTreeSet::new();
        for (tensor, ..) in items.iter().flat_map(|item| &item.tensors) {
            if !tensor.starts_with(FILLER) && names.insert(tensor.as_str()) {
                continue;
            }
            return Err(Error::Reserved { tensor: tensor.clone() });
        }
        let mut runs: Vec<Vec<Item>> = Vec::new();
        let mut used = 0;
        for item in items {
            let bytes: u64 = item
                .tensors
                .iter()
                .map(|(_, dtype, shape, _)| shape_bytes(*dtype, shape))
                .map(|bytes| bytes.next_multiple_of(ALIGNMENT as u64))
                .sum();
            if runs.is_empty() || used + bytes > file_bytes {
                runs.push(Vec::new());
                used = 0;
            }
            used += bytes;
            runs.last_mut().expect("there is one").push(item);
        }
        let total = runs.len();
        let common = common_metadata(checkpoint, config);
        let files = runs.into_iter().enumerate();
        let files = files.map(|(at, run)| {
            let name = format!("model-{:05}-of-{total:05}.safetensors", at + 1);
            PlannedFile::new((at, name), run, &layers, common.clone())
        });
        Ok(Self { files: files.collect(), layers })
    }

    /// Bytes of all tensors.
    pub(super) fn total_bytes(&self) -> u64 {
        self.files.iter().map(PlannedFile::data_bytes).sum()
    }

    /// The index, given the checksum of each file's header.
    pub(super) fn index(&self, headers: &BTreeMap<String, u64>) -> Value {
        let places = self.files.iter().flat_map(|file| {
            file.tensors.iter().map(|tensor| (tensor.name.clone(), json!(file.name)))
        });
        let headers: Map<String, Value> = headers
            .iter()
            .map(|(file, sum)| (file.clone(), json!(format!("{sum:016x}"))))
            .collect();
        json!({
            "metadata": {
                "total_size": self.total_bytes(),
                PACKED_KEY: STORE_VERSION.to_string(),
                HEADERS: headers,
            },
            "weight_map": places.collect::<Map<_, _>>(),
        })
    }
}

/// What packing a layer comes to.
fn plan_layer(
    checkpoint: &Checkpoint,
    info: &LayerInfo,
    only_layers: bool,
    threads: usize,
) -> Result<PlannedLayer, Error> {
    let weight = checkpoint.load(&info.name, threads)?;
    let matrix = weight.view();
    let packing = Packing::of(&matrix)
        .map_err(|source| Error::Weight { layer: info.name.clone(), source })?;
    let bias = checkpoint.bias_of(info).filter(|_| !only_layers);
    let stored = StoredLayer {
        name: info.name.clone(),
        spec: packing.spec().clone(),
        source: LayerSource {
            convention: info.convention.to_owned(),
            scales: matrix.scales().element,
            global: matrix.global_scale(),
            exact: packing.scales_are_exact(),
        },
        bias: bias.map(|tensor| Bias {
            tensor: tensor.name.to_owned(),
            expert: info.expert.map(|(expert, _)| expert),
        }),
    };
    Ok(PlannedLayer { info: info.clone(), stored })
}

/// What lies together, by name.
fn items(checkpoint: &Checkpoint, layers: &[PlannedLayer], only_layers: bool) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    let mut replaced = BTreeSet::new();
    for (at, PlannedLayer { info, stored }) in layers.iter().enumerate() {
        let name = &info.name;
        let mut tensors = vec![(
            format!("{name}{PACKED}"),
            Dtype::U8,
            vec![stored.spec.layout().total_bytes],
            Contents::Packed(at),
        )];
        if let Some(order) = stored.spec.input_order() {
            let sizes = [order.inputs().len(), order.groups().len()];
            let contents = [Contents::Inputs(at), Contents::Groups(at)];
            for ((suffix, size), contents) in [INPUTS, GROUPS].iter().zip(sizes).zip(contents) {
                tensors.push((format!("{name}{suffix}"), Dtype::U32, vec![size], contents));
            }
        }
        items.push(Item { name: name.clone(), layer: Some(at), tensors });
        replaced.extend(checkpoint.tensors_of(info).map(|tensor| tensor.name));
    }
    let names =
        checkpoint.tensors().names().filter(|name| !only_layers && !replaced.contains(name));
    items.extend(names.map(|name| {
        let tensor = checkpoint.tensors().get(name).expect("listed");
        let shape = tensor.shape.to_vec();
        let tensors = vec![(name.to_owned(), tensor.dtype, shape, Contents::Carried)];
        Item { name: name.to_owned(), layer: None, tensors }
    }));
    items.sort_by(|a, b| a.name.cmp(&b.name));
    items
}

/// The texts of every file.
fn common_metadata(
    checkpoint: &Checkpoint,
    config: Option<&str>,
) -> BTreeMap<&'static str, String> {
    let label = checkpoint.config().method.as_deref();
    let source = json!({ "label": label, "conventions": checkpoint.conventions() });
    let tool = concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"));
    let mut metadata = BTreeMap::from([
        (PACKED_KEY, STORE_VERSION.to_string()),
        (LAYOUT_KEY, LAYOUT_VERSION.to_string()),
        (TOOL_KEY, tool.to_owned()),
        (SOURCE_KEY, source.to_string()),
    ]);
    metadata.extend(config.map(|text| (CONFIG_KEY, text.to_owned())));
    metadata
}

impl PlannedFile {
    fn new(
        (at, name): (usize, String),
        items: Vec<Item>,
        layers: &[PlannedLayer],
        mut metadata: BTreeMap<&'static str, String>,
    ) -> Self {
        let described: Map<String, Value> = items
            .iter()
            .filter_map(|item| item.layer)
            .map(|at| (layers[at].stored.name.clone(), layers[at].stored.to_json()))
            .collect();
        metadata.insert(LAYERS_KEY, Value::Object(described).to_string());
        let mut tensors: Vec<PlannedTensor> = Vec::new();
        let mut end = 0u64;
        let mut num_fillers = 0;
        for (name, dtype, shape, contents) in items.into_iter().flat_map(|item| item.tensors) {
            let begin = end.next_multiple_of(ALIGNMENT as u64);
            if begin > end {
                tensors.push(PlannedTensor {
                    name: format!("{FILLER}{at}.{num_fillers}"),
                    dtype: Dtype::U8,
                    shape: vec![(begin - end) as usize],
                    range: end..begin,
                    contents: Contents::Filler,
                });
                num_fillers += 1;
            }
            end = begin + shape_bytes(dtype, &shape);
            tensors.push(PlannedTensor { name, dtype, shape, range: begin..end, contents });
        }
        Self { name, tensors, metadata }
    }

    /// Bytes behind the header.
    pub(super) fn data_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |tensor| tensor.range.end)
    }

    /// Everything before the tensors, given their checksums; a tensor without one gets zeros. Its length does not
    /// depend on them.
    pub(super) fn header(&self, checksums: &BTreeMap<String, u64>) -> Vec<u8> {
        let real = self.tensors.iter().filter(|tensor| tensor.contents != Contents::Filler);
        let sums: Map<String, Value> = real
            .map(|tensor| {
                let sum = checksums.get(&tensor.name).copied().unwrap_or(0);
                (tensor.name.clone(), json!(format!("{sum:016x}")))
            })
            .collect();
        let mut metadata = json!(self.metadata);
        metadata[CHECKSUMS_KEY] = Value::Object(sums).to_string().into();
        let mut header = Map::from_iter([("__metadata__".to_owned(), metadata)]);
        header.extend(self.tensors.iter().map(|tensor| {
            let entry = json!({
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [tensor.range.start, tensor.range.end],
            });
            (tensor.name.clone(), entry)
        }));
        let mut text = Value::Object(header).to_string();
        // Spaces behind the text are part of the format.
        let padded = (PREFIX_BYTES + text.len()).next_multiple_of(ALIGNMENT) - PREFIX_BYTES;
        text.extend(std::iter::repeat_n(' ', padded - text.len()));
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }
}
