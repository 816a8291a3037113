//! `makaira doctor`: what this machine can run, and why not.
//!
//! Finding nothing is an answer, not a failure: without a driver everything still runs on the emulator.

use makaira::driver::{Device, DeviceInfo, Driver};
use makaira::jit::{Store, TuneStore};
use makaira::kernel::{FAMILIES, KernelFamily, Kind, Problem, Rows, select};
use makaira::target::{DeviceSpec, PtxIsa};
use makaira::weights::Group;
use serde_json::{Value, json};

use crate::output::{Format, bytes, count};

/// Functions that a driver may lack, and what then is missing. Products need none of them.
const OPTIONAL: &[(&str, &str)] = &[
    ("cuGraphGetEdges", "edges of a graph cannot be told apart"),
    ("cuGraph", "products cannot be timed as graphs"),
    ("cuStreamBeginCapture", "products cannot be captured into graphs"),
    ("cuStreamEndCapture", "products cannot be captured into graphs"),
    ("cuStreamGetCtx", "a foreign stream is not checked against the context"),
    ("cuMemAllocAsync", "memory is not allocated in stream order"),
    ("cuLaunchKernelEx", "kernels cannot overlap their launches or use clusters"),
    ("cuOccupancyMaxActiveClusters", "clusters are not checked before a launch"),
    ("cuTensorMapEncodeTiled", "kernels that copy by tensor maps are not launched"),
    ("cuFuncLoad", "kernels are loaded at their first launch"),
    ("cuFuncGetParamInfo", "arguments are not checked against the kernel"),
];

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    format: Format,
}

/// Runs `doctor`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut report = Report { format: args.format, value: json!({}) };
    match Driver::get() {
        Ok(driver) => driver_there(&mut report, driver)?,
        Err(error) => {
            report.line("driver", &format!("none to use: {error}"))?;
            report.value["driver"] = json!({ "usable": false, "why": error.to_string() });
            report.value["devices"] = json!([]);
        }
    }
    report.line("emulator", "runs every kernel, checks every access; `demo` and `run` use it")?;
    store(&mut report)?;
    tuning(&mut report)?;
    args.format.value(|| report.value)
}

/// The answer so far.
struct Report {
    format: Format,
    value: Value,
}

impl Report {
    fn line(&self, title: &str, text: &str) -> anyhow::Result<()> {
        self.format.line(format!("{title:<10} {text}"))
    }
}

fn driver_there(report: &mut Report, driver: &'static Driver) -> anyhow::Result<()> {
    let ceiling = driver.ptx_ceiling();
    let assembles = match ceiling {
        Some(isa) => format!("assembles PTX up to {isa}"),
        None => "is older than CUDA 11.0: no PTX of ours can be assembled".to_owned(),
    };
    let version = driver.version();
    report.line("driver", &format!("{}, CUDA {version}, {assembles}", driver.library()))?;
    let missing = driver.missing();
    report.line(
        "functions",
        &match missing.len() {
            0 => "all there".to_owned(),
            lacking => format!("{} lacking, none that a product needs", count(lacking, "function")),
        },
    )?;
    for symbol in &missing {
        report.line("", &format!("{symbol}: {}", consequence(symbol)))?;
    }
    report.value["driver"] = json!({
        "usable": true,
        "library": driver.library(),
        "version": version.to_string(),
        "ptx_ceiling": ceiling.map(|isa| isa.to_string()),
        "missing": missing,
    });
    let num_devices = Device::count(driver)?;
    if num_devices == 0 {
        report.line("devices", "none visible; look at CUDA_VISIBLE_DEVICES")?;
    }
    let mut devices = Vec::new();
    for ordinal in 0..num_devices {
        let title = format!("device {ordinal}");
        match Device::nth(driver, ordinal).and_then(|device| device.info()) {
            Ok(info) => {
                report.line(&title, &info.to_string())?;
                devices.push(device_there(report, &info, ceiling)?);
            }
            Err(error) => {
                report.line(&title, &format!("cannot be asked: {error}"))?;
                devices.push(json!({ "ordinal": ordinal, "why": error.to_string() }));
            }
        }
    }
    report.value["devices"] = devices.into();
    Ok(())
}

/// What a missing function means.
fn consequence(symbol: &str) -> &'static str {
    let known = OPTIONAL.iter().find(|(prefix, _)| symbol.starts_with(prefix));
    known.map_or("whatever asks for it is refused by name", |(_, meaning)| meaning)
}

