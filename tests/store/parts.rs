//! Parts for tensor parallelism: what they hold, what they want, and that together they are the whole.

use std::sync::Arc;

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Gemm, Matrix};
use makaira::reference::{Random, Reference};
use makaira::weights::{
    E2M1, Error, FORMATS, Group, InputOrder, PackedWeights, Packing, Part, ScaleType, Shard, U4,
    U4B8, U8B128, WeightFormat,
};
use proptest::prelude::*;

use crate::support::{Drawn, below};

/// The part of a dense weight `[N][K]` that a shard should hold, on its own columns.
fn dense_part(dense: &[f32], k: usize, shard: &Shard<'_>) -> Vec<f32> {
    let columns = shard.columns();
    let rows = shard.part().outputs.clone();
    rows.flat_map(|n| columns.iter().map(move |&c| dense[n * k + c as usize])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn parts_hold_their_share_of_every_type_group_and_order(
        (chunks, tiles, short) in (1usize..5, 1usize..7, any::<bool>()),
        raw in prop::sample::select(vec![-1i64, 16, 32, 64, 128]),
        act_order: bool,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        // A last chunk that is not full, where groups allow it.
        let n = 64 * chunks - if short { 1 + below(&mut random, 63) } else { 0 };
        let size = raw.max(1) as usize;
        let k = 128 * tiles - if short { below(&mut random, 128 / size) * size } else { 0 };
        for format in FORMATS {
            let bytes = format.name() == "e2m1" && matches!(raw, 16 | 32);
            let element = if bytes { ScaleType::E4M3 } else { ScaleType::F16 };
            let drawn = Drawn::new((n, k), raw, *format, element, act_order, &mut random);
            let matrix = drawn.matrix().expect("legal");
            let packing = Packing::of(&matrix).expect("packs");
            let packed = PackedWeights::of_packing(&packing, 1);
            let (layout, dense) = (*packed.layout(), packed.dequantize());
            let edge = |random: &mut Random, size: usize, unit: usize| {
                let last = size.div_ceil(unit);
                let first = below(random, last);
                unit * first..(unit * (first + 1 + below(random, last - first))).min(size)
            };
            let part = Part {
                outputs: edge(&mut random, layout.n, 64),
                inputs: edge(&mut random, layout.k, 128),
            };
            let shard = packed.view().shard(part.clone()).expect("whole chunks");
            let own = shard.to_packed();
            prop_assert_eq!(own.layout().n, part.outputs.len());
            // The same from the checkpoint's side: nothing but the part is packed.
            let fresh = PackedWeights::of_packing(&packing.part(&part).expect("legal"), 2);
            prop_assert!(fresh.bytes() == own.bytes(), "{}", format.name());
            prop_assert_eq!(fresh.input_order(), own.input_order());
            let wanted = dense_part(&dense, k, &shard);
            let columns = shard.clone().on_own_columns();
            prop_assert_eq!(columns.spec().source_inputs(), shard.columns().len());
            let found = columns.to_packed().dequantize();
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            prop_assert!(found.len() == wanted.len() && found.iter().zip(&wanted).all(same));
            // On all columns the others' are worth nothing.
            if shard.spec().input_order().is_some() {
                let all = own.dequantize();
                for (row, values) in all.chunks(k).enumerate() {
                    for (column, value) in values.iter().enumerate() {
                        let n = part.outputs.start + row;
                        let is_own = shard.columns().binary_search(&(column as u32)).is_ok();
                        let wanted = if is_own { dense[n * k + column] } else { 0.0 };
                        prop_assert!(same((value, &wanted)));
                    }
                }
            }
        }
    }
}

/// A shape, group and type, with activation order or not.
const CUT: [(usize, usize, i64, &dyn WeightFormat, bool); 6] = [
    (128, 512, 128, &U4B8, false),
    // One group a rank, which stays a group.
    (64, 256, 128, &U4B8, false),
    (128, 512, -1, &U8B128, false),
    (128, 384, 32, &U4, false),
    (64, 512, 128, &U4B8, true),
    (64, 256, 16, &E2M1, false),
];

/// The products of the ranks, each by a kernel on its shard, are those of the whole.
#[test]
fn products_of_shards_add_up_to_the_whole() {
    let backend: Arc<dyn Backend> = Arc::new(EmuBackend::h200_like(4));
    let gemm = Gemm::new(backend.clone());
    let mut random = Random::new(Random::fresh_seed());
    for (n, k, raw, format, act_order) in CUT {
        let element = if format.name() == "e2m1" { ScaleType::E4M3 } else { ScaleType::F16 };
        let drawn = Drawn::new((n, k), raw, format, element, act_order, &mut random);
        let packed = PackedWeights::pack(&drawn.matrix().expect("legal"), 1).expect("packs");
        let ranks = *packed.spec().ranks_by_inputs().last().expect("one at least");
        assert!(ranks > 1);
        for m in [1, 9] {
            let x = random.activations(m * k);
            let whole = Reference::of_packed(&x, &packed);
            let (mut sum, mut allowed) = (vec![0.0; m * n], vec![0.0; m * n]);
            for rank in 0..ranks {
                let part = packed.spec().part_by_inputs(rank, ranks).expect("divides");
                let shard = packed.view().shard(part).expect("legal");
                let columns = shard.columns();
                let own: Vec<f16> = (0..m)
                    .flat_map(|row| columns.iter().map(move |&c| (row, c as usize)))
                    .map(|(row, column)| x[row * k + column])
                    .collect();
                let shard = shard.on_own_columns().to_packed();
                let y = product(&gemm, &shard, &own, m);
                let reference = Reference::of_packed(&own, &shard);
                let errors = reference.compare(&y, Default::default());
                assert!(errors.is_ok(), "{n} x {k}, {raw}, rank {rank} of {ranks}: {errors}");
                for (at, value) in y.iter().enumerate() {
                    sum[at] += value.to_f64();
                    allowed[at] += value.to_f64().abs() * 2f64.powi(-10);
                }
            }
            for (at, sum) in sum.iter().enumerate() {
                let (wanted, room) = (whole.values()[at], allowed[at] + 0.02);
                assert!((sum - wanted).abs() <= room, "{at}: {sum}, {wanted}, {room}");
            }
        }
        // By outputs a rank's product is its columns of the whole.
        let part = packed.spec().part_by_outputs(n / 64 - 1, n / 64).expect("divides");
        let shard = packed.view().shard(part.clone()).expect("legal").to_packed();
        let x = random.activations(3 * k);
        let [own, all] = [&shard, &packed].map(|weight| product(&gemm, weight, &x, 3));
        for (row, values) in own.chunks(part.outputs.len()).enumerate() {
            let wanted = &all[row * n..][part.outputs.clone()];
            for (found, wanted) in values.iter().zip(wanted) {
                let room = 4.0 * f64::from(f16::EPSILON.to_f32()) * (1.0 + wanted.to_f64().abs());
                assert!((found.to_f64() - wanted.to_f64()).abs() <= room, "{found} {wanted}");
            }
        }
    }
}

fn product(gemm: &Gemm, packed: &PackedWeights, x: &[f16], m: usize) -> Vec<f16> {
    let backend = gemm.backend();
    let (n, k) = (packed.layout().n, packed.source_inputs());
    let weight = gemm.upload(packed).expect("fits");
    let workspace = gemm.workspace(&weight, m as u64).expect("fits");
    let a = backend.alloc(2 * x.len() as u64).expect("fits");
    let c = backend.alloc(2 * (m * n) as u64).expect("fits");
    backend.upload(a, bytemuck::cast_slice(x)).expect("allocated");
    let mut y = vec![f16::NAN; m * n];
    backend.upload(c, bytemuck::cast_slice(&y)).expect("allocated");
    let (left, right) = (Matrix { ptr: a, stride: k as u64 }, Matrix { ptr: c, stride: n as u64 });
    gemm.matmul(left, &weight, right, m as u64, &workspace, Stream::default()).expect("runs");
    backend.download(c, bytemuck::cast_slice_mut(&mut y)).expect("allocated");
    for ptr in [a, c] {
        backend.free(ptr).expect("allocated");
    }
    y
}

fn spec(n: usize, k: usize, act_order: bool) -> PackedWeights {
    let mut random = Random::new(Random::fresh_seed());
    let drawn = Drawn::new((n, k), 128, &U4B8, ScaleType::F16, act_order, &mut random);
    PackedWeights::pack(&drawn.matrix().expect("legal"), 1).expect("packs")
}

#[test]
fn what_does_not_divide_is_refused_with_what_does() {
    let packed = spec(192, 768, false);
    let spec = packed.spec();
    assert_eq!((spec.ranks_by_outputs(), spec.ranks_by_inputs()), (vec![1, 3], vec![1, 2, 3, 6]));
    let error = spec.part_by_inputs(0, 4).expect_err("6 tiles");
    assert_eq!(
        error.to_string(),
        "768 inputs cannot be cut into 4 equal parts of whole runs of 128; the numbers of ranks that \
         do are 1, 2, 3, 6"
    );
    let Error::Ranks { axis, unit, possible, .. } =
        spec.part_by_outputs(1, 2).expect_err("3 chunks")
    else {
        panic!("another error")
    };
    assert_eq!((axis, unit, possible), ("outputs", 64, vec![1, 3]));
    assert!(matches!(spec.part_by_inputs(2, 2), Err(Error::Rank { rank: 2, ranks: 2 })));
    assert!(matches!(spec.part_by_inputs(0, 0), Err(Error::Rank { .. })));
    for (outputs, inputs) in [
        (0..192, 64..768),
        (0..192, 0..700),
        (0..100, 0..768),
        (0..192, 128..128),
        (0..192, 0..896),
        (64..64, 0..768),
        (192..256, 0..768),
    ] {
        let refused = packed.view().shard(Part { outputs, inputs }).expect_err("no part");
        assert!(matches!(refused, Error::Part { .. }), "{refused}");
    }
    // Sizes off the grid are whole, and cut anywhere else only by hand.
    let odd = self::spec(100, 1280, false);
    assert_eq!(odd.spec().ranks_by_outputs(), [1]);
    let part = Part { outputs: 64..100, inputs: 0..1280 };
    assert_eq!(odd.view().shard(part).expect("the rest").spec().layout().n, 36);
}

#[test]
fn a_part_of_an_order_says_which_columns_it_wants() {
    let packed = spec(64, 512, true);
    let order = packed.input_order().expect("shuffled").clone();
    let mut all = Vec::new();
    let ranks = *packed.spec().ranks_by_inputs().last().expect("one at least");
    assert!(ranks > 1);
    for rank in 0..ranks {
        let part = packed.spec().part_by_inputs(rank, ranks).expect("divides");
        let shard = packed.view().shard(part.clone()).expect("legal");
        let own = shard.spec().input_order().expect("a part of it");
        assert_eq!(own.source_inputs(), 512);
        assert_eq!(own.inputs(), &order.inputs()[part.inputs.clone()]);
        let compact = shard.clone().on_own_columns();
        let places = compact.spec().input_order().expect("still one").inputs().iter();
        for (place, input) in places.zip(own.inputs()) {
            let column = shard.columns().get(*place as usize).copied();
            assert_eq!(column.unwrap_or(InputOrder::NONE), *input);
        }
        all.extend(shard.columns());
    }
    all.sort_unstable();
    assert!(all.into_iter().eq(0..512), "every column is wanted once");
    assert_eq!(packed.layout().group, Group::Size(packed.layout().group.raw() as u32));
}
