//! Packing against its naive twin, and what packed buffers are worth.

use proptest::prelude::*;

use super::*;
use crate::weights::{
    FORMATS, Group, MatrixParts, ScaleOrder, ScaleType, Scales, U4B8, ZeroOrder, ZeroRule, Zeros,
};

/// The packed buffer, one element at a time, from the layout's positions only.
fn pack_naive(matrix: &QuantMatrix<'_>) -> PackedWeights {
    let packing = Packing::of(matrix).expect("a legal matrix");
    let (mut packed, rule) = (PackedWeights::zeroed(packing.spec().clone()), packing.rule);
    let layout = packing.spec().layout;
    let format = matrix.format();
    let fragments = format.fragments().expect("a conversion");
    let bytes: &mut [u8] = packed.bytes_mut();
    for n in 0..layout.n_padded {
        for k in 0..layout.k_padded {
            let real = n < layout.n && k < layout.k;
            let code = if real { matrix.code(k, n) } else { format.padding_code() };
            let bit = layout.code_bit(k, n);
            bytes[bit / 8] |= code << (bit % 8);
            let Some(at) = layout.zero_byte(k, n) else { continue };
            let group_idx = layout.group.index_of(k);
            let exists = n < layout.n && group_idx < layout.num_groups();
            let zero = if exists { matrix.zero(group_idx, n).expect("stored") } else { 0 };
            let base = fragments.zero_bases().expect("of stored zeros").f16[n % 16 / 8];
            let stored = f16::from_f32(base + f32::from(zero)).to_le_bytes();
            bytes[at..at + 2].copy_from_slice(&stored);
        }
    }
    for tile in 0..layout.codes_bytes / layout.tile_bytes {
        let start = tile * layout.tile_bytes;
        for word in bytes[start..start + layout.kind.code_bytes()].as_chunks_mut::<4>().0 {
            *word = fragments.arrange(u32::from_le_bytes(*word)).to_le_bytes();
        }
    }
    for n in 0..layout.n {
        for group_idx in 0..layout.num_groups() {
            let at = layout.scale_byte(group_idx, n);
            let bits = rule.bits(matrix, group_idx, n).to_le_bytes();
            match rule.row {
                ScaleRow::F16 => bytes[at..at + 2].copy_from_slice(&bits),
                ScaleRow::E5m3 => bytes[at] = bits[0],
            }
        }
    }
    packed
}

/// A shape, a group and the seed of its contents.
fn cases() -> impl Strategy<Value = (usize, usize, i64, u64)> {
    let raw = prop::sample::select(vec![-1i64, 16, 32, 64, 128]);
    (1usize..200, 1usize..9, raw, 0usize..16).prop_flat_map(|(n, groups, raw, odd)| {
        let k = if raw < 0 { groups * 48 + odd } else { groups * raw as usize };
        any::<u64>().prop_map(move |seed| (n, k, raw, seed))
    })
}

/// Random numbers.
fn numbers(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed | 1;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32
    }
}

/// Random codes `[K][N]` and random scale bits (any pattern: they are only moved).
fn contents(n: usize, k: usize, groups: usize, seed: u64) -> (Vec<u8>, Vec<u16>) {
    let mut next = numbers(seed);
    let codes = (0..n * k).map(|_| (next() & 0xf) as u8).collect();
    (codes, (0..groups * n).map(|_| next() as u16).collect())
}

/// Little-endian words of `rows` rows of `fields` fields each, rounded up with `fill`.
fn field_words(
    bits: u32,
    rows: usize,
    fields: usize,
    fill: u8,
    code: impl Fn(usize, usize) -> u8,
) -> Vec<u8> {
    let per_word = 32 / bits as usize;
    let word = |row: usize, word: usize| {
        (0..per_word).rev().fold(0u32, |value, field| {
            let at = word * per_word + field;
            value << bits | u32::from(if at < fields { code(row, at) } else { fill })
        })
    };
    let row_words = fields.div_ceil(per_word);
    (0..rows * row_words).flat_map(|i| word(i / row_words, i % row_words).to_le_bytes()).collect()
}

