//! The source side: every order of codes, scales and zeros is read as its writer meant it.
//!
//! A weight is made from random codes, zeros and scales; writers that share nothing with the crate lay it
//! down in each order; the accessors must give back what was drawn.

use half::{bf16, f16};
use makaira::reference::{self, Random};
use makaira::weights::{
    Codes, Error, FORMATS, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder, ScaleType,
    Scales, WeightFormat, ZeroOrder, ZeroRule, Zeros, format_by_name,
};

/// Codes in one order: the bytes and how they are viewed.
type Source = (Vec<u8>, fn(&[u8]) -> Codes<'_>);

/// A weight, element by element.
struct Plain {
    n: usize,
    k: usize,
    group: Group,
    format: &'static dyn WeightFormat,
    num_groups: usize,
    /// `[K][N]`.
    codes: Vec<u8>,
    /// `[groups][N]`.
    zeros: Vec<u8>,
    /// `[groups][N]`, elements of `element`.
    scales: Vec<Vec<u8>>,
    element: ScaleType,
    /// `[K]`, where the groups are permuted.
    g_idx: Option<Vec<u8>>,
}

fn below(random: &mut Random, bound: usize) -> usize {
    (random.bits() % bound as u64) as usize
}

/// What the bytes of a scale are worth, by the definition of the type.
fn scale_value(element: ScaleType, bytes: &[u8]) -> f64 {
    match element {
        ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        ScaleType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        ScaleType::F32 => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        ScaleType::E8M0 => 2f64.powi(i32::from(bytes[0]) - 127),
        ScaleType::E4M3 => e4m3(bytes[0]),
    }
}

fn e4m3(code: u8) -> f64 {
    let (sign, exponent) = (if code < 128 { 1.0 } else { -1.0 }, i32::from(code >> 3 & 15));
    let mantissa = f64::from(code & 7) / 8.0;
    sign * if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) }
}

/// What a code less its zero is worth, by the definition of the type.
fn steps(format: &dyn WeightFormat, code: u8, zero: u8) -> f64 {
    match format.name() {
        "u4b8" => f64::from(code) - 8.0,
        "u8b128" => f64::from(code) - 128.0,
        "u4" | "u8" => f64::from(code) - f64::from(zero),
        "e4m3" => e4m3(code),
        "e2m1" => {
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
            if code < 8 { magnitude } else { -magnitude }
        }
        other => panic!("no definition of {other}"),
    }
}

impl Plain {
    fn new(
        (n, k): (usize, usize),
        raw_group: i64,
        format: &'static dyn WeightFormat,
        element: ScaleType,
        random: &mut Random,
    ) -> Self {
        let group = Group::new(k, raw_group).expect("legal");
        let num_groups = group.num_groups(k);
        let code = |random: &mut Random| loop {
            let code = below(random, format.num_codes()) as u8;
            if format.decode(code).is_finite() {
                break code;
            }
        };
        let codes = (0..n * k).map(|_| code(random)).collect();
        let zeros = (0..n * num_groups).map(|_| below(random, format.num_codes()) as u8).collect();
        let finite = |random: &mut Random| loop {
            let bytes: Vec<u8> = random.bits().to_le_bytes()[..element.bytes()].to_vec();
            let nan = element == ScaleType::E4M3 && bytes[0] & 0x7f == 0x7f
                || element == ScaleType::E8M0 && bytes[0] == 255;
            if !nan && scale_value(element, &bytes).is_finite() {
                break bytes;
            }
        };
        let scales = (0..n * num_groups).map(|_| finite(random)).collect();
        let g_idx = None;
        Self { n, k, group, format, num_groups, codes, zeros, scales, element, g_idx }
    }

    /// Group indices of any kind: not even the same number of inputs for each group.
    fn with_group_indices(mut self, random: &mut Random) -> Self {
        let indices = (0..self.k).map(|_| below(random, self.num_groups) as i32);
        self.g_idx = Some(indices.flat_map(i32::to_le_bytes).collect());
        self
    }

    fn code(&self, k: usize, n: usize) -> u32 {
        u32::from(self.codes[k * self.n + n])
    }

