//! Which rows belong to which expert: lists on the device, made there.

use std::sync::{Arc, RwLock};

use crate::asm::Module;
use crate::backend::{Backend, DevicePtr, Enqueue, Kernel, Launch, Stream};
use crate::gemm::{Error, Gemm};
use crate::kernel::experts::BLOCK_BYTES;
use crate::kernel::experts::blocks::{self, BlockArguments};
use crate::kernel::experts::route::{self, RouteArguments};
use crate::kernel::experts::select::{
    BLOCK_ROWS, COMMON_BLOCK_ROWS, MAX_LIST_ROWS, max_blocks, tallest, tile_m,
};
use crate::target::{DeviceSpec, SmArch};

/// Most experts of a stack.
const MAX_EXPERTS: u32 = 1 << 16;

pub(super) fn check_num_experts(num_experts: u32) -> Result<(), Error> {
    if (1..=MAX_EXPERTS).contains(&num_experts) {
        return Ok(());
    }
    let rule = format!("{num_experts} of them, a stack has 1 to {MAX_EXPERTS}");
    Err(Error::Operand { operand: "experts", rule })
}

/// How much the lists of the largest batch hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    num_experts: u32,
    max_tokens: u64,
    top_k: u32,
    /// Most rows of a block on the device.
    tallest: u32,
    /// Rows of a block, where they do not follow from the batch.
    tile_m: Option<u32>,
}

impl Sizes {
    pub(super) fn new(
        device: &DeviceSpec,
        num_experts: u32,
        max_tokens: u64,
        top_k: u32,
    ) -> Result<Self, Error> {
        check_num_experts(num_experts)?;
        let rows = max_tokens.checked_mul(top_k.into()).filter(|rows| *rows <= MAX_LIST_ROWS);
        if top_k == 0 || rows.is_none() {
            let rule = format!(
                "{top_k} experts for each of {max_tokens} tokens; at least 1, and at most {MAX_LIST_ROWS} rows: \
                 split the batch"
            );
            return Err(Error::Operand { operand: "lists", rule });
        }
        Ok(Self { num_experts, max_tokens, top_k, tallest: tallest(device), tile_m: None })
    }

    pub(super) fn max_rows(&self) -> u64 {
        self.max_tokens * u64::from(self.top_k)
    }

    /// Rows of a block, and how many blocks there can be.
    pub(super) fn blocks(&self, rows: u64, tokens: u64) -> (u32, u64) {
        let suggested = || tile_m(rows, tokens, self.num_experts, self.tallest);
        let tile_m = self.tile_m.unwrap_or_else(suggested);
        (tile_m, self.max_blocks(rows, tile_m))
    }

    /// Blocks of so many rows that there can be.
    pub(super) fn max_blocks(&self, rows: u64, tile_m: u32) -> u64 {
        max_blocks(rows, self.num_experts, tile_m)
    }
}

/// Room on the device for the lists of a batch. It serves one batch at a time: lists are valid until the next ones are
/// made, and calls that can run at the same time need a routing each. Freed when dropped.
pub struct Routing {
    backend: Arc<dyn Backend>,
    sizes: Sizes,
    base: DevicePtr,
    /// Bytes from the base to each list: blocks, lower blocks, offsets, token ids, places, row weights, the counter.
    at: [u64; 7],
}

/// What the tokens of a batch have chosen, on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// The experts of each token, `[tokens][top_k]` 32-bit words at a multiple of 4 bytes. What is no expert's number,
    /// negative ones among them, has no row.
    pub ids: DevicePtr,
    /// What they are worth, `[tokens][top_k]` f32, if that is wanted in the list's order.
    pub weights: Option<DevicePtr>,
    /// Tokens.
    pub tokens: u64,
}

