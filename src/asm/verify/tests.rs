use std::time::{Duration, Instant};

use super::*;
use crate::asm::builder::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred};

mod definition;
mod hopper;

const SM80: SmArch = SmArch::baseline(80);

fn device(sm: u16, driver: i32) -> DeviceSpec {
    DeviceSpec {
        name: "test card".into(),
        arch: SmArch::baseline(sm),
        isa: PtxIsa::of_driver(driver).expect("a driver that we know"),
        num_sms: 1,
        l2_bytes: 1 << 20,
        smem_per_cta_bytes: 96 << 10,
    }
}

/// The problems of a program that ends with an exit, as `(rule, text)`.
fn problems(emit: impl FnOnce(&mut Asm)) -> Vec<(Rule, String)> {
    let mut asm = Asm::new();
    emit(&mut asm);
    asm.exit();
    problems_of(&asm.finish("k", SM80, 32, 1))
}

fn problems_of(module: &Module) -> Vec<(Rule, String)> {
    match module.verify() {
        Ok(()) => Vec::new(),
        Err(found) => found.iter().map(|one| (one.rule, one.to_string())).collect(),
    }
}

/// Exactly one problem, of this rule, whose text has all of `words`.
#[track_caller]
fn assert_one(found: &[(Rule, String)], rule: Rule, words: &[&str]) {
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].0, rule, "{found:#?}");
    for word in words {
        assert!(found[0].1.contains(word), "no `{word}` in {}", found[0].1);
    }
}

#[track_caller]
fn assert_clean(found: &[(Rule, String)]) {
    assert!(found.is_empty(), "{found:#?}");
}

fn predicate(asm: &mut Asm) -> Reg<Pred> {
    let tid = asm.reg();
    asm.mov_u32_special(tid, crate::asm::types::Special::TidX);
    asm.test_u32(Cmp::Lt, tid, 7)
}

#[test]
fn labels_are_bound_once_and_used() {
    let twice = problems(|asm| {
        let top = asm.label("top");
        asm.bind(top);
        asm.bind(top);
        let p = predicate(asm);
        asm.when(p, |asm| asm.bra(top));
    });
    assert_one(&twice, Rule::Label, &["$top_0", "twice"]);
    let never = problems(|asm| {
        let p = predicate(asm);
        let nowhere = asm.label("nowhere");
        asm.when(p, |asm| asm.bra(nowhere));
    });
    assert_one(&never, Rule::Label, &["$nowhere_0", "not bound"]);
    let idle = problems(|asm| {
        let idle = asm.label("idle");
        asm.bind(idle);
    });
    assert_one(&idle, Rule::Label, &["$idle_0", "never used"]);
}

#[test]
fn control_reaches_everything_and_ends_at_an_exit() {
    let mut asm = Asm::new();
    asm.bar_sync(0);
    let past_the_end = problems_of(&asm.finish("k", SM80, 32, 1));
    assert_one(&past_the_end, Rule::Flow, &["runs past", "bar.sync 0;"]);
    let mut asm = Asm::new();
    let p = predicate(&mut asm);
    asm.when(p, |asm| asm.exit());
    assert_one(&problems_of(&asm.finish("k", SM80, 32, 1)), Rule::Flow, &["runs past"]);
    let dead = problems(|asm| {
        let end = asm.label("end");
        asm.bra(end);
        asm.bar_sync(0);
        asm.bar_sync(1);
        asm.bind(end);
    });
    assert_one(&dead, Rule::Flow, &["never reaches", "2 instructions", "bar.sync 0;"]);
    assert_one(&problems_of(&Asm::new().finish("k", SM80, 32, 1)), Rule::Flow, &["no instruction"]);
}

#[test]
fn offsets_are_multiples_of_the_access() {
    let access = |offset: u32| {
        problems(|asm| {
            let region = asm.smem.region("tile", 64, 16);
            let base = asm.reg();
            asm.mov_u32_smem(base);
            let d = asm.regs::<B32, 4>();
            asm.ld_shared_v4_b32(d, base.at(offset).within(region));
        })
    };
    assert_clean(&access(32));
    assert_one(&access(24), Rule::Alignment, &["24", "16"]);
}

