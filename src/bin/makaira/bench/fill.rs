//! Random packed weights, made where they are needed: on the device, by a kernel of our assembler.
//!
//! Word i of a weight is a hash of i and the weight's seed, so that tens of gigabytes, no two weights alike,
//! are made at the rate of the memory and any word can be computed again on the host. Code words are the
//! hash itself, less a bit of each code where the type has codes that are no numbers. Of scales and zeros some bits
//! come from the hash. fp16 scales have random signs, so that codes whose mean is not zero do not add up to a common
//! direction of all outputs. The smallest scale, or for floats the weight's factor, keeps the mean square of a product
//! that of its input, so that numbers stay in range through any number of layers.

use std::sync::Arc;

use half::f16;
use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Backend, DevicePtr, Error, Kernel, Launch, Stream};
use makaira::target::SmArch;
use makaira::weights::{Fragments, PackedLayout, ScaleRow, ScaleType, ZeroRule};

use super::layer::code_rms;
use crate::problem::WeightType;

const CTAS_PER_SM: u32 = 16;
const UNIT_BYTES: u32 = 16;
/// Numbers of words from one tile to the next; the largest tile, of 8-bit codes with 8 rows of scales and zeros, has
/// 640.
const TILE_WORDS: u32 = 1024;
/// Bits of a hash that an fp16 scale takes: its sign and the low eight.
const HALF_MASK: u16 = 0x80ff;

/// The finaliser of MurmurHash3: every bit of the result depends on every bit of `word`.
fn mix(word: u32) -> u32 {
    let word = (word ^ word >> 16).wrapping_mul(0x85eb_ca6b);
    let word = (word ^ word >> 13).wrapping_mul(0xc2b2_ae35);
    word ^ word >> 16
}

fn twice(half: u16) -> u32 {
    u32::from(half) << 16 | u32::from(half)
}

/// What the words of a type's weights take from their hash, and what is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Masks {
    codes: u32,
    scales: u32,
    zeros: u32,
    zero_base: u32,
}

/// The bits of a code that may be set without its being a NaN.
fn code_mask(weight: WeightType) -> u8 {
    let format = weight.format;
    let has_nan = (0..format.num_codes()).any(|code| format.decode(code as u8).is_nan());
    if has_nan { 0xfe } else { 0xff }
}

fn fragments(weight: WeightType) -> &'static dyn Fragments {
    weight.format.fragments().expect("every type has a conversion")
}

impl Masks {
    fn of(weight: WeightType) -> Self {
        let scales = match weight.scales {
            ScaleType::F16 | ScaleType::BF16 | ScaleType::F32 => twice(HALF_MASK),
            // Mantissa and an exponent bit of e5m3; two exponent bits.
            ScaleType::E4M3 => 0x0f0f_0f0f,
            ScaleType::E8M0 => 0x1818_1818,
        };
        let (mut zeros, mut zero_base) = (0, 0);
        if let Some(bases) = fragments(weight).zero_bases() {
            // The numbers from the base to the base plus the largest zero differ in these bits only.
            let largest = (weight.format.num_codes() - 1) as f32;
            let bits = |number: f32| u32::from(f16::from_f32(number).to_bits());
            let [low, high] = bases.f16;
            zero_base = bits(low) | bits(high) << 16;
            zeros = zero_base ^ (bits(low + largest) | bits(high + largest) << 16);
        }
        let codes = fragments(weight).arrange(u32::from_ne_bytes([code_mask(weight); 4]));
        Self { codes, scales, zeros, zero_base }
    }
}

/// What a weight is filled with.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u32,
    weight: WeightType,
    masks: Masks,
    /// The smallest scales, as bits of a word of them.
    scale_base: u32,
    factor: f32,
}

