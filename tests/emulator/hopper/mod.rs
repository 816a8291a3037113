//! Programs in Hopper's instructions: what their tests share.
//!
//! A [`Pattern`] is a small kernel of the kind that real ones are made of, with its data and its answer. It
//! runs on every backend; in the emulator also with one instruction left out or weakened, see `mutants.rs`.

mod barriers;
mod clusters;
mod copies;
mod kernels;
mod mutants;
mod patterns;
mod patterns_cluster;
mod products;
mod tiles;

use makaira::asm::reg::{In, Reg, SharedAddr};
use makaira::asm::types::{B32, B64, Pred, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Backend, DevicePtr, Launch, Stream, Swizzle, TensorMap};
use makaira::emu::{EmuBackend, EmuError, Fault, FaultKind, Options};
use makaira::target::SmArch;

use super::common::Random;

/// What most programs want to know.
#[derive(Clone, Copy)]
pub struct Prelude {
    pub tid: Reg<B32>,
    pub lane: Reg<B32>,
    pub warp: Reg<B32>,
    pub smem: Reg<B32>,
}

/// A module for `sm_90a` with clusters of `cluster` CTAs; shared memory begins at a multiple of 1024.
pub fn module(threads: u32, cluster: u32, emit: impl FnOnce(&mut Asm, Prelude)) -> Module {
    let mut asm = Asm::new();
    asm.cluster = cluster;
    asm.smem.region("base", 16, 1024);
    let [tid, lane, warp, smem] = asm.regs();
    asm.mov_u32_special(tid, Special::TidX);
    asm.mov_u32_special(lane, Special::Laneid);
    asm.shr_u32(warp, tid, 5);
    // The same in all lanes, as the assembler can see.
    asm.shfl_sync_idx_b32(warp, warp, 0);
    asm.mov_u32_smem(smem);
    emit(&mut asm, Prelude { tid, lane, warp, smem });
    asm.exit();
    let module = asm.finish("test", SmArch::specific(90), threads, 1);
    module.verify().unwrap_or_else(|found| panic!("{found}"));
    module
}

/// The value of a pointer parameter.
pub fn pointer(asm: &mut Asm, name: &'static str) -> Reg<B64> {
    let param = asm.param_u64(name);
    let reg = asm.reg();
    asm.ld_param_u64(reg, param);
    reg
}

/// The address of a tensor map parameter.
pub fn map(asm: &mut Asm, name: &'static str) -> Reg<B64> {
    let param = asm.param_tensor_map(name);
    let reg = asm.reg();
    asm.cvta_param_u64(reg, param);
    reg
}

/// Spins until the phase of `parity` of a barrier has completed.
pub fn wait(asm: &mut Asm, bar: SharedAddr, parity: impl Into<In<B32>>) {
    let (again, done) = (asm.label("again"), asm.reg());
    asm.bind(again);
    asm.mbarrier_try_wait_parity_shared_cta_b64(done, bar, parity);
    asm.unless(done, |asm| asm.bra(again));
}

/// A predicate that holds in one lane of the warp.
pub fn elect(asm: &mut Asm) -> Reg<Pred> {
    let elected = asm.reg();
    asm.elect_sync(elected);
    elected
}

/// A predicate that holds in one lane of warp `warp`.
pub fn elect_in(asm: &mut Asm, p: Prelude, warp: u32) -> Reg<Pred> {
    let (elected, both) = (elect(asm), asm.reg());
    let is_warp = asm.test_u32(makaira::asm::types::Cmp::Eq, p.warp, warp);
    asm.and_pred(both, elected, is_warp);
    both
}

/// The descriptor of a K-major operand with the 128-byte swizzle at a shared address.
pub fn descriptor(asm: &mut Asm, address: Reg<B32>) -> Reg<B64> {
    let (units, desc) = (asm.reg(), asm.reg());
    asm.shr_u32(units, address, 4);
    asm.mad_wide_u32(desc, units, 1, 0x4000_0040_0001_0000u64);
    desc
}

/// The register plus a constant.
pub fn plus(asm: &mut Asm, base: Reg<B32>, bytes: u32) -> Reg<B32> {
    let sum = asm.reg();
    asm.add_u32(sum, base, bytes);
    sum
}

/// A backend with buffers.
pub struct Device<'a> {
    pub backend: &'a dyn Backend,
}

