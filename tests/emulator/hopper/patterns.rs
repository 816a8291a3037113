//! One CTA: a producer warp feeding consumers' products, and warps that feed themselves.

use half::f16;
use makaira::asm::Asm;
use makaira::asm::reg::SharedAddr;
use makaira::asm::types::{B32, B64, Cmp, F32};
use makaira::backend::{Arg, Swizzle, TensorMap};
use makaira::layout::{mma_m16n8k16, wgmma_m64k16};

use super::super::common::Random;
use super::{Case, Device, Pattern, descriptor, elect, elect_in, map, module, plus, pointer, wait};

/// Small integers: every sum is exact.
pub fn halves(random: &mut Random, len: usize) -> Vec<f16> {
    (0..len).map(|_| f16::from_f32(random.below(9) as f32 - 4.0)).collect()
}

/// `[64 rows][k]` in the order in which the threads of a warpgroup hold A fragments: for each k16 step and
/// thread 16 bytes.
pub fn fragments(a: &[f16], k: usize) -> Vec<f16> {
    let mut words = Vec::with_capacity(a.len());
    for step in 0..k / 16 {
        for thread in 0..128u32 {
            for (reg, half) in (0..4).flat_map(|reg| [(reg, 0), (reg, 1)]) {
                let (row, column) = wgmma_m64k16::a(thread % 32, reg, half);
                let row = (16 * (thread / 32) + row) as usize;
                words.push(a[row * k + 16 * step + column as usize]);
            }
        }
    }
    words
}

/// Stages of a ring and turns through it.
const STAGES: u32 = 2;
const TURNS: u32 = 5;
const TOKENS: u32 = 16;
/// Bytes of a stage: weights of 64 channels and activations of 64 k.
const WEIGHT_BYTES: u32 = 64 * 64 * 2;
const TOKEN_BYTES: u32 = TOKENS * 64 * 2;

