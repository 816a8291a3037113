//! Checkpoints: files to borrowed quantised matrices.
//!
//! This room maps safetensors files ([`Tensors`]), reads the quantisation configuration
//! ([`QuantConfig`]) and hands out layers as [`QuantMatrix`] views of the mapping, ready to pack.
//! One file per on-disk convention, listed in [`CONVENTIONS`]. The configuration's label chooses among
//! them, and each layer's tensors must be of one of the label's; where they are of another, the
//! checkpoint is refused with both named.
//!
//! Everything read is untrusted. Headers, sizes, indices and shapes are checked when a checkpoint
//! is opened; the small tensors of a layer (scales, zeros, group indices) when the layer is asked
//! for; the codes need no check. A field that cannot be honoured is a refusal, never ignored. What
//! is odd without being wrong is a [`Finding`].
//!
//! ```
//! use makaira::checkpoint::Checkpoint;
//! use makaira::weights::{PackedWeights, default_threads};
//! let checkpoint = Checkpoint::open("assets/demo".as_ref())?;
//! let layer = &checkpoint.layers()[0];
//! assert_eq!((layer.n, layer.k), (128, 384));
//! let packed = PackedWeights::pack(&checkpoint.layer(&layer.name)?, default_threads())?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod audit;
mod awq;
mod blocks;
mod config;
mod container;
mod discover;
mod dynamic;
mod error;
mod finding;
mod float4;
mod float8;
mod gptq;
mod map;
mod marlin;
mod names;
mod packed;
mod parallel;
mod plain;
mod refused;
mod schemes;
mod shards;
mod source;

pub use awq::Awq;
pub use blocks::MxBlocks;
pub use config::QuantConfig;
pub use error::Error;
pub use finding::{Finding, ScaleFault};
pub use float4::{Mxfp4, Nvfp4};
pub use float8::{FloatQuantized, Fp8};
pub use gptq::Gptq;
pub use map::{FileMap, forget_cached};
pub use marlin::MarlinSerialised;
pub use packed::PackQuantized;
pub use parallel::place;
pub use plain::Plain;
pub use safetensors::Dtype;
pub(crate) use shards::INDEX;
pub use shards::{PACKED_KEY, Tensor, Tensors};
pub use source::Source;
pub(crate) use source::{check_dtype, check_shape};

use std::fmt;
use std::path::Path;

use discover::{layers_of, refuse_other_conventions};

use crate::weights::{
    Codes, Group, MatrixParts, QuantMatrix, Quantized, ScaleOrder, ScaleType, Scales, WeightFormat,
};

/// How one family of tools writes quantised layers.
pub trait Convention: fmt::Debug + Sync {
    /// A short name, for messages and listings.
    fn name(&self) -> &'static str;

    /// The `quant_method` whose checkpoints hold such layers; none for plain ones.
    fn method(&self) -> Option<&'static str>;

    /// The suffix of the tensor that every layer has, dot included.
    fn marker_suffix(&self) -> &'static str;

    /// Dimensions of that tensor. One more is a stack of experts.
    fn marker_dims(&self) -> usize {
        2
    }

    /// The suffix of a layer's scales, dot included.
    fn scales_suffix(&self) -> &'static str;

    /// Suffixes, dot included, of all tensors that a layer may consist of.
    fn layer_suffixes(&self) -> &'static [&'static str];

    /// Whether the tensors of a stem with the marker can be a layer of this convention, whatever
    /// the configuration says.
    fn recognises(&self, source: &Source<'_, '_>) -> bool;

    /// The format that the configuration states for a layer of this convention, where it is another.
    fn other_label(&self, source: &Source<'_, '_>) -> Option<String> {
        let _ = source;
        None
    }

    /// Refuses what this convention, or this crate, does not support in the configuration. Asked of
    /// the first convention of a `quant_method` and of each that has layers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the field, its value and what is supported.
    fn check(&self, config: &QuantConfig, tensors: &Tensors) -> Result<(), Error>;

    /// Size and format of a layer, from the headers alone.
    ///
    /// # Errors
    /// Missing tensors, wrong types and shapes that do not agree.
    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error>;

    /// The layer as a view of the mapping, the contents of its small tensors checked, except that
    /// scales are finite. What is odd is added to `findings`.
    ///
    /// # Errors
    /// Contents that this crate would misread, and those of [`QuantMatrix::from_parts`].
    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error>;
}

