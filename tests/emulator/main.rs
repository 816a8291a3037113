//! The emulator runs programs as PTX says, and reports every kind of fault.

mod arithmetic;
mod programs;
mod support;
