//! The real assembler on every configuration that the selection ships, and its machine code.
//!
//! Grid: the linear layers of two models and odd ones, every row tile, every group rule and row layout,
//! four targets. Each choice must assemble without spills or local memory, in registers and shared memory
//! that let as many CTAs share an SM as the configuration says. What the weave is for is then looked up in
//! the machine code: the main loop holds what the kernel's abstract counts, and no long run of one kind.
//! `MAKAIRA_ORACLE_ALL=1` looks at everything of which a sample is taken otherwise: the odd layers' choices, the
//! machine code of the wgmma family's candidates.

mod common;
#[path = "configs_oracle/experts.rs"]
mod experts;
#[path = "configs_oracle/invariant.rs"]
mod invariant;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::Random;
use common::family::{pairwise, wgmma};
use common::oracle::{Function, Nvdisasm, Ptxas, Sass};
use makaira::asm::Module;
use makaira::kernel::{self, Config, Conversion, Problem, Rows, select};
use makaira::target::{DeviceSpec, PtxIsa, SmArch};
use makaira::weights::{Activation, FORMATS, Group, ScaleRow, TILE_K};

/// Targets, each with the SMs of a well-known card and its L2 in MiB.
const TARGETS: [(u16, u32, u64); 4] = [(80, 108, 40), (86, 82, 6), (89, 128, 72), (90, 132, 50)];

/// The linear layers of two models: outputs and inputs.
const LAYERS: [(u32, u32); 8] = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
];

/// Layers that no tile divides.
const ODD_LAYERS: [(u32, u32); 4] = [(1000, 11008), (64, 128), (257, 4000), (152064, 3584)];

/// One batch for each row tile, and a large one.
const BATCHES: [u64; 9] = [1, 2, 4, 8, 16, 32, 48, 64, 1024];

fn device(sm: u16, num_sms: u32, l2_mib: u64) -> DeviceSpec {
    let arch = SmArch::baseline(sm);
    DeviceSpec {
        name: format!("{num_sms} SMs of {arch}"),
        arch,
        isa: PtxIsa::new(9, 0),
        num_sms,
        l2_bytes: l2_mib << 20,
        smem_per_cta_bytes: arch.spec().expect("in the table").smem_per_cta_bytes,
    }
}

/// The choices for some problems on a device.
fn choices(
    device: &DeviceSpec,
    layers: &[(u32, u32)],
    groups: &[Group],
    rows: &[Rows],
) -> BTreeSet<Config> {
    let mut choices = BTreeSet::new();
    for (n, k) in layers {
        for m in BATCHES {
            for group in groups {
                for rows in rows {
                    let problem = Problem {
                        kind: kernel::Kind::U4B8,
                        m,
                        n: *n,
                        k: *k,
                        group: *group,
                        rows: *rows,
                    };
                    let choice = select::choose(&problem, device);
                    choices.insert(choice.unwrap_or_else(|error| panic!("{error}")).config);
                }
            }
        }
    }
    choices
}

/// What is shipped for a target, and what odd layers add to that.
fn shipped(device: &DeviceSpec) -> (BTreeSet<Config>, BTreeSet<Config>) {
    let two = [Group::PerColumn, Group::Size(128)];
    let all = [Group::PerColumn, Group::Size(32), Group::Size(64), Group::Size(128)];
    let shipped = choices(device, &LAYERS, &two, &[Rows::Whole]);
    let rows = [Rows::Whole, Rows::Vector, Rows::Element];
    let odd = choices(device, &ODD_LAYERS, &all, &rows);
    let odd = odd.difference(&shipped).copied().collect();
    (shipped, odd)
}

/// Calls `work` on every item, on all processors; what it complained of.
fn on_all_processors<T: Sync>(items: &[T], work: impl Fn(&T) -> Vec<String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let complaints = work(item);
                    found.lock().expect("no thread panicked").extend(complaints);
                }
            });
        }
    });
    found.into_inner().expect("no thread panicked")
}

