//! The `config_groups` of compressed-tensors: which modules are quantised how.

use serde_json::Value;

use super::names::Names;
use super::{Error, QuantConfig};

/// How the modules of one group are quantised.
#[derive(Clone, Debug)]
pub(super) struct Scheme {
    /// The key of the group.
    pub(super) key: String,
    /// The format of the tensors, by the group or else by the whole configuration.
    pub(super) format: Option<String>,
    /// Bits of a weight.
    pub(super) bits: i64,
    /// `int` or `float`.
    pub(super) number: String,
    /// `tensor`, `channel`, `group`, `block` or `tensor_group`.
    pub(super) strategy: String,
    /// The group size, where one is stated.
    pub(super) group_size: Option<i64>,
    /// Sizes of a block, where they are stated: outputs, inputs.
    pub(super) block: Option<Vec<i64>>,
    /// Whether there are no stored zeros.
    pub(super) symmetric: bool,
    /// What is said of the activations, unless they are not quantised.
    pub(super) activations: Option<String>,
    targets: Names,
    /// Whether a target is a class of modules, `Linear`, which a file cannot tell.
    targets_class: bool,
}

/// All groups.
#[derive(Clone, Debug, Default)]
pub(super) struct Schemes(Vec<Scheme>);

impl Schemes {
    /// The groups of a configuration of compressed-tensors.
    ///
    /// # Errors
    /// [`Error::Config`] for a group that is not made as one, [`Error::Unsupported`] for settings
    /// that change what the tensors mean and are not read.
    pub(super) fn read(config: &QuantConfig) -> Result<Self, Error> {
        if let Some(status) = config.text("quantization_status")?
            && !matches!(status.as_str(), "compressed" | "frozen")
        {
            let rule = "only weights that are saved compressed are read";
            return Err(config.unsupported(format!("quantization_status {status}"), rule));
        }
        if config.is_set("transform_config") {
            let rule = "weights that need transformed activations are not read";
            return Err(config.unsupported("a transform_config".to_owned(), rule));
        }
        let format = config.text("format")?;
        let Some(groups) = config.field("config_groups") else { return Ok(Self::default()) };
        let groups =
            groups.as_object().ok_or_else(|| config.wrong("config_groups", "an object"))?;
        let schemes =
            groups.iter().map(|(key, group)| Scheme::read(config, key, group, format.clone()));
        schemes.collect::<Result<_, _>>().map(Self)
    }

    /// The scheme of a module: of the first group that names it, else of the first that takes a
    /// class of modules.
    pub(super) fn of(&self, name: &str) -> Option<&Scheme> {
        let named = self.0.iter().find(|scheme| scheme.targets.contain(name));
        named.or_else(|| self.0.iter().find(|scheme| scheme.targets_class))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Scheme> {
        self.0.iter()
    }

    /// Target patterns that could not be understood.
    pub(super) fn unreadable(&self) -> impl Iterator<Item = &(String, String)> {
        self.0.iter().flat_map(|scheme| &scheme.targets.unreadable)
    }
}

impl Scheme {
    fn read(
        config: &QuantConfig,
        key: &str,
        group: &Value,
        format: Option<String>,
    ) -> Result<Self, Error> {
        let wrong = |what: &str| Error::Config {
            path: config.path.clone(),
            reason: format!("config_groups.{key}: {what}"),
        };
        let weights = group.get("weights").filter(|weights| weights.is_object());
        let weights = weights.ok_or_else(|| wrong("no object weights"))?;
        let set = |object: &Value, name: &str| object.get(name).cloned().filter(|v| !v.is_null());
        let text = |name: &str| match set(weights, name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.to_lowercase())),
            Some(other) => Err(wrong(&format!("weights.{name} is {other}, expected a text"))),
        };
        let integer = |name: &str| match set(weights, name) {
            None => Ok(None),
            Some(value) => value
                .as_i64()
                .map(Some)
                .ok_or_else(|| wrong(&format!("weights.{name} is {value}, expected an integer"))),
        };
        let block = match set(weights, "block_structure") {
            None => None,
            Some(value) => {
                let sizes = value.as_array().map(|list| list.iter().map(Value::as_i64).collect());
                let sizes = sizes.and_then(|sizes: Option<Vec<i64>>| sizes);
                let wrong = || wrong(&format!("block_structure is {value}, expected two integers"));
                Some(sizes.filter(|sizes| sizes.len() == 2).ok_or_else(wrong)?)
            }
        };
        let group_size = integer("group_size")?;
        let strategy = match (text("strategy")?, group_size) {
            (Some(strategy), _) => strategy,
            // The library's own rule for what is not stated.
            (None, None) => "tensor".to_owned(),
            (None, Some(-1)) => "channel".to_owned(),
            (None, Some(_)) => "group".to_owned(),
        };
        let symmetric = match set(weights, "symmetric") {
            None => true,
            Some(value) => {
                let wrong = || wrong(&format!("symmetric is {value}, expected true or false"));
                value.as_bool().ok_or_else(wrong)?
            }
        };
        let own_format = set(group, "format");
        let own_format = own_format.and_then(|value| value.as_str().map(str::to_lowercase));
        let (mut targets, mut targets_class) = (Names::default(), false);
        let list = set(group, "targets").unwrap_or_else(|| Value::Array(Vec::new()));
        let list = list.as_array().ok_or_else(|| wrong("targets are no list"))?;
        for target in list {
            let target = target.as_str().ok_or_else(|| wrong("a target is no text"))?;
            // Classes are written like types, modules like paths.
            let is_class = target.starts_with(char::is_uppercase) && !target.contains('.');
            targets_class |= is_class;
            if !is_class {
                targets.add(target);
            }
        }
        Ok(Self {
            key: key.to_owned(),
            format: own_format.or(format),
            bits: integer("num_bits")?.ok_or_else(|| wrong("no weights.num_bits"))?,
            number: text("type")?.unwrap_or_else(|| "int".to_owned()),
            strategy,
            group_size,
            block,
            symmetric,
            activations: set(group, "input_activations").map(|value| activations(&value)),
            targets,
            targets_class,
        })
    }

    /// The group size that the strategy means, for strategies of one scale a group or column.
    pub(super) fn raw_group(&self) -> Option<i64> {
        match self.strategy.as_str() {
            "channel" => Some(-1),
            "group" | "tensor_group" => self.group_size,
            _ => None,
        }
    }

    /// The scheme in a few words.
    pub(super) fn describe(&self) -> String {
        let Self { key, bits, number, strategy, .. } = self;
        let zeros = if self.symmetric { "symmetric" } else { "with zeros" };
        let group = self.group_size.map_or_else(String::new, |size| format!(" of {size}"));
        format!("{key}: {bits}-bit {number}, one scale a {strategy}{group}, {zeros}")
    }
}

/// What a scheme of activations asks for, in a few words.
fn activations(value: &Value) -> String {
    let of = |name: &str| match value.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => "?".to_owned(),
    };
    let dynamic =
        if value.get("dynamic") == Some(&Value::Bool(true)) { "dynamic" } else { "static" };
    format!("{}-bit {}, {dynamic}, one scale a {}", of("num_bits"), of("type"), of("strategy"))
}
