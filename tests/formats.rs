//! `docs/formats.md` is true: its formulas, computed from its text, find every code, scale and zero of random layers.
//!
//! The judge of sources is [`QuantMatrix`], whose element-wise reading the packer does not share; of the packed layout
//! it is the source that was packed.

#[path = "formats/arithmetic.rs"]
mod arithmetic;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use arithmetic::{Names, value};
use half::f16;
use makaira::reference::Random;
use makaira::weights::{
    Codes, FORMATS, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder, ScaleType, Scales,
    U4B8, WeightFormat, ZeroOrder, ZeroRule, Zeros, format_by_name,
};

/// The document: its formulas by name, and those that were computed.
struct Document {
    formulas: BTreeMap<String, Vec<(String, String)>>,
    /// Type by name to, for each bit of a half of a word from the top, field and bit of the code.
    arrangements: BTreeMap<String, Vec<(u32, u32)>>,
    used: RefCell<BTreeSet<String>>,
}

impl Document {
    fn read() -> Self {
        let text = include_str!("../docs/formats.md");
        let (mut formulas, mut arrangements) = (BTreeMap::new(), BTreeMap::new());
        for block in text.split("```").skip(1).step_by(2) {
            let (heading, body) = block.split_once('\n').expect("a block has lines");
            if let Some(name) = heading.strip_prefix("formula ") {
                let line = |line: &str| {
                    let (left, right) = line.split_once('=').expect("name = value");
                    (left.trim().to_owned(), right.trim().to_owned())
                };
                let known = formulas.insert(name.to_owned(), body.lines().map(line).collect());
                assert!(known.is_none(), "{name} is there twice");
            } else if heading == "text arrangement" {
                for line in body.lines().skip(1) {
                    let mut words = line.split_whitespace();
                    let name = words.next().expect("a type").to_owned();
                    let place = |word: &str| {
                        let (field, bit) = word.split_once('.').expect("field.bit");
                        (field.parse().expect("a number"), bit.parse().expect("a number"))
                    };
                    arrangements.insert(name, words.map(place).collect());
                }
            }
        }
        Self { formulas, arrangements, used: RefCell::default() }
    }

    /// Computes a formula; its names become values too.
    fn compute(&self, formula: &str, names: &mut Names) {
        self.used.borrow_mut().insert(formula.to_owned());
        let lines = self.formulas.get(formula).unwrap_or_else(|| panic!("no formula {formula}"));
        for (name, text) in lines {
            let value = value(text, names);
            names.insert(name.clone(), value);
        }
    }

    /// What a formula says of one value of names.
    fn of<const COUNT: usize>(
        &self,
        formula: &str,
        names: &Names,
        wanted: [&str; COUNT],
    ) -> [usize; COUNT] {
        let mut names = names.clone();
        self.compute(formula, &mut names);
        wanted.map(|name| usize::try_from(names[name]).expect("places are not negative"))
    }

    /// A word with its codes in order, from one as it is packed.
    fn in_order(&self, format: &str, bits: u32, word: u32) -> u32 {
        let Some(places) = self.arrangements.get(format) else { return word };
        let half = |half: u32| {
            let moved = places
                .iter()
                .enumerate()
                .map(|(at, (field, bit))| (half >> (15 - at as u32) & 1) << (field * bits + bit));
            moved.sum::<u32>()
        };
        half(word >> 16) << 16 | half(word & 0xffff)
    }
}

fn names(values: &[(&str, usize)]) -> Names {
    values.iter().map(|(name, value)| ((*name).to_owned(), *value as i64)).collect()
}

fn random_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| (random.bits() >> 23) as u8).collect()
}

/// The field that starts at a bit of a word, or of a byte.
fn field(bytes: &[u8], byte: usize, bit: usize, bits: u32) -> u8 {
    let mut word = [0; 4];
    let rest = &bytes[byte..bytes.len().min(byte + 4)];
    word[..rest.len()].copy_from_slice(rest);
    (u32::from_le_bytes(word) >> bit) as u8 & (0xff >> (8 - bits))
}

/// A way to store codes, scales or zeros, and what the document calls it.
struct Order<T> {
    formula: &'static str,
    order: T,
}

fn formats(bits: u32) -> Vec<&'static dyn WeightFormat> {
    FORMATS.iter().copied().filter(|format| format.bits() == bits).collect()
}

