//! Rows of A in the list's order: see [`rows`](crate::kernel::experts::rows).

use std::sync::Arc;

use super::{Experts, Routed};
use crate::backend::{DevicePtr, Enqueue, Kernel, Stream};
use crate::gemm::{Error, Gemm, Matrix, Workspace};
use crate::kernel::experts::rows::{self, RowsArguments};

/// Bytes of scratch memory for `rows` rows.
pub(super) fn bytes(experts: &Experts, rows: u64) -> u64 {
    2 * rows * experts.layout().k as u64
}

impl Gemm {
    pub(super) fn rows_kernel(&self, stream: Option<Stream>) -> Result<Arc<dyn Kernel>, Error> {
        self.list_kernel(&self.experts.rows, rows::build, stream)
    }

    /// Enqueues the ordering of A's rows, which are whole vectors, into scratch memory; the matrix to multiply.
    pub(super) fn ordered(
        &self,
        a: Matrix,
        experts: &Experts,
        routed: &Routed<'_>,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<Matrix, Error> {
        let Some((token_ids_ptr, num_tokens)) = routed.tokens() else { return Ok(a) };
        let (rows, k) = (routed.rows(), experts.layout().k as u64);
        let need_bytes = bytes(experts, rows);
        if need_bytes > workspace.scratch_bytes {
            return Err(Error::Workspace {
                m: rows,
                have_bytes: workspace.scratch_bytes,
                have_locks: workspace.num_locks,
                need_bytes,
                need_locks: 0,
            });
        }
        let to = Matrix { ptr: workspace.scratch.unwrap_or(DevicePtr(0)), stride: k };
        let arguments = RowsArguments {
            from_ptr: a.ptr.0,
            from_stride_bytes: (2 * a.stride) as u32,
            token_ids_ptr,
            num_tokens,
            end_ptr: routed.end_ptr().0,
            to_ptr: to.ptr.0,
            row_bytes: 2 * k as u32,
            rows: rows as u32,
        };
        let kernel = self.rows_kernel(Some(order.stream))?;
        self.launch_list(&*kernel, arguments.grid(), &arguments.list(), order)?;
        Ok(to)
    }
}
