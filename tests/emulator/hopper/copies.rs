//! The rules of bulk copies and of the asynchronous proxy, one by one.

use makaira::asm::reg::{Reg, Region, SharedAddr};
use makaira::asm::types::{B32, B64};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Swizzle, TensorMap};
use makaira::emu::FaultKind;

use super::{
    Device, Prelude, elect_in, emulator, expect, launch, map, module, plus, pointer, wait,
};

/// What a program of two warps has at hand: a ready barrier, 1024 bytes, one thread's predicate.
pub struct Hands {
    pub p: Prelude,
    pub bar: SharedAddr,
    buffer: Region,
    pub one: Reg<makaira::asm::types::Pred>,
}

impl Hands {
    fn place(&self, at: u32) -> SharedAddr {
        self.p.smem.at(self.buffer.start + at).within(self.buffer)
    }

    /// This thread's 16 bytes.
    fn mine(&self, asm: &mut Asm) -> SharedAddr {
        let mine: Reg<B32> = asm.reg();
        asm.mad_lo_u32(mine, self.p.tid, 16, self.p.smem);
        mine.at(self.buffer.start)
    }

    /// One thread copies 1024 bytes to the buffer.
    fn copy(&self, asm: &mut Asm, from: Reg<B64>) {
        asm.when(self.one, |asm| {
            asm.mbarrier_arrive_expect_tx_shared_cta_b64(self.bar, 1024);
            asm.cp_async_bulk_shared_global(self.place(0), from, 1024, self.bar);
        });
    }
}

fn two_warps(emit: impl FnOnce(&mut Asm, Hands)) -> Module {
    module(64, 1, |asm, p| {
        let buffer = asm.smem.region("buffer", 1024, 1024);
        let bars = asm.smem.region("barrier", 16, 16);
        let bar = p.smem.at(bars.start).within(bars);
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| {
            asm.mbarrier_init_shared_b64(bar, 1);
            asm.fence_mbarrier_init_release_cluster();
        });
        asm.bar_sync(0);
        emit(asm, Hands { p, bar, buffer, one });
    })
}

pub fn clean(what: &str, emit: impl FnOnce(&mut Asm, Hands)) {
    expect(what, &[], &two_warps(emit), &[7; 256]);
}

pub fn fault(what: &str, kind: FaultKind, emit: impl FnOnce(&mut Asm, Hands)) -> String {
    expect(what, &[kind], &two_warps(emit), &[7; 256])
}

#[test]
fn bytes_in_flight_are_touched_by_nobody() {
    let copy_then = |waits: bool, then: fn(&mut Asm, SharedAddr)| {
        move |asm: &mut Asm, h: Hands| {
            let input = pointer(asm, "input");
            let mine = h.mine(asm);
            h.copy(asm, input);
            if waits {
                wait(asm, h.bar, 0);
            }
            then(asm, mine);
            wait(asm, h.bar, 0);
        }
    };
    let read = |asm: &mut Asm, mine: SharedAddr| {
        let words = asm.regs::<B32, 4>();
        asm.ld_shared_v4_b32(words, mine);
    };
    let write = |asm: &mut Asm, mine: SharedAddr| asm.st_shared_b32(mine, 1);
    clean("read after the wait", copy_then(true, read));
    clean("written after the wait", copy_then(true, write));
    let unordered = [FaultKind::MissingWait, FaultKind::Race, FaultKind::UndefinedMemory];
    expect("read before", &unordered, &two_warps(copy_then(false, read)), &[7; 256]);
    expect("written before", &unordered, &two_warps(copy_then(false, write)), &[7; 256]);
    let report = fault("read before by its thread", FaultKind::MissingWait, |asm, h| {
        let (input, word) = (pointer(asm, "input"), asm.reg());
        h.copy(asm, input);
        asm.when(h.one, |asm| asm.ld_shared_b32(word, h.place(512)));
    });
    assert!(report.contains("cp.async.bulk.shared"), "{report}");
    fault("two copies to one place", FaultKind::MissingWait, |asm, h| {
        let input = pointer(asm, "input");
        asm.when(h.one, |asm| asm.mbarrier_arrive_expect_tx_shared_cta_b64(h.bar, 32));
        for _ in 0..2 {
            asm.when(h.one, |asm| asm.cp_async_bulk_shared_global(h.place(0), input, 16, h.bar));
        }
        wait(asm, h.bar, 0);
    });
    fault("ended before", FaultKind::EarlyExit, |asm, h| {
        let input = pointer(asm, "input");
        h.copy(asm, input);
    });
}

