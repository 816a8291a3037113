//! Plain checkpoints, of fp16, bf16 or fp32 weights: quantised by rounding when they are loaded.
//!
//! The linear layers are the matrices named `weight`, `[N][K]`, that are neither embeddings nor
//! norms nor the output head. They become `u4b8` in groups of 128, or of 64 or 32, or with one scale
//! per column, whichever is the first to divide K. See [`crate::weights::quantize`] for the rule.

use super::source::{check_dtype, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
use crate::weights::{Dense, Group, QuantMatrix, Quantized, ScaleOrder, U4B8, quantize};

/// The convention of weights that are not quantised.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

const NAME: &str = "plain";
const DTYPES: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];
/// A component of a name with one of these in it is no linear layer that is worth quantising.
const NOT_LINEAR: [&str; 6] = ["embed", "wte", "wpe", "norm", "lm_head", "router"];

/// The default group rule of `k` inputs.
fn default_group(k: usize) -> Group {
    let size = [128u32, 64, 32].into_iter().find(|&size| k.is_multiple_of(size as usize));
    match size {
        Some(size) if (size as usize) < k => Group::Size(size),
        _ => Group::PerColumn,
    }
}

/// A layer, rounded.
///
/// # Errors
/// [`Error::Weight`] with those of [`quantize`].
pub(super) fn round(
    source: &Source<'_, '_>,
    layer: &LayerInfo,
    threads: usize,
) -> Result<Quantized, Error> {
    let weight = source.required(NAME, ".weight")?;
    let dense = match weight.dtype {
        Dtype::F16 => Dense::F16(weight.bytes),
        Dtype::BF16 => Dense::BF16(weight.bytes),
        _ => Dense::F32(weight.bytes),
    };
    quantize(dense, layer.n, layer.k, layer.group, threads)
        .map_err(|source| Error::Weight { layer: layer.name.clone(), source })
}

impl Convention for Plain {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        None
    }

    fn marker_suffix(&self) -> &'static str {
        ".weight"
    }

    fn scales_suffix(&self) -> &'static str {
        ".weight"
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".weight", ".bias"]
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        let is_linear = !NOT_LINEAR.iter().any(|part| source.stem.contains(part));
        let weight = source.get(".weight").ok().flatten();
        is_linear
            && source.expert.is_none()
            && weight
                .is_some_and(|tensor| tensor.shape.len() == 2 && DTYPES.contains(&tensor.dtype))
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // There is none.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let weight = source.required(NAME, ".weight")?;
        check_dtype(&weight, DTYPES)?;
        let &[n, k] = weight.shape else {
            return Err(shape_error(&weight, "two dimensions".to_owned()));
        };
        if n == 0 || k == 0 {
            return Err(shape_error(&weight, "[N, K], neither of them 0".to_owned()));
        }
        let scales = (Dtype::F16, ScaleOrder::Rows);
        Ok(LayerInfo::new(self, source, (n, k), default_group(k), &U4B8, scales))
    }

    fn read<'a>(
        &self,
        _source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        Err(Error::NotStored { layer: layer.name.clone() })
    }
}
