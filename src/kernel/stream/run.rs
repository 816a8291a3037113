//! The arithmetic of one run of 128 inputs: shared loads, dequantisation, mma, and how they are woven.
//!
//! Everything is written as streams. Registers are fresh for every value, so the only dependences are true
//! ones, and the weaver may place each instruction as soon as its operands are there. A run goes step by step
//! over all tiles ([`Arithmetic::emit_steps`]), or tile pair by tile pair over all steps
//! ([`Arithmetic::emit_pairs`]): the first keeps few fragments of the batch, the second few sums, and has
//! read all weights early.
//! Source: Marlin paper, "Dequantization and tensor cores"; PTX ISA, "mma.m16n8k16", "ldmatrix".

use super::bias::Bias;
use super::{Geometry, ROW_BYTES};
use crate::asm::reg::{Reg, Region};
use crate::asm::types::{B32, F32};
use crate::asm::{Asm, Pattern, Stream};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::{Config, Conversion, Scaling};
use crate::kernel::tile::{STEPS, Source, Tile, Words, emit_scales};
use crate::layout::swizzle_unit;
use crate::weights::{Activation, Group};

/// Tiles that [`Arithmetic::emit_pairs`] takes at a time: independent sums enough to keep the tensor cores busy.
const PAIR: usize = 2;

/// The B fragments of one k16 step, by row tile.
pub(super) type BatchStep = Vec<[Reg<B32>; 2]>;

/// What a warp's arithmetic needs in registers.
pub(in crate::kernel) struct Arithmetic<'a> {
    pub(in crate::kernel) config: &'a Config,
    pub(in crate::kernel) geometry: Geometry,
    /// Shared address of the lane's first 16 bytes of weights, less their place in the plan.
    pub(in crate::kernel) weights_lane: Reg<B32>,
    /// Shared address of the lane's scale word of tile 0, less its place in the plan.
    pub(in crate::kernel) scales_lane: Reg<B32>,
    /// Shared addresses of the lane's `ldmatrix` row, less their place in the plan. One `ldmatrix.x4` covers
    /// `steps_per_load` k16 steps; load `n` uses address `n % len`, since a row's swizzle repeats every 128
    /// bytes.
    pub(in crate::kernel) rows_lane: Vec<Reg<B32>>,
    pub(in crate::kernel) zero: Reg<F32>,
    /// What the weight type's conversion wants in registers.
    pub(in crate::kernel) constants: Vec<Reg<B32>>,
    /// What makes the zero of codes that stay as they are.
    pub(in crate::kernel) bias: Option<Bias>,
}

/// The arithmetic of a part of a run.
#[derive(Default)]
pub(in crate::kernel) struct Part {
    pub(in crate::kernel) loads: Stream,
    pub(in crate::kernel) dequant: Stream,
    pub(in crate::kernel) mma: Stream,
}

