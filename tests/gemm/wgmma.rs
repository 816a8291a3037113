//! The wgmma family: every kind of its configurations, on small layers and ragged ones.

use makaira::kernel::{Config, Conversion, Reduction, Rows, Scaling, select};
use makaira::target::SmArch;
use makaira::weights::Group;

use crate::coverage::{Shape, pairwise, run};
use crate::support::{Random, devices};

/// Configurations of the family over all its dimensions, those that are legal.
fn family() -> Vec<Config> {
    let mut family = Vec::new();
    for tile_m in [8, 16, 24, 32, 48, 64, 96, 128, 256] {
        for (tile_n, warps_n, warps_k) in [
            (64, 4, 1),
            (64, 4, 2),
            (128, 8, 1),
            (128, 4, 1),
            (192, 12, 1),
            (256, 16, 1),
            (256, 8, 1),
        ] {
            for group in [Group::PerColumn, Group::Size(32), Group::Size(64), Group::Size(128)] {
                for (rows, scaling) in [
                    (Rows::Whole, Scaling::Promote),
                    (Rows::Whole, Scaling::Fragment),
                    (Rows::Vector, Scaling::Promote),
                    (Rows::Vector, Scaling::Fragment),
                ] {
                    for (stages, runs_per_stage, ctas_per_sm) in
                        [(2, 1, 1), (3, 1, 1), (4, 1, 2), (2, 2, 1), (3, 2, 1), (5, 1, 1)]
                    {
                        family.push(Config {
                            family: "sm90wg",
                            format: "u4b8",
                            group,
                            tile_m,
                            tile_n,
                            warps_n,
                            warps_k,
                            stages,
                            runs_per_stage,
                            ctas_per_sm,
                            conversion: Conversion::Value,
                            scaling,
                            reduction: Reduction::F32,
                            rows,
                            evict_first: false,
                        });
                    }
                }
            }
        }
    }
    family.retain(|config| select::check(config, SmArch::baseline(90)).is_ok());
    family
}

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
    let stage_runs = (config.warps_k * config.runs_per_stage) as usize;
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
    let family = family();
    for device in devices().into_iter().filter(|device| device.backend.device().arch.sm == 90) {
        let mut random = Random(12);
        let picked = pairwise(&family, &mut random);
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
