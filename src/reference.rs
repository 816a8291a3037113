//! The answer in f64, how far a kernel may be from it, and inputs to ask with.
//!
//! Shared by the command line, the tests and the benches, so that all of them mean the same by "ok". Relies
//! on decoded weights and on nothing that a kernel uses: no packed order, no fragment map.
//!
//! For `C[i][j] = sum over k of a w` let `y` be the exact sum and `S` the sum of `|a w|`. A product is right
//! if every element keeps
//!
//! ```text
//! |c - y|  <=  2^-11 |y| + 2^-25  +  (17/16 k + 64) 2^-23 S  +  r 2^-11 S
//! ```
//!
//! - 2^-11 |y| + 2^-25: the result is rounded once to fp16, to half a unit of an 11-bit significand, or to
//!   half of the subnormal step 2^-24.
//! - 2^-23 S for each addition in fp32: a tensor core aligns the 16 products and the accumulator of an `mma`
//!   to the largest and may cut each of the 17 off at the last bit, 2^-23 of at most S; there are k / 16 of
//!   them. Products of fp16 numbers with codes are exact in fp32. 64 more stand for what adds partial sums
//!   (teams, stripes, group scales) and is far fewer.
//! - r roundings of a term to fp16: of each weight, where fragments are scaled in fp16 or a reference was made
//!   with rounded weights; of each partial sum, where CTAs add up through the fp16 output.
//!
//! With bf16 activations all of this is said of bf16: 2^-8 and 2^-134 instead of 2^-11 and 2^-25. Then a scaled fragment
//! is rounded twice, since its scale is. Scales of one byte leave fragments exact in either type.
//!
//! That holds for every input but is wide for large k, since errors rarely all point one way. So the whole
//! product must also keep, in Frobenius norms and with `Q` the matrix of root sums of `(a w)^2` (the size of
//! a sum of k terms of random sign),
//!
//! ```text
//! |C - Y|  <=  2^-11 |Y| + 2^-25 sqrt(m n)  +  (k / 16 + 8) 2^-23 (|Y| + |Q|)  +  r 2^-11 |Q|
//! ```

mod element;
mod random;
mod weighted;

use std::fmt;
use std::thread;

use half::f16;

pub use self::element::{Element, Rounding};
pub use self::random::Random;
use crate::kernel::{Config, Reduction, Scaling};
use crate::weights::{Activation, PackedWeights, QuantMatrix, ScaleRow, TILE_K, default_threads};

/// A unit in the last place of fp32, relative.
const SINGLE_ULP: f64 = 1.0 / 8_388_608.0;
/// Rows of activations that one pass over the weights serves.
const LANES: usize = 8;

/// The exact product of activations and a weight, with what its bound needs.
#[derive(Clone, Debug)]
pub struct Reference {
    n: usize,
    k: usize,
    /// The products, `[m][n]`.
    values: Vec<f64>,
    /// The sums of absolute terms, `[m][n]`.
    magnitudes: Vec<f64>,
    /// The sum of all squared terms.
    squares: f64,
    /// How results round.
    rounding: Rounding,
}

