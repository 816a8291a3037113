//! The link shim: lets a program that uses `cuda-driver-sys` link on a machine without CUDA.
//!
//! `cuda-driver-sys` asks the linker for `-lcuda`, of which we use type aliases only; the driver
//! itself is opened at run time. Where no libcuda can be found, this script puts an empty archive
//! named libcuda.a on the search path. Where one can be found it does nothing, because our archive
//! would come first and break the link of another crate that really uses libcuda. Cargo hands the
//! search path on to dependants.
//!
//! It does nothing without the feature `cuda-driver-sys`, off Linux, and with
//! `MAKAIRA_NO_LINK_SHIM` set.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Variables that name a folder below which libcuda may lie. `LIBRARY_PATH` is a list of folders.
const VARIABLES: &[&str] = &[
    "CUDA_LIBRARY_PATH",
    "CUDA_PATH",
    "CUDA_HOME",
    "CUDA_ROOT",
    "CUDA_TOOLKIT_ROOT_DIR",
    "LIBRARY_PATH",
];

const OPT_OUT: &str = "MAKAIRA_NO_LINK_SHIM";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for variable in VARIABLES.iter().chain(&[OPT_OUT, "CC", "PATH"]) {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let wanted = env::var_os("CARGO_FEATURE_CUDA_DRIVER_SYS").is_some()
        && env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux")
        && env::var_os(OPT_OUT).is_none();
    if !wanted || roots().iter().any(|root| holds_libcuda(root)) || linker_finds_libcuda() {
        return;
    }
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let archive = folder.join("libcuda.a");
    // Eight bytes: the magic of an ar archive, and no member.
    if let Err(error) = fs::write(&archive, b"!<arch>\n") {
        println!("cargo:warning=cannot write {}: {error}", archive.display());
        return;
    }
    println!("cargo:rustc-link-search=native={}", folder.display());
}

/// Folders named by the environment and the usual places.
fn roots() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = VARIABLES
        .iter()
        .filter_map(env::var_os)
        .flat_map(|value| env::split_paths(&value).collect::<Vec<_>>())
        .filter(|root| !root.as_os_str().is_empty())
        .collect();
    roots.push("/opt/cuda".into());
    for entry in fs::read_dir("/usr/local").into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("cuda") {
            roots.push(entry.path());
        }
    }
    roots
}

/// Whether libcuda lies in `root` or in one of the folders where a toolkit keeps its libraries.
fn holds_libcuda(root: &Path) -> bool {
    let mut folders: Vec<PathBuf> = ["", "lib64", "lib64/stubs", "lib", "lib/stubs"]
        .iter()
        .map(|folder| root.join(folder))
        .collect();
    for target in fs::read_dir(root.join("targets")).into_iter().flatten().flatten() {
        folders.push(target.path().join("lib"));
        folders.push(target.path().join("lib/stubs"));
    }
    folders.iter().any(|f| f.join("libcuda.so").exists() || f.join("libcuda.a").exists())
}

/// Whether the C compiler, which rustc calls as linker, knows where libcuda is: it then prints a
/// path.
fn linker_finds_libcuda() -> bool {
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let Ok(output) = Command::new(compiler).arg("-print-file-name=libcuda.so").output() else {
        return false;
    };
    Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_absolute()
}
