//! Weaving: several instruction streams interleaved by a stated pattern.
//!
//! The order in which the streams are given is their meaning: all of the first, then all of the second and
//! so on. A weave may reorder instructions of different streams as long as no dependence is turned round:
//! two instructions that touch a common register, one of them writing it, or that may touch a common byte
//! of memory, one of them writing it, or of which one synchronises. Shared accesses are independent if
//! their stated regions are disjoint, or if they use the same base register and their byte ranges are.
//! A pattern that would break a dependence is refused with both instructions named.

use super::builder::{Asm, Node, Stream};
use super::isa::Effect;
use super::reg::{AnyReg, Place, Role};

/// How streams are interleaved.
#[derive(Clone, Debug, PartialEq)]
pub enum Pattern {
    /// All streams start together and end together: each is spread evenly over the whole.
    Even,
    /// Repeats: so many instructions of each stream in turn, until all are used up.
    Ratio(Vec<usize>),
    /// Each instruction as early as its dependences allow, taking the streams' turns as in `Even`: an
    /// instruction that must wait for one of an earlier stream is held back until it has been emitted.
    EvenHeldBack,
}

/// What one instruction touches.
struct Footprint {
    reads: Vec<AnyReg>,
    writes: Vec<AnyReg>,
    place: Option<Place>,
    effect: Effect,
}

impl Footprint {
    fn of(node: &Node) -> Self {
        let mut footprint = Footprint {
            reads: Vec::new(),
            writes: Vec::new(),
            place: None,
            effect: node.inst.row().effect,
        };
        node.inst.registers(&mut |reg, role| {
            if role != Role::Write {
                footprint.reads.push(reg);
            }
            if role != Role::Read {
                footprint.writes.push(reg);
            }
        });
        if let Some(guard) = node.guard {
            footprint.reads.push(guard.pred.any());
            // A guarded write keeps the old value where the guard is false.
            let kept: Vec<_> = footprint.writes.clone();
            footprint.reads.extend(kept);
        }
        node.inst.places(&mut |place| footprint.place = footprint.place.or(Some(place)));
        footprint
    }

    /// Whether `self` and `other` must keep their order.
    fn conflicts(&self, other: &Footprint) -> bool {
        let shares = |a: &[AnyReg], b: &[AnyReg]| a.iter().any(|reg| b.contains(reg));
        shares(&self.writes, &other.reads)
            || shares(&self.reads, &other.writes)
            || shares(&self.writes, &other.writes)
            || self.memory_conflicts(other)
    }

    fn memory_conflicts(&self, other: &Footprint) -> bool {
        use Effect::*;
        let both_disjoint = || {
            let (Some(a), Some(b)) = (self.place, other.place) else { return false };
            let by_region = matches!((a.region, b.region), (Some(a), Some(b)) if a.is_disjoint(b));
            let by_offset = a.base == b.base && (a.offset - b.offset).abs() >= 16;
            by_region || by_offset
        };
        match (self.effect, other.effect) {
            (Pure, _) | (_, Pure) => false,
            (Control, _) | (_, Control) => true,
            (Sync, _) | (_, Sync) => true,
            (LoadShared, LoadShared) | (LoadGlobal, LoadGlobal) => false,
            // Copies of one group complete together, in no order; their sources are read-only.
            (LoadShared | StoreShared | CopyAsync, LoadShared | StoreShared | CopyAsync) => {
                !both_disjoint()
            }
            (LoadGlobal, StoreGlobal) | (StoreGlobal, LoadGlobal | StoreGlobal) => !both_disjoint(),
            (StoreGlobal, CopyAsync) | (CopyAsync, StoreGlobal) => true,
            (LoadShared | StoreShared, LoadGlobal | StoreGlobal)
            | (LoadGlobal | StoreGlobal, LoadShared | StoreShared)
            | (CopyAsync, LoadGlobal)
            | (LoadGlobal, CopyAsync) => false,
        }
    }
}

impl Asm {
    /// Appends the streams, interleaved by `pattern`. A pattern that turns a dependence round is reported
    /// by the verifier as a mistake that names both instructions.
    #[track_caller]
    pub fn weave(&mut self, pattern: Pattern, streams: impl IntoIterator<Item = Stream>) {
        let streams: Vec<Vec<Node>> = streams.into_iter().map(|stream| stream.nodes).collect();
        let place = std::panic::Location::caller();
        let prints: Vec<Vec<Footprint>> =
            streams.iter().map(|nodes| nodes.iter().map(Footprint::of).collect()).collect();
        let order = match &pattern {
            Pattern::Even => even(&streams, |_, _| true),
            Pattern::Ratio(counts) => ratio(&streams, counts),
            Pattern::EvenHeldBack => {
                // The instruction may go once everything it depends on in earlier streams is out.
                let waits = dependences(&prints);
                even(&streams, |done, (s, n)| waits[s][n].iter().all(|(s, n)| done[*s] > *n))
            }
        };
        if let Some(((s, n), (t, m))) = first_reversal(&order, &prints) {
            self.mistakes.push(format!(
                "weave at {}:{} turns a dependence round: `{}` must come before `{}`",
                place.file(),
                place.line(),
                streams[s][n].inst,
                streams[t][m].inst
            ));
        }
        let nodes = order.into_iter().map(|(s, n)| streams[s][n]).collect();
        self.append(Stream { nodes });
    }
}

/// For each instruction the last one of each earlier stream that it must follow.
fn dependences(prints: &[Vec<Footprint>]) -> Vec<Vec<Vec<(usize, usize)>>> {
    let last_conflict = |s: usize, print: &Footprint| {
        prints[s].iter().rposition(|earlier| earlier.conflicts(print)).map(|n| (s, n))
    };
    let of_stream = |t: usize| {
        prints[t]
            .iter()
            .map(|print| (0..t).filter_map(|s| last_conflict(s, print)).collect())
            .collect()
    };
    (0..prints.len()).map(of_stream).collect()
}

/// Takes the stream that lags most behind its even share among those whose next instruction `may_go`.
fn even(
    streams: &[Vec<Node>],
    may_go: impl Fn(&[usize], (usize, usize)) -> bool,
) -> Vec<(usize, usize)> {
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

fn ratio(streams: &[Vec<Node>], counts: &[usize]) -> Vec<(usize, usize)> {
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

/// The first pair that must keep its order and does not: `(what must come first, what came first)`.
fn first_reversal(
    order: &[(usize, usize)],
    prints: &[Vec<Footprint>],
) -> Option<((usize, usize), (usize, usize))> {
    for (position, &(t, m)) in order.iter().enumerate() {
        for &(s, n) in &order[position + 1..] {
            if s < t && prints[s][n].conflicts(&prints[t][m]) {
                return Some(((s, n), (t, m)));
            }
        }
    }
    None
}
