//! A launch: all CTAs of a grid, their warps taking turns.
//!
//! Every CTA is resident and every warp gets a slice of instructions in turn, so a warp that spins on
//! another CTA's flag does not keep that CTA from setting it. The order is the same in every run; a seed
//! picks another one. A launch that cannot go on ends as a fault that says where every warp is: at barriers
//! (deadlock), or running without writing anything (no progress), or out of steps.

use std::cell::RefCell;

use super::async_ops::Flights;
use super::banks::Banks;
use super::clock::{Threads, Words};
use super::machine::{CtaState, Executor, Pause, Stop};
use super::memory::{Bytes, Memory};
use super::program::Program;
use super::report::{Counts, Fault, FaultKind, LaunchReport, Site};
use super::warp::Warp;

/// How a launch is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `None` runs the warps in a fixed order; a seed picks another order and other slices.
    pub seed: Option<u64>,
    /// Most warp instructions of a launch.
    pub max_steps: u64,
    /// Most warp instructions during which nothing is written, no barrier completes and no thread ends.
    pub max_idle_steps: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: None, max_steps: 1 << 28, max_idle_steps: 4 << 20 }
    }
}

/// What all CTAs of a launch share.
pub(super) struct Launch<'a> {
    pub program: &'a Program,
    pub grid: [u32; 2],
    pub args: &'a [u64],
    /// What atomic writes have published, by address of the word.
    pub words: RefCell<Words>,
}

impl Launch<'_> {
    /// Position of a CTA in the grid.
    pub fn ctaid(&self, cta: u32) -> [u32; 2] {
        [cta % self.grid[0], cta / self.grid[0]]
    }

    /// A place in the program for a report.
    pub fn site(&self, cta: u32, thread: u32, pc: u32, what: String) -> Site {
        let node = self.program.node(pc);
        let guard = node
            .guard
            .map(|guard| format!("@{}{} ", if guard.negated { "!" } else { "" }, guard.pred));
        Site {
            what,
            cta: self.ctaid(cta),
            thread,
            instruction: format!("{}{}", guard.unwrap_or_default(), node.inst),
            section: self.program.sections[node.section as usize].clone(),
            emitter: node.emitter,
        }
    }
}

/// A CTA barrier that some warps have reached.
#[derive(Clone, Debug, Default)]
struct Barrier {
    /// The arrived warps.
    warps: Vec<usize>,
    /// Threads that are awaited.
    threads: u32,
}

struct Cta {
    state: CtaState,
    warps: Vec<Warp>,
    barriers: [Barrier; 16],
    /// Warps that have not ended.
    running: usize,
}

impl Cta {
    fn new(program: &Program, index: u32) -> Self {
        let threads = program.threads;
        let warps: Vec<Warp> = (0..threads.div_ceil(32))
            .map(|warp| Warp::new(program, warp, (threads - warp * 32).min(32)))
            .collect();
        Self {
            state: CtaState {
                index,
                shared: Bytes::new(program.smem_bytes as usize),
                flights: Flights::new(program.smem_bytes, threads),
                threads: Threads::new(index, threads.next_multiple_of(32)),
            },
            running: warps.len(),
            warps,
            barriers: Default::default(),
        }
    }

    /// A warp arrives at a barrier; completes it if it is the last. Whether it did.
    fn arrive(
        &mut self,
        launch: &Launch<'_>,
        warp: usize,
        id: u32,
        threads: Option<u32>,
    ) -> Result<bool, Stop> {
        let all = launch.program.threads.next_multiple_of(32);
        let awaited = threads.unwrap_or(all);
        let barrier = &mut self.barriers[id as usize];
        if let Some(first) = barrier.warps.first()
            && barrier.threads != awaited
        {
            let (first, other) = (&self.warps[*first], barrier.threads);
            let accesses = vec![
                waiting(launch, self.state.index, &self.warps[warp]),
                waiting(launch, self.state.index, first),
            ];
            return Err(Box::new(Fault {
                kind: FaultKind::BarrierMisuse,
                what: format!("barrier {id} awaits {awaited} threads here and {other} there"),
                accesses: accesses.into_iter().flatten().collect(),
                help: "all warps that meet at a barrier give the same count".into(),
            }));
        }
        barrier.threads = awaited;
        barrier.warps.push(warp);
        if barrier.warps.len() as u32 * 32 < awaited {
            return Ok(false);
        }
        let arrived = std::mem::take(&mut barrier.warps);
        for warp in &arrived {
            self.warps[*warp].at_barrier = None;
        }
        let warps = &self.warps;
        let live = arrived.iter().flat_map(|warp| {
            let warp = &warps[*warp];
            (0..32).filter(|lane| warp.live >> lane & 1 != 0).map(|lane| warp.index * 32 + lane)
        });
        self.state.threads.meet(live);
        Ok(true)
    }
}