/// All orders that a source of these codes `[K][N]` can have, each with one byte before it: nothing in a mapped file is
/// aligned for certain.
fn sources(bits: u32, n: usize, k: usize, codes: &[u8]) -> Vec<(&'static str, Vec<u8>)> {
    let per_word = 32 / bits as usize;
    let code = |k: usize, n_idx: usize| codes[k * n + n_idx];
    let mut sources = vec![
        ("by input", codes.to_vec()),
        ("by output", (0..n * k).map(|i| code(i % k, i / k)).collect()),
        ("packed rows", field_words(bits, n, k, 0xf, |n, k| code(k, n))),
    ];
    if k.is_multiple_of(per_word) {
        // Words along K, then along N: the transpose of packed rows.
        let rows = field_words(bits, n, k, 0, |n, k| code(k, n));
        let words: Vec<&[u8]> = rows.chunks(4).collect();
        let row_words = k / per_word;
        let transposed = (0..row_words * n).flat_map(|i| words[i % n * row_words + i / n].to_vec());
        sources.push(("gptq", transposed.collect()));
    }
    if bits == 4 && k.is_multiple_of(2) {
        let pair = |i: usize| {
            let (n, k) = (i / (k / 2), 2 * (i % (k / 2)));
            code(k, n) | code(k + 1, n) << 4
        };
        sources.push(("pairs", (0..n * k / 2).map(pair).collect()));
    }
    if bits == 4 && n.is_multiple_of(8) {
        let order = crate::weights::AWQ_ORDER;
        let words = field_words(4, k, n, 0, |k, n| code(k, n / 8 * 8 + order[n % 8]));
        sources.push(("awq", words));
    }
    for (_, bytes) in &mut sources {
        bytes.insert(0, 0xa5);
    }
    sources
}

fn codes_of<'a>(name: &str, bytes: &'a [u8]) -> Codes<'a> {
    match name {
        "by input" => Codes::ByInput(bytes),
        "by output" => Codes::ByOutput(bytes),
        "packed rows" => Codes::PackedRows(bytes),
        "gptq" => Codes::GptqWords(bytes),
        "pairs" => Codes::NibblePairs(bytes),
        _ => Codes::AwqWords(bytes),
    }
}

