//! Control flow of an entry and the registers that are defined at each place.
//!
//! The program is cut into runs: straight-line stretches that begin at a label or after a branch. A fact is
//! one bit of a run's entry state, and the state of a run that several others lead to has the facts that all
//! of them bring. There are three kinds of facts:
//! - register `r` is defined;
//! - if guard `g` holds, `r` is defined (made by a write under `g`, or because a branch has shown that `g`
//!   does not hold; lost when the predicate is written);
//! - guard `g` implies guard `h` (made by `and`, `or` and `not` of predicates; lost when either is written).
//!
//! All transfer functions are monotone and states only lose facts, so the sweeps end.

use std::collections::HashMap;

use crate::asm::builder::{Item, Node};
use crate::asm::isa::{Effect, Inst, alu::Alu, wgmma::Wgmma};
use crate::asm::module::Entry;
use crate::asm::reg::{AnyReg, In, Role};
use crate::asm::types::Class;

/// A straight-line stretch of instructions.
struct Run {
    first: usize,
    end: usize,
    /// The runs that it leads to, with what the way there tells: the guard that holds.
    next: Vec<(usize, Option<Guard>)>,
    /// It may run past the last instruction.
    falls_off: bool,
}

/// A predicate register's number and the value it must have.
type Guard = (u32, bool);

/// The runs of an entry.
pub(super) struct Flow {
    runs: Vec<Run>,
    reachable: Vec<bool>,
}

impl Flow {
    /// Cuts the program into runs. `targets` gives the instruction that each bound label stands before.
    pub(super) fn new(nodes: &[&Node], targets: &HashMap<u32, usize>) -> Self {
        let mut starts = vec![false; nodes.len() + 1];
        starts[0] = true;
        for target in targets.values() {
            starts[*target] = true;
        }
        for (n, node) in nodes.iter().enumerate() {
            if node.inst.row().effect == Effect::Control {
                starts[n + 1] = true;
            }
        }
        let firsts: Vec<usize> = (0..nodes.len()).filter(|n| starts[*n]).collect();
        let run_at = |node: usize| firsts.binary_search(&node).ok();
        let run = |(i, first): (usize, &usize)| {
            let end = firsts.get(i + 1).copied().unwrap_or(nodes.len());
            let mut run = Run { first: *first, end, next: Vec::new(), falls_off: false };
            let last = nodes[end - 1];
            let control = last.inst.row().effect == Effect::Control;
            let guard = last.guard.map(|guard| (guard.pred.any().id, !guard.negated));
            if !control || guard.is_some() {
                run.lead_to(run_at(end), guard.filter(|_| control).map(|(p, value)| (p, !value)));
            }
            let target = if control { last.inst.label() } else { None };
            if let Some(target) = target.and_then(|label| targets.get(&label.id)) {
                run.lead_to(run_at(*target), guard);
            }
            run
        };
        let runs: Vec<Run> = firsts.iter().enumerate().map(run).collect();
        let mut reachable = vec![false; runs.len()];
        let mut todo = if runs.is_empty() { vec![] } else { vec![0] };
        while let Some(run) = todo.pop() {
            if !std::mem::replace(&mut reachable[run], true) {
                todo.extend(runs[run].next.iter().map(|(next, _)| *next));
            }
        }
        Self { runs, reachable }
    }

    /// The first instruction of each stretch that control never reaches, and how many there are in it.
    pub(super) fn unreachable(&self) -> Vec<(usize, usize)> {
        let mut stretches: Vec<(usize, usize)> = Vec::new();
        for (run, _) in self.runs.iter().zip(&self.reachable).filter(|(_, reached)| !**reached) {
            match stretches.last_mut() {
                Some((first, count)) if *first + *count == run.first => {
                    *count += run.end - run.first
                }
                _ => stretches.push((run.first, run.end - run.first)),
            }
        }
        stretches
    }

    /// The instructions after which control runs past the end.
    pub(super) fn falls_off(&self) -> impl Iterator<Item = usize> {
        let reached = self.runs.iter().zip(&self.reachable).filter(|(_, reached)| **reached);
        reached.filter(|(run, _)| run.falls_off).map(|(run, _)| run.end - 1)
    }