/// `y[16][64] = x[16][k] * a[64][k]^T`: one producer warp, a warpgroup of consumers, a ring of two stages,
/// activations by swizzled tiles, products in flight over the release of the stage before, the result by a
/// swizzled tile store. Weights are requested before the wait for the grid before.
pub fn producer_and_consumers() -> Pattern {
    let k = 64 * TURNS;
    let module = module(384, 1, |asm, p| {
        let stage = WEIGHT_BYTES + TOKEN_BYTES;
        let ring = asm.smem.region("ring", STAGES * stage, 1024);
        let out = asm.smem.region("out", TOKEN_BYTES, 1024);
        let bars = asm.smem.region("barriers", 16 * STAGES, 16);
        let weights = pointer(asm, "weights");
        let (x, y) = (map(asm, "x"), map(asm, "y"));
        let full = |s: u32| p.smem.at(bars.start + 8 * s).within(bars);
        let empty = |s: u32| p.smem.at(bars.start + 8 * (STAGES + s)).within(bars);
        let [zero, zero_too] = asm.regs::<B32, 2>();
        asm.mov_b32(zero, 0);
        asm.mov_b32(zero_too, 0);
        asm.section("begin", |asm| {
            let first = elect_in(asm, p, 0);
            asm.when(first, |asm| {
                for s in 0..STAGES {
                    asm.mbarrier_init_shared_b64(full(s), 1);
                    asm.mbarrier_init_shared_b64(empty(s), 4);
                }
                asm.fence_mbarrier_init_release_cluster();
            });
            asm.bar_sync(0);
        });
        let (consume, done) = (asm.label("consume"), asm.label("done"));
        let is_consumer = asm.test_u32(Cmp::Lt, p.warp, 4);
        asm.when(is_consumer, |asm| asm.bra_uni(consume));
        asm.section("producer", |asm| {
            asm.setmaxnreg_dec_sync_aligned_u32(40);
            let is_idle = asm.test_u32(Cmp::Ne, p.warp, 4);
            asm.when(is_idle, |asm| asm.bra_uni(done));
            let one = elect(asm);
            let send_weights = |asm: &mut Asm, turn: u32| {
                let s = turn % STAGES;
                let to = p.smem.at(ring.start + s * stage).within(ring);
                let from = weights.at((turn * WEIGHT_BYTES) as i32);
                asm.when(one, |asm| {
                    asm.mbarrier_arrive_expect_tx_shared_cta_b64(full(s), stage);
                    asm.cp_async_bulk_shared_global_hint(
                        to,
                        from,
                        WEIGHT_BYTES,
                        full(s),
                        0x12F0_0000_0000_0000,
                    );
                });
            };
            let send_tokens = |asm: &mut Asm, turn: u32| {
                let s = turn % STAGES;
                let to = p.smem.at(ring.start + s * stage + WEIGHT_BYTES).within(ring);
                let column = asm.reg();
                asm.mov_b32(column, 64 * turn);
                asm.when(one, |asm| {
                    asm.cp_async_bulk_tensor_2d_shared_global(to, x, column, zero, full(s));
                });
            };
            for turn in 0..STAGES {
                send_weights(asm, turn);
            }
            asm.griddepcontrol_wait();
            for turn in 0..STAGES {
                send_tokens(asm, turn);
            }
            for turn in STAGES..TURNS {
                wait(asm, empty(turn % STAGES), (turn / STAGES % 2) ^ 1);
                send_weights(asm, turn);
                send_tokens(asm, turn);
            }
            asm.griddepcontrol_launch_dependents();
            asm.bra_uni(done);
        });
        asm.bind(consume);
        let sums = asm.reg_range::<F32>(TOKENS / 2);
        asm.section("consumers", |asm| {
            asm.setmaxnreg_inc_sync_aligned_u32(232);
            let mine = asm.reg();
            asm.mad_lo_u32(mine, p.tid, 16, p.smem);
            let one = elect(asm);
            for turn in 0..TURNS {
                let s = turn % STAGES;
                wait(asm, full(s), turn / STAGES % 2);
                let steps = [(); 4].map(|()| asm.regs::<B32, 4>());
                for (step, a) in steps.iter().enumerate() {
                    let at = ring.start + s * stage + 2048 * step as u32;
                    asm.ld_shared_v4_b32(*a, mine.at(at).within(ring));
                }
                let tokens = plus(asm, p.smem, ring.start + s * stage + WEIGHT_BYTES);
                let first = descriptor(asm, tokens);
                asm.wgmma_fence_sync_aligned();
                for (step, a) in steps.into_iter().enumerate() {
                    let desc = asm.reg();
                    asm.add_u64(desc, first, 2 * step as u64);
                    let more = turn + step as u32 > 0;
                    asm.wgmma_mma_async_m64k16_f32_f16(TOKENS, sums, a, desc, more);
                }
                asm.wgmma_commit_group_sync_aligned();
                let is_last = turn + 1 == TURNS;
                // The stage before is read by now if it is filled again; this one is still multiplied.
                let is_refilled = turn > 0 && turn - 1 + STAGES < TURNS;
                if is_refilled || is_last {
                    asm.wgmma_wait_group_sync_aligned(u32::from(!is_last));
                }
                if is_refilled {
                    asm.bar_warp_sync(-1);
                    let before = empty((turn - 1) % STAGES);
                    asm.when(one, |asm| asm.mbarrier_arrive_shared_cta_b64(before));
                }
            }
        });
        asm.section("epilogue", |asm| {
            let [unit, row, at] = asm.regs::<B32, 3>();
            // Lane 8 j + r: row r of matrix j is token 8 (j / 2) + r, channels 16 w + 8 (j % 2) and on.
            asm.and_b32(row, p.lane, 7);
            let [half, token] = asm.regs::<B32, 2>();
            asm.shr_u32(half, p.lane, 4);
            asm.mad_lo_u32(token, half, 8, row);
            asm.shr_u32(unit, p.lane, 3);
            asm.and_b32(unit, unit, 1);
            asm.mad_lo_u32(unit, p.warp, 2, unit);
            asm.xor_b32(unit, unit, row);
            asm.mad_lo_u32(at, token, 128, p.smem);
            asm.mad_lo_u32(at, unit, 16, at);
            let packed = asm.regs::<B32, 4>();
            for (n, word) in packed.into_iter().enumerate() {
                asm.cvt_rn_f16x2_f32(word, sums.get(2 * n + 1), sums.get(2 * n));
            }
            let to = at.at(out.start).within(out);
            asm.stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(to, packed);
            asm.fence_proxy_async_shared_cta();
            asm.bar_sync_n(1, 128);
            let one = elect_in(asm, p, 0);
            // The consumers know of the grid before by the producer's arrivals after its wait.
            asm.when(one, |asm| {
                let from = p.smem.at(out.start).within(out);
                asm.cp_async_bulk_tensor_2d_global_shared(y, zero, zero_too, from);
                asm.cp_async_bulk_commit_group();
                asm.cp_async_bulk_wait_group_read(0);
            });
        });
        asm.bind(done);
    });
    let setup = move |device: &Device<'_>, random: &mut Random| {
        let k = k as usize;
        // Fewer tokens than a tile: what lies outside is read as zeros and not written.
        let rows = TOKENS as usize - 3;
        let (a, x) = (halves(random, 64 * k), halves(random, rows * k));
        let weights: Vec<f16> = (0..TURNS as usize)
            .flat_map(|turn| {
                let part: Vec<f16> =
                    (0..64).flat_map(|row| a[row * k + 64 * turn..][..64].to_vec()).collect();
                fragments(&part, 64)
            })
            .collect();
        let tile = |base, columns: usize| {
            Arg::TensorMap(TensorMap {
                base,
                elements: [columns as u64, rows as u64],
                row_bytes: 2 * columns as u64,
                tile: [64, TOKENS],
                swizzle: Swizzle::B128,
            })
        };
        let result = device.alloc(rows * 64 * 2);
        let tokens = device.upload(&x);
        let args = vec![device.upload(&weights).into(), tile(tokens, k), tile(result, 64)];
        let written = vec![(tokens, x.len() / 2)];
        let value = |row: usize, channel: usize| -> f16 {
            let products = (0..k).map(|i| x[row * k + i].to_f64() * a[channel * k + i].to_f64());
            f16::from_f64(products.sum())
        };
        let expected: Vec<f16> = (0..rows * 64).map(|n| value(n / 64, n % 64)).collect();
        let expected = bytemuck::cast_slice::<f16, u32>(&expected).to_vec();
        Case { args, written, result, expected }
    };
    Pattern { name: "producer and consumers", module, grid: [1, 1], setup: Box::new(setup) }
}

