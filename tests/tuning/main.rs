//! Measured winners: the store on disk, and the choices that follow from it.

#[path = "../stub/build.rs"]
mod build;
#[path = "../stub/open.rs"]
mod opened;

mod choices;
mod records;
