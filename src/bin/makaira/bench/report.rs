//! What was measured, as a table and as JSON, beside the times of others.
//!
//! Times of the fp16 product of the same card come from a file that `benches/fp16.py` writes; those of other
//! 4-bit kernels from `benches/peers.json`, which says when and where they were measured.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use makaira::kernel::select::Choice;
use serde_json::{Value, json};

use super::ceiling::Ceiling;
use super::layer::Shape;
use super::plan::Pair;
use super::timer::Timing;
use crate::problem::WeightType;

/// Peers that the table compares with: their names in `benches/peers.json`.
const PEERS: [(&str, &str); 6] = [
    ("ist_marlin_g128", "IST"),
    ("vllm_marlin_g128", "vLLM"),
    ("machete", "Machete"),
    ("machete_best9", "Machete9"),
    ("torch_int4_bf16", "torch"),
    ("gemlite", "gemlite"),
];

/// One measured configuration.
#[derive(Clone, Debug)]
pub struct Row {
    /// The layer.
    pub shape: Shape,
    /// The type of its weights.
    pub weight: WeightType,
    /// Rows of the product.
    pub m: u64,
    /// Bytes of codes and scales.
    pub weight_bytes: usize,
    /// Configurations, stripe lengths, predictions.
    pub pair: Pair,
    /// CTAs, in plain order like what follows.
    pub grid: [u32; 2],
    /// Registers per thread.
    pub num_regs: Option<u32>,
    /// Bytes of local memory per thread.
    pub local_bytes: Option<u32>,
    /// Relative error, or what is wrong.
    pub answer: Result<f64, String>,
    /// The time in plain order, if the answer is right and it was taken.
    pub timing: Option<Timing>,
    /// The time with early launch, likewise.
    pub early: Option<Timing>,
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
    /// A row of which nothing is measured yet.
    pub fn new(shape: &Shape, weight: WeightType, m: u64, weight_bytes: usize, pair: Pair) -> Self {
        Self {
            shape: shape.clone(),
            weight,
            m,
            weight_bytes,
            pair,
            grid: [0; 2],
            num_regs: None,
            local_bytes: None,
            answer: Err("not measured".to_owned()),
            timing: None,
            early: None,
            ceiling: None,
        }
    }

    /// Time in plain order, or infinity, for sorting.
    pub fn us(&self) -> f64 {
        self.timing.map_or(f64::INFINITY, |timing| timing.mean())
    }

    /// Operations in millions: with a time in microseconds, TFLOP/s.
    fn mega_ops(&self) -> f64 {
        2.0 * self.m as f64 * self.shape.n as f64 * self.shape.k as f64 / 1e6
    }

    /// Read ceiling over a time: the fraction of it that is reached.
    fn of_ceiling(&self, timing: Option<Timing>) -> Option<f64> {
        Some(self.ceiling.as_ref()?.us() / timing?.mean())
    }

    /// The row as JSON, with the times of others.
    pub fn json(&self, peers: &Others, fp16: &Others) -> Value {
        let Choice { config, stripe, cost } = self.pair.plain;
        let best = peers.best(&self.shape.name, self.m);
        let early = self.early;
        json!({
            "shape": self.shape.name, "n": self.shape.n, "k": self.shape.k, "m": self.m,
            "type": self.weight.to_string(), "activation": config.kind.activation.name(),
            "group": config.group.raw(),
            "weight_bytes": self.weight_bytes,
            "config": config.to_string(), "stripe": stripe, "grid": self.grid,
            "early_config": self.pair.early.config.to_string(),
            "early_stripe": self.pair.early.stripe,
            "regs": self.num_regs, "local_bytes": self.local_bytes,
            "predicted": {
                "total_us": cost.total_us, "memory_us": cost.memory_us,
                "issue_us": cost.issue_us, "fixed_us": cost.fixed_us,
            },
            "rel_err": self.answer.as_ref().ok(), "wrong": self.answer.as_ref().err(),
            "us": self.timing.map(|timing| timing.mean()),
            "run_us": self.timing.map(|timing| timing.us),
            "launches": self.timing.map(|timing| timing.num_launches),
            "early_us": early.map(|timing| timing.mean()),
            "early_run_us": early.map(|timing| timing.us),
            "of_ceiling": self.of_ceiling(self.timing), "early_of_ceiling": self.of_ceiling(early),
            "tflops": self.timing.map(|timing| self.mega_ops() / timing.mean()),
            "early_tflops": early.map(|timing| self.mega_ops() / timing.mean()),
            "ceiling_us": self.ceiling.as_ref().map(Ceiling::us),
            "readers": self.ceiling.as_ref().map(Ceiling::json),
            "fp16_us": fp16.us(&self.shape.name, self.m, "us"),
            "peer_us": best.map(|best| best.0), "peer": best.map(|best| best.1),
            "prototype_us": peers.us(&self.shape.name, self.m, "prototype"),
            "prototype_early_us": peers.us(&self.shape.name, self.m, "prototype_early"),
        })
    }
}

/// A list of results under `name`, with the card and the date, as JSON.
pub fn document(card: &str, command: &str, name: &str, results: Vec<Value>) -> Value {
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    json!({
        "card": card, "command": command,
        "unix_time": since_epoch.map_or(0, |elapsed| elapsed.as_secs()),
        name: results,
    })
}

/// A number in a column of the table, or a dash.
pub fn cell(value: Option<f64>, width: usize, digits: usize) -> String {
    match value {
        Some(value) => format!("{value:>width$.digits$}"),
        None => format!("{:>width$}", "-"),
    }
}

/// The heading of [`line`].
pub const HEADING: &str = "shape          M       us  ±% ceil    early  ±% ceil   GB/s TFLOP/s x fp16 x proto x peer                pred us err     regs  configuration:stripe";

