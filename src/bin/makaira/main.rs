//! The command line.

mod bench;

use clap::Parser;

/// Marlin W4A16 kernels: tools.
#[derive(Debug, Parser)]
#[command(version)]
enum Command {
    Bench(bench::Args),
}

fn main() -> anyhow::Result<()> {
    env_logger::init();
    match Command::parse() {
        Command::Bench(args) => bench::run(&args),
    }
}
