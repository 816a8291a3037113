//! Asynchronous copies: what a wait covers, what a barrier adds, and buffers that are refilled too early.

use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp, F32};
use makaira::asm::{Asm, Module};
use makaira::emu::FaultKind;

use super::support::{Run, element, module, pointer, slot, sum};

/// Each of 64 threads clears 16 bytes, copies over them, `between` follows, then it reads the word that
/// thread `tid ^ distance` copied.
fn copy_then_read(distance: u32, between: fn(&mut Asm)) -> Module {
    module(64, 1024, |asm, p| {
        let input = pointer(asm, "input");
        let from = element(asm, input, p.tid, 16);
        let mine = slot(asm, p.smem, p.tid, 16);
        let zeros = asm.regs::<F32, 4>();
        zeros.iter().for_each(|zero| asm.mov_f32(*zero, 0.0));
        asm.st_shared_v4_f32(mine, zeros);
        asm.bar_sync(0);
        asm.cp_async_cg_16(mine, from);
        between(asm);
        let other = asm.reg();
        asm.xor_b32(other, p.tid, distance);
        let theirs = slot(asm, p.smem, other, 16);
        let value = asm.reg();
        asm.ld_shared_b32(value, theirs);
    })
}

fn run() -> Run {
    Run::new().words(&(1..=256).collect::<Vec<_>>())
}

#[test]
fn a_missing_wait_is_reported() {
    let fault = run().fault(&copy_then_read(0, |_| {}), [1, 1]);
    assert_eq!(fault.kind, FaultKind::MissingWait);
    assert!(fault.accesses[0].instruction.starts_with("ld.shared"), "{fault}");
    assert!(fault.accesses[1].instruction.starts_with("cp.async"), "{fault}");
    let committed = copy_then_read(0, |asm| asm.cp_async_commit_group());
    assert_eq!(run().fault(&committed, [1, 1]).kind, FaultKind::MissingWait);
    let not_committed = copy_then_read(0, |asm| asm.cp_async_wait_group(0));
    assert_eq!(run().fault(&not_committed, [1, 1]).kind, FaultKind::MissingWait);
    // A barrier is no wait, not even for others.
    let barrier = copy_then_read(1, |asm| {
        asm.cp_async_commit_group();
        asm.bar_sync(0);
    });
    assert_eq!(run().fault(&barrier, [1, 1]).kind, FaultKind::MissingWait);
    let waited = copy_then_read(0, |asm| {
        asm.cp_async_commit_group();
        asm.cp_async_wait_group(0);
    });
    run().clean(&waited, [1, 1]);
}

#[test]
fn a_wait_without_a_barrier_is_reported() {
    let waited = |asm: &mut Asm| {
        asm.cp_async_commit_group();
        asm.cp_async_wait_group(0);
    };
    let fault = run().fault(&copy_then_read(32, waited), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race);
    assert!(fault.accesses.iter().any(|site| site.instruction.starts_with("cp.async")), "{fault}");
    let fault = run().fault(&copy_then_read(1, waited), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race, "lanes of one warp are not ordered either");
    let barrier = |asm: &mut Asm| {
        asm.cp_async_commit_group();
        asm.cp_async_wait_group(0);
        asm.bar_sync(0);
    };
    run().clean(&copy_then_read(32, barrier), [1, 1]);
}

/// The barrier must follow the wait.
#[test]
fn a_barrier_before_the_wait_does_not_help_others() {
    let fault = run().fault(
        &copy_then_read(32, |asm| {
            asm.cp_async_commit_group();
            asm.bar_sync(0);
            asm.cp_async_wait_group(0);
        }),
        [1, 1],
    );
    assert!(matches!(fault.kind, FaultKind::Race | FaultKind::MissingWait), "{fault}");
}

/// Warp 0 copies and waits after the barrier at which warp 1 was; warp 1 reads so late that the wait is long
/// over. Nothing orders the two, whatever the clock says.
#[test]
fn a_late_read_is_no_excuse_for_a_missing_barrier() {
    let program = |barrier: bool| {
        module(64, 1024, |asm, p| {
            let input = pointer(asm, "input");
            let from = element(asm, input, p.tid, 16);
            let mine = slot(asm, p.smem, p.tid, 16);
            asm.cp_async_cg_16(mine, from);
            asm.cp_async_commit_group();
            asm.bar_sync(0);
            asm.cp_async_wait_group(0);
            if barrier {
                asm.bar_sync(0);
            }
            let (turn, head, end) = (asm.reg(), asm.label("head"), asm.label("end"));
            let early = asm.test_u32(Cmp::Lt, p.tid, 32);
            asm.when(early, |asm| asm.bra(end));
            asm.mov_b32(turn, 0);
            asm.bind(head);
            asm.add_u32(turn, turn, 1);
            let again = asm.test_u32(Cmp::Lt, turn, 2000);
            asm.when(again, |asm| asm.bra(head));
            let other = asm.reg();
            asm.xor_b32(other, p.tid, 32);
            let theirs = slot(asm, p.smem, other, 16);
            let value = asm.reg();
            asm.ld_shared_b32(value, theirs);
            asm.bind(end);
        })
    };
    assert_eq!(run().fault(&program(false), [1, 1]).kind, FaultKind::Race);
    run().clean(&program(true), [1, 1]);
}

