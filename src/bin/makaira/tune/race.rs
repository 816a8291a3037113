//! The measurement of one layer's candidates.

use anyhow::Context as _;
use makaira::backend::Stream;
use makaira::gemm::{Gemm, Prepared, Workspace};
use makaira::jit::GpuKernel;
use makaira::kernel::Problem;
use makaira::kernel::select::{self, Choice};

use super::verdict::{Timed, Verdict, same};
use crate::bench::layer::{self, Layer, Shape};
use crate::bench::operands::Operands;
use crate::bench::reference::Reference;
use crate::bench::timer::{Timer, Watchdog};
use crate::bench::{error_limit, in_order, load_all};
use crate::problem::KindArgs;

/// The fastest of each order are timed again, and their times averaged, before one of them wins.
const FINALISTS: usize = 3;

/// A random layer on the card, copied often enough that no copy is in L2 when its turn comes.
pub struct Race<'g> {
    gemm: &'g Gemm,
    operands: Operands,
    reference: Reference,
}

/// Times of all candidates that were right, and what was wrong with the others.
#[derive(Default)]
pub struct Outcome {
    /// In plain order, and with early launch.
    timed: [Vec<Timed>; 2],
    /// One line each.
    pub wrong: Vec<String>,
}

impl Outcome {
    /// The winner, of the mean of both orders so that both give the same bits, as either order sees it.
    pub fn verdicts(&self, current: &Choice) -> Option<[Verdict; 2]> {
        let [plain, early] = &self.timed;
        let mean =
            |(plain, early): (&Timed, &Timed)| Timed { us: (plain.us + early.us) / 2.0, ..*plain };
        let means: Vec<Timed> = plain.iter().zip(early).map(mean).collect();
        let verdict = Verdict::of(&means, current)?;
        let in_order = |timed: &Vec<Timed>| {
            let us = |choice: &Choice| {
                timed.iter().find(|timed| same(&timed.choice, choice)).map(|timed| timed.us)
            };
            let us_after = us(&verdict.after.choice)?;
            let after = Timed { us: us_after, ..verdict.after };
            Some(Verdict { before: (*current, us(current)), after, ..verdict })
        };
        Some([in_order(plain)?, in_order(early)?])
    }

    /// The fastest candidates of either order.
    fn finalists(&self) -> Vec<Choice> {
        let mut finalists: Vec<Choice> = Vec::new();
        for timed in &self.timed {
            let mut timed = timed.clone();
            timed.sort_by(|a, b| a.us.total_cmp(&b.us));
            for Timed { choice, .. } in timed.into_iter().take(FINALISTS) {
                if !finalists.iter().any(|known| same(known, &choice)) {
                    finalists.push(choice);
                }
            }
        }
        finalists
    }

    /// Averages a candidate's times with new ones.
    fn again(&mut self, choice: &Choice, us: [f64; 2]) {
        for (timed, us) in self.timed.iter_mut().zip(us) {
            if let Some(timed) = timed.iter_mut().find(|timed| same(&timed.choice, choice)) {
                timed.us = (timed.us + us) / 2.0;
            }
        }
    }
}

impl<'g> Race<'g> {
    /// A layer of this shape and type, and activations for batches of up to the largest of `ms`.
    pub fn new(
        gemm: &'g Gemm,
        shape: &Shape,
        kind: &KindArgs,
        ms: &[u64],
        seeds: [u64; 3],
    ) -> anyhow::Result<Self> {
        let KindArgs { weight, activation, .. } = *kind;
        let layer = Layer::random(shape, weight, kind.group(shape.k)?, seeds[0]);
        let packed = layer.pack()?;
        let max_m = ms.iter().copied().max().unwrap_or(1) as usize;
        let a = layer::random_activations(activation, max_m, shape.k, seeds[1]);
        let reference = Reference::new(&layer.matrix()?, activation, &a, ms, seeds[2]);
        let operands = Operands::new(gemm, &packed, activation, &a, true)?;
        Ok(Self { gemm, operands, reference })
    }

