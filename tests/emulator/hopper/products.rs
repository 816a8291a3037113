//! Warpgroup products: what they compute, and the rules of their registers and operands, one by one.

use std::time::Instant;

use half::f16;
use makaira::asm::reg::{Reg, RegRange, Region};
use makaira::asm::types::{B32, B64, Cmp, F32};
use makaira::asm::{Asm, Module};
use makaira::emu::FaultKind;
use makaira::layout::{Descriptor, wgmma_m64k16};
use proptest::prelude::*;

use super::super::common::Random;
use super::patterns::fragments;
use super::{Device, Prelude, descriptor, emulator, expect, launch, module, plus, pointer, wait};

/// What a program of one warpgroup has at hand: 16 columns of 64 k, loaded and waited for, an A fragment.
struct Hands {
    p: Prelude,
    tile: Region,
    bar: makaira::asm::reg::SharedAddr,
    input: Reg<B64>,
    one: Reg<makaira::asm::types::Pred>,
    desc: Reg<B64>,
    a: [Reg<B32>; 4],
    d: RegRange<F32>,
}

impl Hands {
    fn product(&self, asm: &mut Asm, more: bool) {
        asm.wgmma_mma_async_m64k16_f32_f16(16, self.d, self.a, self.desc, more);
    }

    fn copy(&self, asm: &mut Asm) {
        asm.when(self.one, |asm| {
            asm.mbarrier_arrive_expect_tx_shared_cta_b64(self.bar, self.tile.bytes);
            let to = self.p.smem.at(self.tile.start);
            asm.cp_async_bulk_shared_global(to, self.input, self.tile.bytes, self.bar);
        });
    }
}

fn warpgroup(emit: impl FnOnce(&mut Asm, Hands)) -> Module {
    module(128, 1, |asm, p| {
        let tile = asm.smem.region("tile", 2048, 1024);
        let bars = asm.smem.region("barrier", 16, 16);
        let bar = p.smem.at(bars.start);
        let input = pointer(asm, "input");
        let one = super::elect_in(asm, p, 0);
        asm.when(one, |asm| {
            asm.mbarrier_init_shared_b64(bar, 1);
            asm.fence_mbarrier_init_release_cluster();
        });
        asm.bar_sync(0);
        let at = plus(asm, p.smem, tile.start);
        let desc = descriptor(asm, at);
        let a = asm.regs();
        a.iter().for_each(|a| asm.mov_b32(*a, 0x3c00_3c00));
        let d = asm.reg_range(8);
        let hands = Hands { p, tile, bar, input, one, desc, a, d };
        hands.copy(asm);
        wait(asm, bar, 0);
        emit(asm, hands);
    })
}

const WORDS: [u32; 512] = [0x3c00_3c00; 512];

fn clean(what: &str, emit: impl FnOnce(&mut Asm, Hands)) {
    expect(what, &[], &warpgroup(emit), &WORDS);
}

fn fault(what: &str, kind: FaultKind, emit: impl FnOnce(&mut Asm, Hands)) -> String {
    expect(what, &[kind], &warpgroup(emit), &WORDS)
}

/// A product that nothing is in the way of, waited for.
fn whole(asm: &mut Asm, h: &Hands, more: bool) {
    asm.wgmma_fence_sync_aligned();
    h.product(asm, more);
    asm.wgmma_commit_group_sync_aligned();
    asm.wgmma_wait_group_sync_aligned(0);
}

fn use_register(asm: &mut Asm, reg: Reg<F32>) {
    let sum = asm.reg();
    asm.add_f32(sum, reg, reg);
}

