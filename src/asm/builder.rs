//! `Asm`, the program under construction: one call, one instruction.
//!
//! Nothing is scheduled behind the caller's back. What the builder adds is bookkeeping: fresh registers,
//! labels, predication, named sections, the Rust line that emitted each instruction, and capture of a
//! run of instructions as a [`Stream`] that the weaver can interleave with others.
//! The builder does not fail; mistakes are reported together by the verifier.

use std::panic::Location;

use super::isa::Inst;
use super::module::{Entry, Module, SmemPlan};
use super::reg::{Label, Param, Reg, RegRange};
use super::types::{Class, Cmp, Pred, RegClass};
use crate::target::SmArch;

/// The predicate that an instruction is executed under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The predicate register.
    pub pred: Reg<Pred>,
    /// Executed where the predicate is false.
    pub negated: bool,
}

/// An instruction with its circumstances.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// The instruction.
    pub inst: Inst,
    /// Its guard, if it is predicated.
    pub guard: Option<Guard>,
    /// The Rust line that emitted it.
    pub emitter: &'static Location<'static>,
    /// The section it stands in, an index into [`Entry::sections`].
    pub section: u32,
}

/// One item of a program.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// An instruction.
    Inst(Node),
    /// A place that branches name.
    Label(Label),
    /// From here on instructions belong to this section.
    Section(u32),
}

/// A run of straight-line instructions, captured to be woven with others.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    pub(super) nodes: Vec<Node>,
}

impl Stream {
    /// An empty stream.
    pub const fn new() -> Self {
        Self { nodes: Vec::new() }
    }

    /// Appends another stream.
    pub fn extend(&mut self, other: Stream) {
        self.nodes.extend(other.nodes);
    }

    /// Number of instructions.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}

/// A program under construction.
#[derive(Debug)]
pub struct Asm {
    items: Vec<Item>,
    params: Vec<Param>,
    pub(super) num_regs: [u32; Class::ALL.len()],
    num_labels: u32,
    sections: Vec<String>,
    path: Vec<u32>,
    guard: Option<Guard>,
    pub(super) mistakes: Vec<String>,
    /// The CTA's shared memory.
    pub smem: SmemPlan,
    /// CTAs of a cluster, 1 if the grid has none.
    pub cluster: u32,
}

impl Default for Asm {
    fn default() -> Self {
        Self::new()
    }
}

impl Asm {
    /// An empty program.
    pub fn new() -> Self {
        Self {
            items: Vec::new(),
            params: Vec::new(),
            num_regs: [0; Class::ALL.len()],
            num_labels: 0,
            sections: vec![String::new()],
            path: vec![0],
            guard: None,
            mistakes: Vec::new(),
            smem: SmemPlan::default(),
            cluster: 1,
        }
    }

    /// A fresh register.
    pub fn reg<C: RegClass>(&mut self) -> Reg<C> {
        let counter = &mut self.num_regs[C::CLASS as usize];
        *counter += 1;
        Reg::new(*counter - 1)
    }

    /// `N` fresh registers.
    pub fn regs<C: RegClass, const N: usize>(&mut self) -> [Reg<C>; N] {
        std::array::from_fn(|_| self.reg())
    }

    /// `len` fresh registers in a row.
    pub fn reg_range<C: RegClass>(&mut self, len: u32) -> RegRange<C> {
        let counter = &mut self.num_regs[C::CLASS as usize];
        *counter += len;
        RegRange::new(*counter - len, len)
    }

    /// Declares the next entry parameter of 4 bytes (`.u32`).
    pub fn param_u32(&mut self, name: &'static str) -> Param {
        self.param(name, 4)
    }

    /// Declares the next entry parameter of 8 bytes (`.u64`).
    pub fn param_u64(&mut self, name: &'static str) -> Param {
        self.param(name, 8)
    }

    /// Declares the next entry parameter as a tensor map (`.b8[128]`), of which the kernel takes the address.
    pub fn param_tensor_map(&mut self, name: &'static str) -> Param {
        self.param(name, 128)
    }

    fn param(&mut self, name: &'static str, bytes: u32) -> Param {
        let param = Param { index: self.params.len() as u32, name, bytes };
        self.params.push(param);
        param
    }

    /// A fresh label, not yet bound.
    pub fn label(&mut self, name: &'static str) -> Label {
        self.num_labels += 1;
        Label { id: self.num_labels - 1, name }
    }

