//! `QuantMatrix`: a quantised weight as some file or quantiser holds it, borrowed.
//!
//! The view owns nothing. Its byte slices may come straight from a memory map and need no
//! alignment: every word is read with an explicit little-endian, unaligned load. Lengths, code
//! ranges and group indices are checked once, in [`QuantMatrix::from_parts`]; the packer relies on
//! that. What a weight is worth is said in one place, [`QuantMatrix::value`].

use half::f16;

use super::scales::ScaleShape;
use super::zeros::AWQ_FIELD;
use super::{Error, Group, ScaleOrder, Scales, WeightFormat, ZeroRule, Zeros};

/// The codes of an N x K weight, in the order of their source. With `p = 32 / bits` codes a word.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// `qweight` of a GPTQ checkpoint: little-endian words `[K/p][N]`; field i (lowest first) of
    /// word (r, n) is the code of input p r + i.
    GptqWords(&'a [u8]),
    /// `qweight` of AWQ's gemm layout: little-endian words `[K][N/8]`; field i of word (k, w) is the
    /// code of output 8 w + [`super::AWQ_ORDER`]`[i]`. 4 bits.
    AwqWords(&'a [u8]),
    /// `B` of the original Marlin kernel: little-endian words `[K/16][2N]`. 4 bits.
    MarlinWords(&'a [u8]),
    /// `weight_packed` of compressed-tensors: little-endian words `[N][K/p]`, rounded up; field i of
    /// word (n, r) is the code of input p r + i.
    PackedRows(&'a [u8]),
    /// Pairs of 4-bit codes, bytes `[N][K/2]`: the low half is the even input.
    NibblePairs(&'a [u8]),
    /// One code a byte, `[K][N]`.
    ByInput(&'a [u8]),
    /// One code a byte, `[N][K]`: the orientation of a linear layer's dense weight.
    ByOutput(&'a [u8]),
}

impl<'a> Codes<'a> {
    /// The bytes.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::GptqWords(bytes)
            | Self::AwqWords(bytes)
            | Self::MarlinWords(bytes)
            | Self::PackedRows(bytes)
            | Self::NibblePairs(bytes)
            | Self::ByInput(bytes)
            | Self::ByOutput(bytes) => bytes,
        }
    }

    /// The name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            Self::GptqWords(_) => "qweight",
            Self::AwqWords(_) => "AWQ's qweight",
            Self::MarlinWords(_) => "Marlin's B",
            Self::PackedRows(_) => "packed rows",
            Self::NibblePairs(_) => "code pairs",
            Self::ByInput(_) | Self::ByOutput(_) => "codes",
        }
    }

    /// Checks that an `n` x `k` weight of `format` can lie in this order, and its size.
    fn check(self, (n, k): (usize, usize), format: &'static dyn WeightFormat) -> Result<(), Error> {
        let (order, bits, per_word) = (self.name(), format.bits(), format.codes_per_word());
        let only_four_bits =
            matches!(self, Self::AwqWords(_) | Self::MarlinWords(_) | Self::NibblePairs(_));
        if only_four_bits && bits != 4 {
            return Err(Error::CodeBits { order, format: format.name(), bits });
        }
        let (n_multiple, k_multiple) = match self {
            Self::GptqWords(_) => (1, per_word),
            Self::AwqWords(_) => (8, 1),
            Self::MarlinWords(_) => (64, 16),
            Self::NibblePairs(_) => (1, 2),
            Self::PackedRows(_) | Self::ByInput(_) | Self::ByOutput(_) => (1, 1),
        };
        if !n.is_multiple_of(n_multiple) || !k.is_multiple_of(k_multiple) {
            return Err(Error::OrderShape { order, n_multiple, k_multiple, n, k });
        }
        let expected = match self {
            Self::ByInput(_) | Self::ByOutput(_) => n * k,
            Self::GptqWords(_) | Self::PackedRows(_) => 4 * n * k.div_ceil(per_word),
            Self::AwqWords(_) | Self::MarlinWords(_) | Self::NibblePairs(_) => n * k / 2,
        };
        let found = self.bytes().len();
        if found != expected {
            return Err(Error::SourceBytes { what: order, n, k, expected, found });
        }
        match self {
            Self::ByInput(bytes) | Self::ByOutput(bytes) => check_codes(bytes, format),
            _ => Ok(()),
        }
    }
}

/// All that a [`QuantMatrix`] is made of.
#[derive(Clone, Copy, Debug)]
pub struct MatrixParts<'a> {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// The group rule.
    pub group: Group,
    /// What a code is worth.
    pub format: &'static dyn WeightFormat,
    /// The codes.
    pub codes: Codes<'a>,
    /// The scales.
    pub scales: Scales<'a>,
    /// The zeros, of a format that stores them.
    pub zeros: Option<Zeros<'a>>,
    /// The group of each input, little-endian i32 `[K]`; none if an input's group follows from its
    /// place. With indices the scales may have any number of groups: a part of the inputs of a layer
    /// refers to the scales of the whole.
    pub g_idx: Option<&'a [u8]>,
}

/// A borrowed quantised weight of N outputs by K inputs.
///
/// ```
/// use makaira::weights::{Codes, Group, QuantMatrix, ScaleOrder, Scales, U4B8};
/// let codes = [9u8; 64 * 128];
/// let scales = [0x3c00u16; 64]; // 1.0
/// let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
/// let m = QuantMatrix::new(64, 128, Group::PerColumn, &U4B8, Codes::ByInput(&codes), scales)?;
/// assert_eq!((m.n(), m.k(), m.num_groups()), (64, 128, 1));
/// assert_eq!(m.value(127, 63), 1.0);
/// # Ok::<(), makaira::weights::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QuantMatrix<'a> {
    parts: MatrixParts<'a>,
    num_groups: usize,
}