#[test]
fn registers_in_flight_are_left_alone() {
    clean("waited for", |asm, h| {
        whole(asm, &h, false);
        use_register(asm, h.d.get(0));
        asm.mov_b32(h.a[2], 0);
    });
    let unwaited = |then: fn(&mut Asm, &Hands)| {
        move |asm: &mut Asm, h: Hands| {
            asm.wgmma_fence_sync_aligned();
            h.product(asm, false);
            asm.wgmma_commit_group_sync_aligned();
            then(asm, &h);
        }
    };
    let in_flight = FaultKind::RegisterInFlight;
    fault("D read", in_flight, unwaited(|asm, h| use_register(asm, h.d.get(7))));
    fault("D written", in_flight, unwaited(|asm, h| asm.mov_f32(h.d.get(3), 0.0)));
    fault("A written", in_flight, unwaited(|asm, h| asm.mov_b32(h.a[1], 0)));
    let read_a = |asm: &mut Asm, h: &Hands| {
        let copy = asm.reg();
        asm.mov_b32(copy, h.a[1]);
    };
    fault("A read", in_flight, unwaited(read_a));
    fault("committed only", in_flight, |asm, h| {
        asm.wgmma_fence_sync_aligned();
        h.product(asm, false);
        asm.wgmma_wait_group_sync_aligned(0);
        use_register(asm, h.d.get(0));
    });
    fault(
        "too short a wait",
        in_flight,
        unwaited(|asm, h| {
            asm.wgmma_wait_group_sync_aligned(1);
            use_register(asm, h.d.get(0));
        }),
    );
    // Two groups: the older one is over, the newer one is not.
    let two = |newer: bool| {
        move |asm: &mut Asm, h: Hands| {
            let (other, b) = (asm.reg_range(8), asm.regs::<B32, 4>());
            b.iter().for_each(|b| asm.mov_b32(*b, 0));
            asm.wgmma_fence_sync_aligned();
            h.product(asm, false);
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_mma_async_m64k16_f32_f16(16, other, b, h.desc, false);
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_wait_group_sync_aligned(1);
            use_register(asm, if newer { other.get(0) } else { h.d.get(0) });
            if !newer {
                asm.mov_b32(h.a[0], 0);
            }
        }
    };
    clean("the older of two", two(false));
    fault("the newer of two", in_flight, two(true));
}

#[test]
fn products_wait_for_unlike_ones() {
    let second = |n: u32, of_d: bool| {
        move |asm: &mut Asm, h: Hands| {
            // Registers before a range of the accumulators' class would overlap: take a second range.
            let tail = asm.reg_range::<F32>(n / 2);
            let d = if of_d { h.d } else { tail };
            asm.wgmma_fence_sync_aligned();
            h.product(asm, false);
            if of_d {
                asm.wgmma_mma_async_m64k16_f32_f16(16, d, h.a, h.desc, true);
            } else {
                asm.wgmma_mma_async_m64k16_f32_f16(n, d, h.a, h.desc, false);
            }
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_wait_group_sync_aligned(0);
            use_register(asm, d.get(0));
        }
    };
    clean("the same shape into the same registers", second(16, true));
    clean("another shape into others, with the same A", second(8, false));
}

#[test]
fn register_accesses_are_fenced() {
    let unfenced = FaultKind::MissingFence;
    fault("the first product", unfenced, |asm, h| h.product(asm, false));
    let between = |touch: fn(&mut Asm, &Hands), fence: bool| {
        move |asm: &mut Asm, h: Hands| {
            whole(asm, &h, false);
            touch(asm, &h);
            if fence {
                asm.wgmma_fence_sync_aligned();
            }
            h.product(asm, true);
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_wait_group_sync_aligned(0);
        }
    };
    type Touch = fn(&mut Asm, &Hands);
    let touches: [(&str, Touch); 3] = [
        ("A written", |asm, h| asm.mov_b32(h.a[3], 0)),
        ("D written", |asm, h| asm.mov_f32(h.d.get(5), 0.0)),
        ("D read", |asm, h| use_register(asm, h.d.get(5))),
    ];
    clean("nothing touched", between(|_, _| {}, false));
    for (what, touch) in touches {
        clean(what, between(touch, true));
        fault(what, unfenced, between(touch, false));
    }
}