    /// Reads of registers that are not defined on every path: `(instruction, register)`, each register once,
    /// in program order.
    pub(super) fn undefined_reads(&self, entry: &Entry) -> Vec<(usize, AnyReg)> {
        let facts = Facts::new(entry);
        let mut states: Vec<Option<State>> = vec![None; self.runs.len()];
        if let Some(first) = states.first_mut() {
            *first = Some(State(vec![0; facts.num_words]));
        }
        let mut dirty = vec![true; self.runs.len()];
        while dirty.contains(&true) {
            for (r, run) in self.runs.iter().enumerate() {
                let Some(mut state) = states[r].clone().filter(|_| dirty[r]) else {
                    dirty[r] = false;
                    continue;
                };
                dirty[r] = false;
                for n in run.first..run.end {
                    facts.step(n, &mut state);
                }
                for (next, holds) in &run.next {
                    let mut arriving = state.clone();
                    if let Some(guard) = holds {
                        facts.learn(*guard, &mut arriving);
                    }
                    match &mut states[*next] {
                        Some(known) => dirty[*next] |= known.keep_common(&arriving),
                        unseen => {
                            *unseen = Some(arriving);
                            dirty[*next] = true;
                        }
                    }
                }
            }
        }
        let mut reported = vec![false; facts.num_regs];
        let mut found = Vec::new();
        for (run, state) in self.runs.iter().zip(states) {
            let Some(mut state) = state else { continue };
            for n in run.first..run.end {
                facts.each_undefined(n, &state, |reg| {
                    if !std::mem::replace(&mut reported[reg as usize], true) {
                        found.push((n, facts.name(reg)));
                    }
                });
                facts.step(n, &mut state);
            }
        }
        found
    }
}

impl Run {
    fn lead_to(&mut self, run: Option<usize>, holds: Option<Guard>) {
        match run {
            Some(run) => self.next.push((run, holds)),
            None => self.falls_off = true,
        }
    }
}

/// The facts that hold at a place, one bit each.
#[derive(Clone)]
struct State(Vec<u64>);

impl State {
    fn has(&self, fact: u32) -> bool {
        self.0[fact as usize / 64] >> (fact % 64) & 1 != 0
    }

    fn set(&mut self, fact: u32, holds: bool) {
        let word = &mut self.0[fact as usize / 64];
        *word = *word & !(1 << (fact % 64)) | u64::from(holds) << (fact % 64);
    }

    /// Drops what `other` does not have; whether anything was dropped.
    fn keep_common(&mut self, other: &State) -> bool {
        let mut dropped = false;
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            dropped |= *word & !other != 0;
            *word &= other;
        }
        dropped
    }
}

/// One instruction, as far as definedness goes. Registers are numbered over all classes.
struct Step {
    /// Its part of [`Facts::touched`]: first the registers it reads, then those it writes.
    reads: std::ops::Range<usize>,
    writes: std::ops::Range<usize>,
    guard: Option<Guard>,
    /// The implications that hold after it.
    implies: Vec<u32>,
}

/// A guard that implies others.
type Logic = Vec<(Guard, Guard)>;

/// The numbering of facts and the effect of every instruction on them.
struct Facts {
    base: [u32; Class::ALL.len()],
    num_regs: usize,
    num_words: usize,
    steps: Vec<Step>,
    touched: Vec<u32>,
    /// For each register the facts "defined if the guard holds".
    of_reg: Vec<Vec<(Guard, u32)>>,
    /// For each predicate the same, with the register.
    of_pred: Vec<Vec<(bool, u32, u32)>>,
    /// For each predicate what its value implies: `(value, implied guard, fact)`.
    implied: Vec<Vec<(bool, Guard, u32)>>,
    /// For each predicate the implications that it stands in, on either side.
    mentions: Vec<Vec<u32>>,
}

