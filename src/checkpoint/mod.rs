//! Checkpoints: files to borrowed quantised matrices.
//!
//! This room maps safetensors files ([`Tensors`]), reads the quantisation configuration
//! ([`QuantConfig`]) and hands out layers as [`QuantMatrix`] views of the mapping, ready to pack.
//! One file per on-disk convention, listed in [`CONVENTIONS`]; a checkpoint is of exactly one.
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

mod config;
mod container;
mod error;
mod finding;
mod gptq;
mod map;
mod marlin;
mod parts;
mod shards;

pub use config::QuantConfig;
pub use error::Error;
pub use finding::{Finding, ScaleFault};
pub use gptq::Gptq;
pub use map::FileMap;
pub use marlin::MarlinSerialised;
pub use safetensors::Dtype;
pub use shards::{Tensor, Tensors};

use std::fmt;
use std::path::Path;

use crate::weights::{Group, QuantMatrix, WeightFormat};

/// How one family of tools writes quantised layers.
pub trait Convention: fmt::Debug + Sync {
    /// A short name, for messages and listings.
    fn name(&self) -> &'static str;

    /// Whether a checkpoint with this configuration and these tensors is of this convention. At
    /// most one convention claims a checkpoint.
    ///
    /// # Errors
    /// Those of malformed configuration fields.
    fn claims(&self, config: &QuantConfig, tensors: &Tensors) -> Result<bool, Error>;

    /// Refuses what this convention, or this crate, does not support in the configuration.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the field, its value and what is supported.
    fn check_config(&self, config: &QuantConfig) -> Result<(), Error>;

    /// The suffix of the tensor that every quantised layer has, dot included.
    fn marker_suffix(&self) -> &'static str;

    /// The suffix of a layer's scales, dot included.
    fn scales_suffix(&self) -> &'static str;

    /// Suffixes, dot included, of all tensors that a layer may consist of.
    fn layer_suffixes(&self) -> &'static [&'static str];

    /// Size and format of a layer, from the headers alone.
    ///
    /// # Errors
    /// Missing tensors, wrong types and shapes that do not agree.
    fn describe(
        &self,
        config: &QuantConfig,
        tensors: &Tensors,
        name: &str,
    ) -> Result<LayerInfo, Error>;

    /// Checks the contents of a layer's small tensors, except that scales are finite. Returns what
    /// is odd.
    ///
    /// # Errors
    /// Contents that this crate would misread.
    fn check_contents(
        &self,
        config: &QuantConfig,
        tensors: &Tensors,
        layer: &LayerInfo,
    ) -> Result<Vec<Finding>, Error>;

    /// The layer as a view of the mapping.
    ///
    /// # Errors
    /// Those of [`QuantMatrix::new`].
    fn matrix<'a>(&self, tensors: &'a Tensors, layer: &LayerInfo)
    -> Result<QuantMatrix<'a>, Error>;
}

/// Every convention that can be read, by name.
pub const CONVENTIONS: &[&'static dyn Convention] = &[&Gptq, &MarlinSerialised];

/// A quantised layer, as the headers describe it.
#[derive(Clone, Debug)]
pub struct LayerInfo {
    /// The name, without the suffix of any tensor.
    pub name: String,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// The group rule.
    pub group: Group,
    /// The weight type.
    pub format: &'static dyn WeightFormat,
    /// The convention that the layer is written in.
    pub convention: &'static str,
}

impl fmt::Display for LayerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (format, group) = (self.format.name(), self.group);
        let Self { name, n, k, convention, .. } = self;
        write!(f, "{name}: {n} x {k}, {format}, group {group}, {convention}")
    }
}

/// An open checkpoint of one convention.
#[derive(Debug)]
pub struct Checkpoint {
    tensors: Tensors,
    config: QuantConfig,
    convention: &'static dyn Convention,
    layers: Vec<LayerInfo>,
    findings: Vec<Finding>,
}

