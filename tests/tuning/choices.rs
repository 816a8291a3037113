//! What `Gemm` makes of measured winners, on the stand-in for libcuda and on the emulator.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use makaira::backend::{Backend, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Gemm, Matrix};
use makaira::jit::{GpuBackend, Loader, Store, TuneStore, Winner};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Kind, Problem, Rows};
use makaira::weights::{Activation, Dense, FORMATS, Group, PackedWeights, quantize};

use crate::build::stub;
use crate::opened::{context, open};

const N: usize = 512;
const K: usize = 2048;

fn problem(m: u64) -> Problem {
    let group = Group::Size(128);
    Problem { kind: Kind::U4B8, m, n: N as u32, k: K as u32, group, rows: Rows::Whole }
}

/// A stand-in for a card with a driver of some version.
fn card(name: &str, version: &str) -> Option<Arc<GpuBackend>> {
    let driver = open(stub(name, &["full"], &[("STUB_DRIVER_VERSION", version)]))?;
    Some(Arc::new(GpuBackend::new(context(driver, 0), Loader::new(Store::disabled()))))
}

fn name_of(choice: &Choice) -> (String, u32) {
    (choice.config.to_string(), choice.stripe)
}

/// A candidate that the cost model does not prefer.
fn outsider(backend: &dyn Backend, m: u64) -> Choice {
    let ranked = select::ranked(&problem(m), backend.device());
    *ranked.last().expect("there are candidates")
}

#[test]
fn a_kept_winner_is_chosen_by_later_objects_for_its_problem_alone() {
    let Some(gpu) = card("tuned", "13000") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let gemm = || {
        let store = Arc::new(TuneStore::open(folder.path()));
        Gemm::new(gpu.clone()).with_tuning(store)
    };
    let predicted = select::choose(&problem(16), gpu.device()).expect("a kernel");
    let before = gemm();
    assert_eq!(before.choice(&problem(16), false).expect("a kernel"), predicted);
    let wanted = outsider(&*gpu, 16);
    assert_ne!(name_of(&wanted), name_of(&predicted));
    before.keep_winner(&problem(16), false, &wanted, 3.5).expect("writable");
    let same = before.choice(&problem(16), false).expect("a kernel");
    assert_eq!(same, predicted, "an object keeps to what it said");

    let after = gemm();
    // m = 11 is of the same step.
    for m in [16, 11] {
        let chosen = after.choice(&problem(m), false).expect("a kernel");
        assert_eq!(name_of(&chosen), name_of(&wanted), "m = {m}");
    }
    let others = [(problem(16), true), (problem(8), false), (problem(17), false)];
    for (other, early) in others {
        let untouched = select::choose(&other, gpu.device()).expect("a kernel");
        assert_eq!(after.choice(&other, early).expect("a kernel"), untouched, "{other}, {early}");
    }
    // Nor is it told for the same layer of other types.
    let mut names = BTreeSet::from([problem(16).to_string()]);
    for format in FORMATS.iter().map(|format| format.name()) {
        for activation in [Activation::F16, Activation::Bf16] {
            let plain = Kind { format, activation, ..Kind::U4B8 };
            for kind in [plain, Kind { factor: true, ..plain }] {
                let other = Problem { kind, ..problem(16) };
                assert!(names.insert(other.to_string()) || kind == Kind::U4B8, "{other}");
                let untouched = select::choose(&other, gpu.device()).expect("a kernel");
                let chosen = after.choice(&other, false).expect("a kernel");
                assert_eq!(chosen == untouched, kind != Kind::U4B8, "{other}");
                assert_eq!(chosen.config.kind, kind, "{other}");
            }
        }
    }
    let off = gemm().without_tuning();
    assert_eq!(off.choice(&problem(16), false).expect("a kernel"), predicted);
    let kept = off.keep_winner(&problem(16), false, &wanted, 3.5).expect_err("there is no store");
    assert_eq!(kept.kind(), io::ErrorKind::Unsupported);

    // Another driver: times may differ.
    let Some(newer) = card("tuned_newer", "13010") else { return };
    let store = Arc::new(TuneStore::open(folder.path()));
    let other = Gemm::new(newer).with_tuning(store);
    assert_eq!(other.choice(&problem(16), false).expect("a kernel"), predicted);
}

