//! One layer, packed and uploaded, and its products checked.
//!
//! The output starts as NaNs, in 16 rows more before and after than the product has; whatever the kernel
//! leaves unwritten or writes beside its rows is found. The reference is decoded element by element from the
//! checkpoint's own order, so that it shares nothing with the packer.

use std::time::{Duration, Instant};

use anyhow::bail;
use half::f16;
use makaira::backend::{DevicePtr, Stream};
use makaira::emu::LaunchReport;
use makaira::gemm::{Gemm, Matrix, Prepared, Weight};
use makaira::kernel::{Problem, Rows, select};
use makaira::reference::{self, Errors, Reference, Tolerance};
use makaira::weights::{PackedView, PackedWeights, QuantMatrix, default_threads};
use serde_json::{Value, json};

use crate::device::Device;

/// A NaN that no kernel writes.
const POISON: u16 = 0x7d5a;
/// Rows that nobody may write, before the output and after it.
const CANARY_ROWS: usize = 16;

/// A layer on a device.
pub struct Trial<'d> {
    device: &'d Device,
    gemm: Gemm,
    weight: Weight,
    /// The decoded weights, `[n][k]`.
    decoded: Vec<f32>,
    /// Bytes of the packed weight.
    pub packed_bytes: usize,
    /// What packing took.
    pub pack_time: Duration,
}

/// Values to compare with besides the f64 reference.
pub struct Golden {
    /// Activations, `[rows][k]`.
    pub x: Vec<f16>,
    /// Products `[rows][n]` with weights rounded to fp16.
    pub y: Vec<f32>,
}

/// A comparison of one product.
pub struct Check {
    /// With what.
    pub against: &'static str,
    /// How far apart they are.
    pub errors: Errors,
}

/// One product.
pub struct Outcome {
    /// Rows of the product.
    pub m: usize,
    /// Where the activations came from.
    pub input: &'static str,
    /// The kernel and stripe length.
    pub choice: select::Choice,
    /// CTAs of the first launch, zero without one.
    pub grid: [u32; 2],
    /// Time to emit and load the kernel, if that was done now.
    pub load_time: Duration,
    /// Wall time of the product, launch and wait included.
    pub run_time: Duration,
    /// Registers a thread, where the backend knows.
    pub num_regs: Option<u32>,
    /// Bytes of local memory a thread (spills), where the backend knows.
    pub local_bytes: Option<u32>,
    /// The comparisons.
    pub checks: Vec<Check>,
    /// The emulator's figures.
    pub report: Option<LaunchReport>,
}

impl<'d> Trial<'d> {
    /// Packs a layer and uploads it.
    pub fn new(device: &'d Device, matrix: &QuantMatrix<'_>) -> anyhow::Result<Self> {
        let start = Instant::now();
        let packed = PackedWeights::pack(matrix, default_threads())?;
        let pack_time = start.elapsed();
        let gemm = Gemm::new(device.backend.clone());
        let weight = gemm.upload(&packed)?;
        let decoded = reference::decode(matrix);
        let packed_bytes = packed.bytes().len();
        Ok(Self { device, gemm, weight, decoded, packed_bytes, pack_time })
    }

    /// Uploads a layer that is packed already; the reference is decoded from the packed layout.
    pub fn of_packed(device: &'d Device, packed: PackedView<'_>) -> anyhow::Result<Self> {
        let gemm = Gemm::new(device.backend.clone());
        let weight = gemm.upload(packed)?;
        let (decoded, packed_bytes) = (packed.dequantize(), packed.bytes().len());
        Ok(Self { device, gemm, weight, decoded, packed_bytes, pack_time: Duration::ZERO })
    }

