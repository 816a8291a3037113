//! The permutation before products with weights whose inputs are packed in another order: see
//! [`gather`](crate::kernel::gather).

use std::sync::Arc;

use super::memory::Gather;
use super::{Error, Gemm, Matrix, Weight, Workspace};
use crate::backend::{DevicePtr, Enqueue, Kernel, Launch, Stream};
use crate::kernel::gather::{self, GatherArguments};
use crate::weights::InputOrder;

impl Gemm {
    /// Copies the order of a weight's inputs to the device, if activations must be gathered by it.
    pub(super) fn upload_order(&self, order: &InputOrder) -> Result<Option<Gather>, Error> {
        if order.is_identity() {
            return Ok(None);
        }
        let bytes: &[u8] = bytemuck::cast_slice(order.inputs());
        let ptr = self.backend.alloc(bytes.len() as u64)?;
        if let Err(error) = self.backend.upload(ptr, bytes) {
            self.backend.free(ptr)?;
            return Err(error.into());
        }
        Ok(Some(Gather { ptr, k: order.source_inputs() }))
    }

    /// The kernel that gathers; compiled now, for work on `stream` if there is any, if it was not before.
    pub(super) fn gather_kernel(&self, stream: Option<Stream>) -> Result<Arc<dyn Kernel>, Error> {
        if let Some(kernel) = &*self.gather.read().expect("no panic holds it") {
            return Ok(kernel.clone());
        }
        let module = gather::build(self.backend.device().arch);
        let kernel = match stream {
            Some(stream) => self.backend.load_for(&module, stream)?,
            None => self.backend.load(&module)?,
        };
        let mut slot = self.gather.write().expect("no panic holds it");
        Ok(slot.get_or_insert(kernel).clone())
    }

    /// Enqueues the gathering of `m` rows of activations into scratch memory, if the weight wants it; the matrix to
    /// multiply.
    pub(super) fn gathered(
        &self,
        a: Matrix,
        weight: &Weight,
        m: u64,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<Matrix, Error> {
        let Some(Gather { ptr: inputs, .. }) = weight.gather else { return Ok(a) };
        let kernel = self.gather_kernel(Some(order.stream))?;
        let columns = weight.layout.k as u32;
        let to = Matrix { ptr: workspace.scratch.unwrap_or(DevicePtr(0)), stride: columns.into() };
        let Enqueue { stream, overlap_previous } = order;
        // A launch counts rows in 32 bits.
        const MOST: u64 = 1 << 30;
        for first in (0..m).step_by(MOST as usize) {
            let args = GatherArguments {
                from_ptr: a.ptr.0 + 2 * a.stride * first,
                from_stride_bytes: (2 * a.stride) as u32,
                inputs_ptr: inputs.0,
                to_ptr: to.ptr.0 + 2 * to.stride * first,
                columns,
                rows: (m - first).min(MOST) as u32,
            };
            let list = args.list();
            let launch = Launch { grid: args.grid(), args: &list, stream, overlap_previous };
            self.backend.launch(&*kernel, &launch)?;
        }
        Ok(to)
    }
}
