//! The consumers: warpgroups that dequantise words into A registers and keep wgmma busy.
//!
//! A run of 128 inputs is a sequence of steps, one per k64 half and m64 tile: four products from one set of A
//! registers, then the dequantisation of the next step's set while they run. At most one group of products
//! stays in flight. With `Promote` the run ends with a drain, and its sums go into the accumulators times the
//! scales; otherwise the products accumulate by themselves.
//! The loop is unrolled over the ring's stages, so every address is a constant; a segment may end at any stage
//! and the next one enters there.
//! Source: PTX ISA, "wgmma.mma_async", "wgmma.wait_group".

use super::{BOX_ROW_BYTES, Place, Wg};
use crate::asm::Asm;
use crate::asm::reg::{In, Reg, RegRange};
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::Scaling;
use crate::kernel::sm80::run::emit_scale_fragment;
use crate::kernel::stripe::{Segment, Stripe};
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES};

/// A shared-memory descriptor for K-major operands with the 128-byte swizzle, without its address: leading
/// offset 1 (unused), stride 1024 B between groups of 8 rows. Source: PTX ISA, "Matrix Descriptor Format".
const DESCRIPTOR: u64 = 0x4000_0040_0001_0000;

/// The A registers of one step: four k16 fragments.
type Set = [[Reg<B32>; 4]; 4];

/// One run's packed words of a warp, as loaded.
#[derive(Clone)]
struct Words {
    /// `[k64 half][tile]`, four k16 steps each.
    codes: [Vec<[Reg<B32>; 4]>; 2],
    /// `[tile][group]`.
    scales: Vec<Vec<Reg<B32>>>,
}

/// Registers of the consumers.
struct Consumer<'a> {
    wg: &'a Wg<'a>,
    /// Tiles of 16 channels of a warp, and of 64 channels of its warpgroup.
    tiles: usize,
    /// Sums go through `totals`.
    promotes: bool,
    /// Descriptor of the team's first box in stage 0.
    descriptor: Reg<B64>,
    /// The lane's first words of tile 0 in stage 0, and its scale word.
    weights_lane: Reg<B32>,
    scales_lane: Reg<B32>,
    constants: Vec<Reg<B32>>,
    /// What the products accumulate into, per tile.
    sums: Vec<RegRange<F32>>,
    /// Scaled sums, per tile.
    totals: Accumulators,
    /// The run's words at a stage's top, and the first step's A registers.
    words: Words,
    set: Set,
    /// Scales of the last run, for the tail.
    last_scales: Vec<[Reg<F32>; 2]>,
    rounds: Reg<B32>,
    /// Parity of the phase to wait for.
    parity: Reg<B32>,
    /// False for the segment's first products, which begin from zero.
    accumulates: Reg<Pred>,
    /// Whether this lane gives the stage before back: elected, and there is one.
    releases: Reg<Pred>,
    /// The stage to go on at, and the barrier to give the last stage back to.
    stage: Reg<B32>,
    release: Reg<B32>,
}

impl Wg<'_> {
    /// Everything that the consumers do.
    pub(super) fn emit_consume(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let consumer = a.section("consumers", |a| Consumer::new(a, self));
        consumer.emit(a, stripe, segment);
    }
}