    fn group_of(&self, k: usize) -> usize {
        match (&self.g_idx, self.group) {
            (Some(g_idx), _) => g_idx[4 * k] as usize, // Fewer than 256 groups in these tests.
            (None, Group::PerColumn) => 0,
            (None, Group::Size(size)) => k / size as usize,
        }
    }

    fn value(&self, k: usize, n: usize) -> f64 {
        let at = self.group_of(k) * self.n + n;
        steps(self.format, self.codes[k * self.n + n], self.zeros[at])
            * scale_value(self.element, &self.scales[at])
    }

    /// The codes in every order that holds the type and the shape; each as its bytes and how to view them.
    fn code_sources(&self) -> Vec<Source> {
        let (n, k, bits) = (self.n, self.k, self.format.bits());
        let per_word = 32 / bits as usize;
        let word = |code_of: &dyn Fn(usize) -> u32| {
            (0..per_word).map(|i| code_of(i) << (bits as usize * i)).sum::<u32>().to_le_bytes()
        };
        let mut sources: Vec<Source> = vec![
            (self.codes.clone(), |bytes| Codes::ByInput(bytes)),
            ((0..n * k).map(|i| self.code(i % k, i / k) as u8).collect(), |bytes| {
                Codes::ByOutput(bytes)
            }),
        ];
        let row_words = k.div_ceil(per_word);
        let packed_rows = (0..n * row_words).flat_map(|at| {
            let (n, first) = (at / row_words, at % row_words * per_word);
            word(&|i| if first + i < k { self.code(first + i, n) } else { 3 })
        });
        sources.push((packed_rows.collect(), |bytes| Codes::PackedRows(bytes)));
        if k.is_multiple_of(per_word) {
            let words = (0..k / per_word * n)
                .flat_map(|at| word(&|i| self.code(at / n * per_word + i, at % n)));
            sources.push((words.collect(), |bytes| Codes::GptqWords(bytes)));
        }
        if bits == 4 && n.is_multiple_of(8) {
            // AutoAWQ's order: fields 0.. hold columns 0, 2, 4, 6, 1, 3, 5, 7.
            let order = [0, 2, 4, 6, 1, 3, 5, 7];
            let words = (0..k * n / 8)
                .flat_map(|at| word(&|i| self.code(at / (n / 8), at % (n / 8) * 8 + order[i])));
            sources.push((words.collect(), |bytes| Codes::AwqWords(bytes)));
        }
        if bits == 4 && k.is_multiple_of(2) {
            let pair = |at: usize| {
                let (n, k) = (at / (k / 2), at % (k / 2) * 2);
                (self.code(k, n) | self.code(k + 1, n) << 4) as u8
            };
            sources.push(((0..n * k / 2).map(pair).collect(), |bytes| Codes::NibblePairs(bytes)));
        }
        sources
    }

    fn scale_sources(&self) -> Vec<(Vec<u8>, ScaleOrder)> {
        let (n, groups) = (self.n, self.num_groups);
        let columns = (0..n * groups).map(|i| &self.scales[i % groups * n + i / groups]);
        vec![
            (self.scales.concat(), ScaleOrder::Rows),
            (columns.flatten().copied().collect(), ScaleOrder::Columns),
        ]
    }

