//! Packing: from any source order to the packed layout.
//!
//! The packer fills whole chunks. Every source first yields, for each tile, *column words*: the
//! codes of neighbouring inputs of one channel, eight of 4 bits or four of 8, the lowest first (the word GPTQ stores).
//! Sixteen or 32 by sixteen of them are a tile, and a fixed shuffle makes the tile's words out of them;
//! no index is divided per code. Then the weight type orders the bits of its codes. Marlin's words are permuted
//! directly. Chunks are independent: threads take equal runs of them, and [`Packing`] fills any run wherever its caller wants it,
//! for a whole weight or a part of one.
//!
//! The inverse, [`PackedView::unpack`](super::PackedView::unpack), does not share the shuffle: it asks [`PackedLayout`]
//! for every position. A mistake in one of the two cannot cancel in the other.

use half::f16;

use super::columns::{SourceColumns, column_words, shuffle_bytes, shuffle_nibbles};
use super::packed_layout::{
    CHUNK_CHANNELS, PackedLayout, SCALE_ROW_BYTES, ScaleRow, TILE_CHANNELS, TILE_K, TileKind,
};
use super::scale_rule::{ScaleRule, power, scale_of_bits};
use super::{
    Codes, Error, Fragments, Group, InputOrder, PackedSpec, PackedWeights, Part, QuantMatrix,
    ScaleOrder, Scales,
};

/// The number of threads that packing and quantising should use here: one per available core.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A matrix and what packing it comes to: the work of [`PackedWeights::pack`], for callers that want the buffer in
/// pieces, or only that of a part.
#[derive(Debug)]
pub struct Packing<'a> {
    matrix: QuantMatrix<'a>,
    spec: PackedSpec,
    rule: ScaleRule,
    /// The part's first input and output in the matrix, the input only if inputs lie in the source's order.
    origin: (usize, usize),
    fragments: &'static dyn Fragments,
    /// The padding code in all of a word's fields.
    padding: u32,
    /// What a row holds for each scale of one byte; none for other types.
    byte_scales: Option<Box<[u16; 256]>>,
    /// What a row holds for each zero, of channels g and g + 8; none for types without stored zeros.
    zero_bits: Option<Box<[[u16; 256]; 2]>>,
}

impl<'a> Packing<'a> {
    /// The packing of a matrix. Reads its scales and group indices.
    ///
    /// # Errors
    /// [`Error::Unpackable`] for what no kernel takes, [`Error::ScaleRange`] and [`Error::GlobalScale`] for scales that
    /// do not go together, and [`Error::Size`].
    pub fn of(matrix: &QuantMatrix<'a>) -> Result<Self, Error> {
        let format = matrix.format();
        let Some(fragments) = format.fragments() else {
            let what = format!("a weight of type {}", format.name());
            return Err(Error::Unpackable { what, rule: "no kernel takes the type" });
        };
        let rule = ScaleRule::of(matrix)?;
        let kind = TileKind::of(format, rule.row);
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
        let spec = PackedSpec { layout, format, factor, order: order.map(|(order, _)| order) };
        // A one in every field: the sum of 16^p, or of 256^p.
        let ones = if format.bits() == 4 { 0x1111_1111 } else { 0x0101_0101 };
        let padding = u32::from(format.padding_code()) * ones;
        let element = matrix.scales().element;
        let byte_scales = (element.bytes() == 1).then(|| {
            Box::new(std::array::from_fn(|byte| rule.bits_of(element.decode(&[byte as u8]))))
        });
        let zero_bits = fragments.zero_bases().map(|bases| {
            let bits = |base: f32, zero: usize| f16::from_f32(base + zero as f32).to_bits();
            Box::new(bases.f16.map(|base| std::array::from_fn(|zero| bits(base, zero))))
        });
        let (matrix, origin) = (*matrix, (0, 0));
        Ok(Self { matrix, spec, rule, origin, fragments, padding, byte_scales, zero_bits })
    }

    /// The packing of a part. Its buffer is what a [`Shard`](super::Shard) cut from the whole packed weight is.
    ///
    /// # Errors
    /// Those of [`PackedSpec::part`].
    pub fn part(&self, part: &Part) -> Result<Self, Error> {
        let spec = self.spec.part(part)?;
        let k0 = if spec.order.is_some() { 0 } else { part.inputs.start };
        let Self { matrix, rule, fragments, padding, .. } = *self;
        let origin = (self.origin.0 + k0, self.origin.1 + part.outputs.start);
        let (byte_scales, zero_bits) = (self.byte_scales.clone(), self.zero_bits.clone());
        Ok(Self { matrix, spec, rule, origin, fragments, padding, byte_scales, zero_bits })
    }

