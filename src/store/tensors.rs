//! The tensors of a store: how they are called, and where they may lie.

use crate::checkpoint::Dtype;
use crate::weights::InputOrder;

/// Bytes that every tensor's place in its file is a multiple of.
pub const ALIGNMENT: usize = 256;

/// Behind a layer's name: the packed weight, bytes.
pub(super) const PACKED: &str = ".packed";
/// Behind a layer's name: the source's input of each packed one.
pub(super) const INPUTS: &str = ".packed_inputs";
/// Behind a layer's name: the source's group of each packed one.
pub(super) const GROUPS: &str = ".packed_groups";
/// Before a number: bytes that keep the next tensor in its place. A safetensors file must not have holes.
pub(super) const FILLER: &str = "makaira.filler.";

/// The numbers of an order, little endian: inputs, groups.
pub(super) fn order_bytes(order: &InputOrder) -> [Vec<u8>; 2] {
    [order.inputs(), order.groups()]
        .map(|words| words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

/// Bytes of a tensor's shape, of a type of whole bytes.
pub(super) fn shape_bytes(dtype: Dtype, shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product::<u64>() * dtype.bitsize() as u64 / 8
}