    /// The product of `x`, `[m][k]`, with the layer, compared with the f64 reference and with `golden`,
    /// `[m][n]`.
    pub fn product(
        &self,
        input: &'static str,
        x: &[f16],
        golden: Option<&[f32]>,
    ) -> anyhow::Result<Outcome> {
        let (n, k) = (self.weight.layout().n, self.weight.layout().k);
        // Activations have the source's inputs, which may be packed with others that do not exist.
        let source_k = self.weight.source_inputs();
        let m = x.len() / source_k;
        let rows = Rows::of(n, k);
        let group = self.weight.layout().group;
        let problem = Problem {
            kind: self.weight.kind(),
            m: m as u64,
            n: n as u32,
            k: k as u32,
            group,
            rows,
        };
        // Without rows nothing is launched; there is a kernel all the same.
        let chosen_for = Problem { m: problem.m.max(1), ..problem };
        let choice = select::choose(&chosen_for, self.device.backend.device())?;
        let start = Instant::now();
        let prepared = self.gemm.prepare_choice(choice)?;
        let load_time = start.elapsed();
        let (c, run_time) = self.run(&prepared, &problem, x)?;
        let reference = Reference::new(x, &self.decoded, source_k);
        let tolerance = Tolerance::of(&choice.config, k);
        let mut checks = vec![Check { against: "f64", errors: reference.compare(&c, tolerance) }];
        if let Some(golden) = golden {
            let reference = reference.with_values(golden.iter().map(|y| f64::from(*y)).collect());
            let errors = reference.compare(&c, tolerance.with_rounded_weights());
            checks.push(Check { against: "golden", errors });
        }
        let plan = select::plans(&choice.config, &problem, choice.stripe).next();
        let grid = plan.map_or([0, 0], |plan| plan.grid);
        let launched = self.device.emu.as_ref().filter(|_| m > 0);
        let report = launched.and_then(|emu| emu.last_report());
        let kernel = &prepared.kernel;
        let (num_regs, local_bytes) = (kernel.num_regs(), kernel.local_bytes());
        Ok(Outcome {
            m,
            input,
            choice,
            grid,
            load_time,
            run_time,
            num_regs,
            local_bytes,
            checks,
            report,
        })
    }

    /// The product between canaries.
    fn run(
        &self,
        prepared: &Prepared,
        problem: &Problem,
        x: &[f16],
    ) -> anyhow::Result<(Vec<f16>, Duration)> {
        let backend = &self.device.backend;
        let (m, n, k) = (problem.m as usize, problem.n as usize, self.weight.source_inputs());
        let gathered = self.weight.gathered_bytes(problem.m);
        let (mut scratch, mut locks) = (gathered, 0);
        for plan in select::plans(&prepared.choice.config, problem, prepared.choice.stripe) {
            scratch = scratch.max(gathered + plan.scratch_bytes);
            locks = locks.max(plan.num_locks);
        }
        let workspace = self.gemm.workspace_of(scratch, locks)?;
        let a = Buffer::new(self.device, bytemuck::cast_slice(x))?;
        let mut out = vec![POISON; (m + 2 * CANARY_ROWS) * n];
        let c = Buffer::new(self.device, bytemuck::cast_slice(&out))?;
        let first = CANARY_ROWS * n;
        let start = Instant::now();
        self.gemm.matmul_with(
            prepared,
            Matrix { ptr: a.ptr, stride: k as u64 },
            &self.weight,
            Matrix { ptr: c.ptr.offset(2 * first as u64), stride: n as u64 },
            m as u64,
            &workspace,
            Stream::default(),
        )?;
        backend.synchronize(Stream::default())?;
        let run_time = start.elapsed();
        backend.download(c.ptr, bytemuck::cast_slice_mut(&mut out))?;
        let inside = first..first + m * n;
        let canaries = out[..inside.start].iter().chain(&out[inside.end..]);
        let touched = canaries.filter(|bits| **bits != POISON).count();
        if touched > 0 {
            bail!(
                "{} wrote {touched} elements before or after its {m} rows",
                prepared.choice.config
            );
        }
        Ok((out[inside].iter().map(|bits| f16::from_bits(*bits)).collect(), run_time))
    }
}

/// Device memory, freed when dropped.
struct Buffer<'d> {
    device: &'d Device,
    ptr: DevicePtr,
}

impl<'d> Buffer<'d> {
    fn new(device: &'d Device, bytes: &[u8]) -> anyhow::Result<Self> {
        let ptr = device.backend.alloc(bytes.len().max(1) as u64)?;
        let buffer = Self { device, ptr };
        device.backend.upload(ptr, bytes)?;
        Ok(buffer)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.device.backend.free(self.ptr) {
            log::debug!("freeing a buffer: {error}");
        }
    }
}

impl Outcome {
    /// Whether every comparison is within its bound.
    pub fn is_ok(&self) -> bool {
        self.checks.iter().all(|check| check.errors.is_ok())
    }

