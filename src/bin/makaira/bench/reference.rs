//! What a product must give, in f64, for a sample of its columns and rows.
//!
//! The reference reads the unpacked source: a mistake of the packer shows as a wrong product. Of a
//! small batch all rows are compared; of a large one the first, the last and one from each of equal ranges,
//! so that every tile of rows is met. Values of all batches of a shape are computed once.

use makaira::weights::{Activation, QuantMatrix, default_threads};

use super::layer::{Random, number};

/// Columns of the product that are compared with the reference.
const SAMPLED_COLUMNS: usize = 192;
/// Rows of the product that are compared, at most.
const SAMPLED_ROWS: usize = 128;

/// A sample of a product.
pub struct Reference {
    /// The type of activations and products.
    activation: Activation,
    seed: u64,
    /// Columns in ascending order.
    columns: Vec<usize>,
    /// Rows in ascending order: those of every batch.
    rows: Vec<usize>,
    /// `[column][row]`.
    values: Vec<Vec<f64>>,
}

/// One number from each of `count` equal ranges of `0..len`; all of them if there are no more.
pub fn sample(len: usize, count: usize, random: &mut Random) -> Vec<usize> {
    let count = count.min(len);
    let start = |idx| idx * len / count;
    let pick = |idx| start(idx) + random.next() as usize % (start(idx + 1) - start(idx));
    (0..count).map(pick).collect()
}

/// The rows of a batch of `m` that are compared.
fn sampled_rows(m: usize, seed: u64) -> Vec<usize> {
    let mut rows = sample(m, SAMPLED_ROWS, &mut Random(seed ^ m as u64));
    if let Some(first) = rows.first_mut() {
        *first = 0;
    }
    if let Some(last) = rows.last_mut() {
        *last = m - 1;
    }
    rows
}

/// The product of two vectors. Eight sums, so that they can be computed side by side.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

impl Reference {
    /// Products of the first rows of `a` (`[rows][K]`, bits of `activation`) with the layer, for batches of each of
    /// `ms` rows.
    pub fn new(
        matrix: &QuantMatrix<'_>,
        activation: Activation,
        a: &[u16],
        ms: &[u64],
        seed: u64,
    ) -> Self {
        let (n, k) = (matrix.n(), matrix.k());
        let columns = sample(n, SAMPLED_COLUMNS, &mut Random(seed));
        let mut rows: Vec<usize> =
            ms.iter().flat_map(|m| sampled_rows(*m as usize, seed)).collect();
        rows.sort_unstable();
        rows.dedup();
        let value = |bits: &u16| number(activation, *bits);
        let exact = |row: &usize| a[row * k..][..k].iter().map(value).collect();
        let exact: Vec<Vec<f64>> = rows.iter().map(exact).collect();
        let mut values = vec![Vec::new(); columns.len()];
        let per_thread = columns.len().div_ceil(default_threads());
        std::thread::scope(|scope| {
            for (columns, values) in columns.chunks(per_thread).zip(values.chunks_mut(per_thread)) {
                let exact = &exact;
                scope.spawn(move || {
                    for (n, values) in columns.iter().zip(values) {
                        let weights: Vec<f64> = (0..k).map(|k| matrix.value(k, *n)).collect();
                        *values = exact.iter().map(|row| dot(row, &weights)).collect();
                    }
                });
            }
        });
        Self { activation, seed, columns, rows, values }
    }

