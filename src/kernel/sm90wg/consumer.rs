//! The consumers: warpgroups that dequantise words into A registers and keep wgmma busy.
//!
//! A run of 128 inputs is a sequence of steps, one per k64 half and m64 tile: four products from one set of A
//! registers, then the dequantisation of the next step's set while they run. At most one group of products
//! stays in flight. With `Promote` the run ends with a drain, and its sums go into the accumulators times the
//! scales; otherwise the products accumulate by themselves.
//! The loop is unrolled over the ring's stages, so every address is a constant. A segment may end at any stage;
//! each begins at the first, so that the loop has one entry: with several the assembler serialises products.
//! Source: PTX ISA, "wgmma.mma_async", "wgmma.wait_group".

use super::supply::Supply;
use super::{BOX_ROW_BYTES, Place, Wg};
use crate::asm::Asm;
use crate::asm::reg::{Label, Reg, RegRange};
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::Scaling;
use crate::kernel::sm80::run::emit_scale_fragment;
use crate::kernel::stripe::{Segment, Stripe};
use crate::weights::{CODE_BYTES_PER_TILE, Group, SCALE_ROW_BYTES};

/// A shared-memory descriptor for K-major operands with the 128-byte swizzle, without its address: leading
/// offset 1 (unused), stride 1024 B between groups of 8 rows. Source: PTX ISA, "Matrix Descriptor Format".
const DESCRIPTOR: u64 = 0x4000_0040_0001_0000;

/// The A registers of one step: some k16 fragments.
type Set = Vec<[Reg<B32>; 4]>;

/// The scale words of a warp's run, `[tile][group]`.
type Scales = Vec<Vec<Reg<B32>>>;

/// What a step multiplies: some k16 fragments of one m64 tile in one k64 half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    half: usize,
    tile: usize,
    /// First of its k16 steps in the half.
    k16: usize,
}

/// What a stage begins with: its first step is dequantised already.
#[derive(Clone)]
struct Carry {
    /// The words of half 0 of tile 0.
    codes: [Reg<B32>; 4],
    scales: Scales,
    set: Set,
}

/// The last step of a stage and what the end of a segment wants to know.
struct Leaving {
    step: Step,
    run: u32,
    set: Set,
    scales: Vec<[Reg<F32>; 2]>,
}

/// Registers of the consumers.
struct Consumer<'a> {
    wg: &'a Wg<'a>,
    supply: &'a Supply<'a>,
    /// Tiles of 16 channels of a warp, and of 64 channels of its warpgroup.
    tiles: usize,
    /// Sums go through `totals`.
    promotes: bool,
    /// Descriptor of the team's first box in stage 0, and in the current stage. One that advances keeps the
    /// assembler from computing every stage's ahead of the loop, for which it has no registers.
    first_box: Reg<B64>,
    descriptor: Reg<B64>,
    /// The lane's first words of tile 0 in stage 0, and its scale word.
    weights_lane: Reg<B32>,
    scales_lane: Reg<B32>,
    constants: Vec<Reg<B32>>,
    /// What the products accumulate into, per tile.
    sums: Vec<RegRange<F32>>,
    /// Scaled sums, per tile.
    totals: Accumulators,
    /// k16 steps of a step.
    width: usize,
    /// The registers of a stage's top.
    top: Carry,
    /// Scales of the last run, for the tail.
    last_scales: Vec<[Reg<F32>; 2]>,
    rounds: Reg<B32>,
    /// Bit per stage: parity of the phase to wait for.
    phases: Reg<B32>,
    /// Whether this lane gives the stage before back: elected, and there is one.
    releases: Reg<Pred>,
    /// The barrier to give the segment's last stage back to.
    release: Reg<B32>,
}

impl Wg<'_> {
    /// Everything that the consumers do.
    pub(super) fn emit_consume(
        &self,
        a: &mut Asm,
        stripe: &Stripe,
        segment: &Segment,
        supply: &Supply<'_>,
    ) {
        let consumer = a.section("consumers", |a| Consumer::new(a, self, supply));
        consumer.emit(a, stripe, segment);
    }
}

