//! From a source's codes to the words of a tile: first to column words, whatever the source's order, then by a fixed
//! shuffle to the order of lanes.

use super::packed_layout::{CHUNK_CHANNELS, TILE_CHANNELS, TILE_K};
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
            for (octet_idx, row) in columns.iter_mut().enumerate().take(inputs.div_ceil(8)) {
                let count = (inputs - 8 * octet_idx).min(8);
                for (half, octet) in row.chunks_exact_mut(8).enumerate().take(channels / 8) {
                    let mut words = [padding; 8];
                    for (i, word) in words.iter_mut().enumerate().take(count) {
                        let at = ((k0 + 8 * octet_idx + i) * n + n0) / 2 + 4 * half;
                        *word = read_word(bytes, at);
                    }
                    let fields = transposed(words);
                    for (column, field) in octet.iter_mut().zip(AWQ_FIELD) {
                        *column = fields[field];
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

/// The column words of all inputs of a chunk's channels, in the source's order, from which those of another order are
/// gathered. Inputs that follow each other in an order lie anywhere in the source, thousands of bytes apart; here they
/// are as close as can be, and the source is read once, from its start to its end.
pub(super) struct SourceColumns {
    /// The first channel.
    pub(super) n0: usize,
    bits: usize,
    padding: u32,
    /// Words of each channel.
    rows: usize,
    /// `[tile][row]`.
    words: Vec<[u32; TILE_CHANNELS]>,
}

impl SourceColumns {
    pub(super) fn of(matrix: &QuantMatrix<'_>, n0: usize, padding: u32) -> Self {
        let bits = matrix.format().bits() as usize;
        let per_word = 32 / bits;
        let rows = matrix.k().div_ceil(TILE_K) * TILE_K / per_word;
        let mut words = Vec::with_capacity(CHUNK_CHANNELS / TILE_CHANNELS * rows);
        for n0 in (n0..n0 + CHUNK_CHANNELS).step_by(TILE_CHANNELS) {
            for k0 in (0..matrix.k()).step_by(TILE_K) {
                let columns = match matrix.codes() {
                    Codes::MarlinWords(_) => plain_words(matrix, k0, n0, padding),
                    _ => column_words(matrix, k0, n0, padding),
                };
                words.extend_from_slice(&columns[..TILE_K / per_word]);
            }
        }
        Self { n0, bits, padding, rows, words }
    }

    /// The column words of a tile, by its place in the chunk, whose inputs are those of `inputs`; codes of inputs that do
    /// not exist or are past their end are the padding code.
    pub(super) fn gather(&self, tile: usize, inputs: &[u32]) -> ColumnWords {
        let mut columns = [[self.padding; TILE_CHANNELS]; TILE_K / 4];
        let (bits, per_word) = (self.bits, 32 / self.bits);
        // Shifts: a division for each input would cost more than all its codes.
        let log2_fields = per_word.trailing_zeros();
        let mask = u32::MAX >> (32 - bits);
        let source = &self.words[tile * self.rows..(tile + 1) * self.rows];
        for (row, inputs) in columns.iter_mut().zip(inputs.chunks(per_word)) {
            // In registers: the loops over channels are vector loops.
            let mut fields = [0; TILE_CHANNELS];
            for field in 0..per_word {
                let input = inputs.get(field).copied().unwrap_or(InputOrder::NONE);
                let shift = bits * field;
                if input == InputOrder::NONE {
                    fields = fields.map(|word| word | self.padding & mask << shift);
                    continue;
                }
                let input = input as usize;
                let (words, from) = (source[input >> log2_fields], bits * (input & (per_word - 1)));
                let codes = words.map(|word| (word >> from & mask) << shift);
                for (word, code) in fields.iter_mut().zip(codes) {
                    *word |= code;
                }
            }
            *row = fields;
        }
        columns
    }
}

/// The column words of a tile, one code at a time.
fn plain_words(matrix: &QuantMatrix<'_>, k0: usize, n0: usize, padding: u32) -> ColumnWords {
    let mut columns = [[padding; TILE_CHANNELS]; TILE_K / 4];
    let bits = matrix.format().bits() as usize;
    let per_word = 32 / bits;
    let mask = u32::MAX >> (32 - bits);
    for k in k0..matrix.k().min(k0 + TILE_K) {
        let (row, shift) = (&mut columns[(k - k0) / per_word], bits * ((k - k0) % per_word));
        for (column, n) in row.iter_mut().zip(n0..matrix.n()) {
            *column = *column & !(mask << shift) | u32::from(matrix.code(k, n)) << shift;
        }
    }
    columns
}

fn read_word(bytes: &[u8], at: usize) -> u32 {
    let quad = &bytes[at..at + 4];
    u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]])
}

/// Field i of word j becomes field j of word i: halves, quarters and eighths change sides.
fn transposed(mut words: [u32; 8]) -> [u32; 8] {
    for (step, mask) in [(4, 0x0000_ffff), (2, 0x00ff_00ff), (1, 0x0f0f_0f0f)] {
        for low in (0..8).filter(|word| word & step == 0) {
            let (a, b) = (words[low], words[low + step]);
            words[low] = a & mask | (b & mask) << (4 * step);
            words[low + step] = a >> (4 * step) & mask | b & !mask;
        }
    }
    words
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
    /// The bytes of a word with a byte between them.
    fn spread(word: u32) -> u64 {
        let halves = (u64::from(word) | u64::from(word) << 16) & 0x0000_ffff_0000_ffff;
        (halves | halves << 8) & 0x00ff_00ff_00ff_00ff
    }
    for (pair, quads) in columns.chunks_exact(8).enumerate() {
        let lanes = &mut tile[128 * pair..128 * (pair + 1)];
        // Two lanes of neighbouring c share their column words.
        for (at, lanes) in lanes.chunks_exact_mut(8).enumerate() {
            let (g, c) = (at / 2, at % 2);
            for octet in 0..4 {
                let quad = &quads[2 * octet + c];
                let words = spread(quad[g]) | spread(quad[g + 8]) << 8;
                lanes[octet] = (words as u32).to_le();
                lanes[4 + octet] = ((words >> 32) as u32).to_le();
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