    /// The outcome as lines of text.
    pub fn lines(&self) -> Vec<String> {
        let [x, y] = self.grid;
        let mut lines = vec![format!(
            "m {:<7} {}, stripes of {} x 128 inputs, grid {x} x {y}",
            self.m, self.choice.config, self.choice.stripe
        )];
        for Check { against, errors } in &self.checks {
            let verdict = if errors.is_ok() { "ok" } else { "WRONG" };
            let what = format!("{} inputs against {against}", self.input);
            lines.push(format!("  {what:<31} {errors}: {verdict}"));
        }
        if let (Some(num_regs), Some(local_bytes)) = (self.num_regs, self.local_bytes) {
            lines.push(format!(
                "  loaded in {:.1?}, run in {:.1?}; {num_regs} registers a thread, {local_bytes} bytes of \
                 local memory",
                self.load_time, self.run_time
            ));
        }
        if let Some(report) = &self.report {
            lines.push(format!(
                "  emulated in {:.1?}: {} warp instructions, {} shared wavefronts, {} more for bank \
                 conflicts",
                self.run_time,
                report.total.warp_instructions,
                report.total.shared_wavefronts,
                report.total.conflict_wavefronts
            ));
        }
        lines
    }

    /// The outcome for programs.
    pub fn to_json(&self) -> Value {
        let checks = self.checks.iter().map(|Check { against, errors }| {
            json!({
                "against": against,
                "max_abs": errors.max_abs,
                "max_of_bound": errors.max_of_bound,
                "rel_frobenius": errors.rel_frobenius,
                "rel_frobenius_limit": errors.rel_frobenius_limit,
                "num_outside": errors.num_outside,
                "ok": errors.is_ok(),
            })
        });
        let report = self.report.as_ref().map(|report| {
            json!({
                "warp_instructions": report.total.warp_instructions,
                "lane_instructions": report.total.lane_instructions,
                "shared_wavefronts": report.total.shared_wavefronts,
                "conflict_wavefronts": report.total.conflict_wavefronts,
            })
        });
        json!({
            "m": self.m,
            "input": self.input,
            "config": self.choice.config.to_string(),
            "stripe": self.choice.stripe,
            "grid": self.grid,
            "load_ms": self.load_time.as_secs_f64() * 1e3,
            "num_regs": self.num_regs,
            "local_bytes": self.local_bytes,
            "run_ms": self.run_time.as_secs_f64() * 1e3,
            "checks": checks.collect::<Vec<_>>(),
            "emulator": report,
            "ok": self.is_ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use makaira::checkpoint::Checkpoint;
    use makaira::reference::Random;

    use super::*;
    use crate::device::{self, DeviceArgs, Place};

    fn emulator() -> Device {
        let device_like = device::preset("h200").expect("a known card");
        Device::open(&DeviceArgs { device: Place::Emulator, device_like }).expect("always there")
    }

    /// The verdict comes from the comparison: a golden that one element of the product does not meet.
    #[test]
    fn a_product_outside_its_bound_is_told() {
        let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo"));
        let checkpoint = Checkpoint::open(demo).expect("readable");
        let matrix = checkpoint.layer(&checkpoint.layers()[0].name).expect("legal");
        let device = emulator();
        let trial = Trial::new(&device, &matrix).expect("it fits");
        let x = Random::new(31).activations(3 * matrix.k());
        let exact = Reference::new(&x, &reference::decode(&matrix), matrix.k());
        let mut golden: Vec<f32> = exact.values().iter().map(|y| *y as f32).collect();
        let outcome = trial.product("random", &x, Some(&golden)).expect("it runs");
        assert!(outcome.is_ok(), "{:?}", outcome.lines());
        golden[2 * matrix.n() + 7] += 0.5;
        let outcome = trial.product("random", &x, Some(&golden)).expect("it runs");
        assert!(!outcome.is_ok() && outcome.to_json()["ok"] == false);
        let told = outcome.lines().join("\n");
        assert!(told.contains("1 element outside, the first at row 2, column 7"), "{told}");
        assert!(told.contains(": ok\n") && told.contains(": WRONG\n"), "{told}");
    }

    #[test]
    fn b11_no_rows_are_no_failure() {
        let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo"));
        let checkpoint = Checkpoint::open(demo).expect("readable");
        let matrix = checkpoint.layer(&checkpoint.layers()[0].name).expect("legal");
        let device = emulator();
        let outcome = Trial::new(&device, &matrix).expect("it fits").product("random", &[], None);
        let outcome = outcome.expect("nothing to do");
        assert!(outcome.is_ok() && outcome.grid == [0, 0] && outcome.report.is_none());
    }
}