impl Facts {
    fn new(entry: &Entry) -> Self {
        let mut base = [0; Class::ALL.len()];
        let mut num_regs = 0;
        for class in Class::ALL {
            base[class as usize] = num_regs;
            num_regs += entry.num_regs[class as usize];
        }
        let num_preds = entry.num_regs[Class::Pred as usize] as usize;
        let mut facts = Facts {
            base,
            num_regs: num_regs as usize,
            num_words: 0,
            steps: Vec::with_capacity(entry.items.len()),
            touched: Vec::with_capacity(6 * entry.items.len()),
            of_reg: vec![Vec::new(); num_regs as usize],
            of_pred: vec![Vec::new(); num_preds],
            implied: vec![Vec::new(); num_preds],
            mentions: vec![Vec::new(); num_preds],
        };
        let mut num_facts = num_regs;
        for item in &entry.items {
            if let Item::Inst(node) = item {
                facts.add_step(node, entry, &mut num_facts);
            }
        }
        facts.num_words = num_facts.div_ceil(64) as usize;
        facts
    }

    fn add_step(&mut self, node: &Node, entry: &Entry, num_facts: &mut u32) {
        let mut fresh = || {
            *num_facts += 1;
            *num_facts - 1
        };
        let declared = |reg: AnyReg| reg.id < entry.num_regs[reg.class as usize];
        let guard = node.guard.map(|guard| (guard.pred.any().id, !guard.negated));
        let guard = guard.filter(|(pred, _)| *pred < entry.num_regs[Class::Pred as usize]);
        let start = self.touched.len();
        let mut touch = |wanted: fn(Role) -> bool| {
            let start = self.touched.len();
            node.inst.registers(&mut |reg, role| {
                if wanted(role) && declared(reg) {
                    self.touched.push(self.base[reg.class as usize] + reg.id);
                }
            });
            start..self.touched.len()
        };
        // A product whose scale is not known to be 1 may ignore its accumulators; the emulator sees whether.
        let may_ignore = match node.inst {
            Inst::Wgmma(Wgmma::WgmmaM64K16F32F16(product)) => product.scale_d != In::Imm(1),
            _ => false,
        };
        let reads = match may_ignore {
            true => touch(|role| role == Role::Read),
            false => touch(|role| role != Role::Write),
        };
        let writes = touch(|role| role != Role::Read);
        if let Some(guard) = guard {
            for reg in &self.touched[start..] {
                let known = &mut self.of_reg[*reg as usize];
                if known.iter().all(|(other, _)| *other != guard) {
                    let fact = fresh();
                    known.push((guard, fact));
                    self.of_pred[guard.0 as usize].push((guard.1, *reg, fact));
                }
            }
        }
        let mut implies = Vec::new();
        let logic = logic(&node.inst).filter(|_| guard.is_none());
        for (g, h) in logic.into_iter().flatten() {
            // A predicate that is combined into itself implies nothing about its new value.
            if g.0 == h.0 || g.0.max(h.0) as usize >= self.implied.len() {
                continue;
            }
            let of_g = &mut self.implied[g.0 as usize];
            let known = of_g.iter().find(|(value, other, _)| (*value, *other) == (g.1, h));
            let fact = match known {
                Some((.., fact)) => *fact,
                None => {
                    let fact = fresh();
                    of_g.push((g.1, h, fact));
                    self.mentions[g.0 as usize].push(fact);
                    self.mentions[h.0 as usize].push(fact);
                    fact
                }
            };
            implies.push(fact);
        }
        self.steps.push(Step { reads, writes, guard, implies });
    }

    /// Whether `reg` is defined where `guard` holds.
    fn defined(&self, state: &State, reg: u32, guard: Option<Guard>) -> bool {
        if state.has(reg) {
            return true;
        }
        let known = &self.of_reg[reg as usize];
        match guard {
            Some(guard) if !known.is_empty() => self
                .implied_by(state, guard)
                .iter()
                .any(|g| known.iter().any(|(other, fact)| other == g && state.has(*fact))),
            _ => false,
        }
    }

