//! Faults of types and of what callers pass: zeros of several groups in a run, scales of another type than the
//! activations, extreme scales, activations of any rank.

use half::{bf16, f16};
use makaira::backend::Stream;
use makaira::gemm::{Error, Matrix};
use makaira::kernel::{Problem, Rows, select};
use makaira::layout::{bf16_from_f64, f16_from_f64};
use makaira::weights::{
    Activation, Codes, FORMATS, Group, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder,
    ScaleType, Scales, WeightFormat, ZeroOrder, ZeroRule, Zeros, format_by_name,
};

use crate::support::{
    Device, Fill, Layer, Random, Setup, Tolerance, activations, compare, devices,
};
use crate::types::{TypedLayer, families_agree};

/// The bytes of a scale of some type.
fn scale_bytes(element: ScaleType, value: f64) -> Vec<u8> {
    match element {
        ScaleType::F16 => f16_from_f64(value).to_le_bytes().to_vec(),
        ScaleType::BF16 => bf16_from_f64(value).to_le_bytes().to_vec(),
        ScaleType::F32 => (value as f32).to_le_bytes().to_vec(),
        ScaleType::E4M3 | ScaleType::E8M0 => panic!("one byte holds few numbers"),
    }
}

/// A layer with codes, scales and zeros of (group, output) of the test's own.
fn layer(
    format: &'static dyn WeightFormat,
    (n, k): (usize, usize),
    raw: i64,
    element: ScaleType,
    random: &mut Random,
    scale: impl Fn(usize, usize) -> f64,
    zero: impl Fn(usize, usize) -> u8,
) -> TypedLayer {
    let group = Group::new(k, raw).expect("legal");
    let num_scales = n * group.num_groups(k);
    let code = |_| {
        loop {
            let code = random.below(format.num_codes()) as u8;
            if !format.decode(code).is_nan() {
                break code;
            }
        }
    };
    let codes: Vec<u8> = (0..n * k).map(code).collect();
    let bytes: Vec<u8> =
        (0..num_scales).flat_map(|at| scale_bytes(element, scale(at / n, at % n))).collect();
    let zero_bytes: Vec<u8> = (0..num_scales).map(|at| zero(at / n, at % n)).collect();
    let stored = format.zero_rule() == ZeroRule::Stored;
    let parts = MatrixParts {
        n,
        k,
        group,
        format,
        codes: Codes::ByOutput(&codes),
        scales: Scales::new(&bytes, element, ScaleOrder::Rows),
        zeros: stored.then_some(Zeros { bytes: &zero_bytes, order: ZeroOrder::Rows }),
        g_idx: None,
    };
    TypedLayer::of(&QuantMatrix::from_parts(parts).expect("legal"))
}

/// Fault B07 in bf16: 129 groups of 64, an odd number of halves of a run.
#[test]
fn b07_groups_of_64_in_bf16() {
    for device in devices() {
        let mut random = Random(7);
        let shape = (device.size(64, 256), 8256);
        let layer = TypedLayer::new(FORMATS[3], shape, 64, ScaleType::BF16, &mut random);
        for m in [1, 16, 33] {
            families_agree::<bf16>(&device, &layer, m, "b07", &mut random);
        }
    }
}

/// Fault B26: every group of a run has zeros of its own, far from those of its neighbours, so that a zero of another
/// group shows in every weight.
#[test]
fn b26_zeros_of_several_groups_in_a_run() {
    for device in devices() {
        let mut random = Random(26);
        for name in ["u4", "u8"] {
            let format = format_by_name(name).expect("listed");
            let most = format.num_codes() - 1;
            for k in [128, 256, 640] {
                let zero = |group: usize, n: usize| {
                    let end = if group.is_multiple_of(2) { 0 } else { most };
                    end.abs_diff((group / 2 + n) % (most / 2)) as u8
                };
                let scale = |group: usize, n: usize| 0.01 + 0.001 * ((3 * group + n) % 7) as f64;
                let of = (format, (128, k), 32, ScaleType::F16);
                let layer = layer(of.0, of.1, of.2, of.3, &mut random, scale, zero);
                for m in [1, 12, 40] {
                    let what = format!("{name} k={k}");
                    families_agree::<f16>(&device, &layer, m, &what, &mut random);
                    families_agree::<bf16>(&device, &layer, m, &what, &mut random);
                }
            }
        }
    }
}

