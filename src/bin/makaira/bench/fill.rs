//! Random packed weights, made where they are needed: on the device, by a kernel of our assembler.
//!
//! Word i of a weight is a hash of i and the weight's seed, so that tens of gigabytes, no two weights alike,
//! are made at the rate of the memory and any word can be computed again on the host. Code words are the
//! hash itself. Scales take their sign and their low eight bits from it: signs, so that the mean of the
//! codes (-1/2) does not add up to a common direction of all outputs; eight bits above a smallest scale that
//! keeps the mean square of a product that of its input, so that numbers stay in range through any number
//! of layers.

use std::sync::Arc;

use half::f16;
use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Backend, DevicePtr, Error, Kernel, Launch, Stream};
use makaira::target::SmArch;
use makaira::weights::{CODE_BYTES_PER_TILE, PackedLayout};

/// Threads of a CTA: one for each 16 bytes of the largest tile.
const THREADS: u32 = 96;
const CTAS_PER_SM: u32 = 16;
const UNIT_BYTES: u32 = 16;
/// Numbers of words from one tile to the next; the largest tile has 288.
const TILE_WORDS: u32 = 512;
/// The mean of (code - 8)² over the sixteen codes.
const MEAN_SQUARE_CODE: f64 = 21.5;
/// Bits of a hash that a scale takes.
const SCALE_MASK: u32 = 0x80ff;

/// The finaliser of MurmurHash3: every bit of the result depends on every bit of `word`.
fn mix(word: u32) -> u32 {
    let word = (word ^ word >> 16).wrapping_mul(0x85eb_ca6b);
    let word = (word ^ word >> 13).wrapping_mul(0xc2b2_ae35);
    word ^ word >> 16
}

/// What a weight is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    seed: u32,
    /// Bits of the smallest scale.
    scale: u16,
}

impl Pattern {
    /// Weights of `k` inputs whose products are about as large as their inputs.
    pub fn new(seed: u32, k: usize) -> Self {
        let wanted = 1.0 / (MEAN_SQUARE_CODE * k as f64);
        let mean_square = |scale: u16| {
            let squares = (scale..scale + 256).map(|bits| f16::from_bits(bits).to_f64().powi(2));
            squares.sum::<f64>() / 256.0
        };
        // Both ends are far from any layer's scale: 6e-8 and 0.5.
        let (mut low, mut high) = (1, 0x3800);
        while low + 1 < high {
            let middle = (low + high) / 2;
            if mean_square(middle) < wanted { low = middle } else { high = middle }
        }
        Self { seed, scale: low }
    }

    fn word(&self, tile: u32, word: u32) -> u32 {
        let hash = mix((tile * TILE_WORDS + word).wrapping_add(self.seed));
        if word < CODE_BYTES_PER_TILE as u32 / 4 {
            hash
        } else {
            (hash & (SCALE_MASK << 16 | SCALE_MASK)).wrapping_add(self.scale_pair())
        }
    }

    fn scale_pair(&self) -> u32 {
        u32::from(self.scale) << 16 | u32::from(self.scale)
    }

    /// The weights of one output, `[K]`, exact.
    pub fn column(&self, layout: &PackedLayout, n: usize) -> Vec<f64> {
        let word_at = |byte: usize| {
            let (tile, in_tile) = (byte / layout.tile_bytes, byte % layout.tile_bytes);
            self.word(tile as u32, in_tile as u32 / 4) >> (8 * (in_tile % 4))
        };
        let weight = |k: usize| {
            let bit = layout.code_bit(k, n);
            let code = word_at(bit / 8) >> (bit % 8) & 0xf;
            let scale = word_at(layout.scale_byte(layout.group.index_of(k), n)) as u16;
            (f64::from(code) - 8.0) * f16::from_bits(scale).to_f64()
        };
        (0..layout.k).map(weight).collect()
    }
}

/// The kernel that fills weights.
pub struct Filler {
    kernel: Arc<dyn Kernel>,
    tile_bytes: u32,
    num_ctas: u32,
}

impl Filler {
    /// A filler of weights whose tiles have `tile_bytes` bytes, scales among them.
    ///
    /// # Errors
    /// Those of [`Backend::load`].
    pub fn load(backend: &dyn Backend, tile_bytes: usize) -> Result<Self, Error> {
        let num_ctas = CTAS_PER_SM * backend.device().num_sms;
        let tile_bytes = tile_bytes as u32;
        let kernel = backend.load(&build(tile_bytes, num_ctas, backend.device().arch))?;
        Ok(Self { kernel, tile_bytes, num_ctas })
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
        let values = [num_tiles, pattern.seed, pattern.scale_pair()].map(Arg::U32);
        let args = [&[ptr.into()][..], &values].concat();
        backend.launch(&*self.kernel, &Launch::new([self.num_ctas, 1], &args, stream))
    }
}

