//! Bank conflicts, counted exactly.

use makaira::asm::types::{B32, F32};
use makaira::emu::Counts;
use makaira::layout::swizzle_unit;
use proptest::prelude::*;

use super::support::{Run, module, slot};

/// Wavefronts and conflicts of one section.
fn figures(run: &Counts) -> (u64, u64) {
    (run.shared_wavefronts, run.conflict_wavefronts)
}

/// `ldmatrix` or `stmatrix` over rows of `row_bytes`: lane `8 j + r` names unit `j` of row `r`, swizzled or not.
fn fragments(row_bytes: u32, swizzled: bool, stores: bool) -> (u64, u64) {
    let units = row_bytes / 16;
    let program = module(32, 16 * row_bytes, |asm, p| {
        // Every unit of 16 rows is written by a lane-contiguous loop: never a conflict.
        let zeros = asm.regs::<F32, 4>();
        zeros.iter().for_each(|zero| asm.mov_f32(*zero, 0.0));
        let mine = slot(asm, p.smem, p.tid, 16);
        asm.section("fill", |asm| {
            for turn in 0..units / 2 {
                asm.st_shared_v4_f32(mine.at(turn * 512), zeros);
            }
        });
        asm.bar_warp_sync(-1);
        let (row, unit, address) = (asm.reg(), asm.reg(), asm.reg());
        asm.and_b32(row, p.tid, 7);
        asm.shr_u32(unit, p.tid, 3);
        if swizzled {
            asm.xor_b32(unit, unit, row);
        }
        asm.mad_lo_u32(address, row, row_bytes, p.smem);
        asm.mad_lo_u32(address, unit, 16, address);
        let fragment = asm.regs::<B32, 4>();
        asm.bar_warp_sync(-1);
        asm.section("fragments", |asm| {
            if stores {
                fragment.into_iter().for_each(|word| asm.mov_b32(word, p.tid));
                asm.stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(address, fragment);
            } else {
                asm.ldmatrix_sync_aligned_m8n8_x4_shared_b16(fragment, address);
            }
        });
    });
    let report = Run::new().clean(&program, [1, 1]);
    assert_eq!(figures(&report.section("fill")), (u64::from(units / 2) * 4, 0));
    let total = report.section("fill").shared_wavefronts + 4;
    assert_eq!(report.total.shared_wavefronts, total);
    figures(&report.section("fragments"))
}

#[test]
fn the_swizzle_removes_conflicts_of_fragments() {
    for stores in [false, true] {
        // 128-byte rows: eight rows start in one bank, so each of four matrices takes 8 wavefronts.
        assert_eq!(fragments(128, false, stores), (4, 4 * 7));
        assert_eq!(fragments(128, true, stores), (4, 0));
        // 64-byte rows: two rows cover the banks, so four rows collide.
        assert_eq!(fragments(64, false, stores), (4, 4 * 3));
    }
}

/// One access per lane at `tid * stride` bytes, of `size` bytes.
fn strided(stride: u32, size: u32) -> (u64, u64) {
    let program = module(32, 32 * stride + 16, |asm, p| {
        let values = asm.regs::<F32, 4>();
        values.iter().for_each(|value| asm.mov_f32(*value, 0.0));
        let place = slot(asm, p.smem, p.tid, stride);
        match size {
            4 => asm.st_shared_f32(place, values[0]),
            8 => asm.st_shared_v2_f32(place, [values[0], values[1]]),
            _ => asm.st_shared_v4_f32(place, values),
        }
    });
    figures(&Run::new().clean(&program, [1, 1]).total)
}

#[test]
fn strides_conflict_by_their_common_factor_with_the_banks() {
    assert_eq!(strided(4, 4), (1, 0));
    assert_eq!(strided(8, 4), (1, 1));
    assert_eq!(strided(12, 4), (1, 0));
    assert_eq!(strided(128, 4), (1, 31));
    assert_eq!(strided(132, 4), (1, 0));
    assert_eq!(strided(8, 8), (2, 0));
    assert_eq!(strided(16, 8), (2, 2));
    assert_eq!(strided(128, 8), (2, 30));
    assert_eq!(strided(16, 16), (4, 0));
    assert_eq!(strided(32, 16), (4, 4));
    assert_eq!(strided(128, 16), (4, 28));
}

/// Lanes that read one word share it.
#[test]
fn a_broadcast_is_free() {
    let program = module(32, 256, |asm, p| {
        let mine = slot(asm, p.smem, p.tid, 8);
        asm.st_shared_b32(mine, 0);
        asm.st_shared_b32(mine.at(4), 0);
        asm.bar_warp_sync(-1);
        let word = asm.reg();
        asm.section("all", |asm| asm.ld_shared_b32(word, p.smem));
        let (pair, place) = (asm.reg(), asm.reg());
        asm.and_b32(pair, p.tid, 1);
        asm.mad_lo_u32(place, pair, 128, p.smem);
        asm.section("two", |asm| asm.ld_shared_b32(word, place));
    });
    let report = Run::new().clean(&program, [1, 1]);
    assert_eq!(figures(&report.section("all")), (1, 0));
    assert_eq!(figures(&report.section("two")), (1, 1), "two words in one bank");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any words: as many wavefronts as the fullest bank has distinct words.
    #[test]
    fn random_words_are_counted(words in proptest::collection::vec(0u32..256, 32)) {
        let program = module(32, 1024, |asm, p| {
            let table = super::support::pointer(asm, "table");
            let from = super::support::element(asm, table, p.tid, 4);
            let mine = slot(asm, p.smem, p.tid, 4);
            for turn in 0..8 {
                asm.st_shared_b32(mine.at(turn * 128), 1);
            }
            asm.bar_warp_sync(-1);
            let (index, value) = (asm.reg(), asm.reg());
            asm.ld_global_b32(index, from);
            let place = slot(asm, p.smem, index, 4);
            asm.section("gather", |asm| asm.ld_shared_b32(value, place));
        });
        let report = Run::new().words(&words).clean(&program, [1, 1]);
        let distinct: std::collections::BTreeSet<u32> = words.iter().copied().collect();
        let fullest = (0..32).map(|bank| distinct.iter().filter(|w| *w % 32 == bank).count()).max();
        let expected = fullest.expect("there are 32 banks") as u64 - 1;
        prop_assert_eq!(figures(&report.section("gather")), (1, expected));
    }

    /// The swizzle of the layout module spreads any unit of eight rows over all banks.
    #[test]
    fn the_layout_swizzle_is_the_one_that_is_needed(first in 0u32..100, unit in 0u32..8) {
        let banks: std::collections::BTreeSet<u32> =
            (8 * first..8 * first + 8).map(|row| swizzle_unit(row, unit) % 8).collect();
        prop_assert_eq!(banks.len(), 8);
    }
}
