//! The rules of barriers in shared memory, one by one.

use makaira::asm::reg::SharedAddr;
use makaira::asm::types::{B32, Cmp};
use makaira::asm::{Asm, Module};
use makaira::emu::FaultKind;

use super::{Prelude, elect_in, emulator, expect, launch, module, pointer, wait};

/// Two warps with a barrier for `count` arrivals, initialised by thread 0; `order` stands between that and
/// `emit`.
fn two_warps(
    count: u32,
    order: impl FnOnce(&mut Asm),
    emit: impl FnOnce(&mut Asm, Prelude, SharedAddr),
) -> Module {
    module(64, 1, |asm, p| {
        let bars = asm.smem.region("barrier", 16, 16);
        let bar = p.smem.at(bars.start).within(bars);
        let first = asm.test_u32(Cmp::Eq, p.tid, 0);
        asm.when(first, |asm| asm.mbarrier_init_shared_b64(bar, count));
        order(asm);
        emit(asm, p, bar);
    })
}

fn meet(asm: &mut Asm) {
    asm.bar_sync(0);
}

fn clean(what: &str, module: &Module) {
    expect(what, &[], module, &[7; 256]);
}

fn fault(what: &str, kind: FaultKind, module: &Module) -> String {
    expect(what, &[kind], module, &[7; 256])
}

#[test]
fn a_barrier_is_initialised_before_it_is_used() {
    let arrive = |asm: &mut Asm, _: Prelude, bar| asm.mbarrier_arrive_shared_cta_b64(bar);
    clean("ordered", &two_warps(64, meet, arrive));
    fault("unordered", FaultKind::MbarrierMisuse, &two_warps(64, |_| {}, arrive));
    let elsewhere = |asm: &mut Asm, _: Prelude, bar: SharedAddr| {
        asm.mbarrier_arrive_shared_cta_b64(bar + 8);
    };
    fault("none there", FaultKind::MbarrierMisuse, &two_warps(64, meet, elsewhere));
    let again = |asm: &mut Asm, p: Prelude, bar| {
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.mbarrier_init_shared_b64(bar, 64));
    };
    fault("twice", FaultKind::MbarrierMisuse, &two_warps(64, meet, again));
    let nothing = |_: &mut Asm, _: Prelude, _| {};
    fault("no arrivals", FaultKind::MbarrierMisuse, &two_warps(0, meet, nothing));
    fault("too many", FaultKind::MbarrierMisuse, &two_warps(1 << 20, meet, nothing));
    let crooked = module(32, 1, |asm, p| {
        let bar = super::plus(asm, p.smem, 4);
        asm.mbarrier_init_shared_b64(bar, 1);
    });
    fault("at 4", FaultKind::Misaligned, &crooked);
    let outside = module(32, 1, |asm, p| {
        let bar = super::plus(asm, p.smem, 16);
        asm.mbarrier_init_shared_b64(bar, 1);
    });
    fault("outside", FaultKind::OutOfBounds, &outside);
}

/// The bytes of a barrier are not for loads and stores.
#[test]
fn a_barrier_is_no_memory() {
    let read = |asm: &mut Asm, _: Prelude, bar| {
        let word = asm.reg();
        asm.ld_shared_b32(word, bar);
    };
    fault("read", FaultKind::MbarrierMisuse, &two_warps(1, meet, read));
    let write = |asm: &mut Asm, _: Prelude, bar: SharedAddr| asm.st_shared_b32(bar + 4, 0);
    fault("written", FaultKind::MbarrierMisuse, &two_warps(1, meet, write));
    let beside = |asm: &mut Asm, p: Prelude, bar: SharedAddr| {
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.st_shared_b32(bar + 8, 0));
    };
    clean("beside it", &two_warps(1, meet, beside));
}

#[test]
fn arrivals_are_counted() {
    let arrive = |asm: &mut Asm, _: Prelude, bar| asm.mbarrier_arrive_shared_cta_b64(bar);
    // 64 threads arrive: phases of 64, of 32 and of 16 come out even; bytes to come keep the phase open.
    clean("in one phase", &two_warps(64, meet, arrive));
    clean("in four phases", &two_warps(16, meet, arrive));
    let open = |asm: &mut Asm, p: Prelude, bar| {
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.mbarrier_expect_tx_shared_cta_b64(bar, 16));
        asm.bar_sync(0);
        asm.mbarrier_arrive_shared_cta_b64(bar);
    };
    let report = fault("one too many", FaultKind::MbarrierMisuse, &two_warps(63, meet, open));
    assert!(report.contains("0 of 63 arrivals missing, 16 bytes to come"), "{report}");
}

