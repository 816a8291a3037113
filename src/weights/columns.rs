//! From a source's codes to the words of a tile: first to column words, whatever the source's order, then by a fixed
//! shuffle to the order of lanes.

use super::packed_layout::{TILE_CHANNELS, TILE_K};
use super::zeros::AWQ_FIELD;
use super::{Codes, InputOrder, QuantMatrix};

/// Column words of a tile: `[input octet][channel]` of 4-bit codes, which fill half of the rows, `[input quad][channel]`
/// of 8-bit ones.
pub(super) type ColumnWords = [[u32; TILE_CHANNELS]; TILE_K / 4];

/// The column words of the tile at (k0, n0); codes past N or K are the padding code.
pub(super) fn column_words(
    matrix: &QuantMatrix<'_>,
    k0: usize,
    n0: usize,
    padding: u32,
) -> ColumnWords {
    let (n, k) = (matrix.n(), matrix.k());
    let mut columns = [[padding; TILE_CHANNELS]; TILE_K / 4];
    let channels = n.saturating_sub(n0).min(TILE_CHANNELS);
    let inputs = (k - k0).min(TILE_K);
    if channels == 0 {
        return columns;
    }
    let bits = matrix.format().bits() as usize;
    let per_word = 32 / bits;
    let mask = u32::MAX >> (32 - bits);
    let set = |word: &mut u32, field: usize, code: u32| {
        *word = *word & !(mask << (bits * field)) | code << (bits * field);
    };
    match matrix.codes() {
        Codes::GptqWords(bytes) => {
            for (row_idx, row) in columns.iter_mut().enumerate().take(inputs / per_word) {
                let at = 4 * ((k0 / per_word + row_idx) * n + n0);
                let source = bytes[at..at + 4 * channels].as_chunks().0;
                for (word, quad) in row.iter_mut().zip(source) {
                    *word = u32::from_le_bytes(*quad);
                }
            }
        }
        Codes::PackedRows(bytes) => {
            // Fields past K are whatever the file holds.
            let row_words = k.div_ceil(per_word);
            for channel in 0..channels {
                let at = 4 * ((n0 + channel) * row_words + k0 / per_word);
                let source = bytes[at..at + 4 * inputs.div_ceil(per_word)].as_chunks().0;
                for (row, quad) in columns.iter_mut().zip(source) {
                    row[channel] = u32::from_le_bytes(*quad);
                }
                for input in inputs..inputs.next_multiple_of(per_word) {
                    let word = &mut columns[input / per_word][channel];
                    set(word, input % per_word, padding & mask);
                }
            }
        }
        Codes::NibblePairs(bytes) => {
            for channel in 0..channels {
                let at = ((n0 + channel) * k + k0) / 2;
                let (quads, rest) = bytes[at..at + inputs / 2].as_chunks();
                for (row, quad) in columns.iter_mut().zip(quads) {
                    row[channel] = u32::from_le_bytes(*quad);
                }
                for (i, pair) in rest.iter().enumerate() {
                    let word = &mut columns[quads.len()][channel];
                    set(word, 2 * i, u32::from(pair & 0xf));
                    set(word, 2 * i + 1, u32::from(pair >> 4));
                }
            }
        }
        Codes::AwqWords(bytes) => {
            for k_in_tile in 0..inputs {
                let at = (k0 + k_in_tile) * n / 2 + n0 / 2;
                let row = &mut columns[k_in_tile / 8];
                let words = bytes[at..at + channels / 2].as_chunks().0;
                for (octet, quad) in row.chunks_exact_mut(8).zip(words) {
                    let word = u32::from_le_bytes(*quad);
                    for (column, field) in octet.iter_mut().zip(AWQ_FIELD) {
                        set(column, k_in_tile % 8, word >> (4 * field) & 0xf);
                    }
                }
            }
        }
        Codes::ByInput(bytes) => {
            for k_in_tile in 0..inputs {
                let at = (k0 + k_in_tile) * n + n0;
                let row = &mut columns[k_in_tile / per_word];
                for (word, &code) in row.iter_mut().zip(&bytes[at..at + channels]) {
                    set(word, k_in_tile % per_word, code.into());
                }
            }
        }
        Codes::ByOutput(bytes) if bits == 4 => {
            for channel in 0..channels {
                let at = (n0 + channel) * k + k0;
                let (octets, rest) = bytes[at..at + inputs].as_chunks();
                for (row, octet) in columns.iter_mut().zip(octets) {
                    row[channel] = gather_nibbles(u64::from_le_bytes(*octet));
                }
                for (i, &code) in rest.iter().enumerate() {
                    set(&mut columns[octets.len()][channel], i, code.into());
                }
            }
        }
        Codes::ByOutput(bytes) => {
            for channel in 0..channels {
                let at = (n0 + channel) * k + k0;
                let (quads, rest) = bytes[at..at + inputs].as_chunks();
                for (row, quad) in columns.iter_mut().zip(quads) {
                    row[channel] = u32::from_le_bytes(*quad);
                }
                for (i, &code) in rest.iter().enumerate() {
                    set(&mut columns[quads.len()][channel], i, code.into());
                }
            }
        }
        Codes::MarlinWords(_) => unreachable!("Marlin's words are permuted, not gathered"),
    }
    columns
}

