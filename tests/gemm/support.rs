//! What the tests of products share: devices, layers whose product is known, runs between canaries.
//!
//! Inputs are fresh for every seed and never zero; the seed is in every message. The output starts as NaN,
//! in rows further apart than they are long, with rows before and after it; every run checks that nothing
//! but the product was written, and that the locks are zero again. The reference is the sum in f64.
//! Integer-valued products are exact in single precision and are compared bit by bit with the sum rounded
//! once; others within the bound of [`Tolerance`].

// Each test binary uses its part of this.
#![allow(dead_code)]

use std::io::Write;
use std::sync::{Arc, OnceLock};

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::emu::{EmuBackend, Options};
use makaira::gemm::{Error, Gemm, Matrix, Prepared, Weight, Workspace};
use makaira::jit::GpuBackend;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Kind, Problem, Reduction, Rows, Scaling};
use makaira::layout::f16_from_f64;
use makaira::weights::{Codes, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4B8};

/// Says what was skipped and why, past the test runner's capture.
pub fn skipped(what: &str) {
    // A test that cannot write to stderr has nobody to tell.
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}

/// What a test runs on.
#[derive(Clone)]
pub struct Device {
    pub backend: Arc<dyn Backend>,
    /// The emulator behind it, for its reports; none on a GPU.
    pub emu: Option<Arc<EmuBackend>>,
}

impl Device {
    pub fn emulated(emu: EmuBackend) -> Self {
        let emu = Arc::new(emu);
        Self { backend: emu.clone(), emu: Some(emu) }
    }

    /// A Hopper card with few SMs, on the emulator. Grids may begin before earlier ones have ended.
    pub fn hopper() -> Self {
        let options = Options { overlap: true, ..Options::default() };
        Self::emulated(EmuBackend::h200_like(4).with_options(options))
    }

    /// The same, its warps taking turns in another order.
    pub fn hopper_seeded(seed: u64) -> Self {
        let options = Options { seed: Some(seed), ..Options::default() };
        Self::emulated(EmuBackend::h200_like(4).with_options(options))
    }

    pub fn is_gpu(&self) -> bool {
        self.emu.is_none()
    }

    /// A size on the emulator, another on a GPU.
    pub fn size<T>(&self, emulated: T, gpu: T) -> T {
        if self.is_gpu() { gpu } else { emulated }
    }
}

/// The first GPU, opened once.
pub fn gpu() -> Option<&'static Arc<GpuBackend>> {
    static GPU: OnceLock<Option<Arc<GpuBackend>>> = OnceLock::new();
    GPU.get_or_init(|| {
        let wanted = std::env::var("MAKAIRA_DEVICE").unwrap_or_default();
        if wanted == "emu" {
            skipped("products on a GPU: MAKAIRA_DEVICE=emu");
            return None;
        }
        match GpuBackend::open(0) {
            Ok(gpu) => Some(Arc::new(gpu)),
            Err(error) if wanted == "gpu" => panic!("MAKAIRA_DEVICE=gpu, but: {error}"),
            Err(error) => {
                skipped(&format!("products on a GPU: {error}"));
                None
            }
        }
    })
    .as_ref()
}

/// The emulator, and a GPU if there is one. `MAKAIRA_DEVICE=emu` or `gpu` leaves only that.
pub fn devices() -> Vec<Device> {
    let mut devices = Vec::new();
    if std::env::var("MAKAIRA_DEVICE").as_deref() != Ok("gpu") {
        devices.push(Device::hopper());
    }
    devices.extend(gpu().map(|gpu| Device { backend: gpu.clone(), emu: None }));
    devices
}

/// Deterministic random numbers.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// In `[low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Which values inputs have. None is zero, but for code 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Codes and activations count up, scales are powers of two: exact, and a misplaced element shows.
    Ascending,
    /// Random codes, integers from -3 to 3, scales 1/2, 1 or 2: exact.
    Integers,
    /// Random codes, activations from -1 to 1, scales around 0.01.
    Random,
    /// The same, but all products are positive: nothing cancels.
    Positive,
}

