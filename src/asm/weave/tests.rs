use proptest::prelude::*;

use super::*;
use crate::asm::module::Module;
use crate::asm::reg::{Reg, Region};
use crate::asm::test_machine::TestMachine;
use crate::asm::types::{B32, Cmp, Pred};
use crate::target::SmArch;

/// The order of stream and instruction that a pattern gives to independent streams of these lengths.
fn order(pattern: Pattern, lengths: &[usize]) -> Vec<(u32, u32)> {
    let mut asm = Asm::new();
    let streams: Vec<_> = (0u32..)
        .zip(lengths)
        .map(|(s, len)| {
            asm.capture(|asm| {
                for n in 0..*len as u32 {
                    let d = asm.reg();
                    asm.mov_b32(d, 100 * s + n);
                }
            })
        })
        .collect();
    asm.weave(pattern, streams);
    assert_eq!(asm.mistakes, Vec::<String>::new());
    let module = finish(asm);
    let text = module.to_string();
    let values = text.lines().filter_map(|line| line.trim().strip_prefix("mov.b32 "));
    let value = |line: &str| line.split(", ").nth(1)?.strip_suffix(';')?.parse::<u32>().ok();
    values.filter_map(value).map(|value| (value / 100, value % 100)).collect()
}

fn finish(mut asm: Asm) -> Module {
    asm.exit();
    asm.finish("woven", SmArch::baseline(80), 32, 1)
}

#[test]
fn even_spreads_every_stream_over_the_whole() {
    let got = order(Pattern::Even, &[2, 6]);
    assert_eq!(got, [(1, 0), (0, 0), (1, 1), (1, 2), (1, 3), (0, 1), (1, 4), (1, 5)]);
    assert_eq!(order(Pattern::Even, &[0, 3]), [(1, 0), (1, 1), (1, 2)]);
    assert_eq!(order(Pattern::Even, &[]), []);
}

#[test]
fn ratio_takes_turns_by_count() {
    let got = order(Pattern::Ratio(vec![1, 3]), &[3, 5]);
    assert_eq!(got, [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (1, 3), (1, 4), (0, 2)]);
    // No count, or 0, is one at a time.
    let got = order(Pattern::Ratio(vec![0, 2]), &[2, 2, 2]);
    assert_eq!(got, [(0, 0), (1, 0), (1, 1), (2, 0), (0, 1), (2, 1)]);
}

type Emit<'a> = &'a dyn Fn(&mut Asm, &Fixture);

/// The mistakes of weaving two one-instruction streams against their order, after a common prologue.
fn reversed(emit: [Emit; 2]) -> Vec<String> {
    let mut asm = Asm::new();
    let fixture = Fixture::new(&mut asm);
    let [first, second] = emit.map(|emit| asm.capture(|asm| emit(asm, &fixture)));
    // The second stream is the shorter one, so that `Even` puts it in the middle of the first.
    let filler = asm.capture(|asm| (0..3).for_each(|_| asm.mov_b32(fixture.idle, 1)));
    let mut lagging = filler;
    lagging.extend(first);
    asm.weave(Pattern::Even, [lagging, second]);
    asm.mistakes.clone()
}

struct Fixture {
    base: Reg<B32>,
    other: Reg<B32>,
    idle: Reg<B32>,
    r: [Reg<B32>; 4],
    p: Reg<Pred>,
    left: Region,
    right: Region,
}

impl Fixture {
    fn new(asm: &mut Asm) -> Self {
        let left = asm.smem.region("left", 64, 16);
        let right = asm.smem.region("right", 64, 16);
        Fixture {
            base: asm.reg(),
            other: asm.reg(),
            idle: asm.reg(),
            r: asm.regs(),
            p: asm.reg(),
            left,
            right,
        }
    }
}

#[test]
fn a_reversal_is_refused_with_both_instructions_named() {
    let found =
        reversed([&|asm, x| asm.mov_b32(x.r[0], 5), &|asm, x| asm.add_u32(x.r[1], x.r[0], 1)]);
    assert_eq!(found.len(), 1);
    for words in
        ["weave at", file!(), "`mov.b32 %r3, 5;`", "must come before `add.u32 %r4, %r3, 1;`"]
    {
        assert!(found[0].contains(words), "{words}: {found:?}");
    }
}

