//! Round-to-nearest quantisation of a dense weight to `u4b8`.
//!
//! Per group of a row of `[N][K]` (the orientation of a linear layer's weight): the scale is
//! s = 2 max|w| / 15 rounded to fp16, and the code is clamp(round(w / s) + 8, 0, 15), ties to
//! even. The largest magnitude sits at 7.5 steps, so it costs half a step on either side. A
//! group without a non-zero scale (all zeros, or so small that s rounds to zero) gets scale 0 and
//! code 8. This is a baseline for tests and for users without calibration data; GPTQ is better.
//!
//! Rows are independent; threads take equal runs of them, and the result is the same for any
//! number of threads.

use half::f16;

use super::{Codes, Error, Group, QuantMatrix, ScaleOrder, Scales, U4B8};

/// A dense weight `[N][K]`, as little-endian bytes of any alignment.
#[derive(Clone, Copy, Debug)]
pub enum Dense<'a> {
    /// IEEE half precision.
    F16(&'a [u8]),
    /// bfloat16.
    BF16(&'a [u8]),
    /// IEEE single precision.
    F32(&'a [u8]),
}

/// A weight that the quantiser made: owned codes and scales.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    n: usize,
    k: usize,
    group: Group,
    codes: Vec<u8>,
    scales: Vec<f16>,
}

impl Quantized {
    /// The borrowed matrix that the packer takes.
    pub fn view(&self) -> QuantMatrix<'_> {
        let bytes = bytemuck::cast_slice(&self.scales);
        let scales = Scales::f16(bytes, ScaleOrder::Rows);
        QuantMatrix::new(self.n, self.k, self.group, &U4B8, Codes::ByOutput(&self.codes), scales)
            .expect("the quantiser makes codes below 16 and one scale per group and row")
    }

    /// One code a byte, `[N][K]`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Scales, `[groups][N]`.
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }
}

/// Quantises a dense weight of `n` outputs by `k` inputs with up to `threads` threads.
///
/// # Errors
/// [`Error::NotFinite`] for the first weight that is NaN, infinite or too large for an fp16 scale,
/// [`Error::SourceBytes`], [`Error::Size`] and those of [`Group::new`].
pub fn quantize(
    dense: Dense<'_>,
    n: usize,
    k: usize,
    group: Group,
    threads: usize,
) -> Result<Quantized, Error> {
    let elements = n.checked_mul(k).filter(|&e| e > 0).ok_or(Error::Size { n, k })?;
    let group = Group::new(k, group.raw())?;
    let (bytes, element_bytes, what) = match dense {
        Dense::F16(bytes) => (bytes, 2, "f16 weights"),
        Dense::BF16(bytes) => (bytes, 2, "bf16 weights"),
        Dense::F32(bytes) => (bytes, 4, "f32 weights"),
    };
    if bytes.len() != elements * element_bytes {
        let (expected, found) = (elements * element_bytes, bytes.len());
        return Err(Error::SourceBytes { what, n, k, expected, found });
    }
    let num_groups = group.num_groups(k);
    let mut codes = vec![0u8; elements];
    // [N][groups] while rows are filled by threads; transposed below.
    let mut row_scales = vec![f16::ZERO; n * num_groups];
    let rows_per_thread = n.div_ceil(threads.max(1));
    let outcome: Result<(), Error> = std::thread::scope(|scope| {
        let runs = codes
            .chunks_mut(rows_per_thread * k)
            .zip(row_scales.chunks_mut(rows_per_thread * num_groups))
            .enumerate();
        let handles: Vec<_> = runs
            .map(|(run_idx, (codes, scales))| {
                scope.spawn(move || {
                    let first = run_idx * rows_per_thread;
                    let mut values = vec![0f32; k];
                    let rows = codes.chunks_exact_mut(k).zip(scales.chunks_exact_mut(num_groups));
                    for (idx, (codes, scales)) in rows.enumerate() {
                        widen_row(dense, (first + idx) * k, &mut values);
                        quantize_row(&values, group, codes, scales).map_err(|column| {
                            let value = values[column];
                            Error::NotFinite { row: first + idx, column, value }
                        })?;
                    }
                    Ok(())
                })
            })
            .collect();
        handles.into_iter().try_for_each(|handle| {
            handle.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause))
        })
    });
    outcome?;
    let scales = (0..num_groups * n).map(|i| row_scales[i % n * num_groups + i / n]).collect();
    Ok(Quantized { n, k, group, codes, scales })
}

