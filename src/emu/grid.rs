//! A launch: all CTAs of a grid, their warps taking turns.
//!
//! Every CTA is resident and every warp gets a slice of instructions in turn, so a warp that spins on
//! another CTA's flag does not keep that CTA from setting it; one that waits for a phase of a barrier, for its
//! cluster or for registers is not asked before they have come. The order is the same in every run; a seed
//! picks another one. A launch that cannot go on ends as a fault that says where every warp is: at barriers
//! (deadlock), or running without writing anything (no progress), or out of steps.

use std::cell::RefCell;

use super::agents::{Agent, Agents};
use super::async_ops::Flights;
use super::banks::Banks;
use super::clock::{Threads, Words};
use super::cluster::{ClusterBarrier, Pool};
use super::machine::{CtaState, Executor, Pause, Reach, Stop, Wait};
use super::memory::{Bytes, Memory};
use super::program::Program;
use super::report::{Counts, Fault, FaultKind, LaunchReport, Site};
use super::warp::Warp;
use super::wgmma::Products;
use crate::backend::TensorMap;

/// How a launch is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `None` runs the warps in a fixed order; a seed picks another order and other slices.
    pub seed: Option<u64>,
    /// Most warp instructions of a launch.
    pub max_steps: u64,
    /// Most warp instructions during which nothing is written, no barrier completes and no thread ends.
    pub max_idle_steps: u64,
    /// Launches begin before earlier ones have ended, whether or not the host asks for it: what those wrote
    /// since the host last waited may be read, and device memory written, after `griddepcontrol.wait` only.
    pub overlap: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: None, max_steps: 1 << 28, max_idle_steps: 4 << 20, overlap: false }
    }
}

/// What all CTAs of a launch share.
pub(super) struct Launch<'a> {
    pub program: &'a Program,
    pub grid: [u32; 2],
    pub args: &'a [u64],
    /// The parameters that are tensor maps.
    pub maps: &'a [Option<TensorMap>],
    /// Earlier launches may still run.
    pub overlap: bool,
    /// The lane that `elect.sync` elects: the same in all warps, not always the first.
    pub elected: u32,
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
    warps: Vec<Warp>,
    barriers: [Barrier; 16],
    /// Warps that have not ended.
    running: usize,
}

/// A cluster: what its CTAs share with each other, and their warps.
struct Cluster {
    states: Vec<CtaState>,
    ctas: Vec<Cta>,
    barrier: ClusterBarrier,
}

fn state(program: &Program, index: u32) -> CtaState {
    let threads = program.threads.next_multiple_of(32);
    let agents = Agents::new(threads);
    let mut clocks = Threads::new(index, threads);
    clocks.all_know(agents.running(), 1);
    CtaState {
        index,
        shared: Bytes::new(program.smem_bytes as usize),
        flights: Flights::new(program.smem_bytes, program.threads),
        threads: clocks,
        agents,
        barriers: Default::default(),
        init_fences: Default::default(),
        bulk_groups: Default::default(),
        warpgroups: (0..program.threads / 128).map(|_| Default::default()).collect(),
        pool: Pool { free: 0 },
        remote: Vec::new(),
        has_ended: false,
    }
}

impl Cta {
    fn new(program: &Program, state: &mut CtaState) -> Self {
        let threads = program.threads;
        let warps: Vec<Warp> = (0..threads.div_ceil(32))
            .map(|index| {
                let mut warp = Warp::new(program, index, (threads - index * 32).min(32));
                if program.has_products {
                    let agent = state.agents.id(Agent::Products(index));
                    warp.products = Some(Box::new(Products::new(program, agent)));
                }
                warp
            })
            .collect();
        Self { running: warps.len(), warps, barriers: Default::default() }
    }

    /// A warp arrives at a barrier; completes it if it is the last. Whether it did.
    fn arrive(
        &mut self,
        launch: &Launch<'_>,
        state: &mut CtaState,
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
            let accesses =
                vec![waiting(launch, state, &self.warps[warp]), waiting(launch, state, first)];
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
        state.threads.meet(live);
        Ok(true)
    }
}

/// Where a warp waits or runs.
fn waiting(launch: &Launch<'_>, cta: &CtaState, warp: &Warp) -> Option<Site> {
    if warp.live == 0 {
        return None;
    }
    let lane = warp.live.trailing_zeros();
    let (pc, what) = match (warp.at_barrier, warp.parked) {
        (Some(pc), _) => (pc, "waiting".to_owned()),
        (None, Some(Wait::Mbarrier { index, .. })) => {
            let barrier = &cta.barriers.list[index];
            (warp.pc_of(lane).saturating_sub(1), format!("waiting for {}:", barrier.text()))
        }
        (None, Some(Wait::Cluster { .. })) => {
            (warp.pc_of(lane), "waiting for the cluster's barrier".to_owned())
        }
        (None, Some(Wait::Pool { need })) => {
            let entry = launch.program.entry_regs * launch.program.threads.next_multiple_of(32);
            let text = format!(
                "waiting for {need} registers of a pool that has {} ({} threads enter with {} each, \
                 {entry} in all)",
                cta.pool.free, launch.program.threads, launch.program.entry_regs
            );
            (warp.pc_of(lane), text)
        }
        (None, None) => (warp.pc_of(lane), "running".to_owned()),
    };
    let pc = pc.min(launch.program.steps.len() as u32 - 1);
    Some(launch.site(cta.index, warp.index * 32 + lane, pc, what))
}

