//! What can be wrong with a weight: sizes, groups, codes and values.

use super::Group;

/// A refusal of this room. Every message names the rule and the numbers that broke it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The group size is none that the packed layout and the kernels know.
    #[error("group size {raw} is not supported: use -1 (one scale per column), 32, 64 or 128")]
    GroupSize {
        /// The size as it was given.
        raw: i64,
    },

    /// The last group would be short.
    #[error(
        "K = {k} is not a multiple of the group size {group} ({} whole groups and {} inputs left \
         over{}): quantise with a group size that divides K, or with -1",
        k / group, k % group, rows_text(*.scale_rows)
    )]
    GroupRemainder {
        /// Inputs of the layer.
        k: usize,
        /// The group size as it was given.
        group: usize,
        /// Rows of the scale tensor, where one was at hand.
        scale_rows: Option<usize>,
    },

    /// The scale tensor has not one row per group.
    #[error("K = {k} with group size {group} needs {expected} rows of scales, found {found}")]
    ScaleRows {
        /// Inputs of the layer.
        k: usize,
        /// The group rule.
        group: Group,
        /// Number of groups.
        expected: usize,
        /// Rows of the tensor.
        found: usize,
    },

    /// A source has the wrong number of bytes.
    #[error("{what} of a {n} x {k} (N x K) matrix take {expected} bytes, found {found}")]
    SourceBytes {
        /// Which source.
        what: &'static str,
        /// Outputs of the layer.
        n: usize,
        /// Inputs of the layer.
        k: usize,
        /// Bytes that the shape demands.
        expected: usize,
        /// Bytes given.
        found: usize,
    },

    /// A code needs more bits than its type has.
    #[error(
        "code {code} at byte {at} of the codes does not fit {format}, whose codes are below {limit}"
    )]
    CodeRange {
        /// The code.
        code: u8,
        /// Where it stands.
        at: usize,
        /// The weight type's name.
        format: &'static str,
        /// One more than the largest code.
        limit: usize,
    },

    /// A size is zero, or so large that byte counts overflow.
    #[error(
        "a weight of N = {n} outputs and K = {k} inputs cannot be packed: both sizes must be at \
         least 1 and N x K below 2^48"
    )]
    Size {
        /// Outputs of the layer.
        n: usize,
        /// Inputs of the layer.
        k: usize,
    },

    /// The source or target order cannot hold the shape.
    #[error(
        "{order} holds only N a multiple of {n_multiple} and K a multiple of {k_multiple}, found \
         N = {n}, K = {k}"
    )]
    OrderShape {
        /// The name of the order.
        order: &'static str,
        /// N must be a multiple of this.
        n_multiple: usize,
        /// K must be a multiple of this.
        k_multiple: usize,
        /// Outputs of the layer.
        n: usize,
        /// Inputs of the layer.
        k: usize,
    },

    /// The packed layout holds no codes of this type.
    #[error("the packed layout, version 1, holds 4-bit codes; {format} has {bits} bits")]
    FormatBits {
        /// The weight type's name.
        format: &'static str,
        /// Its bits.
        bits: u32,
    },

    /// The quantiser met a value that has no nearest code.
    #[error(
        "the weight at row {row} (output), column {column} (input) is {value}: only finite weights \
         whose scale fits fp16 can be quantised"
    )]
    NotFinite {
        /// Output index.
        row: usize,
        /// Input index.
        column: usize,
        /// The value found.
        value: f32,
    },
}

fn rows_text(scale_rows: Option<usize>) -> String {
    scale_rows.map_or_else(String::new, |rows| format!("; {rows} rows of scales"))
}