/// Where a warp waits or runs.
fn waiting(launch: &Launch<'_>, cta: u32, warp: &Warp) -> Option<Site> {
    if warp.live == 0 {
        return None;
    }
    let lane = warp.live.trailing_zeros();
    let (pc, what) = match warp.at_barrier {
        Some(pc) => (pc, "waiting"),
        None => (warp.pc_of(lane), "running"),
    };
    let pc = pc.min(launch.program.steps.len() as u32 - 1);
    Some(launch.site(cta, warp.index * 32 + lane, pc, what.to_owned()))
}

/// A small generator for the order of turns.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(below)) >> 32) as u32
    }
}

/// Instructions of a warp's turn without a seed.
const SLICE: u32 = 512;

/// Runs a decoded program; arguments are zero-extended.
pub(super) fn run(
    program: &Program,
    grid: [u32; 2],
    args: &[u64],
    memory: &mut Memory,
    options: &Options,
) -> Result<LaunchReport, Stop> {
    let launch = Launch { program, grid, args, words: RefCell::default() };
    let mut counts = vec![Counts::default(); program.steps.len()];
    let result = turns(&launch, memory, options, &mut counts);
    memory.forget_accesses();
    result?;
    let mut report = LaunchReport {
        grid,
        threads: program.threads,
        shared_bytes: program.smem_bytes,
        total: Counts::default(),
        sections: Vec::new(),
    };
    let mut sections = vec![Counts::default(); program.sections.len()];
    for (pc, counts) in counts.iter().enumerate() {
        report.total.add(counts);
        sections[program.node(pc as u32).section as usize].add(counts);
    }
    report.sections = program.sections.iter().cloned().zip(sections).collect();
    Ok(report)
}

fn turns(
    launch: &Launch<'_>,
    memory: &mut Memory,
    options: &Options,
    counts: &mut [Counts],
) -> Result<(), Stop> {
    let num_ctas = launch.grid[0] * launch.grid[1];
    let mut ctas: Vec<Cta> = (0..num_ctas).map(|index| Cta::new(launch.program, index)).collect();
    let mut random = options.seed.map(|seed| Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
    let mut banks = Banks::new();
    let (mut steps, mut idle) = (0u64, 0u64);
    while ctas.iter().any(|cta| cta.running > 0) {
        let mut ran = false;
        let first_cta = random.as_mut().map_or(0, |random| random.next(num_ctas));
        for cta in (0..num_ctas).map(|n| ((n + first_cta) % num_ctas) as usize) {
            let cta = &mut ctas[cta];
            let num_warps = cta.warps.len();
            let first = random.as_mut().map_or(0, |random| random.next(num_warps as u32));
            for warp in (0..num_warps).map(|n| (n + first as usize) % num_warps) {
                let state = &mut cta.warps[warp];
                if state.live == 0 || state.at_barrier.is_some() {
                    continue;
                }
                ran = true;
                let slice = random.as_mut().map_or(SLICE, |random| 1 + random.next(64));
                let mut executor =
                    Executor::new(launch, state, &mut cta.state, memory, counts, &mut banks);
                let pause = executor.run(slice)?;
                let (took, mut progress) = (u64::from(executor.steps), executor.progress);
                match pause {
                    Pause::Slice => {}
                    Pause::Ended => cta.running -= 1,
                    Pause::Barrier { id, threads } => {
                        progress |= cta.arrive(launch, warp, id, threads)?;
                    }
                }
                steps += took;
                idle = if progress { 0 } else { idle + took };
            }
        }
        if !ran {
            return Err(stopped(launch, &ctas, FaultKind::BarrierDeadlock));
        }
        if steps > options.max_steps {
            return Err(stopped(launch, &ctas, FaultKind::StepLimit));
        }
        if idle > options.max_idle_steps {
            return Err(stopped(launch, &ctas, FaultKind::NoProgress));
        }
    }
    Ok(())
}

/// Most warps that a report lists.
const MAX_LISTED: usize = 32;

fn stopped(launch: &Launch<'_>, ctas: &[Cta], kind: FaultKind) -> Stop {
    let warps: Vec<Site> = ctas
        .iter()
        .flat_map(|cta| cta.warps.iter().filter_map(|warp| waiting(launch, cta.state.index, warp)))
        .collect();
    let (rule, help) = match kind {
        FaultKind::BarrierDeadlock => (
            "all wait at barriers",
            "let every warp that a barrier counts reach it, the same number of times, with the \
             same number and count; a warp that has ended does not arrive",
        ),
        FaultKind::NoProgress => (
            "the grid runs without writing anything",
            "a spin waits for a flag that nobody sets: check the flag's start value and that each \
             turn is handed on",
        ),
        _ => ("the step budget is used up", "raise `max_steps`, or look for an endless loop"),
    };
    Box::new(Fault {
        kind,
        what: format!("{rule}; {} warps have not ended", warps.len()),
        accesses: warps.into_iter().take(MAX_LISTED).collect(),
        help: help.into(),
    })
}