/// Every order of codes: each code of a random layer by its formula.
fn check_codes(document: &Document, random: &mut Random) {
    type Make = for<'a> fn(&'a [u8]) -> Codes<'a>;
    let orders: [(Order<Make>, &[u32]); 6] = [
        (Order { formula: "gptq.codes", order: |bytes| Codes::GptqWords(bytes) }, &[4, 8]),
        (Order { formula: "awq.codes", order: |bytes| Codes::AwqWords(bytes) }, &[4]),
        (Order { formula: "marlin.codes", order: |bytes| Codes::MarlinWords(bytes) }, &[4]),
        (Order { formula: "ct.codes", order: |bytes| Codes::PackedRows(bytes) }, &[4, 8]),
        (Order { formula: "fp4.codes", order: |bytes| Codes::NibblePairs(bytes) }, &[4]),
        (Order { formula: "fp8.codes", order: |bytes| Codes::ByOutput(bytes) }, &[8]),
    ];
    for (Order { formula, order }, all_bits) in orders {
        for bits in all_bits {
            let is_ragged = formula == "ct.codes";
            let (n, k) = (128, if is_ragged { 101_usize } else { 96 });
            let count = if is_ragged {
                4 * n * k.div_ceil(32 / *bits as usize)
            } else {
                n * k * *bits as usize / 8
            };
            let mut bytes = random_bytes(random, count);
            // No NaN, where codes are checked.
            bytes.iter_mut().for_each(|byte| *byte &= 0xfe | u8::from(*bits == 4));
            let scales = [0u8; 2 * 128];
            let scales = Scales::f16(&scales, ScaleOrder::Rows);
            let format = formats(*bits).into_iter().find(|f| f.zero_rule() != ZeroRule::Stored);
            let format = format.expect("there is one");
            let matrix = QuantMatrix::new(n, k, Group::PerColumn, format, order(&bytes), scales);
            let matrix = matrix.unwrap_or_else(|error| panic!("{formula}: {error}"));
            let mut here = names(&[("N", n), ("K", k), ("bits", *bits as usize)]);
            for i in 0..n * k {
                let (n, k) = (i / k, i % k);
                here.extend(names(&[("n", n), ("k", k)]));
                let mut all = here.clone();
                document.compute(formula, &mut all);
                let bit = all["bit"] as usize;
                let byte = all.get("word").map_or_else(|| all["byte"], |word| 4 * word) as usize;
                let found = field(&bytes, byte, bit, *bits);
                assert_eq!(found, matrix.code(k, n), "{formula}, {bits} bits, ({k}, {n})");
            }
        }
    }
}

/// Every order of scales.
fn check_scales(document: &Document, random: &mut Random) {
    for (formula, order, raw, k) in [
        ("gptq.scales", ScaleOrder::Rows, 32, 256),
        ("awq.scales", ScaleOrder::Rows, 64, 256),
        ("ct.scales", ScaleOrder::Columns, 32, 256),
        ("fp4.scales", ScaleOrder::Columns, 16, 256),
        ("marlin.scales", ScaleOrder::Marlin, 128, 512),
        ("marlin.column_scales", ScaleOrder::Marlin, -1, 256),
        ("fp8.block_scales", ScaleOrder::Blocks, 128, 300),
    ] {
        let n = 192_usize;
        let group = if order == ScaleOrder::Blocks {
            Group::Size(128)
        } else {
            Group::new(k, raw).expect("legal")
        };
        let num_groups = group.num_groups(k);
        let num_scales = num_groups * if order == ScaleOrder::Blocks { n.div_ceil(128) } else { n };
        let mut bytes = random_bytes(random, 2 * num_scales);
        // Finite.
        bytes.iter_mut().skip(1).step_by(2).for_each(|byte| *byte &= 0xbb);
        let codes = vec![0; n * k];
        let scales = Scales::f16(&bytes, order);
        let matrix = QuantMatrix::new(n, k, group, &U4B8, Codes::ByOutput(&codes), scales);
        let matrix = matrix.unwrap_or_else(|error| panic!("{formula}: {error}"));
        for i in 0..num_groups * n {
            let (g, n_idx) = (i / n, i % n);
            let k_of_group = g * if raw < 0 { k } else { raw as usize };
            let here = names(&[
                ("N", n),
                ("K", k),
                ("g", g),
                ("n", n_idx),
                ("groups", num_groups),
                ("k", k_of_group),
            ]);
            let [element] = document.of(formula, &here, ["element"]);
            let found = f16::from_le_bytes([bytes[2 * element], bytes[2 * element + 1]]);
            assert_eq!(
                found.to_f32(),
                matrix.scale(g, n_idx),
                "{formula}: group {g}, output {n_idx}"
            );
        }
    }
}

