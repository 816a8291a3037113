//! Measured winners on disk, beside the compiled kernels and shared by all processes of a user.
//!
//! Owns the files `<problem>-<hash>.tuned`: one record each, a few lines of text. A record is found by all
//! that its times depend on (card, driver, this crate, the candidates, the problem, the launch order), has
//! that in its text and a checksum before it. Records are independent files that appear by an atomic rename,
//! so that processes need no lock and lose nothing of each other; of two that measure the same the later
//! stays. Invariant: a store can only make products faster. What is damaged, of another version or of
//! somebody else is a [`Finding`], ignored with one warning; what a process was told once it is told until
//! it ends, because workspaces are sized by it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{fmt, fs, io};

use super::key::{KeyParts, hash128};
use super::store::{self, Store};

/// The first line: what the file is, and the version of what follows.
const TITLE: &str = "makaira tuning 1";
const RECORD: &str = "tuned";

/// What a record is found by.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TuneKey {
    problem: String,
    text: String,
}

impl TuneKey {
    /// The key of a problem on a device, for kernels that start early or in plain order. `candidates` are
    /// all that were there to be measured, in any order: with others the winner may be another.
    pub fn new(
        device: &str,
        problem: &str,
        overlap_previous: bool,
        candidates: impl IntoIterator<Item = String>,
    ) -> Self {
        let mut candidates: Vec<String> = candidates.into_iter().collect();
        candidates.sort_unstable();
        let table = hash128(candidates.join("\n").as_bytes());
        // `Debug` of a string escapes line ends: no part can pass for two.
        let text = format!(
            "device {device:?}\nemitter {:?}\ncandidates {table:032x}\nproblem {problem:?}\n\
             early_launch {overlap_previous}\n",
            KeyParts::EMITTER
        );
        Self { problem: problem.to_owned(), text }
    }

    /// All parts, one a line.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Name of the record's file without extension.
    fn stem(&self) -> String {
        let fit = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let problem: String = self.problem.chars().take(100).map(fit).collect();
        format!("{problem}-{:032x}", hash128(self.text.as_bytes()))
    }
}

impl fmt::Debug for TuneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TuneKey({})", self.stem())
    }
}

/// What won, and how fast it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Winner {
    /// Name of the configuration.
    pub config: String,
    /// How its grid is cut, as the measurer writes it. One line.
    pub plan: String,
    /// Median time in microseconds.
    pub us: f64,
}

/// A file that is no record, or not the one that its name promises. It is ignored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Finding {
    /// The content is wrong.
    #[error(
        "{} {why}: ignored; `makaira tune` measures anew", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
    /// The file cannot be read.
    #[error("{} cannot be read: ignored", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A record as the store lists it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The file.
    pub path: PathBuf,
    /// The key's parts, one a line.
    pub key: String,
    /// What won.
    pub winner: Winner,
}

/// The store of measured winners, or none.
#[derive(Debug, Default)]
pub struct TuneStore {
    folder: Option<PathBuf>,
    /// What was asked for, and the answer.
    told: Mutex<HashMap<TuneKey, Option<Winner>>>,
}

