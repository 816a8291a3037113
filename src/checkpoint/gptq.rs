//! GPTQ checkpoints, 4 bit, symmetric, in input order.
//!
//! A layer is `qweight` `[K/8][N]` (words of eight codes along K), `scales` f16 `[groups][N]`,
//! `qzeros` `[groups][N/8]` and `g_idx` `[K]`, the group of each input. The zero of a symmetric
//! checkpoint is 8; the format "gptq" (version 1) stores it less one, 7, and "gptq_v2" stores 8.
//! Tools have written either under either label, and with `sym` both can only mean 8, so the other
//! one is read and reported. Any other stored zero is an asymmetric layer and refused, as is a
//! `g_idx` that is not the plain order: both would be misread silently.

use super::parts::{check_dtype, check_shape, matrix_tensor, required, shape_error, words};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Tensor, Tensors};
use crate::weights::{Codes, Group, QuantMatrix, ScaleOrder, Scales, U4B8};

/// The convention of GPTQ tools.
#[derive(Clone, Copy, Debug)]
pub struct Gptq;

/// Stored symmetric zero of version 1: the zero less one.
const V1_ZERO: u8 = 7;
/// Stored symmetric zero of version 2: the zero itself.
const V2_ZERO: u8 = 8;

/// The label and its symmetric zero, of a configuration that [`Gptq`] accepts.
fn zero_of_label(config: &QuantConfig) -> Result<(&'static str, u8), Error> {
    match config.checkpoint_format()?.as_deref() {
        // "marlin" comes here only where the other marker and the tensors say it is not.
        None | Some("gptq" | "marlin") => Ok(("gptq", V1_ZERO)),
        Some("gptq_v2") => Ok(("gptq_v2", V2_ZERO)),
        Some(other) => Err(config.unsupported(
            format!("checkpoint_format {other}"),
            "the formats gptq, gptq_v2 and marlin are read",
        )),
    }
}

/// Refuses every setting, common to the GPTQ family, that would change how codes are read.
pub(super) fn check_common(config: &QuantConfig) -> Result<(), Error> {
    match config.integer("bits")? {
        Some(4) => {}
        Some(bits) => return Err(config.unsupported(format!("bits {bits}"), "4 bits are read")),
        None => return Err(config.unsupported("no bits".to_owned(), "4 bits must be stated")),
    }
    if config.flag("sym")? == Some(false) {
        let rule = "only symmetric weights (sym true) are read";
        return Err(config.unsupported("sym false".to_owned(), rule));
    }
    if config.is_set("dynamic") {
        let rule = "settings that differ by layer are not read";
        return Err(config.unsupported("dynamic settings".to_owned(), rule));
    }
    match config.text("pack_dtype")?.as_deref() {
        None | Some("int32") => Ok(()),
        Some(other) => {
            Err(config.unsupported(format!("pack_dtype {other}"), "codes packed in int32 are read"))
        }
    }
}

/// The group size that the configuration states.
pub(super) fn group_size(config: &QuantConfig) -> Result<i64, Error> {
    config.integer("group_size")?.ok_or_else(|| {
        config.unsupported("no group_size".to_owned(), "a group size (-1 or a number) is needed")
    })
}

/// The group rule of a layer whose scales have `rows` rows.
pub(super) fn group_of(
    config: &QuantConfig,
    layer: &str,
    k: usize,
    rows: usize,
) -> Result<Group, Error> {
    Group::for_scale_rows(k, group_size(config)?, rows)
        .map_err(|source| Error::Weight { layer: layer.to_owned(), source })
}