#[test]
fn accumulators_without_values_are_not_added() {
    clean("ignored", |asm, h| whole(asm, &h, false));
    let by_register = |scale: u32| {
        move |asm: &mut Asm, h: Hands| {
            let more = asm.test_u32(Cmp::Eq, h.p.smem, scale);
            let not_more = asm.reg();
            asm.not_pred(not_more, more);
            asm.wgmma_fence_sync_aligned();
            let more = if scale == 0 { more } else { not_more };
            asm.wgmma_mma_async_m64k16_f32_f16(16, h.d, h.a, h.desc, more);
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_wait_group_sync_aligned(0);
        }
    };
    clean("ignored by a predicate", by_register(0));
    fault("added by a predicate", FaultKind::UndefinedRegister, by_register(1));
}

/// The second operand is read until the wait, through the asynchronous proxy.
#[test]
fn the_operand_in_memory_is_left_alone() {
    let write = |asm: &mut Asm, h: &Hands| {
        let mine = asm.reg();
        asm.mad_lo_u32(mine, h.p.tid, 16, h.p.smem);
        asm.st_shared_b32(mine.at(h.tile.start), 0);
    };
    let then = |waits: bool, meets: bool, then: fn(&mut Asm, &Hands)| {
        move |asm: &mut Asm, h: Hands| {
            asm.wgmma_fence_sync_aligned();
            h.product(asm, false);
            asm.wgmma_commit_group_sync_aligned();
            if waits {
                asm.wgmma_wait_group_sync_aligned(0);
            }
            if meets {
                asm.bar_sync(0);
            }
            then(asm, &h);
        }
    };
    clean("written after all have waited", then(true, true, write));
    let early = [FaultKind::MissingWait, FaultKind::Race];
    for (what, waits, meets) in
        [("not waited", false, true), ("others have not waited", true, false)]
    {
        expect(what, &early, &warpgroup(then(waits, meets, write)), &WORDS);
    }
    let refill = |asm: &mut Asm, h: &Hands| {
        h.copy(asm);
        wait(asm, h.bar, 1);
    };
    clean("filled again after all have waited", then(true, true, refill));
    // Warps that are far behind find the barrier two phases on, and wait for the next one.
    let early = [FaultKind::MissingWait, FaultKind::BarrierDeadlock];
    for (what, waits, meets) in [("not waited", false, true), ("not met", true, false)] {
        expect(what, &early, &warpgroup(then(waits, meets, refill)), &WORDS);
    }
    let written = |fence: bool| {
        move |asm: &mut Asm, h: Hands| {
            let mine = asm.reg();
            asm.mad_lo_u32(mine, h.p.tid, 16, h.p.smem);
            asm.st_shared_b32(mine.at(h.tile.start), 0);
            if fence {
                asm.fence_proxy_async_shared_cta();
            }
            asm.bar_sync(0);
            whole(asm, &h, false);
        }
    };
    clean("written and fenced", written(true));
    fault("written, not fenced", FaultKind::MissingProxyFence, written(false));
    // A product before the copy has landed, or in lanes that do not know of it.
    fault("not landed", FaultKind::MissingWait, |asm, h| {
        asm.bar_sync(0);
        h.copy(asm);
        asm.bar_sync(0);
        whole(asm, &h, false);
    });
}

#[test]
fn descriptors_are_checked() {
    let with = |change: u64| {
        move |asm: &mut Asm, h: Hands| {
            asm.add_u64(h.desc, h.desc, change);
            whole(asm, &h, false);
        }
    };
    clean("the next k16 step", with(2));
    fault("stray bits", FaultKind::BadOperand, with(1 << 14));
    fault("a row further on", FaultKind::BadOperand, with(8));
    fault("over the end of a row", FaultKind::BadOperand, with(7));
    fault("a base offset", FaultKind::Unsupported, with(1 << 49));
    fault("64-byte swizzle", FaultKind::Unsupported, with(1 << 62));
    fault("atoms 1040 bytes apart", FaultKind::Unsupported, with(1 << 32));
    fault("outside", FaultKind::OutOfBounds, with(0x2000));
    fault("never written", FaultKind::UndefinedMemory, |asm, h| {
        asm.smem.region("more", 2048, 1024);
        asm.add_u64(h.desc, h.desc, 256u64);
        whole(asm, &h, false);
    });
}

