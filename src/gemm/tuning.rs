//! Measured winners instead of predicted ones.
//!
//! A choice is the winner that `makaira tune` measured for the problem on this card with this driver, if
//! there is one, else the one that the cost model prefers. A winner counts only while it is among the
//! candidates that it was measured against, so that whatever is in a store the choice is legal, and the
//! product is what any candidate gives: exact to the stated error.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, RwLock};

use super::{Gemm, Slot};
use crate::backend::Backend;
use crate::jit::{TuneKey, TuneStore, Winner};
use crate::kernel::Problem;
use crate::kernel::order::{self, Summation};
use crate::kernel::select::{self, Choice, NoKernel, step};

impl Gemm {
    /// Winners from this store instead of the process's.
    pub fn with_tuning(self, store: Arc<TuneStore>) -> Self {
        Self { tuning: Some(store), ..self }
    }

    /// No winners: the cost model decides alone.
    pub fn without_tuning(self) -> Self {
        Self { tuning: None, ..self }
    }

    /// Batch-invariant products: a row of A gives the same bits, whatever other rows are in the batch and however many
    /// they are. All products with a weight are summed in one order, see [`crate::kernel::order`]; each batch gets the
    /// fastest kernel of those that keep it. That costs time, most where a layer is small: see the README's figures.
    /// The order belongs to the layer, the device and this version of the library, and to whether rows are whole, cut
    /// or read by elements (see [`Rows`](crate::kernel::Rows)): operands must be aligned alike. Measured winners are not
    /// asked. Products of a stack of experts are summed in the order of their own kernels and not covered.
    #[must_use]
    pub fn batch_invariant(self) -> Self {
        Self { orders: Some(RwLock::default()), ..self.without_tuning() }
    }

    /// The configuration and stripe length that products of this problem get: the measured winner or the
    /// predicted one. The same as long as this object lives. The predicted one, and the winner that
    /// `makaira tune` keeps, are the same with early launch as without, so both give the same bits.
    ///
    /// # Errors
    /// If no kernel takes the problem.
    pub fn choice(&self, problem: &Problem, overlap_previous: bool) -> Result<Choice, NoKernel> {
        let slot = Slot::new(problem, overlap_previous);
        if let Some(choice) = self.choices.read().expect("no panic holds it").get(&slot) {
            return Ok(*choice);
        }
        let choice = match &self.orders {
            Some(orders) => self.choice_in_order(problem, orders)?,
            None => {
                let predicted = select::choose(problem, self.backend.device())?;
                self.winner(problem, overlap_previous).unwrap_or(predicted)
            }
        };
        let mut choices = self.choices.write().expect("no panic holds it");
        Ok(*choices.entry(slot).or_insert(choice))
    }

    /// The choice for a problem that keeps its layer's order of summation.
    fn choice_in_order(
        &self,
        problem: &Problem,
        orders: &RwLock<HashMap<Slot, Summation>>,
    ) -> Result<Choice, NoKernel> {
        let device = self.backend.device();
        let layer = Slot::new(&Problem { m: 1, ..*problem }, false);
        let known = orders.read().expect("no panic holds it").get(&layer).copied();
        let order = match known {
            Some(order) => order,
            None => {
                let order = order::invariant_order(problem, device)?;
                orders.write().expect("no panic holds it").insert(layer, order);
                order
            }
        };
        order::choose_in_order(problem, device, &order)
    }

    /// The measured winner of a problem, if there is one.
    fn winner(&self, problem: &Problem, overlap_previous: bool) -> Option<Choice> {
        let store = self.tuning.as_ref().filter(|store| store.folder().is_some())?;
        let device = self.backend.timing_identity()?;
        let ranked = ranked(&*self.backend, problem);
        let key = key(&device, problem, overlap_previous, &ranked);
        let winner = store.get(&key)?;
        let is_it = |choice: &Choice| {
            winner.config == choice.config.to_string() && winner.plan == plan_of(choice)
        };
        let choice = ranked.into_iter().find(is_it);
        match &choice {
            Some(_) => log::debug!("{problem}: {} was measured to win", winner.config),
            None => log::warn!(
                "{problem}: {} ({}) won, but is no candidate any more; measure anew with `makaira tune`",
                winner.config,
                winner.plan
            ),
        }
        choice
    }

    /// Keeps a measured winner for objects made from now on. `us` is its time in microseconds.
    ///
    /// # Errors
    /// Those of writing; `Unsupported` without a store, or where time means nothing (the emulator).
    pub fn keep_winner(
        &self,
        problem: &Problem,
        overlap_previous: bool,
        choice: &Choice,
        us: f64,
    ) -> io::Result<()> {
        let unsupported = |what| io::Error::new(io::ErrorKind::Unsupported, what);
        let store = self.tuning.as_ref().filter(|store| store.folder().is_some());
        let store = store.ok_or_else(|| unsupported("there is no store for measured winners"))?;
        let device = self.backend.timing_identity();
        let device = device.ok_or_else(|| unsupported("times on this device mean nothing"))?;
        let ranked = ranked(&*self.backend, problem);
        let key = key(&device, problem, overlap_previous, &ranked);
        let (config, plan) = (choice.config.to_string(), plan_of(choice));
        store.put(&key, &Winner { config, plan, us })
    }
}

/// All candidates for a problem's step of the batch.
fn ranked(backend: &dyn Backend, problem: &Problem) -> Vec<Choice> {
    let problem = Problem { m: step(problem.m), ..*problem };
    select::ranked(&problem, backend.device())
}

/// What a problem's winner is kept under.
fn key(device: &str, problem: &Problem, overlap_previous: bool, ranked: &[Choice]) -> TuneKey {
    let problem = Problem { m: step(problem.m), ..*problem };
    let candidates = ranked.iter().map(|choice| format!("{} {}", choice.config, plan_of(choice)));
    TuneKey::new(
        device,
        &format!("{} {problem}", problem.kind.format),
        overlap_previous,
        candidates,
    )
}

/// How a choice cuts its grid, in words.
fn plan_of(choice: &Choice) -> String {
    format!("stripe {}", choice.stripe)
}
