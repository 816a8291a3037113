//! What every entry of a registry must do, so that a new one is tested by being listed.
//!
//! The weight types: packing gives back every code, and the kernels multiply by exactly what `decode` says.
//! The families: each has a golden. (Its candidates verify in `kernels.rs` and assemble in
//! `configs_oracle.rs`; a checkpoint convention has its test in `checkpoint.rs`.)

use std::sync::Arc;

use half::{bf16, f16};
use makaira::backend::{Backend, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Gemm, Matrix};
use makaira::jit::GpuBackend;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, FAMILIES, Problem, Rows};
use makaira::reference::Random;
use makaira::target::SmArch;
use makaira::weights::{
    Activation, Codes, FORMATS, Group, MatrixParts, PackedLayout, PackedWeights, QuantMatrix,
    ScaleOrder, ScaleRow, ScaleType, Scales, TileKind, WeightFormat, ZeroOrder, ZeroRule, Zeros,
};

const N: usize = 64;
const K: usize = 256;
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

/// A layer of a type that has every code in every place of a fragment. Scales are powers of two, so that every weight
/// is an fp16 number, and a bf16 one.
struct Layer {
    codes: Vec<u8>,
    /// `[K][N]`.
    weights: Vec<f32>,
    packed: PackedWeights,
}

impl Layer {
    fn new(
        format: &'static dyn WeightFormat,
        raw: i64,
        element: ScaleType,
        random: &mut Random,
    ) -> Self {
        let group = Group::new(K, raw).expect("legal");
        let num_codes = format.num_codes();
        let below = |random: &mut Random, bound: usize| random.bits() as usize % bound;
        // Each place of a fragment counts through the codes by itself. NaNs are nobody's weights.
        let places =
            PackedLayout::of(N, K, group, TileKind::of(format, ScaleRow::F16)).expect("legal");
        let mut counts: Vec<usize> = (0..8).map(|_| below(random, num_codes)).collect();
        let mut codes = vec![0; N * K];
        for (i, code) in codes.iter_mut().enumerate() {
            let bit = places.code_bit(i / N, i % N);
            let words = places.kind.words_per_fragment();
            let place = bit / 32 % words * (8 / words) + bit % 32 / format.bits() as usize;
            counts[place] += 1;
            *code = (counts[place] % num_codes) as u8;
            if format.decode(*code).is_nan() {
                *code = format.padding_code();
            }
        }
        let num_scales = group.num_groups(K) * N;
        let exponents: Vec<usize> = (0..num_scales).map(|_| below(random, 4)).collect();
        // 1/4, 1/2, 1 or 2.
        let bytes: Vec<u8> = exponents
            .iter()
            .flat_map(|exponent| {
                let value = [0.25, 0.5, 1.0, 2.0][*exponent];
                match element {
                    ScaleType::E4M3 => vec![[0x28, 0x30, 0x38, 0x40][*exponent]],
                    ScaleType::E8M0 => vec![125 + *exponent as u8],
                    _ => f16::from_f32(value).to_le_bytes().to_vec(),
                }
            })
            .collect();
        let scales = Scales::new(&bytes, element, ScaleOrder::Rows);
        let zero_bytes: Vec<u8> = (0..num_scales).map(|_| below(random, num_codes) as u8).collect();
        let zeros = Zeros { bytes: &zero_bytes, order: ZeroOrder::Rows };
        let zeros = (format.zero_rule() == ZeroRule::Stored).then_some(zeros);
        let parts = MatrixParts {
            n: N,
            k: K,
            group,
            format,
            codes: Codes::ByInput(&codes),
            scales,
            zeros,
            g_idx: None,
        };
        let matrix = QuantMatrix::from_parts(parts).expect("legal");
        let packed = PackedWeights::pack(&matrix, 1).expect("it packs");
        assert!(packed.unpack().codes == codes, "{format:?}");
        let weights = (0..N * K).map(|i| matrix.value(i / N, i % N) as f32).collect();
        Self { codes, weights, packed }
    }
}

/// One-hot activations pick one weight each: what the kernel dequantised, exactly, for every place of a word.
#[test]
fn every_weight_type_is_multiplied_as_it_decodes() {
    let seed = Random::fresh_seed();
    let mut random = Random::new(seed);
    let mut multiplied = 0;
    for format in FORMATS {
        if format.fragments().is_none() {
            eprintln!("skipped: {} in kernels, none converts it yet", format.name());
            continue;
        }
        let halves = [(128, ScaleType::F16), (32, ScaleType::F16), (-1, ScaleType::F16)];
        let bytes = [(16, ScaleType::E4M3), (32, ScaleType::E8M0)];
        let bytes = bytes.into_iter().filter(|_| format.name() == "e2m1");
        for (raw, element) in halves.into_iter().chain(bytes) {
            let layer = Layer::new(*format, raw, element, &mut random);
            for (backend_name, backend) in backends() {
                for config in configs(*format, &layer) {
                    let arch = backend.device().arch;
                    if !select::family_of(&config).runs_on(arch) {
                        eprintln!("skipped: {config} on {arch}");
                        continue;
                    }
                    if let Err(why) = products(&backend, config, &layer) {
                        panic!("{backend_name}, {config}, seed {seed}: {why}");
                    }
                    multiplied += 1;
                }
            }
        }
    }
    assert!(multiplied > 100, "only {multiplied} kernels");
}