    fn zero_sources(&self) -> Vec<(Vec<u8>, ZeroOrder)> {
        let (n, groups, bits) = (self.n, self.num_groups, self.format.bits());
        let per_word = 32 / bits as usize;
        let words = n.div_ceil(per_word);
        let zero = |g: usize, n_idx: usize| {
            if n_idx < n { u32::from(self.zeros[g * n + n_idx]) } else { 5 }
        };
        let word = |g: usize, first: usize, order: &[usize]| -> u32 {
            order.iter().enumerate().map(|(i, o)| zero(g, first + o) << (bits as usize * i)).sum()
        };
        let plain: Vec<usize> = (0..per_word).collect();
        let rows: Vec<u32> =
            (0..groups * words).map(|i| word(i / words, i % words * per_word, &plain)).collect();
        let ones = (0..per_word).map(|i| 1u32 << (bits as usize * i)).sum();
        let bytes = |words: Vec<u32>| words.into_iter().flat_map(u32::to_le_bytes).collect();
        let mut sources = vec![
            (bytes(rows.clone()), ZeroOrder::GptqWords),
            (
                bytes(rows.iter().map(|word| word.wrapping_sub(ones)).collect()),
                ZeroOrder::GptqWordsLessOne,
            ),
            (
                bytes((0..words * groups).map(|i| rows[i % groups * words + i / groups]).collect()),
                ZeroOrder::PackedColumns,
            ),
            (self.zeros.clone(), ZeroOrder::Rows),
            (
                (0..n * groups)
                    .map(|i| self.zeros[i % groups * n + i / groups].wrapping_sub(1 << (bits - 1)))
                    .collect(),
                ZeroOrder::SignedColumns,
            ),
        ];
        if bits == 4 && n.is_multiple_of(8) {
            let order = [0, 2, 4, 6, 1, 3, 5, 7];
            let words = (0..groups * n / 8).map(|i| word(i / (n / 8), i % (n / 8) * 8, &order));
            sources.push((bytes(words.collect()), ZeroOrder::AwqWords));
        }
        sources
    }

    fn check(&self, codes: Codes<'_>, scales: Scales<'_>, zeros: Option<Zeros<'_>>) {
        let (n, k, group, format) = (self.n, self.k, self.group, self.format);
        let g_idx = self.g_idx.as_deref();
        let parts = MatrixParts { n, k, group, format, codes, scales, zeros, g_idx };
        let what = format!("{} {n} x {k}, group {group}, {}", format.name(), codes.name());
        let matrix =
            QuantMatrix::from_parts(parts).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(matrix.num_groups(), self.num_groups, "{what}");
        for k_idx in 0..k {
            assert_eq!(matrix.group_of_input(k_idx), self.group_of(k_idx), "{what}, input {k_idx}");
            for n_idx in 0..n {
                let place = format!("{what}, {:?}, input {k_idx}, output {n_idx}", scales.order);
                assert_eq!(
                    u32::from(matrix.code(k_idx, n_idx)),
                    self.code(k_idx, n_idx),
                    "{place}"
                );
                let at = self.group_of(k_idx) * n + n_idx;
                if zeros.is_some() {
                    assert_eq!(matrix.zero(at / n, n_idx), Some(self.zeros[at]), "{place}");
                }
                assert_eq!(matrix.value(k_idx, n_idx), self.value(k_idx, n_idx), "{place}");
            }
        }
    }
}

/// One byte of offset: nothing in a mapped file is aligned for certain.
fn shifted(bytes: &[u8]) -> Vec<u8> {
    let mut shifted = vec![0];
    shifted.extend_from_slice(bytes);
    shifted
}

const ELEMENTS: [ScaleType; 5] =
    [ScaleType::F16, ScaleType::BF16, ScaleType::F32, ScaleType::E4M3, ScaleType::E8M0];

#[test]
fn every_order_of_every_type_reads_as_it_was_written() {
    let seed = Random::fresh_seed();
    eprintln!("seed {seed}");
    let mut random = Random::new(seed);
    for (idx, format) in FORMATS.iter().enumerate() {
        for (at, (n, k, raw)) in
            [(8, 32, 16), (24, 64, 32), (5, 20, -1), (13, 128, 64), (16, 256, 128)]
                .into_iter()
                .enumerate()
        {
            let element = ELEMENTS[(idx + at) % ELEMENTS.len()];
            let mut plain = Plain::new((n, k), raw, *format, element, &mut random);
            if at % 2 == 1 {
                plain = plain.with_group_indices(&mut random);
            }
            let zeros = match format.zero_rule() {
                ZeroRule::Stored => plain.zero_sources().into_iter().map(Some).collect(),
                _ => vec![None],
            };
            for (codes, view) in plain.code_sources() {
                let codes = shifted(&codes);
                for (scales, order) in plain.scale_sources() {
                    let scales = shifted(&scales);
                    let scales = Scales::new(&scales[1..], element, order);
                    for zeros in &zeros {
                        let bytes = zeros.as_ref().map(|(bytes, order)| (shifted(bytes), *order));
                        let zeros = bytes
                            .as_ref()
                            .map(|(bytes, order)| Zeros { bytes: &bytes[1..], order: *order });
                        plain.check(view(&codes[1..]), scales, zeros);
                    }
                }
            }
        }
    }
}

