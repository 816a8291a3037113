//! A file's bytes, mapped into memory or read: the unsafe room of the checkpoint code.
//!
//! A file is mapped read-only and private. Where the system cannot map it (some network file
//! systems, tight containers) it is read instead; callers see the same slice. The size is taken
//! once, from the open file, and the slice has exactly that length.
//!
//! A mapping reflects the file: if another process shortens the file while it is mapped, lost pages
//! read as zeros (see [`guard`]), and if it rewrites the file, bytes may change under the reader. No
//! user-space check can exclude that. Everything derived from the bytes is bounds-checked, so a change
//! can make values wrong but never an index, and [`FileMap::check`] says afterwards whether there was
//! one.
#![allow(unsafe_code)] // Mapping a file is the one operation here that the compiler cannot check.

#[cfg(unix)]
mod guard;

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::{Mmap, MmapOptions};

use super::Error;

/// The bytes of one file.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    /// Dropped before the mapping that it guards.
    #[cfg(unix)]
    guard: Option<guard::Guard>,
    bytes: Bytes,
    file: File,
    modified: Option<SystemTime>,
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
        let metadata = file.metadata().map_err(io_error("read the size of"))?;
        let (size, modified) = (metadata.len(), modified(&metadata));
        let bytes = match map(&file) {
            Ok(map) => Bytes::Mapped(map),
            Err(error) => {
                log::info!("cannot map {} ({error}); reading it instead", path.display());
                let mut bytes = Vec::new();
                (&file).read_to_end(&mut bytes).map_err(io_error("read"))?;
                Bytes::Read(bytes)
            }
        };
        let opened = Self {
            path: path.to_owned(),
            #[cfg(unix)]
            guard: match &bytes {
                Bytes::Mapped(map) if !map.is_empty() => Some(guard::Guard::new(map)),
                _ => None,
            },
            bytes,
            file,
            modified,
        };
        let found = opened.bytes().len() as u64;
        if found == size {
            Ok(opened)
        } else {
            Err(Error::Truncated { path: path.to_owned(), expected: size, found })
        }
    }

    /// Whether a part of the mapping was lost because the file shrank: what was read from it may be
    /// zeros. Costs nothing.
    pub fn is_lost(&self) -> bool {
        #[cfg(unix)]
        return self.guard.as_ref().is_some_and(guard::Guard::is_lost);
        #[cfg(not(unix))]
        return false; // Such systems do not let a mapped file shrink.
    }

    /// Checks that the file is as it was when it was opened, by its size and the time of its last
    /// change. What was read from it before is then what the file held.
    ///
    /// # Errors
    /// [`Error::Changed`], and [`Error::Io`] when the system does not say.
    pub fn check(&self) -> Result<(), Error> {
        if !self.is_mapped() {
            return Ok(());
        }
        let path = || self.path.clone();
        let io_error = |source| Error::Io { action: "read the size of", path: path(), source };
        let metadata = self.file.metadata().map_err(io_error)?;
        let (opened, found) = (self.bytes().len() as u64, metadata.len());
        if self.is_lost() || found != opened || modified(&metadata) != self.modified {
            return Err(Error::Changed { path: path(), opened, found });
        }
        Ok(())
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Read(bytes) => bytes,
        }
    }

    /// Reads a part of the file as plain files are read, past the mapping: whole pages are not mapped for it.
    ///
    /// # Errors
    /// [`Error::Io`], also if the file ends before.
    pub fn read_at(&self, offset: usize, buffer: &mut [u8]) -> Result<(), Error> {
        let io_error = |source| Error::Io { action: "read", path: self.path.clone(), source };
        if let Bytes::Read(bytes) = &self.bytes {
            let part = bytes.get(offset..).and_then(|rest| rest.get(..buffer.len()));
            let part = part.ok_or_else(|| io_error(io::ErrorKind::UnexpectedEof.into()))?;
            buffer.copy_from_slice(part);
            return Ok(());
        }
        read_exact_at(&self.file, offset as u64, buffer).map_err(io_error)
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

#[cfg(unix)]
fn read_exact_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

#[cfg(not(unix))]
fn read_exact_at(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
    use std::io::{Seek, SeekFrom};
    /// The place in a file belongs to all of its handles.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut file = file;
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(buffer)
}

/// Has the system forget what it keeps of a file in memory, so that the next reading of it is a cold one; the file must
/// not be mapped meanwhile. Only Linux is known to do so.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be opened or synced, and where the system knows no such thing.
pub fn forget_cached(path: &Path) -> Result<(), Error> {
    let io_error =
        |source| Error::Io { action: "drop the cached pages of", path: path.to_owned(), source };
    let file = File::open(path).map_err(io_error)?;
    // What has not reached the disk yet is kept otherwise.
    file.sync_all().map_err(io_error)?;
    #[cfg(target_os = "linux")]
    let outcome = {
        use std::os::fd::AsRawFd;
        // SAFETY: the descriptor is open; the call reads and writes no memory of ours.
        match unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    };
    #[cfg(not(target_os = "linux"))]
    let outcome = Err(io::ErrorKind::Unsupported.into());
    outcome.map_err(io_error)
}

/// The time of the last change, where the system has one.
fn modified(metadata: &Metadata) -> Option<SystemTime> {
    metadata.modified().ok()
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
    fn plain_reads_give_the_same_bytes_and_refuse_what_is_past_the_end() {
        let contents: Vec<u8> = (0..10_000u32).map(|i| ((i * i) >> 3) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&contents).expect("written");
        if cfg!(target_os = "linux") {
            forget_cached(file.path()).expect("a plain file");
        }
        let maps = [
            FileMap::open(file.path()).expect("opens"),
            FileMap::open_with(file.path(), refuse_enodev).expect("falls back"),
        ];
        for map in &maps {
            for (offset, len) in [(0, 10_000), (17, 1000), (9_999, 1), (10_000, 0)] {
                let mut buffer = vec![0; len];
                map.read_at(offset, &mut buffer).expect("within the file");
                assert!(buffer == contents[offset..offset + len]);
            }
            for (offset, len) in [(0, 10_001), (9_999, 2), (20_000, 1)] {
                let error = map.read_at(offset, &mut vec![0; len]).expect_err("past the end");
                assert!(matches!(error, Error::Io { .. }), "{error}");
            }
        }
        assert!(forget_cached(Path::new("/nowhere/model.safetensors")).is_err());
    }

    /// A shrinking file must not end the process: what is read is thrown away by the check.
    #[test]
    fn b73_a_file_that_changes_while_it_is_mapped_is_told() {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&[7; 100_000]).expect("written");
        let map = FileMap::open(file.path()).expect("opens");
        assert!(map.is_mapped());
        map.check().expect("nothing happened");
        file.as_file().set_len(10).expect("shorter");
        let sum: u64 = map.bytes().iter().map(|&byte| u64::from(byte)).sum();
        assert!(sum <= 7 * 4096, "at most the page that is left");
        let error = map.check().expect_err("shorter");
        assert!(matches!(error, Error::Changed { opened: 100_000, found: 10, .. }), "{error}");
        assert!(cfg!(not(unix)) || map.is_lost());

        // The same size, other contents.
        let map = FileMap::open(file.path()).expect("opens");
        map.check().expect("nothing happened");
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).expect("a time");
        assert!(matches!(map.check(), Err(Error::Changed { opened: 10, found: 10, .. })));
    }

    #[test]
    fn an_absent_file_is_named() {
        let error = FileMap::open(Path::new("/nowhere/model.safetensors")).expect_err("absent");
        assert_eq!(error.to_string(), "cannot open /nowhere/model.safetensors");
        assert!(std::error::Error::source(&error).is_some());
    }
}
