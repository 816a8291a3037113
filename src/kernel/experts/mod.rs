//! Products with a stack of experts: each row of C belongs to one of them, in one launch.
//!
//! Rows are listed by expert, and *row blocks* cut the list: at most `tile_m` rows of one expert. Which blocks there are
//! only the device knows; [`route`] writes them down there, the host knows how many there can be. A CTA takes items,
//! a column tile of a block, whole along K: item `ctaid`, then every `nctaid`-th. Nothing is shared between CTAs, so
//! that there are no locks and no sums in scratch memory, and the bits do not depend on the grid.
//! Blocks stand one after the other from the first record on; an empty record ends them. The record of an item is read
//! one item ahead.
//! Row i of the list reads row `token_ids[i]` of A: family `sm80` looks each row up, `sm90wg` copies boxes of rows and
//! wants them in the list's order, which [`rows`] brings them into.

pub mod blocks;
pub mod route;
pub mod rows;
pub mod select;

use super::params::{emit_div, load_u32, load_u64, magic};
use super::stream::RowCopies;
use super::stripe::{Segment, Stripe};
use crate::asm::Asm;
use crate::asm::reg::{Param, Reg};
use crate::asm::types::{B32, B64, Cmp, F32, Pred, Special};
use crate::backend::{Arg, ArgList};

/// Threads of the CTAs that make the list of rows and its blocks.
const THREADS: u32 = 256;
/// Bytes of the record of a row block: expert, first row, rows, nothing.
pub const BLOCK_BYTES: u64 = 16;
/// Experts lie at multiples of this many bytes.
pub const EXPERT_ALIGN: u64 = 16;

/// What a family's kernels for experts are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// Most rows of a block.
    pub tallest: u32,
    /// Whether A must have the list's order.
    pub in_order: bool,
}

/// The entry parameters of a product with experts; the host fills them in the same order.
#[derive(Clone, Copy, Debug)]
pub struct ExpertParams {
    /// Records of row blocks.
    blocks_ptr: Param,
    /// Units of [`EXPERT_ALIGN`] bytes from one expert's weights to the next one's.
    stride: Param,
    /// The row of A of each row of the list.
    token_ids_ptr: Param,
    /// Rows of A; 0 if A has the list's order.
    num_tokens: Param,
    /// What each row of the list is multiplied by.
    row_weights_ptr: Param,
    /// Whether it is.
    weighted: Param,
    /// Column tiles of an expert.
    column_tiles: Param,
    /// Division by it.
    column_tiles_magic: Param,
    /// Its shift.
    column_tiles_shift: Param,
    /// Items that there can be.
    max_items: Param,
}

/// The values of [`ExpertParams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertArguments {
    /// Address of the records.
    pub blocks_ptr: u64,
    /// Records that there can be.
    pub max_blocks: u32,
    /// Units of [`EXPERT_ALIGN`] bytes from one expert's weights to the next one's.
    pub stride: u32,
    /// Address of the row of A of each row of the list, and the rows of A; none if A has the list's order.
    pub tokens: Option<(u64, u32)>,
    /// Address of what each row of the list is multiplied by.
    pub row_weights_ptr: Option<u64>,
    /// Column tiles of an expert.
    pub column_tiles: u32,
}

impl ExpertParams {
    pub(super) fn declare(a: &mut Asm) -> Self {
        Self {
            blocks_ptr: a.param_u64("blocks_ptr"),
            stride: a.param_u32("expert_stride"),
            token_ids_ptr: a.param_u64("token_ids_ptr"),
            num_tokens: a.param_u32("num_tokens"),
            row_weights_ptr: a.param_u64("row_weights_ptr"),
            weighted: a.param_u32("weighted"),
            column_tiles: a.param_u32("column_tiles"),
            column_tiles_magic: a.param_u32("column_tiles_magic"),
            column_tiles_shift: a.param_u32("column_tiles_shift"),
            max_items: a.param_u32("max_items"),
        }
    }

    /// Emits the address of an expert's part of what begins at `base`.
    pub(super) fn emit_base(&self, a: &mut Asm, base: Reg<B64>, block: &Block) -> Reg<B64> {
        let (stride, bytes, place) = (load_u32(a, self.stride), a.reg(), a.reg());
        a.mul_lo_u32(bytes, block.expert, EXPERT_ALIGN as u32);
        a.mad_wide_u32(place, bytes, stride, base);
        place
    }

