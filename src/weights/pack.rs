//! Packing and unpacking: from any source order to the packed layout and back.
//!
//! The packer fills whole chunks. Every source first yields, for each tile, *column words*: the
//! codes of neighbouring inputs of one channel, eight of 4 bits or four of 8, the lowest first (the word GPTQ stores).
//! Sixteen or 32 by sixteen of them are a tile, and a fixed shuffle makes the tile's words out of them;
//! no index is divided per code. Then the weight type orders the bits of its codes. Marlin's words are permuted directly. Chunks are independent, so
//! threads take equal runs of them.
//!
//! The inverse, [`PackedWeights::unpack`], does not share the shuffle: it asks [`PackedLayout`] for
//! every position. A mistake in one of the two cannot cancel in the other.

use half::f16;

use super::columns::{column_words, gathered_words, shuffle_bytes, shuffle_nibbles};
use super::packed_layout::{
    CHUNK_CHANNELS, PackedLayout, SCALE_ROW_BYTES, ScaleRow, TILE_CHANNELS, TILE_K, TileKind,
};
use super::scale_rule::{ScaleRule, power, scale_of_bits};
use super::{Codes, Error, Fragments, Group, InputOrder, QuantMatrix, WeightFormat};

/// A weight in the packed layout, ready to be uploaded in one piece.
#[derive(Clone, Debug)]
pub struct PackedWeights {
    layout: PackedLayout,
    format: &'static dyn WeightFormat,
    /// What every weight is multiplied by beside its scale.
    factor: f32,
    /// Where inputs and groups come from, if not from the same place in the source.
    order: Option<InputOrder>,
    /// The buffer, in 16-byte units so that it is aligned for any vector access.
    data: Vec<u128>,
}

/// What [`PackedWeights::unpack`] gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpacked {
    /// One code a byte, `[K][N]`.
    pub codes: Vec<u8>,
    /// Scales as the rows hold them, `[groups][N]`: those of the source less [`PackedWeights::factor`].
    pub scales: Vec<f16>,
    /// Zeros, `[groups][N]`, if the type stores zeros.
    pub zeros: Option<Vec<u8>>,
}

/// The number of threads that packing and quantising should use here: one per available core.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What packing a matrix comes to.
pub(super) struct Plan {
    layout: PackedLayout,
    rule: ScaleRule,
    factor: f32,
    order: Option<InputOrder>,
}

impl Plan {
    /// The plan of a matrix; refuses what cannot be packed.
    pub(super) fn of(matrix: &QuantMatrix<'_>) -> Result<Self, Error> {
        matrix.check_kernels()?;
        let rule = ScaleRule::of(matrix)?;
        let kind = TileKind::of(matrix.format(), rule.row);
        let sizes = match rule.row {
            ScaleRow::F16 => &Group::SIZES[..],
            ScaleRow::E5m3 => &[16, 32],
        };
        let order = InputOrder::of(matrix, &kind, sizes)?;
        let (k, group) = match &order {
            Some((order, group)) => (order.inputs().len(), *group),
            None => (matrix.k(), matrix.group()),
        };
        let layout = PackedLayout::of(matrix.n(), k, group, kind)?;
        let factor = (f64::from(matrix.global_scale()) * power(-rule.exponent)) as f32;
        // Scales that are all NaN, infinite or zero still have one.
        if !factor.is_normal() {
            return Err(Error::GlobalScale { value: factor });
        }
        Ok(Self { layout, rule, factor, order: order.map(|(order, _)| order) })
    }
}

