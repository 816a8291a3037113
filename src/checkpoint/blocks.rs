//! `quant_method` mxfp4: stacks of experts in blocks of 32, as gpt-oss is published.
//!
//! A stack is `<name>_blocks` `[E][N][K/32][16]`, bytes of two e2m1 numbers, the even input in the low
//! half, and `<name>_scales` `[E][N][K/32]`, e8m0. `<name>_bias` `[E][N]` may lie beside them.

use super::source::{check_dtype, check_shape, shape_error};
use super::{Convention, Dtype, Error, Finding, LayerInfo, QuantConfig, Source, Tensors};
use crate::weights::{Codes, E2M1, QuantMatrix, ScaleOrder, ScaleType, Scales};

/// The convention of MXFP4 blocks.
#[derive(Clone, Copy, Debug)]
pub struct MxBlocks;

const NAME: &str = "mxfp4";
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";
/// Inputs, and bytes, of a block.
const BLOCK_INPUTS: usize = 32;
const BLOCK_BYTES: usize = 16;

impl Convention for MxBlocks {
    fn name(&self) -> &'static str {
        NAME
    }

    fn method(&self) -> Option<&'static str> {
        Some(NAME)
    }

    fn marker_suffix(&self) -> &'static str {
        BLOCKS
    }

    /// Outputs, blocks, bytes of a block.
    fn marker_dims(&self) -> usize {
        3
    }

    fn scales_suffix(&self) -> &'static str {
        SCALES
    }

    fn layer_suffixes(&self) -> &'static [&'static str] {
        &[BLOCKS, SCALES, "_bias"]
    }

    fn recognises(&self, source: &Source<'_, '_>) -> bool {
        matches!(source.get(BLOCKS), Ok(Some(tensor)) if tensor.dtype == Dtype::U8)
    }

    fn check(&self, _config: &QuantConfig, _tensors: &Tensors) -> Result<(), Error> {
        Ok(()) // The configuration has no settings of its own.
    }

    fn describe(&self, source: &Source<'_, '_>) -> Result<LayerInfo, Error> {
        let blocks = source.required(NAME, BLOCKS)?;
        check_dtype(&blocks, &[Dtype::U8])?;
        let &[n, num_blocks, BLOCK_BYTES] = blocks.shape else {
            return Err(shape_error(&blocks, "[N, K/32, 16]".to_owned()));
        };
        let k = num_blocks.checked_mul(BLOCK_INPUTS).filter(|&k| k > 0 && n > 0);
        let k =
            k.ok_or_else(|| shape_error(&blocks, "[N, K/32, 16], none of them 0".to_owned()))?;
        let scales = source.required(NAME, SCALES)?;
        check_dtype(&scales, &[Dtype::U8, Dtype::F8_E8M0])?;
        check_shape(&scales, &[n, num_blocks])?;
        let group = source.group(k, BLOCK_INPUTS as i64, num_blocks)?;
        let scales = (scales.dtype, ScaleOrder::Columns);
        Ok(LayerInfo::new(self, source, (n, k), group, &E2M1, scales))
    }

    fn read<'a>(
        &self,
        source: &Source<'_, 'a>,
        layer: &LayerInfo,
        _findings: &mut Vec<Finding>,
    ) -> Result<QuantMatrix<'a>, Error> {
        let codes = Codes::NibblePairs(source.required(NAME, BLOCKS)?.bytes);
        let bytes = source.required(NAME, SCALES)?.bytes;
        let scales = Scales::new(bytes, ScaleType::E8M0, ScaleOrder::Columns);
        layer.matrix(layer.parts(codes, scales))
    }
}
