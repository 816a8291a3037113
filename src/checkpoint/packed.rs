//! `pack-quantized` of compressed-tensors: 4 and 8 bit integers, symmetric and with zeros.
//!
//! With p = 32 / bits codes a word, a layer is `weight_packed` `[N][K/p]` (rounded up),
//! `weight_scale` `[N][groups]`, `weight_shape` (N, K), and `weight_zero_point` where it is not
//! symmetric: packed along the outputs, `[N/p][groups]`, or signed bytes `[N][groups]`. Integers are
//! signed where they are quantised and stored with half of the number of codes added, zeros too.
//! `weight_g_idx` `[K]` is there with `actorder` group only.

use super::gptq::group_indices;
use super::schemes::Scheme;
use super::source::{SCALE_DTYPES, check_dtype, check_shape, scale_type, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensor, Tensors};
use crate::weights::{
    Codes, Group, MatrixParts, QuantMatrix, ScaleOrder, Scales, U4, U4B8, U8, U8B128, WeightFormat,
    ZeroOrder, Zeros,
};

/// The convention of packed integers.
#[derive(Clone, Copy, Debug)]
pub struct PackQuantized;

const NAME: &str = "pack-quantized";
/// The `quant_method` of every format of compressed-tensors.
pub(super) const METHOD: &str = "compressed-tensors";

/// The scheme of a layer of compressed-tensors, of the kind that a convention reads.
///
/// # Errors
/// [`Error::Unsupported`] when no group of the configuration takes the layer, or quantises it as
/// another kind of number.
pub(super) fn scheme<'c>(source: &Source<'c, '_>, number: &str) -> Result<&'c Scheme, Error> {
    let name = source.name();
    let Some(scheme) = source.config.schemes().of(&name) else {
        let found = format!("in config_groups nothing of layer {name}");
        return Err(source.config.unsupported(found, "a quantised layer needs a scheme"));
    };
    if scheme.number != number {
        let found = format!("that layer {name} is {}", scheme.describe());
        let rule = "the tensors hold another kind of number";
        return Err(source.config.unsupported(found, rule));
    }
    Ok(scheme)
}

/// The format that the configuration states for a layer, if it is not among `own`.
pub(super) fn other_format(source: &Source<'_, '_>, own: &[&str]) -> Option<String> {
    let format = source.config.schemes().of(&source.name())?.format.clone()?;
    (!own.contains(&format.as_str()) && format != "mixed-precision").then_some(format)
}

fn format(source: &Source<'_, '_>, scheme: &Scheme) -> Result<&'static dyn WeightFormat, Error> {
    Ok(match (scheme.bits, scheme.symmetric) {
        (4, true) => &U4B8,
        (4, false) => &U4,
        (8, true) => &U8B128,
        (8, false) => &U8,
        (bits, _) => {
            let found = format!("num_bits {bits} for layer {}", source.name());
            return Err(source.config.unsupported(found, "4 and 8 bits are read"));
        }
    })
}

