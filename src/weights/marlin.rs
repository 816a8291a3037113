//! The tensors of the original Marlin kernel: `B` and `s`, read and written.
//!
//! `B` is words `[K/16][2N]`: for each k16 strip and each 64 channels, lane by lane, one word for
//! each of the four 16-channel tiles. `s` is the scale matrix with its columns permuted, in runs of
//! 64 if grouped and in runs of 32 with one scale per column. A word of `B` becomes a word of the
//! packed layout by exchanging nibbles 1, 2 and 5, 6; the exchange is its own inverse.
//!
//! The checkpoints written by the original packer, and the vectors in the tests, pin these maps.

use half::f16;

use super::packed_layout::{CHUNK_CHANNELS, TILE_K};
use super::{Codes, Error, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4B8};

/// A weight as the original Marlin kernel takes it.
#[derive(Clone, Debug, PartialEq)]
pub struct MarlinTensors {
    /// `B`: words `[K/16][2N]`.
    pub b: Vec<u32>,
    /// `s`: scales `[groups][N]`, columns permuted.
    pub s: Vec<f16>,
}

/// Words of one k16 strip of 64 channels.
const STRIP_WORDS: usize = 128;

/// Word of `B` (of `n_total` channels) and nibble that hold (k, n).
pub(super) fn word_and_nibble(n_total: usize, k: usize, n: usize) -> (usize, usize) {
    let (kr, channel) = (k % 16, n % 16);
    let lane = 4 * (channel % 8) + kr % 8 / 2;
    let strip = n / CHUNK_CHANNELS * STRIP_WORDS;
    let word = k / 16 * (2 * n_total) + strip + 4 * lane + n % CHUNK_CHANNELS / 16;
    (word, 4 * (kr % 2) + 2 * (channel / 8) + kr / 8)
}

/// Column of `s` that holds the scale of channel `n`.
pub(super) fn scale_column(group: Group, n: usize) -> usize {
    match group {
        Group::Size(_) => n / 64 * 64 + 8 * (n % 8) + n % 64 / 8,
        Group::PerColumn => n / 32 * 32 + 8 * (n % 8 / 2) + 2 * (n % 32 / 8) + n % 2,
    }
}

/// Exchanges nibbles 1, 2 and 5, 6 of a word.
pub(super) fn swap_nibbles(word: u32) -> u32 {
    // Nibbles 1 and 5 stand at bits 4 and 20; the differing bits are flipped on both sides.
    let differing = (word ^ (word >> 4)) & 0x00f0_00f0;
    word ^ differing ^ (differing << 4)
}

/// Writes the codes of one chunk, from words of `B`, into the chunk's words; strips past the end of
/// K become `padding`.
pub(super) fn pack_chunk_codes(
    matrix: &QuantMatrix<'_>,
    b: &[u8],
    (k0, n0): (usize, usize),
    tile_words: usize,
    chunk: &mut [u32],
    padding: u32,
) {
    let strip_row_bytes = 8 * matrix.n();
    for strip in 0..TILE_K / 16 {
        let (h, s) = (strip / 4, strip % 4);
        let kt = k0 / 16 + strip;
        let at = kt * strip_row_bytes + n0 / CHUNK_CHANNELS * (4 * STRIP_WORDS);
        let source = (16 * kt < matrix.k()).then(|| b[at..at + 4 * STRIP_WORDS].as_chunks().0);
        for (j, tile) in chunk.chunks_exact_mut(tile_words).enumerate() {
            let half = &mut tile[STRIP_WORDS * h..STRIP_WORDS * (h + 1)];
            for (lane, words) in half.chunks_exact_mut(4).enumerate() {
                let word = source.map(|source| u32::from_le_bytes(source[4 * lane + j]));
                words[s] = word.map_or(padding, swap_nibbles);
            }
        }
    }
}