    /// The type of activations and products.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// ‖c − reference‖ / ‖reference‖ over the sample of `c`, `[m][N]` as bits. NaN in the sample gives NaN.
    ///
    /// # Panics
    /// If the reference was not made for a batch of `m` rows.
    pub fn relative_error(&self, c: &[u16], n: usize) -> f64 {
        let (mut error, mut norm) = (0.0, 0.0);
        for row in sampled_rows(c.len() / n, self.seed) {
            let idx = self.rows.binary_search(&row).expect("the batch is one of the reference's");
            for (column, values) in self.columns.iter().zip(&self.values) {
                let c = number(self.activation, c[row * n + column]);
                error += (c - values[idx]).powi(2);
                norm += values[idx].powi(2);
            }
        }
        (error / norm).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use makaira::weights::Group;

    use super::super::layer::{Layer, Shape, random_activations, round};
    use super::*;
    use crate::problem::WeightType;

    const NAN: u16 = 0x7fff;

    #[test]
    fn the_reference_is_the_product_with_the_packed_layer() {
        for (n, k, group, weight, activation, half_ulp) in [
            (192, 256, 128, "u4b8", Activation::F16, 4e-4),
            (70, 136, -1, "u8", Activation::Bf16, 3.2e-3),
            (64, 37, -1, "e4m3", Activation::F16, 4e-4),
            (64, 64, 16, "nvfp4", Activation::Bf16, 3.2e-3),
        ] {
            let shape = Shape { name: String::new(), n, k };
            let group = Group::new(k, group).expect("a legal group");
            let layer = Layer::random(&shape, weight.parse().expect("a type"), group, 5);
            let dense = layer.pack().expect("packs").dequantize();
            let a = random_activations(activation, 3, k, 9);
            let matrix = layer.matrix().expect("legal");
            let reference = Reference::new(&matrix, activation, &a, &[3], 1);
            assert_eq!(reference.columns.len(), n.min(SAMPLED_COLUMNS));
            let dot = |i: usize| {
                let pairs = a[i / n * k..][..k].iter().zip(&dense[i % n * k..][..k]);
                pairs.map(|(a, w)| number(activation, *a) * f64::from(*w)).sum::<f64>()
            };
            let mut c: Vec<u16> = (0..3 * n).map(|i| round(activation, dot(i))).collect();
            let error = reference.relative_error(&c, n);
            assert!(error > 0.0 && error < half_ulp, "{weight}: {error}");
            c[n + reference.columns[7]] = NAN;
            assert!(reference.relative_error(&c, n).is_nan());
        }
    }

    #[test]
    fn a_large_batch_is_sampled_in_every_range_and_at_both_ends() {
        assert_eq!(sampled_rows(100, 7), (0..100).collect::<Vec<_>>());
        let rows = sampled_rows(4096, 7);
        assert_eq!((rows.len(), rows[0], rows[127]), (SAMPLED_ROWS, 0, 4095));
        for (idx, row) in rows.iter().enumerate() {
            assert_eq!(row / 32, idx, "one of every 32");
        }
        assert_ne!(rows, sampled_rows(4096, 8));
    }

    #[test]
    fn every_batch_has_its_own_rows_of_one_reference() {
        let (n, k, activation) = (64, 128, Activation::F16);
        let shape = Shape { name: String::new(), n, k };
        let layer = Layer::random(&shape, WeightType::U4B8, Group::Size(128), 2);
        let matrix = layer.matrix().expect("legal");
        let a = random_activations(activation, 300, k, 3);
        let reference = Reference::new(&matrix, activation, &a, &[2, 300, 200], 4);
        let full = Reference::new(&matrix, activation, &a, &[128], 4);
        assert_eq!(full.rows.len(), 128);
        let column = |n| (0..k).map(|k| matrix.value(k, n)).collect();
        let exact: Vec<Vec<f64>> = (0..n).map(column).collect();
        for m in [2, 200, 300] {
            let value = |i: usize| {
                let row = a[i / n * k..][..k].iter().map(|a| number(activation, *a));
                round(activation, dot(&row.collect::<Vec<f64>>(), &exact[i % n]))
            };
            let mut c: Vec<u16> = (0..m * n).map(value).collect();
            assert!(reference.relative_error(&c, n) < 4e-4, "{m}");
            c[(m - 1) * n..].fill(0);
            assert!(reference.relative_error(&c, n) > 1e-2, "the last row of {m}");
        }
    }
}
