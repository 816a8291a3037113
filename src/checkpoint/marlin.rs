//! Marlin-serialised checkpoints: GPTQ layers already in the order of the original Marlin kernel.
//!
//! A layer is `B` `[K/16][2N]` and `s` f16 `[groups][N]`; there are neither zeros nor group
//! indices, and a `workspace` tensor may lie beside them. Two markers exist, `is_marlin_format`
//! true and `checkpoint_format` "marlin", and tools wrote either, both, or let them contradict each
//! other. Where they contradict, the tensors decide, so that packed words are never packed again.

use super::gptq::{check_common, group_size};
use super::source::{check_shape, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
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

const NAME: &str = "marlin";

impl Convention for MarlinSerialised {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        Some("gptq")
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

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        matches!(source.get(".B"), Ok(Some(tensor)) if tensor.dtype == Dtype::I32)
    }

    fn check(&self, config: &QuantConfig, tensors: &Tensors) -> Result<(), Error> {
        is_marlin(config, tensors)?;
        check_common(config)?;
        if !config.overrides().are_none() {
            let rule = "Marlin-serialised weights have one setting for all layers";
            return Err(config.unsupported("dynamic settings".to_owned(), rule));
        }
        if config.integer("bits")? != Some(4) {
            let rule = "Marlin-serialised weights have 4 bits";
            return Err(config.unsupported("bits 8".to_owned(), rule));
        }
        if config.flag("sym")? == Some(false) {
            let rule = "Marlin-serialised weights are symmetric";
            return Err(config.unsupported("sym false".to_owned(), rule));
        }
        if config.flag("desc_act")? == Some(true) {
            let rule = "Marlin-serialised weights have no activation order";
            return Err(config.unsupported("desc_act true".to_owned(), rule));
        }
        Ok(())
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let (b, [strips, row_words]) = source.matrix(NAME, ".B", &[Dtype::I32])?;
        let k = strips.checked_mul(16).filter(|&k| k > 0 && row_words > 0);
        let k = k.filter(|_| row_words.is_multiple_of(128)).ok_or_else(|| {
            shape_error(&b, "[K/16, 2N] with N a multiple of 64, neither of them 0".to_owned())
        })?;
        let n = row_words / 2;
        let (s, [rows, _]) = source.matrix(NAME, ".s", &[Dtype::F16])?;
        let group = source.group(k, group_size(source.config)?, rows)?;
        check_shape(&s, &[group.num_groups(k), n])?;
        let scales = (s.dtype, ScaleOrder::Marlin);
        Ok(LayerInfo::new(self, source, (n, k), group, &U4B8, scales))
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::MarlinWords(source.required(NAME, ".B")?.bytes);
        let scales = Scales::f16(source.required(NAME, ".s")?.bytes, ScaleOrder::Marlin);
        layer.matrix(layer.parts(codes, scales))
    }
}