/// The asynchronous proxy sees what threads wrote after their fence, and may overwrite what they read after it: until
/// then a read may still wait in the memory pipeline, wherever threads have met. The chip has shown both.
#[test]
fn writes_of_threads_are_fenced() {
    #[derive(Clone, Copy, PartialEq)]
    enum Before {
        Nothing,
        Read,
        FencedRead,
        Write,
        FencedWrite,
        LateFence,
    }
    let program = |before: Before, meets: bool| {
        move |asm: &mut Asm, h: Hands| {
            let input = pointer(asm, "input");
            let mine = h.mine(asm);
            h.copy(asm, input);
            wait(asm, h.bar, 0);
            match before {
                Before::Nothing => {}
                Before::Read | Before::FencedRead => {
                    let word = asm.reg();
                    asm.ld_shared_b32(word, mine);
                }
                _ => asm.st_shared_b32(mine, 1),
            }
            if matches!(before, Before::FencedWrite | Before::FencedRead) {
                asm.fence_proxy_async_shared_cta();
            }
            if meets {
                asm.bar_sync(0);
            }
            if before == Before::LateFence {
                asm.when(h.one, |asm| asm.fence_proxy_async_shared_cta());
            }
            h.copy(asm, input);
            wait(asm, h.bar, 1);
        }
    };
    clean("nobody used it", program(Before::Nothing, true));
    clean("read, fenced, met", program(Before::FencedRead, true));
    let report = fault("read, and met", FaultKind::MissingProxyFence, program(Before::Read, true));
    assert!(report.contains("memory pipeline"), "{report}");
    fault("read by others, not met", FaultKind::Race, program(Before::FencedRead, false));
    clean("written, fenced, met", program(Before::FencedWrite, true));
    fault("fenced, not met", FaultKind::Race, program(Before::FencedWrite, false));
    let report = fault("unfenced", FaultKind::MissingProxyFence, program(Before::Write, true));
    assert!(report.contains("fence.proxy.async"), "{report}");
    fault("fenced by another", FaultKind::MissingProxyFence, program(Before::LateFence, true));
    fault("a source written by this launch", FaultKind::MissingProxyFence, |asm, h| {
        let input = pointer(asm, "input");
        asm.when(h.one, |asm| asm.st_global_b32(input.at(64), 1));
        h.copy(asm, input);
        wait(asm, h.bar, 0);
    });
}

/// A barrier's initialisation is made visible to the asynchronous proxy too.
#[test]
fn barriers_are_fenced_before_copies_use_them() {
    let program = |fence: fn(&mut Asm)| {
        module(32, 1, |asm, p| {
            let buffer = asm.smem.region("buffer", 64, 128);
            let bars = asm.smem.region("barrier", 16, 16);
            let (input, bar) = (pointer(asm, "input"), p.smem.at(bars.start));
            let one = elect_in(asm, p, 0);
            asm.when(one, |asm| asm.mbarrier_init_shared_b64(bar, 1));
            asm.when(one, fence);
            asm.bar_warp_sync(-1);
            asm.when(one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(bar, 64);
                asm.cp_async_bulk_shared_global(p.smem.at(buffer.start), input, 64, bar);
            });
            wait(asm, bar, 0);
        })
    };
    let words = [7; 256];
    expect("fenced", &[], &program(|asm| asm.fence_mbarrier_init_release_cluster()), &words);
    expect("by a proxy fence", &[], &program(|asm| asm.fence_proxy_async_shared_cta()), &words);
    expect("unfenced", &[FaultKind::MbarrierMisuse], &program(|_| {}), &words);
}

