//! A packed tile in shared memory as a lane reads it, whatever its weight type and whoever brought it there.
//!
//! A lane of row g and column c of a fragment finds its words at 16 bytes times its number, in vectors of four words:
//! four k16 steps of 4-bit codes, two of 8-bit ones. The scales and zeros of channels g and g + 8 lie side by side, at a
//! place that g gives. Offsets here are those from a lane's own place in the tile.
//! Relies on the drawing of [`PackedLayout`](crate::weights::PackedLayout).

use super::problem::Config;
use crate::asm::Asm;
use crate::asm::reg::{Reg, Region};
use crate::asm::types::{B16, B32, F32};
use crate::weights::{
    Activation, Fragments, Group, Operands, SCALE_ROW_BYTES, ScaleRow, TileKind, emit_zeros,
};

/// k16 steps of a tile.
pub(super) const STEPS: u32 = 8;
/// Bytes of a lane's vectors of all lanes.
const VECTOR_BYTES: u32 = 512;

/// Sizes and places of a tile of a configuration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    kind: TileKind,
    group: Group,
    activation: Activation,
    fragments: &'static dyn Fragments,
    /// Bytes of the tile.
    pub(super) bytes: u32,
    /// Groups in it, at least 1.
    pub(super) groups: u32,
}

/// Where a lane's part of a tile lies: addresses less `start`, both inside `region`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// Address of the lane's first words.
    pub(super) words: Reg<B32>,
    /// Address of its first scales and zeros, at [`Tile::scale_bytes_per_row`] times g.
    pub(super) scales: Reg<B32>,
    /// Bytes from there to the tile.
    pub(super) start: u32,
    /// The shared memory that holds the tile.
    pub(super) region: Region,
}

/// Words of scales, or of zeros, of a tile as loaded.
pub(super) type Words = Vec<Reg<B32>>;

impl Tile {
    pub(super) fn new(config: &Config) -> Self {
        let (kind, group) = (config.kind.tile(), config.group);
        Self {
            kind,
            group,
            activation: config.kind.activation,
            fragments: config.kind.fragments(),
            bytes: kind.tile_bytes(group) as u32,
            groups: kind.scale_rows(group).max(1) as u32,
        }
    }

    /// Words of a fragment.
    pub(super) fn words_per_step(&self) -> usize {
        self.kind.words_per_fragment()
    }

    /// k16 steps of a vector of words.
    pub(super) fn steps_per_vector(&self) -> u32 {
        STEPS / 2 / self.words_per_step() as u32
    }

    /// k16 steps of a group.
    pub(super) fn steps_per_group(&self) -> u32 {
        STEPS / self.groups
    }

    /// Bytes from the scales of channel g to those of channel g + 1.
    pub(super) fn scale_bytes_per_row(&self) -> u32 {
        match self.kind.scales {
            ScaleRow::F16 => 4,
            ScaleRow::E5m3 => 2 * self.groups,
        }
    }

    /// Words of scales that a lane has of a tile.
    pub(super) fn num_scale_words(&self) -> usize {
        match (self.group, self.kind.scales) {
            (Group::PerColumn, _) => 0,
            (_, ScaleRow::F16) => self.groups as usize,
            (_, ScaleRow::E5m3) => self.groups as usize / 2,
        }
    }

    /// How many of them are loaded when group `group` begins.
    pub(super) fn num_scale_words_for(&self, group: u32) -> usize {
        match self.kind.scales {
            ScaleRow::F16 => self.num_scale_words().min(group as usize + 1),
            ScaleRow::E5m3 => self.num_scale_words(),
        }
    }

    /// Words of zeros that a lane has of a tile.
    pub(super) fn num_zero_words(&self) -> usize {
        self.kind.zero_rows(self.group)
    }

    /// Words of scales and zeros that a lane has of a tile.
    pub(super) fn num_factor_words(&self) -> u32 {
        (self.num_scale_words() + self.num_zero_words()) as u32
    }

    /// Emits the load of the vector of words that begins with k16 step `step`.
    pub(super) fn emit_load_vector(&self, a: &mut Asm, from: Source, step: u32, to: [Reg<B32>; 4]) {
        let offset = from.start + VECTOR_BYTES * (step / self.steps_per_vector());
        a.ld_shared_v4_b32(to, from.words.at(offset).within(from.region));
    }