/// A quantised layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub n: usize,
    pub k: usize,
    pub group: Group,
    /// `[n][k]`.
    pub codes: Vec<u8>,
    /// `[groups][n]`.
    pub scales: Vec<f16>,
}

impl Layer {
    /// A layer for a raw group size, -1 for one scale per column.
    pub fn new(n: usize, k: usize, group: i64, fill: Fill, random: &mut Random) -> Self {
        let group = Group::new(k, group).expect("a group size that kernels have");
        let code = |i: usize, random: &mut Random| match fill {
            Fill::Ascending => (i / k + i % k) % 16,
            Fill::Integers | Fill::Random => random.below(16),
            Fill::Positive => 9 + random.below(7),
        };
        let codes = (0..n * k).map(|i| code(i, random) as u8).collect();
        let scale = |i: usize, random: &mut Random| match fill {
            Fill::Ascending => [0.5, 1.0, 2.0][(i / n + i % n) % 3],
            Fill::Integers => random.pick(&[0.5, 1.0, 2.0]),
            Fill::Random | Fill::Positive => random.uniform(0.005, 0.02),
        };
        let scales = (0..group.num_groups(k) * n).map(|i| f16_from_f64(scale(i, random))).collect();
        Self { n, k, group, codes, scales }
    }

    pub fn packed(&self) -> PackedWeights {
        let scales = Scales::f16(bytemuck::cast_slice(&self.scales), ScaleOrder::Rows);
        let codes = Codes::ByOutput(&self.codes);
        let matrix = QuantMatrix::new(self.n, self.k, self.group, &U4B8, codes, scales)
            .expect("codes and scales fit the layer");
        PackedWeights::pack(&matrix, 1).expect("the matrix was checked")
    }

    /// The weights of one output.
    pub fn column(&self, n: usize) -> Vec<f64> {
        let codes = &self.codes[n * self.k..(n + 1) * self.k];
        let scale = |k| self.scales[self.group.index_of(k) * self.n + n].to_f64();
        codes.iter().enumerate().map(|(k, code)| (f64::from(*code) - 8.0) * scale(k)).collect()
    }
}

/// Activations `[m][k]` for a layer.
pub fn activations(m: usize, k: usize, fill: Fill, random: &mut Random) -> Vec<f16> {
    let value = |i: usize, random: &mut Random| match fill {
        Fill::Ascending => [1.0, 2.0, -1.0, 3.0, -2.0][(i / k + i % k) % 5],
        Fill::Integers => random.pick(&[-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]),
        Fill::Random => random.uniform(0.01, 1.0) * random.pick(&[-1.0, 1.0]),
        Fill::Positive => random.uniform(0.01, 1.0),
    };
    (0..m * k).map(|i| f16_from_f64(value(i, random))).collect()
}

/// How operands lie in memory, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// Between rows of A.
    pub a_gap: usize,
    /// Between rows of C.
    pub c_gap: usize,
    /// Before A.
    pub a_shift: usize,
    /// Before C.
    pub c_shift: usize,
}

/// Canaries stand around C; vector accesses stay possible.
pub const CANARIES: Spread = Spread { a_gap: 8, c_gap: 8, a_shift: 0, c_shift: 0 };

/// A NaN that no kernel writes.
const POISON: u16 = 0x7d5a;
/// Canary rows before and after C.
const CANARY_ROWS: usize = 16;

/// A layer on a device.
pub struct Setup {
    pub device: Device,
    pub gemm: Gemm,
    pub layer: Layer,
    pub weight: Weight,
}

impl Setup {
    pub fn new(device: &Device, layer: Layer) -> Self {
        let gemm = Gemm::new(device.backend.clone());
        let weight = gemm.upload(&layer.packed()).expect("the layer fits");
        Self { device: device.clone(), gemm, layer, weight }
    }

    pub fn problem(&self, m: usize, rows: Rows) -> Problem {
        let Layer { n, k, group, .. } = self.layer;
        Problem { kind: Kind::U4B8, m: m as u64, n: n as u32, k: k as u32, group, rows }
    }