fn build(tile_bytes: u32, num_ctas: u32, target: SmArch) -> Module {
    let num_units = tile_bytes / UNIT_BYTES;
    let code_units = CODE_BYTES_PER_TILE as u32 / UNIT_BYTES;
    assert!((code_units..=THREADS).contains(&num_units), "a thread for each unit of a tile");
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
    let [next, done] = ["next", "done"].map(|name| a.label(name));
    a.section("tiles", |a| {
        a.bind(next);
        let more = a.test_u32(Cmp::Lt, tile, num_tiles);
        a.unless(more, |a| a.bra(done));
        let start = a.reg();
        a.mad_lo_u32(start, tile, TILE_WORDS, first);
        let words: [Reg<B32>; 4] = a.regs();
        for (idx, word) in (0..).zip(words) {
            let [shifted, scale] = a.regs();
            a.add_u32(word, start, idx);
            for (shift, factor) in [(16, 0x85eb_ca6bu32), (13, 0xc2b2_ae35)] {
                a.shr_u32(shifted, word, shift);
                a.xor_b32(word, word, shifted);
                a.mul_lo_u32(word, word, factor);
            }
            a.shr_u32(shifted, word, 16);
            a.xor_b32(word, word, shifted);
            a.and_b32(scale, word, SCALE_MASK << 16 | SCALE_MASK);
            a.add_u32(scale, scale, smallest);
            a.selp_b32(word, word, scale, is_code);
        }
        a.mad_wide_u32(ptr, tile, tile_bytes, unit_ptr);
        a.when(exists, |a| a.st_global_v4_b32(ptr, words));
        a.add_u32(tile, tile, num_ctas);
        a.bra(next);
    });
    a.bind(done);
    a.exit();
    a.finish(&format!("fill_b{tile_bytes}_g{num_ctas}"), target, THREADS, CTAS_PER_SM)
}

#[cfg(test)]
mod tests {
    use makaira::emu::EmuBackend;
    use makaira::weights::Group;

    use super::*;

    #[test]
    fn the_device_writes_what_the_host_computes() {
        let backend = EmuBackend::h200_like(1);
        for group in [32, 64, 128] {
            let group = Group::new(256, group).expect("it divides");
            let layout = PackedLayout::new(192, 256, group).expect("small");
            let margin = 64;
            let bytes = layout.total_bytes + margin;
            let ptr = backend.alloc(bytes as u64).expect("fits");
            backend.upload(ptr, &vec![0xa5; bytes]).expect("uploads");
            let pattern = Pattern::new(0x1234_5678, 256);
            let filler = Filler::load(&backend, layout.tile_bytes).expect("loads");
            filler.fill(&backend, ptr, &layout, &pattern, Stream::default()).expect("runs");
            let mut found = vec![0; bytes];
            backend.download(ptr, &mut found).expect("downloads");
            let (weight, behind) = found.split_at(layout.total_bytes);
            assert!(behind.iter().all(|byte| *byte == 0xa5));
            let words = weight.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            for (at, word) in words.enumerate() {
                let (tile, idx) = (4 * at / layout.tile_bytes, 4 * at % layout.tile_bytes / 4);
                assert_eq!(word, pattern.word(tile as u32, idx as u32), "{group:?}, word {at}");
            }
        }
    }

    #[test]
    fn weights_have_the_size_that_keeps_products_in_range() {
        for k in [256, 4096, 14336, 28672] {
            let layout = PackedLayout::new(64, k, Group::Size(128)).expect("legal");
            let of = |seed| move |n| Pattern::new(seed, k).column(&layout, n);
            let weights: Vec<f64> = (0..64).flat_map(of(7)).collect();
            let gain = weights.iter().map(|w| w * w).sum::<f64>() / 64.0;
            assert!((0.9..1.1).contains(&gain), "{k} inputs: {gain}");
            let negative = weights.iter().filter(|w| **w < 0.0).count() as f64;
            assert!((0.4..0.6).contains(&(negative / weights.len() as f64)), "{negative}");
            assert_ne!(weights, (0..64).flat_map(of(8)).collect::<Vec<f64>>());
        }
    }
}
