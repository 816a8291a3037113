//! `makaira pack`: a checkpoint packed once, into a store that is mapped and uploaded as it is.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::bail;
use makaira::checkpoint::Checkpoint;
use makaira::store::{PackOptions, PackReport, PackedStore, pack};
use serde_json::json;

use crate::output::{Format, Progress, bytes, count};

/// Arguments of `pack`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint: a directory or a safetensors file.
    checkpoint: PathBuf,
    /// The directory to write, empty or not there yet; or that of an interrupted run, which is finished.
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Most bytes of a file, like 5GB or 512MiB.
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = size)]
    file_size: u64,
    /// Leave out embeddings, norms, biases and the files beside the tensors.
    #[arg(long)]
    only_layers: bool,
    #[command(flatten)]
    format: Format,
}

/// A number of bytes, at least one, with a unit or without.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        unit => return Err(format!("unit {unit} is none of KB, MB, GB, KiB, MiB and GiB")),
    };
    let number: Option<u64> = digits.parse().ok();
    let size = number.and_then(|number| number.checked_mul(unit)).filter(|&size| size > 0);
    size.ok_or_else(|| "write a number of bytes, like 5GB".to_owned())
}

/// Runs `pack`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let format = args.format;
    if PackedStore::is_at(&args.checkpoint) {
        bail!("{} is packed already", args.checkpoint.display());
    }
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let mut options = PackOptions::default();
    (options.file_bytes, options.only_layers) = (args.file_size, args.only_layers);
    let start = Instant::now();
    let mut progress = Progress::of_bytes();
    let report = pack(&checkpoint, &args.output, &options, &mut |at| {
        progress.reach(at.done_bytes, at.total_bytes, at.what);
    })?;
    drop(progress);
    let PackReport { num_layers, num_carried, num_files, num_kept, total_bytes } = report;
    let kept = match num_kept {
        0 => String::new(),
        _ => format!(" ({num_kept} of an earlier run)"),
    };
    format.line(format!("store     {}", args.output.display()))?;
    format.line(format!(
        "packed    {}, {} carried over",
        count(num_layers, "layer"),
        count(num_carried, "tensor")
    ))?;
    format.line(format!("files     {}{kept}, {}", count(num_files, "file"), bytes(total_bytes)))?;
    format.value(|| {
        json!({
            "checkpoint": args.checkpoint,
            "store": args.output,
            "layers": num_layers,
            "carried": num_carried,
            "files": num_files,
            "kept": num_kept,
            "bytes": total_bytes,
            "seconds": start.elapsed().as_secs_f64(),
        })
    })
}
