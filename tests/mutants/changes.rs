//! What a mutant changes: one instruction left out, weakened or moved.

use std::collections::HashMap;

use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{Alu, MovB32, SetpU32, XorB32};
use makaira::asm::isa::async_copy::{CopyAsync, CpAsyncWaitGroup};
use makaira::asm::isa::bulk::Bulk;
use makaira::asm::isa::cluster::Cluster;
use makaira::asm::isa::mbarrier::{
    Mbarrier, MbarrierArriveExpectTx, MbarrierInit, MbarrierTryWaitParity,
};
use makaira::asm::isa::mem::{
    LdGlobalB32, LdRelaxedGpuGlobalU32, Mem, RedRelaxedGpuGlobalAddU32, StGlobalB32,
};
use makaira::asm::isa::sync::Sync;
use makaira::asm::isa::tensor::Tensor;
use makaira::asm::reg::{Imm, In, SharedAddr};
use makaira::asm::types::Cmp;

use crate::products;

/// One change to a module.
#[derive(Clone)]
pub struct Mutant {
    /// Which item.
    pub at: usize,
    /// What stands there instead; nothing if it is left out.
    pub with: Option<Node>,
    /// Where: the section's path.
    pub section: String,
    /// Which one of its row of the instruction table in the section, from 0.
    pub nth: usize,
    /// The change in words: section, instruction, what becomes of it.
    pub what: String,
}

impl Mutant {
    /// Whether an instruction of this row is what is left out, in this section.
    pub fn leaves_out(&self, method: &str, section: &str, module: &Module) -> bool {
        let Item::Inst(node) = module.entry.items[self.at] else { return false };
        self.with.is_none() && node.inst.row().method == method && self.section.starts_with(section)
    }

    /// What it does: the row of the instruction and what becomes of it.
    pub fn kind(&self, module: &Module) -> (&'static str, bool) {
        let Item::Inst(node) = module.entry.items[self.at] else { return ("", false) };
        (node.inst.row().method, self.with.is_some())
    }
}

/// What an instruction may become; `None` leaves it out.
fn weaker(node: &Node) -> Vec<(&'static str, Option<Node>)> {
    let left_out = ("left out", None);
    let becomes = |how, inst: Inst| (how, Some(Node { inst, ..*node }));
    match node.inst {
        Inst::Sync(Sync::BarSync(_) | Sync::BarSyncN(_) | Sync::BarWarpSync(_)) => vec![left_out],
        Inst::CopyAsync(CopyAsync::CpAsyncCommitGroup(_)) => vec![left_out],
        Inst::CopyAsync(CopyAsync::CpAsyncWaitGroup(wait)) => {
            let later = CpAsyncWaitGroup { n: Imm(wait.n.0 + 1) };
            vec![left_out, becomes("waits for one group less", later.into())]
        }
        Inst::Mem(Mem::LdAcquireGpuGlobalU32(load)) => vec![
            becomes("relaxed", LdRelaxedGpuGlobalU32 { d: load.d, a: load.a }.into()),
            becomes("weak", LdGlobalB32 { d: load.d, a: load.a }.into()),
        ],
        Inst::Mem(Mem::RedReleaseGpuGlobalAddU32(red)) => {
            let relaxed = RedRelaxedGpuGlobalAddU32 { a: red.a, b: red.b };
            vec![left_out, becomes("relaxed", relaxed.into())]
        }
        Inst::Mem(Mem::StReleaseGpuGlobalU32(store)) => {
            vec![left_out, becomes("weak", StGlobalB32 { a: store.a, b: store.b }.into())]
        }
        // The only plain 32-bit store is the reset of a lock.
        Inst::Mem(Mem::StGlobalB32(_)) => vec![left_out],
        Inst::Mbarrier(Mbarrier::MbarrierInit(init)) => {
            let In::Imm(arrivals) = init.n else { return vec![left_out] };
            let more = MbarrierInit { n: In::Imm(arrivals + 1), ..init };
            vec![left_out, becomes("expects an arrival more", more.into())]
        }
        Inst::Mbarrier(Mbarrier::FenceMbarrierInit(_)) => vec![left_out],
        Inst::Mbarrier(Mbarrier::MbarrierArriveExpectTx(arrive)) => {
            let (how, bytes) = match arrive.n {
                In::Imm(bytes) => ("expects 16 bytes less", bytes - 16),
                In::Reg(_) => ("expects 16 bytes", 16),
            };
            let other = MbarrierArriveExpectTx { n: In::Imm(bytes), ..arrive };
            vec![left_out, becomes(how, other.into())]
        }
        Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(wait)) => {
            let passes = SetpU32 { d: wait.d, cmp: Cmp::Eq, a: In::Imm(0), b: In::Imm(0) };
            let parity = |n| MbarrierTryWaitParity { parity: In::Imm(n), ..wait };
            vec![
                becomes("does not wait", passes.into()),
                becomes("waits for even phases", parity(0).into()),
                becomes("waits for odd phases", parity(1).into()),
            ]
        }
        Inst::Mbarrier(Mbarrier::MbarrierArrive(_) | Mbarrier::MbarrierArriveCluster(_)) => {
            vec![left_out]
        }
        Inst::Bulk(
            Bulk::CpAsyncBulk(_) | Bulk::CpAsyncBulkHint(_) | Bulk::CpAsyncBulkTensor2d(_),
        ) => vec![left_out],
        Inst::Cluster(
            Cluster::GriddepcontrolWait(_)
            | Cluster::StAsyncV4F32(_)
            | Cluster::BarrierClusterArriveRelaxed(_)
            | Cluster::BarrierClusterWait(_),
        ) => vec![left_out],
        // The address that the CTA itself uses.
        Inst::Cluster(Cluster::Mapa(map)) => {
            vec![becomes("stays in this CTA", MovB32 { d: map.d, a: In::Reg(map.a.0) }.into())]
        }
        Inst::Alu(Alu::XorB32(XorB32 { b: In::Imm(0), .. })) => Vec::new(),
        Inst::Alu(Alu::XorB32(XorB32 { d, a, .. })) => {
            vec![becomes("passes its first operand on", MovB32 { d, a }.into())]
        }
        _ => Vec::new(),
    }
}