impl Reference {
    /// The product of `x`, `[m][k]`, with weights `[n][k]`, each term and sum in f64; results are of the type of `x`.
    ///
    /// # Panics
    /// If `x` or `weights` is no whole number of rows of `k`.
    ///
    /// ```
    /// use half::f16;
    /// use makaira::reference::Reference;
    /// let x = [f16::from_f32(1.0), f16::from_f32(-2.0)];
    /// let reference = Reference::new(&x, &[0.5, 0.25, 3.0, 1.0], 2);
    /// assert_eq!(reference.values(), [0.0, 1.0]);
    /// ```
    pub fn new<E: Element>(x: &[E], weights: &[f32], k: usize) -> Self {
        assert!(k > 0 && x.len().is_multiple_of(k) && weights.len().is_multiple_of(k));
        let (m, n) = (x.len() / k, weights.len() / k);
        let passes: Vec<Vec<[f64; LANES]>> = x.chunks(LANES * k).map(|x| lanes(x, k)).collect();
        let mut columns = vec![(0.0, 0.0); m * n];
        if m > 0 {
            // Column by column: a thread owns whole outputs.
            let per_thread = n.div_ceil(default_threads()).max(1);
            thread::scope(|scope| {
                let shares = columns.chunks_mut(per_thread * m);
                for (out, weights) in shares.zip(weights.chunks(per_thread * k)) {
                    let passes = &passes;
                    scope.spawn(move || {
                        for (out, w) in out.chunks_mut(m).zip(weights.chunks(k)) {
                            for (out, x) in out.chunks_mut(LANES).zip(passes) {
                                multiply(out, x, w);
                            }
                        }
                    });
                }
            });
        }
        let mut values = vec![0.0; m * n];
        let mut magnitudes = vec![0.0; m * n];
        for (at, (value, magnitude)) in columns.into_iter().enumerate() {
            let (column, row) = (at / m, at % m);
            values[row * n + column] = value;
            magnitudes[row * n + column] = magnitude;
        }
        let squares = sum_of_squares(x, weights, k);
        Self { n, k, values, magnitudes, squares, rounding: E::ROUNDING }
    }

    /// The product with a packed weight.
    ///
    /// # Panics
    /// If `x` is no whole number of rows of the weight's K.
    pub fn of_packed<E: Element>(x: &[E], packed: &PackedWeights) -> Self {
        Self::new(x, &packed.dequantize(), packed.source_inputs())
    }

    /// The same bound around other values `[m][n]`, for instance those that another program computed.
    ///
    /// # Panics
    /// If there are not as many of them.
    pub fn with_values(self, values: Vec<f64>) -> Self {
        assert_eq!(values.len(), self.values.len(), "values of another product");
        Self { values, ..self }
    }

    /// The product with a number added to each element before it is rounded: a bias, a residual.
    #[must_use]
    pub fn plus(mut self, added: impl Fn(usize, usize) -> f64) -> Self {
        for (idx, value) in self.values.iter_mut().enumerate() {
            let added = added(idx / self.n, idx % self.n);
            *value += added;
            self.magnitudes[idx] += added.abs();
        }
        self
    }

    /// The products, `[m][n]`.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// How far an element may be from [`Reference::values`]; see the module's derivation.
    pub fn bound(&self, idx: usize, tolerance: Tolerance) -> f64 {
        let single = (17.0 / 16.0 * self.k as f64 + 64.0) * SINGLE_ULP;
        let Rounding { half_ulp, half_subnormal, .. } = self.rounding;
        let half = f64::from(tolerance.half_roundings) * half_ulp;
        half_ulp * self.values[idx].abs() + half_subnormal + (single + half) * self.magnitudes[idx]
    }

    /// Compares a product `[m][n]` with this one.
    ///
    /// # Panics
    /// If it has another size.
    pub fn compare<E: Element>(&self, c: &[E], tolerance: Tolerance) -> Errors {
        assert_eq!(c.len(), self.values.len(), "a product of another size");
        let mut errors = Errors::default();
        let Rounding { half_ulp, half_subnormal, overflow } = self.rounding;
        let (mut error_squares, mut norm_squares) = (0.0, 0.0);
        for (idx, (c, exact)) in c.iter().zip(&self.values).enumerate() {
            let (c, bound) = (c.value(), self.bound(idx, tolerance));
            if c.is_infinite() && exact.abs() + bound >= overflow {
                let same_sign = c.is_sign_negative() == exact.is_sign_negative();
                if same_sign {
                    continue;
                }
            }
            let error = (c - exact).abs();
            // A NaN is larger than any bound.
            let of_bound = if error.is_nan() { f64::INFINITY } else { error / bound };
            if of_bound > 1.0 {
                errors.num_outside += 1;
                let (row, column) = (idx / self.n, idx % self.n);
                errors.first_outside.get_or_insert(Outside {
                    row,
                    column,
                    found: c,
                    exact: *exact,
                    bound,
                });
            }
            errors.max_of_bound = errors.max_of_bound.max(of_bound);
            errors.max_abs = errors.max_abs.max(if error.is_nan() { f64::INFINITY } else { error });
            error_squares += error * error;
            norm_squares += exact * exact;
        }
        let norm = norm_squares.sqrt().max(f64::MIN_POSITIVE);
        let term_norm = self.squares.sqrt();
        let half = f64::from(tolerance.half_roundings) * half_ulp * term_norm;
        let single = (self.k as f64 / 16.0 + 8.0) * SINGLE_ULP * (norm + term_norm);
        let output = half_ulp * norm + half_subnormal * (c.len() as f64).sqrt();
        errors.rel_frobenius = error_squares.sqrt() / norm;
        errors.rel_frobenius_limit = (output + single + half) / norm;
        errors
    }
}