/// What is wrong with an assembled configuration, and with its main loop if `listing` can be made.
fn complaints(
    ptxas: &Ptxas,
    listing: Option<&Nvdisasm>,
    config: &Config,
    target: SmArch,
) -> Vec<String> {
    if config.family == "sm90wg" {
        return wgmma_complaints(ptxas, listing, config);
    }
    let family = select::family_of(config);
    let module = family.build(config, target);
    let name = format!("{target} {config}");
    let assembled = match ptxas.assemble(&module.to_string(), &target.to_string(), &[]) {
        Ok(assembled) => assembled,
        Err(log) => return vec![format!("{name}: {log}")],
    };
    let spec = target.spec().expect("in the table");
    let smem = module.entry.smem.bytes();
    let fit = spec.ctas_that_fit(config.num_threads(), assembled.regs, smem);
    let mut complaints = Vec::new();
    if assembled.spill_bytes + assembled.stack_bytes > 0 {
        complaints.push(format!(
            "{} bytes of spills, {} of stack, with {} registers",
            assembled.spill_bytes, assembled.stack_bytes, assembled.regs
        ));
    }
    if fit < config.ctas_per_sm {
        complaints.push(format!("{} registers and {smem} bytes: {fit} CTAs fit", assembled.regs));
    }
    if assembled.smem_bytes != 0 || smem != family.smem_bytes(config) {
        complaints.push(format!("{} static and {smem} dynamic bytes", assembled.smem_bytes));
    }
    if let Some(nvdisasm) = listing {
        let functions = nvdisasm.functions(&assembled.cubin);
        let kind = &config.kind;
        let instructions = kind.fragments().num_instructions(kind.activation) as usize;
        match functions.first().and_then(|function| function.main_loop("HMMA")) {
            Some(code) => {
                complaints.extend(Expected::of(config).differences(
                    unrolled(&module),
                    instructions,
                    code,
                ));
            }
            None => complaints.push("there is no loop with an HMMA".into()),
        }
    }
    complaints.into_iter().map(|what| format!("{name}: {what}")).collect()
}

/// Runs of a main loop: each has a section of its own.
fn unrolled(module: &Module) -> u32 {
    let sections = module.entry.sections.iter();
    sections.filter(|section| section.starts_with("main loop, ")).count() as u32
}

/// What one run of 128 inputs of a warp takes, if rows of A are whole.
#[derive(Debug, PartialEq, Eq)]
struct Expected {
    mma: u32,
    ldmatrix: u32,
    copies: u32,
    bulk_copies: u32,
    words: u32,
    scales: u32,
}

impl Expected {
    fn of(config: &Config) -> Self {
        let tiles = config.tiles_per_warp();
        let row_tiles = config.tile_m.div_ceil(8);
        let kind = config.kind.tile();
        let tile_bytes = kind.tile_bytes(config.group) as u32;
        let zeros = kind.zero_rows(config.group) as u32;
        let vectors = 2 * kind.words_per_fragment() as u32;
        // Scales of one byte come in one load: of 16 bytes a lane in groups of 16, of 8 in groups of 32.
        let (wide, narrow) = match (config.group, kind.scales) {
            (Group::PerColumn, _) => (0, 0),
            (Group::Size(size), ScaleRow::F16) => (0, TILE_K as u32 / size),
            (Group::Size(16), ScaleRow::E5m3) => (1, 0),
            (_, ScaleRow::E5m3) => (0, 1),
        };
        // A warp copies two rows an instruction, as many warps as are a power of two.
        let rows = config.tile_m.div_ceil(2 << config.warps_n.ilog2());
        let weights = (tiles * tile_bytes).div_ceil(512);
        // Sums of the batch for the zero of bare codes: two of its eight fragments a row tile at a time.
        let bias = match config.conversion {
            Conversion::Value => 0,
            Conversion::Subnormal => 4 * row_tiles,
        };
        let (copies, bulk_copies) = match config.family {
            "sm90" => (rows, tiles.div_ceil(4)),
            _ => (weights + rows, 0),
        };
        Self {
            mma: 8 * tiles * row_tiles + bias,
            // Eight 16 x 8 matrices of halves a row tile, two an instruction.
            ldmatrix: 4 * row_tiles,
            copies,
            bulk_copies,
            words: (vectors + wide) * tiles,
            scales: (narrow + zeros) * tiles,
        }
    }