/// A list by expert that the caller has made, on the device: 32-bit words at multiples of 4 bytes. It must outlive the
/// products with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List {
    /// Where the rows of each expert begin and where those of the last one end, `num_experts + 1` numbers that do not
    /// decrease. Numbers above `rows` count as `rows`.
    pub offsets: DevicePtr,
    /// The row of A of each row of the list, below `tokens`; none if A has the list's order.
    pub token_ids: Option<DevicePtr>,
    /// What each row is worth, f32.
    pub row_weights: Option<DevicePtr>,
    /// Rows of the list, or more.
    pub rows: u64,
    /// Rows of A.
    pub tokens: u64,
}

/// What the lists of a batch mean for a product. Valid until the routing makes the next ones.
#[derive(Clone, Copy)]
pub struct Routed<'a> {
    routing: &'a Routing,
    rows: u64,
    tokens: u64,
    tile_m: u32,
    max_blocks: u64,
    blocks: DevicePtr,
    offsets: DevicePtr,
    token_ids: Option<DevicePtr>,
    row_weights: Option<DevicePtr>,
    weighted: bool,
}

impl Gemm {
    /// Room for the lists of batches of up to `max_tokens` tokens that choose `top_k` of `num_experts` experts each.
    ///
    /// # Errors
    /// [`Error::Operand`] for no experts or none chosen, or more rows than kernels count. If memory runs out.
    pub fn routing(&self, num_experts: u32, max_tokens: u64, top_k: u32) -> Result<Routing, Error> {
        let sizes = Sizes::new(self.backend.device(), num_experts, max_tokens, top_k)?;
        let rows = sizes.max_rows().max(1);
        let experts = u64::from(num_experts);
        // As many blocks as rows, however high they are.
        let blocks = BLOCK_BYTES * rows;
        let bytes = [blocks, blocks, 4 * (experts + 1), 4 * rows, 4 * rows, 4 * rows, 4];
        let mut total = 0;
        let at = bytes.map(|bytes| {
            let at = total;
            total += bytes.next_multiple_of(256);
            at
        });
        let base = self.backend.alloc(total)?;
        let routing = Routing { backend: self.backend.clone(), sizes, base, at };
        self.backend.upload(routing.counter_ptr(), &[0; 4])?;
        Ok(routing)
    }

