//! What a store holds is what was packed, and what was packed comes back bit for bit.

use half::{bf16, f16};
use makaira::checkpoint::{Checkpoint, Tensors};
use makaira::reference::Random;
use makaira::store::{PackOptions, PackedStore, pack};
use makaira::weights::{
    FORMATS, PackedView, PackedWeights, Packing, QuantMatrix, ScaleType, default_threads,
};
use proptest::prelude::*;

use crate::fixtures::{fixture, weights_of};
use crate::support::{Drawn, Packed};

/// The value of an element, by the definition of its type.
fn value(element: ScaleType, bytes: &[u8]) -> f32 {
    match element {
        ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        ScaleType::E8M0 => 2f32.powi(i32::from(bytes[0]) - 127),
        ScaleType::E4M3 => {
            let (exponent, mantissa) =
                (i32::from(bytes[0] >> 3 & 15), f32::from(bytes[0] & 7) / 8.0);
            let magnitude = match exponent {
                0 => mantissa / 64.0,
                _ => (1.0 + mantissa) * 2f32.powi(exponent - 7),
            };
            if bytes[0] < 128 { magnitude } else { -magnitude }
        }
    }
}

/// Compares everything that a packed weight gives back with its source.
fn assert_restored(what: &str, matrix: &QuantMatrix<'_>, packed: PackedView<'_>) {
    let (n, k, element) = (matrix.n(), matrix.k(), matrix.scales().element);
    let restored = packed.restore(element, matrix.global_scale()).expect(what);
    for (at, code) in restored.codes.iter().enumerate() {
        assert_eq!(*code, matrix.code(at / n, at % n), "{what}: code {at}");
    }
    let bytes = element.bytes();
    assert_eq!(restored.zeros.is_some(), matrix.zeros().is_some(), "{what}");
    let mut groups_seen = vec![false; matrix.num_groups()];
    (0..k).for_each(|input| groups_seen[matrix.group_of_input(input)] = true);
    assert!(restored.num_groups <= matrix.num_groups(), "{what}");
    for (group_idx, _) in groups_seen.iter().enumerate().filter(|(_, seen)| **seen) {
        for column in 0..n {
            let at = group_idx * n + column;
            let found = value(element, &restored.scales[bytes * at..]);
            let wanted = matrix.scale(group_idx, column);
            assert_eq!(found.to_bits(), wanted.to_bits(), "{what}: scale {group_idx} {column}");
            let zero = restored.zeros.as_ref().map(|zeros| zeros[at]);
            assert_eq!(zero, matrix.zero(group_idx, column), "{what}: zero {group_idx} {column}");
        }
    }
    for input in 0..k {
        let found = restored.g_idx.as_ref().map(|groups| groups[input] as usize);
        let found = found.unwrap_or_else(|| matrix.group().index_of(input));
        assert_eq!(found, matrix.group_of_input(input), "{what}: group of {input}");
    }
}

/// Every checkpoint that is at hand, through a store on disk and back.
#[test]
fn every_fixture_comes_back_from_its_store_bit_for_bit() {
    let names = [
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
        "tiny-llama",
    ];
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo").into();
    let folders = names.into_iter().filter_map(fixture).map(weights_of).chain([demo]);
    for path in folders {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let target = folder.path().join("store");
        let checkpoint = Checkpoint::open(&path).expect("readable");
        let options = PackOptions { file_bytes: 3_000_000, ..PackOptions::default() };
        let report = pack(&checkpoint, &target, &options, &mut |_| ()).expect("packs");
        let store = PackedStore::open(&target).expect("opens");
        store.check(2).expect("as it was written");
        assert_eq!(store.layers().len(), checkpoint.layers().len(), "{}", path.display());
        assert!(report.num_layers == store.layers().len() && report.num_kept == 0);
        let mut accounted: Vec<String> = store.carried().map(str::to_owned).collect();
        for name in &accounted {
            let [ours, theirs] = [store.tensors(), checkpoint.tensors()].map(|t: &Tensors| {
                let tensor = t.get(name).expect("in both");
                (tensor.dtype, tensor.shape.to_vec(), tensor.bytes.to_vec())
            });
            assert!(ours == theirs, "{name}");
        }
        for (layer, stored) in checkpoint.layers().iter().zip(store.layers()) {
            let what = format!("{}: {layer}", path.display());
            let weight = checkpoint.load(&layer.name, default_threads()).expect("legal");
            let matrix = weight.view();
            let packed = store.packed(&layer.name).expect("there");
            let fresh = PackedWeights::pack(&matrix, 1).expect("packs");
            assert!(packed.bytes() == fresh.bytes(), "{what}");
            assert_eq!(packed.spec().input_order(), fresh.input_order(), "{what}");
            assert_eq!(stored.source.convention, layer.convention, "{what}");
            // bf16, f16 and bytes are moved; these checkpoints have no f32 scales but exact ones.
            assert!(stored.source.exact, "{what}");
            assert_eq!(stored.source.scales, matrix.scales().element, "{what}");
            assert_eq!(stored.source.global.to_bits(), matrix.global_scale().to_bits(), "{what}");
            assert_restored(&what, &matrix, packed);
            accounted.extend(checkpoint.tensors_of(layer).map(|tensor| tensor.name.to_owned()));
        }
        accounted.sort_unstable();
        assert!(accounted.iter().map(String::as_str).eq(checkpoint.tensors().names()));
    }
}

