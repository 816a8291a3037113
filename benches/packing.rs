//! Packing speed: fp16 weights quantised and packed, and GPTQ tensors packed.
//!
//! `cargo bench --bench packing [-- THREADS …]`. One layer of 4096 x 4096, group 128; the median of some
//! repetitions, per thread count. Rates per core are the rate over the threads that were used.

use std::hint::black_box;
use std::time::Instant;

use half::f16;
use makaira::weights::{
    Codes, Dense, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4B8, default_threads,
    quantize,
};

const N: usize = 4096;
const K: usize = 4096;
const REPETITIONS: usize = 9;

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Median seconds of some repetitions, after one that is not counted.
fn median_seconds<R>(mut work: impl FnMut() -> R) -> f64 {
    black_box(work());
    let mut seconds: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            black_box(work());
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[REPETITIONS / 2]
}

fn main() {
    // `cargo bench` passes `--bench`.
    let counts: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let counts = if counts.is_empty() { vec![1, default_threads()] } else { counts };
    let mut state = 0x1234_5678;
    let dense: Vec<f16> = (0..N * K)
        .map(|_| f16::from_f32((splitmix(&mut state) >> 40) as f32 / (1u64 << 23) as f32 - 1.0))
        .collect();
    let dense = Dense::F16(bytemuck::cast_slice(&dense));
    let words: Vec<u64> = (0..N * K / 16).map(|_| splitmix(&mut state)).collect();
    let group = Group::Size(128);
    let scales: Vec<f16> =
        (0..K / 128 * N).map(|i| f16::from_f32(0.01 + i as f32 * 1e-8)).collect();
    let scales = Scales::f16(bytemuck::cast_slice(&scales), ScaleOrder::Rows);
    let codes = Codes::GptqWords(bytemuck::cast_slice(&words));
    let gptq = QuantMatrix::new(N, K, group, &U4B8, codes, scales).expect("a legal layer");

    println!("packing one layer of {N} x {K}, group 128, median of {REPETITIONS}");
    println!("threads  work                        ms     GB/s  GB/s a core");
    for threads in counts {
        let print = |work: &str, seconds: f64, bytes: usize| {
            let rate = bytes as f64 / seconds / 1e9;
            let per_core = rate / threads as f64;
            println!(
                "{threads:>7}  {work:<22} {:>7.2} {rate:>8.2} {per_core:>12.2}",
                1e3 * seconds
            );
        };
        let quantized = quantize(dense, N, K, group, threads).expect("finite weights");
        let packed = PackedWeights::pack(&gptq, threads).expect("packs");
        let packed_bytes = packed.bytes().len();
        let fp16_bytes = 2 * N * K;
        let seconds = median_seconds(|| quantize(dense, N, K, group, threads));
        print("quantise, of fp16", seconds, fp16_bytes);
        let seconds = median_seconds(|| PackedWeights::pack(&quantized.view(), threads));
        print("pack codes, of fp16", seconds, fp16_bytes);
        let seconds = median_seconds(|| {
            let quantized = quantize(dense, N, K, group, threads).expect("finite weights");
            PackedWeights::pack(&quantized.view(), threads)
        });
        print("both, of fp16", seconds, fp16_bytes);
        let seconds = median_seconds(|| PackedWeights::pack(&gptq, threads));
        print("pack GPTQ, of output", seconds, packed_bytes);
    }
}
