//! How the scales of a source become the scale rows of a packed weight.
//!
//! A row holds `scale * 2^exponent`, and the layer's factor makes up for that power of two:
//!
//! - fp16 scales are copied bit by bit, exponent 0. For a type whose fp16 fragments are a power of two too small the
//!   exponent makes the largest large, so that a scaled fragment does not fall below fp16's normal range.
//! - e4m3 scales of `e2m1` (NVFP4) become e5m3 bytes with the exponent 7, e8m0 scales (MXFP4) with the exponent that
//!   makes the largest 2^15. Both are exact.
//! - All others are rounded to fp16. If some would be too large, or fall below the normal range, the exponent makes the
//!   largest as large as scaled fragments allow.
//!
//! A nonzero scale that would still be below the normal range, or a power of two below 2^-9 (where an fp16 fragment
//! times it loses a bit), is refused: it is more than 2^20 times smaller than the largest.
//! NaN and infinite scales stay what they are and spoil their own group and column.

use half::f16;

use super::{
    Activation, E2M1, Error, Group, QuantMatrix, ScaleRow, ScaleType, WeightFormat, ZeroRule,
};
use crate::layout::f16_from_f64;

/// The smallest fp16 number with all significant bits.
const MIN_NORMAL: f64 = 1.0 / 16384.0;
/// What rows and scaled fragments may reach: half of the largest fp16 number.
const LARGEST: f64 = 32768.0;

/// How scales become rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScaleRule {
    /// What rows hold.
    pub(super) row: ScaleRow,
    /// Rows hold scales times two to this.
    pub(super) exponent: i32,
}

/// `2^exponent`.
pub(super) fn power(exponent: i32) -> f64 {
    2f64.powi(exponent)
}

impl ScaleRule {
    /// The rule for a matrix.
    ///
    /// # Errors
    /// [`Error::ScaleRange`] for a scale that the rule would round by more than fp16 does, or a negative one where rows
    /// have no sign.
    pub(super) fn of(matrix: &QuantMatrix<'_>) -> Result<Self, Error> {
        let (format, element) = (matrix.format(), matrix.scales().element);
        let bytes = format.name() == E2M1.name() && matches!(matrix.group(), Group::Size(16 | 32));
        match element {
            ScaleType::E4M3 if bytes => {
                let rule = Self { row: ScaleRow::E5m3, exponent: 7 };
                rule.check(matrix, |scale| scale >= 0.0, "a scale of one byte has no sign")?;
                Ok(rule)
            }
            ScaleType::E8M0 if bytes => {
                let largest = Range::of(matrix).largest;
                let exponent = if largest > 0.0 { 15 - largest.log2() as i32 } else { 0 };
                let rule = Self { row: ScaleRow::E5m3, exponent };
                let fits = |scale| scale * power(exponent) >= power(-9);
                rule.check(matrix, fits, "scales of one byte may be up to 2^24 times smaller")?;
                Ok(rule)
            }
            ScaleType::F16 if !wants_large_scales(format) => {
                Ok(Self { row: ScaleRow::F16, exponent: 0 })
            }
            _ => Self::halves(matrix),
        }
    }

    /// The rule for rows of fp16 numbers that are made, not copied.
    fn halves(matrix: &QuantMatrix<'_>) -> Result<Self, Error> {
        let (format, element) = (matrix.format(), matrix.scales().element);
        let range = Range::of(matrix);
        let most = (LARGEST / largest_fragment(format)).min(LARGEST);
        let fits = range.smallest >= MIN_NORMAL && range.largest <= most;
        let mut exponent = match range.largest > 0.0 && (wants_large_scales(format) || !fits) {
            true => (most / range.largest).log2().floor() as i32,
            false => 0,
        };
        if element == ScaleType::F16 {
            // Upwards only: that is exact.
            exponent = exponent.max(0);
        } else {
            let least = MIN_NORMAL * power(-exponent);
            let fits = |scale: f64| scale == 0.0 || scale.abs() >= least;
            let rule = Self { row: ScaleRow::F16, exponent };
            rule.check(matrix, fits, "beside the largest it would lose bits that fp16 keeps")?;
        }
        Ok(Self { row: ScaleRow::F16, exponent })
    }

