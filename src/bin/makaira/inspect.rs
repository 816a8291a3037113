//! `makaira inspect`: what is in a checkpoint, without running any of it.
//!
//! Ranks are the degrees of tensor parallelism into which a layer can be cut evenly, without cutting a group.
//! Layers that differ in nothing but the numbers in their names are told in one line. Findings are facts, not
//! verdicts: the exit code is 0 whenever the checkpoint can be opened.

use std::collections::BTreeMap;
use std::path::PathBuf;

use makaira::checkpoint::{Checkpoint, Finding, LayerInfo, ScaleFault, place};
use makaira::store::PackedStore;
use makaira::weights::{PackedLayout, QuantMatrix};
use serde_json::{Value, json};

use crate::output::{Format, bytes, count};
use crate::stored;

/// Larger numbers of ranks are told to programs only.
const MAX_RANKS_TOLD: usize = 16;
/// Scales of one fault that are told one by one for like tensors.
const MAX_LISTED: usize = 4;

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The checkpoint, or a store of packed weights: a directory or a safetensors file.
    checkpoint: PathBuf,
    /// A line for each layer, not for each place in a block.
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    format: Format,
}

/// A layer and what its tensors hold.
pub struct Report {
    /// The layer.
    pub layer: LayerInfo,
    zeros: bool,
    act_order: bool,
    /// Why it cannot be packed, if so.
    pub unpackable: Option<String>,
    /// Why it cannot be read, if so.
    pub refused: Option<String>,
    /// What is odd about it.
    pub findings: Vec<Finding>,
}

/// Runs `inspect`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    // Every finding is part of the answer; the log would only repeat it.
    log::set_max_level(log::LevelFilter::Error);
    if PackedStore::is_at(&args.checkpoint) {
        return stored::inspect(&args.checkpoint, args.all, args.format);
    }
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let reports: Vec<Report> =
        checkpoint.layers().iter().map(|layer| Report::new(&checkpoint, layer)).collect();
    checkpoint.check_unchanged()?;
    let format = args.format;
    for line in text(&checkpoint, args, &reports) {
        format.line(line)?;
    }
    format.value(|| {
        json!({
            "checkpoint": args.checkpoint,
            "label": label(&checkpoint),
            "found": checkpoint.conventions(),
            "files": files(&checkpoint),
            "layers": reports.iter().map(Report::to_json).collect::<Vec<_>>(),
            "ranks": ranks(&reports),
            "findings": checkpoint.findings().iter().map(finding_json).collect::<Vec<_>>(),
        })
    })
}

