//! `makaira ptx`: kernels as PTX text.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail};
use makaira::asm::{Module, PrintOptions};
use makaira::kernel::{Config, GOLDENS, select};
use makaira::target::SmArch;
use serde_json::json;

use crate::output::{Format, Progress, count, write};
use crate::{device, problem};

/// Arguments of `ptx`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["config", "m", "all"])))]
pub struct Args {
    /// A configuration's name, instead of a problem.
    config: Option<Config>,
    #[command(flatten)]
    problem: problem::ProblemArgs,
    /// The target that the text is written for: sm_80 if not given, with --all each configuration's own.
    #[arg(long)]
    target: Option<SmArch>,
    /// Streaming multiprocessors of the card to choose for; those of a typical one if not given.
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["config", "all"])]
    sms: Option<u32>,
    /// Carry the Rust lines that emitted each instruction, for a profiler's source page.
    #[arg(long)]
    lineinfo: bool,
    /// Write the text to this file.
    #[arg(short, long, value_name = "FILE", conflicts_with = "all")]
    output: Option<PathBuf>,
    /// Write every configuration of the golden set to a file of its name in this folder.
    #[arg(long, value_name = "FOLDER")]
    all: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

impl Args {
    fn target(&self) -> SmArch {
        self.target.unwrap_or(SmArch::baseline(80))
    }
}

/// Runs `ptx`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(folder) = &args.all {
        return all(args, folder);
    }
    let config = match args.config {
        Some(config) => config,
        None => chosen(args)?,
    };
    let module = build(&config, args.target())?;
    let text = module.to_ptx(PrintOptions { line_info: args.lineinfo });
    if let Some(path) = &args.output {
        fs::write(path, &text).with_context(|| format!("cannot write {}", path.display()))?;
        let what = format!("{config} for {}", args.target());
        args.format.line(format!("{}: {what}", path.display()))?;
    } else if !args.format.json {
        write(&text)?;
    }
    args.format.value(|| {
        json!({
            "config": config.to_string(),
            "target": args.target().to_string(),
            "version": module.isa().to_string(),
            "file": args.output,
            "ptx": args.output.is_none().then_some(text),
        })
    })
}

/// The verified kernel of a configuration that is legal on the target.
fn build(config: &Config, target: SmArch) -> anyhow::Result<Module> {
    select::check(config, target)?;
    let module = select::family_of(config).build(config, target);
    module.verify()?;
    Ok(module)
}

/// The configuration that the problem gets on a typical card of the target.
fn chosen(args: &Args) -> anyhow::Result<Config> {
    let mut spec = device::typical(args.target())?;
    match args.sms {
        Some(0) => bail!("--sms 0: a card has at least one"),
        Some(num_sms) => spec.num_sms = num_sms,
        None => {}
    }
    Ok(select::choose(&args.problem.problem()?, &spec)?.config)
}

fn all(args: &Args, folder: &PathBuf) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // On a target that is given, those of families that run on it.
    let mut goldens = Vec::new();
    for (name, own_target, _) in GOLDENS {
        let config: Config = name.parse()?;
        let target = args.target.unwrap_or(*own_target);
        if select::family_of(&config).runs_on(target) {
            goldens.push((name, config, target));
        }
    }
    let mut progress = Progress::new(goldens.len());
    let mut files = Vec::new();
    for (name, config, target) in goldens {
        progress.step(name);
        let text = build(&config, target)?.to_ptx(PrintOptions { line_info: args.lineinfo });
        let path = folder.join(name).with_extension("ptx");
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        files.push(path);
    }
    drop(progress);
    let what = count(files.len(), "configuration");
    args.format.line(format!("{what} written to {}", folder.display()))?;
    args.format.value(|| json!({ "files": files }))
}
