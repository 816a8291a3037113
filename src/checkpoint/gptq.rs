//! GPTQ checkpoints: 4 and 8 bit, symmetric and not, in any activation order.
//!
//! With p = 32 / bits codes a word, a layer is `qweight` `[K/p][N]` (words of codes along K),
//! `scales` `[groups][N]`, `qzeros` `[groups][N/p]` and `g_idx` `[K]`, the group of each input. The
//! format "gptq" (version 1) stores zeros less one, "gptq_v2" as they are. The zero of a symmetric
//! checkpoint is the middle code, 8 or 128. Tools have written it either way under either label, and
//! with `sym` both can only mean the middle, so the other one is read and reported. Any other zero
//! under `sym` is refused: one of the two is wrong, and nothing says which.
//!
//! Modules may have `bits`, `group_size`, `sym` and `desc_act` of their own: see `dynamic.rs`.
//! `g_idx` decides the order of the groups, whatever `desc_act` says; one in plain order is dropped.

use super::dynamic::Overrides;
use super::source::{SCALE_DTYPES, check_dtype, check_shape, scale_type, shape_error, words};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensor, Tensors};
use crate::weights::{
    Codes, MatrixParts, QuantMatrix, ScaleOrder, Scales, U4, U4B8, U8, U8B128, WeightFormat,
    ZeroOrder, Zeros,
};

/// The convention of GPTQ tools.
#[derive(Clone, Copy, Debug)]
pub struct Gptq;

/// The two ways to store a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// Less one.
    V1,
    /// As it is.
    V2,
}

impl Version {
    /// That of a configuration's label.
    fn of(config: &QuantConfig) -> Result<Self, Error> {
        match config.checkpoint_format()?.as_deref() {
            // "marlin" comes here only where the other marker and the tensors say it is not.
            None | Some("gptq" | "marlin") => Ok(Self::V1),
            Some("gptq_v2") => Ok(Self::V2),
            Some(other) => Err(config.unsupported(
                format!("checkpoint_format {other}"),
                "the formats gptq, gptq_v2 and marlin are read",
            )),
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::V1 => "gptq",
            Self::V2 => "gptq_v2",
        }
    }

    /// How the middle of the codes is stored as a zero.
    fn symmetric_zero(self, bits: u32) -> u8 {
        let middle = 1 << (bits - 1);
        match self {
            Self::V1 => middle - 1,
            Self::V2 => middle,
        }
    }

    fn zero_order(self) -> ZeroOrder {
        match self {
            Self::V1 => ZeroOrder::GptqWordsLessOne,
            Self::V2 => ZeroOrder::GptqWords,
        }
    }
}

/// Refuses every setting, common to the GPTQ family, that would change how codes are read.
pub(super) fn check_common(config: &QuantConfig) -> Result<(), Error> {
    bits(config)?;
    config.flag("sym")?;
    match config.text("pack_dtype")?.as_deref() {
        None | Some("int32") => Ok(()),
        Some(other) => {
            Err(config.unsupported(format!("pack_dtype {other}"), "codes packed in int32 are read"))
        }
    }
}

/// The bits of a code that the configuration states: 4 or 8.
fn bits(config: &QuantConfig) -> Result<u32, Error> {
    match config.integer("bits")? {
        Some(4) => Ok(4),
        Some(8) => Ok(8),
        Some(bits) => Err(config.unsupported(format!("bits {bits}"), "4 and 8 bits are read")),
        None => Err(config.unsupported("no bits".to_owned(), "4 or 8 bits must be stated")),
    }
}

/// The group size that the configuration states.
pub(super) fn group_size(config: &QuantConfig) -> Result<i64, Error> {
    config.integer("group_size")?.ok_or_else(|| {
        config.unsupported("no group_size".to_owned(), "a group size (-1 or a number) is needed")
    })
}

/// The weight type: symmetric unless the configuration says otherwise.
fn format(config: &QuantConfig) -> Result<&'static dyn WeightFormat, Error> {
    let symmetric = config.flag("sym")? != Some(false);
    Ok(match (bits(config)?, symmetric) {
        (4, true) => &U4B8,
        (4, false) => &U4,
        (_, true) => &U8B128,
        (_, false) => &U8,
    })
}

const NAME: &str = "gptq";

impl Convention for Gptq {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        Some("gptq")
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