/// The products of `x`, `[m][k]`, with a packed weight in f64, `[m][n]`.
///
/// # Panics
/// If `x` has not `m` rows of the weight's K.
pub fn matmul_f64(x: &[f16], m: usize, packed: &PackedWeights) -> Vec<f64> {
    assert_eq!(x.len(), m * packed.source_inputs(), "activations of {m} rows");
    Reference::of_packed(x, packed).values
}

/// The weights `[n][k]` of a quantised matrix, element by element in its source's own order: independent of
/// the packer. Each is [`QuantMatrix::value`] rounded to f32, which changes it only where scales are f32 or
/// have a global factor.
pub fn decode(matrix: &QuantMatrix<'_>) -> Vec<f32> {
    let (n, k) = (matrix.n(), matrix.k());
    let mut weights = vec![0.0; n * k];
    let per_thread = n.div_ceil(default_threads()).max(1);
    thread::scope(|scope| {
        for (share, weights) in weights.chunks_mut(per_thread * k).enumerate() {
            scope.spawn(move || {
                for (at, weight) in weights.iter_mut().enumerate() {
                    *weight = matrix.value(at % k, share * per_thread + at / k) as f32;
                }
            });
        }
    });
    weights
}

/// What besides fp32 sums and one rounding of the result a product is allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tolerance {
    /// Roundings to the type of activations that a term may go through before it is added: `r` in the module's derivation.
    pub half_roundings: u32,
}

impl Tolerance {
    /// That of a configuration for `k` inputs.
    pub fn of(config: &Config, k: usize) -> Self {
        let fragments = match (config.scaling, config.kind.scales, config.kind.activation) {
            (Scaling::Promote, ..) | (_, ScaleRow::E5m3, _) => 0,
            (Scaling::Fragment, _, Activation::F16) => 1,
            (Scaling::Fragment, _, Activation::Bf16) => 2,
        };
        let hops = match config.reduction {
            Reduction::F32 => 0,
            // Most hops: every run of 128 inputs in a stripe of its own.
            Reduction::F16InPlace => k.div_ceil(TILE_K) as u32,
        };
        Self { half_roundings: fragments + hops }
    }

    /// For values that were computed from weights rounded once to fp16.
    pub fn with_rounded_weights(self) -> Self {
        Self { half_roundings: self.half_roundings + 1 }
    }
}

/// An element outside its bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outside {
    /// Its row.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// What was computed.
    pub found: f64,
    /// What is right.
    pub exact: f64,
    /// How far apart they may be.
    pub bound: f64,
}

/// How far a product is from the exact one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// The largest difference.
    pub max_abs: f64,
    /// The largest difference as a part of its element's bound: at most 1 if all keep theirs.
    pub max_of_bound: f64,
    /// The norm of the difference over the norm of the exact product.
    pub rel_frobenius: f64,
    /// What that may be.
    pub rel_frobenius_limit: f64,
    /// Elements outside their bound.
    pub num_outside: usize,
    /// The first of them.
    pub first_outside: Option<Outside>,
}

