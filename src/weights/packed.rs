//! Packed weights: what one is ([`PackedSpec`]), its buffer owned ([`PackedWeights`]) or borrowed ([`PackedView`]), and
//! how it is read.
//!
//! Readers ask [`PackedLayout`] for every position and share nothing with the packer. A view may come out of any file:
//! what it is made of is checked when it is made, and every byte of the buffer is legal, so reading cannot fail.

use half::f16;

use super::packed_layout::{PackedLayout, ScaleRow, TILE_CHANNELS, TileKind};
use super::scale_rule::scale_of_bits;
use super::{E2M1, Error, Fragments, Group, InputOrder, WeightFormat};

/// The inputs of a packed weight.
#[derive(Clone, Debug)]
pub enum Inputs {
    /// So many, in the source's order.
    InPlace(usize),
    /// In an order of their own.
    Ordered(InputOrder),
}

/// What a packed weight is, but for its bytes.
#[derive(Clone, Debug)]
pub struct PackedSpec {
    pub(super) layout: PackedLayout,
    pub(super) format: &'static dyn WeightFormat,
    pub(super) factor: f32,
    pub(super) order: Option<InputOrder>,
}

impl PackedSpec {
    /// The description of a weight that somebody packed: its outputs, its inputs, the packed inputs' group rule, the
    /// weight type, what scale rows hold, and the factor.
    ///
    /// # Errors
    /// [`Error::Unpackable`] for what no kernel takes, [`Error::GlobalScale`] for the factor, [`Error::Order`] for an
    /// order of another number of groups, [`Error::Size`] and those of [`Group::new`].
    pub fn new(
        n: usize,
        inputs: Inputs,
        group: Group,
        format: &'static dyn WeightFormat,
        scales: ScaleRow,
        factor: f32,
    ) -> Result<Self, Error> {
        let what = || format!("a weight of type {}, group {group}", format.name());
        if format.fragments().is_none() {
            return Err(Error::Unpackable { what: what(), rule: "no kernel takes the type" });
        }
        let of_e2m1 = format.name() == E2M1.name() && matches!(group, Group::Size(16 | 32));
        if scales == ScaleRow::E5m3 && !of_e2m1 {
            let rule = "scales of one byte go with e2m1 in groups of 16 and 32";
            return Err(Error::Unpackable { what: what(), rule });
        }
        if !factor.is_normal() {
            return Err(Error::GlobalScale { value: factor });
        }
        let (k, order) = match inputs {
            Inputs::InPlace(k) => (k, None),
            Inputs::Ordered(order) => (order.inputs().len(), Some(order)),
        };
        let layout = PackedLayout::of(n, k, group, TileKind::of(format, scales))?;
        if layout.group != group {
            let rule = "one group is the whole column, which is written as -1";
            return Err(Error::Unpackable { what: format!("{}, of {k} inputs", what()), rule });
        }
        if let Some(order) = &order {
            order.check_groups(layout.num_groups())?;
        }
        Ok(Self { layout, format, factor, order })
    }

    /// Sizes and positions.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The weight type.
    pub fn format(&self) -> &'static dyn WeightFormat {
        self.format
    }

    /// What every weight is multiplied by, beside its scale: a global scale of the source, and the power of two that
    /// the scale rows lack.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// Where packed inputs come from, if they do not lie in the source's order.
    pub fn input_order(&self) -> Option<&InputOrder> {
        self.order.as_ref()
    }

    /// Inputs of the source: columns of the activations.
    pub fn source_inputs(&self) -> usize {
        self.order.as_ref().map_or(self.layout.k, InputOrder::source_inputs)
    }

    /// The packed place of each input of the source, none of those that a part leaves to others.
    pub(super) fn places(&self) -> Vec<Option<usize>> {
        match &self.order {
            Some(order) => order.places(),
            None => (0..self.layout.k).map(Some).collect(),
        }
    }
}