/// Two warps, each with a ring of its own that one of its lanes fills: every turn a warp takes 16 bytes a lane
/// as an A fragment of `mma`, against a constant B of ones; sums go out by vector reductions to device memory.
pub fn private_rings() -> Pattern {
    const SLOTS: u32 = 2;
    const TURNS: u32 = 6;
    let module = module(64, 1, |asm, p| {
        let ring = asm.smem.region("ring", 2 * SLOTS * 512, 128);
        let bars = asm.smem.region("barriers", 2 * SLOTS * 8, 16);
        let (input, out) = (pointer(asm, "input"), pointer(asm, "out"));
        let [slots, mine, bar] = asm.regs::<B32, 3>();
        asm.mad_lo_u32(slots, p.warp, SLOTS * 512, p.smem);
        asm.mad_lo_u32(mine, p.lane, 16, slots);
        asm.mad_lo_u32(bar, p.warp, SLOTS * 8, p.smem);
        let from = asm.reg::<B64>();
        asm.mad_wide_u32(from, p.warp, TURNS * 512, input);
        let one = elect(asm);
        let full = |s: u32| -> SharedAddr { bar.at(bars.start + 8 * s).within(bars) };
        let fill = |asm: &mut Asm, turn: u32| {
            let s = turn % SLOTS;
            asm.when(one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(full(s), 512);
                let to = slots.at(ring.start + s * 512).within(ring);
                let bytes = from.at((turn * 512) as i32);
                asm.cp_async_bulk_shared_global(to, bytes, 512, full(s));
            });
        };
        asm.section("begin", |asm| {
            asm.when(one, |asm| {
                (0..SLOTS).for_each(|s| asm.mbarrier_init_shared_b64(full(s), 1));
                asm.fence_mbarrier_init_release_cluster();
                asm.cp_async_bulk_prefetch_l2_global(from.at(512), (TURNS - 1) * 512);
            });
            asm.bar_warp_sync(-1);
            (0..SLOTS).for_each(|turn| fill(asm, turn));
        });
        let sums = asm.regs::<F32, 4>();
        sums.iter().for_each(|sum| asm.mov_f32(*sum, 0.0));
        let ones = asm.regs::<B32, 2>();
        ones.iter().for_each(|word| asm.mov_b32(*word, 0x3c00_3c00));
        asm.section("loop", |asm| {
            for turn in 0..TURNS {
                let s = turn % SLOTS;
                wait(asm, full(s), turn / SLOTS % 2);
                let a = asm.regs::<B32, 4>();
                asm.ld_shared_v4_b32(a, mine.at(ring.start + s * 512).within(ring));
                asm.mma_m16n8k16_f32_f16(sums, a, ones, sums);
                if turn + SLOTS < TURNS {
                    asm.fence_proxy_async_shared_cta();
                    asm.bar_warp_sync(-1);
                    fill(asm, turn + SLOTS);
                }
            }
        });
        asm.section("store", |asm| {
            asm.griddepcontrol_wait();
            let place = asm.reg::<B64>();
            asm.mad_wide_u32(place, p.lane, 16, out);
            asm.red_relaxed_gpu_global_add_v4_f32(place, sums);
        });
    });
    let setup = |device: &Device<'_>, random: &mut Random| {
        let input = halves(random, 2 * TURNS as usize * 256);
        let zeros = vec![0.0f32; 128];
        let result = device.upload(&zeros);
        // Every column of the product is the row's sum; both warps add up.
        let mut rows = [0.0f32; 16];
        for (n, value) in input.iter().enumerate() {
            let (lane, element) = (n as u32 % 256 / 8, n as u32 % 8);
            let (row, _) = mma_m16n8k16::a(lane, element / 2, element % 2);
            rows[row as usize] += value.to_f32();
        }
        let value = |n: usize| rows[mma_m16n8k16::c(n as u32 / 4, n as u32 % 4).0 as usize];
        let expected = (0..128).map(|n| value(n).to_bits()).collect();
        let args = vec![device.upload(&input).into(), result.into()];
        Case { args, written: vec![(result, 128)], result, expected }
    };
    Pattern { name: "private rings", module, grid: [1, 1], setup: Box::new(setup) }
}
