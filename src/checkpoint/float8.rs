//! fp8 weights: `float-quantized` and `naive-quantized` of compressed-tensors, and `quant_method`
//! fp8, whose block scales are named `weight_scale_inv`.
//!
//! A layer is `weight` `[N][K]` of e4m3 numbers and a tensor of scales, f16, bf16, f32 or e8m0: one
//! for the tensor (`[]` or `[1]`), one for each output (`[N]` or `[N][1]`), one for each group
//! (`[N][groups]`), or one for each block of 128 x 128 weights (`[N/128][K/128]`, rounded up). Despite
//! its name `weight_scale_inv` is a factor too. Scales of activations are for kernels that quantise
//! activations; here they stay in 16 bits.

use super::packed::{METHOD, other_format, scheme};
use super::source::{check_dtype, check_shape, scale_type, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
use crate::weights::{Codes, E4M3, Group, QuantMatrix, SCALE_BLOCK, ScaleOrder, Scales};

/// The convention of compressed-tensors' fp8.
#[derive(Clone, Copy, Debug)]
pub struct FloatQuantized;

/// The convention of `quant_method` fp8.
#[derive(Clone, Copy, Debug)]
pub struct Fp8;

const FLOAT: &str = "float-quantized";
const FP8: &str = "fp8";
const INVERSE: &str = ".weight_scale_inv";
const SCALE: &str = ".weight_scale";
/// Element types of fp8 scales.
const DTYPES: &[Dtype] = &[Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0];

/// What the configuration says of the scales.
enum Stated {
    /// Whatever the tensor's shape says.
    Nothing,
    /// One scale for the tensor.
    Tensor,
    /// Groups of this size along K.
    Group(i64),
    /// Blocks of 128 x 128.
    Blocks,
}

fn is_fp8(source: &Source<'_, '_>) -> bool {
    let weight = source.get(".weight").ok().flatten();
    weight.is_some_and(|tensor| {
        matches!(
            tensor.dtype,
            Dtype::F8_E4M3 | Dtype::F8_E5M2 | Dtype::F8_E4M3FNUZ | Dtype::F8_E5M2FNUZ
        )
    })
}

fn describe(
    convention: &dyn Convention,
    source: &Source<'_, '_>,
    suffix: &str,
    stated: Stated,
) -> Result<LayerInfo, Error> {
    let name = convention.name();
    let (weight, [n, k]) = source.matrix(name, ".weight", &[Dtype::F8_E4M3])?;
    if n == 0 || k == 0 {
        return Err(shape_error(&weight, "[N, K], neither of them 0".to_owned()));
    }
    let scales = source.required(name, suffix)?;
    check_dtype(&scales, DTYPES)?;
    let blocks = [n.div_ceil(SCALE_BLOCK), k.div_ceil(SCALE_BLOCK)];
    let per_tensor = matches!(scales.shape, [] | [1] | [1, 1]);
    let per_channel = matches!(scales.shape, &[rows] | &[rows, 1] if rows == n);
    let (group, order) = match stated {
        Stated::Blocks => {
            check_shape(&scales, &blocks)?;
            let single = k <= SCALE_BLOCK;
            let group = if single { Group::PerColumn } else { Group::Size(SCALE_BLOCK as u32) };
            (group, ScaleOrder::Blocks)
        }
        Stated::Group(raw) if raw != -1 => {
            let rows = scales.shape.get(1).copied().unwrap_or(1);
            let group = source.group(k, raw, rows)?;
            check_shape(&scales, &[n, group.num_groups(k)])?;
            (group, ScaleOrder::Columns)
        }
        Stated::Tensor | Stated::Nothing if per_tensor => (Group::PerColumn, ScaleOrder::PerTensor),
        Stated::Group(_) | Stated::Nothing if per_channel => (Group::PerColumn, ScaleOrder::Rows),
        Stated::Tensor => return Err(shape_error(&scales, "[1], one for the tensor".to_owned())),
        Stated::Group(_) => return Err(shape_error(&scales, format!("[{n}, 1]"))),
        Stated::Nothing => {
            let expected = format!("[1] or [{n}, 1]: no block size is stated");
            return Err(shape_error(&scales, expected));
        }
    };
    Ok(LayerInfo::new(convention, source, (n, k), group, &E4M3, (scales.dtype, order)))
}

fn read<'a>(
    convention: &'static str,
    source: &Source<'_, 'a>,
    layer: &LayerInfo,
    suffix: &str,
) -> Result<QuantMatrix<'a>, Error> {
    let codes = Codes::ByOutput(source.required(convention, ".weight")?.bytes);
    let scales = source.required(convention, suffix)?;
    let scales = Scales::new(scales.bytes, scale_type(scales.dtype), layer.scale_order);
    layer.matrix(layer.parts(codes, scales))
}

