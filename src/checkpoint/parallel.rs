//! Names that repeat through a model, and into how many parts a layer can be cut for tensor
//! parallelism.

use super::LayerInfo;
use crate::weights::Group;

/// More ranks than this are not listed.
const MAX_RANKS: usize = 64;

/// Ends of the names of layers that are cut along their inputs, since the layers before them are cut
/// along their outputs.
const BY_INPUTS: [&str; 8] =
    ["o_proj", "down_proj", "out_proj", "c_proj", "wo", "w2", "fc2", "dense_4h_to_h"];

/// A name with its numeric components replaced by `*`: where a layer stands in every block alike.
///
/// ```
/// use makaira::checkpoint::place;
/// assert_eq!(place("model.layers.11.mlp.up_proj"), "model.layers.*.mlp.up_proj");
/// ```
pub fn place(name: &str) -> String {
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(&part) { "*" } else { part });
    parts.collect::<Vec<_>>().join(".")
}

impl LayerInfo {
    /// Numbers of ranks, up to 64, among which the outputs can be divided evenly.
    pub fn ranks_by_outputs(&self) -> Vec<usize> {
        (1..=MAX_RANKS).filter(|ranks| self.n.is_multiple_of(*ranks)).collect()
    }

    /// Numbers of ranks, up to 64, among which the inputs can be divided evenly without cutting a
    /// group. With `act_order` every rank has the scales of all groups, and none is cut.
    pub fn ranks_by_inputs(&self, act_order: bool) -> Vec<usize> {
        let whole_groups = |ranks: usize| match self.group {
            Group::Size(size) if !act_order => (self.k / ranks).is_multiple_of(size as usize),
            _ => true,
        };
        let even = |ranks: &usize| self.k.is_multiple_of(*ranks) && whole_groups(*ranks);
        (1..=MAX_RANKS).filter(even).collect()
    }

    /// Whether models of the usual make cut this layer along its inputs, by its name.
    pub fn is_cut_by_inputs(&self) -> bool {
        let last = self.stem().rsplit('.').next().unwrap_or_default();
        BY_INPUTS.contains(&last)
    }
}
