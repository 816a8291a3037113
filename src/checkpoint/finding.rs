//! What is odd about a checkpoint without making it unreadable, and the check of its scales.

use std::fmt;

use super::Error;
use crate::weights::{QuantMatrix, SCALE_BLOCK, ScaleOrder};

/// Something a careful user wants to know.
#[derive(Clone, Debug, PartialEq, PartialOrd)]
#[non_exhaustive]
pub enum Finding {
    /// A safetensors file that the shard index does not name.
    StrayFile {
        /// The file's name.
        file: String,
    },
    /// A tensor that belongs to no quantised layer and is no ordinary weight or bias.
    UnusedTensor {
        /// The tensor.
        tensor: String,
    },
    /// Zeros as the other version of the GPTQ format stores them; both mean the symmetric zero.
    ZeroLabel {
        /// The tensor.
        tensor: String,
        /// The checkpoint format by its configuration.
        label: &'static str,
        /// The stored zero.
        found: u8,
    },
    /// A scale out of the ordinary.
    Scale {
        /// The tensor.
        tensor: String,
        /// Group, the logical row of the scales.
        group_idx: usize,
        /// Output column.
        column: usize,
        /// What is out of the ordinary.
        fault: ScaleFault,
        /// The value.
        value: f32,
    },
}

/// What is out of the ordinary about a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScaleFault {
    /// NaN: every weight of the group is NaN.
    NotANumber,
    /// Infinite: every weight of the group is infinite or NaN.
    Infinite,
    /// Zero: every weight of the group is zero.
    Zero,
    /// Below the smallest normal number of its type: few significant bits are left.
    Subnormal,
}

impl fmt::Display for ScaleFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotANumber => "NaN",
            Self::Infinite => "infinite",
            Self::Zero => "zero",
            Self::Subnormal => "subnormal",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StrayFile { file } => {
                write!(f, "{file} is not named by the shard index and was left alone")
            }
            Self::UnusedTensor { tensor } => {
                write!(f, "tensor {tensor} belongs to no quantised layer and is not used")
            }
            Self::ZeroLabel { tensor, label, found } => write!(
                f,
                "tensor {tensor} stores {found} for every zero, which is not how {label} is \
                 written; read as symmetric"
            ),
            Self::Scale { tensor, group_idx, column, fault, value } => write!(
                f,
                "tensor {tensor}, group {group_idx}, column {column}: scale {value:e} is {fault}"
            ),
        }
    }
}

/// Every scale that is NaN, infinite, zero or subnormal. One that several outputs share is reported
/// for the first of them.
pub(super) fn odd_scales(tensor: &str, matrix: &QuantMatrix<'_>) -> Vec<Finding> {
    let scales = matrix.scales();
    let shared_by = match scales.order {
        ScaleOrder::Rows | ScaleOrder::Columns | ScaleOrder::Marlin => 1,
        ScaleOrder::Blocks => SCALE_BLOCK,
        ScaleOrder::PerTensor => matrix.n(),
    };
    let mut findings = Vec::new();
    for group_idx in 0..matrix.num_groups() {
        for column in (0..matrix.n()).step_by(shared_by) {
            let value = matrix.scale(group_idx, column);
            let fault = if value.is_nan() {
                ScaleFault::NotANumber
            } else if value.is_infinite() {
                ScaleFault::Infinite
            } else if value == 0.0 {
                ScaleFault::Zero
            } else if value.abs() < scales.element.min_normal() {
                ScaleFault::Subnormal
            } else {
                continue;
            };
            findings.push(Finding::Scale {
                tensor: tensor.to_owned(),
                group_idx,
                column,
                fault,
                value,
            });
        }
    }
    findings
}

/// Refuses a matrix with scales that are NaN or infinite.
pub(super) fn refuse_bad_scales(tensor: &str, matrix: &QuantMatrix<'_>) -> Result<(), Error> {
    // One pass over the bits finds whether there is any; only then are they located.
    if matrix.scales().are_finite() {
        return Ok(());
    }
    let mut bad = odd_scales(tensor, matrix).into_iter().filter_map(|finding| match finding {
        Finding::Scale { group_idx, column, value, .. } if !value.is_finite() => {
            Some((group_idx, column, value))
        }
        _ => None,
    });
    let Some((group_idx, column, value)) = bad.next() else { return Ok(()) };
    let (tensor, count) = (tensor.to_owned(), 1 + bad.count());
    Err(Error::BadScales { tensor, group_idx, column, value, count })
}