/// A copy may land when it is issued: readers before it need a barrier before the issue, not before the
/// wait.
#[test]
fn a_barrier_between_issue_and_wait_is_too_late_for_readers() {
    let program = |barrier_first: bool| {
        module(64, 512, |asm, p| {
            let input = pointer(asm, "input");
            let lane = asm.reg();
            asm.and_b32(lane, p.tid, 31);
            let from = element(asm, input, lane, 16);
            let place = slot(asm, p.smem, lane, 16);
            let (copies, reads) =
                (asm.test_u32(Cmp::Ge, p.tid, 32), asm.test_u32(Cmp::Lt, p.tid, 32));
            asm.when(copies, |asm| asm.st_shared_b32(place, 0));
            asm.bar_sync(0);
            let value = asm.reg();
            asm.when(reads, |asm| asm.ld_shared_b32(value, place));
            if barrier_first {
                asm.bar_sync(0);
            }
            asm.when(copies, |asm| asm.cp_async_cg_16(place, from));
            asm.cp_async_commit_group();
            if !barrier_first {
                asm.bar_sync(0);
            }
            asm.cp_async_wait_group(0);
        })
    };
    let fault = run().fault(&program(false), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race);
    assert!(fault.accesses.iter().any(|site| site.instruction.contains("cp.async.cg")), "{fault}");
    run().clean(&program(true), [1, 1]);
}

/// Three groups; the first is read after a wait that leaves `pending` of them.
#[test]
fn a_wait_count_one_too_large_is_reported() {
    let program = |pending: u32| {
        module(32, 3 * 512, |asm, p| {
            let input = pointer(asm, "input");
            let from = element(asm, input, p.tid, 16);
            let mine = slot(asm, p.smem, p.tid, 16);
            for stage in 0..3 {
                asm.cp_async_cg_16(mine.at(stage * 512), from);
                asm.cp_async_commit_group();
            }
            asm.cp_async_wait_group(pending);
            let value = asm.reg();
            asm.ld_shared_b32(value, mine);
        })
    };
    assert_eq!(run().fault(&program(3), [1, 1]).kind, FaultKind::MissingWait);
    run().clean(&program(2), [1, 1]);
    run().clean(&program(0), [1, 1]);
}

#[test]
fn short_sources_are_filled_with_zeros() {
    let program = module(32, 512, |asm, p| {
        let (input, out) = (pointer(asm, "input"), pointer(asm, "out"));
        let mine = slot(asm, p.smem, p.tid, 16);
        let bytes = asm.reg();
        asm.min_u32(bytes, p.tid, 16);
        // All lanes copy from the last 16 bytes of the input, of which 10 exist.
        asm.cp_async_cg_16_zfill(mine, input.at(16), bytes);
        asm.cp_async_commit_group();
        asm.cp_async_wait_group(0);
        let words = asm.regs::<B32, 4>();
        asm.ld_shared_v4_b32(words, mine);
        let place = element(asm, out, p.tid, 16);
        asm.st_global_v4_b32(place, words);
    });
    let mut full = Run::new().words(&[0xffff_ffff; 8]).undefined(512);
    full.clean(&program, [1, 1]);
    let bytes: Vec<u32> = full
        .read(1, 128)
        .chunks(4)
        .map(|words| words.iter().map(|w| w.count_ones() / 8).sum())
        .collect();
    assert_eq!(bytes, (0..32).map(|tid: u32| tid.min(16)).collect::<Vec<_>>());
    let mut short = Run::new().undefined(26).undefined(512);
    let makaira::backend::Arg::U64(ptr) = short.args[0] else { unreachable!("a buffer") };
    short.memory.upload(ptr, &[1; 26]).expect("the range is allocated");
    let fault = short.fault(&program, [1, 1]);
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    assert_eq!(fault.place().expect("a copy was at fault").thread, 11, "the first to read byte 26");
}

/// Nobody may overwrite a copy in flight, not even its own lane.
#[test]
fn bytes_in_flight_are_not_overwritten() {
    let program = |wait: bool| {
        module(32, 512, |asm, p| {
            let input = pointer(asm, "input");
            let from = element(asm, input, p.tid, 16);
            let mine = slot(asm, p.smem, p.tid, 16);
            asm.cp_async_cg_16(mine, from);
            asm.cp_async_commit_group();
            if wait {
                asm.cp_async_wait_group(0);
            }
            asm.st_shared_b32(mine.at(12), 0);
        })
    };
    assert_eq!(run().fault(&program(false), [1, 1]).kind, FaultKind::MissingWait);
    run().clean(&program(true), [1, 1]);
}

