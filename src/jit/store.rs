//! Compiled kernels on disk, shared by all processes of a user.
//!
//! Owns the folder's layout: `<name>-<hash>.cubin` is an entry, `….lock` serialises those who would
//! compile it. Readers need no lock: an entry appears by an atomic rename of a complete, synced
//! file. What is read is believed only if magic, lengths, checksum and key text agree. Invariant:
//! no failure in here reaches the caller. A damaged entry is rebuilt with one warning, a folder
//! that cannot be used is warned of once and done without (faults B66, B68, B70, B72).

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::key::{Key, hash128};
use crate::driver::Cubin;

const MAGIC: &[u8; 8] = b"makaira1";
/// Magic, checksum of the rest, three lengths.
const HEADER_BYTES: usize = 8 + 16 + 3 * 8;
const ENTRY: &str = "cubin";
const LOCK: &str = "lock";
const TEMPORARY: &str = "makaira-part-";
const ASIDE: &str = "makaira-aside-";
/// How long to wait for another process that compiles the same kernel before doing it again.
const PATIENCE: Duration = Duration::from_secs(120);

/// Where compiled code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Read from the store.
    Store,
    /// Compiled now.
    Compiled,
}

/// An entry of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryInfo {
    /// Name of the configuration.
    pub name: String,
    /// The key's hash, 32 hexadecimal digits.
    pub key: String,
    /// The file.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// Time since it was written; zero if the clock was turned back.
    pub age: Duration,
}

/// What [`Store::clear`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleared {
    /// Entries.
    pub num_entries: usize,
    /// Their size in bytes.
    pub size_bytes: u64,
}

/// The store of compiled kernels, or none.
#[derive(Debug)]
pub struct Store {
    folder: Option<PathBuf>,
    /// Whether trouble with the folder was reported already.
    warned: AtomicBool,
}

/// What a read found.
enum Found {
    Sound(Cubin),
    Nothing,
    /// Something that is no sound entry of this key, and what is wrong.
    Damaged(String),
}

