//! The store of compiled kernels and the loader over it, with a compiler that needs no GPU.
//!
//! The compiler here is a closure that makes an image from the key's text.

#[path = "cache/processes.rs"]
mod processes;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use makaira::driver::{Cubin, DriverVersion, JitOptions};
use makaira::jit::{Key, KeyParts, Loader, Origin, Store};
use makaira::target::SmArch;
use tempfile::TempDir;

fn key(name: &str, driver: i32) -> Key {
    Key::new(&KeyParts {
        name,
        ptx: &format!("// {name}\n.version 8.0\n.target sm_80\n"),
        device: SmArch::baseline(90),
        driver_version: DriverVersion(driver),
        options: &JitOptions::default(),
        emitter: KeyParts::EMITTER,
    })
}

/// An image of some size that depends on every byte of the key.
fn compiled(key: &Key) -> Cubin {
    let image = key.text().bytes().cycle().take(10_000).zip(0_u32..);
    let image = image.map(|(byte, idx)| byte.wrapping_mul(31).wrapping_add(idx as u8)).collect();
    Cubin { image, log: format!("log of {}", key.hex()) }
}

/// Asks the store, and counts compilations.
fn ask(store: &Store, key: &Key) -> Origin {
    let compilations = AtomicUsize::new(0);
    let compile = || {
        compilations.fetch_add(1, Ordering::Relaxed);
        Ok::<_, io::Error>(compiled(key))
    };
    let (cubin, origin) = store.get_or_compile(key, compile).expect("this compiler never fails");
    assert_eq!(cubin, compiled(key), "wrong code for {key:?}");
    assert_eq!(compilations.into_inner(), usize::from(origin == Origin::Compiled));
    origin
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn entry(folder: &Path, key: &Key) -> PathBuf {
    folder.join(format!("{}-{}.cubin", key.name(), key.hex()))
}

/// Warnings of this thread, in order; taken away by the call.
fn warnings() -> Vec<String> {
    struct Collector(Mutex<Vec<(thread::ThreadId, String)>>);
    impl log::Log for Collector {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                let line = (thread::current().id(), record.args().to_string());
                self.0.lock().expect("no panic while logging").push(line);
            }
        }
        fn flush(&self) {}
    }
    static COLLECTOR: OnceLock<&'static Collector> = OnceLock::new();
    let collector = COLLECTOR.get_or_init(|| {
        let collector: &'static Collector = Box::leak(Box::new(Collector(Mutex::default())));
        log::set_logger(collector).expect("no other logger");
        log::set_max_level(log::LevelFilter::Trace);
        collector
    });
    let mut lines = collector.0.lock().expect("no panic while logging");
    let own = thread::current().id();
    let (mine, others) = lines.drain(..).partition(|(id, _)| *id == own);
    *lines = others;
    let mine: Vec<(thread::ThreadId, String)> = mine;
    mine.into_iter().map(|(_, line)| line).collect()
}

#[test]
fn what_was_compiled_once_is_read_afterwards() {
    warnings();
    let folder = folder();
    let inside = folder.path().join("made/at/the/first/write");
    let key = key("marlin_a", 13000);
    assert_eq!(ask(&Store::at(&inside), &key), Origin::Compiled);
    assert_eq!(ask(&Store::at(&inside), &key), Origin::Store);
    assert!(entry(&inside, &key).is_file());
    assert_eq!(warnings(), [""; 0]);
}

/// Fault B71 on disk: another driver is another entry in the same folder, and both stay.
#[test]
fn b71_entries_of_two_drivers_live_side_by_side() {
    let folder = folder();
    let store = Store::at(folder.path());
    let keys = [key("marlin_a", 12040), key("marlin_a", 13000), key("marlin_b", 13000)];
    for expected in [Origin::Compiled, Origin::Store] {
        for key in &keys {
            assert_eq!(ask(&store, key), expected, "{key:?}");
        }
    }
}

#[test]
fn a_failed_compilation_leaves_nothing_behind() {
    let folder = folder();
    let store = Store::at(folder.path());
    let key = key("marlin_a", 13000);
    let failed = store.get_or_compile(&key, || Err::<Cubin, _>("no"));
    assert_eq!(failed, Err("no"));
    assert_eq!(store.list().expect("a listing"), []);
    assert_eq!(ask(&store, &key), Origin::Compiled);
}

