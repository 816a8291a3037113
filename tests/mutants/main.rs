//! The checker bites: every wait, commit, barrier, flag, swizzle, region and guard of a kernel is missed
//! when it is gone.
//!
//! A mutant is a kernel with one instruction left out, weakened or moved. It runs twice on one workspace,
//! between canaries, in several orders of the warps, and must be noticed: by a fault, a wrong number, a
//! lock that is left set, or a count of bank conflicts. Mutants that cannot be noticed are listed with the
//! reason in [`redundant`]; one that is listed and noticed all the same fails as well, so the list stays
//! true. `tests/emulator/mutants.rs` asks the emulator alone; this asks the whole suite, of kernels that
//! differ in every emission paragraph.

mod case;
mod changes;
mod experts;
mod gather;
mod products;
#[path = "../gemm/support.rs"]
mod support;

use std::collections::BTreeMap;

use makaira::asm::Module;
use makaira::asm::builder::Item;
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{Alu, XorB32};
use makaira::asm::isa::mem::Mem;
use makaira::asm::reg::In;
use makaira::kernel::epilogue::epilogue_bytes;
use makaira::kernel::{Config, Reduction};
use makaira::weights::CODE_BYTES_PER_TILE;

use case::Case;
use changes::{Mutant, apply, mutants};

/// Whether a mutant takes a barrier between the windows of a tall tile's weave away: they keep the
/// assembler from moving loads out of their window, and order nothing.
fn is_window(config: &Config, mutant: &Mutant, module: &Module) -> bool {
    let team_barrier = config.warps_n == 1 && mutant.nth == 0;
    config.tile_m >= 32
        && !team_barrier
        && mutant.leaves_out("bar_warp_sync", "main loop, slot", module)
}

/// Why a mutant cannot be noticed, if that is known.
fn redundant(config: &Config, mutant: &Mutant, module: &Module) -> Option<&'static str> {
    let left_out = |method, section| mutant.leaves_out(method, section, module);
    let sums = "partial sums to shared memory";
    let in_place = config.reduction == Reduction::F16InPlace;
    if in_place && left_out("bar_sync", sums) && mutant.nth == 1 {
        return Some("the barrier behind the lock lies between the sums' stores and loads as well");
    }
    // The sums' readers and the next runs' copies to that place are both team 0, which has a barrier of
    // its own between them.
    let items = config.tile_m * config.tile_n / 4;
    let team_codes = config.warps_n * config.tiles_per_warp() * CODE_BYTES_PER_TILE as u32;
    let inside = items <= 32 * config.warps_n && epilogue_bytes(config) <= team_codes;
    let at_the_end = left_out("bar_sync", "tile done");
    if config.family == "sm80" && at_the_end && inside {
        return Some("only the team whose ring holds the sums reads them");
    }
    if config.family == "sm90wg" {
        return products::redundant(config, mutant, module);
    }
    let Item::Inst(node) = module.entry.items[mutant.at] else { return None };
    let swizzles = matches!(node.inst, Inst::Alu(Alu::XorB32(XorB32 { b: In::Reg(_), .. })));
    if config.tile_m == 1 && swizzles {
        return Some("row 0 lies as it is in every swizzle");
    }
    let rows_per_pass = config.num_threads() / (config.tile_n / 4);
    let unguarded = mutant.with.is_some_and(|node| node.guard.is_none());
    let to_slot = matches!(node.inst, Inst::Mem(Mem::StGlobalV4F32(_)));
    if unguarded && to_slot && config.tile_m.is_multiple_of(rows_per_pass) {
        return Some("a slot has room for rows that do not exist");
    }
    None
}

