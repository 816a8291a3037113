//! A problem given on the command line.

use anyhow::Context;
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::Group;

/// The sizes of a product.
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
    /// Inputs that share a scale: -1 (all of a column), 32, 64 or 128.
    #[arg(long, default_value_t = 128, allow_negative_numbers = true)]
    pub group: i64,
}

impl ProblemArgs {
    /// The problem, for rows that lie densely at aligned addresses.
    pub fn problem(&self) -> anyhow::Result<Problem> {
        let missing = "a problem needs --m, --n and --k";
        let (m, n, k) =
            (self.m.context(missing)?, self.n.context(missing)?, self.k.context(missing)?);
        if m == 0 || n == 0 || k == 0 {
            anyhow::bail!("--m {m} --n {n} --k {k}: a kernel is made for at least 1 of each");
        }
        let group = Group::new(k as usize, self.group)?;
        Ok(Problem { kind: Kind::U4B8, m, n, k, group, rows: Rows::of(n as usize, k as usize) })
    }
}
