//! How CTAs that share a tile add up: see [`super::stripe`] for who shares and who owns.
//!
//! In single precision every helper stores its part in scratch memory and counts up the tile's lock; the
//! owner waits for the count, adds the parts in stripe order and clears the lock. One hop, whatever the
//! number of helpers, where the original chains one hop per participant. The original's reduction, through
//! the fp16 output, is here as well. Locks are zero before and after every launch.
//! Source: Marlin paper, "Striped partitioning"; PTX ISA, "Memory Consistency Model" (release and acquire
//! patterns: the barrier before the release makes all threads' stores cumulative).

use super::elements::emit_load_quad;
use super::epilogue::{Epilogue, Item, Items, Output, Sums, Thread, emit_add, emit_zeros};
use super::params::{Params, emit_div, load_u32, load_u64};
use super::stripe::Segment;
use crate::asm::Asm;
use crate::asm::reg::{Label, Reg};
use crate::asm::types::{B32, B64, Cmp, Special};
use crate::weights::Activation;

/// The lock of this CTA's output tile.
fn emit_lock_ptr(a: &mut Asm, params: &Params, segment: &Segment) -> Reg<B64> {
    emit_lock_ptr_in(a, params, segment, None)
}

/// The same of a row of locks, one for each tile; without a row it is the CTA's row tile.
pub(super) fn emit_lock_ptr_in(
    a: &mut Asm,
    params: &Params,
    segment: &Segment,
    row: Option<Reg<B32>>,
) -> Reg<B64> {
    let locks = load_u64(a, params.locks_ptr);
    let num_runs = load_u32(a, params.num_runs);
    let multiplier = load_u32(a, params.k_tiles_magic);
    let shift = load_u32(a, params.k_tiles_shift);
    let num_tiles = emit_div(a, num_runs, multiplier, shift);
    let [row_tile, index] = a.regs();
    let row = row.unwrap_or_else(|| {
        a.mov_u32_special(row_tile, Special::CtaidY);
        row_tile
    });
    a.mad_lo_u32(index, row, num_tiles, segment.tile);
    let ptr: Reg<B64> = a.reg();
    a.mad_wide_u32(ptr, index, 4, locks);
    ptr
}

/// How many later stripes hold a part of the segment's tile, 0 if this one reaches its end.
pub(super) fn emit_num_helpers(a: &mut Asm, params: &Params, segment: &Segment) -> Reg<B32> {
    // The rest of the tile, in stripes rounded up.
    let stripe = load_u32(a, params.stripe);
    let multiplier = load_u32(a, params.stripe_magic);
    let shift = load_u32(a, params.stripe_shift);
    let rest = a.reg();
    a.sub_u32(rest, segment.k_tiles, segment.end);
    a.add_u32(rest, rest, stripe);
    a.sub_u32(rest, rest, 1);
    emit_div(a, rest, multiplier, shift)
}

/// Thread 0 waits until the lock holds `value`; then the CTA goes on.
fn emit_wait_lock(a: &mut Asm, thread: &Thread, lock: Reg<B64>, value: Reg<B32>) {
    let others = a.test_u32(Cmp::Ne, thread.tid, 0);
    let [spin, done] = ["spin", "locked"].map(|name| a.label(name));
    a.when(others, |a| a.bra(done));
    emit_spin(a, spin, lock, value);
    a.bind(done);
    a.bar_sync(0);
}

/// One thread reads the lock until it holds `value`; what its writers released is visible to it then.
pub(super) fn emit_spin(a: &mut Asm, spin: Label, lock: Reg<B64>, value: Reg<B32>) {
    a.bind(spin);
    let seen = a.reg();
    a.ld_acquire_gpu_global_u32(seen, lock);
    let early = a.test_u32(Cmp::Ne, seen, value);
    a.when(early, |a| a.bra(spin));
}

pub(super) fn emit_f32(a: &mut Asm, epilogue: &Epilogue<'_>, items: &Items, sums: Sums) {
    let Epilogue { config, params, ref thread, segment, .. } = *epilogue;
    let [own, output, done] = ["own", "output", "tile_done"].map(|name| a.label(name));
    let first = a.section("whose tile", |a| {
        let first = a.test_u32(Cmp::Eq, thread.tid, 0);
        let owns = a.test_u32(Cmp::Eq, segment.begin, 0);
        a.when(owns, |a| a.bra(own));
        first
    });
    a.section("contribute to another CTA's tile", |a| {
        let slot = items.emit_slot_ptr(a, params, segment.stripe_idx);
        for passes in items.batches() {
            for item in items.emit_add_teams(a, config, &sums, &passes) {
                let place = slot.at((item.pass * items.pass_bytes) as i32);
                a.when(item.exists, |a| a.st_global_v4_f32(place, item.sum));
            }
        }
        let lock = emit_lock_ptr(a, params, segment);
        a.bar_sync(0);
        a.when(first, |a| a.red_release_gpu_global_add_u32(lock, 1u32));
        a.bra(done);
    });
    a.bind(own);
    let num_helpers = a.section("wait for the other CTAs", |a| {
        let num_helpers = emit_num_helpers(a, params, segment);
        let alone = a.test_u32(Cmp::Eq, num_helpers, 0);
        a.when(alone, |a| a.bra(output));
        let lock = emit_lock_ptr(a, params, segment);
        emit_wait_lock(a, thread, lock, num_helpers);
        a.when(first, |a| a.st_global_b32(lock, 0u32));
        num_helpers
    });
    a.bind(output);
    a.section("output", |a| {
        let first_slot = a.reg();
        a.add_u32(first_slot, segment.stripe_idx, 1);
        let slots = items.emit_slot_ptr(a, params, first_slot);
        let output = items.emit_output_place(a, params, thread);
        for passes in items.batches() {
            let batch = items.emit_add_teams(a, config, &sums, &passes);
            emit_add_helpers(a, items, slots, num_helpers, &batch);
            items.emit_output(a, params, &output, &batch);
        }
    });
    a.bind(done);
    // The owner's threads have read the sums, so the caller may use their place again. Contributors
    // have met since their last read already, before the release.
    a.section("tile done", |a| a.bar_sync(0));
}

