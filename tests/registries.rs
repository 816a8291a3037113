//! What every entry of a registry must do, so that a new one is tested by being listed.
//!
//! The weight types: packing gives back every code, and the kernels multiply by exactly what `decode` says.
//! The families: each has a golden. (Its candidates verify in `kernels.rs` and assemble in
//! `configs_oracle.rs`; a checkpoint convention has its test in `checkpoint.rs`.)

use std::sync::Arc;

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Gemm, Matrix};
use makaira::jit::GpuBackend;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, FAMILIES, Problem, Rows};
use makaira::reference::Random;
use makaira::weights::{
    Codes, FORMATS, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, WeightFormat,
};

const N: usize = 64;
const K: usize = 256;
const GROUP: u32 = 128;
/// Rows of one product.
const M: usize = 16;

/// The emulator, and the GPU if there is one.
fn backends() -> Vec<(&'static str, Arc<dyn Backend>)> {
    let mut backends: Vec<(_, Arc<dyn Backend>)> =
        vec![("emulator", Arc::new(EmuBackend::h200_like(2)))];
    match GpuBackend::open(0) {
        Ok(gpu) => backends.push(("GPU", Arc::new(gpu))),
        Err(error) => {
            assert!(error.is_unavailable(), "the GPU is there and does not open: {error}");
            eprintln!("skipped: the registries on a GPU: {error}");
        }
    }
    backends
}

/// A layer of random codes of a type. Scales are powers of two, so that every weight is an fp16 number.
struct Layer {
    codes: Vec<u8>,
    scales: Vec<f16>,
    packed: PackedWeights,
}

impl Layer {
    fn new(format: &'static dyn WeightFormat, random: &mut Random) -> Self {
        let group = Group::Size(GROUP);
        let below = |random: &mut Random, bound: usize| random.bits() as usize % bound;
        let codes: Vec<u8> = (0..N * K).map(|_| below(random, format.num_codes()) as u8).collect();
        let scale = |random: &mut Random| [0.25, 0.5, 1.0, 2.0][below(random, 4)];
        let scales: Vec<f16> =
            (0..group.num_groups(K) * N).map(|_| f16::from_f64(scale(random))).collect();
        let view = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let matrix = QuantMatrix::new(N, K, group, format, Codes::ByInput(&codes), view);
        let packed = PackedWeights::pack(&matrix.expect("legal"), 1).expect("it packs");
        Self { codes, scales, packed }
    }

    /// The weight of input `k` and output `n`.
    fn weight(&self, k: usize, n: usize) -> f16 {
        let scale = self.scales[k / GROUP as usize * N + n];
        let value = self.packed.format().decode(self.codes[k * N + n]) * scale.to_f32();
        let weight = f16::from_f32(value);
        assert_eq!(weight.to_f32(), value, "the test wants weights that fp16 holds");
        weight
    }
}

/// One-hot activations pick one weight each: what the kernel dequantised, exactly, for every place of a word.
#[test]
fn every_weight_type_is_multiplied_as_it_decodes() {
    let seed = Random::fresh_seed();
    let mut random = Random::new(seed);
    for format in FORMATS {
        if format.fragments().is_none() {
            eprintln!("skipped: {} in kernels, none converts it yet", format.name());
            continue;
        }
        let layer = Layer::new(*format, &mut random);
        let unpacked = layer.packed.unpack();
        assert!(unpacked.codes == layer.codes && unpacked.scales == layer.scales, "seed {seed}");
        for (backend_name, backend) in backends() {
            let kernels =
                [("sm80", ""), ("sm80", "_fs"), ("sm80", "_sn"), ("sm90", ""), ("sm90", "_sn")];
            for (family, flags) in kernels {
                if flags == "_sn" && format.subnormal().is_none() {
                    continue;
                }
                let name = format.name();
                let name = format!("marlin_{family}_{name}_f16_m16n64k256_g128_w1_s2_c1{flags}");
                let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
                let arch = backend.device().arch;
                if !select::family_of(&config).runs_on(arch) {
                    eprintln!("skipped: {config} on {arch}");
                    continue;
                }
                if let Err(why) = products(&backend, config, &layer) {
                    panic!("{backend_name}, {config}, seed {seed}: {why}");
                }
            }
        }
    }
}

/// Multiplies with every unit vector, [`M`] of them at a time.
fn products(backend: &Arc<dyn Backend>, config: Config, layer: &Layer) -> Result<(), String> {
    let gemm = Gemm::new(backend.clone());
    let weight = gemm.upload(&layer.packed).expect("it fits");
    let (n, k, group) = (N as u32, K as u32, Group::Size(GROUP));
    let problem = Problem { format: "u4b8", m: M as u64, n, k, group, rows: Rows::Whole };
    let stripe = k / 128;
    let cost = select::cost(&config, &problem, backend.device(), stripe);
    let prepared = gemm.prepare_choice(Choice { config, stripe, cost });
    let prepared = prepared.map_err(|error| error.to_string())?;
    let workspace = gemm.workspace_of(0, 0).expect("nothing is shared");
    let [a, c] = [K, N].map(|columns| {
        let ptr = backend.alloc((2 * M * columns) as u64).expect("memory");
        Matrix { ptr, stride: columns as u64 }
    });
    let mut got = vec![f16::ZERO; M * N];
    for first in (0..K).step_by(M) {
        let mut rows = vec![f16::ZERO; M * K];
        for row in 0..M {
            rows[row * K + first + row] = f16::ONE;
        }
        backend.upload(a.ptr, bytemuck::cast_slice(&rows)).expect("it fits");
        backend.upload(c.ptr, &vec![0xff; 2 * M * N]).expect("it fits");
        gemm.matmul_with(&prepared, a, &weight, c, M as u64, &workspace, Stream::default())
            .map_err(|error| error.to_string())?;
        backend.download(c.ptr, bytemuck::cast_slice_mut(&mut got)).expect("it is there");
        for (idx, got) in got.iter().enumerate() {
            let (k, n) = (first + idx / N, idx % N);
            let wanted = layer.weight(k, n);
            if *got != wanted {
                let (code, scale) = (layer.codes[k * N + n], layer.scales[k / 128 * N + n]);
                return Err(format!(
                    "code {code} of {} with scale {scale}, input {k}, output {n}: \
                     multiplied as {got}, decodes to {wanted}",
                    config.format
                ));
            }
        }
    }
    for matrix in [a, c] {
        backend.free(matrix.ptr).expect("allocated above");
    }
    Ok(())
}

#[test]
fn every_family_has_a_golden() {
    let goldens: Vec<String> = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/ptx"))
        .expect("the folder of the goldens")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    for family in FAMILIES {
        let prefix = format!("marlin_{}_", family.name());
        assert!(
            goldens.iter().any(|name| name.starts_with(&prefix)),
            "family {} has no golden: list a configuration in GOLDENS, src/kernel/mod.rs",
            family.name()
        );
    }
    assert!(FAMILIES.is_sorted_by_key(|family| family.name()), "FAMILIES is sorted by name");
}
