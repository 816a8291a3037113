//! The tensors of a checkpoint: one safetensors file, or several with an index.
//!
//! A path may be a file or a directory. In a directory `model.safetensors.index.json` decides, then
//! `model.safetensors`; nothing else is guessed. The index is checked in both directions: every
//! tensor that it lists is in the named shard, and every tensor of a shard is listed for that
//! shard. A safetensors file that the index does not name is left alone and reported.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::container::Container;
use super::{Dtype, Error, Finding};

pub(crate) const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// The text beside tensors that says that they are packed weights, and by which version of the file format.
pub const PACKED_KEY: &str = "makaira.store";

/// The tensors of one checkpoint, borrowed from its files.
#[derive(Debug)]
pub struct Tensors {
    directory: PathBuf,
    shards: Vec<Container>,
    /// Name to the index of the shard that holds it.
    shard_of: BTreeMap<String, usize>,
    findings: Vec<Finding>,
}

/// One tensor, as its file holds it: little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The full name.
    pub name: &'a str,
    /// The element type.
    pub dtype: Dtype,
    /// The sizes, outermost first.
    pub shape: &'a [usize],
    /// The bytes.
    pub bytes: &'a [u8],
}

impl Tensors {
    /// Opens the file, or the checkpoint in the directory, at `path`.
    ///
    /// # Errors
    /// Those of the file's header ([`Error::Truncated`], [`Error::Header`] and so on),
    /// [`Error::NoModel`], and [`Error::Index`], [`Error::ShardMissing`], [`Error::NotInShard`],
    /// [`Error::NotInIndex`] where index and shards disagree.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if !path.is_dir() {
            return Self::open_single(path);
        }
        if path.join(INDEX).exists() {
            Self::open_sharded(path)
        } else if path.join(SINGLE).exists() {
            Self::open_single(&path.join(SINGLE))
        } else {
            Err(Error::NoModel { path: path.to_owned() })
        }
    }

    fn open_single(path: &Path) -> Result<Self, Error> {
        let container = Container::open(path)?;
        let shard_of = container.entries().keys().map(|name| (name.clone(), 0)).collect();
        // A bare file name has an empty parent; its directory is the current one.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new(".")).to_owned();
        Ok(Self { directory, shards: vec![container], shard_of, findings: Vec::new() })
    }

    fn open_sharded(directory: &Path) -> Result<Self, Error> {
        let index_path = directory.join(INDEX);
        let weight_map = read_index(&index_path)?;
        let names: BTreeSet<&String> = weight_map.values().collect();
        let mut shards = Vec::new();
        let mut shard_of = BTreeMap::new();
        for shard in &names {
            let path = directory.join(shard);
            if !path.is_file() {
                let tensor = weight_map.iter().find(|(_, s)| s == shard);
                let tensor = tensor.map_or_else(String::new, |(tensor, _)| tensor.clone());
                let shard = (*shard).clone();
                return Err(Error::ShardMissing { path: index_path, shard, tensor });
            }
            let container = Container::open(&path)?;
            for tensor in container.entries().keys() {
                let placed = weight_map.get(tensor);
                if placed != Some(shard) {
                    return Err(Error::NotInIndex {
                        path: index_path,
                        shard: (*shard).clone(),
                        tensor: tensor.clone(),
                        placed: placed.cloned(),
                    });
                }
                shard_of.insert(tensor.clone(), shards.len());
            }
            shards.push(container);
        }
        if let Some((tensor, shard)) = weight_map.iter().find(|(t, _)| !shard_of.contains_key(*t)) {
            let (shard, tensor) = (shard.clone(), tensor.clone());
            return Err(Error::NotInShard { path: index_path, shard, tensor });
        }
        let findings = stray_files(directory, &names)?;
        Ok(Self { directory: directory.to_owned(), shards, shard_of, findings })
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, &shard) = self.shard_of.get_key_value(name)?;
        let shard = &self.shards[shard];
        let entry = &shard.entries()[name];
        let (dtype, shape) = (entry.dtype, entry.shape.as_slice());
        Some(Tensor { name, dtype, shape, bytes: shard.bytes(entry) })
    }

    /// Whether some file says that it holds packed weights.
    pub fn are_packed(&self) -> bool {
        self.shards.iter().any(|shard| shard.metadata().contains_key(PACKED_KEY))
    }

    /// Where the tensor of that name lies: which of [`Tensors::files`], and its bytes in it.
    pub fn place(&self, name: &str) -> Option<(usize, Range<usize>)> {
        let &shard = self.shard_of.get(name)?;
        Some((shard, self.shards[shard].entries()[name].range.clone()))
    }

    /// Reads a part of a file past its mapping: see [`super::FileMap::read_at`]. The file is given by its place among
    /// [`Tensors::files`].
    ///
    /// # Errors
    /// Those of [`super::FileMap::read_at`].
    ///
    /// # Panics
    /// If there is no such file.
    pub fn read_at(&self, file: usize, offset: usize, buffer: &mut [u8]) -> Result<(), Error> {
        self.shards[file].map().read_at(offset, buffer)
    }

    /// All bytes of a file, by its place among [`Tensors::files`].
    ///
    /// # Panics
    /// If there is no such file.
    pub fn bytes(&self, file: usize) -> &[u8] {
        self.shards[file].map().bytes()
    }

    /// The texts that lie beside the tensors of a file, by the file's place among [`Tensors::files`].
    ///
    /// # Panics
    /// If there is no such file.
    pub fn metadata(&self, file: usize) -> &BTreeMap<String, String> {
        self.shards[file].metadata()
    }

    /// The bytes of a file that come before its tensors, by the file's place among [`Tensors::files`].
    ///
    /// # Panics
    /// If there is no such file.
    pub fn header(&self, file: usize) -> &[u8] {
        self.shards[file].header()
    }

    /// Every tensor's name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.shard_of.keys().map(String::as_str)
    }

    /// The files, sorted by name, and whether each is mapped rather than read.
    pub fn files(&self) -> impl Iterator<Item = (&Path, bool)> {
        self.shards.iter().map(|shard| (shard.path(), shard.is_mapped()))
    }

    /// The directory that holds the files and the configuration.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Checks that every file is as it was when it was opened. Call it when all that is wanted has been
    /// read: a file that shrinks reads as zeros, one that is rewritten as anything.
    ///
    /// # Errors
    /// Those of [`super::FileMap::check`].
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.shards.iter().try_for_each(|shard| shard.map().check())
    }

    /// [`Tensors::check_unchanged`] where a file is known to have shrunk; costs nothing otherwise.
    pub(crate) fn check_lost(&self) -> Result<(), Error> {
        let mut lost = self.shards.iter().filter(|shard| shard.map().is_lost());
        lost.try_for_each(|shard| shard.map().check())
    }

    /// What is odd about the set of files without being wrong.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }
}

