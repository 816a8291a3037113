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
            writeln!(out, ".extern .shared .align {} .b8 smem[];\n", entry.smem.align())?;
        }
        writeln!(out, ".visible .entry {}(", entry.name)?;
        for (n, param) in entry.params.iter().enumerate() {
            let comma = if n + 1 < entry.params.len() { "," } else { "" };
            match param.bytes {
                4 | 8 => writeln!(out, "  .param .u{} {}{comma}", 8 * param.bytes, param.name)?,
                bytes => writeln!(out, "  .param .align 64 .b8 {}[{bytes}]{comma}", param.name)?,
            }
        }
        writeln!(out, ")\n.reqntid {}, 1, 1\n.minnctapersm {}", entry.threads, entry.min_ctas)?;
        if entry.cluster > 1 {
            writeln!(out, ".explicitcluster\n.reqnctapercluster {}, 1, 1", entry.cluster)?;
        }
        writeln!(out, "{{")?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asm::builder::Asm;
    use crate::asm::types::{B32, B64, Cmp, F32};
    use crate::target::SmArch;

    /// Sections, labels, guards, vectors, addresses and immediates in one program.
    fn sample() -> (Module, u32) {
        let mut asm = Asm::new();
        let out = asm.param_u64("out");
        let rounds = asm.param_u32("rounds");
        let tile = asm.smem.region("tile", 256, 128);
        let [n, base] = asm.regs::<B32, 2>();
        let to = asm.reg::<B64>();
        let x = asm.regs::<F32, 2>();
        let line = line!() + 1;
        asm.ld_param_u64(to, out);
        asm.ld_param_u32(n, rounds);
        asm.mov_u32_smem(base);
        asm.section("loop", |asm| {
            let top = asm.label("top");
            asm.bind(top);
            asm.ld_shared_v2_f32(x, base.at(8).within(tile));
            asm.section("sum", |asm| asm.fma_rn_f32(x[0], x[0], x[1], 0.5));
            asm.add_u32(n, n, -1);
            let more = asm.test_u32(Cmp::Ne, n, 0);
            asm.when(more, |asm| asm.bra(top));
            asm.unless(more, |asm| asm.st_global_v2_f32(to.at(-16), x));
        });
        asm.exit();
        (asm.finish("sample", SmArch::baseline(86), 64, 2), line)
    }

    #[test]
    fn text_is_canonical() {
        let wanted = "\
.version 7.1
.target sm_86
.address_size 64

.extern .shared .align 128 .b8 smem[];

.visible .entry sample(
  .param .u64 out,
  .param .u32 rounds
)
.reqntid 64, 1, 1
.minnctapersm 2
{
  .reg .pred %p<1>;
  .reg .b32 %r<2>;
  .reg .b64 %d<1>;
  .reg .f32 %f<2>;
  // smem      0 +   256  tile
  ld.param.u64 %d0, [out];
  ld.param.u32 %r0, [rounds];
  mov.u32 %r1, smem;

  // loop
$top_0:
  ld.shared.v2.f32 {%f0, %f1}, [%r1+8];

  // loop / sum
  fma.rn.f32 %f0, %f0, %f1, 0f3F000000;

  // loop
  add.u32 %r0, %r0, 0xffffffff;
  setp.ne.u32 %p0, %r0, 0;
  @%p0 bra $top_0;
  @!%p0 st.global.v2.f32 [%d0-16], {%f0, %f1};
  exit;
}
";
        let (module, _) = sample();
        assert_eq!(module.to_string(), wanted);
        assert_eq!(module.to_ptx(PrintOptions::default()), wanted);
    }

    #[test]
    fn line_information_adds_directives_and_changes_nothing_else() {
        let (module, line) = sample();
        let text = module.to_ptx(PrintOptions { line_info: true });
        let is_info = |line: &&str| line.starts_with("  .loc ") || line.starts_with(".file ");
        let rest: Vec<_> = text.lines().filter(|line| !is_info(line)).collect();
        assert_eq!(rest, module.to_string().lines().collect::<Vec<_>>());
        assert!(
            text.contains(&format!("  .loc 1 {line} 13\n  ld.param.u64 %d0, [out];")),
            "{text}"
        );
        assert!(text.ends_with(&format!("}}\n.file 1 \"{}\"\n", file!())), "{text}");
    }

    #[test]
    fn line_numbers_are_those_of_the_text() {
        let (module, _) = sample();
        let text = module.to_string();
        let lines: Vec<_> = text.lines().collect();
        for (node, line) in module.nodes().zip(module.ptx_lines()) {
            assert_eq!(lines[line - 1].trim(), node.to_string());
        }
    }
}
