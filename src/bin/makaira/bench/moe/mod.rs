//! Mixtures of experts: one launch for a stack of experts, beside one launch for each expert that has rows.
//!
//! Tokens choose their experts at random, each expert as probably as any other. Launches take turns among some such
//! batches, and among copies of the stack where it is small, so that weights come from memory. The time of a pure
//! read of the experts that have rows is the bound of decoding. A batch's lists, made on the device, and its product
//! are checked before anything is timed.

mod device;
mod model;

use std::time::Instant;

use anyhow::Context as _;
use makaira::gemm::experts::Routed;
use serde_json::{Value, json};

use super::chain::READ_BYTES_PER_US;
use super::report::cell;
use super::timer::Timing;
use super::{Session, in_order};
use device::{Batch, Stack};
pub use model::MoeModel;

/// Numbers of tokens.
const TOKENS: [u64; 13] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Batches that launches take turns among.
const NUM_BATCHES: usize = 8;

/// The heading of [`Outcome::line`].
const HEADING: &str = "product  tokens   rows experts  route      us  ±% x 4.65   early  ±% x 4.65  singles x one    rms err";

/// A measured product.
struct Outcome {
    model: String,
    product: String,
    tokens: u64,
    rows: u64,
    tile_m: u32,
    /// Experts with rows, on average over the batches.
    num_active: f64,
    /// Bytes of those.
    active_bytes: f64,
    answer: Result<f64, String>,
    /// The making of the lists.
    route: Option<Timing>,
    /// One launch.
    one: Option<Timing>,
    early: Option<Timing>,
    /// One launch for each expert.
    singles: Option<Timing>,
}

impl Outcome {
    fn read_us(&self) -> f64 {
        self.active_bytes / READ_BYTES_PER_US
    }

    fn line(&self) -> String {
        let us = |timing: Option<Timing>| timing.map(|timing| timing.mean());
        let order = |timing: Option<Timing>| {
            [
                cell(us(timing), 7, 1),
                cell(timing.map(|timing| 100.0 * timing.spread()), 3, 0),
                cell(us(timing).map(|us| us / self.read_us()), 6, 2),
            ]
            .join(" ")
        };
        [
            format!(
                "{:<8} {:>6} {:>6} {:>7.1}",
                self.product, self.tokens, self.rows, self.num_active
            ),
            cell(us(self.route), 6, 1),
            order(self.one),
            order(self.early),
            cell(us(self.singles), 8, 1),
            cell(us(self.singles).zip(us(self.one)).map(|(singles, one)| singles / one), 5, 2),
            match &self.answer {
                Ok(error) => format!("{error:10.1e}"),
                Err(why) => format!("WRONG  {why}"),
            },
        ]
        .join(" ")
    }

    fn json(&self) -> Value {
        let us = |timing: Option<Timing>| timing.map(|timing| timing.mean());
        let runs = |timing: Option<Timing>| timing.map(|timing| timing.us);
        json!({
            "model": self.model, "product": self.product, "tokens": self.tokens, "rows": self.rows,
            "tile_m": self.tile_m, "active_experts": self.num_active, "active_bytes": self.active_bytes,
            "read_us": self.read_us(), "read_gb_per_s": READ_BYTES_PER_US / 1e3,
            "route_us": us(self.route), "us": us(self.one), "run_us": runs(self.one),
            "early_us": us(self.early), "early_run_us": runs(self.early),
            "singles_us": us(self.singles), "singles_run_us": runs(self.singles),
            "rel_err": self.answer.as_ref().ok(), "wrong": self.answer.as_ref().err(),
        })
    }
}

/// Measures all models.
///
/// # Errors
/// If a kernel fails or an answer is wrong.
pub fn run(mut session: Session<'_>) -> anyhow::Result<()> {
    let args = session.args;
    let tokens = args.ms(&TOKENS);
    let max_tokens = tokens.iter().copied().max().unwrap_or(1);
    let mut results = Vec::new();
    let mut num_wrong = 0;
    for model in &args.moe {
        println!("\n{model}; {}", args.kind.text());
        for product in 0..model.products.len() {
            let (start, max_rows) = (Instant::now(), model.rows(max_tokens));
            let stack = Stack::new(
                &session.gemm,
                (model, product),
                &args.kind,
                max_rows,
                !args.check_only,
                &mut session.random,
            )?;
            println!(
                "{}: {} copies of {:.2} GB, {:.1} s to make\n{HEADING}",
                stack.shape.name,
                stack.copies.len(),
                stack.expert_bytes() as f64 * f64::from(stack.num_experts()) / 1e9,
                start.elapsed().as_secs_f64()
            );
            for tokens in &tokens {
                let what = format!("{} {} of {tokens} tokens", model.name, stack.shape.name);
                let watchdog = session.watchdog.clone();
                let result =
                    measure(&mut session, model, &stack, *tokens, &watchdog).context(what)?;
                num_wrong += usize::from(result.answer.is_err());
                println!("{}", result.line());
                results.push(result.json());
                session.write_json("moe", results.clone())?;
            }
        }
    }
    anyhow::ensure!(num_wrong == 0, "{num_wrong} of {} products are wrong", results.len());
    Ok(())
}

