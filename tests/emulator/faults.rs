//! Faults of a single access.

use makaira::asm::Asm;
use makaira::asm::reg::{Reg, Region, SharedAddr};
use makaira::asm::types::{B16, B32, B64, Cmp, F32, Special};
use makaira::backend::Arg;
use makaira::emu::{Category, FaultKind};

use super::support::{Run, element, module, pointer, slot, sum};

#[test]
fn an_undefined_register_is_reported_with_its_place() {
    let program = |everywhere: bool| {
        module(32, 0, |asm, p| {
            let value = asm.reg::<B32>();
            let low = asm.test_u32(Cmp::Lt, p.tid, 5);
            asm.when(low, |asm| asm.mov_b32(value, 1));
            if everywhere {
                asm.unless(low, |asm| asm.mov_b32(value, 2));
            }
            asm.section("epilogue", |asm| asm.section("store", |asm| sum(asm, value, 1)));
        })
    };
    let fault = Run::new().fault(&program(false), [1, 1]);
    assert_eq!(fault.kind, FaultKind::UndefinedRegister);
    assert_eq!(fault.kind.category(), Category::KernelBug);
    let place = fault.place().expect("an instruction was at fault");
    assert_eq!(place.thread, 5, "the first lane whose guard was false");
    assert_eq!(place.instruction, "add.u32 %r3, %r2, 1;");
    assert_eq!(place.section, "epilogue / store");
    assert!(place.emitter.file().ends_with("support.rs"), "{}", place.emitter);
    Run::new().clean(&program(true), [1, 1]);
}

#[test]
fn an_undefined_guard_is_reported() {
    let program = |defined: bool| {
        module(32, 0, |asm, p| {
            let guard = asm.reg();
            if defined {
                asm.setp_u32(guard, Cmp::Eq, p.tid, 3);
            }
            asm.when(guard, |asm| sum(asm, p.tid, 1));
        })
    };
    let fault = Run::new().fault(&program(false), [1, 1]);
    assert_eq!(fault.kind, FaultKind::UndefinedRegister);
    assert!(fault.what.contains("%p0"), "{fault}");
    Run::new().clean(&program(true), [1, 1]);
}

#[test]
fn undefined_shared_memory_is_reported() {
    let program = |bytes_written: u32| {
        module(32, 32 * 4, |asm, p| {
            let place = slot(asm, p.smem, p.tid, 4);
            let ([low, high], word) = (asm.regs::<B16, 2>(), asm.reg());
            asm.mov_b32_unpack([low, high], p.tid);
            match bytes_written {
                2 => asm.st_shared_b16(place, low),
                _ => asm.st_shared_b32(place, p.tid),
            }
            asm.ld_shared_b32(word, place);
        })
    };
    let fault = Run::new().fault(&program(2), [1, 1]);
    assert_eq!(fault.kind, FaultKind::UndefinedMemory);
    assert!(fault.what.contains("shared byte 2 "), "two of four bytes are undefined: {fault}");
    Run::new().clean(&program(4), [1, 1]);
}

#[test]
fn undefined_device_memory_is_reported() {
    let program = module(32, 0, |asm, p| {
        let input = pointer(asm, "input");
        let place = element(asm, input, p.tid, 4);
        let value = asm.reg();
        asm.ld_global_b32(value, place);
    });
    let mut run = Run::new().undefined(32 * 4);
    let Arg::U64(ptr) = run.args[0] else { unreachable!("a buffer is an address") };
    run.memory.upload(ptr, &[7; 127]).expect("the range is allocated");
    let fault = run.fault(&program, [1, 1]);
    assert_eq!(fault.kind, FaultKind::UndefinedMemory);
    assert!(fault.what.contains("byte 127 "), "{fault}");
    assert_eq!(fault.place().expect("a load was at fault").thread, 31);
    run.memory.upload(ptr + 127, &[7]).expect("the range is allocated");
    run.clean(&program, [1, 1]);
}

