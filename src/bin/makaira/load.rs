//! `makaira load`: how fast a store or a checkpoint reaches the device, by each way there is.
//!
//! Every run starts with opening and ends when all layers have arrived. A cold run comes first, with what the system
//! keeps of the files dropped; then the warm ones. What arrived is compared with the files. Plain reading is the
//! yardstick: nothing is uploaded.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use makaira::checkpoint::{Checkpoint, Tensors, forget_cached};
use makaira::gemm::{Gemm, Weight};
use makaira::load::{LoadOptions, Loader};
use makaira::reference::Random;
use makaira::store::PackedStore;
use makaira::weights::{PackedWeights, default_threads};
use serde_json::{Value, json};

use crate::device::{self, Device};
use crate::output::{Format, Progress, bytes, count};
use crate::pack::size;

/// Bytes that plain reading takes at a time.
const READ_BYTES: usize = 8 << 20;

/// A way to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Reading the files, without a device.
    Read,
    /// Layer by layer: one blocking copy from the mapping, of a checkpoint after packing.
    Copy,
    /// Staging buffers filled from the mapping, of a checkpoint by packing into them.
    Ring,
    /// Staging buffers filled by plain reads.
    Reads,
}

impl Way {
    const ALL: [Self; 4] = [Self::Read, Self::Copy, Self::Ring, Self::Reads];

    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Copy => "copy",
            Self::Ring => "ring",
            Self::Reads => "reads",
        }
    }

    fn describe(self, is_store: bool) -> &'static str {
        match (self, is_store) {
            (Self::Read, _) => "plain reads, nothing uploaded",
            (Self::Copy, true) => "copies from the mapping",
            (Self::Copy, false) => "packed, then copied",
            (Self::Ring, true) => "staged from the mapping",
            (Self::Ring, false) => "packed into staging buffers",
            (Self::Reads, _) => "staged by plain reads",
        }
    }
}

impl FromStr for Way {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let way = Self::ALL.into_iter().find(|way| way.name() == text);
        way.ok_or_else(|| "write read, copy, ring or reads".to_owned())
    }
}

/// Arguments of `load`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The store or the checkpoint: a directory or a safetensors file.
    path: PathBuf,
    /// Ways to measure: read, copy, ring, reads [default: all that there are].
    #[arg(long, value_delimiter = ',')]
    way: Vec<Way>,
    /// Warm runs of each way.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Leave out the cold runs.
    #[arg(long)]
    no_cold: bool,
    /// Load everything else too: embeddings, norms, biases.
    #[arg(long)]
    others: bool,
    /// Threads [default: one per core, eight at most].
    #[arg(long)]
    threads: Option<usize>,
    /// Staging buffers of each thread.
    #[arg(long)]
    buffers: Option<usize>,
    /// Size of a staging buffer, like 4MiB.
    #[arg(long, value_parser = size)]
    buffer_size: Option<u64>,
    #[command(flatten)]
    device: device::DeviceArgs,
    #[command(flatten)]
    format: Format,
}

/// What is loaded: opened anew in every run.
enum Source {
    Store(PackedStore),
    Checkpoint(Checkpoint),
}

impl Source {
    fn open(path: &Path, is_store: bool) -> anyhow::Result<Self> {
        Ok(match is_store {
            true => Self::Store(PackedStore::open(path)?),
            false => Self::Checkpoint(Checkpoint::open(path)?),
        })
    }

    fn tensors(&self) -> &Tensors {
        match self {
            Self::Store(store) => store.tensors(),
            Self::Checkpoint(checkpoint) => checkpoint.tensors(),
        }
    }

    fn names(&self) -> Vec<&str> {
        match self {
            Self::Store(store) => store.layers().iter().map(|l| l.name.as_str()).collect(),
            Self::Checkpoint(checkpoint) => {
                checkpoint.layers().iter().map(|layer| layer.name.as_str()).collect()
            }
        }
    }