impl<'a> Consumer<'a> {
    fn new(a: &mut Asm, wg: &'a Wg<'a>) -> Self {
        let (config, geometry) = (wg.config, wg.geometry);
        let tiles = config.tiles_per_warp() as usize;
        let promotes =
            config.group != Group::PerColumn && config.scaling == Scaling::Promote;
        let [team, warp_n, rows, low, first, column, tile, base, quad] = a.regs();
        a.shr_u32(team, wg.warp, config.warps_n.ilog2());
        a.and_b32(warp_n, wg.warp, config.warps_n - 1);
        // The team's boxes.
        let team_boxes = config.runs_per_stage * 2 * geometry.box_bytes;
        a.mad_lo_u32(rows, team, team_boxes, wg.smem);
        a.shr_u32(low, rows, 4);
        a.and_b32(low, low, 0x3fff);
        let descriptor = a.reg();
        a.cvt_u64_u32(descriptor, low);
        a.add_u64(descriptor, descriptor, DESCRIPTOR);
        // The warp's tiles of 16 channels, in its column of 64.
        a.mul_lo_u32(first, warp_n, tiles as u32);
        a.shr_u32(column, first, 2);
        a.and_b32(tile, first, 3);
        a.mad_lo_u32(base, column, geometry.column_bytes, wg.smem);
        a.mad_lo_u32(base, tile, geometry.tile_bytes, base);
        a.mad_lo_u32(base, team, config.runs_per_stage * geometry.chunk_bytes, base);
        let [weights_lane, scales_lane] = a.regs();
        a.mad_lo_u32(weights_lane, wg.lane, 16, base);
        a.shr_u32(quad, wg.lane, 2);
        a.mad_lo_u32(scales_lane, quad, 4, base);
        let groups = if config.group == Group::PerColumn { 0 } else { geometry.groups_per_run };
        let words = Words {
            codes: [(); 2].map(|()| (0..tiles).map(|_| a.regs()).collect()),
            scales: (0..tiles).map(|_| (0..groups).map(|_| a.reg()).collect()).collect(),
        };
        let per_tile = config.tile_m / 2;
        Self {
            wg,
            tiles,
            promotes,
            descriptor,
            weights_lane,
            scales_lane,
            constants: config.weight_format().emit_constants(a),
            sums: (0..tiles).map(|_| a.reg_range(per_tile)).collect(),
            totals: match promotes {
                true => (0..tiles)
                    .map(|_| (0..config.tile_m / 8).map(|_| a.regs()).collect())
                    .collect(),
                false => Vec::new(),
            },
            words,
            set: [(); 4].map(|()| a.regs()),
            last_scales: (0..if promotes { tiles } else { 0 }).map(|_| a.regs()).collect(),
            rounds: a.reg(),
            parity: a.reg(),
            accumulates: a.reg(),
            releases: a.reg(),
            stage: a.reg(),
            release: a.reg(),
        }
    }

    /// The loop over segments.
    fn emit(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let wg = self.wg;
        let stages = wg.config.stages;
        let mut labels = |name| (0..stages).map(|_| a.label(name)).collect::<Vec<_>>();
        let (entries, tops, tails) = (labels("enter"), labels("stage"), labels("leave"));
        let [segment_top, tail, end] =
            ["segment", "tail", "all_done"].map(|name| a.label(name));
        a.section("segment", |a| {
            // Output and scratch belong to the kernel before this one until it has ended.
            a.griddepcontrol_wait();
            a.mov_b32(self.parity, 0);
            a.mov_b32(self.stage, 0);
            a.bind(segment_top);
            wg.emit_rounds(a, segment, self.rounds);
            self.totals.iter().flatten().flatten().for_each(|total| a.mov_f32(*total, 0.0));
            a.setp_u32(self.accumulates, Cmp::Ne, self.stage, self.stage);
            a.setp_u32(self.releases, Cmp::Ne, self.stage, self.stage);
            for stage in 1..stages {
                let here = a.test_u32(Cmp::Eq, self.stage, stage);
                a.when(here, |a| a.bra(entries[stage as usize]));
            }
        });
        for stage in 0..stages {
            a.section("enter", |a| {
                a.bind(entries[stage as usize]);
                self.emit_take(a, stage);
                a.bra(tops[stage as usize]);
            });
        }
        for stage in 0..stages {
            a.section(&format!("main loop, stage {stage}"), |a| {
                a.bind(tops[stage as usize]);
                self.emit_stage(a, stage, tails[stage as usize]);
            });
        }
        a.section("main loop", |a| a.bra(tops[0]));
        for stage in 0..stages {
            a.section("leave", |a| {
                a.bind(tails[stage as usize]);
                a.mov_b32(self.stage, (stage + 1) % stages);
                a.add_u32(self.release, wg.smem, wg.plan.empty.start + 8 * stage);
                a.bra(tail);
            });
        }
        a.bind(tail);
        a.section("end of the segment", |a| {
            a.wgmma_wait_group_sync_aligned(0);
            if self.promotes {
                self.emit_promote(a, &self.last_scales);
            }
            a.bar_warp_sync(0xffff_ffffu32);
            a.when(wg.elected, |a| a.mbarrier_arrive_shared_cta_b64(self.release));
        });
        let place = a.section("end of the segment", |a| wg.emit_place(a, segment));
        self.emit_output(a, segment, &place);
        a.section("next segment", |a| {
            let next = stripe.emit_next(a, segment);
            let more = segment.emit_become(a, &next);
            a.when(more, |a| a.bra(segment_top));
            a.bind(end);
        });
    }