    /// What comes out.
    pub fn spec(&self) -> &PackedSpec {
        &self.spec
    }

    /// Whether the rows hold every scale exactly, up to the factor. Only f32 scales are rounded.
    pub fn scales_are_exact(&self) -> bool {
        let (matrix, unit) = (&self.matrix, power(-self.rule.exponent));
        (0..matrix.num_groups()).all(|group_idx| {
            (0..matrix.n()).all(|n| {
                let scale = f64::from(matrix.scale(group_idx, n));
                let bits = self.rule.bits(matrix, group_idx, n);
                scale.is_nan() || f64::from(scale_of_bits(self.rule.row, bits)) * unit == scale
            })
        })
    }

    /// Packs a run of chunks into their words, from chunk `first` of the buffer on.
    ///
    /// # Panics
    /// If `words` are no whole chunks, or reach past the last one.
    pub fn fill_chunks(&self, first: usize, words: &mut [u32]) {
        let layout = &self.spec.layout;
        let chunk_words = layout.chunk_bytes / 4;
        assert!(words.len().is_multiple_of(chunk_words), "runs are made of whole chunks");
        assert!(first + words.len() / chunk_words <= layout.num_chunks(), "within the buffer");
        // Chunks of the same channels follow each other.
        let mut source = None;
        for (idx, chunk) in words.chunks_exact_mut(chunk_words).enumerate() {
            self.pack_chunk(first + idx, chunk, &mut source);
        }
    }

    /// Writes what follows the last chunk, scales of whole columns if there are any, from that of output `first` on.
    ///
    /// # Panics
    /// If the buffer does not go so far.
    pub fn fill_tail(&self, first: usize, tail: &mut [u8]) {
        let layout = &self.spec.layout;
        let rest = layout.total_bytes - layout.codes_bytes;
        assert!(2 * first + tail.len() <= rest, "within the buffer");
        for (at, half) in tail.as_chunks_mut().0.iter_mut().enumerate() {
            *half = (self.scale_bits(0, self.origin.1 + first + at) as u16).to_le_bytes();
        }
    }

    /// Packs one chunk of four tiles into its words. `source` is that of the chunk before, if inputs are gathered.
    fn pack_chunk(&self, idx: usize, chunk: &mut [u32], source: &mut Option<SourceColumns>) {
        let (matrix, layout) = (&self.matrix, &self.spec.layout);
        let (kind, order) = (layout.kind, self.spec.order.as_ref());
        let (place, n0) = layout.tile_origin(idx * (CHUNK_CHANNELS / TILE_CHANNELS));
        let (k0, n0) = (self.origin.0 + place, self.origin.1 + n0);
        let tile_words = layout.tile_bytes / 4;
        let marlin = match matrix.codes() {
            Codes::MarlinWords(b) if order.is_none() => Some(b),
            _ => None,
        };
        if let Some(b) = marlin {
            let origin = (k0, n0);
            super::marlin::pack_chunk_codes(matrix, b, origin, tile_words, chunk, self.padding);
        }
        if order.is_some() && source.as_ref().is_none_or(|source| source.n0 != n0) {
            *source = Some(SourceColumns::of(matrix, n0, self.padding));
        }
        for (j, tile) in chunk.chunks_exact_mut(tile_words).enumerate() {
            let (codes, rows) = tile.split_at_mut(kind.code_bytes() / 4);
            let (scales, zeros) =
                rows.split_at_mut((kind.zeros_offset(layout.group) - kind.code_bytes()) / 4);
            let n0 = n0 + j * TILE_CHANNELS;
            if marlin.is_none() {
                let columns = match (order, &source) {
                    (Some(order), Some(source)) => {
                        let inputs = order.inputs();
                        source.gather(j, &inputs[place..inputs.len().min(place + TILE_K)])
                    }
                    _ => column_words(matrix, k0, n0, self.padding),
                };
                match kind.code_bits {
                    4 => shuffle_nibbles(&columns, codes),
                    _ => shuffle_bytes(&columns, codes),
                }
            }
            self.fragments.arrange_all(codes);
            self.pack_scales(place, n0, scales);
            self.pack_zeros(place, n0, zeros);
        }
    }

    /// The source's group of a packed one, none past the last.
    fn source_group(&self, group_idx: usize) -> Option<usize> {
        match &self.spec.order {
            Some(order) => order.groups().get(group_idx).map(|group| *group as usize),
            None => {
                let group_idx = self.spec.layout.group.index_of(self.origin.0) + group_idx;
                (group_idx < self.matrix.num_groups()).then_some(group_idx)
            }
        }
    }

    /// The bits of the scale of a packed group and a channel of the matrix, zero past the last ones.
    fn scale_bits(&self, group_idx: usize, n: usize) -> u32 {
        match self.source_group(group_idx) {
            Some(group_idx) if n < self.matrix.n() => {
                self.rule.bits(&self.matrix, group_idx, n).into()
            }
            _ => 0,
        }
    }