/// How the suffixes of biases end.
const BIAS: &str = "bias";

/// Every convention that can be read, by name.
pub const CONVENTIONS: &[&'static dyn Convention] = &[
    &Awq,
    &FloatQuantized,
    &Fp8,
    &Gptq,
    &MarlinSerialised,
    &MxBlocks,
    &Mxfp4,
    &Nvfp4,
    &PackQuantized,
    &Plain,
];

/// A quantised layer, as the headers describe it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LayerInfo {
    /// The name: that of the tensors without any suffix, and the expert of a stack behind a dot.
    pub name: String,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// The group rule.
    pub group: Group,
    /// The weight type.
    pub format: &'static dyn WeightFormat,
    /// The element type of the scales.
    pub scale_type: ScaleType,
    /// The order of the scales.
    pub scale_order: ScaleOrder,
    /// The convention that the layer is written in.
    pub convention: &'static str,
    /// The expert of a stack, and how many there are.
    pub expert: Option<(usize, usize)>,
}

impl LayerInfo {
    fn new(
        convention: &dyn Convention,
        source: &Source<'_, '_>,
        (n, k): (usize, usize),
        group: Group,
        format: &'static dyn WeightFormat,
        (scale_dtype, scale_order): (Dtype, ScaleOrder),
    ) -> Self {
        let (name, expert, convention) = (source.name(), source.expert, convention.name());
        let scale_type = source::scale_type(scale_dtype);
        Self { name, n, k, group, format, scale_type, scale_order, convention, expert }
    }

    /// The name of the layer's tensors, without their suffixes.
    pub fn stem(&self) -> &str {
        match self.expert {
            None => &self.name,
            Some(_) => self.name.rsplit_once('.').map_or(&self.name, |(stem, _)| stem),
        }
    }

    /// The parts of a matrix of this layer, without zeros and group indices.
    fn parts<'a>(&self, codes: Codes<'a>, scales: Scales<'a>) -> MatrixParts<'a> {
        let Self { n, k, group, format, .. } = *self;
        MatrixParts { n, k, group, format, codes, scales, zeros: None, g_idx: None }
    }

    fn matrix<'a>(&self, parts: MatrixParts<'a>) -> Result<QuantMatrix<'a>, Error> {
        QuantMatrix::from_parts(parts)
            .map_err(|source| Error::Weight { layer: self.name.clone(), source })
    }
}

impl fmt::Display for LayerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (format, group) = (self.format.name(), self.group);
        let Self { name, n, k, convention, .. } = self;
        write!(f, "{name}: {n} x {k}, {format}, group {group}, {convention}")
    }
}

/// A layer's weight, ready to be packed.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One is made per layer and at once viewed.
pub enum LayerWeight<'a> {
    /// Quantised in the checkpoint: a view of the mapping.
    Stored(QuantMatrix<'a>),
    /// Rounded to nearest when it was loaded.
    Rounded(Quantized),
}

impl LayerWeight<'_> {
    /// The matrix that the packer takes.
    pub fn view(&self) -> QuantMatrix<'_> {
        match self {
            Self::Stored(matrix) => *matrix,
            Self::Rounded(quantized) => quantized.view(),
        }
    }
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: Tensors,
    config: QuantConfig,
    layers: Vec<LayerInfo>,
    findings: Vec<Finding>,
}