/// Configurations of all families and conversions for a layer.
fn configs(format: &'static dyn WeightFormat, layer: &Layer) -> Vec<Config> {
    let PackedLayout { group, kind, .. } = *layer.packed.layout();
    let group = match (group, kind.scales) {
        (Group::PerColumn, _) => "col".to_owned(),
        (group, ScaleRow::F16) => format!("g{group}"),
        (group, ScaleRow::E5m3) => format!("g{group}e5m3"),
    };
    let mut configs = Vec::new();
    for activation in [Activation::F16, Activation::Bf16] {
        let exponent = format.fragments().expect("a conversion").exponent(activation);
        let factor = layer.packed.factor() * 2f32.powi(exponent as i32);
        for (family, tile, warps, flags) in [
            ("sm80", "m16n64k256", "w1_s2_c1", ""),
            ("sm80", "m16n64k256", "w1_s2_c1", "_fs"),
            ("sm80", "m16n64k256", "w1_s2_c1", "_sn"),
            ("sm90", "m16n64k256", "w1_s2_c1", ""),
            ("sm90", "m16n64k256", "w1_s2_c1", "_sn"),
            ("sm90wg", "m16n64k128", "w4_s3_c1", ""),
            ("sm90wg", "m16n64k128", "w4_s3_c1", "_fs"),
            ("sm90wg", "m16n128k128", "w4_s3_c1_x2", "_fs"),
        ] {
            let factor = if factor == 1.0 { "" } else { "_gf" };
            let (name, activation) = (format.name(), activation.name());
            let name = format!(
                "marlin_{family}_{name}_{activation}_{tile}_{group}_{warps}{flags}{factor}"
            );
            let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
            // What a family leaves to others.
            match select::check(&config, SmArch::specific(90)) {
                Ok(()) => configs.push(config),
                Err(error) => assert!(!flags.is_empty() || group != "g128", "{error}"),
            }
        }
    }
    configs
}

/// Multiplies with every unit vector, [`M`] of them at a time.
fn products(backend: &Arc<dyn Backend>, config: Config, layer: &Layer) -> Result<(), String> {
    let gemm = Gemm::new(backend.clone());
    let activation = config.kind.activation;
    let weight = gemm.upload(&layer.packed).expect("it fits").with_activation(activation);
    let (n, k) = (N as u32, K as u32);
    let problem =
        Problem { kind: config.kind, m: M as u64, n, k, group: config.group, rows: Rows::Whole };
    let stripe = k / 128;
    let cost = select::cost(&config, &problem, backend.device(), stripe);
    let prepared = gemm.prepare_choice(Choice { config, stripe, cost });
    let prepared = prepared.map_err(|error| error.to_string())?;
    let workspace = gemm.workspace_of(0, 0).expect("nothing is shared");
    let [a, c] = [K, N].map(|columns| {
        let ptr = backend.alloc((2 * M * columns) as u64).expect("memory");
        Matrix { ptr, stride: columns as u64 }
    });
    let one = match activation {
        Activation::F16 => f16::ONE.to_bits(),
        Activation::Bf16 => bf16::ONE.to_bits(),
    };
    let mut got = vec![0u16; M * N];
    for first in (0..K).step_by(M) {
        let mut rows = vec![0u16; M * K];
        for row in 0..M {
            rows[row * K + first + row] = one;
        }
        backend.upload(a.ptr, bytemuck::cast_slice(&rows)).expect("it fits");
        backend.upload(c.ptr, &vec![0xff; 2 * M * N]).expect("it fits");
        gemm.matmul_with(&prepared, a, &weight, c, M as u64, &workspace, Stream::default())
            .map_err(|error| error.to_string())?;
        backend.download(c.ptr, bytemuck::cast_slice_mut(&mut got)).expect("it is there");
        for (idx, got) in got.iter().enumerate() {
            let (k, n) = (first + idx / N, idx % N);
            let wanted = layer.weights[k * N + n];
            let got = match activation {
                Activation::F16 => f16::from_bits(*got).to_f32(),
                Activation::Bf16 => bf16::from_bits(*got).to_f32(),
            };
            if got != wanted {
                let code = layer.codes[k * N + n];
                return Err(format!(
                    "code {code} of {}, input {k}, output {n}: multiplied as {got}, the weight is {wanted}",
                    config.kind.format
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