    /// The packed bytes of a layer, as they should arrive.
    fn expected(&self, name: &str) -> anyhow::Result<Vec<u8>> {
        Ok(match self {
            Self::Store(store) => store.packed(name)?.bytes().to_vec(),
            Self::Checkpoint(checkpoint) => {
                let weight = checkpoint.load(name, default_threads())?;
                let packed = PackedWeights::pack(&weight.view(), default_threads())?;
                packed.bytes().to_vec()
            }
        })
    }
}

/// Runs `load`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let format = args.format;
    let is_store = PackedStore::is_at(&args.path);
    let mut options = LoadOptions { others: args.others, ..LoadOptions::default() };
    options.threads = args.threads.unwrap_or(options.threads);
    options.buffers = args.buffers.unwrap_or(options.buffers);
    options.buffer_bytes = match args.buffer_size {
        Some(size) => usize::try_from(size).context("a buffer that no memory holds")?,
        None => options.buffer_bytes,
    };
    let device = Device::open(&args.device)?;
    let gemm = Gemm::new(device.backend.clone());
    Loader::new(&gemm, options)?; // Wrong options are told before anything is read.
    let first = Source::open(&args.path, is_store)?;
    let files: Vec<PathBuf> = first.tensors().files().map(|(path, _)| path.to_owned()).collect();
    let num_layers = first.names().len();
    drop(first);
    let LoadOptions { threads, buffers, buffer_bytes, .. } = options;
    let kind = if is_store { "store" } else { "checkpoint" };
    format.line(device.lines().join("\n"))?;
    let layers = count(num_layers, "layer");
    format.line(format!("from      {}: {kind}, {layers}", args.path.display()))?;
    format.line(format!(
        "staging   {}, each with {} of {}",
        count(threads, "thread"),
        count(buffers, "buffer"),
        bytes(buffer_bytes as u64)
    ))?;
    let ways: Vec<Way> = match args.way.is_empty() {
        // Reads fill buffers only where bytes go as they are.
        true => Way::ALL.into_iter().filter(|way| is_store || *way != Way::Reads).collect(),
        false => args.way.clone(),
    };
    if !is_store && ways.contains(&Way::Reads) {
        bail!("a checkpoint is packed on the way, from the mapping: `reads` is for stores");
    }
    let mut progress = Progress::new(ways.len() * (args.runs + usize::from(!args.no_cold)));
    let mut answers = Vec::new();
    for way in ways {
        let mut times = Times::default();
        let one = |progress: &mut Progress, what: &str| {
            progress.quiet_step(&format!("{}, {what}", way.name()));
            measure(&gemm, way, &args.path, is_store, &options)
        };
        if !args.no_cold {
            files.iter().try_for_each(|file| forget_cached(file))?;
            let (bytes, time) = one(&mut progress, "cold")?;
            (times.bytes, times.cold) = (bytes, Some(time));
        }
        for _ in 0..args.runs {
            let (bytes, time) = one(&mut progress, "warm")?;
            times.bytes = bytes;
            times.warm.push(time);
        }
        times.warm.sort_unstable();
        progress.pause(|| format.line(times.line(way.describe(is_store))))?;
        answers.push(times.to_json(way));
    }
    drop(progress);
    format.value(|| {
        json!({
            "path": args.path,
            "kind": kind,
            "device": device.to_json(),
            "layers": num_layers,
            "threads": threads,
            "buffers": buffers,
            "buffer_bytes": buffer_bytes,
            "ways": answers,
        })
    })
}

/// The times of one way.
#[derive(Default)]
struct Times {
    bytes: u64,
    cold: Option<Duration>,
    /// Sorted.
    warm: Vec<Duration>,
}

impl Times {
    fn rate(&self, time: Duration) -> f64 {
        self.bytes as f64 / time.as_secs_f64() / 1e9
    }

    fn told(&self, name: &str, time: Option<Duration>) -> String {
        let told =
            time.map(|time| format!("{:.3} s ({:.2} GB/s)", time.as_secs_f64(), self.rate(time)));
        told.map_or_else(String::new, |told| format!(", {name} {told}"))
    }

