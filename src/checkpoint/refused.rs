//! Formats that are recognised, by label or by tensors, and not read.

use super::{Error, QuantConfig, Tensors};

/// Formats of compressed-tensors that are read, and the two labels that mean "see elsewhere".
const READ: [&str; 7] = [
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
];

/// Methods that are read.
pub(super) const METHODS: &str =
    "gptq, awq, compressed-tensors, fp8 and mxfp4 are read, and checkpoints without quantisation";

/// Refuses a checkpoint of a format that is known and not read.
///
/// # Errors
/// [`Error::Unsupported`] naming the format.
pub(super) fn check(config: &QuantConfig, tensors: &Tensors) -> Result<(), Error> {
    if config.method.as_deref() != Some(super::packed::METHOD) {
        return Ok(());
    }
    let refuse = |format: &str, rule| {
        let found = format!("quant_method compressed-tensors, format {format}");
        Err(config.unsupported(found, rule))
    };
    let sparse = "2:4 sparse weights are not read yet";
    let sparsity = config.field("sparsity_config").and_then(|field| field.get("format"));
    if let Some(format) = sparsity.and_then(|format| format.as_str())
        && format != "dense"
    {
        return refuse(format, sparse);
    }
    let has = |suffix: &str| tensors.names().any(|name| name.ends_with(suffix));
    if has(".meta") && has(".scale_packed") {
        return refuse("marlin-24", sparse);
    }
    if has(".bitmask") && has(".compressed") {
        return refuse("sparse-24-bitmask", sparse);
    }
    let of_groups = config.schemes().iter().filter_map(|scheme| scheme.format.clone());
    for format in config.text("format")?.into_iter().chain(of_groups) {
        if !READ.contains(&format.as_str()) {
            let rule = match format.as_str() {
                "marlin-24" => sparse,
                _ => "of its formats packed integers, fp8, NVFP4 and MXFP4 are read",
            };
            return refuse(&format, rule);
        }
    }
    Ok(())
}
