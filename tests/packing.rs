//! Packing at real sizes, against the files of the original packer and against plain readings.

mod fixtures;

use fixtures::{fixture, weights_of};
use half::f16;
use makaira::checkpoint::Checkpoint;
use makaira::weights::{
    Codes, Dense, FORMATS, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder, ScaleType,
    Scales, U4B8, ZeroOrder, ZeroRule, Zeros, quantize,
};

/// A repeatable stream of numbers.
struct Stream(u64);

impl Stream {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }
}

#[test]
fn our_marlin_tensors_are_those_of_the_original_packer() {
    for (ours, theirs, num_layers) in
        [("gptq-g128-sym", "marlin-g128", 42), ("gptq-channelwise", "marlin-channelwise", 3)]
    {
        let (Some(ours), Some(theirs)) = (fixture(ours), fixture(theirs)) else { continue };
        let gptq = Checkpoint::open(&weights_of(ours)).expect("readable");
        let original = Checkpoint::open(&weights_of(theirs)).expect("readable");
        assert_eq!((gptq.layers().len(), original.layers().len()), (num_layers, num_layers));
        for layer in gptq.layers() {
            let packed = PackedWeights::pack(&gptq.layer(&layer.name).expect("legal"), 2);
            let packed = packed.expect("packs");
            let marlin = packed.to_marlin().expect("multiples of 64 and 16");
            let tensor = |suffix| {
                let name = format!("{}.{suffix}", layer.name);
                original.tensors().get(&name).expect("the same layers").bytes
            };
            let (b, s): (&[u8], &[u8]) =
                (bytemuck::cast_slice(&marlin.b), bytemuck::cast_slice(&marlin.s));
            assert!(tensor("B") == b, "{}: B", layer.name);
            assert!(tensor("s") == s, "{}: s", layer.name);
            let shape = (layer.n, layer.k);
            let again = PackedWeights::from_marlin(shape, layer.group, tensor("B"), tensor("s"), 2);
            assert!(again.expect("legal").bytes() == packed.bytes(), "{}", layer.name);
            let matrix = original.layer(&layer.name).expect("legal");
            assert!(PackedWeights::pack(&matrix, 1).expect("packs").bytes() == packed.bytes());
        }
    }
}

/// Sizes that other stacks refuse; each packs, decodes and is padded with zeros.
#[test]
fn b01_b02_b03_b04_b08_sizes_off_the_tile_grid_are_padded() {
    let shapes = [
        (64, 10944, 64),
        (384, 256, 128),
        (256, 192, -1),
        (256, 7392, -1),
        (256, 7392, 32),
        (8, 2048, 128),
        (32, 2048, 128),
        (96, 2048, 128),
        (160, 2048, 128),
        (256, 8256, 64),
        (100, 128, -1),
        (264, 128, -1),
        (320, 128, -1),
        (1, 1, -1),
        (65, 129, -1),
    ];
    for (n, k, raw) in shapes {
        let mut stream = Stream((n * k) as u64);
        let group = Group::new(k, raw).expect("supported");
        let num_groups = group.num_groups(k);
        let codes: Vec<u8> = (0..n * k).map(|_| (stream.next() & 15) as u8).collect();
        let scales: Vec<f16> =
            (0..num_groups * n).map(|_| f16::from_bits((stream.next() & 0x3fff) as u16)).collect();
        let view = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), view);
        let packed = PackedWeights::pack(&matrix.expect("legal"), 2).expect("packs");
        let layout = *packed.layout();
        assert_eq!((layout.n_padded % 64, layout.k_padded % 128), (0, 0));
        assert_eq!(packed.bytes().len(), layout.total_bytes);
        let dense = packed.dequantize();
        for (i, &value) in dense.iter().enumerate() {
            let (row, column) = (i / k, i % k);
            let scale = scales[group.index_of(column) * n + row].to_f64();
            let exact = (f64::from(codes[column * n + row]) - 8.0) * scale;
            assert_eq!(f64::from(value), exact, "{n} x {k}, group {group}: ({row}, {column})");
        }
        let padding = (0..layout.n_padded)
            .flat_map(|n_idx| (0..layout.k_padded).map(move |k_idx| (k_idx, n_idx)))
            .filter(|&(k_idx, n_idx)| n_idx >= n || k_idx >= k);
        assert!(padding.into_iter().all(|(k_idx, n_idx)| packed.code(k_idx, n_idx) == 8));
        for n_idx in n..layout.n_padded {
            let padded = (0..num_groups).map(|group_idx| packed.scale(group_idx, n_idx));
            assert!(padded.into_iter().all(|scale| scale.to_bits() == 0), "channel {n_idx}");
        }
        let unpacked = packed.unpack();
        assert!(unpacked.codes == codes && unpacked.scales == scales);
    }
}