impl Device<'_> {
    pub fn upload<T: bytemuck::NoUninit>(&self, values: &[T]) -> DevicePtr {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let ptr = self.backend.alloc(bytes.len() as u64).expect("there is memory");
        self.backend.upload(ptr, bytes).expect("it fits");
        ptr
    }

    pub fn alloc(&self, bytes: usize) -> DevicePtr {
        self.backend.alloc(bytes as u64).expect("there is memory")
    }

    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(
        &self,
        ptr: DevicePtr,
        len: usize,
    ) -> Vec<T> {
        let mut values = vec![T::zeroed(); len];
        self.backend.download(ptr, bytemuck::cast_slice_mut(&mut values)).expect("it is there");
        values
    }
}

/// Makes the data of a run.
pub type Setup = Box<dyn Fn(&Device<'_>, &mut Random) -> Case>;

/// A kernel of a real kind.
pub struct Pattern {
    pub name: &'static str,
    pub module: Module,
    pub grid: [u32; 2],
    /// Uploads the data; gives the arguments and what the buffer of results must hold.
    pub setup: Setup,
}

/// The data of a run.
pub struct Case {
    pub args: Vec<Arg>,
    /// What the grid before this one writes: buffers and their 32-bit words.
    pub written: Vec<(DevicePtr, usize)>,
    pub result: DevicePtr,
    pub expected: Vec<u32>,
}

/// What came of a run.
#[derive(Debug)]
#[allow(dead_code)] // What differs is for the reports.
pub enum Outcome {
    Right,
    Wrong { word: usize, got: u32, expected: u32 },
    Fault(Box<Fault>),
}

impl Pattern {
    /// Runs `module`, which is the pattern's or a mutant of it.
    pub fn run(&self, backend: &dyn Backend, module: &Module, early: bool, seed: u64) -> Outcome {
        let device = Device { backend };
        let case = (self.setup)(&device, &mut Random(seed));
        let kernel = backend.load(module).unwrap_or_else(|e| {
            panic!("{}: {}", self.name, std::error::Error::source(&e).expect("a cause"))
        });
        for (buffer, words) in &case.written {
            rewrite(backend, *buffer, *words);
        }
        let launch = Launch {
            overlap_previous: early,
            ..Launch::new(self.grid, &case.args, Stream::default())
        };
        let done = backend
            .launch(kernel.as_ref(), &launch)
            .and_then(|()| backend.synchronize(Stream::default()));
        if let Err(error) = done {
            return match fault_of(&error) {
                Some(fault) => Outcome::Fault(Box::new(fault)),
                None => panic!("{}: {error}: {:?}", self.name, error.source),
            };
        }
        let got: Vec<u32> = device.download(case.result, case.expected.len());
        let differs = got.iter().zip(&case.expected).position(|(got, expected)| got != expected);
        match differs {
            None => Outcome::Right,
            Some(word) => Outcome::Wrong { word, got: got[word], expected: case.expected[word] },
        }
    }
}

/// Launches a grid that writes words over themselves.
pub fn rewrite(backend: &dyn Backend, buffer: DevicePtr, words: usize) {
    let program = module(32, 1, |asm, p| {
        let (param, base, place) = (asm.param_u64("buffer"), asm.reg::<B64>(), asm.reg::<B64>());
        asm.ld_param_u64(base, param);
        let cta = asm.reg();
        asm.mov_u32_special(cta, Special::CtaidX);
        asm.mad_lo_u32(cta, cta, 32, p.lane);
        asm.mad_wide_u32(place, cta, 4, base);
        let word = asm.reg();
        let inside = asm.test_u32(makaira::asm::types::Cmp::Lt, cta, words as u32);
        asm.griddepcontrol_wait();
        asm.when(inside, |asm| {
            asm.ld_global_b32(word, place);
            asm.st_global_b32(place, word);
        });
        asm.griddepcontrol_launch_dependents();
    });
    let kernel = backend.load(&program).expect("it is sound");
    let args = [buffer.into()];
    let launch = Launch::new([words.div_ceil(32) as u32, 1], &args, Stream::default());
    backend.launch(kernel.as_ref(), &launch).expect("it runs");
}

/// An emulator whose turns a seed orders.
pub fn emulator(seed: Option<u64>) -> EmuBackend {
    let options = Options {
        seed,
        max_steps: 1 << 22,
        max_idle_steps: 1 << 20,
        // A mutant without its wait has to be seen to need it.
        early_without_wait: true,
        ..Options::default()
    };
    EmuBackend::h200_like(2).with_options(options)
}

/// The fault at the end of an error's causes.
pub fn fault_of(error: &(dyn std::error::Error + 'static)) -> Option<Fault> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(EmuError::Fault(fault)) = error.downcast_ref() {
            return Some((**fault).clone());
        }
        cause = error.source();
    }
    None
}

