//! Shapes, a random quantised layer and random activations.
//!
//! Codes are random words in GPTQ's order, so that making a layer costs no more than writing it, at any size. Scales
//! make the weights of every type about as large.

use anyhow::Context as _;
use half::{bf16, f16};
use makaira::kernel::{Kind, Problem, Rows};
use makaira::layout::{bf16_from_f64, f16_from_f64};
use makaira::weights::{
    Activation, Codes, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder, ScaleType,
    Scales, WeightFormat, ZeroOrder, ZeroRule, Zeros, default_threads,
};

use crate::problem::WeightType;

/// The root of the mean square of all weights: that of u4b8 codes with scales around 0.01.
const WEIGHT_RMS: f64 = 0.046;

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
    pub fn problem(&self, kind: Kind, m: u64, group: Group) -> Problem {
        Problem { kind, m, n: self.n as u32, k: self.k as u32, group, rows: self.rows() }
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

/// A random layer as a checkpoint would hold it.
pub struct Layer {
    n: usize,
    k: usize,
    group: Group,
    weight: WeightType,
    /// GPTQ's words, `[K/p][N]` with p codes each; one code a byte, `[K][N]`, where K is no multiple of p.
    codes: Vec<u32>,
    /// `[groups][N]`.
    scales: Vec<u8>,
    /// `[groups][N]`, of a type that stores zeros.
    zeros: Option<Vec<u8>>,
    /// The factor of all scales.
    global: f32,
}

impl Layer {
    /// A layer of `shape` with random codes, scales and zeros.
    pub fn random(shape: &Shape, weight: WeightType, group: Group, seed: u64) -> Self {
        let (n, k, format) = (shape.n, shape.k, weight.format);
        let per_word =
            if k.is_multiple_of(format.codes_per_word()) { format.codes_per_word() } else { 4 };
        let field_bits = if per_word == 4 { 8 } else { 4 };
        let field_mask = u32::MAX / ((1 << field_bits) - 1) * (format.num_codes() as u32 - 1);
        let is_nan: Vec<bool> =
            (0..format.num_codes()).map(|code| format.decode(code as u8).is_nan()).collect();
        let has_nan = is_nan.contains(&true);
        let mut codes = vec![0u32; (k * n).div_ceil(per_word)];
        fill(&mut codes, seed, |random, word| {
            *word = random.next() as u32 & field_mask;
            if has_nan {
                // The code beside a NaN is a number.
                let number = |byte: u8| byte ^ u8::from(is_nan[usize::from(byte)]);
                *word = u32::from_le_bytes(word.to_le_bytes().map(number));
            }
            *word = word.to_le();
        });
        let mut random = Random(!seed);
        let num_scales = group.num_groups(k) * n;
        let stored = format.zero_rule() == ZeroRule::Stored;
        let scale_rms = WEIGHT_RMS / code_rms(format, u8::MAX);
        // Elements of one byte are small beside the factor, or powers of two.
        let global = if weight.has_global_scale() { scale_rms as f32 } else { 1.0 };
        let scales = (0..num_scales).flat_map(|_| random_scale(weight, scale_rms, &mut random));
        let scales = scales.collect();
        let mut zero = |_| (random.next() as usize % format.num_codes()) as u8;
        let zeros = stored.then(|| (0..num_scales).map(&mut zero).collect());
        Self { n, k, group, weight, codes, scales, zeros, global }
    }

    /// The layer as a source of weights: what they are worth is read from it, not from the packed ones.
    ///
    /// # Errors
    /// Those of [`QuantMatrix::from_parts`].
    pub fn matrix(&self) -> anyhow::Result<QuantMatrix<'_>> {
        let Self { n, k, group, weight, global, .. } = *self;
        let bytes: &[u8] = bytemuck::cast_slice(&self.codes);
        let codes = match k.is_multiple_of(weight.format.codes_per_word()) {
            true => Codes::GptqWords(bytes),
            false => Codes::ByInput(&bytes[..k * n]),
        };
        let (bytes, element) = (&self.scales, weight.scales);
        let scales = Scales { bytes, element, order: ScaleOrder::Rows, global };
        let zeros = self.zeros.as_deref().map(|bytes| Zeros { bytes, order: ZeroOrder::Rows });
        let (format, g_idx) = (weight.format, None);
        let parts = MatrixParts { n, k, group, format, codes, scales, zeros, g_idx };
        QuantMatrix::from_parts(parts).context("the random layer")
    }

    /// The layer in the packed layout.
    ///
    /// # Errors
    /// If the group does not divide K.
    pub fn pack(&self) -> anyhow::Result<PackedWeights> {
        PackedWeights::pack(&self.matrix()?, default_threads()).context("packing the random layer")
    }
}

