//! The operands of a call: their rules, and the kernel arguments made of them.

use super::{Error, Weight, Workspace};
use crate::backend::DevicePtr;
use crate::kernel::select::{self, MAX_ROW_STRIDE_BYTES, MAX_ROWS};
use crate::kernel::{Arguments, Config, OptionalArguments, Plan, Problem, Rows};
use crate::weights::PackedLayout;

/// A row-major matrix in device memory, fp16 or what the weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Address of the first element.
    pub ptr: DevicePtr,
    /// Elements from one row to the next, at least the number of columns.
    pub stride: u64,
}

/// Refuses a batch that no memory holds, before sizes are computed from it.
pub(super) fn check_rows(m: u64) -> Result<(), Error> {
    if m <= MAX_ROWS {
        return Ok(());
    }
    Err(Error::Operand {
        operand: "m",
        rule: format!("{m} rows, at most {MAX_ROWS}; split the batch"),
    })
}

/// Refuses a weight whose rows of A or C would be longer than kernels address.
pub(super) fn check_shape(layout: &PackedLayout) -> Result<(), Error> {
    let (n, k) = (layout.n, layout.k);
    let most = MAX_ROW_STRIDE_BYTES / 2;
    if n.max(k) as u64 <= most {
        return Ok(());
    }
    let rule = format!("{n} outputs x {k} inputs; at most {most} of each, split the layer");
    Err(Error::Operand { operand: "weight", rule })
}

/// How these operands' rows can be accessed.
pub(super) fn rows_of(
    weight: &Weight,
    a: Matrix,
    residual: Option<Matrix>,
    c: Matrix,
) -> Result<Rows, Error> {
    // Gathered activations lie as kernels like them.
    let is_gathered = weight.gather.is_some();
    access(weight.layout(), (a, weight.source_inputs(), is_gathered), residual, c, weight.bias)
}

/// The same for a layout, an A of so many columns that is gathered or not, and a bias.
pub(super) fn access(
    layout: &PackedLayout,
    (a, columns, is_gathered): (Matrix, usize, bool),
    residual: Option<Matrix>,
    c: Matrix,
    bias: Option<DevicePtr>,
) -> Result<Rows, Error> {
    let residual = residual.map(|residual| ("residual", residual, layout.n));
    let operands = [("a", a, columns), ("c", c, layout.n)].into_iter().chain(residual);
    for (operand, matrix, columns) in operands {
        let error = |rule| Err(Error::Operand { operand, rule });
        if !matrix.ptr.0.is_multiple_of(2) {
            return error(format!("address {:#x} is odd; elements need 2 bytes", matrix.ptr.0));
        }
        if matrix.stride < columns as u64 {
            return error(format!(
                "a stride of {} elements is less than the {columns} columns",
                matrix.stride
            ));
        }
        if 2 * matrix.stride > MAX_ROW_STRIDE_BYTES {
            return error(format!(
                "a stride of {} elements is more than {}; copy the rows closer together",
                matrix.stride,
                MAX_ROW_STRIDE_BYTES / 2
            ));
        }
    }
    let aligned = |matrix: Matrix, bytes: u64| {
        matrix.ptr.0.is_multiple_of(bytes) && (2 * matrix.stride).is_multiple_of(bytes)
    };
    let bias = bias.unwrap_or(DevicePtr(0)).0;
    if !bias.is_multiple_of(2) {
        let rule = format!("address {bias:#x} is odd; elements need 2 bytes");
        return Err(Error::Operand { operand: "bias", rule });
    }
    let vectors = (is_gathered || aligned(a, 16))
        && aligned(c, 8)
        && residual.is_none_or(|(_, residual, _)| aligned(residual, 8))
        && bias.is_multiple_of(8);
    Ok(if vectors { Rows::of(layout.n, layout.k) } else { Rows::Element })
}

pub(super) fn arguments(
    plan: &Plan,
    config: &Config,
    problem: &Problem,
    (a, weight, residual, c): (Matrix, &Weight, Option<Matrix>, Matrix),
    workspace: &Workspace,
) -> Arguments {
    let layout = weight.layout();
    let k_tiles = layout.num_k_tiles() as u32;
    let num_tiles = select::num_tiles(config, problem, plan.num_rows.into());
    let deal = select::deal(config, plan, num_tiles as u32, k_tiles);
    // Nothing is divided by a share that nobody has.
    let stripe = deal.share.max(1);
    let [(k_tiles_magic, k_tiles_shift), (stripe_magic, stripe_shift)] =
        select::magics(problem, stripe);
    let at = |matrix: Matrix| matrix.ptr.0 + 2 * matrix.stride * plan.first_row;
    Arguments {
        a_ptr: at(a),
        b_ptr: weight.ptr.0,
        c_ptr: at(c),
        column_scales_ptr: weight.ptr.0 + layout.column_scales_offset.unwrap_or(0) as u64,
        scratch_ptr: workspace.scratch.map_or(0, |ptr| ptr.0) + weight.gathered_bytes(problem.m),
        locks_ptr: workspace.locks.map_or(0, |ptr| ptr.0),
        m: plan.num_rows,
        n: problem.n,
        k: problem.k,
        a_stride_bytes: (2 * a.stride) as u32,
        c_stride_bytes: (2 * c.stride) as u32,
        num_chunk_columns: (layout.n_padded / crate::weights::CHUNK_CHANNELS) as u32,
        k_tiles,
        num_runs: deal.shared_tiles * k_tiles,
        stripe,
        k_tiles_magic,
        k_tiles_shift,
        stripe_magic,
        stripe_shift,
        optional: OptionalArguments {
            factor_bits: weight.kernel_factor(config.kind.activation).to_bits(),
            bias_ptr: weight.bias.map_or(0, |bias| bias.0),
            residual_ptr: residual.map_or(0, at),
            residual_stride_bytes: residual.map_or(0, |residual| (2 * residual.stride) as u32),
            ..OptionalArguments::default()
        },
    }
}
