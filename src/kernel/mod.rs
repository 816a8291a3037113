//! GEMM kernels: families that build them, and the choice among their configurations.
//!
//! A family is one file and one line of [`FAMILIES`]. It says which configurations it has for a problem and
//! builds the module of one. This room emits programs; it never runs them.

pub mod epilogue;
pub mod params;
pub mod problem;
mod reduction;
pub mod select;
pub mod sm80;
pub mod stripe;

pub use params::Arguments;
pub use problem::{Config, Plan, Problem, Reduction, Rows, Scaling};

use crate::asm::Module;
use crate::target::SmArch;

/// A kernel design for a range of architectures.
pub trait KernelFamily: Sync {
    /// Its name in a configuration's name.
    fn name(&self) -> &'static str;
    /// Whether it runs on a target.
    fn runs_on(&self, target: SmArch) -> bool;
    /// Bytes of shared memory of a configuration.
    fn smem_bytes(&self, config: &Config) -> u32;
    /// The kernel of a legal configuration.
    fn build(&self, config: &Config, target: SmArch) -> Module;
}

/// Every kernel family, by name.
pub const FAMILIES: &[&'static dyn KernelFamily] = &[&sm80::Sm80Family];
