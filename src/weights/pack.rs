//! Packing and unpacking: from any source order to the packed layout and back.
//!
//! The packer fills whole chunks. Every source first yields, for each tile, *column words*: the
//! eight codes of inputs 8 r .. 8 r + 8 of one channel, lowest nibble first (the word GPTQ stores).
//! Sixteen by sixteen of them are a tile, and a fixed shuffle makes the tile's words out of them;
//! no index is divided per code. Marlin's words are permuted directly. Chunks are independent, so
//! threads take equal runs of them.
//!
//! The inverse, [`PackedWeights::unpack`], does not share the shuffle: it asks [`PackedLayout`] for
//! every position. A mistake in one of the two cannot cancel in the other.

use half::f16;

use super::packed_layout::{
    CHUNK_CHANNELS, CODE_BYTES_PER_TILE, PackedLayout, SCALE_ROW_BYTES, TILE_CHANNELS, TILE_K,
};
use super::{Codes, Error, QuantMatrix, WeightFormat, ZeroRule};

/// Column words of a tile: `[input octet][channel]`.
type ColumnWords = [[u32; TILE_CHANNELS]; TILE_K / 8];

/// A weight in the packed layout, ready to be uploaded in one piece.
#[derive(Clone, Debug)]
pub struct PackedWeights {
    layout: PackedLayout,
    format: &'static dyn WeightFormat,
    /// The buffer, in 16-byte units so that it is aligned for any vector access.
    data: Vec<u128>,
}

/// What [`PackedWeights::unpack`] gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpacked {
    /// One code a byte, `[K][N]`.
    pub codes: Vec<u8>,
    /// Scales, `[groups][N]`.
    pub scales: Vec<f16>,
}

