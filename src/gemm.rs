//! `Gemm`: the object that inference code holds. It ties packed weights, the choice of a kernel, the
//! compiled module and the launch together.
//!
//! A [`Gemm`] belongs to one [`Backend`]. [`Gemm::upload`] copies a packed weight to the device;
//! [`Gemm::prepare`] chooses and compiles the kernels for a range of batch sizes; [`Gemm::matmul`] enqueues
//! a product on the caller's pointers and stream. After `prepare` that call looks up a small table,
//! computes a few integers and launches: it does not allocate, compile or synchronise.
//!
//! A [`Workspace`] holds partial sums and locks. It may serve any number of weights, one stream at a time:
//! calls that can run at the same time need a workspace each. Calls of one stream may share it also when
//! they [start early](Stream::early): a kernel touches it only after the kernel before it has ended.

pub mod experts;
mod gather;
mod memory;
mod operands;
mod tuning;

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use crate::backend::{self, Backend, Enqueue, Kernel, Launch, Stream};
use crate::jit::TuneStore;
use crate::kernel::order::Summation;
use crate::kernel::select::{self, Choice, step};
use crate::kernel::{Config, Kind, Plan, Problem, Rows};
use crate::weights::{Activation, PackedLayout, PackedSpec, PackedView, WeightFormat};

pub use memory::{Weight, Workspace};
pub use operands::Matrix;
use operands::{arguments, check_rows, check_shape, rows_of};

/// What can go wrong with a product.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] backend::Error),
    /// No kernel takes the layer.
    #[error(transparent)]
    NoKernel(#[from] select::NoKernel),
    /// A configuration that was asked for is not legal here.
    #[error(transparent)]
    Illegal(#[from] select::Illegal),
    /// A pointer or stride breaks a rule.
    #[error("{operand}: {rule}")]
    Operand {
        /// Which operand.
        operand: &'static str,
        /// The rule, the value and the remedy.
        rule: String,
    },
    /// The workspace is too small.
    #[error(
        "the workspace has {have_bytes} bytes of scratch and {have_locks} locks, m = {m} needs \
         {need_bytes} and {need_locks}; make it with Gemm::workspace(weight, m), for experts with Gemm::expert_workspace"
    )]
    Workspace {
        /// Rows of the product.
        m: u64,
        /// Scratch bytes that the workspace has.
        have_bytes: u64,
        /// Locks that it has.
        have_locks: u64,
        /// Scratch bytes needed.
        need_bytes: u64,
        /// Locks needed.
        need_locks: u64,
    },
    /// The configuration is for another kind of weight.
    #[error("{config} is for another layer: {rule}")]
    Mismatch {
        /// The configuration.
        config: String,
        /// What does not match.
        rule: String,
    },
}

/// A kernel that is ready to launch, and how.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The configuration and stripe length.
    pub choice: Choice,
    /// The loaded kernel.
    pub kernel: Arc<dyn Kernel>,
}

/// What the choice of a kernel depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Slot {
    kind: Kind,
    n: u32,
    k: u32,
    group: crate::weights::Group,
    rows: Rows,
    /// The batch, rounded up to the step that choices distinguish.
    m: u64,
    /// Whether the kernel may start early: what wins may differ.
    overlap_previous: bool,
}

/// What is added to a product before it is rounded.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Added {
    bias: bool,
    residual: bool,
}

impl Slot {
    fn new(problem: &Problem, overlap_previous: bool) -> Self {
        let Problem { kind, m, n, k, group, rows } = *problem;
        Self { kind, n, k, group, rows, m: step(m), overlap_previous }
    }
}

/// Kernels and products on one backend. See the module's documentation.
pub struct Gemm {
    backend: Arc<dyn Backend>,
    /// Measured winners, `None` if they are not asked.
    tuning: Option<Arc<TuneStore>>,
    /// The order of summation of each layer, in batch-invariant mode.
    orders: Option<RwLock<HashMap<Slot, Summation>>>,
    choices: RwLock<HashMap<Slot, Choice>>,
    prepared: RwLock<HashMap<(Slot, Added), Prepared>>,
    kernels: RwLock<HashMap<Config, Arc<dyn Kernel>>>,
    /// The kernel that gathers activations, once it was wanted.
    gather: RwLock<Option<Arc<dyn Kernel>>>,
    experts: experts::Kernels,
}

