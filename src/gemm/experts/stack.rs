//! The packed weights of experts on a device, one after the other.

use std::sync::Arc;

use crate::backend::{Backend, DevicePtr};
use crate::gemm::memory::kernel_factor;
use crate::gemm::operands::check_shape;
use crate::gemm::{Error, Gemm};
use crate::kernel::experts::EXPERT_ALIGN;
use crate::kernel::experts::select::ExpertProblem;
use crate::kernel::{Kind, Rows};
use crate::weights::{Activation, PackedLayout, PackedWeights, WeightFormat};

/// A stack of packed experts of one shape and type on a device. Freed when dropped.
pub struct Experts {
    backend: Arc<dyn Backend>,
    layout: PackedLayout,
    format: &'static dyn WeightFormat,
    activation: Activation,
    ptr: DevicePtr,
    /// From one expert to the next, in units of [`EXPERT_ALIGN`] bytes.
    stride_units: u32,
    /// What a kernel multiplies the products with each expert by, here and on the device.
    factors: Vec<f32>,
    factors_ptr: DevicePtr,
    bias: Option<DevicePtr>,
}

impl Gemm {
    /// Copies packed experts of one shape and type to the device, for A and C of a type.
    ///
    /// # Errors
    /// [`Error::Operand`] if there are none, if they differ in shape or type, or if one's inputs are packed in another
    /// order (act-order): one launch reads all rows of A in one order. If the device has too little memory.
    pub fn upload_experts(
        &self,
        packed: &[PackedWeights],
        activation: Activation,
    ) -> Result<Experts, Error> {
        let Some(first) = packed.first() else {
            let rule = "no experts; a stack has at least one".to_owned();
            return Err(Error::Operand { operand: "experts", rule });
        };
        let count = u32::try_from(packed.len()).unwrap_or(u32::MAX);
        let mut experts =
            self.reserve_experts(first.layout(), first.format(), count, activation)?;
        for (idx, packed) in packed.iter().enumerate() {
            self.upload_expert(&mut experts, idx as u32, packed)?;
        }
        Ok(experts)
    }

    /// Room for a stack of experts, which [`Gemm::upload_expert`] fills, or the caller, at [`Experts::expert_ptr`].
    ///
    /// # Errors
    /// [`Error::Operand`] if there are none or more than 65536, or if rows of A or C would be longer than kernels
    /// address. If the device has too little memory.
    pub fn reserve_experts(
        &self,
        layout: &PackedLayout,
        format: &'static dyn WeightFormat,
        num_experts: u32,
        activation: Activation,
    ) -> Result<Experts, Error> {
        super::lists::check_num_experts(num_experts)?;
        check_shape(layout)?;
        let units = (layout.total_bytes as u64).div_ceil(EXPERT_ALIGN);
        let Ok(stride_units) = u32::try_from(units) else {
            let rule = format!("{} bytes each; at most 2^36, split the layer", layout.total_bytes);
            return Err(Error::Operand { operand: "experts", rule });
        };
        let factors = vec![kernel_factor(format, 1.0, activation); num_experts as usize];
        let ptr = self.backend.alloc(EXPERT_ALIGN * units * u64::from(num_experts))?;
        let factors_ptr = match self.backend.alloc(4 * u64::from(num_experts)) {
            Ok(factors_ptr) => factors_ptr,
            Err(error) => {
                self.backend.free(ptr)?;
                return Err(error.into());
            }
        };
        let experts = Experts {
            backend: self.backend.clone(),
            layout: *layout,
            format,
            activation,
            ptr,
            stride_units,
            factors,
            factors_ptr,
            bias: None,
        };
        self.backend.upload(factors_ptr, bytemuck::cast_slice(&experts.factors))?;
        Ok(experts)
    }