impl Convention for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn claims(&self, config: &QuantConfig, tensors: &Tensors) -> Result<bool, Error> {
        Ok(config.method == "gptq" && !super::marlin::is_marlin(config, tensors)?)
    }

    fn check_config(&self, config: &QuantConfig) -> Result<(), Error> {
        check_common(config)?;
        zero_of_label(config).map(|_| ())
    }

    fn marker_suffix(&self) -> &'static str {
        ".qweight"
    }

    fn scales_suffix(&self) -> &'static str {
        ".scales"
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".qweight", ".scales", ".qzeros", ".g_idx", ".bias"]
    }

    fn describe(
        &self,
        config: &QuantConfig,
        tensors: &Tensors,
        name: &str,
    ) -> Result<LayerInfo, Error> {
        let (qweight, [octets, n]) = matrix_tensor(&Self, tensors, (name, ".qweight"), Dtype::I32)?;
        let k = octets.checked_mul(8).filter(|&k| k > 0 && n > 0);
        let k = k.ok_or_else(|| shape_error(&qweight, "[K/8, N], neither of them 0".to_owned()))?;
        let (scales, [rows, _]) = matrix_tensor(&Self, tensors, (name, ".scales"), Dtype::F16)?;
        let group = group_of(config, name, k, rows)?;
        let num_groups = group.num_groups(k);
        check_shape(&scales, &[num_groups, n])?;
        let (qzeros, _) = matrix_tensor(&Self, tensors, (name, ".qzeros"), Dtype::I32)?;
        check_shape(&qzeros, &[num_groups, n.div_ceil(8)])?;
        if let Some(g_idx) = g_idx(config, tensors, name)? {
            check_dtype(&g_idx, Dtype::I32)?;
            check_shape(&g_idx, &[k])?;
        }
        let name = name.to_owned();
        Ok(LayerInfo { name, n, k, group, format: &U4B8, convention: self.name() })
    }

    fn check_contents(
        &self,
        config: &QuantConfig,
        tensors: &Tensors,
        layer: &LayerInfo,
    ) -> Result<Vec<Finding>, Error> {
        if let Some(g_idx) = g_idx(config, tensors, &layer.name)? {
            check_input_order(&g_idx, layer)?;
        }
        let qzeros = required(&Self, tensors, &layer.name, ".qzeros")?;
        let label = zero_of_label(config)?;
        Ok(check_zeros(&qzeros, layer.n, label)?.into_iter().collect())
    }

    fn matrix<'a>(
        &self,
        tensors: &'a Tensors,
        layer: &LayerInfo,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::GptqWords(required(&Self, tensors, &layer.name, ".qweight")?.bytes);
        let bytes = required(&Self, tensors, &layer.name, ".scales")?.bytes;
        let scales = Scales::f16(bytes, ScaleOrder::Rows);
        QuantMatrix::new(layer.n, layer.k, layer.group, layer.format, codes, scales)
            .map_err(|source| Error::Weight { layer: layer.name.clone(), source })
    }
}

/// The group indices of a layer: only a checkpoint in input order may lack them.
fn g_idx<'a>(
    config: &QuantConfig,
    tensors: &'a Tensors,
    layer: &str,
) -> Result<Option<Tensor<'a>>, Error> {
    if config.flag("desc_act")? == Some(true) {
        return required(&Gptq, tensors, layer, ".g_idx").map(Some);
    }
    Ok(tensors.get(&format!("{layer}.g_idx")))
}

/// Checks that every input is in the group of its position.
fn check_input_order(g_idx: &Tensor<'_>, layer: &LayerInfo) -> Result<(), Error> {
    let num_groups = layer.group.num_groups(layer.k);
    let mut out_of_order = None;
    for (row, value) in words(g_idx).map(u32::cast_signed).enumerate() {
        let tensor = || g_idx.name.to_owned();
        let legal = usize::try_from(value).is_ok_and(|group_idx| group_idx < num_groups);
        if !legal {
            return Err(Error::GroupIndex { tensor: tensor(), row, value, num_groups });
        }
        let expected = layer.group.index_of(row);
        if value as usize != expected && out_of_order.is_none() {
            out_of_order = Some(Error::ActOrder { tensor: tensor(), row, found: value, expected });
        }
    }
    out_of_order.map_or(Ok(()), Err)
}

/// Checks that every stored zero is the symmetric one, under either label.
fn check_zeros(
    qzeros: &Tensor<'_>,
    n: usize,
    (label, expected): (&'static str, u8),
) -> Result<Option<Finding>, Error> {
    let words_per_row = n.div_ceil(8);
    let first = words(qzeros).next().map_or(expected, |word| (word & 0xf) as u8);
    let stored = if matches!(first, V1_ZERO | V2_ZERO) { first } else { expected };
    for (idx, word) in words(qzeros).enumerate() {
        if word == u32::from(stored) * 0x1111_1111 {
            continue;
        }
        let (group_idx, first_column) = (idx / words_per_row, idx % words_per_row * 8);
        // Nibbles past N are padding of the last word and may be anything.
        for column in first_column..n.min(first_column + 8) {
            let found = (word >> (4 * (column % 8)) & 0xf) as u8;
            if found != stored {
                let tensor = qzeros.name.to_owned();
                return Err(Error::Zeros { tensor, group_idx, column, found, expected, label });
            }
        }
    }
    let tensor = || qzeros.name.to_owned();
    Ok((stored != expected).then(|| Finding::ZeroLabel { tensor: tensor(), label, found: stored }))
}