#[test]
fn a_quantised_half_precision_weight_stays_within_half_a_step() {
    let (n, k) = (192, 1024);
    let mut stream = Stream(5);
    // Roughly normal, with a few outliers.
    let weight: Vec<f16> = (0..n * k)
        .map(|_| {
            let sum: f64 = (0..4).map(|_| f64::from(stream.next()) / 2f64.powi(32) - 0.5).sum();
            let outlier = if stream.next().is_multiple_of(997) { 6.0 } else { 1.0 };
            f16::from_f64(0.05 * outlier * sum)
        })
        .collect();
    for raw in [-1, 32, 64, 128] {
        let group = Group::new(k, raw).expect("supported");
        let dense = Dense::F16(bytemuck::cast_slice(&weight));
        let quantized = quantize(dense, n, k, group, 2).expect("finite");
        assert!(quantized == quantize(dense, n, k, group, 1).expect("finite"));
        let packed = PackedWeights::pack(&quantized.view(), 2).expect("packs");
        for (i, &value) in packed.dequantize().iter().enumerate() {
            let (row, column) = (i / k, i % k);
            let step = packed.scale(group.index_of(column), row).to_f64();
            let error = (f64::from(value) - weight[i].to_f64()).abs();
            // Half a step, and the ends at 7.5 steps of a scale rounded to 11 bits.
            assert!(
                error <= step * (0.5 + 7.5 * 2f64.powi(-11)),
                "group {group}: ({row}, {column})"
            );
        }
    }
}

/// Fault B90: a packer that looks at codes for signs drops negative weights, since codes carry an offset. Every weight
/// of the reported kind of block keeps its sign and size, and no byte is wasted.
#[test]
fn b90_negative_weights_survive_packing() {
    let (n, k) = (256, 128);
    let block = [-7.0, -6.0, 1.0, 2.0];
    let dense: Vec<f32> = (0..n * k).map(|i| block[(i + i / k) % 4]).collect();
    let quantized = quantize(Dense::F32(bytemuck::cast_slice(&dense)), n, k, Group::PerColumn, 1)
        .expect("finite");
    let packed = PackedWeights::pack(&quantized.view(), 1).expect("packs");
    assert_eq!(packed.layout().codes_bytes, k / 2 * n / 8 * 8, "half a byte a code");
    for (at, (wanted, found)) in dense.iter().zip(packed.dequantize()).enumerate() {
        // Half a step of the scale that holds -7 at code 0.
        assert!((wanted - found).abs() <= 0.51, "weight {at}: {found}, not {wanted}");
    }
}

/// Fault B94: packing reads its description and leaves it alone. Twice, and from threads at once, it gives the same
/// bytes, and the description still says what it said.
#[test]
fn b94_packing_leaves_its_description_alone() {
    for (at, format) in FORMATS.iter().enumerate() {
        let mut stream = Stream(94 + at as u64);
        let (n, k) = (100, 384);
        let fp4 = format.name() == "e2m1";
        let (group, element) = match fp4 {
            true => (Group::Size(16), ScaleType::E4M3),
            false => (Group::Size(64), ScaleType::F16),
        };
        let codes: Vec<u8> =
            (0..n * k).map(|_| stream.next() as u8 & (0x7e >> (8 - format.bits()))).collect();
        let num_scales = n * group.num_groups(k);
        let scales: Vec<u8> =
            (0..num_scales * element.bytes()).map(|_| 0x20 | stream.next() as u8 & 0x1f).collect();
        let zeros: Vec<u8> = (0..num_scales).map(|_| stream.next() as u8 & 0xf).collect();
        // Inputs in another order, so that packing has one of its own to keep.
        let g_idx: Vec<u8> =
            (0..k as i32).flat_map(|i| (i % (num_scales / n) as i32).to_le_bytes()).collect();
        let stored = format.zero_rule() == ZeroRule::Stored;
        let parts = MatrixParts {
            n,
            k,
            group,
            format: *format,
            codes: Codes::ByOutput(&codes),
            scales: Scales::new(&scales, element, ScaleOrder::Rows),
            zeros: stored.then_some(Zeros { bytes: &zeros, order: ZeroOrder::Rows }),
            g_idx: Some(&g_idx),
        };
        let matrix = QuantMatrix::from_parts(parts).expect("legal");
        let before = format!("{matrix:?}");
        let pack = || {
            let packed = PackedWeights::pack(&matrix, 1).expect("packs");
            (packed.bytes().to_vec(), packed.input_order().map(|order| order.inputs().to_vec()))
        };
        let first = pack();
        assert!(first.1.is_some(), "the order is kept");
        let others = std::thread::scope(|scope| {
            let threads = [scope.spawn(pack), scope.spawn(pack)];
            threads.map(|thread| thread.join().expect("no panic"))
        });
        for other in others {
            assert!(other == first, "{format:?}");
        }
        assert!(pack() == first, "{format:?}");
        assert!(format!("{matrix:?}") == before, "{format:?}");
        assert_eq!((matrix.n(), matrix.k(), matrix.group()), (n, k, group));
    }
}