    /// Refuses the first finite scale that does not fit.
    fn check(
        self,
        matrix: &QuantMatrix<'_>,
        fits: impl Fn(f64) -> bool,
        rule: &'static str,
    ) -> Result<(), Error> {
        let fails = |value: f32| value.is_finite() && !fits(value.into());
        // Few values of one byte, however many scales.
        if small_values(matrix).is_some_and(|mut values| !values.any(fails)) {
            return Ok(());
        }
        for group_idx in 0..matrix.num_groups() {
            for n in 0..matrix.n() {
                let value = matrix.scale(group_idx, n);
                if fails(value) {
                    return Err(Error::ScaleRange { group_idx, n, value, rule });
                }
            }
        }
        Ok(())
    }

    /// Whether rows are copies of the scales.
    pub(super) fn copies(self, matrix: &QuantMatrix<'_>) -> bool {
        self.exponent == 0 && matrix.scales().element == ScaleType::F16
    }

    /// The bits that a row holds for a scale: 16, or 8 of a scale of one byte.
    pub(super) fn bits(self, matrix: &QuantMatrix<'_>, group_idx: usize, n: usize) -> u16 {
        match self.copies(matrix) {
            true => matrix.half_scale(group_idx, n).to_bits(),
            false => self.bits_of(matrix.scale(group_idx, n)),
        }
    }

    /// The bits that a row holds for the value of a scale that is not copied.
    pub(super) fn bits_of(self, scale: f32) -> u16 {
        let bits = f16_from_f64(f64::from(scale) * power(self.exponent)).to_bits();
        match self.row {
            ScaleRow::F16 => bits,
            ScaleRow::E5m3 => bits >> 7 & 0xff,
        }
    }
}

/// The value of a row's bits.
pub(super) fn scale_of_bits(row: ScaleRow, bits: u16) -> f16 {
    match row {
        ScaleRow::F16 => f16::from_bits(bits),
        ScaleRow::E5m3 => f16::from_bits(bits << 7),
    }
}

/// Whether fp16 fragments of a type are so small that small scales would make subnormals of them.
fn wants_large_scales(format: &dyn WeightFormat) -> bool {
    format.fragments().is_some_and(|fragments| fragments.exponent(Activation::F16) > 0)
}

/// The largest magnitude of an fp16 fragment of a type, before it is scaled.
fn largest_fragment(format: &dyn WeightFormat) -> f64 {
    let exponent = format.fragments().map_or(0, |fragments| fragments.exponent(Activation::F16));
    let largest = match format.zero_rule() {
        ZeroRule::Stored => (format.num_codes() - 1) as f64,
        ZeroRule::Bias(_) | ZeroRule::Float => (0..format.num_codes())
            .map(|code| f64::from(format.decode(code as u8)).abs())
            .fold(0.0, f64::max),
    };
    largest * power(-(exponent as i32))
}

/// The largest magnitude of the finite scales, and the smallest but zero.
struct Range {
    largest: f64,
    smallest: f64,
}

impl Range {
    fn of(matrix: &QuantMatrix<'_>) -> Self {
        let mut range = Self { largest: 0.0, smallest: f64::INFINITY };
        let mut add = |value: f32| {
            let magnitude = f64::from(value).abs();
            if magnitude.is_finite() && magnitude > 0.0 {
                range.largest = range.largest.max(magnitude);
                range.smallest = range.smallest.min(magnitude);
            }
        };
        if let Some(values) = small_values(matrix) {
            values.for_each(add);
            return range;
        }
        for group_idx in 0..matrix.num_groups() {
            (0..matrix.n()).for_each(|n| add(matrix.scale(group_idx, n)));
        }
        range
    }
}

/// The different values of scales of one byte; none of other types.
fn small_values(matrix: &QuantMatrix<'_>) -> Option<impl Iterator<Item = f32>> {
    let scales = matrix.scales();
    (scales.element.bytes() == 1).then(|| {
        let mut seen = [false; 256];
        scales.bytes.iter().for_each(|byte| seen[usize::from(*byte)] = true);
        (0..=255u8)
            .filter(move |byte| seen[usize::from(*byte)])
            .map(move |byte| scales.element.decode(&[byte]))
    })
}
