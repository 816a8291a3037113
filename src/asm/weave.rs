//! Weaving: several instruction streams interleaved by a stated pattern.
//!
//! The order in which the streams are given is their meaning: all of the first, then all of the second and
//! so on. A weave may reorder instructions of different streams as long as no dependence is turned round.
//! Two instructions depend on each other if
//! - they touch a common register, one of them writing it (a guarded write may keep the old value, but it
//!   is a write);
//! - they may touch a common byte of memory, one of them writing it. Shared accesses are independent if
//!   their stated regions are disjoint; any two accesses are if they use the same base register and their
//!   bytes are apart (a base that changes between them depends on both, so it keeps them in order);
//! - one of them synchronises and the other touches memory, or one of them changes the flow of control.
//!
//! A pattern that would break a dependence is refused with both instructions named.

use super::builder::{Asm, Node, Stream};
use super::isa::Effect;
use super::reg::{AnyReg, Place, Role};
use super::types::Class;

/// How streams are interleaved. Within a stream the order always stays.
#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    /// All streams start together and end together: each is spread evenly over the whole.
    Even,
    /// Rounds: so many instructions of each stream in turn, the first count for the first stream, until all
    /// are used up. A stream without a count, or with 0, goes one at a time; one that has ended is skipped.
    Ratio(Vec<usize>),
    /// The turns of `Even`, but an instruction that depends on some of an earlier stream waits for those.
    /// This never breaks a dependence.
    EvenHeldBack,
}

/// What one instruction touches.
struct Footprint {
    /// Numbers of registers over all classes.
    reads: Vec<u32>,
    writes: Vec<u32>,
    effect: Effect,
    place: Option<Place>,
    /// Width of the access in bytes.
    bytes: i64,
}

impl Footprint {
    fn of(node: &Node, number: &impl Fn(AnyReg) -> u32) -> Self {
        let row = node.inst.row();
        let mut footprint = Footprint {
            reads: Vec::new(),
            writes: Vec::new(),
            effect: row.effect,
            place: None,
            bytes: row.access_bytes.into(),
        };
        node.inst.registers(&mut |reg, role| {
            if role != Role::Write {
                footprint.reads.push(number(reg));
            }
            if role != Role::Read {
                footprint.writes.push(number(reg));
            }
        });
        footprint.reads.extend(node.guard.map(|guard| number(guard.pred.any())));
        // Of a copy the first place, the destination, counts: what it reads does not change under it.
        node.inst.places(&mut |place| footprint.place = footprint.place.or(Some(place)));
        footprint
    }

    fn touches_memory_or_control(&self) -> bool {
        self.effect != Effect::Pure
    }

    /// Whether `self` and `other` must keep their order, registers aside.
    fn conflicts(&self, other: &Footprint) -> bool {
        use Effect::*;
        match (self.effect, other.effect) {
            (Control, _) | (_, Control) => true,
            (Pure, _) | (_, Pure) => false,
            (Sync, _) | (_, Sync) => true,
            (LoadShared, LoadShared) | (LoadGlobal, LoadGlobal) => false,
            (LoadShared | StoreShared | CopyAsync, LoadShared | StoreShared | CopyAsync) => {
                !self.is_apart(other)
            }
            (LoadGlobal, StoreGlobal) | (StoreGlobal, LoadGlobal | StoreGlobal) => {
                !self.is_apart(other)
            }
            // The place of a copy is its shared destination; its global source is not compared.
            (StoreGlobal, CopyAsync) | (CopyAsync, StoreGlobal) => true,
            (LoadShared | StoreShared, LoadGlobal | StoreGlobal)
            | (LoadGlobal | StoreGlobal, LoadShared | StoreShared)
            | (CopyAsync, LoadGlobal)
            | (LoadGlobal, CopyAsync) => false,
        }
    }

