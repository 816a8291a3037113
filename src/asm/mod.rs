//! A PTX program as data: instructions, builder, weaver, printer and verifier.
//!
//! | stage | input | output | file |
//! |---|---|---|---|
//! | emit | calls on [`Asm`] | [`builder::Item`]s | `builder.rs`, one row per call in `isa/` |
//! | weave | [`builder::Stream`]s, a pattern | one stream | `weave.rs` |
//! | finish | the builder | [`Module`] | `module.rs` |
//! | verify | module, target | diagnostics | `verify.rs` |
//! | print | module | PTX text | `print.rs` |
//!
//! This room knows nothing of Marlin, of files or of CUDA. An instruction exists in one place, its row in
//! `isa/`; text, typed builder method, operand roles, requirement and meaning all come from there.

mod addr;
pub mod builder;
pub mod isa;
pub mod module;
pub mod print;
pub mod reg;
#[cfg(test)]
mod test_machine;
pub mod types;
pub mod verify;
pub mod weave;

pub use builder::{Asm, Stream};
pub use module::Module;
pub use print::PrintOptions;
pub use verify::{Diagnostic, Diagnostics, Rule};
pub use weave::Pattern;