/// Launches on an emulator; what kind of fault it ends in, and its report.
pub fn launch(
    backend: &EmuBackend,
    module: &Module,
    grid: [u32; 2],
    args: &[Arg],
) -> Option<(FaultKind, String)> {
    let kernel = backend.load(module).expect("it was verified");
    let done = backend.launch(kernel.as_ref(), &Launch::new(grid, args, Stream::default()));
    done.err().map(|error| {
        let fault = fault_of(&error).unwrap_or_else(|| panic!("{error}: {:?}", error.source));
        (fault.kind, fault.to_string())
    })
}

/// A program, and the faults of which it must end in one, in every order of turns; none if it is clean.
pub fn expect(what: &str, wanted: &[FaultKind], module: &Module, words: &[u32]) -> String {
    let mut report = String::new();
    for seed in [None, Some(1), Some(2)] {
        let backend = emulator(seed);
        let device = Device { backend: &backend };
        let args: Vec<Arg> = module
            .entry
            .params
            .iter()
            .map(|param| match param.bytes {
                8 => device.upload(words).into(),
                _ => Arg::TensorMap(TensorMap {
                    base: device.upload(words),
                    elements: [64, 8],
                    row_bytes: 128,
                    tile: [64, 8],
                    swizzle: Swizzle::B128,
                }),
            })
            .collect();
        let found = launch(&backend, module, [module.entry.cluster, 1], &args);
        let kind = found.as_ref().map(|(kind, _)| *kind);
        report = found.map(|(_, text)| text).unwrap_or_default();
        let is_wanted = match kind {
            None => wanted.is_empty(),
            Some(kind) => wanted.contains(&kind),
        };
        assert!(is_wanted, "{what}, {seed:?}: {kind:?}, not {wanted:?}: {report}");
    }
    report
}

/// All patterns.
pub fn patterns() -> Vec<Pattern> {
    vec![
        patterns::producer_and_consumers(),
        patterns::private_rings(),
        patterns_cluster::exchanged_sums(),
        patterns_cluster::multicast_pair(),
    ]
}

/// The assembler takes the patterns, and finds no product that it would have to serialise.
#[test]
fn patterns_assemble() {
    let Some(ptxas) = super::common::oracle::Ptxas::find() else { return };
    for pattern in patterns() {
        let built = ptxas.assemble(&pattern.module.to_string(), "sm_90a", &[]);
        let built = built.unwrap_or_else(|log| panic!("{}: {log}", pattern.name));
        assert!(!built.log.contains("C75"), "{}: {}", pattern.name, built.log);
        assert_eq!(built.spill_bytes, 0, "{}: {}", pattern.name, built.log);
    }
}

/// Every pattern is clean and right, on every backend, in many orders, begun early or not.
#[test]
fn patterns_are_clean_and_right() {
    for pattern in patterns() {
        for seed in [None, Some(1), Some(2), Some(3), Some(4), Some(5)] {
            for early in [false, true] {
                let backend = emulator(seed);
                let outcome = pattern.run(&backend, &pattern.module, early, seed.unwrap_or(77));
                assert!(
                    matches!(outcome, Outcome::Right),
                    "{} {seed:?}: {}",
                    pattern.name,
                    match outcome {
                        Outcome::Fault(fault) => fault.to_string(),
                        other => format!("{other:?}"),
                    }
                );
            }
        }
    }
    for (name, backend) in super::common::backends() {
        if backend.device().arch.sm != 90 {
            eprintln!("skipped: patterns for sm_90a on {name}, which is {}", backend.device().arch);
            continue;
        }
        for pattern in patterns() {
            for (seed, early) in (0..10).flat_map(|seed| [(seed, false), (seed, true)]) {
                let outcome = pattern.run(backend.as_ref(), &pattern.module, early, seed);
                let (what, is_right) = (pattern.name, matches!(outcome, Outcome::Right));
                assert!(is_right, "{what} on {name}, {seed}, {early}: {outcome:?}");
            }
        }
    }
}
