//! The kernels of products with experts, and those that make their lists.

use std::collections::BTreeSet;

use makaira::kernel::experts::select::{BLOCK_ROWS, COMMON_BLOCK_ROWS, ExpertProblem, tile_m};
use makaira::kernel::experts::{blocks, route, rows};
use makaira::kernel::{Config, Kind, Rows};
use makaira::target::SmArch;
use makaira::weights::Group;

use super::common::oracle::{Nvdisasm, Ptxas};
use super::{TARGETS, complaints, device, kinds, on_all_processors, report};

/// Outputs and inputs of the experts of three models, and odd ones.
const SHAPES: [(u32, u32); 6] =
    [(28672, 4096), (4096, 14336), (1536, 2048), (2048, 768), (4096, 7168), (200, 1000)];

#[test]
fn choices_for_experts_assemble_and_are_woven() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut work: BTreeSet<(Config, SmArch)> = BTreeSet::new();
    let mut add = |sm, kind: Kind, n, k: u32, group, tile_m, max_blocks| {
        let (sm, num_sms, l2) = sm;
        let (device, kind) = (device(sm, num_sms, l2), Kind { experts: true, ..kind });
        let rows = if k.is_multiple_of(128) { Rows::Whole } else { Rows::Vector };
        let listed_rows = Some(64);
        let problem = ExpertProblem { kind, n, k, group, rows, tile_m, max_blocks, listed_rows };
        let ranked = problem.ranked(&device).unwrap_or_else(|error| panic!("{error}"));
        // The best one of each family.
        let mut families = BTreeSet::new();
        let best = ranked.iter().filter(|choice| families.insert(choice.config.family));
        work.extend(best.map(|choice| (choice.config, device.arch)));
    };
    for (n, k) in SHAPES {
        for tile_m in BLOCK_ROWS {
            for (group, max_blocks) in [(Group::PerColumn, 8), (Group::Size(128), 300)] {
                // One scale per column is a matter of low tiles.
                if group == Group::PerColumn && tile_m > COMMON_BLOCK_ROWS {
                    continue;
                }
                add(TARGETS[3], Kind::U4B8, n, k, group, tile_m, max_blocks);
            }
        }
        add(TARGETS[0], Kind::U4B8, n, k, Group::Size(128), tile_m(64, 8, 8, 64), 64);
    }
    for (kind, groups) in kinds() {
        let kind = Kind { bias: true, residual: false, ..kind };
        for (tile_m, group) in [1, 16, 64].into_iter().zip(groups.iter().cycle()) {
            add(TARGETS[3], kind, 4096, 4096, *group, tile_m, 64);
        }
    }
    let work: Vec<(Config, SmArch)> = work.into_iter().collect();
    eprintln!("{} configurations and targets", work.len());
    assert!(work.len() > 40, "only {}", work.len());
    let found = on_all_processors(&work, |(config, arch)| {
        complaints(&ptxas, Some(&nvdisasm), config, *arch)
    });
    report(&found, work.len());
}

#[test]
fn the_kernels_of_lists_assemble() {
    let Some(ptxas) = Ptxas::find() else { return };
    for (sm, ..) in TARGETS {
        let target = SmArch::baseline(sm);
        for module in [route::build(target), blocks::build(target), rows::build(target)] {
            let name = format!("{} for {target}", module.entry.name);
            module.verify().unwrap_or_else(|found| panic!("{name}: {found}"));
            let assembled = ptxas.assemble(&module.to_string(), &target.to_string(), &[]);
            let assembled = assembled.unwrap_or_else(|log| panic!("{name}: {log}"));
            assert_eq!((assembled.spill_bytes, assembled.stack_bytes), (0, 0), "{name}");
            assert!(assembled.regs <= 64, "{name}: {} registers", assembled.regs);
        }
    }
}
