//! Emission speed: from a configuration to checked PTX text.
//!
//! `cargo bench --bench emission`. For each row tile the configuration that is chosen for a layer of
//! 4096 x 4096 on an H200, and the two largest programs among all candidates; medians in milliseconds.

use std::hint::black_box;
use std::time::Instant;

use makaira::asm::PrintOptions;
use makaira::backend::Backend;
use makaira::emu::EmuBackend;
use makaira::kernel::{Config, Kind, Problem, Rows, select};
use makaira::weights::Group;

const REPETITIONS: usize = 15;

/// Median milliseconds of some repetitions, after one that is not counted.
fn median_ms<R>(mut work: impl FnMut() -> R) -> f64 {
    black_box(work());
    let mut ms: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            black_box(work());
            1e3 * start.elapsed().as_secs_f64()
        })
        .collect();
    ms.sort_by(f64::total_cmp);
    ms[REPETITIONS / 2]
}

fn main() {
    let emulator = EmuBackend::h200_like(132);
    let device = emulator.device();
    let build = |config: &Config| select::family_of(config).build(config, device.arch);
    let mut configs = Vec::new();
    let mut largest: Vec<(usize, Config)> = Vec::new();
    for m in [1, 2, 4, 8, 16, 32, 48, 64] {
        let problem = Problem {
            kind: Kind::U4B8,
            m,
            n: 4096,
            k: 4096,
            group: Group::Size(128),
            rows: Rows::Whole,
        };
        configs.push(select::choose(&problem, device).expect("there is a kernel").config);
        let sizes = select::candidates(&problem, device.arch).into_iter();
        largest.extend(sizes.map(|config| (build(&config).nodes().count(), config)));
    }
    largest.sort_unstable();
    configs.extend(largest.iter().rev().take(2).map(|(_, config)| *config));

    println!(
        "choosing one of all configurations, building, verifying and printing; ms, median of {REPETITIONS}"
    );
    println!("choose  build  verify  print  build+verify  instructions  PTX kB  configuration");
    let mut worst = 0.0f64;
    for config in configs {
        let m = config.tile_m.into();
        let problem = Problem {
            kind: Kind::U4B8,
            m,
            n: 4096,
            k: 4096,
            group: Group::Size(128),
            rows: Rows::Whole,
        };
        let module = build(&config);
        let options = PrintOptions { line_info: false };
        let choose = median_ms(|| select::choose(&problem, device).is_ok());
        let built = median_ms(|| build(&config));
        let verified = median_ms(|| module.verify().is_ok());
        let printed = median_ms(|| module.to_ptx(options));
        worst = worst.max(built + verified);
        println!(
            "{choose:>6.2} {built:>6.2} {verified:>7.2} {printed:>6.2} {:>13.2} {:>13} {:>7} {config}",
            built + verified,
            module.nodes().count(),
            module.to_ptx(options).len() / 1000,
        );
    }
    println!("slowest build + verify: {worst:.2} ms");
}
