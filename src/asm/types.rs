//! Register classes, state spaces, scopes and the tuning modifiers of PTX.
//!
//! A class is a PTX register type as the declaration `.reg .b32 %r<n>` knows it. Signedness belongs to
//! the instruction and not to the register, as in PTX, so u32, s32 and b32 values share class `B32`;
//! floats keep a class of their own because PTX refuses to mix `.f32` with integer instructions.
//! Source: PTX ISA, "State Spaces, Types, and Variables" and "Memory Consistency Model" (scopes).

use std::fmt;

/// The class of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// One bit, `.pred`.
    Pred,
    /// 16 bits, `.b16`: integers and fp16/bf16 scalars.
    B16,
    /// 32 bits, `.b32`: integers, shared-memory addresses, packed halves.
    B32,
    /// 64 bits, `.b64`: integers and global addresses.
    B64,
    /// A single-precision float, `.f32`.
    F32,
}

impl Class {
    /// All classes, in declaration order of the printed text.
    pub const ALL: [Class; 5] = [Class::Pred, Class::B16, Class::B32, Class::B64, Class::F32];

    /// The type in a `.reg` declaration.
    pub const fn ptx_type(self) -> &'static str {
        match self {
            Class::Pred => "pred",
            Class::B16 => "b16",
            Class::B32 => "b32",
            Class::B64 => "b64",
            Class::F32 => "f32",
        }
    }

    /// The letters between `%` and the register's number.
    pub const fn prefix(self) -> &'static str {
        match self {
            Class::Pred => "p",
            Class::B16 => "h",
            Class::B32 => "r",
            Class::B64 => "d",
            Class::F32 => "f",
        }
    }
}

/// A register class as a type, so that a register of the wrong class is a type error at the call.
pub trait RegClass: Copy + fmt::Debug + PartialEq + Eq + 'static {
    /// The class.
    const CLASS: Class;
    /// What a register of this class holds, as the emulator and immediates see it.
    type Value: Copy;
    /// The value's bits, zero-extended.
    fn to_bits(value: Self::Value) -> u64;
    /// The value of these bits.
    fn from_bits(bits: u64) -> Self::Value;
}

macro_rules! classes {
    ($($(#[$doc:meta])* $Name:ident($value:ty) $to:expr, $from:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $Name;
        impl RegClass for $Name {
            const CLASS: Class = Class::$Name;
            type Value = $value;
            fn to_bits(value: $value) -> u64 {
                let to: fn($value) -> u64 = $to;
                to(value)
            }
            fn from_bits(bits: u64) -> $value {
                let from: fn(u64) -> $value = $from;
                from(bits)
            }
        }
    )*};
}

classes! {
    /// Predicates.
    Pred(bool) u64::from, |bits| bits != 0;
    /// 16-bit registers.
    B16(u16) u64::from, |bits| bits as u16;
    /// 32-bit registers.
    B32(u32) u64::from, |bits| bits as u32;
    /// 64-bit registers.
    B64(u64) |value| value, |bits| bits;
    /// Single-precision registers.
    F32(f32) |value| u64::from(value.to_bits()), |bits| f32::from_bits(bits as u32);
}

/// A state space that loads and stores name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory.
    Global,
    /// The CTA's shared memory; addresses are 32-bit offsets into the shared window.
    Shared,
}

/// How a memory access takes part in the memory consistency model.
/// Source: PTX ISA, "Memory Consistency Model".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// No synchronisation: two conflicting weak accesses without happens-before are a data race.
    Weak,
    /// Atomic at GPU scope, no ordering of other accesses.
    RelaxedGpu,
    /// Atomic at GPU scope; what the releasing thread did before is visible afterwards.
    AcquireGpu,
    /// Atomic at GPU scope; publishes what this thread has seen and done.
    ReleaseGpu,
    /// Both acquire and release.
    AcqRelGpu,
}

/// Who executes an instruction together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Each active lane for itself.
    Lane,
    /// The warp together (`.sync.aligned`): all its live lanes must be active.
    Warp,
    /// Warps of the CTA meet.
    Cta,
}

/// A comparison operator of `setp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

impl Cmp {
    /// All of them.
    pub const ALL: [Cmp; 6] = [Cmp::Eq, Cmp::Ne, Cmp::Lt, Cmp::Le, Cmp::Gt, Cmp::Ge];

    /// Whether `a cmp b` holds.
    pub fn holds<T: PartialOrd>(self, a: T, b: T) -> bool {
        match self {
            Cmp::Eq => a == b,
            Cmp::Ne => a != b,
            Cmp::Lt => a < b,
            Cmp::Le => a <= b,
            Cmp::Gt => a > b,
            Cmp::Ge => a >= b,
        }
    }
}

impl fmt::Display for Cmp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cmp::Eq => "eq",
            Cmp::Ne => "ne",
            Cmp::Lt => "lt",
            Cmp::Le => "le",
            Cmp::Gt => "gt",
            Cmp::Ge => "ge",
        })
    }
}

/// A special register. Source: PTX ISA, "Special Registers".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Special {
    TidX,
    NtidX,
    CtaidX,
    CtaidY,
    NctaidX,
    NctaidY,
    Laneid,
    ClusterCtarank,
}

impl Special {
    /// All of them.
    pub const ALL: [Special; 8] = [
        Special::TidX,
        Special::NtidX,
        Special::CtaidX,
        Special::CtaidY,
        Special::NctaidX,
        Special::NctaidY,
        Special::Laneid,
        Special::ClusterCtarank,
    ];
}

impl fmt::Display for Special {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Special::TidX => "%tid.x",
            Special::NtidX => "%ntid.x",
            Special::CtaidX => "%ctaid.x",
            Special::CtaidY => "%ctaid.y",
            Special::NctaidX => "%nctaid.x",
            Special::NctaidY => "%nctaid.y",
            Special::Laneid => "%laneid",
            Special::ClusterCtarank => "%cluster_ctarank",
        })
    }
}
