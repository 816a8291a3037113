//! `makaira synth`: a checkpoint of a model's size with random weights, to measure with.
//!
//! GPTQ in 4 bits, groups of 128, as tools write it: several files with an index, an embedding and a head in bf16.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use makaira::checkpoint::Dtype;
use makaira::reference::Random;
use safetensors::tensor::View;
use serde_json::json;

use crate::bench::model::Model;
use crate::output::{Format, Progress, bytes, count};

const GROUP: usize = 128;

/// Arguments of `synth`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory to write, empty or not there yet.
    directory: PathBuf,
    /// The model: 8b, 70b, or layers and products like 4x768x512+512x768.
    #[arg(long, default_value = "8b")]
    model: Model,
    /// Rows of the embedding and of the head.
    #[arg(long, default_value_t = 128256)]
    vocabulary: usize,
    /// Inputs in an order of activations.
    #[arg(long)]
    act_order: bool,
    /// Seed; another one each time if not given.
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    format: Format,
}

/// What a tensor is filled with.
#[derive(Clone, Copy)]
enum Fill {
    /// Any bits.
    Codes,
    /// fp16 between 2^-8 and 2^-7.
    Scales,
    /// The zeros of symmetric weights.
    Zeros,
    /// The groups of inputs, shuffled or not.
    Groups { shuffled: bool },
    /// bf16 between 2^-7 and 2^-5 of either sign.
    Dense,
}

/// A tensor that is made when it is written.
struct Made {
    dtype: Dtype,
    shape: Vec<usize>,
    fill: Fill,
    seed: u64,
}

impl View for Made {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.data_len();
        let mut random = Random::new(self.seed);
        let mask = |and: u64, or: u64| move |bits: u64| bits & and | or;
        let words = |random: &mut Random, change: &dyn Fn(u64) -> u64| -> Vec<u8> {
            let words = (0..bytes.div_ceil(8)).map(|_| change(random.bits()));
            let mut data: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            data.truncate(bytes);
            data
        };
        Cow::Owned(match self.fill {
            Fill::Codes => words(&mut random, &|bits| bits),
            Fill::Scales => words(&mut random, &mask(0x03ff_03ff_03ff_03ff, 0x1c00_1c00_1c00_1c00)),
            Fill::Zeros => vec![0x77; bytes],
            Fill::Groups { shuffled } => {
                let mut groups: Vec<i32> =
                    (0..self.shape[0]).map(|input| (input / GROUP) as i32).collect();
                for at in (1..groups.len()).rev().filter(|_| shuffled) {
                    groups.swap(at, (random.bits() % (at as u64 + 1)) as usize);
                }
                groups.into_iter().flat_map(i32::to_le_bytes).collect()
            }
            Fill::Dense => words(&mut random, &mask(0x80ff_80ff_80ff_80ff, 0x3c00_3c00_3c00_3c00)),
        })
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Runs `synth`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let Args { directory, model, format, .. } = args;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    if std::fs::read_dir(directory)?.next().is_some() {
        bail!("{} is not empty; choose an empty directory", directory.display());
    }
    let mut seeds = Random::new(args.seed.unwrap_or_else(Random::fresh_seed));
    let mut files: Vec<Vec<(String, Made)>> = vec![ends(args, &mut seeds)];
    for layer in 0..model.num_layers {
        let tensors = products(args, layer, &mut seeds)?;
        // Four layers a file, so that there are several of each model.
        match layer % 4 {
            0 => files.push(tensors),
            _ => files.last_mut().expect("there is one").extend(tensors),
        }
    }
    let (mut weight_map, mut size) = (BTreeMap::new(), 0);
    let total = files.len();
    let mut progress = Progress::new(total);
    for (at, tensors) in files.into_iter().enumerate() {
        let name = format!("model-{:05}-of-{total:05}.safetensors", at + 1);
        progress.step(&name);
        for (tensor, made) in &tensors {
            size += made.data_len() as u64;
            weight_map.insert(tensor.clone(), name.clone());
        }
        safetensors::serialize_to_file(tensors, None, &directory.join(&name))
            .with_context(|| format!("cannot write {name}"))?;
    }
    drop(progress);
    let config = json!({
        "num_hidden_layers": model.num_layers,
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": true,
            "desc_act": args.act_order,
        },
    });
    let index = json!({ "metadata": { "total_size": size }, "weight_map": weight_map });
    write(directory, "config.json", &config)?;
    write(directory, "model.safetensors.index.json", &index)?;
    let num_products = model.num_layers * model.products.len();
    format.line(format!(
        "{}: {}, {}, random",
        directory.display(),
        count(num_products, "layer"),
        bytes(size)
    ))?;
    format.value(|| json!({ "directory": directory, "layers": num_products, "bytes": size }))
}

fn write(directory: &Path, name: &str, value: &serde_json::Value) -> anyhow::Result<()> {
    let path = directory.join(name);
    std::fs::write(&path, format!("{value:#}\n"))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// What stands before and after the layers.
fn ends(args: &Args, seeds: &mut Random) -> Vec<(String, Made)> {
    let hidden = args.model.products[0].k;
    let mut made = |shape: Vec<usize>| Made {
        dtype: Dtype::BF16,
        shape,
        fill: Fill::Dense,
        seed: seeds.bits(),
    };
    vec![
        ("lm_head.weight".to_owned(), made(vec![args.vocabulary, hidden])),
        ("model.embed_tokens.weight".to_owned(), made(vec![args.vocabulary, hidden])),
        ("model.norm.weight".to_owned(), made(vec![hidden])),
    ]
}

/// The products of one layer.
fn products(args: &Args, layer: usize, seeds: &mut Random) -> anyhow::Result<Vec<(String, Made)>> {
    let mut tensors = Vec::new();
    for (at, shape) in args.model.products.iter().enumerate() {
        let (n, k) = (shape.n, shape.k);
        if !k.is_multiple_of(GROUP) || !n.is_multiple_of(8) {
            bail!("{n} x {k}: inputs must be a multiple of {GROUP}, outputs of 8");
        }
        let groups = k / GROUP;
        let stem = match shape.name.split_once('_') {
            Some((_, name)) => format!("model.layers.{layer}.{name}_proj"),
            None => format!("model.layers.{layer}.product_{at}"),
        };
        let shuffled = args.act_order;
        for (suffix, dtype, shape, fill) in [
            ("g_idx", Dtype::I32, vec![k], Fill::Groups { shuffled }),
            ("qweight", Dtype::I32, vec![k / 8, n], Fill::Codes),
            ("qzeros", Dtype::I32, vec![groups, n / 8], Fill::Zeros),
            ("scales", Dtype::F16, vec![groups, n], Fill::Scales),
        ] {
            let made = Made { dtype, shape, fill, seed: seeds.bits() };
            tensors.push((format!("{stem}.{suffix}"), made));
        }
    }
    Ok(tensors)
}