    /// How a main loop of `runs` runs differs, and where it is not woven.
    /// `instructions` are those that the conversion of a fragment takes.
    fn differences(&self, runs: u32, instructions: usize, code: &[Sass]) -> Vec<String> {
        let count = |matches: &dyn Fn(&str) -> bool| {
            code.iter().filter(|sass| matches(sass.opcode())).count() as u32
        };
        let found = Self {
            mma: count(&|op| op.starts_with("HMMA.16816")),
            ldmatrix: count(&|op| op.starts_with("LDSM.16.M88.4")),
            copies: count(&|op| op.starts_with("LDGSTS") && op.contains(".128")),
            bulk_copies: count(&|op| op.starts_with("UBLKCP")),
            words: count(&|op| op == "LDS.128"),
            // The assembler guards a run's copies with up to three loads into nowhere.
            scales: code
                .iter()
                .filter(|sass| {
                    ["LDS", "LDS.64"].contains(&sass.opcode()) && !sass.text.contains("RZ,")
                })
                .count() as u32,
        };
        let expected = Self {
            mma: runs * self.mma,
            ldmatrix: runs * self.ldmatrix,
            copies: runs * self.copies,
            bulk_copies: runs * self.bulk_copies,
            words: runs * self.words,
            scales: runs * self.scales,
        };
        let mut differences = Vec::new();
        if found != expected {
            differences.push(format!("a loop of {runs} runs has {found:?}, not {expected:?}"));
        }
        let [copies, guards] = [count(&|op| op.starts_with("LDGSTS")), count(&|op| op == "LDS")];
        // A fence before a slot is copied over, and up to four such loads before it.
        let fences = count(&|op| op.starts_with("FENCE.VIEW.ASYNC"));
        if copies != found.copies || guards > found.scales + 3 * runs + 4 * fences {
            differences.push(format!("{copies} copies of any width, {guards} narrow loads"));
        }
        if fences != if found.bulk_copies > 0 { runs } else { 0 } {
            differences.push(format!("{fences} proxy fences in {runs} runs"));
        }
        for kind in [Kind::Convert, Kind::Mma, Kind::Shared] {
            let longest = longest(code, kind);
            if longest > kind.most_together(instructions) {
                differences.push(format!("{longest} of {kind:?} stand together"));
            }
        }
        differences
    }
}

/// What the weave mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Dequantisation.
    Convert,
    Mma,
    Shared,
    Other,
}

impl Kind {
    fn of(sass: &Sass) -> Self {
        let is = |prefixes: &[&str]| prefixes.iter().any(|p| sass.opcode().starts_with(p));
        match () {
            () if is(&["LOP3", "HADD2", "HFMA2", "HMUL2", "PRMT", "SHF"]) => Self::Convert,
            () if is(&["HMMA"]) => Self::Mma,
            () if is(&["LDS"]) => Self::Shared,
            () => Self::Other,
        }
    }

    /// How many may stand together: a quarter more than the most in any choice when the limits were set.
    /// Without a weave there are hundreds: a run of 64 channels converts 32 words by 9 instructions, or as many as the
    /// weight type takes.
    fn most_together(self, instructions: usize) -> usize {
        match self {
            Self::Convert => 38 * instructions.max(9) / 9,
            Self::Mma => 32,
            Self::Shared => 13,
            Self::Other => usize::MAX,
        }
    }
}

/// The longest run of one kind.
fn longest(code: &[Sass], kind: Kind) -> usize {
    code.chunk_by(|a, b| Kind::of(a) == Kind::of(b))
        .filter(|run| Kind::of(&run[0]) == kind)
        .map(<[Sass]>::len)
        .max()
        .unwrap_or(0)
}