impl Pattern {
    /// Weights of `k` inputs whose products are about as large as their inputs.
    pub fn new(seed: u32, weight: WeightType, k: usize) -> Self {
        let wanted = 1.0 / (code_rms(weight.format, code_mask(weight)).powi(2) * k as f64);
        let half_square = |scale: u16| {
            let squares = (scale..scale + 256).map(|bits| f16::from_bits(bits).to_f64().powi(2));
            squares.sum::<f64>() / 256.0
        };
        let masks = Masks::of(weight);
        let (scale_base, square) = match (weight.scales, weight.format.zero_rule()) {
            (ScaleType::E4M3 | ScaleType::E8M0, _) => {
                // 2^7, and what the mask adds to it: far from both ends of what fp16 fragments can be.
                const BASE: u8 = 22 << 3;
                let added =
                    (0..=u8::MAX).filter(|byte| u32::from(*byte) & !masks.scales & 0xff == 0);
                let squares: Vec<f64> =
                    added.map(|byte| half_of_byte(BASE + byte).powi(2)).collect();
                let mean = squares.iter().sum::<f64>() / squares.len() as f64;
                (u32::from_ne_bytes([BASE; 4]), mean)
            }
            // 2^8: likewise.
            (_, ZeroRule::Float) => (twice(0x5c00), half_square(0x5c00)),
            (_, ZeroRule::Bias(_) | ZeroRule::Stored) => {
                // Both ends are far from any layer's scale: 6e-8 and 0.5.
                let (mut low, mut high) = (1, 0x3800);
                while low + 1 < high {
                    let middle = (low + high) / 2;
                    if half_square(middle) < wanted { low = middle } else { high = middle }
                }
                (twice(low), wanted)
            }
        };
        let factor = (wanted / square).sqrt() as f32;
        Self { seed, weight, masks, scale_base, factor }
    }

    /// What every weight is multiplied by beside its scale.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    fn word(&self, layout: &PackedLayout, tile: u32, word: u32) -> u32 {
        let hash = mix((tile * TILE_WORDS + word).wrapping_add(self.seed));
        let byte = 4 * word as usize;
        if byte < layout.kind.code_bytes() {
            hash & self.masks.codes
        } else if byte < layout.kind.zeros_offset(layout.group) {
            (hash & self.masks.scales).wrapping_add(self.scale_base)
        } else {
            (hash & self.masks.zeros) + self.masks.zero_base
        }
    }

    /// The weights of one output, `[K]`, exact.
    pub fn column(&self, layout: &PackedLayout, n: usize) -> Vec<f64> {
        let format = self.weight.format;
        let word_at = |byte: usize| {
            let (tile, in_tile) = (byte / layout.tile_bytes, byte % layout.tile_bytes);
            self.word(layout, tile as u32, in_tile as u32 / 4)
        };
        let half_at = |byte: usize| f16::from_bits((word_at(byte) >> (8 * (byte % 4))) as u16);
        let weight = |k: usize| {
            let bit = layout.code_bit(k, n);
            let code = fragments(self.weight).restore(word_at(bit / 8)) >> (bit % 32);
            let value = f64::from(format.decode(code as u8 & (0xff >> (8 - format.bits()))));
            let zero = layout.zero_byte(k, n).map_or(0.0, |byte| {
                let bases = fragments(self.weight).zero_bases().expect("zeros are stored");
                half_at(byte).to_f64() - f64::from(bases.f16[n % 16 / 8])
            });
            let byte = layout.scale_byte(layout.group.index_of(k), n);
            let scale = match layout.kind.scales {
                ScaleRow::F16 => half_at(byte).to_f64(),
                ScaleRow::E5m3 => half_of_byte((word_at(byte) >> (8 * (byte % 4))) as u8),
            };
            (value - zero) * scale * f64::from(self.factor)
        };
        (0..layout.k).map(weight).collect()
    }
}

/// What an e5m3 byte is worth.
fn half_of_byte(byte: u8) -> f64 {
    f16::from_bits(u16::from(byte) << 7).to_f64()
}

/// The kernel that fills weights.
pub struct Filler {
    kernel: Arc<dyn Kernel>,
    tile_bytes: u32,
    num_ctas: u32,
}

impl Filler {
    /// A filler of weights of a type in tiles like those of `layout`, scales among them.
    ///
    /// # Errors
    /// Those of [`Backend::load`].
    pub fn load(
        backend: &dyn Backend,
        weight: WeightType,
        layout: &PackedLayout,
    ) -> Result<Self, Error> {
        let num_ctas = CTAS_PER_SM * backend.device().num_sms;
        let kernel = backend.load(&build(weight, layout, num_ctas, backend.device().arch))?;
        Ok(Self { kernel, tile_bytes: layout.tile_bytes as u32, num_ctas })
    }

