//! A problem given on the command line: what is multiplied, and its sizes.

use std::fmt;
use std::str::FromStr;

use anyhow::Context;
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::{
    Activation, E2M1, FORMATS, Group, ScaleRow, ScaleType, U4B8, WeightFormat, ZeroRule,
};

/// Weights as checkpoints have them: a type of codes and what goes with it.
#[derive(Clone, Copy, Debug)]
pub struct WeightType {
    /// The type of the codes.
    pub format: &'static dyn WeightFormat,
    /// The type of the scales.
    pub scales: ScaleType,
    /// The only group size, where there is one.
    fixed_group: Option<u32>,
}

/// fp4 with scales of one byte, by the names of their specifications.
const FP4_VARIANTS: [(&str, ScaleType, u32); 2] =
    [("nvfp4", ScaleType::E4M3, 16), ("mxfp4", ScaleType::E8M0, 32)];

impl WeightType {
    /// Symmetric GPTQ.
    pub const U4B8: Self = Self { format: &U4B8, scales: ScaleType::F16, fixed_group: None };

    /// Every type, by name: those of the codes with fp16 scales, and the variants of fp4.
    pub fn all() -> Vec<Self> {
        let of = |format: &&'static dyn WeightFormat| Self { format: *format, ..Self::U4B8 };
        let variants = FP4_VARIANTS.map(|(_, scales, group)| Self {
            format: &E2M1,
            scales,
            fixed_group: Some(group),
        });
        FORMATS.iter().map(of).chain(variants).collect()
    }

    /// Whether scales have a common factor of type f32.
    pub fn has_global_scale(&self) -> bool {
        self.scales == ScaleType::E4M3
    }

    /// What tiles hold of the scales.
    fn scale_row(&self) -> ScaleRow {
        match self.scales {
            ScaleType::E4M3 | ScaleType::E8M0 => ScaleRow::E5m3,
            ScaleType::F16 | ScaleType::BF16 | ScaleType::F32 => ScaleRow::F16,
        }
    }

    /// Products with such weights. Scales of floats are brought into the range that kernels want, and a factor makes
    /// up for it.
    pub fn kind(&self, activation: Activation) -> Kind {
        let factor = self.format.zero_rule() == ZeroRule::Float;
        let (format, scales) = (self.format.name(), self.scale_row());
        Kind { format, scales, activation, factor, ..Kind::U4B8 }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variant = FP4_VARIANTS.iter().find(|(_, scales, _)| *scales == self.scales);
        f.write_str(variant.map_or(self.format.name(), |(name, ..)| name))
    }
}

impl FromStr for WeightType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = Self::all();
        all.iter().find(|known| known.to_string() == text).copied().ok_or_else(|| {
            let names: Vec<String> = all.iter().map(Self::to_string).collect();
            format!("`{text}` is no weight type; there are {}", names.join(", "))
        })
    }
}

/// What is multiplied.
#[derive(Clone, Debug, clap::Args)]
pub struct KindArgs {
    /// Type of the weights: u4b8, u4, u8b128, u8, e4m3 (fp8) or e2m1 (fp4) with fp16 scales; nvfp4 or mxfp4.
    #[arg(long = "type", value_name = "TYPE", default_value_t = WeightType::U4B8)]
    pub weight: WeightType,
    /// Type of the activations and the product: f16 or bf16.
    #[arg(long, default_value = "f16", value_parser = activation)]
    pub activation: Activation,
    /// Inputs that share a scale: -1 (all of a column), 16, 32, 64 or 128 [default: 128; 16 for nvfp4, 32 for mxfp4].
    #[arg(long, allow_negative_numbers = true)]
    pub group: Option<i64>,
}

impl Default for KindArgs {
    fn default() -> Self {
        Self { weight: WeightType::U4B8, activation: Activation::F16, group: None }
    }
}

fn activation(text: &str) -> Result<Activation, String> {
    [Activation::F16, Activation::Bf16]
        .into_iter()
        .find(|activation| activation.name() == text)
        .ok_or_else(|| format!("`{text}` is neither f16 nor bf16"))
}

