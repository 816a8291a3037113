//! A finished program: target, entry, parameters, registers and shared-memory plan.

use super::builder::{Item, Node};
use super::isa::cluster::Cluster;
use super::isa::{Inst, Since, ptx};
use super::reg::{Param, Region};
use super::types::Class;
use crate::target::{PtxIsa, SmArch};

/// The plan of a CTA's dynamic shared memory: named regions, one after the other.
#[derive(Clone, Debug, Default)]
pub struct SmemPlan {
    regions: Vec<(String, Region)>,
    bytes: u32,
    align: u32,
}

impl SmemPlan {
    /// Adds a region of `bytes` bytes at a multiple of `align`.
    pub fn region(&mut self, name: &str, bytes: u32, align: u32) -> Region {
        let start = self.bytes.next_multiple_of(align);
        self.bytes = start + bytes;
        self.align = self.align.max(align);
        let region = Region { start, bytes };
        self.regions.push((name.to_owned(), region));
        region
    }

    /// Adds a name for memory that other regions own: a later phase of the program reuses it.
    ///
    /// # Panics
    /// If it does not lie inside the plan: a bug in the emitter.
    pub fn overlay(&mut self, name: &str, start: u32, bytes: u32) -> Region {
        assert!(start + bytes <= self.bytes, "overlay {name} leaves the plan");
        let region = Region { start, bytes };
        self.regions.push((name.to_owned(), region));
        region
    }

    /// Grows the plan to at least `bytes`.
    pub fn reserve(&mut self, bytes: u32) {
        self.bytes = self.bytes.max(bytes);
    }

    /// Total size in bytes.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Alignment of its first byte: 128, or more if a region asks for more.
    pub fn align(&self) -> u32 {
        self.align.max(128)
    }

    /// The regions with their names, in order of declaration.
    pub fn regions(&self) -> &[(String, Region)] {
        &self.regions
    }
}

/// The kernel of a module.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The kernel's name.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs that should fit on an SM.
    pub min_ctas: u32,
    /// CTAs of a cluster, 1 if the grid has none; the grid's x is a multiple of it.
    pub cluster: u32,
    /// The CTA's shared memory.
    pub smem: SmemPlan,
    /// How many registers of each class it declares, indexed by [`Class`].
    pub num_regs: [u32; Class::ALL.len()],
    /// The names of its sections; 0 is the root and has none.
    pub sections: Vec<String>,
    /// The program.
    pub items: Vec<Item>,
    /// What the builder noticed and the verifier will report.
    pub(super) mistakes: Vec<String>,
}

/// What clusters need (`.reqnctapercluster`).
pub(super) const CLUSTERS: Since = ptx(7, 8, 90);

/// A module with one kernel.
#[derive(Clone, Debug)]
pub struct Module {
    /// The target it is written for.
    pub target: SmArch,
    /// The kernel.
    pub entry: Entry,
}

impl Module {
    /// The instructions in order.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.entry.items.iter().filter_map(|item| match item {
            Item::Inst(node) => Some(node),
            _ => None,
        })
    }

    /// Whether the kernel waits for the one before it (`griddepcontrol.wait`), so that it may start early. One
    /// that does not is launched in plain order whatever the caller permits. That every CTA waits, before it
    /// touches anything that the kernel before may touch, is for the emulator to find out.
    pub fn waits_for_previous(&self) -> bool {
        self.nodes().any(|node| matches!(node.inst, Inst::Cluster(Cluster::GriddepcontrolWait(_))))
    }

    /// Registers with which a thread enters the kernel, if the assembler takes all that `.reqntid` and
    /// `.minnctapersm` leave it, as it does for kernels that change the number later (`setmaxnreg`).
    pub fn entry_regs(&self) -> u32 {
        let regs = self.target.spec().map_or(0, |spec| spec.regs_per_sm);
        let threads = self.entry.threads.max(1) * self.entry.min_ctas.max(1);
        (regs / threads / 8 * 8).min(255)
    }

    /// The lowest PTX ISA version with every used form and the target.
    pub fn isa(&self) -> PtxIsa {
        let target = self.target.since().unwrap_or(PtxIsa::new(0, 0));
        let target = if self.entry.cluster > 1 { target.max(CLUSTERS.isa) } else { target };
        self.nodes().map(|node| node.inst.since().isa).fold(target, PtxIsa::max)
    }
}