/// A weight in the packed layout, ready to be uploaded in one piece.
#[derive(Clone, Debug)]
pub struct PackedWeights {
    spec: PackedSpec,
    /// The buffer, in 16-byte units so that it is aligned for any vector access.
    data: Vec<u128>,
}

/// What [`PackedView::unpack`] gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpacked {
    /// One code a byte, `[K][N]`.
    pub codes: Vec<u8>,
    /// Scales as the rows hold them, `[groups][N]`: those of the source less [`PackedSpec::factor`].
    pub scales: Vec<f16>,
    /// Zeros, `[groups][N]`, if the type stores zeros.
    pub zeros: Option<Vec<u8>>,
}

impl PackedWeights {
    /// A buffer of zero bytes.
    pub(super) fn zeroed(spec: PackedSpec) -> Self {
        let data = vec![0; spec.layout.total_bytes / size_of::<u128>()];
        Self { spec, data }
    }

    /// What it is.
    pub fn spec(&self) -> &PackedSpec {
        &self.spec
    }

    /// Sizes and positions.
    pub fn layout(&self) -> &PackedLayout {
        &self.spec.layout
    }

    /// The weight type.
    pub fn format(&self) -> &'static dyn WeightFormat {
        self.spec.format
    }

    /// See [`PackedSpec::factor`].
    pub fn factor(&self) -> f32 {
        self.spec.factor
    }

    /// See [`PackedSpec::input_order`]. Indices of the methods below are those of packed inputs and groups, but for
    /// [`PackedWeights::unpack`] and [`PackedWeights::dequantize`].
    pub fn input_order(&self) -> Option<&InputOrder> {
        self.spec.order.as_ref()
    }

    /// See [`PackedSpec::source_inputs`].
    pub fn source_inputs(&self) -> usize {
        self.spec.source_inputs()
    }

    /// The buffer, aligned to 16 bytes: what the device receives.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.data)
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.data)
    }

    /// The weight, borrowed.
    pub fn view(&self) -> PackedView<'_> {
        PackedView { spec: &self.spec, bytes: self.bytes() }
    }

    /// See [`PackedView::code`].
    pub fn code(&self, k: usize, n: usize) -> u8 {
        self.view().code(k, n)
    }

    /// See [`PackedView::scale`].
    pub fn scale(&self, group_idx: usize, n: usize) -> f16 {
        self.view().scale(group_idx, n)
    }

    /// See [`PackedView::zero`].
    pub fn zero(&self, k: usize, n: usize) -> Option<u8> {
        self.view().zero(k, n)
    }

    /// See [`PackedView::unpack`].
    pub fn unpack(&self) -> Unpacked {
        self.view().unpack()
    }

    /// See [`PackedView::dequantize`].
    pub fn dequantize(&self) -> Vec<f32> {
        self.view().dequantize()
    }
}

/// A packed weight whose bytes lie anywhere, for instance in a mapped file.
#[derive(Clone, Copy, Debug)]
pub struct PackedView<'a> {
    spec: &'a PackedSpec,
    bytes: &'a [u8],
}

impl<'a> From<&'a PackedWeights> for PackedView<'a> {
    fn from(packed: &'a PackedWeights) -> Self {
        packed.view()
    }
}

impl<'a> PackedView<'a> {
    /// The weight that `spec` describes in a buffer of any alignment.
    ///
    /// # Errors
    /// [`Error::SourceBytes`] for a buffer of another size.
    pub fn new(spec: &'a PackedSpec, bytes: &'a [u8]) -> Result<Self, Error> {
        let PackedLayout { n, k, total_bytes: expected, .. } = spec.layout;
        if bytes.len() != expected {
            let (what, found) = ("packed weights", bytes.len());
            return Err(Error::SourceBytes { what, n, k, expected, found });
        }
        Ok(Self { spec, bytes })
    }

