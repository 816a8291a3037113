//! Products with a stack of experts: a layer of a mixture of experts in one launch.
//!
//! ```text
//! choices of tokens --route--> list of rows by expert, row blocks --matmul_experts--> C, a row for each of the list
//! ```
//!
//! Nothing comes back to the host in between: it knows how many rows there are at most, the device knows whose they
//! are. An [`Experts`] is the weights, a [`Routing`] the lists' memory, a [`Routed`] what a batch's lists mean for
//! a product. Experts without a row cost nothing.
//!
//! A layer is a product by token ([`Routed`] as it comes), the activation function in the list's order, and a product
//! [in that order](Routed::in_order), [weighted](Routed::weighted); [`Routing::places_ptr`] says where a token's rows
//! lie, to add them up.
//!
//! ```
//! use std::sync::Arc;
//!
//! use half::f16;
//! use makaira::gemm::experts::Choices;
//! use makaira::reference::{Random, Reference};
//! use makaira::weights::{Activation, Dense, Group, quantize};
//! use makaira::{Backend, EmuBackend, Gemm, Matrix, PackedWeights, Stream};
//!
//! // `GpuBackend::open(0)?` where there is a GPU.
//! let backend: Arc<dyn Backend> = Arc::new(EmuBackend::h200_like(4));
//! let gemm = Gemm::new(backend.clone());
//! let (num_experts, tokens, top_k, n, k) = (4, 3, 2, 64, 256);
//! let mut random = Random::new(1);
//! let mut packed = Vec::new();
//! for _ in 0..num_experts {
//!     let dense: Vec<f32> = (0..n * k).map(|_| random.uniform(-1.0, 1.0) as f32).collect();
//!     let dense = Dense::F32(bytemuck::cast_slice(&dense));
//!     packed.push(PackedWeights::pack(&quantize(dense, n, k, Group::Size(128), 1)?.view(), 1)?);
//! }
//! let experts = gemm.upload_experts(&packed, Activation::F16)?;
//! let routing = gemm.routing(num_experts, tokens, top_k)?;
//! let workspace = gemm.expert_workspace(&experts, tokens, top_k)?;
//! gemm.prepare_experts(&experts, tokens, top_k)?;
//!
//! // What a router leaves on the device: nobody has chosen expert 2.
//! let put = |bytes: &[u8]| {
//!     let ptr = backend.alloc(bytes.len() as u64)?;
//!     backend.upload(ptr, bytes)?;
//!     Ok::<_, makaira::backend::Error>(ptr)
//! };
//! let ids = put(bytemuck::cast_slice(&[3u32, 0, 1, 3, 0, 1]))?;
//! let x = random.activations(tokens as usize * k);
//! let (a, c) = (put(bytemuck::cast_slice(&x))?, backend.alloc(2 * 6 * n as u64)?);
//!
//! let stream = Stream::default();
//! let routed = gemm.route(&routing, Choices { ids, weights: None, tokens }, stream)?;
//! let [a, c] = [(a, k), (c, n)].map(|(ptr, stride)| Matrix { ptr, stride: stride as u64 });
//! gemm.matmul_experts(a, &experts, c, &routed, &workspace, stream)?;
//!
//! let mut y = vec![f16::NAN; 6 * n];
//! backend.download(c.ptr, bytemuck::cast_slice_mut(&mut y))?;
//! // By expert, then by token.
//! for (row, (expert, token)) in [(0, 0), (0, 2), (1, 1), (1, 2), (3, 0), (3, 1)].into_iter().enumerate() {
//!     let reference = Reference::of_packed(&x[token * k..][..k], &packed[expert]);
//!     let errors = reference.compare(&y[row * n..][..n], Default::default());
//!     assert!(errors.is_ok(), "row {row}: {errors}");
//! }
//! # for ptr in [ids, a.ptr, c.ptr] { backend.free(ptr)?; }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod lists;
mod order;
mod stack;

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use super::operands::access;
use super::{Error, Gemm, Matrix, Workspace};
use crate::backend::{Enqueue, Kernel, Launch, Stream};
use crate::kernel::experts::ExpertArguments;
use crate::kernel::experts::select::{
    COMMON_BLOCK_ROWS, ExpertChoice, ExpertProblem, MAX_ITEMS, may_want_order, wants_order,
};
use crate::kernel::params::magic;
use crate::kernel::select::family_of;
use crate::kernel::{Arguments, OptionalArguments, Rows};
use crate::weights::CHUNK_CHANNELS;

