//! What the conventions share: fetching a tensor of a known type and shape, and reading its words.

use super::{Convention, Dtype, Error, Tensor, Tensors};

/// The tensor `layer` + `suffix` of element type `dtype` and two dimensions.
pub(super) fn matrix_tensor<'a>(
    convention: &'static dyn Convention,
    tensors: &'a Tensors,
    (layer, suffix): (&str, &str),
    dtype: Dtype,
) -> Result<(Tensor<'a>, [usize; 2]), Error> {
    let tensor = required(convention, tensors, layer, suffix)?;
    check_dtype(&tensor, dtype)?;
    let &[rows, columns] = tensor.shape else {
        return Err(shape_error(&tensor, "two dimensions".to_owned()));
    };
    Ok((tensor, [rows, columns]))
}

/// The tensor `layer` + `suffix`, which the convention needs.
pub(super) fn required<'a>(
    convention: &'static dyn Convention,
    tensors: &'a Tensors,
    layer: &str,
    suffix: &str,
) -> Result<Tensor<'a>, Error> {
    let name = format!("{layer}{suffix}");
    let convention = convention.name();
    tensors.get(&name).ok_or(Error::MissingTensor { tensor: name, convention })
}

pub(super) fn check_dtype(tensor: &Tensor<'_>, expected: Dtype) -> Result<(), Error> {
    if tensor.dtype == expected {
        Ok(())
    } else {
        Err(Error::TensorDtype { tensor: tensor.name.to_owned(), expected, found: tensor.dtype })
    }
}

pub(super) fn check_shape(tensor: &Tensor<'_>, expected: &[usize]) -> Result<(), Error> {
    if tensor.shape == expected {
        Ok(())
    } else {
        Err(shape_error(tensor, format!("{expected:?}")))
    }
}

pub(super) fn shape_error(tensor: &Tensor<'_>, expected: String) -> Error {
    let found = tensor.shape.to_vec();
    Error::TensorShape { tensor: tensor.name.to_owned(), expected, found }
}

/// The little-endian words of a tensor of 32-bit integers.
pub(super) fn words<'a>(tensor: &Tensor<'a>) -> impl Iterator<Item = u32> + 'a {
    let quads = tensor.bytes.chunks_exact(4);
    quads.map(|quad| u32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]))
}