    /// Whether the two accesses have no byte in common, as far as regions and offsets tell.
    fn is_apart(&self, other: &Footprint) -> bool {
        let (Some(a), Some(b)) = (self.place, other.place) else { return false };
        let by_region = matches!((a.region, b.region), (Some(a), Some(b)) if a.is_disjoint(b));
        let by_offset = a.base == b.base
            && (a.offset + self.bytes <= b.offset || b.offset + other.bytes <= a.offset);
        by_region || by_offset
    }
}

impl Asm {
    /// Appends the streams, interleaved by `pattern`. The program means the same as the streams appended one
    /// after the other; where the pattern would change that, the verifier reports a mistake that names both
    /// instructions and this call.
    ///
    /// ```
    /// use makaira::asm::{Asm, Pattern};
    /// let mut asm = Asm::new();
    /// let [a, b] = asm.regs::<makaira::asm::types::B32, 2>();
    /// let first = asm.capture(|asm| (0..2).for_each(|_| asm.mov_b32(a, 1)));
    /// let second = asm.capture(|asm| (0..4).for_each(|_| asm.mov_b32(b, 2)));
    /// asm.weave(Pattern::Ratio(vec![1, 2]), [first, second]);
    /// asm.exit();
    /// let text = asm.finish("woven", makaira::target::SmArch::baseline(80), 32, 1).to_string();
    /// let order: Vec<_> = text.lines().filter_map(|line| line.trim().strip_prefix("mov.b32 %r")).collect();
    /// assert_eq!(order, ["0, 1;", "1, 2;", "1, 2;", "0, 1;", "1, 2;", "1, 2;"]);
    /// ```
    #[track_caller]
    pub fn weave(&mut self, pattern: Pattern, streams: impl IntoIterator<Item = Stream>) {
        let streams: Vec<Vec<Node>> = streams.into_iter().map(|stream| stream.nodes).collect();
        let place = std::panic::Location::caller();
        let waits = self.dependences(&streams);
        let order = match &pattern {
            Pattern::Even => even(&streams, |_, _| true),
            Pattern::Ratio(counts) => ratio(&streams, counts),
            Pattern::EvenHeldBack => {
                even(&streams, |done, (s, n)| waits[s][n].iter().all(|(s, n)| done[*s] > *n))
            }
        };
        if let Some(((s, n), (t, m))) = first_reversal(&order, &waits) {
            self.mistakes.push(format!(
                "weave at {}:{} turns a dependence round: `{}` (stream {s}, instruction {n}) must come \
                 before `{}` (stream {t}, instruction {m})",
                place.file(),
                place.line(),
                streams[s][n],
                streams[t][m]
            ));
        }
        let nodes = order.into_iter().map(|(s, n)| streams[s][n]).collect();
        self.append(Stream { nodes });
    }

    /// For each instruction the last one of each earlier stream that it must follow. Since order within a
    /// stream stays, that one stands for all before it.
    fn dependences(&self, streams: &[Vec<Node>]) -> Vec<Vec<Vec<Position>>> {
        let mut base = [0; Class::ALL.len()];
        let mut num_regs = 0;
        for class in Class::ALL {
            base[class as usize] = num_regs;
            num_regs += self.num_regs[class as usize];
        }
        let number = |reg: AnyReg| base[reg.class as usize] + reg.id;
        let mut earlier: Vec<Summary> = Vec::with_capacity(streams.len());
        let mut waits = Vec::with_capacity(streams.len());
        for nodes in streams {
            let prints: Vec<_> = nodes.iter().map(|node| Footprint::of(node, &number)).collect();
            let of = |print: &Footprint| -> Vec<Position> {
                let last = |(s, of): (usize, &Summary)| of.last_conflict(print).map(|n| (s, n));
                earlier.iter().enumerate().filter_map(last).collect()
            };
            waits.push(prints.iter().map(of).collect());
            earlier.push(Summary::of(prints, num_regs as usize));
        }
        waits
    }
}

