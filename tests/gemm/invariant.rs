//! Batch-invariant products: the same row has the same bits, whatever else is in the batch.

use half::f16;
use makaira::emu::EmuBackend;
use makaira::gemm::Gemm;
use makaira::kernel::order::{BATCHES, Summation, choose_in_order, invariant_order};
use makaira::kernel::select::{self, step};
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::Group;

use crate::support::{CANARIES, Device, Fill, Layer, Random, Setup, activations, devices};

/// A layer and rows whose products nearly cancel between the halves of K, so that the order in which parts are added
/// shows in the rounded result.
fn cancelling(n: usize, k: usize, m: usize, random: &mut Random) -> (Layer, Vec<f16>) {
    let mut layer = Layer::new(n, k, 128, Fill::Random, random);
    let half = k / 2;
    for column in layer.codes.chunks_exact_mut(k) {
        column.copy_within(..half, half);
    }
    let scales = layer.scales.len() / 2;
    layer.scales.copy_within(..scales, scales);
    let mut a = activations(m, k, Fill::Random, random);
    for row in a.chunks_exact_mut(k) {
        for i in 0..half {
            let rest = random.uniform(-1e-3, 1e-3);
            row[half + i] = f16::from_f64(-row[i].to_f64() * (1.0 + rest));
        }
    }
    (layer, a)
}

/// How many elements of a row differ from the first product of that row alone, over some batches of it and others.
fn differences(setup: &Setup, a: &[f16], ms: &[usize], random: &mut Random) -> usize {
    let (n, k) = (setup.layer.n, setup.layer.k);
    let alone = setup.run(&a[..k], CANARIES).expect("one row runs");
    let mut count = 0;
    for &m in ms {
        // The row at a random place among the others.
        let place = random.below(m);
        let mut batch = a[k..(m + 1) * k].to_vec();
        batch[place * k..(place + 1) * k].copy_from_slice(&a[..k]);
        let c = setup.run(&batch, CANARIES).expect("a batch runs");
        let row = &c[place * n..(place + 1) * n];
        count += row.iter().zip(&alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    }
    count
}

/// All devices, and one on which only `mma.sync` runs.
fn all_devices() -> Vec<Device> {
    let mut all = devices();
    if all.iter().any(|device| !device.is_gpu()) {
        all.push(Device::emulated(EmuBackend::like_sm80(4)));
    }
    all
}

#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    for device in all_devices() {
        let mut random = Random(77);
        let ms =
            device.size(vec![2, 5, 8, 9, 16, 30, 64, 70, 130], vec![2, 9, 17, 64, 100, 300, 2000]);
        let most = ms.iter().max().expect("there are some") + 1;
        for (n, k) in [(256, 1024), (200, 1536)] {
            let (layer, a) = cancelling(n, k, most, &mut random);
            let mut setup = Setup::new(&device, layer);
            let free = differences(&setup, &a, &ms, &mut random);
            assert!(
                free > 0,
                "{n} x {k}: the fastest kernels of all batches agree, this shows nothing"
            );
            setup.gemm = Gemm::new(device.backend.clone()).batch_invariant();
            let kept = differences(&setup, &a, &ms, &mut random);
            assert_eq!(kept, 0, "{n} x {k} on {}", device.backend.device().name);
        }
    }
}

/// What [`Summation`] says: all configurations of an order agree bit for bit. One each of as many as there is time for.
#[test]
fn configurations_of_one_order_agree() {
    for device in all_devices() {
        let mut random = Random(78);
        let (layer, a) = cancelling(256, 1024, 40, &mut random);
        let setup = Setup::new(&device, layer);
        let k = setup.layer.k;
        let mut firsts: Vec<(Summation, Vec<f16>)> = Vec::new();
        let mut agreed = 0;
        for m in [1, 12, 40] {
            let problem = setup.problem(m, Rows::Whole);
            let ranked = select::ranked(&problem, device.backend.device());
            let whole = ranked.iter().filter(|choice| choice.stripe % (k as u32 / 128) == 0);
            for choice in whole.step_by(4) {
                let prepared = setup.gemm.prepare_choice(*choice).expect("a candidate is legal");
                let workspace = setup.workspace(choice, m);
                let c = setup.run_with(&prepared, &a[..m * k], CANARIES, &workspace);
                let row = c.expect("runs")[..setup.layer.n].to_vec();
                let order = Summation::of(&choice.config);
                match firsts.iter().find(|(known, _)| *known == order) {
                    None => firsts.push((order, row)),
                    Some((_, first)) => {
                        agreed += 1;
                        assert_eq!(&row, first, "{}: {order:?}", choice.config);
                    }
                }
            }
        }
        assert!(firsts.len() > 3 && agreed > 10, "{} orders, {agreed} agreed", firsts.len());
        let all_same = firsts.iter().all(|(_, row)| *row == firsts[0].1);
        assert!(!all_same, "all orders give the same bits: the operands show nothing");
    }
}

/// There is an order for every layer, and a whole-tile choice of it for every batch.
#[test]
fn every_layer_has_an_order_for_all_batches() {
    let cards = [EmuBackend::h200_like(132), EmuBackend::like_sm80(108)];
    let devices = cards.each_ref().map(|card| makaira::backend::Backend::device(card).clone());
    for device in &devices {
        for kind in [Kind::U4B8, Kind { format: "e4m3", ..Kind::U4B8 }] {
            for group in [Group::PerColumn, Group::Size(32), Group::Size(128)] {
                for (n, k, rows) in [
                    (64, 128, Rows::Whole),
                    (4096, 4096, Rows::Whole),
                    (28672, 8192, Rows::Whole),
                    (100, 1000, Rows::Vector),
                    (4100, 4104, Rows::Vector),
                    (77, 333, Rows::Element),
                ] {
                    let problem = Problem { kind, m: 1, n, k, group, rows };
                    let order = invariant_order(&problem, device)
                        .unwrap_or_else(|error| panic!("{problem}: {error}"));
                    for m in BATCHES.into_iter().chain([3, 24, 48, 96, 192, 2000, 70_000]) {
                        let problem = Problem { m, ..problem };
                        let choice = choose_in_order(&problem, device, &order)
                            .unwrap_or_else(|error| panic!("{problem}: {error}"));
                        assert_eq!(Summation::of(&choice.config), order, "{problem}");
                        assert_eq!(choice.stripe % k.div_ceil(128), 0, "{problem}");
                        assert!(step(m) >= m);
                    }
                }
            }
        }
    }
}