impl Arithmetic<'_> {
    fn promotes(&self) -> bool {
        self.config.group != Group::PerColumn && self.config.scaling == Scaling::Promote
    }

    /// Emits the accumulators of a segment, zero.
    pub(in crate::kernel) fn emit_accumulators(&self, a: &mut Asm) -> Accumulators {
        let acc: Accumulators = (0..self.config.tiles_per_warp())
            .map(|_| (0..self.geometry.row_tiles).map(|_| a.regs()).collect())
            .collect();
        a.section("main loop", |a| {
            acc.iter().flatten().flatten().for_each(|value| a.mov_f32(*value, 0.0));
            self.bias.iter().for_each(|bias| bias.emit_begin(a));
        });
        acc
    }

    /// Emits what is left to do to the accumulators after the last run.
    pub(in crate::kernel) fn emit_finish(&self, a: &mut Asm, acc: &Accumulators) {
        if let Some(bias) = &self.bias {
            a.section("undo the codes' scale", |a| bias.emit_finish(a, acc));
        }
    }

    /// Where the lane finds the warp's tile `tile`.
    fn source(&self, weights: Region, tile: usize) -> Source {
        Source {
            words: self.weights_lane,
            scales: self.scales_lane,
            start: weights.start + tile as u32 * self.geometry.tile.bytes,
            region: weights,
        }
    }

    /// The vector of a tile's words that begins with a k16 step.
    fn emit_load_vector(&self, a: &mut Asm, from: Source, step: u32) -> [Reg<B32>; 4] {
        let words = a.regs();
        self.geometry.tile.emit_load_vector(a, from, step, words);
        words
    }

    /// The A fragment of some words.
    fn emit_fragment(
        &self,
        a: &mut Asm,
        zeros: Option<[Reg<B32>; 2]>,
        words: &[Reg<B32>],
    ) -> [Reg<B32>; 4] {
        match (self.config.conversion, self.config.kind.weight_format().subnormal()) {
            (Conversion::Subnormal, Some(subnormal)) => subnormal.emit_fragment(a, words[0]),
            _ => self.geometry.tile.emit_fragment(a, &self.constants, zeros, words),
        }
    }

    fn emit_mma(
        &self,
        a: &mut Asm,
        sum: [Reg<F32>; 4],
        fragment: [Reg<B32>; 4],
        b: [Reg<B32>; 2],
        before: [Reg<F32>; 4],
    ) {
        match self.config.kind.activation {
            Activation::F16 => a.mma_m16n8k16_f32_f16(sum, fragment, b, before),
            Activation::Bf16 => a.mma_m16n8k16_f32_bf16(sum, fragment, b, before),
        }
    }

    /// The arithmetic of one run, step by step: for each k16 step its shared loads, its dequantisation and its
    /// mma.
    pub(in crate::kernel) fn emit_steps(
        &self,
        a: &mut Asm,
        weights: Region,
        rows: Region,
        acc: &Accumulators,
    ) -> Vec<Part> {
        let geometry = self.geometry;
        let tile_shape = geometry.tile;
        let (per_vector, per_step) = (tile_shape.steps_per_vector(), tile_shape.words_per_step());
        let tiles = self.config.tiles_per_warp() as usize;
        let sources: Vec<Source> = (0..tiles).map(|tile| self.source(weights, tile)).collect();
        let promote = self.promotes();
        let mut words: Vec<[Reg<B32>; 4]> = Vec::new();
        let mut batch = BatchStep::new();
        let mut next_batch = BatchStep::new();
        let mut factors = vec![Factors::default(); tiles];
        let mut sums: Accumulators = Vec::new();
        let mut steps = Vec::new();
        for step in 0..STEPS {
            let Part { mut loads, mut dequant, mut mma } = Part::default();
            if step % per_vector == 0 {
                words.clear();
                loads.extend(a.capture(|a| {
                    words.extend(sources.iter().map(|from| self.emit_load_vector(a, *from, step)));
                }));
            }
            if step % geometry.steps_per_load == 0 {
                loads.extend(a.capture(|a| {
                    [batch, next_batch] = self.emit_load_batch(a, rows, step);
                }));
            } else {
                batch.clone_from(&next_batch);
            }
            let new_group = step % tile_shape.steps_per_group() == 0;
            let group = step / tile_shape.steps_per_group();
            if new_group {
                loads.extend(a.capture(|a| {
                    for (from, factors) in sources.iter().zip(&mut factors) {
                        factors.emit_load(a, &tile_shape, *from, group);
                    }
                }));
            }
            if promote && new_group {
                sums = acc.iter().map(|row| row.iter().map(|_| a.regs()).collect()).collect();
            }
            for tile in 0..tiles {
                let at = (step % per_vector) as usize * per_step;
                let word = &words[tile][at..at + per_step];
                let mut fragment = [word[0]; 4];
                dequant.extend(a.capture(|a| {
                    if new_group {
                        factors[tile].emit_begin_group(a, &tile_shape, group);
                    }
                    fragment = self.emit_fragment(a, factors[tile].zeros, word);
                    if let (false, Some(scale)) = (promote, factors[tile].scale) {
                        fragment = tile_shape.emit_scale_fragment(a, fragment, scale);
                    }
                }));
                for (j, b) in batch.iter().enumerate() {
                    let sum = if promote { sums[tile][j] } else { acc[tile][j] };
                    let before = if promote && new_group { [self.zero; 4] } else { sum };
                    mma.extend(a.capture(|a| self.emit_mma(a, sum, fragment, *b, before)));
                }
            }
            if promote && (step + 1) % tile_shape.steps_per_group() == 0 {
                for tile in 0..tiles {
                    let (acc, sums) = (&acc[tile], &sums[tile]);
                    mma.extend(a.capture(|a| emit_promote(a, acc, sums, factors[tile].scale)));
                }
            }
            steps.push(Part { loads, dequant, mma });
        }
        steps
    }

    /// The arithmetic of one run, two tiles at a time: the loads of all of the batch's fragments, then for each
    /// pair and half of the run its shared loads, its dequantisation and its mma. What makes the codes' zero of
    /// the batch comes with the first.
    pub(in crate::kernel) fn emit_pairs(
        &self,
        a: &mut Asm,
        weights: Region,
        rows: Region,
        acc: &Accumulators,
    ) -> (Stream, Vec<Part>) {
        let tiles = self.config.tiles_per_warp() as usize;
        let promote = self.promotes();
        let tile_shape = self.geometry.tile;
        let (steps_per_group, per_step) =
            (tile_shape.steps_per_group(), tile_shape.words_per_step());
        let mut batch: Vec<BatchStep> = Vec::new();
        let batch_loads = a.capture(|a| {
            for step in (0..STEPS).step_by(self.geometry.steps_per_load as usize) {
                let loaded = self.emit_load_batch(a, rows, step);
                batch.extend(loaded.into_iter().take(self.geometry.steps_per_load as usize));
            }
        });
        // What the sums of each group begin with, by row tile.
        let mut zeros: Vec<Vec<[Reg<F32>; 4]>> = Vec::new();
        let mma = a.capture(|a| {
            for group in batch.chunks(steps_per_group as usize) {
                zeros.push(match &self.bias {
                    Some(bias) => bias.emit_group(a, group, self.zero),
                    None => group[0].iter().map(|_| [self.zero; 4]).collect(),
                });
            }
        });
        let mut first = Part { mma, ..Part::default() };
        let mut parts = Vec::new();
        for pair in (0..tiles).step_by(PAIR).map(|tile| tile..(tile + PAIR).min(tiles)) {
            let sources: Vec<Source> =
                pair.clone().map(|tile| self.source(weights, tile)).collect();
            let mut sums: Accumulators = Vec::new();
            let mut factors = vec![Factors::default(); pair.len()];
            for half in 0..2 {
                let mut part = std::mem::take(&mut first);
                let mut words: Vec<Words> = Vec::new();
                part.loads.extend(a.capture(|a| {
                    for from in &sources {
                        let vectors = (4 * half..4 * half + 4)
                            .step_by(tile_shape.steps_per_vector() as usize);
                        words.push(
                            vectors
                                .flat_map(|step| self.emit_load_vector(a, *from, step))
                                .collect(),
                        );
                    }
                }));
                for step in 4 * half..4 * half + 4 {
                    let new_group = step % steps_per_group == 0;
                    let group = step / steps_per_group;
                    if new_group {
                        part.loads.extend(a.capture(|a| {
                            for (from, factors) in sources.iter().zip(&mut factors) {
                                factors.emit_load(a, &tile_shape, *from, group);
                            }
                        }));
                        sums = pair
                            .clone()
                            .map(|tile| match promote {
                                true => acc[tile].iter().map(|_| a.regs()).collect(),
                                false => Vec::new(),
                            })
                            .collect();
                    }
                    for (n, tile) in pair.clone().enumerate() {
                        let at = step as usize % 4 * per_step;
                        let word = &words[n][at..at + per_step];
                        let mut fragment = [word[0]; 4];
                        part.dequant.extend(a.capture(|a| {
                            if new_group {
                                factors[n].emit_begin_group(a, &tile_shape, group);
                            }
                            fragment = self.emit_fragment(a, factors[n].zeros, word);
                            if let (false, Some(scale)) = (promote, factors[n].scale) {
                                fragment = tile_shape.emit_scale_fragment(a, fragment, scale);
                            }
                        }));
                        for (j, b) in batch[step as usize].iter().enumerate() {
                            let sum = if promote { sums[n][j] } else { acc[tile][j] };
                            let before = match promote && new_group {
                                true => zeros[group as usize][j],
                                false => sum,
                            };
                            part.mma
                                .extend(a.capture(|a| self.emit_mma(a, sum, fragment, *b, before)));
                        }
                    }
                    if promote && (step + 1) % steps_per_group == 0 {
                        for (n, tile) in pair.clone().enumerate() {
                            let scale = factors[n].scale;
                            part.mma.extend(
                                a.capture(|a| emit_promote(a, &acc[tile], &sums[n], scale)),
                            );
                        }
                    }
                }
                parts.push(part);
            }
        }
        (batch_loads, parts)
    }

    /// Loads the B fragments of the `steps_per_load` k16 steps from `step` on: per step and row tile.
    fn emit_load_batch(&self, a: &mut Asm, rows: Region, step: u32) -> [BatchStep; 2] {
        let geometry = self.geometry;
        let load = step / geometry.steps_per_load;
        let len = self.rows_lane.len() as u32;
        let base = self.rows_lane[(load % len) as usize];
        let offset = rows.start + 128 * (load / len);
        let mut steps = [Vec::new(), Vec::new()];
        let row_tiles_per_load = 2 / geometry.steps_per_load;
        for j in (0..geometry.row_tiles).step_by(row_tiles_per_load as usize) {
            let f: [Reg<B32>; 4] = a.regs();
            let from = base.at(offset + 8 * j * ROW_BYTES).within(rows);
            a.ldmatrix_sync_aligned_m8n8_x4_shared_b16(f, from);
            match geometry.steps_per_load {
                1 => steps[0].extend([[f[0], f[1]], [f[2], f[3]]]),
                _ => {
                    steps[0].push([f[0], f[1]]);
                    steps[1].push([f[2], f[3]]);
                }
            }
        }
        steps
    }
}

