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
    /// A configuration of a quantisation, and no quantised layer.
    NoLayers {
        /// The `quant_method`.
        method: String,
    },
    /// A layer that most modules of its kind have and this one has not.
    MissingLayer {
        /// The absent layer.
        layer: String,
        /// Modules that have it.
        present: usize,
        /// Modules of the kind.
        modules: usize,
    },
    /// A block of the model without any quantised layer.
    MissingBlock {
        /// The block.
        block: usize,
        /// Blocks of the model by its configuration.
        num_blocks: usize,
    },
    /// A plain weight where its likes are quantised, which the configuration does not leave out.
    LeftPlain {
        /// The tensor.
        tensor: String,
    },
    /// A quantised layer that the configuration leaves out.
    Ignored {
        /// The layer.
        layer: String,
    },
    /// A layer of another format than the configuration says; the tensors decide.
    FormatLabel {
        /// The layer.
        layer: String,
        /// The format by the configuration.
        label: String,
        /// The format of the tensors.
        found: &'static str,
    },
    /// The checkpoint was made for quantised activations; they stay in 16 bits here.
    Activations {
        /// The group of the configuration.
        group: String,
        /// What it says.
        scheme: String,
    },
    /// A pattern of the configuration that could not be understood; it matches nothing.
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why.
        reason: String,
    },
    /// Zeros of 0, which version 1 of the GPTQ format stores by borrowing from their neighbours.
    ZeroBorrow {
        /// The tensor.
        tensor: String,
        /// Words with such a zero.
        count: usize,
    },
    /// Zeros all as the other version of the GPTQ format stores the symmetric one.
    ZeroLabel {
        /// The tensor.
        tensor: String,
        /// The checkpoint format by its configuration.
        label: &'static str,
        /// The stored zero.
        found: u8,
    },
    /// Weights that are NaN, of a float type.
    NotANumber {
        /// The layer.
        layer: String,
        /// Output of the first.
        row: usize,
        /// Input of the first.
        column: usize,
        /// How many there are.
        count: usize,
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

impl Finding {
    /// The kind of the finding, as programs are told it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::StrayFile { .. } => "stray-file",
            Self::UnusedTensor { .. } => "unused-tensor",
            Self::NoLayers { .. } => "no-layers",
            Self::MissingLayer { .. } => "missing-layer",
            Self::MissingBlock { .. } => "missing-block",
            Self::LeftPlain { .. } => "left-plain",
            Self::Ignored { .. } => "ignored",
            Self::FormatLabel { .. } => "format-label",
            Self::Activations { .. } => "activations",
            Self::Pattern { .. } => "pattern",
            Self::ZeroBorrow { .. } => "zero-borrow",
            Self::ZeroLabel { .. } => "zero-label",
            Self::NotANumber { .. } => "not-a-number",
            Self::Scale { .. } => "scale",
        }
    }

    /// Whether it puts the weights in doubt. What does not is a property of the checkpoint that its
    /// user should know.
    pub fn is_doubt(&self) -> bool {
        !matches!(self, Self::Activations { .. })
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
                "tensor {tensor} stores {found} for every zero, which is how the other version of \
                 {label} stores a symmetric one; with sym true it is read as that"
            ),
            Self::NoLayers { method } => {
                write!(f, "the configuration says quant_method {method}, and no layer is quantised")
            }
            Self::MissingLayer { layer, present, modules } => write!(
                f,
                "layer {layer} is missing: {present} of {modules} modules like its own have one"
            ),
            Self::MissingBlock { block, num_blocks } => {
                write!(f, "block {block} of {num_blocks} has no quantised layer")
            }
            Self::LeftPlain { tensor } => write!(
                f,
                "tensor {tensor} is not quantised, though its likes are and no setting leaves it \
                 out"
            ),
            Self::Ignored { layer } => {
                write!(f, "layer {layer} is quantised, though the configuration leaves it out")
            }
            Self::FormatLabel { layer, label, found } => {
                write!(f, "layer {layer} is {found}, though the configuration says {label}")
            }
            Self::Activations { group, scheme } => {
                write!(f, "{group} asks for quantised activations ({scheme}); they stay in 16 bits")
            }
            Self::Pattern { pattern, reason } => {
                let reason = reason.lines().last().unwrap_or_default();
                write!(f, "pattern {pattern} is not understood and matches nothing: {reason}")
            }
            Self::ZeroBorrow { tensor, count } => write!(
                f,
                "tensor {tensor} has {count} words with a zero of 0, which version 1 stores by \
                 borrowing from its neighbours: tools disagree on how they are read"
            ),
            Self::NotANumber { layer, row, column, count } => write!(
                f,
                "layer {layer}: {count} weights are NaN, the first is that of output {row}, input \
                 {column}"
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

/// The weights of a matrix whose codes are NaN: only some of fp8's are.
pub(super) fn nan_codes(layer: &str, matrix: &QuantMatrix<'_>) -> Option<Finding> {
    let format = matrix.format();
    let is_nan: Vec<bool> =
        (0..format.num_codes()).map(|code| format.decode(code as u8).is_nan()).collect();
    if !is_nan.contains(&true) {
        return None;
    }
    let k = matrix.k();
    let places = (0..matrix.n() * k).map(|at| (at / k, at % k));
    let mut nan = places.filter(|&(n, k)| is_nan[usize::from(matrix.code(k, n))]);
    let (row, column) = nan.next()?;
    Some(Finding::NotANumber { layer: layer.to_owned(), row, column, count: 1 + nan.count() })
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