#[test]
fn registers_conflict_where_one_writes() {
    let conflict = |emit: [Emit; 2]| !reversed(emit).is_empty();
    assert!(conflict([&|a, x| a.add_u32(x.r[1], x.r[0], 1), &|a, x| a.mov_b32(x.r[0], 5)]));
    assert!(conflict([&|a, x| a.mov_b32(x.r[0], 4), &|a, x| a.mov_b32(x.r[0], 5)]));
    assert!(
        !conflict([&|a, x| a.add_u32(x.r[1], x.r[0], 1), &|a, x| a.add_u32(x.r[2], x.r[0], 1)])
    );
    let setp = |a: &mut Asm, x: &Fixture| a.setp_u32(x.p, Cmp::Eq, x.r[3], 1);
    let guarded = |a: &mut Asm, x: &Fixture| a.when(x.p, |a| a.mov_b32(x.r[0], 1));
    assert!(conflict([&setp, &guarded]));
    assert!(conflict([&guarded, &setp]));
}

#[test]
fn memory_conflicts_where_bytes_may_be_common() {
    let conflict = |emit: [Emit; 2]| !reversed(emit).is_empty();
    let store = |a: &mut Asm, x: &Fixture| a.st_shared_b32(x.base.at(0).within(x.left), 1);
    let load = |offset| {
        move |a: &mut Asm, x: &Fixture| a.ld_shared_b32(x.r[1], x.base.at(offset).within(x.left))
    };
    let elsewhere =
        |a: &mut Asm, x: &Fixture| a.ld_shared_b32(x.r[2], x.other.at(0).within(x.right));
    let unknown = |a: &mut Asm, x: &Fixture| a.ld_shared_b32(x.r[1], x.other);
    assert!(conflict([&store, &load(0)]));
    assert!(!conflict([&store, &load(4)]), "the same base, other bytes");
    assert!(!conflict([&store, &elsewhere]), "disjoint regions");
    assert!(conflict([&store, &unknown]));
    assert!(!conflict([&load(0), &elsewhere]), "two loads");
    assert!(conflict([&store, &|a, x| a.ld_shared_v4_b32(x.r, x.base.at(0))]));
}

#[test]
fn nothing_crosses_synchronisation_or_control() {
    let conflict = |emit: [Emit; 2]| !reversed(emit).is_empty();
    let load = |a: &mut Asm, x: &Fixture| a.ld_shared_b32(x.r[1], x.base);
    let add = |a: &mut Asm, x: &Fixture| a.add_u32(x.r[1], x.r[0], 1);
    let barrier = |a: &mut Asm, _: &Fixture| a.bar_sync(0);
    let leave = |a: &mut Asm, x: &Fixture| a.when(x.p, |a| a.exit());
    assert!(conflict([&load, &barrier]) && conflict([&barrier, &load]));
    assert!(!conflict([&add, &barrier]), "registers do not care for barriers");
    assert!(conflict([&add, &leave]) && conflict([&leave, &add]));
    assert!(conflict([&barrier, &barrier]));
}

#[test]
fn held_back_streams_wait_for_what_they_need() {
    let mut asm = Asm::new();
    let x = Fixture::new(&mut asm);
    let first = asm.capture(|asm| {
        (0..4).for_each(|_| asm.mov_b32(x.idle, 1));
        asm.mov_b32(x.r[0], 5);
    });
    let second = asm.capture(|asm| {
        asm.add_u32(x.r[1], x.r[0], 1);
        asm.add_u32(x.r[1], x.r[1], 2);
    });
    asm.weave(Pattern::EvenHeldBack, [first, second]);
    assert_eq!(asm.mistakes, Vec::<String>::new());
    let machine = TestMachine::run(&finish(asm));
    assert_eq!(machine.regs[&(0, x.r[1].any())], 8);
}

/// An instruction of a random stream.
#[derive(Clone, Copy, Debug)]
enum Op {
    Mov(usize, u32),
    Add(usize, usize, usize),
    Guarded(usize, usize, bool),
    Test(usize, usize),
    Load(usize, usize, u32),
    LoadWide(usize, u32),
    Store(usize, usize, u32),
    Advance(usize),
    Barrier,
}

fn op() -> impl Strategy<Value = Op> {
    let r = 0usize..4;
    prop_oneof![
        2 => (r.clone(), any::<u32>()).prop_map(|(d, v)| Op::Mov(d, v)),
        4 => (r.clone(), r.clone(), r.clone()).prop_map(|(d, a, b)| Op::Add(d, a, b)),
        2 => (r.clone(), r.clone(), any::<bool>()).prop_map(|(d, a, n)| Op::Guarded(d, a, n)),
        1 => (r.clone(), r.clone()).prop_map(|(a, b)| Op::Test(a, b)),
        4 => (0usize..3, r.clone(), 0u32..8).prop_map(|(at, d, n)| Op::Load(at, d, 4 * n)),
        1 => (0usize..3, 0u32..2).prop_map(|(at, n)| Op::LoadWide(at, 16 * n)),
        4 => (0usize..3, r, 0u32..8).prop_map(|(at, a, n)| Op::Store(at, a, 4 * n)),
        1 => (0usize..1).prop_map(Op::Advance),
        1 => Just(Op::Barrier),
    ]
}