#[test]
fn addresses_outside_are_reported() {
    let program = |words: u32| {
        module(64, 0, |asm, p| {
            let out = pointer(asm, "out");
            let place = element(asm, out, p.tid, 4);
            let inside = asm.test_u32(Cmp::Lt, p.tid, words);
            asm.when(inside, |asm| asm.st_global_b32(place, p.tid));
        })
    };
    let fault = Run::new().undefined(40 * 4).fault(&program(41), [1, 1]);
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    assert!(fault.what.contains("0 bytes past the end of the 160 bytes"), "{fault}");
    assert_eq!(fault.place().expect("a store was at fault").thread, 40);
    Run::new().undefined(40 * 4).clean(&program(40), [1, 1]);

    let shared = |bytes: u32| {
        module(32, bytes, |asm, p| {
            let place = slot(asm, p.smem, p.tid, 4);
            asm.st_shared_b32(place, p.tid);
        })
    };
    let fault = Run::new().fault(&shared(124), [1, 1]);
    assert_eq!(fault.kind, FaultKind::OutOfBounds);
    Run::new().clean(&shared(128), [1, 1]);
}

/// An offset without the base that `mov.u32 %r, smem` gives.
#[test]
fn a_forgotten_shared_base_is_reported() {
    let program = module(32, 128, |asm, p| {
        let place = asm.reg();
        asm.mul_lo_u32(place, p.tid, 4);
        asm.st_shared_b32(place, p.tid);
    });
    assert_eq!(Run::new().fault(&program, [1, 1]).kind, FaultKind::OutOfBounds);
}

#[test]
fn freed_memory_is_reported() {
    let program = module(32, 0, |asm, p| {
        let out = pointer(asm, "out");
        let place = element(asm, out, p.tid, 4);
        asm.st_global_b32(place, p.tid);
    });
    let mut run = Run::new().undefined(128);
    run.clean(&program, [1, 1]);
    let Arg::U64(ptr) = run.args[0] else { unreachable!("a buffer is an address") };
    run.memory.free(ptr).expect("the allocation is live");
    assert_eq!(run.fault(&program, [1, 1]).kind, FaultKind::UseAfterFree);
}

#[test]
fn misaligned_addresses_are_reported() {
    let program = |offset: u32| {
        module(32, 1024, |asm, p| {
            let place = slot(asm, p.smem, p.tid, 16);
            let zeros = asm.regs::<F32, 4>();
            zeros.iter().for_each(|zero| asm.mov_f32(*zero, 0.0));
            asm.st_shared_v4_f32(place.at(offset), zeros);
        })
    };
    let fault = Run::new().fault(&program(8), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Misaligned);
    Run::new().clean(&program(16), [1, 1]);

    let global = |offset: i32| {
        module(1, 0, |asm, _| {
            let out = pointer(asm, "out");
            let words = asm.regs::<B32, 2>();
            words.iter().for_each(|word| asm.mov_b32(*word, 0));
            asm.st_global_v2_b32(out.at(offset), words);
        })
    };
    let fault = Run::new().undefined(64).fault(&global(4), [1, 1]);
    assert_eq!(fault.kind, FaultKind::Misaligned);
    Run::new().undefined(64).clean(&global(8), [1, 1]);
}

#[test]
fn a_broken_region_promise_is_reported() {
    type Emit = fn(&mut Asm, Reg<B64>, SharedAddr);
    let accesses: [Emit; 4] = [
        |asm, _, place| asm.st_shared_b32(place, 1),
        |asm, _, place| {
            let value = asm.reg();
            asm.ld_shared_b32(value, place);
        },
        |asm, input, place| asm.cp_async_ca_4_zfill(place, input, 4),
        |asm, _, place| {
            // The same 128 bytes as eight rows of 16.
            let (lane, row, rows) = (asm.reg(), asm.reg(), asm.regs::<B32, 2>());
            asm.mov_u32_special(lane, Special::Laneid);
            asm.and_b32(row, lane, 7);
            asm.mov_u32_smem(lane);
            asm.mad_lo_u32(row, row, 16, lane);
            let place = SharedAddr { base: row, ..place };
            asm.ldmatrix_sync_aligned_m8n8_x2_shared_b16(rows, place);
        },
    ];
    for access in accesses {
        let program = |bytes: u32| {
            module(32, 1024, |asm, p| {
                let input = pointer(asm, "input");
                let place = slot(asm, p.smem, p.tid, 4);
                asm.st_shared_b32(place.at(64), 0);
                asm.bar_warp_sync(-1);
                access(asm, input, place.at(64).within(Region { start: 64, bytes }));
            })
        };
        let fault = Run::new().words(&[1]).fault(&program(124), [1, 1]);
        assert_eq!(fault.kind, FaultKind::BrokenPromise);
        Run::new().words(&[1]).clean(&program(128), [1, 1]);
    }
}

