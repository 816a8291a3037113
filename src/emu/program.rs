//! A module made ready to run: labels resolved, register numbers turned into slots.

use crate::asm::Module;
use crate::asm::builder::{Item, Node};
use crate::asm::isa::{Effect, Inst, wgmma::Wgmma};
use crate::asm::reg::{AnyReg, Label, Param, Role};
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
    /// Number of its list of registers that products use, 0 if it has none: see [`Program::touched`].
    pub products: u32,
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
    /// The shared-window address of a CTA's shared memory: no more aligned than the plan asks for, and not
    /// 0, so that a forgotten base shows.
    pub smem_base: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// Registers with which a thread begins.
    pub entry_regs: u32,
    /// Whether it has warpgroup products.
    pub has_products: bool,
    pub sections: Vec<String>,
    /// Registers of at most 32 bits.
    pub num_words: usize,
    /// Registers of 64 bits.
    pub num_longs: usize,
    nodes: Vec<Node>,
    labels: Vec<u32>,
    bases: [usize; Class::ALL.len()],
    /// Lists of `(slot, written)`.
    touched: Vec<Box<[(u32, bool)]>>,
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
            smem_base: ((1024 / entry.smem.align()) | 1) * entry.smem.align(),
            cluster: entry.cluster.max(1),
            // Allocated by the warp in units of 8 a thread.
            entry_regs: module.entry_regs().next_multiple_of(8),
            has_products: false,
            sections: entry.sections.clone(),
            num_words,
            num_longs: entry.num_regs[Class::B64 as usize] as usize,
            nodes: Vec::new(),
            labels: Vec::new(),
            bases,
            touched: Vec::new(),
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
        program.find_product_registers();
        program
    }

    /// Notes, for every ordinary instruction, which of its registers products use.
    fn find_product_registers(&mut self) {
        let is_product = |inst: &Inst| {
            matches!(inst, Inst::Wgmma(Wgmma::WgmmaM64K16F32F16(_) | Wgmma::WgmmaM64K16F32Bf16(_)))
        };
        let mut used = vec![false; self.num_words];
        for step in self.steps.iter().filter(|step| is_product(&step.inst)) {
            step.inst.registers(&mut |reg, _| {
                if matches!(reg.class, Class::F32 | Class::B32) {
                    used[self.slot(reg)] = true;
                }
            });
            self.has_products = true;
        }
        if !self.has_products {
            return;
        }
        for n in 0..self.steps.len() {
            let inst = self.steps[n].inst;
            let mut list = Vec::new();
            inst.registers(&mut |reg, role| {
                if reg.class != Class::B64 && used[self.slot(reg)] {
                    list.push((self.slot(reg) as u32, role != Role::Read));
                }
            });
            if !list.is_empty() && !is_product(&inst) {
                self.touched.push(list.into());
                self.steps[n].products = self.touched.len() as u32;
            }
        }
    }

    /// The registers of list `number`, from 1, as `(slot, written)`.
    pub fn touched(&self, number: u32) -> &[(u32, bool)] {
        &self.touched[number as usize - 1]
    }

    /// The register of at most 32 bits that has a slot.
    pub fn word_register(&self, slot: usize) -> AnyReg {
        let mut classes = Class::ALL.into_iter().filter(|class| *class != Class::B64);
        let class = classes.rfind(|class| self.bases[*class as usize] <= slot);
        let class = class.expect("the first class begins at slot 0");
        AnyReg { class, id: (slot - self.bases[class as usize]) as u32 }
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
            products: 0,
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
