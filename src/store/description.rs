//! What a file of a store says of its layers, beside their bytes: written and read here, in one form.
//!
//! Texts beside the tensors of a safetensors file, all optional to other readers:
//!
//! ```text
//! makaira.store      version of the file format
//! makaira.layout     version of the packed layout
//! makaira.tool       the program that wrote it
//! makaira.source     {"label": .., "conventions": [..]} of the checkpoint
//! makaira.config     the checkpoint's config.json, as it is
//! makaira.layers     {"<layer>": {"format": "u4b8", "n": 4096, "k": 4096, "group": 128, "scales": "f16",
//!                      "factor": "3f800000", "order": false, "bias": null, "expert": null,
//!                      "source": {"convention": "gptq", "scales": "f16", "global": "3f800000", "exact": true}}}
//! makaira.checksums  {"<tensor>": "<XXH64, 16 hexadecimal digits>"}
//! ```
//!
//! `k` counts inputs of the source, `group` is that of packed inputs. The factor and the global scale are bits of f32.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::Error;
use super::tensors::{GROUPS, INPUTS};
use crate::checkpoint::{Dtype, PACKED_KEY, Tensors, check_dtype, check_shape};
use crate::weights::{
    Group, InputOrder, Inputs, LAYOUT_VERSION, PackedSpec, ScaleRow, ScaleType, format_by_name,
};

/// The version of the file format.
pub(super) const STORE_VERSION: u32 = 1;
pub(super) const LAYOUT_KEY: &str = "makaira.layout";
pub(super) const TOOL_KEY: &str = "makaira.tool";
pub(super) const SOURCE_KEY: &str = "makaira.source";
pub(super) const CONFIG_KEY: &str = "makaira.config";
pub(super) const LAYERS_KEY: &str = "makaira.layers";
pub(super) const CHECKSUMS_KEY: &str = "makaira.checksums";

/// Where a layer of a store comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSource {
    /// The convention of the checkpoint.
    pub convention: String,
    /// The element type of the scales.
    pub scales: ScaleType,
    /// The global scale.
    pub global: f32,
    /// Whether the packed scales are those of the checkpoint, not rounded ones.
    pub exact: bool,
}

/// The bias of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bias {
    pub(super) tensor: String,
    /// The row of a stack's.
    pub(super) expert: Option<usize>,
}

/// A packed layer of a store.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// The name, that of the checkpoint's layer.
    pub name: String,
    /// What the packed weight is.
    pub spec: PackedSpec,
    /// Where it comes from.
    pub source: LayerSource,
    pub(super) bias: Option<Bias>,
}

fn bits_text(value: f32) -> String {
    format!("{:08x}", value.to_bits())
}

impl StoredLayer {
    pub(super) fn to_json(&self) -> Value {
        let Self { spec, source, bias, .. } = self;
        let layout = spec.layout();
        json!({
            "format": spec.format().name(),
            "n": layout.n,
            "k": spec.source_inputs(),
            "group": layout.group.raw(),
            "scales": layout.kind.scales.name(),
            "factor": bits_text(spec.factor()),
            "order": spec.input_order().is_some(),
            "bias": bias.as_ref().map(|bias| &bias.tensor),
            "expert": bias.as_ref().and_then(|bias| bias.expert),
            "source": {
                "convention": source.convention,
                "scales": source.scales.name(),
                "global": bits_text(source.global),
                "exact": source.exact,
            },
        })
    }

    /// A layer of the file at `path`, whose order, if it has one, lies among the tensors.
    fn from_json(path: &Path, name: &str, value: &Value, tensors: &Tensors) -> Result<Self, Error> {
        let fields = Fields { path, layer: name, value };
        let source = Fields { value: fields.get("source")?, ..fields };
        let n = fields.size("n")?;
        let k = fields.size("k")?;
        let weight = |source| Error::Weight { layer: name.to_owned(), source };
        let inputs = match fields.flag("order")? {
            false => Inputs::InPlace(k),
            true => Inputs::Ordered(order(name, k, tensors)?.map_err(weight)?),
        };
        let packed_k = match &inputs {
            Inputs::InPlace(k) => *k,
            Inputs::Ordered(order) => order.inputs().len(),
        };
        let raw = fields.get("group")?.as_i64();
        let raw = raw.ok_or_else(|| fields.wrong("group", "an integer"))?;
        let group = Group::new(packed_k, raw).map_err(weight)?;
        if group.raw() != raw {
            return Err(fields.wrong("group", "-1, or less than the packed inputs"));
        }
        let format = format_by_name(fields.text("format")?);
        let format =
            format.ok_or_else(|| fields.wrong("format", "a weight type of this program"))?;
        let row = ScaleRow::by_name(fields.text("scales")?);
        let row = row.ok_or_else(|| fields.wrong("scales", "f16 or e5m3"))?;
        let factor = fields.float("factor")?;
        let spec = PackedSpec::new(n, inputs, group, format, row, factor).map_err(weight)?;
        let bias = match fields.get("bias")? {
            Value::Null => None,
            Value::String(tensor) => {
                let expert = match fields.get("expert")? {
                    Value::Null => None,
                    _ => Some(fields.size("expert")?),
                };
                Some(Bias { tensor: tensor.clone(), expert })
            }
            _ => return Err(fields.wrong("bias", "a tensor's name")),
        };
        let scales = ScaleType::by_name(source.text("scales")?);
        let source = LayerSource {
            convention: source.text("convention")?.to_owned(),
            scales: scales.ok_or_else(|| source.wrong("scales", "a type of scales"))?,
            global: source.float("global")?,
            exact: source.flag("exact")?,
        };
        Ok(Self { name: name.to_owned(), spec, source, bias })
    }
}

