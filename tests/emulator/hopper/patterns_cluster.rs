//! Pairs of CTAs: sums exchanged through each other's memory, activations sent to both.

use half::f16;
use makaira::asm::Asm;
use makaira::asm::reg::Reg;
use makaira::asm::types::{B16, B32, B64, Cmp, F32, Special};
use makaira::backend::{Arg, Swizzle, TensorMap};

use super::super::common::Random;
use super::patterns::{fragments, halves};
use super::{Case, Device, Pattern, descriptor, elect, elect_in, module, plus, wait};

fn pointer(asm: &mut Asm, name: &'static str) -> Reg<B64> {
    let param = asm.param_u64(name);
    let reg = asm.reg();
    asm.ld_param_u64(reg, param);
    reg
}

fn rank(asm: &mut Asm) -> Reg<B32> {
    let rank = asm.reg();
    asm.mov_u32_special(rank, Special::ClusterCtarank);
    rank
}

/// Two CTAs add up two halves each of 64 x 2 x 4 floats: each thread sends four to the other CTA, over memory
/// that a bulk copy has used before, and stores the sum of the four that it kept and the four that came.
pub fn exchanged_sums() -> Pattern {
    let module = module(64, 2, |asm, p| {
        let buffer = asm.smem.region("buffer", 2048, 128);
        let bars = asm.smem.region("barriers", 16, 16);
        let (input, out) = (pointer(asm, "input"), pointer(asm, "out"));
        let (full, sums) = (p.smem.at(bars.start), p.smem.at(bars.start + 8));
        let rank = rank(asm);
        let first = elect_in(asm, p, 0);
        asm.section("begin", |asm| {
            asm.when(first, |asm| {
                asm.mbarrier_init_shared_b64(full, 1);
                asm.mbarrier_init_shared_b64(sums, 1);
                asm.fence_mbarrier_init_release_cluster();
            });
            asm.barrier_cluster_arrive_relaxed_aligned();
            asm.barrier_cluster_wait_acquire_aligned();
        });
        let values = [(); 2].map(|()| asm.regs::<F32, 4>());
        asm.section("load", |asm| {
            let from = asm.reg::<B64>();
            asm.mad_wide_u32(from, rank, 2048, input);
            asm.when(first, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(full, 2048);
                asm.cp_async_bulk_shared_global(p.smem.at(buffer.start), from, 2048, full);
                // What the other CTA will send.
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(sums, 1024);
            });
            wait(asm, full, 0);
            let mine = asm.reg();
            asm.mad_lo_u32(mine, p.tid, 16, p.smem);
            for (half, values) in values.into_iter().enumerate() {
                asm.ld_shared_v4_f32(values, mine.at(buffer.start + 1024 * half as u32));
            }
        });
        asm.section("exchange", |asm| {
            // The other CTA writes over what this one has read: both say that they have.
            asm.barrier_cluster_arrive_release_aligned();
            asm.barrier_cluster_wait_acquire_aligned();
            let (other, mine, to, bar) = (asm.reg(), asm.reg(), asm.reg(), asm.reg());
            asm.xor_b32(other, rank, 1);
            asm.mad_lo_u32(mine, p.tid, 16, p.smem);
            asm.mapa_shared_cluster_u32(to, mine, other);
            asm.mapa_shared_cluster_u32(bar, p.smem, other);
            let is_low = asm.test_u32(Cmp::Eq, rank, 0);
            let [kept, sent] = [(); 2].map(|()| asm.regs::<F32, 4>());
            for n in 0..4 {
                asm.selp_f32(kept[n], values[0][n], values[1][n], is_low);
                asm.selp_f32(sent[n], values[1][n], values[0][n], is_low);
            }
            asm.st_async_shared_cluster_v4_f32(to.at(buffer.start), sent, bar.at(bars.start + 8));
            wait(asm, sums, 0);
            let came = asm.regs::<F32, 4>();
            asm.ld_shared_v4_f32(came, mine.at(buffer.start));
            (0..4).for_each(|n| asm.add_f32(kept[n], kept[n], came[n]));
            let place = asm.reg::<B64>();
            asm.mad_wide_u32(place, rank, 1024, out);
            asm.mad_wide_u32(place, p.tid, 16, place);
            asm.griddepcontrol_wait();
            asm.st_global_v4_f32(place, kept);
        });
    });
    let setup = |device: &Device<'_>, random: &mut Random| {
        let input: Vec<f32> = (0..1024).map(|_| random.below(100) as f32 - 50.0).collect();
        let sum = |n: usize| (input[n] + input[512 + n]).to_bits();
        let expected = (0..512).map(sum).collect();
        let result = device.upload(&[0.0f32; 512]);
        let args = vec![device.upload(&input).into(), result.into()];
        Case { args, written: vec![(result, 512)], result, expected }
    };
    Pattern { name: "exchanged sums", module, grid: [2, 1], setup: Box::new(setup) }
}

