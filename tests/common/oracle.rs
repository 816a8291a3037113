//! The offline assembler and disassembler as oracles.
//!
//! They are found by `MAKAIRA_PTXAS` and `MAKAIRA_NVDISASM` (paths), else on `PATH`. Where they are missing a
//! test says that it skips; with `MAKAIRA_REQUIRE_ORACLE=1` it fails instead.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What the assembler made of a module with one kernel.
#[derive(Debug)]
pub struct Assembled {
    /// Registers per thread.
    pub regs: u32,
    /// Bytes stored and loaded by spills, and of the stack frame.
    pub spill_bytes: u32,
    pub stack_bytes: u32,
    /// Bytes of static shared memory.
    pub smem_bytes: u32,
    pub cubin: Vec<u8>,
    /// Everything that the assembler said.
    pub log: String,
}

/// A machine instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sass {
    pub address: u32,
    /// Its text without predicate and semicolon: `HMMA.16816.F32 R4, …`.
    pub text: String,
    pub guard: Option<String>,
}

impl Sass {
    /// The mnemonic with its modifiers.
    pub fn opcode(&self) -> &str {
        self.text.split_whitespace().next().unwrap_or_default()
    }
}

/// The machine code of one kernel.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub code: Vec<Sass>,
    /// `(source file, line)` for each instruction that has one.
    labels: Vec<(String, u32)>,
}

impl Function {
    /// Loops, as the code from the target of a backward branch to the branch.
    pub fn loops(&self) -> Vec<&[Sass]> {
        let address_of = |label: &str| {
            self.labels.iter().find(|(name, _)| name == label).map(|(_, address)| *address)
        };
        let backward = |(n, sass): (usize, &Sass)| {
            if !sass.opcode().starts_with("BRA") {
                return None;
            }
            let target = sass.text.split(['(', ')', ' ', '`']).find_map(address_of)?;
            let first = self.code.iter().position(|sass| sass.address == target)?;
            (first <= n && sass.address != target).then(|| &self.code[first..=n])
        };
        self.code.iter().enumerate().filter_map(backward).collect()
    }

    /// The shortest loop with the most instructions of this opcode prefix.
    pub fn main_loop(&self, opcode: &str) -> Option<&[Sass]> {
        let count = |code: &[Sass]| code.iter().filter(|s| s.opcode().starts_with(opcode)).count();
        self.loops()
            .into_iter()
            .filter(|code| count(code) > 0)
            .max_by_key(|code| (count(code), std::cmp::Reverse(code.len())))
    }

    /// The shortest loop with this many instructions of this opcode prefix.
    pub fn loop_of(&self, num: usize, opcode: &str) -> Option<&[Sass]> {
        let count = |code: &[Sass]| code.iter().filter(|s| s.opcode().starts_with(opcode)).count();
        self.loops().into_iter().filter(|code| count(code) == num).min_by_key(|code| code.len())
    }
}

fn tool(variable: &str, name: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "{variable} names {}, which is no file", path.display());
        return Some(path);
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|path| path.is_file());
    if found.is_none() {
        let required = std::env::var_os("MAKAIRA_REQUIRE_ORACLE").is_some_and(|value| value != "0");
        assert!(!required, "MAKAIRA_REQUIRE_ORACLE is set, but there is no {name}: set {variable}");
        eprintln!(
            "skipped: no {name} (set {variable}); nothing was compared with the real assembler"
        );
    }
    found
}

/// The assembler.
pub struct Ptxas(PathBuf);

impl Ptxas {
    /// The assembler, or none with a line that says that a test is skipped.
    pub fn find() -> Option<Self> {
        tool("MAKAIRA_PTXAS", "ptxas").map(Self)
    }

    /// Assembles a text for an architecture such as `sm_80`.
    ///
    /// # Errors
    /// What the assembler said when it refused.
    pub fn assemble(&self, text: &str, arch: &str, flags: &[&str]) -> Result<Assembled, String> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (source, cubin) = (dir.path().join("a.ptx"), dir.path().join("a.cubin"));
        std::fs::write(&source, text).expect("the directory is ours");
        let mut command = Command::new(&self.0);
        command
            .arg("-v")
            .arg(format!("-arch={arch}"))
            .args(flags)
            .arg(&source)
            .arg("-o")
            .arg(&cubin);
        let output = command.output().expect("the assembler starts");
        let log = [output.stdout, output.stderr].concat();
        let log = String::from_utf8_lossy(&log).into_owned();
        if !output.status.success() {
            return Err(log);
        }
        let number = |unit: &str| {
            let before = log.find(unit).map(|end| &log[..end]);
            before.and_then(|text| {
                text.split(|c: char| !c.is_ascii_digit()).rfind(|w| !w.is_empty())?.parse().ok()
            })
        };
        Ok(Assembled {
            regs: number(" registers").expect("the assembler tells the registers"),
            spill_bytes: number(" bytes spill stores").unwrap_or(0)
                + number(" bytes spill loads").unwrap_or(0),
            stack_bytes: number(" bytes stack frame").unwrap_or(0),
            smem_bytes: number(" bytes smem").unwrap_or(0),
            cubin: std::fs::read(&cubin).expect("the assembler wrote it"),
            log,
        })
    }
}

/// The disassembler.
pub struct Nvdisasm(PathBuf);

impl Nvdisasm {
    /// The disassembler, or none with a line that says that a test is skipped.
    pub fn find() -> Option<Self> {
        tool("MAKAIRA_NVDISASM", "nvdisasm").map(Self)
    }

    /// The text that the disassembler prints for a cubin.
    pub fn text(&self, cubin: &[u8], flags: &[&str]) -> String {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), cubin).expect("the file is ours");
        let path: &Path = file.path();
        let output = Command::new(&self.0).args(flags).arg(path).output().expect("it starts");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the disassembler failed: {log}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The functions of a cubin.
    pub fn functions(&self, cubin: &[u8]) -> Vec<Function> {
        parse(&self.text(cubin, &["-c"]))
    }
}

/// Reads the disassembler's listing: `.text.<name>:` begins a function, `.L_x_0:` is a label and
/// `/*0010*/ @P0 OPCODE operands ;` an instruction.
fn parse(listing: &str) -> Vec<Function> {
    let mut functions: Vec<Function> = Vec::new();
    let mut waiting: Vec<String> = Vec::new();
    for line in listing.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".text.").and_then(|line| line.strip_suffix(':')) {
            functions.push(Function { name: name.into(), code: Vec::new(), labels: Vec::new() });
        } else if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with('.')) {
            waiting.push(label.to_owned());
        } else if let Some((address, rest)) =
            line.strip_prefix("/*").and_then(|line| line.split_once("*/"))
            && let (Ok(address), Some(function)) =
                (u32::from_str_radix(address, 16), functions.last_mut())
        {
            let text = rest.split(';').next().unwrap_or_default().trim();
            let (guard, text) = match text.strip_prefix('@').and_then(|text| text.split_once(' ')) {
                Some((guard, text)) => (Some(guard.to_owned()), text.trim()),
                None => (None, text),
            };
            function.labels.extend(waiting.drain(..).map(|label| (label, address)));
            function.code.push(Sass { address, text: text.to_owned(), guard });
        }
    }
    functions
}
