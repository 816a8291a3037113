//! How fast programs of the shape of a GEMM main loop run, with all checks on.

use std::time::Instant;

use makaira::asm::types::{B32, Cmp, F32, Special};

use super::support::{Run, element, module, pointer, slot};

/// Prints the rate; a fall below a small part of the usual one is a fault of ours.
#[test]
fn a_main_loop_runs_fast_enough() {
    const ITERATIONS: u32 = 64;
    let program = module(256, 4 * 8192, |asm, p| {
        let (a, b) = (pointer(asm, "a"), pointer(asm, "b"));
        let lane = asm.reg();
        asm.mov_u32_special(lane, Special::Laneid);
        let from_a = element(asm, a, p.tid, 16);
        let from_b = element(asm, b, p.tid, 16);
        let mine = slot(asm, p.smem, p.tid, 16);
        let (row, address) = (asm.reg(), slot(asm, p.smem, lane, 128));
        asm.and_b32(row, lane, 7);
        asm.mad_lo_u32(address, row, 16, address);
        let sums: [[_; 4]; 8] = std::array::from_fn(|_| asm.regs::<F32, 4>());
        sums.iter().flatten().for_each(|sum| asm.mov_f32(*sum, 0.0));
        let (turn, head) = (asm.reg(), asm.label("head"));
        asm.mov_b32(turn, 0);
        let [bias, one, zero] = asm.regs::<B32, 3>();
        asm.mov_b32(bias, 0x6408_6408);
        asm.mov_b32(one, 0x3c00_3c00);
        asm.mov_b32(zero, 0);
        asm.bind(head);
        asm.section("copy", |asm| {
            for part in 0..2 {
                asm.cp_async_cg_16(mine.at(part * 4096), from_a);
                asm.cp_async_cg_16(mine.at(8192 + part * 4096), from_b);
            }
            asm.cp_async_commit_group();
            asm.cp_async_wait_group(0);
            asm.bar_sync(0);
        });
        asm.section("multiply", |asm| {
            let fragment = asm.regs::<B32, 4>();
            asm.ldmatrix_sync_aligned_m8n8_x4_shared_b16(fragment, address);
            let codes = asm.regs::<B32, 4>();
            asm.ld_shared_v4_b32(codes, mine.at(8192));
            for (code, sums) in codes.iter().flat_map(|code| [code, code]).zip(&sums) {
                let weights = asm.regs::<B32, 2>();
                for (n, weight) in weights.into_iter().enumerate() {
                    let (shifted, masked) = (asm.reg(), asm.reg());
                    asm.shr_u32(shifted, *code, 4 * n as u32);
                    asm.lop3_b32(masked, shifted, 0x000f_000f, 0x6400_6400, 0xea);
                    asm.sub_f16x2(masked, masked, bias);
                    asm.fma_rn_f16x2(weight, masked, one, zero);
                }
                asm.mma_m16n8k16_f32_f16(*sums, fragment, weights, *sums);
            }
        });
        asm.bar_sync(0);
        asm.add_u32(turn, turn, 1);
        let again = asm.test_u32(Cmp::Lt, turn, ITERATIONS);
        asm.when(again, |asm| asm.bra(head));
    });
    let words: Vec<u32> =
        (0..1024).map(|i: u32| i.wrapping_mul(0x9e37_79b9) & 0x3fff_3fff).collect();
    let mut run = Run::new().words(&words).words(&words);
    let start = Instant::now();
    let report = run.clean(&program, [4, 1]);
    let seconds = start.elapsed().as_secs_f64();
    let rate = report.total.lane_instructions as f64 / seconds / 1e6;
    eprintln!("{report}\n{rate:.1} million lane instructions a second ({seconds:.3} s)");
    assert!(rate > 0.5, "{rate} million lane instructions a second");
}
