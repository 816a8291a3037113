//! The order of a packed weight's inputs where the source gives every input a group of its own choice (act-order).
//!
//! Packed inputs are sorted by group, those of a group in the source's order, so that each group's scales serve a run of
//! inputs again. A group is filled up to whole packed groups with inputs that do not exist: whoever multiplies gathers
//! the activations in this order and takes zeros for those. Any indices are taken: a part of a layer's inputs (a shard of
//! a row-parallel layer) has groups of any size, and refers to the scales of the whole.

use std::ops::Range;

use super::{Error, Group, QuantMatrix, TILE_K, TileKind};

/// Where packed inputs and groups come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputOrder {
    /// Inputs of the source.
    k: usize,
    /// The source's input of each packed one; a part lacks those of others.
    inputs: Vec<u32>,
    /// The source's group of each packed one.
    groups: Vec<u32>,
}

impl InputOrder {
    /// What stands for an input that does not exist.
    pub const NONE: u32 = u32::MAX;

    /// The order of a matrix for tiles of some kind, and the packed group rule. None if the inputs lie as the group rule
    /// says.
    ///
    /// # Errors
    /// [`Error::Size`] for more inputs than 32 bits count.
    pub(super) fn of(
        matrix: &QuantMatrix<'_>,
        kind: &TileKind,
        sizes: &[u32],
    ) -> Result<Option<(Self, Group)>, Error> {
        let (n, k) = (matrix.n(), matrix.k());
        let in_place = matrix.num_groups() == matrix.group().num_groups(k)
            && (0..k).all(|input| matrix.group_of_input(input) == matrix.group().index_of(input));
        if matrix.g_idx().is_none() || in_place {
            return Ok(None);
        }
        if u32::try_from(k).is_err() {
            return Err(Error::Size { n, k });
        }
        let mut of_group = vec![Vec::new(); matrix.num_groups()];
        (0..k).for_each(|input| of_group[matrix.group_of_input(input)].push(input as u32));
        let used: Vec<(u32, Vec<u32>)> = of_group
            .into_iter()
            .enumerate()
            .filter(|(_, inputs)| !inputs.is_empty())
            .map(|(group, inputs)| (group as u32, inputs))
            .collect();
        if let [(group, inputs)] = &used[..] {
            let order = Self { k, inputs: inputs.clone(), groups: vec![*group] };
            return Ok(Some((order, Group::PerColumn)));
        }
        // The size that takes the fewest bytes: padding against rows of scales.
        let bytes = |size: &u32| {
            let padded = |inputs: &[u32]| inputs.len().next_multiple_of(*size as usize);
            let inputs: usize = used.iter().map(|(_, inputs)| padded(inputs)).sum();
            inputs.div_ceil(TILE_K) * kind.tile_bytes(Group::Size(*size))
        };
        let size = *sizes.iter().min_by_key(|size| bytes(size)).expect("there is a size");
        let mut order = Self { k, inputs: Vec::new(), groups: Vec::new() };
        for (group, inputs) in used {
            order.inputs.extend(inputs);
            order.inputs.resize(order.inputs.len().next_multiple_of(size as usize), Self::NONE);
            order.groups.resize(order.inputs.len() / size as usize, group);
        }
        Ok(Some((order, Group::Size(size))))
    }

    /// Inputs of the source: columns of the activations.
    pub fn source_inputs(&self) -> usize {
        self.k
    }

    /// The source's input of each packed one, [`InputOrder::NONE`] where there is none: what activations are gathered
    /// by.
    pub fn inputs(&self) -> &[u32] {
        &self.inputs
    }

    /// The source's group of each packed one.
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    /// Whether packed inputs are the source's, one after the other.
    pub fn is_identity(&self) -> bool {
        self.inputs.len() == self.k
            && self.inputs.iter().enumerate().all(|(at, input)| at == *input as usize)
    }

    /// The packed place of each input of the source, none of those that a part leaves to others.
    pub fn places(&self) -> Vec<Option<usize>> {
        let mut places = vec![None; self.k];
        for (place, input) in self.inputs.iter().enumerate().filter(|(_, i)| **i != Self::NONE) {
            places[*input as usize] = Some(place);
        }
        places
    }

    /// An order that somebody wrote down: the inputs of the source, the source's input of each packed one and its group
    /// of each packed group.
    ///
    /// # Errors
    /// [`Error::Order`] unless every input of the source is there exactly once.
    pub fn from_parts(k: usize, inputs: Vec<u32>, groups: Vec<u32>) -> Result<Self, Error> {
        let refuse = |reason| Err(Error::Order { reason });
        if k > inputs.len() {
            return refuse(format!("{} places for {k} inputs", inputs.len()));
        }
        let mut seen = vec![false; k];
        for (place, &input) in inputs.iter().enumerate().filter(|(_, i)| **i != Self::NONE) {
            match seen.get_mut(input as usize) {
                None => {
                    return refuse(format!("place {place} is of input {input}, there are {k}"));
                }
                Some(true) => {
                    return refuse(format!("place {place} is of input {input}, which has one"));
                }
                Some(seen) => *seen = true,
            }
        }
        match seen.iter().position(|seen| !seen) {
            Some(input) => refuse(format!("input {input} of {k} has no place")),
            None => Ok(Self { k, inputs, groups }),
        }
    }

    /// Refuses an order of another number of packed groups.
    pub(super) fn check_groups(&self, num_groups: usize) -> Result<(), Error> {
        let found = self.groups.len();
        if found == num_groups {
            return Ok(());
        }
        Err(Error::Order { reason: format!("it has {found} groups, packed are {num_groups}") })
    }

    /// The order of a run of packed inputs; it is still one of all of the source's.
    pub(super) fn part(&self, inputs: Range<usize>, group: Group) -> Self {
        let groups = match group {
            Group::PerColumn => 0..1,
            Group::Size(size) => inputs.start / size as usize..inputs.end.div_ceil(size as usize),
        };
        Self {
            k: self.k,
            inputs: self.inputs[inputs].to_vec(),
            groups: self.groups[groups].to_vec(),
        }
    }

    /// The source's inputs that there are, ascending.
    pub fn columns(&self) -> Vec<u32> {
        let mut columns: Vec<u32> =
            self.inputs.iter().copied().filter(|input| *input != Self::NONE).collect();
        columns.sort_unstable();
        columns
    }

    /// The order for activations that have no other columns than [`InputOrder::columns`], in that order.
    #[must_use]
    pub fn on_own_columns(mut self) -> Self {
        let columns = self.columns();
        for input in self.inputs.iter_mut().filter(|input| **input != Self::NONE) {
            let at = columns.binary_search(input).expect("the columns are those of the order");
            *input = at as u32;
        }
        self.k = columns.len();
        self
    }
}
