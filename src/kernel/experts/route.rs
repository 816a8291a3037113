//! The list of rows by expert, from the experts that each token has chosen: count, prefix sum, scatter.
//!
//! CTA e serves expert e. It reads all choices twice, each thread a contiguous part of them: first it counts those of
//! experts before e, where e's rows begin, and those of e; a prefix sum over the threads then gives each thread its
//! first row, and the second time it writes its rows down. So rows lie by expert, then by token, then by choice,
//! nothing depends on the order of things, and CTAs do not wait for each other. One CTA more serves the choices of no
//! expert: they have no row.
//! The last CTA to be done, by a counter that goes back to 0 by itself, writes the row blocks.
//! Where grids may overlap it waits for the one before it, which may be writing the choices.

use super::THREADS;
use super::blocks::{BlockArguments, BlockParams, Scan};
use crate::asm::reg::{Param, Reg};
use crate::asm::types::{B32, B64, Cmp, Pred, Special};
use crate::asm::{Asm, Module};
use crate::backend::{Arg, ArgList};
use crate::kernel::params::{emit_div, load_u32, load_u64, magic};
use crate::target::SmArch;

/// The place of a choice that has no row.
pub const NO_PLACE: u32 = u32::MAX;
/// Choices that a thread reads at a time.
const AT_ONCE: u32 = 4;

/// What a launch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteArguments {
    /// Experts of each token, `[tokens][top_k]` words. What is no expert's number has no row.
    pub topk_ids_ptr: u64,
    /// Weights of the choices, `[tokens][top_k]` floats, if there are any.
    pub topk_weights_ptr: Option<u64>,
    /// Experts that a token chooses.
    pub top_k: u32,
    /// Choices: `tokens * top_k`, at most 2^30.
    pub num_choices: u32,
    /// Room for the token of each row.
    pub token_ids_ptr: u64,
    /// Room for the row of each choice.
    pub places_ptr: u64,
    /// Room for the weight of each row.
    pub row_weights_ptr: u64,
    /// A word, zero before and after each launch.
    pub counter_ptr: u64,
    /// The offsets and row blocks that are written.
    pub blocks: BlockArguments,
}

impl RouteArguments {
    /// The kernel's arguments, in the order of the entry's parameters.
    pub fn list(&self) -> ArgList {
        let (multiplier, shift) = magic(self.top_k);
        let mut list = ArgList::new(&[
            Arg::U64(self.topk_ids_ptr),
            Arg::U64(self.topk_weights_ptr.unwrap_or(0)),
            Arg::U32(self.topk_weights_ptr.is_some().into()),
            Arg::U32(multiplier),
            Arg::U32(shift),
            Arg::U32(self.num_choices),
            Arg::U64(self.token_ids_ptr),
            Arg::U64(self.places_ptr),
            Arg::U64(self.row_weights_ptr),
            Arg::U64(self.counter_ptr),
        ]);
        self.blocks.append(&mut list);
        list
    }

    /// CTAs of the launch.
    pub fn grid(&self) -> [u32; 2] {
        [self.blocks.num_experts + 1, 1]
    }
}

/// The entry's parameters.
struct Params {
    topk_ids_ptr: Param,
    topk_weights_ptr: Param,
    weighted: Param,
    top_k_magic: Param,
    top_k_shift: Param,
    num_choices: Param,
    token_ids_ptr: Param,
    places_ptr: Param,
    row_weights_ptr: Param,
    counter_ptr: Param,
    blocks: BlockParams,
}

impl Params {
    fn declare(a: &mut Asm) -> Self {
        Self {
            topk_ids_ptr: a.param_u64("topk_ids_ptr"),
            topk_weights_ptr: a.param_u64("topk_weights_ptr"),
            weighted: a.param_u32("weighted"),
            top_k_magic: a.param_u32("top_k_magic"),
            top_k_shift: a.param_u32("top_k_shift"),
            num_choices: a.param_u32("num_choices"),
            token_ids_ptr: a.param_u64("token_ids_ptr"),
            places_ptr: a.param_u64("places_ptr"),
            row_weights_ptr: a.param_u64("row_weights_ptr"),
            counter_ptr: a.param_u64("counter_ptr"),
            blocks: BlockParams::declare(a),
        }
    }
}