/// The column words of a tile whose inputs are those of `inputs`, of 16 outputs from `n0` on; codes of inputs that do
/// not exist, past their end, or of outputs past N are the padding code.
pub(super) fn gathered_words(
    matrix: &QuantMatrix<'_>,
    inputs: &[u32],
    n0: usize,
    padding: u32,
) -> ColumnWords {
    let mut columns = [[padding; TILE_CHANNELS]; TILE_K / 4];
    let channels = matrix.n().saturating_sub(n0).min(TILE_CHANNELS);
    // Past N there is nothing to point at either.
    if channels == 0 {
        return columns;
    }
    let bits = matrix.format().bits() as usize;
    let per_word = 32 / bits;
    let mask = u32::MAX >> (32 - bits);
    for (place, &input) in inputs.iter().enumerate().filter(|(_, i)| **i != InputOrder::NONE) {
        let (row, shift) = (&mut columns[place / per_word], bits * (place % per_word));
        let input = input as usize;
        let mut set = |channel: usize, code: u32| {
            row[channel] = row[channel] & !(mask << shift) | code << shift;
        };
        match matrix.codes() {
            // The order that act-order comes in: a row of words.
            Codes::GptqWords(bytes) => {
                let at = 4 * (input / per_word * matrix.n() + n0);
                let words = bytes[at..at + 4 * channels].as_chunks().0;
                for (channel, quad) in words.iter().enumerate() {
                    let word = u32::from_le_bytes(*quad) >> (bits * (input % per_word));
                    set(channel, word & mask);
                }
            }
            _ => (0..channels)
                .for_each(|channel| set(channel, matrix.code(input, n0 + channel).into())),
        }
    }
    columns
}

/// Eight bytes below 16 to eight nibbles, in order: pairs, then quads, then octets close up.
fn gather_nibbles(bytes: u64) -> u32 {
    let pairs = (bytes | bytes >> 4) & 0x00ff_00ff_00ff_00ff;
    let quads = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
    (quads | quads >> 16) as u32
}

/// Column words of 8-bit codes to the tile's 512 words.
///
/// A word of lane (g, c), step s and inputs f takes two bytes of two column words: those of channels g and g + 8 in
/// quad 2 (2 s + f) + c / 2, their lower halves for even c. The bytes of the two alternate.
pub(super) fn shuffle_bytes(columns: &ColumnWords, tile: &mut [u32]) {
    /// The bytes of a half with a byte between them.
    fn spread(half: u32) -> u32 {
        (half & 0xff) | (half & 0xff00) << 8
    }
    for (octet, quads) in columns.chunks_exact(2).enumerate() {
        let (pair, at) = (octet / 4, octet % 4);
        for g in 0..8 {
            for c in 0..4 {
                let quad = &quads[c / 2];
                let [low, high] =
                    [quad[g], quad[g + 8]].map(|word| word >> (16 * (c % 2)) & 0xffff);
                let word = spread(low) | spread(high) << 8;
                tile[(32 * pair + 4 * g + c) * 4 + at] = word.to_le();
            }
        }
    }
}

/// Column words of 4-bit codes to the tile's 256 words.
///
/// A word of lane (g, c) and step s takes byte c of four column words: octets 2 s and 2 s + 1 of
/// channels g and g + 8 (of half h). Low nibbles are input 2 c, high ones 2 c + 1. So four bytes
/// are merged for all c at once and then transposed from (byte of the word, c) to (c, byte).
pub(super) fn shuffle_nibbles(columns: &ColumnWords, tile: &mut [u32]) {
    const LOW: u32 = 0x0f0f_0f0f;
    for (step, octets) in columns[..TILE_K / 8].chunks_exact(2).enumerate() {
        let (h, s) = (step / 4, step % 4);
        let half = &mut tile[128 * h..128 * (h + 1)];
        let mut words = [[0u32; 8]; 4];
        for g in 0..8 {
            let (a0, b0) = (octets[0][g], octets[0][g + 8]);
            let (a1, b1) = (octets[1][g], octets[1][g + 8]);
            let merged = [
                a0 & LOW | (b0 & LOW) << 4,
                a1 & LOW | (b1 & LOW) << 4,
                a0 >> 4 & LOW | b0 & !LOW,
                a1 >> 4 & LOW | b1 & !LOW,
            ];
            for (c, words) in words.iter_mut().enumerate() {
                let byte = |word: u32| word >> (8 * c) & 0xff;
                words[g] = byte(merged[0])
                    | byte(merged[1]) << 8
                    | byte(merged[2]) << 16
                    | byte(merged[3]) << 24;
            }
        }
        for (lane, quad) in half.chunks_exact_mut(4).enumerate() {
            quad[s] = words[lane % 4][lane / 4].to_le();
        }
    }
}
