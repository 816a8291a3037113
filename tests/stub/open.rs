//! Opens the stand-in for libcuda.

use std::path::PathBuf;

use makaira::driver::{Context, Device, Driver};

/// Opens what was compiled.
pub fn open(library: Option<PathBuf>) -> Option<&'static Driver> {
    library.map(|library| Driver::open(library).expect("the stand-in opens"))
}

/// The primary context of a device.
pub fn context(driver: &'static Driver, ordinal: u32) -> Context {
    let device = Device::nth(driver, ordinal).expect("the device is there");
    Context::primary(device).expect("a primary context")
}