impl Store {
    /// The store that the environment asks for; see the [module](super) for the variables.
    pub fn from_env() -> Self {
        Self::resolve(|name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with the variables looked up by `variable`.
    pub fn resolve(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let folder = Self::folder_of(&variable);
        if folder.is_none() && !is_set(variable("MAKAIRA_NO_CACHE")) {
            log::warn!(
                "no folder for compiled kernels (neither MAKAIRA_CACHE_DIR, XDG_CACHE_HOME nor HOME \
                 is set): every process compiles anew"
            );
        }
        Self { folder, warned: AtomicBool::new(false) }
    }

    /// The folder that these variables ask for, if any.
    pub(super) fn folder_of(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        if is_set(variable("MAKAIRA_NO_CACHE")) {
            return None;
        }
        let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // Relative folders are invalid there, says the XDG Base Directory Specification.
        let absolute = |name| path(name).filter(|path| path.is_absolute());
        path("MAKAIRA_CACHE_DIR")
            .or_else(|| absolute("XDG_CACHE_HOME").map(|folder| folder.join("makaira")))
            .or_else(|| absolute("HOME").map(|home| home.join(".cache").join("makaira")))
    }

    /// A store in this folder, which is made at the first write.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), warned: AtomicBool::new(false) }
    }

    /// No store: every request compiles, nothing is read or written.
    pub fn disabled() -> Self {
        Self { folder: None, warned: AtomicBool::new(false) }
    }

    /// The folder, `None` without a store.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The code of this key: from the store, else from `compile`, and then kept. Of several
    /// processes that ask for one key together, one compiles and the others read.
    ///
    /// # Errors
    /// Those of `compile` alone.
    pub fn get_or_compile<E>(
        &self,
        key: &Key,
        compile: impl FnOnce() -> Result<Cubin, E>,
    ) -> Result<(Cubin, Origin), E> {
        let Some(folder) = &self.folder else { return Ok((compile()?, Origin::Compiled)) };
        let path = folder.join(key.stem()).with_extension(ENTRY);
        if let Found::Sound(cubin) = read(&path, key) {
            return Ok((cubin, Origin::Store));
        }
        let lock = self.lock(folder, key);
        // Another one may have compiled it while this one waited.
        let damage = match read(&path, key) {
            Found::Sound(cubin) => return Ok((cubin, Origin::Store)),
            Found::Nothing => None,
            Found::Damaged(why) => Some(why),
        };
        let compiled = compile();
        if let Some(why) = &damage {
            log::warn!("{} is damaged ({why}): compiled anew", path.display());
        }
        let cubin = compiled?;
        if let Err(error) = write(folder, &path, key, &cubin) {
            // One warning for one trouble: a damaged entry has had its own.
            self.report(folder, &error, damage.is_some());
        }
        drop(lock);
        Ok((cubin, Origin::Compiled))
    }

    /// Compiles although there is an entry, because the driver did not accept it, and overwrites
    /// it.
    ///
    /// # Errors
    /// Those of `compile` alone.
    pub fn recompile<E>(
        &self,
        key: &Key,
        compile: impl FnOnce() -> Result<Cubin, E>,
    ) -> Result<Cubin, E> {
        let cubin = compile()?;
        if let Some(folder) = &self.folder {
            let path = folder.join(key.stem()).with_extension(ENTRY);
            if let Err(error) = write(folder, &path, key, &cubin) {
                self.report(folder, &error, true);
            }
        }
        Ok(cubin)
    }

    /// The entries, by name and key. A folder that is not there has none.
    ///
    /// # Errors
    /// Those of reading the folder.
    pub fn list(&self) -> io::Result<Vec<EntryInfo>> {
        let now = SystemTime::now();
        let mut entries = Vec::new();
        for (path, file_name) in self.files()? {
            let Some((name, key)) = parse_entry(&file_name) else { continue };
            // Another process may have removed it meanwhile.
            let Ok(meta) = fs::metadata(&path) else { continue };
            let written = meta.modified().unwrap_or(now);
            entries.push(EntryInfo {
                name: name.to_owned(),
                key: key.to_owned(),
                size_bytes: meta.len(),
                age: now.duration_since(written).unwrap_or_default(),
                path,
            });
        }
        entries.sort_by(|a, b| (&a.name, &a.key).cmp(&(&b.name, &b.key)));
        Ok(entries)
    }

    /// Removes all entries, and what crashed processes left. Files of others stay.
    ///
    /// # Errors
    /// Those of reading the folder and of the first file that cannot be removed.
    pub fn clear(&self) -> io::Result<Cleared> {
        let mut cleared = Cleared::default();
        for (path, file_name) in self.files()? {
            let is_entry = parse_entry(&file_name).is_some();
            let is_lock = file_name
                .strip_suffix(LOCK)
                .is_some_and(|stem| parse_entry(&format!("{stem}{ENTRY}")).is_some());
            let is_left = file_name.starts_with(TEMPORARY) || file_name.starts_with(ASIDE);
            if !is_entry && !is_lock && !is_left {
                continue;
            }
            let meta = fs::symlink_metadata(&path)?;
            match if meta.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) } {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            if is_entry {
                cleared.num_entries += 1;
                cleared.size_bytes += meta.len();
            }
        }
        Ok(cleared)
    }

