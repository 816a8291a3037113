//! Definition before use, along branches, loops and guards.

use super::*;

#[test]
fn a_read_before_the_write_is_reported_with_its_place() {
    let mut asm = Asm::new();
    let [a, b] = asm.regs::<B32, 2>();
    let line = line!() + 1;
    asm.section("sum", |asm| asm.add_u32(b, a, 1));
    asm.exit();
    let module = asm.finish("k", SM80, 32, 1);
    let found = module.verify().expect_err("%r0 is never written");
    let site = found.iter().next().and_then(|one| one.site.clone()).expect("an instruction");
    assert_eq!((site.instruction, site.section.as_str()), (0, "sum"));
    assert_eq!(
        module.to_ptx(Default::default()).lines().nth(site.line - 1),
        Some("  add.u32 %r1, %r0, 1;")
    );
    assert_eq!((site.emitter.file(), site.emitter.line()), (file!(), line));
    assert_one(&problems_of(&module), Rule::Definition, &["%r0", "add.u32 %r1, %r0, 1;", "sum"]);
}

#[test]
fn each_undefined_register_is_reported_once_and_all_at_once() {
    let found = problems(|asm| {
        let [a, b, c] = asm.regs::<B32, 3>();
        asm.add_u32(c, a, b);
        asm.add_u32(c, a, b);
    });
    assert_eq!(found.len(), 2, "{found:#?}");
}

#[test]
fn a_write_on_one_of_two_paths_is_not_enough() {
    let diamond = |both: bool| {
        problems(|asm| {
            let p = predicate(asm);
            let a = asm.reg::<B32>();
            let [other, join] = [asm.label("other"), asm.label("join")];
            asm.when(p, |asm| asm.bra(other));
            asm.mov_b32(a, 1);
            asm.bra(join);
            asm.bind(other);
            if both {
                asm.mov_b32(a, 2);
            } else {
                asm.bar_sync(0);
            }
            asm.bind(join);
            asm.add_u32(a, a, 1);
        })
    };
    assert_clean(&diamond(true));
    assert_one(&diamond(false), Rule::Definition, &["%r1"]);
}

#[test]
fn a_loop_body_does_not_define_for_its_own_first_round() {
    let counted = |before: bool| {
        problems(|asm| {
            let [n, sum] = asm.regs::<B32, 2>();
            asm.mov_b32(n, 3);
            if before {
                asm.mov_b32(sum, 0);
            }
            let top = asm.label("top");
            asm.bind(top);
            asm.add_u32(sum, sum, n);
            asm.sub_u32(n, n, 1);
            let more = asm.test_u32(Cmp::Ne, n, 0);
            asm.when(more, |asm| asm.bra(top));
        })
    };
    assert_clean(&counted(true));
    assert_one(&counted(false), Rule::Definition, &["%r1"]);
}

#[test]
fn guarded_writes_serve_uses_under_the_same_guard() {
    assert_clean(&problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.when(p, |asm| asm.add_u32(b, a, 1));
        asm.unless(p, |asm| asm.mov_b32(b, 0));
        asm.add_u32(b, b, 1);
    }));
    let other_guard = problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.unless(p, |asm| asm.add_u32(b, a, 1));
    });
    assert_one(&other_guard, Rule::Definition, &["%r1"]);
    let no_guard = problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.add_u32(b, a, 1);
    });
    assert_one(&no_guard, Rule::Definition, &["%r1"]);
    let guard_changed = problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.setp_u32(p, Cmp::Gt, 3, 2);
        asm.when(p, |asm| asm.add_u32(b, a, 1));
    });
    assert_one(&guard_changed, Rule::Definition, &["%r1"]);
}

#[test]
fn a_branch_tells_what_its_guard_was() {
    // The write is skipped where p is false; the guarded use is, too.
    assert_clean(&problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        let skip = asm.label("skip");
        asm.unless(p, |asm| asm.bra(skip));
        asm.mov_b32(a, 1);
        asm.bind(skip);
        asm.when(p, |asm| asm.add_u32(b, a, 1));
    }));
    // A guarded write, used without guard where the branch has shown that p holds.
    assert_clean(&problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        let skip = asm.label("skip");
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.unless(p, |asm| asm.bra(skip));
        asm.add_u32(b, a, 1);
        asm.bind(skip);
    }));
    let wrong_side = problems(|asm| {
        let p = predicate(asm);
        let [a, b] = asm.regs::<B32, 2>();
        let skip = asm.label("skip");
        asm.when(p, |asm| asm.mov_b32(a, 1));
        asm.when(p, |asm| asm.bra(skip));
        asm.add_u32(b, a, 1);
        asm.bind(skip);
    });
    assert_one(&wrong_side, Rule::Definition, &["%r1"]);
}

#[test]
fn a_combined_predicate_implies_its_parts() {
    let combined = |emit: fn(&mut Asm, Reg<Pred>, Reg<Pred>, Reg<Pred>)| {
        problems(|asm| {
            let (p, q) = (predicate(asm), predicate(asm));
            let both = asm.reg();
            let [a, b] = asm.regs::<B32, 2>();
            asm.when(p, |asm| asm.mov_b32(a, 1));
            emit(asm, both, p, q);
            asm.when(both, |asm| asm.add_u32(b, a, 1));
        })
    };
    assert_clean(&combined(|asm, d, p, q| asm.and_pred(d, p, q)));
    assert_one(&combined(|asm, d, p, q| asm.or_pred(d, p, q)), Rule::Definition, &["%r2"]);
    assert_one(&combined(|asm, d, p, _| asm.not_pred(d, p)), Rule::Definition, &["%r2"]);
    assert_one(
        &combined(|asm, d, p, q| {
            asm.and_pred(d, p, q);
            asm.setp_u32(d, Cmp::Eq, 1, 1);
        }),
        Rule::Definition,
        &["%r2"],
    );
}
