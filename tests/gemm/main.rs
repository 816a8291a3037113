//! Products on the emulator, and on a GPU if there is one, against a reference in f64.
//!
//! The same functions run on both; `MAKAIRA_DEVICE=emu` or `gpu` leaves only that device. What cannot be
//! shown on one of them says so on stderr, past the test runner's capture. Tests named `bNN_` close a fault
//! that users of such kernels met in public.

mod conversions;
mod coverage;
mod experts;
mod families;
#[path = "../common/family.rs"]
mod family;
mod faults;
#[path = "../fixtures/mod.rs"]
mod fixtures;
mod goldens;
mod gpu;
mod invariant;
mod lane;
mod laws;
mod numerics;
mod operands;
mod shapes;
mod stripes;
mod support;
mod types;
mod wgmma;