impl Errors {
    /// Whether the product is right.
    pub fn is_ok(&self) -> bool {
        self.num_outside == 0 && self.rel_frobenius <= self.rel_frobenius_limit
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "max abs {:.2e} ({:.0}% of its bound), rel Frobenius {:.2e} (limit {:.2e})",
            self.max_abs,
            100.0 * self.max_of_bound,
            self.rel_frobenius,
            self.rel_frobenius_limit
        )?;
        if let Some(Outside { row, column, found, exact, bound }) = self.first_outside {
            write!(
                f,
                "; {} element{} outside, the first at row {row}, column {column}: {found} for {exact:.6}, \
                 {bound:.2e} allowed",
                self.num_outside,
                if self.num_outside == 1 { "" } else { "s" }
            )?;
        }
        Ok(())
    }
}

/// Up to [`LANES`] rows of activations, input by input; missing rows are zero.
fn lanes<E: Element>(x: &[E], k: usize) -> Vec<[f64; LANES]> {
    let mut lanes = vec![[0.0; LANES]; k];
    for (lane, row) in x.chunks(k).enumerate() {
        for (lanes, x) in lanes.iter_mut().zip(row) {
            lanes[lane] = x.value();
        }
    }
    lanes
}

/// One output of up to [`LANES`] rows: the sum and the sum of absolute terms.
fn multiply(out: &mut [(f64, f64)], x: &[[f64; LANES]], w: &[f32]) {
    let (mut sums, mut magnitudes) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in x.iter().zip(w) {
        let w = f64::from(*w);
        for lane in 0..LANES {
            let term = x[lane] * w;
            sums[lane] += term;
            magnitudes[lane] += term.abs();
        }
    }
    for (out, lane) in out.iter_mut().zip(sums.into_iter().zip(magnitudes)) {
        *out = lane;
    }
}