/// The same instruction one promised region further on.
fn misplaced(inst: &Inst) -> Option<Inst> {
    let moved = |a: SharedAddr| {
        let region = a.region?;
        Some(SharedAddr { offset: a.offset + region.bytes as i32, ..a })
    };
    let mut inst = *inst;
    match &mut inst {
        Inst::CopyAsync(CopyAsync::CpAsyncCg16(copy)) => copy.d = moved(copy.d)?,
        Inst::CopyAsync(CopyAsync::CpAsyncCg16Zfill(copy)) => copy.d = moved(copy.d)?,
        Inst::CopyAsync(CopyAsync::CpAsyncCg16Hint(copy)) => copy.d = moved(copy.d)?,
        Inst::Bulk(Bulk::CpAsyncBulk(copy)) => copy.d = moved(copy.d)?,
        Inst::Bulk(Bulk::CpAsyncBulkHint(copy)) => copy.d = moved(copy.d)?,
        Inst::Mem(Mem::LdSharedV4B32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::LdSharedB32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::LdSharedV4F32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::StSharedV4B32(store)) => store.a = moved(store.a)?,
        Inst::Mem(Mem::StSharedF32(store)) => store.a = moved(store.a)?,
        Inst::Mem(Mem::StSharedV4F32(store)) => store.a = moved(store.a)?,
        Inst::Cluster(Cluster::StAsyncV4F32(store)) => store.a = moved(store.a)?,
        Inst::Mem(Mem::LdSharedV2B32(load)) => load.a = moved(load.a)?,
        Inst::Tensor(Tensor::LdmatrixX4(load)) => load.a = moved(load.a)?,
        Inst::Tensor(Tensor::StmatrixX4Trans(store)) => store.a = moved(store.a)?,
        _ => return None,
    }
    Some(inst)
}

/// Every mutant of a module: all weakenings, and of misplaced or unguarded accesses one a section and
/// row of the instruction table.
pub fn mutants(module: &Module) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    let mut seen = Vec::new();
    let mut counts: HashMap<_, usize> = HashMap::new();
    for (at, item) in module.entry.items.iter().enumerate() {
        let Item::Inst(node) = item else { continue };
        let section = module.entry.sections[node.section as usize].as_str();
        let kind = (section, node.inst.row().method);
        let count = counts.entry(kind).or_default();
        let nth = *count;
        *count += 1;
        let mut push = |how: &str, with| {
            let what = format!("{section}, number {nth}: `{}` {how}", node.inst);
            mutants.push(Mutant { at, with, section: section.into(), nth, what });
        };
        let context = products::Context { module, section };
        for (how, with) in weaker(node).into_iter().chain(context.weaker(node)) {
            push(how, with);
        }
        if seen.contains(&kind) {
            continue;
        }
        if let Some(inst) = misplaced(&node.inst) {
            seen.push(kind);
            push("one region further on", Some(Node { inst, ..*node }));
        }
        let stores = matches!(
            node.inst,
            Inst::Mem(
                Mem::StGlobalV4F32(_)
                    | Mem::StGlobalV2B32(_)
                    | Mem::StGlobalB16(_)
                    | Mem::StGlobalB32(_)
                    | Mem::RedReleaseGpuGlobalAddU32(_)
            )
        );
        if stores && node.guard.is_some() {
            seen.push(kind);
            push("by every thread", Some(Node { guard: None, ..*node }));
        }
    }
    mutants
}

/// The module with these changes, which are in ascending order.
pub fn apply<'m>(module: &Module, mutants: impl IntoIterator<Item = &'m Mutant>) -> Module {
    let mut module = module.clone();
    for (removed, mutant) in mutants.into_iter().enumerate() {
        match mutant.with {
            Some(node) => module.entry.items[mutant.at - removed] = Item::Inst(node),
            None => drop(module.entry.items.remove(mutant.at - removed)),
        }
    }
    module
}