/// Weaves parts as one, after some loads.
pub(in crate::kernel) fn emit_woven(
    a: &mut Asm,
    loads: Stream,
    parts: impl IntoIterator<Item = Part>,
) {
    let mut whole = Part { loads, ..Part::default() };
    for Part { loads, dequant, mma } in parts {
        whole.loads.extend(loads);
        whole.dequant.extend(dequant);
        whole.mma.extend(mma);
    }
    a.weave(Pattern::EvenHeldBack, [whole.loads, whole.dequant, whole.mma]);
}

/// The addresses of `ldmatrix` rows: see [`Arithmetic::rows_lane`]. Lane `8 i + r` names row `r` of matrix `i`.
pub(in crate::kernel) fn emit_rows_lane(
    a: &mut Asm,
    config: &Config,
    geometry: &Geometry,
    smem: Reg<B32>,
    lane: Reg<B32>,
    team: Reg<B32>,
) -> Vec<Reg<B32>> {
    let [r, i, unit, row_base] = a.regs();
    // Rows past the kept ones repeat.
    a.and_b32(r, lane, config.tile_m.min(8) - 1);
    a.shr_u32(i, lane, 3);
    a.mad_lo_u32(row_base, team, geometry.rows_bytes, smem);
    a.mad_lo_u32(row_base, r, ROW_BYTES, row_base);
    if geometry.steps_per_load == 1 {
        // Matrices: (row tile 0, unit 0), (0, 1), (1, 0), (1, 1).
        let row_tile = a.reg();
        a.shr_u32(row_tile, i, 1);
        a.mad_lo_u32(row_base, row_tile, 8 * ROW_BYTES, row_base);
        a.and_b32(i, i, 1);
    }
    a.xor_b32(unit, i, r);
    let units_per_load = 2 * geometry.steps_per_load;
    (0..8 / units_per_load)
        .map(|load| {
            let [at, address] = a.regs();
            a.xor_b32(at, unit, swizzle_unit(0, units_per_load * load));
            a.mad_lo_u32(address, at, 16, row_base);
            address
        })
        .collect()
}

