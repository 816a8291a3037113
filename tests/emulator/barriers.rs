//! Barriers: deadlock, counts, lanes that do not arrive, and launches that never end.

use makaira::asm::types::{B32, Cmp};
use makaira::emu::{Category, FaultKind};

use super::support::{Run, module, pointer, slot};

#[test]
fn a_deadlock_lists_who_waits_where() {
    let program = |skipping: bool| {
        module(96, 0, |asm, p| {
            let past = asm.label("past");
            let early = asm.test_u32(Cmp::Ge, p.tid, 64);
            if skipping {
                asm.when(early, |asm| asm.bra(past));
            }
            asm.section("meet", |asm| asm.bar_sync(3));
            asm.bind(past);
        })
    };
    let fault = Run::new().fault(&program(true), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BarrierDeadlock);
    let waiting: Vec<u32> = fault.accesses.iter().map(|site| site.thread).collect();
    assert_eq!(waiting, [0, 32], "warps 0 and 1 wait, warp 2 has ended");
    assert!(fault.accesses.iter().all(|site| site.instruction == "bar.sync 3;"));
    assert!(fault.accesses.iter().all(|site| site.section == "meet"));
    Run::new().clean(&program(false), [1, 1]);
}

/// Two warps each wait at a different barrier.
#[test]
fn different_barriers_deadlock() {
    let program = |ids: [u32; 2]| {
        module(64, 0, |asm, p| {
            let id = asm.reg();
            let first = asm.test_u32(Cmp::Lt, p.tid, 32);
            asm.selp_b32(id, ids[0], ids[1], first);
            asm.bar_sync_n(id, 64);
        })
    };
    assert_eq!(Run::new().fault(&program([1, 2]), [1, 1]).kind, FaultKind::BarrierDeadlock);
    Run::new().clean(&program([2, 2]), [1, 1]);
}

/// Pairs of warps exchange through named barriers; a count that takes in the wrong warps shows.
#[test]
fn a_wrong_barrier_count_is_reported() {
    let program = |count: u32| {
        module(128, 512, |asm, p| {
            let mine = slot(asm, p.smem, p.tid, 4);
            asm.st_shared_b32(mine, p.tid);
            let (id, other) = (asm.reg(), asm.reg());
            asm.shr_u32(id, p.tid, 6);
            asm.add_u32(id, id, 1);
            asm.bar_sync_n(id, count);
            asm.xor_b32(other, p.tid, 32);
            let theirs = slot(asm, p.smem, other, 4);
            asm.ld_shared_b32(other, theirs);
        })
    };
    Run::new().clean(&program(64), [1, 1]);
    let fault = Run::new().fault(&program(96), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BarrierDeadlock, "a third warp never comes");
    let fault = Run::new().fault(&program(32), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race, "the other warp is not awaited");
    for impossible in [0, 48, 160] {
        let fault = Run::new().fault(&program(impossible), [1, 1]);
        assert_eq!(fault.kind, FaultKind::BarrierMisuse, "{impossible}");
    }
}

#[test]
fn counts_that_differ_are_reported() {
    let program = |counts: [u32; 2]| {
        module(64, 0, |asm, p| {
            let (second, past) = (asm.label("second"), asm.label("past"));
            let low = asm.test_u32(Cmp::Lt, p.tid, 32);
            asm.unless(low, |asm| asm.bra(second));
            asm.bar_sync_n(1, counts[0]);
            asm.bra(past);
            asm.bind(second);
            asm.bar_sync_n(1, counts[1]);
            asm.bind(past);
        })
    };
    // A count of 32 completes at once, whoever comes; then the other warp waits for a second one.
    let fault = Run::new().fault(&program([64, 32]), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BarrierMisuse);
    assert_eq!(fault.accesses.len(), 2);
    Run::new().clean(&program([64, 64]), [1, 1]);
}

#[test]
fn barrier_sixteen_does_not_exist() {
    let program = |id: u32| module(32, 0, |asm, _| asm.bar_sync_n(id, 32));
    assert_eq!(Run::new().fault(&program(16), [1, 1]).kind, FaultKind::BarrierMisuse);
    Run::new().clean(&program(15), [1, 1]);
}

#[test]
fn lanes_of_a_warp_name_one_barrier() {
    let program = |shift: u32| {
        module(64, 0, |asm, p| {
            let id = asm.reg();
            asm.shr_u32(id, p.tid, shift);
            asm.bar_sync_n(id, 32);
        })
    };
    assert_eq!(Run::new().fault(&program(4), [1, 1]).kind, FaultKind::BarrierMisuse);
    Run::new().clean(&program(5), [1, 1]);
}

