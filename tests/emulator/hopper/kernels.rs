//! The checker bites on whole kernels of the wgmma family too, by the emulator's word alone.
//!
//! Where a kernel says a thing more often than it must, as unrolled loops do (each wait for products covers what
//! the one before did, each warp barrier what came before the next), all of a kind are changed together.

use makaira::asm::Module;
use makaira::asm::builder::Item;
use makaira::asm::isa::Inst;
use makaira::asm::isa::cluster::Cluster;
use makaira::asm::isa::mbarrier::Mbarrier;
use makaira::asm::isa::sync::Sync;
use makaira::asm::isa::wgmma::{Wgmma, WgmmaWaitGroup};
use makaira::asm::reg::Imm;
use makaira::emu::{Category, Options};
use makaira::kernel::{Config, select};
use makaira::target::SmArch;

use super::super::mutants::{Case, Edit};
use super::mutants::{Change, changes, mutate};

/// An instruction of which single ones may be spare.
fn is_repeated(inst: &Inst) -> bool {
    matches!(
        inst,
        Inst::Wgmma(Wgmma::WgmmaWaitGroup(_) | Wgmma::WgmmaCommitGroup(_))
            | Inst::Sync(Sync::BarWarpSync(_))
            | Inst::Cluster(Cluster::GriddepcontrolWait(_))
    )
}

/// Leaves out all instructions of which `is` tells. Whether there was one.
fn without(module: &mut Module, is: fn(&Inst) -> bool) -> Option<String> {
    let before = module.entry.items.len();
    module.entry.items.retain(|item| !matches!(item, Item::Inst(node) if is(&node.inst)));
    (module.entry.items.len() < before).then(String::new)
}

fn wait_a_group_less(module: &mut Module) -> Option<String> {
    let mut found = None;
    for item in &mut module.entry.items {
        if let Item::Inst(node) = item
            && let Inst::Wgmma(Wgmma::WgmmaWaitGroup(wait)) = node.inst
        {
            node.inst = WgmmaWaitGroup { n: Imm(wait.n.0 + 1) }.into();
            found = Some(String::new());
        }
    }
    found
}

/// A change of all instructions of a kind; whether there was one.
type All = fn(&mut Module) -> Option<String>;

/// Mutants of all of a kind.
const OF_ALL: [(&str, All); 5] = [
    ("every wait for products a group short", wait_a_group_less),
    ("no wait for products", |module| {
        without(module, |inst| matches!(inst, Inst::Wgmma(Wgmma::WgmmaWaitGroup(_))))
    }),
    ("no group of products closed", |module| {
        without(module, |inst| matches!(inst, Inst::Wgmma(Wgmma::WgmmaCommitGroup(_))))
    }),
    ("no warp barrier", |module| {
        without(module, |inst| matches!(inst, Inst::Sync(Sync::BarWarpSync(_))))
    }),
    ("no wait for the grid before", |module| {
        without(module, |inst| matches!(inst, Inst::Cluster(Cluster::GriddepcontrolWait(_))))
    }),
];

/// Single changes: in words, which item, and what becomes of it.
fn of_one(module: &Module) -> Vec<(String, usize, Change)> {
    let mut mutants = Vec::new();
    for (index, item) in module.entry.items.iter().enumerate() {
        let Item::Inst(node) = item else { continue };
        for change in changes(&node.inst) {
            let same = matches!(change, Change::Replaced(inst) if inst == node.inst);
            if is_repeated(&node.inst) || same {
                continue;
            }
            let section = &module.entry.sections[node.section as usize];
            // The first stages are requested into fresh slots: the wait for them passes at once.
            let is_wait = matches!(node.inst, Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(_)));
            if section == "supply" && is_wait {
                continue;
            }
            let what = match change {
                Change::Replaced(inst) => format!("becomes `{inst}`"),
                other => format!("{other:?}").to_lowercase(),
            };
            let what = format!("`{}` in {section} ({}) {what}", node.inst, node.emitter);
            mutants.push((what, index, change));
        }
    }
    mutants
}

/// The mutants of a configuration's kernel that are reported for none of the products.
fn survivors(name: &'static str, cases: &[Case]) -> Vec<String> {
    let config: Config = name.parse().expect("the name of a configuration");
    let arch = SmArch::baseline(90);
    select::check(&config, arch).expect("it is legal");
    let module = select::family_of(&config).build(&config, arch);
    let packed: Vec<_> = cases.iter().map(Case::packed).collect();
    // What an edit comes to; an edit is made anew for every run.
    let report = |edit: &dyn Fn() -> Edit| {
        let mut last = "nothing to change".to_owned();
        for (case, packed) in cases.iter().zip(&packed) {
            let options = Options {
                max_idle_steps: 200_000,
                max_steps: 4 << 20,
                overlap: true,
                ..Options::default()
            };
            let outcome = case.run_edited(packed, edit(), options);
            match outcome.fault {
                Some(fault) if fault.kind.category() == Category::KernelBug => return None,
                Some(fault) => last = format!("only {fault}"),
                None if outcome.mutated.is_some() => last = "clean".to_owned(),
                None => {}
            }
        }
        Some(last)
    };
    let as_it_is = report(&|| Box::new(|_| Some(String::new())));
    assert_eq!(as_it_is.as_deref(), Some("clean"), "{name} as it is");
    let mut survivors = Vec::new();
    let mut count = 0;
    let mut see = |what: &str, edit: &dyn Fn() -> Edit| {
        count += 1;
        if let Some(outcome) = report(edit) {
            survivors.push(format!("{name}: {what}: {outcome}"));
        }
    };
    for (what, edit) in OF_ALL {
        see(what, &|| Box::new(edit));
    }
    for (what, index, change) in of_one(&module) {
        see(&what, &|| {
            Box::new(move |module| {
                *module = mutate(module, index, change);
                Some(String::new())
            })
        });
    }
    eprintln!("{name}: {count} mutants");
    assert!(count > 50, "{name}: hardly any synchronisation was found");
    survivors
}

/// Stripes that begin and end inside tiles, one whose first segment is a single round, and some of several
/// tiles, long and short.
#[test]
fn every_synchronisation_of_a_wgmma_kernel_is_needed() {
    let names = [
        ("marlin_sm90wg_u4b8_f16_m16n64k128_g128_w4_s3_c1", 19, 124),
        ("marlin_sm90wg_u4b8_f16_m32n128k128_g128_w8_s3_c1_fs", 40, 252),
        ("marlin_sm90wg_u4b8_f16_m64n128k128_g128_w4_s3_c1_fs", 70, 252),
    ];
    let left: Vec<String> =
        names
            .into_iter()
            .flat_map(|(name, m, n)| {
                let cases = [(1024, 12), (1024, 15), (1024, 31), (256, 7)]
                    .map(|(k, stripe)| Case { name, m, n, k, stripe });
                survivors(name, &cases)
            })
            .collect();
    assert!(left.is_empty(), "not reported:\n{}", left.join("\n"));
}