#[test]
fn a_warpgroup_acts_as_one() {
    let differs = FaultKind::WarpgroupMismatch;
    let in_warp = |asm: &mut Asm, h: &Hands, emit: fn(&mut Asm, &Hands)| {
        let (other, end) = (asm.test_u32(Cmp::Ne, h.p.warp, 2), asm.label("end"));
        asm.when(other, |asm| asm.bra_uni(end));
        emit(asm, h);
        asm.bind(end);
    };
    fault("one warp alone", differs, |asm, h| {
        in_warp(asm, &h, |asm, h| whole(asm, h, false));
    });
    fault("one warp more", differs, |asm, h| {
        whole(asm, &h, false);
        in_warp(asm, &h, |asm, h| whole(asm, h, true));
        whole(asm, &h, true);
    });
    fault("another descriptor", differs, |asm, h| {
        in_warp(asm, &h, |asm, h| asm.add_u64(h.desc, h.desc, 2u64));
        whole(asm, &h, false);
    });
    fault("another descriptor in a lane", differs, |asm, h| {
        let one = asm.test_u32(Cmp::Eq, h.p.lane, 9);
        asm.when(one, |asm| asm.add_u64(h.desc, h.desc, 2u64));
        whole(asm, &h, false);
    });
    fault("half a warp", FaultKind::DivergentAligned, |asm, h| {
        let (low, end) = (asm.test_u32(Cmp::Lt, h.p.lane, 16), asm.label("end"));
        asm.when(low, |asm| asm.bra(end));
        whole(asm, &h, false);
        asm.bind(end);
    });
}

/// `d[64][n] = a[64][k] * b[n][k]^T + d`, all k16 steps, B with the swizzle or without.
fn multiply(n: u32, k: u32, turns: u32, swizzle: bool) -> Module {
    module(128, 1, |asm, p| {
        let tile = asm.smem.region("tile", n * k * 2, 1024);
        let bars = asm.smem.region("barrier", 16, 16);
        let bar = p.smem.at(bars.start);
        let (a, b, out) = (pointer(asm, "a"), pointer(asm, "b"), pointer(asm, "out"));
        let one = super::elect_in(asm, p, 0);
        asm.when(one, |asm| {
            asm.mbarrier_init_shared_b64(bar, 1);
            asm.fence_mbarrier_init_release_cluster();
            asm.mbarrier_arrive_expect_tx_shared_cta_b64(bar, n * k * 2);
            asm.cp_async_bulk_shared_global(p.smem.at(tile.start), b, n * k * 2, bar);
        });
        asm.bar_sync(0);
        wait(asm, bar, 0);
        let from = asm.reg::<B64>();
        asm.mad_wide_u32(from, p.tid, 16, a);
        let d = asm.reg_range::<F32>(n / 2);
        let steps: Vec<[Reg<B32>; 4]> = (0..k / 16)
            .map(|step| {
                let a = asm.regs();
                asm.ld_global_v4_b32(a, from.at(2048 * step as i32));
                a
            })
            .collect();
        let [turn, units] = asm.regs::<B32, 2>();
        asm.mov_b32(turn, 0);
        let at = plus(asm, p.smem, tile.start);
        asm.shr_u32(units, at, 4);
        let again = asm.label("again");
        asm.bind(again);
        asm.wgmma_fence_sync_aligned();
        for (step, a) in steps.iter().enumerate() {
            let step = step as u32;
            let start = match swizzle {
                true => step / 4 * n * 128 + step % 4 * 32,
                false => step * n * 32,
            };
            let operand = Descriptor {
                start,
                leading_bytes: if swizzle { 16 } else { n * 16 },
                stride_bytes: if swizzle { 1024 } else { 128 },
                base_offset: 0,
                swizzle: if swizzle { Descriptor::B128 } else { Descriptor::NONE },
            };
            let desc = asm.reg();
            asm.mad_wide_u32(desc, units, 1, operand.encode());
            let more = asm.test_u32(Cmp::Ne, turn, if step == 0 { 0 } else { u32::MAX });
            asm.wgmma_mma_async_m64k16_f32_f16(n, d, *a, desc, more);
        }
        asm.wgmma_commit_group_sync_aligned();
        asm.wgmma_wait_group_sync_aligned(0);
        asm.add_u32(turn, turn, 1);
        let more = asm.test_u32(Cmp::Lt, turn, turns);
        asm.when(more, |asm| asm.bra_uni(again));
        let place = asm.reg::<B64>();
        asm.mad_wide_u32(place, p.tid, n * 2, out);
        for (reg, d) in d.iter().enumerate() {
            asm.st_global_f32(place.at(4 * reg as i32), d);
        }
    })
}

