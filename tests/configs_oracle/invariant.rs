//! The kernels of batch-invariant products: those that are the fastest of an order, though never of all.

use std::collections::BTreeSet;

use makaira::kernel::order::{BATCHES, choose_in_order, invariant_order};
use makaira::kernel::{Config, Kind, Problem, Rows};
use makaira::target::SmArch;
use makaira::weights::Group;

use super::common::oracle::Ptxas;
use super::{LAYERS, TARGETS, complaints, device, on_all_processors, report, wgmma_complaints};

#[test]
fn batch_invariant_choices_assemble() {
    let Some(ptxas) = Ptxas::find() else { return };
    let mut work: BTreeSet<(Config, SmArch)> = BTreeSet::new();
    for (sm, num_sms, l2) in [TARGETS[0], TARGETS[3]] {
        let device = device(sm, num_sms, l2);
        for (n, k) in LAYERS {
            for group in [Group::PerColumn, Group::Size(64), Group::Size(128)] {
                let problem = Problem { kind: Kind::U4B8, m: 1, n, k, group, rows: Rows::Whole };
                let order = invariant_order(&problem, &device).unwrap_or_else(|e| panic!("{e}"));
                for m in BATCHES.into_iter().chain([24, 48, 96, 192]) {
                    let choice = choose_in_order(&Problem { m, ..problem }, &device, &order);
                    let choice = choice.unwrap_or_else(|e| panic!("{e}"));
                    work.insert((choice.config, device.arch));
                }
            }
        }
    }
    let work: Vec<(Config, SmArch)> = work.into_iter().collect();
    eprintln!("{} configurations and targets", work.len());
    assert!(work.len() > 30, "only {}", work.len());
    let found = on_all_processors(&work, |(config, arch)| match config.family {
        "sm90wg" => wgmma_complaints(&ptxas, None, config),
        _ => complaints(&ptxas, None, config, *arch),
    });
    report(&found, work.len());
}
