//! A kernel around one instruction: every register it reads comes from memory, every one it writes goes
//! there, and the bytes that its addresses name are handed in and out.
//!
//! One warp runs it. Lane `l` has slot `n` of `input` and `output` at `8 * (32 * n + l)`, and each address of
//! the instruction points at byte `16 * l` of a 512-byte image: `memory` for global addresses, a copy of it
//! after the first 512 bytes, in shared memory, for shared ones.

use makaira::asm::isa::{Effect, Inst, Row, alu};
use makaira::asm::reg::{AnyReg, Out, Param, Reg, Region, Role};
use makaira::asm::types::{B16, B32, B64, Class, Cmp, F32, Pred, RegClass, Special};
use makaira::asm::{Asm, Module};
use makaira::target::SmArch;

/// Bytes of an image.
pub const IMAGE: usize = 512;

/// A kernel around one instruction.
pub struct RowKernel {
    pub module: Module,
    pub inst: Inst,
    /// The classes of the input and output slots.
    pub inputs: Vec<Class>,
    pub outputs: Vec<Class>,
    /// Bytes of the parameter that the instruction reads; it is the last one.
    pub param_bytes: Option<u32>,
}

fn typed<C: RegClass>(reg: AnyReg) -> Reg<C> {
    reg.typed().expect("the class was looked at")
}

/// The instruction that a row makes of these choices; 0 where there are no more.
pub fn instruction(row: &Row, asm: &mut Asm, choices: &[u32]) -> Inst {
    // The width of a parameter is the row's, which the operand by itself does not know.
    match row.method {
        "ld_param_u32" => {
            let a = asm.param_u32("value");
            alu::LdParamU32 { d: Out(asm.reg()), a }.into()
        }
        "ld_param_u64" => {
            let a = asm.param_u64("value");
            alu::LdParamU64 { d: Out(asm.reg()), a }.into()
        }
        _ => {
            let mut choices = choices.iter().copied().chain(std::iter::repeat(0));
            (row.example)(asm, &mut |n| choices.next().unwrap_or(0) % n)
        }
    }
}

impl RowKernel {
    /// The kernel for a row, with the choices that [`instruction`] takes.
    pub fn new(row: &Row, choices: &[u32], target: SmArch) -> Self {
        let mut asm = Asm::new();
        let pointers = ["input", "output", "memory"].map(|name| asm.param_u64(name));
        let image = asm.smem.region("image", IMAGE as u32, 128);
        let inst = instruction(row, &mut asm, choices);
        let mut kernel = RowKernel {
            module: Asm::new().finish("empty", target, 32, 1),
            inst,
            inputs: Vec::new(),
            outputs: Vec::new(),
            param_bytes: inst.param().map(|param| param.bytes),
        };
        kernel.emit(&mut asm, pointers, image);
        kernel.module = asm.finish("row", target, 32, 1);
        kernel
    }

    fn emit(&mut self, asm: &mut Asm, pointers: [Param; 3], image: Region) {
        let lane = asm.reg::<B32>();
        asm.mov_u32_special(lane, Special::TidX);
        let [input, output, memory] = pointers.map(|param| {
            let base = asm.reg::<B64>();
            asm.ld_param_u64(base, param);
            base
        });
        let at = |asm: &mut Asm, base: Reg<B64>, scale: u32| {
            let address = asm.reg::<B64>();
            asm.mad_wide_u32(address, lane, scale, base);
            address
        };
        let (input, output, memory) = (at(asm, input, 8), at(asm, output, 8), at(asm, memory, 16));
        let shared = asm.reg::<B32>();
        asm.mov_u32_smem(shared);
        asm.mad_lo_u32(shared, lane, 16, shared);
        let words = asm.regs::<B32, 4>();
        asm.ld_global_v4_b32(words, memory.at(IMAGE as i32));
        asm.st_shared_v4_b32(shared.at(0).within(image), words);
        asm.bar_sync(0);

        let mut bases = Vec::new();
        self.inst.places(&mut |place| bases.push(place.base));
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        self.inst.registers(&mut |reg, role| {
            if role != Role::Write && !bases.contains(&reg) {
                reads.push(reg);
            }
            if role != Role::Read {
                writes.push(reg);
            }
        });
        for base in bases {
            match base.class {
                Class::B64 => asm.mov_b64(typed::<B64>(base), memory),
                _ => asm.mov_b32(typed::<B32>(base), shared),
            }
        }
        for (slot, reg) in reads.iter().enumerate() {
            read_slot(asm, *reg, input, 256 * slot as i32);
        }
        asm.section("instruction", |asm| asm.emit(self.inst));
        if let Some(label) = self.inst.label() {
            asm.bind(label);
        }
        if self.inst.row().effect == Effect::CopyAsync {
            asm.cp_async_commit_group();
            asm.cp_async_wait_group(0);
        }
        asm.bar_sync(0);
        for (slot, reg) in writes.iter().enumerate() {
            write_slot(asm, *reg, output, 256 * slot as i32);
        }
        asm.ld_shared_v4_b32(words, shared.at(0).within(image));
        asm.st_global_v4_b32(memory.at(IMAGE as i32), words);
        asm.exit();
        self.inputs = reads.iter().map(|reg| reg.class).collect();
        self.outputs = writes.iter().map(|reg| reg.class).collect();
    }
}

/// Loads input slot `address + offset` into a register.
fn read_slot(asm: &mut Asm, reg: AnyReg, address: Reg<B64>, offset: i32) {
    let place = address.at(offset);
    match reg.class {
        Class::B16 => asm.ld_global_b16(typed::<B16>(reg), place),
        Class::B32 => asm.ld_global_b32(typed::<B32>(reg), place),
        Class::F32 => {
            let high = asm.reg::<F32>();
            asm.ld_global_v2_f32([typed::<F32>(reg), high], place);
        }
        Class::Pred => {
            let bits = asm.reg::<B32>();
            asm.ld_global_b32(bits, place);
            asm.setp_u32(typed::<Pred>(reg), Cmp::Ne, bits, 0);
        }
        Class::B64 => {
            let [low, high] = asm.regs::<B32, 2>();
            asm.ld_global_b32(low, place);
            asm.ld_global_b32(high, place + 4);
            // high * 2^16, doubled 16 times, plus low.
            let (wide, reg) = (asm.reg::<B64>(), typed::<B64>(reg));
            asm.mul_wide_u32(wide, high, 0x1_0000);
            for _ in 0..16 {
                asm.add_u64(wide, wide, wide);
            }
            asm.cvt_u64_u32(reg, low);
            asm.add_u64(reg, reg, wide);
        }
    }
}

/// Stores a register to output slot `address + offset`.
fn write_slot(asm: &mut Asm, reg: AnyReg, address: Reg<B64>, offset: i32) {
    let place = address.at(offset);
    match reg.class {
        Class::B16 => asm.st_global_b16(place, typed::<B16>(reg)),
        Class::B32 => asm.st_global_b32(place, typed::<B32>(reg)),
        Class::F32 => asm.st_global_f32(place, typed::<F32>(reg)),
        Class::B64 => asm.st_global_b64(place, typed::<B64>(reg)),
        Class::Pred => {
            let bits = asm.reg::<B32>();
            asm.selp_b32(bits, 1, 0, typed::<Pred>(reg));
            asm.st_global_b32(place, bits);
        }
    }
}