/// Copies are not accesses of the warp: they take no wavefronts of it.
#[test]
fn copies_have_no_bank_conflicts() {
    let program = two_warps(|asm, h| {
        let input = pointer(asm, "input");
        h.copy(asm, input);
        wait(asm, h.bar, 0);
    });
    let backend = emulator(None);
    let input = Device { backend: &backend }.upload(&[7u32; 256]);
    assert_eq!(launch(&backend, &program, [1, 1], &[input.into()]), None);
    let report = backend.last_report().expect("it ran");
    assert_eq!((report.total.shared_wavefronts, report.total.conflict_wavefronts), (0, 0));
}

#[test]
fn sizes_and_places_are_checked() {
    let copy = |at: u32, from: u64, bytes: u32| {
        move |asm: &mut Asm, h: Hands| {
            let (input, to) = (pointer(asm, "input"), plus(asm, h.p.smem, h.buffer.start + at));
            asm.add_u64(input, input, from);
            asm.when(h.one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(h.bar, bytes);
                asm.cp_async_bulk_shared_global(to.at(0).within(h.buffer), input, bytes, h.bar);
            });
            wait(asm, h.bar, 0);
        }
    };
    clean("the last bytes", copy(960, 960, 64));
    fault("8 bytes", FaultKind::BadOperand, copy(0, 0, 8));
    fault("no bytes", FaultKind::BadOperand, copy(0, 0, 0));
    fault("to 8", FaultKind::Misaligned, copy(8, 0, 16));
    fault("from 8", FaultKind::Misaligned, copy(0, 8, 16));
    fault("past the source", FaultKind::OutOfBounds, copy(0, 1008, 32));
    fault("past the region", FaultKind::BrokenPromise, copy(1008, 0, 32));
    fault("past the memory", FaultKind::OutOfBounds, copy(1 << 20, 0, 32));
    fault("a prefetch past the end", FaultKind::OutOfBounds, |asm, h| {
        let input = pointer(asm, "input");
        asm.when(h.one, |asm| asm.cp_async_bulk_prefetch_l2_global(input.at(1008), 32));
    });
    fault("memory as a map", FaultKind::BadOperand, |asm, h| {
        let input = pointer(asm, "input");
        asm.when(h.one, |asm| asm.prefetch_tensormap(input));
    });
    clean("a map ahead of its use", |asm, h| {
        let map = map(asm, "map");
        asm.when(h.one, |asm| asm.prefetch_tensormap(map));
    });
    fault("a map as memory", FaultKind::OutOfBounds, |asm, _| {
        let (map, word) = (map(asm, "map"), asm.reg());
        asm.ld_global_b32(word, map);
    });
    let tile = |at: u32, is_map: bool| {
        move |asm: &mut Asm, h: Hands| {
            let tensor = match is_map {
                true => map(asm, "map"),
                false => pointer(asm, "input"),
            };
            let (to, zero) = (plus(asm, h.p.smem, at), asm.reg());
            asm.mov_b32(zero, 0);
            asm.when(h.one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(h.bar, 1024);
                asm.cp_async_bulk_tensor_2d_shared_global(to, tensor, zero, zero, h.bar);
            });
            wait(asm, h.bar, 0);
        }
    };
    clean("a tile", tile(1024, true));
    fault("a tile at 64", FaultKind::Misaligned, tile(64, true));
    fault("no map", FaultKind::BadOperand, tile(1024, false));
}

