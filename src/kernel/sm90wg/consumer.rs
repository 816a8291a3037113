//! The consumers: warpgroups that dequantise words into A registers and keep wgmma busy.
//!
//! A run of 128 inputs is a sequence of steps, one per k64 half and m64 tile: four products from one set of A
//! registers, then the dequantisation of the next step's set while they run. At most one group of products
//! stays in flight. With `Promote` the run ends with a drain, and its sums go into the accumulators times the
//! scales; otherwise the products accumulate by themselves.
//! The loop's body is one stage; its addresses are registers that advance from stage to stage, so a segment may
//! begin and end at any of them and the ring never drains between segments.
//! Source: PTX ISA, "wgmma.mma_async", "wgmma.wait_group".

use super::supply::Supply;
use super::{BOX_ROW_BYTES, Place, Wg};
use crate::asm::Asm;
use crate::asm::reg::{Label, Reg, RegRange};
use crate::asm::types::{B32, B64, Cmp, F32, Pred};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::stripe::{Segment, Stripe};
use crate::kernel::tile::{Source, Tile, Words, emit_scales};
use crate::weights::Activation;

/// A shared-memory descriptor for K-major operands with the 128-byte swizzle, without its address: leading
/// offset 1 (unused), stride 1024 B between groups of 8 rows. Source: PTX ISA, "Matrix Descriptor Format".
const DESCRIPTOR: u64 = 0x4000_0040_0001_0000;

/// The A registers of one step: some k16 fragments.
type Set = Vec<[Reg<B32>; 4]>;

/// The words of scales and zeros of a warp's run, by tile.
type Scales = Vec<TileScales>;

/// The words of scales and zeros of a tile.
#[derive(Clone)]
struct TileScales {
    scales: Words,
    zeros: Words,
}