/// Fault B68: every kind of damage is rebuilt, overwritten, and warned of exactly once.
#[test]
fn b68_damaged_entries_are_rebuilt_with_one_warning() {
    type Damage = fn(&Path, &[u8], &[u8]);
    let put = |path: &Path, bytes: &[u8]| fs::write(path, bytes).expect("a write");
    let damages: [(&str, Damage); 12] = [
        ("empty", |path, _, _| fs::write(path, b"").expect("a write")),
        ("half", |path, own, _| fs::write(path, &own[..own.len() / 2]).expect("a write")),
        ("one byte short", |path, own, _| fs::write(path, &own[..own.len() - 1]).expect("a write")),
        ("trailing byte", |path, own, _| {
            fs::write(path, [own, b"x"].concat()).expect("a write");
        }),
        ("flipped bit in the image", |path, own, _| flip(path, own, own.len() - 100)),
        ("flipped bit in the key", |path, own, _| flip(path, own, 60)),
        ("flipped bit in a length", |path, own, _| flip(path, own, 30)),
        ("flipped bit in the checksum", |path, own, _| flip(path, own, 10)),
        ("flipped bit in the magic", |path, own, _| flip(path, own, 0)),
        ("another kernel's entry", |path, _, other| fs::write(path, other).expect("a write")),
        ("an empty folder in its place", |path, _, _| {
            fs::remove_file(path).expect("a removal");
            fs::create_dir(path).expect("a folder");
        }),
        ("a full folder in its place", |path, _, _| {
            fs::remove_file(path).expect("a removal");
            fs::create_dir(path).expect("a folder");
            fs::write(path.join("somebody's"), "file").expect("a write");
        }),
    ];
    warnings();
    let folder = folder();
    let store = Store::at(folder.path());
    let (own, other) = (key("marlin_a", 13000), key("marlin_b", 13000));
    ask(&store, &own);
    ask(&store, &other);
    let path = entry(folder.path(), &own);
    let sound = fs::read(&path).expect("an entry");
    let foreign = fs::read(entry(folder.path(), &other)).expect("an entry");
    for (what, damage) in damages {
        damage(&path, &sound, &foreign);
        assert_eq!(ask(&store, &own), Origin::Compiled, "{what}");
        let lines = warnings();
        assert_eq!(lines.len(), 1, "{what}: {lines:?}");
        assert!(lines[0].contains("is damaged (") && lines[0].contains(&own.hex()), "{lines:?}");
        assert_eq!(ask(&store, &own), Origin::Store, "{what}: not overwritten");
        assert_eq!(warnings(), [""; 0], "{what}");
        put(&path, &sound);
    }
    assert_eq!(ask(&store, &other), Origin::Store, "the neighbour is as it was");
}

fn flip(path: &Path, sound: &[u8], at: usize) {
    let mut bytes = sound.to_vec();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).expect("a write");
}

/// Fault B68: an entry that cannot be read. A link to itself is unreadable for everybody, also for
/// root; permissions are tried where they mean something.
#[cfg(unix)]
#[test]
fn b68_unreadable_entries_are_rebuilt_with_one_warning() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    warnings();
    let folder = folder();
    let store = Store::at(folder.path());
    let key = key("marlin_a", 13000);
    ask(&store, &key);
    let path = entry(folder.path(), &key);
    fs::remove_file(&path).expect("a removal");
    symlink(&path, &path).expect("a link");
    assert_eq!(ask(&store, &key), Origin::Compiled);
    assert_eq!(warnings().len(), 1);
    assert_eq!(ask(&store, &key), Origin::Store);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("permissions");
    if fs::read(&path).is_ok() {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    assert_eq!(ask(&store, &key), Origin::Compiled);
    assert_eq!(warnings().len(), 1);
    assert_eq!(ask(&store, &key), Origin::Store);
}

/// Fault B70: places where nothing can be written cost one warning and no failure.
#[test]
fn b70_an_unusable_folder_costs_one_warning() {
    warnings();
    let folder = folder();
    let file = folder.path().join("file");
    fs::write(&file, "no folder").expect("a write");
    let store = Store::at(file.join("below"));
    for name in ["marlin_a", "marlin_b", "marlin_a"] {
        assert_eq!(ask(&store, &key(name, 13000)), Origin::Compiled);
    }
    let lines = warnings();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("are not kept"), "{lines:?}");
    assert_eq!(fs::read_to_string(&file).expect("untouched"), "no folder");
}