    /// Everything but AWQ's layout, whose `qweight` is packed along the outputs.
    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        !super::awq::is_packed_along_outputs(source)
    }

    fn check(&self, config: &QuantConfig, tensors: &Tensors) -> Result<(), Error> {
        super::marlin::is_marlin(config, tensors)?;
        check_common(config)?;
        Version::of(config).map(|_| ())
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let config = Overrides::of(source.config, &source.name())?;
        let format = format(&config)?;
        let per_word = format.codes_per_word();
        let (qweight, [rows, n]) = source.matrix(NAME, ".qweight", &[Dtype::I32])?;
        let k = rows.checked_mul(per_word).filter(|&k| k > 0 && n > 0).ok_or_else(|| {
            shape_error(&qweight, format!("[K/{per_word}, N], neither of them 0"))
        })?;
        let (scales, [rows, _]) = source.matrix(NAME, ".scales", SCALE_DTYPES)?;
        let group = source.group(k, group_size(&config)?, rows)?;
        let num_groups = group.num_groups(k);
        check_shape(&scales, &[num_groups, n])?;
        let (qzeros, shape) = source.matrix(NAME, ".qzeros", &[Dtype::I32])?;
        let row_words = n.div_ceil(per_word);
        if shape != [num_groups, row_words] {
            let bits = format.bits();
            let expected = format!("[{num_groups}, {row_words}] for {bits}-bit zeros");
            return Err(shape_error(&qzeros, expected));
        }
        if let Some(g_idx) = g_idx(source, &config)? {
            check_dtype(&g_idx, &[Dtype::I32])?;
            check_shape(&g_idx, &[k])?;
        }
        let scale_order = ScaleOrder::Rows;
        Ok(LayerInfo::new(self, source, (n, k), group, format, (scales.dtype, scale_order)))
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let config = Overrides::of(source.config, &source.name())?;
        let g_idx = match g_idx(source, &config)? {
            None => None,
            Some(g_idx) => group_indices(&g_idx, layer)?,
        };
        let version = Version::of(source.config)?;
        let qzeros = source.required(NAME, ".qzeros")?;
        let bits = layer.format.bits();
        let zeros = if matches!(layer.format.name(), "u4b8" | "u8b128") {
            findings.extend(check_symmetric_zeros(&qzeros, layer.n, bits, version)?);
            None
        } else {
            findings.extend(odd_zeros(&qzeros, bits, version));
            Some(Zeros { bytes: qzeros.bytes, order: version.zero_order() })
        };
        let codes = Codes::GptqWords(source.required(NAME, ".qweight")?.bytes);
        let scales = source.required(NAME, ".scales")?;
        let scales = Scales::new(scales.bytes, scale_type(scales.dtype), ScaleOrder::Rows);
        layer.matrix(MatrixParts { zeros, g_idx, ..layer.parts(codes, scales) })
    }
}

/// The group indices of a layer: only a checkpoint in input order may lack them.
fn g_idx<'a>(source: &Source<'_, 'a>, config: &QuantConfig) -> Result<Option<Tensor<'a>>, Error> {
    if config.flag("desc_act")? == Some(true) {
        return source.required(NAME, ".g_idx").map(Some);
    }
    source.get(".g_idx")
}

/// The bytes of group indices that are all in range; none if every input is in the group of its
/// place.
pub(super) fn group_indices<'a>(
    g_idx: &Tensor<'a>,
    layer: &LayerInfo,
) -> Result<Option<&'a [u8]>, Error> {
    let num_groups = layer.group.num_groups(layer.k);
    let mut in_order = true;
    for (row, value) in words(g_idx).map(u32::cast_signed).enumerate() {
        let legal = usize::try_from(value).is_ok_and(|group_idx| group_idx < num_groups);
        if !legal {
            let tensor = g_idx.name.to_owned();
            return Err(Error::GroupIndex { tensor, row, value, num_groups });
        }
        in_order &= value as usize == layer.group.index_of(row);
    }
    Ok((!in_order).then_some(g_idx.bytes))
}

/// A word with `zero` in every field.
fn word_of(zero: u8, bits: u32) -> u32 {
    let ones = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
    u32::from(zero) * ones
}

/// Checks that every stored zero is the middle of the codes, under either label.
fn check_symmetric_zeros(
    qzeros: &Tensor<'_>,
    n: usize,
    bits: u32,
    version: Version,
) -> Result<Option<Finding>, Error> {
    let (fields, mask) = (32 / bits as usize, 0xff_u32 >> (8 - bits));
    let words_per_row = n.div_ceil(fields);
    let label = version.label();
    let expected = version.symmetric_zero(bits);
    let known = [Version::V1, Version::V2].map(|version| version.symmetric_zero(bits));
    let first = words(qzeros).next().map_or(expected, |word| (word & mask) as u8);
    let stored = if known.contains(&first) { first } else { expected };
    for (idx, word) in words(qzeros).enumerate() {
        if word == word_of(stored, bits) {
            continue;
        }
        let (group_idx, first_column) = (idx / words_per_row, idx % words_per_row * fields);
        // Fields past N are padding of the last word and may be anything.
        for column in first_column..n.min(first_column + fields) {
            let found = (word >> (bits as usize * (column % fields)) & mask) as u8;
            if found != stored {
                let tensor = qzeros.name.to_owned();
                return Err(Error::Zeros { tensor, group_idx, column, found, expected, label });
            }
        }
    }
    let tensor = || qzeros.name.to_owned();
    Ok((stored != expected).then(|| Finding::ZeroLabel { tensor: tensor(), label, found: stored }))
}

/// What is odd about the stored zeros of an asymmetric layer: that they are all the symmetric one of
/// the other version, or that version 1 had to store a zero of 0.
fn odd_zeros(qzeros: &Tensor<'_>, bits: u32, version: Version) -> Vec<Finding> {
    let tensor = || qzeros.name.to_owned();
    let other = if version == Version::V1 { Version::V2 } else { Version::V1 };
    let found = other.symmetric_zero(bits);
    if words(qzeros).all(|word| word == word_of(found, bits)) {
        return vec![Finding::ZeroLabel { tensor: tensor(), label: version.label(), found }];
    }
    if version == Version::V2 {
        return Vec::new();
    }
    let (fields, largest) = (32 / bits as usize, 0xff_u32 >> (8 - bits));
    let borrowed =
        |word: &u32| (0..fields).any(|field| word >> (bits as usize * field) & largest == largest);
    let count = words(qzeros).filter(borrowed).count();
    if count == 0 { Vec::new() } else { vec![Finding::ZeroBorrow { tensor: tensor(), count }] }
}