impl<'a> QuantMatrix<'a> {
    /// A view of `n` outputs by `k` inputs without stored zeros, its groups in the inputs' order.
    ///
    /// # Errors
    /// Those of [`QuantMatrix::from_parts`].
    pub fn new(
        n: usize,
        k: usize,
        group: Group,
        format: &'static dyn WeightFormat,
        codes: Codes<'a>,
        scales: Scales<'a>,
    ) -> Result<Self, Error> {
        let (zeros, g_idx) = (None, None);
        Self::from_parts(MatrixParts { n, k, group, format, codes, scales, zeros, g_idx })
    }

    /// A view of `parts`, its group rule normalised.
    ///
    /// # Errors
    /// [`Error::Size`]; [`Error::SourceBytes`], [`Error::ScaleRows`], [`Error::OrderShape`],
    /// [`Error::CodeBits`], [`Error::ScaleGroup`], [`Error::ZeroBits`] where sizes and orders
    /// disagree; [`Error::ZeroRule`] for zeros that the format does not store, or lacks;
    /// [`Error::CodeRange`], [`Error::ZeroRange`], [`Error::GroupIndex`], [`Error::GlobalScale`] for
    /// values out of range; and those of [`Group::new`]. A last block that is short is legal with
    /// [`ScaleOrder::Blocks`] only.
    pub fn from_parts(mut parts: MatrixParts<'a>) -> Result<Self, Error> {
        let MatrixParts { n, k, format, codes, scales, .. } = parts;
        let fits = n.checked_mul(k).is_some_and(|elements| (1..1 << 48).contains(&elements));
        if !fits {
            return Err(Error::Size { n, k });
        }
        parts.group = match (scales.order, parts.group) {
            (ScaleOrder::Blocks, Group::Size(128)) if k > 128 => parts.group,
            (_, group) => Group::new(k, group.raw())?,
        };
        codes.check((n, k), format)?;
        let num_groups = scales.check((n, k), parts.group, parts.g_idx.is_some())?;
        if parts.zeros.is_some() != (format.zero_rule() == ZeroRule::Stored) {
            return Err(Error::ZeroRule { format: format.name(), found: parts.zeros.is_some() });
        }
        if let Some(zeros) = parts.zeros {
            zeros.check((n, k), num_groups, format.bits())?;
        }
        if let Some(g_idx) = parts.g_idx {
            check_group_indices(g_idx, (n, k), num_groups)?;
        }
        Ok(Self { parts, num_groups })
    }