    /// Enqueues the filling of a weight.
    ///
    /// # Errors
    /// Those of [`Backend::launch`].
    pub fn fill(
        &self,
        backend: &dyn Backend,
        ptr: DevicePtr,
        layout: &PackedLayout,
        pattern: &Pattern,
        stream: Stream,
    ) -> Result<(), Error> {
        let num_tiles = layout.codes_bytes as u32 / self.tile_bytes;
        let values = [num_tiles, pattern.seed, pattern.scale_base].map(Arg::U32);
        let args = [&[ptr.into()][..], &values].concat();
        backend.launch(&*self.kernel, &Launch::new([self.num_ctas, 1], &args, stream))
    }
}

fn build(weight: WeightType, layout: &PackedLayout, num_ctas: u32, target: SmArch) -> Module {
    let masks = Masks::of(weight);
    let tile_bytes = layout.tile_bytes as u32;
    let num_units = tile_bytes / UNIT_BYTES;
    let code_units = layout.kind.code_bytes() as u32 / UNIT_BYTES;
    let zeros_start = layout.kind.zeros_offset(layout.group) as u32 / UNIT_BYTES;
    assert!(tile_bytes <= 4 * TILE_WORDS, "tiles have numbers of their own");
    let num_threads = num_units.next_multiple_of(32);
    let mut a = Asm::new();
    let data_ptr = a.param_u64("data_ptr");
    let [tiles, seed, scales] = ["num_tiles", "seed", "scales"].map(|name| a.param_u32(name));
    let [tid, tile, num_tiles, first, smallest] = a.regs();
    a.mov_u32_special(tid, Special::TidX);
    a.mov_u32_special(tile, Special::CtaidX);
    a.ld_param_u32(num_tiles, tiles);
    a.ld_param_u32(first, seed);
    a.ld_param_u32(smallest, scales);
    a.mad_lo_u32(first, tid, 4, first);
    let [data, unit_ptr, ptr]: [Reg<B64>; 3] = a.regs();
    a.ld_param_u64(data, data_ptr);
    a.mad_wide_u32(unit_ptr, tid, UNIT_BYTES, data);
    let exists = a.test_u32(Cmp::Lt, tid, num_units);
    let is_code = a.test_u32(Cmp::Lt, tid, code_units);
    let is_scale = (masks.zeros != 0).then(|| a.test_u32(Cmp::Lt, tid, zeros_start));
    let [next, done] = ["next", "done"].map(|name| a.label(name));
    a.section("tiles", |a| {
        a.bind(next);
        let more = a.test_u32(Cmp::Lt, tile, num_tiles);
        a.unless(more, |a| a.bra(done));
        let start = a.reg();
        a.mad_lo_u32(start, tile, TILE_WORDS, first);
        let words: [Reg<B32>; 4] = a.regs();
        for (idx, word) in (0..).zip(words) {
            let [shifted, code, row] = a.regs();
            a.add_u32(word, start, idx);
            for (shift, factor) in [(16, 0x85eb_ca6bu32), (13, 0xc2b2_ae35)] {
                a.shr_u32(shifted, word, shift);
                a.xor_b32(word, word, shifted);
                a.mul_lo_u32(word, word, factor);
            }
            a.shr_u32(shifted, word, 16);
            a.xor_b32(word, word, shifted);
            a.and_b32(code, word, masks.codes);
            a.and_b32(row, word, masks.scales);
            a.add_u32(row, row, smallest);
            if let Some(is_scale) = is_scale {
                let zero = a.reg();
                a.and_b32(zero, word, masks.zeros);
                a.add_u32(zero, zero, masks.zero_base);
                a.selp_b32(row, row, zero, is_scale);
            }
            a.selp_b32(word, code, row, is_code);
        }
        a.mad_wide_u32(ptr, tile, tile_bytes, unit_ptr);
        a.when(exists, |a| a.st_global_v4_b32(ptr, words));
        a.add_u32(tile, tile, num_ctas);
        a.bra(next);
    });
    a.bind(done);
    a.exit();
    let name = format!("fill_{weight}_b{tile_bytes}_g{num_ctas}");
    a.finish(&name, target, num_threads, CTAS_PER_SM.min(1536 / num_threads))
}

#[cfg(test)]
mod tests {
    use makaira::emu::EmuBackend;
    use makaira::weights::{Activation, Group};

    use super::*;

    /// Every type, and the groups that a layer of 256 inputs can have.
    fn layouts() -> Vec<(WeightType, PackedLayout)> {
        let mut layouts = Vec::new();
        for weight in WeightType::all() {
            let sizes = match weight.scales {
                ScaleType::E4M3 => &[16][..],
                ScaleType::E8M0 => &[32],
                _ => &[16, 32, 64, 128],
            };
            for size in sizes {
                let tile = weight.kind(Activation::F16).tile();
                let layout = PackedLayout::of(192, 256, Group::Size(*size), tile).expect("small");
                layouts.push((weight, layout));
            }
        }
        layouts
    }