/// A thread's part of the choices, and whom its CTA serves.
struct Part {
    begin: Reg<B32>,
    end: Reg<B32>,
    ids: Reg<B64>,
    expert: Reg<B32>,
    /// Whether the CTA serves the choices of no expert.
    serves_rest: Reg<Pred>,
}

impl Part {
    fn new(a: &mut Asm, params: &Params, tid: Reg<B32>, expert: Reg<B32>) -> Self {
        let num_choices = load_u32(a, params.num_choices);
        let num_experts = params.blocks.emit_num_experts(a);
        let [each, begin, end] = a.regs();
        a.add_u32(each, num_choices, THREADS - 1);
        a.shr_u32(each, each, THREADS.ilog2());
        a.mul_lo_u32(begin, tid, each);
        a.add_u32(end, begin, each);
        a.min_u32(end, end, num_choices);
        let ids = load_u64(a, params.topk_ids_ptr);
        let serves_rest = a.test_u32(Cmp::Eq, expert, num_experts);
        Self { begin, end, ids, expert, serves_rest }
    }

    /// Emits a loop over the part: for each choice its number, its expert, and whether it is the CTA's.
    fn emit_each(
        &self,
        a: &mut Asm,
        name: &'static str,
        mut emit: impl FnMut(&mut Asm, Reg<B32>, Reg<B32>, Reg<Pred>),
    ) {
        let ([next, done], first) = ([name, "part_done"].map(|name| a.label(name)), a.reg());
        a.mov_b32(first, self.begin);
        a.bind(next);
        let finished = a.test_u32(Cmp::Ge, first, self.end);
        a.when(finished, |a| a.bra(done));
        let loaded: Vec<_> = (0..AT_ONCE)
            .map(|n| {
                let (choice, id, at): (_, _, Reg<B64>) = (a.reg(), a.reg(), a.reg());
                a.add_u32(choice, first, n);
                let exists = a.test_u32(Cmp::Lt, choice, self.end);
                a.mad_wide_u32(at, choice, 4, self.ids);
                // Of no expert, and after all of them.
                a.mov_b32(id, u32::MAX);
                a.when(exists, |a| a.ld_global_b32(id, at));
                (choice, id, exists)
            })
            .collect();
        for (choice, id, exists) in loaded {
            let mine = a.test_u32(Cmp::Gt, id, self.expert);
            let same = a.test_u32(Cmp::Eq, id, self.expert);
            a.and_pred(mine, mine, self.serves_rest);
            a.or_pred(mine, mine, same);
            a.and_pred(mine, mine, exists);
            emit(a, choice, id, mine);
        }
        a.add_u32(first, first, AT_ONCE);
        a.bra(next);
        a.bind(done);
    }
}

/// Emits `count += 1` where `counts` holds.
fn emit_count(a: &mut Asm, count: Reg<B32>, counts: Reg<Pred>) {
    a.when(counts, |a| a.add_u32(count, count, 1));
}

