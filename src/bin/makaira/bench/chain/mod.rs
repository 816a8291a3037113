//! Chains: all linear layers of a model, every weight distinct, in one graph.
//!
//! The products feed each other through buffers in place: the first one of all reads an input of its own,
//! every other one the leading columns of its predecessor's output, so an early launch that reads before
//! its predecessor has written gives other bits. Weights are filled on the device. After the timed graphs
//! every output must be finite, the last layer's products must agree with f64 on a sample, and early
//! launch must have left the same bits as plain order.

mod device;
mod outcome;

use std::time::Instant;

use anyhow::Context as _;
use makaira::kernel::select::Choice;
use makaira::weights::PackedLayout;

use super::ceiling::{self, Ceiling};
use super::plan::Pair;
use super::report::Others;
use super::{CHAIN_MS, Session, reader};
use device::{Chain, Kernels};
use outcome::Outcome;
pub use outcome::READ_BYTES_PER_US;

/// Measures all chains.
///
/// # Errors
/// If a kernel fails or an answer is wrong.
pub fn run(mut session: Session<'_>) -> anyhow::Result<()> {
    let args = session.args;
    let ms = args.ms(&CHAIN_MS);
    let fp16 = args.fp16.as_deref().map(Others::read).transpose()?.unwrap_or_default();
    let mut results = Vec::new();
    let mut num_wrong = 0;
    for model in &args.chain {
        let start = Instant::now();
        let max_m = ms.iter().copied().max().unwrap_or(1);
        let chain = Chain::new(&session.gemm, model, &args.kind, max_m, &mut session.random)?;
        println!(
            "\n{model}; {}; {:.2} GB of codes and scales, {:.1} s to make",
            args.kind.text(),
            chain.weight_bytes() as f64 / 1e9,
            start.elapsed().as_secs_f64()
        );
        let skip_ceilings = args.no_ceiling || args.check_only;
        let ceilings = if skip_ceilings { None } else { Some(ceilings(&session, &chain)?) };
        let mut runs: Vec<(u64, Vec<Pair>)> = Vec::new();
        for m in &ms {
            match &args.sets {
                Some(path) => runs
                    .extend(chain.sets(&session.gemm, *m, path)?.into_iter().map(|set| (*m, set))),
                None => runs.push((*m, chain.choices(&session.gemm, *m)?)),
            }
        }
        session.compile(runs.iter().flat_map(|(_, pairs)| pairs).flat_map(Pair::choices));
        println!("{}", outcome::HEADING);
        for (m, choices) in runs {
            let what = format!("the chain {} at m={m}", model.name);
            let measure = || measure(&session, &chain, m, &choices, ceilings.as_deref());
            let result = session.watchdog.watch(&what, measure).context(what)?;
            num_wrong += usize::from(result.answer.is_err());
            println!("{}", result.line(&fp16));
            results.push(result.json(&fp16));
            session.write_json("chains", results.clone())?;
        }
    }
    anyhow::ensure!(num_wrong == 0, "{num_wrong} of {} chains are wrong", results.len());
    Ok(())
}

/// The best readers of each of a layer's weights.
fn ceilings(session: &Session<'_>, chain: &Chain) -> anyhow::Result<Vec<Ceiling>> {
    let of = |(in_layer, layout): (usize, &PackedLayout)| {
        let mut first = vec![0; layout.total_bytes];
        chain.backend.download(chain.weights[in_layer].ptr(), &mut first)?;
        let per_layer = chain.layouts.len();
        let weight =
            |idx: usize| chain.weights[idx % chain.model.num_layers * per_layer + in_layer].ptr();
        print!("{}: ", chain.model.products[in_layer].name);
        ceiling::measure(session, &weight, layout.total_bytes, reader::sum_of(&first))
    };
    chain.layouts.iter().enumerate().map(of).collect()
}

/// Measures a chain in both orders.
fn measure(
    session: &Session<'_>,
    chain: &Chain,
    m: u64,
    pairs: &[Pair],
    ceilings: Option<&[Ceiling]>,
) -> anyhow::Result<Outcome> {
    let num_launches = chain.model.num_launches();
    let order = |kernels: &Kernels, early: bool, timed: bool| {
        let launch = |idx, stream| chain.launch(&session.gemm, kernels, idx, early, stream);
        chain.poison(m)?;
        let timing = if timed {
            Some(session.timer.time_graph(num_launches, &launch)?)
        } else {
            session.timer.run(num_launches, &launch)?;
            None
        };
        anyhow::Ok((chain.look(kernels)?, timing))
    };
    let timed = !session.args.check_only;
    let kernels = |pick: fn(&Pair) -> Choice| {
        let choices: Vec<Choice> = pairs.iter().map(pick).collect();
        chain.kernels(&session.gemm, m, &choices)
    };
    let mut outcome = Outcome {
        name: chain.model.name.clone(),
        kind: session.args.kind.clone(),
        m,
        num_launches,
        weight_bytes: chain.weight_bytes(),
        configs: pairs.iter().map(Pair::to_string).collect(),
        answer: Err(String::new()),
        timing: None,
        early: None,
        ceiling_us: ceilings.map(|ceilings| {
            ceilings.iter().map(Ceiling::us).sum::<f64>() * chain.model.num_layers as f64
        }),
    };
    (outcome.answer, outcome.timing) = order(&kernels(|pair| pair.plain)?, false, timed)?;
    if session.args.no_early || outcome.answer.is_err() {
        return Ok(outcome);
    }
    let kernels = kernels(|pair| pair.early)?;
    // Other configurations may add in another order; the same ones have the bits already.
    let plain = if pairs.iter().all(Pair::is_one) {
        outcome.answer.clone()
    } else {
        order(&kernels, false, false)?.0
    };
    let (early, timing) = order(&kernels, true, timed)?;
    outcome.early = timing;
    let same = plain.and_then(|plain| match early?.bits == plain.bits {
        true => Ok(()),
        false => Err("other bits than in plain order".to_owned()),
    });
    if let Err(why) = same {
        outcome.answer = Err(format!("early launch: {why}"));
    }
    Ok(outcome)
}