/// Two CTAs with 64 channels each share 16 tokens: each fetches 8 of them for both, stage by stage, once the
/// consumers of both have left the stage.
pub fn multicast_pair() -> Pattern {
    const STAGES: u32 = 2;
    const TURNS: u32 = 5;
    const TOKEN_BYTES: u32 = 16 * 128;
    let module = module(160 + 96, 2, |asm, p| {
        let ring = asm.smem.region("ring", STAGES * TOKEN_BYTES, 1024);
        let bars = asm.smem.region("barriers", 16 * STAGES, 16);
        let weights = pointer(asm, "weights");
        let param = asm.param_tensor_map("x");
        let x = asm.reg();
        asm.mov_b64_param(x, param);
        let out = pointer(asm, "out");
        let rank = rank(asm);
        let full = |s: u32| p.smem.at(bars.start + 8 * s).within(bars);
        let empty = |s: u32| p.smem.at(bars.start + 8 * (STAGES + s)).within(bars);
        asm.section("begin", |asm| {
            let first = elect_in(asm, p, 0);
            asm.when(first, |asm| {
                for s in 0..STAGES {
                    asm.mbarrier_init_shared_b64(full(s), 1);
                    asm.mbarrier_init_shared_b64(empty(s), 8);
                }
                asm.fence_mbarrier_init_release_cluster();
            });
            asm.barrier_cluster_arrive_relaxed_aligned();
            asm.barrier_cluster_wait_acquire_aligned();
        });
        let (consume, done) = (asm.label("consume"), asm.label("done"));
        let is_consumer = asm.test_u32(Cmp::Lt, p.warp, 4);
        asm.when(is_consumer, |asm| asm.bra_uni(consume));
        asm.section("producer", |asm| {
            let is_idle = asm.test_u32(Cmp::Ne, p.warp, 4);
            asm.when(is_idle, |asm| asm.bra_uni(done));
            let one = elect(asm);
            let (row, to) = (asm.reg(), asm.reg());
            asm.mul_lo_u32(row, rank, 8);
            asm.mad_lo_u32(to, rank, 1024, p.smem);
            let (word, both) = (asm.reg::<B32>(), asm.regs::<B16, 2>());
            asm.mov_b32(word, 3);
            asm.mov_b32_unpack(both, word);
            asm.griddepcontrol_wait();
            for turn in 0..TURNS {
                let s = turn % STAGES;
                if turn >= STAGES {
                    wait(asm, empty(s), turn / STAGES % 2 ^ 1);
                }
                let column = asm.reg();
                asm.mov_b32(column, 64 * turn);
                asm.when(one, |asm| {
                    asm.mbarrier_arrive_expect_tx_shared_cta_b64(full(s), TOKEN_BYTES);
                    let to = to.at(ring.start + s * TOKEN_BYTES);
                    asm.cp_async_bulk_tensor_2d_shared_global_multicast(
                        to,
                        x,
                        column,
                        row,
                        full(s),
                        both[0],
                    );
                });
            }
            asm.bra_uni(done);
        });
        asm.bind(consume);
        asm.section("consumers", |asm| {
            let other = asm.reg();
            asm.xor_b32(other, rank, 1);
            let there = asm.reg();
            asm.mapa_shared_cluster_u32(there, p.smem, other);
            let one = elect(asm);
            let from = asm.reg::<B64>();
            asm.mad_wide_u32(from, rank, TURNS * 8192, weights);
            asm.mad_wide_u32(from, p.tid, 16, from);
            let sums = asm.reg_range::<F32>(8);
            for turn in 0..TURNS {
                let s = turn % STAGES;
                let steps = [(); 4].map(|()| asm.regs::<B32, 4>());
                for (step, a) in steps.iter().enumerate() {
                    asm.ld_global_v4_b32(*a, from.at((turn * 8192) as i32 + 2048 * step as i32));
                }
                wait(asm, full(s), turn / STAGES % 2);
                let tokens = plus(asm, p.smem, ring.start + s * TOKEN_BYTES);
                let first = descriptor(asm, tokens);
                asm.wgmma_fence_sync_aligned();
                for (step, a) in steps.into_iter().enumerate() {
                    let desc = asm.reg();
                    asm.add_u64(desc, first, 2 * step as u64);
                    let more = turn + step as u32 > 0;
                    asm.wgmma_mma_async_m64k16_f32_f16(16, sums, a, desc, more);
                }
                // Nobody waits for the last releases, as in a loop; that they come is all the same.
                let part = if turn + STAGES < TURNS { "release" } else { "drain" };
                asm.section(part, |asm| {
                    asm.wgmma_commit_group_sync_aligned();
                    asm.wgmma_wait_group_sync_aligned(0);
                    asm.when(one, |asm| {
                        asm.mbarrier_arrive_shared_cta_b64(empty(s));
                        let bar = there.at(bars.start + 8 * (STAGES + s)).within(bars);
                        asm.mbarrier_arrive_shared_cluster_b64(bar);
                    });
                });
            }
            let place = asm.reg::<B64>();
            asm.mad_wide_u32(place, rank, 4096, out);
            asm.mad_wide_u32(place, p.tid, 32, place);
            for half in 0..2 {
                let part = [0, 1, 2, 3].map(|n| sums.get(4 * half + n));
                asm.st_global_v4_f32(place.at(16 * half as i32), part);
            }
        });
        asm.bind(done);
        asm.section("end", |asm| {
            asm.barrier_cluster_arrive_release_aligned();
            asm.barrier_cluster_wait_acquire_aligned();
        });
    });
    let setup = |device: &Device<'_>, random: &mut Random| {
        let k = 64 * TURNS as usize;
        let (a, x) = (halves(random, 128 * k), halves(random, 16 * k));
        let weights: Vec<f16> = a.chunks(64 * k).flat_map(|rows| fragments(rows, k)).collect();
        let tokens = device.upload(&x);
        let map = TensorMap {
            base: tokens,
            elements: [k as u64, 16],
            row_bytes: 2 * k as u64,
            tile: [64, 8],
            swizzle: Swizzle::B128,
        };
        let result = device.alloc(8192);
        let args = vec![device.upload(&weights).into(), Arg::TensorMap(map), result.into()];
        let value = |n: usize| {
            let (cta, thread, reg) = (n / 1024, n / 8 % 128, n % 8);
            let (row, token) = makaira::layout::wgmma_m64k16::d(thread as u32 % 32, reg as u32);
            let channel = 64 * cta + 16 * (thread / 32) + row as usize;
            let products =
                (0..k).map(|i| a[channel * k + i].to_f32() * x[token as usize * k + i].to_f32());
            products.sum::<f32>().to_bits()
        };
        let written = vec![(tokens, x.len() / 2)];
        Case { args, written, result, expected: (0..2048).map(value).collect() }
    };
    Pattern { name: "multicast pair", module, grid: [2, 1], setup: Box::new(setup) }
}
