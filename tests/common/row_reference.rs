//! What an instruction of the table should do, written a second time: from the PTX ISA, slowly, and without
//! a look at the rows' meanings. Numbers are exact integers wherever they can be; who holds which element of
//! a fragment is written out from the ISA's figures and not asked from the crate.

use super::row_numbers::{
    fused, half_fma, half_of_float, halves, nearest_bfloat, rounded, units, value_of_bfloat,
    value_of_half,
};

/// One warp's worth of values: `[slot][lane]`, and the images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub slots: Vec<[u64; 32]>,
    pub memory: Vec<u8>,
    pub shared: Vec<u8>,
}

/// An instruction, taken apart from its text.
struct Form {
    opcode: String,
    operands: Vec<String>,
}

impl Form {
    fn of(text: &str) -> Self {
        let text = text.trim_end_matches(';');
        let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
        let plain = operands.replace(['{', '}'], "");
        let operands = plain.split(", ").filter(|operand| !operand.is_empty()).map(str::to_owned);
        Self { opcode: opcode.to_owned(), operands: operands.collect() }
    }

    fn is(&self, prefix: &str) -> bool {
        self.opcode.starts_with(prefix)
    }

    /// The sources in `lane`: input slots in order, immediates, special registers. Addresses are left out.
    fn sources(&self, num_out: usize, before: &State, lane: usize) -> Vec<u64> {
        let mut slots = before.slots.iter().map(|slot| slot[lane]);
        let mut next_slot = || slots.next().expect("a slot for every register that is read");
        let plain = self.operands.iter().filter(|operand| !operand.starts_with('['));
        plain
            .skip(num_out)
            .map(|operand| match operand.as_str() {
                "%tid.x" | "%laneid" => lane as u64,
                "%ntid.x" => 32,
                "%nctaid.x" | "%nctaid.y" => 1,
                "%ctaid.x" | "%ctaid.y" => 0,
                register if register.starts_with('%') => next_slot(),
                immediate => number(immediate),
            })
            .collect()
    }
}