    /// Emits the loads of the scales that group `group` is the first to want into the next of `to`.
    pub(super) fn emit_load_scales(&self, a: &mut Asm, from: Source, group: u32, to: &[Reg<B32>]) {
        let start = from.start + self.kind.code_bytes() as u32;
        let place = |offset| from.scales.at(start + offset).within(from.region);
        match (self.kind.scales, group, to) {
            _ if self.num_scale_words() == 0 => {}
            (ScaleRow::F16, ..) => {
                a.ld_shared_b32(to[group as usize], place(group * SCALE_ROW_BYTES as u32));
            }
            (ScaleRow::E5m3, 0, &[w0, w1, w2, w3]) => {
                a.ld_shared_v4_b32([w0, w1, w2, w3], place(0))
            }
            (ScaleRow::E5m3, 0, &[w0, w1]) => a.ld_shared_v2_b32([w0, w1], place(0)),
            (ScaleRow::E5m3, ..) => {}
        }
    }

    /// Emits the load of the zeros of group `group`, if there are any.
    pub(super) fn emit_load_zeros(&self, a: &mut Asm, from: Source, group: u32, to: &[Reg<B32>]) {
        if let Some(word) = to.get(group as usize) {
            let offset = self.kind.zeros_offset(self.group) as u32 + group * SCALE_ROW_BYTES as u32;
            a.ld_shared_b32(*word, from.scales.at(from.start + offset).within(from.region));
        }
    }

    /// Emits the scales of a group as fp16, channel g's in the low half and that of g + 8 in the high one, from words
    /// that were loaded.
    pub(super) fn emit_scale_word(&self, a: &mut Asm, words: &Words, group: u32) -> Reg<B32> {
        match self.kind.scales {
            ScaleRow::F16 => words[group as usize],
            ScaleRow::E5m3 => {
                let [spread, scales] = a.regs();
                // Each byte above a zero byte; the bits of an fp16 number lie one lower.
                let pick = [0x1404u32, 0x3424][group as usize % 2];
                a.prmt_b32(spread, words[group as usize / 2], 0u32, pick);
                a.shr_u32(scales, spread, 1);
                scales
            }
        }
    }

    /// Emits what the conversion wants in registers for the zeros of a group, if there are any.
    pub(super) fn emit_zeros(
        &self,
        a: &mut Asm,
        words: &[Reg<B32>],
        group: u32,
    ) -> Option<[Reg<B32>; 2]> {
        let (bases, word) = (self.fragments.zero_bases()?, words.get(group as usize)?);
        Some(emit_zeros(a, self.activation, bases, *word))
    }

    /// Emits the fragment of some words.
    pub(super) fn emit_fragment(
        &self,
        a: &mut Asm,
        constants: &[Reg<B32>],
        zeros: Option<[Reg<B32>; 2]>,
        words: &[Reg<B32>],
    ) -> [Reg<B32>; 4] {
        let constants = constants.to_vec();
        let operands = Operands { activation: self.activation, constants, zeros };
        self.fragments.emit_fragment(a, &operands, words)
    }

    /// Emits the multiplication of the rows of an A fragment by their channels' scales: registers 0 and 2 hold channel
    /// g, 1 and 3 channel g + 8; the scale word has g's in its low half.
    pub(super) fn emit_scale_fragment(
        &self,
        a: &mut Asm,
        fragment: [Reg<B32>; 4],
        scale: Reg<B32>,
    ) -> [Reg<B32>; 4] {
        let both: [Reg<B32>; 2] = a.regs();
        match self.activation {
            Activation::F16 => {
                a.prmt_b32(both[0], scale, scale, 0x1010u32);
                a.prmt_b32(both[1], scale, scale, 0x3232u32);
                let scaled: [Reg<B32>; 4] = a.regs();
                for (n, (scaled, value)) in scaled.into_iter().zip(fragment).enumerate() {
                    a.mul_f16x2(scaled, value, both[n % 2]);
                }
                scaled
            }
            Activation::Bf16 => {
                for (both, scale) in both.into_iter().zip(emit_scales(a, scale)) {
                    a.cvt_rn_bf16x2_f32(both, scale, scale);
                }
                // -0.0 added to a product leaves it as it is.
                let zeros = a.reg();
                a.mov_b32(zeros, 0x8000_8000u32);
                let scaled: [Reg<B32>; 4] = a.regs();
                for (n, (scaled, value)) in scaled.into_iter().zip(fragment).enumerate() {
                    a.fma_rn_bf16x2(scaled, value, both[n % 2], zeros);
                }
                scaled
            }
        }
    }
}

/// Emits the scales of channels g and g + 8 in single precision from their word.
pub(super) fn emit_scales(a: &mut Asm, word: Reg<B32>) -> [Reg<F32>; 2] {
    let halves: [Reg<B16>; 2] = a.regs();
    a.mov_b32_unpack(halves, word);
    halves.map(|half| {
        let scale = a.reg();
        a.cvt_f32_f16(scale, half);
        scale
    })
}
