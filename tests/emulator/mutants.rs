//! The checker bites on real kernels: without any one of its barriers, waits, commits and flag orders a
//! shipped kernel is reported.
//!
//! A backend that edits the module before the emulator loads it stands between the library and the
//! emulator, so everything else runs as it does for a user. Each mutant leaves out or weakens one
//! instruction; the emulator must report it from what the accesses are, whatever the values came out as.

use std::sync::{Arc, Mutex};

use half::f16;
use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::alu::{Alu, MovB32, XorB32};
use makaira::asm::isa::async_copy::{CopyAsync, CpAsyncWaitGroup};
use makaira::asm::isa::mem::{LdRelaxedGpuGlobalU32, Mem, RedRelaxedGpuGlobalAddU32, StGlobalB32};
use makaira::asm::isa::sync::Sync;
use makaira::asm::isa::{Effect, Inst};
use makaira::asm::reg::{Imm, In};
use makaira::backend::{Backend, DevicePtr, Error, Kernel, Launch, Stream};
use makaira::emu::{Category, EmuBackend, EmuError, Fault, LaunchReport, Options};
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::{Config, Kind, Problem, select};
use makaira::target::DeviceSpec;
use makaira::weights::{Dense, PackedWeights, quantize};

/// What an instruction is replaced by: `Some(None)` leaves it out, `None` leaves it alone.
fn weakened(config: &Config, inst: &Inst) -> Vec<Option<Inst>> {
    match inst {
        Inst::Sync(Sync::BarSync(_) | Sync::BarSyncN(_)) => vec![None],
        // Kernels of tall tiles (four row tiles and more) keep loads in their window of the weave by warp barriers: those order
        // nothing that CTA barriers do not.
        Inst::Sync(Sync::BarWarpSync(_)) if config.tile_m < 32 => vec![None],
        // The wait for all that follows the main loop meets only empty groups.
        Inst::CopyAsync(CopyAsync::CpAsyncWaitGroup(CpAsyncWaitGroup { n: Imm(0) })) => Vec::new(),
        Inst::CopyAsync(CopyAsync::CpAsyncCommitGroup(_)) => vec![None],
        Inst::CopyAsync(CopyAsync::CpAsyncWaitGroup(wait)) => {
            vec![None, Some(CpAsyncWaitGroup { n: Imm(wait.n.0 + 1) }.into())]
        }
        Inst::Mem(Mem::LdAcquireGpuGlobalU32(load)) => {
            vec![Some(LdRelaxedGpuGlobalU32 { d: load.d, a: load.a }.into())]
        }
        Inst::Mem(Mem::RedReleaseGpuGlobalAddU32(red)) => {
            vec![Some(RedRelaxedGpuGlobalAddU32 { a: red.a, b: red.b }.into())]
        }
        Inst::Mem(Mem::StReleaseGpuGlobalU32(store)) => {
            vec![Some(StGlobalB32 { a: store.a, b: store.b }.into())]
        }
        Inst::Mem(Mem::FenceAcqRelGpu(_)) => vec![None],
        _ => Vec::new(),
    }
}

fn is_barrier(item: &Item) -> bool {
    let Item::Inst(node) = item else { return false };
    matches!(node.inst, Inst::Sync(Sync::BarSync(_) | Sync::BarSyncN(_)))
}

/// Whether an item neither touches memory nor changes the flow of control.
fn is_plain(item: &Item) -> bool {
    match item {
        Item::Inst(node) => node.inst.row().effect == Effect::Pure,
        Item::Section(_) => true,
        Item::Label(_) => false,
    }
}

/// A barrier that follows barrier `index` with no access between: parts of a kernel that follow each other
/// may each bring their own. One of the two is spare, so both are left out together.
fn next_barrier(module: &Module, index: usize) -> Option<usize> {
    let items = &module.entry.items;
    let next = index + 1 + items[index + 1..].iter().position(|item| !is_plain(item))?;
    (is_barrier(&items[index]) && is_barrier(&items[next])).then_some(next)
}

fn previous_barrier(module: &Module, index: usize) -> Option<usize> {
    let items = &module.entry.items;
    let previous = items[..index].iter().rposition(|item| !is_plain(item))?;
    (is_barrier(&items[index]) && is_barrier(&items[previous])).then_some(previous)
}

/// What is done to a module.
#[derive(Clone, Copy, PartialEq)]
pub enum Mutation {
    None,
    /// One instruction is weakened: the n-th that can be, counted over the module, if there are so many.
    Weakened(usize),
    /// Every exclusive or of two registers passes its first operand on: kernels use it for swizzles only.
    Unswizzled,
}

/// An emulator that loads mutants.
struct Mutating {
    inner: EmuBackend,
    edit: Edit,
    /// What was mutated.
    mutated: Mutex<Option<String>>,
}

/// Changes a module; what it changed, in words, if it found it.
pub type Edit = Box<dyn Fn(&mut Module) -> Option<String> + Send + std::marker::Sync>;

