//! What the emulator tells: faults and the figures of a launch.
//!
//! A fault says whose fault it is by its [`Category`]: a bug of the kernel, something that the emulator
//! does not support, or a limit that was reached. It names every access that takes part, each with CTA,
//! thread, instruction, section and the Rust line that emitted it, and ends with what usually helps.

use std::fmt;
use std::panic::Location;

/// Whose fault a [`Fault`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Category {
    /// The kernel breaks a rule of PTX.
    KernelBug,
    /// The emulator does not model this.
    Unsupported,
    /// A limit of the launch was reached; the kernel may or may not be right.
    Limit,
}

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// A register is read that was never written.
    UndefinedRegister,
    /// Memory is read that was never written.
    UndefinedMemory,
    /// An address lies in no allocation, or outside the CTA's shared memory.
    OutOfBounds,
    /// An address lies in freed memory.
    UseAfterFree,
    /// An address is no multiple of the access size.
    Misaligned,
    /// Two accesses, one of them a write, that nothing orders.
    Race,
    /// Bytes of an asynchronous copy are touched before a wait covers the copy.
    MissingWait,
    /// The asynchronous proxy touches what a thread wrote and did not fence.
    MissingProxyFence,
    /// A barrier in shared memory used before it is ready, or against its counts.
    MbarrierMisuse,
    /// A register is used that a warpgroup product in flight holds.
    RegisterInFlight,
    /// A product uses registers that were used since the last `wgmma.fence`.
    MissingFence,
    /// The warps of a warpgroup execute different products.
    WarpgroupMismatch,
    /// Shared memory of a CTA that may not have begun.
    PeerNotRunning,
    /// A CTA ends while something may still be done to its shared memory.
    EarlyExit,
    /// A grid that began early touches what earlier ones may still write or read.
    EarlyAccess,
    /// Registers taken or given back against the rules of `setmaxnreg`.
    RegisterPool,
    /// A `.aligned` instruction or CTA barrier that not all live lanes of the warp execute.
    DivergentAligned,
    /// No warp can go on: all wait.
    BarrierDeadlock,
    /// A barrier with an impossible number, count or set of lanes.
    BarrierMisuse,
    /// A shared address outside the region that the emitter promised.
    BrokenPromise,
    /// An instruction has an operand that PTX does not allow.
    BadOperand,
    /// The emulator cannot run this.
    Unsupported,
    /// The step budget is used up.
    StepLimit,
    /// Nothing was written for so long that the grid seems to spin.
    NoProgress,
}

impl FaultKind {
    /// Whose fault it is.
    pub fn category(self) -> Category {
        match self {
            FaultKind::Unsupported => Category::Unsupported,
            FaultKind::StepLimit | FaultKind::NoProgress => Category::Limit,
            _ => Category::KernelBug,
        }
    }

    fn title(self) -> &'static str {
        match self {
            FaultKind::UndefinedRegister => "undefined register",
            FaultKind::UndefinedMemory => "undefined memory",
            FaultKind::OutOfBounds => "out of bounds",
            FaultKind::UseAfterFree => "use after free",
            FaultKind::Misaligned => "misaligned address",
            FaultKind::Race => "data race",
            FaultKind::MissingWait => "missing wait",
            FaultKind::MissingProxyFence => "missing proxy fence",
            FaultKind::MbarrierMisuse => "mbarrier misuse",
            FaultKind::RegisterInFlight => "register in flight",
            FaultKind::MissingFence => "missing register fence",
            FaultKind::WarpgroupMismatch => "warpgroup mismatch",
            FaultKind::PeerNotRunning => "peer not known to run",
            FaultKind::EarlyExit => "early exit",
            FaultKind::EarlyAccess => "access before the grid wait",
            FaultKind::RegisterPool => "register pool",
            FaultKind::DivergentAligned => "divergent aligned instruction",
            FaultKind::BarrierDeadlock => "barrier deadlock",
            FaultKind::BarrierMisuse => "barrier misuse",
            FaultKind::BrokenPromise => "broken region promise",
            FaultKind::BadOperand => "operand out of range",
            FaultKind::Unsupported => "not modelled",
            FaultKind::StepLimit => "step budget used up",
            FaultKind::NoProgress => "no progress",
        }
    }
}