/// The kernel for a target.
pub fn build(target: SmArch) -> Module {
    let mut a = Asm::new();
    let params = Params::declare(&mut a);
    let (tid, expert, scan, part) = a.section("who is who", |a| {
        let [tid, expert] = a.regs();
        a.mov_u32_special(tid, Special::TidX);
        a.mov_u32_special(expert, Special::CtaidX);
        let part = Part::new(a, &params, tid, expert);
        (tid, expert, Scan::new(a, tid), part)
    });
    let last_flag = a.smem.region("whether the CTA is the last one", 4, 4);
    if target.sm >= 90 {
        a.griddepcontrol_wait();
        a.griddepcontrol_launch_dependents();
    }
    let [row, first_row] = a.section("count", |a| {
        let [before, same] = a.regs();
        a.mov_b32(before, 0);
        a.mov_b32(same, 0);
        part.emit_each(a, "count", |a, _, id, mine| {
            // A choice that does not exist is after all experts.
            let earlier = a.test_u32(Cmp::Lt, id, expert);
            emit_count(a, before, earlier);
            emit_count(a, same, mine);
        });
        let [rank, _] = scan.emit_sum(a, same);
        let [_, first_row] = scan.emit_sum(a, before);
        let row = a.reg();
        a.add_u32(row, first_row, rank);
        [row, first_row]
    });
    a.section("scatter", |a| emit_scatter(a, &params, &part, row));
    let (first, done) = (a.test_u32(Cmp::Eq, tid, 0), a.label("done"));
    a.section("who is last", |a| {
        let others = a.reg();
        a.not_pred(others, first);
        let (at, told) = (params.blocks.emit_offset_place(a, expert), a.label("told"));
        a.when(others, |a| a.bra(told));
        a.st_global_b32(at, first_row);
        let counter = load_u64(a, params.counter_ptr);
        let num_experts = params.blocks.emit_num_experts(a);
        let [before, smem] = a.regs();
        a.atom_acq_rel_gpu_global_inc_u32(before, counter, num_experts);
        a.mov_u32_smem(smem);
        a.st_shared_b32(smem.at(last_flag.start).within(last_flag), before);
        a.bind(told);
        a.bar_sync(0);
    });
    a.section("row blocks", |a| {
        let num_experts = params.blocks.emit_num_experts(a);
        let [before, smem] = a.regs();
        a.mov_u32_smem(smem);
        a.ld_shared_b32(before, smem.at(last_flag.start).within(last_flag));
        let earlier = a.test_u32(Cmp::Ne, before, num_experts);
        a.when(earlier, |a| a.bra(done));
        params.blocks.emit_blocks(a, &scan, tid);
    });
    a.bind(done);
    a.exit();
    a.finish("makaira_route", target, THREADS, 1)
}

/// Emits the writing of the thread's rows from `row` on, or that its choices have none.
fn emit_scatter(a: &mut Asm, params: &Params, part: &Part, row: Reg<B32>) {
    let [token_ids, places, row_weights, topk_weights] =
        [params.token_ids_ptr, params.places_ptr, params.row_weights_ptr, params.topk_weights_ptr]
            .map(|param| load_u64(a, param));
    let [multiplier, shift] =
        [params.top_k_magic, params.top_k_shift].map(|param| load_u32(a, param));
    let weighted = load_u32(a, params.weighted);
    let weighted = a.test_u32(Cmp::Ne, weighted, 0);
    part.emit_each(a, "scatter", |a, choice, _, mine| {
        let at = |a: &mut Asm, base: Reg<B64>, idx: Reg<B32>| -> Reg<B64> {
            let place = a.reg();
            a.mad_wide_u32(place, idx, 4, base);
            place
        };
        let (place, told) = (at(a, places, choice), a.reg());
        a.selp_b32(told, NO_PLACE, row, part.serves_rest);
        a.when(mine, |a| a.st_global_b32(place, told));
        let has_row: Reg<Pred> = a.reg();
        a.not_pred(has_row, part.serves_rest);
        a.and_pred(has_row, has_row, mine);
        let token = emit_div(a, choice, multiplier, shift);
        let place = at(a, token_ids, row);
        a.when(has_row, |a| a.st_global_b32(place, token));
        let moves: Reg<Pred> = a.reg();
        a.and_pred(moves, has_row, weighted);
        let (from, to, weight) = (at(a, topk_weights, choice), at(a, row_weights, row), a.reg());
        a.mov_b32(weight, 0);
        a.when(moves, |a| a.ld_global_b32(weight, from));
        a.when(moves, |a| a.st_global_b32(to, weight));
        emit_count(a, row, has_row);
    });
}
