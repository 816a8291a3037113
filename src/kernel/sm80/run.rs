//! The arithmetic of one run of 128 inputs: shared loads, dequantisation, mma, and how they are woven.
//!
//! Everything is written per k16 step as three streams. Registers are fresh for every value, so the only
//! dependences are true ones, and the weaver may place each instruction as soon as its operands are there.
//! Source: Marlin paper, "Dequantization and tensor cores"; PTX ISA, "mma.m16n8k16", "ldmatrix".

use super::{Geometry, ROW_BYTES, Slot, Sm80};
use crate::asm::reg::{Reg, Region};
use crate::asm::types::{B16, B32, F32};
use crate::asm::{Asm, Pattern, Stream};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::{Config, Scaling};
use crate::layout::swizzle_unit;
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES};

impl Sm80<'_> {
    /// The arithmetic of one run: for each k16 step its shared loads, its dequantisation and its mma.
    pub(super) fn emit_run(&self, a: &mut Asm, slot: u32, acc: &Accumulators) -> Vec<[Stream; 3]> {
        let (config, geometry) = (self.config, self.geometry);
        let Slot { weights, rows } = self.slots[slot as usize];
        let tiles = config.tiles_per_warp();
        let format = config.weight_format();
        let grouped = config.group != Group::PerColumn;
        let promote = grouped && config.scaling == Scaling::Promote;
        let steps_per_group = 8 / geometry.groups_per_run;
        let mut words: Vec<[Reg<B32>; 4]> = Vec::new();
        let mut batch: Vec<[Reg<B32>; 2]> = Vec::new();
        let mut next_batch: Vec<[Reg<B32>; 2]> = Vec::new();
        let mut scales: Vec<Reg<B32>> = Vec::new();
        let mut sums: Accumulators = Vec::new();
        let mut steps = Vec::new();
        for step in 0..8 {
            let [mut loads, mut dequant, mut mma] = [const { Stream::new() }; 3];
            if step % 4 == 0 {
                // Four k16 steps of each tile.
                words = (0..tiles)
                    .map(|tile| {
                        let words = a.regs();
                        let offset = tile * geometry.tile_bytes + 512 * (step / 4);
                        let from = self.weights_lane.at(weights.start + offset).within(weights);
                        loads.extend(a.capture(|a| a.ld_shared_v4_b32(words, from)));
                        words
                    })
                    .collect();
            }
            if step % geometry.steps_per_load == 0 {
                loads.extend(a.capture(|a| {
                    [batch, next_batch] = self.emit_load_batch(a, rows, step);
                }));
            } else {
                batch.clone_from(&next_batch);
            }
            let new_group = step % steps_per_group == 0;
            if grouped && new_group {
                let group = step / steps_per_group;
                scales = (0..tiles)
                    .map(|tile| {
                        let word = a.reg();
                        let offset = tile * geometry.tile_bytes
                            + CODE_BYTES_PER_TILE as u32
                            + group * SCALE_ROW_BYTES as u32;
                        let from = self.scales_lane.at(weights.start + offset).within(weights);
                        loads.extend(a.capture(|a| a.ld_shared_b32(word, from)));
                        word
                    })
                    .collect();
            }
            if promote && new_group {
                sums = acc.iter().map(|row| row.iter().map(|_| a.regs()).collect()).collect();
            }
            for tile in 0..tiles as usize {
                let word = words[tile][step as usize % 4];
                let mut fragment = [word; 4];
                dequant.extend(a.capture(|a| {
                    fragment = format.emit_fragment(a, &self.constants, word);
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
            if promote && (step + 1) % steps_per_group == 0 {
                for tile in 0..tiles as usize {
                    let (acc, sums) = (&acc[tile], &sums[tile]);
                    mma.extend(a.capture(|a| emit_promote(a, acc, sums, scales[tile])));
                }
            }
            steps.push([loads, dequant, mma]);
        }
        steps
    }

    /// Loads the B fragments of the `steps_per_load` k16 steps from `step` on: per step and row tile.
    fn emit_load_batch(&self, a: &mut Asm, rows: Region, step: u32) -> [Vec<[Reg<B32>; 2]>; 2] {
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

    /// Weaves the steps of a run. Short batches: one weave, the assembler has registers to spare. Tall ones:
    /// a window a step, in which the shared loads of the step after next, the dequantisation of the next
    /// and the mma of this one run side by side; a warp barrier between windows keeps the assembler from
    /// hoisting loads out of theirs, which would cost it more registers than there are.
    pub(super) fn emit_woven(&self, a: &mut Asm, steps: Vec<[Stream; 3]>) {
        let [mut loads, mut dequant, mut mma] = [(); 3].map(|()| Vec::new());
        for [l, d, m] in steps {
            loads.push(l);
            dequant.push(d);
            mma.push(m);
        }
        if self.geometry.row_tiles < 4 {
            let whole = [loads, dequant, mma].map(|streams| {
                let mut whole = Stream::new();
                streams.into_iter().for_each(|stream| whole.extend(stream));
                whole
            });
            a.weave(Pattern::EvenHeldBack, whole);
            return;
        }
        let ahead = 1;
        let mut loads = loads.into_iter();
        let mut dequant = dequant.into_iter();
        loads.by_ref().take(1 + ahead).for_each(|stream| a.append(stream));
        dequant.by_ref().take(1).for_each(|stream| a.append(stream));
        for mma in mma {
            a.bar_warp_sync(0xffff_ffffu32);
            let loads = loads.next().unwrap_or_default();
            let dequant = dequant.next().unwrap_or_default();
            // The mma of this step come first in the order that counts: they read what is there.
            a.weave(Pattern::EvenHeldBack, [mma, loads, dequant]);
        }
    }
}

/// The addresses of `ldmatrix` rows: see [`Sm80::rows_lane`]. Lane `8 i + r` names row `r` of matrix `i`.
pub(super) fn emit_rows_lane(
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