    fn emit_output(&self, a: &mut Asm, segment: &Segment, place: &Place) {
        let sums = match self.promotes {
            true => self.totals.clone(),
            false => (self.sums.iter())
                .map(|sums| {
                    let fragments = self.wg.config.tile_m as usize / 8;
                    (0..fragments).map(|j| std::array::from_fn(|r| sums.get(4 * j + r))).collect()
                })
                .collect(),
        };
        self.wg.emit_output(a, &sums, segment, place);
    }

    /// Waits for a stage and prepares its first step, in the registers of a stage's top.
    fn emit_take(&self, a: &mut Asm, stage: u32) {
        let wg = self.wg;
        wg.emit_wait(a, wg.smem.at(wg.plan.full.start + 8 * stage), self.parity);
        self.emit_load(a, stage, 0, &self.words);
        let set = self.emit_dequantise(a, &self.words, 0, 0);
        for (to, from) in self.set.iter().flatten().zip(set.iter().flatten()) {
            a.mov_b32(*to, *from);
        }
    }

    /// Loads a run's words and scales.
    fn emit_load(&self, a: &mut Asm, stage: u32, run: u32, words: &Words) {
        let geometry = self.wg.geometry;
        let start =
            stage * geometry.stage_bytes + geometry.rows_bytes + run * geometry.chunk_bytes;
        let ring = self.wg.plan.ring;
        for (tile, scales) in words.scales.iter().enumerate() {
            for (group, scale) in scales.iter().enumerate() {
                let offset = start
                    + tile as u32 * geometry.tile_bytes
                    + CODE_BYTES_PER_TILE as u32
                    + group as u32 * SCALE_ROW_BYTES as u32;
                a.ld_shared_b32(*scale, self.scales_lane.at(offset).within(ring));
            }
        }
        for (half, tiles) in words.codes.iter().enumerate() {
            for (tile, codes) in tiles.iter().enumerate() {
                let offset = start + tile as u32 * geometry.tile_bytes + 512 * half as u32;
                a.ld_shared_v4_b32(*codes, self.weights_lane.at(offset).within(ring));
            }
        }
    }

    /// Fresh registers for a run's words.
    fn fresh_words(&self, a: &mut Asm) -> Words {
        Words {
            codes: [(); 2].map(|()| (0..self.tiles).map(|_| a.regs()).collect()),
            scales: (self.words.scales.iter())
                .map(|groups| groups.iter().map(|_| a.reg()).collect())
                .collect(),
        }
    }

    /// The A registers of a step: four k16 fragments, scaled unless the sums are.
    fn emit_dequantise(&self, a: &mut Asm, words: &Words, half: usize, tile: usize) -> Set {
        let format = self.wg.config.weight_format();
        let steps_per_group = 8 / self.wg.geometry.groups_per_run as usize;
        std::array::from_fn(|k| {
            let fragment = format.emit_fragment(a, &self.constants, words.codes[half][tile][k]);
            match words.scales[tile].get((4 * half + k) / steps_per_group) {
                Some(scale) if !self.promotes => emit_scale_fragment(a, fragment, *scale),
                _ => fragment,
            }
        })
    }

    /// Four products of a step.
    fn emit_products(&self, a: &mut Asm, set: &Set, at: [u32; 3], tile: usize) {
        let geometry = self.wg.geometry;
        let [stage, run, half] = at;
        let start = stage * geometry.stage_bytes + (2 * run + half) * geometry.box_bytes;
        a.wgmma_fence_sync_aligned();
        for (k, fragment) in set.iter().enumerate() {
            let descriptor = a.reg();
            let offset = (start + 32 * k as u32) / 16;
            a.add_u64(descriptor, self.descriptor, u64::from(offset));
            let first_of_run = half == 0 && k == 0;
            let scale_d: In<Pred> = match (first_of_run, self.promotes) {
                (true, true) => false.into(),
                (true, false) if run == 0 => self.accumulates.into(),
                _ => true.into(),
            };
            let n = self.wg.config.tile_m;
            a.wgmma_mma_async_m64k16_f32_f16(n, self.sums[tile], *fragment, descriptor, scale_d);
        }
        a.wgmma_commit_group_sync_aligned();
    }

