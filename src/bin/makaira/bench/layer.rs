//! Shapes, a random quantised layer and random activations.
//!
//! Codes are random words in GPTQ's order and scales random fp16 numbers, so that making a layer costs no
//! more than writing it, at any size.

use anyhow::Context as _;
use half::f16;
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::{
    Codes, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4B8, default_threads,
};

/// A stream of 64-bit random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Which layer: a name for the table and its sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The name, or `NxK`.
    pub name: String,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
}

/// The linear layers of two models, by name: outputs, inputs.
const LAYERS: [(&str, usize, usize); 8] = [
    ("8b_qkv", 6144, 4096),
    ("8b_o", 4096, 4096),
    ("8b_gateup", 28672, 4096),
    ("8b_down", 4096, 14336),
    ("70b_qkv", 10240, 8192),
    ("70b_o", 8192, 8192),
    ("70b_gateup", 57344, 8192),
    ("70b_down", 8192, 28672),
];

impl Shape {
    /// The layers of the comparison.
    pub fn all() -> Vec<Self> {
        LAYERS.map(|(name, n, k)| Self { name: name.to_owned(), n, k }).to_vec()
    }

    /// How rows of exactly `n` and `k` elements can be accessed.
    pub fn rows(&self) -> Rows {
        Rows::of(self.n, self.k)
    }

    /// The product of `m` rows with this layer.
    pub fn problem(&self, m: u64, group: Group) -> Problem {
        Problem {
            kind: Kind::U4B8,
            m,
            n: self.n as u32,
            k: self.k as u32,
            group,
            rows: self.rows(),
        }
    }
}

impl std::str::FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(shape) = Self::all().into_iter().find(|shape| shape.name == text) {
            return Ok(shape);
        }
        let sizes = text.split_once('x').and_then(|(n, k)| {
            let (n, k) = (n.parse().ok()?, k.parse().ok()?);
            (n > 0 && k > 0).then_some((n, k))
        });
        let (n, k) = sizes.ok_or_else(|| {
            let names = LAYERS.map(|(name, ..)| name).join(", ");
            format!(
                "`{text}` is no shape; write outputs x inputs like 4096x14336, or one of {names}"
            )
        })?;
        Ok(Self { name: text.to_owned(), n, k })
    }
}

/// A random layer in GPTQ's order.
pub struct Layer {
    n: usize,
    k: usize,
    group: Group,
    /// `[K/8 rounded up][N]`: nibble i of word (r, n) is the code of input 8 r + i.
    words: Vec<u32>,
    /// `[groups][N]`.
    scales: Vec<f16>,
}

impl Layer {
    /// A layer of `shape` with random codes and scales of 0.005 to 0.015.
    pub fn random(shape: &Shape, group: Group, seed: u64) -> Self {
        let (n, k) = (shape.n, shape.k);
        let mut words = vec![0u32; k.div_ceil(8) * n];
        fill(&mut words, seed, |random, word| *word = random.next() as u32);
        let mut random = Random(!seed);
        let scale = |_| f16::from_f64(0.005 + 0.01 * random.unit());
        let scales = (0..group.num_groups(k) * n).map(scale).collect();
        Self { n, k, group, words, scales }
    }

    fn code(&self, k: usize, n: usize) -> u8 {
        (self.words[k / 8 * self.n + n] >> (4 * (k % 8)) & 0xf) as u8
    }

    /// Outputs and inputs.
    pub fn sizes(&self) -> (usize, usize) {
        (self.n, self.k)
    }

    /// The weights of one output, `[K]`, exact.
    pub fn column(&self, n: usize) -> Vec<f64> {
        let weight = |k: usize| {
            let scale = self.scales[self.group.index_of(k) * self.n + n];
            (f64::from(self.code(k, n)) - 8.0) * scale.to_f64()
        };
        (0..self.k).map(weight).collect()
    }

    /// The layer in the packed layout.
    ///
    /// # Errors
    /// If the group does not divide K.
    pub fn pack(&self) -> anyhow::Result<PackedWeights> {
        let bytes = bytemuck::cast_slice(&self.scales);
        let scales = Scales::f16(bytes, ScaleOrder::Rows);
        // GPTQ's order has whole words only; other sizes go one code a byte.
        let bytes: Vec<u8>;
        let codes = if self.k.is_multiple_of(8) {
            Codes::GptqWords(bytemuck::cast_slice(&self.words))
        } else {
            bytes = (0..self.k * self.n).map(|i| self.code(i / self.n, i % self.n)).collect();
            Codes::ByInput(&bytes)
        };
        let matrix = QuantMatrix::new(self.n, self.k, self.group, &U4B8, codes, scales)?;
        PackedWeights::pack(&matrix, default_threads()).context("packing the random layer")
    }
}

/// Random activations `[m][K]` in `-1.0..1.0`.
pub fn random_activations(m: usize, k: usize, seed: u64) -> Vec<f16> {
    let mut activations = vec![f16::ZERO; m * k];
    fill(&mut activations, seed, |random, value| {
        *value = f16::from_f32(2.0 * random.unit() as f32 - 1.0);
    });
    activations
}

/// Fills `items` with random ones on all cores; the result does not depend on their number.
fn fill<T: Send>(items: &mut [T], seed: u64, one: impl Fn(&mut Random, &mut T) + Sync) {
    let mut parts: Vec<(usize, &mut [T])> = items.chunks_mut(1 << 16).enumerate().collect();
    let per_thread = parts.len().div_ceil(default_threads()).max(1);
    std::thread::scope(|scope| {
        for parts in parts.chunks_mut(per_thread) {
            let one = &one;
            scope.spawn(move || {
                for (idx, part) in parts {
                    let mut random = Random(seed ^ (*idx as u64 + 1) << 40);
                    part.iter_mut().for_each(|item| one(&mut random, item));
                }
            });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_parse_by_name_and_by_size() {
        assert_eq!("8b_down".parse::<Shape>().map(|s| (s.n, s.k)), Ok((4096, 14336)));
        assert_eq!("70x130".parse::<Shape>().map(|s| (s.n, s.k)), Ok((70, 130)));
        for text in ["8b", "0x4", "4x", "4x4x4", "-1x4"] {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
    }
}
