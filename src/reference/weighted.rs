//! Products whose rows are multiplied by a number before they are rounded.

use super::Reference;

impl Reference {
    /// The product times a number, for instance what an expert's row is worth.
    #[must_use]
    pub fn times(mut self, factor: f64) -> Self {
        self.values.iter_mut().for_each(|value| *value *= factor);
        self.magnitudes.iter_mut().for_each(|magnitude| *magnitude *= factor.abs());
        self.squares *= factor * factor;
        self
    }
}
