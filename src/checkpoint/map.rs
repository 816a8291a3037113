//! A file's bytes, mapped into memory or read: the unsafe room of the checkpoint code.
//!
//! A file is mapped read-only and private. Where the system cannot map it (some network file
//! systems, tight containers) it is read instead; callers see the same slice. The size is taken
//! once, from the open file, and the slice has exactly that length.
//!
//! A mapping reflects the file: if another process shortens the file while it is mapped, touching
//! the lost pages raises SIGBUS, and if it rewrites the file, bytes may change under the reader.
//! No user-space check can exclude that; everything derived from the bytes is bounds-checked, so a
//! change can make values wrong but never an index.
#![allow(unsafe_code)] // Mapping a file is the one operation here that the compiler cannot check.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapOptions};

use super::Error;

/// The bytes of one file.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Read(Vec<u8>),
}

impl FileMap {
    /// Maps `path`, or reads it where mapping fails.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or read, [`Error::Truncated`] when it shrinks
    /// while it is read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_with(path, map_private)
    }

    /// [`FileMap::open`] with the mapping call given, so that a test can make it fail.
    fn open_with(path: &Path, map: fn(&File) -> io::Result<Mmap>) -> Result<Self, Error> {
        let io_error = |action| move |source| Error::Io { action, path: path.to_owned(), source };
        let file = File::open(path).map_err(io_error("open"))?;
        let size = file.metadata().map_err(io_error("read the size of"))?.len();
        let bytes = match map(&file) {
            Ok(map) => Bytes::Mapped(map),
            Err(error) => {
                log::info!("cannot map {} ({error}); reading it instead", path.display());
                let mut bytes = Vec::new();
                (&file).read_to_end(&mut bytes).map_err(io_error("read"))?;
                Bytes::Read(bytes)
            }
        };
        let opened = Self { path: path.to_owned(), bytes };
        let found = opened.bytes().len() as u64;
        if found == size {
            Ok(opened)
        } else {
            Err(Error::Truncated { path: path.to_owned(), expected: size, found })
        }
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Read(bytes) => bytes,
        }
    }

    /// Whether the bytes are a mapping (or else a copy).
    pub fn is_mapped(&self) -> bool {
        matches!(self.bytes, Bytes::Mapped(_))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn map_private(file: &File) -> io::Result<Mmap> {
    // SAFETY: the mapping is private and read-only, so this process cannot write through it. The
    // slice is only ever read as plain bytes, for which every bit pattern is valid, and lives no
    // longer than the `Mmap` that owns it. Changes of the file by others are discussed in the
    // module's documentation.
    unsafe { MmapOptions::new().map_copy_read_only(file) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn refuse_enodev(_: &File) -> io::Result<Mmap> {
        Err(io::Error::from_raw_os_error(19))
    }

    fn refuse_enomem(_: &File) -> io::Result<Mmap> {
        Err(io::Error::from_raw_os_error(12))
    }

    #[test]
    fn b80_a_refused_mapping_becomes_a_plain_read_of_the_same_bytes() {
        let contents: Vec<u8> = (0..10_000u32).map(|i| ((i * i) >> 3) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&contents).expect("written");
        let mapped = FileMap::open(file.path()).expect("opens");
        assert!(mapped.is_mapped());
        assert!(mapped.bytes() == contents);
        for refuse in [refuse_enodev, refuse_enomem] {
            let read = FileMap::open_with(file.path(), refuse).expect("falls back");
            assert!(!read.is_mapped());
            assert!(read.bytes() == contents);
            assert_eq!(read.path(), file.path());
        }
    }

    #[test]
    fn an_absent_file_is_named() {
        let error = FileMap::open(Path::new("/nowhere/model.safetensors")).expect_err("absent");
        assert_eq!(error.to_string(), "cannot open /nowhere/model.safetensors");
        assert!(std::error::Error::source(&error).is_some());
    }
}
