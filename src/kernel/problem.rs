//! What is to be computed and how: plain values, each printable, none with behaviour of its own.
//!
//! `C[m][n] = A[m][k] * W[k][n]`, A and C fp16 or bf16, row-major, W quantised and packed. A [`Kind`] is what the
//! operands are; a [`Problem`] is that, the layer and the batch; a [`Config`] is one kernel; a [`Plan`] is one launch of it. A configuration has
//! one name, used for the PTX entry, the golden file, the cache entry and the bench row; it parses back.

use std::fmt;
use std::str::FromStr;

use crate::weights::{
    Activation, Fragments, Group, ScaleRow, TileKind, WeightFormat, format_by_name,
};

/// What is multiplied, and what is done to the product before it is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// The weight type's name, see [`crate::weights::FORMATS`].
    pub format: &'static str,
    /// What the packed weight's scale rows hold.
    pub scales: ScaleRow,
    /// The type of A, C, the bias and the residual.
    pub activation: Activation,
    /// The product is multiplied by a factor of the layer's.
    pub factor: bool,
    /// A number for each column is added.
    pub bias: bool,
    /// A matrix of C's shape is added.
    pub residual: bool,
    /// The weights are a stack of experts, and each row of C belongs to one: see [`super::experts`].
    pub experts: bool,
}

impl Kind {
    /// 4-bit codes with the bias 8 and fp16 scales, fp16 activations: symmetric GPTQ.
    pub const U4B8: Self = Self {
        format: "u4b8",
        scales: ScaleRow::F16,
        activation: Activation::F16,
        factor: false,
        bias: false,
        residual: false,
        experts: false,
    };

    /// The weight type.
    pub fn weight_format(&self) -> &'static dyn WeightFormat {
        format_by_name(self.format).expect("a kind names a registered format")
    }

    /// The conversion of the weights.
    pub fn fragments(&self) -> &'static dyn Fragments {
        self.weight_format().fragments().expect("a kind's weight type has a conversion")
    }

    /// What tiles of the packed weight hold.
    pub fn tile(&self) -> TileKind {
        TileKind::of(self.weight_format(), self.scales)
    }

    /// The first rule that the parts break together, with their names.
    pub(super) fn broken_rule(&self, group: Group) -> Option<String> {
        let Some(fragments) = self.weight_format().fragments() else {
            return Some(format!("no kernel takes the weight type {}", self.format));
        };
        if self.experts && self.residual {
            return Some("a residual beside experts: C is in the order of the list".into());
        }
        if self.scales == ScaleRow::F16 {
            return None;
        }
        if !matches!(group, Group::Size(16 | 32)) {
            return Some(format!("scales of one byte with group {group}, they go with 16 and 32"));
        }
        let zeros = fragments.zero_bases().is_some();
        zeros.then(|| format!("scales of one byte beside the zeros of {}", self.format))
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind { format, scales, activation, factor, bias, residual, experts } = self;
        write!(f, "{format} weights, {} activations", activation.name())?;
        if *scales == ScaleRow::E5m3 {
            write!(f, ", {E5M3} scales")?;
        }
        for (flag, name) in
            [(factor, "a factor"), (bias, "a bias"), (residual, "a residual"), (experts, "experts")]
        {
            if *flag {
                write!(f, ", {name}")?;
            }
        }
        Ok(())
    }
}

/// A matrix product to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// The operands.
    pub kind: Kind,
    /// Rows of A and C, the batch. May be 0.
    pub m: u64,
    /// Columns of C, outputs of the layer.
    pub n: u32,
    /// Columns of A, inputs of the layer.
    pub k: u32,
    /// How inputs share scales.
    pub group: Group,
    /// How rows of A and C can be accessed.
    pub rows: Rows,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { kind, m, n, k, group, rows } = self;
        let rows = match rows {
            Rows::Whole => "rows by whole runs of 128",
            Rows::Vector => "rows by vectors",
            Rows::Element => "rows by elements",
        };
        write!(f, "m {m}, n {n}, k {k}, group {}, {rows}", group.raw())?;
        match *kind == Kind::U4B8 {
            true => Ok(()),
            false => write!(f, ", {kind}"),
        }
    }
}

/// How rows of A and C can be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rows {
    /// A by 16 bytes, C by 8, and K is a multiple of 128: every run is whole.
    Whole,
    /// A by 16 bytes, C by 8: addresses, strides, K (8 elements) and N (4 elements) allow it.
    Vector,
    /// Element by element: any address that is a multiple of 2, any K, N and stride.
    Element,
}

impl Rows {
    /// How rows of exactly `n` and `k` elements that begin at aligned addresses can be accessed.
    pub fn of(n: usize, k: usize) -> Self {
        match (n % 4, k % 8, k % 128) {
            (0, 0, 0) => Rows::Whole,
            (0, 0, _) => Rows::Vector,
            _ => Rows::Element,
        }
    }
}