    /// Binds a label to the next instruction.
    pub fn bind(&mut self, label: Label) {
        self.items.push(Item::Label(label));
    }

    /// Emits under a heading that the printed text shows and that reports name.
    pub fn section<R>(&mut self, name: &str, emit: impl FnOnce(&mut Self) -> R) -> R {
        let outer = *self.path.last().expect("the root section is never popped");
        let path = match outer {
            0 => name.to_owned(),
            _ => format!("{} / {name}", self.sections[outer as usize]),
        };
        let known = self.sections.iter().position(|section| *section == path);
        let index = known.unwrap_or(self.sections.len()) as u32;
        if known.is_none() {
            self.sections.push(path);
        }
        self.path.push(index);
        self.items.push(Item::Section(index));
        let result = emit(self);
        self.path.pop();
        self.items.push(Item::Section(outer));
        result
    }

    /// Emits instructions guarded by a predicate.
    pub fn when<R>(&mut self, pred: Reg<Pred>, emit: impl FnOnce(&mut Self) -> R) -> R {
        self.guarded(Guard { pred, negated: false }, emit)
    }

    /// Emits instructions guarded by the opposite of a predicate.
    pub fn unless<R>(&mut self, pred: Reg<Pred>, emit: impl FnOnce(&mut Self) -> R) -> R {
        self.guarded(Guard { pred, negated: true }, emit)
    }

    fn guarded<R>(&mut self, guard: Guard, emit: impl FnOnce(&mut Self) -> R) -> R {
        if self.guard.is_some() {
            self.mistakes.push("a guarded run inside a guarded run: combine the predicates".into());
        }
        let outer = self.guard.replace(guard);
        let result = emit(self);
        self.guard = outer;
        result
    }

    /// A predicate that compares two unsigned values.
    #[track_caller]
    pub fn test_u32(
        &mut self,
        cmp: Cmp,
        a: impl Into<super::reg::In<super::types::B32>>,
        b: impl Into<super::reg::In<super::types::B32>>,
    ) -> Reg<Pred> {
        let pred = self.reg();
        self.setp_u32(pred, cmp, a, b);
        pred
    }

    /// Captures what `emit` emits as a stream instead of appending it.
    pub fn capture(&mut self, emit: impl FnOnce(&mut Self)) -> Stream {
        let start = self.items.len();
        emit(self);
        let mut nodes = Vec::with_capacity(self.items.len() - start);
        for item in self.items.drain(start..) {
            match item {
                Item::Inst(node) => nodes.push(node),
                Item::Section(_) => {}
                Item::Label(label) => self.mistakes.push(format!(
                    "label {label} inside a stream: a stream is straight-line code, bind labels outside"
                )),
            }
        }
        Stream { nodes }
    }

    /// Appends a stream as it is.
    pub fn append(&mut self, stream: Stream) {
        self.items.extend(stream.nodes.into_iter().map(Item::Inst));
    }

    /// Number of instructions so far.
    pub fn num_instructions(&self) -> usize {
        self.items.iter().filter(|item| matches!(item, Item::Inst(_))).count()
    }

    /// Appends an instruction that was made as data; one row's own method is the usual way.
    #[track_caller]
    pub fn emit(&mut self, inst: impl Into<Inst>) {
        self.push(inst.into());
    }

    #[track_caller]
    pub(super) fn push(&mut self, inst: Inst) {
        let section = *self.path.last().expect("the root section is never popped");
        let emitter = Location::caller();
        self.items.push(Item::Inst(Node { inst, guard: self.guard, emitter, section }));
    }

    /// The finished module with this program as its entry.
    ///
    /// `threads` is the exact CTA size (`.reqntid`); `min_ctas` the number of CTAs that should fit on an SM
    /// (`.minnctapersm`), which bounds the registers that the assembler may use.
    pub fn finish(self, name: &str, target: SmArch, threads: u32, min_ctas: u32) -> Module {
        Module {
            target,
            entry: Entry {
                name: name.to_owned(),
                params: self.params,
                threads,
                min_ctas,
                cluster: self.cluster,
                smem: self.smem,
                num_regs: self.num_regs,
                sections: self.sections,
                items: self.items,
                mistakes: self.mistakes,
            },
        }
    }
}