/// The number of threads that packing and quantising should use here: one per available core.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl PackedWeights {
    /// Packs a matrix with up to `threads` threads; the result does not depend on their number.
    ///
    /// # Errors
    /// [`Error::Unpackable`] for what no kernel takes yet, [`Error::Size`].
    pub fn pack(matrix: &QuantMatrix<'_>, threads: usize) -> Result<Self, Error> {
        let mut packed = Self::zeroed(matrix)?;
        let layout = packed.layout;
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut packed.data);
        let (chunks, tail) = words.split_at_mut(layout.codes_bytes / 4);
        let chunk_words = layout.chunk_bytes / 4;
        let per_thread = layout.num_chunks().div_ceil(threads.max(1));
        std::thread::scope(|scope| {
            for (run_idx, run) in chunks.chunks_mut(per_thread * chunk_words).enumerate() {
                let first = run_idx * per_thread;
                let mut work = move || {
                    for (idx, chunk) in run.chunks_exact_mut(chunk_words).enumerate() {
                        pack_chunk(matrix, &layout, first + idx, chunk);
                    }
                };
                if per_thread == layout.num_chunks() {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        if let Some(offset) = layout.column_scales_offset {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(tail);
            let first = (offset - layout.codes_bytes) / 2;
            for (n, half) in halves[first..first + layout.n].iter_mut().enumerate() {
                *half = matrix.half_scale(0, n).to_bits().to_le();
            }
        }
        Ok(packed)
    }

    fn zeroed(matrix: &QuantMatrix<'_>) -> Result<Self, Error> {
        matrix.check_packable()?;
        let format = matrix.format();
        let layout = PackedLayout::new(matrix.n(), matrix.k(), matrix.group())?;
        Ok(Self { layout, format, data: vec![0; layout.total_bytes / size_of::<u128>()] })
    }

    /// Sizes and positions.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The weight type.
    pub fn format(&self) -> &'static dyn WeightFormat {
        self.format
    }

    /// The buffer, aligned to 16 bytes: what the device receives.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }

    /// The little-endian word at byte `at` of the buffer.
    pub(super) fn word(&self, at: usize) -> u32 {
        let bytes = self.bytes();
        u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    }

    /// The code of input `k` and output `n`, both below the padded sizes.
    pub fn code(&self, k: usize, n: usize) -> u8 {
        let bit = self.layout.code_bit(k, n);
        self.bytes()[bit / 8] >> (bit % 8) & 0xf
    }

    /// The scale of group `group_idx` and output `n`, both below the padded counts.
    pub fn scale(&self, group_idx: usize, n: usize) -> f16 {
        let at = self.layout.scale_byte(group_idx, n);
        f16::from_le_bytes([self.bytes()[at], self.bytes()[at + 1]])
    }

    /// Every code and the bits of every scale, without the padding.
    pub fn unpack(&self) -> Unpacked {
        let (n, k) = (self.layout.n, self.layout.k);
        let codes = (0..k * n).map(|i| self.code(i / n, i % n)).collect();
        let scales = (0..self.layout.num_groups() * n).map(|i| self.scale(i / n, i % n)).collect();
        Unpacked { codes, scales }
    }

    /// The weights, `[N][K]`: the decoded code times its scale. The product is exact in f32 (at
    /// most 8 significant bits times 11), so it is also the f64 reference.
    ///
    /// # Panics
    /// For a format whose zeros are stored beside the scales: this buffer has none.
    pub fn dequantize(&self) -> Vec<f32> {
        assert_ne!(self.format.zero_rule(), ZeroRule::Stored, "this layout stores no zeros");
        let values: Vec<f32> =
            (0..self.format.num_codes()).map(|code| self.format.decode(code as u8)).collect();
        let mut dense = Vec::with_capacity(self.layout.n * self.layout.k);
        for n in 0..self.layout.n {
            for k in 0..self.layout.k {
                let scale = self.scale(self.layout.group.index_of(k), n).to_f32();
                dense.push(values[usize::from(self.code(k, n))] * scale);
            }
        }
        dense
    }
}

/// Packs one chunk of four tiles into its words.
fn pack_chunk(matrix: &QuantMatrix<'_>, layout: &PackedLayout, idx: usize, chunk: &mut [u32]) {
    let (k0, n0) = layout.tile_origin(idx * (CHUNK_CHANNELS / TILE_CHANNELS));
    // The padding code in all eight nibbles: 0x1111_1111 is the sum of 16^p.
    let padding = u32::from(matrix.format().padding_code()) * 0x1111_1111;
    let tile_words = layout.tile_bytes / 4;
    if let Codes::MarlinWords(b) = matrix.codes() {
        super::marlin::pack_chunk_codes(matrix, b, (k0, n0), tile_words, chunk, padding);
    }
    for (j, tile) in chunk.chunks_exact_mut(tile_words).enumerate() {
        let (codes, scales) = tile.split_at_mut(CODE_BYTES_PER_TILE / 4);
        let n0 = n0 + j * TILE_CHANNELS;
        if !matches!(matrix.codes(), Codes::MarlinWords(_)) {
            let columns = column_words(matrix, k0, n0, padding);
            shuffle_tile(&columns, codes);
        }
        let first_group = matrix.group().index_of(k0);
        for (row, words) in scales.chunks_exact_mut(SCALE_ROW_BYTES / 4).enumerate() {
            for (g, word) in words.iter_mut().enumerate() {
                let low = scale_or_zero(matrix, first_group + row, n0 + g);
                let high = scale_or_zero(matrix, first_group + row, n0 + g + 8);
                *word = (u32::from(low) | u32::from(high) << 16).to_le();
            }
        }
    }
}

fn scale_or_zero(matrix: &QuantMatrix<'_>, group_idx: usize, n: usize) -> u16 {
    if group_idx < matrix.num_groups() && n < matrix.n() {
        matrix.half_scale(group_idx, n).to_bits()
    } else {
        0
    }
}

/// The column words of the tile at (k0, n0); codes past N or K are the padding code.
fn column_words(matrix: &QuantMatrix<'_>, k0: usize, n0: usize, padding: u32) -> ColumnWords {
    let (n, k) = (matrix.n(), matrix.k());
    let mut columns = [[padding; TILE_CHANNELS]; TILE_K / 8];
    let channels = n.saturating_sub(n0).min(TILE_CHANNELS);
    let inputs = (k - k0).min(TILE_K);
    if channels == 0 {
        return columns;
    }
    match matrix.codes() {
        Codes::GptqWords(bytes) => {
            for (octet, row) in columns.iter_mut().enumerate().take(inputs / 8) {
                let at = 4 * ((k0 / 8 + octet) * n + n0);
                let source = bytes[at..at + 4 * channels].as_chunks().0;
                for (word, quad) in row.iter_mut().zip(source) {
                    *word = u32::from_le_bytes(*quad);
                }
            }
        }
        Codes::ByInput(bytes) => {
            for k_in_tile in 0..inputs {
                let at = (k0 + k_in_tile) * n + n0;
                let shift = 4 * (k_in_tile % 8);
                let row = &mut columns[k_in_tile / 8];
                for (word, &code) in row.iter_mut().zip(&bytes[at..at + channels]) {
                    *word = *word & !(0xf << shift) | u32::from(code) << shift;
                }
            }
        }
        Codes::ByOutput(bytes) => {
            for channel in 0..channels {
                let at = (n0 + channel) * k + k0;
                let (octets, rest) = bytes[at..at + inputs].as_chunks();
                for (row, octet) in columns.iter_mut().zip(octets) {
                    row[channel] = gather_nibbles(u64::from_le_bytes(*octet));
                }
                for (i, &code) in rest.iter().enumerate() {
                    let word = &mut columns[octets.len()][channel];
                    *word = *word & !(0xf << (4 * i)) | u32::from(code) << (4 * i);
                }
            }
        }
        Codes::MarlinWords(_) => unreachable!("Marlin's words are permuted, not gathered"),
        Codes::AwqWords(_) | Codes::PackedRows(_) | Codes::NibblePairs(_) => {
            unreachable!("refused by check_packable")
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

/// Column words to the tile's 256 words.
///
/// A word of lane (g, c) and step s takes byte c of four column words: octets 2 s and 2 s + 1 of
/// channels g and g + 8 (of half h). Low nibbles are input 2 c, high ones 2 c + 1. So four bytes
/// are merged for all c at once and then transposed from (byte of the word, c) to (c, byte).
fn shuffle_tile(columns: &ColumnWords, tile: &mut [u32]) {
    const LOW: u32 = 0x0f0f_0f0f;
    for (step, octets) in columns.chunks_exact(2).enumerate() {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::weights::{Group, ScaleOrder, Scales, U4B8};

    /// The packed buffer, one element at a time, from the layout's positions only.
    fn pack_naive(matrix: &QuantMatrix<'_>) -> PackedWeights {
        let mut packed = PackedWeights::zeroed(matrix).expect("a legal matrix");
        let layout = packed.layout;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut packed.data);
        for n in 0..layout.n_padded {
            for k in 0..layout.k_padded {
                let real = n < layout.n && k < layout.k;
                let code = if real { matrix.code(k, n) } else { 8 };
                let bit = layout.code_bit(k, n);
                bytes[bit / 8] |= code << (bit % 8);
            }
        }
        for n in 0..layout.n {
            for group_idx in 0..layout.num_groups() {
                let at = layout.scale_byte(group_idx, n);
                let scale = matrix.half_scale(group_idx, n).to_le_bytes();
                bytes[at..at + 2].copy_from_slice(&scale);
            }
        }
        packed
    }

    /// A shape, a group and the seed of its contents.
    fn cases() -> impl Strategy<Value = (usize, usize, i64, u64)> {
        (1usize..200, 1usize..9, prop::sample::select(vec![-1i64, 32, 64, 128]), 0usize..16)
            .prop_flat_map(|(n, groups, raw, odd)| {
                let k = if raw < 0 { groups * 48 + odd } else { groups * raw as usize };
                any::<u64>().prop_map(move |seed| (n, k, raw, seed))
            })
    }

    /// Random codes `[K][N]` and random scale bits (any pattern: they are only moved).
    fn contents(n: usize, k: usize, groups: usize, seed: u64) -> (Vec<u8>, Vec<u16>) {
        let mut state = seed | 1;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32
        };
        let codes = (0..n * k).map(|_| (next() & 0xf) as u8).collect();
        (codes, (0..groups * n).map(|_| next() as u16).collect())
    }

    fn gptq_words(codes: &[u8], n: usize, k: usize) -> Vec<u8> {
        let word = |r: usize, n_idx: usize| {
            (0..8).fold(0u32, |w, i| w | u32::from(codes[(8 * r + i) * n + n_idx]) << (4 * i))
        };
        (0..k / 8 * n).flat_map(|i| word(i / n, i % n).to_le_bytes()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn packing_equals_the_naive_twin_from_every_source_order((n, k, raw, seed) in cases()) {
            let group = Group::new(k, raw).expect("legal");
            let (codes, scales) = contents(n, k, group.num_groups(k), seed);
            // One byte of offset: nothing in a mapped file is aligned for certain.
            let mut shifted = vec![0u8];
            shifted.extend_from_slice(bytemuck::cast_slice(&scales));
            let scales_view = Scales::f16(&shifted[1..], ScaleOrder::Rows);
            let by_output: Vec<u8> = (0..n * k).map(|i| codes[i % k * n + i / k]).collect();
            let mut words = vec![0u8];
            words.extend(gptq_words(&codes, n, k));
            let mut sources = vec![Codes::ByInput(&codes), Codes::ByOutput(&by_output)];
            if k % 8 == 0 {
                sources.push(Codes::GptqWords(&words[1..]));
            }
            for source in sources {
                let matrix = QuantMatrix::new(n, k, group, &U4B8, source, scales_view);
                let matrix = matrix.expect("legal");
                let naive = pack_naive(&matrix);
                for threads in [1, 2, 5] {
                    let packed = PackedWeights::pack(&matrix, threads).expect("packs");
                    prop_assert!(packed.bytes() == naive.bytes(), "{} {} {}", n, k, group);
                }
                let unpacked = naive.unpack();
                prop_assert!(unpacked.codes == codes);
                let bits: Vec<u16> = unpacked.scales.iter().map(|s| s.to_bits()).collect();
                prop_assert!(bits == scales);
            }
        }

        #[test]
        fn marlin_tensors_go_there_and_back(
            (chunks, strips, seed) in (1usize..4, 1usize..20, any::<u64>()),
            raw in prop::sample::select(vec![-1i64, 32, 64, 128]),
        ) {
            let n = 64 * chunks;
            let k = if raw < 0 { 16 * strips } else { raw as usize * strips };
            let group = Group::new(k, raw).expect("legal");
            let (codes, scales) = contents(n, k, group.num_groups(k), seed);
            let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
            let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
            let packed = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs");
            let marlin = packed.to_marlin().expect("multiples");
            let (b, s) = (bytemuck::cast_slice(&marlin.b), bytemuck::cast_slice(&marlin.s));
            let again = PackedWeights::from_marlin((n, k), group, b, s, 2).expect("legal");
            prop_assert!(again.bytes() == packed.bytes());
            let scales = Scales::f16(s, ScaleOrder::Marlin);
            let view = QuantMatrix::new(n, k, group, &U4B8, Codes::MarlinWords(b), scales);
            prop_assert!(pack_naive(&view.expect("legal")).bytes() == packed.bytes());
        }
    }

    #[test]
    fn padding_decodes_to_zero_and_scales_to_zero() {
        let (n, k) = (70, 160);
        let (codes, scales) = contents(n, k, 5, 9);
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let group = Group::Size(32);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
        let packed = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs");
        for n_idx in 0..128 {
            for k_idx in 0..256 {
                if n_idx >= n || k_idx >= k {
                    assert_eq!(packed.code(k_idx, n_idx), 8, "({k_idx}, {n_idx})");
                }
            }
            for group_idx in 0..8 {
                if n_idx >= n || group_idx >= 5 {
                    assert_eq!(packed.scale(group_idx, n_idx).to_bits(), 0);
                }
            }
        }
    }

    #[test]
    fn b21_minus_one_and_k_pack_to_the_same_bits() {
        for k in [128, 4096] {
            let n = 64;
            let (codes, scales) = contents(n, k, 1, 77);
            let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
            let pack = |group| {
                let codes = Codes::ByInput(&codes);
                let matrix = QuantMatrix::new(n, k, group, &U4B8, codes, scales).expect("legal");
                PackedWeights::pack(&matrix, 1).expect("packs")
            };
            let written_as_k = pack(Group::new(k, k as i64).expect("legal"));
            let written_raw = pack(Group::Size(k as u32));
            let per_column = pack(Group::PerColumn);
            assert_eq!(per_column.bytes(), written_as_k.bytes());
            assert_eq!(per_column.bytes(), written_raw.bytes());
            assert_eq!(per_column.layout().group, Group::PerColumn);
        }
    }

    #[test]
    fn b19_groups_past_the_128th_keep_their_scales() {
        let (n, k) = (64, 16512);
        let codes = vec![9u8; n * k];
        let scales: Vec<f16> = (0..129 * n).map(|i| f16::from_f32((i / n + 1) as f32)).collect();
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let group = Group::Size(128);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
        let dense = PackedWeights::pack(&matrix.expect("legal"), 2).expect("packs").dequantize();
        for (i, value) in dense.iter().enumerate() {
            assert_eq!(*value, (i % k / 128 + 1) as f32);
        }
    }

    #[test]
    fn b38_every_level_times_extreme_scales_is_exact() {
        let scales = [1.0, 2f64.powi(-14), 2f64.powi(-24), 3e4];
        let bits: Vec<f16> = (0..16 * 4).map(|i| f16::from_f64(scales[i / 16])).collect();
        let codes: Vec<u8> = (0..64 * 64).map(|i| (i / 64 % 16) as u8).collect();
        let view = Scales::f16(bytemuck::cast_slice(&bits), ScaleOrder::Rows);
        let codes = Codes::ByInput(&codes);
        let matrix = QuantMatrix::new(64, 64, Group::PerColumn, &U4B8, codes, view);
        let dense = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs").dequantize();
        for (i, value) in dense.iter().enumerate() {
            let (n, k) = (i / 64, i % 64);
            let exact = ((k % 16) as f64 - 8.0) * f16::from_f64(scales[n / 16]).to_f64();
            assert_eq!(f64::from(*value), exact, "level {} scale {}", k % 16, scales[n / 16]);
        }
    }

    #[test]
    fn b39_bad_scales_poison_only_their_own_columns() {
        let (n, k) = (8, 64);
        let mut scales = vec![f16::ONE; n];
        (scales[1], scales[3]) = (f16::NAN, f16::INFINITY);
        (scales[5], scales[6]) = (f16::ZERO, f16::from_bits(1));
        let codes = vec![11u8; n * k];
        let view = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let codes = Codes::ByInput(&codes);
        let matrix = QuantMatrix::new(n, k, Group::PerColumn, &U4B8, codes, view);
        let dense = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs").dequantize();
        for (i, value) in dense.iter().enumerate() {
            match i / k {
                1 => assert!(value.is_nan()),
                3 => assert_eq!(*value, f32::INFINITY),
                5 => assert_eq!(*value, 0.0),
                6 => assert_eq!(*value, 3.0 * 2f32.powi(-24)),
                _ => assert_eq!(*value, 3.0),
            }
        }
    }
}
