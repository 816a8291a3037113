//! Nothing that uses this crate links against libcuda, and nothing that does is broken by us.
//!
//! A small program that depends on the crate is built in a folder of its own, offline, with this
//! repository's lock file, and its ELF dynamic section is read. Where there is no cargo, or no ELF,
//! the tests say that they are skipped.
#![cfg(target_os = "linux")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Libraries that an ELF file needs at start, from its dynamic section.
fn needed(path: &Path) -> Vec<String> {
    const DYNAMIC: u64 = 6;
    const NEEDED: u64 = 1;
    let bytes = fs::read(path).expect("a readable program");
    assert!(bytes.starts_with(b"\x7fELF\x02\x01"), "{} is no 64-bit ELF file", path.display());
    let word = |at: usize, len: usize| {
        bytes[at..at + len].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    };
    let (sections, num_sections) = (word(40, 8) as usize, word(60, 2) as usize);
    let section = |idx: usize| sections + idx * 64;
    let range = |at: usize| (word(at + 24, 8) as usize, word(at + 32, 8) as usize);
    let mut names = Vec::new();
    for at in (0..num_sections).map(section).filter(|at| word(at + 4, 4) == DYNAMIC) {
        let (entries, len) = range(at);
        let (strings, _) = range(section(word(at + 40, 4) as usize));
        for entry in (entries..entries + len).step_by(16) {
            if word(entry, 8) == NEEDED {
                let start = strings + word(entry + 8, 8) as usize;
                let text: Vec<u8> =
                    bytes[start..].iter().copied().take_while(|b| *b != 0).collect();
                names.push(String::from_utf8(text).expect("library names are ASCII"));
            }
        }
    }
    assert!(names.iter().any(|name| name.starts_with("libc.so")), "{names:?} lacks the C library");
    names
}

fn needs_libcuda(path: &Path) -> bool {
    needed(path).iter().any(|name| name.contains("libcuda"))
}

/// A downstream program in a folder of its own.
struct Program {
    folder: PathBuf,
    target: PathBuf,
}

impl Program {
    const MAIN: &str = r#"
fn main() {
    match makaira::driver::Driver::get() {
        Ok(driver) => println!("driver {}", driver.version()),
        Err(error) => println!("{error}"),
    }
    #[cfg(feature = "links")]
    {
        #[link(name = "cuda")]
        unsafe extern "C" {
            fn cuInit(flags: u32) -> i32;
        }
        println!("linked {}", unsafe { cuInit(0) });
    }
}
"#;

    /// `None` (and a line that says so) without cargo or without the sources.
    fn new(name: &str) -> Option<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        if let Err(error) = Command::new(cargo()).arg("--version").output() {
            eprintln!("skipped: no downstream program without cargo ({error})");
            return None;
        }
        if !root.join("Cargo.lock").is_file() {
            eprintln!("skipped: no downstream program without the sources in {}", root.display());
            return None;
        }
        let temporary = Path::new(env!("CARGO_TARGET_TMPDIR")).join("link");
        let folder = temporary.join(name);
        fs::create_dir_all(folder.join("src")).expect("a folder");
        let manifest = format!(
            "[package]\nname = \"downstream\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
             [features]\nlinks = []\n\
             [dependencies]\nmakaira = {{ path = {root:?}, default-features = false, \
             features = [\"cuda-driver-sys\"] }}\n[workspace]\n"
        );
        fs::write(folder.join("Cargo.toml"), manifest).expect("a manifest");
        fs::write(folder.join("src/main.rs"), Self::MAIN).expect("a program");
        fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).expect("the lock file");
        // Dependencies are compiled once for all programs and runs.
        Some(Self { folder, target: temporary.join("target") })
    }

    /// Builds it, with extra cargo arguments and variables.
    fn build(&self, arguments: &[&str], variables: &[(&str, &Path)]) -> PathBuf {
        let mut command = Command::new(cargo());
        command
            .args(["build", "--offline", "--quiet"])
            .args(arguments)
            .current_dir(&self.folder)
            .env("CARGO_TARGET_DIR", &self.target)
            .envs(variables.iter().copied());
        let output = command.output().expect("cargo starts");
        assert!(output.status.success(), "the build: {}", String::from_utf8_lossy(&output.stderr));
        self.target.join("debug/downstream")
    }
}

fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

#[test]
fn this_test_does_not_need_libcuda() {
    let own = env::current_exe().expect("this test has a path");
    // Uses the crate, so that the linker had its reasons.
    let _ = makaira::driver::Driver::get();
    assert!(!needs_libcuda(&own), "{:?}", needed(&own));
}

/// The shim makes a downstream program link without CUDA; then, with a libcuda in reach, a program
/// that really links it still does.
#[test]
fn downstream_programs_link_with_and_without_libcuda() {
    let Some(program) = Program::new("downstream") else { return };
    let binary = program.build(&[], &[]);
    assert!(!needs_libcuda(&binary), "{:?}", needed(&binary));
    let output = Command::new(&binary)
        .env("MAKAIRA_LIBCUDA", "/nonexistent/libcuda.so")
        .output()
        .expect("the program starts");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("no CUDA driver"), "{output:?}");

    let library = program.folder.join("lib");
    fs::create_dir_all(&library).expect("a folder");
    let source = library.join("cuda.rs");
    let text = "#[unsafe(no_mangle)]\npub extern \"C\" fn cuInit(_: u32) -> i32 { 0 }\n";
    fs::write(&source, text).expect("a source");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args(["--edition", "2024", "--crate-type", "cdylib", "-o"])
        .arg(library.join("libcuda.so"))
        .arg(&source)
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no libcuda to link with, without rustc");
        return;
    }
    let variables = [("LIBRARY_PATH", &*library)];
    let binary = program.build(&["--features", "links"], &variables);
    assert!(needs_libcuda(&binary), "the real library was shadowed: {:?}", needed(&binary));
    let binary = program.build(&[], &variables);
    assert!(!needs_libcuda(&binary), "{:?}", needed(&binary));
}