/// Every order of zeros.
fn check_zeros(document: &Document, random: &mut Random) {
    for (formula, order, all_bits) in [
        ("gptq.zeros", ZeroOrder::GptqWords, &[4, 8][..]),
        ("gptq.zeros", ZeroOrder::GptqWordsLessOne, &[4, 8]),
        ("awq.zeros", ZeroOrder::AwqWords, &[4]),
        ("ct.zeros", ZeroOrder::PackedColumns, &[4, 8]),
        ("ct.signed_zeros", ZeroOrder::SignedColumns, &[4, 8]),
    ] {
        for bits in all_bits {
            let format = format_by_name(if *bits == 4 { "u4" } else { "u8" }).expect("listed");
            let (n, k, fields) =
                (if order == ZeroOrder::AwqWords { 72_usize } else { 70 }, 128, 32 / *bits);
            let num_groups = 4;
            let is_signed = order == ZeroOrder::SignedColumns;
            let count =
                if is_signed { n * num_groups } else { 4 * n.div_ceil(fields) * num_groups };
            let mut bytes = random_bytes(random, count);
            let half = 1 << (bits - 1);
            if is_signed {
                // Numbers of the type, sign-extended.
                bytes.iter_mut().for_each(|byte| {
                    *byte = (*byte as i8 >> (8 - bits)).cast_unsigned();
                });
            }
            let (codes, scales) = (vec![0; n * k], vec![0; 2 * n * num_groups]);
            let parts = MatrixParts {
                n,
                k,
                group: Group::Size(32),
                format,
                codes: Codes::ByOutput(&codes),
                scales: Scales::f16(&scales, ScaleOrder::Rows),
                zeros: Some(Zeros { bytes: &bytes, order }),
                g_idx: None,
            };
            let matrix = QuantMatrix::from_parts(parts).expect("legal");
            let ones: u32 = if *bits == 4 { 0x1111_1111 } else { 0x0101_0101 };
            for i in 0..num_groups * n {
                let (g, n_idx) = (i / n, i % n);
                let mut here = names(&[
                    ("N", n),
                    ("g", g),
                    ("n", n_idx),
                    ("groups", num_groups),
                    ("bits", *bits),
                ]);
                document.compute(formula, &mut here);
                let found = if is_signed {
                    bytes[here["byte"] as usize].wrapping_add(half)
                } else {
                    let at = 4 * here["word"] as usize;
                    let word: [u8; 4] = bytes[at..at + 4].try_into().expect("four");
                    let less_one = order == ZeroOrder::GptqWordsLessOne;
                    let word =
                        u32::from_le_bytes(word).wrapping_add(if less_one { ones } else { 0 });
                    field(&word.to_le_bytes(), 0, here["bit"] as usize, *bits as u32)
                };
                let wanted = matrix.zero(g, n_idx);
                assert_eq!(
                    Some(found),
                    wanted,
                    "{formula}, {bits} bits: group {g}, output {n_idx}"
                );
            }
        }
    }
}

/// The packed layout of every type and group rule.
fn check_packed(document: &Document, random: &mut Random) {
    for format in FORMATS {
        let mut scalings: Vec<(i64, ScaleType)> =
            [-1, 16, 32, 64, 128].map(|raw| (raw, ScaleType::F16)).to_vec();
        if format.name() == "e2m1" {
            scalings.extend([(16, ScaleType::E4M3), (32, ScaleType::E8M0)]);
        }
        for (raw, element) in scalings {
            let (n, k) = (66, if raw < 0 { 150 } else { 256 });
            check_packed_layer(document, random, *format, (n, k), raw, element);
        }
    }
}

