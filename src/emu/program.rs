//! A module made ready to run: labels resolved, register numbers turned into slots.

use crate::asm::Module;
use crate::asm::builder::{Item, Node};
use crate::asm::isa::{Effect, Inst};
use crate::asm::reg::{AnyReg, Label, Param};
use crate::asm::types::{Class, Scope};

/// One instruction as the emulator runs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub inst: Inst,
    /// Slot of the guard's predicate, and whether it is negated.
    pub guard: Option<(usize, bool)>,
    pub scope: Scope,
    /// May change the flow of control.
    pub control: bool,
    /// May make lanes or warps wait.
    pub sync: bool,
    /// Touches shared memory.
    pub shared: bool,
}

/// A program ready to run.
#[derive(Debug)]
pub(super) struct Program {
    pub name: String,
    pub steps: Vec<Step>,
    pub params: Vec<Param>,
    /// Threads of a CTA.
    pub threads: u32,
    pub smem_bytes: u32,
    pub sections: Vec<String>,
    /// Registers of at most 32 bits.
    pub num_words: usize,
    /// Registers of 64 bits.
    pub num_longs: usize,
    nodes: Vec<Node>,
    labels: Vec<u32>,
    bases: [usize; Class::ALL.len()],
}

impl Program {
    /// Decodes a module.
    pub fn new(module: &Module) -> Self {
        let entry = &module.entry;
        let mut bases = [0; Class::ALL.len()];
        let mut num_words = 0;
        for class in Class::ALL {
            if class != Class::B64 {
                bases[class as usize] = num_words;
                num_words += entry.num_regs[class as usize] as usize;
            }
        }
        // The slots of 64-bit registers follow those of the others; only definedness uses them.
        bases[Class::B64 as usize] = num_words;
        let mut program = Self {
            name: entry.name.clone(),
            steps: Vec::new(),
            params: entry.params.clone(),
            threads: entry.threads,
            smem_bytes: entry.smem.bytes(),
            sections: entry.sections.clone(),
            num_words,
            num_longs: entry.num_regs[Class::B64 as usize] as usize,
            nodes: Vec::new(),
            labels: Vec::new(),
            bases,
        };
        for item in &entry.items {
            match item {
                Item::Inst(node) => program.push(node),
                Item::Label(label) => {
                    let id = label.id as usize;
                    if program.labels.len() <= id {
                        program.labels.resize(id + 1, u32::MAX);
                    }
                    program.labels[id] = program.steps.len() as u32;
                }
                Item::Section(_) => {}
            }
        }
        program
    }

    fn push(&mut self, node: &Node) {
        let row = node.inst.row();
        self.steps.push(Step {
            inst: node.inst,
            guard: node.guard.map(|guard| (self.slot(guard.pred.any()), guard.negated)),
            scope: row.scope,
            control: row.effect == Effect::Control,
            sync: row.effect == Effect::Sync,
            shared: matches!(
                row.effect,
                Effect::LoadShared | Effect::StoreShared | Effect::CopyAsync
            ),
        });
        self.nodes.push(*node);
    }

    /// The register's place among all registers.
    #[inline]
    pub fn slot(&self, reg: AnyReg) -> usize {
        self.bases[reg.class as usize] + reg.id as usize
    }

    /// The instruction that a label names, `None` if it was never bound.
    pub fn target(&self, label: Label) -> Option<u32> {
        self.labels.get(label.id as usize).copied().filter(|pc| *pc != u32::MAX)
    }

    /// An instruction with its circumstances.
    pub fn node(&self, pc: u32) -> &Node {
        &self.nodes[pc as usize]
    }
}
