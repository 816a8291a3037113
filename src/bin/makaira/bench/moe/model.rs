//! Which experts a mixture has.

use std::fmt;
use std::str::FromStr;

use super::super::layer::Shape;

/// The experts of one layer of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeModel {
    /// The name, or the text that it was read from.
    pub name: String,
    /// Experts.
    pub num_experts: u32,
    /// Those that a token chooses.
    pub top_k: u32,
    /// The products of a layer, in order: the first one reads rows of tokens, the others rows of the list.
    pub products: Vec<Shape>,
}

/// Models by name: experts, how many a token chooses, hidden size, size between the products.
/// Source: the `config.json` of each.
const MODELS: [(&str, u32, u32, usize, usize); 3] = [
    ("mixtral", 8, 2, 4096, 14336),
    ("qwen3-30b-a3b", 128, 8, 2048, 768),
    ("deepseek-v3", 256, 8, 7168, 2048),
];

impl MoeModel {
    /// Rows of the list of so many tokens.
    pub fn rows(&self, tokens: u64) -> u64 {
        tokens * u64::from(self.top_k)
    }
}

impl fmt::Display for MoeModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let products: Vec<String> =
            self.products.iter().map(|shape| format!("{}x{}", shape.n, shape.k)).collect();
        let Self { name, num_experts, top_k, .. } = self;
        write!(f, "{name}: {num_experts} experts of {}, {top_k} a token", products.join(" and "))
    }
}

impl FromStr for MoeModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some((name, num_experts, top_k, hidden, inner)) =
            MODELS.into_iter().find(|model| model.0 == text)
        {
            let shape = |name: &str, n, k| Shape { name: name.to_owned(), n, k };
            let products = vec![shape("gateup", 2 * inner, hidden), shape("down", hidden, inner)];
            return Ok(Self { name: name.to_owned(), num_experts, top_k, products });
        }
        let sizes: Option<Vec<u32>> =
            text.split('x').map(|size| size.parse().ok().filter(|size| *size > 0)).collect();
        let Some(&[num_experts, n, k, top_k]) = sizes.as_deref() else {
            let names = MODELS.map(|(name, ..)| name).join(", ");
            return Err(format!(
                "`{text}` is no mixture of experts; write {names} or EXPERTSxNxKxTOP like 64x1024x2048x6"
            ));
        };
        if top_k > num_experts {
            return Err(format!(
                "`{text}` chooses {top_k} of {num_experts} experts; there are not as many"
            ));
        }
        let shape = Shape { name: "product".to_owned(), n: n as usize, k: k as usize };
        Ok(Self { name: text.to_owned(), num_experts, top_k, products: vec![shape] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_named_or_spelt_out() {
        let model: MoeModel = "qwen3-30b-a3b".parse().expect("a name");
        let sizes: Vec<_> = model.products.iter().map(|shape| (shape.n, shape.k)).collect();
        assert_eq!((model.num_experts, model.top_k, model.rows(3)), (128, 8, 24));
        assert_eq!(sizes, [(1536, 2048), (2048, 768)]);
        let model: MoeModel = "4x64x128x2".parse().expect("sizes");
        assert_eq!(model.to_string(), "4x64x128x2: 4 experts of 64x128, 2 a token");
        for wrong in ["4x64x128", "0x64x128x1", "4x64x128x-1", "x", "4x64x128x2x2"] {
            let error = wrong.parse::<MoeModel>().expect_err(wrong);
            assert!(error.contains("write mixtral, "), "{error}");
        }
    }
}
