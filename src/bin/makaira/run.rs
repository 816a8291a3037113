//! `makaira run`: layers of any checkpoint, multiplied and checked.

use std::path::PathBuf;

use anyhow::{Context, bail};
use makaira::checkpoint::{self, Checkpoint};
use makaira::reference::Random;
use makaira::weights::default_threads;
use serde_json::json;

use crate::device::{self, Device};
use crate::output::{Format, Progress, bytes, count};
use crate::trial::Trial;

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint: a directory or a safetensors file.
    checkpoint: PathBuf,
    /// The layer to run; several may be given.
    #[arg(long, value_name = "NAME", required_unless_present_any = ["all", "list"])]
    layer: Vec<String>,
    /// Run every quantised layer.
    #[arg(long, conflicts_with = "layer")]
    all: bool,
    /// List the quantised layers and what is odd about the files; run nothing.
    #[arg(long, conflicts_with_all = ["layer", "all"])]
    list: bool,
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    m: Vec<u32>,
    /// Seed of the random activations; another one each time if not given.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    device: device::DeviceArgs,
    #[command(flatten)]
    format: Format,
}

/// Runs `run`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let format = args.format;
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    if args.list {
        return list(&checkpoint, format);
    }
    let names: Vec<&str> = match args.all {
        true => checkpoint.layers().iter().map(|layer| layer.name.as_str()).collect(),
        false => args.layer.iter().map(String::as_str).collect(),
    };
    // Every layer is looked at before any is run.
    for name in &names {
        match checkpoint.layer(name) {
            Ok(matrix) => matrix.check_packable().with_context(|| format!("layer {name}"))?,
            Err(checkpoint::Error::NotStored { .. }) => {} // It will be rounded.
            Err(error) => return Err(error.into()),
        }
    }
    let seed = args.seed.unwrap_or_else(Random::fresh_seed);
    let device = Device::open(&args.device)?;
    format.line(device.lines().join("\n"))?;
    format.line(format!("seed      {seed}"))?;
    let mut progress = Progress::new(names.len() * args.m.len());
    let (mut layers, mut num_products, mut num_wrong) = (Vec::new(), 0, 0);
    for name in names {
        let weight = checkpoint.load(name, default_threads())?;
        let matrix = weight.view();
        let trial = Trial::new(&device, &matrix)?;
        checkpoint.check_unchanged()?;
        let (packed, time) = (trial.packed_bytes, trial.pack_time);
        let (n, k, group) = (matrix.n(), matrix.k(), matrix.group());
        progress.pause(|| {
            format.line(format!("layer     {name}: {n} x {k}, group {}", group.raw()))?;
            format.line(format!("packed    {} in {time:.1?}", bytes(packed as u64)))
        })?;
        let mut products = Vec::new();
        for m in &args.m {
            progress.step(&format!("{name}, m {m}"));
            // A layer's inputs depend on the seed and the size alone, not on what ran before.
            let x = Random::new(seed ^ u64::from(*m) << 32).activations(*m as usize * k);
            let outcome = trial.product("random", &x, None)?;
            progress.pause(|| format.line(outcome.lines().join("\n")))?;
            num_products += 1;
            num_wrong += usize::from(!outcome.is_ok());
            products.push(outcome.to_json());
        }
        layers.push(json!({
            "layer": name,
            "n": n,
            "k": k,
            "group": group.raw(),
            "packed_bytes": packed,
            "products": products,
        }));
    }
    drop(progress);
    format.value(|| {
        json!({
            "checkpoint": args.checkpoint,
            "device": device.to_json(),
            "seed": seed,
            "layers": layers,
            "ok": num_wrong == 0,
        })
    })?;
    if num_wrong > 0 {
        bail!("{num_wrong} of {} are wrong (seed {seed})", count(num_products, "product"));
    }
    format.line(format!("ok: {}, each within its bound", count(num_products, "product")))
}

fn list(checkpoint: &Checkpoint, format: Format) -> anyhow::Result<()> {
    for layer in checkpoint.layers() {
        format.line(layer.to_string())?;
    }
    let mut findings: Vec<String> = checkpoint.findings().iter().map(|f| f.to_string()).collect();
    for layer in checkpoint.layers() {
        findings.extend(checkpoint.inspect(&layer.name)?.iter().map(|f| f.to_string()));
    }
    for finding in &findings {
        format.line(format!("note: {finding}"))?;
    }
    let layers = checkpoint.layers().iter().map(|layer| {
        json!({
            "layer": layer.name,
            "n": layer.n,
            "k": layer.k,
            "group": layer.group.raw(),
            "format": layer.format.name(),
            "convention": layer.convention,
        })
    });
    format.value(|| json!({ "layers": layers.collect::<Vec<_>>(), "findings": findings }))
}