#[test]
fn regions_and_plan_stay_inside_the_limits() {
    let mut large = Asm::new();
    large.smem.region("tile", 100 << 10, 16);
    large.exit();
    let mut module = large.finish("k", SM80, 32, 1);
    assert_clean(&problems_of(&module));
    module.target = SmArch::baseline(89);
    assert_one(&problems_of(&module), Rule::Smem, &["102400", "sm_89", "101376"]);
    module.target = SM80;
    let found = module.verify_for(&device(80, 12000)).expect_err("96 KiB of shared memory");
    assert!(found.to_string().contains("test card has at most 98304"), "{found}");

    let mut other = Asm::new();
    other.smem.region("pad", 64, 16);
    let foreign = other.smem.region("foreign", 64, 16);
    let outside = problems(|asm| {
        asm.smem.region("tile", 64, 16);
        let base = asm.reg();
        asm.mov_u32_smem(base);
        asm.st_shared_b32(base.at(0).within(foreign), 1);
    });
    assert_one(&outside, Rule::Smem, &["64+64", "64 bytes"]);
    let no_plan = problems(|asm| {
        let base = asm.reg();
        asm.mov_u32_smem(base);
    });
    assert_one(&no_plan, Rule::Smem, &["empty"]);
}

#[test]
fn parameters_are_read_at_their_width() {
    let wrong = problems(|asm| {
        let p = asm.param_u64("p");
        let d = asm.reg();
        asm.ld_param_u32(d, p);
    });
    assert_one(&wrong, Rule::Param, &["p of 8 bytes is read as 4"]);
    let foreign = Asm::new().param_u32("q");
    let none = problems(|asm| {
        let d = asm.reg();
        asm.ld_param_u32(d, foreign);
    });
    assert_one(&none, Rule::Param, &["none of this entry"]);
}

#[test]
fn names_are_identifiers_and_unique() {
    let name = |entry: &str, param: &'static str| {
        let mut asm = Asm::new();
        asm.param_u32(param);
        asm.exit();
        problems_of(&asm.finish(entry, SM80, 32, 1))
    };
    assert_clean(&name("marlin_sm80", "m"));
    assert_one(&name("marlin-sm80", "m"), Rule::Name, &["marlin-sm80"]);
    assert_one(&name("", "m"), Rule::Name, &["no PTX identifier"]);
    assert_one(&name("k", "k"), Rule::Name, &["taken"]);
    assert_one(&name("k", "smem"), Rule::Name, &["taken"]);
    assert_one(&name("k", "9lives"), Rule::Name, &["9lives"]);
}

#[test]
fn launches_are_possible() {
    for threads in [0, 31, 33, 1056] {
        let mut asm = Asm::new();
        asm.exit();
        let found = problems_of(&asm.finish("k", SM80, threads, 1));
        assert_one(&found, Rule::Launch, &[&format!("{threads} threads"), "multiple of 32"]);
    }
    let mut asm = Asm::new();
    asm.exit();
    assert_one(&problems_of(&asm.finish("k", SM80, 1024, 0)), Rule::Launch, &["0 CTAs"]);
}

#[test]
fn immediates_are_in_range() {
    assert_one(&problems(|asm| asm.bar_sync(16)), Rule::Immediate, &["barrier 16"]);
    assert_one(&problems(|asm| asm.bar_sync_n(1, 64)), Rule::Immediate, &["64 threads"]);
    let lut = problems(|asm| {
        let d = asm.reg();
        asm.lop3_b32(d, 1, 2, 3, 0x100);
    });
    assert_one(&lut, Rule::Immediate, &["0x100"]);
}

#[test]
fn registers_of_another_program_are_refused() {
    let mut other = Asm::new();
    let [.., foreign] = other.regs::<B32, 9>();
    let found = problems(|asm| {
        let d = asm.reg();
        asm.mov_b32(d, foreign);
    });
    assert_one(&found, Rule::Register, &["%r8", "another program"]);
}

/// A kernel that uses the instructions of the Ampere pipeline.
fn ampere(target: SmArch) -> Module {
    let mut asm = Asm::new();
    asm.smem.region("tile", 512, 128);
    let src = asm.param_u64("src");
    let [from] = asm.regs::<B64, 1>();
    let [to] = asm.regs::<B32, 1>();
    asm.ld_param_u64(from, src);
    asm.mov_u32_smem(to);
    asm.cp_async_cg_16(to, from);
    asm.cp_async_commit_group();
    asm.cp_async_wait_group(0);
    let a = asm.regs::<B32, 4>();
    asm.ldmatrix_sync_aligned_m8n8_x4_shared_b16(a, to);
    let c: [Reg<F32>; 4] = asm.regs();
    for c in c {
        asm.mov_f32(c, 0.0);
    }
    asm.mma_m16n8k16_f32_f16(c, a, [a[0], a[1]], c);
    asm.mma_m16n8k16_f32_f16(c, a, [a[2], a[3]], c);
    asm.exit();
    asm.finish("ampere", target, 32, 1)
}