#[test]
fn a_divergent_aligned_instruction_names_the_lanes() {
    let program = |meet: bool| {
        module(32, 0, |asm, p| {
            let join = asm.label("join");
            let odd = asm.reg();
            asm.and_b32(odd, p.tid, 1);
            let skip = asm.test_u32(Cmp::Ne, odd, 0);
            let copy = asm.reg();
            if meet {
                asm.when(skip, |asm| asm.bra(join));
                sum(asm, p.tid, 1);
                asm.bind(join);
                asm.shfl_sync_idx_b32(copy, p.tid, 0);
            } else {
                asm.when(skip, |asm| asm.bra(join));
                asm.shfl_sync_idx_b32(copy, p.tid, 0);
                asm.bind(join);
                sum(asm, p.tid, 1);
            }
        })
    };
    let fault = Run::new().fault(&program(false), [1, 1]);
    assert_eq!(fault.kind, FaultKind::DivergentAligned);
    assert!(fault.what.contains("lanes 0 2 4"), "{fault}");
    assert!(fault.what.contains("lanes 1 3 5"), "{fault}");
    Run::new().clean(&program(true), [1, 1]);
}

#[test]
fn a_partly_guarded_aligned_instruction_is_reported() {
    let program = |limit: u32| {
        module(32, 0, |asm, p| {
            let some = asm.test_u32(Cmp::Lt, p.tid, limit);
            let copy = asm.reg();
            asm.when(some, |asm| asm.shfl_sync_idx_b32(copy, p.tid, 0));
        })
    };
    assert_eq!(Run::new().fault(&program(31), [1, 1]).kind, FaultKind::DivergentAligned);
    Run::new().clean(&program(32), [1, 1]);
    Run::new().clean(&program(0), [1, 1]);
}

#[test]
fn impossible_operands_are_reported() {
    let copy = |bytes: u32| {
        module(32, 512, |asm, p| {
            let input = pointer(asm, "input");
            let mine = slot(asm, p.smem, p.tid, 16);
            asm.cp_async_cg_16_zfill(mine, input, bytes);
        })
    };
    let fault = Run::new().words(&[0; 8]).fault(&copy(17), [1, 1]);
    assert_eq!(fault.kind, FaultKind::BadOperand);
    Run::new().words(&[0; 8]).clean(&copy(16), [1, 1]);

    let branch = |bound: bool| {
        module(32, 0, |asm, _| {
            let label = asm.label("nowhere");
            asm.bra(label);
            if bound {
                asm.bind(label);
            }
        })
    };
    assert_eq!(Run::new().fault(&branch(false), [1, 1]).kind, FaultKind::BadOperand);
    Run::new().clean(&branch(true), [1, 1]);
}

/// A fault reads like this: rule, values, both sides, remedy.
#[test]
fn a_fault_prints_itself() {
    let program = module(64, 4, |asm, p| {
        asm.section("main loop", |asm| asm.st_shared_b32(p.smem, p.tid));
    });
    let text = Run::new().fault(&program, [1, 1]).to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "kernel bug: data race: write and write of shared byte 0");
    assert_eq!(lines[1], "  (1) write by thread 1 (warp 0, lane 1) of CTA (0, 0)");
    assert_eq!(lines[2], "      `st.shared.b32 [%r1], %r0;`");
    assert_eq!(lines[3], "      in section main loop");
    assert!(lines[4].starts_with("      emitted at tests/emulator/faults.rs:"), "{text}");
    assert!(
        lines[5].starts_with("  (2) write earlier, in no order with it, by thread 0 "),
        "{text}"
    );
    assert!(lines[9].starts_with("  help: "), "{text}");
}
