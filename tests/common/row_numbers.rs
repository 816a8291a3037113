//! Numbers of the rows' second implementation, written out without the crate's own rounding.

/// Two roundings, to f64 and from there, are one for sums and products of single precision: 53 >= 2 * 24 + 2.
pub fn rounded(value: f64) -> u64 {
    let value = value as f32;
    u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
}

/// `a * b + c` in f64, rounded to odd, so that rounding it again is harmless.
pub fn fused(a: f32, b: f32, c: f32) -> f64 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    if !sum.is_finite() {
        return sum;
    }
    let part = sum - product;
    let error = (product - (sum - part)) + (c - part);
    if error == 0.0 || sum.to_bits() % 2 == 1 {
        return sum;
    }
    match (error > 0.0) == (sum > 0.0) {
        true => f64::from_bits(sum.to_bits() + 1),
        false => f64::from_bits(sum.to_bits() - 1),
    }
}

pub fn halves(s: &[u64], f: impl Fn([u16; 3]) -> u16) -> u64 {
    let part = |shift: u32| {
        let operand = |n: usize| s.get(n).map_or(0, |bits| (bits >> shift) as u16);
        u64::from(f([operand(0), operand(1), operand(2)])) << shift
    };
    part(0) + part(16)
}

/// A finite half in units of 2^-24, with its sign.
pub fn units(bits: u16) -> i128 {
    let (exponent, fraction) = (bits >> 10 & 31, i128::from(bits & 1023));
    let magnitude = match exponent {
        0 => fraction,
        _ => (fraction + 1024) << (exponent - 1),
    };
    if bits & 0x8000 != 0 { -magnitude } else { magnitude }
}

pub fn is_nan(bits: u16) -> bool {
    bits & 0x7fff > 0x7c00
}

pub fn is_infinite(bits: u16) -> bool {
    bits & 0x7fff == 0x7c00
}

pub fn half_fma(a: u16, b: u16, c: u16) -> u16 {
    let sign = (a ^ b) & 0x8000;
    let product_is_infinite = is_infinite(a) || is_infinite(b);
    let is_invalid = (is_infinite(a) && b & 0x7fff == 0) || (is_infinite(b) && a & 0x7fff == 0);
    let cancels = product_is_infinite && is_infinite(c) && sign != c & 0x8000;
    if [a, b, c].into_iter().any(is_nan) || is_invalid || cancels {
        return 0x7fff;
    }
    if product_is_infinite {
        return sign | 0x7c00;
    }
    if is_infinite(c) {
        return c;
    }
    // In units of 2^-48.
    let sum = units(a) * units(b) + (units(c) << 24);
    match sum {
        0 if sign == c & 0x8000 => sign,
        0 => 0,
        _ => nearest_half(sum < 0, sum.unsigned_abs() << 12),
    }
}

pub fn half_of_float(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let magnitude = f64::from(value.abs()).min(2f64.powi(17)) * 2f64.powi(60);
    // What lies below the unit only has to break ties.
    let sticky = u128::from(magnitude.fract() != 0.0);
    nearest_half(value.is_sign_negative(), magnitude as u128 | sticky)
}

/// The half nearest to a magnitude in units of 2^-60, the even one of two; 65536 stands for infinity.
pub fn nearest_half(negative: bool, magnitude: u128) -> u16 {
    let value = |code: u16| match code {
        0x7c00 => 1u128 << 76,
        code => units(code).unsigned_abs() << 36,
    };
    let below =
        (0..=0x7c00u16).rev().find(|code| value(*code) <= magnitude).expect("0 is below all");
    let code = match below {
        0x7c00 => below,
        _ => {
            let (down, up) = (magnitude - value(below), value(below + 1) - magnitude);
            if up < down || (up == down && below % 2 == 1) { below + 1 } else { below }
        }
    };
    code | if negative { 0x8000 } else { 0 }
}

pub fn value_of_half(bits: u16) -> f32 {
    let sign = if bits & 0x8000 != 0 { -1.0 } else { 1.0 };
    match (is_nan(bits), is_infinite(bits)) {
        (true, _) => f32::from_bits(0x7fff_ffff),
        (_, true) => sign * f32::INFINITY,
        _ => sign * (units(bits & 0x7fff) as f64 * 2f64.powi(-24)) as f32,
    }
}

/// The bf16 number nearest to a value, the even one of two.
pub fn nearest_bfloat(value: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let (magnitude, sign) = (value.abs(), u16::from(value.is_sign_negative()) << 15);
    // As if the exponents went on.
    let of = |code: u16| match code {
        0x7f80 => 2f64.powi(128),
        code => f64::from(value_of_bfloat(code)),
    };
    let (mut below, mut above) = (0u16, 0x7f80u16);
    if magnitude >= of(above) {
        return sign | above;
    }
    while above - below > 1 {
        let middle = below.midpoint(above);
        if of(middle) <= magnitude { below = middle } else { above = middle }
    }
    let (down, up) = (magnitude - of(below), of(above) - magnitude);
    sign | if up < down || (up == down && below % 2 == 1) { above } else { below }
}

pub fn value_of_bfloat(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
