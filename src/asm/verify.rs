//! The verifier: a module and its target, or a device, to all problems at once.
//!
//! Each rule is a variant of [`Rule`]. What a rule says about an instruction comes from the instruction's
//! row and operands, so a new row is covered without a word here. A module that passes may still be refused
//! by the emulator or by the driver, but nothing behind this point panics on it.
//! Not checked: what only values can tell (addresses out of bounds, races, waits, lanes that diverge at an
//! `.aligned` instruction). The emulator reports those.
//! Source: PTX ISA, "Identifiers", "Performance-Tuning Directives", "Addresses as Operands" (alignment) and
//! the target notes of each instruction.

use std::collections::HashMap;

mod flow;
mod report;
#[cfg(test)]
mod tests;

pub use report::{Diagnostic, Diagnostics, Rule, Site};

use super::builder::{Item, Node};
use super::isa::{
    Effect, Inst, TargetSet, alu::Alu, async_copy::CopyAsync, bulk::Bulk, cluster::Cluster,
    cluster::SetmaxnregDec, cluster::SetmaxnregInc, sync::Sync, wgmma::Wgmma,
};
use super::module::{CLUSTERS, Module};
use super::reg::{In, Label, Role};
use super::types::Class;
use crate::target::{DeviceSpec, PtxIsa, SmArch};

impl Module {
    /// Checks the module against its own target.
    ///
    /// # Errors
    /// All problems found, see [`Rule`].
    pub fn verify(&self) -> Result<(), Diagnostics> {
        self.check(None)
    }

    /// Checks the module against its own target and against a device: that it runs code of this target,
    /// that its driver assembles the module's PTX version, and that a CTA's shared memory fits.
    ///
    /// # Errors
    /// All problems found, see [`Rule`].
    pub fn verify_for(&self, device: &DeviceSpec) -> Result<(), Diagnostics> {
        self.check(Some(device))
    }

    fn check(&self, device: Option<&DeviceSpec>) -> Result<(), Diagnostics> {
        let mut checker =
            Checker { module: self, nodes: self.nodes().collect(), found: Vec::new() };
        checker.emission();
        checker.names();
        checker.launch();
        checker.smem(device);
        checker.target(device);
        checker.version(device);
        for n in 0..checker.nodes.len() {
            checker.instruction(n);
        }
        let targets = checker.labels();
        checker.flow(&targets);
        checker.finish()
    }
}

/// The module under test and what was found so far: `(rule, instruction, what)`.
struct Checker<'m> {
    module: &'m Module,
    nodes: Vec<&'m Node>,
    found: Vec<(Rule, Option<usize>, String)>,
}