/// A tile that is stored, and what may happen to its source when.
#[test]
fn stores_read_until_their_wait() {
    let store = |fence: bool, then: fn(&mut Asm, SharedAddr, &Hands)| {
        move |asm: &mut Asm, h: Hands| {
            let (tensor, zero) = (map(asm, "map"), asm.reg());
            asm.mov_b32(zero, 0);
            let mine = h.mine(asm);
            let words = asm.regs::<B32, 4>();
            words.into_iter().for_each(|word| asm.mov_b32(word, h.p.tid));
            asm.st_shared_v4_b32(mine, words);
            if fence {
                asm.fence_proxy_async_shared_cta();
            }
            asm.bar_sync(0);
            asm.when(h.one, |asm| {
                let from = h.place(0);
                asm.cp_async_bulk_tensor_2d_global_shared(tensor, zero, zero, from);
                asm.cp_async_bulk_commit_group();
            });
            then(asm, mine, &h);
        }
    };
    let wait_read = |asm: &mut Asm, _: SharedAddr, h: &Hands| {
        asm.when(h.one, |asm| asm.cp_async_bulk_wait_group_read(0));
    };
    clean("fenced, waited for", store(true, wait_read));
    fault("unfenced", FaultKind::MissingProxyFence, store(false, wait_read));
    fault("ended", FaultKind::EarlyExit, store(true, |_, _, _| {}));
    fault(
        "ended after too short a wait",
        FaultKind::EarlyExit,
        store(true, |asm, _, h| {
            asm.when(h.one, |asm| asm.cp_async_bulk_wait_group_read(1));
        }),
    );
    clean(
        "waited for to the end",
        store(true, |asm, _, h| {
            asm.when(h.one, |asm| asm.cp_async_bulk_wait_group(0));
        }),
    );
    let unordered = [FaultKind::MissingWait, FaultKind::Race];
    let early = store(true, |asm, mine, h| {
        asm.st_shared_b32(mine, 0);
        asm.when(h.one, |asm| asm.cp_async_bulk_wait_group_read(0));
    });
    expect("overwritten", &unordered, &two_warps(early), &[7; 256]);
    clean(
        "overwritten when read",
        store(true, |asm, mine, h| {
            asm.when(h.one, |asm| asm.cp_async_bulk_wait_group_read(0));
            asm.bar_sync(0);
            asm.st_shared_b32(mine, 0);
        }),
    );
    // Read again, which changes nothing.
    clean(
        "read again",
        store(true, |asm, mine, h| {
            let word = asm.reg();
            asm.ld_shared_b32(word, mine);
            asm.when(h.one, |asm| asm.cp_async_bulk_wait_group_read(0));
        }),
    );
}

/// What a store writes may be read by its thread after the wait for its end, not after that for its reads.
#[test]
fn stores_write_until_their_wait() {
    let program = |whole: bool| {
        module(32, 1, |asm, p| {
            let buffer = asm.smem.region("buffer", 1024, 1024);
            let (tensor, base) = (map(asm, "map"), asm.param_u64("again"));
            let (zero, out) = (asm.reg(), asm.reg::<B64>());
            asm.mov_b32(zero, 0);
            asm.ld_param_u64(out, base);
            let mine = asm.reg();
            asm.mad_lo_u32(mine, p.lane, 32, p.smem);
            let words = asm.regs::<B32, 4>();
            words.into_iter().for_each(|word| asm.mov_b32(word, 5));
            for half in 0..2 {
                asm.st_shared_v4_b32(mine.at(buffer.start + 16 * half), words);
            }
            asm.fence_proxy_async_shared_cta();
            asm.bar_warp_sync(-1);
            let one = elect_in(asm, p, 0);
            asm.when(one, |asm| {
                let from = p.smem.at(buffer.start);
                asm.cp_async_bulk_tensor_2d_global_shared(tensor, zero, zero, from);
                asm.cp_async_bulk_commit_group();
                match whole {
                    true => asm.cp_async_bulk_wait_group(0),
                    false => asm.cp_async_bulk_wait_group_read(0),
                }
                asm.ld_global_b32(words[0], out);
            });
        })
    };
    for (whole, wanted) in [(true, None), (false, Some(FaultKind::MissingWait))] {
        let backend = emulator(None);
        let base = Device { backend: &backend }.upload(&[7u32; 256]);
        let swizzle = Swizzle::B128;
        let map = TensorMap { base, elements: [64, 8], row_bytes: 128, tile: [64, 8], swizzle };
        let args = [Arg::TensorMap(map), base.into()];
        let found = launch(&backend, &program(whole), [1, 1], &args);
        assert_eq!(found.map(|(kind, _)| kind), wanted);
    }
}