/// Fault B38: scales at the ends of what their type holds, in fp16 and in bf16; a scale moved from one exponent width
/// to the other by bits is off by 2^112, or zero.
#[test]
fn b38_extreme_scales_of_every_type() {
    for device in devices() {
        let mut random = Random(38);
        for (idx, format) in FORMATS.iter().enumerate() {
            let largest = (0..format.num_codes())
                .map(|code| f64::from(format.decode(code as u8)))
                .fold(1.0, f64::max);
            let scales = [
                (1.0, ScaleType::F16),
                (2f64.powi(-14), ScaleType::F16),
                (2f64.powi(-24), ScaleType::F16),
                (2f64.powi(-24), ScaleType::F32),
                (2f64.powi(-100), ScaleType::BF16),
                (3e4, ScaleType::F32),
                (3e4 / largest, ScaleType::F16),
            ];
            for (at, (value, element)) in scales.into_iter().enumerate() {
                let (shape, raw) = ((64, 256), [-1, 32][(at + idx) % 2]);
                // Neighbours differ by a power of two, but there is no half of the smallest number.
                let half = if value < 1e-7 { 1.0 } else { 0.5 };
                let scale = |group, n| value * [1.0, half][(group + n) % 2];
                let layer = layer(*format, shape, raw, element, &mut random, scale, |_, _| 3);
                let m = [1, 10, 34][(idx + at) % 3];
                let what = format!("{} scale {value:e} {element:?}", format.name());
                families_agree::<bf16>(&device, &layer, m, &what, &mut random);
                if value > 1e-20 {
                    families_agree::<f16>(&device, &layer, m, &what, &mut random);
                }
            }
        }
    }
}

/// Fault B53: scales of every type with activations of every type. Those that fp16 holds are kept bit by bit; others
/// are moved by a power of two and rounded to fp16 once, or refused.
#[test]
fn b53_scales_of_another_type_than_the_activations() {
    for device in devices() {
        let mut random = Random(53);
        for element in [ScaleType::F16, ScaleType::BF16, ScaleType::F32] {
            // 2^-30 is zero in fp16.
            for size in [0.01, 2f64.powi(-30)] {
                if element == ScaleType::F16 && size < 1e-6 {
                    continue;
                }
                let scale = |group: usize, n: usize| size * (1.0 + (7 * group + n) as f64 / 700.0);
                let format = format_by_name("u4b8").expect("listed");
                let of = (format, (128, 512), 128, element);
                let layer = layer(of.0, of.1, of.2, of.3, &mut random, scale, |_, _| 0);
                let what = format!("{element:?} {size:e}");
                families_agree::<bf16>(&device, &layer, 9, &what, &mut random);
                families_agree::<f16>(&device, &layer, 9, &what, &mut random);
            }
        }
    }
    // Beside a scale of 1, one of 2^-60 would become zero.
    let (codes, group) = ([9u8; 64 * 128], Group::PerColumn);
    let mut scales = [1.0f32; 64];
    scales[37] = 2f32.powi(-60);
    let scales = Scales::new(bytemuck::cast_slice(&scales), ScaleType::F32, ScaleOrder::Rows);
    let format = format_by_name("u4b8").expect("listed");
    let matrix = QuantMatrix::new(64, 128, group, format, Codes::ByInput(&codes), scales);
    let refused = PackedWeights::pack(&matrix.expect("legal"), 1).expect_err("it would be lost");
    let text = refused.to_string();
    assert!(text.contains("37") && text.contains("beside the largest"), "{text}");
}

fn product(
    setup: &Setup,
    a: Matrix,
    c: Matrix,
    m: usize,
) -> Result<Vec<f16>, Box<dyn std::error::Error>> {
    let backend = setup.gemm.backend();
    let mut out = vec![f16::NAN; m * setup.layer.n];
    backend.upload(c.ptr, bytemuck::cast_slice(&out))?;
    let workspace = setup.gemm.workspace(&setup.weight, m as u64)?;
    setup.gemm.matmul(a, &setup.weight, c, m as u64, &workspace, Stream::default())?;
    backend.synchronize(Stream::default())?;
    backend.download(c.ptr, bytemuck::cast_slice_mut(&mut out))?;
    Ok(out)
}