pub use lists::{Choices, List, Routed, Routing};
pub use stack::Experts;

/// Kernels that were wanted.
#[derive(Default)]
pub(super) struct Kernels {
    route: RwLock<Option<Arc<dyn Kernel>>>,
    blocks: RwLock<Option<Arc<dyn Kernel>>>,
    rows: RwLock<Option<Arc<dyn Kernel>>>,
    products: RwLock<HashMap<ExpertProblem, PreparedExperts>>,
}

/// A kernel for experts that is ready to launch, and how.
#[derive(Clone, Debug)]
pub struct PreparedExperts {
    /// The configuration and the grid.
    pub choice: ExpertChoice,
    /// The loaded kernel.
    pub kernel: Arc<dyn Kernel>,
}

impl Gemm {
    /// Chooses and compiles the kernels for batches of up to `max_tokens` tokens that choose `top_k` experts each, for
    /// rows that are whole vectors; those that make the lists too. Kernels of odd row layouts are compiled when first
    /// used.
    ///
    /// # Errors
    /// If no kernel takes the experts or compilation fails.
    pub fn prepare_experts(
        &self,
        experts: &Experts,
        max_tokens: u64,
        top_k: u32,
    ) -> Result<(), Error> {
        let device = self.backend.device();
        let sizes = lists::Sizes::new(device, experts.num_experts(), max_tokens, top_k)?;
        let layout = experts.layout();
        let access = Rows::of(layout.n, layout.k);
        self.route_kernel(None)?;
        self.blocks_kernel(None)?;
        if may_want_order(device) {
            self.rows_kernel(None)?;
        }
        for tokens in super::steps(max_tokens) {
            let tokens = tokens.min(max_tokens);
            let rows = tokens * u64::from(top_k);
            let (tile_m, max_blocks) = sizes.blocks(rows, tokens);
            for listed in [Some(rows), None] {
                let problem = experts.problem(access, tile_m, max_blocks, listed);
                match self.prepared_experts(&problem, None) {
                    Err(Error::NoKernel(_)) if tile_m > COMMON_BLOCK_ROWS => {
                        let max_blocks = sizes.max_blocks(rows, COMMON_BLOCK_ROWS);
                        let lower = experts.problem(access, COMMON_BLOCK_ROWS, max_blocks, listed);
                        self.prepared_experts(&lower, None)?;
                    }
                    prepared => drop(prepared?),
                }
            }
        }
        Ok(())
    }

    /// A workspace for products with experts of batches of up to `max_tokens` tokens that choose `top_k` experts each.
    ///
    /// # Errors
    /// [`Error::Operand`] for more rows than kernels count. If memory runs out.
    pub fn expert_workspace(
        &self,
        experts: &Experts,
        max_tokens: u64,
        top_k: u32,
    ) -> Result<Workspace, Error> {
        let device = self.backend.device();
        let sizes = lists::Sizes::new(device, experts.num_experts(), max_tokens, top_k)?;
        let bytes = match may_want_order(device) {
            true => order::bytes(experts, sizes.max_rows()),
            false => 0,
        };
        self.workspace_of(bytes, 0)
    }