/// The bytes of random scales of a type, none of them NaN or too small beside the others.
fn scale_bytes(element: ScaleType, count: usize, next: &mut impl FnMut() -> u32) -> Vec<u8> {
    let mut scale = |element: ScaleType| {
        let value = 0.25 + (next() % 4096) as f32 / 4096.0;
        match element {
            ScaleType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            ScaleType::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            ScaleType::F32 => value.to_le_bytes().to_vec(),
            ScaleType::E4M3 => vec![(next() % 0x7f) as u8],
            ScaleType::E8M0 => vec![110 + (next() % 15) as u8],
        }
    };
    (0..count).flat_map(|_| scale(element)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn packing_equals_the_naive_twin_from_every_source_order((n, k, raw, seed) in cases()) {
        let group = Group::new(k, raw).expect("legal");
        let mut next = numbers(seed);
        for format in FORMATS {
            let codes: Vec<u8> = (0..n * k).map(|_| next() as u8 & (0xff >> (8 - format.bits()))).collect();
            let num_groups = group.num_groups(k);
            let zero_bytes: Vec<u8> = (0..n * num_groups).map(|_| next() as u8 & (0xff >> (8 - format.bits()))).collect();
            let elements = [ScaleType::F16, ScaleType::BF16, ScaleType::F32, ScaleType::E4M3, ScaleType::E8M0];
            let element = elements[next() as usize % 5];
            let scale_bytes = scale_bytes(element, n * num_groups, &mut next);
            let scales = Scales { bytes: &scale_bytes, element, order: ScaleOrder::Rows, global: 0.75 };
            let stored = format.zero_rule() == ZeroRule::Stored;
            let zeros = stored.then_some(Zeros { bytes: &zero_bytes, order: ZeroOrder::Rows });
            for (name, bytes) in sources(format.bits(), n, k, &codes) {
                let source = codes_of(name, &bytes[1..]);
                let parts = MatrixParts { n, k, group, format: *format, codes: source, scales, zeros, g_idx: None };
                let matrix = QuantMatrix::from_parts(parts).expect("legal");
                let naive = pack_naive(&matrix);
                let what = format!("{} from {name}, {n} x {k}, {group}, {element:?}", format.name());
                for threads in [1, 2, 5] {
                    let packed = PackedWeights::pack(&matrix, threads).expect("packs");
                    prop_assert!(packed.bytes() == naive.bytes(), "{}", what);
                }
                let unpacked = naive.unpack();
                prop_assert!(unpacked.codes == codes, "{}", what);
                prop_assert!(unpacked.zeros == stored.then(|| zero_bytes.clone()), "{}", what);
                if element == ScaleType::F16 && naive.factor() == 0.75 {
                    let bits: Vec<u8> = unpacked.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                    prop_assert!(bits == scale_bytes, "{}", what);
                }
                // All scales here are fp16 numbers, times a power of two, but those of f32.
                for (i, value) in naive.dequantize().iter().enumerate().step_by(7) {
                    let wanted = matrix.value(i % k, i / k);
                    let allowed = if element == ScaleType::F32 { wanted.abs() * 2f64.powi(-11) } else { 0.0 };
                    if wanted.is_nan() {
                        prop_assert!(format.decode(matrix.code(i % k, i / k)).is_nan());
                        continue;
                    }
                    prop_assert!((f64::from(*value) - wanted).abs() <= allowed, "{} {}: {} {}", what, i, value, wanted);
                }
            }
        }
    }

    #[test]
    fn gathered_inputs_come_from_every_source_order((n, k, raw, seed) in cases()) {
        let group = Group::new(k, raw).expect("legal");
        let (num_groups, mut next) = (group.num_groups(k), numbers(seed));
        let groups: Vec<u32> = (0..k).map(|_| next() % num_groups as u32).collect();
        let g_idx: Vec<u8> = groups.iter().flat_map(|group| group.to_le_bytes()).collect();
        for format in FORMATS {
            let mask = 0xff >> (8 - format.bits());
            let codes: Vec<u8> = (0..n * k).map(|_| next() as u8 & mask).collect();
            let zero_bytes: Vec<u8> = (0..n * num_groups).map(|_| next() as u8 & mask).collect();
            let scale_bytes = scale_bytes(ScaleType::F16, n * num_groups, &mut next);
            let stored = format.zero_rule() == ZeroRule::Stored;
            let mut first: Option<PackedWeights> = None;
            for (name, bytes) in sources(format.bits(), n, k, &codes) {
                let matrix = QuantMatrix::from_parts(MatrixParts {
                    n,
                    k,
                    group,
                    format: *format,
                    codes: codes_of(name, &bytes[1..]),
                    scales: Scales::f16(&scale_bytes, ScaleOrder::Rows),
                    zeros: stored.then_some(Zeros { bytes: &zero_bytes, order: ZeroOrder::Rows }),
                    g_idx: Some(&g_idx),
                });
                let packed = PackedWeights::pack(&matrix.expect("legal"), 3).expect("packs");
                prop_assert!(packed.unpack().codes == codes, "{} from {}", format.name(), name);
                let first = first.get_or_insert_with(|| packed.clone());
                prop_assert!(first.bytes() == packed.bytes(), "{} from {}", format.name(), name);
            }
        }
    }

    #[test]
    fn marlin_tensors_go_there_and_back(
        (chunks, strips, seed) in (1usize..4, 1usize..20, any::<u64>()),
        raw in prop::sample::select(vec![-1i64, 32, 64, 128]),
    ) {
        let n = 64 * chunks;
        let k = if raw < 0 { 16 * strips } else { raw as usize * strips };
        let group = Group::new(k, raw).expect("legal");
        let (codes, scales) = contents(n, k, group.num_groups(k), seed);
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
        let packed = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs");
        let marlin = packed.to_marlin().expect("multiples");
        let (b, s) = (bytemuck::cast_slice(&marlin.b), bytemuck::cast_slice(&marlin.s));
        let again = PackedWeights::from_marlin((n, k), group, b, s, 2).expect("legal");
        prop_assert!(again.bytes() == packed.bytes());
        let scales = Scales::f16(s, ScaleOrder::Marlin);
        let view = QuantMatrix::new(n, k, group, &U4B8, Codes::MarlinWords(b), scales);
        prop_assert!(pack_naive(&view.expect("legal")).bytes() == packed.bytes());
    }
}

/// Outputs that end before the last tiles of their chunk, in every source order that inputs can be gathered from.
#[test]
fn gathered_layers_of_any_number_of_outputs() {
    for n in [1, 16, 32, 48, 64, 72] {
        let k = 64;
        let (codes, mut scales) = contents(n, k, 4, 3 + n as u64);
        // Numbers only: they are compared.
        scales.iter_mut().for_each(|bits| *bits &= 0xbbff);
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let g_idx: Vec<u8> = (0..k as i32).flat_map(|i| (i * 5 % 4).to_le_bytes()).collect();
        for (name, bytes) in sources(4, n, k, &codes) {
            let parts = MatrixParts {
                n,
                k,
                group: Group::Size(16),
                format: &U4B8,
                codes: codes_of(name, &bytes[1..]),
                scales,
                zeros: None,
                g_idx: Some(&g_idx),
            };
            let matrix = QuantMatrix::from_parts(parts).expect("legal");
            let packed = PackedWeights::pack(&matrix, 1).expect("packs");
            for (at, weight) in packed.dequantize().into_iter().enumerate() {
                let (k, n) = (at % k, at / k);
                assert_eq!(f64::from(weight), matrix.value(k, n), "{name}: ({k}, {n})");
            }
        }
    }
}

#[test]
fn padding_decodes_to_zero_and_scales_to_zero() {
    let (n, k) = (70, 160);
    let (codes, scales) = contents(n, k, 5, 9);
    let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
    let group = Group::Size(32);
    let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
    let packed = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs");
    for n_idx in 0..128 {
        for k_idx in 0..256 {
            if n_idx >= n || k_idx >= k {
                assert_eq!(packed.code(k_idx, n_idx), 8, "({k_idx}, {n_idx})");
            }
        }
        for group_idx in 0..8 {
            if n_idx >= n || group_idx >= 5 {
                assert_eq!(packed.scale(group_idx, n_idx).to_bits(), 0);
            }
        }
    }
}

#[test]
fn b21_minus_one_and_k_pack_to_the_same_bits() {
    for k in [128, 4096] {
        let n = 64;
        let (codes, scales) = contents(n, k, 1, 77);
        let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
        let pack = |group| {
            let codes = Codes::ByInput(&codes);
            let matrix = QuantMatrix::new(n, k, group, &U4B8, codes, scales).expect("legal");
            PackedWeights::pack(&matrix, 1).expect("packs")
        };
        let written_as_k = pack(Group::new(k, k as i64).expect("legal"));
        let written_raw = pack(Group::Size(k as u32));
        let per_column = pack(Group::PerColumn);
        assert_eq!(per_column.bytes(), written_as_k.bytes());
        assert_eq!(per_column.bytes(), written_raw.bytes());
        assert_eq!(per_column.layout().group, Group::PerColumn);
    }
}

#[test]
fn b19_groups_past_the_128th_keep_their_scales() {
    let (n, k) = (64, 16512);
    let codes = vec![9u8; n * k];
    let scales: Vec<f16> = (0..129 * n).map(|i| f16::from_f32((i / n + 1) as f32)).collect();
    let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
    let group = Group::Size(128);
    let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByInput(&codes), scales);
    let dense = PackedWeights::pack(&matrix.expect("legal"), 2).expect("packs").dequantize();
    for (i, value) in dense.iter().enumerate() {
        assert_eq!(*value, (i % k / 128 + 1) as f32);
    }
}