/// Row elements `first ..` as f32; all widenings are exact.
fn widen_row(dense: Dense<'_>, first: usize, values: &mut [f32]) {
    match dense {
        Dense::F16(bytes) => {
            let source = bytes[2 * first..2 * (first + values.len())].as_chunks().0;
            for (value, pair) in values.iter_mut().zip(source) {
                *value = widen_half(u16::from_le_bytes(*pair));
            }
        }
        Dense::BF16(bytes) => {
            let source = bytes[2 * first..2 * (first + values.len())].as_chunks().0;
            for (value, pair) in values.iter_mut().zip(source) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16);
            }
        }
        Dense::F32(bytes) => {
            let source = bytes[4 * first..4 * (first + values.len())].as_chunks().0;
            for (value, quad) in values.iter_mut().zip(source) {
                *value = f32::from_le_bytes(*quad);
            }
        }
    }
}

/// f16 bits to f32 without a branch, so that the loop around it becomes a vector loop.
///
/// The 15 magnitude bits, moved to f32's exponent position, are the value times 2^-112 (the two
/// biases differ by 127 - 15); the product with 2^112 is exact, subnormals included. Exponent 31
/// (infinity, NaN) then is at least 2^16 and gets f32's full exponent.
fn widen_half(bits: u16) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * 2f32.powi(112);
    let special = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | u32::from(bits & 0x8000) << 16)
}

/// Codes and scales of one row; the column of a value that cannot be quantised otherwise.
fn quantize_row(
    values: &[f32],
    group: Group,
    codes: &mut [u8],
    scales: &mut [f16],
) -> Result<(), usize> {
    let group_len = match group {
        Group::PerColumn => values.len(),
        Group::Size(size) => size as usize,
    };
    let groups = values.chunks(group_len).zip(codes.chunks_mut(group_len)).zip(scales);
    for (group_idx, ((values, codes), scale)) in groups.enumerate() {
        // The bits of |w| order as the values do, and NaN above all: an integer maximum is a
        // vector loop and finds NaN and infinity too.
        let magnitude_bits = |v: &f32| (v.to_bits() & 0x7fff_ffff).cast_signed();
        let largest_bits = values.iter().map(magnitude_bits).fold(0, i32::max);
        let largest = f32::from_bits(largest_bits.cast_unsigned());
        *scale = f16::from_f32(2.0 * largest / 15.0);
        if !largest.is_finite() || !scale.is_finite() {
            let column = values.iter().position(|v| magnitude_bits(v) == largest_bits);
            return Err(group_idx * group_len + column.unwrap_or(0));
        }
        let scale = scale.to_f32();
        if scale == 0.0 {
            codes.fill(8);
            continue;
        }
        for (code, value) in codes.iter_mut().zip(values) {
            *code = round_to_step(value / scale);
        }
    }
    Ok(())
}

