//! Files of vectors: how they read, how the computed ones are made.
//!
//! ```text
//! # source: computed
//! case 0 1 4660            the choices that make the instruction of the row
//! text add.u32 %r0, %r1, 4660;
//! param 0
//! memory <hex> -> <hex>    512 bytes, or `=` where nothing changed; only if the row names addresses
//! shared <hex> -> <hex>
//! 00000001 -> 00001235     input slots and output slots of lane 0, then of 1 to 31
//! ```

use std::fmt;

use super::Random;
use super::row_kernel::{IMAGE, RowKernel, target_of};
use super::row_reference::{self, State};
use makaira::asm::isa::{Inst, Row};
use makaira::asm::types::Class;

/// The source of vectors that no card has confirmed.
pub const COMPUTED: &str = "computed";

/// The vectors of one row.
pub struct Vectors {
    pub source: String,
    pub cases: Vec<Case>,
}

/// One instruction in one warp.
#[derive(Clone)]
pub struct Case {
    pub choices: Vec<u32>,
    pub text: String,
    pub param: u64,
    pub has_places: bool,
    pub before: State,
    pub after: State,
}

impl Vectors {
    /// Reads a file.
    ///
    /// # Errors
    /// The line that is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().peekable();
        let source = lines.next().and_then(|line| line.strip_prefix("# source: "));
        let source = source.ok_or("the first line gives no source")?.to_owned();
        let mut cases = Vec::new();
        while let Some(line) = lines.next() {
            let bad = || format!("`{line}` and what follows is no case");
            let mut field = |name: &str| {
                let line = lines.next_if(|line| line.starts_with(name));
                line.map(|line| line[name.len()..].trim().to_owned())
            };
            let choices = line.strip_prefix("case").ok_or_else(bad)?;
            let choices: Result<Vec<u32>, _> = choices.split_whitespace().map(str::parse).collect();
            let text = field("text ").ok_or_else(bad)?;
            let param = field("param ").and_then(|text| u64::from_str_radix(&text, 16).ok());
            let images = [field("memory "), field("shared ")];
            let has_places = images[0].is_some();
            let [memory, shared] = images.map(|image| match image {
                Some(image) => parse_image(&image),
                None => Some((vec![0; IMAGE], vec![0; IMAGE])),
            });
            let (memory, shared) = (memory.ok_or_else(bad)?, shared.ok_or_else(bad)?);
            let (mut before, mut after) = (Vec::new(), Vec::new());
            for lane in 0..32 {
                let line = lines.next().ok_or_else(bad)?;
                let (left, right) = line.split_once("->").ok_or_else(bad)?;
                parse_lane(left, lane, &mut before).ok_or_else(bad)?;
                parse_lane(right, lane, &mut after).ok_or_else(bad)?;
            }
            cases.push(Case {
                choices: choices.map_err(|_| bad())?,
                text,
                param: param.ok_or_else(bad)?,
                has_places,
                before: State { slots: before, memory: memory.0, shared: shared.0 },
                after: State { slots: after, memory: memory.1, shared: shared.1 },
            });
        }
        Ok(Self { source, cases })
    }

    /// Where `got` is not what the case says. A card's NaNs are compared bit by bit; in computed vectors every
    /// NaN is as good as another.
    pub fn difference(&self, kernel: &RowKernel, case: &Case, got: &State) -> Option<String> {
        let text = &case.text;
        let is_bf16 = text.contains("bf16");
        let same = |n: usize, a: u64, b: u64| {
            a == b
                || self.source == COMPUTED
                    && match (kernel.outputs[n], text.contains("f16x2"), text.contains("f16")) {
                        (Class::F32, ..) => nan32(a) && nan32(b),
                        (Class::B16, _, true) => nan16(a, is_bf16) && nan16(b, is_bf16),
                        (Class::B32, true, _) => [0, 16].into_iter().all(|shift| {
                            let (a, b) = (a >> shift, b >> shift);
                            a & 0xffff == b & 0xffff || nan16(a, is_bf16) && nan16(b, is_bf16)
                        }),
                        _ => false,
                    }
        };
        for (n, (wanted, got)) in case.after.slots.iter().zip(&got.slots).enumerate() {
            if let Some(lane) = (0..32).find(|lane| !same(n, wanted[*lane], got[*lane])) {
                let inputs: Vec<_> =
                    case.before.slots.iter().map(|slot| format!("{:x}", slot[lane])).collect();
                return Some(format!(
                    "`{text}` of ({}) in lane {lane} writes {:x} to result {n}, not {:x}",
                    inputs.join(", "),
                    got[lane],
                    wanted[lane]
                ));
            }
        }
        if !case.has_places {
            return None;
        }
        let images = [
            ("global", &case.after.memory, &got.memory),
            ("shared", &case.after.shared, &got.shared),
        ];
        images.into_iter().find_map(|(name, wanted, got)| {
            let at = (0..IMAGE).find(|at| wanted[*at] != got[*at])?;
            Some(format!(
                "`{text}` leaves {:02x} in {name} byte {at}, not {:02x}",
                got[at], wanted[at]
            ))
        })
    }
}