/// Fault B57: cards below 8.0 are refused before the driver is called, with instruction and minimum.
#[test]
fn b57_old_targets_are_refused_by_name() {
    assert_clean(&problems_of(&ampere(SM80)));
    let turing = problems_of(&ampere(SmArch::baseline(75)));
    let copies =
        turing.iter().filter(|(rule, text)| *rule == Rule::Target && text.contains("`cp.async"));
    assert_eq!(copies.count(), 3, "{turing:#?}");
    let mma = "`mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32` needs sm_80 or higher, the target is sm_75";
    assert_eq!(turing.iter().filter(|(_, text)| text.contains(mma)).count(), 1, "{turing:#?}");
    let volta = problems_of(&ampere(SmArch::baseline(70)));
    assert!(
        volta
            .iter()
            .any(|(_, text)| text.contains("`ldmatrix") && text.contains("sm_75 or higher"))
    );
    let found = ampere(SM80).verify_for(&device(75, 12000)).expect_err("a Turing card");
    assert!(found.to_string().contains("test card has sm_75, which does not run code for sm_80"));
}

/// Faults B55 and B61: the version is the lowest that works, and an older driver is told what it lacks.
#[test]
fn b55_driver_too_old_names_version_and_remedy() {
    for driver in [11040, 11080, 12000, 12040, 12080, 13000] {
        let module = ampere(SM80);
        assert!(module.isa() <= PtxIsa::new(7, 0));
        assert!(module.verify_for(&device(90, driver)).is_ok(), "driver {driver}");
    }
    let found =
        ampere(SmArch::baseline(89)).verify_for(&device(89, 11040)).expect_err("sm_89 needs 7.8");
    let text = found.to_string();
    assert!(text.contains("sm_89 needs PTX 7.8, the driver speaks up to 7.4"), "{text}");
    assert!(text.contains("CUDA 11.8"), "{text}");
    let mut asm = Asm::new();
    let policy = asm.reg();
    asm.createpolicy_fractional_l2_evict_first_b64(policy);
    asm.exit();
    let module = asm.finish("k", SM80, 32, 1);
    let found = module.verify_for(&device(80, 11000)).expect_err("createpolicy needs 7.4");
    assert!(
        found.to_string().contains("`createpolicy.fractional.L2::evict_first.b64` needs PTX 7.4")
    );
}

#[test]
fn what_the_builder_noticed_is_reported() {
    let found = problems(|asm| {
        let stream = asm.capture(|asm| {
            let label = asm.label("inside");
            asm.bind(label);
        });
        asm.append(stream);
    });
    assert_one(&found, Rule::Emission, &["$inside_0"]);
}

/// Emission and verification of a kernel of 6000 instructions stay below 10 ms.
#[test]
fn large_kernels_verify_quickly() {
    let emit = || {
        let mut asm = Asm::new();
        let region = asm.smem.region("tile", 4096, 128);
        let base = asm.reg();
        asm.mov_u32_smem(base);
        let p = predicate(&mut asm);
        let words = asm.regs::<B32, 256>();
        let half: Reg<B16> = asm.reg();
        for word in words {
            asm.when(p, |asm| asm.mov_b32(word, 1));
            asm.unless(p, |asm| asm.mov_b32(word, 2));
        }
        let top = asm.label("top");
        asm.bind(top);
        for n in 0..1100 {
            let [a, b, c, d] = std::array::from_fn(|i| words[(n * 4 + i) % 256]);
            asm.ld_shared_v4_b32([a, b, c, d], base.at(16 * (n as u32 % 256)).within(region));
            asm.lop3_b32(a, b, c, d, 0xca);
            asm.when(p, |asm| asm.sub_f16x2(b, a, c));
            asm.mov_b32_unpack([half, half], d);
            let skip = asm.label("skip");
            if n % 20 == 0 {
                asm.unless(p, |asm| asm.bra(skip));
            }
            asm.st_shared_b32(base.at(4 * (n as u32 % 1024)).within(region), c);
            if n % 20 == 0 {
                asm.bind(skip);
            }
        }
        asm.when(p, |asm| asm.bra(top));
        asm.exit();
        asm.finish("k", SM80, 32, 1)
    };
    let module = emit();
    assert!(module.nodes().count() > 6000);
    let timed = |work: &dyn Fn()| -> Duration {
        let once = |_| {
            let start = Instant::now();
            work();
            start.elapsed()
        };
        (0..7).map(once).min().expect("seven runs")
    };
    let verified = timed(&|| module.verify().expect("it is correct"));
    let emitted = timed(&|| drop(std::hint::black_box(emit())));
    eprintln!("emit {emitted:?}, verify {verified:?}");
    assert!(emitted + verified < Duration::from_millis(10), "{emitted:?} + {verified:?}");
}