fn check_packed_layer(
    document: &Document,
    random: &mut Random,
    format: &'static dyn WeightFormat,
    (n, k): (usize, usize),
    raw: i64,
    element: ScaleType,
) {
    let group = Group::new(k, raw).expect("legal");
    let num_scales = n * group.num_groups(k);
    let codes = random_bytes(random, n * k);
    let mask = 0xff >> (8 - format.bits());
    let codes: Vec<u8> = codes.iter().map(|code| code & mask & 0xf7).collect();
    let scales: Vec<u8> = match element {
        // 0.125 to 1.9.
        ScaleType::F16 => random_bytes(random, num_scales)
            .iter()
            .flat_map(|low| [*low, 0x30 + low % 15])
            .collect(),
        ScaleType::E8M0 => random_bytes(random, num_scales).iter().map(|b| 120 + b % 8).collect(),
        _ => random_bytes(random, num_scales).iter().map(|b| 0x20 + b % 64).collect(),
    };
    let zeros: Vec<u8> = random_bytes(random, num_scales).iter().map(|zero| zero & mask).collect();
    let stored = format.zero_rule() == ZeroRule::Stored;
    let parts = MatrixParts {
        n,
        k,
        group,
        format,
        codes: Codes::ByOutput(&codes),
        scales: Scales::new(&scales, element, ScaleOrder::Rows),
        zeros: stored.then_some(Zeros { bytes: &zeros, order: ZeroOrder::Rows }),
        g_idx: None,
    };
    let matrix = QuantMatrix::from_parts(parts).expect("legal");
    let packed = PackedWeights::pack(&matrix, 1).expect("packs");
    let bytes = packed.bytes();
    let what = format!("{} group {raw} {element:?}", format.name());
    let (bits, rows) = (format.bits(), if raw < 0 { 0 } else { 128 / raw as usize });
    let byte_scales = element != ScaleType::F16;
    let mut tile = names(&[
        ("N", n),
        ("K", k),
        ("bits", bits as usize),
        ("rows", rows),
        ("group", if raw < 0 { 128 } else { raw as usize }),
        ("scale_row", if byte_scales { 16 } else { 32 }),
        ("zero_rows", if stored { rows.max(1) } else { 0 }),
        ("column_scales", usize::from(raw < 0)),
    ]);
    let half = |byte: usize| f16::from_le_bytes([bytes[byte], bytes[byte + 1]]);
    for i in 0..n * k {
        let (n_idx, k_idx) = (i / k, i % k);
        tile.extend(names(&[("n", n_idx), ("k", k_idx)]));
        let mut here = tile.clone();
        document.compute("packed.tile", &mut here);
        assert_eq!(here["total_bytes"] as usize, bytes.len(), "{what}");
        let formula = if bits == 4 { "packed.code4" } else { "packed.code8" };
        let [word, bit] = document.of(formula, &here, ["word", "bit"]);
        let raw_word = u32::from_le_bytes(bytes[4 * word..][..4].try_into().expect("four"));
        let in_order = document.in_order(format.name(), bits, raw_word);
        let code = field(&in_order.to_le_bytes(), 0, bit, bits);
        assert_eq!(code, matrix.code(k_idx, n_idx), "{what}: code ({k_idx}, {n_idx})");
        let scale = match (raw, byte_scales) {
            (-1, _) => half(document.of("packed.column_scale", &here, ["byte"])[0]),
            (_, false) => half(document.of("packed.scale16", &here, ["byte"])[0]),
            (_, true) => {
                let [byte] = document.of("packed.scale8", &here, ["byte"]);
                f16::from_bits(u16::from(bytes[byte]) << 7)
            }
        };
        let wanted = matrix.scale(matrix.group_of_input(k_idx), n_idx);
        let found = f64::from(scale.to_f32()) * f64::from(packed.factor());
        assert_eq!(found, f64::from(wanted), "{what}: scale of ({k_idx}, {n_idx})");
        if let Some(wanted) = matrix.zero(matrix.group_of_input(k_idx), n_idx) {
            let [byte, base] = document.of("packed.zero", &here, ["byte", "base"]);
            let found = half(byte).to_f32() - base as f32;
            assert_eq!(found, f32::from(wanted), "{what}: zero of ({k_idx}, {n_idx})");
        }
    }
}

#[test]
fn the_formulas_of_the_document_find_every_number() {
    let document = Document::read();
    let seed = Random::fresh_seed();
    println!("seed {seed}");
    let mut random = Random::new(seed);
    check_codes(&document, &mut random);
    check_scales(&document, &mut random);
    check_zeros(&document, &mut random);
    check_packed(&document, &mut random);
    let all: BTreeSet<String> = document.formulas.keys().cloned().collect();
    assert_eq!(*document.used.borrow(), all, "every formula was computed");
}

/// Types that the table of arrangements does not list have their codes as they are.
#[test]
fn the_table_of_arrangements_is_that_of_the_types() {
    let document = Document::read();
    for format in FORMATS {
        let bits = format.bits();
        let fragments = format.fragments().expect("kernels take it");
        // For each bit of a half: the bit of the ordered half that is there.
        let place = |at: u32| (0..16).find(|from| fragments.arrange(1 << from) == 1 << at);
        let places: Vec<(u32, u32)> = (0..16)
            .rev()
            .map(|at| place(at).expect("a permutation"))
            .map(|from| (from / bits, from % bits))
            .collect();
        let as_they_are: Vec<(u32, u32)> = (0..16).rev().map(|at| (at / bits, at % bits)).collect();
        let listed = document.arrangements.get(format.name()).unwrap_or(&as_they_are);
        assert_eq!(*listed, places, "{}", format.name());
        // Both halves alike.
        for at in 0..16 {
            assert_eq!(fragments.arrange(1 << (16 + at)), fragments.arrange(1 << at) << 16);
        }
    }
}

/// Each type of the document's first table is one of the crate's, with these bits.
#[test]
fn the_document_lists_every_type() {
    let text = include_str!("../docs/formats.md");
    for format in FORMATS {
        let row = format!("| `{}` | {} |", format.name(), format.bits());
        assert!(text.contains(&row), "{row}");
    }
}