#[test]
fn parities_tell_phases() {
    let waits = |parity: u32| {
        move |asm: &mut Asm, p: Prelude, bar| {
            let one = elect_in(asm, p, 0);
            wait(asm, bar, parity);
            asm.bar_sync(0);
            asm.when(one, |asm| asm.mbarrier_arrive_shared_cta_b64(bar));
        }
    };
    clean("a fresh barrier passes parity 1", &two_warps(1, meet, waits(1)));
    let report =
        fault("parity 0 never comes", FaultKind::BarrierDeadlock, &two_warps(1, meet, waits(0)));
    assert!(report.contains("phase 0 (parity 0), 1 of 1 arrivals missing"), "{report}");
    assert!(report.contains("mbarrier.try_wait"), "{report}");
    fault("no parity", FaultKind::BadOperand, &two_warps(1, meet, waits(2)));
    let in_turn = |asm: &mut Asm, _: Prelude, bar: SharedAddr| {
        for phase in 0..5 {
            asm.mbarrier_arrive_shared_cta_b64(bar);
            wait(asm, bar, phase % 2);
        }
    };
    clean("phases in turn", &two_warps(64, meet, in_turn));
}

/// A missing announcement, a missing copy: the phase does not end, and the report says what it lacks.
#[test]
fn bytes_are_counted() {
    let copies = |announced: u32, copied: u32, part: u32| {
        let order = |asm: &mut Asm| {
            asm.fence_mbarrier_init_release_cluster();
            asm.bar_sync(0);
        };
        two_warps(1, order, move |asm, p, bar| {
            let buffer = asm.smem.region("buffer", 256, 128);
            let input = pointer(asm, "input");
            let one = elect_in(asm, p, 0);
            asm.when(one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(bar, announced);
                for at in (0..copied).step_by(part as usize) {
                    let to = p.smem.at(buffer.start + at);
                    asm.cp_async_bulk_shared_global(to, input.at(at as i32), part, bar);
                }
            });
            wait(asm, bar, 0);
        })
    };
    clean("as many", &copies(128, 128, 64));
    let report = fault("fewer copied", FaultKind::BarrierDeadlock, &copies(192, 128, 64));
    assert!(report.contains("0 of 1 arrivals missing, 64 bytes to come"), "{report}");
    let report = fault("more copied", FaultKind::MbarrierMisuse, &copies(64, 128, 128));
    assert!(report.contains("more bytes were copied than announced"), "{report}");
    // The second copy is one of the next phase, which nobody waits for.
    fault("a copy more", FaultKind::EarlyExit, &copies(64, 128, 64));
    fault("too many announced", FaultKind::MbarrierMisuse, &copies(1 << 20, 64, 64));
}

/// An announcement without an arrival belongs to the phase only if one of its arrivals comes later.
#[test]
fn announcements_come_before_an_arrival() {
    let program = |met: bool| {
        let order = |asm: &mut Asm| {
            asm.fence_mbarrier_init_release_cluster();
            asm.bar_sync(0);
        };
        two_warps(1, order, move |asm, p, bar| {
            let buffer = asm.smem.region("buffer", 64, 128);
            let input = pointer(asm, "input");
            let announces = elect_in(asm, p, 0);
            asm.when(announces, |asm| {
                asm.mbarrier_expect_tx_shared_cta_b64(bar, 64);
                let to = p.smem.at(buffer.start);
                asm.cp_async_bulk_shared_global(to, input, 64, bar);
            });
            if met {
                asm.bar_sync(0);
            }
            let arrives = elect_in(asm, p, 1);
            asm.when(arrives, |asm| asm.mbarrier_arrive_shared_cta_b64(bar));
            wait(asm, bar, 0);
            let word = asm.reg();
            asm.ld_shared_b32(word, p.smem.at(buffer.start));
        })
    };
    clean("met", &program(true));
    // If the arrival comes first the phase ends without the copy, and nobody waits for the next one.
    let kinds = [FaultKind::MbarrierMisuse, FaultKind::MissingWait, FaultKind::UndefinedMemory];
    expect("not met", &kinds, &program(false), &[7; 256]);
}

