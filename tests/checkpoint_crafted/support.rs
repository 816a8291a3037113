//! Writing small checkpoints, whole or broken.

use std::collections::BTreeMap;
use std::path::PathBuf;

use makaira::checkpoint::{Checkpoint, Dtype, Error};
use makaira::reference::Random;
use makaira::weights::QuantMatrix;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Tensors by name: element type, shape, bytes.
pub type Parts = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// `count` random bytes.
pub fn random_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| (random.bits() >> 17) as u8).collect()
}

/// Every weight, `[N][K]`, exactly.
pub fn values(matrix: &QuantMatrix<'_>) -> Vec<f64> {
    let (n, k) = (matrix.n(), matrix.k());
    (0..n * k).map(|at| matrix.value(at % k, at / k)).collect()
}

/// A checkpoint in a temporary folder.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new(parts: &Parts, config: &Value) -> Self {
        let folder = Self(tempfile::tempdir().expect("a temporary directory"));
        let views = parts.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).expect("sizes agree"))
        });
        let bytes = safetensors::serialize(views, None).expect("fits");
        std::fs::write(folder.file("model.safetensors"), bytes).expect("written");
        let config = json!({ "quantization_config": config }).to_string();
        std::fs::write(folder.file("config.json"), config).expect("written");
        folder
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn open(&self) -> Result<Checkpoint, Error> {
        Checkpoint::open(self.0.path())
    }
}

/// The weights of layer "l", or the refusal of the checkpoint or the layer, whichever is first.
pub fn load(parts: &Parts, config: &Value) -> Result<Vec<f64>, Error> {
    let checkpoint = Folder::new(parts, config).open()?;
    Ok(values(&checkpoint.layer("l")?))
}

/// [`load`], which must refuse: the text of the refusal.
pub fn refusal(parts: &Parts, config: &Value) -> String {
    load(parts, config).map(|_| ()).expect_err("it must be refused").to_string()
}
