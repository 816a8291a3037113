//! Tensor maps: the descriptors by which tile copies find a matrix.
//!
//! The driver makes the 128 opaque bytes on the host; no device memory is involved. A map is an argument like another, of 128 bytes at a multiple of 64. The rules for sizes are those of the
//! hardware; a caller checks them to name the broken one, here the driver refuses it.
//!
//! Source: CUDA Driver API, "Tensor Map Object Management".

use super::buffer::DevicePtr;
use super::context::Context;
use super::error::Result;
use super::launch::KernelArg;
use super::sys;

/// A matrix of fp16 elements in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledMatrix {
    /// Address of the first element.
    pub base: DevicePtr,
    /// Elements of a row, and rows.
    pub elements: [u64; 2],
    /// Bytes from one row to the next.
    pub row_bytes: u64,
    /// Elements of a tile's row, and its rows.
    pub tile: [u32; 2],
    /// Whether a tile's 128-byte rows are permuted in shared memory; else they lie one after the other.
    pub swizzle_128b: bool,
}

/// `CUtensorMap`, as the driver wrote it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

const _: () = assert!(size_of::<TensorMap>() == 128 && align_of::<TensorMap>() == 64);

// SAFETY: sixteen words without padding, of which every bit pattern is a value.
unsafe impl bytemuck::NoUninit for TensorMap {}

impl KernelArg for TensorMap {}

impl TensorMap {
    /// The map of a matrix: elements outside are read as zeros and not written; lines come into L2 by
    /// 256 bytes.
    ///
    /// # Errors
    /// `MissingSymbol` before CUDA 12.0; `Call` with code 1 if the matrix breaks a rule of the hardware.
    pub fn encode(context: &Context, matrix: &TiledMatrix) -> Result<Self> {
        const NUM_DIMENSIONS: u32 = 2;
        let _current = context.bind()?;
        let TiledMatrix { base, elements, row_bytes, tile, swizzle_128b } = matrix;
        let swizzle = if *swizzle_128b { sys::TENSOR_SWIZZLE_128B } else { sys::TENSOR_NO_SWIZZLE };
        let element_strides = [1, 1];
        let mut map = Self([0; 16]);
        // SAFETY: the driver writes 128 bytes at a multiple of 64 and reads two sizes, one distance and
        // two sizes of tile and step, as the rank says; it does not follow the address.
        unsafe {
            context.api().cuTensorMapEncodeTiled(
                map.0.as_mut_ptr(),
                sys::TENSOR_FLOAT16,
                NUM_DIMENSIONS,
                base.as_raw(),
                elements.as_ptr(),
                row_bytes,
                tile.as_ptr(),
                element_strides.as_ptr(),
                sys::TENSOR_NO_INTERLEAVE,
                swizzle,
                sys::TENSOR_L2_PROMOTION_256B,
                sys::TENSOR_ZEROS_OUTSIDE,
            )
        }?;
        Ok(map)
    }
}
