//! Module to PTX text.
//!
//! Canonical: one spelling for everything, registers declared by class, sections as comments, two spaces
//! of indentation. With line information the text carries `.file` and `.loc`, so that a profiler shows the
//! Rust line that emitted each instruction beside the machine code.
//! Source: PTX ISA, "PTX Module Directives", "Kernel and Function Directives", "Debugging Directives".

use std::fmt::{self, Write};

use super::builder::{Guard, Item, Node};
use super::module::Module;
use super::types::Class;

/// What to print besides the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrintOptions {
    /// `.file` and `.loc` directives that name the emitting Rust lines.
    pub line_info: bool,
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "@{}{} ", if self.negated { "!" } else { "" }, self.pred)
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.guard {
            Some(guard) => write!(f, "{guard}{}", self.inst),
            None => self.inst.fmt(f),
        }
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_ptx(PrintOptions::default()))
    }
}

impl Module {
    /// The module's PTX text.
    pub fn to_ptx(&self, options: PrintOptions) -> String {
        let mut text = String::with_capacity(64 * self.entry.items.len() + 1024);
        self.write(&mut text, options, &mut |_| {}).expect("writing to a string does not fail");
        text
    }

    /// The line of each instruction in the text without line information, counted from 1.
    pub(super) fn ptx_lines(&self) -> Vec<usize> {
        let (mut lines, mut line, mut seen) = (Vec::new(), 1, 0);
        let mut before_each = |text: &String| {
            line += text.as_bytes()[seen..].iter().filter(|byte| **byte == b'\n').count();
            seen = text.len();
            lines.push(line);
        };
        self.write(&mut String::new(), PrintOptions::default(), &mut before_each)
            .expect("writing to a string does not fail");
        lines
    }

    fn write(
        &self,
        out: &mut String,
        options: PrintOptions,
        before_each: &mut dyn FnMut(&String),
    ) -> fmt::Result {
        let entry = &self.entry;
        writeln!(out, ".version {}", self.isa())?;
        writeln!(out, ".target {}", self.target)?;
        writeln!(out, ".address_size 64\n")?;
        let files = if options.line_info { self.files() } else { Vec::new() };
        if entry.smem.bytes() > 0 {
            writeln!(out, ".extern .shared .align 128 .b8 smem[];\n")?;
        }
        writeln!(out, ".visible .entry {}(", entry.name)?;
        for (n, param) in entry.params.iter().enumerate() {
            let comma = if n + 1 < entry.params.len() { "," } else { "" };
            writeln!(out, "  .param .u{} {}{comma}", 8 * param.bytes, param.name)?;
        }
        writeln!(out, ")\n.reqntid {}, 1, 1\n.minnctapersm {}\n{{", entry.threads, entry.min_ctas)?;
        for (class, count) in Class::ALL.into_iter().zip(entry.num_regs) {
            if count > 0 {
                writeln!(out, "  .reg .{} %{}<{count}>;", class.ptx_type(), class.prefix())?;
            }
        }
        for (name, region) in entry.smem.regions() {
            writeln!(out, "  // smem {:6} +{:6}  {name}", region.start, region.bytes)?;
        }
        let mut section = 0;
        let mut loc = None;
        for item in &entry.items {
            match item {
                Item::Label(label) => writeln!(out, "{label}:")?,
                Item::Section(index) => {
                    section_comment(out, &entry.sections, &mut section, *index)?
                }
                Item::Inst(node) => {
                    section_comment(out, &entry.sections, &mut section, node.section)?;
                    if options.line_info {
                        let here = (node.emitter.file(), node.emitter.line());
                        if loc.replace(here) != Some(here) {
                            let file = files.iter().position(|file| *file == here.0);
                            let file = file.map_or(0, |file| file + 1);
                            writeln!(out, "  .loc {file} {} {}", here.1, node.emitter.column())?;
                        }
                    }
                    before_each(out);
                    writeln!(out, "  {node}")?;
                }
            }
        }
        writeln!(out, "}}")?;
        for (n, file) in files.iter().enumerate() {
            writeln!(out, ".file {} \"{file}\"", n + 1)?;
        }
        Ok(())
    }

    /// The Rust files that emitted instructions, in order of first appearance.
    fn files(&self) -> Vec<&'static str> {
        let mut files: Vec<&'static str> = Vec::new();
        for node in self.nodes() {
            if !files.contains(&node.emitter.file()) {
                files.push(node.emitter.file());
            }
        }
        files
    }
}

fn section_comment(out: &mut String, names: &[String], now: &mut u32, next: u32) -> fmt::Result {
    if *now != next && next != 0 {
        writeln!(out, "\n  // {}", names[next as usize])?;
    }
    *now = next;
    Ok(())
}