impl PackedWeights {
    /// Packs a matrix with up to `threads` threads; the result does not depend on their number.
    ///
    /// # Errors
    /// [`Error::Unpackable`] for what no kernel takes, [`Error::ScaleRange`] for scales that do not go together, and
    /// [`Error::Size`].
    pub fn pack(matrix: &QuantMatrix<'_>, threads: usize) -> Result<Self, Error> {
        let (mut packed, rule) = Self::zeroed(matrix)?;
        let layout = packed.layout;
        let words: &mut [u32] = bytemuck::cast_slice_mut(&mut packed.data);
        let (chunks, tail) = words.split_at_mut(layout.codes_bytes / 4);
        let chunk_words = layout.chunk_bytes / 4;
        let per_thread = layout.num_chunks().div_ceil(threads.max(1));
        let packer = Packer::new(matrix, &layout, rule, packed.order.as_ref());
        std::thread::scope(|scope| {
            for (run_idx, run) in chunks.chunks_mut(per_thread * chunk_words).enumerate() {
                let (packer, first) = (&packer, run_idx * per_thread);
                let mut work = move || {
                    for (idx, chunk) in run.chunks_exact_mut(chunk_words).enumerate() {
                        packer.pack_chunk(first + idx, chunk);
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
                *half = (packer.scale_bits(0, n) as u16).to_le();
            }
        }
        Ok(packed)
    }

    fn zeroed(matrix: &QuantMatrix<'_>) -> Result<(Self, ScaleRule), Error> {
        let Plan { layout, rule, factor, order } = Plan::of(matrix)?;
        let data = vec![0; layout.total_bytes / size_of::<u128>()];
        Ok((Self { layout, format: matrix.format(), factor, order, data }, rule))
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

    /// What every weight is multiplied by, beside its scale: a global scale of the source, and the power of two that
    /// the scale rows lack.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Where packed inputs come from, if they do not lie in the source's order. Indices of the methods below are those of
    /// packed inputs and groups, but for [`PackedWeights::unpack`] and [`PackedWeights::dequantize`].
    pub fn input_order(&self) -> Option<&InputOrder> {
        self.order.as_ref()
    }

    /// Inputs of the source: columns of the activations.
    pub fn source_inputs(&self) -> usize {
        self.order.as_ref().map_or(self.layout.k, InputOrder::source_inputs)
    }

    /// The packed place of each input of the source.
    fn places(&self) -> Vec<usize> {
        match &self.order {
            Some(order) => order.places(),
            None => (0..self.layout.k).collect(),
        }
    }

    /// The code of input `k` and output `n`, both below the padded sizes.
    pub fn code(&self, k: usize, n: usize) -> u8 {
        let bit = self.layout.code_bit(k, n);
        let word = self.fragments().restore(self.word(bit / 32 * 4));
        (word >> (bit % 32)) as u8 & (0xff >> (8 - self.format.bits()))
    }

    fn fragments(&self) -> &'static dyn Fragments {
        self.format.fragments().expect("what no kernel converts is not packed")
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes()[at], self.bytes()[at + 1]])
    }

    /// The scale of group `group_idx` and output `n`, both below the padded counts, as the row holds it: without
    /// [`PackedWeights::factor`].
    pub fn scale(&self, group_idx: usize, n: usize) -> f16 {
        let at = self.layout.scale_byte(group_idx, n);
        match (self.layout.group, self.layout.kind.scales) {
            (Group::Size(_), ScaleRow::E5m3) => {
                scale_of_bits(ScaleRow::E5m3, self.bytes()[at].into())
            }
            _ => scale_of_bits(ScaleRow::F16, self.half(at)),
        }
    }

    /// The zero of the group of input `k` and of output `n`, both below the padded sizes, if zeros are stored.
    pub fn zero(&self, k: usize, n: usize) -> Option<u8> {
        let at = self.layout.zero_byte(k, n)?;
        let base = self.fragments().zero_bases()?.f16[n % TILE_CHANNELS / 8];
        Some((f16::from_bits(self.half(at)).to_f32() - base) as u8)
    }

    /// Every code in the source's order, the bits of every scale and every zero, without the padding. Scales and zeros
    /// are those of packed groups.
    pub fn unpack(&self) -> Unpacked {
        let (n, places) = (self.layout.n, self.places());
        let num_groups = self.layout.num_groups();
        let codes = (0..places.len() * n).map(|i| self.code(places[i / n], i % n)).collect();
        let scales = (0..num_groups * n).map(|i| self.scale(i / n, i % n)).collect();
        let per_group = self.layout.group.raw().max(0) as usize;
        let zeros = (0..num_groups * n).map(|i| self.zero(i / n * per_group, i % n)).collect();
        Unpacked { codes, scales, zeros }
    }

    /// The weights, `[N][K]`: the decoded code less its zero, times its scale, times the factor. Before the factor the
    /// product is exact in f32 (at most 9 significant bits times 11), so where that is a power of two it is also the
    /// f64 reference.
    pub fn dequantize(&self) -> Vec<f32> {
        let values: Vec<f32> =
            (0..self.format.num_codes()).map(|code| self.format.decode(code as u8)).collect();
        let places = self.places();
        let mut dense = Vec::with_capacity(self.layout.n * places.len());
        for n in 0..self.layout.n {
            for &k in &places {
                let scale = self.scale(self.layout.group.index_of(k), n).to_f32();
                let zero = self.zero(k, n).map_or(0.0, f32::from);
                let value = values[usize::from(self.code(k, n))] - zero;
                dense.push(value * scale * self.factor);
            }
        }
        dense
    }
}

/// What packing a chunk wants to know.
struct Packer<'a> {
    matrix: &'a QuantMatrix<'a>,
    layout: &'a PackedLayout,
    rule: ScaleRule,
    order: Option<&'a InputOrder>,
    fragments: &'static dyn Fragments,
    /// The padding code in all of a word's fields.
    padding: u32,
}