/// A small generator for the order of turns.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

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
    maps: &[Option<TensorMap>],
    memory: &mut Memory,
    options: &Options,
) -> Result<LaunchReport, Stop> {
    let elected = options.seed.map_or(0, |seed| Random::new(seed).next(32));
    let overlap = options.overlap;
    if !overlap {
        // It begins when all before it have ended.
        memory.settle();
    }
    let words = RefCell::default();
    let launch = Launch { program, grid, args, maps, overlap, elected, words };
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

/// Times that all warps were asked in vain before a launch counts as stuck: a wait for a phase may give up
/// and let its thread do something else.
const MAX_TIMEOUTS: u32 = 64;

fn turns(
    launch: &Launch<'_>,
    memory: &mut Memory,
    options: &Options,
    counts: &mut [Counts],
) -> Result<(), Stop> {
    let program = launch.program;
    let num_ctas = launch.grid[0] * launch.grid[1];
    let size = program.cluster;
    let mut clusters: Vec<Cluster> = (0..num_ctas / size)
        .map(|cluster| {
            let indices = cluster * size..(cluster + 1) * size;
            let mut states: Vec<CtaState> = indices.map(|index| state(program, index)).collect();
            let ctas: Vec<Cta> = states.iter_mut().map(|state| Cta::new(program, state)).collect();
            let warps = ctas.iter().map(|cta| cta.running).sum();
            Cluster { states, ctas, barrier: ClusterBarrier::new(warps) }
        })
        .collect();
    let mut random = options.seed.map(Random::new);
    let mut banks = Banks::new();
    let (mut steps, mut idle, mut timeouts) = (0u64, 0u64, 0u32);
    let mut running = num_ctas;
    while running > 0 {
        let mut ran = false;
        let first_cta = random.as_mut().map_or(0, |random| random.next(num_ctas));
        for cta in (0..num_ctas).map(|n| (n + first_cta) % num_ctas) {
            let rank = (cta % size) as usize;
            let Cluster { states, ctas, barrier } = &mut clusters[(cta / size) as usize];
            let cta = &mut ctas[rank];
            let num_warps = cta.warps.len();
            let first = random.as_mut().map_or(0, |random| random.next(num_warps as u32));
            for index in (0..num_warps).map(|n| (n + first as usize) % num_warps) {
                let warp = &mut cta.warps[index];
                if warp.live == 0 || warp.at_barrier.is_some() {
                    continue;
                }
                if let Some(wait) = warp.parked {
                    if !has_come(wait, &states[rank], barrier) {
                        continue;
                    }
                    warp.parked = None;
                }
                ran = true;
                let slice = random.as_mut().map_or(SLICE, |random| 1 + random.next(64));
                let reach =
                    Reach { warp, cluster: &mut *states, rank, barrier: &mut *barrier, memory };
                let mut executor = Executor::new(launch, reach, counts, &mut banks);
                let pause = executor.run(slice)?;
                let (took, mut progress) = (u64::from(executor.steps), executor.progress);
                match pause {
                    Pause::Slice => {}
                    Pause::Parked(wait) => executor.warp.parked = Some(wait),
                    Pause::Ended => {
                        cta.running -= 1;
                        if cta.running == 0 {
                            running -= 1;
                            executor.check_end()?;
                        }
                        executor.barrier.leave(executor.warp.cluster_arrival);
                    }
                    Pause::Barrier { id, threads } => {
                        progress |= cta.arrive(launch, &mut states[rank], index, id, threads)?;
                    }
                }
                steps += took;
                idle = if progress { 0 } else { idle + took };
                timeouts = if progress { 0 } else { timeouts };
            }
        }
        if !ran {
            timeouts += 1;
            if timeouts > MAX_TIMEOUTS || !time_out(&mut clusters) {
                return Err(stopped(launch, &clusters, FaultKind::BarrierDeadlock));
            }
        }
        if steps > options.max_steps {
            return Err(stopped(launch, &clusters, FaultKind::StepLimit));
        }
        if idle > options.max_idle_steps {
            return Err(stopped(launch, &clusters, FaultKind::NoProgress));
        }
    }
    Ok(())
}

/// Whether what a warp waits for has come.
fn has_come(wait: Wait, cta: &CtaState, barrier: &ClusterBarrier) -> bool {
    match wait {
        Wait::Mbarrier { index, phase } => cta.barriers.list[index].phase != phase,
        Wait::Cluster { generation } => barrier.generation != generation,
        Wait::Pool { need } => cta.pool.free >= need,
    }
}

/// Lets all warps that wait for a phase go on without it, as PTX allows. Whether there is one.
fn time_out(clusters: &mut [Cluster]) -> bool {
    let mut any = false;
    let ctas = clusters.iter_mut().flat_map(|cluster| &mut cluster.ctas);
    for warp in ctas.flat_map(|cta| &mut cta.warps) {
        if warp.live != 0 && matches!(warp.parked, Some(Wait::Mbarrier { .. })) {
            warp.parked = None;
            any = true;
        }
    }
    any
}

/// Most warps that a report lists.
const MAX_LISTED: usize = 32;

fn stopped(launch: &Launch<'_>, clusters: &[Cluster], kind: FaultKind) -> Stop {
    let ctas = clusters.iter().flat_map(|cluster| cluster.states.iter().zip(&cluster.ctas));
    let warps: Vec<Site> = ctas
        .flat_map(|(state, cta)| cta.warps.iter().filter_map(|warp| waiting(launch, state, warp)))
        .collect();
    let (rule, help) = match kind {
        FaultKind::BarrierDeadlock => (
            "all wait at barriers",
            "let every warp that a barrier counts reach it, the same number of times, with the \
             same number and count; a warp that has ended does not arrive; a phase of an mbarrier \
             ends when all its arrivals and all announced bytes have come",
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