    #[test]
    fn the_device_writes_what_the_host_computes() {
        let backend = EmuBackend::h200_like(1);
        for (weight, layout) in layouts() {
            let margin = 64;
            let bytes = layout.total_bytes + margin;
            let ptr = backend.alloc(bytes as u64).expect("fits");
            backend.upload(ptr, &vec![0xa5; bytes]).expect("uploads");
            let pattern = Pattern::new(0x1234_5678, weight, 256);
            let filler = Filler::load(&backend, weight, &layout).expect("loads");
            filler.fill(&backend, ptr, &layout, &pattern, Stream::default()).expect("runs");
            let mut found = vec![0; bytes];
            backend.download(ptr, &mut found).expect("downloads");
            let (filled, behind) = found.split_at(layout.total_bytes);
            assert!(behind.iter().all(|byte| *byte == 0xa5));
            let words = filled.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            for (at, word) in words.enumerate() {
                let (tile, idx) = (4 * at / layout.tile_bytes, 4 * at % layout.tile_bytes / 4);
                let wanted = pattern.word(&layout, tile as u32, idx as u32);
                assert_eq!(word, wanted, "{weight} {:?}, word {at}", layout.group);
            }
            backend.free(ptr).expect("ours");
        }
    }

    #[test]
    fn weights_have_the_size_that_keeps_products_in_range() {
        for (weight, layout) in layouts() {
            for k in [256, 4096, 28672] {
                let layout = PackedLayout::of(64, k, layout.group, layout.kind).expect("legal");
                let of = |seed| move |n| Pattern::new(seed, weight, k).column(&layout, n);
                let weights: Vec<f64> = (0..64).flat_map(of(7)).collect();
                let gain = weights.iter().map(|w| w * w).sum::<f64>() / 64.0;
                assert!((0.8..1.25).contains(&gain), "{weight}, {k} inputs: {gain}");
                let negative = weights.iter().filter(|w| **w < 0.0).count() as f64;
                assert!((0.4..0.6).contains(&(negative / weights.len() as f64)), "{negative}");
                assert_ne!(weights, (0..64).flat_map(of(8)).collect::<Vec<f64>>());
            }
        }
    }

    /// Zeros and codes reach every value but NaN.
    #[test]
    fn codes_and_zeros_are_of_their_whole_range() {
        for (weight, layout) in layouts() {
            let pattern = Pattern::new(3, weight, 256);
            let mut codes = vec![0u32; weight.format.num_codes()];
            let mut zeros = std::collections::BTreeSet::new();
            for n in 0..192 {
                for k in 0..256 {
                    let bit = layout.code_bit(k, n);
                    let word = |byte: usize| {
                        let (tile, at) = (byte / layout.tile_bytes, byte % layout.tile_bytes);
                        pattern.word(&layout, tile as u32, at as u32 / 4)
                    };
                    let code = fragments(weight).restore(word(bit / 8)) >> (bit % 32);
                    codes[code as usize % weight.format.num_codes()] += 1;
                    if let Some(byte) = layout.zero_byte(k, n) {
                        let bits = (word(byte) >> (8 * (byte % 4))) as u16;
                        let bases = fragments(weight).zero_bases().expect("stored");
                        let zero = f16::from_bits(bits).to_f32() - bases.f16[n % 16 / 8];
                        assert!(zero.fract() == 0.0, "{weight}: {zero}");
                        zeros.insert(zero as i32);
                    }
                }
            }
            for (code, count) in codes.into_iter().enumerate() {
                let mask = usize::from(code_mask(weight));
                assert_eq!(count > 0, code & !mask == 0, "{weight}: code {code}, {count} times");
                assert!(count == 0 || !weight.format.decode(code as u8).is_nan());
            }
            if layout.kind.zeros {
                let (least, most) = (zeros.first(), zeros.last());
                let largest = weight.format.num_codes() as i32 - 1;
                assert!(least >= Some(&0) && most <= Some(&largest), "{weight}: {zeros:?}");
                assert!(zeros.len() as i32 > largest * 3 / 4, "{weight}: {zeros:?}");
            }
        }
    }
}
