//! The kernels' side of a weight type: how its codes lie in a packed word, and the instructions that make numbers of
//! them which tensor cores multiply.
//!
//! A type owns the order of the bits within each half of a word, so that few instructions take them out. It
//! converts to fp16 and to bf16, exactly; where that is cheaper the fragments are a power of two too small, which
//! the kernel's epilogue makes up for. Stored zeros come as rows of fp16 numbers beside the scales: for fp16
//! fragments exactly what the biased codes are too large by.

use std::fmt::Debug;

use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B16, B32, F32};

/// `(a & b) | c`, for `lop3`.
pub(super) const AND_OR: u32 = 0xea;
/// `(!a & b) | c`, for `lop3`.
pub(super) const NOT_AND_OR: u32 = 0xae;
/// -0.0 twice, in fp16 and in bf16: added to a product it changes nothing, not even the sign of a zero.
const NEGATIVE_ZEROS: u32 = 0x8000_8000;

/// The type of activations, of outputs and of the fragments that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Activation {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Activation {
    /// The name in a configuration's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// What stored zeros are subtracted from, see [`Fragments::zero_bases`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ZeroBases {
    /// The packed word of a group holds these plus the zeros of channels g and g + 8: what fp16 numbers made of
    /// codes are too large by.
    pub f16: [f32; 2],
    /// This less the zero is what bf16 numbers made of codes lack.
    pub bf16: f32,
}

/// Registers that a conversion takes beside the words.
#[derive(Clone, Debug)]
pub struct Operands {
    /// The type of the fragments.
    pub activation: Activation,
    /// What [`Fragments::emit_constants`] emitted.
    pub constants: Vec<Reg<B32>>,
    /// What [`emit_zeros`] made of the group's zeros, if the type stores zeros.
    pub zeros: Option<[Reg<B32>; 2]>,
}

/// The conversion of packed words to numbers that tensor cores multiply.
pub trait Fragments: Debug + Sync {
    /// Fragments hold `(value - zero) * 2^-exponent`.
    fn exponent(&self, _activation: Activation) -> u32 {
        0
    }

    /// The bases of stored zeros, if the type stores zeros.
    fn zero_bases(&self) -> Option<ZeroBases> {
        None
    }

    /// The packed form of a word whose codes lie in order, half by half.
    fn arrange(&self, word: u32) -> u32 {
        word
    }

    /// The inverse of [`Fragments::arrange`].
    fn restore(&self, word: u32) -> u32 {
        word
    }

    /// [`Fragments::arrange`] of little-endian words in place.
    fn arrange_all(&self, words: &mut [u32]) {
        words.iter_mut().for_each(|word| *word = self.arrange(u32::from_le(*word)).to_le());
    }

    /// Instructions of [`Fragments::emit_fragment`], for the prediction of times.
    fn num_instructions(&self, activation: Activation) -> u32;

    /// Emits the constants that [`Fragments::emit_fragment`] wants in registers.
    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>>;

    /// Emits the conversion of the packed words of one fragment (one of 4-bit codes, two of 8-bit ones) to the A
    /// operand of `mma.m16n8k16`, unscaled: registers 0 and 2 belong to channel g, 1 and 3 to channel g + 8; 0 and 1
    /// to inputs 2c and 2c + 1, 2 and 3 to 2c + 8 and 2c + 9 (see the drawing of
    /// [`PackedLayout`](super::PackedLayout)).
    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4];
}

/// Emits what a conversion subtracts from fp16 fragments, or adds to bf16 ones, of channels g and g + 8, from a word of
/// a zero row: each twice in its register.
pub fn emit_zeros(
    a: &mut Asm,
    activation: Activation,
    bases: ZeroBases,
    word: Reg<B32>,
) -> [Reg<B32>; 2] {
    let both: [Reg<B32>; 2] = a.regs();
    match activation {
        Activation::F16 => {
            a.prmt_b32(both[0], word, word, 0x1010u32);
            a.prmt_b32(both[1], word, word, 0x3232u32);
        }
        Activation::Bf16 => {
            let halves: [Reg<B16>; 2] = a.regs();
            a.mov_b32_unpack(halves, word);
            for ((both, half), base) in both.into_iter().zip(halves).zip(bases.f16) {
                let [stored, added]: [Reg<F32>; 2] = a.regs();
                a.cvt_f32_f16(stored, half);
                // bf16 base - (stored - fp16 base).
                a.fma_rn_f32(added, stored, -1.0, bases.bf16 + base);
                a.cvt_rn_bf16x2_f32(both, added, added);
            }
        }
    }
    both
}

/// Emits a constant, twice in a register.
pub(super) fn emit_constant(a: &mut Asm, half: u16) -> Reg<B32> {
    let constant = a.reg();
    a.mov_b32(constant, u32::from(half) << 16 | u32::from(half));
    constant
}

/// Emits `(moved & magnitude) | (signs & 0x80008000)`: a float from the bits below its sign and a word whose top bits
/// are the signs.
pub(super) fn emit_float(
    a: &mut Asm,
    moved: Reg<B32>,
    magnitude: u32,
    signs: Reg<B32>,
) -> Reg<B32> {
    let [sign, value] = a.regs();
    a.and_b32(sign, signs, 0x8000_8000u32);
    a.lop3_b32(value, moved, magnitude, sign, AND_OR);
    value
}

/// Emits a shift to the left, or to the right if negative, or nothing.
pub(super) fn emit_shift(a: &mut Asm, word: Reg<B32>, left: i32) -> Reg<B32> {
    if left == 0 {
        return word;
    }
    let moved = a.reg();
    match left {
        1.. => a.shl_b32(moved, word, left.unsigned_abs()),
        _ => a.shr_u32(moved, word, left.unsigned_abs()),
    }
    moved
}

/// Emits bf16 values times a constant, exactly if the constant is a power of two.
pub(super) fn emit_times_bf16(a: &mut Asm, value: Reg<B32>, factor: [Reg<B32>; 2]) -> Reg<B32> {
    let product = a.reg();
    a.fma_rn_bf16x2(product, value, factor[0], factor[1]);
    product
}

/// The constants of [`emit_times_bf16`] for a factor of `2^exponent`.
pub(super) fn emit_power_bf16(a: &mut Asm, exponent: u16) -> Vec<Reg<B32>> {
    let power = emit_constant(a, (127 + exponent) << 7);
    let zeros = a.reg();
    a.mov_b32(zeros, NEGATIVE_ZEROS);
    vec![power, zeros]
}