fn nan32(bits: u64) -> bool {
    f32::from_bits(bits as u32).is_nan()
}

fn nan16(bits: u64, is_bf16: bool) -> bool {
    bits & 0x7fff > if is_bf16 { 0x7f80 } else { 0x7c00 }
}

fn parse_image(text: &str) -> Option<(Vec<u8>, Vec<u8>)> {
    let (before, after) = text.split_once(" -> ")?;
    let bytes = |hex: &str| -> Option<Vec<u8>> {
        (0..IMAGE).map(|n| u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()).collect()
    };
    let before = bytes(before)?;
    let after = if after == "=" { before.clone() } else { bytes(after)? };
    Some((before, after))
}

fn parse_lane(text: &str, lane: usize, slots: &mut Vec<[u64; 32]>) -> Option<()> {
    for (n, word) in text.split_whitespace().enumerate() {
        if n == slots.len() {
            slots.push([0; 32]);
        }
        slots[n][lane] = u64::from_str_radix(word, 16).ok()?;
    }
    Some(())
}

impl fmt::Display for Vectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# source: {}", self.source)?;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for case in &self.cases {
            let choices: String = case.choices.iter().map(|choice| format!(" {choice}")).collect();
            writeln!(f, "case{choices}\ntext {}\nparam {:x}", case.text, case.param)?;
            let images = [
                ("memory", &case.before.memory, &case.after.memory),
                ("shared", &case.before.shared, &case.after.shared),
            ];
            for (name, before, after) in images.into_iter().filter(|_| case.has_places) {
                let after = if before == after { "=".to_owned() } else { hex(after) };
                writeln!(f, "{name} {} -> {after}", hex(before))?;
            }
            for lane in 0..32 {
                for slot in &case.before.slots {
                    write!(f, "{:x} ", slot[lane])?;
                }
                write!(f, "->")?;
                for slot in &case.after.slots {
                    write!(f, " {:x}", slot[lane])?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

/// What the second implementation makes of a case.
pub fn expected(kernel: &RowKernel, case: &Case) -> State {
    row_reference::expected(&case.text, kernel.outputs.len(), case.param, &case.before)
}

/// Vectors of a row: registers alone first, then other choices; the same on every machine.
pub fn compute(row: &Row) -> Vectors {
    let mut random =
        Random(row.method.bytes().fold(1u64, |seed, byte| seed.wrapping_mul(31) ^ u64::from(byte)));
    // Sequences of choices that the row can tell apart.
    let rich = ["setp", "lop3", "mov.u32"].iter().any(|opcode| row.text.starts_with(opcode));
    let mut forms = vec![Vec::new(); if row.access_bytes > 0 { 1 } else { 4 }];
    for _ in 0..if rich { 12 } else { 2 } {
        forms.push((0..8).map(|_| random.next() as u32).collect());
    }
    if row.text.starts_with("wgmma.mma_async") {
        // Columns, accumulators / 4 - 1, and the scale: a register, or a constant of either value.
        forms = vec![vec![8, 0, 0], vec![16, 1, 0], vec![8, 0, 1, 1, 0], vec![16, 1, 1, 0, 0]];
    }
    let mut cases: Vec<Case> = Vec::new();
    for choices in forms {
        let choices = used_choices(row, &choices);
        let kernel = RowKernel::new(row, &choices, target_of(row));
        let text = kernel.inst.to_string();
        let is_new = choices.is_empty() || cases.iter().all(|case| case.text != text);
        if kernel.module.verify().is_err() || !is_new {
            continue;
        }
        let slots = (0..kernel.inputs.len()).map(|n| inputs(&kernel, n, cases.len(), &mut random));
        let mut before = State { slots: slots.collect(), memory: vec![], shared: vec![] };
        let is_product = row.text.starts_with("wgmma.mma_async");
        let has_places = row.access_bytes > 0 || is_product;
        let mut image = || match has_places {
            true if is_product => (0..IMAGE / 2)
                .flat_map(|_| small_integer(row.text, &mut random).to_le_bytes())
                .collect(),
            true => (0..IMAGE).map(|_| random.next() as u8).collect(),
            false => vec![0; IMAGE],
        };
        (before.memory, before.shared) = (image(), image());
        let param = random.next() >> if kernel.param_bytes == Some(4) { 32 } else { 0 };
        let after = before.clone();
        let mut case = Case { choices, text, param, has_places, before, after };
        case.after = expected(&kernel, &case);
        cases.push(case);
    }
    Vectors { source: COMPUTED.to_owned(), cases }
}

/// The choices that the row really asks for, reduced to their ranges.
fn used_choices(row: &Row, choices: &[u32]) -> Vec<u32> {
    let mut used = Vec::new();
    let mut left = choices.iter();
    (row.example)(&mut makaira::asm::Asm::new(), &mut |n| match left.next() {
        Some(choice) => {
            used.push(choice % n);
            choice % n
        }
        None => 0,
    });
    used
}

const INTEGERS: [u32; 16] = [
    0,
    1,
    2,
    3,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    0x8000_0001,
    0xffff_fffe,
    0xffff_ffff,
    0x0123_4567,
    0x89ab_cdef,
    0x7654_3210,
    0xfedc_ba98,
    0x5555_aaaa,
];
/// 0, subnormals, normals around ties, the largest, infinity, NaN; each with either sign.
const HALVES: [u16; 16] = [
    0, 1, 2, 0x03ff, 0x0400, 0x0401, 0x1400, 0x3bff, 0x3c00, 0x3c01, 0x6400, 0x64ff, 0x7bff,
    0x7c00, 0x7e00, 0x7c01,
];
/// The same in bf16, and numbers so far apart that a sum is all but one of them.
const BFLOATS: [u32; 16] = [
    0, 1, 2, 0x007f, 0x0080, 0x0081, 0x2f80, 0x3f7f, 0x3f80, 0x3f81, 0x4300, 0x437f, 0x7f7f,
    0x7f80, 0x7fc0, 0x7f81,
];
const FLOATS: [u32; 20] = [
    0,
    1,
    0x007f_ffff,
    0x0080_0000,
    0x3380_0000,
    0x3300_0000,
    0x3300_0001,
    0x3f7f_ffff,
    0x3f80_0000,
    0x3f80_0001,
    0x3f80_1000,
    0x3f80_3000,
    0x477f_e000,
    0x477f_efff,
    0x477f_f000,
    0x4b80_0000,
    0x7f7f_ffff,
    0x7f80_0000,
    0x7fc0_0000,
    0x7f80_0001,
];

/// An integer from -16 to 16 in the type of the instruction's elements: products and sums are exact in any order.
fn small_integer(text: &str, random: &mut Random) -> u16 {
    let value = random.below(33) as f32 - 16.0;
    match text.contains("bf16") {
        true => half::bf16::from_f32(value).to_bits(),
        false => half::f16::from_f32(value).to_bits(),
    }
}

/// The values of input slot `slot` in the `round`-th case.
fn inputs(kernel: &RowKernel, slot: usize, round: usize, random: &mut Random) -> [u64; 32] {
    let text = kernel.inst.to_string();
    let opcode = text.split(' ').next().unwrap_or_default();
    let sign = |random: &mut Random| random.below(2);
    let half = |random: &mut Random| match random.below(3) {
        0 => random.next() as u16,
        1 => random.pick(&HALVES) | (sign(random) as u16) << 15,
        // Of similar size, so that sums cancel and round.
        _ => (0x3800 + random.below(0x1000) as u16) | (sign(random) as u16) << 15,
    };
    let is_matrix = matches!(kernel.inst, Inst::Tensor(_) | Inst::Wgmma(_));
    // A product's scale is the same in all threads.
    let scale = u64::from(round as u32 % 2);
    std::array::from_fn(|lane| match kernel.inputs[slot] {
        Class::Pred if is_matrix => scale,
        Class::Pred => u64::from(random.below(2)),
        Class::B16 => half(random).into(),
        Class::B64 => random.next() >> random.pick(&[0, 1, 31, 32, 33, 63]),
        Class::F32 if is_matrix => {
            { (f64::from(random.below(4096)) - 2048.0) as f32 }.to_bits().into()
        }
        Class::F32 => u64::from(match random.below(3) {
            0 => random.next() as u32,
            1 => random.pick(&FLOATS) | sign(random) << 31,
            _ => (0x3f00_0000 + random.below(1 << 24)) | sign(random) << 31,
        }),
        Class::B32 if is_matrix => {
            let mut integer = || u64::from(small_integer(&text, random));
            integer() | integer() << 16
        }
        Class::B32 if opcode.contains("bf16x2") => {
            let mut half = || match random.below(3) {
                0 => random.next() as u32 & 0xffff,
                1 => random.pick(&BFLOATS) | sign(random) << 15,
                _ => (0x3f00 + random.below(0x100)) | sign(random) << 15,
            };
            u64::from(half()) | u64::from(half()) << 16
        }
        Class::B32 if opcode.contains("f16x2") => {
            u64::from(half(random)) | u64::from(half(random)) << 16
        }
        Class::B32 if opcode.starts_with("cp.async.ca") => u64::from(random.below(5)),
        Class::B32 if opcode.starts_with("cp.async.cg") => u64::from(random.below(17)),
        Class::B32 if opcode.starts_with("sh") && slot == 1 && random.below(4) > 0 => {
            u64::from(random.below(40))
        }
        // Every nibble in every place first, then edges and anything.
        Class::B32 if round == 0 && lane < 16 && slot == 0 => 0x1111_1111 * lane as u64,
        Class::B32 => u64::from(match random.below(2) {
            0 => random.pick(&INTEGERS),
            _ => random.next() as u32,
        }),
    })
}