    /// Enqueues `c[i][n] = a[token of row i][k] * (expert of row i)` for all rows of a routed list. Rows of C past the
    /// list's end are not written; with an empty batch nothing is launched.
    ///
    /// `a` and `c` are matrices of the type that the experts are for, with the rules of [`Gemm::matmul`]; A has the
    /// batch's tokens as rows, or the list's rows if it is [in order](Routed::in_order). Kernels that copy boxes of rows
    /// have them brought into that order in the workspace first. Each row is the same bits whatever its neighbours are,
    /// as long as the kernel is the same.
    ///
    /// # Errors
    /// [`Error::Operand`] for a misaligned address, a bad stride, or lists of another number of experts;
    /// [`Error::NoKernel`]; [`Error::Workspace`] if it is too small: make it with [`Gemm::expert_workspace`];
    /// [`Error::Backend`] if the launch is refused.
    pub fn matmul_experts(
        &self,
        a: Matrix,
        experts: &Experts,
        c: Matrix,
        routed: &Routed<'_>,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        let order = stream.into();
        let rows = self.check_experts(a, experts, c, routed)?;
        if routed.rows() == 0 {
            return Ok(());
        }
        let problem = |routed: &Routed<'_>| {
            experts.problem(rows, routed.tile_m(), routed.max_blocks(), routed.listed_rows())
        };
        match self.prepared_experts(&problem(routed), Some(order.stream)) {
            // What takes tall blocks does not take every layout of rows.
            Err(Error::NoKernel(_)) if routed.tile_m() > COMMON_BLOCK_ROWS => {
                let lower = self.cut_lower(routed, order)?;
                let prepared = self.prepared_experts(&problem(&lower), Some(order.stream))?;
                self.launch_experts(&prepared, a, experts, c, &lower, workspace, order)
            }
            prepared => self.launch_experts(&prepared?, a, experts, c, routed, workspace, order),
        }
    }

    /// [`Gemm::matmul_experts`] with a kernel of the caller's choice, for benchmarks and tests.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul_experts`], and [`Error::Mismatch`] if the kernel is for other experts or blocks.
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_experts_with(
        &self,
        prepared: &PreparedExperts,
        a: Matrix,
        experts: &Experts,
        c: Matrix,
        routed: &Routed<'_>,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        let rows = self.check_experts(a, experts, c, routed)?;
        let config = &prepared.choice.config;
        let mismatch = |rule: String| Error::Mismatch { config: config.to_string(), rule };
        if rows > config.rows {
            return Err(mismatch(format!("rows allow {rows:?} access at most")));
        }
        let (kind, group) = (experts.kind(), experts.layout().group);
        if config.kind != kind || config.group != group || config.tile_m != routed.tile_m() {
            return Err(mismatch(format!(
                "the product is of {kind}, group {group}, blocks of {} rows",
                routed.tile_m()
            )));
        }
        if routed.rows() == 0 {
            return Ok(());
        }
        self.launch_experts(prepared, a, experts, c, routed, workspace, stream.into())
    }

    /// Compiles a configuration of the caller's choice.
    ///
    /// # Errors
    /// If it is not legal on the device or compilation fails.
    pub fn prepare_expert_choice(&self, choice: ExpertChoice) -> Result<PreparedExperts, Error> {
        Ok(PreparedExperts { choice, kernel: self.kernel(&choice.config, None)? })
    }

    fn check_experts(
        &self,
        a: Matrix,
        experts: &Experts,
        c: Matrix,
        routed: &Routed<'_>,
    ) -> Result<Rows, Error> {
        if routed.num_experts() != experts.num_experts() {
            let rule = format!(
                "of {} experts, the weights have {}; make them with Gemm::routing for as many",
                routed.num_experts(),
                experts.num_experts()
            );
            return Err(Error::Operand { operand: "lists", rule });
        }
        let layout = experts.layout();
        access(layout, (a, layout.k, false), None, c, experts.bias_ptr())
    }

    /// The prepared kernel of a problem; chosen and compiled now if it was not before.
    fn prepared_experts(
        &self,
        problem: &ExpertProblem,
        stream: Option<Stream>,
    ) -> Result<PreparedExperts, Error> {
        // Grids depend on the exact number of blocks, choices on its size.
        let slot = ExpertProblem {
            max_blocks: problem.max_blocks.next_power_of_two(),
            listed_rows: problem.listed_rows.map(u64::next_power_of_two),
            ..*problem
        };
        let device = self.backend.device();
        let known = self.experts.products.read().expect("no panic holds it").get(&slot).cloned();
        let mut prepared = match known {
            Some(prepared) => prepared,
            None => {
                let choice = slot.ranked(device)?[0];
                let kernel = self.kernel(&choice.config, stream)?;
                let mut table = self.experts.products.write().expect("no panic holds it");
                table.entry(slot).or_insert(PreparedExperts { choice, kernel }).clone()
            }
        };
        let items =
            u64::from(problem.n.div_ceil(prepared.choice.config.tile_n)) * problem.max_blocks;
        prepared.choice.num_ctas = items.min(prepared.choice.num_ctas.into()) as u32;
        Ok(prepared)
    }

    #[allow(clippy::too_many_arguments)]
    fn launch_experts(
        &self,
        prepared: &PreparedExperts,
        a: Matrix,
        experts: &Experts,
        c: Matrix,
        routed: &Routed<'_>,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<(), Error> {
        let ExpertChoice { config, num_ctas, .. } = prepared.choice;
        let layout = experts.layout();
        let column_tiles = (layout.n as u32).div_ceil(config.tile_n);
        let items = routed.max_blocks() * u64::from(column_tiles);
        if items > MAX_ITEMS {
            let rule = format!("{items} tiles, at most {MAX_ITEMS}: split the batch");
            return Err(Error::Mismatch { config: config.to_string(), rule });
        }
        let (a, routed) = match wants_order(&config) {
            true => (self.ordered(a, experts, routed, workspace, order)?, routed.in_order()),
            false => (a, *routed),
        };
        let k_tiles = layout.num_k_tiles() as u32;
        let (n, k) = (layout.n as u32, layout.k as u32);
        let (k_tiles_magic, k_tiles_shift) = magic(k_tiles);
        let b_ptr = experts.ptr().0;
        let arguments = Arguments {
            a_ptr: a.ptr.0,
            b_ptr,
            c_ptr: c.ptr.0,
            column_scales_ptr: b_ptr + layout.column_scales_offset.unwrap_or(0) as u64,
            scratch_ptr: 0,
            locks_ptr: 0,
            m: routed.rows() as u32,
            n,
            k,
            a_stride_bytes: (2 * a.stride) as u32,
            c_stride_bytes: (2 * c.stride) as u32,
            num_chunk_columns: (layout.n_padded / CHUNK_CHANNELS) as u32,
            k_tiles,
            num_runs: k_tiles,
            stripe: k_tiles,
            k_tiles_magic,
            k_tiles_shift,
            stripe_magic: k_tiles_magic,
            stripe_shift: k_tiles_shift,
            optional: OptionalArguments {
                factors_ptr: experts.factors_ptr().0,
                bias_ptr: experts.bias_ptr().map_or(0, |bias| bias.0),
                experts: ExpertArguments {
                    blocks_ptr: routed.blocks_ptr().0,
                    max_blocks: routed.max_blocks() as u32,
                    stride: experts.stride_units(),
                    tokens: routed.tokens(),
                    row_weights_ptr: routed.row_weights().map(|ptr| ptr.0),
                    column_tiles,
                },
                ..OptionalArguments::default()
            },
        };
        let Enqueue { stream, overlap_previous } = order;
        let mut list = arguments.list(&config.kind);
        family_of(&config).extra_arguments(&config, &arguments, &mut list);
        let launch = Launch { grid: [num_ctas, 1], args: &list, stream, overlap_previous };
        Ok(self.backend.launch(&*prepared.kernel, &launch)?)
    }
}