impl TuneStore {
    /// The store in this folder, which is made at the first write.
    pub fn open(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), told: Mutex::default() }
    }

    /// No store: nothing is known and nothing kept.
    pub fn disabled() -> Self {
        Self::default()
    }

    /// The store of the environment, one for the whole process; see the [module](super) for the
    /// variables.
    pub fn of_process() -> Arc<Self> {
        static STORE: OnceLock<Arc<TuneStore>> = OnceLock::new();
        STORE.get_or_init(|| Arc::new(Self::resolve(|name| std::env::var_os(name)))).clone()
    }

    /// As [`of_process`](Self::of_process), with the variables looked up by `variable`, and not shared.
    pub fn resolve(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        if store::is_set(variable("MAKAIRA_NO_TUNING")) {
            return Self::disabled();
        }
        Self { folder: Store::folder_of(variable), told: Mutex::default() }
    }

    /// The folder, `None` without a store.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The winner of this key, if one is known. A finding is a warning. The answer does not change until
    /// the process ends, except by [`put`](Self::put).
    pub fn get(&self, key: &TuneKey) -> Option<Winner> {
        if let Some(told) = self.told().get(key) {
            return told.clone();
        }
        let found = self.read(key).unwrap_or_else(|finding| {
            let cause = std::error::Error::source(&finding).map(|cause| format!(" ({cause})"));
            log::warn!("{finding}{}", cause.unwrap_or_default());
            None
        });
        // Another thread may have been first: what it said stays said.
        self.told().entry(key.clone()).or_insert(found).clone()
    }

    /// The winner of this key as the disk has it now.
    ///
    /// # Errors
    /// What is wrong with its file.
    pub fn read(&self, key: &TuneKey) -> Result<Option<Winner>, Finding> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let path = folder.join(key.stem()).with_extension(RECORD);
        let Some(record) = load(&path)? else { return Ok(None) };
        if record.key != key.text {
            return Err(Finding::Damaged { path, why: "belongs to another problem or device" });
        }
        Ok(Some(record.winner))
    }

    /// Keeps a winner, in place of the one before it. Without a store only for this process.
    ///
    /// # Errors
    /// Those of writing; a winner whose texts are not one line each is `InvalidInput`.
    pub fn put(&self, key: &TuneKey, winner: &Winner) -> io::Result<()> {
        let text = encode(key, winner);
        if decode(&text).is_ok_and(|(found, back)| found == key.text && back == *winner) {
            if let Some(folder) = &self.folder {
                let path = folder.join(key.stem()).with_extension(RECORD);
                store::place(folder, &path, text.as_bytes())?;
            }
            self.told().insert(key.clone(), Some(winner.clone()));
            return Ok(());
        }
        let what = format!("{winner:?} is no record: names of one line and a positive time are");
        Err(io::Error::new(io::ErrorKind::InvalidInput, what))
    }

    /// The records, by file name, and what is wrong with those that are none. A folder that is not there
    /// has none.
    ///
    /// # Errors
    /// Those of reading the folder.
    pub fn list(&self) -> io::Result<Vec<Result<Record, Finding>>> {
        let mut paths = self.paths()?;
        paths.sort();
        Ok(paths.iter().filter_map(|path| load(path).transpose()).collect())
    }

    /// Removes all records, damaged ones too; says how many. Files of others stay.
    ///
    /// # Errors
    /// Those of reading the folder and of the first file that cannot be removed.
    pub fn clear(&self) -> io::Result<usize> {
        let mut count = 0;
        for path in self.paths()? {
            match fs::remove_file(&path) {
                Ok(()) => count += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        self.told().clear();
        Ok(count)
    }

    /// Files with the names of records.
    fn paths(&self) -> io::Result<Vec<PathBuf>> {
        let Some(folder) = &self.folder else { return Ok(Vec::new()) };
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut paths = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let hash = stem.and_then(|stem| stem.rsplit_once('-')).map_or("", |(_, hash)| hash);
            let is_hash = hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
            if is_hash && path.extension().is_some_and(|extension| extension == RECORD) {
                paths.push(path);
            }
        }
        Ok(paths)
    }

    /// Locked also after a panic of another thread: the table is whole at every moment.
    fn told(&self) -> MutexGuard<'_, HashMap<TuneKey, Option<Winner>>> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The record of a file; `None` if there is no file.
fn load(path: &Path) -> Result<Option<Record>, Finding> {
    let damaged = |why| Finding::Damaged { path: path.to_owned(), why };
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error)
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(None);
        }
        Err(source) => return Err(Finding::Unreadable { path: path.to_owned(), source }),
    };
    let text = String::from_utf8(bytes).map_err(|_| damaged("is no text"))?;
    let (key, winner) = decode(&text).map_err(damaged)?;
    Ok(Some(Record { path: path.to_owned(), key: key.to_owned(), winner }))
}

fn encode(key: &TuneKey, winner: &Winner) -> String {
    let Winner { config, plan, us } = winner;
    let rest = format!("{}config {config}\nplan {plan}\nmicroseconds {us}\n", key.text);
    format!("{TITLE}\nchecksum {:032x}\n{rest}", hash128(rest.as_bytes()))
}

/// The key's text and the winner of a record.
fn decode(text: &str) -> Result<(&str, Winner), &'static str> {
    let rest = text.strip_prefix(TITLE).and_then(|rest| rest.strip_prefix("\nchecksum "));
    let rest = rest.ok_or("is no tuning record of this version")?;
    let (checksum, rest) = rest.split_once('\n').ok_or("ends in its head")?;
    if checksum != format!("{:032x}", hash128(rest.as_bytes())) {
        return Err("has a wrong checksum");
    }
    let mut lines = rest.split_inclusive('\n').rev();
    let mut value = |name| {
        let line = lines.next()?.strip_suffix('\n')?;
        line.strip_prefix(name)?.strip_prefix(' ').filter(|value| !value.is_empty())
    };
    let (us, plan, config) = (value("microseconds"), value("plan"), value("config"));
    let (Some(us), Some(plan), Some(config)) = (us, plan, config) else {
        return Err("has other lines than a record has");
    };
    let us = us.parse().ok().filter(|us: &f64| us.is_finite() && *us > 0.0);
    let us = us.ok_or("has no positive time")?;
    let key_bytes = lines.map(str::len).sum();
    let winner = Winner { config: config.to_owned(), plan: plan.to_owned(), us };
    Ok((&rest[..key_bytes], winner))
}