impl Convention for FloatQuantized {
    fn name(&self) -> &'static str {
        FLOAT
    }

    fn method(&self) -> Option<&'static str> {
        Some(METHOD)
    }

    fn marker_suffix(&self) -> &'static str {
        ".weight"
    }

    fn scales_suffix(&self) -> &'static str {
        SCALE
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".weight", SCALE, ".weight_zero_point", ".input_scale", ".input_zero_point", ".bias"]
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        is_fp8(source) && !matches!(source.get(INVERSE), Ok(Some(_)))
    }

    fn other_label(&self, source: &Source<'_, '_>) -> Option<String> {
        other_format(source, &[FLOAT, "naive-quantized"])
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // Schemes differ by layer.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let scheme = scheme(source, "float")?;
        let refuse = |found: String, rule| Err(source.config.unsupported(found, rule));
        let layer = source.name();
        if scheme.bits != 8 {
            let found = format!("num_bits {} for layer {layer}", scheme.bits);
            return refuse(found, "the tensor holds 8-bit floats");
        }
        if !scheme.symmetric {
            return refuse(format!("symmetric false for layer {layer}"), "floats have no zeros");
        }
        let stated = match (scheme.strategy.as_str(), scheme.raw_group()) {
            ("tensor", _) => Stated::Tensor,
            ("block", _) => match scheme.block.as_deref() {
                Some([128, 128]) => Stated::Blocks,
                other => {
                    let found = format!("block_structure {other:?} for layer {layer}");
                    return refuse(found, "blocks of 128 x 128 are read");
                }
            },
            (_, Some(raw)) => Stated::Group(raw),
            (strategy, None) => {
                let found = format!("strategy {strategy} for layer {layer}");
                return refuse(found, "one scale a tensor, channel, group or block is read");
            }
        };
        describe(self, source, SCALE, stated)
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        read(FLOAT, source, layer, SCALE)
    }
}

/// The name of a layer's scales: some tools use `weight_scale_inv` for blocks only, some always.
fn fp8_suffix(source: &Source<'_, '_>) -> &'static str {
    if matches!(source.get(INVERSE), Ok(Some(_))) { INVERSE } else { SCALE }
}

impl Convention for Fp8 {
    fn name(&self) -> &'static str {
        FP8
    }

    fn method(&self) -> Option<&'static str> {
        Some(FP8)
    }

    fn marker_suffix(&self) -> &'static str {
        ".weight"
    }

    fn scales_suffix(&self) -> &'static str {
        INVERSE
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".weight", INVERSE, SCALE, ".input_scale", ".bias"]
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        is_fp8(source)
    }

    fn check(&self, config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        if let Some(fmt) = config.text("fmt")?
            && !matches!(fmt.as_str(), "e4m3" | "e4m3fn" | "float8_e4m3fn")
        {
            return Err(config.unsupported(format!("fmt {fmt}"), "fp8 of the format e4m3 is read"));
        }
        block_size(config).map(|_| ())
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let stated = if block_size(source.config)? { Stated::Blocks } else { Stated::Nothing };
        describe(self, source, fp8_suffix(source), stated)
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        read(FP8, source, layer, fp8_suffix(source))
    }
}

/// Whether blocks of 128 x 128 are stated.
fn block_size(config: &QuantConfig) -> Result<bool, Error> {
    let Some(value) = config.field("weight_block_size") else { return Ok(false) };
    let sizes: Option<Vec<i64>> =
        value.as_array().and_then(|sizes| sizes.iter().map(|size| size.as_i64()).collect());
    match sizes.as_deref() {
        Some([128, 128]) => Ok(true),
        Some(_) => {
            let found = format!("weight_block_size {value}");
            Err(config.unsupported(found, "blocks of 128 x 128 are read"))
        }
        None => Err(config.wrong("weight_block_size", "a list of two integers")),
    }
}
