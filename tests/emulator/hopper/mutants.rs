//! The checker bites: every pattern without, or with a weaker form of, any one of its waits, arrivals,
//! announcements, fences, commits and barriers is reported, whatever its results come out as. Left out are
//! sections called `drain`: what a loop does once more at its end, and nobody waits for.

use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::SetpU32;
use makaira::asm::isa::bulk::{Bulk, CpAsyncBulkWaitGroupRead};
use makaira::asm::isa::cluster::Cluster;
use makaira::asm::isa::mbarrier::{Mbarrier, MbarrierArriveExpectTx, MbarrierInit};
use makaira::asm::isa::sync::Sync;
use makaira::asm::isa::wgmma::{Wgmma, WgmmaWaitGroup};
use makaira::asm::reg::{Imm, In};
use makaira::asm::types::Cmp;
use makaira::emu::Category;

use super::{Outcome, Pattern, emulator, patterns};

/// What becomes of an instruction: nothing, itself twice, or another one.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    Dropped,
    Doubled,
    Replaced(Inst),
}

/// The mutations of an instruction.
pub fn changes(inst: &Inst) -> Vec<Change> {
    use Change::{Doubled, Dropped, Replaced};
    let bump = |n: In<_>, by: i64| match n {
        In::Imm(n) => In::Imm((n as i64 + by) as u64),
        reg => reg,
    };
    match inst {
        Inst::Mbarrier(Mbarrier::MbarrierInit(i)) => [1, -1]
            .into_iter()
            .filter(|by| !matches!(i.n, In::Imm(1)) || *by > 0)
            .map(|by| Replaced(MbarrierInit { a: i.a, n: bump(i.n, by) }.into()))
            .chain([Dropped, Doubled])
            .collect(),
        Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(i)) => {
            let passes = SetpU32 { d: i.d, cmp: Cmp::Eq, a: In::Imm(0), b: In::Imm(0) };
            let mut other = *i;
            if let In::Imm(parity) = &mut other.parity {
                *parity ^= 1;
            }
            vec![Replaced(passes.into()), Replaced(other.into())]
        }
        Inst::Mbarrier(Mbarrier::MbarrierArriveExpectTx(i)) => {
            let with = |by| MbarrierArriveExpectTx { a: i.a, n: bump(i.n, by) }.into();
            vec![Dropped, Doubled, Replaced(with(16)), Replaced(with(-16))]
        }
        Inst::Mbarrier(Mbarrier::MbarrierArrive(_) | Mbarrier::MbarrierArriveCluster(_)) => {
            vec![Dropped, Doubled]
        }
        Inst::Mbarrier(Mbarrier::FenceMbarrierInit(_)) => vec![Dropped],
        Inst::Bulk(
            Bulk::CpAsyncBulk(_)
            | Bulk::CpAsyncBulkHint(_)
            | Bulk::CpAsyncBulkTensor2d(_)
            | Bulk::CpAsyncBulkTensor2dMulticast(_),
        ) => vec![Dropped, Doubled],
        Inst::Bulk(Bulk::CpAsyncBulkWaitGroupRead(i)) => {
            vec![Dropped, Replaced(CpAsyncBulkWaitGroupRead { n: Imm(i.n.0 + 1) }.into())]
        }
        Inst::Bulk(
            Bulk::CpAsyncBulkCommitGroup(_)
            | Bulk::CpAsyncBulkWaitGroup(_)
            | Bulk::FenceProxyAsyncSharedCta(_),
        ) => vec![Dropped],
        Inst::Cluster(
            Cluster::BarrierClusterArrive(_)
            | Cluster::BarrierClusterArriveRelaxed(_)
            | Cluster::BarrierClusterWait(_),
        ) => vec![Dropped, Doubled],
        Inst::Cluster(Cluster::GriddepcontrolWait(_)) => vec![Dropped],
        Inst::Cluster(Cluster::StAsyncV4F32(_)) => vec![Dropped, Doubled],
        Inst::Wgmma(Wgmma::WgmmaFence(_) | Wgmma::WgmmaCommitGroup(_)) => vec![Dropped],
        Inst::Wgmma(Wgmma::WgmmaWaitGroup(i)) => {
            vec![Dropped, Replaced(WgmmaWaitGroup { n: Imm(i.n.0 + 1) }.into())]
        }
        // Each warp barrier orders what comes before the next one too: see `without_warp_barriers`.
        Inst::Sync(Sync::BarSync(_) | Sync::BarSyncN(_)) => vec![Dropped],
        _ => Vec::new(),
    }
}