    /// Everything in the folder with a readable name.
    fn files(&self) -> io::Result<Vec<(PathBuf, String)>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            if let Ok(name) = entry.file_name().into_string() {
                files.push((entry.path(), name));
            }
        }
        Ok(files)
    }

    /// Waits for whoever compiles this key. Without a lock two processes may compile it, which
    /// costs time and nothing else, so that trouble with it is no more than a debug line.
    fn lock(&self, folder: &Path, key: &Key) -> Option<File> {
        let path = folder.join(key.stem()).with_extension(LOCK);
        let open = || {
            fs::create_dir_all(folder)?;
            File::options().create(true).truncate(false).write(true).open(&path)
        };
        let file = open().inspect_err(|error| log::debug!("{}: {error}", path.display())).ok()?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Some(file),
                Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => {
                    thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    log::debug!("{}: {error}; compiling without the lock", path.display());
                    return None;
                }
            }
        }
    }

    /// Reports trouble with the folder, once as a warning.
    fn report(&self, folder: &Path, error: &io::Error, quiet: bool) {
        let first = !self.warned.swap(true, Ordering::Relaxed);
        let level = if first && !quiet { log::Level::Warn } else { log::Level::Debug };
        log::log!(level, "compiled kernels are not kept: {}: {error}", folder.display());
    }
}

/// Whether a variable that switches something on is set: to anything but `0`.
pub(super) fn is_set(value: Option<OsString>) -> bool {
    value.is_some_and(|value| !value.is_empty() && value != "0")
}

/// Name and key of an entry's file name.
fn parse_entry(file_name: &str) -> Option<(&str, &str)> {
    let (name, key) = file_name.strip_suffix(ENTRY)?.strip_suffix('.')?.rsplit_once('-')?;
    let is_key = key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_key.then_some((name, key))
}

fn read(path: &Path, key: &Key) -> Found {
    match fs::read(path) {
        Ok(bytes) => {
            decode(&bytes, key).map_or_else(|why| Found::Damaged(why.into()), Found::Sound)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
        // The folder itself is no folder: nothing is damaged, and the write will report it.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Found::Nothing,
        Err(error) => Found::Damaged(error.to_string()),
    }
}

fn encode(key: &Key, cubin: &Cubin) -> Vec<u8> {
    let parts = [key.text().as_bytes(), cubin.log.as_bytes(), &cubin.image];
    let mut rest = Vec::with_capacity(24 + parts.iter().map(|part| part.len()).sum::<usize>());
    for part in parts {
        rest.extend_from_slice(&(part.len() as u64).to_le_bytes());
    }
    for part in parts {
        rest.extend_from_slice(part);
    }
    [MAGIC, &hash128(&rest).to_le_bytes()[..], &rest].concat()
}

fn decode(bytes: &[u8], key: &Key) -> Result<Cubin, &'static str> {
    if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
        return Err("it has no header of this version");
    }
    let (checksum, rest) = bytes[MAGIC.len()..].split_at(16);
    if hash128(rest).to_le_bytes() != checksum {
        return Err("its checksum is wrong");
    }
    let (lengths, mut payload) = rest.split_at(24);
    let mut parts = [&[][..]; 3];
    for (part, len) in parts.iter_mut().zip(lengths.chunks_exact(8)) {
        let len = u64::from_le_bytes(len.try_into().expect("chunks of eight bytes"));
        let split = usize::try_from(len).ok().and_then(|len| payload.split_at_checked(len));
        (*part, payload) = split.ok_or("its lengths are wrong")?;
    }
    let [text, log, image] = parts;
    if !payload.is_empty() {
        return Err("its lengths are wrong");
    }
    if text != key.text().as_bytes() {
        return Err("it belongs to another kernel");
    }
    let log = String::from_utf8(log.to_vec()).map_err(|_| "its log is no text")?;
    Ok(Cubin { image: image.to_vec(), log })
}

fn write(folder: &Path, path: &Path, key: &Key, cubin: &Cubin) -> io::Result<()> {
    place(folder, path, &encode(key, cubin))
}

/// Makes a file appear whole or not at all.
pub(super) fn place(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    if fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir()) {
        move_aside(folder, path)?;
    }
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Gets a folder out of an entry's place. It is not ours, so that it is removed only if it is
/// empty.
fn move_aside(folder: &Path, path: &Path) -> io::Result<()> {
    if fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    let aside = tempfile::Builder::new().prefix(ASIDE).tempdir_in(folder)?.keep();
    fs::rename(path, aside)
}
