//! Marlin-serialised checkpoints: GPTQ layers already in the order of the original Marlin kernel.
//!
//! A layer is `B` `[K/16][2N]` and `s` f16 `[groups][N]`; there are neither zeros nor group
//! indices, and a `workspace` tensor may lie beside them. Two markers exist, `is_marlin_format`
//! true and `checkpoint_format` "marlin", and tools wrote either, both, or let them contradict each
//! other. Where they contradict, the tensors decide, so that packed words are never packed again.

use super::gptq::{check_common, group_of};
use super::parts::{check_shape, matrix_tensor, required, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Tensors};
use crate::weights::{Codes, QuantMatrix, ScaleOrder, Scales, U4B8};

/// The convention of Marlin-serialised GPTQ.
#[derive(Clone, Copy, Debug)]
pub struct MarlinSerialised;

/// Whether a GPTQ checkpoint is Marlin-serialised.
///
/// # Errors
/// [`Error::Unsupported`] when the markers and the tensors cannot both be right.
pub(super) fn is_marlin(config: &QuantConfig, tensors: &Tensors) -> Result<bool, Error> {
    let flag = config.flag("is_marlin_format")?;
    let format = config.checkpoint_format()?;
    let marked = flag == Some(true) || format.as_deref() == Some("marlin");
    let contradicted = marked
        && (flag == Some(false) || format.as_deref().is_some_and(|format| format != "marlin"));
    let (mut has_b, mut has_qweight) = (false, false);
    for name in tensors.names() {
        has_b |= name.ends_with(".B");
        has_qweight |= name.ends_with(".qweight");
    }
    match (marked, has_b, has_qweight) {
        (_, true, true) => Err(config.unsupported(
            "GPTQ, and the tensors are both B and qweight".to_owned(),
            "a checkpoint must be of one format",
        )),
        (false, true, false) => Err(config.unsupported(
            "GPTQ without a Marlin marker, but the tensors are Marlin's B".to_owned(),
            "set checkpoint_format to marlin if that is what they are",
        )),
        (true, false, true) if !contradicted => Err(config.unsupported(
            "Marlin-serialised, but the tensors are GPTQ's qweight".to_owned(),
            "remove the Marlin marker if they were never repacked",
        )),
        (true, false, true) => Ok(false),
        (marked, _, _) => Ok(marked),
    }
}

impl Convention for MarlinSerialised {
    fn name(&self) -> &'static str {
        "marlin"
    }

    fn claims(&self, config: &QuantConfig, tensors: &Tensors) -> Result<bool, Error> {
        Ok(config.method == "gptq" && is_marlin(config, tensors)?)
    }

    fn check_config(&self, config: &QuantConfig) -> Result<(), Error> {
        check_common(config)?;
        if config.flag("desc_act")? == Some(true) {
            let rule = "Marlin-serialised weights have no activation order";
            return Err(config.unsupported("desc_act true".to_owned(), rule));
        }
        Ok(())
    }

    fn marker_suffix(&self) -> &'static str {
        ".B"
    }

    fn scales_suffix(&self) -> &'static str {
        ".s"
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".B", ".s", ".workspace", ".bias"]
    }

    fn describe(
        &self,
        config: &QuantConfig,
        tensors: &Tensors,
        name: &str,
    ) -> Result<LayerInfo, Error> {
        let (b, [strips, row_words]) = matrix_tensor(&Self, tensors, (name, ".B"), Dtype::I32)?;
        let k = strips.checked_mul(16).filter(|&k| k > 0 && row_words > 0);
        let k = k.filter(|_| row_words.is_multiple_of(128)).ok_or_else(|| {
            shape_error(&b, "[K/16, 2N] with N a multiple of 64, neither of them 0".to_owned())
        })?;
        let n = row_words / 2;
        let (s, [rows, _]) = matrix_tensor(&Self, tensors, (name, ".s"), Dtype::F16)?;
        let group = group_of(config, name, k, rows)?;
        check_shape(&s, &[group.num_groups(k), n])?;
        let name = name.to_owned();
        Ok(LayerInfo { name, n, k, group, format: &U4B8, convention: self.name() })
    }

    fn check_contents(
        &self,
        _config: &QuantConfig,
        _tensors: &Tensors,
        _layer: &LayerInfo,
    ) -> Result<Vec<Finding>, Error> {
        Ok(Vec::new()) // Nothing beside codes and scales is stored.
    }

    fn matrix<'a>(
        &self,
        tensors: &'a Tensors,
        layer: &LayerInfo,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::MarlinWords(required(&Self, tensors, &layer.name, ".B")?.bytes);
        let bytes = required(&Self, tensors, &layer.name, ".s")?.bytes;
        let scales = Scales::f16(bytes, ScaleOrder::Marlin);
        QuantMatrix::new(layer.n, layer.k, layer.group, layer.format, codes, scales)
            .map_err(|source| Error::Weight { layer: layer.name.clone(), source })
    }
}