impl TileScales {
    /// Registers for the words.
    fn new(a: &mut Asm, tile: &Tile) -> Self {
        let mut regs = |count| (0..count).map(|_| a.reg()).collect();
        Self { scales: regs(tile.num_scale_words()), zeros: regs(tile.num_zero_words()) }
    }
}

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
    codes: Words,
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
    /// The stage: descriptor of the team's first box, the lane's first words of tile 0 and its scale word,
    /// the barrier, and the parity of the phase to wait for.
    descriptor: Reg<B64>,
    first_box: Reg<B32>,
    weights_lane: Reg<B32>,
    scales_lane: Reg<B32>,
    full: Reg<B32>,
    parity: Reg<B32>,
    /// One past the last stage's barrier.
    full_end: Reg<B32>,
    /// The barrier of the stage before, to give it back.
    before: Reg<B32>,
    constants: Vec<Reg<B32>>,
    /// What the products accumulate into, per tile.
    sums: Vec<RegRange<F32>>,
    /// Scaled sums, per tile.
    totals: Accumulators,
    /// k16 steps of a step.
    width: usize,
    /// The registers of a stage's top.
    top: Carry,
    rounds: Reg<B32>,
    /// Whether this lane gives the stage before back: elected, and there is one.
    releases: Reg<Pred>,
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
        let promotes = super::promotes(config);
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
        let descriptor = emit_descriptor(a, low);
        // The warp's tiles of 16 channels, in its column of 64.
        a.mul_lo_u32(first, warp_n, tiles as u32);
        a.shr_u32(column, first, 2);
        a.and_b32(tile, first, 3);
        a.mad_lo_u32(base, column, geometry.column_bytes, wg.smem);
        a.mad_lo_u32(base, tile, geometry.tile.bytes, base);
        a.mad_lo_u32(base, team, config.runs_per_stage * geometry.chunk_bytes, base);
        let [weights_lane, scales_lane] = a.regs();
        a.mad_lo_u32(weights_lane, wg.lane, 16, base);
        a.shr_u32(quad, wg.lane, 2);
        a.mad_lo_u32(scales_lane, quad, geometry.tile.scale_bytes_per_row(), base);
        let [full, full_end, parity] = a.regs();
        a.add_u32(full, wg.smem, wg.plan.full.start);
        a.add_u32(full_end, full, 8 * config.stages);
        a.mov_b32(parity, 0);
        // Wide steps leave the products more time, narrow ones take fewer registers.
        let per_tile = config.tile_m / 2;
        let live = per_tile * tiles as u32 * if promotes { 2 } else { 1 };
        let available = super::registers(config);
        let others = match tiles {
            1 if available > 80 => 64,
            1 => 80,
            _ => 80 + 16 * geometry.tile.num_factor_words().max(1),
        } + 8 * (geometry.tile.words_per_step() as u32 - 1);
        let width = if live + others > available { 2 } else { 4 };
        let top = Carry {
            codes: (0..4 * geometry.tile.words_per_step()).map(|_| a.reg()).collect(),
            scales: (0..tiles).map(|_| TileScales::new(a, &geometry.tile)).collect(),
            set: (0..width).map(|_| a.regs()).collect(),
        };
        Self {
            wg,
            supply,
            tiles,
            promotes,
            descriptor,
            first_box: low,
            weights_lane,
            scales_lane,
            full,
            parity,
            full_end,
            before: a.reg(),
            constants: config.kind.fragments().emit_constants(a, config.kind.activation),
            sums: (0..tiles).map(|_| a.reg_range(per_tile)).collect(),
            totals: match promotes {
                true => {
                    (0..tiles).map(|_| (0..config.tile_m / 8).map(|_| a.regs()).collect()).collect()
                }
                false => Vec::new(),
            },
            width,
            top,
            rounds: a.reg(),
            releases: a.reg(),
        }
    }

    /// The loop over segments.
    fn emit(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment) {
        let wg = self.wg;
        let [segment_top, top, leave] = ["segment", "main_loop", "leave"].map(|name| a.label(name));
        a.section("segment", |a| {
            // Output and scratch belong to the kernel before this one until it has ended.
            a.griddepcontrol_wait();
            a.mov_b32(self.before, self.full);
            a.bind(segment_top);
            wg.emit_rounds(a, segment, self.rounds);
            let totals = self.totals.iter().flatten().flatten().copied();
            let sums = self.sums.iter().flat_map(|sums| sums.iter());
            totals.chain(sums).for_each(|sum| a.mov_f32(sum, 0.0));
            a.setp_u32(self.releases, Cmp::Ne, self.rounds, self.rounds);
            self.emit_take(a);
            self.emit_prepare(a);
            a.bind(top);
        });
        let leaving = a.section("main loop", |a| {
            let leaving = self.emit_stage(a, leave);
            a.bra(top);
            leaving
        });
        a.section("end of the segment", |a| {
            a.bind(leave);
            self.emit_products(a, &leaving.set, leaving.run, leaving.step);
            self.emit_advance(a);
            a.wgmma_wait_group_sync_aligned(0);
            if self.promotes {
                self.emit_promote(a, &leaving.scales);
            }
            self.emit_release(a, wg.elected);
        });
        let place = a.section("end of the segment", |a| wg.emit_place(a, segment));
        self.emit_output(a, stripe, segment, &place);
        a.section("next segment", |a| {
            let next = stripe.emit_next(a, segment);
            let more = segment.emit_become(a, &next);
            a.when(more, |a| a.bra(segment_top));
        });
    }

    /// Goes on to the next stage.
    fn emit_advance(&self, a: &mut Asm) {
        let (wg, geometry) = (self.wg, self.wg.geometry);
        let bytes = geometry.stage_bytes;
        a.add_u32(self.before, self.full, wg.plan.empty.start - wg.plan.full.start);
        a.add_u32(self.weights_lane, self.weights_lane, bytes);
        a.add_u32(self.scales_lane, self.scales_lane, bytes);
        a.add_u32(self.first_box, self.first_box, bytes / 16);
        a.add_u32(self.full, self.full, 8);
        let wraps = a.test_u32(Cmp::Eq, self.full, self.full_end);
        let ring = wg.config.stages * bytes;
        a.when(wraps, |a| {
            a.sub_u32(self.weights_lane, self.weights_lane, ring);
            a.sub_u32(self.scales_lane, self.scales_lane, ring);
            a.sub_u32(self.first_box, self.first_box, ring / 16);
            a.sub_u32(self.full, self.full, 8 * wg.config.stages);
            a.xor_b32(self.parity, self.parity, 1);
        });
        let descriptor = emit_descriptor(a, self.first_box);
        a.mov_b64(self.descriptor, descriptor);
    }

    /// Gives the stage before back.
    fn emit_release(&self, a: &mut Asm, releases: Reg<Pred>) {
        // The elected lane speaks for all lanes' loads.
        a.bar_warp_sync(0xffff_ffffu32);
        a.when(releases, |a| a.mbarrier_arrive_shared_cta_b64(self.before));
    }

    fn emit_output(&self, a: &mut Asm, stripe: &Stripe, segment: &Segment, place: &Place) {
        let sums = match self.promotes {
            true => self.totals.clone(),
            false => (self.sums.iter())
                .map(|sums| {
                    let fragments = self.wg.config.tile_m as usize / 8;
                    (0..fragments).map(|j| std::array::from_fn(|r| sums.get(4 * j + r))).collect()
                })
                .collect(),
        };
        self.wg.emit_output(a, &sums, stripe, segment, place);
    }

    /// Waits for the stage and loads what its first step wants.
    fn emit_take(&self, a: &mut Asm) {
        self.wg.emit_wait(a, self.full.into(), self.parity);
        self.emit_load_codes(a, 0, Step { half: 0, tile: 0, k16: 0 }, &self.top.codes);
        self.emit_load_scales(a, 0, &self.top.scales);
    }

    /// Dequantises the stage's first step.
    fn emit_prepare(&self, a: &mut Asm) {
        let first = Step { half: 0, tile: 0, k16: 0 };
        let set = self.emit_dequantise(a, &self.top.codes, &self.top.scales, first);
        for (to, from) in self.top.set.iter().flatten().zip(set.iter().flatten()) {
            a.mov_b32(*to, *from);
        }
    }

    /// Bytes from the lane's words of tile 0 in the stage to a run's.
    fn run_offset(&self, run: u32) -> u32 {
        self.wg.geometry.rows_bytes + run * self.wg.geometry.chunk_bytes
    }

    /// Where the lane finds a tile of a run.
    fn source(&self, run: u32, tile: usize) -> Source {
        Source {
            words: self.weights_lane,
            scales: self.scales_lane,
            start: self.run_offset(run) + tile as u32 * self.wg.geometry.tile.bytes,
            region: self.wg.plan.ring,
        }
    }

    /// Registers for the words of half a tile.
    fn code_regs(&self, a: &mut Asm) -> Words {
        self.top.codes.iter().map(|_| a.reg()).collect()
    }

    /// Loads the words of a step's half of its tile.
    fn emit_load_codes(&self, a: &mut Asm, run: u32, step: Step, codes: &Words) {
        let tile = &self.wg.geometry.tile;
        for (n, vector) in codes.as_chunks().0.iter().enumerate() {
            let first = 4 * step.half as u32 + n as u32 * tile.steps_per_vector();
            tile.emit_load_vector(a, self.source(run, step.tile), first, *vector);
        }
    }

    fn emit_load_scales(&self, a: &mut Asm, run: u32, scales: &Scales) {
        let tile = &self.wg.geometry.tile;
        for (n, words) in scales.iter().enumerate() {
            for group in 0..tile.groups {
                tile.emit_load_scales(a, self.source(run, n), group, &words.scales);
                tile.emit_load_zeros(a, self.source(run, n), group, &words.zeros);
            }
        }
    }

    /// The A registers of a step: k16 fragments, scaled unless the sums are.
    fn emit_dequantise(&self, a: &mut Asm, codes: &Words, scales: &Scales, step: Step) -> Set {
        let tile = &self.wg.geometry.tile;
        let (per_step, words) = (tile.words_per_step(), &scales[step.tile]);
        let scaled = !self.promotes && !words.scales.is_empty();
        // What the newest group asks for.
        let (mut newest, mut scale, mut zeros) = (None, None, None);
        (step.k16..step.k16 + self.width)
            .map(|k| {
                let group = (4 * step.half + k) as u32 / tile.steps_per_group();
                if newest.replace(group) != Some(group) {
                    scale = scaled.then(|| tile.emit_scale_word(a, &words.scales, group));
                    zeros = tile.emit_zeros(a, &words.zeros, group);
                }
                let words = &codes[k * per_step..(k + 1) * per_step];
                let fragment = tile.emit_fragment(a, &self.constants, zeros, words);
                match scale {
                    Some(scale) => tile.emit_scale_fragment(a, fragment, scale),
                    None => fragment,
                }
            })
            .collect()
    }

    /// The products of a step, as one group.
    fn emit_products(&self, a: &mut Asm, set: &Set, run: u32, step: Step) {
        self.emit_products_at(a, self.descriptor, set, run, step);
    }

    /// The same, of a stage whose first box has another descriptor than the current one.
    fn emit_products_at(&self, a: &mut Asm, first_box: Reg<B64>, set: &Set, run: u32, step: Step) {
        let geometry = self.wg.geometry;
        let start = (2 * run + step.half as u32) * geometry.box_bytes;
        a.wgmma_fence_sync_aligned();
        for (k, fragment) in set.iter().enumerate() {
            let descriptor = a.reg();
            let offset = (start + 32 * (step.k16 + k) as u32) / 16;
            a.add_u64(descriptor, first_box, u64::from(offset));
            let begins = step.half == 0 && step.k16 == 0 && k == 0;
            let scale_d = !(self.promotes && begins);
            let n = self.wg.config.tile_m;
            let sums = self.sums[step.tile];
            match self.wg.config.kind.activation {
                Activation::F16 => {
                    a.wgmma_mma_async_m64k16_f32_f16(n, sums, *fragment, descriptor, scale_d);
                }
                Activation::Bf16 => {
                    a.wgmma_mma_async_m64k16_f32_bf16(n, sums, *fragment, descriptor, scale_d);
                }
            }
        }
        a.wgmma_commit_group_sync_aligned();
    }

    /// The steps of a run, in order: tile by tile, so that the products in flight where the loop may be left
    /// are all of one tile. The assembler loses track of others there, and serialises.
    fn steps(&self) -> Vec<Step> {
        let parts = (0..4).step_by(self.width);
        (0..2 * self.tiles)
            .flat_map(|n| {
                let (tile, half) = (n / 2, n % 2);
                parts.clone().map(move |k16| Step { half, tile, k16 })
            })
            .collect()
    }

    /// The runs of a stage, and the first step of the next one. Leaves before the last step's products if the
    /// segment ends there.
    fn emit_stage(&self, a: &mut Asm, leave: Label) -> Leaving {
        let wg = self.wg;
        let runs = wg.config.runs_per_stage;
        let steps = self.steps();
        let first = Step { half: 0, tile: 0, k16: 0 };
        let Carry { mut codes, mut scales, mut set } = self.top.clone();
        for run in 0..runs {
            let factors: Vec<[Reg<F32>; 2]> = match self.promotes {
                true => scales.iter().map(|words| emit_scales(a, words.scales[0])).collect(),
                false => Vec::new(),
            };
            for (n, &step) in steps.iter().enumerate() {
                let next = steps.get(n + 1).copied();
                let leaves = next.is_none() && run + 1 == runs;
                // Loads run while this step's products do.
                match next {
                    Some(next) if next.k16 == 0 => {
                        codes = self.code_regs(a);
                        self.emit_load_codes(a, run, next, &codes);
                    }
                    Some(_) => {}
                    None if leaves => {
                        // Every warp has left the stage before, or is about to.
                        self.supply.emit_refill(a);
                        a.sub_u32(self.rounds, self.rounds, 1);
                        let finished = a.test_u32(Cmp::Eq, self.rounds, 0);
                        a.when(finished, |a| a.bra(leave));
                        let leaving =
                            Leaving { step, run, set: set.clone(), scales: factors.clone() };
                        let products = a.reg();
                        a.mov_b64(products, self.descriptor);
                        self.emit_advance(a);
                        self.emit_take(a);
                        self.emit_products_at(a, products, &set, run, step);
                        a.wgmma_wait_group_sync_aligned(1);
                        self.emit_prepare(a);
                        if self.promotes {
                            a.wgmma_wait_group_sync_aligned(0);
                            self.emit_promote(a, &factors);
                        }
                        return leaving;
                    }
                    None => {
                        codes = self.code_regs(a);
                        self.emit_load_codes(a, run + 1, first, &codes);
                        let next: Scales = (scales.iter())
                            .map(|_| TileScales::new(a, &wg.geometry.tile))
                            .collect();
                        self.emit_load_scales(a, run + 1, &next);
                        scales = next;
                    }
                }
                self.emit_products(a, &set, run, step);
                a.wgmma_wait_group_sync_aligned(1);
                if run == 0 && n == 0 {
                    // The products of the stage before are complete: it may be filled again.
                    self.emit_release(a, self.releases);
                    a.and_pred(self.releases, wg.elected, wg.elected);
                }
                set = self.emit_dequantise(a, &codes, &scales, next.unwrap_or(first));
                if self.promotes && next.is_none() {
                    a.wgmma_wait_group_sync_aligned(0);
                    self.emit_promote(a, &factors);
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

/// The descriptor of the box at `first_box` times 16 bytes. The shuffle tells the assembler that it is the same
/// in all lanes: descriptors must be in uniform registers, and from others it copies them before each product.
fn emit_descriptor(a: &mut Asm, first_box: Reg<B32>) -> Reg<B64> {
    let uniform = a.reg();
    a.shfl_sync_idx_b32(uniform, first_box, 0);
    let descriptor = a.reg();
    a.cvt_u64_u32(descriptor, uniform);
    a.add_u64(descriptor, descriptor, DESCRIPTOR);
    descriptor
}

const _: () = assert!(BOX_ROW_BYTES == 128, "the descriptor's stride is 8 rows of 128 bytes");
