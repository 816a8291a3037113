//! Runs a module on the CPU, and checks every step against the rules of PTX.
//!
//! | part | file |
//! |---|---|
//! | the launch: CTAs and warps taking turns, barriers, deadlock | `grid.rs` |
//! | a warp: registers, divergence | `warp.rs` |
//! | one instruction: what the rows ask for, the gates of every access | `machine.rs`, `rows.rs`, `gates.rs` |
//! | device and shared memory, definedness | `memory.rs` |
//! | copies of single threads in flight | `async_ops.rs` |
//! | what else completes later, and the asynchronous proxy | `agents.rs`, `proxy.rs` |
//! | barriers in shared memory, bulk copies, clusters, warpgroup products | `mbarrier.rs`, `bulk.rs`, `cluster.rs`, `wgmma.rs` |
//! | happens-before, data races | `clock.rs`, `check.rs` |
//! | bank conflicts | `banks.rs` |
//! | faults and figures | `report.rs` |
//!
//! The emulator knows the instruction table and nothing of kernels. It is strict where PTX leaves things
//! open: an asynchronous copy may land at any moment before its wait, lanes of a warp are not in step, and
//! memory holds no value until somebody writes one. A program without a fault here is free of these bugs
//! for the inputs that were run, whatever the order in which the hardware runs its warps.
//!
//! ```
//! use makaira::asm::{Asm, types::Special};
//! use makaira::emu::{self, EmuError, FaultKind, Memory, Options};
//! use makaira::target::SmArch;
//!
//! // Every thread writes its number to the same word of shared memory.
//! let mut asm = Asm::new();
//! asm.smem.region("word", 4, 4);
//! let [tid, smem] = asm.regs();
//! asm.mov_u32_special(tid, Special::TidX);
//! asm.mov_u32_smem(smem);
//! asm.section("race", |asm| asm.st_shared_b32(smem, tid));
//! asm.exit();
//! let module = asm.finish("racy", SmArch::baseline(80), 64, 1);
//!
//! let run = emu::run(&module, [1, 1], &[], &mut Memory::default(), &Options::default());
//! let Err(EmuError::Fault(fault)) = run else { panic!("the race was not found") };
//! assert_eq!(fault.kind, FaultKind::Race);
//! println!("{fault}");
//! ```

mod agents;
mod async_ops;
mod backend;
mod banks;
mod bulk;
mod check;
mod clock;
mod cluster;
mod gates;
mod grid;
mod machine;
mod mbarrier;
mod memory;
mod program;
mod proxy;
mod report;
mod rows;
mod warp;
mod wgmma;

pub use backend::{EmuBackend, EmuError, EmuKernel, run};
pub use grid::Options;
pub use memory::{Memory, MemoryError};
pub use report::{Category, Counts, Fault, FaultKind, LaunchReport, Site};
