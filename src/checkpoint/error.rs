//! What can be wrong with a checkpoint: files, headers, indices, configurations and contents.

use std::path::PathBuf;

use super::Dtype;
use crate::weights;

/// A refusal of this room. Every message names the file or tensor, the rule and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The file ends before its header says.
    #[error(
        "{} is cut short: expected {expected} bytes by its header, found {found}; fetch it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes that the part read so far demands.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },

    /// The file is not what it was when it was opened.
    #[error(
        "{} changed while it was read ({opened} bytes when it was opened, {found} now): nothing that \
         was read from it can be trusted; open it again",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its bytes when it was opened.
        opened: u64,
        /// Its bytes now.
        found: u64,
    },

    /// Bytes follow the last tensor.
    #[error(
        "{} has {extra} bytes after its last tensor ({expected} bytes expected by its header, \
         found {found}); such files are refused: rewrite it with its own tool",
        path.display()
    )]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// Bytes that the header accounts for.
        expected: u64,
        /// Bytes of the file.
        found: u64,
        /// The difference.
        extra: u64,
    },

    /// The header is not one of a safetensors file.
    #[error("{} has no valid safetensors header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// One tensor of the header is impossible.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    TensorEntry {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A directory without weights that could be chosen.
    #[error(
        "{} holds neither model.safetensors.index.json nor model.safetensors; pass the path of the \
         safetensors file to open",
        path.display()
    )]
    NoModel {
        /// The directory.
        path: PathBuf,
    },

    /// The files hold packed weights, which are no source of a checkpoint's.
    #[error(
        "{} holds weights that are packed already; open it as a packed store",
        path.display()
    )]
    Packed {
        /// The file or directory.
        path: PathBuf,
    },

    /// The shard index is not what such a file must be.
    #[error("shard index {}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The index names a shard that is not there.
    #[error(
        "shard index {} names {shard} (for tensor {tensor}), which is not in the directory; fetch \
         the shard or drop the stale index",
        path.display()
    )]
    ShardMissing {
        /// The index.
        path: PathBuf,
        /// The absent shard.
        shard: String,
        /// One tensor that the shard should hold.
        tensor: String,
    },

    /// A tensor is not in the shard that the index names.
    #[error(
        "shard index {} says that {shard} holds tensor {tensor}, but it does not",
        path.display()
    )]
    NotInShard {
        /// The index.
        path: PathBuf,
        /// The shard named by the index.
        shard: String,
        /// The tensor.
        tensor: String,
    },

    /// A shard holds a tensor that the index does not place there.
    #[error(
        "shard {shard} holds tensor {tensor}, which index {} {}; index and shards come from \
         different savings",
        path.display(),
        placed.as_ref().map_or_else(|| "does not list".to_owned(), |p| format!("places in {p}"))
    )]
    NotInIndex {
        /// The index.
        path: PathBuf,
        /// The shard that holds the tensor.
        shard: String,
        /// The tensor.
        tensor: String,
        /// Where the index places it, if anywhere.
        placed: Option<String>,
    },

    /// A layer of a plain checkpoint has no stored codes.
    #[error(
        "layer {layer} is not quantised in this checkpoint, so there is nothing to view; load it, \
         which rounds it to 4 bits"
    )]
    NotStored {
        /// The layer.
        layer: String,
    },

    /// The configuration names one format and the tensors are of another.
    #[error(
        "{} says {label}, but tensor {tensor} is one of a {found} layer; correct the \
         configuration, or fetch the checkpoint again",
        path.display()
    )]
    LabelDisagrees {
        /// The configuration file.
        path: PathBuf,
        /// What it says.
        label: String,
        /// The convention of the tensors.
        found: &'static str,
        /// One of them.
        tensor: String,
    },

    /// A configuration file is no JSON object of the expected form.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// The checkpoint says that it is something this crate does not read.
    #[error("{} says {found}; {rule}", path.display())]
    Unsupported {
        /// The configuration file.
        path: PathBuf,
        /// The field and its value.
        found: String,
        /// What is supported.
        rule: &'static str,
    },

    /// There is no quantised layer of that name.
    #[error("no quantised layer {name}; {}", nearest.as_ref().map_or_else(
        || "the checkpoint holds none".to_owned(), |n| format!("did you mean {n}?")))]
    NoLayer {
        /// The name asked for.
        name: String,
        /// The most similar name there is.
        nearest: Option<String>,
    },

    /// A tensor that the layer needs is absent.
    #[error("tensor {tensor} is missing; {convention} layers need it")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The convention that needs it.
        convention: &'static str,
    },

    /// A tensor has another element type than the convention says.
    #[error("tensor {tensor} is {found:?}, expected {}", dtypes(expected))]
    TensorDtype {
        /// The tensor.
        tensor: String,
        /// The types of the convention.
        expected: Vec<Dtype>,
        /// The type in the file.
        found: Dtype,
    },

    /// A tensor has another shape than its neighbours demand.
    #[error("tensor {tensor} has shape {found:?}, expected {expected}")]
    TensorShape {
        /// The tensor.
        tensor: String,
        /// The shape expected, in words.
        expected: String,
        /// The shape in the file.
        found: Vec<usize>,
    },

    /// An entry of `g_idx` points outside the scale table.
    #[error("tensor {tensor}, row {row}: group index {value} is outside 0..{num_groups}")]
    GroupIndex {
        /// The tensor.
        tensor: String,
        /// The offending row.
        row: usize,
        /// The entry.
        value: i32,
        /// Number of groups.
        num_groups: usize,
    },

    /// A stored zero is not the symmetric one.
    #[error(
        "tensor {tensor}, group {group_idx}, column {column}: stored zero {found}, expected \
         {expected} of a symmetric {label} layer; if the zeros are right, the configuration must say \
         that the weights are not symmetric"
    )]
    Zeros {
        /// The tensor.
        tensor: String,
        /// Row of the tensor.
        group_idx: usize,
        /// Output column.
        column: usize,
        /// The stored zero.
        found: u8,
        /// The stored zero of a symmetric checkpoint of that label.
        expected: u8,
        /// The checkpoint format by its configuration.
        label: &'static str,
    },

    /// Scales are NaN or infinite.
    #[error(
        "tensor {tensor} has {count} scales that are not finite, the first is {value} at group \
         {group_idx}, column {column}; the quantiser that wrote it failed there"
    )]
    BadScales {
        /// The tensor.
        tensor: String,
        /// Row of the first bad scale.
        group_idx: usize,
        /// Column of the first bad scale.
        column: usize,
        /// Its value.
        value: f32,
        /// How many there are.
        count: usize,
    },

    /// A global scale is no number that weights could be divided by.
    #[error("tensor {tensor} is {value}: a global scale is positive and finite")]
    GlobalScale {
        /// The tensor.
        tensor: String,
        /// Its value.
        value: f32,
    },

    /// The weight itself is illegal.
    #[error("layer {layer} cannot be used")]
    Weight {
        /// The layer.
        layer: String,
        /// The rule that it breaks.
        source: weights::Error,
    },
}

/// "F16, BF16 or F32".
fn dtypes(list: &[Dtype]) -> String {
    let names: Vec<String> = list.iter().map(|dtype| format!("{dtype:?}")).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => "nothing".to_owned(),
    }
}