    /// What the view is made of.
    pub fn parts(&self) -> MatrixParts<'a> {
        self.parts
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.parts.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.parts.k
    }

    /// The group rule, normalised for K.
    pub fn group(&self) -> Group {
        self.parts.group
    }

    /// Number of groups that the scales have.
    pub fn num_groups(&self) -> usize {
        self.num_groups
    }

    /// The weight type.
    pub fn format(&self) -> &'static dyn WeightFormat {
        self.parts.format
    }

    /// The codes as their source holds them.
    pub fn codes(&self) -> Codes<'a> {
        self.parts.codes
    }

    /// The scales as their source holds them.
    pub fn scales(&self) -> Scales<'a> {
        self.parts.scales
    }

    /// The zeros as their source holds them.
    pub fn zeros(&self) -> Option<Zeros<'a>> {
        self.parts.zeros
    }

    /// The group of each input as its source holds it: little-endian i32 `[K]`.
    pub fn g_idx(&self) -> Option<&'a [u8]> {
        self.parts.g_idx
    }

    /// The code of input `k` and output `n`: the plain reading of the source's order, one element
    /// at a time. The packer has a faster way of its own and the tests compare the two.
    pub fn code(&self, k: usize, n: usize) -> u8 {
        let MatrixParts { n: num_outputs, k: num_inputs, format, codes, .. } = self.parts;
        let per_word = format.codes_per_word();
        match codes {
            Codes::GptqWords(bytes) => {
                field(bytes, format.bits(), (k / per_word) * num_outputs + n, k % per_word)
            }
            Codes::AwqWords(bytes) => {
                nibble(bytes, k * (num_outputs / 8) + n / 8, AWQ_FIELD[n % 8])
            }
            Codes::MarlinWords(bytes) => {
                let (word, p) = super::marlin::word_and_nibble(num_outputs, k, n);
                nibble(bytes, word, p)
            }
            Codes::PackedRows(bytes) => {
                let word = n * num_inputs.div_ceil(per_word) + k / per_word;
                field(bytes, format.bits(), word, k % per_word)
            }
            Codes::NibblePairs(bytes) => bytes[(n * num_inputs + k) / 2] >> (4 * (k % 2)) & 0xf,
            Codes::ByInput(bytes) => bytes[k * num_outputs + n],
            Codes::ByOutput(bytes) => bytes[n * num_inputs + k],
        }
    }

    /// The group that input `k` belongs to.
    pub fn group_of_input(&self, k: usize) -> usize {
        match self.parts.g_idx {
            None => self.parts.group.index_of(k),
            Some(g_idx) => {
                let quad = &g_idx[4 * k..4 * k + 4];
                u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]) as usize
            }
        }
    }

    fn scale_shape(&self) -> ScaleShape {
        ScaleShape { n: self.parts.n, num_groups: self.num_groups, group: self.parts.group }
    }

    /// The stored scale of group `group_idx` and output `n`, exactly; the global factor is not in
    /// it.
    pub fn scale(&self, group_idx: usize, n: usize) -> f32 {
        self.parts.scales.get(&self.scale_shape(), group_idx, n)
    }

    /// Which element of the scales [`QuantMatrix::scale`] is.
    pub(super) fn scale_place(&self, group_idx: usize, n: usize) -> usize {
        self.parts.scales.element_idx(&self.scale_shape(), group_idx, n)
    }

    /// The bits of [`QuantMatrix::scale`], where the elements are f16.
    pub(super) fn half_scale(&self, group_idx: usize, n: usize) -> f16 {
        self.parts.scales.get_half(&self.scale_shape(), group_idx, n)
    }

    /// The factor of every scale.
    pub fn global_scale(&self) -> f32 {
        self.parts.scales.global
    }

    /// The stored zero of group `group_idx` and output `n`, if the format stores zeros.
    pub fn zero(&self, group_idx: usize, n: usize) -> Option<u8> {
        let MatrixParts { n: num_outputs, format, zeros, .. } = self.parts;
        let shape = (num_outputs, self.num_groups, format.bits());
        zeros.map(|zeros| zeros.get(shape, group_idx, n))
    }

    /// The weight of input `k` and output `n`: scale x (code - zero) x global factor.
    ///
    /// Exact, except that the last product is rounded to f64 where an f32 scale has a global factor.
    pub fn value(&self, k: usize, n: usize) -> f64 {
        let group_idx = self.group_of_input(k);
        let zero = self.zero(group_idx, n).unwrap_or(0);
        let steps = f64::from(self.parts.format.decode(self.code(k, n))) - f64::from(zero);
        steps * f64::from(self.scale(group_idx, n)) * f64::from(self.parts.scales.global)
    }

    /// Refuses what cannot be brought into the packed layout, for the reason that packing it would give.
    ///
    /// # Errors
    /// [`Error::Unpackable`] for what no kernel takes, [`Error::ScaleRange`] and [`Error::GlobalScale`] for
    /// scales that would lose more than fp16 does, and those of the layout.
    pub fn check_packable(&self) -> Result<(), Error> {
        super::Packing::of(self).map(|_| ())
    }
}