    /// Enqueues the making of the lists of a batch: rows by expert, then by token, then by choice. Without tokens the
    /// lists are empty.
    ///
    /// # Errors
    /// [`Error::Operand`] if the batch is larger than the routing or an address is not a multiple of 4;
    /// [`Error::Backend`] if the launch is refused.
    pub fn route<'a>(
        &self,
        routing: &'a Routing,
        choices: Choices,
        stream: impl Into<Enqueue>,
    ) -> Result<Routed<'a>, Error> {
        let Choices { ids, weights, tokens } = choices;
        let top_k = routing.sizes.top_k;
        let rows = tokens.saturating_mul(top_k.into());
        let row_weights = weights.map(|_| routing.row_weights_ptr());
        let (offsets, token_ids) = (routing.offsets_ptr(), routing.token_ids_ptr());
        let routed = routing.routed(rows, tokens, offsets, Some(token_ids), row_weights)?;
        check_words([("ids", Some(ids)), ("weights", weights)])?;
        let arguments = RouteArguments {
            topk_ids_ptr: ids.0,
            topk_weights_ptr: weights.map(|ptr| ptr.0),
            top_k,
            num_choices: rows as u32,
            token_ids_ptr: routing.token_ids_ptr().0,
            places_ptr: routing.places_ptr().0,
            row_weights_ptr: routing.row_weights_ptr().0,
            counter_ptr: routing.counter_ptr().0,
            blocks: routed.arguments(),
        };
        let order: Enqueue = stream.into();
        let kernel = self.route_kernel(Some(order.stream))?;
        self.launch_list(&*kernel, arguments.grid(), &arguments.list(), order)?;
        Ok(routed)
    }

    /// Enqueues what a product needs to know of a list that the caller has made.
    ///
    /// # Errors
    /// Those of [`Gemm::route`].
    pub fn route_list<'a>(
        &self,
        routing: &'a Routing,
        list: List,
        stream: impl Into<Enqueue>,
    ) -> Result<Routed<'a>, Error> {
        let List { offsets, token_ids, row_weights, rows, tokens } = list;
        check_words([
            ("offsets", Some(offsets)),
            ("token ids", token_ids),
            ("row weights", row_weights),
        ])?;
        let routed = routing.routed(rows, tokens, offsets, token_ids, row_weights)?;
        self.cut(&routed, stream.into())?;
        Ok(routed)
    }

    /// Enqueues the cutting of a list into blocks.
    fn cut(&self, routed: &Routed<'_>, order: Enqueue) -> Result<(), Error> {
        let kernel = self.blocks_kernel(Some(order.stream))?;
        self.launch_list(&*kernel, [1, 1], &routed.arguments().list(), order)
    }

    /// Cuts a list into blocks that every kernel takes.
    pub(super) fn cut_lower<'a>(
        &self,
        routed: &Routed<'a>,
        order: Enqueue,
    ) -> Result<Routed<'a>, Error> {
        let tile_m = COMMON_BLOCK_ROWS;
        let max_blocks = routed.routing.sizes.max_blocks(routed.rows, tile_m);
        let routed = Routed { tile_m, max_blocks, blocks: routed.routing.ptr(1), ..*routed };
        self.cut(&routed, order)?;
        Ok(routed)
    }

    pub(super) fn launch_list(
        &self,
        kernel: &dyn Kernel,
        grid: [u32; 2],
        args: &[crate::backend::Arg],
        order: Enqueue,
    ) -> Result<(), Error> {
        let Enqueue { stream, overlap_previous } = order;
        Ok(self.backend.launch(kernel, &Launch { grid, args, stream, overlap_previous })?)
    }

    pub(super) fn route_kernel(&self, stream: Option<Stream>) -> Result<Arc<dyn Kernel>, Error> {
        self.list_kernel(&self.experts.route, route::build, stream)
    }

    pub(super) fn blocks_kernel(&self, stream: Option<Stream>) -> Result<Arc<dyn Kernel>, Error> {
        self.list_kernel(&self.experts.blocks, blocks::build, stream)
    }

    /// A kernel that makes lists; compiled now if it was not before.
    pub(super) fn list_kernel(
        &self,
        slot: &RwLock<Option<Arc<dyn Kernel>>>,
        build: fn(SmArch) -> Module,
        stream: Option<Stream>,
    ) -> Result<Arc<dyn Kernel>, Error> {
        if let Some(kernel) = &*slot.read().expect("no panic holds it") {
            return Ok(kernel.clone());
        }
        let module = build(self.backend.device().arch);
        let kernel = match stream {
            Some(stream) => self.backend.load_for(&module, stream)?,
            None => self.backend.load(&module)?,
        };
        Ok(slot.write().expect("no panic holds it").get_or_insert(kernel).clone())
    }
}

