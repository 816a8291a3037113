//! Every kind of configuration, on small layers.
//!
//! The full product of the configuration space has thousands of members. [`pairwise`] picks few of them
//! such that every two values that occur together in a legal configuration occur together in one that
//! is run.

use std::collections::HashSet;

use makaira::kernel::select;
use makaira::kernel::{Config, Kind, Problem, Reduction, Rows};
use makaira::target::SmArch;
use makaira::weights::Group;

use crate::family::{pairs, pairwise};
use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
    devices,
};

/// All configurations of a target for batches of every tile, all groups and rows; the in-place reduction
/// as well, which the selection does not choose by itself.
fn family(target: SmArch) -> Vec<Config> {
    let mut family = Vec::new();
    for m in [1, 2, 4, 8, 16, 32, 48, 64] {
        for group in [Group::PerColumn, Group::Size(32), Group::Size(64), Group::Size(128)] {
            for rows in [Rows::Whole, Rows::Vector, Rows::Element] {
                let problem = Problem { kind: Kind::U4B8, m, n: 4096, k: 4096, group, rows };
                // The wgmma family has a test of its own, with shapes that its stages allow.
                let candidates = select::candidates(&problem, target).into_iter();
                for config in candidates.filter(|config| config.family != "sm90wg") {
                    family.push(config);
                    let in_place = Config { reduction: Reduction::F16InPlace, ..config };
                    if select::check(&in_place, target).is_ok() {
                        family.push(in_place);
                    }
                }
            }
        }
    }
    family
}

/// A product's sizes and how it is cut.
pub struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub stripe: u32,
}

/// A layer and a stripe length that make a configuration work: two or three output tiles, the last one
/// ragged; stripes that begin and end inside tiles.
fn shape(config: &Config, random: &mut Random) -> Shape {
    let tile_m = config.tile_m as usize;
    // Below the tile, the tile itself, or a second row tile.
    let m = match random.below(3) {
        0 if tile_m > 1 => tile_m / 2 + 1 + random.below(tile_m / 2),
        1 => tile_m + 1,
        _ => tile_m,
    };
    let tile_n = config.tile_n as usize;
    let num_tiles = if tile_n > 128 { 2 } else { 3 };
    // From one run for some teams to rings that are filled twice.
    let most = (config.warps_k * 2 * config.stages).min(40) as usize;
    let k_tiles = 2 + random.below(most);
    let (n, k) = match config.rows {
        Rows::Whole => (num_tiles * tile_n - 4 * random.below(8), 128 * k_tiles),
        Rows::Vector => (num_tiles * tile_n - 4 * random.below(8), 128 * k_tiles - 32),
        Rows::Element if config.group == Group::PerColumn => {
            (num_tiles * tile_n - random.below(32), 128 * k_tiles - 1 - random.below(30))
        }
        Rows::Element => (num_tiles * tile_n - random.below(32), 128 * k_tiles - 32),
    };
    // Groups must be whole.
    let k = match config.group {
        Group::Size(size) => k.next_multiple_of(size as usize),
        Group::PerColumn => k,
    };
    let num_runs = num_tiles * k.div_ceil(128);
    let stripe = 1 + num_runs / 7 + random.below(num_runs.div_ceil(3));
    Shape { m, n, k, stripe: stripe as u32 }
}

/// Runs a configuration twice on a fresh layer of a shape that suits it, and checks everything.
pub fn run(device: &Device, config: Config, seed: u64, shape: fn(&Config, &mut Random) -> Shape) {
    let mut random = Random(seed);
    let Shape { m, n, k, stripe } = shape(&config, &mut random);
    let fill = random.pick(&[Fill::Ascending, Fill::Integers, Fill::Random]);
    let layer = Layer::new(n, k, config.group.raw(), fill, &mut random);
    let a = activations(m, k, fill, &mut random);
    let what = format!("{config} m={m} n={n} k={k} stripe={stripe} {fill:?} seed={seed}");
    assert_eq!(layer.group, config.group, "{what}: more than one group");
    let setup = Setup::new(device, layer);
    let prepared = setup.prepare(config, stripe, m);
    let workspace = setup.workspace(&prepared.choice, m);
    let spread = match config.rows {
        Rows::Element => Spread { a_gap: 3, c_gap: 5, a_shift: 1, c_shift: 7 },
        _ => CANARIES,
    };
    let tolerance = Tolerance::of(fill, &config, k, stripe);
    let problem = setup.problem(m, config.rows);
    let locks = select::plans(&config, &problem, stripe).map(|plan| plan.num_locks).max();
    let mut first = None;
    // Twice: the second launch finds what the first left in the workspace.
    for _ in 0..2 {
        let c = setup
            .run_with(&prepared, &a, spread, &workspace)
            .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
        assert!(setup.locks_are_zero(&workspace, locks.unwrap_or(0)), "{what}: a lock is set");
        if let Some(emu) = &device.emu {
            let report = emu.last_report().expect("a launch has finished");
            let conflicts = report.total.conflict_wavefronts;
            assert_eq!(conflicts, 0, "{what}: bank conflicts\n{report}");
        }
        match &first {
            None => {
                let error = compare(&setup.layer, &a, &c, tolerance)
                    .unwrap_or_else(|why| panic!("{what}: {why}"));
                println!("{what}: {error:.1e}");
                first = Some(c);
            }
            Some(first) => assert_eq!(first, &c, "{what}: the second launch differs"),
        }
    }
}

fn run_share(share: usize) {
    for device in devices() {
        let family = family(device.backend.device().arch);
        let mut random = Random(11);
        let mut picked = Vec::new();
        for _ in 0..2 {
            picked.extend(pairwise(&family, |bound| random.below(bound)));
        }
        assert!(picked.len() > 80, "the family has shrunk to {}", family.len());
        println!("{} of {} configurations", picked.len(), family.len());
        for (idx, config) in picked.into_iter().enumerate().filter(|(idx, _)| idx % 2 == share) {
            run(&device, config, 1000 + idx as u64, shape);
        }
    }
}

#[test]
fn every_pair_of_values_even_half() {
    run_share(0);
}

#[test]
fn every_pair_of_values_odd_half() {
    run_share(1);
}

#[test]
fn the_picked_configurations_have_every_pair() {
    let family = family(SmArch::baseline(80));
    let mut random = Random(5);
    let picked = pairwise(&family, |bound| random.below(bound));
    let all: HashSet<[u32; 4]> = family.iter().flat_map(pairs).collect();
    let had: HashSet<[u32; 4]> = picked.iter().flat_map(pairs).collect();
    assert_eq!(all, had);
    assert!(picked.len() < 120, "{} are not few", picked.len());
}