/// The sum of `(x[i][k] w[j][k])^2` over all i, j, k: per input, a product of two sums.
fn sum_of_squares<E: Element>(x: &[E], weights: &[f32], k: usize) -> f64 {
    let mut of_x = vec![0.0; k];
    for row in x.chunks(k) {
        row.iter().zip(&mut of_x).for_each(|(x, sum)| *sum += x.value().powi(2));
    }
    let mut of_w = vec![0.0; k];
    for row in weights.chunks(k) {
        row.iter().zip(&mut of_w).for_each(|(w, sum)| *sum += f64::from(*w).powi(2));
    }
    of_x.iter().zip(&of_w).map(|(x, w)| x * w).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::f16_from_f64;
    use crate::weights::{Dense, Group, quantize};

    fn product(m: usize, n: usize, k: usize, seed: u64) -> (Vec<f16>, Vec<f32>, Reference) {
        let mut random = Random::new(seed);
        let x = random.activations(m * k);
        let weights: Vec<f32> =
            random.activations(n * k).iter().map(|w| w.to_f32() / 16.0).collect();
        let reference = Reference::new(&x, &weights, k);
        (x, weights, reference)
    }

    /// Sizes around the lanes and the shares of threads, each element by the definition.
    #[test]
    fn products_are_those_of_the_definition() {
        for (m, n, k) in [(0, 3, 5), (1, 1, 1), (7, 5, 33), (8, 2, 16), (19, 67, 40)] {
            let (x, w, reference) = product(m, n, k, 11 + m as u64);
            assert_eq!(reference.values().len(), m * n);
            let mut squares = 0.0;
            for (at, value) in reference.values().iter().enumerate() {
                let (row, column) = (at / n, at % n);
                let terms: Vec<f64> = (0..k)
                    .map(|i| x[row * k + i].to_f64() * f64::from(w[column * k + i]))
                    .collect();
                assert!((value - terms.iter().sum::<f64>()).abs() < 1e-12, "{m} {n} {k} at {at}");
                let magnitude: f64 = terms.iter().map(|term| term.abs()).sum();
                assert!((reference.magnitudes[at] - magnitude).abs() < 1e-12);
                squares += terms.iter().map(|term| term * term).sum::<f64>();
            }
            assert!((reference.squares - squares).abs() <= 1e-12 * squares);
        }
    }

    #[test]
    fn a_matrix_decodes_as_its_packed_form_does() {
        let (n, k) = (37, 256);
        let mut random = Random::new(3);
        let dense: Vec<f32> = (0..n * k).map(|_| random.uniform(-1.0, 1.0) as f32).collect();
        let dense = Dense::F32(bytemuck::cast_slice(&dense));
        let matrix = quantize(dense, n, k, Group::Size(64), 1).expect("finite");
        let packed = PackedWeights::pack(&matrix.view(), 1).expect("packs");
        assert_eq!(decode(&matrix.view()), packed.dequantize());
        let x = random.activations(3 * k);
        assert_eq!(
            matmul_f64(&x, 3, &packed),
            Reference::new(&x, &decode(&matrix.view()), k).values()
        );
    }

    #[test]
    fn the_rounded_product_is_right_and_the_bound_bites() {
        let (_, _, reference) = product(5, 64, 512, 21);
        let exact: Vec<f16> = reference.values().iter().map(|y| f16_from_f64(*y)).collect();
        let errors = reference.compare(&exact, Tolerance::default());
        assert!(errors.is_ok() && errors.max_abs > 0.0, "{errors}");
        assert!(
            errors.rel_frobenius > 1e-4 && errors.rel_frobenius < f16::ROUNDING.half_ulp,
            "{errors}"
        );
        // One element off by 1% of the terms' sum, one NaN, one infinity.
        for wrong in [
            f16_from_f64(reference.values()[77] + 0.01 * reference.magnitudes[77]),
            f16::NAN,
            f16::INFINITY,
        ] {
            let mut c = exact.clone();
            c[77] = wrong;
            let errors = reference.compare(&c, Tolerance::default());
            assert_eq!(errors.num_outside, 1, "{wrong}: {errors}");
            let outside = errors.first_outside.expect("one is");
            assert_eq!((outside.row, outside.column), (1, 13));
            assert!(!errors.is_ok());
        }
    }

    /// Small errors everywhere keep every element's bound at large k; the norm tells them.
    #[test]
    fn the_norm_bites_where_bounds_are_wide() {
        let (_, _, reference) = product(4, 32, 8192, 5);
        let c: Vec<f16> = reference.values().iter().map(|y| f16_from_f64(y * 1.003)).collect();
        let errors = reference.compare(&c, Tolerance::default());
        assert!(errors.num_outside == 0 && !errors.is_ok(), "{errors}");
    }

    #[test]
    fn results_beyond_fp16_must_be_infinities_of_the_right_sign() {
        let x = [f16_from_f64(60000.0), f16_from_f64(60000.0)];
        let reference = Reference::new(&x, &[1.0, 1.0, -1.0, -1.0], 2);
        let tolerance = Tolerance::default();
        assert!(reference.compare(&[f16::INFINITY, f16::NEG_INFINITY], tolerance).is_ok());
        assert_eq!(reference.compare(&[f16::INFINITY; 2], tolerance).num_outside, 1);
        assert_eq!(reference.compare(&[f16::MAX, f16::NEG_INFINITY], tolerance).num_outside, 1);
    }

    #[test]
    fn activations_repeat_and_are_never_zero() {
        let values = Random::new(9).activations(10_000);
        assert_eq!(values, Random::new(9).activations(10_000));
        assert_ne!(values, Random::new(10).activations(10_000));
        let range = 1.0 / 256.0..=1.0;
        assert!(values.iter().all(|value| range.contains(&value.to_f64().abs())));
        let mean = values.iter().map(|value| value.to_f64()).sum::<f64>() / 1e4;
        assert!(mean.abs() < 0.03, "{mean}");
    }
}