#[cfg(unix)]
#[test]
fn b70_a_read_only_folder_still_serves_what_it_has() {
    use std::os::unix::fs::PermissionsExt;
    warnings();
    let folder = folder();
    let store = Store::at(folder.path());
    ask(&store, &key("marlin_a", 13000));
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o555)).expect("permissions");
    if fs::write(folder.path().join("probe"), "").is_ok() {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    assert_eq!(ask(&store, &key("marlin_a", 13000)), Origin::Store);
    assert_eq!(ask(&store, &key("marlin_b", 13000)), Origin::Compiled);
    assert_eq!(warnings().len(), 1);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("permissions");
}

fn resolved(variables: &[(&str, &str)]) -> Store {
    let variables: Vec<(String, OsString)> =
        variables.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
    Store::resolve(move |name| {
        variables.iter().find(|(found, _)| found == name).map(|(_, value)| value.clone())
    })
}

/// Fault B70: which folder the environment means, down to none.
#[test]
fn b70_the_environment_names_the_folder() {
    warnings();
    let home = ("HOME", "/home/a");
    let xdg = ("XDG_CACHE_HOME", "/var/cache/a");
    let own = ("MAKAIRA_CACHE_DIR", "/tmp/own");
    let folder = |variables: &[(&str, &str)]| resolved(variables).folder().map(PathBuf::from);
    assert_eq!(folder(&[home, xdg, own]), Some("/tmp/own".into()));
    assert_eq!(folder(&[home, xdg]), Some("/var/cache/a/makaira".into()));
    assert_eq!(folder(&[home]), Some("/home/a/.cache/makaira".into()));
    assert_eq!(
        folder(&[home, ("XDG_CACHE_HOME", "relative")]),
        Some("/home/a/.cache/makaira".into())
    );
    assert_eq!(folder(&[home, ("MAKAIRA_CACHE_DIR", "")]), Some("/home/a/.cache/makaira".into()));
    assert_eq!(folder(&[("MAKAIRA_CACHE_DIR", "/tmp/own")]), Some("/tmp/own".into()), "no HOME");
    assert_eq!(folder(&[home, own, ("MAKAIRA_NO_CACHE", "1")]), None);
    assert_eq!(folder(&[own, ("MAKAIRA_NO_CACHE", "0")]), Some("/tmp/own".into()));
    assert_eq!(warnings(), [""; 0]);
    assert_eq!(folder(&[]), None);
    assert_eq!(warnings().len(), 1);
    assert_eq!(ask(&resolved(&[]), &key("marlin_a", 13000)), Origin::Compiled);
}

/// Fault B72: without a cache nothing is read and nothing is written, twice in one process.
#[test]
fn b72_no_cache_neither_reads_nor_writes() {
    let folder = folder();
    let path = folder.path().to_str().expect("a plain path");
    let key = key("marlin_a", 13000);
    assert_eq!(ask(&Store::at(folder.path()), &key), Origin::Compiled);
    let before = snapshot(folder.path());
    let off = resolved(&[("MAKAIRA_CACHE_DIR", path), ("MAKAIRA_NO_CACHE", "1")]);
    for _ in 0..2 {
        assert_eq!(ask(&off, &key), Origin::Compiled, "read");
    }
    assert_eq!(off.list().expect("a listing"), []);
    assert_eq!(snapshot(folder.path()), before, "written");
}

fn snapshot(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| (path.clone(), fs::read(path).expect("a file")))
        .collect();
    files.sort();
    files
}

#[test]
fn entries_are_listed_and_cleared_and_files_of_others_stay() {
    let folder = folder();
    let store = Store::at(folder.path());
    assert_eq!(Store::at(folder.path().join("absent")).list().expect("a listing"), []);
    let keys = [key("marlin_b", 13000), key("marlin_a", 13000)];
    for key in &keys {
        ask(&store, key);
    }
    for name in ["README", "makaira-part-crashed", "other-123.cubin", "other.cubin"] {
        fs::write(folder.path().join(name), "x").expect("a write");
    }
    let entries = store.list().expect("a listing");
    let names: Vec<&str> = entries.iter().map(|entry| &*entry.name).collect();
    assert_eq!(names, ["marlin_a", "marlin_b"]);
    assert_eq!(entries[0].key, keys[1].hex());
    let sizes: u64 = entries.iter().map(|entry| entry.size_bytes).sum();
    assert!(sizes > 20_000 && entries.iter().all(|entry| entry.age < Duration::from_secs(600)));
    let cleared = store.clear().expect("a clearing");
    assert_eq!((cleared.num_entries, cleared.size_bytes), (2, sizes));
    let mut left: Vec<String> = snapshot(folder.path())
        .into_iter()
        .map(|(path, _)| path.file_name().expect("a name").to_string_lossy().into_owned())
        .collect();
    left.sort();
    assert_eq!(left, ["README", "other-123.cubin", "other.cubin"]);
    assert_eq!(ask(&store, &keys[0]), Origin::Compiled);
}

