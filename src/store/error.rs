//! What can be wrong with a store of packed weights, and with making one.

use std::path::PathBuf;

use crate::{checkpoint, weights};

/// A refusal of this room. Every message names the file or layer, the rule and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The files themselves, or the checkpoint that is packed.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),

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

    /// The files hold no packed weights.
    #[error(
        "{} is no store of packed weights: it does not say {}; `makaira pack` makes one of a checkpoint",
        path.display(), checkpoint::PACKED_KEY
    )]
    NotAStore {
        /// The file.
        path: PathBuf,
    },

    /// Packing was interrupted.
    #[error(
        "packing into {} was not finished; run it again with the same arguments, finished files are \
         kept",
        path.display()
    )]
    Unfinished {
        /// The directory.
        path: PathBuf,
    },

    /// The store was written by another version of the file format or the packed layout.
    #[error(
        "{} has {what} version {found}, this program reads {supported}; pack the checkpoint again, or \
         use the program that wrote it",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Which version.
        what: &'static str,
        /// What the file says.
        found: String,
        /// What is read.
        supported: u32,
    },

    /// The description of the layers is not what a store's must be.
    #[error("{}: {reason}; pack the checkpoint again", path.display())]
    Description {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A file is not the one that the index was written for.
    #[error(
        "{}: its header has the checksum {found}, the index was written for {expected}; index and files \
         come from different stores, or the file is damaged",
        path.display()
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The checksum in the index.
        expected: String,
        /// That of the file.
        found: String,
    },

    /// A tensor does not lie where it must.
    #[error(
        "{}: tensor {tensor} starts at byte {offset}, not at a multiple of {alignment}; such a file was \
         not written by `makaira pack`, or rewritten since",
        path.display()
    )]
    Misaligned {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it starts.
        offset: usize,
        /// What that must be a multiple of.
        alignment: usize,
    },

    /// A tensor that a layer needs is absent.
    #[error("tensor {tensor} is missing, layer {layer} needs it; fetch the store again")]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The layer.
        layer: String,
    },

    /// A tensor's bytes are not those that were written.
    #[error(
        "tensor {tensor} has the checksum {found}, {expected} was written: it is damaged; fetch the \
         store again"
    )]
    Checksum {
        /// The tensor.
        tensor: String,
        /// The checksum that was written.
        expected: String,
        /// That of the bytes.
        found: String,
    },

    /// A packed weight is illegal.
    #[error("layer {layer} cannot be used")]
    Weight {
        /// The layer.
        layer: String,
        /// The rule that it breaks.
        source: weights::Error,
    },

    /// A store cannot be written there.
    #[error("cannot pack into {}: {reason}; choose an empty directory", path.display())]
    Target {
        /// The directory.
        path: PathBuf,
        /// What is in the way.
        reason: String,
    },

    /// The checkpoint has a tensor whose name the store needs.
    #[error(
        "tensor {tensor} has a name that a store needs for itself; rename it, or pack only the layers"
    )]
    Reserved {
        /// The tensor.
        tensor: String,
    },

    /// Another process packs into the directory.
    #[error("another process is packing into {}; wait for it", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
    },

    /// A layer came out otherwise than it was planned.
    #[error(
        "layer {layer} is not what it was when packing began: the checkpoint changed; pack it again"
    )]
    Changed {
        /// The layer.
        layer: String,
    },
}
