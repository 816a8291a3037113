//! The entry parameters of a GEMM kernel, and what a kernel needs to read them.
//!
//! One list declares the parameters to the assembler and gives the host the struct that fills them, so
//! their order exists once. Division by a parameter goes through a multiplier that the host computes:
//! integer division by a run-time value would cost hundreds of clocks before the first copy.
//! Source of the multipliers: Granlund and Montgomery, "Division by Invariant Integers using Multiplication".

use super::experts::{Block, ExpertArguments, ExpertParams};
use super::problem::Kind;
use crate::asm::Asm;
use crate::asm::reg::{Param, Reg};
use crate::asm::types::{B32, B64, F32};
use crate::backend::{Arg, ArgList};

/// Declares the entry parameters. The host fills them in the same order: see [`super::Arguments`].
macro_rules! params {
    ($($(#[$doc:meta])* $name:ident: $width:ident),* $(,)?) => {
        /// The entry parameters of a GEMM kernel.
        #[derive(Clone, Copy, Debug)]
        pub struct Params {
            $($(#[$doc])* pub $name: Param,)*
            /// What only some kinds of products take.
            pub optional: OptionalParams,
        }

        impl Params {
            /// Declares those of a kind of products, in order.
            pub fn declare(a: &mut Asm, kind: &Kind) -> Self {
                Self {
                    $($name: a.$width(stringify!($name)),)*
                    optional: OptionalParams::declare(a, kind),
                }
            }
        }

        /// The values of the entry parameters of a GEMM kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Arguments {
            $($(#[$doc])* pub $name: params!(@type $width),)*
            /// What only some kinds of products take.
            pub optional: OptionalArguments,
        }

        impl Arguments {
            /// The kernel arguments of a kind of products, in the order of the entry's parameters.
            pub fn list(&self, kind: &Kind) -> ArgList {
                let mut list = ArgList::new(&[$(params!(@arg $width self.$name)),*]);
                self.optional.append(kind, &mut list);
                list
            }
        }
    };
    (@type param_u64) => { u64 };
    (@type param_u32) => { u32 };
    (@arg param_u64 $value:expr) => { Arg::U64($value) };
    (@arg param_u32 $value:expr) => { Arg::U32($value) };
}

params! {
    /// Activations `[m][k]`.
    a_ptr: param_u64,
    /// Packed weights.
    b_ptr: param_u64,
    /// Output `[m][n]`.
    c_ptr: param_u64,
    /// Per-column scales, fp16 `[n_padded]`; unused with grouped scales.
    column_scales_ptr: param_u64,
    /// Partial sums, one slot of `tile_m * tile_n` floats per CTA.
    scratch_ptr: param_u64,
    /// One lock word per output tile.
    locks_ptr: param_u64,
    /// Rows of A and C.
    m: param_u32,
    /// Columns of C.
    n: param_u32,
    /// Columns of A.
    k: param_u32,
    /// Bytes from one row of A to the next.
    a_stride_bytes: param_u32,
    /// Bytes from one row of C to the next.
    c_stride_bytes: param_u32,
    /// Groups of 64 columns in the packed weights.
    num_chunk_columns: param_u32,
    /// Runs of 128 inputs in the packed weights.
    k_tiles: param_u32,
    /// Runs of 128 inputs in all tiles together.
    num_runs: param_u32,
    /// Runs of 128 inputs per stripe.
    stripe: param_u32,
    /// Division by `k_tiles`: see [`magic`].
    k_tiles_magic: param_u32,
    /// Its shift.
    k_tiles_shift: param_u32,
    /// Division by `stripe`.
    stripe_magic: param_u32,
    /// Its shift.
    stripe_shift: param_u32,
}

/// The entry parameters of what a [`Kind`] has beside the product; the host fills them in the same order.
#[derive(Clone, Copy, Debug)]
pub struct OptionalParams {
    /// What the product is multiplied by: the bits of an f32; with experts the address of one of each.
    pub factor: Option<Param>,
    /// A number for each column of C, of C's type; with experts for each column of each.
    pub bias_ptr: Option<Param>,
    /// A matrix of C's shape and type, and the bytes from one row of it to the next.
    pub residual: Option<(Param, Param)>,
    /// Which expert each row belongs to.
    pub experts: Option<ExpertParams>,
}

/// The values of [`OptionalParams`]; those of others than the kind has are not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptionalArguments {
    /// The bits of the factor.
    pub factor_bits: u32,
    /// Address of the experts' factors.
    pub factors_ptr: u64,
    /// Address of the bias.
    pub bias_ptr: u64,
    /// Address of the residual.
    pub residual_ptr: u64,
    /// Bytes from one row of it to the next.
    pub residual_stride_bytes: u32,
    /// Which expert each row belongs to.
    pub experts: ExpertArguments,
}

impl OptionalParams {
    fn declare(a: &mut Asm, kind: &Kind) -> Self {
        Self {
            factor: kind.factor.then(|| match kind.experts {
                false => a.param_u32("factor_bits"),
                true => a.param_u64("factors_ptr"),
            }),
            bias_ptr: kind.bias.then(|| a.param_u64("bias_ptr")),
            residual: kind
                .residual
                .then(|| (a.param_u64("residual_ptr"), a.param_u32("residual_stride_bytes"))),
            experts: kind.experts.then(|| ExpertParams::declare(a)),
        }
    }

    /// Emits the factor, if there is one; that of a row block's expert.
    pub(super) fn emit_factor(&self, a: &mut Asm, block: Option<&Block>) -> Option<Reg<F32>> {
        self.factor.map(|param| {
            let (bits, factor) = match block {
                None => (load_u32(a, param), a.reg()),
                Some(block) => {
                    let (base, at, bits): (_, Reg<B64>, _) = (load_u64(a, param), a.reg(), a.reg());
                    a.mad_wide_u32(at, block.expert, 4, base);
                    a.ld_global_b32(bits, at);
                    (bits, a.reg())
                }
            };
            a.mov_b32_to_f32(factor, bits);
            factor
        })
    }
}

impl OptionalArguments {
    fn append(&self, kind: &Kind, list: &mut ArgList) {
        if kind.factor {
            list.push(match kind.experts {
                false => Arg::U32(self.factor_bits),
                true => Arg::U64(self.factors_ptr),
            });
        }
        if kind.bias {
            list.push(Arg::U64(self.bias_ptr));
        }
        if kind.residual {
            list.push(Arg::U64(self.residual_ptr));
            list.push(Arg::U32(self.residual_stride_bytes));
        }
        if kind.experts {
            self.experts.append(list);
        }
    }
}

impl Params {
    /// Emits the address of what begins at `base` for the expert of a row block; `base` without one.
    pub(super) fn emit_base(&self, a: &mut Asm, base: Reg<B64>, block: Option<&Block>) -> Reg<B64> {
        match (self.optional.experts, block) {
            (Some(experts), Some(block)) => experts.emit_base(a, base, block),
            _ => base,
        }
    }
}

/// Multiplier and shift with `x / d == mulhi(2 * x, multiplier) >> shift` for `x < 2^31`.
///
/// With `shift = ceil(log2 d)` and `multiplier = ceil(2^(31 + shift) / d)`, which lies in `[2^31, 2^32)`, the
/// multiplier is too large by less than `d <= 2^shift` parts in `2^(31 + shift)`: too little to carry a
/// quotient of `x < 2^31` to the next integer.
pub fn magic(d: u32) -> (u32, u32) {
    let shift = d.next_power_of_two().ilog2();
    let multiplier = (1u64 << (31 + shift)).div_ceil(u64::from(d));
    (multiplier as u32, shift)
}

/// Emits `x / d` for a divisor whose [`magic`] is in `multiplier` and `shift`.
pub fn emit_div(a: &mut Asm, x: Reg<B32>, multiplier: Reg<B32>, shift: Reg<B32>) -> Reg<B32> {
    let [twice, high, quotient] = a.regs();
    a.add_u32(twice, x, x);
    a.mul_hi_u32(high, twice, multiplier);
    a.shr_u32(quotient, high, shift);
    quotient
}

/// A 32-bit entry parameter in a register.
pub fn load_u32(a: &mut Asm, param: Param) -> Reg<B32> {
    let reg = a.reg();
    a.ld_param_u32(reg, param);
    reg
}

/// A 64-bit entry parameter in a register.
pub fn load_u64(a: &mut Asm, param: Param) -> Reg<B64> {
    let reg = a.reg();
    a.ld_param_u64(reg, param);
    reg
}