impl Checkpoint {
    /// Opens the checkpoint in the directory, or the safetensors file, at `path`; the configuration
    /// is that of the directory. No tensor data is read.
    ///
    /// # Errors
    /// Those of [`Tensors::open`] and [`QuantConfig::read`], [`Error::Unsupported`] for a
    /// convention or a setting that this crate does not read, and the refusal of any layer whose
    /// tensors disagree with each other.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let tensors = Tensors::open(path)?;
        let config = QuantConfig::read(tensors.directory())?;
        let convention = convention_of(&config, &tensors)?;
        convention.check_config(&config)?;
        let layers = tensors
            .names()
            .filter_map(|name| name.strip_suffix(convention.marker_suffix()))
            .map(|name| convention.describe(&config, &tensors, name))
            .collect::<Result<Vec<_>, _>>()?;
        let mut findings = tensors.findings().to_vec();
        findings.extend(unused_tensors(&tensors, convention));
        for finding in &findings {
            log::warn!("{}: {finding}", path.display());
        }
        Ok(Self { tensors, config, convention, layers, findings })
    }

    /// The quantised layers, sorted by name.
    pub fn layers(&self) -> &[LayerInfo] {
        &self.layers
    }

    /// The layer of that name, its small tensors checked.
    ///
    /// # Errors
    /// [`Error::NoLayer`], and the refusals of contents: [`Error::BadScales`], [`Error::Zeros`],
    /// [`Error::ActOrder`], [`Error::GroupIndex`].
    pub fn layer(&self, name: &str) -> Result<QuantMatrix<'_>, Error> {
        let info = self.info(name)?;
        for finding in self.convention.check_contents(&self.config, &self.tensors, info)? {
            log::warn!("{finding}");
        }
        let matrix = self.convention.matrix(&self.tensors, info)?;
        finding::refuse_bad_scales(&self.scales_tensor(info), &matrix)?;
        Ok(matrix)
    }

    /// Everything odd about one layer, scales that are not finite included: those that are zero or
    /// subnormal are legal and listed too.
    ///
    /// # Errors
    /// Those of [`Checkpoint::layer`], except [`Error::BadScales`].
    pub fn inspect(&self, name: &str) -> Result<Vec<Finding>, Error> {
        let info = self.info(name)?;
        let mut findings = self.convention.check_contents(&self.config, &self.tensors, info)?;
        let matrix = self.convention.matrix(&self.tensors, info)?;
        findings.extend(finding::odd_scales(&self.scales_tensor(info), &matrix));
        Ok(findings)
    }

    /// What is odd about the files: stray shards, tensors that no layer uses.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The tensors, for whatever is not a quantised layer.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The quantisation configuration.
    pub fn config(&self) -> &QuantConfig {
        &self.config
    }

    /// The name of the convention.
    pub fn convention(&self) -> &'static str {
        self.convention.name()
    }

    fn info(&self, name: &str) -> Result<&LayerInfo, Error> {
        self.layers.iter().find(|layer| layer.name == name).ok_or_else(|| {
            // The layer that shares the longest end with the wanted name: prefixes of whole models
            // are what people leave out.
            let shared = |layer: &&LayerInfo| {
                let pairs = layer.name.bytes().rev().zip(name.bytes().rev());
                pairs.take_while(|(a, b)| a == b).count()
            };
            let nearest = self.layers.iter().max_by_key(shared).map(|layer| layer.name.clone());
            Error::NoLayer { name: name.to_owned(), nearest }
        })
    }

    fn scales_tensor(&self, info: &LayerInfo) -> String {
        format!("{}{}", info.name, self.convention.scales_suffix())
    }
}

fn convention_of(
    config: &QuantConfig,
    tensors: &Tensors,
) -> Result<&'static dyn Convention, Error> {
    for convention in CONVENTIONS {
        if convention.claims(config, tensors)? {
            return Ok(*convention);
        }
    }
    let mut found = format!("quant_method {}", config.method);
    for field in ["version", "format"] {
        if let Some(value) = config.text(field)? {
            found.push_str(&format!(", {field} {value}"));
        }
    }
    Err(config.unsupported(found, "only GPTQ and Marlin-serialised GPTQ are read"))
}

/// Tensors that belong to no quantised layer and are no ordinary weight or bias.
fn unused_tensors<'a>(
    tensors: &'a Tensors,
    convention: &'static dyn Convention,
) -> impl Iterator<Item = Finding> + 'a {
    tensors.names().filter_map(move |name| {
        let of_layer = convention.layer_suffixes().iter().any(|suffix| {
            let marker = convention.marker_suffix();
            let layer = name.strip_suffix(suffix);
            layer.is_some_and(|layer| tensors.get(&format!("{layer}{marker}")).is_some())
        });
        let ordinary = name.ends_with(".weight") || name.ends_with(".bias");
        (!of_layer && !ordinary).then(|| Finding::UnusedTensor { tensor: name.to_owned() })
    })
}
