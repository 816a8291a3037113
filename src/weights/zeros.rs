//! The stored zeros of a weight: where the zero of (group, output) lies and what it is.
//!
//! A zero has as many bits as a code and is subtracted from it. Checkpoints pack it in words of
//! 32 bits, of `p = 32 / bits` fields, lowest first.

use super::Error;

/// The order of a tensor of stored zeros, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroOrder {
    /// `qzeros` of GPTQ's version 2: words `[groups][N/p]`, field i of word w is output w p + i. N
    /// is rounded up.
    GptqWords,
    /// `qzeros` of GPTQ's version 1: the same words less one in every field.
    ///
    /// The writer subtracts from whole words, so a zero of 0 borrows from the fields above it.
    /// Adding to whole words, modulo 2^32, is the exact inverse.
    GptqWordsLessOne,
    /// `qzeros` of AWQ's gemm layout: words `[groups][N/8]` of 4-bit fields in the order
    /// [`AWQ_ORDER`].
    AwqWords,
    /// Packed zeros of compressed-tensors: words `[N/p][groups]`, field i of word (w, g) is output
    /// w p + i. N is rounded up.
    PackedColumns,
    /// Unpacked zeros of compressed-tensors: signed bytes `[N][groups]`, less half of the number of
    /// codes.
    SignedColumns,
    /// A byte each, `[groups][N]`.
    Rows,
}

/// The output, of eight, that each 4-bit field of an AWQ word belongs to, lowest field first.
pub const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The field of an AWQ word that holds each of eight outputs.
pub(super) const AWQ_FIELD: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The stored zeros of a weight.
#[derive(Clone, Copy, Debug)]
pub struct Zeros<'a> {
    /// The bytes, of any alignment.
    pub bytes: &'a [u8],
    /// Where the zero of (group, output) lies.
    pub order: ZeroOrder,
}

impl Zeros<'_> {
    /// Checks the size for a weight of `bits`-bit codes.
    ///
    /// # Errors
    /// [`Error::SourceBytes`], [`Error::OrderShape`], [`Error::ZeroBits`] for AWQ's order, which has
    /// 4 bits, and [`Error::ZeroRange`] for a byte that no code of `bits` bits can have.
    pub(super) fn check(
        &self,
        (n, k): (usize, usize),
        num_groups: usize,
        bits: u32,
    ) -> Result<(), Error> {
        let fields = 32 / bits as usize;
        if self.order == ZeroOrder::AwqWords {
            if bits != 4 {
                return Err(Error::ZeroBits { order: "AWQ's qzeros", bits });
            }
            if !n.is_multiple_of(8) {
                let (n_multiple, k_multiple) = (8, 1);
                let order = "AWQ's qzeros";
                return Err(Error::OrderShape { order, n_multiple, k_multiple, n, k });
            }
        }
        let expected = match self.order {
            ZeroOrder::SignedColumns | ZeroOrder::Rows => n * num_groups,
            _ => 4 * n.div_ceil(fields) * num_groups,
        };
        let found = self.bytes.len();
        if found != expected {
            return Err(Error::SourceBytes { what: "zeros", n, k, expected, found });
        }
        let half = 1i16 << (bits - 1);
        let in_range = |byte: u8| match self.order {
            ZeroOrder::SignedColumns => (-half..half).contains(&i16::from(byte.cast_signed())),
            ZeroOrder::Rows => i16::from(byte) < 2 * half,
            _ => true,
        };
        match self.bytes.iter().position(|&byte| !in_range(byte)) {
            None => Ok(()),
            Some(at) => Err(Error::ZeroRange { byte: self.bytes[at], at, bits }),
        }
    }

    /// The zero of group `group_idx` and output `n`, of a weight of `n_total` outputs.
    pub(super) fn get(
        &self,
        (n_total, num_groups, bits): (usize, usize, u32),
        group_idx: usize,
        n: usize,
    ) -> u8 {
        let fields = 32 / bits as usize;
        let row_words = n_total.div_ceil(fields);
        let field =
            |word: u32, idx: usize| (word >> (bits as usize * idx)) as u8 & (0xff >> (8 - bits));
        match self.order {
            ZeroOrder::GptqWords => {
                field(self.word(group_idx * row_words + n / fields), n % fields)
            }
            ZeroOrder::GptqWordsLessOne => {
                let one_in_each = if bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
                let word = self.word(group_idx * row_words + n / fields);
                field(word.wrapping_add(one_in_each), n % fields)
            }
            ZeroOrder::AwqWords => {
                field(self.word(group_idx * row_words + n / 8), AWQ_FIELD[n % 8])
            }
            ZeroOrder::PackedColumns => {
                field(self.word(n / fields * num_groups + group_idx), n % fields)
            }
            ZeroOrder::SignedColumns => {
                self.bytes[n * num_groups + group_idx].wrapping_add(1 << (bits - 1))
            }
            ZeroOrder::Rows => self.bytes[group_idx * n_total + n],
        }
    }

    fn word(&self, idx: usize) -> u32 {
        let quad = &self.bytes[4 * idx..4 * idx + 4];
        u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_awq_tables_are_inverse() {
        for (field, output) in AWQ_ORDER.into_iter().enumerate() {
            assert_eq!(AWQ_FIELD[output], field);
        }
    }

    /// What the writer of version 1 does: it subtracts one from each field of the whole word.
    #[test]
    fn version_1_zeros_come_back_through_borrows() {
        for zeros in
            [[7u8; 8], [0; 8], [0, 15, 0, 1, 8, 0, 15, 15], [15; 8], [1, 0, 0, 0, 2, 3, 0, 0]]
        {
            let word = zeros.iter().rev().fold(0u32, |word, zero| word << 4 | u32::from(*zero));
            let bytes = word.wrapping_sub(0x1111_1111).to_le_bytes();
            let stored = Zeros { bytes: &bytes, order: ZeroOrder::GptqWordsLessOne };
            let read: Vec<u8> = (0..8).map(|n| stored.get((8, 1, 4), 0, n)).collect();
            assert_eq!(read, zeros);
        }
        for zeros in [[128u8; 4], [0, 255, 0, 1]] {
            let bytes = u32::from_le_bytes(zeros).wrapping_sub(0x0101_0101).to_le_bytes();
            let stored = Zeros { bytes: &bytes, order: ZeroOrder::GptqWordsLessOne };
            let read: Vec<u8> = (0..4).map(|n| stored.get((4, 1, 8), 0, n)).collect();
            assert_eq!(read, zeros);
        }
    }

    #[test]
    fn signed_zeros_are_shifted_by_half_of_the_codes() {
        let bytes = [(-8i8).cast_unsigned(), 0, 7];
        let stored = Zeros { bytes: &bytes, order: ZeroOrder::SignedColumns };
        stored.check((3, 32), 1, 4).expect("in range");
        assert_eq!((0..3).map(|n| stored.get((3, 1, 4), 0, n)).collect::<Vec<_>>(), [0, 8, 15]);
        let outside = Zeros { bytes: &[8], order: ZeroOrder::SignedColumns };
        assert_eq!(outside.check((1, 32), 1, 4), Err(Error::ZeroRange { byte: 8, at: 0, bits: 4 }));
        let outside = Zeros { bytes: &[16], order: ZeroOrder::Rows };
        assert!(outside.check((1, 32), 1, 4).is_err());
        outside.check((1, 32), 1, 8).expect("8 bits hold 16");
    }
}