/// Refuses addresses that are not those of words.
fn check_words<const N: usize>(
    operands: [(&'static str, Option<DevicePtr>); N],
) -> Result<(), Error> {
    for (operand, ptr) in operands {
        if let Some(DevicePtr(address)) = ptr.filter(|ptr| !ptr.0.is_multiple_of(4)) {
            let rule = format!("address {address:#x} is no multiple of 4; numbers have 32 bits");
            return Err(Error::Operand { operand, rule });
        }
    }
    Ok(())
}

impl Routing {
    /// Blocks of `tile_m` rows, one of [`BLOCK_ROWS`], instead of what the batch suggests.
    ///
    /// # Errors
    /// [`Error::Operand`] for another number.
    pub fn with_tile_m(mut self, tile_m: u32) -> Result<Self, Error> {
        if !BLOCK_ROWS.contains(&tile_m) {
            let rule = format!("blocks of {tile_m} rows, kernels have {BLOCK_ROWS:?}");
            return Err(Error::Operand { operand: "lists", rule });
        }
        self.sizes.tile_m = Some(tile_m);
        Ok(self)
    }

    fn ptr(&self, list: usize) -> DevicePtr {
        self.base.offset(self.at[list])
    }

    /// Where the rows of each expert begin, and where those of the last one end: `num_experts + 1` words.
    pub fn offsets_ptr(&self) -> DevicePtr {
        self.ptr(2)
    }

    /// The token of each row of the list: words.
    pub fn token_ids_ptr(&self) -> DevicePtr {
        self.ptr(3)
    }

    /// The row of each choice, `[tokens][top_k]` words; [`route::NO_PLACE`] for one of no expert.
    pub fn places_ptr(&self) -> DevicePtr {
        self.ptr(4)
    }

    /// What each row of the list is worth: f32.
    pub fn row_weights_ptr(&self) -> DevicePtr {
        self.ptr(5)
    }

    fn counter_ptr(&self) -> DevicePtr {
        self.ptr(6)
    }

    fn routed(
        &self,
        rows: u64,
        tokens: u64,
        offsets: DevicePtr,
        token_ids: Option<DevicePtr>,
        row_weights: Option<DevicePtr>,
    ) -> Result<Routed<'_>, Error> {
        let Sizes { max_tokens, top_k, .. } = self.sizes;
        if rows > self.sizes.max_rows() || tokens > u32::MAX.into() {
            let rule = format!(
                "{rows} rows of {tokens} tokens, there is room for {max_tokens} times {top_k}; make it for a \
                 larger batch"
            );
            return Err(Error::Operand { operand: "lists", rule });
        }
        let (tile_m, max_blocks) = self.sizes.blocks(rows, tokens);
        Ok(Routed {
            routing: self,
            rows,
            tokens,
            tile_m,
            max_blocks,
            blocks: self.ptr(0),
            offsets,
            token_ids,
            row_weights,
            weighted: false,
        })
    }
}

impl Drop for Routing {
    fn drop(&mut self) {
        if let Err(error) = self.backend.free(self.base) {
            log::debug!("freeing lists: {error}");
        }
    }
}

impl Routed<'_> {
    /// The same for an A whose rows are in the list's order: [`Routed::rows`] of them, of which those past the list's
    /// end may hold anything.
    #[must_use]
    pub fn in_order(self) -> Self {
        Self { token_ids: None, ..self }
    }

    /// The same, each row multiplied by what it is worth, after the bias and before it is rounded. Without weights all
    /// are worth 1.
    #[must_use]
    pub fn weighted(self) -> Self {
        Self { weighted: true, ..self }
    }

    /// Rows of the list at most.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Experts.
    pub fn num_experts(&self) -> u32 {
        self.routing.sizes.num_experts
    }

    /// Rows of a block.
    pub fn tile_m(&self) -> u32 {
        self.tile_m
    }

    /// Blocks that there can be.
    pub fn max_blocks(&self) -> u64 {
        self.max_blocks
    }

    pub(super) fn blocks_ptr(&self) -> DevicePtr {
        self.blocks
    }

    /// Address of the number of rows of the list.
    pub(super) fn end_ptr(&self) -> DevicePtr {
        self.offsets.offset(4 * u64::from(self.num_experts()))
    }

    /// Rows of the list, if rows of A are looked up in it.
    pub(super) fn listed_rows(&self) -> Option<u64> {
        self.token_ids.map(|_| self.rows)
    }

    /// Address of the rows' tokens and the number of those; none if A is in order.
    pub(super) fn tokens(&self) -> Option<(u64, u32)> {
        self.token_ids.map(|ptr| (ptr.0, self.tokens as u32))
    }

    pub(super) fn row_weights(&self) -> Option<DevicePtr> {
        self.row_weights.filter(|_| self.weighted)
    }

    fn arguments(&self) -> BlockArguments {
        BlockArguments {
            offsets_ptr: self.offsets.0,
            blocks_ptr: self.blocks_ptr().0,
            num_experts: self.num_experts(),
            max_rows: self.rows as u32,
            tile_shift: self.tile_m.ilog2(),
            max_blocks: self.max_blocks as u32,
        }
    }
}