/// `[n][k]` as the bytes that the products read.
fn operand(b: &[f16], n: usize, k: usize, swizzle: bool) -> Vec<f16> {
    let mut out = vec![f16::ZERO; n * k];
    for (at, value) in b.iter().enumerate() {
        let (column, i) = (at / k, at % k);
        let place = match swizzle {
            // Tiles of 64 k: rows of 128 bytes, pieces of 8 exchanged by the row's number.
            true => i / 64 * n * 64 + column * 64 + ((i % 64 / 8) ^ (column % 8)) * 8 + i % 8,
            // Tiles of 16 k, in them halves of 8 k, in them columns of 8.
            false => i / 16 * n * 16 + i % 16 / 8 * n * 8 + column * 8 + i % 8,
        };
        out[place] = *value;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any values: within the roundings of sixteen exact products at a time.
    #[test]
    fn products_multiply(seed: u64, n8 in 1u32..=32, k64 in 1u32..3, swizzle: bool) {
        let (n, k) = (8 * n8, 64 * k64);
        let mut random = Random(seed);
        let mut values = |len: u32| -> Vec<f16> {
            (0..len).map(|_| f16::from_f32(random.below(8192) as f32 / 1024.0 - 4.0)).collect()
        };
        let (a, b) = (values(64 * k), values(n * k));
        let backend = emulator(Some(seed));
        let device = Device { backend: &backend };
        let out = device.alloc(64 * n as usize * 4);
        let in_memory = operand(&b, n as usize, k as usize, swizzle);
        let args = [
            device.upload(&fragments(&a, k as usize)).into(),
            device.upload(&in_memory).into(),
            out.into(),
        ];
        prop_assert_eq!(launch(&backend, &multiply(n, k, 1, swizzle), [1, 1], &args), None);
        let got: Vec<f32> = device.download(out, (64 * n) as usize);
        for (at, got) in got.iter().enumerate() {
            let (thread, reg) = (at as u32 / (n / 2), at as u32 % (n / 2));
            let (row, column) = wgmma_m64k16::d(thread % 32, reg);
            let (row, column) = ((16 * (thread / 32) + row) as usize, column as usize);
            let (mut exact, mut size) = (0.0, 0.0);
            for i in 0..k as usize {
                let product = a[row * k as usize + i].to_f64() * b[column * k as usize + i].to_f64();
                exact += product;
                size += product.abs();
            }
            let bound = size * f64::from(k / 16) * 2f64.powi(-24);
            prop_assert!((f64::from(*got) - exact).abs() <= bound, "{at}: {got}, not {exact}");
        }
    }
}

/// Prints the rate; a fall far below the usual one is a fault of ours.
#[test]
fn products_run_fast_enough() {
    for (n, turns) in [(16, 60), (256, 8)] {
        let backend = emulator(None);
        let device = Device { backend: &backend };
        let halves = vec![f16::ONE; 256 * 64];
        let args = [
            device.upload(&halves[..64 * 64]).into(),
            device.upload(&halves[..n as usize * 64]).into(),
            device.alloc(64 * n as usize * 4).into(),
        ];
        let program = multiply(n, 64, turns, true);
        let start = Instant::now();
        assert_eq!(launch(&backend, &program, [1, 1], &args), None);
        let seconds = start.elapsed().as_secs_f64();
        let rate = f64::from(2 * 64 * n * 64 * turns) / seconds / 1e6;
        eprintln!("{n} columns: {rate:.0} MFLOP/s ({seconds:.4} s)");
        assert!(rate > 30.0, "{n} columns: {rate} MFLOP/s");
    }
}