#[test]
fn b38_every_level_times_extreme_scales_is_exact() {
    let scales = [1.0, 2f64.powi(-14), 2f64.powi(-24), 3e4];
    let bits: Vec<f16> = (0..16 * 4).map(|i| f16::from_f64(scales[i / 16])).collect();
    let codes: Vec<u8> = (0..64 * 64).map(|i| (i / 64 % 16) as u8).collect();
    let view = Scales::f16(bytemuck::cast_slice(&bits), ScaleOrder::Rows);
    let codes = Codes::ByInput(&codes);
    let matrix = QuantMatrix::new(64, 64, Group::PerColumn, &U4B8, codes, view);
    let dense = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs").dequantize();
    for (i, value) in dense.iter().enumerate() {
        let (n, k) = (i / 64, i % 64);
        let exact = ((k % 16) as f64 - 8.0) * f16::from_f64(scales[n / 16]).to_f64();
        assert_eq!(f64::from(*value), exact, "level {} scale {}", k % 16, scales[n / 16]);
    }
}

#[test]
fn b39_bad_scales_poison_only_their_own_columns() {
    let (n, k) = (8, 64);
    let mut scales = vec![f16::ONE; n];
    (scales[1], scales[3]) = (f16::NAN, f16::INFINITY);
    (scales[5], scales[6]) = (f16::ZERO, f16::from_bits(1));
    let codes = vec![11u8; n * k];
    let view = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
    let codes = Codes::ByInput(&codes);
    let matrix = QuantMatrix::new(n, k, Group::PerColumn, &U4B8, codes, view);
    let dense = PackedWeights::pack(&matrix.expect("legal"), 1).expect("packs").dequantize();
    for (i, value) in dense.iter().enumerate() {
        match i / k {
            1 => assert!(value.is_nan()),
            3 => assert_eq!(*value, f32::INFINITY),
            5 => assert_eq!(*value, 0.0),
            6 => assert_eq!(*value, 3.0 * 2f32.powi(-24)),
            _ => assert_eq!(*value, 3.0),
        }
    }
}