/// Where something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// What happened there.
    pub what: String,
    /// The CTA, x and y.
    pub cta: [u32; 2],
    /// The thread within the CTA; lane is `thread % 32`.
    pub thread: u32,
    /// The instruction with its guard.
    pub instruction: String,
    /// The section path, empty at the root.
    pub section: String,
    /// The Rust line that emitted the instruction.
    pub emitter: &'static Location<'static>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y] = self.cta;
        let (warp, lane) = (self.thread / 32, self.thread % 32);
        write!(
            f,
            "{} by thread {} (warp {warp}, lane {lane}) of CTA ({x}, {y})",
            self.what, self.thread
        )?;
        write!(f, "\n      `{}`", self.instruction)?;
        if !self.section.is_empty() {
            write!(f, "\n      in section {}", self.section)?;
        }
        write!(f, "\n      emitted at {}:{}", self.emitter.file(), self.emitter.line())
    }
}

/// Why a launch stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rule that was broken.
    pub kind: FaultKind,
    /// The values: which register, address, byte.
    pub what: String,
    /// Everything that takes part; the first is what just happened.
    pub accesses: Vec<Site>,
    /// What usually helps.
    pub help: String,
}

impl Fault {
    /// Where the launch stopped, if it stopped at an instruction.
    pub fn place(&self) -> Option<&Site> {
        self.accesses.first()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = match self.kind.category() {
            Category::KernelBug => "kernel bug",
            Category::Unsupported => "unsupported",
            Category::Limit => "limit",
        };
        write!(f, "{whose}: {}: {}", self.kind.title(), self.what)?;
        for (n, site) in self.accesses.iter().enumerate() {
            write!(f, "\n  ({}) {site}", n + 1)?;
        }
        write!(f, "\n  help: {}", self.help)
    }
}

impl std::error::Error for Fault {}

/// How often something happened in one section or in the whole launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions, each counted once per warp.
    pub warp_instructions: u64,
    /// Instructions, each counted once per executing lane.
    pub lane_instructions: u64,
    /// Shared-memory wavefronts that the accesses need without bank conflicts.
    pub shared_wavefronts: u64,
    /// Further wavefronts that bank conflicts cost.
    pub conflict_wavefronts: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Counts) {
        self.warp_instructions += other.warp_instructions;
        self.lane_instructions += other.lane_instructions;
        self.shared_wavefronts += other.shared_wavefronts;
        self.conflict_wavefronts += other.conflict_wavefronts;
    }
}

/// The figures of a finished launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchReport {
    /// CTAs, x and y.
    pub grid: [u32; 2],
    /// Threads of a CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// The whole launch.
    pub total: Counts,
    /// By section path, in order of first appearance; the root is the empty path.
    pub sections: Vec<(String, Counts)>,
}

impl LaunchReport {
    /// The figures of the section with this path, zeros if it has none.
    pub fn section(&self, path: &str) -> Counts {
        let found = self.sections.iter().find(|(name, _)| name == path);
        found.map(|(_, counts)| *counts).unwrap_or_default()
    }
}

impl fmt::Display for LaunchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y] = self.grid;
        writeln!(f, "grid ({x}, {y}) of {} threads, {} B shared", self.threads, self.shared_bytes)?;
        writeln!(
            f,
            "{:>12} {:>12} {:>12} {:>12}  section",
            "warp inst", "lane inst", "wavefronts", "conflicts"
        )?;
        let total = ("total".to_owned(), self.total);
        for (name, counts) in self.sections.iter().chain([&total]) {
            writeln!(
                f,
                "{:>12} {:>12} {:>12} {:>12}  {}",
                counts.warp_instructions,
                counts.lane_instructions,
                counts.shared_wavefronts,
                counts.conflict_wavefronts,
                if name.is_empty() { "(root)" } else { name }
            )?;
        }
        Ok(())
    }
}