    /// Compiles the kernels of all choices, several at a time.
    pub fn load<'c>(&self, choices: impl Iterator<Item = &'c Choice>) {
        load_all(self.gemm, choices);
    }

    /// Measures all candidates. `step` is told what begins, once for each of them.
    ///
    /// # Errors
    /// If the device fails; a candidate that is refused or gives a wrong product is noted.
    pub fn run(
        &self,
        timer: &Timer,
        watchdog: &Watchdog,
        problem: &Problem,
        choices: &[Choice],
        mut step: impl FnMut(&str),
    ) -> anyhow::Result<Outcome> {
        let mut outcome = Outcome::default();
        let measure = |choice: &Choice| {
            let what = format!("m={} {} stripe {}", problem.m, choice.config, choice.stripe);
            let measured = watchdog.watch(&what, || self.measure(timer, problem, *choice));
            measured.with_context(|| what.clone()).map(|us| us.map_err(|why| (what, why)))
        };
        for choice in choices {
            step(&choice.config.to_string());
            match measure(choice)? {
                Ok(us) => {
                    for (timed, us) in outcome.timed.iter_mut().zip(us) {
                        timed.push(Timed { choice: *choice, us });
                    }
                }
                Err((what, why)) => outcome.wrong.push(format!("{what}: {why}")),
            }
        }
        for choice in outcome.finalists() {
            if let Ok(us) = measure(&choice)? {
                outcome.again(&choice, us);
            }
        }
        Ok(outcome)
    }

    /// Microseconds in plain order and with early launch, or what is wrong with the candidate.
    fn measure(
        &self,
        timer: &Timer,
        problem: &Problem,
        choice: Choice,
    ) -> anyhow::Result<Result<[f64; 2], String>> {
        let prepared = match self.gemm.prepare_choice(choice) {
            Ok(prepared) => prepared,
            Err(error) => return Ok(Err(format!("{:#}", anyhow::Error::from(error)))),
        };
        let problem = Problem { rows: choice.config.rows, ..*problem };
        let mut needs = (0, 0);
        for plan in select::plans(&choice.config, &problem, choice.stripe) {
            needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
        }
        let workspace = self.gemm.workspace_of(needs.0, needs.1)?;
        let plain = self.order(timer, &problem, &prepared, &workspace, false)?;
        let kernel = prepared.kernel.as_any().downcast_ref::<GpuKernel>();
        let waits = kernel.is_some_and(GpuKernel::waits_for_previous);
        // Without a wait of its own a kernel is launched in plain order in any case.
        let early = match waits {
            true => self.order(timer, &problem, &prepared, &workspace, true)?,
            false => plain.clone(),
        };
        Ok(plain.and_then(|plain| Ok([plain, early?])))
    }

    /// Microseconds in one order, or what is wrong: the product is checked before and after.
    fn order(
        &self,
        timer: &Timer,
        problem: &Problem,
        prepared: &Prepared,
        workspace: &Workspace,
        early: bool,
    ) -> anyhow::Result<Result<f64, String>> {
        let operands = &self.operands;
        let launch = |idx: usize, stream: Stream| {
            let (a, c, weight) = (operands.a(), operands.c(), operands.weight(idx));
            let stream = in_order(stream, early && idx > 0);
            self.gemm.matmul_with(prepared, a, weight, c, problem.m, workspace, stream)?;
            anyhow::Ok(())
        };
        let m = problem.m as usize;
        let check = || operands.check(m, &self.reference, error_limit(prepared));
        operands.poison(m)?;
        // The second and third overlap their predecessors.
        timer.run(if early { 3 } else { 1 }, &launch)?;
        let first = match check()? {
            Ok(first) => first,
            Err(why) => return Ok(Err(why)),
        };
        operands.poison(m)?;
        let timing = timer.time(&launch)?;
        Ok(match check()? {
            Ok(left) if left.bits == first.bits => Ok(timing.mean()),
            Ok(_) => Err("the same product gave other bits".to_owned()),
            Err(why) => Err(why),
        })
    }
}
