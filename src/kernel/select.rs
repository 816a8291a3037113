//! From a problem and a device to a configuration: legality rules, then a cost.
//!
//! Pure functions of their arguments, so every choice can be tested and explained without a GPU.
