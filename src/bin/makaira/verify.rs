//! `makaira verify`: fails on anything doubtful in a checkpoint.
//!
//! All that `makaira inspect` reads, the codes of every layer, and with `--numerics` products of some layers on
//! the GPU or the emulator, compared with the f64 reference. A layer that cannot be read or run is a doubt, and
//! so is every finding that does not merely describe.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::bail;
use makaira::checkpoint::{Checkpoint, Finding, place};
use makaira::reference::Random;
use makaira::store::PackedStore;
use makaira::weights::default_threads;
use serde_json::{Value, json};

use crate::device::{self, Device};
use crate::inspect::{Report, finding_json, told, with_causes};
use crate::output::{Format, Progress, count};
use crate::stored;
use crate::trial::Trial;

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint, or a store of packed weights: a directory or a safetensors file.
    checkpoint: PathBuf,
    /// Multiply with some of the layers and compare with the f64 reference.
    #[arg(long)]
    pub numerics: bool,
    /// How many layers `--numerics` takes, at random.
    #[arg(long, default_value_t = 4, requires = "numerics")]
    pub layers: usize,
    /// Batch sizes that `--numerics` multiplies.
    #[arg(long, value_delimiter = ',', default_value = "1,16", requires = "numerics")]
    pub m: Vec<u32>,
    /// Seed of the choice and the activations; another one each time if not given.
    #[arg(long, requires = "numerics")]
    pub seed: Option<u64>,
    /// Where `--numerics` runs.
    #[command(flatten)]
    pub device: device::DeviceArgs,
    /// How to answer.
    #[command(flatten)]
    pub format: Format,
}

/// Something that is wrong, or may be.
struct Doubt {
    kind: &'static str,
    layer: String,
    text: String,
}

/// Runs `verify`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    // Every finding is part of the answer; the log would only repeat it.
    log::set_max_level(log::LevelFilter::Error);
    let format = args.format;
    if PackedStore::is_at(&args.checkpoint) {
        return stored::verify(&args.checkpoint, args);
    }
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let mut findings: Vec<Finding> = checkpoint.findings().to_vec();
    let mut doubts = Vec::new();
    let mut progress = Progress::new(checkpoint.layers().len());
    let mut can_run = Vec::new();
    for info in checkpoint.layers() {
        progress.quiet_step(&info.name);
        let report = Report::new(&checkpoint, info);
        let doubt = |kind, text: Option<String>| {
            text.map(|text| Doubt { kind, layer: info.name.clone(), text })
        };
        let (refused, unpackable) = (report.refused, report.unpackable);
        let is_refused = refused.is_some();
        if !is_refused && unpackable.is_none() {
            can_run.push(info.name.as_str());
        }
        doubts.extend(doubt("refused", refused));
        doubts.extend(doubt("does-not-run", unpackable));
        findings.extend(report.findings);
        if is_refused {
            continue;
        }
        match checkpoint.check_codes(&info.name, default_threads()) {
            Ok(found) => findings.extend(found),
            Err(error) => doubts.extend(doubt("refused", Some(with_causes(error.into())))),
        }
    }
    drop(progress);
    checkpoint.check_unchanged()?;
    let mut numerics = Vec::new();
    if args.numerics {
        numerics = products(args, &checkpoint, can_run, &mut doubts)?;
    }
    let (doubtful, notes): (Vec<Finding>, Vec<Finding>) =
        findings.into_iter().partition(Finding::is_doubt);
    // What is said of the layers of a place alike is said once.
    let mut alike: BTreeMap<(String, &str), usize> = BTreeMap::new();
    for doubt in &doubts {
        *alike.entry((place(&doubt.layer), &doubt.text)).or_default() += 1;
    }
    for ((layer, text), number) in alike {
        let times = if number == 1 { String::new() } else { format!(" ({number} times)") };
        format.line(format!("doubt: layer {layer}{times}: {text}"))?;
    }
    for text in told(doubtful.iter()) {
        format.line(format!("doubt: {text}"))?;
    }
    for text in told(notes.iter()) {
        format.line(format!("note: {text}"))?;
    }
    let num_doubts = doubts.len() + doubtful.len();
    format.value(|| {
        let of_layers = doubts
            .iter()
            .map(|doubt| json!({ "kind": doubt.kind, "layer": doubt.layer, "text": doubt.text }));
        json!({
            "checkpoint": args.checkpoint,
            "found": checkpoint.conventions(),
            "layers": checkpoint.layers().len(),
            "doubts": of_layers.chain(doubtful.iter().map(finding_json)).collect::<Vec<_>>(),
            "notes": notes.iter().map(finding_json).collect::<Vec<_>>(),
            "numerics": numerics,
            "ok": num_doubts == 0,
        })
    })?;
    if num_doubts > 0 {
        bail!("{} in {}", count(num_doubts, "doubt"), args.checkpoint.display());
    }
    format.line(format!("ok: {}, nothing doubtful", count(checkpoint.layers().len(), "layer")))
}

/// Multiplies with some of the layers; a product outside its bound is a doubt.
fn products(
    args: &Args,
    checkpoint: &Checkpoint,
    mut names: Vec<&str>,
    doubts: &mut Vec<Doubt>,
) -> anyhow::Result<Vec<Value>> {
    let seed = args.seed.unwrap_or_else(Random::fresh_seed);
    let mut random = Random::new(seed);
    let device = Device::open(&args.device)?;
    args.format.line(device.lines().join("\n"))?;
    args.format.line(format!("seed      {seed}"))?;
    let mut answers = Vec::new();
    for _ in 0..args.layers.min(names.len()) {
        let name = names.swap_remove((random.bits() % names.len() as u64) as usize);
        let weight = checkpoint.load(name, default_threads())?;
        let matrix = weight.view();
        let trial = Trial::new(&device, &matrix)?;
        checkpoint.check_unchanged()?;
        args.format.line(format!("layer     {name}: {} x {}", matrix.n(), matrix.k()))?;
        for m in &args.m {
            let x = random.activations(*m as usize * matrix.k());
            let outcome = trial.product("random", &x, None)?;
            args.format.line(outcome.lines().join("\n"))?;
            if !outcome.is_ok() {
                let (layer, kind) = (name.to_owned(), "numerics");
                let text = format!("the product of {m} rows is outside its bound (seed {seed})");
                doubts.push(Doubt { kind, layer, text });
            }
            let mut answer = outcome.to_json();
            answer["layer"] = json!(name);
            answers.push(answer);
        }
    }
    Ok(answers)
}
