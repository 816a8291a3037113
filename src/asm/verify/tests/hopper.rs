//! What the rules say about Hopper's instructions.

use super::*;
use crate::asm::reg::{In, RegRange};
use crate::asm::types::Special;

const SM90A: SmArch = SmArch::specific(90);

fn on(target: SmArch, emit: impl FnOnce(&mut Asm)) -> Vec<(Rule, String)> {
    let mut asm = Asm::new();
    asm.smem.region("tile", 1024, 128);
    emit(&mut asm);
    asm.exit();
    problems_of(&asm.finish("k", target, 128, 1))
}

fn product(asm: &mut Asm, n: u32, regs: u32, more: impl Into<In<Pred>>) -> RegRange<F32> {
    let (a, desc) = (asm.regs::<B32, 4>(), asm.reg::<B64>());
    a.iter().for_each(|a| asm.mov_b32(*a, 0));
    asm.mov_b64(desc, 0u64);
    let d = asm.reg_range(regs);
    asm.wgmma_mma_async_m64k16_f32_f16(n, d, a, desc, more);
    d
}

#[test]
fn products_have_columns_and_accumulators() {
    let with = |n, regs| {
        on(SM90A, |asm| {
            product(asm, n, regs, false);
        })
    };
    assert_clean(&with(8, 4));
    assert_clean(&with(256, 128));
    assert_one(&with(12, 6), Rule::Immediate, &["12 columns", "8 to 256"]);
    assert_one(&with(264, 132), Rule::Immediate, &["264 columns"]);
    assert_one(&with(16, 4), Rule::Immediate, &["4 accumulators for 16 columns: use 8"]);
    let elsewhere = on(SmArch::baseline(90), |asm| {
        product(asm, 8, 4, false);
    });
    assert_one(&elsewhere, Rule::Target, &["sm_90a only", "build for that target"]);
}

/// Accumulators that a product certainly reads must have values; where a predicate decides, only the run tells.
#[test]
fn accumulators_are_defined_before_they_are_added_to() {
    let found = on(SM90A, |asm| {
        product(asm, 8, 4, true);
    });
    assert_eq!(found.len(), 4, "{found:#?}");
    assert!(found.iter().all(|(rule, _)| *rule == Rule::Definition), "{found:#?}");
    assert_clean(&on(SM90A, |asm| {
        let more = predicate(asm);
        let d = product(asm, 8, 4, more);
        let sum = asm.reg();
        asm.add_f32(sum, d.get(0), d.get(3));
    }));
}

#[test]
fn registers_are_given_back_in_steps_of_8() {
    let with = |n: u32| on(SM90A, |asm| asm.setmaxnreg_dec_sync_aligned_u32(n));
    assert_clean(&with(24));
    assert_one(&with(20), Rule::Immediate, &["20 registers", "multiple of 8 from 24 to 256"]);
    assert_one(&with(264), Rule::Immediate, &["264 registers"]);
}

/// A barrier lies at any multiple of 8, also in an instruction whose other addresses name 16 bytes.
#[test]
fn barriers_lie_at_multiples_of_8() {
    let with = |to: u32, bar: u32| {
        on(SM90A, |asm| {
            let param = asm.param_u64("input");
            let (smem, input) = (asm.reg(), asm.reg());
            asm.mov_u32_smem(smem);
            asm.ld_param_u64(input, param);
            asm.cp_async_bulk_shared_global(smem.at(to), input, 16, smem.at(bar));
        })
    };
    assert_clean(&with(16, 8));
    assert_one(&with(8, 8), Rule::Alignment, &["multiple of 16"]);
    assert_one(&with(16, 4), Rule::Alignment, &["multiple of 8"]);
}

#[test]
fn tensor_maps_are_parameters_of_their_own_kind() {
    let take = |asm: &mut Asm, param| {
        let address = asm.reg::<B64>();
        asm.cvta_param_u64(address, param);
    };
    assert_clean(&on(SM90A, |asm| {
        let map = asm.param_tensor_map("map");
        take(asm, map);
    }));
    let found = on(SM90A, |asm| {
        let pointer = asm.param_u64("pointer");
        take(asm, pointer);
    });
    assert_one(&found, Rule::Param, &["parameter pointer of 8 bytes"]);
    let found = on(SM90A, |asm| {
        let (map, value) = (asm.param_tensor_map("map"), asm.reg::<B64>());
        asm.ld_param_u64(value, map);
    });
    assert_one(&found, Rule::Param, &["parameter map of 128 bytes is read as 8"]);
}

#[test]
fn clusters_are_of_hopper() {
    let with = |cluster: u32, target: SmArch| {
        on(target, |asm| {
            asm.cluster = cluster;
            let word: Reg<B32> = asm.reg();
            asm.mov_b32(word, 0);
        })
    };
    assert_clean(&with(2, SmArch::baseline(90)));
    assert_clean(&with(1, SM80));
    assert_one(&with(2, SM80), Rule::Target, &["clusters need sm_90"]);
    assert_one(&with(9, SM90A), Rule::Launch, &["clusters of 9 CTAs"]);
    assert_one(&with(0, SM90A), Rule::Launch, &["clusters of 0 CTAs"]);
    let rank = |target| {
        on(target, |asm| {
            let rank = asm.reg();
            asm.mov_u32_special(rank, Special::ClusterCtarank);
        })
    };
    assert_clean(&rank(SM90A));
    assert_one(&rank(SM80), Rule::Target, &["sm_90 or higher", "sm_80"]);
}

#[test]
fn the_entrys_registers_follow_from_its_threads() {
    let regs = |threads, min_ctas| {
        let mut asm = Asm::new();
        asm.exit();
        asm.finish("k", SM90A, threads, min_ctas).entry_regs()
    };
    assert_eq!([regs(384, 1), regs(640, 1), regs(128, 1)], [168, 96, 255]);
    assert_eq!([regs(128, 4), regs(1024, 1), regs(384, 2)], [128, 64, 80]);
}