/// Fault B54: activations of rank 1, 2, 3 and 4 are so many rows of K, whole or part by part; K elements taken for K
/// rows are refused.
#[test]
fn b54_activations_of_any_rank() {
    for device in devices() {
        let (n, k) = (96, 256);
        let mut random = Random(54);
        let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
        let backend = &device.backend;
        // [2][3][4][K]: the ranks are [K], [4][K], [3][4][K] and all of it.
        let a = activations(2 * 3 * 4, k, Fill::Integers, &mut random);
        let alloc = |elements: usize| backend.alloc(2 * elements as u64).expect("it fits");
        let (a_ptr, c_ptr) = (alloc(a.len()), alloc(24 * n));
        backend.upload(a_ptr, bytemuck::cast_slice(&a)).expect("it fits");
        let c = Matrix { ptr: c_ptr, stride: n as u64 };
        let rows =
            |first: usize| Matrix { ptr: a_ptr.offset(2 * (first * k) as u64), stride: k as u64 };
        let whole = product(&setup, rows(0), c, 24).expect("24 rows");
        compare(&setup.layer, &a, &whole, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
        for m in [1, 4, 12] {
            let parts: Vec<f16> = (0..24 / m)
                .flat_map(|part| product(&setup, rows(part * m), c, m).expect("a part"))
                .collect();
            assert_eq!(parts, whole, "parts of {m} rows");
        }
        // [K] as K rows of one element.
        let column = Matrix { ptr: a_ptr, stride: 1 };
        let workspace = setup.gemm.workspace(&setup.weight, k as u64).expect("it fits");
        let stream = Stream::default();
        let refused = setup.gemm.matmul(column, &setup.weight, c, k as u64, &workspace, stream);
        let error = refused.expect_err("rows overlap");
        assert!(matches!(error, Error::Operand { operand: "a", .. }), "{error}");
        assert!(error.to_string().contains("256"), "{error}");
        for ptr in [a_ptr, c_ptr] {
            backend.free(ptr).expect("allocated above");
        }
    }
}

/// Fault B92: sizes that are multiples of 64 and not of 512 have one verdict for every batch, and products.
#[test]
fn b92_outputs_that_are_no_multiple_of_512() {
    let hopper = Device::hopper();
    for n in [640, 1152] {
        for format in FORMATS {
            for m in [1, 16, 17, 64, 256] {
                for activation in [Activation::F16, Activation::Bf16] {
                    let kind = makaira::kernel::Kind {
                        format: format.name(),
                        activation,
                        ..makaira::kernel::Kind::U4B8
                    };
                    let (group, rows) = (Group::Size(128), Rows::Whole);
                    let problem = Problem { kind, m, n, k: 256, group, rows };
                    let choice = select::choose(&problem, hopper.backend.device());
                    choice.unwrap_or_else(|error| panic!("{problem}: {error}"));
                }
            }
        }
    }
    for device in devices() {
        let mut random = Random(92);
        for n in [640, 1152] {
            let setup = Setup::new(&device, Layer::new(n, 256, 128, Fill::Integers, &mut random));
            for m in [1, 16, 17, 64, 256] {
                let a = activations(m, 256, Fill::Integers, &mut random);
                let c = setup.run(&a, crate::support::CANARIES);
                let c = c.unwrap_or_else(|error| panic!("n={n} m={m}: {error}"));
                compare(&setup.layer, &a, &c, Tolerance::Exact)
                    .unwrap_or_else(|why| panic!("n={n} m={m}: {why}"));
            }
        }
    }
}

/// Scales of blocks of 128 x 128 whose last block is short in both directions: the last inputs and outputs have scales
/// of their own, and what is beyond them adds nothing.
#[test]
fn short_last_blocks_keep_their_scales() {
    for device in devices() {
        let mut random = Random(128);
        let format = format_by_name("e4m3").expect("listed");
        for (n, k) in [(200_usize, 300_usize), (128, 129), (130, 264), (64, 640)] {
            let codes: Vec<u8> = (0..n * k).map(|_| random.below(0x7e) as u8).collect();
            let num_scales = n.div_ceil(128) * k.div_ceil(128);
            // Neighbouring blocks differ by a factor of three at least.
            let scale = |at: usize| 0.01 * 3f64.powi((at % 3) as i32) * random_unit(at);
            let bytes: Vec<u8> =
                (0..num_scales).flat_map(|at| scale_bytes(ScaleType::F32, scale(at))).collect();
            let scales = Scales::new(&bytes, ScaleType::F32, ScaleOrder::Blocks);
            let codes = Codes::ByOutput(&codes);
            let matrix = QuantMatrix::new(n, k, Group::Size(128), format, codes, scales);
            let layer = TypedLayer::of(&matrix.expect("legal"));
            for m in [1, 12, 40] {
                let what = format!("blocks of {n} x {k}");
                families_agree::<f16>(&device, &layer, m, &what, &mut random);
                families_agree::<bf16>(&device, &layer, m, &what, &mut random);
            }
        }
    }
}

/// 1.0 to 1.4, by place.
fn random_unit(at: usize) -> f64 {
    1.0 + (at * 37 % 41) as f64 / 100.0
}
