//! Packing speed: fp16 weights quantised and packed, and the tensors of every kind of checkpoint packed.
//!
//! `cargo bench --bench packing [-- THREADS …]`. One layer of 4096 x 4096, group 128 where it is not said otherwise;
//! the median of some repetitions, per thread count. Rates are of packed bytes, of fp16 ones where it says so; rates per
//! core are the rate over the threads that were used. Sources lie in a mapped file, as those of a checkpoint do.

use std::hint::black_box;
use std::time::Instant;

use half::f16;
use makaira::checkpoint::FileMap;
use makaira::weights::{
    Codes, Dense, E2M1, E4M3, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder,
    ScaleType, Scales, U4, U4B8, U8B128, WeightFormat, ZeroOrder, Zeros, default_threads, quantize,
};

const N: usize = 4096;
const K: usize = 4096;
const REPETITIONS: usize = 15;

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Median and least seconds of some repetitions, after one that is not counted.
fn seconds_of<R>(mut work: impl FnMut() -> R) -> [f64; 2] {
    black_box(work());
    let mut seconds: Vec<f64> = (0..REPETITIONS)
        .map(|_| {
            let start = Instant::now();
            black_box(work());
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    [seconds[REPETITIONS / 2], seconds[0]]
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
    let group = Group::Size(128);
    let file = source_file(&mut state);
    let map = FileMap::open(file.path()).expect("a plain file");

    println!("packing one layer of {N} x {K}, group 128, median of {REPETITIONS}");
    println!("threads  work                           ms     GB/s  GB/s a core  GB/s at best");
    for threads in counts {
        let print = |work: &str, [seconds, least]: [f64; 2], bytes: usize| {
            let [rate, best] = [seconds, least].map(|seconds| bytes as f64 / seconds / 1e9);
            let per_core = rate / threads as f64;
            let milliseconds = 1e3 * seconds;
            println!(
                "{threads:>7}  {work:<25} {milliseconds:>7.2} {rate:>8.2} {per_core:>12.2} {best:>13.2}"
            );
        };
        let quantized = quantize(dense, N, K, group, threads).expect("finite weights");
        let fp16_bytes = 2 * N * K;
        let seconds = seconds_of(|| quantize(dense, N, K, group, threads));
        print("quantise, of fp16", seconds, fp16_bytes);
        let seconds = seconds_of(|| PackedWeights::pack(&quantized.view(), threads));
        print("pack codes, of fp16", seconds, fp16_bytes);
        let seconds = seconds_of(|| {
            let quantized = quantize(dense, N, K, group, threads).expect("finite weights");
            PackedWeights::pack(&quantized.view(), threads)
        });
        print("both, of fp16", seconds, fp16_bytes);
        for (name, matrix) in sources(map.bytes()) {
            let bytes = PackedWeights::pack(&matrix, threads).expect("packs").bytes().len();
            let seconds = seconds_of(|| PackedWeights::pack(&matrix, threads));
            print(name, seconds, bytes);
        }
    }
}

/// Bytes of 8-bit codes, and room for what goes with them.
const CODE_BYTES: usize = N * K;
/// Most scales of a source: those of groups of 16.
const SCALES: usize = N * K / 16;

/// A file of random codes and zeros, then fp16 scales, then scales of one byte, then groups of inputs.
fn source_file(state: &mut u64) -> tempfile::NamedTempFile {
    let mut bytes: Vec<u8> =
        (0..CODE_BYTES / 8).flat_map(|_| splitmix(state).to_le_bytes()).collect();
    bytes.extend((0..SCALES).flat_map(|_| {
        let mantissa = (splitmix(state) & 0x3ff) as u16;
        (0x1c00 | mantissa).to_le_bytes()
    }));
    bytes.extend((0..SCALES).map(|_| 0x30 | (splitmix(state) & 0xf) as u8));
    let mut groups: Vec<u32> = (0..K as u32).map(|input| input / 128).collect();
    for at in (1..K).rev() {
        groups.swap(at, splitmix(state) as usize % (at + 1));
    }
    bytes.extend(groups.into_iter().flat_map(u32::to_le_bytes));
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("room for it");
    file
}

/// A layer of every kind of checkpoint, its tensors taken from the file.
fn sources(bytes: &[u8]) -> Vec<(&'static str, QuantMatrix<'_>)> {
    let (codes, rest) = bytes.split_at(CODE_BYTES);
    let (halves, rest) = rest.split_at(2 * SCALES);
    let (small, groups) = rest.split_at(SCALES);
    let (four, zeros) = (&codes[..CODE_BYTES / 2], &codes[..N * K / 128 / 2]);
    let matrix = |format: &'static dyn WeightFormat, codes, raw: i64, element, order| {
        let group = Group::new(K, raw).expect("legal");
        let count = N * group.num_groups(K);
        let bytes = match element {
            ScaleType::F16 => &halves[..2 * count],
            _ => &small[..count],
        };
        let scales = Scales { bytes, element, order, global: 1.0 };
        let (zeros, g_idx) = (None, None);
        MatrixParts { n: N, k: K, group, format, codes, scales, zeros, g_idx }
    };
    let (rows, columns, f16) = (ScaleOrder::Rows, ScaleOrder::Columns, ScaleType::F16);
    let gptq = matrix(&U4B8, Codes::GptqWords(four), 128, f16, rows);
    let asymmetric = |parts, order| MatrixParts {
        format: &U4,
        zeros: Some(Zeros { bytes: zeros, order }),
        ..parts
    };
    let awq = matrix(&U4, Codes::AwqWords(four), 128, f16, rows);
    let rows_of_words = matrix(&U4B8, Codes::PackedRows(four), 128, f16, columns);
    let list = [
        ("gptq", gptq),
        ("gptq, one scale a column", matrix(&U4B8, Codes::GptqWords(four), -1, f16, rows)),
        ("gptq, group 32", matrix(&U4B8, Codes::GptqWords(four), 32, f16, rows)),
        ("gptq, zeros", asymmetric(gptq, ZeroOrder::GptqWordsLessOne)),
        ("gptq, activation order", MatrixParts { g_idx: Some(groups), ..gptq }),
        ("gptq, 8 bits", matrix(&U8B128, Codes::GptqWords(codes), 128, f16, rows)),
        ("awq", asymmetric(awq, ZeroOrder::AwqWords)),
        ("packed rows", rows_of_words),
        ("packed rows, zeros", asymmetric(rows_of_words, ZeroOrder::PackedColumns)),
        ("marlin", matrix(&U4B8, Codes::MarlinWords(four), 128, f16, ScaleOrder::Marlin)),
        ("fp8", matrix(&E4M3, Codes::ByOutput(codes), -1, f16, columns)),
        ("nvfp4", matrix(&E2M1, Codes::NibblePairs(four), 16, ScaleType::E4M3, columns)),
        ("mxfp4", matrix(&E2M1, Codes::NibblePairs(four), 32, ScaleType::E8M0, columns)),
    ];
    list.map(|(name, parts)| (name, QuantMatrix::from_parts(parts).expect(name))).to_vec()
}
