//! What was measured of a chain, as a line and as JSON.

use serde_json::{Value, json};

use super::super::report::{Others, cell};
use super::super::timer::Timing;
use super::device::Left;
use crate::problem::KindArgs;

/// Bytes that a microsecond of pure reading takes on an H200: what a chain is compared with.
pub const READ_BYTES_PER_US: f64 = 4.65e6;

/// The heading of [`Outcome::line`].
pub const HEADING: &str =
    "model    M launches      us  ±% x 4.65 x ceil   early  ±% x 4.65 x ceil x fp16    rms err";

/// A measured chain.
pub struct Outcome {
    pub name: String,
    pub kind: KindArgs,
    pub m: u64,
    pub num_launches: usize,
    pub weight_bytes: usize,
    pub configs: Vec<String>,
    pub answer: Result<Left, String>,
    pub timing: Option<Timing>,
    pub early: Option<Timing>,
    /// The sum of the read ceilings of all products.
    pub ceiling_us: Option<f64>,
}

impl Outcome {
    /// Microseconds of the whole chain.
    fn us(&self, timing: Option<Timing>) -> Option<f64> {
        Some(timing?.mean() * self.num_launches as f64)
    }

    /// Microseconds of a pure read of all weights.
    fn read_us(&self) -> f64 {
        self.weight_bytes as f64 / READ_BYTES_PER_US
    }

    fn fp16_us(&self, fp16: &Others) -> Option<f64> {
        fp16.us(&format!("chain_{}", self.name), self.m, "us")
    }

    /// A line of the table.
    pub fn line(&self, fp16: &Others) -> String {
        let order = |timing: Option<Timing>| {
            let us = self.us(timing);
            [
                cell(us, 7, 0),
                cell(timing.map(|timing| 100.0 * timing.spread()), 3, 0),
                cell(us.map(|us| us / self.read_us()), 6, 2),
                cell(us.zip(self.ceiling_us).map(|(us, ceiling)| us / ceiling), 6, 2),
            ]
            .join(" ")
        };
        let fastest = self.us(self.early).or(self.us(self.timing));
        let left = self.answer.as_ref();
        [
            format!("{:<6} {:>3} {:>8}", self.name, self.m, self.num_launches),
            order(self.timing),
            order(self.early),
            cell(self.fp16_us(fp16).zip(fastest).map(|(fp16, us)| fp16 / us), 6, 2),
            cell(left.ok().map(|left| left.rms), 6, 2),
            left.map_or_else(|why| format!("WRONG  {why}"), |left| format!("{:.1e}", left.error)),
        ]
        .join(" ")
    }

    /// All of it as JSON.
    pub fn json(&self, fp16: &Others) -> Value {
        let ratio = |timing, over: Option<f64>| self.us(timing).zip(over).map(|(us, by)| us / by);
        let runs = |timing: Option<Timing>| {
            timing.map(|timing| timing.us.map(|us| us * self.num_launches as f64))
        };
        let (read, left) = (Some(self.read_us()), self.answer.as_ref().ok());
        json!({
            "model": self.name, "type": self.kind.weight.to_string(),
            "activation": self.kind.activation.name(), "group": self.kind.raw_group(), "m": self.m, "num_launches": self.num_launches,
            "weight_bytes": self.weight_bytes, "configs": self.configs,
            "us": self.us(self.timing), "run_us": runs(self.timing),
            "early_us": self.us(self.early), "early_run_us": runs(self.early),
            "read_us": self.read_us(), "read_gb_per_s": READ_BYTES_PER_US / 1e3,
            "ceiling_us": self.ceiling_us,
            "of_read": ratio(self.timing, read), "early_of_read": ratio(self.early, read),
            "of_ceiling": ratio(self.timing, self.ceiling_us),
            "early_of_ceiling": ratio(self.early, self.ceiling_us),
            "fp16_us": self.fp16_us(fp16),
            "rel_err": left.map(|left| left.error), "rms": left.map(|left| left.rms),
            "bits": left.map(|left| format!("{:016x}", left.bits)),
            "wrong": self.answer.as_ref().err(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        let timing = |us| Some(Timing { us: [us, us], num_launches: 128 });
        Outcome {
            name: "8b".to_owned(),
            kind: KindArgs::default(),
            m: 16,
            num_launches: 128,
            weight_bytes: 3_600_000_000,
            configs: vec!["marlin:1".to_owned()],
            answer: Ok(Left { bits: 0xabc, rms: 0.8, error: 2.2e-4 }),
            timing: timing(10.0),
            early: timing(8.0),
            ceiling_us: Some(1000.0),
        }
    }

    #[test]
    fn a_chain_is_compared_with_the_read_of_all_its_weights() {
        let text = r#"{"rows": [{"shape": "chain_8b", "m": 16, "us": 4096.0}]}"#;
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fp16.json");
        std::fs::write(&path, text).expect("writes");
        let fp16 = Others::read(&path).expect("reads");
        let json = outcome().json(&fp16);
        assert_eq!((&json["type"], &json["group"]), (&json!("u4b8"), &json!(128)));
        let number = |name: &str| json[name].as_f64().unwrap_or_else(|| panic!("{name}: {json}"));
        assert_eq!((number("us"), number("early_us")), (1280.0, 1024.0));
        assert!((number("read_us") - 774.2).abs() < 0.1);
        assert!((number("early_of_read") - 1024.0 / 774.19).abs() < 1e-3);
        assert_eq!((number("of_ceiling"), number("early_of_ceiling")), (1.28, 1.024));
        assert_eq!((number("fp16_us"), json["bits"].as_str()), (4096.0, Some("0000000000000abc")));
        let line = outcome().line(&fp16);
        for part in ["   1280", "   1024", " 4.00 ", " 1.02 ", "2.2e-4"] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn columns_stand_under_their_heading_and_a_wrong_answer_says_why() {
        let (none, right) = (Others::default(), outcome());
        let end = HEADING.find("err").expect("a column") - HEADING.matches('±').count();
        assert_eq!(right.line(&none).find("2.2e-4"), Some(end));
        let wrong = Outcome {
            answer: Err("early launch changes bits".to_owned()),
            early: None,
            ceiling_us: None,
            ..right
        };
        let line = wrong.line(&none);
        assert_eq!(line.find("WRONG  early launch changes bits"), Some(end), "{line}");
        assert_eq!(wrong.json(&none)["wrong"], "early launch changes bits");
    }
}
