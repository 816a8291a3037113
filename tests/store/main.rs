//! Stores of packed weights: made of checkpoints, opened, cut, damaged, interrupted.

#[path = "../fixtures/mod.rs"]
mod fixtures;

mod hostile;
mod interrupted;
mod parts;
mod restored;
mod support;
