//! What can be wrong with a weight: sizes, groups, codes and values.

use super::{Group, ScaleOrder};

/// A refusal of this room. Every message names the rule and the numbers that broke it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The group size is none that the packed layout and the kernels know.
    #[error("group size {raw} is not supported: use -1 (one scale per column), 16, 32, 64 or 128")]
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

    /// The order of the codes is one of 4-bit codes only.
    #[error("{order} holds 4-bit codes; {format} has {bits} bits")]
    CodeBits {
        /// The name of the order.
        order: &'static str,
        /// The weight type's name.
        format: &'static str,
        /// Its bits.
        bits: u32,
    },

    /// The order of the zeros is one of 4-bit zeros only.
    #[error("{order} holds 4-bit zeros, the codes have {bits} bits")]
    ZeroBits {
        /// The name of the order.
        order: &'static str,
        /// Bits of a code.
        bits: u32,
    },

    /// Zeros are given to a type that stores none, or the other way round.
    #[error(
        "{format} {}", if *.found {
            "has a zero of its own: it takes no stored zeros"
        } else {
            "needs stored zeros, one for each scale"
        }
    )]
    ZeroRule {
        /// The weight type's name.
        format: &'static str,
        /// Whether zeros were given.
        found: bool,
    },

    /// A zero is outside the range of the codes.
    #[error("the zero at byte {at} is {byte:#04x}, which is outside the range of {bits}-bit codes")]
    ZeroRange {
        /// The byte.
        byte: u8,
        /// Where it stands.
        at: usize,
        /// Bits of a code.
        bits: u32,
    },

    /// A group index points outside the scales.
    #[error("input {input}: group index {value} is outside 0..{num_groups}")]
    GroupIndex {
        /// The input.
        input: usize,
        /// The index.
        value: i32,
        /// Groups that the scales have.
        num_groups: usize,
    },

    /// The order of the scales belongs to another group size.
    #[error(
        "scales in the order {} do not go with group size {group}: blocks are of 128 inputs, \
         a single scale has one group",
        order.name()
    )]
    ScaleGroup {
        /// The order.
        order: ScaleOrder,
        /// The group rule.
        group: Group,
    },

    /// The global factor is no number that weights could be multiplied by.
    #[error("the global scale comes to {value}: it must be finite, and neither zero nor subnormal")]
    GlobalScale {
        /// The factor.
        value: f32,
    },

    /// A scale does not go with the others, or not with the form that the packed layout gives it.
    #[error("the scale of group {group_idx} and output {n} is {value}: {rule}")]
    ScaleRange {
        /// The group.
        group_idx: usize,
        /// The output.
        n: usize,
        /// The scale.
        value: f32,
        /// What it does not fit.
        rule: &'static str,
    },

    /// The weight is understood, but the packed layout or the kernels cannot take it.
    #[error("{what} cannot be packed: {rule}")]
    Unpackable {
        /// The part that cannot be packed.
        what: String,
        /// What can be packed.
        rule: &'static str,
    },

    /// The order of a packed weight's inputs is none.
    #[error("the order of the packed inputs is none: {reason}")]
    Order {
        /// What is wrong with it.
        reason: String,
    },

    /// A packed weight cannot be cut evenly for so many ranks.
    #[error(
        "{size} {axis} cannot be cut into {ranks} equal parts of whole runs of {unit}; the numbers of ranks that do are \
         {}",
        list(possible)
    )]
    Ranks {
        /// What is cut: outputs, inputs, or packed inputs of an order of their own.
        axis: &'static str,
        /// How many there are.
        size: usize,
        /// What parts are made of.
        unit: usize,
        /// The ranks that were asked for.
        ranks: usize,
        /// The numbers of ranks that are possible, up to 64.
        possible: Vec<usize>,
    },

    /// There is no such rank.
    #[error("rank {rank} of {ranks}: ranks are numbered from 0 to one less than their number")]
    Rank {
        /// The rank that was asked for.
        rank: usize,
        /// The number of ranks.
        ranks: usize,
    },

    /// A part of a packed weight that does not consist of whole chunks.
    #[error(
        "{axis} {start} to {end} of {size} are no part of a packed weight: parts start and end at multiples of {unit}, or \
         at the end, and are not empty"
    )]
    Part {
        /// What is cut: outputs or packed inputs.
        axis: &'static str,
        /// The first.
        start: usize,
        /// One past the last.
        end: usize,
        /// How many there are.
        size: usize,
        /// What parts are made of.
        unit: usize,
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

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

fn rows_text(scale_rows: Option<usize>) -> String {
    scale_rows.map_or_else(String::new, |rows| format!("; {rows} rows of scales"))
}
