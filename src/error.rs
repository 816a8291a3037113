//! `Error`: one variant per room, for programs that call several of them.
//!
//! The rooms' functions return their own errors; `?` turns each into this one. Messages and causes are the
//! rooms' own.

use crate::{backend, checkpoint, driver, emu, gemm, jit, kernel, load, store, target, weights};

/// Any error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A backend failed.
    #[error(transparent)]
    Backend(#[from] backend::Error),
    /// A checkpoint was refused.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    /// The driver failed, or is not there.
    #[error(transparent)]
    Driver(#[from] driver::Error),
    /// The emulator found a fault.
    #[error(transparent)]
    Emu(#[from] emu::EmuError),
    /// A product was refused.
    #[error(transparent)]
    Gemm(#[from] gemm::Error),
    /// A kernel could not be compiled or loaded.
    #[error(transparent)]
    Jit(#[from] jit::Error),
    /// A configuration is not legal on a target.
    #[error(transparent)]
    Illegal(#[from] kernel::select::Illegal),
    /// No kernel takes a problem.
    #[error(transparent)]
    NoKernel(#[from] kernel::select::NoKernel),
    /// A text is no configuration's name.
    #[error(transparent)]
    ConfigName(#[from] kernel::problem::ParseConfigError),
    /// Files could not be loaded to a device.
    #[error(transparent)]
    Load(#[from] load::Error),
    /// A store of packed weights was refused, or could not be made.
    #[error(transparent)]
    Store(#[from] store::Error),
    /// A text is no target.
    #[error(transparent)]
    Target(#[from] target::ParseSmArchError),
    /// A weight was refused.
    #[error(transparent)]
    Weights(#[from] weights::Error),
}

/// Result with any error of this crate.
pub type Result<T> = std::result::Result<T, Error>;
