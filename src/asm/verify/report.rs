//! What the verifier says: rules, places and the list of all problems of a module.

use std::fmt;
use std::panic::Location;

/// The rule that a module breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rule {
    /// What the builder noticed: a broken weave, a label inside a stream.
    Emission,
    /// Names are PTX identifiers and unique.
    Name,
    /// CTA size and occupancy are ones that can be launched.
    Launch,
    /// The shared-memory plan fits the target, and regions lie inside it.
    Smem,
    /// The target, or the device, has the instruction.
    Target,
    /// The assembler speaks the PTX version that the used forms need.
    Version,
    /// Registers belong to this program.
    Register,
    /// Every register is written before it is read, on every path.
    Definition,
    /// Labels are bound once and used.
    Label,
    /// Control reaches every instruction, and ends only at an exit.
    Flow,
    /// An access's offset is a multiple of its width.
    Alignment,
    /// Parameters belong to this entry and are read at their own width.
    Param,
    /// Immediates are in the range that the instruction allows.
    Immediate,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Emission => "emission",
            Rule::Name => "name",
            Rule::Launch => "launch",
            Rule::Smem => "shared memory",
            Rule::Target => "target",
            Rule::Version => "version",
            Rule::Register => "register",
            Rule::Definition => "definition before use",
            Rule::Label => "label",
            Rule::Flow => "flow",
            Rule::Alignment => "alignment",
            Rule::Param => "parameter",
            Rule::Immediate => "immediate",
        })
    }
}

/// The instruction that a diagnostic is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Its number, counted from 0 over the instructions of the entry.
    pub instruction: usize,
    /// Its line in the printed text (without line information), counted from 1.
    pub line: usize,
    /// The path of the section it stands in; empty at the root.
    pub section: String,
    /// Its text.
    pub text: String,
    /// The Rust line that emitted it.
    pub emitter: &'static Location<'static>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instruction {}, line {}", self.instruction, self.line)?;
        if !self.section.is_empty() {
            write!(f, ", section \"{}\"", self.section)?;
        }
        write!(f, ": `{}` from {}:{}", self.text, self.emitter.file(), self.emitter.line())
    }
}

/// One problem of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// The rule.
    pub rule: Rule,
    /// What is wrong, with the value and the remedy.
    pub what: String,
    /// The instruction, unless it is the module as a whole.
    pub site: Option<Site>,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.what)?;
        match &self.site {
            Some(site) => write!(f, "\n  at {site}"),
            None => Ok(()),
        }
    }
}

/// All problems of a module: those of the module as a whole first, then in the order of instructions.
/// Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostics {
    pub(super) entry: String,
    pub(super) list: Vec<Diagnostic>,
}

impl Diagnostics {
    /// The problems.
    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.list.iter()
    }
}

impl<'a> IntoIterator for &'a Diagnostics {
    type Item = &'a Diagnostic;
    type IntoIter = std::slice::Iter<'a, Diagnostic>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.list.len() == 1 { "" } else { "s" };
        write!(f, "{} problem{plural} in kernel {}", self.list.len(), self.entry)?;
        for diagnostic in self {
            write!(f, "\n{diagnostic}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}