/// Base 0 wanders over both regions and states none; 1 and 2 stay in theirs and say so.
struct Bases([Reg<B32>; 3]);

fn emit(asm: &mut Asm, ops: &[Op], x: &Fixture, bases: &Bases) {
    let place = |at: usize, offset: u32| match at {
        0 => bases.0[0].at(offset),
        1 => bases.0[1].at(offset).within(x.left),
        _ => bases.0[2].at(offset).within(x.right),
    };
    for op in ops {
        match *op {
            Op::Mov(d, v) => asm.mov_b32(x.r[d], v),
            Op::Add(d, a, b) => asm.add_u32(x.r[d], x.r[a], x.r[b]),
            Op::Guarded(d, a, true) => asm.unless(x.p, |asm| asm.add_u32(x.r[d], x.r[a], 1)),
            Op::Guarded(d, a, false) => asm.when(x.p, |asm| asm.mov_b32(x.r[d], x.r[a])),
            Op::Test(a, b) => asm.setp_u32(x.p, Cmp::Lt, x.r[a], x.r[b]),
            Op::Load(at, d, offset) => asm.ld_shared_b32(x.r[d], place(at, offset)),
            Op::LoadWide(at, offset) => asm.ld_shared_v4_b32(x.r, place(at, offset)),
            Op::Store(at, a, offset) => asm.st_shared_b32(place(at, offset), x.r[a]),
            Op::Advance(base) => asm.add_u32(bases.0[base], bases.0[base], 16),
            Op::Barrier => asm.bar_sync(0),
        }
    }
}

/// The program with the streams woven, or one after the other, and what the weaver had to say.
fn program(streams: &[Vec<Op>], pattern: Option<&Pattern>) -> (Module, Vec<String>) {
    let mut asm = Asm::new();
    let x = Fixture::new(&mut asm);
    let bases = Bases(asm.regs());
    for (base, start) in bases.0.into_iter().zip([x.left.start, x.left.start, x.right.start]) {
        asm.mov_u32_smem(base);
        asm.add_u32(base, base, start);
    }
    for (n, r) in x.r.into_iter().enumerate() {
        asm.mov_b32(r, 1000 + 37 * n as u32);
    }
    asm.setp_u32(x.p, Cmp::Lt, x.r[0], x.r[1]);
    let captured: Vec<_> =
        streams.iter().map(|ops| asm.capture(|asm| emit(asm, ops, &x, &bases))).collect();
    match pattern {
        Some(pattern) => asm.weave(pattern.clone(), captured),
        None => captured.into_iter().for_each(|stream| asm.append(stream)),
    }
    let mistakes = asm.mistakes.clone();
    (finish(asm), mistakes)
}

/// Whether two instructions must keep their order, judged by what they do and not by the weaver's rules.
fn clash(a: &Node, b: &Node) -> bool {
    let touched = |node: &Node, wanted: fn(Role) -> bool| {
        let mut regs = Vec::new();
        node.inst.registers(&mut |reg, role| {
            if wanted(role) {
                regs.push(reg);
            }
        });
        regs
    };
    let reads = |node: &Node| {
        let guard = node.guard.map(|guard| guard.pred.any());
        touched(node, |role| role != Role::Write).into_iter().chain(guard).collect::<Vec<_>>()
    };
    let writes = |node: &Node| touched(node, |role| role != Role::Read);
    let meet = |a: &[AnyReg], b: &[AnyReg]| a.iter().any(|reg| b.contains(reg));
    let span = |node: &Node| {
        let mut span = None;
        node.inst.places(&mut |place| span = Some(place));
        span.map(|place| (place, i64::from(node.inst.row().access_bytes)))
    };
    let text = |node: &Node| node.inst.to_string();
    let memory = match (span(a), span(b)) {
        (Some((p, p_bytes)), Some((q, q_bytes))) => {
            let both_load = text(a).starts_with("ld") && text(b).starts_with("ld");
            let regions = p.region.zip(q.region).is_some_and(|(p, q)| p != q);
            let offsets = p.base == q.base
                && (p.offset + p_bytes <= q.offset || q.offset + q_bytes <= p.offset);
            !both_load && !regions && !offsets
        }
        _ => {
            let barrier = |node: &Node| text(node).starts_with("bar");
            (barrier(a) && (barrier(b) || span(b).is_some())) || (barrier(b) && span(a).is_some())
        }
    };
    meet(&reads(a), &writes(b))
        || meet(&writes(a), &reads(b))
        || meet(&writes(a), &writes(b))
        || memory
}