#[test]
fn a_store_is_a_whole_model_with_its_places_and_provenance() {
    let mut random = Random::new(Random::fresh_seed());
    for file_bytes in [1, 40_000, u64::MAX] {
        let packed = Packed::new(5, file_bytes, &mut random);
        let (checkpoint, store) = (packed.checkpoint(), packed.open().expect("opens"));
        assert_eq!(packed.report.num_carried, 3);
        assert_eq!(
            store.carried().collect::<Vec<_>>(),
            ["embed.weight", "layers.2.proj.bias", "norm.weight"]
        );
        for name in ["config.json", "tokenizer.json"] {
            let [ours, theirs] = ["store", "model"]
                .map(|folder| std::fs::read(packed.folder.path().join(folder).join(name)));
            assert_eq!(ours.expect("carried over"), theirs.expect("there"));
        }
        let tool = concat!("makaira ", env!("CARGO_PKG_VERSION"));
        assert_eq!(store.provenance()["makaira.tool"], tool);
        assert!(store.provenance()["makaira.config"].contains("quantization_config"));
        let bias = store.bias("layers.2.proj").expect("a layer").expect("a bias");
        let theirs = checkpoint.tensors().get("layers.2.proj.bias").expect("there");
        assert_eq!((bias.shape, bias.bytes), (theirs.shape, theirs.bytes));
        assert!(store.bias("layers.1.proj").expect("a layer").is_none());
        for name in store.tensors().names().filter(|name| !name.starts_with("makaira.")) {
            let (_, range) = store.tensors().place(name).expect("listed");
            assert!(range.start.is_multiple_of(256), "{name} at {}", range.start);
        }
        // Any other reader lists the same tensors.
        for (path, _) in store.tensors().files() {
            let bytes = std::fs::read(path).expect("there");
            let listed = safetensors::SafeTensors::deserialize(&bytes).expect("legal");
            for name in listed.names().into_iter().filter(|name| !name.starts_with("makaira.")) {
                let ours = store.tensors().get(name).expect("listed").bytes;
                assert!(listed.tensor(name).expect("listed").data() == ours, "{name}");
            }
        }
        let error = store.packed("proj").expect_err("a part of a name").to_string();
        assert!(error.contains("did you mean layers."), "{error}");
        let error = Checkpoint::open(&packed.directory()).expect_err("packed").to_string();
        assert!(error.contains("packed already"), "{error}");
    }
}

#[test]
fn only_the_layers_are_packed_on_demand() {
    let packed = Packed::new(3, u64::MAX, &mut Random::new(Random::fresh_seed()));
    let target = packed.folder.path().join("layers");
    let options = PackOptions { only_layers: true, ..PackOptions::default() };
    let report = pack(&packed.checkpoint(), &target, &options, &mut |_| ()).expect("packs");
    let store = PackedStore::open(&target).expect("opens");
    assert_eq!((report.num_carried, store.carried().count()), (0, 0));
    assert!(store.bias("layers.2.proj").expect("a layer").is_none());
    assert!(!target.join("config.json").exists());
    let whole = packed.open().expect("opens");
    for layer in whole.layers() {
        let [a, b] = [&whole, &store].map(|s| s.packed(&layer.name).expect("there").bytes());
        assert!(a == b, "{}", layer.name);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn packing_loses_nothing_of_any_type_group_or_order(
        (n, groups, odd) in (1usize..150, 1usize..9, 0usize..16),
        raw in prop::sample::select(vec![-1i64, 16, 32, 64, 128]),
        act_order: bool,
        seed: u64,
    ) {
        let k = if raw < 0 { groups * 48 + odd } else { groups * raw as usize };
        let mut random = Random::new(seed);
        for format in FORMATS {
            for element in
                [ScaleType::F16, ScaleType::BF16, ScaleType::F32, ScaleType::E4M3, ScaleType::E8M0]
            {
                let drawn = Drawn::new((n, k), raw, *format, element, act_order, &mut random);
                let matrix = drawn.matrix().expect("legal");
                // Scales of one byte may be too far apart for fp16: that is told, not rounded.
                let Ok(packing) = Packing::of(&matrix) else { continue };
                let packed = PackedWeights::of_packing(&packing, 2);
                let what = format!("{} {n} x {k}, {raw}, {element:?}, {act_order}", format.name());
                prop_assert!(packing.scales_are_exact() || element == ScaleType::F32, "{}", what);
                if packing.scales_are_exact() {
                    assert_restored(&what, &matrix, packed.view());
                }
            }
        }
    }
}