    /// What it is.
    pub fn spec(&self) -> &'a PackedSpec {
        self.spec
    }

    /// The buffer: what the device receives.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The little-endian word at byte `at` of the buffer.
    pub(super) fn word(&self, at: usize) -> u32 {
        let bytes = &self.bytes[at..at + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn fragments(&self) -> &'static dyn Fragments {
        self.spec.format.fragments().expect("what no kernel converts is not packed")
    }

    /// The code of packed input `k` and output `n`, both below the padded sizes.
    pub fn code(&self, k: usize, n: usize) -> u8 {
        let bit = self.spec.layout.code_bit(k, n);
        let word = self.fragments().restore(self.word(bit / 32 * 4));
        (word >> (bit % 32)) as u8 & (0xff >> (8 - self.spec.format.bits()))
    }

    /// The scale of packed group `group_idx` and output `n`, both below the padded counts, as the row holds it: without
    /// [`PackedSpec::factor`].
    pub fn scale(&self, group_idx: usize, n: usize) -> f16 {
        let layout = &self.spec.layout;
        let at = layout.scale_byte(group_idx, n);
        match (layout.group, layout.kind.scales) {
            (Group::Size(_), ScaleRow::E5m3) => {
                scale_of_bits(ScaleRow::E5m3, self.bytes[at].into())
            }
            _ => scale_of_bits(ScaleRow::F16, self.half(at)),
        }
    }

    /// The zero of the group of packed input `k` and of output `n`, both below the padded sizes, if zeros are stored.
    pub fn zero(&self, k: usize, n: usize) -> Option<u8> {
        let at = self.spec.layout.zero_byte(k, n)?;
        let base = self.fragments().zero_bases()?.f16[n % TILE_CHANNELS / 8];
        Some((f16::from_bits(self.half(at)).to_f32() - base) as u8)
    }

    /// Every code in the source's order, the bits of every scale and every zero, without the padding. Scales and zeros
    /// are those of packed groups; [`PackedView::restore`] gives those of the source.
    pub fn unpack(&self) -> Unpacked {
        let layout = &self.spec.layout;
        let (n, num_groups) = (layout.n, layout.num_groups());
        let scales = (0..num_groups * n).map(|i| self.scale(i / n, i % n)).collect();
        let per_group = layout.group.raw().max(0) as usize;
        let zeros = (0..num_groups * n).map(|i| self.zero(i / n * per_group, i % n)).collect();
        Unpacked { codes: self.codes(), scales, zeros }
    }

    /// Every code, one a byte, `[K][N]` in the source's order; those of inputs that a part leaves to others are worth
    /// zero.
    pub(super) fn codes(&self) -> Vec<u8> {
        let PackedSpec { layout, format, .. } = self.spec;
        let row = |place: Option<usize>| {
            (0..layout.n).map(move |n| match place {
                Some(k) => self.code(k, n),
                None => format.padding_code(),
            })
        };
        self.spec.places().into_iter().flat_map(row).collect()
    }

    /// The weights, `[N][K]`: the decoded code less its zero, times its scale, times the factor. Before the factor the
    /// product is exact in f32 (at most 9 significant bits times 11), so where that is a power of two it is also the
    /// f64 reference.
    pub fn dequantize(&self) -> Vec<f32> {
        let PackedSpec { layout, format, factor, .. } = self.spec;
        let values: Vec<f32> =
            (0..format.num_codes()).map(|code| format.decode(code as u8)).collect();
        let places = self.spec.places();
        let mut dense = Vec::with_capacity(layout.n * places.len());
        for n in 0..layout.n {
            for place in &places {
                let Some(k) = *place else {
                    dense.push(0.0);
                    continue;
                };
                let scale = self.scale(layout.group.index_of(k), n).to_f32();
                let zero = self.zero(k, n).map_or(0.0, f32::from);
                let value = values[usize::from(self.code(k, n))] - zero;
                dense.push(value * scale * factor);
            }
        }
        dense
    }
}