/// The root of the mean square of a type's codes less their zeros, all as frequent that are within a mask.
pub fn code_rms(format: &dyn WeightFormat, mask: u8) -> f64 {
    let codes = (0..format.num_codes()).map(|code| code as u8).filter(|code| code & !mask == 0);
    let values = codes.map(|code| f64::from(format.decode(code)));
    let values: Vec<f64> = values.filter(|value| !value.is_nan()).collect();
    let squares = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
    match format.zero_rule() {
        ZeroRule::Bias(_) | ZeroRule::Float => squares.sqrt(),
        // Of the difference of two codes: twice the variance.
        ZeroRule::Stored => {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            (2.0 * (squares - mean * mean)).sqrt()
        }
    }
}

/// The bytes of a scale of about `size`, less the global factor if the type has one.
fn random_scale(weight: WeightType, size: f64, random: &mut Random) -> Vec<u8> {
    match weight.scales {
        ScaleType::F16 => f16_from_f64(size * (0.5 + random.unit())).to_le_bytes().to_vec(),
        ScaleType::BF16 => bf16_from_f64(size * (0.5 + random.unit())).to_le_bytes().to_vec(),
        ScaleType::F32 => ((size * (0.5 + random.unit())) as f32).to_le_bytes().to_vec(),
        // 0.25 to 1.875.
        ScaleType::E4M3 => vec![0x28 + (random.next() % 24) as u8],
        // Four powers of two.
        ScaleType::E8M0 => vec![(127.0 + size.log2()) as u8 - 1 + (random.next() % 4) as u8],
    }
}

/// The bits of a number rounded to a type of activations.
pub fn round(activation: Activation, value: f64) -> u16 {
    match activation {
        Activation::F16 => f16_from_f64(value).to_bits(),
        Activation::Bf16 => bf16_from_f64(value).to_bits(),
    }
}

/// The number that bits of a type of activations are.
pub fn number(activation: Activation, bits: u16) -> f64 {
    match activation {
        Activation::F16 => f16::from_bits(bits).to_f64(),
        Activation::Bf16 => bf16::from_bits(bits).to_f64(),
    }
}

/// Random activations `[m][K]` in `-1.0..1.0`, as bits.
pub fn random_activations(activation: Activation, m: usize, k: usize, seed: u64) -> Vec<u16> {
    let mut activations = vec![0; m * k];
    fill(&mut activations, seed, |random, bits| {
        *bits = round(activation, 2.0 * random.unit() - 1.0);
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
    use std::sync::Arc;

    use makaira::emu::EmuBackend;
    use makaira::gemm::Gemm;
    use makaira::reference;

    use super::*;

    #[test]
    fn shapes_parse_by_name_and_by_size() {
        assert_eq!("8b_down".parse::<Shape>().map(|s| (s.n, s.k)), Ok((4096, 14336)));
        assert_eq!("70x130".parse::<Shape>().map(|s| (s.n, s.k)), Ok((70, 130)));
        for text in ["8b", "0x4", "4x", "4x4x4", "-1x4"] {
            assert!(text.parse::<Shape>().is_err(), "{text}");
        }
    }

    /// Every type's random layer becomes what problems of the type are about, with weights of the promised size.
    #[test]
    fn random_layers_are_of_their_kind_and_of_one_size() {
        let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(1)));
        let mut checked = 0;
        for weight in WeightType::all() {
            for (n, k, group) in [(70, 384, 16), (70, 384, 32), (64, 384, 128), (64, 393, -1)] {
                let is_fixed = !matches!(weight.scales, ScaleType::F16);
                let bytes = if weight.has_global_scale() { 16 } else { 32 };
                if is_fixed && group != bytes {
                    continue;
                }
                let shape = Shape { name: String::new(), n, k };
                let group = Group::new(k, group).expect("legal");
                let layer = Layer::random(&shape, weight, group, 7 + checked);
                let matrix = layer.matrix().expect("legal");
                let weights = reference::decode(&matrix);
                let squares: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
                let rms = (squares / weights.len() as f64).sqrt();
                assert!((0.3..3.0).contains(&(rms / WEIGHT_RMS)), "{weight}: {rms}");
                let packed = layer.pack().expect("packs");
                for activation in [Activation::F16, Activation::Bf16] {
                    let uploaded = gemm.upload(&packed).expect("fits").with_activation(activation);
                    assert_eq!(uploaded.kind(), weight.kind(activation), "{weight} {group}");
                }
                checked += 1;
            }
        }
        assert_eq!(checked, 4 * 6 + 2);
    }
}
