//! Random weights of any type, and small checkpoints made of them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use makaira::checkpoint::{Checkpoint, Dtype};
use makaira::reference::Random;
use makaira::store::{PackOptions, PackReport, PackedStore, pack};
use makaira::weights::{
    Codes, Error, Group, MatrixParts, QuantMatrix, ScaleOrder, ScaleType, Scales, WeightFormat,
    ZeroOrder, ZeroRule, Zeros,
};
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub fn below(random: &mut Random, bound: usize) -> usize {
    (random.bits() >> 11) as usize % bound
}

/// A weight that owns its parts.
pub struct Drawn {
    pub n: usize,
    pub k: usize,
    pub group: Group,
    pub format: &'static dyn WeightFormat,
    pub codes: Vec<u8>,
    pub element: ScaleType,
    pub scales: Vec<u8>,
    pub zeros: Option<Vec<u8>>,
    pub g_idx: Option<Vec<u8>>,
    pub global: f32,
}

/// A random scale between 1/4 and 5/4, or so.
fn scale(element: ScaleType, random: &mut Random) -> Vec<u8> {
    let value = 0.25 + below(random, 4096) as f32 / 4096.0;
    match element {
        ScaleType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        ScaleType::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        ScaleType::F32 => value.to_le_bytes().to_vec(),
        ScaleType::E4M3 => vec![1 + below(random, 0x7e) as u8],
        ScaleType::E8M0 => vec![110 + below(random, 15) as u8],
    }
}

impl Drawn {
    pub fn new(
        (n, k): (usize, usize),
        raw_group: i64,
        format: &'static dyn WeightFormat,
        element: ScaleType,
        act_order: bool,
        random: &mut Random,
    ) -> Self {
        let group = Group::new(k, raw_group).expect("legal");
        let num_groups = group.num_groups(k);
        let mask = 0xff >> (8 - format.bits());
        let codes = (0..n * k).map(|_| (random.bits() >> 9) as u8 & mask).collect();
        let scales = (0..num_groups * n).flat_map(|_| scale(element, random)).collect();
        let stored = format.zero_rule() == ZeroRule::Stored;
        let zeros = stored
            .then(|| (0..num_groups * n).map(|_| (random.bits() >> 9) as u8 & mask).collect());
        let g_idx = act_order.then(|| {
            // The usual one is a permutation of whole groups; this one has groups of any size.
            let first = (0..num_groups).chain((num_groups..k).map(|_| below(random, num_groups)));
            let mut groups: Vec<usize> = first.take(k).collect();
            for at in (1..k).rev() {
                groups.swap(at, below(random, at + 1));
            }
            groups.into_iter().flat_map(|group| (group as i32).to_le_bytes()).collect()
        });
        let global = [1.0, 0.75, 3.0][below(random, 3)];
        Self { n, k, group, format, codes, element, scales, zeros, g_idx, global }
    }

    pub fn matrix(&self) -> Result<QuantMatrix<'_>, Error> {
        let order = ScaleOrder::Rows;
        let (bytes, element, global) = (&self.scales[..], self.element, self.global);
        let zeros = self.zeros.as_deref();
        QuantMatrix::from_parts(MatrixParts {
            n: self.n,
            k: self.k,
            group: self.group,
            format: self.format,
            codes: Codes::ByInput(&self.codes),
            scales: Scales { bytes, element, order, global },
            zeros: zeros.map(|bytes| Zeros { bytes, order: ZeroOrder::Rows }),
            g_idx: self.g_idx.as_deref(),
        })
    }
}

/// Tensors by name: element type, shape, bytes.
pub type Parts = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn random_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| (random.bits() >> 17) as u8).collect()
}