/// N and K by `weight_shape`; none where it is not there, as in a stack of experts.
fn stated_shape(source: &Source<'_, '_>) -> Result<Option<[usize; 2]>, Error> {
    let Some(tensor) = source.get(".weight_shape")? else { return Ok(None) };
    check_dtype(&tensor, &[Dtype::I64, Dtype::I32])?;
    check_shape(&tensor, &[2])?;
    let element_bytes = tensor.bytes.len() / 2;
    let size = |idx: usize| {
        // Sign-extended, so that a negative size stays one.
        let mut bytes = [0xff; 8];
        bytes[..element_bytes]
            .copy_from_slice(&tensor.bytes[idx * element_bytes..][..element_bytes]);
        let value = match element_bytes {
            4 => i64::from(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            _ => i64::from_le_bytes(bytes),
        };
        usize::try_from(value).ok().filter(|&size| size > 0)
    };
    match (size(0), size(1)) {
        (Some(n), Some(k)) => Ok(Some([n, k])),
        _ => Err(shape_error(&tensor, "two positive sizes in it, N and K".to_owned())),
    }
}

impl Convention for PackQuantized {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        Some(METHOD)
    }

    fn marker_suffix(&self) -> &'static str {
        ".weight_packed"
    }

    fn scales_suffix(&self) -> &'static str {
        ".weight_scale"
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[
            ".weight_packed",
            ".weight_scale",
            ".weight_zero_point",
            ".weight_shape",
            ".weight_g_idx",
            ".input_scale",
            ".input_zero_point",
            ".bias",
        ]
    }

    /// Words are integers; floats are packed in bytes.
    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        let packed = source.get(".weight_packed").ok().flatten();
        packed.is_some_and(|tensor| tensor.dtype != Dtype::U8)
    }

    fn other_label(&self, source: &Source<'_, '_>) -> Option<String> {
        other_format(source, &[NAME])
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // Schemes differ by layer.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let scheme = scheme(source, "int")?;
        let format = format(source, scheme)?;
        let per_word = format.codes_per_word();
        let (packed, [n, words]) = source.matrix(NAME, ".weight_packed", &[Dtype::I32])?;
        let k = match stated_shape(source)? {
            None => words.checked_mul(per_word).filter(|&k| k > 0 && n > 0).ok_or_else(|| {
                shape_error(&packed, format!("[N, K/{per_word}], neither of them 0"))
            })?,
            Some([stated_n, k]) => {
                if [n, words] != [stated_n, k.div_ceil(per_word)] {
                    let expected = [stated_n, k.div_ceil(per_word)];
                    let bits = format.bits();
                    let expected =
                        format!("{expected:?}, {bits}-bit codes of weight_shape [{stated_n}, {k}]");
                    return Err(shape_error(&packed, expected));
                }
                k
            }
        };
        let scales = source.required(NAME, ".weight_scale")?;
        check_dtype(&scales, SCALE_DTYPES)?;
        let (group, scale_order) = match scheme.raw_group() {
            Some(raw) => {
                let rows = scales.shape.get(1).copied().unwrap_or(1);
                let group = source.group(k, raw, rows)?;
                check_shape(&scales, &[n, group.num_groups(k)])?;
                (group, ScaleOrder::Columns)
            }
            None if scheme.strategy == "tensor" => {
                check_shape(&scales, &[1])?;
                (Group::PerColumn, ScaleOrder::PerTensor)
            }
            None => {
                let found = format!("strategy {} for layer {}", scheme.strategy, source.name());
                let rule = "packed integers have one scale a group, channel or tensor";
                return Err(source.config.unsupported(found, rule));
            }
        };
        if let Some(zeros) = zero_point(source, scheme)? {
            let num_groups = group.num_groups(k);
            check_dtype(&zeros, &[Dtype::I32, Dtype::I8])?;
            let rows = if zeros.dtype == Dtype::I8 { n } else { n.div_ceil(per_word) };
            check_shape(&zeros, &[rows, num_groups])?;
        }
        if let Some(g_idx) = source.get(".weight_g_idx")? {
            check_dtype(&g_idx, &[Dtype::I32])?;
            check_shape(&g_idx, &[k])?;
        }
        let scales = (scales.dtype, scale_order);
        Ok(LayerInfo::new(self, source, (n, k), group, format, scales))
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let scheme = scheme(source, "int")?;
        let codes = Codes::PackedRows(source.required(NAME, ".weight_packed")?.bytes);
        let scales = source.required(NAME, ".weight_scale")?;
        let scales = Scales::new(scales.bytes, scale_type(scales.dtype), layer.scale_order);
        let stored = zero_point(source, scheme)?.map(|tensor| {
            let order = match tensor.dtype {
                Dtype::I8 => ZeroOrder::SignedColumns,
                _ => ZeroOrder::PackedColumns,
            };
            (tensor, Zeros { bytes: tensor.bytes, order })
        });
        // All minus one: the tool reserved the tensor and did not use it.
        let g_idx = source.get(".weight_g_idx")?;
        let g_idx = g_idx.filter(|tensor| tensor.bytes.iter().any(|&byte| byte != 0xff));
        let g_idx = match g_idx {
            None => None,
            Some(g_idx) => group_indices(&g_idx, layer)?,
        };
        let parts = MatrixParts { g_idx, ..layer.parts(codes, scales) };
        if !scheme.symmetric {
            return layer.matrix(MatrixParts { zeros: stored.map(|(_, zeros)| zeros), ..parts });
        }
        if let Some((tensor, zeros)) = stored {
            findings.push(Finding::UnusedTensor { tensor: tensor.name.to_owned() });
            check_symmetric(&tensor, zeros, layer, parts)?;
        }
        layer.matrix(parts)
    }
}

/// The stored zeros, which only a symmetric layer may lack.
fn zero_point<'a>(source: &Source<'_, 'a>, scheme: &Scheme) -> Result<Option<Tensor<'a>>, Error> {
    if scheme.symmetric {
        source.get(".weight_zero_point")
    } else {
        source.required(NAME, ".weight_zero_point").map(Some)
    }
}

/// Refuses stored zeros of a symmetric layer that are not the middle of the codes.
fn check_symmetric(
    tensor: &Tensor<'_>,
    zeros: Zeros<'_>,
    layer: &LayerInfo,
    parts: MatrixParts<'_>,
) -> Result<(), Error> {
    let format: &'static dyn WeightFormat = if layer.format.bits() == 4 { &U4 } else { &U8 };
    let matrix = layer.matrix(MatrixParts { format, zeros: Some(zeros), ..parts })?;
    let expected = 1u8 << (layer.format.bits() - 1);
    for group_idx in 0..matrix.num_groups() {
        for column in 0..layer.n {
            if let Some(found) = matrix.zero(group_idx, column).filter(|&zero| zero != expected) {
                let (tensor, label) = (tensor.name.to_owned(), NAME);
                return Err(Error::Zeros { tensor, group_idx, column, found, expected, label });
            }
        }
    }
    Ok(())
}