impl PackedWeights {
    /// Packs the tensors of the original Marlin kernel: a word permutation, no code is decoded.
    ///
    /// `b` and `s` are little-endian bytes, of any alignment.
    ///
    /// # Errors
    /// Those of [`QuantMatrix::new`]: N must be a multiple of 64 and K of 16.
    pub fn from_marlin(
        (n, k): (usize, usize),
        group: Group,
        b: &[u8],
        s: &[u8],
        threads: usize,
    ) -> Result<Self, Error> {
        let scales = Scales::f16(s, ScaleOrder::Marlin);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::MarlinWords(b), scales)?;
        Self::pack(&matrix, threads)
    }

    /// The weight as the original Marlin kernel takes it.
    ///
    /// # Errors
    /// [`Error::OrderShape`] unless N is a multiple of 64 and K of 16: Marlin's tensors have no
    /// padding.
    pub fn to_marlin(&self) -> Result<MarlinTensors, Error> {
        let layout = self.layout();
        let (n, k) = (layout.n, layout.k);
        if !n.is_multiple_of(CHUNK_CHANNELS) || !k.is_multiple_of(16) {
            let (n_multiple, k_multiple) = (CHUNK_CHANNELS, 16);
            return Err(Error::OrderShape { order: "Marlin's B", n_multiple, k_multiple, n, k });
        }
        let mut b = vec![0u32; n * k / 8];
        for (idx, word) in b.iter_mut().enumerate() {
            let (kt, in_row) = (idx / (2 * n), idx % (2 * n));
            let (lane, j) = (in_row % STRIP_WORDS / 4, in_row % 4);
            // Nibble 0 of a Marlin word is (k, n) = (2c, g) of its 16 x 16 tile, and so is ours.
            let (k, n) = (16 * kt + 2 * (lane % 4), in_row / STRIP_WORDS * 64 + 16 * j + lane / 4);
            let at = layout.code_bit(k, n) / 8;
            *word = swap_nibbles(self.view().word(at));
        }
        let mut s = vec![f16::ZERO; layout.num_groups() * n];
        for group_idx in 0..layout.num_groups() {
            for channel in 0..n {
                let column = scale_column(layout.group, channel);
                s[group_idx * n + column] = self.scale(group_idx, channel);
            }
        }
        Ok(MarlinTensors { b, s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nibble_exchange_is_an_involution_of_four_nibbles() {
        assert_eq!(swap_nibbles(0x7654_3210), 0x7564_3120);
        for word in [0x7654_3210, 0xffff_0000, 0x0123_4567, 0xdead_beef] {
            assert_eq!(swap_nibbles(swap_nibbles(word)), word);
        }
    }

    /// The published vectors of the original packer's order.
    #[test]
    fn packing_agrees_with_the_recorded_words_of_the_original_packer() {
        let (n, k) = (128usize, 32usize);
        let codes: Vec<u8> = (0..k * n)
            .map(|i| (i / n, i % n))
            .map(|(k, n)| ((7 * k + 3 * n + k * n / 5) % 16) as u8)
            .collect();
        let scales: Vec<f16> = (0..n).map(|n| f16::from_f32(1.0 + n as f32)).collect();
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let codes = Codes::ByInput(&codes);
        let matrix = QuantMatrix::new(n, k, Group::PerColumn, &U4B8, codes, scales).expect("fits");
        let packed = PackedWeights::pack(&matrix, 1).expect("packs");
        let marlin = packed.to_marlin().expect("fits");
        let b = &marlin.b;
        assert_eq!(b.len(), 512);
        assert_eq!(
            b[..6],
            [0x50f7_c880, 0x23ba_6810, 0xf78d_08b0, 0xba50_9840, 0x61d5_e96e, 0x9b0e_ef64]
        );
        assert_eq!((b[128], b[255]), (0x8d23_38e0, 0x3f3c_2f4d));
        assert_eq!((b[256], b[511]), (0xfaf7_6180, 0x96f9_951a));
        assert_eq!(b.iter().fold(0u32, |sum, &w| sum.wrapping_add(w)), 0xe555_69c1);
        assert_eq!(b.iter().fold(0u32, |xor, &w| xor ^ w), 0xcd0e_627b);
        let bytes = b.iter().flat_map(|w| w.to_le_bytes());
        let hash =
            bytes.fold(0x811c_9dc5u32, |h, byte| (h ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        assert_eq!(hash, 0x0869_d3a9, "FNV-1a of the little-endian bytes");

        let again = PackedWeights::from_marlin(
            (n, k),
            Group::PerColumn,
            bytemuck::cast_slice(b),
            bytemuck::cast_slice(&marlin.s),
            2,
        );
        assert_eq!(again.expect("fits").bytes(), packed.bytes());
    }
}