/// A GPTQ checkpoint of some layers, groups of 32: the odd ones with activation order, every third with a bias; beside
/// them an embedding and a norm of an odd size.
pub fn model(num_layers: usize, random: &mut Random) -> Parts {
    let mut parts = Parts::new();
    for layer in 0..num_layers {
        let (n, k) = (64 * (1 + layer % 2), 128 * (1 + layer % 3));
        let groups = k / 32;
        let mut g_idx: Vec<usize> = (0..k).map(|input| input / 32).collect();
        if layer % 2 == 1 {
            for at in (1..k).rev() {
                g_idx.swap(at, below(random, at + 1));
            }
        }
        let g_idx = g_idx.into_iter().flat_map(|group| (group as i32).to_le_bytes()).collect();
        let scales = (0..groups * n).flat_map(|_| scale(ScaleType::F16, random)).collect();
        let mut add = |suffix: &str, dtype, shape: &[usize], bytes| {
            parts.insert(format!("layers.{layer}.proj.{suffix}"), (dtype, shape.to_vec(), bytes));
        };
        add("qweight", Dtype::I32, &[k / 8, n], random_bytes(random, n * k / 2));
        add("qzeros", Dtype::I32, &[groups, n / 8], vec![0x77; groups * n / 2]);
        add("scales", Dtype::F16, &[groups, n], scales);
        add("g_idx", Dtype::I32, &[k], g_idx);
        if layer % 3 == 2 {
            add("bias", Dtype::F16, &[n], random_bytes(random, 2 * n));
        }
    }
    let embedding = random_bytes(random, 2 * 100 * 128);
    parts.insert("embed.weight".to_owned(), (Dtype::BF16, vec![100, 128], embedding));
    parts.insert("norm.weight".to_owned(), (Dtype::F16, vec![33], random_bytes(random, 66)));
    parts
}

/// Writes a checkpoint of one file with a configuration and a tokeniser.
pub fn write_model(folder: &Path, parts: &Parts) {
    let views = parts.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).expect("sizes agree"))
    });
    let bytes = safetensors::serialize(views, None).expect("fits");
    std::fs::create_dir_all(folder).expect("made");
    std::fs::write(folder.join("model.safetensors"), bytes).expect("written");
    let config = json!({ "num_hidden_layers": 1, "quantization_config": {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": true, "desc_act": true } });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    std::fs::write(folder.join("tokenizer.json"), "{ }").expect("written");
}

/// A checkpoint and the store of it, in a temporary folder.
pub struct Packed {
    pub folder: tempfile::TempDir,
    pub report: PackReport,
}

impl Packed {
    pub fn new(num_layers: usize, file_bytes: u64, random: &mut Random) -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        write_model(&folder.path().join("model"), &model(num_layers, random));
        let checkpoint = Checkpoint::open(&folder.path().join("model")).expect("legal");
        let options = PackOptions { file_bytes, threads: 2, ..PackOptions::default() };
        let target = folder.path().join("store");
        let report = pack(&checkpoint, &target, &options, &mut |_| ()).expect("packs");
        Self { folder, report }
    }

    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(&self.folder.path().join("model")).expect("legal")
    }

    pub fn directory(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    pub fn open(&self) -> Result<PackedStore, makaira::store::Error> {
        PackedStore::open(&self.directory())
    }

    /// The only file of tensors.
    pub fn file(&self) -> PathBuf {
        self.directory().join("model-00001-of-00001.safetensors")
    }

    /// Opens the only file without the index, its header changed.
    pub fn with_header(
        &self,
        change: impl FnOnce(&mut Value),
    ) -> Result<PackedStore, makaira::store::Error> {
        let bytes = std::fs::read(self.file()).expect("there");
        let header_bytes = u64::from_le_bytes(*bytes.first_chunk().expect("long enough")) as usize;
        let (header, data) = bytes[8..].split_at(header_bytes);
        let mut header: Value = serde_json::from_slice(header).expect("JSON");
        change(&mut header);
        let mut text = header.to_string();
        text.extend(std::iter::repeat_n(
            ' ',
            (8 + text.len()).next_multiple_of(256) - 8 - text.len(),
        ));
        let changed = self.folder.path().join("changed.safetensors");
        let parts = [&(text.len() as u64).to_le_bytes(), text.as_bytes(), data];
        std::fs::write(&changed, parts.concat()).expect("written");
        PackedStore::open(&changed)
    }
}

/// Every file of a directory but `makaira-pack.lock`, by name.
pub fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(directory).expect("a directory").map(|entry| {
        let entry = entry.expect("readable");
        let bytes = std::fs::read(entry.path()).expect("readable");
        (entry.file_name().into_string().expect("UTF-8"), bytes)
    });
    entries.filter(|(name, _)| name != "makaira-pack.lock").collect()
}
