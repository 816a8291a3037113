//! `QuantMatrix`: a quantised weight as some file or quantiser holds it, borrowed.
//!
//! The view owns nothing. Its byte slices may come straight from a memory map and need no
//! alignment: every word is read with an explicit little-endian, unaligned load. Lengths and code
//! ranges are checked once, in [`QuantMatrix::new`]; the packer relies on that.

use half::f16;

use super::{Error, Group, WeightFormat};

/// The codes of an N x K weight, in the order of their source.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// `qweight` of a 4-bit GPTQ checkpoint: little-endian words `[K/8][N]`; nibble i (lowest
    /// first) of word (r, n) is the code of input 8 r + i.
    GptqWords(&'a [u8]),
    /// `B` of the original Marlin kernel: little-endian words `[K/16][2N]`.
    MarlinWords(&'a [u8]),
    /// One code a byte, `[K][N]`.
    ByInput(&'a [u8]),
    /// One code a byte, `[N][K]`: the orientation of a linear layer's dense weight.
    ByOutput(&'a [u8]),
}

/// The order of a scale tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOrder {
    /// `[groups][N]`.
    Rows,
    /// `[groups][N]` with the columns permuted as the original Marlin kernel wants them.
    Marlin,
}

/// The scales of a weight: little-endian f16 bytes, `[groups][N]`.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// The bytes.
    pub bytes: &'a [u8],
    /// The order of the columns.
    pub order: ScaleOrder,
}

/// A borrowed quantised weight of N outputs by K inputs.
///
/// ```
/// use makaira::weights::{Codes, Group, QuantMatrix, ScaleOrder, Scales, U4B8};
/// let codes = [8u8; 64 * 128];
/// let scales = [0x3c00u16; 64]; // 1.0
/// let scales = Scales { bytes: bytemuck::cast_slice(&scales), order: ScaleOrder::Rows };
/// let m = QuantMatrix::new(64, 128, Group::PerColumn, &U4B8, Codes::ByInput(&codes), scales)?;
/// assert_eq!((m.n(), m.k(), m.num_groups()), (64, 128, 1));
/// # Ok::<(), makaira::weights::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QuantMatrix<'a> {
    n: usize,
    k: usize,
    group: Group,
    format: &'static dyn WeightFormat,
    codes: Codes<'a>,
    scales: Scales<'a>,
}

impl<'a> QuantMatrix<'a> {
    /// A view of `n` outputs by `k` inputs.
    ///
    /// # Errors
    /// [`Error::SourceBytes`], [`Error::ScaleRows`], [`Error::OrderShape`], [`Error::CodeRange`],
    /// [`Error::Size`] and those of [`Group::new`].
    pub fn new(
        n: usize,
        k: usize,
        group: Group,
        format: &'static dyn WeightFormat,
        codes: Codes<'a>,
        scales: Scales<'a>,
    ) -> Result<Self, Error> {
        let elements = n.checked_mul(k).filter(|&e| e > 0).ok_or(Error::Size { n, k })?;
        let group = Group::new(k, group.raw())?;
        let (order, n_multiple, k_multiple) = match codes {
            Codes::GptqWords(_) => ("qweight", 1, 8),
            Codes::MarlinWords(_) => ("Marlin's B", 64, 16),
            Codes::ByInput(_) | Codes::ByOutput(_) => ("codes", 1, 1),
        };
        if !n.is_multiple_of(n_multiple) || !k.is_multiple_of(k_multiple) {
            return Err(Error::OrderShape { order, n_multiple, k_multiple, n, k });
        }
        let (bytes, expected) = match codes {
            Codes::GptqWords(bytes) | Codes::MarlinWords(bytes) => (bytes, elements / 2),
            Codes::ByInput(bytes) | Codes::ByOutput(bytes) => (bytes, elements),
        };
        if bytes.len() != expected {
            return Err(Error::SourceBytes { what: order, n, k, expected, found: bytes.len() });
        }
        if matches!(codes, Codes::ByInput(_) | Codes::ByOutput(_)) {
            check_codes(bytes, format)?;
        } else if format.bits() != 4 {
            return Err(Error::FormatBits { format: format.name(), bits: format.bits() });
        }
        if scales.order == ScaleOrder::Marlin && !n.is_multiple_of(64) {
            return Err(Error::OrderShape {
                order: "Marlin's s",
                n_multiple: 64,
                k_multiple: 1,
                n,
                k,
            });
        }
        let row_bytes = 2 * n;
        let num_groups = group.num_groups(k);
        if scales.bytes.len() != num_groups * row_bytes {
            if scales.bytes.len().is_multiple_of(row_bytes) {
                let found = scales.bytes.len() / row_bytes;
                return Err(Error::ScaleRows { k, group, expected: num_groups, found });
            }
            let (expected, found) = (num_groups * row_bytes, scales.bytes.len());
            return Err(Error::SourceBytes { what: "scales", n, k, expected, found });
        }
        Ok(Self { n, k, group, format, codes, scales })
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The group rule, normalised for K.
    pub fn group(&self) -> Group {
        self.group
    }

    /// Number of rows of scales.
    pub fn num_groups(&self) -> usize {
        self.group.num_groups(self.k)
    }

    /// The weight type.
    pub fn format(&self) -> &'static dyn WeightFormat {
        self.format
    }

    /// The codes as their source holds them.
    pub fn codes(&self) -> Codes<'a> {
        self.codes
    }

    /// The scales as their source holds them.
    pub fn scales(&self) -> Scales<'a> {
        self.scales
    }

    /// The code of input `k` and output `n`: the plain reading of the source's order, one element
    /// at a time. The packer has a faster way of its own and the tests compare the two.
    pub fn code(&self, k: usize, n: usize) -> u8 {
        match self.codes {
            Codes::GptqWords(bytes) => nibble(bytes, (k / 8) * self.n + n, k % 8),
            Codes::MarlinWords(bytes) => {
                let (word, p) = super::marlin::word_and_nibble(self.n, k, n);
                nibble(bytes, word, p)
            }
            Codes::ByInput(bytes) => bytes[k * self.n + n],
            Codes::ByOutput(bytes) => bytes[n * self.k + k],
        }
    }

    /// The scale of group `group_idx` and output `n`.
    pub fn scale(&self, group_idx: usize, n: usize) -> f16 {
        let column = match self.scales.order {
            ScaleOrder::Rows => n,
            ScaleOrder::Marlin => super::marlin::scale_column(self.group, n),
        };
        let at = 2 * (group_idx * self.n + column);
        f16::from_le_bytes([self.scales.bytes[at], self.scales.bytes[at + 1]])
    }
}

fn nibble(bytes: &[u8], word: usize, p: usize) -> u8 {
    bytes[4 * word + p / 2] >> (4 * (p % 2)) & 0xf
}

fn check_codes(bytes: &[u8], format: &'static dyn WeightFormat) -> Result<(), Error> {
    let limit = format.num_codes();
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
        let scales = Scales { bytes: scales, order: ScaleOrder::Rows };
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