/// 128 x 128 blocks, at sizes that are no multiple of one, and a single scale.
#[test]
fn shared_scales_and_the_global_factor_reach_every_weight() {
    let mut random = Random::new(Random::fresh_seed());
    let format = format_by_name("e4m3").expect("listed");
    for (n, k) in [(300, 256), (128, 100), (1, 384), (130, 300)] {
        let codes: Vec<u8> = (0..n * k).map(|_| below(&mut random, 126) as u8).collect();
        let (rows, columns) = (usize::div_ceil(n, 128), usize::div_ceil(k, 128));
        let scales: Vec<f32> =
            (0..rows * columns).map(|_| random.uniform(1e-3, 1.0) as f32).collect();
        let mut blocks =
            Scales::new(bytemuck::cast_slice(&scales), ScaleType::F32, ScaleOrder::Blocks);
        blocks.global = 0.25;
        let group = if k <= 128 { Group::PerColumn } else { Group::Size(128) };
        let codes = Codes::ByOutput(&codes);
        let matrix = QuantMatrix::new(n, k, group, format, codes, blocks).expect("legal");
        let code = |k_idx: usize, n_idx: usize| codes.bytes()[n_idx * k + k_idx];
        for (k_idx, n_idx) in (0..k).flat_map(|k_idx| (0..n).map(move |n_idx| (k_idx, n_idx))) {
            let scale = f64::from(scales[n_idx / 128 * columns + k_idx / 128]);
            let wanted = e4m3(code(k_idx, n_idx)) * scale * 0.25;
            assert_eq!(matrix.value(k_idx, n_idx), wanted, "{n} x {k}: {k_idx}, {n_idx}");
        }
        assert_eq!(reference::decode(&matrix)[k - 1], matrix.value(k - 1, 0) as f32);
        let half = 0.5f32.to_le_bytes();
        let single = Scales::new(&half, ScaleType::F32, ScaleOrder::PerTensor);
        let matrix =
            QuantMatrix::new(n, k, Group::PerColumn, format, codes, single).expect("legal");
        assert_eq!(matrix.value(k - 1, n - 1), e4m3(code(k - 1, n - 1)) * 0.5);
    }
}

/// What is said of `base` with one part changed.
fn refusal<'a>(mut parts: MatrixParts<'a>, change: impl FnOnce(&mut MatrixParts<'a>)) -> String {
    change(&mut parts);
    QuantMatrix::from_parts(parts).expect_err("a part is wrong").to_string()
}