    /// Emits the row of A that each copy of a lane reads: rows past the block's last one repeat it, and tokens past A's
    /// last row read that one.
    pub(super) fn emit_tokens(
        &self,
        a: &mut Asm,
        copies: &RowCopies,
        block: &Block,
        tokens: &[Reg<B32>],
    ) {
        let num_tokens = load_u32(a, self.num_tokens);
        let list = load_u64(a, self.token_ids_ptr);
        let [last_row, last_token] = a.regs();
        a.sub_u32(last_row, block.num_rows, 1);
        a.sub_u32(last_token, num_tokens, 1);
        let listed = a.test_u32(Cmp::Ne, num_tokens, 0);
        let exists = a.test_u32(Cmp::Ne, block.num_rows, 0);
        a.and_pred(listed, listed, exists);
        for (c, token) in tokens.iter().enumerate() {
            let (row, at): (_, Reg<B64>) = (a.reg(), a.reg());
            a.add_u32(row, copies.row, c as u32 * copies.copy_rows);
            a.min_u32(row, row, last_row);
            a.add_u32(row, row, block.row_begin);
            a.mad_wide_u32(at, row, 4, list);
            a.mov_b32(*token, row);
            a.when(listed, |a| a.ld_global_b32(*token, at));
        }
        // Apart from the loads, so that those are on their way together.
        for token in tokens {
            a.min_u32(*token, *token, last_token);
        }
    }

    /// Emits where the weight of a row of the list lies, and whether there are any.
    pub(super) fn emit_row_weights(&self, a: &mut Asm, row: Reg<B32>) -> RowWeights {
        let (base, weighted, at) =
            (load_u64(a, self.row_weights_ptr), load_u32(a, self.weighted), a.reg());
        a.mad_wide_u32(at, row, 4, base);
        RowWeights { at, weighted: a.test_u32(Cmp::Ne, weighted, 0) }
    }
}

impl ExpertArguments {
    pub(super) fn append(&self, list: &mut ArgList) {
        let (token_ids_ptr, num_tokens) = self.tokens.unwrap_or_default();
        let (multiplier, shift) = magic(self.column_tiles);
        list.push(Arg::U64(self.blocks_ptr));
        list.push(Arg::U32(self.stride));
        list.push(Arg::U64(token_ids_ptr));
        list.push(Arg::U32(num_tokens));
        list.push(Arg::U64(self.row_weights_ptr.unwrap_or(0)));
        list.push(Arg::U32(self.row_weights_ptr.is_some().into()));
        list.push(Arg::U32(self.column_tiles));
        list.push(Arg::U32(multiplier));
        list.push(Arg::U32(shift));
        list.push(Arg::U32(self.max_blocks * self.column_tiles));
    }
}

/// What the rows of a tile are multiplied by.
#[derive(Clone, Copy)]
pub(super) struct RowWeights {
    /// Address of that of the thread's first row.
    at: Reg<B64>,
    weighted: Reg<Pred>,
}

impl RowWeights {
    /// Emits what the row `rows` further on is multiplied by, if it `exists`.
    pub(super) fn emit_load(&self, a: &mut Asm, exists: Reg<Pred>, rows: u32) -> Reg<F32> {
        let (bits, reads, weight) = (a.reg(), a.reg(), a.reg());
        a.mov_b32(bits, 1f32.to_bits());
        a.and_pred(reads, exists, self.weighted);
        a.when(reads, |a| a.ld_global_b32(bits, self.at.at(4 * rows as i32)));
        a.mov_b32_to_f32(weight, bits);
        weight
    }
}

/// A row block, in registers.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The expert.
    pub expert: Reg<B32>,
    /// First row of the list.
    pub row_begin: Reg<B32>,
    /// Rows, 0 if there is no such block.
    pub num_rows: Reg<B32>,
}

impl Block {
    pub(super) fn new(a: &mut Asm) -> Self {
        Self { expert: a.reg(), row_begin: a.reg(), num_rows: a.reg() }
    }