impl Checker<'_> {
    fn report(&mut self, rule: Rule, at: impl Into<Option<usize>>, what: impl Into<String>) {
        self.found.push((rule, at.into(), what.into()));
    }

    fn finish(mut self) -> Result<(), Diagnostics> {
        if self.found.is_empty() {
            return Ok(());
        }
        self.found.sort_by_key(|(_, at, _)| *at);
        let lines = self.module.ptx_lines();
        let sections = &self.module.entry.sections;
        let site = |n: usize| Site {
            instruction: n,
            line: lines[n],
            section: sections.get(self.nodes[n].section as usize).cloned().unwrap_or_default(),
            text: self.nodes[n].to_string(),
            emitter: self.nodes[n].emitter,
        };
        let list = self.found.into_iter();
        let list = list.map(|(rule, at, what)| Diagnostic { rule, what, site: at.map(site) });
        Err(Diagnostics { entry: self.module.entry.name.clone(), list: list.collect() })
    }

    fn emission(&mut self) {
        for mistake in &self.module.entry.mistakes {
            self.report(Rule::Emission, None, mistake);
        }
    }

    fn names(&mut self) {
        let entry = &self.module.entry;
        let mut names = vec![("entry", entry.name.as_str())];
        names.extend(entry.params.iter().map(|param| ("parameter", param.name)));
        for (n, (kind, name)) in names.iter().enumerate() {
            if !is_identifier(name) {
                let what = format!(
                    "{kind} name `{name}` is no PTX identifier: a letter, then letters, digits, _ or $"
                );
                self.report(Rule::Name, None, what);
            }
            if *name == "smem" || names[..n].iter().any(|(_, other)| other == name) {
                self.report(
                    Rule::Name,
                    None,
                    format!("{kind} name `{name}` is taken: choose another"),
                );
            }
        }
        let regions = entry.smem.regions().iter().map(|(name, _)| ("region", name));
        let sections = entry.sections.iter().map(|name| ("section", name));
        for (kind, name) in regions.chain(sections) {
            if name.contains(char::is_control) {
                let what = format!("{kind} name {name:?} does not fit on a comment line");
                self.report(Rule::Name, None, what);
            }
        }
    }

    fn launch(&mut self) {
        let entry = &self.module.entry;
        if entry.threads == 0 || entry.threads > 1024 || !entry.threads.is_multiple_of(32) {
            let what = format!(
                "a CTA of {} threads: choose a multiple of 32 from 32 to 1024",
                entry.threads
            );
            self.report(Rule::Launch, None, what);
        }
        if entry.min_ctas == 0 {
            self.report(Rule::Launch, None, "0 CTAs per SM asked for: ask for at least 1");
        }
        let cluster = entry.cluster;
        if !(1..=8).contains(&cluster) {
            let what = format!("clusters of {cluster} CTAs: every device has 1 to 8");
            self.report(Rule::Launch, None, what);
        }
        let target = self.module.target;
        if cluster > 1 && !CLUSTERS.targets.contains(target) {
            let needs = CLUSTERS.targets;
            let what = format!("clusters need {needs}, the target is {target}: use single CTAs");
            self.report(Rule::Target, None, what);
        }
        for param in entry.params.iter().filter(|param| !matches!(param.bytes, 4 | 8 | 128)) {
            let what = format!(
                "parameter {} of {} bytes: use 4, 8, or 128 for a tensor map",
                param.name, param.bytes
            );
            self.report(Rule::Param, None, what);
        }
    }

    fn smem(&mut self, device: Option<&DeviceSpec>) {
        let bytes = self.module.entry.smem.bytes();
        let target = self.module.target;
        let of_target = target.spec().map(|spec| (target.to_string(), spec.smem_per_cta_bytes));
        let of_device = device.map(|device| (device.name.clone(), device.smem_per_cta_bytes));
        for (name, limit) in of_target.into_iter().chain(of_device) {
            if bytes > limit {
                let what = format!(
                    "the plan takes {bytes} bytes, a CTA on {name} has at most {limit}: use fewer \
                     stages or a smaller tile"
                );
                self.report(Rule::Smem, None, what);
            }
        }
        for (name, region) in self.module.entry.smem.regions() {
            if u64::from(region.start) + u64::from(region.bytes) > u64::from(bytes) {
                let what = format!(
                    "region {name} ({}+{}) leaves the plan of {bytes} bytes",
                    region.start, region.bytes
                );
                self.report(Rule::Smem, None, what);
            }
        }
    }

    /// Every instruction is available on the target, and the device runs code of the target. A missing
    /// instruction is reported where it is first used.
    fn target(&mut self, device: Option<&DeviceSpec>) {
        let target = self.module.target;
        if target.since().is_none() || target.spec().is_none() {
            self.report(Rule::Target, None, format!("{target} is no target that we know"));
        }
        if let Some(device) = device {
            let runs = match target.specific {
                true => device.arch.sm == target.sm,
                false => device.arch.sm >= target.sm,
            };
            if !runs {
                let what = format!(
                    "{} has {}, which does not run code for {target}: build for {}",
                    device.name,
                    device.arch,
                    SmArch::baseline(device.arch.sm)
                );
                self.report(Rule::Target, None, what);
            }
        }
        self.each_form(
            |node| !node.inst.since().targets.contains(target),
            |this, n, opcode| {
                let targets = this.nodes[n].inst.since().targets;
                let remedy = match targets {
                    TargetSet::From(_) => "this kernel cannot run on older cards",
                    TargetSet::Specific(_) => "build for that target",
                };
                let what = format!("`{opcode}` needs {targets}, the target is {target}: {remedy}");
                this.report(Rule::Target, n, what);
            },
        );
    }

    /// The device's driver speaks the version of the target and of every used form.
    fn version(&mut self, device: Option<&DeviceSpec>) {
        let Some(device) = device else { return };
        let remedy = |isa: PtxIsa| match first_cuda_release(isa) {
            Some((major, minor)) => {
                format!("install a driver of CUDA {major}.{minor} or newer")
            }
            None => "no driver that we know speaks it".to_owned(),
        };
        let target = self.module.target;
        if let Some(isa) = target.since().filter(|isa| *isa > device.isa) {
            let what = format!(
                "{target} needs PTX {isa}, the driver speaks up to {}: {}",
                device.isa,
                remedy(isa)
            );
            self.report(Rule::Version, None, what);
        }
        self.each_form(
            |node| node.inst.since().isa > device.isa,
            |this, n, opcode| {
                let isa = this.nodes[n].inst.since().isa;
                let what = format!(
                    "`{opcode}` needs PTX {isa}, the driver speaks up to {}: {}",
                    device.isa,
                    remedy(isa)
                );
                this.report(Rule::Version, n, what);
            },
        );
    }

    /// Calls `f` with the first instruction of each form that `is_bad`, and its opcode.
    fn each_form(&mut self, is_bad: impl Fn(&Node) -> bool, f: impl Fn(&mut Self, usize, &str)) {
        let mut seen: Vec<&str> = Vec::new();
        for n in 0..self.nodes.len() {
            let row = self.nodes[n].inst.row();
            if is_bad(self.nodes[n]) && !seen.contains(&row.text) {
                seen.push(row.text);
                f(self, n, row.text.split([' ', ';']).next().unwrap_or(row.text));
            }
        }
    }

    /// What one instruction shows by itself.
    fn instruction(&mut self, n: usize) {
        let entry = &self.module.entry;
        let node = self.nodes[n];
        let row = node.inst.row();
        let mut destination = None;
        let mut foreign = None;
        let mut see = |reg: super::reg::AnyReg, role| {
            if role == Role::Write {
                destination = Some(reg.class);
            }
            if reg.id >= entry.num_regs[reg.class as usize] {
                foreign = Some(reg);
            }
        };
        node.inst.registers(&mut see);
        if let Some(guard) = node.guard {
            see(guard.pred.any(), Role::Read);
        }
        if let Some(reg) = foreign {
            let what = format!("{reg} belongs to another program: take it from this one's `reg()`");
            self.report(Rule::Register, n, what);
        }
        if node.section as usize >= entry.sections.len() {
            self.report(Rule::Register, n, "its section belongs to another program");
        }
        let smem_bytes = entry.smem.bytes();
        let mut places = Vec::new();
        node.inst.places(&mut |place| places.push(place));
        for place in places {
            let width = i64::from(place.bytes.unwrap_or(row.access_bytes).max(1));
            if place.offset % width != 0 {
                let what = format!(
                    "offset {} of an access of {width} bytes: it must be a multiple of {width}",
                    place.offset
                );
                self.report(Rule::Alignment, n, what);
            }
            if let Some(region) = place.region
                && u64::from(region.start) + u64::from(region.bytes) > u64::from(smem_bytes)
            {
                let what = format!(
                    "stated region {}+{} leaves the plan of {smem_bytes} bytes",
                    region.start, region.bytes
                );
                self.report(Rule::Smem, n, what);
            }
        }
        if let Some(param) = node.inst.param() {
            // The address of a parameter is taken of those that have no width of their own.
            let width = match node.inst {
                Inst::Bulk(Bulk::CvtaParamU64(_)) => 128,
                _ => destination.map_or(0, class_bytes),
            };
            if entry.params.get(param.index as usize) != Some(&param) {
                let what = format!("parameter {} is none of this entry", param.name);
                self.report(Rule::Param, n, what);
            } else if param.bytes != width {
                let what = format!(
                    "parameter {} of {} bytes is read as {width}: use the load of its own width",
                    param.name, param.bytes
                );
                self.report(Rule::Param, n, what);
            }
        }
        if matches!(node.inst, Inst::Alu(Alu::MovU32Smem(_))) && smem_bytes == 0 {
            self.report(Rule::Smem, n, "the plan is empty, so there is no `smem`: plan a region");
        }
        if let Some(what) = bad_immediate(&node.inst, entry.threads) {
            self.report(Rule::Immediate, n, what);
        }
    }

    /// Where each bound label stands, by number.
    fn labels(&mut self) -> HashMap<u32, usize> {
        let mut bound: HashMap<u32, (Label, usize)> = HashMap::new();
        let mut used: HashMap<u32, Label> = HashMap::new();
        let mut n = 0;
        for item in &self.module.entry.items {
            match item {
                Item::Label(label) => {
                    if bound.insert(label.id, (*label, n)).is_some() {
                        self.report(Rule::Label, None, format!("{label} is bound twice"));
                    }
                    if !label.name.chars().all(is_identifier_char) {
                        let what =
                            format!("{label} is no PTX identifier: use letters, digits, _ or $");
                        self.report(Rule::Name, None, what);
                    }
                }
                Item::Inst(node) => {
                    if let Some(label) = target_of(node) {
                        used.insert(label.id, label);
                    }
                    n += 1;
                }
                Item::Section(_) => {}
            }
        }
        for n in 0..self.nodes.len() {
            if let Some(label) = target_of(self.nodes[n])
                && bound.get(&label.id).is_none_or(|(known, _)| *known != label)
            {
                self.report(Rule::Label, n, format!("{label} is not bound: `bind` it once"));
            }
        }
        let mut idle: Vec<_> =
            bound.values().filter(|(label, _)| !used.contains_key(&label.id)).collect();
        idle.sort_by_key(|(label, _)| label.id);
        for (label, _) in idle {
            self.report(Rule::Label, None, format!("{label} is bound and never used: remove it"));
        }
        bound.into_iter().map(|(id, (_, n))| (id, n)).collect()
    }

    fn flow(&mut self, targets: &HashMap<u32, usize>) {
        if self.nodes.is_empty() {
            self.report(Rule::Flow, None, "the program has no instruction: emit at least `exit`");
            return;
        }
        let flow = flow::Flow::new(&self.nodes, targets);
        for n in flow.falls_off() {
            self.report(Rule::Flow, n, "control runs past the last instruction: end with `exit`");
        }
        for (first, count) in flow.unreachable() {
            let what = format!("control never reaches it ({count} instructions): remove them");
            self.report(Rule::Flow, first, what);
        }
        for (n, reg) in flow.undefined_reads(&self.module.entry) {
            let what = format!(
                "{reg} is read but not written on every path to here: write it before, or under the \
                 same guard while that predicate is unchanged"
            );
            self.report(Rule::Definition, n, what);
        }
    }
}

