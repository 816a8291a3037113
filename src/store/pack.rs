//! Packing a checkpoint into a store.
//!
//! One thread packs (with the help of others) while another adds up and writes, at most two tensors behind. A file that
//! lies about in the directory is taken for a plan's only if this program marked the directory for the same checkpoint,
//! by the names, sizes and times of its files; and kept only if its header is the planned one and all checksums agree.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, UNIX_EPOCH};

use super::Error;
use super::description;
use super::plan::{Contents, Plan, PlannedFile, PlannedTensor};
use super::tensors::order_bytes;
use super::write::{PartFile, io_error, is_part, list, remove, sync_directory, write_file};
use super::xxh64::xxh64;
use crate::checkpoint::{Checkpoint, INDEX, Tensors};
use crate::weights::{PackedWeights, Packing, default_threads};

/// Says that the directory is being packed into, and of what.
const MARKER: &str = "makaira-pack.lock";
const CONFIG: &str = "config.json";
/// Files beside a checkpoint's tensors that whoever runs the model wants.
const SIDE_FILES: [&str; 16] = [
    CONFIG,
    "LICENSE",
    "LICENSE.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "quantize_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// How to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackOptions {
    /// Most bytes of a file, unless one layer is larger.
    pub file_bytes: u64,
    /// Leave out all that is no quantised layer: other tensors, biases among them, and the files beside them.
    pub only_layers: bool,
    /// Threads that pack.
    pub threads: usize,
}

impl Default for PackOptions {
    fn default() -> Self {
        Self { file_bytes: 5_000_000_000, only_layers: false, threads: default_threads() }
    }
}

/// How far packing is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor that was written, or the file that was kept.
    pub what: &'a str,
    /// Bytes that are there.
    pub done_bytes: u64,
    /// Bytes that there will be.
    pub total_bytes: u64,
}

/// What packing did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackReport {
    /// Packed layers.
    pub num_layers: usize,
    /// Tensors that were carried over.
    pub num_carried: usize,
    /// Files of tensors.
    pub num_files: usize,
    /// Those that an earlier run had finished.
    pub num_kept: usize,
    /// Bytes of all tensors.
    pub total_bytes: u64,
}

/// Whether a run that packs into the directory was interrupted, or has not ended yet.
pub(super) fn is_unfinished(path: &Path) -> bool {
    path.join(MARKER).is_file() && !path.join(INDEX).is_file()
}