impl Gemm {
    /// Products on a backend, by kernels that [`makaira tune`](crate::jit::TuneStore) measured to win, where
    /// it did, else by those that the cost model prefers.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            tuning: Some(TuneStore::of_process()),
            orders: None,
            choices: RwLock::default(),
            prepared: RwLock::default(),
            kernels: RwLock::default(),
            gather: RwLock::default(),
            experts: experts::Kernels::default(),
        }
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Copies a packed weight to the device.
    ///
    /// # Errors
    /// If the device has too little memory, or a row of A or C would be longer than kernels address.
    pub fn upload<'p>(&self, packed: impl Into<PackedView<'p>>) -> Result<Weight, Error> {
        let packed = packed.into();
        let weight = self.reserve_for(packed.spec())?;
        self.backend.upload(weight.ptr, packed.bytes())?;
        Ok(weight)
    }

    /// [`Gemm::reserve`] for a weight with its factor and its inputs' order, so that its buffer is all that is missing.
    ///
    /// # Errors
    /// Those of [`Gemm::upload`].
    pub fn reserve_for(&self, spec: &PackedSpec) -> Result<Weight, Error> {
        let mut weight = self.reserve(spec.layout(), spec.format())?;
        weight.factor = spec.factor();
        if let Some(order) = spec.input_order() {
            weight.gather = self.upload_order(order)?;
        }
        Ok(weight)
    }

    /// Room on the device for a packed weight, whose bytes the caller writes there at [`Weight::ptr`] before
    /// the first product.
    ///
    /// # Errors
    /// Those of [`Gemm::upload`].
    pub fn reserve(
        &self,
        layout: &PackedLayout,
        format: &'static dyn WeightFormat,
    ) -> Result<Weight, Error> {
        check_shape(layout)?;
        Ok(Weight {
            backend: self.backend.clone(),
            layout: *layout,
            ptr: self.backend.alloc(layout.total_bytes as u64)?,
            format,
            factor: 1.0,
            activation: Activation::F16,
            bias: None,
            gather: None,
        })
    }

    /// A workspace for products of up to `max_m` rows with a weight.
    ///
    /// # Errors
    /// If no kernel takes the weight or memory runs out.
    pub fn workspace(&self, weight: &Weight, max_m: u64) -> Result<Workspace, Error> {
        check_rows(max_m)?;
        let mut needs = (0, 0);
        let orders = [false, true];
        for (m, overlap_previous) in steps(max_m).flat_map(|m| orders.map(|early| (m, early))) {
            for rows in [Rows::Whole, Rows::Vector, Rows::Element] {
                let problem = problem(weight, m, rows);
                let choice = self.choice(&problem, overlap_previous)?;
                for plan in select::plans(&choice.config, &problem, choice.stripe) {
                    needs.0 = needs.0.max(weight.gathered_bytes(m) + plan.scratch_bytes);
                    needs.1 = needs.1.max(plan.num_locks);
                }
            }
        }
        self.workspace_of(needs.0, needs.1)
    }

    /// A workspace of given sizes: bytes of scratch memory and lock words. The largest of each over several
    /// weights' workspaces make one that serves them all.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn workspace_of(&self, scratch_bytes: u64, num_locks: u64) -> Result<Workspace, Error> {
        let mut workspace = Workspace {
            backend: self.backend.clone(),
            scratch: None,
            scratch_bytes,
            locks: None,
            num_locks,
        };
        if scratch_bytes > 0 {
            workspace.scratch = Some(self.backend.alloc(scratch_bytes)?);
        }
        if num_locks > 0 {
            workspace.locks = Some(self.backend.alloc(4 * num_locks)?);
            workspace.reset()?;
        }
        Ok(workspace)
    }

    /// Chooses and compiles the kernels for products of up to `max_m` rows with a weight, for rows that
    /// are whole vectors. Kernels of odd row layouts are compiled when first used.
    ///
    /// # Errors
    /// If no kernel takes the weight or compilation fails.
    pub fn prepare(&self, weight: &Weight, max_m: u64) -> Result<(), Error> {
        check_rows(max_m)?;
        let rows = Rows::of(weight.layout().n, weight.layout().k);
        if weight.gather.is_some() {
            self.gather_kernel(None)?;
        }
        for m in steps(max_m) {
            for overlap_previous in [false, true] {
                let added = Added { bias: weight.bias.is_some(), residual: false };
                self.prepared(&problem(weight, m, rows), added, overlap_previous, None)?;
            }
        }
        Ok(())
    }

    /// Enqueues `c[m][n] = a[m][k] * weight` on a stream. With `m` 0 nothing is launched.
    ///
    /// `a` and `c` are addresses of fp16 matrices on the backend's device, of bf16 ones for a weight
    /// [with that activation](Weight::with_activation). They must stay valid until the
    /// work is done and must not overlap; they need an alignment of 2 bytes, and 16 for full speed. The
    /// product is exact to fp32 accumulation and one rounding of the result, and the same bits every time.
    ///
    /// With [`stream.early()`](Stream::early) for a stream the kernel may start while the one before it
    /// still runs; the bits are the same.
    ///
    /// # Errors
    /// [`Error::Operand`] for a misaligned address or a bad stride, [`Error::Workspace`] if it is too small,
    /// [`Error::Backend`] if the launch is refused, or if the stream is being captured into a graph and the
    /// kernel was not prepared; the capture stays whole.
    pub fn matmul(
        &self,
        a: Matrix,
        weight: &Weight,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        self.enqueue(a, weight, None, c, m, workspace, stream.into())
    }

    /// [`Gemm::matmul`] with a residual: enqueues `c[m][n] = a[m][k] * weight + residual[m][n]`. The residual is of C's
    /// type, has the same rules as C, and may be C itself; it is added before the sum is rounded. Its kernels are
    /// compiled when first used.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul`].
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_add(
        &self,
        a: Matrix,
        weight: &Weight,
        residual: Matrix,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        self.enqueue(a, weight, Some(residual), c, m, workspace, stream.into())
    }

    #[allow(clippy::too_many_arguments)]
    fn enqueue(
        &self,
        a: Matrix,
        weight: &Weight,
        residual: Option<Matrix>,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<(), Error> {
        if m == 0 {
            return Ok(());
        }
        check_rows(m)?;
        let rows = rows_of(weight, a, residual, c)?;
        let problem = problem(weight, m, rows);
        let added = Added { bias: weight.bias.is_some(), residual: residual.is_some() };
        let prepared =
            self.prepared(&problem, added, order.overlap_previous, Some(order.stream))?;
        self.launch(&prepared, &problem, a, weight, residual, c, workspace, order)
    }

    /// [`Gemm::matmul`] with a kernel of the caller's choice, for benchmarks and tests.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul`], and [`Error::Mismatch`] if the kernel is for another kind of layer.
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_with(
        &self,
        prepared: &Prepared,
        a: Matrix,
        weight: &Weight,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        self.enqueue_with(prepared, a, weight, None, c, m, workspace, stream.into())
    }

    /// [`Gemm::matmul_add`] with a kernel of the caller's choice, for benchmarks and tests.
    ///
    /// # Errors
    /// Those of [`Gemm::matmul_with`].
    #[allow(clippy::too_many_arguments)]
    pub fn matmul_add_with(
        &self,
        prepared: &Prepared,
        a: Matrix,
        weight: &Weight,
        residual: Matrix,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        stream: impl Into<Enqueue>,
    ) -> Result<(), Error> {
        self.enqueue_with(prepared, a, weight, Some(residual), c, m, workspace, stream.into())
    }

    #[allow(clippy::too_many_arguments)]
    fn enqueue_with(
        &self,
        prepared: &Prepared,
        a: Matrix,
        weight: &Weight,
        residual: Option<Matrix>,
        c: Matrix,
        m: u64,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<(), Error> {
        if m == 0 {
            return Ok(());
        }
        check_rows(m)?;
        let group = weight.layout().group;
        let config = &prepared.choice.config;
        let mismatch = |rule: String| Error::Mismatch { config: config.to_string(), rule };
        let rows = rows_of(weight, a, residual, c)?;
        if rows > config.rows {
            return Err(mismatch(format!("rows allow {rows:?} access at most")));
        }
        let kind = Kind { residual: residual.is_some(), ..weight.kind() };
        if config.group != group || config.kind != kind {
            return Err(mismatch(format!("the product is of {kind}, group {group}")));
        }
        let problem = problem(weight, m, config.rows);
        self.launch(prepared, &problem, a, weight, residual, c, workspace, order)
    }

    /// Compiles a configuration of the caller's choice.
    ///
    /// # Errors
    /// If it is not legal on the device or compilation fails.
    pub fn prepare_choice(&self, choice: Choice) -> Result<Prepared, Error> {
        Ok(Prepared { choice, kernel: self.kernel(&choice.config, None)? })
    }

    #[allow(clippy::too_many_arguments)]
    fn launch(
        &self,
        prepared: &Prepared,
        problem: &Problem,
        a: Matrix,
        weight: &Weight,
        residual: Option<Matrix>,
        c: Matrix,
        workspace: &Workspace,
        order: Enqueue,
    ) -> Result<(), Error> {
        let Enqueue { stream, overlap_previous } = order;
        let Choice { config, stripe, .. } = prepared.choice;
        let step = select::family_of(&config).stripe_step(&config);
        let k_tiles = problem.k.div_ceil(128);
        if stripe == 0 || !stripe.is_multiple_of(step) || !k_tiles.is_multiple_of(step) {
            return Err(Error::Mismatch {
                config: config.to_string(),
                rule: format!(
                    "stripes of {stripe} runs of a layer of {k_tiles}: both must be multiples of {step}"
                ),
            });
        }
        let gathered = weight.gathered_bytes(problem.m);
        for Plan { scratch_bytes, num_locks, .. } in select::plans(&config, problem, stripe) {
            let need_bytes = gathered + scratch_bytes;
            if need_bytes > workspace.scratch_bytes || num_locks > workspace.num_locks {
                return Err(Error::Workspace {
                    m: problem.m,
                    have_bytes: workspace.scratch_bytes,
                    have_locks: workspace.num_locks,
                    need_bytes,
                    need_locks: num_locks,
                });
            }
        }
        let a = self.gathered(a, weight, problem.m, workspace, order)?;
        for plan in select::plans(&config, problem, stripe) {
            let args = arguments(&plan, &config, problem, (a, weight, residual, c), workspace);
            let mut list = args.list(&config.kind);
            select::family_of(&config).extra_arguments(&config, &args, &mut list);
            let launch = Launch { grid: plan.grid, args: &list, stream, overlap_previous };
            self.backend.launch(&*prepared.kernel, &launch)?;
        }
        Ok(())
    }

    /// The prepared kernel of a problem; chosen and compiled now, for work on `stream` if there is any, if
    /// it was not before.
    fn prepared(
        &self,
        problem: &Problem,
        added: Added,
        overlap_previous: bool,
        stream: Option<Stream>,
    ) -> Result<Prepared, Error> {
        let slot = (Slot::new(problem, overlap_previous), added);
        if let Some(prepared) = self.prepared.read().expect("no panic holds it").get(&slot) {
            return Ok(prepared.clone());
        }
        let mut choice = self.choice(problem, overlap_previous)?;
        let Added { bias, residual } = added;
        choice.config.kind = Kind { bias, residual, ..choice.config.kind };
        let prepared = Prepared { choice, kernel: self.kernel(&choice.config, stream)? };
        let mut table = self.prepared.write().expect("no panic holds it");
        Ok(table.entry(slot).or_insert(prepared).clone())
    }

    fn kernel(&self, config: &Config, stream: Option<Stream>) -> Result<Arc<dyn Kernel>, Error> {
        if let Some(kernel) = self.kernels.read().expect("no panic holds it").get(config) {
            return Ok(kernel.clone());
        }
        let target = self.backend.device().arch;
        select::check(config, target)?;
        let module = select::family_of(config).build(config, target);
        let kernel = match stream {
            Some(stream) => self.backend.load_for(&module, stream)?,
            None => self.backend.load(&module)?,
        };
        let mut table = self.kernels.write().expect("no panic holds it");
        Ok(table.entry(*config).or_insert(kernel).clone())
    }
}

/// The batch sizes at which choices may change, up to the one that `max_m` needs.
fn steps(max_m: u64) -> impl Iterator<Item = u64> {
    let last = step(max_m.max(1));
    std::iter::successors(Some(1), |m| Some(step(m + 1))).take_while(move |m| *m <= last)
}

fn problem(weight: &Weight, m: u64, rows: Rows) -> Problem {
    let layout = weight.layout();
    let (n, k) = (layout.n as u32, layout.k as u32);
    Problem { kind: weight.plain_kind(), m, n, k, group: layout.group, rows }
}