/// What is wrong with the parts of a weight is a refusal with its numbers, never an index out of range.
#[test]
fn parts_that_disagree_are_refused() {
    let [u4, u8, e4m3, u4b8] =
        ["u4", "u8", "e4m3", "u4b8"].map(|name| format_by_name(name).expect("listed"));
    let (n, k) = (8, 64);
    let (codes, scales) = (vec![0; n * k], vec![0; 64 * 64]);
    let (g_idx, zeros) = (vec![0; 4 * k], vec![0; 64]);
    let base = MatrixParts {
        n,
        k,
        group: Group::Size(32),
        format: u4,
        codes: Codes::ByInput(&codes),
        scales: Scales::f16(&scales[..2 * 2 * n], ScaleOrder::Rows),
        zeros: Some(Zeros { bytes: &zeros[..8], order: ZeroOrder::GptqWords }),
        g_idx: Some(&g_idx),
    };
    QuantMatrix::from_parts(base).expect("all parts agree");
    let lacks = refusal(base, |parts| parts.zeros = None);
    assert!(lacks.contains("u4 needs stored zeros"), "{lacks}");
    let has = refusal(base, |parts| parts.format = u4b8);
    assert!(has.contains("takes no stored zeros"), "{has}");
    let bits = refusal(base, |parts| {
        (parts.format, parts.codes) = (u8, Codes::NibblePairs(&codes[..256]))
    });
    assert!(bits.contains("holds 4-bit codes; u8 has 8 bits"), "{bits}");
    let bits = refusal(base, |parts| {
        parts.format = u8;
        parts.zeros = Some(Zeros { bytes: &zeros[..8], order: ZeroOrder::AwqWords });
    });
    assert!(bits.contains("4-bit zeros"), "{bits}");
    let short = refusal(base, |parts| parts.zeros.as_mut().expect("set").bytes = &zeros[..4]);
    assert!(short.contains("zeros of a 8 x 64 (N x K) matrix take 8 bytes, found 4"), "{short}");
    let n_odd = refusal(base, |parts| (parts.n, parts.codes) = (4, Codes::AwqWords(&codes[..128])));
    assert!(n_odd.contains("N a multiple of 8"), "{n_odd}");
    let short = refusal(base, |parts| parts.g_idx = Some(&g_idx[..4 * k - 1]));
    assert!(short.contains("group indices") && short.contains("255"), "{short}");
    let no_scales = refusal(base, |parts| parts.scales.bytes = &[]);
    assert!(no_scales.contains("found 0"), "{no_scales}");
    let rows = refusal(base, |parts| {
        (parts.g_idx, parts.scales) = (None, Scales::f16(&scales[..3 * 2 * n], ScaleOrder::Rows));
    });
    assert!(rows.contains("needs 2 rows of scales, found 3"), "{rows}");
    for global in [0.0, f32::NAN, f32::INFINITY] {
        let text = refusal(base, |parts| parts.scales.global = global);
        assert!(text.contains(&format!("the global scale comes to {global}")), "{text}");
    }
    for (row, value) in [(0, 2), (63, -1), (9, i32::MAX), (1, i32::MIN)] {
        let mut bytes = g_idx.clone();
        bytes[4 * row..4 * row + 4].copy_from_slice(&i32::to_le_bytes(value));
        let mut parts = base;
        parts.g_idx = Some(&bytes);
        let error = QuantMatrix::from_parts(parts).expect_err("outside");
        assert_eq!(error, Error::GroupIndex { input: row, value, num_groups: 2 });
    }
    let blocks = |group, order| {
        let scales = Scales::new(&scales[..16], ScaleType::F32, order);
        QuantMatrix::new(128, 512, group, e4m3, Codes::ByOutput(&[0; 65536]), scales)
    };
    blocks(Group::Size(128), ScaleOrder::Blocks).expect("four blocks");
    let error = blocks(Group::Size(64), ScaleOrder::Blocks).expect_err("blocks have 128 inputs");
    assert!(matches!(error, Error::ScaleGroup { .. }), "{error}");
    let error = blocks(Group::Size(128), ScaleOrder::PerTensor).expect_err("one scale, one group");
    assert!(matches!(error, Error::ScaleGroup { .. }), "{error}");
}

/// What no kernel takes is refused before it is packed, each for its own reason.
#[test]
fn what_cannot_be_packed_yet_is_refused_by_name() {
    let mut random = Random::new(1);
    for format in FORMATS {
        let plain = Plain::new((64, 128), 64, *format, ScaleType::F16, &mut random);
        let scales = plain.scales.concat();
        let scales = Scales::f16(&scales, ScaleOrder::Rows);
        let zeros = Zeros { bytes: &plain.zeros, order: ZeroOrder::Rows };
        let zeros = (format.zero_rule() == ZeroRule::Stored).then_some(zeros);
        let codes = Codes::ByInput(&plain.codes);
        let (n, k, group, g_idx) = (plain.n, plain.k, plain.group, None);
        let parts = MatrixParts { n, k, group, format: *format, codes, scales, zeros, g_idx };
        let matrix = QuantMatrix::from_parts(parts).expect("legal");
        match (matrix.check_packable(), PackedWeights::pack(&matrix, 1)) {
            (Ok(()), Ok(packed)) => {
                assert!(packed.unpack().codes == plain.codes, "{}", format.name())
            }
            (Err(Error::Unpackable { .. }), Err(Error::Unpackable { what, .. })) => {
                assert!(what.contains(format.name()) || what.contains("zeros"), "{what}");
            }
            (check, pack) => panic!("{}: {check:?}, {:?}", format.name(), pack.map(|_| ())),
        }
    }
}