/// Packs a checkpoint into the directory `target`, which is made if it is not there and must be empty, unless an
/// earlier run for the same checkpoint was interrupted. `progress` hears of every tensor.
///
/// # Errors
/// [`Error::Target`] and [`Error::Busy`]; the refusal of any layer, before anything is written;
/// [`Error::Checkpoint`] with `Changed` if the checkpoint changes meanwhile; [`Error::Io`]. What was finished before an
/// error stays, for another run.
pub fn pack(
    checkpoint: &Checkpoint,
    target: &Path,
    options: &PackOptions,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<PackReport, Error> {
    let source = checkpoint.tensors().directory();
    let same = |a: &Path, b: &Path| a.canonicalize().ok().zip(b.canonicalize().ok());
    if same(source, target).is_some_and(|(source, target)| source == target) {
        let reason = "it holds the checkpoint itself".to_owned();
        return Err(Error::Target { path: target.to_owned(), reason });
    }
    let config = read_if_there(&source.join(CONFIG))?;
    let config = config.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let PackOptions { file_bytes, only_layers, threads } = *options;
    let plan = Plan::of(checkpoint, file_bytes, only_layers, config.as_deref(), threads)?;
    fs::create_dir_all(target).map_err(io_error("make the directory", target))?;
    let identity = identity(checkpoint, options)?;
    let marker = Marker::take(target, &identity)?;
    let mut report = PackReport {
        num_layers: plan.layers.len(),
        num_files: plan.files.len(),
        total_bytes: plan.total_bytes(),
        ..PackReport::default()
    };
    for name in SIDE_FILES.iter().filter(|_| !only_layers) {
        if let Some(bytes) = read_if_there(&source.join(name))? {
            write_file(target.join(name), &bytes)?;
        }
    }
    let mut headers = BTreeMap::new();
    let mut done_bytes = 0;
    let total_bytes = report.total_bytes;
    for file in &plan.files {
        let carried = file.tensors.iter().filter(|tensor| tensor.contents == Contents::Carried);
        report.num_carried += carried.count();
        let kept = finished(&target.join(&file.name), file);
        if kept.is_some() {
            report.num_kept += 1;
            done_bytes += file.data_bytes();
            progress(Progress { what: &file.name, done_bytes, total_bytes });
        }
        let header = match kept {
            Some(header) => header,
            None => {
                let path = target.join(&file.name);
                write_tensors(checkpoint, &plan, file, path, threads, &mut |tensor| {
                    done_bytes += tensor.range.end - tensor.range.start;
                    progress(Progress { what: &tensor.name, done_bytes, total_bytes });
                })?
            }
        };
        headers.insert(file.name.clone(), xxh64(&header));
    }
    // The names of the files before that of the index, which makes a store of them.
    sync_directory(target)?;
    let index = format!("{:#}\n", plan.index(&headers));
    write_file(target.join(INDEX), index.as_bytes())?;
    sync_directory(target)?;
    marker.release()?;
    Ok(report)
}

/// What a tensor consists of, on its way to the writer.
enum Payload<'a> {
    Packed(PackedWeights),
    Words(Vec<u8>),
    Mapped(&'a [u8]),
    Zeros(usize),
}

/// Writes one file and gives it its name; its header.
fn write_tensors(
    checkpoint: &Checkpoint,
    plan: &Plan,
    file: &PlannedFile,
    path: PathBuf,
    threads: usize,
    written: &mut dyn FnMut(&PlannedTensor),
) -> Result<Vec<u8>, Error> {
    let mut part = PartFile::new(path)?;
    part.write(&file.header(&BTreeMap::new()))?;
    let mut checksums = BTreeMap::new();
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(1);
        scope.spawn(move || produce(checkpoint, plan, file, threads, &sender));
        write_payloads(file, &mut part, &receiver, &mut checksums, written)
    })?;
    // Whatever was read from a file that has changed since is thrown away with the part.
    checkpoint.check_unchanged()?;
    let header = file.header(&checksums);
    part.write_first(&header)?;
    part.finish()?;
    Ok(header)
}

fn write_payloads(
    file: &PlannedFile,
    part: &mut PartFile,
    receiver: &Receiver<Result<Payload<'_>, Error>>,
    checksums: &mut BTreeMap<String, u64>,
    written: &mut dyn FnMut(&PlannedTensor),
) -> Result<(), Error> {
    for tensor in &file.tensors {
        let payload = receiver.recv().expect("one comes for each tensor, or an error")?;
        let zeros;
        let bytes = match &payload {
            Payload::Packed(packed) => packed.bytes(),
            Payload::Words(bytes) => bytes,
            Payload::Mapped(bytes) => bytes,
            Payload::Zeros(count) => {
                zeros = vec![0; *count];
                &zeros
            }
        };
        if tensor.contents != Contents::Filler {
            checksums.insert(tensor.name.clone(), xxh64(bytes));
        }
        part.write(bytes)?;
        written(tensor);
    }
    Ok(())
}

/// Sends the tensors of a file, or the first error, until nobody listens.
fn produce<'c>(
    checkpoint: &'c Checkpoint,
    plan: &Plan,
    file: &PlannedFile,
    threads: usize,
    sender: &SyncSender<Result<Payload<'c>, Error>>,
) {
    for tensor in &file.tensors {
        let payload = payload(checkpoint, plan, tensor, threads);
        let is_last = payload.is_err();
        if sender.send(payload).is_err() || is_last {
            return;
        }
    }
}

fn payload<'c>(
    checkpoint: &'c Checkpoint,
    plan: &Plan,
    tensor: &PlannedTensor,
    threads: usize,
) -> Result<Payload<'c>, Error> {
    let order = |layer: usize| {
        let order = plan.layers[layer].stored.spec.input_order();
        order_bytes(order.expect("planned only for layers with one"))
    };
    Ok(match tensor.contents {
        Contents::Packed(at) => Payload::Packed(pack_layer(checkpoint, plan, at, threads)?),
        Contents::Inputs(at) => Payload::Words(order(at)[0].clone()),
        Contents::Groups(at) => Payload::Words(order(at)[1].clone()),
        Contents::Carried => {
            Payload::Mapped(checkpoint.tensors().get(&tensor.name).expect("planned").bytes)
        }
        Contents::Filler => Payload::Zeros((tensor.range.end - tensor.range.start) as usize),
    })
}