/// Fault B66 within a process: sixteen threads, one key, one compilation, one loaded function.
#[test]
fn b66_threads_that_ask_together_compile_once() {
    let folder = folder();
    for round in 0..50 {
        let loader = Loader::<String>::new(Store::at(folder.path().join(round.to_string())));
        let (barrier, compilations) = (Barrier::new(16), AtomicUsize::new(0));
        let work = || {
            barrier.wait();
            let key = key("marlin_a", 13000);
            let compile = || {
                compilations.fetch_add(1, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
                Ok::<_, io::Error>(compiled(&key))
            };
            let load = |cubin: &Cubin, _| Ok(cubin.log.clone());
            loader.load_with(7, key.clone(), compile, load).expect("no failure")
        };
        let functions: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert_eq!(compilations.load(Ordering::Relaxed), 1);
        assert!(functions.iter().all(|function| std::sync::Arc::ptr_eq(function, &functions[0])));
    }
}

#[test]
fn the_loader_tells_scopes_apart_and_retries_failures() {
    let folder = folder();
    let loader = Loader::<usize>::new(Store::at(folder.path()));
    let key = key("marlin_a", 13000);
    let failed = loader.load_with(1, key.clone(), || Err("no compiler"), |_, _| Ok(0));
    assert_eq!(failed, Err("no compiler"));
    assert_eq!(loader.loaded(1, &key), None);
    let compile = || Ok::<_, &str>(compiled(&key));
    let first = loader.load_with(1, key.clone(), compile, |cubin, origin| {
        assert_eq!(origin, Origin::Compiled);
        Ok(cubin.image.len())
    });
    assert_eq!(first, Ok(std::sync::Arc::new(10_000)));
    let absent = || -> Result<Cubin, &str> { panic!("compiled twice") };
    loader.load_with(1, key.clone(), absent, |_, _| panic!("loaded twice")).expect("it is loaded");
    let second = loader.load_with(2, key.clone(), absent, |_, origin| {
        assert_eq!(origin, Origin::Store);
        Ok(2)
    });
    assert_eq!(second, Ok(std::sync::Arc::new(2)), "another context loads its own");
    assert_eq!(loader.loaded(1, &key).as_deref(), Some(&10_000));
}

/// Fault B68 beyond the checksum: an entry that is sound for us and refused by the driver.
#[test]
fn b68_stored_code_that_the_driver_refuses_is_compiled_anew() {
    warnings();
    let folder = folder();
    let key = key("marlin_a", 13000);
    let stale = || Ok::<_, io::Error>(Cubin { image: b"stale".to_vec(), log: String::new() });
    Store::at(folder.path()).get_or_compile(&key, stale).expect("no failure");
    let loader = Loader::<usize>::new(Store::at(folder.path()));
    let load = |cubin: &Cubin, _| match &*cubin.image {
        b"stale" => Err("invalid image"),
        image => Ok(image.len()),
    };
    let function = loader.load_with(1, key.clone(), || Ok(compiled(&key)), load);
    assert_eq!(function.as_deref(), Ok(&10_000));
    assert_eq!(warnings().len(), 1);
    assert_eq!(ask(&Store::at(folder.path()), &key), Origin::Store, "overwritten");
}

/// Fault B70, B72: what the store saves, reported; and a second process profits from the first.
#[test]
fn b70_cold_and_warm_start_times_are_reported() {
    let folder = folder();
    let key = key("marlin_a", 13000);
    let slow = || {
        thread::sleep(Duration::from_millis(50));
        Ok::<_, io::Error>(compiled(&key))
    };
    let time = |store: Store| {
        let start = Instant::now();
        store.get_or_compile(&key, slow).expect("no failure");
        start.elapsed()
    };
    let (cold, warm) = (time(Store::at(folder.path())), time(Store::at(folder.path())));
    let (off, again) = (time(Store::disabled()), time(Store::disabled()));
    eprintln!("cold {cold:.1?}, warm {warm:.1?}, without a store {off:.1?} and {again:.1?}");
    assert!(cold >= Duration::from_millis(50) && off >= Duration::from_millis(50));
    assert!(again >= Duration::from_millis(50), "the second one was served from somewhere");
    assert!(warm < cold, "the store saves nothing");
}
