//! `dynamic` of GPTQ's configurations: settings that differ by module.
//!
//! Keys are patterns that must match from the start of a module's name on, after `+:` or nothing; values are the
//! settings that are others there. Keys after `-:` name modules that are not quantised, which their tensors say as well.
//! The programs that write them take the first pattern that matches; the order of keys is not that of a JSON object, so
//! patterns that both match and do not say the same are refused.

use std::borrow::Cow;

use regex_lite::Regex;
use serde_json::{Map, Value};

use super::{Error, QuantConfig};

const FIELD: &str = "dynamic";
/// Settings of a module that decide how its tensors are read.
const READ: [&str; 4] = ["bits", "group_size", "sym", "desc_act"];
/// Settings of how a module was quantised, of which its tensors bear no mark.
const OF_QUANTISING: [&str; 8] = [
    "damp_percent",
    "damp_auto_increment",
    "static_groups",
    "true_sequential",
    "mse",
    "act_group_aware",
    "failsafe",
    "fallback",
];

/// Patterns of modules and their settings.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    entries: Vec<(Regex, Map<String, Value>)>,
}

impl Overrides {
    /// Those of a configuration.
    ///
    /// # Errors
    /// [`Error::Config`] for what is no object of objects, and for patterns that are none; [`Error::Unsupported`] for
    /// settings that are not read.
    pub(super) fn read(config: &QuantConfig) -> Result<Self, Error> {
        let mut overrides = Self::default();
        let Some(field) = config.field(FIELD) else { return Ok(overrides) };
        // Some programs write `false` for none.
        if field == &Value::Bool(false) {
            return Ok(overrides);
        }
        let wrong = || config.wrong(FIELD, "an object of patterns and settings");
        for (key, value) in field.as_object().ok_or_else(wrong)? {
            if key.starts_with("-:") {
                continue;
            }
            let settings = value.as_object().ok_or_else(wrong)?;
            let is_known = |name: &str| READ.contains(&name) || OF_QUANTISING.contains(&name);
            if let Some(name) = settings.keys().find(|name| !is_known(name)) {
                let found = format!("dynamic setting {name} for {key}");
                let rule = "bits, group_size, sym and desc_act of a module are read";
                return Err(config.unsupported(found, rule));
            }
            let pattern = key.strip_prefix("+:").unwrap_or(key);
            let regex = Regex::new(&format!("^(?:{pattern})")).map_err(|error| {
                let reason = format!("the pattern {key} of dynamic cannot be read: {error}");
                Error::Config { path: config.path.clone(), reason }
            })?;
            let settings = settings.iter().filter(|(name, _)| READ.contains(&name.as_str()));
            let settings = settings.map(|(name, value)| (name.clone(), value.clone())).collect();
            overrides.entries.push((regex, settings));
        }
        Ok(overrides)
    }

    /// Whether every module has the settings of the whole.
    pub(super) fn are_none(&self) -> bool {
        self.entries.is_empty()
    }

    /// The configuration as it is for a module.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where patterns contradict each other.
    pub(super) fn of<'c>(
        config: &'c QuantConfig,
        module: &str,
    ) -> Result<Cow<'c, QuantConfig>, Error> {
        let entries = &config.overrides().entries;
        let mut matching = entries.iter().filter(|(regex, _)| regex.is_match(module));
        let Some((first, settings)) = matching.next() else { return Ok(Cow::Borrowed(config)) };
        if let Some((other, _)) = matching.find(|(_, others)| others != settings) {
            let found = format!("dynamic settings {first} and {other} for {module}");
            return Err(config.unsupported(found, "patterns must not contradict each other"));
        }
        Ok(Cow::Owned(config.with(settings)))
    }
}