    fn line(&self, what: &str) -> String {
        let median = self.warm.get(self.warm.len() / 2).copied();
        let [cold, best] = [("cold", self.cold), ("warm at best", self.warm.first().copied())]
            .map(|(name, time)| self.told(name, time));
        format!("{what}: {}{cold}{}{best}", bytes(self.bytes), self.told("warm", median))
    }

    fn to_json(&self, way: Way) -> Value {
        let one = |time: &Duration| json!({ "seconds": time.as_secs_f64(), "gb_per_s": self.rate(*time) });
        json!({
            "way": way.name(),
            "bytes": self.bytes,
            "cold": self.cold.as_ref().map(one),
            "warm": self.warm.iter().map(one).collect::<Vec<_>>(),
        })
    }
}

/// One run: bytes and time. What arrived is compared with the files, outside the time.
fn measure(
    gemm: &Gemm,
    way: Way,
    path: &Path,
    is_store: bool,
    options: &LoadOptions,
) -> anyhow::Result<(u64, Duration)> {
    let start = Instant::now();
    let source = Source::open(path, is_store)?;
    match way {
        Way::Read => {
            let bytes = read(source.tensors(), options.threads)?;
            Ok((bytes, start.elapsed()))
        }
        Way::Copy => {
            let weights = copy(gemm, &source)?;
            let time = start.elapsed();
            check(gemm, &source, &weights)?;
            let sizes = weights.iter().map(|(_, weight)| weight.layout().total_bytes as u64);
            Ok((sizes.sum(), time))
        }
        Way::Ring | Way::Reads => {
            let options = LoadOptions { reads: way == Way::Reads, ..*options };
            let loader = Loader::new(gemm, options)?;
            let loaded = match &source {
                Source::Store(store) => loader.store(store)?,
                Source::Checkpoint(checkpoint) => loader.checkpoint(checkpoint)?,
            };
            let time = start.elapsed();
            check(gemm, &source, &loaded.weights)?;
            Ok((loaded.report.layer_bytes + loaded.report.other_bytes, time))
        }
    }
}

/// Layer by layer, each with one copy that is waited for.
fn copy(gemm: &Gemm, source: &Source) -> anyhow::Result<Vec<(String, Weight)>> {
    let mut weights = Vec::new();
    for name in source.names() {
        let weight = match source {
            Source::Store(store) => gemm.upload(store.packed(name)?)?,
            Source::Checkpoint(checkpoint) => {
                let weight = checkpoint.load(name, default_threads())?;
                gemm.upload(&PackedWeights::pack(&weight.view(), default_threads())?)?
            }
        };
        weights.push((name.to_owned(), weight));
    }
    source.tensors().check_unchanged()?;
    Ok(weights)
}

/// Compares a layer at random, and the last, with what should have arrived.
fn check(gemm: &Gemm, source: &Source, weights: &[(String, Weight)]) -> anyhow::Result<()> {
    if weights.is_empty() {
        return Ok(());
    }
    let at = (Random::new(Random::fresh_seed()).bits() % weights.len() as u64) as usize;
    for (name, weight) in [&weights[at], &weights[weights.len() - 1]] {
        let expected = source.expected(name)?;
        let mut found = vec![0; expected.len()];
        gemm.backend().download(weight.ptr(), &mut found)?;
        if found != expected {
            bail!("layer {name} did not arrive as it is in the files");
        }
    }
    Ok(())
}

/// Reads all files, with several threads; how many bytes.
fn read(tensors: &Tensors, threads: usize) -> anyhow::Result<u64> {
    let mut pieces = Vec::new();
    for file in 0..tensors.files().count() {
        let size = tensors.bytes(file).len();
        let starts = (0..size).step_by(READ_BYTES);
        pieces.extend(starts.map(|start| (file, start, READ_BYTES.min(size - start))));
    }
    let next = AtomicUsize::new(0);
    let work = || -> anyhow::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        while let Some((file, start, count)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            tensors.read_at(*file, *start, &mut buffer[..*count])?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut outcomes = workers.into_iter().map(|worker| worker.join().expect("no panic"));
        outcomes.try_for_each(|outcome| outcome)
    })?;
    Ok(pieces.iter().map(|(_, _, count)| *count as u64).sum())
}
