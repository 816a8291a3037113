//! Small programs and their outcomes.

use makaira::asm::reg::{In, Param, Reg};
use makaira::asm::types::{B32, B64, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::Arg;
use makaira::emu::{EmuError, Fault, LaunchReport, Memory, Options};
use makaira::target::SmArch;

/// A program of one CTA size with the registers that most programs want.
pub struct Prelude {
    pub tid: Reg<B32>,
    pub smem: Reg<B32>,
}

/// A module for `threads` threads with `smem_bytes` of shared memory.
pub fn module(threads: u32, smem_bytes: u32, emit: impl FnOnce(&mut Asm, &Prelude)) -> Module {
    let mut asm = Asm::new();
    asm.smem.region("all", smem_bytes, 16);
    let prelude = Prelude { tid: asm.reg(), smem: asm.reg() };
    asm.mov_u32_special(prelude.tid, Special::TidX);
    asm.mov_u32_smem(prelude.smem);
    emit(&mut asm, &prelude);
    asm.exit();
    asm.finish("test", SmArch::baseline(80), threads, 1)
}

/// A register with the value of a pointer parameter.
pub fn pointer(asm: &mut Asm, name: &'static str) -> Reg<B64> {
    let param: Param = asm.param_u64(name);
    let reg = asm.reg();
    asm.ld_param_u64(reg, param);
    reg
}

/// `base + index * scale`, 64-bit.
pub fn element(asm: &mut Asm, base: Reg<B64>, index: Reg<B32>, scale: u32) -> Reg<B64> {
    let reg = asm.reg();
    asm.mad_wide_u32(reg, index, scale, base);
    reg
}

/// `base + index * scale`, 32-bit.
pub fn slot(asm: &mut Asm, base: Reg<B32>, index: Reg<B32>, scale: u32) -> Reg<B32> {
    let reg = asm.reg();
    asm.mad_lo_u32(reg, index, scale, base);
    reg
}

/// A register with the sum.
pub fn sum(asm: &mut Asm, a: impl Into<In<B32>>, b: impl Into<In<B32>>) -> Reg<B32> {
    let reg = asm.reg();
    asm.add_u32(reg, a, b);
    reg
}

/// Device buffers of one run.
pub struct Run {
    pub memory: Memory,
    pub args: Vec<Arg>,
    pub options: Options,
}

impl Run {
    pub fn new() -> Self {
        Self { memory: Memory::default(), args: Vec::new(), options: Options::default() }
    }

    /// Adds an argument: a buffer with these words.
    pub fn words(mut self, words: &[u32]) -> Self {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let ptr = self.memory.alloc(bytes.len() as u64).expect("the memory is large enough");
        self.memory.upload(ptr, &bytes).expect("the range was just allocated");
        self.args.push(Arg::U64(ptr));
        self
    }

    /// Adds an argument: a buffer without values.
    pub fn undefined(mut self, bytes: u64) -> Self {
        let ptr = self.memory.alloc(bytes).expect("the memory is large enough");
        self.args.push(Arg::U64(ptr));
        self
    }

    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = Some(seed);
        self
    }

    /// The words of buffer argument `index`.
    pub fn read(&mut self, index: usize, num_words: usize) -> Vec<u32> {
        let Arg::U64(ptr) = self.args[index] else { panic!("argument {index} is no buffer") };
        let mut bytes = vec![0; num_words * 4];
        self.memory.download(ptr, &mut bytes).expect("the buffer has that many words");
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect()
    }

    pub fn launch(&mut self, module: &Module, grid: [u32; 2]) -> Result<LaunchReport, EmuError> {
        makaira::emu::run(module, grid, &self.args, &mut self.memory, &self.options)
    }

    /// Runs and expects no fault.
    pub fn clean(&mut self, module: &Module, grid: [u32; 2]) -> LaunchReport {
        self.launch(module, grid).unwrap_or_else(|error| panic!("unexpected fault:\n{error}"))
    }

    /// Runs and expects a fault.
    pub fn fault(&mut self, module: &Module, grid: [u32; 2]) -> Fault {
        match self.launch(module, grid) {
            Err(EmuError::Fault(fault)) => *fault,
            Err(other) => panic!("refused instead of run: {other}"),
            Ok(report) => panic!("no fault was found:\n{report}"),
        }
    }
}
