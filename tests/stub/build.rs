//! Compiles the stand-in for libcuda. Without rustc, or without a place for it, says so.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs};

/// Compiles the stand-in, once per name; `None` (and a line that says so) without a compiler.
pub fn stub(name: &str, cfgs: &[&str], variables: &[(&str, &str)]) -> Option<PathBuf> {
    static BUILDING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = BUILDING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("stub");
    let (source, library) = (folder.join("libcuda.rs"), folder.join(format!("lib{name}.so")));
    let write = |name, text| fs::write(folder.join(name), text);
    let written = fs::create_dir_all(&folder)
        .and_then(|()| write("libcuda.rs", include_str!("libcuda.rs")))
        .and_then(|()| write("kernels.rs", include_str!("kernels.rs")))
        .and_then(|()| write("memory.rs", include_str!("memory.rs")))
        .and_then(|()| write("link.rs", include_str!("link.rs")))
        .and_then(|()| write("newer.rs", include_str!("newer.rs")));
    if let Err(error) = written {
        eprintln!("skipped: no stand-in for libcuda in {} ({error})", folder.display());
        return None;
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(rustc);
    command.args(["--edition", "2024", "--crate-type", "cdylib", "-A", "warnings"]);
    for cfg in cfgs {
        command.args(["--cfg", cfg]);
    }
    command.arg(&source).arg("-o").arg(&library).envs(variables.iter().copied());
    match command.output() {
        Ok(output) if output.status.success() => Some(library),
        Ok(output) => panic!("the stand-in: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            eprintln!("skipped: no stand-in for libcuda without rustc ({error})");
            None
        }
    }
}
