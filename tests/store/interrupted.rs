//! Packing that is interrupted: the directory does not open, and the next run finishes it with what was done.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use makaira::checkpoint::Checkpoint;
use makaira::reference::Random;
use makaira::store::{Error, PackOptions, PackReport, PackedStore, pack};

use crate::support::{Packed, below, contents, model, write_model};

const OPTIONS: PackOptions = PackOptions { file_bytes: 20_000, only_layers: false, threads: 2 };

fn run(checkpoint: &Checkpoint, target: &Path) -> Result<PackReport, Error> {
    pack(checkpoint, target, &OPTIONS, &mut |_| ())
}

/// Packs until so many tensors are written.
fn run_until(checkpoint: &Checkpoint, target: &Path, count: usize) {
    let mut seen = 0;
    let mut stop = |_: makaira::store::Progress<'_>| {
        seen += 1;
        assert!(seen <= count, "interrupted");
    };
    let outcome = catch_unwind(AssertUnwindSafe(|| pack(checkpoint, target, &OPTIONS, &mut stop)));
    assert!(outcome.is_err(), "it had more than {count} tensors");
}

#[test]
fn the_next_run_goes_on_with_what_was_finished() {
    let packed = Packed::new(6, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let (checkpoint, whole) = (packed.checkpoint(), contents(&packed.directory()));
    assert!(packed.report.num_files > 4 && whole.len() == packed.report.num_files + 3);
    let mut most_kept = 0;
    for count in [0, 1, 3, 6, 9] {
        let target = packed.folder.path().join(format!("after-{count}"));
        run_until(&checkpoint, &target, count);
        assert!(matches!(PackedStore::open(&target), Err(Error::Unfinished { .. })), "{count}");
        assert!(PackedStore::is_at(&target));
        let report = run(&checkpoint, &target).expect("it goes on");
        most_kept = most_kept.max(report.num_kept);
        assert_eq!(report, PackReport { num_kept: report.num_kept, ..packed.report });
        assert!(contents(&target) == whole, "{count}");
        assert!(!target.join("makaira-pack.lock").exists());
        let store = PackedStore::open(&target).expect("whole");
        store.check(2).expect("as it was written");
    }
    assert!(most_kept > 1, "{most_kept} files were kept at most");
}

#[test]
fn finished_files_that_are_damaged_are_written_again() {
    let packed = Packed::new(6, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let (checkpoint, whole) = (packed.checkpoint(), contents(&packed.directory()));
    let name = format!("model-00001-of-{:05}.safetensors", packed.report.num_files);
    let mut random = Random::new(Random::fresh_seed());
    for damage in 0..4 {
        let target = packed.folder.path().join(format!("damaged-{damage}"));
        run_until(&checkpoint, &target, 9);
        let mut bytes = whole[&name].clone();
        let place = bytes.len() - 1 - below(&mut random, 1000);
        match damage {
            0 => bytes[place] ^= 1,
            1 => bytes.truncate(place),
            2 => bytes[20] ^= 1,
            _ => bytes.clear(),
        }
        std::fs::write(target.join(&name), bytes).expect("written");
        std::fs::write(target.join(".makaira-part-abc"), "left over").expect("written");
        run(&checkpoint, &target).expect("it goes on");
        assert!(contents(&target) == whole, "{damage}");
    }
}

#[test]
fn nothing_of_others_is_overwritten() {
    let packed = Packed::new(6, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let checkpoint = packed.checkpoint();
    let refuse = |target: &Path, part: &str| {
        let before = contents(target);
        let error = run(&checkpoint, target).expect_err(part);
        assert!(matches!(error, Error::Target { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(contents(target) == before, "{part}");
    };
    refuse(&packed.directory(), "already");
    refuse(&packed.folder.path().join("model"), "the checkpoint itself");
    let other = packed.folder.path().join("other");
    std::fs::create_dir(&other).expect("made");
    std::fs::write(other.join("a.safetensors"), "mine").expect("written");
    refuse(&other, "a.safetensors");
    // Another checkpoint's half, or this one's with other options.
    let half = packed.folder.path().join("half");
    run_until(&checkpoint, &half, 6);
    let options = PackOptions { file_bytes: 30_000, ..OPTIONS };
    let error = pack(&checkpoint, &half, &options, &mut |_| ()).expect_err("other options");
    assert!(matches!(error, Error::Target { .. }), "{error}");
    let again = packed.folder.path().join("again");
    write_model(&again, &model(6, &mut Random::new(Random::fresh_seed())));
    let again = Checkpoint::open(&again).expect("legal");
    let error = run(&again, &half).expect_err("another checkpoint");
    assert!(error.to_string().contains("another checkpoint"), "{error}");
    run(&checkpoint, &half).expect("its own goes on");
}

#[test]
fn one_run_at_a_time() {
    let packed = Packed::new(2, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let (checkpoint, target) = (packed.checkpoint(), packed.folder.path().join("busy"));
    let mut num_refused = 0;
    let outcome = pack(&checkpoint, &target, &OPTIONS, &mut |_| {
        if num_refused < 2 {
            let error = run(&checkpoint, &target).expect_err("it is locked");
            assert!(matches!(error, Error::Busy { .. }), "{error}");
            num_refused += 1;
        }
    });
    outcome.expect("the first is not disturbed");
    assert_eq!(num_refused, 2);
}

#[test]
fn a_checkpoint_that_changes_meanwhile_makes_no_store() {
    let packed = Packed::new(4, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let (checkpoint, target) = (packed.checkpoint(), packed.folder.path().join("changed"));
    let model = packed.folder.path().join("model/model.safetensors");
    let file = std::fs::File::options().write(true).open(model).expect("there");
    let length = file.metadata().expect("a size").len();
    let mut seen = 0;
    let outcome = pack(&checkpoint, &target, &OPTIONS, &mut |_| {
        seen += 1;
        if seen == 3 {
            file.set_len(length / 2).expect("shorter");
        }
    });
    let error = outcome.expect_err("it shrank");
    let is_changed = matches!(
        error,
        Error::Checkpoint(makaira::checkpoint::Error::Changed { .. }) | Error::Changed { .. }
    );
    assert!(is_changed, "{error}");
    assert!(matches!(PackedStore::open(&target), Err(Error::Unfinished { .. })));
}

/// The program, killed at any moment.
#[test]
#[cfg(all(unix, feature = "cli"))]
fn a_killed_program_leaves_no_store_and_the_next_one_finishes_it() {
    let packed = Packed::new(24, OPTIONS.file_bytes, &mut Random::new(Random::fresh_seed()));
    let whole = contents(&packed.directory());
    let model = packed.folder.path().join("model");
    let command = |target: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_makaira"));
        command.args([Path::new("pack"), &model, Path::new("--output"), target]);
        command.args(["--file-size", "20KB"]).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let target = packed.folder.path().join("timed");
    let start = Instant::now();
    assert!(command(&target).status().expect("it starts").success());
    let time = start.elapsed();
    assert!(contents(&target) == whole);
    let mut num_killed = 0;
    let mut random = Random::new(Random::fresh_seed());
    for round in 0..12 {
        let target = packed.folder.path().join(format!("killed-{round}"));
        for _ in 0..3 {
            let mut child = command(&target).spawn().expect("it starts");
            let wait = time.as_micros() as u64 * below(&mut random, 1000) as u64 / 1000;
            std::thread::sleep(Duration::from_micros(wait));
            child.kill().expect("it is ours");
            let ended = child.wait().expect("it ends").success();
            num_killed += usize::from(!ended);
            match PackedStore::open(&target) {
                Ok(store) => {
                    store.check(1).expect("whole");
                    break;
                }
                Err(error) => assert!(!ended, "{error}"),
            }
        }
        if PackedStore::open(&target).is_err() {
            assert!(command(&target).status().expect("it starts").success());
        }
        PackedStore::open(&target).expect("finished").check(1).expect("whole");
        let found = contents(&target);
        assert!(found == whole, "round {round}");
    }
    assert!(num_killed > 0, "no run was killed in {time:?}");
}
