//! Prints the PTX of a configuration given by name.
//!
//! `cargo run --example dump_ptx -- marlin_sm80_u4b8_f16_m16n64k1024_g128_w1_s3_c2 sm_80 > kernel.ptx`

use makaira::asm::PrintOptions;
use makaira::kernel::{Config, FAMILIES};
use makaira::target::SmArch;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let config: Config = args.next().ok_or("give a configuration's name")?.parse()?;
    let target: SmArch = args.next().as_deref().unwrap_or("sm_80").parse()?;
    let family = FAMILIES.iter().find(|family| family.name() == config.family);
    let module = family.expect("a parsed configuration has a family").build(&config, target);
    print!("{}", module.to_ptx(PrintOptions { line_info: true }));
    Ok(())
}