/// A stream, indexed by what its instructions touch.
struct Summary {
    /// For each register one more than the last instruction that reads it, and that writes it; 0 for none.
    last_read: Vec<u32>,
    last_write: Vec<u32>,
    /// The instructions that do more than compute.
    effects: Vec<(usize, Footprint)>,
    len: usize,
}

impl Summary {
    fn of(prints: Vec<Footprint>, num_regs: usize) -> Self {
        let mut summary = Summary {
            last_read: vec![0; num_regs],
            last_write: vec![0; num_regs],
            effects: Vec::new(),
            len: prints.len(),
        };
        for (n, print) in prints.into_iter().enumerate() {
            for (regs, last) in
                [(&print.reads, &mut summary.last_read), (&print.writes, &mut summary.last_write)]
            {
                for reg in regs {
                    // A register of another program has no number here; the verifier reports it.
                    if let Some(last) = last.get_mut(*reg as usize) {
                        *last = n as u32 + 1;
                    }
                }
            }
            if print.touches_memory_or_control() {
                summary.effects.push((n, print));
            }
        }
        summary
    }

    /// The last instruction that must stay before one with this footprint.
    fn last_conflict(&self, print: &Footprint) -> Option<usize> {
        let last = |of: &[u32], reg: &u32| of.get(*reg as usize).map_or(0, |last| *last as usize);
        let read = print.reads.iter().map(|reg| last(&self.last_write, reg));
        let written = print
            .writes
            .iter()
            .map(|reg| last(&self.last_write, reg).max(last(&self.last_read, reg)));
        let by_register = read.chain(written).max().unwrap_or(0);
        let by_effect = match print.effect {
            Effect::Control => self.len,
            _ => {
                let later = self.effects.iter().rev().take_while(|(n, _)| *n >= by_register);
                let found = later.into_iter().find(|(_, other)| other.conflicts(print));
                found.map_or(0, |(n, _)| n + 1)
            }
        };
        by_register.max(by_effect).checked_sub(1)
    }
}

/// Takes the stream that lags most behind its even share among those whose next instruction `may_go`.
fn even(streams: &[Vec<Node>], may_go: impl Fn(&[usize], Position) -> bool) -> Vec<Position> {
    let total: usize = streams.iter().map(Vec::len).sum();
    let mut done = vec![0; streams.len()];
    let mut order = Vec::with_capacity(total);
    for _ in 0..total {
        let progress = |s: &usize| (2 * done[*s] + 1) * total / streams[*s].len();
        let next = (0..streams.len())
            .filter(|s| done[*s] < streams[*s].len() && may_go(&done, (*s, done[*s])))
            .min_by_key(progress)
            .expect("the first unfinished stream waits for no later one");
        order.push((next, done[next]));
        done[next] += 1;
    }
    order
}

fn ratio(streams: &[Vec<Node>], counts: &[usize]) -> Vec<Position> {
    let total: usize = streams.iter().map(Vec::len).sum();
    let mut done = vec![0; streams.len()];
    let mut order = Vec::with_capacity(total);
    while order.len() < total {
        for (s, nodes) in streams.iter().enumerate() {
            // A stream without a count of its own goes one at a time.
            for _ in 0..counts.get(s).copied().unwrap_or(1).max(1) {
                if done[s] < nodes.len() {
                    order.push((s, done[s]));
                    done[s] += 1;
                }
            }
        }
    }
    order
}

/// An instruction, as its stream and its place in it.
type Position = (usize, usize);

/// The first pair that must keep its order and does not: `(what must come first, what came first)`.
fn first_reversal(
    order: &[Position],
    waits: &[Vec<Vec<Position>>],
) -> Option<(Position, Position)> {
    let mut done = vec![0; waits.len()];
    for &(t, m) in order {
        if let Some(&first) = waits[t][m].iter().find(|(s, n)| done[*s] <= *n) {
            return Some((first, (t, m)));
        }
        done[t] = m + 1;
    }
    None
}

#[cfg(test)]
mod tests;
