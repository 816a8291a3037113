//! The quantisation configuration of a checkpoint.
//!
//! Found as `quantization_config` (or, of older tools, `compression_config`) in `config.json`, or as
//! the file `quantize_config.json`; the first wins. A checkpoint without any is a plain one. Only what a convention must decide on is read, and what cannot be
//! honoured is refused by the conventions, never ignored. Absent fields stay absent: a default is
//! the convention's business.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::Error;
use super::dynamic::Overrides;
use super::names::Names;
use super::schemes::Schemes;

const MODEL_CONFIG: &str = "config.json";
const QUANT_CONFIG: &str = "quantize_config.json";

/// The fields that conventions decide on.
#[derive(Clone, Debug)]
pub struct QuantConfig {
    /// The file that it came from.
    pub path: PathBuf,
    /// `quant_method`, lower case; "gptq" for a `quantize_config.json` that has none. None for a
    /// checkpoint that is not quantised.
    pub method: Option<String>,
    /// The whole object, for fields that only one convention knows.
    fields: Value,
    /// Modules that the configuration says are not quantised.
    ignored: Names,
    /// The schemes of compressed-tensors.
    schemes: Schemes,
    /// Settings of GPTQ that differ by module.
    overrides: Overrides,
    /// Blocks of the model, by the model's own configuration.
    num_blocks: Option<usize>,
}

impl QuantConfig {
    /// The configuration that belongs to the checkpoint in `directory`.
    ///
    /// # Errors
    /// [`Error::Config`] and [`Error::Io`] for a file that cannot be read as one,
    /// [`Error::Unsupported`] for settings that change what every tensor means.
    pub fn read(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(MODEL_CONFIG);
        let model = read_json(&path)?.unwrap_or_default();
        let of_model = ["quantization_config", "compression_config"]
            .into_iter()
            .find_map(|name| model.get(name).filter(|fields| !fields.is_null()));
        let mut config = match of_model {
            Some(fields) => Self::new(path, fields.clone(), None)?,
            None => {
                let older = directory.join(QUANT_CONFIG);
                match read_json(&older)? {
                    Some(fields) => Self::new(older, fields, Some("gptq"))?,
                    None => Self::plain(path),
                }
            }
        };
        let text_model = model.get("text_config").unwrap_or(&model);
        let num_blocks = text_model.get("num_hidden_layers").and_then(Value::as_u64);
        config.num_blocks = num_blocks.and_then(|count| usize::try_from(count).ok());
        Ok(config)
    }

    /// The configuration of a checkpoint that is not quantised.
    fn plain(path: PathBuf) -> Self {
        Self {
            path,
            method: None,
            fields: Value::Null,
            ignored: Names::default(),
            schemes: Schemes::default(),
            overrides: Overrides::default(),
            num_blocks: None,
        }
    }

    fn new(path: PathBuf, fields: Value, default_method: Option<&str>) -> Result<Self, Error> {
        if !fields.is_object() {
            let reason = format!("the quantisation configuration is {fields}, not an object");
            return Err(Error::Config { path, reason });
        }
        let mut config = Self { fields, ..Self::plain(path) };
        config.method = match (config.text("quant_method")?, default_method) {
            (Some(method), _) => Some(method),
            (None, Some(method)) => Some(method.to_owned()),
            (None, None) => {
                let reason = "the quantisation configuration has no quant_method".to_owned();
                return Err(Error::Config { path: config.path, reason });
            }
        };
        for name in config.texts("ignore")? {
            config.ignored.add(&name);
        }
        for field in ["modules_to_not_convert", "ignored_layers"] {
            for name in config.texts(field)? {
                config.ignored.add_part(&name);
            }
        }
        match config.method.as_deref() {
            Some("compressed-tensors") => config.schemes = Schemes::read(&config)?,
            Some("gptq") => config.overrides = Overrides::read(&config)?,
            _ => {}
        }
        Ok(config)
    }

    /// Modules that the configuration says are not quantised.
    pub(super) fn ignored(&self) -> &Names {
        &self.ignored
    }

    /// The schemes of compressed-tensors.
    pub(super) fn schemes(&self) -> &Schemes {
        &self.schemes
    }

    /// Settings of GPTQ that differ by module.
    pub(super) fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// The configuration with other values of some fields.
    pub(super) fn with(&self, settings: &Map<String, Value>) -> Self {
        let mut config = self.clone();
        for (name, value) in settings {
            config.fields[name] = value.clone();
        }
        config
    }

    /// Blocks of the model, by the model's own configuration.
    pub fn num_blocks(&self) -> Option<usize> {
        self.num_blocks
    }

    /// A field that is not there or null is None.
    pub(super) fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(&self, name: &str, wanted: &str) -> Error {
        let found = self.field(name).map_or_else(String::new, Value::to_string);
        let reason = format!("{name} is {found}, expected {wanted}");
        Error::Config { path: self.path.clone(), reason }
    }

    /// A text field in lower case.
    ///
    /// # Errors
    /// [`Error::Config`] when it is something else.
    pub fn text(&self, name: &str) -> Result<Option<String>, Error> {
        let read = |value: &Value| value.as_str().map(str::to_lowercase);
        self.field(name).map(|v| read(v).ok_or_else(|| self.wrong(name, "a text"))).transpose()
    }

    /// An integer field.
    ///
    /// # Errors
    /// [`Error::Config`] when it is something else.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, Error> {
        let read = |value: &Value| value.as_i64().ok_or_else(|| self.wrong(name, "an integer"));
        self.field(name).map(read).transpose()
    }

    /// A true or false field.
    ///
    /// # Errors
    /// [`Error::Config`] when it is something else.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, Error> {
        let read = |value: &Value| value.as_bool().ok_or_else(|| self.wrong(name, "true or false"));
        self.field(name).map(read).transpose()
    }

    /// A field that is a list of texts, in the case they are written in; empty if it is not there.
    ///
    /// # Errors
    /// [`Error::Config`] when it is something else.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Error> {
        let Some(value) = self.field(name) else { return Ok(Vec::new()) };
        let read = |value: &Value| value.as_str().map(str::to_owned);
        let list = value.as_array().and_then(|list| list.iter().map(read).collect());
        list.ok_or_else(|| self.wrong(name, "a list of texts"))
    }

    /// Whether a field is there and neither null, nor an empty list or object.
    pub fn is_set(&self, name: &str) -> bool {
        self.field(name).is_some_and(|value| match value {
            Value::Object(map) => !map.is_empty(),
            Value::Array(list) => !list.is_empty(),
            _ => true,
        })
    }

    /// The refusal of this configuration for `found`, under `rule`.
    pub fn unsupported(&self, found: String, rule: &'static str) -> Error {
        Error::Unsupported { path: self.path.clone(), found, rule }
    }

    /// The file format that the configuration names (`checkpoint_format`, or `format` in its
    /// absence).
    ///
    /// # Errors
    /// [`Error::Config`] when the two fields contradict each other.
    pub fn checkpoint_format(&self) -> Result<Option<String>, Error> {
        let (new, old) = (self.text("checkpoint_format")?, self.text("format")?);
        if let (Some(new), Some(old)) = (&new, &old)
            && new != old
        {
            let reason = format!("checkpoint_format is {new} but format is {old}");
            return Err(Error::Config { path: self.path.clone(), reason });
        }
        Ok(new.or(old))
    }
}

/// The JSON of a file; none if there is no such file.
fn read_json(path: &Path) -> Result<Option<Value>, Error> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::Io { action: "read", path: path.to_owned(), source }),
    };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| Error::Config { path: path.to_owned(), reason: error.to_string() })
}
