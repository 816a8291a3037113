//! Every kernel that the selection may choose is correct PTX and quickly made.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use makaira::kernel::select::{candidates, family_of};
use makaira::kernel::{Config, Kind, Problem, Rows};
use makaira::target::SmArch;
use makaira::weights::Group;

const TARGETS: [u16; 4] = [80, 86, 89, 90];

/// Every configuration for problems of all row tiles, groups and ways to access rows.
fn configs(target: SmArch) -> BTreeSet<Config> {
    let mut configs = BTreeSet::new();
    for m in [1, 2, 4, 8, 16, 32, 48, 64, 1000] {
        for group in [Group::PerColumn, Group::Size(128)] {
            for rows in [Rows::Whole, Rows::Vector, Rows::Element] {
                configs.extend(candidates(
                    &Problem { kind: Kind::U4B8, m, n: 4096, k: 4096, group, rows },
                    target,
                ));
            }
        }
    }
    configs
}

#[test]
fn every_candidate_verifies() {
    let mut seen = BTreeSet::new();
    let mut refused = Vec::new();
    for target in TARGETS.map(SmArch::baseline) {
        for config in configs(target).into_iter().filter(|config| seen.insert(*config)) {
            if let Err(found) = family_of(&config).build(&config, target).verify() {
                refused.push(format!("{target} {config}: {found}"));
            }
        }
    }
    let first = refused[..refused.len().min(5)].join("\n");
    assert!(seen.len() > 100, "only {} candidates", seen.len());
    assert!(refused.is_empty(), "{} of {}:\n{first}", refused.len(), seen.len());
}

/// Emission and verification of the largest kernel stay below 10 ms.
#[test]
fn kernels_are_emitted_and_verified_quickly() {
    let target = SmArch::baseline(90);
    let of = |config: &Config| family_of(config).build(config, target);
    let largest = configs(target)
        .into_iter()
        .max_by_key(|config| of(config).nodes().count())
        .expect("there are candidates");
    let best = |work: &dyn Fn()| {
        let once = |_| {
            let start = Instant::now();
            work();
            start.elapsed()
        };
        (0..9).map(once).min().expect("nine runs")
    };
    let module = of(&largest);
    let emit = best(&|| drop(std::hint::black_box(of(&largest))));
    let verify = best(&|| module.verify().expect("it is correct"));
    eprintln!("emit {emit:?} verify {verify:?}");
    let best = emit + verify;
    eprintln!("{largest}: {} instructions, {best:?}", of(&largest).nodes().count());
    assert!(best < Duration::from_millis(10), "{largest} took {best:?}");
}
