//! Prints the PTX of the kernel that a problem gets, or of a configuration given by name, with the Rust lines
//! that emitted each instruction.
//!
//! ```sh
//! cargo run --example dump_ptx -- 16 4096 4096            # m n k, group 128
//! cargo run --example dump_ptx -- marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s4_c1 sm_90
//! ```

use std::error::Error;
use std::io::Write;

use makaira::asm::PrintOptions;
use makaira::kernel::{Config, Kind, Problem, Rows, select};
use makaira::target::{DeviceSpec, PtxIsa, SmArch};
use makaira::weights::Group;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (config, target) = match &args[..] {
        [m, n, k] => {
            let (m, n, k) = (m.parse()?, n.parse()?, k.parse()?);
            let group = Group::new(k as usize, 128)?;
            // Rows of activations are whole runs of 128 inputs; others need `Rows::Vector` or `Element`.
            let problem = Problem { kind: Kind::U4B8, m, n, k, group, rows: Rows::Whole };
            let device = a100();
            (select::choose(&problem, &device)?.config, device.arch)
        }
        [name] => (name.parse()?, SmArch::baseline(80)),
        [name, target] => (name.parse()?, target.parse()?),
        _ => return Err("give m, n and k, or a configuration's name and a target".into()),
    };
    Ok(std::io::stdout().write_all(dump(&config, target)?.as_bytes())?)
}

fn dump(config: &Config, target: SmArch) -> Result<String, Box<dyn Error>> {
    select::check(config, target)?;
    let module = select::family_of(config).build(config, target);
    module.verify()?;
    Ok(module.to_ptx(PrintOptions { line_info: true }))
}

/// What a choice depends on: a device's numbers. `GpuBackend` and `EmuBackend` give those of theirs.
fn a100() -> DeviceSpec {
    DeviceSpec {
        name: "NVIDIA A100".to_owned(),
        arch: SmArch::baseline(80),
        isa: PtxIsa::new(8, 0),
        num_sms: 108,
        l2_bytes: 40 << 20,
        smem_per_cta_bytes: 163 << 10,
    }
}