/// Whether samples are not enough.
fn all_are_wanted() -> bool {
    std::env::var_os("MAKAIRA_ORACLE_ALL").is_some_and(|value| value != "0")
}

fn report(found: &[String], of: usize) {
    let first = found[..found.len().min(30)].join("\n");
    assert!(found.is_empty(), "{} of {of}:\n{first}", found.len());
}

#[test]
fn every_shipped_choice_assembles_and_is_woven() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut work = Vec::new();
    for (sm, num_sms, l2) in TARGETS {
        let device = device(sm, num_sms, l2);
        let (shipped, _) = shipped(&device);
        work.extend(shipped.into_iter().map(|config| (config, device.arch)));
    }
    eprintln!("{} configurations and targets", work.len());
    assert!(work.len() > 60, "only {}", work.len());
    let found = on_all_processors(&work, |(config, arch)| {
        complaints(&ptxas, Some(&nvdisasm), config, *arch)
    });
    report(&found, work.len());
}

/// Hopper's families, whether or not the selection prefers another: the best-ranked choices of each conversion.
#[test]
fn choices_of_hoppers_families_assemble_and_are_woven() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let device = device(90, 132, 50);
    let mut work = BTreeSet::new();
    for (n, k) in LAYERS {
        for m in [1, 2, 4, 8, 16] {
            for group in [Group::PerColumn, Group::Size(128)] {
                let problem =
                    Problem { kind: kernel::Kind::U4B8, m, n, k, group, rows: Rows::Whole };
                let ranked = select::ranked(&problem, &device);
                for conversion in [Conversion::Value, Conversion::Subnormal] {
                    let ours = ranked.iter().map(|choice| choice.config).filter(|config| {
                        config.family == "sm90" && config.conversion == conversion
                    });
                    work.extend(ours.take(3));
                }
            }
        }
    }
    let work: Vec<Config> = work.into_iter().collect();
    assert!(work.len() > 40, "only {}", work.len());
    let found =
        on_all_processors(&work, |config| complaints(&ptxas, Some(&nvdisasm), config, device.arch));
    report(&found, work.len());
}

/// Kinds of products: every weight type with fp16 and bf16 activations, scales as checkpoints have them, and what can
/// be added.
fn kinds() -> Vec<(kernel::Kind, Vec<Group>)> {
    let mut kinds = Vec::new();
    for format in FORMATS {
        for activation in [Activation::F16, Activation::Bf16] {
            let plain = kernel::Kind { format: format.name(), activation, ..kernel::Kind::U4B8 };
            let exponent = format.fragments().expect("a conversion").exponent(activation);
            let kind = kernel::Kind { factor: exponent > 0, ..plain };
            let groups = vec![Group::PerColumn, Group::Size(32), Group::Size(128)];
            match format.name() {
                "e2m1" => {
                    let kind = kernel::Kind { scales: ScaleRow::E5m3, ..kind };
                    kinds.push((kind, vec![Group::Size(16), Group::Size(32)]));
                }
                "u4b8" if activation == Activation::F16 => {
                    let added = kernel::Kind { factor: true, bias: true, residual: true, ..kind };
                    kinds.push((added, groups));
                }
                _ => kinds.push((kind, groups)),
            }
        }
    }
    kinds
}

/// The choices for every weight and activation type, in decoding and in prefill, and for each family of a card the best
/// one of its own.
#[test]
fn every_kind_assembles_and_is_woven() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut work = BTreeSet::new();
    for (sm, num_sms, l2) in [TARGETS[0], TARGETS[3]] {
        let device = device(sm, num_sms, l2);
        for (kind, groups) in kinds() {
            for m in [1, 8, 16, 64, 1024] {
                for (idx, group) in groups.iter().enumerate() {
                    let (n, k, group) = (4096, 4096, *group);
                    if !all_are_wanted()
                        && ![(1, 0), (16, 1), (1024, groups.len() - 1)].contains(&(m, idx))
                    {
                        continue;
                    }
                    let problem = Problem { kind, m, n, k, group, rows: Rows::Whole };
                    let mut families = BTreeSet::new();
                    for choice in select::ranked(&problem, &device) {
                        if families.insert(choice.config.family) {
                            work.insert((choice.config, device.arch));
                        }
                    }
                    assert!(!families.is_empty(), "{problem}");
                }
            }
        }
    }
    let work: Vec<(Config, SmArch)> = work.into_iter().collect();
    eprintln!("{} configurations and targets", work.len());
    let found = on_all_processors(&work, |(config, arch)| {
        complaints(&ptxas, Some(&nvdisasm), config, *arch)
    });
    report(&found, work.len());
}

