//! Parts of packed weights, for tensor parallelism: which ranks can be served, and a part's bytes as pieces of the
//! whole's.
//!
//! A chunk of 64 outputs by 128 inputs is the smallest part. Chunks run along the inputs first:
//!
//! ```text
//!            inputs 0..128   128..256   256..384   384..512
//! outputs  0..64    [chunk 0   chunk 1 | chunk 2   chunk 3 ]    by inputs: a run of chunks from each row
//!         64..128   [chunk 4   chunk 5 | chunk 6   chunk 7 ]
//!         ---------------------------------------------------   by outputs: one run of all
//!        128..192   [chunk 8   chunk 9 | chunk 10  chunk 11]
//! ```
//!
//! So a part is cut without reading, let alone packing, anything else. Scales of whole columns lie behind all chunks;
//! every part by inputs has those of its outputs. Groups are never cut: their sizes divide 128. Where inputs lie in
//! an order of their own (act-order), a part by inputs has a run of the packed ones, its own order, and
//! [`Shard::columns`] of the activations that it wants.

use std::ops::Range;

use super::{CHUNK_CHANNELS, Error, PackedLayout, PackedSpec, PackedView, PackedWeights, TILE_K};

/// More ranks than this are not tried.
const MAX_RANKS: usize = 64;

/// A part of a packed weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Outputs, from and to multiples of 64, or the end.
    pub outputs: Range<usize>,
    /// Packed inputs, from and to multiples of 128, or the end.
    pub inputs: Range<usize>,
}

/// A range of `size` things in runs of `unit`, one for each rank.
struct Axis {
    name: &'static str,
    size: usize,
    unit: usize,
    /// Parts may differ in what pads their last run.
    padded: bool,
}

impl Axis {
    fn divides(&self, ranks: usize) -> bool {
        let size = if self.padded { self.size.next_multiple_of(self.unit) } else { self.size };
        ranks == 1 || size.is_multiple_of(ranks) && (size / ranks).is_multiple_of(self.unit)
    }

    fn possible(&self) -> Vec<usize> {
        (1..=MAX_RANKS).filter(|&ranks| self.divides(ranks)).collect()
    }

    fn range(&self, rank: usize, ranks: usize) -> Result<Range<usize>, Error> {
        if rank >= ranks {
            return Err(Error::Rank { rank, ranks });
        }
        let Self { name: axis, size, unit, .. } = *self;
        if !self.divides(ranks) {
            return Err(Error::Ranks { axis, size, unit, ranks, possible: self.possible() });
        }
        let each = if ranks == 1 { size } else { size.next_multiple_of(unit) / ranks };
        Ok(rank * each..((rank + 1) * each).min(size))
    }

    fn check(&self, range: &Range<usize>) -> Result<(), Error> {
        let Self { name: axis, size, unit, .. } = *self;
        let Range { start, end } = *range;
        let ends = end == size || end < size && end.is_multiple_of(unit);
        if start < end && ends && start.is_multiple_of(unit) {
            return Ok(());
        }
        Err(Error::Part { axis, start, end, size, unit })
    }
}

impl PackedSpec {
    fn outputs(&self) -> Axis {
        Axis { name: "outputs", size: self.layout.n, unit: CHUNK_CHANNELS, padded: false }
    }

    fn inputs(&self) -> Axis {
        let (size, unit) = (self.layout.k, TILE_K);
        match self.order {
            None => Axis { name: "inputs", size, unit, padded: false },
            Some(_) => Axis { name: "packed inputs", size, unit, padded: true },
        }
    }

    /// Numbers of ranks, up to 64, for which the outputs can be cut evenly.
    pub fn ranks_by_outputs(&self) -> Vec<usize> {
        self.outputs().possible()
    }

    /// Numbers of ranks, up to 64, for which the inputs can be cut evenly; inputs of an order of their own in
    /// whole runs of 128.
    pub fn ranks_by_inputs(&self) -> Vec<usize> {
        self.inputs().possible()
    }

    /// The outputs of a rank, and all inputs: a column-parallel layer.
    ///
    /// # Errors
    /// [`Error::Ranks`] with the numbers that are possible, [`Error::Rank`].
    pub fn part_by_outputs(&self, rank: usize, ranks: usize) -> Result<Part, Error> {
        Ok(Part { outputs: self.outputs().range(rank, ranks)?, inputs: 0..self.layout.k })
    }

