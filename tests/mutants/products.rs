//! Changes to what the wgmma family lives by: fences, groups, descriptors, parities; and which of them are spare.

use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{AddU64, Alu, MovB32};
use makaira::asm::isa::control::{Bra, Control};
use makaira::asm::isa::mbarrier::Mbarrier;
use makaira::asm::isa::wgmma::{Wgmma, WgmmaWaitGroup};
use makaira::asm::reg::{Imm, In, Reg};
use makaira::asm::types::{B32, B64};
use makaira::kernel::{Config, Scaling};
use makaira::weights::Group;

use crate::changes::Mutant;

/// The swizzle of a descriptor, in its two highest bits: 1 is that of 128 bytes.
const SWIZZLE: u32 = 62;

/// Where an instruction stands.
pub struct Context<'m> {
    pub module: &'m Module,
    pub section: &'m str,
}

impl Context<'_> {
    /// Further changes to an instruction, as [`crate::changes::mutants`] wants them.
    pub fn weaker(&self, node: &Node) -> Vec<(&'static str, Option<Node>)> {
        let left_out = ("left out", None);
        let becomes = |how, inst: Inst| (how, Some(Node { inst, ..*node }));
        match node.inst {
            Inst::Wgmma(Wgmma::WgmmaFence(_) | Wgmma::WgmmaCommitGroup(_)) => vec![left_out],
            Inst::Wgmma(Wgmma::WgmmaWaitGroup(wait)) => {
                let later = WgmmaWaitGroup { n: Imm(wait.n.0 + 1) };
                vec![left_out, becomes("waits for one group less", later.into())]
            }
            Inst::Alu(Alu::AddU64(add)) => self
                .descriptor(add)
                .map_or(Vec::new(), |add| vec![becomes("is another descriptor", add.into())]),
            Inst::Alu(Alu::MovB32(MovB32 { d, a: In::Imm(parity) }))
                if parity < 2 && self.is_parity(d.0) =>
            {
                let other = MovB32 { d, a: In::Imm(1 - parity) };
                vec![becomes("begins with the other parity", other.into())]
            }
            Inst::Control(Control::Bra(Bra { to }))
                if to.name == "spin" && self.section == "wait for the other CTAs" =>
            {
                vec![("left out", None)]
            }
            _ => Vec::new(),
        }
    }

    /// The same sum as another descriptor, if a product uses it: 32 bytes further on, or without swizzle.
    fn descriptor(&self, add: AddU64) -> Option<AddU64> {
        let In::Imm(constant) = add.b else { return None };
        let constant = match constant >> SWIZZLE {
            1 => constant - (1 << SWIZZLE),
            _ if self.is_descriptor(add.d.0) => constant + 2,
            _ => return None,
        };
        Some(AddU64 { b: In::Imm(constant), ..add })
    }

    fn is_descriptor(&self, reg: Reg<B64>) -> bool {
        self.module.nodes().any(|node| match node.inst {
            Inst::Wgmma(Wgmma::WgmmaM64K16F32F16(product)) => product.b.0 == reg,
            _ => false,
        })
    }

    /// Whether a wait names this register's parity.
    fn is_parity(&self, reg: Reg<B32>) -> bool {
        self.module.nodes().any(|node| match node.inst {
            Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(wait)) => wait.parity == In::Reg(reg),
            _ => false,
        })
    }
}

/// Whether a mutant is one of several in the unrolled loop that do the same: each wait for products covers those
/// before it, an unclosed group is closed with the next one.
pub fn is_repeated(config: &Config, mutant: &Mutant, module: &Module) -> bool {
    let Item::Inst(node) = module.entry.items[mutant.at] else { return false };
    let drains = config.scaling == Scaling::Promote && config.group != Group::PerColumn;
    let in_loop = mutant.section.starts_with("main loop");
    in_loop
        && match node.inst {
            // The first one covers the products of the stage that is given back after it.
            Inst::Wgmma(Wgmma::WgmmaWaitGroup(wait)) => wait.n.0 == 1 && (drains || mutant.nth > 0),
            Inst::Wgmma(Wgmma::WgmmaCommitGroup(_)) => true,
            _ => false,
        }
}

/// Why a mutant of the wgmma family cannot be noticed, if that is known.
pub fn redundant(config: &Config, mutant: &Mutant, module: &Module) -> Option<&'static str> {
    let left_out = |method, section| mutant.leaves_out(method, section, module);
    if left_out("griddepcontrol_wait", "segment") {
        return Some("every thread has waited when the ring was filled");
    }
    if left_out("bar_warp_sync", "end of the segment") && config.runs_per_stage == 1 {
        return Some(
            "the words are requested anew after a later phase, that of a warp which has met the others at the output",
        );
    }
    if left_out("bar_sync_n", "output")
        && mutant.nth == 0
        && config.warps_k > 1
        && config.cluster_k == 1
    {
        return Some("the teams have met since the rows before these were read");
    }
    let Item::Inst(node) = module.entry.items[mutant.at] else { return None };
    match node.inst {
        Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(_))
            if mutant.section == "supply" && !mutant.what.ends_with("even phases") =>
        {
            Some("the ring is filled into fresh slots")
        }
        Inst::Alu(Alu::XorB32(_)) if mutant.section == "supply" => {
            Some("the ring's last slot is left free when it is filled")
        }
        _ => None,
    }
}