/// Which families run on a device.
fn device_there(
    report: &Report,
    info: &DeviceInfo,
    ceiling: Option<PtxIsa>,
) -> anyhow::Result<Value> {
    let mut families = Vec::new();
    for family in FAMILIES {
        let verdict = verdict(*family, info, ceiling);
        let text = match &verdict {
            Ok(isa) => format!("family {} runs (PTX {isa})", family.name()),
            Err(why) => format!("family {} does not run: {why}", family.name()),
        };
        report.line("", &text)?;
        families.push(json!({
            "family": family.name(),
            "runs": verdict.is_ok(),
            "why_not": verdict.err(),
        }));
    }
    Ok(json!({
        "ordinal": info.ordinal,
        "name": info.name,
        "target": info.arch.to_string(),
        "num_sms": info.num_sms,
        "memory_bytes": info.memory_bytes,
        "families": families,
    }))
}

/// The PTX version that a family's kernel for this device needs, or why there is none.
fn verdict(
    family: &dyn KernelFamily,
    info: &DeviceInfo,
    ceiling: Option<PtxIsa>,
) -> Result<PtxIsa, String> {
    if !family.runs_on(info.arch) {
        return Err(format!("it is not made for {}", info.arch));
    }
    let ceiling = ceiling.ok_or("the driver is older than CUDA 11.0")?;
    let device = DeviceSpec {
        name: info.name.clone(),
        arch: info.arch,
        isa: ceiling,
        num_sms: info.num_sms,
        l2_bytes: info.l2_bytes,
        smem_per_cta_bytes: info.smem_per_cta_bytes,
    };
    let problem = Problem {
        kind: Kind::U4B8,
        m: 16,
        n: 4096,
        k: 4096,
        group: Group::Size(128),
        rows: Rows::Whole,
    };
    let ranked = select::ranked(&problem, &device);
    let choice = ranked.iter().find(|choice| choice.config.family == family.name());
    let choice = choice.ok_or("no configuration fits its shared memory and registers")?;
    let isa = family.build(&choice.config, info.arch).isa();
    if isa > ceiling {
        return Err(format!(
            "it needs PTX {isa}, the driver assembles {ceiling}; update the driver"
        ));
    }
    Ok(isa)
}

fn store(report: &mut Report) -> anyhow::Result<()> {
    let store = Store::from_env();
    let Some(folder) = store.folder() else {
        report.value["store"] = json!({ "folder": null });
        return report.line("store", "off: every process compiles its kernels anew");
    };
    let text = match store.list() {
        Ok(entries) => {
            let total = entries.iter().map(|entry| entry.size_bytes).sum();
            report.value["store"] =
                json!({ "folder": folder, "entries": entries.len(), "size_bytes": total });
            let what = count(entries.len(), "kernel");
            let there = if folder.exists() { "" } else { " (made when first used)" };
            format!("{}{there}: {what}, {}", folder.display(), bytes(total))
        }
        Err(error) => {
            report.value["store"] = json!({ "folder": folder, "why": error.to_string() });
            format!("{} cannot be read, kernels are compiled anew: {error}", folder.display())
        }
    };
    report.line("store", &text)
}

/// The measured winners, which products take before predictions.
fn tuning(report: &mut Report) -> anyhow::Result<()> {
    let store = TuneStore::of_process();
    let Some(folder) = store.folder() else {
        report.value["tuning"] = json!({ "folder": null });
        return report.line("tuning", "off: predictions alone choose kernels");
    };
    let text = match store.list() {
        Ok(records) => {
            let num_damaged = records.iter().filter(|record| record.is_err()).count();
            let num_winners = records.len() - num_damaged;
            report.value["tuning"] =
                json!({ "folder": folder, "winners": num_winners, "damaged": num_damaged });
            let damaged = match num_damaged {
                0 => String::new(),
                some => format!(", {} ignored", count(some, "damaged record")),
            };
            format!("{}{damaged}; `makaira tune` measures", count(num_winners, "measured winner"))
        }
        Err(error) => {
            report.value["tuning"] = json!({ "folder": folder, "why": error.to_string() });
            format!("winners cannot be read, predictions choose kernels: {error}")
        }
    };
    report.line("tuning", &text)
}
