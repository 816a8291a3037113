//! What instructions compute, on cases that are easy to get wrong.

use makaira::asm::types::{B32, F32};
use proptest::prelude::*;

use super::support::{Run, element, module, pointer, slot};

/// A product and sum whose exact value lies just below the middle between two fp16 values: rounding to
/// single precision first lands on the middle, and the second rounding goes the wrong way.
#[test]
fn fp16_fma_rounds_once() {
    let program = module(32, 0, |asm, _| {
        let (input, out) = (pointer(asm, "input"), pointer(asm, "out"));
        let [a, b, c, d] = asm.regs::<B32, 4>();
        for (n, reg) in [a, b, c].into_iter().enumerate() {
            asm.ld_global_b32(reg, input.at(4 * n as i32));
        }
        asm.fma_rn_f16x2(d, a, b, c);
        let lane = asm.reg();
        asm.mov_u32_special(lane, makaira::asm::types::Special::Laneid);
        let place = element(asm, out, lane, 4);
        asm.st_global_b32(place, d);
    });
    let mut run = Run::new().words(&[0x3c01_3c00, 0x0ffe_4000, 0x3c01_4200]).undefined(128);
    run.clean(&program, [1, 1]);
    // High: the trap. Low: 1 * 2 + 3 = 5.
    assert_eq!(run.read(1, 32), [0x3c01_4500; 32]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// `ldmatrix` of both operands (B through `.x2` from its columns) and `mma`, on integers, are exact.
    #[test]
    fn integer_matrices_multiply_exactly(
        a in proptest::collection::vec(-8i32..8, 16 * 16),
        b in proptest::collection::vec(-8i32..8, 16 * 8),
        c in proptest::collection::vec(-500i32..500, 16 * 8),
    ) {
        let program = module(32, 1024, |asm, p| {
            let (a, b, c, out) =
                (pointer(asm, "a"), pointer(asm, "b"), pointer(asm, "c"), pointer(asm, "out"));
            // A is 16 rows of 32 bytes at 0, B's 8 columns of 32 bytes at 512.
            let from = element(asm, a, p.tid, 16);
            let to = slot(asm, p.smem, p.tid, 16);
            asm.cp_async_cg_16(to, from);
            let few = asm.test_u32(makaira::asm::types::Cmp::Lt, p.tid, 16);
            let from = element(asm, b, p.tid, 16);
            asm.when(few, |asm| asm.cp_async_cg_16(to.at(512), from));
            asm.cp_async_commit_group();
            asm.cp_async_wait_group(0);
            asm.bar_warp_sync(-1);
            let (row, half, address) = (asm.reg(), asm.reg(), asm.reg());
            asm.and_b32(row, p.tid, 15);
            asm.shr_u32(half, p.tid, 4);
            asm.mad_lo_u32(address, row, 32, p.smem);
            asm.mad_lo_u32(address, half, 16, address);
            let fragment_a = asm.regs::<B32, 4>();
            asm.ldmatrix_sync_aligned_m8n8_x4_shared_b16(fragment_a, address);
            asm.and_b32(row, p.tid, 7);
            asm.shr_u32(half, p.tid, 3);
            asm.and_b32(half, half, 1);
            asm.mad_lo_u32(address, row, 32, p.smem);
            asm.mad_lo_u32(address, half, 16, address);
            let fragment_b = asm.regs::<B32, 2>();
            asm.ldmatrix_sync_aligned_m8n8_x2_shared_b16(fragment_b, address.at(512));
            let (sums, results) = (asm.regs::<F32, 4>(), asm.regs::<F32, 4>());
            let (group, pair, place) = (asm.reg(), asm.reg(), asm.reg());
            asm.shr_u32(group, p.tid, 2);
            asm.and_b32(pair, p.tid, 3);
            asm.mul_lo_u32(place, pair, 2);
            asm.mad_lo_u32(place, group, 8, place);
            let from = element(asm, c, place, 4);
            asm.ld_global_v2_f32([sums[0], sums[1]], from);
            asm.ld_global_v2_f32([sums[2], sums[3]], from.at(256));
            asm.mma_m16n8k16_f32_f16(results, fragment_a, fragment_b, sums);
            let to = element(asm, out, place, 4);
            asm.st_global_v2_f32(to, [results[0], results[1]]);
            asm.st_global_v2_f32(to.at(256), [results[2], results[3]]);
        });
        let half = |value: i32| u32::from(half::f16::from_f32(value as f32).to_bits());
        let pack = |values: Vec<i32>| -> Vec<u32> {
            values.chunks(2).map(|pair| half(pair[0]) | half(pair[1]) << 16).collect()
        };
        let b_columns: Vec<i32> = (0..128).map(|i| b[i % 16 * 8 + i / 16]).collect();
        let floats: Vec<u32> = c.iter().map(|value| (*value as f32).to_bits()).collect();
        let mut run =
            Run::new().words(&pack(a.clone())).words(&pack(b_columns)).words(&floats).undefined(512);
        run.clean(&program, [1, 1]);
        let expected: Vec<f32> = (0..128)
            .map(|i| {
                let product: i32 = (0..16).map(|k| a[i / 8 * 16 + k] * b[k * 8 + i % 8]).sum();
                (product + c[i]) as f32
            })
            .collect();
        let result: Vec<f32> = run.read(3, 128).into_iter().map(f32::from_bits).collect();
        prop_assert_eq!(result, expected);
    }
}
