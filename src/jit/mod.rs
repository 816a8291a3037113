//! PTX text to a loaded function: keys, the store on disk, the loader; and measured winners beside it.
//!
//! Relies on `driver` for assembling and loading and sees a kernel as a name and a text. Compiled
//! code is kept twice: in memory per context ([`Loader`]) and as cubins on disk ([`Store`]),
//! because the driver's own cache may be off, too small or on a disk that is gone (fault B70).
//! Invariant: the store can only save time. Whatever is wrong with it costs one warning and a
//! compilation, never an error.
//!
//! | variable | effect |
//! |---|---|
//! | `MAKAIRA_CACHE_DIR` | the store; else `XDG_CACHE_HOME/makaira`, else `~/.cache/makaira` |
//! | `MAKAIRA_NO_CACHE` | set to anything but `0`: the store is neither read nor written, and no winner |
//! | `MAKAIRA_NO_TUNING` | set to anything but `0`: measured winners are neither read nor written |
//! | `MAKAIRA_LINEINFO` | set to anything but `0`: [`GpuBackend::open`] compiles with line info |
//! | `CUDA_CACHE_DISABLE` | the driver's own cache, which it looks up when it starts; `1` is off |

mod backend;
mod key;
mod loader;
mod store;
mod tune_store;

pub use backend::{GpuBackend, GpuError, GpuKernel};
pub use key::{Key, KeyParts};
pub use loader::{Error, LoadedFunction, Loader};
pub use store::{Cleared, EntryInfo, Origin, Store};
pub use tune_store::{Finding, Record, TuneKey, TuneStore, Winner};