fn pack_layer(
    checkpoint: &Checkpoint,
    plan: &Plan,
    at: usize,
    threads: usize,
) -> Result<PackedWeights, Error> {
    let planned = &plan.layers[at];
    let layer = &planned.info.name;
    let weight = checkpoint.load(layer, threads)?;
    let matrix = weight.view();
    let packing =
        Packing::of(&matrix).map_err(|source| Error::Weight { layer: layer.clone(), source })?;
    let (found, expected) = (packing.spec(), &planned.stored.spec);
    let same = found.layout() == expected.layout()
        && found.factor().to_bits() == expected.factor().to_bits()
        && found.input_order() == expected.input_order();
    if !same {
        return Err(Error::Changed { layer: layer.clone() });
    }
    Ok(PackedWeights::of_packing(&packing, threads))
}

/// The header of a file that an earlier run finished, if it is what is planned.
fn finished(path: &Path, file: &PlannedFile) -> Option<Vec<u8>> {
    let tensors = path.is_file().then(|| Tensors::open(path).ok()).flatten()?;
    let checksums = description::checksums(path, tensors.metadata(0)).ok()?;
    let header = file.header(&checksums);
    let sums_agree = || {
        checksums
            .iter()
            .all(|(name, sum)| tensors.get(name).is_some_and(|tensor| xxh64(tensor.bytes) == *sum))
    };
    let whole = tensors.header(0) == header && sums_agree() && tensors.check_unchanged().is_ok();
    if !whole {
        log::warn!("{} is not what it should be; it is written again", path.display());
    }
    whole.then_some(header)
}

/// What tells one run's work from another's: the program, the options, and the checkpoint's files.
fn identity(checkpoint: &Checkpoint, options: &PackOptions) -> Result<String, Error> {
    let PackOptions { file_bytes, only_layers, .. } = options;
    let version = env!("CARGO_PKG_VERSION");
    let mut text =
        format!("makaira {version}, files of {file_bytes}, only layers: {only_layers}\n");
    for (path, _) in checkpoint.tensors().files() {
        let data = path.metadata().map_err(io_error("read the size of", path))?;
        let modified = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let path = path.canonicalize().map_err(io_error("find", path))?;
        let nanos = modified.map_or(0, |time| time.as_nanos());
        text.push_str(&format!("{}: {} bytes, {nanos}\n", path.display(), data.len()));
    }
    Ok(text)
}

/// The mark on a directory that is being packed into; held locked.
struct Marker {
    file: File,
    path: PathBuf,
}

impl Marker {
    /// Marks the directory for this run's work, or goes on under the mark of an earlier one.
    fn take(target: &Path, identity: &str) -> Result<Self, Error> {
        let path = target.join(MARKER);
        let is_weights = |name: &str| name == INDEX || name.ends_with(".safetensors");
        if !path.exists()
            && let Some(name) = list(target, is_weights)?.first()
        {
            let reason = format!("it holds {name} already");
            return Err(Error::Target { path: target.to_owned(), reason });
        }
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io_error("create", &path))?;
        lock(&file, &path)?;
        let mut found = Vec::new();
        file.read_to_end(&mut found).map_err(io_error("read", &path))?;
        if found != identity.as_bytes() {
            if !list(target, is_weights)?.is_empty() {
                let reason = "another checkpoint, or this one with other options or as it was before \
                              a change, was packed into it and not finished";
                return Err(Error::Target { path: target.to_owned(), reason: reason.to_owned() });
            }
            let rewritten = file
                .set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| file.write_all(identity.as_bytes()))
                .and_then(|()| file.sync_all());
            rewritten.map_err(io_error("write", &path))?;
        }
        remove(target, &list(target, is_part)?)?;
        Ok(Self { file, path })
    }

    fn release(self) -> Result<(), Error> {
        fs::remove_file(&self.path).map_err(io_error("remove", &self.path))?;
        drop(self.file);
        Ok(())
    }
}

/// Locks the mark. A lock lives on for a moment in the children that other threads have just started; so it is waited
/// for a little.
fn lock(file: &File, path: &Path) -> Result<(), Error> {
    const TRIES: usize = 10;
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
            Err(TryLockError::Error(source)) => return Err(io_error("lock", path)(source)),
        }
    }
    Err(Error::Busy { path: path.parent().unwrap_or(path).to_owned() })
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_error("read", path)(error)),
    }
}