type Outcome = (Vec<(AnyReg, u64)>, Vec<(u64, u8)>);

/// What a program computes: registers and shared memory.
fn outcome(module: &Module) -> Outcome {
    let machine = TestMachine::run(module);
    let mut regs: Vec<_> = machine.regs.into_iter().map(|((_, reg), bits)| (reg, bits)).collect();
    let mut bytes: Vec<_> =
        machine.memory.into_iter().map(|((_, addr), byte)| (addr, byte)).collect();
    regs.sort_unstable();
    bytes.sort_unstable();
    (regs, bytes)
}

proptest! {
    #[test]
    fn accepted_weaves_mean_the_same(
        streams in prop::collection::vec(prop::collection::vec(op(), 0..12), 1..4),
        counts in prop::collection::vec(0usize..4, 0..4),
    ) {
        let (plain, _) = program(&streams, None);
        let wanted = outcome(&plain);
        for pattern in [Pattern::Even, Pattern::Ratio(counts), Pattern::EvenHeldBack] {
            let (woven, mistakes) = program(&streams, Some(&pattern));
            prop_assert_eq!(woven.nodes().count(), plain.nodes().count());
            prop_assert!(pattern != Pattern::EvenHeldBack || mistakes.is_empty(), "{:?}", mistakes);
            if mistakes.is_empty() {
                prop_assert_eq!(outcome(&woven), wanted.clone(), "{:?}\n{}", pattern, woven);
            }
        }
    }

    /// Refused exactly where some pair that clashes is turned round.
    #[test]
    fn broken_weaves_are_refused_and_no_others(
        streams in prop::collection::vec(prop::collection::vec(op(), 0..6), 2..4),
        counts in prop::collection::vec(0usize..4, 0..4),
    ) {
        let number = |streams: &[Vec<Op>]| streams.iter().map(Vec::len).sum::<usize>();
        let prologue = program(&[], None).0.nodes().count() - 1;
        let plain: Vec<Node> = program(&streams, None).0.nodes().copied().collect();
        for pattern in [Pattern::Even, Pattern::Ratio(counts)] {
            let lengths: Vec<Vec<Node>> = streams.iter().map(|ops| vec![plain[0]; ops.len()]).collect();
            let order = match &pattern {
                Pattern::Ratio(counts) => ratio(&lengths, counts),
                _ => even(&lengths, |_, _| true),
            };
            let start = |s: usize| prologue + number(&streams[..s]);
            let positions: Vec<usize> = order.iter().map(|(s, n)| start(*s) + n).collect();
            let broken = (0..positions.len()).any(|i| (i + 1..positions.len()).any(|j| {
                positions[j] < positions[i] && clash(&plain[positions[j]], &plain[positions[i]])
            }));
            let (_, mistakes) = program(&streams, Some(&pattern));
            prop_assert_eq!(!mistakes.is_empty(), broken, "{:?}", mistakes);
        }
    }
}

/// Weaving 600 instructions takes far less than the 10 ms that a whole kernel has.
#[test]
fn long_streams_weave_quickly() {
    let mut asm = Asm::new();
    let x = Fixture::new(&mut asm);
    let regs = asm.regs::<B32, 200>();
    let streams: Vec<_> = [x.left, x.right, x.left]
        .into_iter()
        .map(|region| {
            asm.capture(|asm| {
                for (n, reg) in regs.into_iter().enumerate() {
                    if n % 3 == 0 {
                        asm.ld_shared_b32(reg, x.base.at(0).within(region));
                    } else {
                        asm.lop3_b32(reg, reg, x.r[0], x.r[1], 0xca);
                    }
                }
            })
        })
        .collect();
    let once = |_| {
        let streams = streams.clone();
        let start = std::time::Instant::now();
        asm.weave(Pattern::EvenHeldBack, streams);
        start.elapsed()
    };
    let best = (0..7).map(once).min().expect("seven runs");
    assert!(best < std::time::Duration::from_millis(2), "{best:?}");
}