/// The kernel that gathers activations, for every target.
#[test]
fn the_gathering_kernel_assembles() {
    let Some(ptxas) = Ptxas::find() else { return };
    for (sm, ..) in TARGETS {
        let target = SmArch::baseline(sm);
        let module = kernel::gather::build(target);
        module.verify().unwrap_or_else(|found| panic!("{target}: {found}"));
        let assembled = ptxas.assemble(&module.to_string(), &target.to_string(), &[]);
        let assembled = assembled.unwrap_or_else(|log| panic!("{target}: {log}"));
        assert_eq!((assembled.spill_bytes, assembled.stack_bytes), (0, 0), "{target}");
        assert!(assembled.regs <= 64, "{target}: {} registers", assembled.regs);
    }
}

/// What is wrong with an assembled configuration of the wgmma family. Its products must overlap: the assembler
/// serialises those that it cannot follow, and says so. A descriptor that it does not know to be the same in
/// all lanes costs two `R2UR` a product.
fn wgmma_complaints(ptxas: &Ptxas, listing: Option<&Nvdisasm>, config: &Config) -> Vec<String> {
    let family = select::family_of(config);
    let module = family.build(config, SmArch::specific(90));
    let assembled = match ptxas.assemble(&module.to_string(), "sm_90a", &[]) {
        Ok(assembled) => assembled,
        Err(log) => return vec![format!("{config}: {log}")],
    };
    let mut complaints = Vec::new();
    let spec = SmArch::baseline(90).spec().expect("in the table");
    let smem = module.entry.smem.bytes();
    let fit = spec.ctas_that_fit(config.num_threads(), assembled.regs, smem);
    if fit < config.ctas_per_sm {
        complaints.push(format!("{} registers and {smem} bytes: {fit} CTAs fit", assembled.regs));
    }
    if assembled.spill_bytes + assembled.stack_bytes > 0 {
        let (spills, stack) = (assembled.spill_bytes, assembled.stack_bytes);
        complaints.push(format!("{spills} bytes of spills, {stack} of stack"));
    }
    if let Some(message) = assembled.log.lines().find(|line| line.contains("(C75")) {
        complaints.push(message.to_owned());
    }
    if let Some(nvdisasm) = listing {
        complaints.extend(products_differences(config, &nvdisasm.functions(&assembled.cubin)));
    }
    complaints.into_iter().map(|what| format!("{config}: {what}")).collect()
}

/// How the loop that has a stage's products differs from what it should be.
fn products_differences(config: &Config, functions: &[Function]) -> Vec<String> {
    // The end of a segment adds products of its own to the loop around this one.
    let tiles = (config.runs_per_stage * config.tiles_per_warp()) as usize;
    let products = 8 * tiles;
    let Some(code) = functions.first().and_then(|function| function.loop_of(products, "HGMMA"))
    else {
        return vec![format!("there is no loop with {products} HGMMAs")];
    };
    let count = |opcode| code.iter().filter(|sass| sass.opcode().starts_with(opcode)).count();
    let (moves, words) = (count("R2UR"), count("LDS.128"));
    let mut differences = Vec::new();
    if moves > products {
        differences.push(format!("{moves} R2UR for {products} products"));
    }
    let kind = config.kind.tile();
    let wide = kind.scales == ScaleRow::E5m3 && config.group == Group::Size(16);
    let expected = (2 * kind.words_per_fragment() + usize::from(wide)) * tiles;
    if words != expected {
        differences.push(format!("{words} loads of words for {tiles} tiles, not {expected}"));
    }
    differences
}

