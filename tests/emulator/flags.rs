//! Flags between CTAs: release and acquire patterns, and what is missing without their parts.

use makaira::asm::types::{B32, Cmp, Special};
use makaira::asm::{Asm, Module};
use makaira::emu::{Fault, FaultKind};

use super::support::{Prelude, Run, element, module, pointer};

/// Vector sums of many threads and CTAs do not race with each other; an ordinary access does.
#[test]
fn vector_sums_are_atomic() {
    let program = |reads: bool, offset: i32| {
        module(64, 16, |asm, p| {
            let sums = pointer(asm, "sums");
            let values = asm.regs();
            for (n, value) in values.into_iter().enumerate() {
                asm.mov_f32(value, 0.5 + n as f32);
            }
            asm.red_relaxed_gpu_global_add_v4_f32(sums.at(offset), values);
            let last = asm.test_u32(Cmp::Eq, p.tid, 63);
            if reads {
                let word = asm.reg();
                asm.when(last, |asm| asm.ld_global_b32(word, sums.at(4)));
            }
        })
    };
    let mut run = Run::new().words(&[0; 8]);
    run.clean(&program(false, 16), [3, 1]);
    let sums = run.read(0, 8).into_iter().map(f32::from_bits).collect::<Vec<_>>();
    assert_eq!(sums, [0.0, 0.0, 0.0, 0.0, 96.0, 288.0, 480.0, 672.0]);
    let fault = Run::new().words(&[0; 8]).fault(&program(true, 0), [3, 1]);
    assert_eq!(fault.kind, FaultKind::Race);
    let fault = Run::new().words(&[0; 8]).fault(&program(false, 8), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Misaligned);
}

type Reg64 = makaira::asm::reg::Reg<makaira::asm::types::B64>;

/// CTA 0 fills a buffer and sets a flag; CTA 1 waits for the flag and reads the buffer. `publish` and
/// `wait` are run by thread 0 only, the rest by all.
struct Handover {
    barrier_before: bool,
    publish: fn(&mut Asm, Reg64),
    wait: fn(&mut Asm, Reg64),
    barrier_after: bool,
}

fn release(asm: &mut Asm, flag: Reg64) {
    asm.st_release_gpu_global_u32(flag, 1);
}

fn spin_acquire(asm: &mut Asm, flag: Reg64) {
    let (spin, seen) = (asm.label("spin"), asm.reg::<B32>());
    asm.bind(spin);
    asm.ld_acquire_gpu_global_u32(seen, flag);
    let wait = asm.test_u32(Cmp::Eq, seen, 0);
    asm.when(wait, |asm| asm.bra(spin));
}

fn spin_relaxed(asm: &mut Asm, flag: Reg64) {
    let (spin, seen) = (asm.label("spin"), asm.reg::<B32>());
    asm.bind(spin);
    asm.ld_relaxed_gpu_global_u32(seen, flag);
    let wait = asm.test_u32(Cmp::Eq, seen, 0);
    asm.when(wait, |asm| asm.bra(spin));
}

const RIGHT: Handover =
    Handover { barrier_before: true, publish: release, wait: spin_acquire, barrier_after: true };

impl Handover {
    fn module(&self) -> Module {
        module(64, 0, |asm, p: &Prelude| {
            let (data, flag) = (pointer(asm, "data"), pointer(asm, "flag"));
            let (reader, end) = (asm.label("reader"), asm.label("end"));
            let (past_publish, past_wait) = (asm.label("past_publish"), asm.label("past_wait"));
            let ctaid = asm.reg();
            asm.mov_u32_special(ctaid, Special::CtaidX);
            let reads = asm.test_u32(Cmp::Eq, ctaid, 1);
            let others = asm.test_u32(Cmp::Ne, p.tid, 0);
            asm.when(reads, |asm| asm.bra(reader));
            let place = element(asm, data, p.tid, 4);
            asm.st_global_b32(place, p.tid);
            if self.barrier_before {
                asm.bar_sync(0);
            }
            asm.when(others, |asm| asm.bra(past_publish));
            (self.publish)(asm, flag);
            asm.bind(past_publish);
            asm.bra(end);
            asm.bind(reader);
            asm.when(others, |asm| asm.bra(past_wait));
            (self.wait)(asm, flag);
            asm.bind(past_wait);
            if self.barrier_after {
                asm.bar_sync(0);
            }
            let other = asm.reg();
            asm.xor_b32(other, p.tid, 33);
            let place = element(asm, data, other, 4);
            let value = asm.reg();
            asm.ld_global_b32(value, place);
            asm.bind(end);
        })
    }

    fn fault(&self) -> Fault {
        Run::new().words(&[0; 64]).words(&[0]).fault(&self.module(), [2, 1])
    }

    fn clean(&self) {
        for seed in 0..8 {
            Run::new().words(&[0; 64]).words(&[0]).seed(seed).clean(&self.module(), [2, 1]);
        }
    }
}

#[test]
fn release_and_acquire_hand_a_buffer_over() {
    RIGHT.clean();
    Handover { publish: |asm, flag| asm.red_release_gpu_global_add_u32(flag, 1), ..RIGHT }.clean();
    Handover {
        publish: |asm, flag| {
            let old = asm.reg();
            asm.atom_acq_rel_gpu_global_add_u32(old, flag, 1);
        },
        ..RIGHT
    }
    .clean();
}

