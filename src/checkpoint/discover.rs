//! Which layers the tensors make up, by each convention, and whether any of another label are among them.

use super::{CONVENTIONS, Convention, Error, LayerInfo, QuantConfig, Source, Tensors};

/// The sources of a convention's layers: one for each stem with the marker, or for each of its
/// experts.
fn sources_of<'c, 'a>(
    convention: &'static dyn Convention,
    config: &'c QuantConfig,
    tensors: &'a Tensors,
) -> impl Iterator<Item = Source<'c, 'a>>
where
    'a: 'c,
{
    tensors.names().flat_map(move |name| {
        let stem = name.strip_suffix(convention.marker_suffix());
        let tensor = stem.and_then(|_| tensors.get(name));
        let num_experts = tensor.and_then(|tensor| {
            let is_stack = tensor.shape.len() == convention.marker_dims() + 1;
            is_stack.then(|| tensor.shape[0]).filter(|&num_experts| num_experts > 0)
        });
        // An empty tensor may claim any number of experts: one is enough to refuse it.
        let is_empty = tensor.is_none_or(|tensor| tensor.bytes.is_empty());
        let count = if is_empty { 1 } else { num_experts.unwrap_or(1) };
        let experts = stem.into_iter().flat_map(move |stem| {
            (0..count).map(move |expert| {
                let expert = num_experts.map(|num_experts| (expert, num_experts));
                Source { config, tensors, stem, expert }
            })
        });
        experts.filter(|source| convention.recognises(source))
    })
}

pub(super) fn layers_of(
    convention: &'static dyn Convention,
    config: &QuantConfig,
    tensors: &Tensors,
) -> Result<Vec<LayerInfo>, Error> {
    sources_of(convention, config, tensors).map(|source| convention.describe(&source)).collect()
}

/// Refuses tensors that are quantised by a convention of another label.
pub(super) fn refuse_other_conventions(
    config: &QuantConfig,
    tensors: &Tensors,
) -> Result<(), Error> {
    let method = config.method.as_deref();
    let others = CONVENTIONS.iter().filter(|other| {
        // Plain weights lie beside quantised ones in every checkpoint.
        other.method().is_some() && other.method() != method
    });
    for other in others {
        // fp8's two labels have the same tensors.
        let same_tensors = |own: &&&'static dyn Convention| {
            own.method() == method && own.marker_suffix() == other.marker_suffix()
        };
        let mut found = sources_of(*other, config, tensors).filter(|source| {
            !CONVENTIONS.iter().filter(same_tensors).any(|own| own.recognises(source))
        });
        if let Some(source) = found.next() {
            let label = match method {
                Some(method) => format!("quant_method {method}"),
                None => "nothing of a quantisation".to_owned(),
            };
            let tensor = format!("{}{}", source.stem, other.marker_suffix());
            let (path, found) = (config.path.clone(), other.name());
            return Err(Error::LabelDisagrees { path, label, found, tensor });
        }
    }
    Ok(())
}
