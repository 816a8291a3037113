//! `makaira demo`: the whole way, on a layer that is part of this program.
//!
//! The layer's files are written to a temporary folder and memory-mapped like any checkpoint's. Each batch
//! size runs with the layer's recorded inputs, as far as there are that many, and with fresh random ones.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use half::f16;
use makaira::checkpoint::{Checkpoint, Dtype, Tensors};
use makaira::reference::Random;
use serde_json::json;

use crate::device::{self, Device};
use crate::output::{Format, bytes, count};
use crate::trial::{Golden, Trial};

/// The files of the shipped layer.
const FILES: [(&str, &[u8]); 3] = [
    ("config.json", include_bytes!("../../../assets/demo/config.json")),
    ("model.safetensors", include_bytes!("../../../assets/demo/model.safetensors")),
    (GOLDENS, include_bytes!("../../../assets/demo/goldens.safetensors")),
];
const GOLDENS: &str = "goldens.safetensors";

/// Arguments of `demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 7, 16, 33])]
    m: Vec<u32>,
    /// Seed of the random activations; another one each time if not given.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    device: device::DeviceArgs,
    #[command(flatten)]
    format: Format,
}

/// Runs `demo`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let format = args.format;
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    for (name, bytes) in FILES {
        let path = folder.path().join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let checkpoint = Checkpoint::open(&folder.path().join("model.safetensors"))?;
    let layer = checkpoint.layers().first().context("the shipped checkpoint has no layer")?;
    let golden = goldens(&folder.path().join(GOLDENS), &layer.name)?;
    let seed = args.seed.unwrap_or_else(Random::fresh_seed);
    let device = Device::open(&args.device)?;
    format.line(format!("layer     {layer}"))?;
    format.line(device.lines().join("\n"))?;
    let trial = Trial::new(&device, &checkpoint.layer(&layer.name)?)?;
    let (packed, time) = (trial.packed_bytes, trial.pack_time);
    format.line(format!("packed    {} in {time:.1?}", bytes(packed as u64)))?;
    format.line(format!("seed      {seed}"))?;
    let mut random = Random::new(seed);
    let mut outcomes = Vec::new();
    for m in args.m.iter().map(|m| *m as usize) {
        if let (Some(x), Some(y)) = (golden.x.get(..m * layer.k), golden.y.get(..m * layer.n)) {
            outcomes.push(trial.product("recorded", x, Some(y))?);
            format.line(outcomes[outcomes.len() - 1].lines().join("\n"))?;
        }
        outcomes.push(trial.product("random", &random.activations(m * layer.k), None)?);
        format.line(outcomes[outcomes.len() - 1].lines().join("\n"))?;
    }
    let num_wrong = outcomes.iter().filter(|outcome| !outcome.is_ok()).count();
    format.value(|| {
        json!({
            "layer": layer.name,
            "n": layer.n,
            "k": layer.k,
            "group": layer.group.raw(),
            "device": device.to_json(),
            "packed_bytes": packed,
            "seed": seed,
            "products": outcomes.iter().map(|outcome| outcome.to_json()).collect::<Vec<_>>(),
            "ok": num_wrong == 0,
        })
    })?;
    if num_wrong > 0 {
        bail!("{num_wrong} of {} are wrong (seed {seed})", count(outcomes.len(), "product"));
    }
    format.line(format!("ok: {}, each within its bound", count(outcomes.len(), "product")))
}

/// The recorded inputs and outputs of a layer.
fn goldens(path: &Path, layer: &str) -> anyhow::Result<Golden> {
    let tensors = Tensors::open(path)?;
    let tensor = |suffix: &str, dtype| {
        let name = format!("{layer}.{suffix}");
        let tensor = tensors.get(&name).filter(|tensor| tensor.dtype == dtype);
        tensor.with_context(|| format!("{} has no {dtype:?} tensor {name}", path.display()))
    };
    let x = tensor("x", Dtype::F16)?.bytes.chunks_exact(2);
    let y = tensor("y", Dtype::F32)?.bytes.chunks_exact(4);
    Ok(Golden {
        x: x.map(|pair| f16::from_le_bytes([pair[0], pair[1]])).collect(),
        y: y.map(|quad| f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]])).collect(),
    })
}
