//! Layers of real checkpoints, as the tools wrote them: their recorded outputs, by the kernels.

use half::{bf16, f16};
use makaira::backend::Stream;
use makaira::checkpoint::{Checkpoint, Tensors};
use makaira::gemm::{Gemm, Matrix};
use makaira::reference::{self, Element, Reference, Tolerance};
use makaira::weights::{Activation, PackedWeights};

use crate::fixtures::{fixture, weights_of};
use crate::support::{Device, chain, devices};

/// Checkpoints whose weights kernels take.
const CHECKPOINTS: [&str; 16] = [
    "awq-g128",
    "ct-fp8-dynamic",
    "ct-mxfp4a16",
    "ct-nvfp4a16",
    "ct-w4a16-asym-g128",
    "ct-w4a16-g128",
    "ct-w8a16",
    "gptq-8bit-g128",
    "gptq-channelwise",
    "gptq-g128-actorder",
    "gptq-g128-asym",
    "gptq-g128-asym-v2",
    "gptq-g128-sym",
    "gptq-g32-sym",
    "marlin-channelwise",
    "marlin-g128",
];

const LAYERS: [&str; 3] = [
    "model.layers.0.self_attn.k_proj",
    "model.layers.2.mlp.gate_proj",
    "model.layers.5.mlp.down_proj",
];

/// The product of some rows by the kernel that the selection takes.
fn product<E: Element + bytemuck::Pod>(
    device: &Device,
    packed: &PackedWeights,
    activation: Activation,
    x: &[E],
) -> Vec<E> {
    let backend = &device.backend;
    let gemm = Gemm::new(backend.clone());
    let weight = gemm.upload(packed).expect("it fits").with_activation(activation);
    let (k, n) = (weight.source_inputs(), weight.layout().n);
    let m = x.len() / k;
    let workspace = gemm.workspace(&weight, m as u64).expect("it fits");
    let [a, c] = [(x, k), (&vec![E::zeroed(); m * n], n)].map(|(values, columns)| {
        let ptr = backend.alloc(2 * values.len() as u64).expect("it fits");
        backend.upload(ptr, bytemuck::cast_slice(values)).expect("it fits");
        Matrix { ptr, stride: columns as u64 }
    });
    gemm.matmul(a, &weight, c, m as u64, &workspace, Stream::default())
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let mut y = vec![E::zeroed(); m * n];
    backend.download(c.ptr, bytemuck::cast_slice_mut(&mut y)).expect("it ran");
    for matrix in [a, c] {
        backend.free(matrix.ptr).expect("it is ours");
    }
    y
}

/// Within the bound of the exact sums, and of the recorded outputs, whose weights were rounded to fp16.
#[test]
fn recorded_outputs_of_real_checkpoints() {
    let mut layers = 0;
    for name in CHECKPOINTS {
        let Some(folder) = fixture(name) else { continue };
        let goldens = Tensors::open(&folder.join("goldens.safetensors")).expect("recorded");
        let checkpoint = Checkpoint::open(&weights_of(folder)).expect("readable");
        for layer in LAYERS {
            let Ok(matrix) = checkpoint.layer(layer) else {
                // The original Marlin kernel takes multiples of 256 outputs only.
                assert!(name.starts_with("marlin"), "{name} {layer}");
                continue;
            };
            let what = format!("{name} {layer}");
            let packed = PackedWeights::pack(&matrix, 1).unwrap_or_else(|e| panic!("{what}: {e}"));
            let dense = reference::decode(&matrix);
            assert!(packed.dequantize() == dense, "{what}");
            let tensor = |suffix| goldens.get(&format!("{layer}.{suffix}")).expect("recorded");
            let x: Vec<f16> = tensor("x")
                .bytes
                .as_chunks()
                .0
                .iter()
                .map(|pair| f16::from_le_bytes(*pair))
                .collect();
            let y = tensor("y").bytes.as_chunks().0.iter();
            let y: Vec<f64> = y.map(|quad| f32::from_le_bytes(*quad).into()).collect();
            // Whatever numerics the selection prefers.
            let tolerance = Tolerance { half_roundings: 1 };
            for device in devices() {
                let c = product(&device, &packed, Activation::F16, &x);
                let exact = Reference::new(&x, &dense, matrix.k());
                let errors = exact.compare(&c, tolerance);
                assert!(errors.is_ok(), "{what}: {errors}");
                let recorded = exact.with_values(y.clone());
                let errors = recorded.compare(&c, tolerance.with_rounded_weights());
                assert!(errors.is_ok(), "{what}, recorded: {errors}");
                let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(x.to_f32())).collect();
                let c = product(&device, &packed, Activation::Bf16, &x);
                let exact = Reference::new(&x, &dense, matrix.k());
                let errors = exact.compare(&c, tolerance.with_rounded_weights());
                assert!(errors.is_ok(), "{what} in bf16: {errors}");
            }
            layers += 1;
        }
    }
    if layers > 0 {
        assert!(layers >= 40, "only {layers}");
    }
}