#[test]
fn a_fence_makes_relaxed_atomics_release() {
    let relaxed: fn(&mut Asm, Reg64) = |asm, flag| asm.red_relaxed_gpu_global_add_u32(flag, 1);
    let fault = Handover { publish: relaxed, ..RIGHT }.fault();
    assert_eq!(fault.kind, FaultKind::Race);
    assert!(fault.help.contains("release"), "{fault}");
    let fenced: fn(&mut Asm, Reg64) = |asm, flag| {
        asm.fence_acq_rel_gpu();
        asm.red_relaxed_gpu_global_add_u32(flag, 1);
    };
    Handover { publish: fenced, ..RIGHT }.clean();
    let too_late: fn(&mut Asm, Reg64) = |asm, flag| {
        asm.red_relaxed_gpu_global_add_u32(flag, 1);
        asm.fence_acq_rel_gpu();
    };
    assert_eq!(Handover { publish: too_late, ..RIGHT }.fault().kind, FaultKind::Race);
}

#[test]
fn both_barriers_of_a_handover_are_needed() {
    let fault = Handover { barrier_before: false, ..RIGHT }.fault();
    assert_eq!(fault.kind, FaultKind::Race, "only thread 0's stores are published");
    let fault = Handover { barrier_after: false, ..RIGHT }.fault();
    assert_eq!(fault.kind, FaultKind::Race, "only thread 0 has acquired");
}

#[test]
fn a_weak_flag_is_a_race_itself() {
    let weak: fn(&mut Asm, Reg64) = |asm, flag| asm.st_global_b32(flag, 1);
    let fault = Handover { publish: weak, ..RIGHT }.fault();
    assert_eq!(fault.kind, FaultKind::Race);
    let both = fault.accesses.iter().map(|site| site.instruction.as_str()).collect::<Vec<_>>();
    assert!(both.iter().any(|text| text.starts_with("st.global.b32")), "{fault}");
    assert!(both.iter().any(|text| text.starts_with("ld.acquire")), "{fault}");
}

#[test]
fn a_missing_acquire_is_reported() {
    let fault = Handover { wait: spin_relaxed, ..RIGHT }.fault();
    assert_eq!(fault.kind, FaultKind::Race);
    let fenced: fn(&mut Asm, Reg64) = |asm, flag| {
        spin_relaxed(asm, flag);
        asm.fence_acq_rel_gpu();
    };
    Handover { wait: fenced, ..RIGHT }.clean();
}

/// What a flag publishes reaches a third CTA through the second one's own flag.
#[test]
fn knowledge_is_handed_on() {
    let program = |second_acquires: bool| {
        module(32, 0, |asm, p| {
            let (data, flags) = (pointer(asm, "data"), pointer(asm, "flags"));
            let (first, second, end) = (asm.label("first"), asm.label("second"), asm.label("end"));
            let ctaid = asm.reg();
            asm.mov_u32_special(ctaid, Special::CtaidX);
            let is_first = asm.test_u32(Cmp::Eq, ctaid, 0);
            let is_second = asm.test_u32(Cmp::Eq, ctaid, 1);
            let others = asm.test_u32(Cmp::Ne, p.tid, 0);
            asm.when(others, |asm| asm.bra(end));
            asm.when(is_first, |asm| asm.bra(first));
            asm.when(is_second, |asm| asm.bra(second));
            let next = asm.reg();
            asm.add_u64(next, flags, 4u64);
            spin_acquire(asm, next);
            let value = asm.reg();
            asm.ld_global_b32(value, data);
            asm.bra(end);
            asm.bind(first);
            asm.st_global_b32(data, 5);
            asm.st_release_gpu_global_u32(flags, 1);
            asm.bra(end);
            asm.bind(second);
            let wait = if second_acquires { spin_acquire } else { spin_relaxed };
            wait(asm, flags);
            asm.st_release_gpu_global_u32(flags.at(4), 1);
            asm.bind(end);
        })
    };
    Run::new().words(&[0]).words(&[0; 2]).clean(&program(true), [3, 1]);
    let fault = Run::new().words(&[0]).words(&[0; 2]).fault(&program(false), [3, 1]);
    assert_eq!(fault.kind, FaultKind::Race);
}

/// Counting by atomics is no race; a weak read of the counter among them is.
#[test]
fn atomics_do_not_race_with_each_other() {
    let program = |weak_read: bool| {
        module(64, 0, |asm, _| {
            let counter = pointer(asm, "counter");
            asm.red_relaxed_gpu_global_add_u32(counter, 1);
            if weak_read {
                let value = asm.reg();
                asm.ld_global_b32(value, counter);
            }
        })
    };
    let mut run = Run::new().words(&[10]);
    run.clean(&program(false), [3, 2]);
    assert_eq!(run.read(0, 1), [10 + 6 * 64]);
    assert_eq!(Run::new().words(&[0]).fault(&program(true), [3, 2]).kind, FaultKind::Race);
}

/// `inc` hands out tickets 0 to the bound and starts again at 0.
#[test]
fn inc_wraps_at_its_bound() {
    let program = module(1, 0, |asm, _| {
        let (counter, out) = (pointer(asm, "counter"), pointer(asm, "out"));
        for n in 0..6 {
            let old = asm.reg();
            asm.atom_acq_rel_gpu_global_inc_u32(old, counter, 3);
            asm.st_global_b32(out.at(4 * n), old);
        }
    });
    let mut run = Run::new().words(&[0]).undefined(24);
    run.clean(&program, [1, 1]);
    assert_eq!(run.read(1, 6), [0, 1, 2, 3, 0, 1]);
}