    /// A configuration and stripe length of the test's choice.
    pub fn choice(&self, config: Config, stripe: u32, m: usize) -> Choice {
        let problem = self.problem(m, config.rows);
        let cost = select::cost(&config, &problem, self.device.backend.device(), stripe);
        Choice { config, stripe, cost }
    }

    pub fn prepare(&self, config: Config, stripe: u32, m: usize) -> Prepared {
        self.gemm
            .prepare_choice(self.choice(config, stripe, m))
            .unwrap_or_else(|error| panic!("{config}: {}", chain(&error)))
    }

    /// A workspace of exactly what a choice needs.
    pub fn workspace(&self, choice: &Choice, m: usize) -> Workspace {
        let problem = self.problem(m, choice.config.rows);
        let (mut scratch, mut locks) = (0, 0);
        for plan in select::plans(&choice.config, &problem, choice.stripe) {
            scratch = scratch.max(plan.scratch_bytes);
            locks = locks.max(plan.num_locks);
        }
        self.gemm.workspace_of(scratch, locks).expect("the workspace fits")
    }

    /// The product with a kernel of the test's choice.
    pub fn run_with(
        &self,
        prepared: &Prepared,
        a: &[f16],
        spread: Spread,
        workspace: &Workspace,
    ) -> Result<Vec<f16>, Error> {
        self.between_canaries(a, spread, |a, c, m| {
            let stream = Stream::default();
            self.gemm.matmul_with(prepared, a, &self.weight, c, m, workspace, stream)
        })
    }

    /// The product as users compute it.
    pub fn run(&self, a: &[f16], spread: Spread) -> Result<Vec<f16>, Error> {
        let m = a.len() / self.layer.k;
        let workspace = self.gemm.workspace(&self.weight, m as u64)?;
        self.run_in(a, spread, &workspace)
    }

    pub fn run_in(
        &self,
        a: &[f16],
        spread: Spread,
        workspace: &Workspace,
    ) -> Result<Vec<f16>, Error> {
        self.between_canaries(a, spread, |a, c, m| {
            self.gemm.matmul(a, &self.weight, c, m, workspace, Stream::default())
        })
    }

    /// Lays operands out, runs, checks that nothing else was written, and gives C.
    fn between_canaries(
        &self,
        a: &[f16],
        spread: Spread,
        run: impl FnOnce(Matrix, Matrix, u64) -> Result<(), Error>,
    ) -> Result<Vec<f16>, Error> {
        let Layer { n, k, .. } = self.layer;
        let m = a.len() / k;
        let backend = &self.device.backend;
        let (a_stride, c_stride) = (k + spread.a_gap, n + spread.c_gap);
        // A ends with its last element: what lies behind it is not even allocated.
        let mut laid = vec![POISON; spread.a_shift + (m.max(1) - 1) * a_stride + k];
        for (row, from) in a.chunks(k).enumerate() {
            let at = spread.a_shift + row * a_stride;
            laid[at..at + k].copy_from_slice(bytemuck::cast_slice(from));
        }
        let a_base = backend.alloc(2 * laid.len() as u64)?;
        backend.upload(a_base, bytemuck::cast_slice(&laid))?;
        let first = CANARY_ROWS * c_stride + spread.c_shift;
        let mut out = vec![POISON; first + (m + CANARY_ROWS) * c_stride];
        let c_base = backend.alloc(2 * out.len() as u64)?;
        backend.upload(c_base, bytemuck::cast_slice(&out))?;
        let result = run(
            Matrix { ptr: a_base.offset(2 * spread.a_shift as u64), stride: a_stride as u64 },
            Matrix { ptr: c_base.offset(2 * first as u64), stride: c_stride as u64 },
            m as u64,
        );
        if result.is_ok() {
            backend.download(c_base, bytemuck::cast_slice_mut(&mut out))?;
        }
        for ptr in [a_base, c_base] {
            backend.free(ptr)?;
        }
        result?;
        let mut c = Vec::with_capacity(m * n);
        for (at, bits) in out.into_iter().enumerate() {
            let inside = at.checked_sub(first).filter(|at| *at < m * c_stride);
            match inside.map(|at| (at / c_stride, at % c_stride)) {
                Some((_, column)) if column < n => c.push(f16::from_bits(bits)),
                _ => assert_eq!(bits, POISON, "element {at} outside C was written, {spread:?}"),
            }
        }
        Ok(c)
    }

