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
use super::report::Others;
use super::{CHAIN_MS, Session, reader};
use device::Chain;
use outcome::Outcome;

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
        let chain = Chain::new(&session.gemm, model, args.group, max_m, &mut session.random)?;
        println!(
            "\n{model}; {:.2} GB of codes and scales, {:.1} s to make",
            chain.weight_bytes() as f64 / 1e9,
            start.elapsed().as_secs_f64()
        );
        let skip_ceilings = args.no_ceiling || args.check_only;
        let ceilings = if skip_ceilings { None } else { Some(ceilings(&session, &chain)?) };
        let choices: Vec<Vec<Choice>> =
            ms.iter().map(|m| chain.choices(*m)).collect::<Result<_, _>>()?;
        session.compile(choices.iter().flatten());
        println!("{}", outcome::HEADING);
        for (m, choices) in ms.iter().zip(choices) {
            let what = format!("the chain {} at m={m}", model.name);
            let measure = || measure(&session, &chain, *m, &choices, ceilings.as_deref());
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
    choices: &[Choice],
    ceilings: Option<&[Ceiling]>,
) -> anyhow::Result<Outcome> {
    let kernels = chain.kernels(&session.gemm, m, choices)?;
    let num_launches = chain.model.num_launches();
    let order = |early: bool| {
        let launch = |idx, stream| chain.launch(&session.gemm, &kernels, idx, early, stream);
        chain.poison(m)?;
        let timing = if session.args.check_only {
            session.timer.run(num_launches, &launch)?;
            None
        } else {
            Some(session.timer.time_graph(num_launches, &launch)?)
        };
        anyhow::Ok((chain.look(&kernels)?, timing))
    };
    let mut outcome = Outcome {
        name: chain.model.name.clone(),
        m,
        num_launches,
        weight_bytes: chain.weight_bytes(),
        configs: choices.iter().map(|c| format!("{}:{}", c.config, c.stripe)).collect(),
        answer: Err(String::new()),
        timing: None,
        early: None,
        ceiling_us: ceilings.map(|ceilings| {
            ceilings.iter().map(Ceiling::us).sum::<f64>() * chain.model.num_layers as f64
        }),
    };
    (outcome.answer, outcome.timing) = order(false)?;
    if !session.args.no_early {
        let (answer, timing) = order(true)?;
        outcome.early = timing;
        match (&outcome.answer, answer) {
            (Ok(plain), Ok(early)) if plain.bits == early.bits => {}
            (Ok(_), Ok(_)) => outcome.answer = Err("early launch changes bits".to_owned()),
            (Ok(_), Err(why)) => outcome.answer = Err(format!("early launch: {why}")),
            (Err(_), _) => {}
        }
    }
    Ok(outcome)
}