/// One row of the table.
pub fn line(row: &Row, peers: &Others, fp16: &Others) -> String {
    let Row { shape, m, pair, early, .. } = row;
    let us = row.timing.map(|timing| timing.mean());
    let over = |other: Option<f64>| other.zip(us).map(|(other, us)| other / us);
    let peer = peers.best(&shape.name, *m);
    let order = |timing: Option<Timing>| {
        [
            cell(timing.map(|timing| timing.mean()), 8, 2),
            cell(timing.map(|timing| 100.0 * timing.spread()), 3, 0),
            cell(row.of_ceiling(timing), 4, 2),
        ]
        .join(" ")
    };
    let parts = [
        format!("{:<11} {m:>4}", shape.name),
        order(row.timing),
        order(*early),
        cell(us.map(|us| row.weight_bytes as f64 / us / 1e3), 6, 0),
        cell(us.map(|us| row.mega_ops() / us), 7, 0),
        cell(over(fp16.us(&shape.name, *m, "us")), 6, 2),
        cell(over(peers.us(&shape.name, *m, "prototype")), 7, 2),
        cell(over(peer.map(|peer| peer.0)), 6, 2),
        format!("{:<14}", peer.map_or(String::new(), |(us, name)| format!("{name} {us:.1}"))),
        cell(Some(pair.plain.cost.total_us), 7, 1),
        match &row.answer {
            Ok(error) => format!("{error:<7.1e}"),
            Err(_) => "WRONG  ".to_owned(),
        },
        cell(row.num_regs.map(f64::from), 4, 0),
    ];
    let mut line = parts.join(" ");
    write!(line, "  {pair}").expect("a string takes everything");
    if let Some(bytes) = row.local_bytes.filter(|bytes| *bytes > 0) {
        write!(line, "  {bytes} B local").expect("a string takes everything");
    }
    if let Err(why) = &row.answer {
        write!(line, "  {why}").expect("a string takes everything");
    }
    line
}

#[cfg(test)]
mod tests {
    use makaira::backend::Backend;
    use makaira::emu::EmuBackend;
    use makaira::kernel::{Kind, select};
    use makaira::weights::Group;

    use super::super::reader::variants;
    use super::*;

    fn row(m: u64) -> Row {
        let backend = EmuBackend::h200_like(132);
        let shape: Shape = "8b_o".parse().expect("a name");
        let problem = shape.problem(Kind::U4B8, m, Group::Size(128));
        let choice = select::choose(&problem, backend.device()).expect("there is a kernel");
        let timing = |us| Timing { us: [us, us + 0.02], num_launches: 4 };
        let readers = variants(backend.device().arch).into_iter();
        let readers =
            readers.zip(1..).map(|(variant, idx)| (variant, timing(9.0 / f64::from(idx))));
        let readers: Vec<_> = readers.collect();
        let mut row = Row::new(&shape, WeightType::U4B8, m, 8_650_752, Pair::both(choice));
        row.answer = Ok(2.1e-4);
        row.timing = Some(timing(6.0));
        row.early = Some(timing(4.0));
        row.ceiling = Some(Ceiling::new(readers));
        row
    }

    #[test]
    fn a_row_has_both_orders_as_fractions_of_the_best_reader() {
        let row = row(16);
        let fp16 = Others::parse(r#"{"rows": [{"shape": "8b_o", "m": 16, "us": 12.0}]}"#);
        let json = row.json(&Others::peers(), &fp16.expect("parses"));
        let number = |name: &str| json[name].as_f64().unwrap_or_else(|| panic!("{name}: {json}"));
        let ceiling = number("ceiling_us");
        let readers = json["readers"].as_array().expect("readers");
        assert_eq!(readers.len(), variants(EmuBackend::h200_like(1).device().arch).len());
        assert!(readers.iter().all(|reader| reader["us"].as_f64().is_some_and(|us| us >= ceiling)));
        assert!((number("of_ceiling") * number("us") / ceiling - 1.0).abs() < 1e-9);
        assert!((number("early_of_ceiling") * number("early_us") / ceiling - 1.0).abs() < 1e-9);
        // 2 x 16 x 4096 x 4096 operations in 6.01 us.
        assert!((number("tflops") - 89.3).abs() < 0.1, "{}", number("tflops"));
        assert!(number("early_tflops") > number("tflops"));
        assert_eq!((number("fp16_us"), &json["wrong"]), (12.0, &Value::Null));
        assert_eq!((&json["type"], &json["activation"]), (&json!("u4b8"), &json!("f16")));
        assert_eq!(json["group"], 128);
        assert_eq!((&json["peer"], number("peer_us")), (&json!("vLLM"), 9.287));
    }

    #[test]
    fn the_table_keeps_its_columns_with_and_without_times() {
        let (peers, fp16) = (Others::peers(), Others::default());
        let full = row(4096);
        let mut bare = row(2);
        (bare.timing, bare.early, bare.ceiling) = (None, None, None);
        bare.answer = Err("3 NaN".to_owned());
        let name = HEADING.find("configuration:stripe").expect("the last column");
        for row in [&full, &bare] {
            let line = line(row, &peers, &fp16);
            assert_eq!(line.find("marlin_"), Some(name - HEADING.matches('±').count()), "{line}");
        }
        assert!(line(&bare, &peers, &fp16).ends_with("3 NaN"));
    }

    #[test]
    fn the_document_names_its_list() {
        let document = document("a card", "makaira bench", "chains", vec![json!({"m": 1})]);
        assert_eq!(document["chains"][0]["m"], 1);
        assert!(document["unix_time"].as_u64().is_some_and(|time| time > 1_700_000_000));
    }
}
