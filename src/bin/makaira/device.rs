//! What commands run on: a GPU, or the emulator standing in for one.

use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, bail};
use makaira::backend::Backend;
use makaira::emu::EmuBackend;
use makaira::jit::GpuBackend;
use makaira::kernel::FAMILIES;
use makaira::target::{DeviceSpec, PtxIsa, SmArch};
use serde_json::{Value, json};

/// A card that choices can be made for without having it.
#[derive(Debug)]
pub struct Preset {
    /// Its name on the command line.
    pub name: &'static str,
    title: &'static str,
    sm: u16,
    num_sms: u32,
    l2_bytes: u64,
}

/// The known cards, by architecture. Source: the vendor's architecture white papers and data sheets.
#[rustfmt::skip]
const PRESETS: &[Preset] = &[
    Preset { name: "a100",    title: "NVIDIA A100",             sm: 80,  num_sms: 108, l2_bytes:  40 << 20 },
    Preset { name: "rtx3090", title: "NVIDIA GeForce RTX 3090", sm: 86,  num_sms:  82, l2_bytes:   6 << 20 },
    Preset { name: "orin",    title: "NVIDIA Jetson AGX Orin",  sm: 87,  num_sms:  16, l2_bytes:   4 << 20 },
    Preset { name: "rtx4090", title: "NVIDIA GeForce RTX 4090", sm: 89,  num_sms: 128, l2_bytes:  72 << 20 },
    Preset { name: "l40s",    title: "NVIDIA L40S",             sm: 89,  num_sms: 142, l2_bytes:  96 << 20 },
    Preset { name: "h200",    title: "NVIDIA H200",             sm: 90,  num_sms: 132, l2_bytes:  60 << 20 },
    Preset { name: "h100",    title: "NVIDIA H100",             sm: 90,  num_sms: 132, l2_bytes:  50 << 20 },
    Preset { name: "b200",    title: "NVIDIA B200",             sm: 100, num_sms: 148, l2_bytes: 126 << 20 },
    Preset { name: "rtx5090", title: "NVIDIA GeForce RTX 5090", sm: 120, num_sms: 170, l2_bytes:  96 << 20 },
];

impl Preset {
    /// The card's numbers, with the newest driver that is known.
    pub fn spec(&self) -> DeviceSpec {
        let arch = SmArch::baseline(self.sm);
        let limits = arch.spec().expect("presets have architectures of the table");
        DeviceSpec {
            name: self.title.to_owned(),
            arch,
            isa: PtxIsa::of_driver(i32::MAX).expect("the table of drivers is not empty"),
            num_sms: self.num_sms,
            l2_bytes: self.l2_bytes,
            smem_per_cta_bytes: limits.smem_per_cta_bytes,
        }
    }
}

/// The preset of that name.
pub fn preset(name: &str) -> Result<&'static Preset, String> {
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| {
        let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        format!("no such card; the known ones are {}", names.join(", "))
    })
}

/// A typical card of a target's architecture.
pub fn typical(target: SmArch) -> anyhow::Result<DeviceSpec> {
    let preset = PRESETS.iter().find(|preset| preset.sm == target.sm);
    let preset = preset.with_context(|| {
        let mut known: Vec<String> =
            PRESETS.iter().map(|preset| SmArch::baseline(preset.sm).to_string()).collect();
        known.dedup();
        format!("no kernel is made for {target}; the known targets are {}", known.join(", "))
    })?;
    Ok(preset.spec())
}

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The first GPU that can run our kernels, else the emulator.
    Auto,
    /// The GPU of this index.
    Gpu(u32),
    /// The emulator.
    Emulator,
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "emu" => Ok(Self::Emulator),
            "gpu" => Ok(Self::Gpu(0)),
            _ => {
                let ordinal = text.strip_prefix("gpu:").and_then(|ordinal| ordinal.parse().ok());
                ordinal.map(Self::Gpu).ok_or("write auto, gpu, gpu:1 or emu".to_owned())
            }
        }
    }
}

/// Arguments of commands that run kernels.
#[derive(Debug, clap::Args)]
pub struct DeviceArgs {
    /// Where to run: auto (a GPU if there is one), gpu, gpu:<index> or emu.
    #[arg(long, default_value = "auto", value_name = "PLACE")]
    pub device: Place,
    /// Which card the emulator stands in for: a100, rtx4090, h200 ….
    #[arg(long, default_value = "h200", value_parser = preset, value_name = "CARD")]
    pub device_like: &'static Preset,
}

/// An open device.
pub struct Device {
    /// What runs modules.
    pub backend: Arc<dyn Backend>,
    /// The emulator behind it, for its figures; none on a GPU.
    pub emu: Option<Arc<EmuBackend>>,
    /// Why it is not a GPU, where that was not asked for.
    why_emulated: Option<String>,
}

impl Device {
    /// Opens what the arguments ask for.
    pub fn open(args: &DeviceArgs) -> anyhow::Result<Self> {
        match args.device {
            Place::Gpu(ordinal) => gpu(ordinal).context(
                "cannot use the GPU; `makaira doctor` says more, `--device emu` runs without one",
            ),
            Place::Emulator => Ok(Self::emulator(args, None)),
            Place::Auto => match gpu(0) {
                Ok(device) => Ok(device),
                Err(error) => Ok(Self::emulator(args, Some(format!("{error:#}")))),
            },
        }
    }

    fn emulator(args: &DeviceArgs, why_emulated: Option<String>) -> Self {
        let emu = Arc::new(EmuBackend::new(args.device_like.spec()));
        Self { backend: emu.clone(), emu: Some(emu), why_emulated }
    }

    /// What it is, in one line or two.
    pub fn lines(&self) -> Vec<String> {
        let spec = describe(self.backend.device());
        let mut lines = match &self.emu {
            None => vec![format!("device    {spec}")],
            Some(_) => vec![format!("device    emulator, standing in for {spec}")],
        };
        lines.extend(self.why_emulated.as_ref().map(|why| format!("no GPU    {why}")));
        lines
    }

    /// What it is, for programs.
    pub fn to_json(&self) -> Value {
        let spec = self.backend.device();
        json!({
            "kind": if self.emu.is_some() { "emulator" } else { "gpu" },
            "why_emulated": self.why_emulated,
            "name": spec.name,
            "target": spec.arch.to_string(),
            "num_sms": spec.num_sms,
        })
    }
}

fn gpu(ordinal: u32) -> anyhow::Result<Device> {
    let backend = GpuBackend::open(ordinal)?;
    let spec = backend.device();
    if !FAMILIES.iter().any(|family| family.runs_on(spec.arch)) {
        bail!("no kernel runs on {} ({})", spec.name, spec.arch);
    }
    Ok(Device { backend: Arc::new(backend), emu: None, why_emulated: None })
}

/// A device's numbers in one line.
pub fn describe(spec: &DeviceSpec) -> String {
    format!(
        "{} ({}, {} SMs, {} MiB L2, {} KiB of shared memory a CTA)",
        spec.name,
        spec.arch,
        spec.num_sms,
        spec.l2_bytes >> 20,
        spec.smem_per_cta_bytes >> 10
    )
}
