//! Device memory of one shape: rotated copies of the weight, activations, output between canaries.
//!
//! The output is filled with one NaN pattern before a launch, and so is a margin on either side. Afterwards no
//! element of the product may be NaN and every element of the margins must still have the pattern.

use std::sync::Arc;

use makaira::backend::{Backend, DevicePtr, Error};
use makaira::gemm::{Gemm, Matrix, Weight};
use makaira::weights::{Activation, PackedWeights};

use super::reference::Reference;
use super::timer::MAX_LAUNCHES;

/// A NaN in fp16 and in bf16 that no arithmetic gives.
pub const POISON: u16 = 0x7fda;
/// Elements before and behind the output.
const CANARIES: usize = 1 << 15;
/// Bytes that the copies of a weight take at least, so that none is left in L2 when its turn comes.
const ROTATED_BYTES: usize = 560_000_000;

/// The operands of one shape on a device.
pub struct Operands {
    backend: Arc<dyn Backend>,
    /// Copies of one weight.
    pub weights: Vec<Weight>,
    n: usize,
    k: usize,
    a: DevicePtr,
    c: DevicePtr,
}

/// A product that was found right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checked {
    /// Its relative error.
    pub error: f64,
    /// A hash of all its bits.
    pub bits: u64,
}

impl Operands {
    /// Uploads a weight, as often as rotation demands or once, and activations of some rows, as bits.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn new(
        gemm: &Gemm,
        packed: &PackedWeights,
        activation: Activation,
        a: &[u16],
        rotate: bool,
    ) -> Result<Self, makaira::gemm::Error> {
        let backend = gemm.backend().clone();
        let (n, k) = (packed.layout().n, packed.layout().k);
        let num_copies = if rotate {
            ROTATED_BYTES.div_ceil(packed.bytes().len()).clamp(2, MAX_LAUNCHES)
        } else {
            1
        };
        let upload = |_| Ok(gemm.upload(packed)?.with_activation(activation));
        let weights = (0..num_copies).map(upload).collect::<Result<_, makaira::gemm::Error>>()?;
        let c_elements = a.len() / k * n + 2 * CANARIES;
        let operands = Self {
            weights,
            n,
            k,
            a: backend.alloc(2 * a.len() as u64)?,
            c: backend.alloc(2 * c_elements as u64)?,
            backend,
        };
        operands.backend.upload(operands.a, bytemuck::cast_slice(a))?;
        Ok(operands)
    }

    /// The copy for launch number `idx`.
    pub fn weight(&self, idx: usize) -> &Weight {
        &self.weights[idx % self.weights.len()]
    }

    /// The activations.
    pub fn a(&self) -> Matrix {
        Matrix { ptr: self.a, stride: self.k as u64 }
    }

    /// The output.
    pub fn c(&self) -> Matrix {
        Matrix { ptr: self.c.offset(2 * CANARIES as u64), stride: self.n as u64 }
    }

    /// Fills `m` rows of output and the margins with the pattern.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn poison(&self, m: usize) -> Result<(), Error> {
        let pattern = vec![POISON; m * self.n + 2 * CANARIES];
        self.backend.upload(self.c, bytemuck::cast_slice(&pattern))
    }

    /// Looks at `m` rows of output after [`Operands::poison`]: right, or what is wrong with them beyond
    /// rounding.
    ///
    /// # Errors
    /// Those of the download.
    pub fn check(
        &self,
        m: usize,
        reference: &Reference,
        limit: f64,
    ) -> Result<Result<Checked, String>, Error> {
        let mut c = vec![0u16; m * self.n + 2 * CANARIES];
        self.backend.download(self.c, bytemuck::cast_slice_mut(&mut c))?;
        Ok(verdict(&c, self.n, reference, limit))
    }
}