impl<'a> Packer<'a> {
    fn new(
        matrix: &'a QuantMatrix<'a>,
        layout: &'a PackedLayout,
        rule: ScaleRule,
        order: Option<&'a InputOrder>,
    ) -> Self {
        let format = matrix.format();
        // A one in every field: the sum of 16^p, or of 256^p.
        let ones = if format.bits() == 4 { 0x1111_1111 } else { 0x0101_0101 };
        let fragments = format.fragments().expect("what no kernel converts is not packed");
        let padding = u32::from(format.padding_code()) * ones;
        Self { matrix, layout, rule, order, fragments, padding }
    }

    /// Packs one chunk of four tiles into its words.
    fn pack_chunk(&self, idx: usize, chunk: &mut [u32]) {
        let (matrix, layout, kind) = (self.matrix, self.layout, self.layout.kind);
        let (k0, n0) = layout.tile_origin(idx * (CHUNK_CHANNELS / TILE_CHANNELS));
        let tile_words = layout.tile_bytes / 4;
        let marlin = match matrix.codes() {
            Codes::MarlinWords(b) if self.order.is_none() => Some(b),
            _ => None,
        };
        if let Some(b) = marlin {
            let origin = (k0, n0);
            super::marlin::pack_chunk_codes(matrix, b, origin, tile_words, chunk, self.padding);
        }
        for (j, tile) in chunk.chunks_exact_mut(tile_words).enumerate() {
            let (codes, rows) = tile.split_at_mut(kind.code_bytes() / 4);
            let (scales, zeros) =
                rows.split_at_mut((kind.zeros_offset(layout.group) - kind.code_bytes()) / 4);
            let n0 = n0 + j * TILE_CHANNELS;
            if marlin.is_none() {
                let columns = match self.order {
                    None => column_words(matrix, k0, n0, self.padding),
                    Some(order) => {
                        let inputs = &order.inputs()[k0..order.inputs().len().min(k0 + TILE_K)];
                        gathered_words(matrix, inputs, n0, self.padding)
                    }
                };
                match kind.code_bits {
                    4 => shuffle_nibbles(&columns, codes),
                    _ => shuffle_bytes(&columns, codes),
                }
            }
            self.fragments.arrange_all(codes);
            self.pack_scales(k0, n0, scales);
            self.pack_zeros(k0, n0, zeros);
        }
    }

    /// The source's group of a packed one, none past the last.
    fn source_group(&self, group_idx: usize) -> Option<usize> {
        match self.order {
            Some(order) => order.groups().get(group_idx).map(|group| *group as usize),
            None => (group_idx < self.matrix.num_groups()).then_some(group_idx),
        }
    }

    /// The bits of a scale, zero past the last group and output.
    fn scale_bits(&self, group_idx: usize, n: usize) -> u32 {
        match self.source_group(group_idx) {
            Some(group_idx) if n < self.matrix.n() => {
                self.rule.bits(self.matrix, group_idx, n).into()
            }
            _ => 0,
        }
    }

    fn pack_scales(&self, k0: usize, n0: usize, scales: &mut [u32]) {
        let first_group = self.layout.group.index_of(k0);
        match self.rule.row {
            ScaleRow::F16 => {
                for (row, words) in scales.chunks_exact_mut(SCALE_ROW_BYTES / 4).enumerate() {
                    for (g, word) in words.iter_mut().enumerate() {
                        let [low, high] =
                            [g, g + 8].map(|g| self.scale_bits(first_group + row, n0 + g));
                        *word = (low | high << 16).to_le();
                    }
                }
            }
            ScaleRow::E5m3 => {
                // Two groups a word.
                let words_per_channel = self.layout.scale_rows_per_tile() / 2;
                for (at, word) in scales.iter_mut().enumerate() {
                    let (g, group) = (at / words_per_channel, 2 * (at % words_per_channel));
                    let group = first_group + group;
                    let bytes = [(group, g), (group, g + 8), (group + 1, g), (group + 1, g + 8)];
                    *word = (bytes.into_iter().rev())
                        .fold(0, |word, (group, g)| word << 8 | self.scale_bits(group, n0 + g))
                        .to_le();
                }
            }
        }
    }

    fn pack_zeros(&self, k0: usize, n0: usize, zeros: &mut [u32]) {
        let Some(bases) = self.fragments.zero_bases() else { return };
        let first_group = self.layout.group.index_of(k0);
        let matrix = self.matrix;
        let zero = |group_idx: usize, n: usize| {
            let group_idx = self.source_group(group_idx).filter(|_| n < matrix.n());
            f32::from(group_idx.and_then(|group_idx| matrix.zero(group_idx, n)).unwrap_or(0))
        };
        for (row, words) in zeros.chunks_exact_mut(SCALE_ROW_BYTES / 4).enumerate() {
            for (g, word) in words.iter_mut().enumerate() {
                let [low, high] = [0, 1].map(|high| {
                    let stored = bases.f16[high] + zero(first_group + row, n0 + g + 8 * high);
                    u32::from(f16::from_f32(stored).to_bits())
                });
                *word = (low | high << 16).to_le();
            }
        }
    }
}

#[cfg(test)]
mod tests;