/// Where the group scale is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scaling {
    /// In single precision, once per group, on the group's partial sums.
    Promote,
    /// In half precision, on the weight fragments. Costs fewer instructions when the tile is tall.
    Fragment,
}

/// How codes become the fragments that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Conversion {
    /// To their values.
    Value,
    /// They stay where they lie, as fp16 subnormals, and the sums make up for it: see
    /// [`crate::weights::Subnormal`]. Fewer instructions for the weights, some more for the batch. A row of A
    /// that holds an infinity comes out as NaN, where values leave infinities.
    Subnormal,
}

/// How a kernel's stream of weights begins, where the family has a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Start {
    /// All slots of the ring are requested at once.
    Full,
    /// Half of them, the others when the first has arrived: the first bytes wait for fewer others.
    Ramped,
}

/// How CTAs that share a tile add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reduction {
    /// Partial sums in single precision through scratch memory, added in a fixed order by the CTA that
    /// began the tile. Bit-reproducible.
    F32,
    /// The paper's: one CTA after the other adds to the fp16 output. Needs no scratch memory and
    /// rounds once per hop.
    F16InPlace,
}

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Config {
    /// The kernel family that builds it.
    pub family: &'static str,
    /// The operands.
    pub kind: Kind,
    /// How inputs share scales.
    pub group: Group,
    /// Rows of C that a CTA computes: 1, 2, 4 or a multiple of 8.
    pub tile_m: u32,
    /// Columns of C that a CTA computes: `16 * tiles_per_warp * warps_n`.
    pub tile_n: u32,
    /// Warps side by side along n: a team. They share activations.
    pub warps_n: u32,
    /// Teams: each takes every `warps_k`-th run of 128 inputs, in `sm90wg` every `warps_k`-th part of a stage.
    pub warps_k: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Runs of 128 inputs of a team in one stage.
    pub runs_per_stage: u32,
    /// CTAs that share an SM.
    pub ctas_per_sm: u32,
    /// CTAs that share each part of a tile, 1 or 2: a cluster. Each sums its share of the runs, and they exchange
    /// halves of the sums through each other's shared memory. Stripes are a cluster's, not a CTA's.
    pub cluster_k: u32,
    /// How the stream of weights begins.
    pub start: Start,
    /// How codes become fragments.
    pub conversion: Conversion,
    /// Where the group scale is applied.
    pub scaling: Scaling,
    /// How CTAs that share a tile add up.
    pub reduction: Reduction,
    /// How rows of A and C are accessed.
    pub rows: Rows,
    /// Weights are loaded under an evict-first L2 policy. Off by default: see DESIGN.md. `sm90wg` always does so and
    /// has no such choice.
    pub evict_first: bool,
}

impl Config {
    /// Tiles of 16 channels that one warp owns.
    pub fn tiles_per_warp(&self) -> u32 {
        self.tile_n / 16 / self.warps_n
    }

    /// Warps of a CTA.
    pub fn num_warps(&self) -> u32 {
        self.warps_n * self.warps_k
    }

    /// Threads of a CTA.
    pub fn num_threads(&self) -> u32 {
        32 * self.num_warps()
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "marlin_{}_{}_{}_m{}n{}k{}_",
            self.family,
            self.kind.format,
            self.kind.activation.name(),
            self.tile_m,
            self.tile_n,
            128 * self.warps_k
        )?;
        match self.group {
            Group::PerColumn => write!(f, "col")?,
            Group::Size(size) => write!(f, "g{size}")?,
        }
        if self.kind.scales == ScaleRow::E5m3 {
            write!(f, "{E5M3}")?;
        }
        write!(f, "_w{}_s{}_c{}", self.warps_n, self.stages, self.ctas_per_sm)?;
        if self.runs_per_stage != 1 {
            write!(f, "_x{}", self.runs_per_stage)?;
        }
        if self.cluster_k != 1 {
            write!(f, "_q{}", self.cluster_k)?;
        }
        match self.start {
            Start::Full => {}
            Start::Ramped => write!(f, "_sr")?,
        }
        if self.conversion == Conversion::Subnormal {
            write!(f, "_sn")?;
        }
        if self.scaling == Scaling::Fragment {
            write!(f, "_fs")?;
        }
        if self.reduction == Reduction::F16InPlace {
            write!(f, "_r16")?;
        }
        match self.rows {
            Rows::Whole => {}
            Rows::Vector => write!(f, "_kt")?,
            Rows::Element => write!(f, "_el")?,
        }
        if self.evict_first {
            write!(f, "_ef")?;
        }
        let Kind { factor, bias, residual, experts, .. } = self.kind;
        for (flag, name) in [(factor, "_gf"), (bias, "_bi"), (residual, "_rs"), (experts, "_xp")] {
            if flag {
                f.write_str(name)?;
            }
        }
        Ok(())
    }
}