    /// Copies one expert of a stack to the device.
    ///
    /// # Errors
    /// Those of [`Gemm::upload_experts`], and [`Error::Operand`] if the stack has no such expert.
    pub fn upload_expert(
        &self,
        experts: &mut Experts,
        idx: u32,
        packed: &PackedWeights,
    ) -> Result<(), Error> {
        let error = |rule| Err(Error::Operand { operand: "experts", rule });
        if idx >= experts.num_experts() {
            let last = experts.num_experts() - 1;
            return error(format!("expert {idx} of a stack whose last one is {last}"));
        }
        if packed.input_order().is_some_and(|order| !order.is_identity()) {
            return error(format!(
                "the inputs of expert {idx} are packed in an order of their own (act-order), and one launch reads \
                 all rows of A in one order; quantise without act-order, or multiply expert by expert with \
                 Gemm::matmul"
            ));
        }
        let (layout, format) = (packed.layout(), packed.format().name());
        if *layout != experts.layout || format != experts.format.name() {
            return error(format!(
                "expert {idx} is {} x {} {format} with group {}, the stack is {} x {} {} with group {}, scales and \
                 all; experts of a stack are of one shape and type",
                layout.n,
                layout.k,
                layout.group,
                experts.layout.n,
                experts.layout.k,
                experts.format.name(),
                experts.layout.group
            ));
        }
        self.backend.upload(experts.expert_ptr(idx), packed.bytes())?;
        experts.set_factor(idx, packed.factor())
    }
}

impl Experts {
    /// The layout of each expert.
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The weight type's name.
    pub fn format(&self) -> &'static str {
        self.format.name()
    }

    /// Experts.
    pub fn num_experts(&self) -> u32 {
        self.factors.len() as u32
    }

    /// The type of A and C.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Where they lie.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Where an expert lies.
    pub fn expert_ptr(&self, idx: u32) -> DevicePtr {
        self.ptr.offset(EXPERT_ALIGN * u64::from(self.stride_units) * u64::from(idx))
    }

    /// Gives an expert a factor of all its products beside its scales: what [`PackedWeights::factor`] says of bytes that
    /// the caller wrote into [reserved](Gemm::reserve_experts) room.
    ///
    /// # Errors
    /// [`Error::Backend`] if it cannot be copied to the device.
    ///
    /// # Panics
    /// If the stack has no such expert.
    pub fn set_factor(&mut self, idx: u32, factor: f32) -> Result<(), Error> {
        let factor = kernel_factor(self.format, factor, self.activation);
        self.factors[idx as usize] = factor;
        let place = self.factors_ptr.offset(4 * u64::from(idx));
        Ok(self.backend.upload(place, &factor.to_le_bytes())?)
    }

    /// The experts with biases that every product gets added before it is weighted and rounded: `[num_experts][N]`
    /// numbers of C's type on the device, at a multiple of 2 bytes, of 8 for full speed. They stay the caller's and
    /// must outlive the last product.
    #[must_use]
    pub fn with_bias(mut self, bias: DevicePtr) -> Self {
        self.bias = Some(bias);
        self
    }

    /// The kind of products with them.
    pub fn kind(&self) -> Kind {
        Kind {
            format: self.format.name(),
            scales: self.layout.kind.scales,
            activation: self.activation,
            factor: self.factors.iter().any(|factor| *factor != 1.0),
            bias: self.bias.is_some(),
            residual: false,
            experts: true,
        }
    }

    /// A product with them, of blocks that there can be `max_blocks` of, `tile_m` rows each; rows of A are looked up in
    /// a list of `listed_rows`, or have its order.
    pub fn problem(
        &self,
        rows: Rows,
        tile_m: u32,
        max_blocks: u64,
        listed_rows: Option<u64>,
    ) -> ExpertProblem {
        let (n, k) = (self.layout.n as u32, self.layout.k as u32);
        let (kind, group) = (self.kind(), self.layout.group);
        ExpertProblem { kind, n, k, group, rows, tile_m, max_blocks, listed_rows }
    }

    pub(super) fn bias_ptr(&self) -> Option<DevicePtr> {
        self.bias
    }

    pub(super) fn factors_ptr(&self) -> DevicePtr {
        self.factors_ptr
    }

    /// From one expert to the next, in units of [`EXPERT_ALIGN`] bytes.
    pub(super) fn stride_units(&self) -> u32 {
        self.stride_units
    }
}

impl Drop for Experts {
    fn drop(&mut self) {
        for ptr in [self.ptr, self.factors_ptr] {
            if let Err(error) = self.backend.free(ptr) {
                log::debug!("freeing experts: {error}");
            }
        }
    }
}