/// Every mutant of a kernel is noticed, or is known to be redundant.
fn bites(name: &str, m: usize) {
    let case = Case::new(name, m);
    let module = case.module();
    if let Some(why) = case.noticed(&module) {
        panic!("{name} itself: {why}");
    }
    let all = mutants(&module);
    let (windows, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|mutant| is_window(&case.config, mutant, &module));
    if let Some(how) = case.noticed(&apply(&module, &windows)) {
        panic!("{name}: the {} barriers between windows matter: {how}", windows.len());
    }
    let (repeated, others): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|mutant| products::is_repeated(&case.config, mutant, &module));
    let (mut wrong, mut excused) = (Vec::new(), Vec::new());
    let mut kinds = BTreeMap::<_, Vec<&Mutant>>::new();
    for mutant in &repeated {
        kinds.entry(mutant.kind(&module)).or_default().push(mutant);
    }
    for (kind, mutants) in kinds {
        if case.noticed(&apply(&module, mutants.iter().copied())).is_none() {
            wrong.push(format!("not noticed, {} together: {kind:?}", mutants.len()));
        }
    }
    for mutant in &others {
        let noticed = case.noticed(&apply(&module, [mutant]));
        match (noticed, redundant(&case.config, mutant, &module)) {
            (Some(_), None) => {}
            (None, Some(reason)) => excused.push((mutant, reason)),
            (None, None) => wrong.push(format!("not noticed: {}", mutant.what)),
            (Some(how), Some(reason)) => {
                wrong.push(format!("not redundant ({reason}): {}: {how}", mutant.what));
            }
        }
    }
    println!("{name}: {} mutants, {} redundant", others.len(), excused.len());
    excused.iter().for_each(|(mutant, reason)| println!("   {}: {reason}", mutant.what));
    assert!(others.len() > 30, "{name}: only {} mutants", others.len());
    assert!(wrong.is_empty(), "{name}, of {} mutants:\n{}", others.len(), wrong.join("\n"));
}

#[test]
fn one_row() {
    bites("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1);
}

#[test]
fn teams_of_two_warps_and_two_stages() {
    bites("marlin_sm80_u4b8_f16_m16n128k256_col_w2_s2_c1", 19);
}

#[test]
fn half_chunks_groups_of_64_and_cut_rows() {
    bites("marlin_sm80_u4b8_f16_m32n128k128_g64_w4_s4_c1_fs_kt", 30);
}

#[test]
fn in_place_reduction() {
    bites("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16", 16);
}

#[test]
fn single_elements() {
    bites("marlin_sm80_u4b8_f16_m8n64k256_col_w1_s2_c1_el", 9);
}

#[test]
fn tall_tiles() {
    bites("marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs", 61);
}

#[test]
fn evict_first_and_groups_of_32() {
    bites("marlin_sm80_u4b8_f16_m4n64k256_g32_w2_s3_c1_ef", 3);
}

#[test]
fn rings_of_one_warp() {
    bites("marlin_sm90_u4b8_f16_m1n64k512_g128_w1_s2_c1", 1);
}

#[test]
fn rings_of_one_warp_and_subnormal_codes() {
    bites("marlin_sm90_u4b8_f16_m16n128k256_g128_w2_s2_c1_sn", 15);
}

#[test]
fn three_warps_side_by_side_and_cut_rows() {
    bites("marlin_sm90_u4b8_f16_m8n96k256_col_w3_s3_c1_sn_kt", 7);
}

#[test]
fn teams_of_a_warpgroup_and_promoted_sums() {
    bites("marlin_sm90wg_u4b8_f16_m16n64k256_g128_w4_s3_c1", 19);
}

#[test]
fn two_runs_a_stage_two_tiles_a_warp_and_scaled_fragments() {
    bites("marlin_sm90wg_u4b8_f16_m40n128k128_g64_w4_s3_c1_x2_fs_kt", 45);
}

#[test]
fn clusters_of_a_warpgroup_each() {
    bites("marlin_sm90wg_u4b8_f16_m32n64k128_g128_w4_s3_c1_q2", 45);
}

#[test]
fn clusters_of_two_teams() {
    bites("marlin_sm90wg_u4b8_f16_m16n64k256_g128_w4_s3_c1_q2", 29);
}

#[test]
fn warpgroups_side_by_side_and_scales_a_column() {
    bites("marlin_sm90wg_u4b8_f16_m24n128k128_col_w8_s3_c1", 29);
}