/// Tensor name to shard file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, Error> {
    let fail = |reason: String| Error::Index { path: path.to_owned(), reason };
    let text = std::fs::read(path).map_err(|source| Error::Io {
        action: "read",
        path: path.to_owned(),
        source,
    })?;
    let index: Value = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| fail("no object weight_map".to_owned()))?;
    if map.is_empty() {
        return Err(fail("weight_map is empty".to_owned()));
    }
    map.iter()
        .map(|(tensor, shard)| {
            let name = shard.as_str().filter(|name| is_plain_file_name(name));
            let name = name.ok_or_else(|| {
                fail(format!(
                    "tensor {tensor} is placed in {shard}, not a file name of the directory"
                ))
            })?;
            Ok((tensor.clone(), name.to_owned()))
        })
        .collect()
}

/// One component, neither `.` nor `..`: an index must not reach outside its directory.
fn is_plain_file_name(name: &str) -> bool {
    !name.contains('\\') && Path::new(name).file_name().is_some_and(|file| file == name)
}

fn stray_files(directory: &Path, named: &BTreeSet<&String>) -> Result<Vec<Finding>, Error> {
    let io_error = |source| Error::Io { action: "list", path: directory.to_owned(), source };
    let mut findings = Vec::new();
    for file in std::fs::read_dir(directory).map_err(io_error)? {
        let file = file.map_err(io_error)?.file_name().to_string_lossy().into_owned();
        if file.ends_with(".safetensors") && !named.contains(&file) {
            findings.push(Finding::StrayFile { file });
        }
    }
    findings.sort_by_key(Finding::to_string);
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    fn write_shard(directory: &Path, file: &str, tensors: &[&str]) {
        let data = [1u8, 2, 3, 4];
        let views = tensors
            .iter()
            .map(|name| (*name, TensorView::new(Dtype::U8, vec![4], &data).expect("four bytes")));
        let bytes = safetensors::serialize(views, None).expect("fits");
        std::fs::write(directory.join(file), bytes).expect("written");
    }

    fn write_index(directory: &Path, map: &[(&str, &str)]) {
        let map: BTreeMap<_, _> = map.iter().copied().collect();
        let text = serde_json::json!({ "weight_map": map }).to_string();
        std::fs::write(directory.join(INDEX), text).expect("written");
    }

    fn temporary() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary directory")
    }

    #[test]
    fn b78_index_and_shards_are_checked_both_ways() {
        let dir = temporary();
        let path = dir.path();
        let map = [("a", "1.safetensors"), ("b", "1.safetensors"), ("c", "2.safetensors")];
        write_index(path, &map);
        write_shard(path, "1.safetensors", &["a", "b"]);

        let error = Tensors::open(path).expect_err("2 is absent").to_string();
        assert!(error.contains("names 2.safetensors (for tensor c)"), "{error}");

        write_shard(path, "2.safetensors", &["d"]);
        let error = Tensors::open(path).expect_err("d is not listed").to_string();
        assert!(error.contains("2.safetensors holds tensor d") && error.contains("does not list"));

        write_shard(path, "2.safetensors", &[]);
        let error = Tensors::open(path).expect_err("c is in no shard");
        assert!(matches!(error, Error::NotInShard { ref tensor, .. } if tensor == "c"), "{error}");

        write_shard(path, "2.safetensors", &["a", "c"]);
        let error = Tensors::open(path).expect_err("a lies in both").to_string();
        assert!(error.contains("tensor a") && error.contains("places in 1.safetensors"), "{error}");

        write_shard(path, "2.safetensors", &["c"]);
        write_shard(path, "3.safetensors", &["c"]);
        let tensors = Tensors::open(path).expect("consistent");
        assert_eq!(tensors.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(tensors.get("c").expect("listed").bytes, [1, 2, 3, 4]);
        assert!(tensors.get("d").is_none());
        assert_eq!(tensors.findings(), [Finding::StrayFile { file: "3.safetensors".to_owned() }]);
    }

    #[test]
    fn an_index_cannot_reach_outside_its_directory() {
        let dir = temporary();
        for shard in ["../x.safetensors", "/etc/passwd", "..", "a/b", "a\\b", ""] {
            write_index(dir.path(), &[("a", shard)]);
            let error = Tensors::open(dir.path()).expect_err(shard);
            assert!(matches!(error, Error::Index { .. }), "{error}");
        }
        for text in ["{}", "[]", "{", r#"{"weight_map":{}}"#, r#"{"weight_map":{"a":3}}"#] {
            std::fs::write(dir.path().join(INDEX), text).expect("written");
            assert!(matches!(Tensors::open(dir.path()), Err(Error::Index { .. })), "{text}");
        }
    }

    #[test]
    fn a_directory_without_weights_says_what_it_looked_for() {
        let dir = temporary();
        write_shard(dir.path(), "other.safetensors", &["a"]);
        let error = Tensors::open(dir.path()).expect_err("not guessed").to_string();
        assert!(error.contains("model.safetensors.index.json"), "{error}");
        assert!(Tensors::open(&dir.path().join("other.safetensors")).is_ok());
    }
}
