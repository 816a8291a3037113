//! Configurations to test a family with, and few of them that stand for all.

use std::collections::HashSet;

use makaira::kernel::{
    Config, Conversion, FAMILIES, Kind, Reduction, Rows, Scaling, Start, select,
};
use makaira::target::SmArch;
use makaira::weights::Group;

/// Configurations of the wgmma family over all its dimensions, those that are legal.
pub fn wgmma() -> Vec<Config> {
    let mut family = Vec::new();
    for tile_m in [8, 16, 24, 32, 48, 64, 96, 128, 192, 256] {
        for (tile_n, warps_n, warps_k) in [
            (64, 4, 1),
            (64, 4, 2),
            (64, 4, 4),
            (128, 4, 1),
            (128, 4, 2),
            (128, 8, 1),
            (128, 8, 2),
            (192, 12, 1),
            (256, 8, 1),
            (256, 8, 2),
            (256, 16, 1),
        ] {
            for group in [Group::PerColumn, Group::Size(32), Group::Size(64), Group::Size(128)] {
                for (rows, scaling) in [
                    (Rows::Whole, Scaling::Promote),
                    (Rows::Whole, Scaling::Fragment),
                    (Rows::Vector, Scaling::Promote),
                    (Rows::Vector, Scaling::Fragment),
                ] {
                    for (stages, runs_per_stage, ctas_per_sm, cluster_k) in [
                        (2, 1, 1, 1),
                        (3, 1, 1, 1),
                        (4, 1, 2, 1),
                        (2, 2, 1, 1),
                        (3, 2, 1, 1),
                        (5, 1, 1, 1),
                        (3, 1, 1, 2),
                        (4, 1, 2, 2),
                        (2, 2, 1, 2),
                    ] {
                        family.push(Config {
                            family: "sm90wg",
                            kind: Kind::U4B8,
                            group,
                            tile_m,
                            tile_n,
                            warps_n,
                            warps_k,
                            stages,
                            runs_per_stage,
                            ctas_per_sm,
                            cluster_k,
                            start: Start::Full,
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

/// A configuration's values, one number a dimension.
fn values(config: &Config) -> [u32; 15] {
    let family = FAMILIES.iter().position(|family| family.name() == config.family);
    [
        family.expect("a registered family") as u32,
        config.conversion as u32,
        config.tile_m,
        config.warps_n,
        config.warps_k,
        config.tiles_per_warp(),
        config.stages,
        config.runs_per_stage,
        config.ctas_per_sm,
        config.cluster_k,
        config.start as u32,
        config.scaling as u32,
        config.reduction as u32,
        config.rows as u32,
        config.group.raw() as u32,
    ]
}

/// The pairs of values of a configuration, as numbers: two dimensions and their values.
pub fn pairs(config: &Config) -> impl Iterator<Item = [u32; 4]> {
    let values = values(config);
    (0..values.len())
        .flat_map(move |i| (0..i).map(move |j| [i as u32, j as u32, values[i], values[j]]))
}

/// Few configurations that have every pair of values that any has. `below` gives random numbers.
pub fn pairwise(family: &[Config], mut below: impl FnMut(usize) -> usize) -> Vec<Config> {
    let mut missing: HashSet<[u32; 4]> = family.iter().flat_map(pairs).collect();
    let mut picked = Vec::new();
    while !missing.is_empty() {
        // The best of a few that have one of the missing pairs.
        let wanted = *missing.iter().min().expect("it is not empty");
        let having: Vec<&Config> =
            family.iter().filter(|config| pairs(config).any(|pair| pair == wanted)).collect();
        let gain = |config: &Config| pairs(config).filter(|pair| missing.contains(pair)).count();
        let best = (0..40).map(|_| *having[below(having.len())]).max_by_key(gain);
        let best = best.expect("some configuration had the pair");
        pairs(&best).for_each(|pair| {
            missing.remove(&pair);
        });
        picked.push(best);
    }
    picked
}