/// clamp(round(steps) + 8, 0, 15), ties to even.
///
/// Clamping first is the same, since the ends are integers. 1.5 x 2^23 has a unit of one in its
/// last place, so adding it rounds to an integer, and the integer stands in the low bits; the bias
/// of 8 rides along, and is even, so it moves no tie.
fn round_to_step(steps: f32) -> u8 {
    const BIASED: f32 = 1.5 * 8_388_608.0 + 8.0;
    (steps.clamp(-8.0, 7.0) + BIASED).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::weights::PackedWeights;

    /// The rule of the module's documentation, in f64 except for the fp16 scale.
    fn naive(values: &[f32], group_len: usize) -> (Vec<u8>, Vec<f16>) {
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for values in values.chunks(group_len) {
            let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
            let scale = f16::from_f32(2.0 * largest / 15.0);
            scales.push(scale);
            for value in values {
                let steps = value / scale.to_f32();
                let code = if scale == f16::ZERO { 8.0 } else { steps.round_ties_even() + 8.0 };
                codes.push(code.clamp(0.0, 15.0) as u8);
            }
        }
        (codes, scales)
    }

    #[test]
    fn every_half_widens_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen_half(bits), f16::from_bits(bits).to_f32());
            assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{bits:04x}");
            assert_eq!(ours.is_sign_negative(), theirs.is_sign_negative(), "{bits:04x}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn rows_follow_the_rule(
            (n, raw, k, magnitude) in (
                1usize..40,
                prop::sample::select(vec![-1i64, 32, 64, 128]),
                1usize..6,
                prop::sample::select(vec![1e-7f32, 1e-3, 1.0, 3e4]),
            ),
            seed in any::<u32>(),
            half in any::<bool>(),
        ) {
            let k = if raw < 0 { 37 * k } else { raw as usize * k };
            let mut state = seed;
            let values: Vec<f32> = (0..n * k).map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                let value = (state >> 8) as f32 / 8388608.0 - 1.0;
                let value = value * magnitude;
                if half { f16::from_f32(value).to_f32() } else { value }
            }).collect();
            let group = Group::new(k, raw).expect("legal");
            let halves: Vec<f16> = values.iter().map(|&v| f16::from_f32(v)).collect();
            let dense = if half {
                Dense::F16(bytemuck::cast_slice(&halves))
            } else {
                Dense::F32(bytemuck::cast_slice(&values))
            };
            let quantized = quantize(dense, n, k, group, 3).expect("finite");
            let group_len = if raw < 0 { k } else { raw as usize };
            let num_groups = k.div_ceil(group_len);
            for row in 0..n {
                let (codes, scales) = naive(&values[row * k..(row + 1) * k], group_len);
                prop_assert_eq!(&quantized.codes()[row * k..(row + 1) * k], &codes[..]);
                for (group_idx, scale) in scales.iter().enumerate() {
                    prop_assert_eq!(quantized.scales()[group_idx * n + row], *scale);
                }
            }
            prop_assert_eq!(quantized.scales().len(), n * num_groups);
            // Packed and decoded, every weight is within half a step (plus the scale's rounding).
            let packed = PackedWeights::pack(&quantized.view(), 2).expect("packs");
            for (i, value) in packed.dequantize().iter().enumerate() {
                let scale = quantized.scales()[i % k / group_len * n + i / k].to_f32();
                let step = if scale == 0.0 { magnitude } else { scale };
                prop_assert!((value - values[i]).abs() <= 0.51 * step + 2f32.powi(-24) * 8.0);
            }
        }
    }

    #[test]
    fn ties_round_to_even_and_the_ends_clamp() {
        // The largest is 7.5 steps of 1.0.
        let values = [7.5f32, -7.5, 0.5, -0.5, 1.5, -1.5, 6.49, -6.51, 0.0, -0.0, 7.0, -8.0 / 1.1];
        let mut codes = [0u8; 11];
        let mut scales = [f16::ZERO];
        quantize_row(&values[..11], Group::PerColumn, &mut codes, &mut scales).expect("finite");
        assert_eq!(scales[0], f16::ONE);
        assert_eq!(codes, [15, 0, 8, 8, 10, 6, 14, 1, 8, 8, 15]);
        assert_eq!(round_to_step(values[11]), 1);
    }

    #[test]
    fn b39_zero_groups_get_scale_zero_and_bad_weights_are_named() {
        let (n, k) = (3, 256);
        let mut values = vec![0.25f32; n * k];
        values[k..k + 128].fill(0.0);
        values[k + 128..2 * k].fill(1e-9); // a scale far below fp16's smallest
        let group = Group::Size(128);
        let run =
            |values: &[f32]| quantize(Dense::F32(bytemuck::cast_slice(values)), n, k, group, 2);
        let quantized = run(&values).expect("finite");
        assert_eq!(quantized.scales()[1], f16::ZERO);
        assert_eq!(quantized.scales()[n + 1], f16::ZERO);
        assert!(quantized.codes()[k..2 * k].iter().all(|&code| code == 8));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            values[2 * k + 131] = bad;
            let text = run(&values).expect_err("bad").to_string();
            assert!(text.contains("row 2 (output), column 131 (input)"), "{text}");
        }
        let halves = [f16::ONE, f16::NEG_INFINITY];
        let error = quantize(Dense::F16(bytemuck::cast_slice(&halves)), 1, 2, Group::PerColumn, 1);
        assert!(matches!(error, Err(Error::NotFinite { row: 0, column: 1, .. })), "{error:?}");
    }
}