fn check_group_indices(
    g_idx: &[u8],
    (n, k): (usize, usize),
    num_groups: usize,
) -> Result<(), Error> {
    if g_idx.len() != 4 * k {
        let (expected, found) = (4 * k, g_idx.len());
        return Err(Error::SourceBytes { what: "group indices", n, k, expected, found });
    }
    for (input, quad) in g_idx.as_chunks().0.iter().enumerate() {
        let value = i32::from_le_bytes(*quad);
        if !usize::try_from(value).is_ok_and(|group_idx| group_idx < num_groups) {
            return Err(Error::GroupIndex { input, value, num_groups });
        }
    }
    Ok(())
}

/// Field `idx` of `bits` bits, lowest first, of a little-endian word.
fn field(bytes: &[u8], bits: u32, word: usize, idx: usize) -> u8 {
    match bits {
        4 => nibble(bytes, word, idx),
        _ => bytes[4 * word + idx],
    }
}

fn nibble(bytes: &[u8], word: usize, p: usize) -> u8 {
    bytes[4 * word + p / 2] >> (4 * (p % 2)) & 0xf
}

fn check_codes(bytes: &[u8], format: &'static dyn WeightFormat) -> Result<(), Error> {
    let limit = format.num_codes();
    if limit > usize::from(u8::MAX) {
        return Ok(()); // Every byte is a code; a mapped file is not read for that.
    }
    // The largest code first: a loop without an early exit is a vector loop.
    let largest = bytes.iter().copied().max().unwrap_or(0);
    if usize::from(largest) < limit {
        return Ok(());
    }
    let at = bytes.iter().position(|&code| usize::from(code) >= limit).unwrap_or(0);
    Err(Error::CodeRange { code: bytes[at], at, format: format.name(), limit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::U4B8;

    fn view<'a>(
        n: usize,
        k: usize,
        raw: i64,
        codes: Codes<'a>,
        scales: &'a [u8],
    ) -> Result<QuantMatrix<'a>, Error> {
        let scales = Scales::f16(scales, ScaleOrder::Rows);
        QuantMatrix::new(n, k, Group::new(k, raw)?, &U4B8, codes, scales)
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_numbers() {
        let codes = vec![3u8; 256 * 64];
        let ok = view(64, 256, 128, Codes::ByInput(&codes), &[0; 2 * 64 * 2]);
        assert_eq!(ok.expect("fits").num_groups(), 2);
        let rows = view(64, 256, 128, Codes::ByInput(&codes), &[0; 3 * 64 * 2]).expect_err("rows");
        let group = Group::Size(128);
        assert_eq!(rows, Error::ScaleRows { k: 256, group, expected: 2, found: 3 });
        let cut = view(64, 256, 128, Codes::ByInput(&codes[1..]), &[0; 256]).expect_err("cut");
        assert_eq!(
            cut.to_string(),
            "codes of a 64 x 256 (N x K) matrix take 16384 bytes, found 16383"
        );
        assert!(view(64, 256, 128, Codes::ByInput(&codes), &[0; 255]).is_err());
        let marlin = view(32, 256, -1, Codes::MarlinWords(&[0; 4096]), &[0; 64]).expect_err("N");
        assert!(matches!(marlin, Error::OrderShape { n_multiple: 64, n: 32, .. }));
        let odd = view(64, 12, -1, Codes::GptqWords(&[0; 384]), &[0; 128]).expect_err("K");
        assert!(matches!(odd, Error::OrderShape { k_multiple: 8, k: 12, .. }));
        assert!(matches!(view(0, 12, -1, Codes::ByInput(&[]), &[]), Err(Error::Size { .. })));
    }

    #[test]
    fn a_code_that_does_not_fit_is_named() {
        let mut codes = vec![15u8; 64 * 64];
        codes[70] = 16;
        for order in [Codes::ByInput(&codes), Codes::ByOutput(&codes)] {
            let error = view(64, 64, -1, order, &[0; 128]).expect_err("16 needs five bits");
            assert_eq!(error, Error::CodeRange { code: 16, at: 70, format: "u4b8", limit: 16 });
        }
    }
}