    /// The runs of a stage, and the first step of the next one.
    fn emit_stage(&self, a: &mut Asm, stage: u32, tail: crate::asm::reg::Label) {
        let wg = self.wg;
        let stages = wg.config.stages;
        let (runs, tiles) = (wg.config.runs_per_stage, self.tiles);
        let mut words = self.words.clone();
        let mut set = self.set;
        for run in 0..runs {
            let scales: Vec<[Reg<F32>; 2]> = match self.promotes {
                true => words.scales.iter().map(|scales| emit_scales(a, scales[0])).collect(),
                false => Vec::new(),
            };
            let mut next_words = None;
            for step in 0..2 * tiles {
                let (half, tile) = (step / tiles, step % tiles);
                let last_step = step + 1 == 2 * tiles;
                if last_step && run + 1 < runs {
                    let next = self.fresh_words(a);
                    self.emit_load(a, stage, run + 1, &next);
                    next_words = Some(next);
                }
                self.emit_products(a, &set, [stage, run, half as u32], tile);
                a.wgmma_wait_group_sync_aligned(1);
                if run == 0 && step == 0 && !self.promotes {
                    // The products of the stage before are complete: it may be filled again.
                    let before = (stage + stages - 1) % stages;
                    let empty = wg.smem.at(wg.plan.empty.start + 8 * before);
                    a.when(self.releases, |a| a.mbarrier_arrive_shared_cta_b64(empty));
                    a.setp_u32(self.accumulates, Cmp::Eq, self.stage, self.stage);
                    a.and_pred(self.releases, wg.elected, wg.elected);
                }
                if !last_step {
                    let (half, tile) = ((step + 1) / tiles, (step + 1) % tiles);
                    set = self.emit_dequantise(a, &words, half, tile);
                } else if let Some(next) = &next_words {
                    set = self.emit_dequantise(a, next, 0, 0);
                } else {
                    a.sub_u32(self.rounds, self.rounds, 1);
                    let finished = a.test_u32(Cmp::Eq, self.rounds, 0);
                    for (to, from) in self.last_scales.iter().flatten().zip(scales.iter().flatten())
                    {
                        a.mov_f32(*to, *from);
                    }
                    if stage + 1 == stages {
                        a.xor_b32(self.parity, self.parity, 1);
                    }
                    a.when(finished, |a| a.bra(tail));
                    self.emit_take(a, (stage + 1) % stages);
                }
            }
            if self.promotes {
                a.wgmma_wait_group_sync_aligned(0);
                self.emit_promote(a, &scales);
                if run + 1 == runs {
                    let empty = wg.smem.at(wg.plan.empty.start + 8 * stage);
                    a.bar_warp_sync(0xffff_ffffu32);
                    a.when(wg.elected, |a| a.mbarrier_arrive_shared_cta_b64(empty));
                }
            }
            if let Some(next) = next_words {
                words = next;
            }
        }
    }

    /// `totals += scales * sums`.
    fn emit_promote(&self, a: &mut Asm, scales: &[[Reg<F32>; 2]]) {
        for ((totals, sums), scales) in self.totals.iter().zip(&self.sums).zip(scales) {
            for (n, total) in totals.iter().flatten().enumerate() {
                a.fma_rn_f32(*total, sums.get(n), scales[n % 4 / 2], *total);
            }
        }
    }
}

/// The scales of channels g and g + 8 in single precision.
fn emit_scales(a: &mut Asm, word: Reg<B32>) -> [Reg<F32>; 2] {
    let halves: [Reg<B16>; 2] = a.regs();
    a.mov_b32_unpack(halves, word);
    halves.map(|half| {
        let scale = a.reg();
        a.cvt_f32_f16(scale, half);
        scale
    })
}

const _: () = assert!(BOX_ROW_BYTES == 128, "the descriptor's stride is 8 rows of 128 bytes");