impl Checkpoint {
    /// Opens the checkpoint in the directory, or the safetensors file, at `path`; the configuration
    /// is that of the directory. No tensor data is read, except `weight_shape` of
    /// compressed-tensors.
    ///
    /// # Errors
    /// Those of [`Tensors::open`] and [`QuantConfig::read`], [`Error::Unsupported`] for a
    /// convention or a setting that this crate does not read, [`Error::LabelDisagrees`] for tensors
    /// of another convention than the configuration says, and the refusal of any layer whose tensors
    /// disagree with each other.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let tensors = Tensors::open(path)?;
        if tensors.are_packed() {
            return Err(Error::Packed { path: path.to_owned() });
        }
        let config = QuantConfig::read(tensors.directory())?;
        let method = config.method.as_deref();
        refused::check(&config, &tensors)?;
        let candidates = CONVENTIONS.iter().filter(|convention| convention.method() == method);
        let Some(first) = candidates.clone().next() else {
            let found = format!("quant_method {}", method.unwrap_or("none"));
            return Err(config.unsupported(found, refused::METHODS));
        };
        // GPTQ's two formats share a label; the other one's check follows if it has layers.
        first.check(&config, &tensors)?;
        let mut layers = Vec::new();
        for convention in candidates {
            let found = layers_of(*convention, &config, &tensors)?;
            if !found.is_empty() {
                convention.check(&config, &tensors)?;
            }
            layers.extend(found);
        }
        refuse_other_conventions(&config, &tensors)?;
        layers.sort_by(|a, b| a.name.cmp(&b.name));
        let mut checkpoint = Self { tensors, config, layers, findings: Vec::new() };
        checkpoint.findings = checkpoint.all_findings(path.is_dir());
        for finding in &checkpoint.findings {
            log::warn!("{}: {finding}", path.display());
        }
        Ok(checkpoint)
    }

    fn all_findings(&self, whole: bool) -> Vec<Finding> {
        let mut findings = audit::findings(&self.config, &self.tensors, &self.layers, whole);
        findings.extend(self.layers.iter().filter_map(|layer| {
            let label = convention_of(layer).other_label(&self.source(layer))?;
            let (layer, found) = (layer.name.clone(), layer.convention);
            Some(Finding::FormatLabel { layer, label, found })
        }));
        findings
    }

    /// The quantised layers, sorted by name.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.layers
    }

    /// The layer of that name as a view of the mapping, its small tensors checked.
    ///
    /// # Errors
    /// [`Error::NoLayer`]; [`Error::NotStored`] for a layer of a plain checkpoint, which
    /// [`Checkpoint::load`] takes; and the refusals of contents: [`Error::BadScales`],
    /// [`Error::Zeros`], [`Error::GroupIndex`], [`Error::GlobalScale`]; [`Error::Changed`].
    pub fn layer(&self, name: &str) -> Result<QuantMatrix<'_>, Error> {
        let info = self.info(name)?;
        let mut findings = Vec::new();
        let outcome = self.read(info, &mut findings).and_then(|matrix| {
            finding::refuse_bad_scales(&self.scales_tensor(info), &matrix)?;
            Ok(matrix)
        });
        self.tensors.check_lost()?;
        for finding in findings {
            log::warn!("{finding}");
        }
        outcome
    }

    fn read(
        &self,
        info: &LayerInfo,
        findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'_>, Error> {
        convention_of(info).read(&self.source(info), info, findings)
    }

    /// The layer of that name, rounded with up to `threads` threads if the checkpoint is a plain one.
    ///
    /// # Errors
    /// Those of [`Checkpoint::layer`], and of [`crate::weights::quantize`] in [`Error::Weight`].
    pub fn load(&self, name: &str, threads: usize) -> Result<LayerWeight<'_>, Error> {
        let info = self.info(name)?;
        if convention_of(info).method().is_none() {
            return plain::round(&self.source(info), info, threads).map(LayerWeight::Rounded);
        }
        self.layer(name).map(LayerWeight::Stored)
    }

    /// Everything odd about one layer, scales that are not finite included: those that are zero or
    /// subnormal are legal and listed too.
    ///
    /// # Errors
    /// Those of [`Checkpoint::layer`], except [`Error::BadScales`] and [`Error::NotStored`].
    pub fn inspect(&self, name: &str) -> Result<Vec<Finding>, Error> {
        self.examine(name).map(|(_, findings)| findings)
    }

    /// Checks that every file is as it was when it was opened. Call it when layers have been packed.
    ///
    /// # Errors
    /// [`Error::Changed`], and [`Error::Io`] when the system does not say.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.tensors.check_unchanged()
    }

    /// The layer of that name, whatever its scales are, and what [`Checkpoint::inspect`] lists. No
    /// matrix for a layer of a plain checkpoint.
    ///
    /// # Errors
    /// Those of [`Checkpoint::inspect`].
    pub fn examine(&self, name: &str) -> Result<(Option<QuantMatrix<'_>>, Vec<Finding>), Error> {
        let info = self.info(name)?;
        let mut findings = Vec::new();
        let outcome = match self.read(info, &mut findings) {
            Ok(matrix) => {
                findings.extend(finding::odd_scales(&self.scales_tensor(info), &matrix));
                Ok((Some(matrix), findings))
            }
            Err(Error::NotStored { .. }) => Ok((None, findings)),
            Err(error) => Err(error),
        };
        self.tensors.check_lost()?;
        outcome
    }

    /// What [`Checkpoint::layer`] takes on trust: whether any code of a layer is NaN. Reads all of the
    /// layer, and rounds it if the checkpoint is a plain one.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`].
    pub fn check_codes(&self, name: &str, threads: usize) -> Result<Option<Finding>, Error> {
        let weight = self.load(name, threads)?;
        Ok(finding::nan_codes(name, &weight.view()))
    }

    /// What is odd about the checkpoint as a whole: stray shards, tensors that no layer uses, layers
    /// that are missing or contradict the configuration.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The tensors, for whatever is not a quantised layer.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The tensors that hold a layer's weight, those of its stack if it is one of several experts; not its bias.
    pub fn tensors_of(&self, layer: &LayerInfo) -> impl Iterator<Item = Tensor<'_>> {
        self.existing(layer, |suffix| !suffix.ends_with(BIAS))
    }

    /// The layer's bias `[N]`, or that of its stack of experts, `[experts][N]`.
    pub fn bias_of(&self, layer: &LayerInfo) -> Option<Tensor<'_>> {
        self.existing(layer, |suffix| suffix.ends_with(BIAS)).next()
    }

    fn existing(
        &self,
        layer: &LayerInfo,
        wanted: fn(&str) -> bool,
    ) -> impl Iterator<Item = Tensor<'_>> {
        let suffixes = convention_of(layer).layer_suffixes().iter();
        let names = suffixes.filter(move |suffix| wanted(suffix));
        names.filter_map(|suffix| self.tensors.get(&format!("{}{suffix}", layer.stem())))
    }

    /// The quantisation configuration.
    pub fn config(&self) -> &QuantConfig {
        &self.config
    }

    /// The names of the conventions that the layers are written in, sorted.
    pub fn conventions(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.layers.iter().map(|layer| layer.convention).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn source<'c, 's: 'c>(&'s self, layer: &'c LayerInfo) -> Source<'c, 's> {
        let (config, tensors) = (&self.config, &self.tensors);
        Source { config, tensors, stem: layer.stem(), expert: layer.expert }
    }

    fn info(&self, name: &str) -> Result<&LayerInfo, Error> {
        if let Ok(at) = self.layers.binary_search_by(|layer| layer.name.as_str().cmp(name)) {
            return Ok(&self.layers[at]);
        }
        Err(no_layer(name, self.layers.iter().map(|layer| layer.name.as_str())))
    }

    fn scales_tensor(&self, info: &LayerInfo) -> String {
        format!("{}{}", info.stem(), convention_of(info).scales_suffix())
    }
}

/// The refusal of a name, with the layer that shares the longest end with it: prefixes of whole models are what people
/// leave out.
pub(crate) fn no_layer<'n>(name: &str, layers: impl Iterator<Item = &'n str>) -> Error {
    let shared = |layer: &&str| {
        let pairs = layer.bytes().rev().zip(name.bytes().rev());
        pairs.take_while(|(a, b)| a == b).count()
    };
    let nearest = layers.max_by_key(shared).map(str::to_owned);
    Error::NoLayer { name: name.to_owned(), nearest }
}

fn convention_of(layer: &LayerInfo) -> &'static dyn Convention {
    let of_name = CONVENTIONS.iter().find(|convention| convention.name() == layer.convention);
    *of_name.expect("a layer's convention is a registered one")
}