/// Measures a product for a number of tokens.
fn measure(
    session: &mut Session<'_>,
    model: &MoeModel,
    stack: &Stack,
    tokens: u64,
    watchdog: &super::timer::Watchdog,
) -> anyhow::Result<Outcome> {
    let num_batches = if session.args.check_only { 1 } else { NUM_BATCHES };
    let batches: Vec<Batch> = (0..num_batches)
        .map(|_| Batch::new(&session.gemm, model, tokens, &mut session.random))
        .collect::<Result<_, _>>()?;
    let gemm = &session.gemm;
    let name = |what: &str| format!("{what} for {tokens} tokens");
    // The first call compiles.
    let routed: Vec<Routed<'_>> = watchdog.watch(name("the lists"), || {
        let stream = makaira::Stream::default();
        let routed = batches.iter().map(|batch| batch.route(gemm, stream.into()));
        let routed = routed.collect::<Result<_, _>>()?;
        gemm.backend().synchronize(stream)?;
        anyhow::Ok(routed)
    })?;
    let num_active =
        batches.iter().map(|batch| batch.num_active() as f64).sum::<f64>() / num_batches as f64;
    let mut outcome = Outcome {
        model: model.name.clone(),
        product: stack.shape.name.clone(),
        tokens,
        rows: model.rows(tokens),
        tile_m: routed[0].tile_m(),
        num_active,
        active_bytes: num_active * stack.expert_bytes() as f64,
        answer: Ok(0.0),
        route: None,
        one: None,
        early: None,
        singles: None,
    };
    let one = |early: bool| {
        let routed = &routed;
        move |idx: usize, stream| {
            stack.launch(gemm, routed[idx % num_batches], idx, in_order(stream, early))
        }
    };
    outcome.answer = watchdog.watch(name("one launch"), || {
        for batch in &batches {
            if let Err(why) = batch.check()? {
                return Ok(Err(why));
            }
        }
        stack.poison()?;
        session.timer.run(1, &one(false))?;
        stack.check(&batches[0], &mut session.random.clone())
    })?;
    if session.args.check_only || outcome.answer.is_err() {
        return Ok(outcome);
    }
    outcome.one = Some(watchdog.watch(name("one launch"), || session.timer.time(&one(false)))?);
    if !session.args.no_early {
        outcome.early =
            Some(watchdog.watch(name("one launch"), || session.timer.time(&one(true)))?);
    }
    let route = |idx: usize, stream: makaira::Stream| {
        batches[idx % num_batches].route(gemm, stream.into()).map(|_| ())
    };
    outcome.route = Some(watchdog.watch(name("the lists"), || session.timer.time(&route))?);
    let (choices, workspace) = stack.prepare_singles(gemm, &batches)?;
    super::load_all(gemm, choices.iter());
    let singles = |idx: usize, stream: makaira::Stream| {
        let batch = &batches[idx % num_batches];
        stack.launch_singles(gemm, batch, &workspace, idx, stream.into())
    };
    outcome.singles = Some(watchdog.watch(name("a launch for each"), || {
        session.timer.run(num_batches, &singles)?;
        session.timer.time(&singles)
    })?);
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        let timing = |us| Some(Timing { us: [us, us], num_launches: 64 });
        Outcome {
            model: "mixtral".to_owned(),
            product: "gateup".to_owned(),
            tokens: 16,
            rows: 32,
            tile_m: 8,
            num_active: 7.5,
            active_bytes: 465e6,
            answer: Ok(2.2e-4),
            route: timing(3.5),
            one: timing(120.0),
            early: timing(110.0),
            singles: timing(240.0),
        }
    }

    #[test]
    fn products_are_compared_with_the_read_of_active_experts_and_with_singles() {
        let line = outcome().line();
        for part in ["gateup ", " 32 ", " 7.5 ", " 1.20 ", " 1.10 ", " 240.0 ", " 2.00 ", "2.2e-4"]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
        let end = HEADING.chars().count();
        assert_eq!(line.chars().count(), end, "{HEADING}\n{line}");
        let json = outcome().json();
        assert_eq!((&json["read_us"], &json["singles_us"]), (&json!(100.0), &json!(240.0)));
        let wrong = Outcome { answer: Err("other rows".to_owned()), one: None, ..outcome() };
        assert!(wrong.line().ends_with("WRONG  other rows"));
        assert_eq!(wrong.json()["wrong"], "other rows");
    }
}