/// A winner that is no candidate (a record of other hands with a right key) is not taken.
#[test]
fn a_winner_that_is_no_candidate_is_not_chosen() {
    let Some(gpu) = card("untrusted", "13000") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = || Arc::new(TuneStore::open(folder.path()));
    let gemm = Gemm::new(gpu.clone()).with_tuning(store());
    let mut illegal = outsider(&*gpu, 16);
    illegal.config.stages = 400;
    gemm.keep_winner(&problem(16), false, &illegal, 0.1).expect("it is a record");
    let mut uncut = outsider(&*gpu, 16);
    uncut.stripe = u32::MAX;
    gemm.keep_winner(&problem(16), true, &uncut, 0.1).expect("it is a record");
    let predicted = select::choose(&problem(16), gpu.device()).expect("a kernel");
    let gemm = Gemm::new(gpu.clone()).with_tuning(store());
    for early in [false, true] {
        assert_eq!(gemm.choice(&problem(16), early).expect("a kernel"), predicted);
    }
    let records = store().list().expect("a listing");
    let winners: Vec<Winner> = records.into_iter().map(|r| r.expect("sound").winner).collect();
    let plans: BTreeSet<&str> = winners.iter().map(|winner| winner.plan.as_str()).collect();
    assert!(plans.contains("stripe 4294967295"), "{plans:?}");
}

/// Whatever wins, workspaces fit and products are launched, early and in order.
#[test]
fn workspaces_fit_the_winners() {
    use std::hash::{BuildHasher, RandomState};
    let Some(gpu) = card("tuned_space", "13000") else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let seed = RandomState::new();
    let dense: Vec<f32> =
        (0..N * K).map(|i| (seed.hash_one(i) % 2000) as f32 / 1000.0 - 1.0005).collect();
    let dense = Dense::F32(bytemuck::cast_slice(&dense));
    let matrix = quantize(dense, N, K, Group::Size(128), 1).expect("finite");
    let packed = PackedWeights::pack(&matrix.view(), 1).expect("it fits");
    let ptr = gpu.alloc(1 << 20).expect("memory");
    let (a, c) = (Matrix { ptr, stride: K as u64 }, Matrix { ptr, stride: N as u64 });
    for round in 0..8 {
        // A winner that needs most scratch memory, then others.
        let store = || Arc::new(TuneStore::open(folder.path()));
        let gemm = Gemm::new(gpu.clone()).with_tuning(store());
        let mut ranked = select::ranked(&problem(16), gpu.device());
        ranked.sort_by_key(|choice| {
            let plans = select::plans(&choice.config, &problem(16), choice.stripe);
            std::cmp::Reverse(plans.map(|plan| plan.scratch_bytes).max())
        });
        let wanted = ranked[round * (ranked.len() - 1) / 7];
        gemm.keep_winner(&problem(16), round % 2 == 1, &wanted, 2.0).expect("writable");
        let gemm = Gemm::new(gpu.clone()).with_tuning(store());
        let weight = gemm.upload(&packed).expect("it fits");
        gemm.prepare(&weight, 16).expect("it compiles");
        let workspace = gemm.workspace(&weight, 16).expect("fits");
        for m in [1, 9, 16] {
            let stream = Stream::default();
            gemm.matmul(a, &weight, c, m, &workspace, stream).expect("a launch");
            gemm.matmul(a, &weight, c, m, &workspace, stream.early()).expect("an early launch");
        }
    }
    gpu.free(ptr).expect("allocated above");
}

/// Time means nothing on the emulator: it neither has winners nor keeps any.
#[test]
fn the_emulator_has_no_winners() {
    let emu = Arc::new(EmuBackend::h200_like(4));
    assert_eq!(emu.timing_identity(), None);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Arc::new(TuneStore::open(folder.path()));
    let gemm = Gemm::new(emu.clone()).with_tuning(store);
    let error = gemm.keep_winner(&problem(16), false, &outsider(&*emu, 16), 1.0);
    assert_eq!(error.expect_err("no times").kind(), io::ErrorKind::Unsupported);
    let predicted = select::choose(&problem(16), emu.device()).expect("a kernel");
    assert_eq!(gemm.choice(&problem(16), false).expect("a kernel"), predicted);
}