/// Half a warp skips a CTA barrier.
#[test]
fn a_divergent_cta_barrier_is_reported() {
    let program = |limit: u32| {
        module(64, 0, |asm, p| {
            let past = asm.label("past");
            let high = asm.test_u32(Cmp::Ge, p.tid, limit);
            asm.when(high, |asm| asm.bra(past));
            asm.bar_sync(0);
            asm.bind(past);
        })
    };
    assert_eq!(Run::new().fault(&program(48), [1, 1]).kind, FaultKind::DivergentAligned);
    Run::new().clean(&program(64), [1, 1]);
}

/// Lanes that diverged meet at a warp barrier, whatever their order; masks must agree.
#[test]
fn warp_barriers_wait_for_diverged_lanes() {
    let program = |masks: [u32; 2]| {
        module(32, 128, |asm, p| {
            let (second, past) = (asm.label("second"), asm.label("past"));
            let mine = slot(asm, p.smem, p.tid, 4);
            let low = asm.test_u32(Cmp::Lt, p.tid, 16);
            asm.unless(low, |asm| asm.bra(second));
            asm.st_shared_b32(mine, 1);
            asm.bar_warp_sync(masks[0]);
            asm.bra(past);
            asm.bind(second);
            asm.st_shared_b32(mine, 2);
            asm.bar_warp_sync(masks[1]);
            asm.bind(past);
            let other = asm.reg();
            asm.xor_b32(other, p.tid, 16);
            let theirs = slot(asm, p.smem, other, 4);
            asm.ld_shared_b32(other, theirs);
        })
    };
    Run::new().clean(&program([u32::MAX; 2]), [1, 1]);
    let fault = Run::new().fault(&program([0x0001_ffff, 0xffff_0001]), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BarrierDeadlock);
    assert_eq!(fault.accesses.len(), 32, "every lane waits");
    let fault = Run::new().fault(&program([0xffff, 0xffff_0000]), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Race, "the halves do not meet");
    let fault = Run::new().fault(&program([0xffff_0000, 0xffff_0000]), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BarrierMisuse, "a lane outside its own mask");
}

/// Lanes that have ended are not awaited at a warp barrier.
#[test]
fn ended_lanes_are_not_awaited() {
    let program = module(32, 128, |asm, p| {
        let high = asm.test_u32(Cmp::Ge, p.tid, 16);
        asm.when(high, |asm| asm.exit());
        let mine = slot(asm, p.smem, p.tid, 4);
        asm.st_shared_b32(mine, p.tid);
        asm.bar_warp_sync(-1);
        let other = asm.reg();
        asm.xor_b32(other, p.tid, 15);
        let theirs = slot(asm, p.smem, other, 4);
        asm.ld_shared_b32(other, theirs);
    });
    Run::new().clean(&program, [1, 1]);
}

/// Fault B42: a spin on a counter that starts dirty ends in a report, never in a hang.
#[test]
fn b42_a_spin_on_a_dirty_counter_ends() {
    let program = module(32, 0, |asm, _| {
        let lock = pointer(asm, "lock");
        let (spin, seen) = (asm.label("spin"), asm.reg::<B32>());
        asm.bind(spin);
        asm.ld_acquire_gpu_global_u32(seen, lock);
        let wait = asm.test_u32(Cmp::Ne, seen, 0);
        asm.section("take the lock", |asm| asm.when(wait, |asm| asm.bra(spin)));
    });
    let mut run = Run::new().words(&[1]);
    run.options.max_idle_steps = 10_000;
    let fault = run.fault(&program, [1, 1]);
    assert_eq!(fault.kind, FaultKind::NoProgress);
    assert_eq!(fault.kind.category(), Category::Limit);
    assert_eq!(fault.accesses.len(), 1, "the one spinning warp");
    Run::new().words(&[0]).clean(&program, [1, 1]);
}

/// A loop that keeps writing makes progress but still meets the step budget.
#[test]
fn an_endless_loop_meets_the_step_budget() {
    let program = |turns: u32| {
        module(32, 128, |asm, p| {
            let (head, turn) = (asm.label("head"), asm.reg());
            let mine = slot(asm, p.smem, p.tid, 4);
            asm.mov_b32(turn, 0);
            asm.bind(head);
            asm.st_shared_b32(mine, turn);
            asm.add_u32(turn, turn, 1);
            let again = asm.test_u32(Cmp::Ne, turn, turns);
            asm.when(again, |asm| asm.bra(head));
        })
    };
    let mut run = Run::new();
    run.options.max_steps = 100_000;
    assert_eq!(run.fault(&program(0), [1, 1]).kind, FaultKind::StepLimit);
    run.clean(&program(1000), [1, 1]);
}
