//! What a set of layers lacks, and what contradicts the configuration: the findings of a whole
//! checkpoint.
//!
//! A checkpoint does not say which layers its model has, but models repeat themselves: a *place* is
//! a name with its numbers left out ([`place`]). Where most modules of a place have a layer, one without it is
//! reported; so is a layer that is plain where its likes are quantised.

use std::collections::{BTreeMap, BTreeSet};

use super::{CONVENTIONS, Convention, Finding, LayerInfo, QuantConfig, Tensors, place};

/// All findings of a checkpoint that its headers and configuration show. `whole` says that every
/// layer of the model should be there.
pub(super) fn findings(
    config: &QuantConfig,
    tensors: &Tensors,
    layers: &[LayerInfo],
    whole: bool,
) -> Vec<Finding> {
    let mut findings = tensors.findings().to_vec();
    findings.extend(unused_tensors(tensors, layers));
    if let Some(method) = &config.method {
        if layers.is_empty() {
            findings.push(Finding::NoLayers { method: method.clone() });
        }
        findings.extend(missing_layers(layers));
        findings.extend(left_plain(config, tensors, layers));
        if whole {
            findings.extend(missing_blocks(config, layers));
        }
    }
    let ignored = layers.iter().filter(|layer| config.ignored().contain(&layer.name));
    findings.extend(ignored.map(|layer| Finding::Ignored { layer: layer.name.clone() }));
    let unreadable = config.ignored().unreadable.iter().chain(config.schemes().unreadable());
    findings.extend(unreadable.map(|(pattern, reason)| Finding::Pattern {
        pattern: pattern.clone(),
        reason: reason.clone(),
    }));
    findings.extend(config.schemes().iter().filter_map(|scheme| {
        let scheme_text = scheme.activations.clone()?;
        Some(Finding::Activations { group: scheme.key.clone(), scheme: scheme_text })
    }));
    findings
}

/// Tensors that belong to no quantised layer and are no ordinary weight or bias.
fn unused_tensors<'a>(
    tensors: &'a Tensors,
    layers: &[LayerInfo],
) -> impl Iterator<Item = Finding> + 'a {
    let stems: BTreeSet<(&str, &str)> =
        layers.iter().map(|layer| (layer.convention, layer.stem())).collect();
    let used: Vec<&'static dyn Convention> = CONVENTIONS
        .iter()
        .copied()
        .filter(|convention| stems.iter().any(|(name, _)| *name == convention.name()))
        .collect();
    let is_unused = |name: &&str| {
        let of_layer = used.iter().any(|convention| {
            convention.layer_suffixes().iter().any(|suffix| {
                let stem = name.strip_suffix(suffix);
                stem.is_some_and(|stem| stems.contains(&(convention.name(), stem)))
            })
        });
        !of_layer && !name.ends_with(".weight") && !name.ends_with(".bias")
    };
    let unused: Vec<String> = tensors.names().filter(is_unused).map(str::to_owned).collect();
    unused.into_iter().map(|tensor| Finding::UnusedTensor { tensor })
}

/// Layers that a module lacks although two thirds of its likes have it.
fn missing_layers(layers: &[LayerInfo]) -> Vec<Finding> {
    // Place of the parent to its modules, each with the layers directly in it.
    let mut modules: BTreeMap<String, BTreeMap<&str, BTreeSet<&str>>> = BTreeMap::new();
    for layer in layers {
        if let Some((parent, last)) = layer.name.rsplit_once('.') {
            let likes = modules.entry(place(parent)).or_default();
            likes.entry(parent).or_default().insert(last);
        }
    }
    let mut findings = Vec::new();
    for likes in modules.values() {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        likes.values().flatten().for_each(|last| *counts.entry(last).or_default() += 1);
        for (last, count) in counts {
            // Experts of a stack are numbered; a stack of fewer experts is none the worse.
            let is_usual = last.parse::<usize>().is_err() && 3 * count >= 2 * likes.len();
            let lacking = likes.iter().filter(|(_, has)| is_usual && !has.contains(last));
            findings.extend(lacking.map(|(parent, _)| Finding::MissingLayer {
                layer: format!("{parent}.{last}"),
                present: count,
                modules: likes.len(),
            }));
        }
    }
    findings
}

/// Blocks of the model without any quantised layer.
fn missing_blocks(config: &QuantConfig, layers: &[LayerInfo]) -> Vec<Finding> {
    let Some(num_blocks) = config.num_blocks() else { return Vec::new() };
    // The number behind "layers", as nearly every model calls its blocks.
    let block_of = |layer: &LayerInfo| {
        let mut parts = layer.name.split('.').skip_while(|part| *part != "layers");
        parts.nth(1)?.parse::<usize>().ok()
    };
    let present: BTreeSet<usize> = layers.iter().filter_map(block_of).collect();
    if present.is_empty() {
        return Vec::new();
    }
    (0..num_blocks)
        .filter(|block| !present.contains(block))
        .map(|block| Finding::MissingBlock { block, num_blocks })
        .collect()
}

/// Matrices that are plain where their likes are quantised and that no list leaves out.
fn left_plain(config: &QuantConfig, tensors: &Tensors, layers: &[LayerInfo]) -> Vec<Finding> {
    let places: BTreeSet<String> = layers.iter().map(|layer| place(&layer.name)).collect();
    let stems: BTreeSet<&str> = layers.iter().map(LayerInfo::stem).collect();
    let is_left = |name: &&str| {
        let Some(stem) = name.strip_suffix(".weight") else { return false };
        let is_matrix = tensors.get(name).is_some_and(|tensor| tensor.shape.len() == 2);
        is_matrix
            && !stems.contains(stem)
            && places.contains(&place(stem))
            && !config.ignored().contain(stem)
    };
    let left = tensors.names().filter(is_left);
    left.map(|tensor| Finding::LeftPlain { tensor: tensor.to_owned() }).collect()
}
