//! The types of activations and outputs, as a comparison wants to know them.

use half::{bf16, f16};

/// How a type rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    /// Half a unit in the last place, relative.
    pub half_ulp: f64,
    /// Half of the smallest subnormal.
    pub half_subnormal: f64,
    /// From here on numbers round to an infinity.
    pub overflow: f64,
}

/// fp16 or bf16.
pub trait Element: Copy + Send + Sync {
    /// How it rounds.
    const ROUNDING: Rounding;

    /// The exact value.
    fn value(self) -> f64;
}

impl Element for f16 {
    const ROUNDING: Rounding =
        Rounding { half_ulp: 1.0 / 2048.0, half_subnormal: 1.0 / 33_554_432.0, overflow: 65520.0 };

    fn value(self) -> f64 {
        self.to_f64()
    }
}

impl Element for bf16 {
    /// 2^-8, 2^-134, and 2^127 (2 - 2^-8).
    const ROUNDING: Rounding = Rounding {
        half_ulp: 1.0 / 256.0,
        half_subnormal: f64::from_bits((1023 - 134) << 52),
        overflow: f64::from_bits((1023 + 127) << 52 | 0xff << 44),
    };

    fn value(self) -> f64 {
        self.to_f64()
    }
}