/// What the wgmma family proposes for the layers.
fn wgmma_candidates() -> BTreeSet<Config> {
    let mut configs = BTreeSet::new();
    for (n, k) in LAYERS {
        for m in [16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 1024] {
            for group in [Group::PerColumn, Group::Size(64), Group::Size(128)] {
                let problem =
                    Problem { kind: kernel::Kind::U4B8, m, n, k, group, rows: Rows::Whole };
                let candidates = select::candidates(&problem, SmArch::baseline(90)).into_iter();
                configs.extend(candidates.filter(|config| config.family == "sm90wg"));
            }
        }
    }
    configs
}

#[test]
fn warpgroup_products_overlap() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut random = Random(3);
    let picked = pairwise(&wgmma(), |bound| random.below(bound as u32) as usize);
    let candidates = wgmma_candidates();
    eprintln!("{} picked configurations, {} candidates", picked.len(), candidates.len());
    assert!(picked.len() > 40 && candidates.len() > 100, "too few");
    // A sample of the candidates, and of those fewer are disassembled, which is the slow part.
    let (step, listed_step) = if all_are_wanted() { (1, 1) } else { (3, 7) };
    let listed = picked.into_iter().chain(candidates.iter().copied().step_by(listed_step));
    let mut work: BTreeMap<Config, bool> =
        candidates.iter().step_by(step).map(|config| (*config, false)).collect();
    work.extend(listed.map(|config| (config, true)));
    let work: Vec<(Config, bool)> = work.into_iter().collect();
    let found = on_all_processors(&work, |(config, listed)| {
        wgmma_complaints(&ptxas, listed.then_some(&nvdisasm), config)
    });
    report(&found, work.len());
}

#[test]
fn choices_for_odd_layers_assemble() {
    let Some(ptxas) = Ptxas::find() else { return };
    let all = all_are_wanted();
    let mut work = Vec::new();
    for (sm, num_sms, l2) in TARGETS {
        let device = device(sm, num_sms, l2);
        let (_, odd) = shipped(&device);
        let odd = odd.into_iter().step_by(if all { 1 } else { 10 });
        work.extend(odd.map(|config| (config, device.arch)));
    }
    eprintln!("{} configurations and targets", work.len());
    assert!(work.len() > 20, "only {}", work.len());
    let found = on_all_processors(&work, |(config, arch)| complaints(&ptxas, None, config, *arch));
    report(&found, work.len());
}

/// The measures can fail: a main loop whose weave is undone, one with a copy too many, one that spills.
#[test]
fn a_main_loop_that_is_not_woven_is_told() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let name = "marlin_sm80_u4b8_f16_m16n128k256_g128_w4_s3_c1";
    let config: Config = name.parse().expect("a name");
    let module = select::family_of(&config).build(&config, SmArch::baseline(90));
    let assembled = ptxas.assemble(&module.to_string(), "sm_90", &[]).expect("it is correct");
    let functions = nvdisasm.functions(&assembled.cubin);
    let code = functions[0].main_loop("HMMA").expect("a main loop");
    let expected = Expected::of(&config);
    assert_eq!(expected.differences(3, 9, code), Vec::<String>::new());
    let mut sorted = code.to_vec();
    sorted.sort_by_key(|sass| Kind::of(sass) as u32);
    let told = expected.differences(3, 9, &sorted);
    assert_eq!(told.len(), 3, "each kind stands together: {told:?}");
    assert!(!expected.differences(3, 9, &code[..code.len() / 2]).is_empty());
    assert!(!expected.differences(4, 9, code).is_empty());
    // Half of the registers.
    let text = module.to_string();
    let tight = ptxas.assemble(&text, "sm_90", &["-maxrregcount=64"]);
    assert!(tight.is_err() || tight.is_ok_and(|tight| tight.spill_bytes > 0 || tight.regs > 64));
}