/// A tile that no other CTA has a part of.
pub(super) fn emit_whole(a: &mut Asm, epilogue: &Epilogue<'_>, items: &Items, sums: Sums) {
    let Epilogue { config, params, ref thread, .. } = *epilogue;
    a.section("output", |a| {
        let output = items.emit_output_place(a, params, thread);
        for passes in items.batches() {
            let batch = items.emit_add_teams(a, config, &sums, &passes);
            items.emit_output(a, params, &output, &batch);
        }
    });
    a.section("tile done", |a| a.bar_sync(0));
}

/// Adds the helpers' parts of a batch of items, in stripe order.
fn emit_add_helpers(
    a: &mut Asm,
    items: &Items,
    slots: Reg<B64>,
    num_helpers: Reg<B32>,
    batch: &[Item],
) {
    let [next, added] = ["next_part", "parts_added"].map(|name| a.label(name));
    let slot: Reg<B64> = a.reg();
    let left = a.reg();
    a.mov_b64(slot, slots);
    a.mov_b32(left, num_helpers);
    a.bind(next);
    let finished = a.test_u32(Cmp::Eq, left, 0);
    a.when(finished, |a| a.bra(added));
    for item in batch {
        let place = slot.at((item.pass * items.pass_bytes) as i32);
        let part = emit_zeros(a);
        a.when(item.exists, |a| a.ld_global_v4_f32(part, place));
        for (sum, part) in item.sum.iter().zip(part) {
            a.add_f32(*sum, *sum, part);
        }
    }
    a.add_u64(slot, slot, u64::from(items.slot_bytes));
    a.sub_u32(left, left, 1);
    a.bra(next);
    a.bind(added);
}

/// The paper's reduction: participants of a tile in turn, from the bottom of the tile to its top, add
/// their sums to what the one before left in C.
pub(super) fn emit_f16(a: &mut Asm, epilogue: &Epilogue<'_>, items: &Items, sums: Sums) {
    let Epilogue { config, params, ref thread, segment, .. } = *epilogue;
    let (num_helpers, lock) = a.section("wait for the turn", |a| {
        let num_helpers = emit_num_helpers(a, params, segment);
        let lock = emit_lock_ptr(a, params, segment);
        emit_wait_lock(a, thread, lock, num_helpers);
        (num_helpers, lock)
    });
    a.section("add to the output", |a| {
        let is_bottom = a.test_u32(Cmp::Eq, num_helpers, 0);
        let output = items.emit_output_place(a, params, thread);
        let from: Reg<B64> = a.reg();
        a.mov_b64(from, output.ptr);
        for passes in items.batches() {
            let mut added = Vec::new();
            for item in &items.emit_add_teams(a, config, &sums, &passes) {
                if item.pass > 0 {
                    a.add_u64(from, from, output.step);
                }
                // What C holds is scaled already: per-column scales go on this part first.
                let part = output.emit_scaled(a, item.sum);
                let reads = a.reg();
                a.not_pred(reads, is_bottom);
                a.and_pred(reads, reads, item.exists);
                let before = emit_load_quad(a, Activation::F16, reads, from);
                let sum = emit_add(a, before, part);
                added.push(Item { sum, ..*item });
            }
            items.emit_output(a, params, &Output { scales: None, ..output }, &added);
        }
        // All threads' stores precede the release. It is the last barrier as well: nobody reads the
        // sums after it.
        a.bar_sync(0);
        // The lock counts the participants that are through; the top one leaves it at zero.
        let first = a.test_u32(Cmp::Eq, thread.tid, 0);
        let is_top = a.test_u32(Cmp::Eq, segment.begin, 0);
        let turn = a.reg();
        a.add_u32(turn, num_helpers, 1);
        a.selp_b32(turn, 0u32, turn, is_top);
        a.when(first, |a| a.st_release_gpu_global_u32(lock, turn));
    });
}
