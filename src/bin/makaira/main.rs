//! The command line.
//!
//! One file a command, each with its arguments and a `run`. What commands share: the device to run on
//! (`device.rs`), the product of one layer and its check (`trial.rs`), texts and progress (`output.rs`).
//! Results go to stdout, as text or with `--json` as one JSON value; everything else goes to stderr. The exit
//! code is 0 for success, 1 for failure (a wrong product is one) and 2 for wrong usage.

mod bench;
mod cache;
mod demo;
mod device;
mod doctor;
mod explain;
mod inspect;
mod load;
mod output;
mod pack;
mod problem;
mod ptx;
mod run;
mod stored;
mod synth;
mod trial;
mod tune;
mod verify;

use std::process::{Command as Process, ExitCode};

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Marlin W4A16 kernels: emit, explain, run and check them, with a GPU or without.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    /// Compile every kernel anew: neither our store nor the driver's cache is used.
    #[arg(long, global = true)]
    no_cache: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a layer of a real checkpoint and compare it with the f64 reference.
    Demo(demo::Args),
    /// Run layers of a checkpoint and compare them with the f64 reference.
    Run(run::Args),
    /// Say what is in a checkpoint: format, layers, what is odd, what can be cut and run.
    Inspect(inspect::Args),
    /// Fail on anything doubtful in a checkpoint.
    Verify(verify::Args),
    /// Pack a checkpoint into a store that is mapped and uploaded as it is.
    Pack(pack::Args),
    /// Time how a store or a checkpoint gets to the device, by every way there is.
    Load(load::Args),
    /// Write a checkpoint of a model's size with random weights.
    #[command(hide = true)]
    Synth(synth::Args),
    /// Print the PTX of a problem's kernel or of a configuration.
    Ptx(ptx::Args),
    /// Say which configuration a problem gets, and why.
    Explain(explain::Args),
    /// Time products, the answers checked first.
    Bench(bench::Args),
    /// Measure the candidates for your layers on this card and keep the winners.
    Tune(tune::Args),
    /// Say what this machine can run, and why not.
    Doctor(doctor::Args),
    /// List or clear the compiled kernels on disk.
    Cache(cache::Args),
}

fn main() -> ExitCode {
    let level = env_logger::Env::default().default_filter_or("warn");
    env_logger::Builder::from_env(level).format_timestamp(None).format_target(false).init();
    let cli = Cli::parse();
    let outcome = match restart_without_caches(&cli) {
        Ok(Some(code)) => return code,
        Ok(None) => dispatch(cli.command),
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Pack(args) => pack::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Ptx(args) => ptx::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Cache(args) => cache::run(&args),
    }
}

/// With `--no-cache`: runs this program again with both caches off. The driver looks at its variable when it
/// is loaded, and a process cannot safely change its own environment.
fn restart_without_caches(cli: &Cli) -> anyhow::Result<Option<ExitCode>> {
    const OFF: [(&str, &str); 2] = [("MAKAIRA_NO_CACHE", "1"), ("CUDA_CACHE_DISABLE", "1")];
    let is_off = |(name, value): &(&str, &str)| std::env::var(name).is_ok_and(|v| v == *value);
    if !cli.no_cache || OFF.iter().all(is_off) {
        return Ok(None);
    }
    let program = std::env::current_exe().context("cannot find this program again")?;
    let status = Process::new(program)
        .args(std::env::args_os().skip(1))
        .envs(OFF)
        .status()
        .context("cannot start this program again")?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(Some(code.map_or(ExitCode::FAILURE, ExitCode::from)))
}