/// The label that the instruction may continue at; only control flow has one.
fn target_of(node: &Node) -> Option<Label> {
    match node.inst.row().effect {
        Effect::Control => node.inst.label(),
        _ => None,
    }
}

/// PTX ISA, "Identifiers"; `WARP_SZ` is the one predefined name that the form allows.
fn is_identifier(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(is_identifier_char)
        && name != "WARP_SZ"
}

fn is_identifier_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '$'
}

fn class_bytes(class: Class) -> u32 {
    match class {
        Class::Pred => 0,
        Class::B16 => 2,
        Class::B32 | Class::F32 => 4,
        Class::B64 => 8,
    }
}

/// What is wrong with an immediate of the instruction. Source: the operand ranges of bar, lop3, cp.async.
fn bad_immediate(inst: &Inst, threads: u32) -> Option<String> {
    let barrier = |id: u64| (id > 15).then(|| format!("barrier {id}: a CTA has barriers 0 to 15"));
    let copied = |n: In<_>, bytes: u64| match n {
        In::Imm(n) if n > bytes => {
            Some(format!("{n} bytes of a copy of {bytes}: use at most {bytes}"))
        }
        _ => None,
    };
    match inst {
        Inst::Sync(Sync::BarSync(i)) => barrier(i.id.0.into()),
        Inst::Sync(Sync::BarSyncN(i)) => match i.id {
            In::Imm(id) if id > 15 => barrier(id),
            _ if i.n.0 == 0 || i.n.0 > threads || !i.n.0.is_multiple_of(32) => Some(format!(
                "a barrier of {} threads: use a multiple of 32 up to the CTA's {threads}",
                i.n.0
            )),
            _ => None,
        },
        Inst::Alu(Alu::Lop3B32(i)) if i.lut.0 > 255 => {
            Some(format!("look-up table {:#x}: it has 8 bits", i.lut.0))
        }
        Inst::Cluster(Cluster::SetmaxnregDec(SetmaxnregDec { n }))
        | Inst::Cluster(Cluster::SetmaxnregInc(SetmaxnregInc { n }))
            if !(24..=256).contains(&n.0) || !n.0.is_multiple_of(8) =>
        {
            Some(format!("{} registers: use a multiple of 8 from 24 to 256", n.0))
        }
        Inst::Wgmma(Wgmma::WgmmaM64K16F32F16(i)) => {
            let (n, regs) = (i.n.0, i.d.0.len());
            if !(8..=256).contains(&n) || !n.is_multiple_of(8) {
                Some(format!("a product of {n} columns: use a multiple of 8 from 8 to 256"))
            } else if regs != n / 2 {
                Some(format!("{regs} accumulators for {n} columns: use {}", n / 2))
            } else {
                None
            }
        }
        Inst::CopyAsync(CopyAsync::CpAsyncCg16Zfill(i)) => copied(i.n, 16),
        Inst::CopyAsync(CopyAsync::CpAsyncCa4Zfill(i)) => copied(i.n, 4),
        _ => None,
    }
}

/// The first CUDA release whose driver speaks this version.
fn first_cuda_release(isa: PtxIsa) -> Option<(i32, i32)> {
    let releases = (11..100).flat_map(|major| (0..10).map(move |minor| (major, minor)));
    releases
        .into_iter()
        .find(|(major, minor)| PtxIsa::of_driver(1000 * major + 10 * minor) >= Some(isa))
}