fn number(text: &str) -> u64 {
    let hex = |digits| u64::from_str_radix(digits, 16);
    let parsed = match (text.strip_prefix("0x"), text.strip_prefix("0f")) {
        (Some(digits), _) | (_, Some(digits)) => hex(digits),
        _ => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{text} is no immediate"))
}

/// What the instruction leaves behind, given the value of the parameter it may read.
pub fn expected(text: &str, num_out: usize, param: u64, before: &State) -> State {
    let form = Form::of(text);
    let mut after = State { slots: vec![[0; 32]; num_out], ..before.clone() };
    if form.is("ldmatrix") || form.is("mma") || form.is("shfl") {
        after.slots = collective(&form, num_out, before);
        return after;
    }
    if form.is("wgmma.mma_async") {
        after.slots = warpgroup_product(&form, before);
        return after;
    }
    if form.is("stmatrix") {
        // Row r of stored matrix j, where lane 8j + r points, is column r of what the lanes hold: lane l has
        // elements 2 (l % 4) and the next of row l / 4.
        for (j, slot) in before.slots.iter().enumerate() {
            for (lane, value) in slot.iter().enumerate() {
                for half in 0..2 {
                    let (row, column) = (lane / 4, 2 * (lane % 4) + half);
                    let at = 16 * (8 * j + column) + 2 * row;
                    let bytes = ((value >> (16 * half)) as u16).to_le_bytes();
                    after.shared[at..at + 2].copy_from_slice(&bytes);
                }
            }
        }
        return after;
    }
    if form.is("elect") {
        after.slots[0][0] = 1;
        return after;
    }
    for lane in 0..32 {
        let sources = form.sources(num_out, before, lane);
        let results = match form.operands.iter().any(|operand| operand.starts_with("[%")) {
            true => memory(&form, num_out, 16 * lane, &sources, before, &mut after),
            false if form.is("ld.param") => vec![param],
            false => pure(&form, num_out, &sources),
        };
        assert_eq!(results.len(), num_out, "{text}");
        for (slot, result) in after.slots.iter_mut().zip(results) {
            slot[lane] = result;
        }
    }
    after
}

/// Loads, stores, atomics and copies of a lane whose addresses point at byte `at` of the images.
fn memory(
    form: &Form,
    num_out: usize,
    at: usize,
    sources: &[u64],
    before: &State,
    after: &mut State,
) -> Vec<u64> {
    let read = |image: &[u8], at: usize, bytes: usize| {
        image[at..at + bytes].iter().rev().fold(0, |value, byte| value * 256 + u64::from(*byte))
    };
    if form.is("cp.async") {
        let size = number(form.operands[2].as_str()) as usize;
        let copied = sources.get(1).map_or(size, |n| *n as usize);
        for n in 0..size {
            after.shared[at + n] = if n < copied { before.memory[at + n] } else { 0 };
        }
        return Vec::new();
    }
    let width = match form.opcode.rsplit('.').next() {
        Some("b16") => 2,
        Some("b64") => 8,
        _ => 4,
    };
    let is_shared = form.opcode.contains(".shared");
    if form.is("ld.") {
        let image = if is_shared { &before.shared } else { &before.memory };
        return (0..num_out).map(|n| read(image, at + n * width, width)).collect();
    }
    let image = if is_shared { &mut after.shared } else { &mut after.memory };
    if form.is("st.") {
        for (n, value) in sources.iter().enumerate() {
            let bytes = value.to_le_bytes();
            image[at + n * width..at + (n + 1) * width].copy_from_slice(&bytes[..width]);
        }
        return Vec::new();
    }
    if form.is("red.relaxed.gpu.global.add.v4.f32") {
        for (n, value) in sources.iter().enumerate() {
            let part = |bits: u64| {
                let value = f32::from_bits(bits as u32);
                if value.is_subnormal() { 0.0 * value } else { value }
            };
            let old = part(read(&before.memory, at + 4 * n, 4));
            let sum = f64::from(part(rounded(f64::from(old) + f64::from(part(*value)))));
            let bytes = (rounded(sum) as u32).to_le_bytes();
            image[at + 4 * n..at + 4 * n + 4].copy_from_slice(&bytes);
        }
        return Vec::new();
    }
    let old = read(&before.memory, at, 4);
    let new = match form.opcode.contains(".inc.") {
        true if old >= sources[0] => 0,
        true => old + 1,
        false => (old + sources[0]) % (1 << 32),
    };
    image[at..at + 4].copy_from_slice(&(new as u32).to_le_bytes());
    if num_out == 1 { vec![old] } else { Vec::new() }
}

/// An element of a product, an integer of 1/2^24.
fn element_units(form: &Form, bits: u16) -> i64 {
    match form.opcode.contains("bf16") {
        true => (f64::from(value_of_bfloat(bits)) * 2f64.powi(24)) as i64,
        false => i64::try_from(units(bits)).expect("integers of 1/2^24"),
    }
}

/// Instructions that the warp executes together.
fn collective(form: &Form, num_out: usize, before: &State) -> Vec<[u64; 32]> {
    let mut out = vec![[0; 32]; num_out];
    if form.is("shfl") {
        for (lane, value) in out[0].iter_mut().enumerate() {
            let from = form.sources(1, before, lane)[1] % 32;
            *value = before.slots[0][from as usize];
        }
    } else if form.is("ldmatrix") {
        // Row r of matrix j is where lane 8j + r points; a lane gets two neighbours of row lane / 4.
        for (j, slot) in out.iter_mut().enumerate() {
            for (lane, value) in slot.iter_mut().enumerate() {
                let at = 16 * (8 * j + lane / 4) + 4 * (lane % 4);
                let bytes = before.shared[at..at + 4].try_into().expect("four bytes");
                *value = u32::from_le_bytes(bytes).into();
            }
        }
    } else {
        // PTX ISA, figures of "Matrix Fragments for mma.m16n8k16": groupID = lane / 4, t = lane % 4.
        let half = |bits: u64| element_units(form, bits as u16);
        let (mut a, mut b) = ([[0; 16]; 16], [[0; 8]; 16]);
        for lane in 0..32 {
            let (group, t) = (lane / 4, lane % 4);
            for i in 0..8 {
                let row = if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 };
                let col = if i < 4 { 2 * t + i % 2 } else { 2 * t + i % 2 + 8 };
                a[row][col] = half(before.slots[i / 2][lane] >> (16 * (i % 2)));
            }
            for i in 0..4 {
                let row = if i < 2 { 2 * t + i } else { 2 * t + i % 2 + 8 };
                b[row][group] = half(before.slots[4 + i / 2][lane] >> (16 * (i % 2)));
            }
        }
        for (i, slot) in out.iter_mut().enumerate() {
            for (lane, result) in slot.iter_mut().enumerate() {
                let (row, col) = (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2);
                let product: i128 =
                    (0..16).map(|k| i128::from(a[row][k]) * i128::from(b[k][col])).sum();
                let c = f64::from(f32::from_bits(before.slots[6 + i][lane] as u32));
                // The inputs are such that everything is exact in f64.
                let value = product as f64 * 2f64.powi(-48) + c;
                *result = u64::from((value as f32).to_bits());
            }
        }
    }
    out
}