/// What a name says of scales of one byte, after the group.
const E5M3: &str = "e5m3";

/// The text is no configuration's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is no configuration's name: {why}; a name looks like {EXAMPLE}")]
pub struct ParseConfigError {
    name: String,
    why: &'static str,
}

const EXAMPLE: &str = "marlin_sm80_u4b8_f16_m16n64k1024_g128_w1_s3_c2";

impl FromStr for Config {
    type Err = ParseConfigError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let error = |why| ParseConfigError { name: name.to_owned(), why };
        let mut fields = name.split('_');
        let mut next = |why| fields.next().ok_or(error(why));
        if next("it is empty")? != "marlin" {
            return Err(error("it does not start with marlin"));
        }
        let family = next("the family is missing")?;
        let family = super::FAMILIES.iter().find(|known| known.name() == family);
        let family = family.ok_or(error("the family is unknown"))?.name();
        let format = format_by_name(next("the weight type is missing")?);
        let format = format.ok_or(error("the weight type is unknown"))?;
        format.fragments().ok_or(error("no kernel takes the weight type"))?;
        let format = format.name();
        let activation = match next("the activation type is missing")? {
            "f16" => Activation::F16,
            "bf16" => Activation::Bf16,
            _ => return Err(error("the activation type is unknown")),
        };
        let tile = next("the tile is missing")?;
        let sizes = tile.strip_prefix('m').and_then(|sizes| {
            let (m, rest) = sizes.split_once('n')?;
            let (n, k) = rest.split_once('k')?;
            Some((m.parse().ok()?, n.parse().ok()?, k.parse::<u32>().ok()?))
        });
        let (tile_m, tile_n, tile_k) = sizes.ok_or(error("the tile is not like m16n64k1024"))?;
        let group = next("the group is missing")?;
        let (group, scales) = match group.strip_suffix(E5M3) {
            Some(group) => (group, ScaleRow::E5m3),
            None => (group, ScaleRow::F16),
        };
        let group = match group {
            "col" => Group::PerColumn,
            size => {
                let size = size.strip_prefix('g').and_then(|size| size.parse().ok());
                Group::Size(size.ok_or(error("the group is neither col nor like g128"))?)
            }
        };
        let mut number = |prefix: char, why| {
            let digits = next(why)?.strip_prefix(prefix).ok_or(error(why))?;
            digits.parse::<u32>().map_err(|_| error(why))
        };
        let warps_n = number('w', "the team size (w) is missing")?;
        let stages = number('s', "the number of stages (s) is missing")?;
        let ctas_per_sm = number('c', "the number of CTAs per SM (c) is missing")?;
        let mut config = Config {
            family,
            kind: Kind { format, scales, activation, ..Kind::U4B8 },
            group,
            tile_m,
            tile_n,
            warps_n,
            warps_k: tile_k / 128,
            stages,
            runs_per_stage: 1,
            ctas_per_sm,
            cluster_k: 1,
            start: Start::Full,
            conversion: Conversion::Value,
            scaling: Scaling::Promote,
            reduction: Reduction::F32,
            rows: Rows::Whole,
            evict_first: false,
        };
        for flag in fields {
            match flag {
                "x2" => config.runs_per_stage = 2,
                "x4" => config.runs_per_stage = 4,
                "q2" => config.cluster_k = 2,
                "sr" => config.start = Start::Ramped,
                "sn" => config.conversion = Conversion::Subnormal,
                "fs" => config.scaling = Scaling::Fragment,
                "r16" => config.reduction = Reduction::F16InPlace,
                "kt" => config.rows = Rows::Vector,
                "el" => config.rows = Rows::Element,
                "ef" => config.evict_first = true,
                "gf" => config.kind.factor = true,
                "bi" => config.kind.bias = true,
                "rs" => config.kind.residual = true,
                "xp" => config.kind.experts = true,
                _ => {
                    let why =
                        "a flag is none of x2, x4, q2, sr, sn, fs, r16, kt, el, ef, gf, bi, rs, xp";
                    return Err(error(why));
                }
            }
        }
        // One spelling per configuration.
        if config.to_string() != name {
            return Err(error("its fields are not in canonical form"));
        }
        Ok(config)
    }
}

/// One launch of a configuration for rows `first_row ..` of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// CTAs: stripes (x), each once for each CTA of its cluster, and row tiles (y).
    pub grid: [u32; 2],
    /// Runs of 128 inputs per stripe.
    pub stripe: u32,
    /// Bytes of scratch memory for partial sums.
    pub scratch_bytes: u64,
    /// Lock words, zero before and after each launch.
    pub num_locks: u64,
    /// First row of A and C.
    pub first_row: u64,
    /// Number of rows.
    pub num_rows: u32,
}