impl<'a> Consumer<'a> {
    fn new(a: &mut Asm, wg: &'a Wg<'a>, supply: &'a Supply<'a>) -> Self {
        let (config, geometry) = (wg.config, wg.geometry);
        let tiles = config.tiles_per_warp() as usize;
        let promotes = config.group != Group::PerColumn && config.scaling == Scaling::Promote;
        let [team, warp_n, rows, low, first, column, tile, base, quad] = a.regs();
        if config.warps_k == 1 {
            a.mov_b32(team, 0);
            a.mov_b32(warp_n, wg.warp);
        } else {
            a.shr_u32(team, wg.warp, config.warps_n.ilog2());
            a.and_b32(warp_n, wg.warp, config.warps_n - 1);
        }
        // The team's boxes.
        let team_boxes = config.runs_per_stage * 2 * geometry.box_bytes;
        a.mad_lo_u32(rows, team, team_boxes, wg.smem);
        a.shr_u32(low, rows, 4);
        a.and_b32(low, low, 0x3fff);
        let first_box = a.reg();
        a.cvt_u64_u32(first_box, low);
        a.add_u64(first_box, first_box, DESCRIPTOR);
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
        // Wide steps leave the products more time, narrow ones take fewer registers.
        let per_tile = config.tile_m / 2;
        let live = per_tile * tiles as u32 * if promotes { 2 } else { 1 };
        let width = if live + 64 > super::registers(config) { 2 } else { 4 };
        let top = Carry {
            codes: a.regs(),
            scales: (0..tiles).map(|_| (0..groups).map(|_| a.reg()).collect()).collect(),
            set: (0..width).map(|_| a.regs()).collect(),
        };
        Self {
            wg,
            supply,
            tiles,
            promotes,
            first_box,
            descriptor: a.reg(),
            weights_lane,
            scales_lane,
            constants: config.weight_format().emit_constants(a),
            sums: (0..tiles).map(|_| a.reg_range(per_tile)).collect(),
            totals: match promotes {
                true => {
                    (0..tiles).map(|_| (0..config.tile_m / 8).map(|_| a.regs()).collect()).collect()
                }
                false => Vec::new(),
            },
            width,
            top,
            last_scales: (0..if promotes { tiles } else { 0 }).map(|_| a.regs()).collect(),
            rounds: a.reg(),
            phases: a.reg(),
            releases: a.reg(),
            release: a.reg(),
        }
    }

