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
use crate::asm::types::{B16, B32, F32};
use crate::asm::{Asm, Pattern, Stream};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::{Config, Conversion, Scaling};
use crate::layout::swizzle_unit;
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES};

/// k16 steps of a run.
const STEPS: u32 = 8;
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

    fn steps_per_group(&self) -> u32 {
        STEPS / self.geometry.groups_per_run
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

    /// The four words of a tile for half a run.
    fn emit_load_words(&self, a: &mut Asm, weights: Region, tile: u32, half: u32) -> [Reg<B32>; 4] {
        let words = a.regs();
        let offset = tile * self.geometry.tile_bytes + 512 * half;
        let from = self.weights_lane.at(weights.start + offset).within(weights);
        a.ld_shared_v4_b32(words, from);
        words
    }

    fn emit_load_scales(&self, a: &mut Asm, weights: Region, tile: u32, group: u32) -> Reg<B32> {
        let word = a.reg();
        let offset = tile * self.geometry.tile_bytes
            + CODE_BYTES_PER_TILE as u32
            + group * SCALE_ROW_BYTES as u32;
        let from = self.scales_lane.at(weights.start + offset).within(weights);
        a.ld_shared_b32(word, from);
        word
    }

    /// The A fragment of a word.
    fn emit_fragment(&self, a: &mut Asm, word: Reg<B32>) -> [Reg<B32>; 4] {
        let format = self.config.weight_format();
        match (self.config.conversion, format.subnormal()) {
            (Conversion::Subnormal, Some(subnormal)) => subnormal.emit_fragment(a, word),
            _ => self.config.fragments().emit_fragment(a, &self.constants, word),
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
        let tiles = self.config.tiles_per_warp();
        let grouped = self.config.group != Group::PerColumn;
        let promote = self.promotes();
        let mut words: Vec<[Reg<B32>; 4]> = Vec::new();
        let mut batch = BatchStep::new();
        let mut next_batch = BatchStep::new();
        let mut scales: Vec<Reg<B32>> = Vec::new();
        let mut sums: Accumulators = Vec::new();
        let mut steps = Vec::new();
        for step in 0..STEPS {
            let Part { mut loads, mut dequant, mut mma } = Part::default();
            if step % 4 == 0 {
                // Four k16 steps of each tile.
                words.clear();
                loads.extend(a.capture(|a| {
                    words.extend(
                        (0..tiles).map(|tile| self.emit_load_words(a, weights, tile, step / 4)),
                    );
                }));
            }
            if step % geometry.steps_per_load == 0 {
                loads.extend(a.capture(|a| {
                    [batch, next_batch] = self.emit_load_batch(a, rows, step);
                }));
            } else {
                batch.clone_from(&next_batch);
            }
            let new_group = step % self.steps_per_group() == 0;
            if grouped && new_group {
                let group = step / self.steps_per_group();
                scales.clear();
                loads.extend(a.capture(|a| {
                    scales.extend(
                        (0..tiles).map(|tile| self.emit_load_scales(a, weights, tile, group)),
                    );
                }));
            }
            if promote && new_group {
                sums = acc.iter().map(|row| row.iter().map(|_| a.regs()).collect()).collect();
            }
            for tile in 0..tiles as usize {
                let word = words[tile][step as usize % 4];
                let mut fragment = [word; 4];
                dequant.extend(a.capture(|a| {
                    fragment = self.emit_fragment(a, word);
                    if grouped && !promote {
                        fragment = emit_scale_fragment(a, fragment, scales[tile]);
                    }
                }));
                for (j, b) in batch.iter().enumerate() {
                    let sum = if promote { sums[tile][j] } else { acc[tile][j] };
                    let before = if promote && new_group { [self.zero; 4] } else { sum };
                    mma.extend(a.capture(|a| a.mma_m16n8k16_f32_f16(sum, fragment, *b, before)));
                }
            }
            if promote && (step + 1) % self.steps_per_group() == 0 {
                for tile in 0..tiles as usize {
                    let (acc, sums) = (&acc[tile], &sums[tile]);
                    mma.extend(a.capture(|a| emit_promote(a, acc, sums, scales[tile])));
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
        let (grouped, promote) = (self.config.group != Group::PerColumn, self.promotes());
        let steps_per_group = self.steps_per_group();
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
            let mut sums: Accumulators = Vec::new();
            let mut scales: Vec<Reg<B32>> = Vec::new();
            for half in 0..2 {
                let mut part = std::mem::take(&mut first);
                let mut words = Vec::new();
                part.loads.extend(a.capture(|a| {
                    for tile in pair.clone() {
                        words.push(self.emit_load_words(a, weights, tile as u32, half));
                    }
                }));
                for step in 4 * half..4 * half + 4 {
                    let new_group = step % steps_per_group == 0;
                    let group = step / steps_per_group;
                    if grouped && new_group {
                        scales.clear();
                        part.loads.extend(a.capture(|a| {
                            for tile in pair.clone() {
                                scales.push(self.emit_load_scales(a, weights, tile as u32, group));
                            }
                        }));
                        sums = pair
                            .clone()
                            .map(|tile| acc[tile].iter().map(|_| a.regs()).collect())
                            .collect();
                    }
                    for (n, tile) in pair.clone().enumerate() {
                        let word = words[n][step as usize % 4];
                        let mut fragment = [word; 4];
                        part.dequant.extend(a.capture(|a| {
                            fragment = self.emit_fragment(a, word);
                            if grouped && !promote {
                                fragment = emit_scale_fragment(a, fragment, scales[n]);
                            }
                        }));
                        for (j, b) in batch[step as usize].iter().enumerate() {
                            let sum = if promote { sums[n][j] } else { acc[tile][j] };
                            let before = match promote && new_group {
                                true => zeros[group as usize][j],
                                false => sum,
                            };
                            part.mma.extend(
                                a.capture(|a| a.mma_m16n8k16_f32_f16(sum, fragment, *b, before)),
                            );
                        }
                    }
                    if promote && (step + 1) % steps_per_group == 0 {
                        for (n, tile) in pair.clone().enumerate() {
                            part.mma.extend(
                                a.capture(|a| emit_promote(a, &acc[tile], &sums[n], scales[n])),
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

/// Multiplies the rows of an A fragment by their channels' scales: registers 0 and 2 hold channel g,
/// 1 and 3 channel g + 8; the scale word has g's in its low half.
pub(in crate::kernel) fn emit_scale_fragment(
    a: &mut Asm,
    fragment: [Reg<B32>; 4],
    scale: Reg<B32>,
) -> [Reg<B32>; 4] {
    let both: [Reg<B32>; 2] = a.regs();
    a.prmt_b32(both[0], scale, scale, 0x1010u32);
    a.prmt_b32(both[1], scale, scale, 0x3232u32);
    let scaled = a.regs();
    for (n, (scaled, value)) in scaled.into_iter().zip(fragment).enumerate() {
        a.mul_f16x2(scaled, value, both[n % 2]);
    }
    scaled
}

/// `acc += scale * sum` in single precision, for one tile. Accumulator registers 0 and 1 are channel g,
/// 2 and 3 channel g + 8.
fn emit_promote(a: &mut Asm, acc: &[[Reg<F32>; 4]], sums: &[[Reg<F32>; 4]], scale: Reg<B32>) {
    let halves: [Reg<B16>; 2] = a.regs();
    a.mov_b32_unpack(halves, scale);
    let scales: [Reg<F32>; 2] = a.regs();
    a.cvt_f32_f16(scales[0], halves[0]);
    a.cvt_f32_f16(scales[1], halves[1]);
    for (acc, sums) in acc.iter().zip(sums) {
        for (n, (acc, sum)) in acc.iter().zip(sums).enumerate() {
            a.fma_rn_f32(*acc, *sum, scales[n / 2], *acc);
        }
    }
}
