//! Inputs to ask with: repeatable random numbers, none of them zero.

use half::f16;

use crate::layout::f16_from_f64;

/// A repeatable stream of numbers: SplitMix64, whose every seed is a good one.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed that differs from call to call.
    pub fn fresh_seed() -> u64 {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(0) >> 32
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// `count` activations between -1 and 1, none of them smaller than 1/256: none is zero.
    pub fn activations(&mut self, count: usize) -> Vec<f16> {
        let value = |random: &mut Self| {
            let magnitude = random.uniform(1.0 / 256.0, 1.0);
            if random.bits() >> 63 == 0 { magnitude } else { -magnitude }
        };
        (0..count).map(|_| f16_from_f64(value(self))).collect()
    }
}