    /// Emits `place` moved to the expert's row of a matrix `[num_experts][n]` of elements.
    pub(super) fn emit_row_of(&self, a: &mut Asm, place: Reg<B64>, n: Reg<B32>) {
        let row_bytes = a.reg();
        a.add_u32(row_bytes, n, n);
        a.mad_wide_u32(place, self.expert, row_bytes, place);
    }

    /// Emits `self = other`.
    pub(super) fn emit_become(&self, a: &mut Asm, other: &Self) {
        a.mov_b32(self.expert, other.expert);
        a.mov_b32(self.row_begin, other.row_begin);
        a.mov_b32(self.num_rows, other.num_rows);
    }
}

/// A CTA's items.
#[derive(Clone, Copy, Debug)]
pub struct Items {
    params: ExpertParams,
    /// The item that is read ahead.
    item: Reg<B32>,
    /// Its column tile.
    tile: Reg<B32>,
    /// Its block.
    block: Block,
}

impl Items {
    /// Emits the reading of `item`.
    fn emit_read(&self, a: &mut Asm) {
        let params = &self.params;
        let max_items = load_u32(a, params.max_items);
        let column_tiles = load_u32(a, params.column_tiles);
        let multiplier = load_u32(a, params.column_tiles_magic);
        let shift = load_u32(a, params.column_tiles_shift);
        let exists = a.test_u32(Cmp::Lt, self.item, max_items);
        let idx = emit_div(a, self.item, multiplier, shift);
        let (before, at, nothing): (_, Reg<B64>, _) = (a.reg(), a.reg(), a.reg());
        a.mul_lo_u32(before, idx, column_tiles);
        a.sub_u32(self.tile, self.item, before);
        let base = load_u64(a, params.blocks_ptr);
        a.mad_wide_u32(at, idx, BLOCK_BYTES as u32, base);
        let Block { expert, row_begin, num_rows } = self.block;
        let record = [expert, row_begin, num_rows, nothing];
        record.into_iter().for_each(|word| a.mov_b32(word, 0));
        a.when(exists, |a| a.ld_global_v4_b32(record, at));
    }

    /// Emits the segment of the item that was read, and reads the next one.
    fn emit_take(&self, a: &mut Asm, stripe_idx: Reg<B32>, k_tiles: Reg<B32>) -> Segment {
        let (block, [tile, begin, end, step]) = (Block::new(a), a.regs());
        block.emit_become(a, &self.block);
        a.mov_b32(tile, self.tile);
        a.mov_b32(begin, 0);
        let exists = a.test_u32(Cmp::Ne, block.num_rows, 0);
        a.selp_b32(end, k_tiles, 0u32, exists);
        a.mov_u32_special(step, Special::NctaidX);
        a.add_u32(self.item, self.item, step);
        self.emit_read(a);
        Segment { stripe_idx, tile, begin, end, k_tiles, block: Some(block) }
    }

    /// Emits the segment after `segment`, empty if nothing is left.
    pub(super) fn emit_next(&self, a: &mut Asm, segment: &Segment) -> Segment {
        self.emit_take(a, segment.stripe_idx, segment.k_tiles)
    }

    /// Emits whether there is a segment after the newest one.
    pub(super) fn emit_has_next(&self, a: &mut Asm) -> Reg<Pred> {
        a.test_u32(Cmp::Ne, self.block.num_rows, 0)
    }

    /// Emits whether there cannot be one. Does not wait for the record.
    pub(super) fn emit_is_last(&self, a: &mut Asm) -> Reg<Pred> {
        let max_items = load_u32(a, self.params.max_items);
        a.test_u32(Cmp::Ge, self.item, max_items)
    }
}

/// Emits this CTA's items: the first segment, empty if it has none, and what follows it.
pub(super) fn emit_items(a: &mut Asm, k_tiles: Param, params: ExpertParams) -> (Stripe, Segment) {
    let k_tiles = load_u32(a, k_tiles);
    let (block, [item, tile]) = (Block::new(a), a.regs());
    let items = Items { params, item, tile, block };
    a.mov_u32_special(item, Special::CtaidX);
    items.emit_read(a);
    let stripe_idx = a.reg();
    a.mov_b32(stripe_idx, item);
    let segment = items.emit_take(a, stripe_idx, k_tiles);
    (Stripe::Items(items), segment)
}