/// The first warp's 16 rows of a product whose second operand lies in the shared image as `row_kernel.rs` says.
/// PTX ISA, figures of "Register Fragments" of `wgmma.mma_async.m64nNk16` and of the canonical layouts.
fn warpgroup_product(form: &Form, before: &State) -> Vec<[u64; 32]> {
    let n: usize = if form.opcode.contains("m64n8k16") { 8 } else { 16 };
    let element = |at: usize| {
        let bytes = [before.shared[at % 512], before.shared[at % 512 + 1]];
        element_units(form, u16::from_le_bytes(bytes))
    };
    let b = |k: usize, column: usize| match n {
        // 128 bytes a column, the second 32 of them, pieces of 16 exchanged by the column's number.
        8 => element(128 * column + ((2 + k / 8) ^ column) * 16 + 2 * (k % 8)),
        _ => element(256 * (column / 8) + 128 * (k / 8) + 16 * (column % 8) + 2 * (k % 8)),
    };
    let num_d = n / 2;
    let half = |bits: u64| element_units(form, bits as u16);
    let mut a = [[0; 16]; 16];
    for lane in 0..32 {
        let (group, t) = (lane / 4, lane % 4);
        for i in 0..8 {
            let row = if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 };
            let col = if i < 4 { 2 * t + i % 2 } else { 2 * t + i % 2 + 8 };
            a[row][col] = half(before.slots[num_d + i / 2][lane] >> (16 * (i % 2)));
        }
    }
    let scale = &form.operands[num_d + 5];
    let scale = match scale.starts_with('%') {
        true => before.slots[num_d + 4][0],
        false => number(scale),
    };
    let mut out = vec![[0; 32]; num_d];
    for (i, slot) in out.iter_mut().enumerate() {
        for (lane, result) in slot.iter_mut().enumerate() {
            let row = lane / 4 + if i % 4 < 2 { 0 } else { 8 };
            let column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            let product: i128 =
                (0..16).map(|k| i128::from(a[row][k]) * i128::from(b(k, column))).sum();
            let d = f64::from(f32::from_bits(before.slots[i][lane] as u32));
            let value = product as f64 * 2f64.powi(-48) + if scale != 0 { d } else { 0.0 };
            *result = u64::from((value as f32).to_bits());
        }
    }
    out
}