impl KindArgs {
    /// How `k` inputs share scales.
    ///
    /// # Errors
    /// For a group that does not divide `k`, or is not that of the weight type.
    pub fn group(&self, k: usize) -> anyhow::Result<Group> {
        let (weight, raw) = (self.weight, self.raw_group());
        match weight.fixed_group {
            Some(fixed) if raw != i64::from(fixed) => anyhow::bail!(
                "--group {raw}: groups of {weight} have {fixed} inputs; e2m1 takes others, with fp16 scales"
            ),
            _ => Ok(Group::new(k, raw)?),
        }
    }

    /// The group as it is given, or the type's own.
    pub fn raw_group(&self) -> i64 {
        self.group.unwrap_or(self.weight.fixed_group.map_or(128, i64::from))
    }

    /// Products with such weights and activations.
    pub fn kind(&self) -> Kind {
        self.weight.kind(self.activation)
    }

    /// For a person.
    pub fn text(&self) -> String {
        format!("{} weights, {} activations", self.weight, self.activation.name())
    }
}

/// A product.
#[derive(Debug, clap::Args)]
pub struct ProblemArgs {
    /// Rows of the activations: the batch.
    #[arg(long, requires_all = ["n", "k"])]
    pub m: Option<u64>,
    /// Outputs of the layer.
    #[arg(long, requires = "m")]
    pub n: Option<u32>,
    /// Inputs of the layer.
    #[arg(long, requires = "m")]
    pub k: Option<u32>,
    #[command(flatten)]
    pub kind: KindArgs,
}

impl ProblemArgs {
    /// The problem, for rows that lie densely at aligned addresses.
    ///
    /// # Errors
    /// For missing or empty sizes and those of [`KindArgs::group`].
    pub fn problem(&self) -> anyhow::Result<Problem> {
        let missing = "a problem needs --m, --n and --k";
        let (m, n, k) =
            (self.m.context(missing)?, self.n.context(missing)?, self.k.context(missing)?);
        if m == 0 || n == 0 || k == 0 {
            anyhow::bail!("--m {m} --n {n} --k {k}: a kernel is made for at least 1 of each");
        }
        let (kind, group) = (self.kind.kind(), self.kind.group(k as usize)?);
        Ok(Problem { kind, m, n, k, group, rows: Rows::of(n as usize, k as usize) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(weight: &str, group: Option<i64>) -> KindArgs {
        let weight = weight.parse().expect("a type");
        KindArgs { weight, activation: Activation::F16, group }
    }

    #[test]
    fn types_have_names_that_parse_back_and_kinds_of_their_own() {
        let mut kinds = Vec::new();
        for weight in WeightType::all() {
            let back: WeightType = weight.to_string().parse().expect("its name");
            assert_eq!(back.to_string(), weight.to_string());
            for activation in [Activation::F16, Activation::Bf16] {
                kinds.push((weight.kind(activation), weight.fixed_group));
            }
        }
        assert_eq!(kinds.len(), 2 * (FORMATS.len() + 2));
        for (idx, kind) in kinds.iter().enumerate() {
            assert!(!kinds[..idx].contains(kind), "{kind:?}");
        }
        assert_eq!(WeightType::U4B8.kind(Activation::F16), Kind::U4B8);
        let error = "int4".parse::<WeightType>().expect_err("no type");
        assert!(error.contains("there are e2m1, ") && error.ends_with("nvfp4, mxfp4"), "{error}");
    }

    #[test]
    fn groups_are_those_of_the_type() {
        let group = |weight, raw| args(weight, raw).group(256).map(|group| group.raw());
        assert_eq!(group("u8", None).expect("legal"), 128);
        assert_eq!(group("e2m1", Some(-1)).expect("legal"), -1);
        assert_eq!(group("nvfp4", None).expect("legal"), 16);
        assert_eq!(group("mxfp4", Some(32)).expect("legal"), 32);
        let error = group("mxfp4", Some(64)).expect_err("its groups are smaller").to_string();
        assert!(error.contains("--group 64") && error.contains("have 32 inputs"), "{error}");
    }
}
