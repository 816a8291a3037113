//! What products keep on a device: packed weights, and scratch memory with locks.

use std::sync::Arc;

use super::Error;
use crate::backend::{Backend, DevicePtr};
use crate::kernel::Kind;
use crate::weights::{Activation, PackedLayout, WeightFormat};

/// A packed weight on a device. Freed when dropped.
pub struct Weight {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) layout: PackedLayout,
    pub(super) ptr: DevicePtr,
    pub(super) format: &'static dyn WeightFormat,
    pub(super) factor: f32,
    pub(super) activation: Activation,
    pub(super) bias: Option<DevicePtr>,
    pub(super) gather: Option<Gather>,
}

/// What activations are gathered by before a product with a weight whose inputs are packed in another order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gather {
    /// The input of each packed one.
    pub(super) ptr: DevicePtr,
    /// Columns of the activations.
    pub(super) k: usize,
}

impl Weight {
    /// The layout: sizes, group rule, padding.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// Where it lies.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Columns of the activations: inputs of the layer, which are the layout's if they are packed in order.
    pub fn source_inputs(&self) -> usize {
        self.gather.map_or(self.layout.k, |gather| gather.k)
    }

    /// Bytes of scratch memory for the gathered activations of `m` rows, before the partial sums of a plan: none if
    /// inputs are packed in order.
    pub fn gathered_bytes(&self, m: u64) -> u64 {
        let row = 2 * self.layout.k as u64;
        self.gather.map_or(0, |_| (m * row).next_multiple_of(256))
    }

    /// The weight type's name.
    pub fn format(&self) -> &'static str {
        self.format.name()
    }

    /// What products with it are multiplied by, beside the scales.
    pub fn factor(&self) -> f32 {
        self.factor
    }

    /// What a kernel multiplies by.
    pub(super) fn kernel_factor(&self, activation: Activation) -> f32 {
        kernel_factor(self.format, self.factor, activation)
    }

    /// The weight for products whose A, C, bias and residual are of a type; without a word they are fp16.
    #[must_use]
    pub fn with_activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// The weight with a factor of all products beside its scales: what [`PackedWeights::factor`](crate::weights::PackedWeights::factor) says of bytes that the
    /// caller wrote into [reserved](super::Gemm::reserve) room.
    #[must_use]
    pub fn with_factor(mut self, factor: f32) -> Self {
        self.factor = factor;
        self
    }

    /// The weight with a bias that every product gets added before it is rounded: N numbers of C's type on the
    /// device, at a multiple of 2 bytes, of 8 for full speed. They stay the caller's, must outlive the weight's last
    /// product, and are read in every one.
    #[must_use]
    pub fn with_bias(mut self, bias: DevicePtr) -> Self {
        self.bias = Some(bias);
        self
    }

    /// The type of A and C.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The kind of products with it, those to which no residual is added.
    pub fn kind(&self) -> Kind {
        Kind { bias: self.bias.is_some(), ..self.plain_kind() }
    }

    /// The kind without anything that is added, by which kernels are chosen.
    pub(super) fn plain_kind(&self) -> Kind {
        Kind {
            format: self.format.name(),
            scales: self.layout.kind.scales,
            activation: self.activation,
            factor: self.kernel_factor(self.activation) != 1.0,
            bias: false,
            residual: false,
            experts: false,
        }
    }
}

/// What a kernel multiplies by: the layer's factor, and the power of two that the conversion leaves out.
pub(super) fn kernel_factor(format: &dyn WeightFormat, factor: f32, activation: Activation) -> f32 {
    let exponent = format.fragments().map_or(0, |fragments| fragments.exponent(activation));
    factor * 2f32.powi(exponent as i32)
}

impl Drop for Weight {
    fn drop(&mut self) {
        for ptr in [Some(self.ptr), self.gather.map(|gather| gather.ptr)].into_iter().flatten() {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing a weight: {error}");
            }
        }
    }
}

/// Scratch memory and locks for products on one stream. Freed when dropped.
pub struct Workspace {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) scratch: Option<DevicePtr>,
    pub(super) scratch_bytes: u64,
    pub(super) locks: Option<DevicePtr>,
    pub(super) num_locks: u64,
}

impl Workspace {
    /// Zeroes the locks again, as they are after every completed launch. Needed only if a launch was
    /// aborted or the memory was written by somebody else.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn reset(&mut self) -> Result<(), Error> {
        if let Some(locks) = self.locks {
            self.backend.upload(locks, &vec![0; 4 * self.num_locks as usize])?;
        }
        Ok(())
    }

    /// Bytes of scratch memory.
    pub fn scratch_bytes(&self) -> u64 {
        self.scratch_bytes
    }

    /// Lock words.
    pub fn num_locks(&self) -> u64 {
        self.num_locks
    }

    /// Address of the lock words, if there are any.
    pub fn locks_ptr(&self) -> Option<DevicePtr> {
        self.locks
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        for ptr in [self.scratch, self.locks].into_iter().flatten() {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing a workspace: {error}");
            }
        }
    }
}