    /// [`Packing::scale_bits`] of the channels of a tile.
    fn scale_row(&self, group_idx: usize, n0: usize) -> [u16; TILE_CHANNELS] {
        let (matrix, mut row) = (&self.matrix, [0; TILE_CHANNELS]);
        let Some(group_idx) = self.source_group(group_idx) else { return row };
        let channels = matrix.n().saturating_sub(n0).min(TILE_CHANNELS);
        let Scales { bytes, order, .. } = matrix.scales();
        let row_of = row[..channels].iter_mut().zip(n0..);
        match &self.byte_scales {
            Some(bits_of) => row_of.for_each(|(bits, n)| {
                *bits = bits_of[usize::from(bytes[matrix.scale_place(group_idx, n)])];
            }),
            None if channels > 0 && order == ScaleOrder::Rows && self.rule.copies(matrix) => {
                let first = 2 * matrix.scale_place(group_idx, n0);
                let halves = bytes[first..first + 2 * channels].as_chunks().0;
                row_of.zip(halves).for_each(|((bits, _), half)| *bits = u16::from_le_bytes(*half));
            }
            None => {
                row_of.for_each(|(bits, n)| *bits = self.rule.bits(matrix, group_idx, n));
            }
        }
        row
    }

    fn pack_scales(&self, place: usize, n0: usize, scales: &mut [u32]) {
        let first_group = self.spec.layout.group.index_of(place);
        match self.rule.row {
            ScaleRow::F16 => {
                for (row, words) in scales.chunks_exact_mut(SCALE_ROW_BYTES / 4).enumerate() {
                    let bits = self.scale_row(first_group + row, n0);
                    for (g, word) in words.iter_mut().enumerate() {
                        *word = (u32::from(bits[g]) | u32::from(bits[g + 8]) << 16).to_le();
                    }
                }
            }
            ScaleRow::E5m3 => {
                // Two groups a word.
                let words_per_channel = self.spec.layout.scale_rows_per_tile() / 2;
                for pair in 0..words_per_channel {
                    let [low, high] =
                        [0, 1].map(|at| self.scale_row(first_group + 2 * pair + at, n0));
                    for g in 0..8 {
                        let bytes = [low[g], low[g + 8], high[g], high[g + 8]].map(|b| b as u8);
                        scales[g * words_per_channel + pair] = u32::from_le_bytes(bytes).to_le();
                    }
                }
            }
        }
    }

    fn pack_zeros(&self, place: usize, n0: usize, zeros: &mut [u32]) {
        let Some(bits_of) = &self.zero_bits else { return };
        let first_group = self.spec.layout.group.index_of(place);
        let matrix = &self.matrix;
        for (row, words) in zeros.chunks_exact_mut(SCALE_ROW_BYTES / 4).enumerate() {
            let group_idx = self.source_group(first_group + row);
            let zero = |n: usize| {
                let group_idx = group_idx.filter(|_| n < matrix.n());
                group_idx.and_then(|group_idx| matrix.zero(group_idx, n)).unwrap_or(0)
            };
            for (g, word) in words.iter_mut().enumerate() {
                let [low, high] = [0, 1]
                    .map(|high| u32::from(bits_of[high][usize::from(zero(n0 + g + 8 * high))]));
                *word = (low | high << 16).to_le();
            }
        }
    }
}

impl PackedWeights {
    /// Packs a matrix with up to `threads` threads; the result does not depend on their number.
    ///
    /// # Errors
    /// Those of [`Packing::of`].
    pub fn pack(matrix: &QuantMatrix<'_>, threads: usize) -> Result<Self, Error> {
        Ok(Self::of_packing(&Packing::of(matrix)?, threads))
    }

    /// What a packing comes to, with up to `threads` threads.
    pub fn of_packing(packing: &Packing<'_>, threads: usize) -> Self {
        let mut packed = Self::zeroed(packing.spec().clone());
        let layout = packing.spec().layout;
        let (chunks, tail) = packed.bytes_mut().split_at_mut(layout.codes_bytes);
        let words: &mut [u32] = bytemuck::cast_slice_mut(chunks);
        let per_thread = layout.num_chunks().div_ceil(threads.max(1));
        std::thread::scope(|scope| {
            for (run_idx, run) in words.chunks_mut(per_thread * layout.chunk_bytes / 4).enumerate()
            {
                let mut work = move || packing.fill_chunks(run_idx * per_thread, run);
                if per_thread == layout.num_chunks() {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        packing.fill_tail(0, tail);
        packed
    }
}

#[cfg(test)]
mod tests;
