//! The emulator runs programs as PTX says, and reports every kind of fault: each fault has a small program
//! that commits it and a twin, repaired in one place, that is clean.

#[path = "../common/mod.rs"]
mod common;

mod arithmetic;
mod banks;
mod barriers;
mod copies;
mod faults;
mod flags;
mod hopper;
mod mutants;
mod programs;
mod races;
mod speed;
mod support;