/// The scales and zeros of a tile: words as they are loaded, and what the current group makes of them.
#[derive(Clone, Debug, Default)]
struct Factors {
    scale_words: Words,
    zero_words: Words,
    /// The scales of the group, if there are groups.
    scale: Option<Reg<B32>>,
    /// What the conversion wants for its zeros, if zeros are stored.
    zeros: Option<[Reg<B32>; 2]>,
}

impl Factors {
    /// Emits the loads of what `group` is the first to want.
    fn emit_load(&mut self, a: &mut Asm, tile: &Tile, from: Source, group: u32) {
        let (loaded, wanted) = (self.scale_words.len(), tile.num_scale_words_for(group));
        if loaded < wanted {
            self.scale_words.extend((loaded..wanted).map(|_| a.reg::<B32>()));
            tile.emit_load_scales(a, from, group, &self.scale_words);
        }
        if tile.num_zero_words() > 0 {
            self.zero_words.push(a.reg());
            tile.emit_load_zeros(a, from, group, &self.zero_words);
        }
    }

    fn emit_begin_group(&mut self, a: &mut Asm, tile: &Tile, group: u32) {
        if !self.scale_words.is_empty() {
            self.scale = Some(tile.emit_scale_word(a, &self.scale_words, group));
        }
        self.zeros = tile.emit_zeros(a, &self.zero_words, group);
    }
}

/// `acc += scale * sum` in single precision, for one tile. Accumulator registers 0 and 1 are channel g,
/// 2 and 3 channel g + 8.
fn emit_promote(
    a: &mut Asm,
    acc: &[[Reg<F32>; 4]],
    sums: &[[Reg<F32>; 4]],
    scale: Option<Reg<B32>>,
) {
    let scales = emit_scales(a, scale.expect("sums are promoted by the scales of a group"));
    for (acc, sums) in acc.iter().zip(sums) {
        for (n, (acc, sum)) in acc.iter().zip(sums).enumerate() {
            a.fma_rn_f32(*acc, *sum, scales[n / 2], *acc);
        }
    }
}