/// Instructions of one lane without memory.
fn pure(form: &Form, num_out: usize, s: &[u64]) -> Vec<u64> {
    let float = |n: usize| f32::from_bits(s[n] as u32);
    let wide = |n: usize| u128::from(s[n]);
    let signed = |n: usize| i64::from(s[n] as u32 as i32);
    let low = |value: u128| (value % (1 << 32)) as u64;
    let truth = |value: bool| u64::from(value);
    let result = match form.opcode.as_str() {
        "mov.b32" if s.len() == 2 => s[0] + (s[1] << 16),
        "mov.b32" if num_out == 2 => return vec![s[0] % 65536, s[0] / 65536],
        "mov.b32" | "mov.b64" | "mov.f32" | "mov.u32" | "cvt.u64.u32" => s[0],
        "createpolicy.fractional.L2::evict_first.b64" => 0x12f0_0000_0000_0000,
        "add.u32" => low(wide(0) + wide(1)),
        "add.u64" => ((wide(0) + wide(1)) % (1 << 64)) as u64,
        "sub.u32" => low((1 << 32) + wide(0) - wide(1)),
        "mul.lo.u32" => low(wide(0) * wide(1)),
        "mul.hi.u32" => low(wide(0) * wide(1) / (1 << 32)),
        "mul.wide.u32" => (wide(0) * wide(1)) as u64,
        "mad.lo.u32" => low(wide(0) * wide(1) + wide(2)),
        "mad.wide.u32" => ((wide(0) * wide(1) + wide(2)) % (1 << 64)) as u64,
        "min.u32" => {
            if s[0] < s[1] {
                s[0]
            } else {
                s[1]
            }
        }
        "max.u32" => {
            if s[0] < s[1] {
                s[1]
            } else {
                s[0]
            }
        }
        "min.s32" => {
            if signed(0) < signed(1) {
                s[0]
            } else {
                s[1]
            }
        }
        "max.s32" => {
            if signed(0) < signed(1) {
                s[1]
            } else {
                s[0]
            }
        }
        "and.b32" | "or.b32" | "xor.b32" | "lop3.b32" => {
            let table = match form.opcode.as_str() {
                "and.b32" => 0b1100_0000,
                "or.b32" => 0b1111_1100,
                "xor.b32" => 0b0011_1100,
                _ => s[3],
            };
            let third = if s.len() > 2 { s[2] } else { 0 };
            let bit = |n: u32| {
                let case = (s[0] >> n & 1) * 4 + (s[1] >> n & 1) * 2 + (third >> n & 1);
                (table >> case & 1) << n
            };
            (0..32).map(bit).sum()
        }
        "shl.b32" => {
            if s[1] > 31 {
                0
            } else {
                low(wide(0) << s[1])
            }
        }
        "shr.u32" => {
            if s[1] > 31 {
                0
            } else {
                s[0] >> s[1]
            }
        }
        "prmt.b32" => {
            let pool: Vec<u8> =
                [s[0] as u32, s[1] as u32].iter().flat_map(|word| word.to_le_bytes()).collect();
            let byte = |n: u64| {
                let choice = (s[2] >> (4 * n)) % 16;
                let byte = pool[choice as usize % 8];
                let byte = match (choice > 7, byte > 127) {
                    (true, true) => 255,
                    (true, false) => 0,
                    _ => byte,
                };
                u64::from(byte) << (8 * n)
            };
            (0..4).map(byte).sum()
        }
        "and.pred" => truth(s[0] != 0 && s[1] != 0),
        "or.pred" => truth(s[0] != 0 || s[1] != 0),
        "not.pred" => truth(s[0] == 0),
        "selp.b32" | "selp.f32" => {
            if s[2] != 0 {
                s[0]
            } else {
                s[1]
            }
        }
        "add.f32" => rounded(f64::from(float(0)) + f64::from(float(1))),
        "mul.f32" => rounded(f64::from(float(0)) * f64::from(float(1))),
        "fma.rn.f32" => rounded(fused(float(0), float(1), float(2))),
        "cvt.f32.f16" => u64::from(value_of_half(s[0] as u16).to_bits()),
        "cvt.rn.f16.f32" => u64::from(half_of_float(float(0))),
        "cvt.rn.f16x2.f32" => {
            u64::from(half_of_float(float(1))) + (u64::from(half_of_float(float(0))) << 16)
        }
        "cvt.rn.bf16.f32" => u64::from(nearest_bfloat(float(0).into())),
        "cvt.rn.bf16x2.f32" => {
            let half = |n: usize| u64::from(nearest_bfloat(float(n).into()));
            half(1) + (half(0) << 16)
        }
        "fma.rn.bf16x2" => halves(s, |operands| {
            let [a, b, c] = operands.map(value_of_bfloat);
            nearest_bfloat(fused(a, b, c))
        }),
        "add.f16x2" => halves(s, |[a, b, _]| half_fma(a, 0x3c00, b)),
        "sub.f16x2" => halves(s, |[a, b, _]| half_fma(a, 0x3c00, b ^ 0x8000)),
        // A product alone keeps its zero's sign: add a zero of that sign.
        "mul.f16x2" => halves(s, |[a, b, _]| half_fma(a, b, (a ^ b) & 0x8000)),
        "fma.rn.f16x2" => halves(s, |[a, b, c]| half_fma(a, b, c)),
        other => match other.split('.').collect::<Vec<_>>()[..] {
            ["setp", cmp, kind] => {
                let order = match kind {
                    "u32" => s[0].cmp(&s[1]),
                    _ => signed(0).cmp(&signed(1)),
                };
                truth(match cmp {
                    "eq" => order.is_eq(),
                    "ne" => order.is_ne(),
                    "lt" => order.is_lt(),
                    "le" => order.is_le(),
                    "gt" => order.is_gt(),
                    _ => order.is_ge(),
                })
            }
            _ => panic!("no reference for {other}: write one"),
        },
    };
    vec![result]
}