/// The order of a layer's inputs, by its two tensors.
fn order(
    layer: &str,
    k: usize,
    tensors: &Tensors,
) -> Result<Result<InputOrder, crate::weights::Error>, Error> {
    let words = |suffix: &str| -> Result<Vec<u32>, Error> {
        let name = format!("{layer}{suffix}");
        let missing = || Error::MissingTensor { tensor: name.clone(), layer: layer.to_owned() };
        let tensor = tensors.get(&name).ok_or_else(missing)?;
        check_dtype(&tensor, &[Dtype::U32])?;
        check_shape(&tensor, &[tensor.bytes.len() / 4])?;
        Ok(tensor.bytes.as_chunks().0.iter().map(|quad| u32::from_le_bytes(*quad)).collect())
    };
    Ok(InputOrder::from_parts(k, words(INPUTS)?, words(GROUPS)?))
}

/// The fields of a layer's description.
#[derive(Clone, Copy)]
struct Fields<'a> {
    path: &'a Path,
    layer: &'a str,
    value: &'a Value,
}

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Result<&'a Value, Error> {
        self.value.get(name).ok_or_else(|| {
            description(self.path, format!("layer {} is described without {name}", self.layer))
        })
    }

    fn wrong(&self, name: &str, wanted: &str) -> Error {
        let found = self.value.get(name).map_or_else(String::new, Value::to_string);
        let layer = self.layer;
        description(self.path, format!("{name} of layer {layer} is {found}, expected {wanted}"))
    }

    fn text(&self, name: &str) -> Result<&'a str, Error> {
        self.get(name)?.as_str().ok_or_else(|| self.wrong(name, "a text"))
    }

    fn size(&self, name: &str) -> Result<usize, Error> {
        let size = self.get(name)?.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.wrong(name, "a size"))
    }

    fn flag(&self, name: &str) -> Result<bool, Error> {
        self.get(name)?.as_bool().ok_or_else(|| self.wrong(name, "true or false"))
    }

    fn float(&self, name: &str) -> Result<f32, Error> {
        let bits = hex(self.text(name)?, 8).map(|bits| f32::from_bits(bits as u32));
        bits.ok_or_else(|| self.wrong(name, "8 hexadecimal digits"))
    }
}

/// Exactly so many hexadecimal digits.
fn hex(text: &str, digits: usize) -> Option<u64> {
    let all = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    all.then(|| u64::from_str_radix(text, 16).ok()).flatten()
}

fn description(path: &Path, reason: String) -> Error {
    Error::Description { path: path.to_owned(), reason }
}

/// The layers of a file that a store's metadata describe, and the checksums of its tensors.
pub(super) fn read(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &Tensors,
) -> Result<(Vec<StoredLayer>, BTreeMap<String, u64>), Error> {
    let versions =
        [(PACKED_KEY, "file format", STORE_VERSION), (LAYOUT_KEY, "packed layout", LAYOUT_VERSION)];
    for (key, what, supported) in versions {
        let Some(found) = metadata.get(key) else {
            return Err(Error::NotAStore { path: path.to_owned() });
        };
        if *found != supported.to_string() {
            let (path, found) = (path.to_owned(), found.clone());
            return Err(Error::Version { path, what, found, supported });
        }
    }
    let layers = object(path, metadata, LAYERS_KEY)?;
    let layers = layers.as_object().into_iter().flatten();
    let layers: Result<_, _> =
        layers.map(|(name, value)| StoredLayer::from_json(path, name, value, tensors)).collect();
    Ok((layers?, checksums(path, metadata)?))
}

/// The checksums of a file's tensors.
pub(super) fn checksums(
    path: &Path,
    metadata: &BTreeMap<String, String>,
) -> Result<BTreeMap<String, u64>, Error> {
    let sums = object(path, metadata, CHECKSUMS_KEY)?;
    let sums = sums.as_object().into_iter().flatten();
    sums.map(|(tensor, value)| {
        let sum = value.as_str().and_then(|text| hex(text, 16));
        let wrong = || format!("the checksum of {tensor} is {value}, not 16 hexadecimal digits");
        Ok((tensor.clone(), sum.ok_or_else(|| description(path, wrong()))?))
    })
    .collect()
}

/// The JSON object of a key.
fn object(path: &Path, metadata: &BTreeMap<String, String>, key: &str) -> Result<Value, Error> {
    let text = metadata.get(key).ok_or_else(|| description(path, format!("there is no {key}")))?;
    let value: Value =
        serde_json::from_str(text).map_err(|error| description(path, format!("{key}: {error}")))?;
    match value.is_object() {
        true => Ok(value),
        false => Err(description(path, format!("{key} is no JSON object"))),
    }
}