impl Mutation {
    /// The mutation of a configuration's kernel.
    fn edit(self, config: Config) -> Edit {
        Box::new(move |mutant| match self {
            Mutation::None => None,
            Mutation::Weakened(which) => Self::weaken(&config, mutant, which),
            Mutation::Unswizzled => {
                let mut found = None;
                for item in &mut mutant.entry.items {
                    if let Item::Inst(node) = item
                        && let Inst::Alu(Alu::XorB32(XorB32 { d, a, b: In::Reg(_) })) = node.inst
                    {
                        node.inst = MovB32 { d, a }.into();
                        found = Some("swizzle".into());
                    }
                }
                found
            }
        })
    }

    fn weaken(config: &Config, mutant: &mut Module, which: usize) -> Option<String> {
        let mut count = 0;
        for index in 0..mutant.entry.items.len() {
            let Item::Inst(node) = mutant.entry.items[index] else { continue };
            let covered = previous_barrier(mutant, index).is_some();
            for replacement in weakened(config, &node.inst) {
                if covered {
                    break;
                }
                if count == which {
                    let section = &mutant.entry.sections[node.section as usize];
                    let now = replacement.map_or("nothing".into(), |inst| inst.to_string());
                    let what =
                        format!("`{}` becomes `{now}` in {section}, {}", node.inst, node.emitter);
                    match replacement {
                        Some(inst) => {
                            mutant.entry.items[index] = Item::Inst(Node { inst, ..node });
                        }
                        None => {
                            if let Some(twin) = next_barrier(mutant, index) {
                                mutant.entry.items.remove(twin);
                            }
                            mutant.entry.items.remove(index);
                        }
                    }
                    return Some(what);
                }
                count += 1;
            }
        }
        None
    }
}

impl Backend for Mutating {
    fn device(&self) -> &DeviceSpec {
        self.inner.device()
    }
    fn alloc(&self, bytes: u64) -> Result<DevicePtr, Error> {
        self.inner.alloc(bytes)
    }
    fn free(&self, ptr: DevicePtr) -> Result<(), Error> {
        self.inner.free(ptr)
    }
    fn upload(&self, ptr: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
        self.inner.upload(ptr, bytes)
    }
    fn download(&self, ptr: DevicePtr, bytes: &mut [u8]) -> Result<(), Error> {
        self.inner.download(ptr, bytes)
    }
    fn load(&self, module: &Module) -> Result<Arc<dyn Kernel>, Error> {
        let mut mutant = module.clone();
        let mutated = (self.edit)(&mut mutant);
        *self.mutated.lock().expect("no thread panicked") = mutated;
        self.inner.load(&mutant)
    }
    fn launch(&self, kernel: &dyn Kernel, launch: &Launch<'_>) -> Result<(), Error> {
        self.inner.launch(kernel, launch)
    }
    fn synchronize(&self, stream: Stream) -> Result<(), Error> {
        self.inner.synchronize(stream)
    }
}

/// The fault at the end of an error's causes.
fn fault_of(error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(EmuError::Fault(fault)) = error.downcast_ref() {
            return Some((**fault).clone());
        }
        cause = error.source();
    }
    None
}

/// What came of a mutant.
pub struct Outcome {
    /// What was mutated.
    pub mutated: Option<String>,
    pub fault: Option<Fault>,
    pub report: Option<LaunchReport>,
}

/// A configuration and a product.
pub struct Case {
    pub name: &'static str,
    pub m: u64,
    pub n: usize,
    pub k: usize,
    pub stripe: u32,
}

impl Case {
    /// Runs a mutant.
    fn run(&self, packed: &PackedWeights, mutation: Mutation) -> Outcome {
        let config: Config = self.name.parse().expect("the name of a configuration");
        let options = Options { max_idle_steps: 200_000, max_steps: 4 << 20, ..Options::default() };
        self.run_edited(packed, mutation.edit(config), options)
    }

    /// Runs a kernel that `edit` has changed.
    pub fn run_edited(&self, packed: &PackedWeights, edit: Edit, options: Options) -> Outcome {
        let overlap = options.overlap;
        let inner = EmuBackend::h200_like(4).with_options(options);
        let config: Config = self.name.parse().expect("the name of a configuration");
        let backend = Arc::new(Mutating { inner, edit, mutated: Mutex::new(None) });
        let gemm = Gemm::new(backend.clone());
        let weight = gemm.upload(packed).expect("the weight fits");
        let a: Vec<f16> =
            (0..self.m as usize * self.k).map(|i| f16::from_f32((i % 13) as f32 - 6.0)).collect();
        let a_ptr = backend.alloc(2 * a.len() as u64).expect("the matrix fits");
        backend.upload(a_ptr, bytemuck::cast_slice(&a)).expect("the range is allocated");
        if overlap {
            // The activations come from a grid that may still run.
            super::hopper::rewrite(&backend.inner, a_ptr, a.len() / 2);
        }
        let c_ptr = backend.alloc(2 * self.m * self.n as u64).expect("the matrix fits");
        let (n, k) = (self.n as u32, self.k as u32);
        let problem =
            Problem { kind: Kind::U4B8, m: self.m, n, k, group: config.group, rows: config.rows };
        let cost = select::cost(&config, &problem, backend.device(), self.stripe);
        let choice = select::Choice { config, stripe: self.stripe, cost };
        let prepared = gemm.prepare_choice(choice).expect("the configuration is legal");
        let plans: Vec<_> = select::plans(&config, &problem, self.stripe).collect();
        let scratch = plans.iter().map(|plan| plan.scratch_bytes).max().unwrap_or(0);
        let locks = plans.iter().map(|plan| plan.num_locks).max().unwrap_or(0);
        assert!(locks > 0, "{}: the case must reduce over CTAs", self.name);
        let workspace = gemm.workspace_of(scratch, locks).expect("the workspace fits");
        let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
        let (a, c) = (matrix(a_ptr, self.k), matrix(c_ptr, self.n));
        let run = gemm.matmul_with(&prepared, a, &weight, c, self.m, &workspace, Stream::default());
        let fault = run.err().map(|error| fault_of(&error).expect("only faults end a launch"));
        let mutated = backend.mutated.lock().expect("no thread panicked").take();
        Outcome { mutated, fault, report: backend.inner.last_report() }
    }