    /// The inputs of a rank, and all outputs: a row-parallel layer, whose products are summed over the ranks.
    ///
    /// # Errors
    /// Those of [`PackedSpec::part_by_outputs`].
    pub fn part_by_inputs(&self, rank: usize, ranks: usize) -> Result<Part, Error> {
        Ok(Part { outputs: 0..self.layout.n, inputs: self.inputs().range(rank, ranks)? })
    }

    /// What a part is. Its order, if it has one, is of the activations of the whole.
    ///
    /// # Errors
    /// [`Error::Part`] for ranges that do not start and end as [`Part`] says.
    pub fn part(&self, part: &Part) -> Result<Self, Error> {
        self.outputs().check(&part.outputs)?;
        self.inputs().check(&part.inputs)?;
        let Self { layout, format, factor, order } = self;
        let order = order.as_ref().map(|order| order.part(part.inputs.clone(), layout.group));
        let layout = layout.of_part(part.outputs.len(), part.inputs.len());
        Ok(Self { layout, format: *format, factor: *factor, order })
    }
}

/// A part of a packed weight, as pieces of the whole's bytes.
#[derive(Clone, Debug)]
pub struct Shard<'a> {
    spec: PackedSpec,
    part: Part,
    whole: PackedLayout,
    bytes: &'a [u8],
}

impl<'a> PackedView<'a> {
    /// A part of the weight. Reads nothing.
    ///
    /// # Errors
    /// Those of [`PackedSpec::part`].
    pub fn shard(&self, part: Part) -> Result<Shard<'a>, Error> {
        let (spec, bytes) = (self.spec().part(&part)?, self.bytes());
        Ok(Shard { spec, part, whole: *self.spec().layout(), bytes })
    }
}

impl<'a> Shard<'a> {
    /// What the part is, as a weight of its own.
    pub fn spec(&self) -> &PackedSpec {
        &self.spec
    }

    /// Which part it is.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// Columns of the whole layer's activations that products with the part want, ascending.
    pub fn columns(&self) -> Vec<u32> {
        match self.spec.input_order() {
            Some(order) => order.columns(),
            None => self.part.inputs.clone().map(|input| input as u32).collect(),
        }
    }

    /// The part for activations that have [`Shard::columns`] and no others. Without an order of the inputs it is so
    /// already; with one, its order is that of all activations at first.
    #[must_use]
    pub fn on_own_columns(mut self) -> Self {
        self.spec.order = self.spec.order.take().map(super::InputOrder::on_own_columns);
        self
    }

    /// The pieces of the whole's bytes that make up the part's buffer, one after the other.
    pub fn pieces(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.bytes;
        self.ranges().map(move |range| &bytes[range])
    }

    /// Where [`Shard::pieces`] lie in the whole's buffer.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let whole = self.whole;
        let Part { outputs, inputs } = self.part.clone();
        let (rows, row) = (whole.num_k_tiles(), inputs.start / TILE_K);
        let run = inputs.len().div_ceil(TILE_K);
        let chunks = outputs.start / CHUNK_CHANNELS..outputs.end.div_ceil(CHUNK_CHANNELS);
        // Rows of chunks that follow each other are one piece.
        let per_piece = if run == rows { chunks.len() } else { 1 };
        let tail = whole.column_scales_offset.map(|offset| {
            let at = |chunk: usize| offset + 2 * CHUNK_CHANNELS * chunk;
            at(chunks.start)..at(chunks.end)
        });
        let pieces = chunks.step_by(per_piece).map(move |chunk| {
            let first = (chunk * rows + row) * whole.chunk_bytes;
            first..first + per_piece * run * whole.chunk_bytes
        });
        pieces.chain(tail)
    }

    /// The part with a buffer of its own.
    pub fn to_packed(&self) -> PackedWeights {
        let mut packed = PackedWeights::zeroed(self.spec.clone());
        let mut rest = packed.bytes_mut();
        for piece in self.pieces() {
            let (target, after) = rest.split_at_mut(piece.len());
            target.copy_from_slice(piece);
            rest = after;
        }
        packed
    }
}