/// A hash of the bits of some halves (FNV-1a over four at a time).
pub fn hash(halves: &[u16]) -> u64 {
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    let (fours, rest) = halves.as_chunks::<4>();
    let word =
        |four: &[u16; 4]| four.iter().rev().fold(0u64, |word, half| word << 16 | u64::from(*half));
    let hash = fours.iter().map(word).fold(0xcbf2_9ce4_8422_2325, step);
    rest.iter().map(|half| u64::from(*half)).fold(hash, step)
}

/// The judgement on a product between its margins.
fn verdict(c: &[u16], n: usize, reference: &Reference, limit: f64) -> Result<Checked, String> {
    let product = CANARIES..c.len() - CANARIES;
    let (before, behind) = (&c[..product.start], &c[product.end..]);
    let margins = (-(CANARIES as i64)..).zip(before).chain((product.len() as i64..).zip(behind));
    if let Some((at, bits)) = margins.into_iter().find(|(_, bits)| **bits != POISON) {
        return Err(format!("element {at} of {} outputs was written: {bits:#06x}", product.len()));
    }
    let c = &c[product];
    // Every NaN is above infinity.
    let infinity = match reference.activation() {
        Activation::F16 => 0x7c00,
        Activation::Bf16 => 0x7f80,
    };
    let is_nan = |bits: &u16| bits & 0x7fff > infinity;
    let num_nan: usize = c.iter().map(|bits| usize::from(is_nan(bits))).sum();
    if num_nan > 0 {
        let first = c.iter().position(is_nan).expect("there are some");
        let kind = if c[first] == POISON { "not written" } else { "NaN" };
        let (row, column) = (first / n, first % n);
        return Err(format!("{num_nan} NaN; the first, ({row}, {column}), is {kind}"));
    }
    let error = reference.relative_error(c, n);
    if error < limit {
        Ok(Checked { error, bits: hash(c) })
    } else {
        Err(format!("relative error {error:.2e}, at most {limit:.0e} is rounding"))
    }
}

impl Drop for Operands {
    fn drop(&mut self) {
        for ptr in [self.a, self.c] {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing operands: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use makaira::weights::Group;

    use super::super::layer::{Layer, Shape, number, random_activations, round};
    use super::*;
    use crate::problem::WeightType;

    #[test]
    fn a_wrong_unwritten_or_misplaced_element_is_noticed() {
        for (activation, limit) in [(Activation::F16, 5e-4), (Activation::Bf16, 4e-3)] {
            let shape = Shape { name: String::new(), n: 64, k: 128 };
            let layer = Layer::random(&shape, WeightType::U4B8, Group::PerColumn, 3);
            let a = random_activations(activation, 2, 128, 4);
            let matrix = layer.matrix().expect("legal");
            let reference = Reference::new(&matrix, activation, &a, &[2], 5);
            let dense = layer.pack().expect("packs").dequantize();
            let dot = |i: usize| {
                let pairs = a[i / 64 * 128..][..128].iter().zip(&dense[i % 64 * 128..][..128]);
                pairs.map(|(a, w)| number(activation, *a) * f64::from(*w)).sum()
            };
            let mut c = vec![POISON; 2 * 64 + 2 * CANARIES];
            for i in 0..2 * 64 {
                c[CANARIES + i] = round(activation, dot(i));
            }
            let of = |c: &[u16]| verdict(c, 64, &reference, limit);
            let right = of(&c).expect("right");
            let mut other = c.clone();
            other[CANARIES + 70] ^= 1;
            assert_ne!(of(&other).expect("one bit is rounding").bits, right.bits);
            let with = |idx: usize, bits: u16| {
                let mut c = c.clone();
                c[idx] = bits;
                of(&c).expect_err("wrong")
            };
            assert!(with(CANARIES - 1, 0).starts_with("element -1 of"));
            assert!(with(CANARIES + 2 * 64, 0).starts_with("element 128 of"));
            assert!(with(CANARIES + 70, POISON).contains("(1, 6), is not written"));
            assert!(with(CANARIES + 70, 0x7fff).contains("(1, 6), is NaN"));
            let wrong = with(CANARIES + 70, round(activation, 90.0));
            assert!(wrong.starts_with("relative error"), "{wrong}");
        }
    }
}
