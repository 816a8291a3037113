//! Which linear layers a chain has.
//!
//! A model is a number of equal layers; the products of a layer follow one another, the first of the next
//! layer follows the last. Each takes the leading columns of its predecessor's output as its input, so that
//! the chain is a real one: no product can begin before its predecessor has ended. (In a transformer other
//! kernels stand between them; none has fewer outputs than the next has inputs.)

use std::fmt;
use std::str::FromStr;

use makaira::weights::PackedLayout;

use super::layer::Shape;
use crate::problem::KindArgs;

/// The linear layers of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The name, or the text that it was read from.
    pub name: String,
    /// How often the products are repeated, each time with weights of their own.
    pub num_layers: usize,
    /// The products of one layer, in order.
    pub products: Vec<Shape>,
}

/// Models by name: their layers, and what the names of their products begin with.
const MODELS: [(&str, usize, &str); 2] = [("8b", 32, "8b_"), ("70b", 80, "70b_")];

impl Model {
    /// The number of products.
    pub fn num_launches(&self) -> usize {
        self.num_layers * self.products.len()
    }

    /// The product with a number, and which of its layer it is.
    pub fn product(&self, idx: usize) -> (usize, &Shape) {
        let in_layer = idx % self.products.len();
        (in_layer, &self.products[in_layer])
    }

    /// Packed layouts of one layer's weights.
    ///
    /// # Errors
    /// Those of [`KindArgs::group`] and [`PackedLayout::of`].
    pub fn layouts(&self, kind: &KindArgs) -> anyhow::Result<Vec<PackedLayout>> {
        let tile = kind.kind().tile();
        let layout =
            |shape: &Shape| Ok(PackedLayout::of(shape.n, shape.k, kind.group(shape.k)?, tile)?);
        self.products.iter().map(layout).collect()
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let products: Vec<String> =
            self.products.iter().map(|shape| format!("{}x{}", shape.n, shape.k)).collect();
        write!(f, "{}: {} layers of {}", self.name, self.num_layers, products.join(", "))
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((name, num_layers, prefix)) = MODELS.iter().find(|model| model.0 == text) {
            let of = |shape: &Shape| shape.name.starts_with(prefix);
            let products = Shape::all().into_iter().filter(of).collect();
            return Ok(Self { name: (*name).to_owned(), num_layers: *num_layers, products });
        }
        let parts = text.split_once('x').and_then(|(layers, products)| {
            let layers: usize = layers.parse().ok().filter(|layers| *layers > 0)?;
            Some((
                layers,
                products.split('+').map(str::parse).collect::<Result<Vec<Shape>, _>>().ok()?,
            ))
        });
        let (num_layers, products) = parts.ok_or_else(|| {
            format!(
                "`{text}` is no model; write 8b, 70b or layers and products like 4x768x512+512x768"
            )
        })?;
        if products.len() < 2 {
            return Err(format!(
                "`{text}` has one product, which would overwrite its own input; give two"
            ));
        }
        for (idx, product) in products.iter().enumerate() {
            let next = &products[(idx + 1) % products.len()];
            if product.n < next.k {
                return Err(format!(
                    "in `{text}` {} outputs cannot feed {} inputs; each product needs as many outputs as \
                     the next has inputs",
                    product.n, next.k
                ));
            }
        }
        Ok(Self { name: text.to_owned(), num_layers, products })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_models_are_whole_and_feed_themselves() {
        for (name, launches, gigabytes) in [("8b", 128, 3.60), ("70b", 320, 35.29)] {
            let model: Model = name.parse().expect("a name");
            assert_eq!(model.num_launches(), launches);
            let layouts = model.layouts(&KindArgs::default()).expect("group 128 divides all");
            let bytes: usize = layouts.iter().map(|layout| layout.total_bytes).sum();
            let total = (bytes * model.num_layers) as f64 / 1e9;
            assert!((total - gigabytes).abs() < 0.01, "{total}");
            for idx in 0..launches {
                let (_, product) = model.product(idx);
                assert!(product.n >= model.product(idx + 1).1.k, "{idx}");
            }
        }
        let model: Model = "8b".parse().expect("a name");
        assert_eq!(
            model.to_string(),
            "8b: 32 layers of 6144x4096, 4096x4096, 28672x4096, 4096x14336"
        );
    }

    #[test]
    fn models_parse_and_the_impossible_ones_say_why() {
        let model: Model = "3x768x512+512x256+512x512".parse().expect("each feeds the next");
        assert_eq!((model.num_layers, model.products.len()), (3, 3));
        assert_eq!(model.product(4).1.k, 256);
        for (text, why) in [
            ("13b", "is no model"),
            ("0x512x512+512x512", "is no model"),
            ("2x512", "is no model"),
            ("2x512x512+512", "is no model"),
            ("2x512x512", "overwrite its own input"),
            ("2x512x512+256x512", "256 outputs cannot feed 512 inputs"),
        ] {
            let error = text.parse::<Model>().expect_err("impossible");
            assert!(error.contains(why), "{error}");
        }
    }
}