    /// The weights of the product.
    pub fn packed(&self) -> PackedWeights {
        let config: Config = self.name.parse().expect("the name of a configuration");
        let dense: Vec<f32> = (0..self.n * self.k).map(|i| (i % 17) as f32 - 8.0).collect();
        let dense = Dense::F32(bytemuck::cast_slice(&dense));
        let quantized =
            quantize(dense, self.n, self.k, config.group, 1).expect("the weights are finite");
        PackedWeights::pack(&quantized.view(), 1).expect("the sizes are legal")
    }

    /// Runs all mutants: those that were not reported as a bug of the kernel.
    fn survivors(&self) -> Vec<String> {
        let packed = self.packed();
        if let Some(fault) = self.run(&packed, Mutation::None).fault {
            panic!("{} has a fault as it is:\n{fault}", self.name);
        }
        let (mut survivors, mut spare) = (Vec::new(), 0);
        for which in 0.. {
            let outcome = self.run(&packed, Mutation::Weakened(which));
            let Some(mutated) = outcome.mutated else {
                eprintln!("{}: {which} mutants, {spare} barrier spare", self.name);
                assert!(spare <= 1, "{}: only the epilogue's last barrier may be", self.name);
                assert!(which > 5, "{}: hardly any synchronisation was found", self.name);
                break;
            };
            match outcome.fault {
                Some(fault) if fault.kind.category() == Category::KernelBug => {}
                Some(fault) => survivors.push(format!("{mutated}: only {:?}", fault.kind)),
                // The last barrier of the epilogue frees the sums' memory for the ring. Where the sums lie
                // within one team's share of the slot and only that team reads them, nobody misses it.
                None if mutated.starts_with("`bar.sync 0;` becomes `nothing` in tile done, ") => {
                    spare += 1;
                }
                None => survivors.push(mutated),
            }
        }
        survivors
    }
}

fn case(name: &'static str, m: u64, n: usize, k: usize, stripe: u32) -> Case {
    Case { name, m, n, k, stripe }
}

/// Stripes longer than a tile, so that a CTA has several segments, some with more runs than the ring has
/// slots.
fn cases() -> [Case; 5] {
    [
        case("marlin_sm80_u4b8_f16_m8n64k512_g128_w1_s3_c1", 8, 192, 4096, 45),
        case("marlin_sm80_u4b8_f16_m16n128k512_g128_w2_s3_c1", 16, 384, 4096, 45),
        case("marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs", 64, 512, 2048, 21),
        case("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1, 192, 4096, 45),
        case("marlin_sm80_u4b8_f16_m16n64k512_col_w1_s3_c1_el", 16, 67, 4001, 45),
    ]
}

#[test]
fn every_synchronisation_of_a_kernel_is_needed() {
    let survivors: Vec<String> = cases().iter().flat_map(Case::survivors).collect();
    assert!(survivors.is_empty(), "not reported:\n{}", survivors.join("\n"));
}

/// The kernels have no bank conflict; without their swizzle the count shows it.
#[test]
fn every_swizzle_of_a_kernel_is_needed() {
    for case in cases() {
        let packed = case.packed();
        let [right, flat] = [Mutation::None, Mutation::Unswizzled].map(|m| case.run(&packed, m));
        assert!(flat.mutated.is_some(), "{}: no swizzle was found", case.name);
        let conflicts = |outcome: &Outcome| match (&outcome.report, &outcome.fault) {
            (Some(report), None) => report.total.conflict_wavefronts,
            (_, Some(fault)) => panic!("{}: {fault}", case.name),
            (None, None) => panic!("{}: nothing was launched", case.name),
        };
        eprintln!("{}: {} conflicts without the swizzle", case.name, conflicts(&flat));
        assert_eq!(conflicts(&right), 0, "{}", case.name);
        // A tile of one row has nothing to spread.
        let needed = case.m >= 8;
        assert!(!needed || conflicts(&flat) > 0, "{}: the count misses the swizzle", case.name);
    }
}