    /// Whether every lock is zero, as it must be between launches.
    pub fn locks_are_zero(&self, workspace: &Workspace, num_locks: u64) -> bool {
        let Some(ptr) = workspace.locks_ptr() else { return true };
        let mut locks = vec![0u8; 4 * num_locks as usize];
        self.device.backend.download(ptr, &mut locks).expect("the locks are allocated");
        locks.iter().all(|byte| *byte == 0)
    }
}

/// How far a product may be from the exact one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// The exact sum, rounded once.
    Exact,
    /// `|error| <= 2^-11 |x| + ((k + 64) 2^-23 + (fragments + hops) 2^-11) S` with `S = sum |a w|`: one
    /// rounding of the result to fp16; one truncation to single precision an addition; one rounding of
    /// each weight if fragments are scaled; one rounding of a partial sum for each hop through fp16.
    Bound { fragments: bool, hops: u32 },
}

impl Tolerance {
    /// What a configuration and its stripes allow for a fill.
    pub fn of(fill: Fill, config: &Config, k: usize, stripe: u32) -> Self {
        let hops = match config.reduction {
            Reduction::F32 => 0,
            Reduction::F16InPlace => (k as u32).div_ceil(128).div_ceil(stripe) + 1,
        };
        match fill {
            // Fragments times powers of two are exact; hops are while the sums stay below 2048.
            Fill::Ascending | Fill::Integers if hops == 0 => Self::Exact,
            _ => Self::Bound { fragments: config.scaling == Scaling::Fragment, hops },
        }
    }
}

/// Compares C with the exact product; what differs, in words. `rows` says which row of A each row is.
pub fn compare(layer: &Layer, a: &[f16], c: &[f16], tolerance: Tolerance) -> Result<f64, String> {
    let (k, m) = (layer.k, a.len() / layer.k);
    assert_eq!(c.len(), m * layer.n, "a product of {m} rows");
    let a: Vec<f64> = a.iter().map(|a| a.to_f64()).collect();
    let (mut squares, mut norm, mut wrong, mut first) = (0.0, 0.0, 0, None);
    for n in 0..layer.n {
        let w = layer.column(n);
        for row in 0..m {
            let (mut exact, mut magnitude) = (0.0, 0.0);
            for (a, w) in a[row * k..(row + 1) * k].iter().zip(&w) {
                exact += a * w;
                magnitude += (a * w).abs();
            }
            let got = c[row * layer.n + n];
            let error = (got.to_f64() - exact).abs();
            let good = match tolerance {
                Tolerance::Exact => got == f16_from_f64(exact),
                Tolerance::Bound { fragments, hops } => {
                    let half = 2f64.powi(-11);
                    let single = (k + 64) as f64 * 2f64.powi(-23);
                    let roundings = f64::from(hops + u32::from(fragments));
                    let bound = half * exact.abs() + (single + half * roundings) * magnitude;
                    // A subnormal result is rounded to multiples of 2^-24.
                    error <= bound + 2f64.powi(-25)
                }
            };
            if !good {
                wrong += 1;
                first.get_or_insert_with(|| {
                    format!("({row}, {n}) is {got}, exactly {exact:.6}, magnitude {magnitude:.3}")
                });
            }
            squares += error * error;
            norm += exact * exact;
        }
    }
    match first {
        Some(first) => Err(format!("{wrong} of {} wrong ({tolerance:?}): {first}", c.len())),
        None => Ok((squares / f64::max(norm, f64::MIN_POSITIVE)).sqrt()),
    }
}

/// An error with its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!("\n  {cause}");
        source = cause.source();
    }
    text
}
