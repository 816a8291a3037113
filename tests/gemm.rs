//! Products on the emulator (and on a GPU if there is one) against a reference in f64.

use std::sync::Arc;

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::select;
use makaira::kernel::{Config, Problem, Rows};
use makaira::weights::{Dense, Group, PackedWeights, quantize};

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn uniform(state: &mut u64) -> f32 {
    (splitmix(state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn run(name: &str, m: u64, n: usize, k: usize, stripe: u32) {
    let backend: Arc<dyn Backend> = Arc::new(EmuBackend::h200_like(4));
    let config: Config = name.parse().expect("a configuration's name");
    select::check(&config, backend.device().arch).expect("legal");
    let gemm = Gemm::new(backend.clone());
    let mut state = 7;
    let dense: Vec<f32> = (0..n * k).map(|_| uniform(&mut state)).collect();
    let quantized =
        quantize(Dense::F32(bytemuck::cast_slice(&dense)), n, k, config.group, 1).expect("finite");
    let packed = PackedWeights::pack(&quantized.view(), 1).expect("packs");
    let weight = gemm.upload(&packed).expect("fits");
    let w = packed.dequantize();
    let a: Vec<f16> = (0..m as usize * k).map(|_| f16::from_f32(uniform(&mut state))).collect();
    let a_ptr = backend.alloc(2 * a.len() as u64).expect("fits");
    backend.upload(a_ptr, bytemuck::cast_slice(&a)).expect("uploads");
    let c_ptr = backend.alloc(2 * m * n as u64).expect("fits");
    backend.upload(c_ptr, &vec![0xff; 2 * m as usize * n]).expect("uploads");
    let problem = Problem { m, n: n as u32, k: k as u32, group: config.group, rows: config.rows };
    let cost = select::cost(&config, &problem, backend.device(), stripe);
    let prepared = gemm.prepare_choice(select::Choice { config, stripe, cost }).expect("builds");
    let (mut scratch, mut locks) = (0, 0);
    for plan in select::plans(&config, &problem, stripe) {
        scratch = scratch.max(plan.scratch_bytes);
        locks = locks.max(plan.num_locks);
    }
    let workspace = gemm.workspace_of(scratch, locks).expect("fits");
    let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
    let start = std::time::Instant::now();
    gemm.matmul_with(
        &prepared,
        matrix(a_ptr, k),
        &weight,
        matrix(c_ptr, n),
        m,
        &workspace,
        Stream::default(),
    )
    .unwrap_or_else(|error| {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            text += &format!("\n  {cause}");
            source = cause.source();
        }
        panic!("{name}: {text}")
    });
    let elapsed = start.elapsed();
    let mut bytes = vec![0; 2 * m as usize * n];
    backend.download(c_ptr, &mut bytes).expect("downloads");
    let c: Vec<f16> = bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]])).collect();
    let (mut error, mut norm) = (0.0, 0.0);
    for row in 0..m as usize {
        for col in 0..n {
            let exact: f64 = (0..k)
                .map(|i| f64::from(a[row * k + i].to_f32()) * f64::from(w[col * k + i]))
                .sum();
            let got = c[row * n + col].to_f64();
            assert!(got.is_finite(), "{name} ({row}, {col}) is {got}, exact {exact}");
            error += (got - exact).powi(2);
            norm += exact.powi(2);
        }
    }
    let relative = (error / norm).sqrt();
    println!("{name} m={m} n={n} k={k} stripe={stripe}: {relative:.2e} in {elapsed:.1?}");
    assert!(relative < 4e-4, "{name}: {relative}");
    let _ = (Group::PerColumn, Rows::Whole);
}

#[test]
fn smoke() {
    run("marlin_sm80_u4b8_f16_m8n64k512_g128_w1_s3_c1", 8, 64, 512, 4);
    run("marlin_sm80_u4b8_f16_m8n64k512_g128_w1_s3_c1", 5, 192, 1024, 6);
    run("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1, 192, 1024, 3);
    run("marlin_sm80_u4b8_f16_m16n128k512_g128_w2_s3_c1", 16, 192, 1024, 5);
    run("marlin_sm80_u4b8_f16_m64n128k256_g128_w4_s3_c1", 61, 256, 512, 3);
    run("marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs", 64, 256, 512, 3);
    run("marlin_sm80_u4b8_f16_m32n64k256_g128_w2_s3_c1", 70, 256, 512, 3);
    run("marlin_sm80_u4b8_f16_m8n64k512_col_w1_s3_c1", 8, 64, 1024, 3);
    run("marlin_sm80_u4b8_f16_m8n64k512_g64_w1_s3_c1", 8, 64, 1024, 8);
    run("marlin_sm80_u4b8_f16_m8n64k512_g32_w1_s3_c1", 8, 64, 1024, 8);
    run("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16", 8, 64, 1024, 3);
    run("marlin_sm80_u4b8_f16_m16n64k512_col_w1_s3_c1_kt", 8, 68, 1000, 3);
    run("marlin_sm80_u4b8_f16_m16n64k512_col_w1_s3_c1_el", 8, 67, 1001, 3);
}
