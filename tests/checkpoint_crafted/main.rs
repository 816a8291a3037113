//! Crafted checkpoints: each convention is read as its tools mean it, and every kind of wrong content is
//! refused or reported by name.

mod awq;
mod compressed;
mod floats;
#[allow(dead_code)]
#[path = "../../fuzz/src/lib.rs"]
mod fuzz;
mod gptq;
mod hostile;
mod support;
mod whole;
