//! `makaira inspect` and `makaira verify` of a store of packed weights.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::bail;
use makaira::checkpoint::place;
use makaira::reference::Random;
use makaira::store::{PackedStore, StoredLayer};
use makaira::weights::default_threads;
use serde_json::{Value, json};

use crate::device::Device;
use crate::inspect::numbers;
use crate::output::{Format, bytes, count};
use crate::trial::Trial;
use crate::verify;

/// Everything about a layer but its name.
fn describe(layer: &StoredLayer) -> String {
    let StoredLayer { spec, source, .. } = layer;
    let (layout, format) = (spec.layout(), spec.format().name());
    let (n, k, group) = (layout.n, spec.source_inputs(), layout.group);
    let mut text = format!("{n} x {k}, {format}, group {group}, of {}", source.convention);
    text.push_str(&format!("; scales {} of {}", layout.kind.scales.name(), source.scales.name()));
    if !source.exact {
        text.push_str(", rounded");
    }
    if spec.input_order().is_some() {
        text.push_str(&format!(", activation order of {} packed inputs", layout.k));
    }
    let [outputs, inputs] =
        [spec.ranks_by_outputs(), spec.ranks_by_inputs()].map(|ranks| numbers(&ranks));
    text.push_str(&format!("; ranks by outputs {outputs}, by inputs {inputs}"));
    text
}

fn to_json(layer: &StoredLayer) -> Value {
    let StoredLayer { name, spec, source, .. } = layer;
    let layout = spec.layout();
    json!({
        "layer": name,
        "n": layout.n,
        "k": spec.source_inputs(),
        "format": spec.format().name(),
        "group": layout.group.raw(),
        "factor": spec.factor(),
        "bytes": layout.total_bytes,
        "act_order": spec.input_order().is_some(),
        "packed_k": layout.k,
        "scale_rows": layout.kind.scales.name(),
        "convention": source.convention,
        "scales": source.scales.name(),
        "global_scale": source.global,
        "exact": source.exact,
        "ranks_by_outputs": spec.ranks_by_outputs(),
        "ranks_by_inputs": spec.ranks_by_inputs(),
    })
}

/// Says what is in a store.
pub fn inspect(path: &Path, all: bool, format: Format) -> anyhow::Result<()> {
    let store = PackedStore::open(path)?;
    let files: Vec<_> = store.tensors().files().collect();
    let sizes = files.iter().filter_map(|(file, _)| file.metadata().ok());
    let size = sizes.map(|data| data.len()).sum();
    let text = |key: &str| store.provenance().get(key).cloned().unwrap_or_default();
    let carried: Vec<&str> = store.carried().collect();
    format.line(format!("store      {}", path.display()))?;
    format.line(format!("files      {}, {}", count(files.len(), "file"), bytes(size)))?;
    format.line(format!(
        "packed by  {}, layout version {}",
        text("makaira.tool"),
        text("makaira.layout")
    ))?;
    format.line(format!(
        "found      {}, {} carried over",
        count(store.layers().len(), "layer"),
        count(carried.len(), "tensor")
    ))?;
    // Place and description to how many layers there are, in the order of the first.
    let mut kinds: BTreeMap<(String, String), (usize, usize)> = BTreeMap::new();
    for (at, layer) in store.layers().iter().enumerate() {
        let name = if all { layer.name.clone() } else { place(&layer.name) };
        kinds.entry((name, describe(layer))).or_insert((at, 0)).1 += 1;
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|(_, (at, _))| *at);
    for ((name, what), (_, number)) in kinds {
        let times = if number == 1 { String::new() } else { format!(" ({number} times)") };
        format.line(format!("{name}{times}: {what}"))?;
    }
    for finding in store.tensors().findings() {
        format.line(format!("note: {finding}"))?;
    }
    let findings: Vec<String> = store.tensors().findings().iter().map(|f| f.to_string()).collect();
    format.value(|| {
        json!({
            "store": path,
            "tool": text("makaira.tool"),
            "layout": text("makaira.layout"),
            "source": serde_json::from_str::<Value>(&text("makaira.source")).unwrap_or_default(),
            "files": files.iter().map(|(file, mapped)| json!({ "file": file, "mapped": mapped }))
                .collect::<Vec<_>>(),
            "bytes": size,
            "layers": store.layers().iter().map(to_json).collect::<Vec<_>>(),
            "carried": carried,
            "findings": findings,
        })
    })
}

/// Fails on a store that is damaged, or whose products are wrong.
pub fn verify(path: &Path, args: &verify::Args) -> anyhow::Result<()> {
    let format = args.format;
    let store = PackedStore::open(path)?;
    store.check(default_threads())?;
    let mut numerics = Vec::new();
    let mut num_wrong = 0;
    if args.numerics {
        let seed = args.seed.unwrap_or_else(Random::fresh_seed);
        let mut random = Random::new(seed);
        let device = Device::open(&args.device)?;
        format.line(device.lines().join("\n"))?;
        format.line(format!("seed      {seed}"))?;
        let mut names: Vec<&str> = store.layers().iter().map(|layer| layer.name.as_str()).collect();
        for _ in 0..args.layers.min(names.len()) {
            let name = names.swap_remove((random.bits() % names.len() as u64) as usize);
            let packed = store.packed(name)?;
            let trial = Trial::of_packed(&device, packed)?;
            store.check_unchanged()?;
            let (n, k) = (packed.spec().layout().n, packed.spec().source_inputs());
            format.line(format!("layer     {name}: {n} x {k}"))?;
            for m in &args.m {
                let x = random.activations(*m as usize * k);
                let outcome = trial.product("random", &x, None)?;
                format.line(outcome.lines().join("\n"))?;
                num_wrong += usize::from(!outcome.is_ok());
                let mut answer = outcome.to_json();
                answer["layer"] = json!(name);
                numerics.push(answer);
            }
        }
    }
    format.value(|| {
        json!({
            "store": path,
            "layers": store.layers().len(),
            "carried": store.carried().count(),
            "numerics": numerics,
            "ok": num_wrong == 0,
        })
    })?;
    if num_wrong > 0 {
        bail!("{} outside their bounds in {}", count(num_wrong, "product"), path.display());
    }
    let layers = count(store.layers().len(), "packed layer");
    format.line(format!("ok: {layers}, every checksum agrees"))
}
