//! From a kernel's text to a function that can be launched, at most one compilation per kernel.
//!
//! Owns the table of loaded functions, per context and key, over the [`Store`]. Threads that ask
//! for one kernel together wait for one of them; different kernels compile side by side. Nothing in
//! here belongs into the hot path: keep the `Arc` that [`Loader::load`] gives.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::key::{Key, KeyParts};
use super::store::{Origin, Store};
use crate::driver::{self, Context, Cubin, Function, JitOptions, Module, StreamRef};

/// Why a kernel could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver failed, or refused the text.
    #[error("kernel `{name}` cannot be compiled or loaded")]
    Driver {
        /// Name of the configuration.
        name: String,
        /// What the driver room says.
        source: driver::Error,
    },
    /// The kernel was never compiled in this process, and now is no time for it.
    #[error(
        "kernel `{name}` is not loaded yet and its stream is being captured; prepare it before the \
         capture begins"
    )]
    Capturing {
        /// Name of the configuration.
        name: String,
    },
}

/// A kernel in a context, and how it came there.
#[derive(Debug)]
pub struct LoadedFunction {
    /// The kernel.
    pub function: Function,
    /// Whether the machine code was read or compiled.
    pub origin: Origin,
    /// Time from request to loaded function.
    pub elapsed: Duration,
}

/// Loaded functions by context and key, over a store.
#[derive(Debug)]
pub struct Loader<F = LoadedFunction> {
    store: Store,
    slots: Mutex<Slots<F>>,
}

/// By scope and key.
type Slots<F> = HashMap<(usize, Key), Arc<Slot<F>>>;

/// Locked by the thread that compiles; empty until it succeeds.
type Slot<F> = Mutex<Option<Arc<F>>>;

impl<F> Loader<F> {
    /// A loader over this store.
    pub fn new(store: Store) -> Self {
        Self { store, slots: Mutex::default() }
    }

    /// The store below.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The function of this key in this scope (a context), if it is loaded.
    pub fn loaded(&self, scope: usize, key: &Key) -> Option<Arc<F>> {
        let slot = locked(&self.slots).get(&(scope, key.clone())).cloned()?;
        locked(&slot).clone()
    }

    /// The function of this key in this scope: the one loaded before, else `load` of what the store
    /// has, else `load` of what `compile` gives. If `load` refuses what was stored, it is compiled
    /// anew. A failure is not kept: the next request tries again.
    ///
    /// # Errors
    /// Those of `compile` and `load`.
    pub fn load_with<E: std::fmt::Display>(
        &self,
        scope: usize,
        key: Key,
        compile: impl Fn() -> Result<Cubin, E>,
        load: impl Fn(&Cubin, Origin) -> Result<F, E>,
    ) -> Result<Arc<F>, E> {
        let slot = locked(&self.slots).entry((scope, key.clone())).or_default().clone();
        let mut slot = locked(&slot);
        if let Some(function) = &*slot {
            return Ok(function.clone());
        }
        let (cubin, origin) = self.store.get_or_compile(&key, &compile)?;
        let function = match load(&cubin, origin) {
            Err(error) if origin == Origin::Store => {
                log::warn!("stored code of {key:?} is refused ({error}): compiled anew");
                load(&self.store.recompile(&key, &compile)?, Origin::Compiled)?
            }
            outcome => outcome?,
        };
        let function = Arc::new(function);
        *slot = Some(function.clone());
        Ok(function)
    }
}

impl Loader {
    /// A loader over the store that the environment asks for.
    pub fn from_env() -> Self {
        Self::new(Store::from_env())
    }

    /// The kernel `name` of this text, in this context. May compile, allocate and wait.
    ///
    /// # Errors
    /// `Driver`, with the driver's log if it refuses the text.
    pub fn load(
        &self,
        context: &Context,
        name: &str,
        ptx: &str,
        options: &JitOptions,
    ) -> Result<Arc<LoadedFunction>, Error> {
        let start = Instant::now();
        let key = key_of(context, name, ptx, options);
        let compile = || Cubin::assemble(context, ptx, options);
        let load = |cubin: &Cubin, origin| {
            let function = Module::from_cubin(context, cubin)?.function(name)?;
            let elapsed = start.elapsed();
            log::debug!("{name}: {origin:?}, {elapsed:.1?}, {:?}", function.attrs());
            Ok(LoadedFunction { function, origin, elapsed })
        };
        self.load_with(context.as_raw().addr(), key, compile, load)
            .map_err(|source| Error::Driver { name: name.to_owned(), source })
    }

    /// As [`load`](Self::load) for work on `stream`: during a capture a kernel that is not loaded
    /// yet is refused, because loading it would break the capture (fault B43).
    ///
    /// # Errors
    /// `Capturing`, and those of [`load`](Self::load).
    pub fn load_for(
        &self,
        context: &Context,
        stream: StreamRef<'_>,
        name: &str,
        ptx: &str,
        options: &JitOptions,
    ) -> Result<Arc<LoadedFunction>, Error> {
        let key = key_of(context, name, ptx, options);
        if let Some(function) = self.loaded(context.as_raw().addr(), &key) {
            return Ok(function);
        }
        match context.is_capturing(stream) {
            Ok(false) => self.load(context, name, ptx, options),
            Ok(true) => Err(Error::Capturing { name: name.to_owned() }),
            Err(source) => Err(Error::Driver { name: name.to_owned(), source }),
        }
    }
}

fn key_of(context: &Context, name: &str, ptx: &str, options: &JitOptions) -> Key {
    Key::new(&KeyParts {
        name,
        ptx,
        device: context.info().arch,
        driver_version: context.driver().version(),
        options,
        emitter: KeyParts::EMITTER,
    })
}

/// Locks also after a panic of another thread: tables and slots are whole at every moment.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