/// A program in which warp 0 writes words, tells by `tell`, and warp 1 reads them after `see`.
fn message(
    tell: impl FnOnce(&mut Asm, Prelude, SharedAddr),
    see: impl FnOnce(&mut Asm, SharedAddr),
    count: u32,
) -> Module {
    two_warps(count, meet, |asm, p, bar| {
        let words = asm.smem.region("words", 128, 16);
        let (reader, end) = (asm.label("reader"), asm.label("end"));
        let mine = asm.reg();
        asm.mad_lo_u32(mine, p.lane, 4, p.smem);
        let reads = asm.test_u32(Cmp::Eq, p.warp, 1);
        asm.when(reads, |asm| asm.bra_uni(reader));
        asm.st_shared_b32(mine.at(words.start), p.lane);
        tell(asm, p, bar);
        asm.bra_uni(end);
        asm.bind(reader);
        see(asm, bar);
        let word = asm.reg();
        asm.ld_shared_b32(word, mine.at(words.start));
        asm.bind(end);
    })
}

#[test]
fn a_phase_hands_memory_over() {
    let all = |asm: &mut Asm, _: Prelude, bar| asm.mbarrier_arrive_shared_cta_b64(bar);
    let one = |asm: &mut Asm, p: Prelude, bar| {
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.mbarrier_arrive_shared_cta_b64(bar));
    };
    let one_for_all = |asm: &mut Asm, p: Prelude, bar| {
        asm.bar_warp_sync(-1);
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.mbarrier_arrive_shared_cta_b64(bar));
    };
    let see = |asm: &mut Asm, bar| wait(asm, bar, 0);
    clean("each lane arrives", &message(all, see, 32));
    clean("one arrives for all", &message(one_for_all, see, 1));
    fault("one arrives for itself", FaultKind::Race, &message(one, see, 1));
    let unordered = [FaultKind::Race, FaultKind::UndefinedMemory];
    expect("nobody waits", &unordered, &message(all, |_, _| {}, 32), &[]);
    let too_early = |asm: &mut Asm, bar| wait(asm, bar, 1);
    expect("the phase before", &unordered, &message(all, too_early, 64), &[]);
    // One lane waits and tells its warp.
    let one_sees = |asm: &mut Asm, bar: SharedAddr| {
        let (lane, end) = (asm.reg(), asm.label("end"));
        asm.mov_u32_special(lane, makaira::asm::types::Special::Laneid);
        let others = asm.test_u32(Cmp::Ne, lane, 3);
        asm.when(others, |asm| asm.bra(end));
        wait(asm, bar, 0);
        asm.bind(end);
    };
    fault("the others of its warp do not know", FaultKind::Race, &message(all, one_sees, 32));
    let one_tells = |asm: &mut Asm, bar: SharedAddr| {
        one_sees(asm, bar);
        asm.bar_warp_sync(-1);
    };
    clean("a lane waits for its warp", &message(all, one_tells, 32));
}

/// A warp that waits is not asked again and again, and does not hold others up.
#[test]
fn waiting_is_cheap() {
    const WORK: u32 = 5000;
    let program = two_warps(1, meet, |asm, p, bar| {
        let (work, end) = (asm.label("work"), asm.label("end"));
        let works = asm.test_u32(Cmp::Eq, p.warp, 0);
        asm.when(works, |asm| asm.bra_uni(work));
        asm.section("wait", |asm| wait(asm, bar, 0));
        asm.bra_uni(end);
        asm.bind(work);
        let count = asm.reg::<B32>();
        asm.mov_b32(count, 0);
        let more = asm.label("more");
        asm.bind(more);
        asm.add_u32(count, count, 1);
        let again = asm.test_u32(Cmp::Lt, count, WORK);
        asm.when(again, |asm| asm.bra(more));
        let one = elect_in(asm, p, 0);
        asm.when(one, |asm| asm.mbarrier_arrive_shared_cta_b64(bar));
        asm.bind(end);
    });
    for seed in [None, Some(1), Some(2)] {
        let backend = emulator(seed);
        assert_eq!(launch(&backend, &program, [1, 1], &[]), None);
        let report = backend.last_report().expect("it ran");
        assert!(report.section("wait").warp_instructions < 20, "{report}");
        assert!(report.total.warp_instructions > u64::from(WORK), "{report}");
    }
}
