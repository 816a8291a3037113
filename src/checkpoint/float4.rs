//! fp4 weights: `nvfp4-pack-quantized` and `mxfp4-pack-quantized` of compressed-tensors.
//!
//! A layer is `weight_packed` `[N][K/2]`, bytes of two e2m1 numbers, the even input in the low half,
//! and `weight_scale`. NVFP4: e4m3 scales `[N][K/16]` and `weight_global_scale` `[1]`, f32, by which
//! they are divided. MXFP4: e8m0 scales `[N][K/32]`, stored as bytes. Scales of activations are for
//! kernels that quantise activations; here they stay in 16 bits.

use super::packed::{METHOD, other_format, scheme};
use super::source::{check_dtype, check_shape, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
use crate::weights::{Codes, E2M1, QuantMatrix, ScaleOrder, ScaleType, Scales};

/// The convention of NVFP4.
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4;

/// The convention of MXFP4.
#[derive(Clone, Copy, Debug)]
pub struct Mxfp4;

const NVFP4: &str = "nvfp4-pack-quantized";
const MXFP4: &str = "mxfp4-pack-quantized";
const PACKED: &str = ".weight_packed";
const SCALE: &str = ".weight_scale";
const GLOBAL: &str = ".weight_global_scale";
const SUFFIXES: &[&str] =
    &[PACKED, SCALE, GLOBAL, ".weight_shape", ".input_global_scale", ".input_scale", ".bias"];

/// The element type of the scales beside packed bytes.
fn scale_dtype(source: &Source<'_, '_>) -> Option<Dtype> {
    let packed = source.get(PACKED).ok().flatten()?;
    let scales = source.get(SCALE).ok().flatten()?;
    (packed.dtype == Dtype::U8).then_some(scales.dtype)
}

fn describe(
    convention: &dyn Convention,
    source: &Source<'_, '_>,
    group_size: i64,
    dtypes: &[Dtype],
) -> Result<LayerInfo, Error> {
    let scheme = scheme(source, "float")?;
    if scheme.bits != 4 || scheme.group_size != Some(group_size) || !scheme.symmetric {
        let found = format!("that layer {} is {}", source.name(), scheme.describe());
        let rule = "NVFP4 has groups of 16, MXFP4 of 32, both 4-bit floats without zeros";
        return Err(source.config.unsupported(found, rule));
    }
    let name = convention.name();
    let (packed, [n, pairs]) = source.matrix(name, PACKED, &[Dtype::U8])?;
    let k = pairs.checked_mul(2).filter(|&k| k > 0 && n > 0);
    let k = k.ok_or_else(|| shape_error(&packed, "[N, K/2], neither of them 0".to_owned()))?;
    let (scales, [_, rows]) = source.matrix(name, SCALE, dtypes)?;
    let group = source.group(k, group_size, rows)?;
    check_shape(&scales, &[n, group.num_groups(k)])?;
    let scales = (scales.dtype, ScaleOrder::Columns);
    Ok(LayerInfo::new(convention, source, (n, k), group, &E2M1, scales))
}

impl Convention for Nvfp4 {
    fn name(&self) -> &'static str {
        NVFP4
    }

    fn method(&self) -> Option<&'static str> {
        Some(METHOD)
    }

    fn marker_suffix(&self) -> &'static str {
        PACKED
    }

    fn scales_suffix(&self) -> &'static str {
        SCALE
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        SUFFIXES
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        scale_dtype(source) == Some(Dtype::F8_E4M3)
    }

    fn other_label(&self, source: &Source<'_, '_>) -> Option<String> {
        other_format(source, &[NVFP4])
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // Schemes differ by layer.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let layer = describe(self, source, 16, &[Dtype::F8_E4M3])?;
        let global = source.required(NVFP4, GLOBAL)?;
        check_dtype(&global, &[Dtype::F32])?;
        match global.shape {
            [] | [1] => Ok(layer),
            _ => Err(shape_error(&global, "[1]".to_owned())),
        }
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::NibblePairs(source.required(NVFP4, PACKED)?.bytes);
        let bytes = source.required(NVFP4, SCALE)?.bytes;
        let global = source.required(NVFP4, GLOBAL)?;
        let quad = global.bytes.first_chunk().copied().unwrap_or_default();
        let divisor = f32::from_le_bytes(quad);
        let factor = 1.0 / divisor;
        if !(factor.is_finite() && factor > 0.0) {
            let tensor = global.name.to_owned();
            return Err(Error::GlobalScale { tensor, value: divisor });
        }
        let mut scales = Scales::new(bytes, ScaleType::E4M3, ScaleOrder::Columns);
        scales.global = factor;
        layer.matrix(layer.parts(codes, scales))
    }
}

impl Convention for Mxfp4 {
    fn name(&self) -> &'static str {
        MXFP4
    }

    fn method(&self) -> Option<&'static str> {
        Some(METHOD)
    }

    fn marker_suffix(&self) -> &'static str {
        PACKED
    }

    fn scales_suffix(&self) -> &'static str {
        SCALE
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        SUFFIXES
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        matches!(scale_dtype(source), Some(Dtype::U8 | Dtype::F8_E8M0))
    }

    fn other_label(&self, source: &Source<'_, '_>) -> Option<String> {
        other_format(source, &[MXFP4])
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // Schemes differ by layer.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        describe(self, source, 32, &[Dtype::U8, Dtype::F8_E8M0])
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::NibblePairs(source.required(MXFP4, PACKED)?.bytes);
        let bytes = source.required(MXFP4, SCALE)?.bytes;
        let scales = Scales::new(bytes, ScaleType::E8M0, ScaleOrder::Columns);
        layer.matrix(layer.parts(codes, scales))
    }
}