/// Copies that nobody reads may be in flight when the threads end.
#[test]
fn unread_copies_may_outlive_their_lane() {
    let program = module(32, 512, |asm, p| {
        let input = pointer(asm, "input");
        let from = element(asm, input, p.tid, 16);
        let mine = slot(asm, p.smem, p.tid, 16);
        asm.cp_async_cg_16(mine, from);
    });
    run().clean(&program, [1, 1]);
}

/// The main loop of a kernel whose scales have one slot for two pipeline stages: activations in a ring of
/// `STAGES` slots filled two iterations ahead, one barrier an iteration that guards that ring, and a scale
/// slot that is refilled on every second iteration for the pair of iterations after it. Warps that are
/// still in the later iteration of a pair may read the slot while it is refilled.
fn shared_scale_slot(barrier_before_refill: bool) -> Module {
    const STAGES: u32 = 4;
    const STAGE_BYTES: u32 = 128 * 16;
    const ITERATIONS: u32 = 12;
    let scale_slots = STAGES / 2;
    module(128, STAGES * STAGE_BYTES + scale_slots * STAGE_BYTES, |asm, p| {
        let (input, scales) = (pointer(asm, "input"), pointer(asm, "scales"));
        let mine = slot(asm, p.smem, p.tid, 16);
        let other = asm.reg();
        asm.xor_b32(other, p.tid, 96);
        let theirs = slot(asm, p.smem, other, 16);
        let input = element(asm, input, p.tid, 16);
        let scales = element(asm, scales, p.tid, 16);
        let fetch = |asm: &mut Asm, iteration: u32| {
            if iteration < ITERATIONS {
                let stage = iteration % STAGES;
                asm.cp_async_cg_16(mine.at(stage * STAGE_BYTES), input);
                if iteration.is_multiple_of(2) {
                    let scale_slot = STAGES + iteration / 2 % scale_slots;
                    asm.cp_async_cg_16(mine.at(scale_slot * STAGE_BYTES), scales);
                }
            }
            asm.cp_async_commit_group();
        };
        for iteration in 0..STAGES - 1 {
            fetch(asm, iteration);
        }
        for iteration in 0..ITERATIONS {
            asm.section("main loop", |asm| {
                asm.cp_async_wait_group(STAGES - 2);
                asm.bar_sync(0);
                let (value, scale): (Reg<B32>, Reg<B32>) = (asm.reg(), asm.reg());
                let stage = iteration % STAGES;
                asm.ld_shared_b32(value, theirs.at(stage * STAGE_BYTES));
                if !barrier_before_refill {
                    asm.section("fetch", |asm| fetch(asm, iteration + STAGES - 1));
                }
                let scale_slot = STAGES + iteration / 2 % scale_slots;
                asm.ld_shared_b32(scale, theirs.at(scale_slot * STAGE_BYTES));
                if barrier_before_refill {
                    asm.bar_sync(0);
                    asm.section("fetch", |asm| fetch(asm, iteration + STAGES - 1));
                }
                sum(asm, value, scale);
            });
        }
    })
}

#[test]
fn a_slot_for_two_stages_is_refilled_too_early() {
    let words: Vec<u32> = (0..512).collect();
    for seed in [None, Some(5), Some(6), Some(7)] {
        let mut run = Run::new().words(&words).words(&words);
        run.options.seed = seed;
        let fault = run.fault(&shared_scale_slot(false), [1, 1]);
        assert!(matches!(fault.kind, FaultKind::Race | FaultKind::MissingWait), "{fault}");
        let texts: Vec<&str> =
            fault.accesses.iter().map(|site| site.instruction.as_str()).collect();
        assert!(texts.iter().any(|text| text.starts_with("cp.async.cg")), "{fault}");
        assert!(texts.iter().any(|text| text.starts_with("ld.shared")), "{fault}");
        run.clean(&shared_scale_slot(true), [1, 1]);
    }
}

/// The same buffer twice without a barrier between the last read and the next copy.
#[test]
fn a_copy_over_a_buffer_in_use_is_reported() {
    let program = |barrier: bool| {
        module(64, 1024, |asm, p| {
            let input: Reg<B64> = pointer(asm, "input");
            let from = element(asm, input, p.tid, 16);
            let mine = slot(asm, p.smem, p.tid, 16);
            let other = asm.reg();
            asm.xor_b32(other, p.tid, 32);
            let theirs = slot(asm, p.smem, other, 16);
            let late = asm.test_u32(Cmp::Ge, p.tid, 32);
            for _ in 0..2 {
                asm.cp_async_cg_16(mine, from);
                asm.cp_async_commit_group();
                asm.cp_async_wait_group(0);
                asm.bar_sync(0);
                let value = asm.reg();
                // Only the second warp reads: the first one runs ahead to the next copy.
                asm.when(late, |asm| asm.ld_shared_b32(value, theirs));
                if barrier {
                    asm.bar_sync(0);
                }
            }
        })
    };
    let fault = run().fault(&program(false), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race);
    run().clean(&program(true), [1, 1]);
}
