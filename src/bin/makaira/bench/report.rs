//! What was measured, as a table and as JSON, beside the times of others.
//!
//! Times of the fp16 product of the same card come from a file that `benches/fp16.py` writes; those of other
//! 4-bit kernels from `benches/peers.json`, which says when and where they were measured.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use makaira::kernel::select::Choice;
use serde_json::{Value, json};

use super::layer::Shape;
use super::reader::Variant;
use super::timer::Timing;

/// Peers that the table compares with: their names in `benches/peers.json`.
const PEERS: [(&str, &str); 2] = [("ist_marlin_g128", "IST"), ("vllm_marlin_g128", "vLLM")];

/// The best reader of a shape.
#[derive(Clone, Copy, Debug)]
pub struct Ceiling {
    /// The kernel.
    pub variant: Variant,
    /// Its time.
    pub timing: Timing,
}

/// One measured configuration.
#[derive(Clone, Debug)]
pub struct Row {
    /// The layer.
    pub shape: Shape,
    /// Rows of the product.
    pub m: u64,
    /// Bytes of codes and scales.
    pub weight_bytes: usize,
    /// Configuration, stripe length, prediction.
    pub choice: Choice,
    /// CTAs.
    pub grid: [u32; 2],
    /// Registers per thread.
    pub num_regs: Option<u32>,
    /// Bytes of local memory per thread.
    pub local_bytes: Option<u32>,
    /// Relative error, or what is wrong.
    pub answer: Result<f64, String>,
    /// The time, if the answer is right and it was taken.
    pub timing: Option<Timing>,
    /// The read ceiling of the shape.
    pub ceiling: Option<Ceiling>,
}

/// Times of others: `(shape, m)` to microseconds.
#[derive(Clone, Debug, Default)]
pub struct Others {
    rows: Vec<Value>,
}

impl Others {
    /// Reads a JSON file with a list `rows` of `{shape, m, <name>: us …}`.
    ///
    /// # Errors
    /// If the file cannot be read or is of another form.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("reading {}", path.display()))
    }

    /// The peers that the repository knows.
    pub fn peers() -> Self {
        Self::parse(include_str!("../../../../benches/peers.json"))
            .expect("the file is part of the program")
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut json: Value = serde_json::from_str(text)?;
        match json["rows"].take() {
            Value::Array(rows) => Ok(Self { rows }),
            _ => anyhow::bail!("there is no list `rows`"),
        }
    }

    /// The time under `name` for a layer and a batch.
    pub fn us(&self, shape: &str, m: u64, name: &str) -> Option<f64> {
        let row = self.rows.iter().find(|row| row["shape"] == shape && row["m"] == m)?;
        row[name].as_f64()
    }

    /// The fastest of the compared peers, and its name.
    pub fn best(&self, shape: &str, m: u64) -> Option<(f64, &'static str)> {
        let times = PEERS.iter().filter_map(|(key, name)| Some((self.us(shape, m, key)?, *name)));
        times.min_by(|a, b| a.0.total_cmp(&b.0))
    }
}

impl Row {
    /// `NAME:STRIPE`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.choice.config, self.choice.stripe)
    }

    /// Time, or infinity, for sorting.
    pub fn us(&self) -> f64 {
        self.timing.map_or(f64::INFINITY, |timing| timing.mean())
    }

    fn json(&self, peers: &Others, fp16: &Others) -> Value {
        let Choice { config, stripe, cost } = self.choice;
        let best = peers.best(&self.shape.name, self.m);
        json!({
            "shape": self.shape.name, "n": self.shape.n, "k": self.shape.k, "m": self.m,
            "weight_bytes": self.weight_bytes,
            "config": config.to_string(), "stripe": stripe, "grid": self.grid,
            "regs": self.num_regs, "local_bytes": self.local_bytes,
            "predicted": {
                "total_us": cost.total_us, "memory_us": cost.memory_us,
                "issue_us": cost.issue_us, "fixed_us": cost.fixed_us,
            },
            "rel_err": self.answer.as_ref().ok(), "wrong": self.answer.as_ref().err(),
            "us": self.timing.map(|timing| timing.mean()),
            "run_us": self.timing.map(|timing| timing.us),
            "launches": self.timing.map(|timing| timing.num_launches),
            "ceiling_us": self.ceiling.map(|ceiling| ceiling.timing.mean()),
            "ceiling_reader": self.ceiling.map(|ceiling| ceiling.variant.to_string()),
            "fp16_us": fp16.us(&self.shape.name, self.m, "us"),
            "peer_us": best.map(|best| best.0), "peer": best.map(|best| best.1),
        })
    }
}

/// All rows with the card and the date, as JSON.
pub fn json(card: &str, command: &str, rows: &[Row], peers: &Others, fp16: &Others) -> Value {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let rows: Vec<Value> = rows.iter().map(|row| row.json(peers, fp16)).collect();
    json!({
        "card": card, "command": command,
        "unix_time": since_epoch.map_or(0, |elapsed| elapsed.as_secs()),
        "rows": rows,
    })
}

/// The heading of [`line`].
pub const HEADING: &str = "shape         M      us  ±%   GB/s ceil  x peer        x fp16  pred us   mem issue fixed  err     regs  configuration:stripe";

/// One row of the table.
pub fn line(row: &Row, peers: &Others, fp16: &Others) -> String {
    let Row { shape, m, choice, .. } = row;
    let mut line = format!("{:<11} {m:>3} ", shape.name);
    let us = row.timing.map(|timing| timing.mean());
    let dash = |value: Option<f64>, width: usize, digits: usize| match value {
        Some(value) => format!("{value:>width$.digits$}"),
        None => format!("{:>width$}", "-"),
    };
    let over = |other: Option<f64>| other.zip(us).map(|(other, us)| other / us);
    let peer = peers.best(&shape.name, *m);
    let cost = choice.cost;
    let parts = [
        dash(us, 7, 2),
        dash(row.timing.map(|timing| 100.0 * timing.spread()), 3, 0),
        dash(us.map(|us| row.weight_bytes as f64 / us / 1e3), 6, 0),
        dash(over(row.ceiling.map(|ceiling| ceiling.timing.mean())), 4, 2),
        dash(over(peer.map(|peer| peer.0)), 5, 2),
        format!("{:<7}", peer.map_or(String::new(), |(us, name)| format!("{name} {us:.1}"))),
        dash(over(fp16.us(&shape.name, *m, "us")), 6, 2),
        dash(Some(cost.total_us), 8, 2),
        dash(Some(cost.memory_us), 5, 1),
        dash(Some(cost.issue_us), 5, 1),
        dash(Some(cost.fixed_us), 5, 1),
        match &row.answer {
            Ok(error) => format!("{error:.1e}"),
            Err(_) => "WRONG  ".to_owned(),
        },
        dash(row.num_regs.map(f64::from), 4, 0),
    ];
    line += &parts.join(" ");
    write!(line, "  {}", row.name()).expect("a string takes everything");
    if let Some(bytes) = row.local_bytes.filter(|bytes| *bytes > 0) {
        write!(line, "  {bytes} B local").expect("a string takes everything");
    }
    if let Err(why) = &row.answer {
        write!(line, "  {why}").expect("a string takes everything");
    }
    line
}