pub fn mutate(module: &Module, index: usize, change: Change) -> Module {
    let mut mutant = module.clone();
    let Item::Inst(node) = mutant.entry.items[index] else { panic!("no instruction") };
    match change {
        Change::Dropped => {
            mutant.entry.items.remove(index);
        }
        Change::Doubled => mutant.entry.items.insert(index, Item::Inst(node)),
        Change::Replaced(inst) => mutant.entry.items[index] = Item::Inst(Node { inst, ..node }),
    }
    mutant
}

/// The cluster barriers of a pattern, arrival and wait, each left out as a whole.
fn without_cluster_barriers(module: &Module) -> Vec<(String, Module)> {
    let is = |item: &Item, wait: bool| match item {
        Item::Inst(node) => match node.inst {
            Inst::Cluster(Cluster::BarrierClusterWait(_)) => wait,
            Inst::Cluster(
                Cluster::BarrierClusterArrive(_) | Cluster::BarrierClusterArriveRelaxed(_),
            ) => !wait,
            _ => false,
        },
        _ => false,
    };
    let items = &module.entry.items;
    let arrivals = (0..items.len()).filter(|n| is(&items[*n], false));
    arrivals
        .map(|first| {
            let wait = (first..items.len()).find(|n| is(&items[*n], true)).expect("a wait");
            let mut mutant = module.clone();
            mutant.entry.items.remove(wait);
            mutant.entry.items.remove(first);
            (format!("without the cluster's barrier of item {first}"), mutant)
        })
        .collect()
}

/// What the checker says of a mutant in some order of turns; none if it finds nothing.
fn report(pattern: &Pattern, mutant: &Module) -> Result<String, String> {
    let mut last = String::new();
    for seed in [None, Some(1), Some(2), Some(3)] {
        match pattern.run(&emulator(seed), mutant, true, 7) {
            Outcome::Fault(fault) if fault.kind.category() == Category::KernelBug => {
                return Ok(fault.to_string());
            }
            other => last = format!("{other:?}"),
        }
    }
    Err(last)
}

/// A pattern without the warp barriers of a section.
fn without_warp_barriers(module: &Module) -> Vec<(String, Module)> {
    let is = |item: &Item, section: u32| match item {
        Item::Inst(node) => {
            matches!(node.inst, Inst::Sync(Sync::BarWarpSync(_))) && node.section == section
        }
        _ => false,
    };
    let sections = 0..module.entry.sections.len() as u32;
    let sections =
        sections.filter(|section| module.entry.items.iter().any(|item| is(item, *section)));
    sections
        .map(|section| {
            let mut mutant = module.clone();
            mutant.entry.items.retain(|item| !is(item, section));
            let name = &module.entry.sections[section as usize];
            (format!("without warp barriers in {name}"), mutant)
        })
        .collect()
}

#[test]
fn every_synchronisation_of_a_pattern_is_needed() {
    let (mut survivors, mut count) = (Vec::new(), 0);
    for pattern in patterns() {
        let module = &pattern.module;
        let mut mutants = without_cluster_barriers(module);
        mutants.extend(without_warp_barriers(module));
        for (index, item) in module.entry.items.iter().enumerate() {
            let Item::Inst(node) = item else { continue };
            let section = &module.entry.sections[node.section as usize];
            if section.ends_with("drain") {
                continue;
            }
            for change in changes(&node.inst) {
                let what = match change {
                    Change::Replaced(inst) => format!("becomes `{inst}`"),
                    other => format!("{other:?}").to_lowercase(),
                };
                let name = format!("`{}` in {section} ({}) {what}", node.inst, node.emitter);
                mutants.push((name, mutate(module, index, change)));
            }
        }
        for (name, mutant) in mutants {
            count += 1;
            if let Err(outcome) = report(&pattern, &mutant) {
                survivors.push(format!("{}: {name}: {outcome}", pattern.name));
            }
        }
    }
    assert!(count > 100, "only {count} mutants");
    assert!(
        survivors.is_empty(),
        "{} of {count} mutants are not reported:\n{}",
        survivors.len(),
        survivors.join("\n")
    );
}
