//! A warp: registers, and which lanes run next.
//!
//! Every lane has its own place in the program. The lanes that are furthest behind run, together, so lanes
//! that diverged meet again where their paths do. A lane that spins on what a lane of its own warp further on
//! would do therefore spins for ever, and is reported as such; the kernels that we emit wait for other warps
//! only. While all lanes are at one place only that place is kept.

use super::machine::Wait;
use super::program::Program;
use super::wgmma::Products;

/// Registers and control state of 32 lanes.
#[derive(Debug)]
pub(super) struct Warp {
    /// Its number in the CTA.
    pub index: u32,
    /// Registers of at most 32 bits, `[slot][lane]`.
    pub words: Vec<u32>,
    /// 64-bit registers, `[id][lane]`.
    pub longs: Vec<u64>,
    /// Per slot, the lanes that have written it.
    pub defined: Vec<u32>,
    /// Lanes that have not ended.
    pub live: u32,
    /// Lanes that wait at a warp barrier.
    pub waiting: u32,
    /// The lanes that each waiting lane waits for.
    members: [u32; 32],
    /// Set while all live lanes are at `pc`.
    together: bool,
    pc: u32,
    pcs: [u32; 32],
    /// The CTA barrier at which the warp waits.
    pub at_barrier: Option<u32>,
    /// What must happen before the warp is asked again.
    pub parked: Option<Wait>,
    /// How often the cluster's barrier had completed when the warp arrived there; none after the wait.
    pub cluster_arrival: Option<u32>,
    /// Registers of a thread.
    pub regs: u32,
    /// Its products, if the program has any.
    pub products: Option<Box<Products>>,
}

impl Warp {
    /// A warp of `lanes` lanes at the start of the program.
    pub fn new(program: &Program, index: u32, lanes: u32) -> Self {
        Self {
            index,
            words: vec![0; program.num_words * 32],
            longs: vec![0; program.num_longs * 32],
            defined: vec![0; program.num_words + program.num_longs],
            live: u32::MAX >> (32 - lanes),
            waiting: 0,
            members: [0; 32],
            together: true,
            pc: 0,
            pcs: [0; 32],
            at_barrier: None,
            parked: None,
            cluster_arrival: None,
            regs: program.entry_regs,
            products: None,
        }
    }

    /// The lanes that run next and where they are; no lanes if all have ended or wait.
    #[inline]
    pub fn next(&self) -> (u32, u32) {
        if self.together {
            return (self.pc, self.live);
        }
        let ready = self.live & !self.waiting;
        let at = |lane: &u32| self.pcs[*lane as usize];
        let lanes = || (0..32).filter(|lane| ready >> lane & 1 != 0);
        let pc = lanes().map(|lane| at(&lane)).min().unwrap_or(0);
        let group = lanes().filter(|lane| at(lane) == pc).fold(0, |mask, lane| mask | 1 << lane);
        (pc, group)
    }

    /// The lanes of `group` go on to the next instruction.
    #[inline]
    pub fn advance(&mut self, group: u32) {
        if self.together {
            self.pc += 1;
            return;
        }
        self.step(group);
        self.regroup();
    }

    /// Moves the lanes of `group` on, after [`Warp::part`]; whether all have met is not asked yet.
    #[inline]
    pub fn step(&mut self, group: u32) {
        for (lane, pc) in self.pcs.iter_mut().enumerate() {
            *pc += group >> lane & 1;
        }
    }

    /// Gives every lane its own place, before an instruction that may part them.
    #[inline]
    pub fn part(&mut self) {
        if self.together {
            self.pcs = [self.pc; 32];
            self.together = false;
        }
    }

    /// Notices that all lanes are at one place again.
    #[inline]
    pub fn regroup(&mut self) {
        if self.waiting != 0 || self.live == 0 {
            return;
        }
        let pc = self.pcs[self.live.trailing_zeros() as usize];
        if (0..32).all(|lane| self.live >> lane & 1 == 0 || self.pcs[lane] == pc) {
            self.pc = pc;
            self.together = true;
        }
    }

    /// Moves a lane, after [`Warp::part`].
    #[inline]
    pub fn place(&mut self, lane: u32, pc: u32) {
        self.pcs[lane as usize] = pc;
    }

    /// A lane's place.
    pub fn pc_of(&self, lane: u32) -> u32 {
        if self.together { self.pc } else { self.pcs[lane as usize] }
    }

    /// A lane waits for the others of `members`.
    pub fn wait_for(&mut self, lane: u32, members: u32) {
        self.waiting |= 1 << lane;
        self.members[lane as usize] = members;
    }

    /// Lanes whose warp barrier is complete, no longer waiting; none if no barrier is.
    pub fn met(&mut self) -> u32 {
        for lane in (0..32).filter(|lane| self.waiting >> lane & 1 != 0) {
            let members = self.members[lane] & self.live;
            let all_wait = members & self.waiting == members;
            if all_wait
                && (0..32).all(|l| members >> l & 1 == 0 || self.members[l] == self.members[lane])
            {
                self.waiting &= !members;
                return members;
            }
        }
        0
    }
}
