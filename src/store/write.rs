//! Writing files so that they are there whole or not at all: under another name, synced, renamed.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::Error;

/// How names of files begin that are not finished.
const TEMPORARY: &str = ".makaira-part-";

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io { action, path: path.to_owned(), source }
}

/// A file that has its name only once it is finished; gone if it is dropped before.
pub(super) struct PartFile {
    file: NamedTempFile,
    target: PathBuf,
}

impl PartFile {
    pub(super) fn new(target: PathBuf) -> Result<Self, Error> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(TEMPORARY);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // As any other file: the process's mask decides, and not the caution of temporary files.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let directory = target.parent().unwrap_or(Path::new("."));
        let file =
            builder.tempfile_in(directory).map_err(io_error("create a file in", directory))?;
        Ok(Self { file, target })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file.write_all(bytes).map_err(io_error("write", &self.target))
    }

    /// Writes over the beginning.
    pub(super) fn write_first(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let rewound = self.file.seek(SeekFrom::Start(0));
        rewound.map_err(io_error("write", &self.target)).and_then(|_| self.write(bytes))
    }

    /// Gives the file its name, in place of whatever has it.
    pub(super) fn finish(self) -> Result<(), Error> {
        let Self { file, target } = self;
        file.as_file().sync_all().map_err(io_error("write", &target))?;
        file.persist(&target).map_err(|error| io_error("name", &target)(error.error))?;
        Ok(())
    }
}

/// Writes a whole file.
pub(super) fn write_file(target: PathBuf, bytes: &[u8]) -> Result<(), Error> {
    let mut part = PartFile::new(target)?;
    part.write(bytes)?;
    part.finish()
}

/// Makes the names in a directory last.
pub(super) fn sync_directory(path: &Path) -> Result<(), Error> {
    if cfg!(unix) {
        let synced = File::open(path).and_then(|directory| directory.sync_all());
        synced.map_err(io_error("write", path))?;
    }
    Ok(())
}

/// The names of a directory's files for which `wanted` is true, sorted.
pub(super) fn list(path: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(io_error("list", path))? {
        let name = entry.map_err(io_error("list", path))?.file_name();
        names.extend(name.to_str().filter(|name| wanted(name)).map(str::to_owned));
    }
    names.sort_unstable();
    Ok(names)
}

/// Removes files of that directory.
pub(super) fn remove(path: &Path, names: &[String]) -> Result<(), Error> {
    names.iter().try_for_each(|name| {
        let file = path.join(name);
        fs::remove_file(&file).map_err(io_error("remove", &file))
    })
}

/// Whether a file of that name was never finished.
pub(super) fn is_part(name: &str) -> bool {
    name.starts_with(TEMPORARY)
}