    /// The loop over segments.
    fn emit(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let wg = self.wg;
        let stages = wg.config.stages;
        let tails: Vec<Label> = (0..stages).map(|_| a.label("leave")).collect();
        let [segment_top, top, tail] = ["segment", "main_loop", "tail"].map(|name| a.label(name));
        a.section("segment", |a| {
            // Output and scratch belong to the kernel before this one until it has ended.
            a.griddepcontrol_wait();
            a.mov_b32(self.phases, 0);
            a.bind(segment_top);
            wg.emit_rounds(a, segment, self.rounds);
            let totals = self.totals.iter().flatten().flatten().copied();
            let sums = self.sums.iter().flat_map(|sums| sums.iter());
            totals.chain(sums).for_each(|sum| a.mov_f32(sum, 0.0));
            a.setp_u32(self.releases, Cmp::Ne, self.rounds, self.rounds);
            a.mov_b64(self.descriptor, self.first_box);
            self.emit_take(a, 0, &self.top);
            let set = self.emit_prepare(a, &self.top);
            copy_set(a, &self.top.set, &set);
            a.bind(top);
        });
        let mut carry = self.top.clone();
        let mut leaving = Vec::new();
        for stage in 0..stages {
            a.section(&format!("main loop, stage {stage}"), |a| {
                let (next, last) = self.emit_stage(a, stage, &carry, tails[stage as usize]);
                carry = next;
                leaving.push(last);
            });
        }
        a.section("main loop", |a| a.bra(top));
        for (stage, leaving) in leaving.into_iter().enumerate() {
            a.section("leave", |a| {
                a.bind(tails[stage]);
                self.emit_products(a, &leaving.set, leaving.run, leaving.step);
                // Products in flight where paths meet would be serialised by the assembler.
                a.wgmma_wait_group_sync_aligned(0);
                let scales = self.last_scales.iter().flatten();
                for (to, from) in scales.zip(leaving.scales.iter().flatten()) {
                    a.mov_f32(*to, *from);
                }
                a.add_u32(self.release, wg.smem, wg.plan.empty.start + 8 * stage as u32);
                a.bra(tail);
            });
        }
        a.bind(tail);
        a.section("end of the segment", |a| {
            if self.promotes {
                self.emit_promote(a, &self.last_scales);
            }
            a.bar_warp_sync(0xffff_ffffu32);
            a.when(wg.elected, |a| a.mbarrier_arrive_shared_cta_b64(self.release));
        });
        let place = a.section("end of the segment", |a| wg.emit_place(a, segment));
        // The next segment's stages fill while this one's sums are written.
        let next = a.section("next segment", |a| {
            let next = stripe.emit_next(a, segment);
            self.supply.emit_point(a, &next);
            self.supply.emit_fill(a, false);
            next
        });
        self.emit_output(a, segment, &place);
        a.section("next segment", |a| {
            let more = segment.emit_become(a, &next);
            a.when(more, |a| a.bra(segment_top));
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

    /// Waits for a stage and loads what its first step wants.
    fn emit_take(&self, a: &mut Asm, stage: u32, carry: &Carry) {
        let wg = self.wg;
        let parity = a.reg();
        a.shr_u32(parity, self.phases, stage);
        a.and_b32(parity, parity, 1);
        a.xor_b32(self.phases, self.phases, 1u32 << stage);
        wg.emit_wait(a, wg.smem.at(wg.plan.full.start + 8 * stage), parity);
        self.emit_load_codes(a, stage, 0, Step { half: 0, tile: 0, k16: 0 }, carry.codes);
        self.emit_load_scales(a, stage, 0, &carry.scales);
    }

    /// Dequantises a stage's first step.
    fn emit_prepare(&self, a: &mut Asm, carry: &Carry) -> Set {
        let first = Step { half: 0, tile: 0, k16: 0 };
        self.emit_dequantise(a, &carry.codes, &carry.scales, first)
    }

    /// Bytes from the lane's words of tile 0 in stage 0 to a run's.
    fn run_offset(&self, stage: u32, run: u32) -> u32 {
        let geometry = self.wg.geometry;
        stage * geometry.stage_bytes + geometry.rows_bytes + run * geometry.chunk_bytes
    }

    /// Loads the words of a step's half of its tile.
    fn emit_load_codes(&self, a: &mut Asm, stage: u32, run: u32, step: Step, codes: [Reg<B32>; 4]) {
        let tile = step.tile as u32 * self.wg.geometry.tile_bytes;
        let offset = self.run_offset(stage, run) + tile + 512 * step.half as u32;
        a.ld_shared_v4_b32(codes, self.weights_lane.at(offset).within(self.wg.plan.ring));
    }

    fn emit_load_scales(&self, a: &mut Asm, stage: u32, run: u32, scales: &Scales) {
        let geometry = self.wg.geometry;
        for (tile, scales) in scales.iter().enumerate() {
            for (group, scale) in scales.iter().enumerate() {
                let offset = self.run_offset(stage, run)
                    + tile as u32 * geometry.tile_bytes
                    + CODE_BYTES_PER_TILE as u32
                    + group as u32 * SCALE_ROW_BYTES as u32;
                a.ld_shared_b32(*scale, self.scales_lane.at(offset).within(self.wg.plan.ring));
            }
        }
    }

    /// The A registers of a step: k16 fragments, scaled unless the sums are.
    fn emit_dequantise(
        &self,
        a: &mut Asm,
        codes: &[Reg<B32>; 4],
        scales: &Scales,
        step: Step,
    ) -> Set {
        let format = self.wg.config.weight_format();
        let steps_per_group = 8 / self.wg.geometry.groups_per_run as usize;
        (step.k16..step.k16 + self.width)
            .map(|k| {
                let fragment = format.emit_fragment(a, &self.constants, codes[k]);
                match scales[step.tile].get((4 * step.half + k) / steps_per_group) {
                    Some(scale) if !self.promotes => emit_scale_fragment(a, fragment, *scale),
                    _ => fragment,
                }
            })
            .collect()
    }

    /// The products of a step, as one group.
    fn emit_products(&self, a: &mut Asm, set: &Set, run: u32, step: Step) {
        let geometry = self.wg.geometry;
        let start = (2 * run + step.half as u32) * geometry.box_bytes;
        a.wgmma_fence_sync_aligned();
        for (k, fragment) in set.iter().enumerate() {
            let descriptor = a.reg();
            let offset = (start + 32 * (step.k16 + k) as u32) / 16;
            a.add_u64(descriptor, self.descriptor, u64::from(offset));
            let begins = step.half == 0 && step.k16 == 0 && k == 0;
            let scale_d = !(self.promotes && begins);
            let n = self.wg.config.tile_m;
            let sums = self.sums[step.tile];
            a.wgmma_mma_async_m64k16_f32_f16(n, sums, *fragment, descriptor, scale_d);
        }
        a.wgmma_commit_group_sync_aligned();
    }

    /// The steps of a run, in order.
    fn steps(&self) -> Vec<Step> {
        let tiles = self.tiles;
        let parts = (0..4).step_by(self.width);
        (0..2 * tiles)
            .flat_map(|n| {
                let (half, tile) = (n / tiles, n % tiles);
                parts.clone().map(move |k16| Step { half, tile, k16 })
            })
            .collect()
    }

    /// The runs of a stage, and what the next stage begins with.
    fn emit_stage(&self, a: &mut Asm, stage: u32, carry: &Carry, tail: Label) -> (Carry, Leaving) {
        let wg = self.wg;
        let stages = wg.config.stages;
        let next_stage = (stage + 1) % stages;
        let runs = wg.config.runs_per_stage;
        let steps = self.steps();
        let Carry { mut codes, mut scales, mut set } = carry.clone();
        // The loop's first stage has its own registers, which the last one fills.
        let mut after = match next_stage {
            0 => self.top.clone(),
            _ => Carry {
                codes: a.regs(),
                scales: (scales.iter())
                    .map(|groups| groups.iter().map(|_| a.reg()).collect())
                    .collect(),
                set: Vec::new(),
            },
        };
        for run in 0..runs {
            let factors: Vec<[Reg<F32>; 2]> = match self.promotes {
                true => scales.iter().map(|scales| emit_scales(a, scales[0])).collect(),
                false => Vec::new(),
            };
            for (n, &step) in steps.iter().enumerate() {
                let next = steps.get(n + 1).copied();
                let leaves = next.is_none() && run + 1 == runs;
                if leaves {
                    // Every warp has left the stage before, or is about to.
                    let skip = a.label("no_refill");
                    self.supply.emit_refill(a, (stage + stages - 1) % stages, skip);
                }
                // Loads run while this step's products do.
                match next {
                    Some(next) if next.k16 == 0 => {
                        let words = a.regs();
                        self.emit_load_codes(a, stage, run, next, words);
                        codes = words;
                    }
                    Some(_) => {}
                    None if leaves => {
                        a.sub_u32(self.rounds, self.rounds, 1);
                        let finished = a.test_u32(Cmp::Eq, self.rounds, 0);
                        a.when(finished, |a| a.bra(tail));
                        self.emit_take(a, next_stage, &after);
                    }
                    None => {
                        codes = a.regs();
                        let first = Step { half: 0, tile: 0, k16: 0 };
                        self.emit_load_codes(a, stage, run + 1, first, codes);
                        let next: Scales = (scales.iter())
                            .map(|groups| groups.iter().map(|_| a.reg()).collect())
                            .collect();
                        self.emit_load_scales(a, stage, run + 1, &next);
                        scales = next;
                    }
                }
                self.emit_products(a, &set, run, step);
                a.wgmma_wait_group_sync_aligned(1);
                if run == 0 && n == 0 && !self.promotes {
                    // The products of the stage before are complete: it may be filled again.
                    let before = (stage + stages - 1) % stages;
                    let empty = wg.smem.at(wg.plan.empty.start + 8 * before);
                    a.bar_warp_sync(0xffff_ffffu32);
                    a.when(self.releases, |a| a.mbarrier_arrive_shared_cta_b64(empty));
                    a.and_pred(self.releases, wg.elected, wg.elected);
                }
                match next {
                    Some(next) => set = self.emit_dequantise(a, &codes, &scales, next),
                    None if leaves => {
                        let leaving =
                            Leaving { step, run, set: set.clone(), scales: factors.clone() };
                        let first = self.emit_prepare(a, &after);
                        match next_stage {
                            0 => copy_set(a, &self.top.set, &first),
                            _ => after.set = first,
                        }
                        if next_stage == 0 {
                            a.mov_b64(self.descriptor, self.first_box);
                        } else {
                            let boxes = u64::from(wg.geometry.stage_bytes / 16);
                            a.add_u64(self.descriptor, self.descriptor, boxes);
                        }
                        if self.promotes {
                            a.wgmma_wait_group_sync_aligned(0);
                            self.emit_promote(a, &factors);
                            let empty = wg.smem.at(wg.plan.empty.start + 8 * stage);
                            a.bar_warp_sync(0xffff_ffffu32);
                            a.when(wg.elected, |a| a.mbarrier_arrive_shared_cta_b64(empty));
                        }
                        return (after, leaving);
                    }
                    None => {
                        let first = Step { half: 0, tile: 0, k16: 0 };
                        set = self.emit_dequantise(a, &codes, &scales, first);
                        if self.promotes {
                            a.wgmma_wait_group_sync_aligned(0);
                            self.emit_promote(a, &factors);
                        }
                    }
                }
            }
        }
        unreachable!("a stage has a run, and a run a last step")
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

fn copy_set(a: &mut Asm, to: &Set, from: &Set) {
    for (to, from) in to.iter().flatten().zip(from.iter().flatten()) {
        a.mov_b32(*to, *from);
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
