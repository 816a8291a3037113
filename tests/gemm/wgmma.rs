//! The wgmma family: every kind of its configurations, on small layers and ragged ones.

use makaira::kernel::{Config, Rows};
use makaira::weights::Group;

use crate::coverage::{Shape, run};
use crate::family::{pairwise, wgmma};
use crate::support::{Random, devices};

/// A layer and a stripe length that make a configuration work: two tiles, the last one ragged; stripes that
/// begin and end inside tiles where stages allow it.
fn shape(config: &Config, random: &mut Random) -> Shape {
    let tile_m = config.tile_m as usize;
    let m = match random.below(3) {
        0 => tile_m / 2 + 1 + random.below(tile_m / 2),
        1 => tile_m + 1 + random.below(tile_m),
        _ => tile_m,
    };
    let n = 2 * config.tile_n as usize - 4 * random.below(8);
    let stage_runs = (config.warps_k * config.runs_per_stage * config.cluster_k) as usize;
    let rounds = 2 + random.below(2 * config.stages as usize);
    let k = 128 * stage_runs * rounds - if config.rows == Rows::Vector { 32 } else { 0 };
    let k = match config.group {
        Group::Size(size) => k.next_multiple_of(size as usize),
        Group::PerColumn => k,
    };
    let num_rounds = 2 * m.div_ceil(tile_m) * rounds;
    let stripe = stage_runs * (1 + num_rounds / 5 + random.below(num_rounds.div_ceil(2)));
    Shape { m, n, k, stripe: stripe as u32 }
}

fn run_share(share: usize) {
    let family = wgmma();
    for device in devices().into_iter().filter(|device| device.backend.device().arch.sm == 90) {
        let mut random = Random(12);
        let picked = pairwise(&family, |bound| random.below(bound));
        assert!(picked.len() > 40, "the family has shrunk to {}", family.len());
        println!("{} of {} configurations", picked.len(), family.len());
        for (idx, config) in picked.into_iter().enumerate().filter(|(idx, _)| idx % 2 == share) {
            let seed = 3000 + idx as u64;
            run(&device, config, seed, shape);
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
