//! AWQ checkpoints in the gemm layout: 4 bit, with zeros.
//!
//! A layer is `qweight` `[K][N/8]` and `qzeros` `[groups][N/8]`, words of eight outputs in the order
//! 0, 2, 4, 6, 1, 3, 5, 7, and `scales` `[groups][N]`. Zeros are stored as they are. There is no
//! activation order. The other layouts that go by the same `quant_method` (gemv, gemv_fast, marlin,
//! exllama and the one of llm-awq) are refused by name.

use super::gptq::group_size;
use super::source::{SCALE_DTYPES, check_shape, scale_type, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
use crate::weights::{Codes, MatrixParts, QuantMatrix, ScaleOrder, Scales, U4, ZeroOrder, Zeros};

/// The convention of AWQ tools.
#[derive(Clone, Copy, Debug)]
pub struct Awq;

const NAME: &str = "awq";

/// Whether `qweight` and `scales` have the shapes of AWQ's gemm layout.
pub(super) fn is_packed_along_outputs(source: &Source<'_, '_>) -> bool {
    packed_columns(source).is_some_and(|[words, n]| words.checked_mul(8) == Some(n))
}

/// Columns of `qweight` and of `scales`.
fn packed_columns(source: &Source<'_, '_>) -> Option<[usize; 2]> {
    let columns = |suffix| match source.get(suffix) {
        Ok(Some(tensor)) if tensor.shape.len() == 2 => Some(tensor.shape[1]),
        _ => None,
    };
    Some([columns(".qweight")?, columns(".scales")?])
}

impl Convention for Awq {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        Some("awq")
    }

    fn marker_suffix(&self) -> &'static str {
        ".qweight"
    }

    fn scales_suffix(&self) -> &'static str {
        ".scales"
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[".qweight", ".scales", ".qzeros", ".bias"]
    }

    /// Everything but GPTQ's layout, whose `qweight` has a column for each output.
    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        packed_columns(source).is_none_or(|[words, n]| words != n)
    }

    fn check(&self, config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        let version = config.text("version")?;
        let label = version.as_deref().unwrap_or("gemm");
        if label != "gemm" {
            let found = format!("quant_method awq, version {label}");
            return Err(config.unsupported(found, "of AWQ's layouts gemm is read"));
        }
        if let Some(backend) = config.text("backend")?
            && backend != "autoawq"
        {
            let found = format!("quant_method awq, backend {backend}");
            return Err(config.unsupported(found, "the layout of AutoAWQ is read"));
        }
        let bits = match config.integer("bits")? {
            Some(bits) => Some(bits),
            None => config.integer("w_bit")?,
        };
        match bits {
            Some(4) => {}
            Some(bits) => return Err(config.unsupported(format!("bits {bits}"), "AWQ has 4 bits")),
            None => return Err(config.unsupported("no bits".to_owned(), "4 bits must be stated")),
        }
        if config.flag("zero_point")? == Some(false) {
            let rule = "AWQ weights with zeros (zero_point true) are read";
            return Err(config.unsupported("zero_point false".to_owned(), rule));
        }
        raw_group(config).map(|_| ())
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let (qweight, [k, words]) = source.matrix(NAME, ".qweight", &[Dtype::I32])?;
        let n = words.checked_mul(8).filter(|&n| k > 0 && n > 0);
        let n = n.ok_or_else(|| shape_error(&qweight, "[K, N/8], neither of them 0".to_owned()))?;
        let (scales, [rows, _]) = source.matrix(NAME, ".scales", SCALE_DTYPES)?;
        let group = source.group(k, raw_group(source.config)?, rows)?;
        check_shape(&scales, &[group.num_groups(k), n])?;
        let (qzeros, _) = source.matrix(NAME, ".qzeros", &[Dtype::I32])?;
        check_shape(&qzeros, &[group.num_groups(k), words])?;
        let scales = (scales.dtype, ScaleOrder::Rows);
        Ok(LayerInfo::new(self, source, (n, k), group, &U4, scales))
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::AwqWords(source.required(NAME, ".qweight")?.bytes);
        let scales = source.required(NAME, ".scales")?;
        let scales = Scales::new(scales.bytes, scale_type(scales.dtype), ScaleOrder::Rows);
        let qzeros = source.required(NAME, ".qzeros")?;
        let zeros = Some(Zeros { bytes: qzeros.bytes, order: ZeroOrder::AwqWords });
        layer.matrix(MatrixParts { zeros, ..layer.parts(codes, scales) })
    }
}

/// The group size, under its name or the older one.
fn raw_group(config: &QuantConfig) -> Result<i64, Error> {
    match config.integer("q_group_size")? {
        Some(size) => Ok(size),
        None => group_size(config),
    }
}
