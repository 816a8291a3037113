//! A kernel around one instruction: every register it reads comes from memory, every one it writes goes
//! there, and the bytes that its addresses name are handed in and out.
//!
//! One warp runs it. Lane `l` has slot `n` of `input` and `output` at `8 * (32 * n + l)`, and each address of
//! the instruction points at byte `16 * l` of a 512-byte image: `memory` for global addresses, a copy of it
//! after the first 512 bytes, in shared memory, for shared ones.
//!
//! A warpgroup product is run by four warps with the same inputs, of which the first one's results count. Its
//! second operand lies in the shared image, for 8 columns with the 128-byte swizzle (the image twice, so that
//! all eight rows of the pattern have values, from the second k16 step on), for more without one.

use makaira::asm::isa::wgmma::Wgmma;
use makaira::asm::isa::{Effect, Inst, Row, TargetSet, alu};
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

/// The target that a row's kernel is built for: the oldest that has the row, not older than `sm_80`.
pub fn target_of(row: &Row) -> SmArch {
    match row.since.targets {
        TargetSet::From(sm) => SmArch::baseline(sm.max(80)),
        TargetSet::Specific(sm) => SmArch::specific(sm),
    }
}

/// The descriptor of a product's second operand in the image, without its address.
fn descriptor(n: u32) -> u64 {
    match n {
        // Groups of 8 columns 1024 bytes apart, the second k16 step of a row.
        8 => 1 << 62 | 64 << 32 | 1 << 16 | 2,
        // Two halves of 8 columns 128 bytes apart, groups of 8 columns 256.
        _ => 16 << 32 | 8 << 16,
    }
}

/// The columns of a product and its descriptor.
fn product(inst: &Inst) -> Option<(u32, Reg<B64>)> {
    match inst {
        Inst::Wgmma(Wgmma::WgmmaM64K16F32F16(product)) => Some((product.n.0, product.b.0)),
        Inst::Wgmma(Wgmma::WgmmaM64K16F32Bf16(product)) => Some((product.n.0, product.b.0)),
        _ => None,
    }
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
        let inst = instruction(row, &mut asm, choices);
        let is_product = product(&inst).is_some();
        let image = match is_product {
            true => asm.smem.region("image", 2 * IMAGE as u32, 1024),
            false => asm.smem.region("image", IMAGE as u32, 128),
        };
        let mut kernel = RowKernel {
            module: Asm::new().finish("empty", target, 32, 1),
            inst,
            inputs: Vec::new(),
            outputs: Vec::new(),
            param_bytes: inst.param().map(|param| param.bytes),
        };
        kernel.emit(&mut asm, pointers, image);
        kernel.module = asm.finish("row", target, if is_product { 128 } else { 32 }, 1);
        kernel
    }

    fn emit(&mut self, asm: &mut Asm, pointers: [Param; 3], image: Region) {
        let lane = asm.reg::<B32>();
        asm.mov_u32_special(lane, Special::Laneid);
        let tid = asm.reg::<B32>();
        asm.mov_u32_special(tid, Special::TidX);
        let is_first = asm.test_u32(Cmp::Lt, tid, 32);
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
        asm.when(is_first, |asm| asm.st_shared_v4_b32(shared.at(0).within(image), words));
        if let Some((n, desc)) = product(&self.inst) {
            let units = asm.reg();
            asm.when(is_first, |asm| {
                asm.st_shared_v4_b32(shared.at(IMAGE as u32).within(image), words);
            });
            asm.fence_proxy_async_shared_cta();
            asm.mov_u32_smem(units);
            asm.shr_u32(units, units, 4);
            asm.mad_wide_u32(desc, units, 1, descriptor(n));
        }
        asm.bar_sync(0);

        let mut bases = Vec::new();
        self.inst.places(&mut |place| bases.push(place.base));
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        self.inst.registers(&mut |reg, role| {
            let is_descriptor = product(&self.inst).is_some() && reg.class == Class::B64;
            if role != Role::Write && !bases.contains(&reg) && !is_descriptor {
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
        if product(&self.inst).is_some() {
            asm.wgmma_fence_sync_aligned();
        }
        asm.section("instruction", |asm| asm.emit(self.inst));
        if product(&self.inst).is_some() {
            asm.wgmma_commit_group_sync_aligned();
            asm.wgmma_wait_group_sync_aligned(0);
        }
        if let Some(label) = self.inst.label() {
            asm.bind(label);
        }
        if self.inst.row().effect == Effect::CopyAsync {
            asm.cp_async_commit_group();
            asm.cp_async_wait_group(0);
        }
        asm.bar_sync(0);
        let end = asm.label("end");
        if product(&self.inst).is_some() {
            asm.unless(is_first, |asm| asm.bra_uni(end));
        }
        for (slot, reg) in writes.iter().enumerate() {
            write_slot(asm, *reg, output, 256 * slot as i32);
        }
        asm.ld_shared_v4_b32(words, shared.at(0).within(image));
        asm.st_global_v4_b32(memory.at(IMAGE as i32), words);
        if product(&self.inst).is_some() {
            asm.bind(end);
        }
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