impl Report {
    /// Reads the small tensors of a layer.
    pub fn new(checkpoint: &Checkpoint, layer: &LayerInfo) -> Self {
        let layer = layer.clone();
        match checkpoint.examine(&layer.name) {
            Ok((matrix, findings)) => {
                let zeros = matrix.is_some_and(|matrix| matrix.zeros().is_some());
                let act_order = matrix.is_some_and(|matrix| matrix.g_idx().is_some());
                let check = matrix.map(|matrix: QuantMatrix<'_>| matrix.check_packable());
                let unpackable = check.and_then(Result::err).map(|error| error.to_string());
                Self { layer, zeros, act_order, unpackable, refused: None, findings }
            }
            Err(error) => {
                let refused = Some(with_causes(error.into()));
                let (zeros, act_order, unpackable, findings) = (false, false, None, Vec::new());
                Self { layer, zeros, act_order, unpackable, refused, findings }
            }
        }
    }

    /// N and K once padded.
    fn padded(&self) -> Option<(usize, usize)> {
        let layout = PackedLayout::new(self.layer.n, self.layer.k, self.layer.group).ok()?;
        Some((layout.n_padded, layout.k_padded))
    }

    /// Everything about the layer but its name.
    fn describe(&self) -> String {
        let LayerInfo { n, k, group, format, scale_type, scale_order, convention, .. } =
            &self.layer;
        let mut text = format!("{n} x {k}, {}, group {group}, {convention}", format.name());
        text.push_str(&format!("; scales {} in {}", scale_type.name(), scale_order.name()));
        if self.zeros {
            text.push_str(", zeros");
        }
        if self.act_order {
            text.push_str(", activation order");
        }
        match self.padded() {
            Some(padded) if padded != (*n, *k) => {
                text.push_str(&format!("; padded to {} x {}", padded.0, padded.1));
            }
            _ => {}
        }
        let by_outputs = numbers(&self.layer.ranks_by_outputs());
        let by_inputs = numbers(&self.layer.ranks_by_inputs(self.act_order));
        text.push_str(&format!("; ranks by outputs {by_outputs}, by inputs {by_inputs}"));
        match (&self.refused, &self.unpackable) {
            (Some(reason), _) => text.push_str(&format!("; REFUSED: {reason}")),
            (None, Some(reason)) => text.push_str(&format!("; does not run: {reason}")),
            (None, None) => {}
        }
        text
    }

    fn to_json(&self) -> Value {
        let layer = &self.layer;
        let padded = self.padded();
        json!({
            "layer": layer.name,
            "n": layer.n,
            "k": layer.k,
            "n_padded": padded.map(|(n, _)| n),
            "k_padded": padded.map(|(_, k)| k),
            "format": layer.format.name(),
            "group": layer.group.raw(),
            "convention": layer.convention,
            "scales": layer.scale_type.name(),
            "scale_order": layer.scale_order.name(),
            "zeros": self.zeros,
            "act_order": self.act_order,
            "expert": layer.expert.map(|(expert, _)| expert),
            "ranks_by_outputs": layer.ranks_by_outputs(),
            "ranks_by_inputs": layer.ranks_by_inputs(self.act_order),
            "refused": self.refused,
            "does_not_run": self.unpackable,
            "findings": self.findings.iter().map(finding_json).collect::<Vec<_>>(),
        })
    }
}

/// An error and its causes, in one line.
pub fn with_causes(error: anyhow::Error) -> String {
    error.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn text(checkpoint: &Checkpoint, args: &Args, reports: &[Report]) -> Vec<String> {
    let files: Vec<_> = checkpoint.tensors().files().collect();
    let size =
        files.iter().filter_map(|(path, _)| path.metadata().ok()).map(|data| data.len()).sum();
    let found = match checkpoint.conventions() {
        names if names.is_empty() => "no quantised layer".to_owned(),
        names => names.join(", "),
    };
    let mut lines = vec![
        format!("checkpoint {}", args.checkpoint.display()),
        format!("files      {}, {}", count(files.len(), "file"), bytes(size)),
        format!("label      {}", label(checkpoint)),
        format!("found      {found}; {}", count(reports.len(), "layer")),
    ];
    if !reports.is_empty() {
        lines.push(format!("ranks      {}", numbers(&ranks(reports))));
    }
    // Place and description to how many layers there are, in the order of the first.
    let mut kinds: BTreeMap<(String, String), (usize, usize)> = BTreeMap::new();
    for (at, report) in reports.iter().enumerate() {
        let name = if args.all { report.layer.name.clone() } else { place(&report.layer.name) };
        kinds.entry((name, report.describe())).or_insert((at, 0)).1 += 1;
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|(_, (at, _))| *at);
    for ((name, what), (_, number)) in kinds {
        let times = if number == 1 { String::new() } else { format!(" ({number} times)") };
        lines.push(format!("{name}{times}: {what}"));
    }
    let of_layers = reports.iter().flat_map(|report| &report.findings);
    let findings = told(checkpoint.findings().iter().chain(of_layers));
    if findings.is_empty() {
        lines.push("nothing odd".to_owned());
    }
    lines.extend(findings.into_iter().map(|finding| format!("note: {finding}")));
    lines
}

/// What the configuration says.
fn label(checkpoint: &Checkpoint) -> String {
    let config = checkpoint.config();
    let file =
        config.path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
    let Some(method) = &config.method else { return "not quantised".to_owned() };
    let fields = ["checkpoint_format", "format", "version"].map(|name| {
        config
            .text(name)
            .ok()
            .flatten()
            .map(|value| format!(", {name} {value}"))
            .unwrap_or_default()
    });
    format!("quant_method {method}{} ({file})", fields.concat())
}

fn files(checkpoint: &Checkpoint) -> Vec<Value> {
    let files = checkpoint.tensors().files();
    files.map(|(path, mapped)| json!({ "file": path, "mapped": mapped })).collect()
}

/// Numbers of ranks that every layer allows in the direction in which models usually cut it.
fn ranks(reports: &[Report]) -> Vec<usize> {
    let of_layer = |report: &Report| match report.layer.is_cut_by_inputs() {
        true => report.layer.ranks_by_inputs(report.act_order),
        false => report.layer.ranks_by_outputs(),
    };
    let each = reports.iter().map(of_layer);
    let all = each.reduce(|all, ranks| all.into_iter().filter(|n| ranks.contains(n)).collect());
    all.unwrap_or_default()
}

/// `1 2 4`; 1 is always among them.
pub fn numbers(list: &[usize]) -> String {
    let told = list.iter().filter(|&&ranks| ranks <= MAX_RANKS_TOLD);
    told.map(usize::to_string).collect::<Vec<_>>().join(" ")
}

/// Findings as texts; of many odd scales of a kind in like tensors only the first are told.
pub fn told<'f>(findings: impl Iterator<Item = &'f Finding>) -> Vec<String> {
    let mut counts: BTreeMap<(String, ScaleFault), usize> = BTreeMap::new();
    let mut texts = Vec::new();
    for finding in findings {
        if let Finding::Scale { tensor, fault, .. } = finding {
            let count = counts.entry((place(tensor), *fault)).or_default();
            *count += 1;
            if *count > MAX_LISTED {
                continue;
            }
        }
        texts.push(finding.to_string());
    }
    let more = counts.into_iter().filter(|(_, count)| *count > MAX_LISTED);
    texts.extend(more.map(|((tensors, fault), count)| {
        format!("tensors {tensors}: {} more scales are {fault}", count - MAX_LISTED)
    }));
    texts
}

/// A finding for programs.
pub fn finding_json(finding: &Finding) -> Value {
    let mut value = json!({ "kind": finding.kind(), "text": finding.to_string() });
    if let Finding::Scale { tensor, group_idx, column, fault, value: scale } = finding {
        value["tensor"] = json!(tensor);
        value["group"] = json!(group_idx);
        value["column"] = json!(column);
        value["fault"] = json!(fault.to_string());
        // A number that JSON has, or none.
        value["value"] = json!(scale.is_finite().then_some(scale));
    }
    value
}
