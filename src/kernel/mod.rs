//! GEMM kernels: families that build them, and the choice among their configurations.
//!
//! A family is one file and one line of [`FAMILIES`]. It says which configurations it has for a problem and
//! builds the module of one. This room emits programs; it never runs them.

mod cost;
mod elements;
pub mod epilogue;
pub mod experts;
pub mod gather;
pub mod order;
pub mod params;
pub mod problem;
mod reduction;
pub mod select;
pub mod sm80;
pub mod sm90;
pub mod sm90wg;
mod stream;
pub mod stripe;
mod tile;

pub use cost::{Cost, CostModel, Work};
pub use order::MatrixInstruction;
pub use params::{Arguments, OptionalArguments};
pub use problem::{Config, Conversion, Kind, Plan, Problem, Reduction, Rows, Scaling, Start};

use crate::asm::Module;
use crate::backend::ArgList;
use crate::target::{DeviceSpec, PtxIsa, SmArch};

/// A kernel design for a range of architectures.
pub trait KernelFamily: Sync {
    /// Its name in a configuration's name.
    fn name(&self) -> &'static str;
    /// Whether it runs on a target.
    fn runs_on(&self, target: SmArch) -> bool;
    /// The first PTX ISA with every instruction that all of it uses: a driver may be older.
    fn isa(&self) -> PtxIsa;
    /// The same of a configuration, whose options may need more.
    fn config_isa(&self, _config: &Config) -> PtxIsa {
        self.isa()
    }
    /// The first rule of the family's own that a configuration breaks, with its numbers.
    fn broken_rule(&self, config: &Config) -> Option<String>;
    /// Configurations worth considering for a problem, in the preferred numerics: lists in order of preference, of
    /// each of which the first legal one counts.
    fn candidates(&self, problem: &Problem) -> Vec<Vec<Config>>;
    /// The same with those that are never the fastest, but may be the fastest of an order of summation.
    fn all_candidates(&self, problem: &Problem) -> Vec<Vec<Config>> {
        self.candidates(problem)
    }
    /// What it multiplies with.
    fn instruction(&self) -> MatrixInstruction {
        MatrixInstruction::Mma
    }
    /// Stripes are multiples of this many runs, and so are tiles.
    fn stripe_step(&self, _config: &Config) -> u32 {
        1
    }
    /// Runs of a team whose weights are on their way while one is computed.
    fn runs_in_flight(&self, config: &Config) -> u32;
    /// What a launch with stripes of `stripe` runs is predicted to take.
    fn cost(&self, config: &Config, problem: &Problem, device: &DeviceSpec, stripe: u32) -> Cost;
    /// Bytes of shared memory of a configuration.
    fn smem_bytes(&self, config: &Config) -> u32;
    /// Appends the arguments after those of [`Params`](params::Params), if the family declares more.
    fn extra_arguments(&self, _config: &Config, _arguments: &Arguments, _list: &mut ArgList) {}
    /// What its kernels for experts are like, if it has any.
    fn experts(&self) -> Option<experts::Support> {
        None
    }
    /// Whether stripes run over the row tiles too; otherwise row tiles are the grid's second dimension.
    fn stripes_cover_rows(&self) -> bool {
        false
    }
    /// About how many registers a thread needs: with fewer the assembler spills.
    fn registers_needed(&self, config: &Config) -> u32;
    /// The kernel of a legal configuration.
    fn build(&self, config: &Config, target: SmArch) -> Module;
}

/// Every kernel family, by name.
pub const FAMILIES: &[&'static dyn KernelFamily] =
    &[&sm80::Sm80Family, &sm90::Sm90Family, &sm90wg::Sm90WgFamily];

const SM80: SmArch = SmArch::baseline(80);
const SM90: SmArch = SmArch::baseline(90);
const SM90A: SmArch = SmArch::specific(90);

/// The configurations whose PTX is kept in `ptx/`, few and chosen, each with what it shows. The test suite writes
/// the files and compares them byte for byte, printed for the target given.
#[rustfmt::skip]
pub const GOLDENS: &[(&str, SmArch, &str)] = &[
    ("marlin_sm80_u4b8_f16_m1n64k1024_g128_w1_s3_c1", SM80, "one row, 8 teams of one warp"),
    ("marlin_sm80_u4b8_f16_m4n64k256_g32_w2_s3_c1_ef", SM80, "four groups a run, evict-first weights"),
    ("marlin_sm80_u4b8_f16_m8n64k512_col_w1_s2_c1_el", SM80, "single elements, odd sizes"),
    ("marlin_sm80_u4b8_f16_m8n64k512_g128_w1_s4_c1", SM80, "eight rows: two k16 steps an ldmatrix"),
    ("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s2_c1_r16", SM80, "the paper's reduction"),
    ("marlin_sm80_u4b8_f16_m16n128k512_g128_w2_s3_c1", SM80, "teams that share activations"),
    ("marlin_sm80_u4b8_f16_m16n128k256_col_w2_s3_c1", SM80, "scales a column, in the epilogue"),
    ("marlin_sm80_u4b8_f16_m32n128k256_g64_w4_s2_c1_kt", SM80, "cut rows, two groups a run"),
    ("marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs", SM80, "tall tiles: windows, scaled fragments"),
    ("marlin_sm80_u4b8_f16_m16n64k512_g128_w2_s2_c1_sn", SM90, "subnormal codes; grids overlap"),
    ("marlin_sm80_u4b8_f16_m16n128k256_g128_w2_s3_c1_xp", SM90, "experts: items, rows of A by token"),
    ("marlin_sm90_u4b8_f16_m1n32k1024_g128_w1_s3_c1", SM90, "one row, rings of one warp each"),
    ("marlin_sm90_u4b8_f16_m16n128k512_g128_w2_s2_c1_sn", SM90, "subnormal codes, teams of two"),
    ("marlin_sm90wg_u4b8_f16_m16n64k512_g128_w4_s4_c1", SM90A, "16 rows: four teams of a warpgroup, promoted sums"),
    ("marlin_sm90wg_u4b8_f16_m64n256k128_g128_w8_s3_c1_x2_fs", SM90A, "two runs a stage, 128 channels a warpgroup"),
    ("marlin_sm90wg_u4b8_f16_m64n128k128_g128_w8_s4_c1_q2", SM90A, "clusters: two CTAs exchange halves of their sums"),
    ("marlin_sm90wg_u4b8_f16_m64n128k128_g128_w8_s4_c1_xp", SM90A, "experts: items, boxes of rows in the list's order"),
    ("marlin_sm90wg_u4b8_f16_m256n128k128_g128_w8_s3_c1_fs", SM90A, "prefill: never drained"),
];