    /// The guards that hold where `guard` does.
    fn implied_by(&self, state: &State, guard: Guard) -> Vec<Guard> {
        let mut holding = vec![guard];
        let mut next = 0;
        while next < holding.len() {
            let (pred, holds) = holding[next];
            for (value, h, fact) in self.implied.get(pred as usize).into_iter().flatten() {
                if *value == holds && state.has(*fact) && !holding.contains(h) {
                    holding.push(*h);
                }
            }
            next += 1;
        }
        holding
    }

    fn each_undefined(&self, n: usize, state: &State, mut f: impl FnMut(u32)) {
        let step = &self.steps[n];
        if let Some((pred, _)) = step.guard {
            let pred = self.base[Class::Pred as usize] + pred;
            if !self.defined(state, pred, None) {
                f(pred);
            }
        }
        for reg in &self.touched[step.reads.clone()] {
            if !self.defined(state, *reg, step.guard) {
                f(*reg);
            }
        }
    }

    fn define(&self, state: &mut State, reg: u32) {
        state.set(reg, true);
        for (_, fact) in &self.of_reg[reg as usize] {
            state.set(*fact, true);
        }
    }

    fn step(&self, n: usize, state: &mut State) {
        let step = &self.steps[n];
        for reg in &self.touched[step.writes.clone()] {
            let known = &self.of_reg[*reg as usize];
            let holds = |state: &State, guard| {
                known.iter().any(|(other, fact)| *other == guard && state.has(*fact))
            };
            match step.guard {
                Some((pred, value)) if !holds(state, (pred, !value)) => {
                    let fact = known.iter().find(|(other, _)| *other == (pred, value));
                    if let Some((_, fact)) = fact {
                        state.set(*fact, true);
                    }
                }
                _ => self.define(state, *reg),
            }
            if let Some(pred) = self.as_pred(*reg) {
                self.forget(pred, state);
            }
        }
        for fact in &step.implies {
            state.set(*fact, true);
        }
    }

    /// The predicate's old value is gone.
    fn forget(&self, pred: u32, state: &mut State) {
        for (_, reg, fact) in &self.of_pred[pred as usize] {
            let defined = state.has(*reg);
            state.set(*fact, defined);
        }
        for fact in &self.mentions[pred as usize] {
            state.set(*fact, false);
        }
    }

    /// On this way the guard holds.
    fn learn(&self, guard: Guard, state: &mut State) {
        for (pred, value) in self.implied_by(state, guard) {
            let Some(known) = self.of_pred.get(pred as usize) else { continue };
            for (if_value, reg, fact) in known {
                if *if_value != value {
                    state.set(*fact, true);
                } else if state.has(*fact) {
                    self.define(state, *reg);
                }
            }
        }
    }

    fn as_pred(&self, reg: u32) -> Option<u32> {
        let base = self.base[Class::Pred as usize];
        reg.checked_sub(base).filter(|pred| (*pred as usize) < self.of_pred.len())
    }

    fn name(&self, reg: u32) -> AnyReg {
        let class = Class::ALL.into_iter().rev().find(|class| self.base[*class as usize] <= reg);
        let class = class.expect("the first class begins at register 0");
        AnyReg { class, id: reg - self.base[class as usize] }
    }
}

/// What the truth of a combined predicate tells about its parts.
fn logic(inst: &Inst) -> Option<Logic> {
    let id = |reg: crate::asm::reg::Reg<_>| reg.any().id;
    match inst {
        Inst::Alu(Alu::AndPred(i)) => {
            let d = id(i.d.0);
            Some(vec![((d, true), (id(i.a.0), true)), ((d, true), (id(i.b.0), true))])
        }
        Inst::Alu(Alu::OrPred(i)) => {
            let d = id(i.d.0);
            Some(vec![((d, false), (id(i.a.0), false)), ((d, false), (id(i.b.0), false))])
        }
        Inst::Alu(Alu::NotPred(i)) => {
            let (d, a) = (id(i.d.0), id(i.a.0));
            Some(vec![((d, true), (a, false)), ((d, false), (a, true))])
        }
        _ => None,
    }
}
