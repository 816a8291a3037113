//! The machine that instructions run on: one warp of one CTA, for a slice of time.
//!
//! [`Executor`] borrows the parts of the grid that the warp can reach. This file is its loop: which lanes
//! run, guards, who must be together, what happens after. What the rows ask for is in `rows.rs`, what every
//! access is checked for in `gates.rs`. The first rule that is broken stops the launch.

use std::collections::BTreeMap;

use super::agents::Agents;
use super::async_ops::Flights;
use super::banks::Banks;
use super::bulk::BulkGroups;
use super::clock::{Stamp, Threads};
use super::cluster::{ClusterBarrier, Pool};
use super::grid::Launch;
use super::mbarrier::Mbarriers;
use super::memory::{Bytes, Memory};
use super::report::{Counts, Fault, FaultKind};
use super::warp::Warp;
use super::wgmma::Warpgroup;
use crate::asm::isa::lanes;
use crate::asm::reg::AnyReg;
use crate::asm::types::{Class, Scope};

pub(super) type Stop = Box<Fault>;

/// What the threads of a CTA share.
#[derive(Debug)]
pub(super) struct CtaState {
    /// Linear index in the grid.
    pub index: u32,
    pub shared: Bytes,
    pub flights: Flights,
    pub threads: Threads,
    pub agents: Agents,
    pub barriers: Mbarriers,
    /// For each thread that initialised barriers one more than its fences for them.
    pub init_fences: BTreeMap<u32, u32>,
    /// The bulk stores of each thread that has any.
    pub bulk_groups: BTreeMap<u32, BulkGroups>,
    pub warpgroups: Vec<Warpgroup>,
    pub pool: Pool,
    /// What other CTAs did to its memory that it must know of before it ends.
    pub remote: Vec<Stamp>,
    pub has_ended: bool,
}

/// What a warp waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// The end of a phase of a barrier of its CTA.
    Mbarrier { index: usize, phase: u32 },
    /// The next time that the cluster's barrier completes.
    Cluster { generation: u32 },
    /// Registers in the CTA's pool.
    Pool { need: u32 },
}

/// Why a warp gave way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    /// Its slice is used up.
    Slice,
    /// It arrived at a CTA barrier.
    Barrier { id: u32, threads: Option<u32> },
    /// It need not be asked before something has happened.
    Parked(Wait),
    /// All its lanes have ended.
    Ended,
}

/// A warp while it runs.
pub(super) struct Executor<'a> {
    pub launch: &'a Launch<'a>,
    pub warp: &'a mut Warp,
    pub cta: &'a mut CtaState,
    /// The CTAs of the cluster before this one and after it.
    pub peers: (&'a mut [CtaState], &'a mut [CtaState]),
    pub rank: usize,
    /// The cluster's barrier.
    pub barrier: &'a mut ClusterBarrier,
    pub memory: &'a mut Memory,
    pub counts: &'a mut [Counts],
    pub banks: &'a mut Banks,
    /// Instructions run.
    pub steps: u32,
    /// Something was written, so the grid moves on.
    pub progress: bool,
    pub pc: u32,
    pub active: u32,
    pub arrival: Option<(u32, Option<u32>)>,
    /// Lanes of the current instruction that asked in vain whether a phase has completed; what they wait for.
    pub failed_tests: u32,
    pub parked: Option<Wait>,
    /// The current instruction did nothing and is executed again once this has come.
    pub retry: Option<Wait>,
}

/// The parts of the grid that a warp can reach.
pub(super) struct Reach<'a> {
    pub warp: &'a mut Warp,
    /// The CTAs of its cluster, and which one is its own.
    pub cluster: &'a mut [CtaState],
    pub rank: usize,
    pub barrier: &'a mut ClusterBarrier,
    pub memory: &'a mut Memory,
}

impl<'a> Executor<'a> {
    pub fn new(
        launch: &'a Launch<'a>,
        reach: Reach<'a>,
        counts: &'a mut [Counts],
        banks: &'a mut Banks,
    ) -> Self {
        let Reach { warp, cluster, rank, barrier, memory } = reach;
        let (before, rest) = cluster.split_at_mut(rank);
        let (cta, after) = rest.split_first_mut().expect("the CTA is one of its cluster");
        let peers = (before, after);
        Self {
            launch,
            warp,
            cta,
            peers,
            rank,
            barrier,
            memory,
            counts,
            banks,
            steps: 0,
            progress: false,
            pc: 0,
            active: 0,
            arrival: None,
            failed_tests: 0,
            parked: None,
            retry: None,
        }
    }

    /// Runs up to `slice` instructions.
    pub fn run(&mut self, slice: u32) -> Result<Pause, Stop> {
        let program = self.launch.program;
        while self.steps < slice {
            let (pc, group) = self.warp.next();
            if group == 0 {
                return if self.warp.live == 0 { Ok(Pause::Ended) } else { Err(self.stuck()) };
            }
            let Some(step) = program.steps.get(pc as usize) else {
                // Running past the last instruction ends a thread, as the assembler's own `exit` does.
                self.warp.live &= !group;
                self.progress = true;
                self.warp.part();
                self.settle();
                continue;
            };
            self.pc = pc;
            self.steps += 1;
            let mut active = group;
            if let Some((slot, negated)) = step.guard {
                active &= self.guard(slot, group)? ^ if negated { u32::MAX } else { 0 };
            }
            let counts = &mut self.counts[pc as usize];
            counts.warp_instructions += 1;
            counts.lane_instructions += u64::from(active.count_ones());
            if active == 0 {
                self.warp.advance(group);
                continue;
            }
            self.active = active;
            if step.scope != Scope::Lane {
                self.check_together(group, step.control)?;
            }
            if step.control {
                self.warp.part();
                self.warp.step(group);
                step.inst.exec(self)?;
                self.settle();
                continue;
            }
            if step.products != 0 {
                self.touch_products(program.touched(step.products))?;
            }
            step.inst.exec(self)?;
            if let Some(wait) = self.retry.take() {
                return Ok(Pause::Parked(wait));
            }
            if step.shared {
                let (ideal, extra) = self.banks.take();
                let counts = &mut self.counts[pc as usize];
                counts.shared_wavefronts += ideal;
                counts.conflict_wavefronts += extra;
            }
            if step.sync && self.warp.waiting != 0 {
                self.warp.part();
                self.warp.step(group);
                self.settle();
            } else {
                self.warp.advance(group);
            }
            if let Some((id, threads)) = self.arrival.take() {
                self.warp.at_barrier = Some(pc);
                return Ok(Pause::Barrier { id, threads });
            }
            if let Some(wait) = self.parked.take() {
                let failed = std::mem::take(&mut self.failed_tests);
                if failed == active.count_ones() {
                    return Ok(Pause::Parked(wait));
                }
            }
        }
        Ok(if self.warp.live == 0 { Pause::Ended } else { Pause::Slice })
    }

    /// After lanes moved, ended or began to wait: completes warp barriers and regroups.
    fn settle(&mut self) {
        while self.warp.waiting != 0 {
            let members = self.warp.met();
            if members == 0 {
                break;
            }
            let first = self.warp.index * 32;
            let threads = lanes(members).map(|lane| first + lane);
            self.cta.threads.meet(threads.collect::<Vec<_>>().into_iter());
        }
        self.warp.regroup();
    }

    /// The lanes of `group` where a predicate holds.
    fn guard(&self, slot: usize, group: u32) -> Result<u32, Stop> {
        let missing = group & !self.warp.defined[slot];
        if missing != 0 {
            let class = AnyReg { class: Class::Pred, id: slot as u32 };
            return Err(self.undefined_register(missing.trailing_zeros(), class));
        }
        let values = &self.warp.words[slot * 32..slot * 32 + 32];
        Ok(values.iter().enumerate().fold(0, |mask, (lane, value)| mask | (value & 1) << lane))
    }

    /// The rule of `.aligned`, of CTA barriers and of `bra.uni`.
    fn check_together(&self, group: u32, control: bool) -> Result<(), Stop> {
        // A uniform branch asks only those lanes that reach it together.
        let wanted = if control { group } else { self.warp.live };
        let missing = wanted & !self.active;
        if missing == 0 {
            return Ok(());
        }
        let mut sites = vec![self.here(self.active.trailing_zeros(), "executed")];
        let lane = missing.trailing_zeros();
        let pc = if group >> lane & 1 != 0 { self.pc } else { self.warp.pc_of(lane) };
        if (pc as usize) < self.launch.program.steps.len() {
            let what = if pc == self.pc { "guarded off" } else { "about to be executed" };
            sites.push(self.site(self.cta.index, self.thread(lane), pc, what.to_owned()));
        }
        Err(Box::new(Fault {
            kind: FaultKind::DivergentAligned,
            what: format!(
                "lanes {} execute it, lanes {} do not",
                mask_text(self.active),
                mask_text(missing)
            ),
            accesses: sites,
            help: "let all lanes of the warp reach it together: move it out of the divergent path \
                   or make the condition the same in every lane"
                .into(),
        }))
    }

    /// All live lanes wait at warp barriers that cannot complete.
    #[cold]
    fn stuck(&self) -> Stop {
        let sites = lanes(self.warp.live)
            .map(|lane| (lane, self.warp.pc_of(lane).saturating_sub(1)))
            .map(|(lane, pc)| self.site(self.cta.index, self.thread(lane), pc, "waiting".into()))
            .collect();
        Box::new(Fault {
            kind: FaultKind::BarrierDeadlock,
            what: "lanes of a warp wait for each other with different lane masks".into(),
            accesses: sites,
            help: "give all lanes that meet the same mask, and let every lane of it arrive".into(),
        })
    }
}

/// A lane mask in words.
fn mask_text(mask: u32) -> String {
    let names: Vec<String> = lanes(mask).map(|lane| lane.to_string()).collect();
    names.join(" ")
}
