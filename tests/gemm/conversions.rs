//! Every instruction of every weight type's conversion matters: with another mask, shift, selector or constant, or
//! passed by, the product is noticed to be wrong.
//!
//! What a type emits is known by the file that emitted it. An instruction stands for all of the kernel that are like it
//! but for their registers, so that a change is one of the emission and not of one place that it was unrolled to.

use std::collections::BTreeMap;

use half::{bf16, f16};
use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{
    Alu, AndB32, CvtRnF16x2F32, FmaRnF32, Lop3B32, MovB32, MovB32Unpack, PrmtB32, ShlB32, ShrU32,
};
use makaira::asm::isa::half::Half;
use makaira::asm::reg::{In, Vector};
use makaira::backend::Stream;
use makaira::gemm::{Gemm, Matrix, Prepared};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Conversion, Problem, Rows, Scaling};
use makaira::reference::{Reference, Tolerance};
use makaira::weights::{FORMATS, ScaleType};

use crate::support::{Device, Random};
use crate::types::{Number, TypedLayer, numbers};

/// What an instruction may become: a word on it, and the other instruction.
fn others(inst: Inst) -> Vec<(String, Inst)> {
    // Every bit that is set in a mask selects bits of codes.
    let cleared = |mask: u64| (0..32).filter(move |bit| mask >> bit & 1 == 1);
    match inst {
        Inst::Alu(Alu::AndB32(AndB32 { d, a, b: In::Imm(mask) })) => cleared(mask)
            .map(|bit| {
                let b = In::Imm(mask & !(1 << bit));
                (format!("bit {bit} not selected"), AndB32 { d, a, b }.into())
            })
            .collect(),
        Inst::Alu(Alu::Lop3B32(lop)) => {
            let Lop3B32 { b: In::Imm(mask), .. } = lop else { return Vec::new() };
            let without = |bit: u32| Lop3B32 { b: In::Imm(mask & !(1 << bit)), ..lop };
            cleared(mask)
                .map(|bit| (format!("bit {bit} not selected"), without(bit).into()))
                .collect()
        }
        Inst::Alu(Alu::ShlB32(ShlB32 { d, a, b: In::Imm(by) })) => {
            vec![("a bit off".into(), ShlB32 { d, a, b: In::Imm(by ^ 1) }.into())]
        }
        Inst::Alu(Alu::ShrU32(ShrU32 { d, a, b: In::Imm(by) })) => {
            vec![("a bit off".into(), ShrU32 { d, a, b: In::Imm(by ^ 1) }.into())]
        }
        Inst::Alu(Alu::PrmtB32(prmt)) => {
            let PrmtB32 { sel: In::Imm(sel), .. } = prmt else { return Vec::new() };
            // The byte beside it where both operands are the same, else one of the other operand.
            let bit = if prmt.a == prmt.b { 0 } else { 2 };
            let other = |byte: u32| PrmtB32 { sel: In::Imm(sel ^ 1 << (4 * byte + bit)), ..prmt };
            (0..4).map(|byte| (format!("byte {byte} is another"), other(byte).into())).collect()
        }
        // The highest bits of the exponents: of a zero that is added the lower ones mean nothing.
        Inst::Alu(Alu::MovB32(MovB32 { d, a: In::Imm(constant) })) => [14, 30]
            .into_iter()
            .map(|bit| {
                let a = In::Imm(constant ^ 1 << bit);
                (format!("another constant in bit {bit}"), MovB32 { d, a }.into())
            })
            .collect(),
        Inst::Alu(Alu::MovB32Unpack(MovB32Unpack { d: Vector([low, high]), a })) => {
            vec![("exchanged".into(), MovB32Unpack { d: Vector([high, low]), a }.into())]
        }
        Inst::Alu(Alu::FmaRnF32(fma)) => {
            let In::Imm(added) = fma.c else { return Vec::new() };
            // The lowest bit of the exponent.
            let c = In::Imm(added ^ 1 << 23);
            vec![("adds another number".into(), FmaRnF32 { c, ..fma }.into())]
        }
        Inst::Alu(Alu::CvtRnBf16x2F32(cvt)) => {
            vec![("to fp16".into(), CvtRnF16x2F32 { d: cvt.d, a: cvt.a, b: cvt.b }.into())]
        }
        Inst::Half(Half::SubF16x2(sub)) => {
            vec![("passed by".into(), MovB32 { d: sub.d, a: In::Reg(sub.a.0) }.into())]
        }
        Inst::Half(Half::FmaRnBf16x2(fma)) => {
            vec![("passed by".into(), MovB32 { d: fma.d, a: In::Reg(fma.a.0) }.into())]
        }
        _ => Vec::new(),
    }
}

/// The instruction's text without the numbers of registers.
fn shape(inst: &Inst) -> String {
    let text = inst.to_string();
    let mut parts = text.split('%');
    let first = parts.next().unwrap_or_default().to_owned();
    let rest = parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_alphanumeric()));
    rest.fold(first, |shape, part| shape + "%" + part)
}

/// A product that can be run with another kernel.
struct Product<'a, E> {
    gemm: Gemm,
    layer: &'a TypedLayer,
    choice: Choice,
    a: Vec<E>,
    m: usize,
}

impl<E: Number> Product<'_, E> {
    /// What is wrong with the product that a module computes.
    fn noticed(&self, module: &Module) -> Option<String> {
        let (backend, TypedLayer { n, k, .. }) = (self.gemm.backend(), self.layer);
        let kernel = match backend.load(module) {
            Ok(kernel) => kernel,
            Err(error) => return Some(error.to_string()),
        };
        let prepared = Prepared { choice: self.choice, kernel };
        let weight = self.layer.weight(&self.gemm, E::ACTIVATION);
        let workspace = self.gemm.workspace_of(1 << 20, 64).expect("it fits");
        let (a_bytes, c_bytes) = (2 * self.a.len(), 2 * self.m * n);
        let alloc = |bytes: usize| backend.alloc(bytes as u64).expect("it fits");
        let (a_ptr, c_ptr) = (alloc(a_bytes), alloc(c_bytes));
        backend.upload(a_ptr, bytemuck::cast_slice(&self.a)).expect("it fits");
        backend.upload(c_ptr, &vec![0xff; c_bytes]).expect("it fits");
        let (a, c) =
            (Matrix { ptr: a_ptr, stride: *k as u64 }, Matrix { ptr: c_ptr, stride: *n as u64 });
        let (rows, stream) = (self.m as u64, Stream::default());
        let ran = self.gemm.matmul_with(&prepared, a, &weight, c, rows, &workspace, stream);
        let mut product = vec![E::zeroed(); self.m * n];
        backend.download(c_ptr, bytemuck::cast_slice_mut(&mut product)).expect("it is there");
        for ptr in [a_ptr, c_ptr] {
            backend.free(ptr).expect("it is ours");
        }
        if let Err(error) = ran {
            return Some(error.to_string());
        }
        let errors = Reference::new(&self.a, &self.layer.dense, *k)
            .compare(&product, Tolerance::of(&self.choice.config, *k));
        (!errors.is_ok()).then(|| errors.to_string())
    }
}

/// Every change of a type's conversion is noticed; how many there were.
fn bites<E: Number>(layer: &TypedLayer, conversion: Conversion, random: &mut Random) -> usize {
    let device = Device::hopper();
    let gemm = Gemm::new(device.backend.clone());
    let (kind, group) = (layer.kind(&gemm, E::ACTIVATION), layer.packed.layout().group);
    let (m, rows) = (8, Rows::Whole);
    let (n, k) = (layer.n as u32, layer.k as u32);
    let problem = Problem { kind, m: m as u64, n, k, group, rows };
    let ranked = select::ranked(&problem, device.backend.device());
    let choice = ranked.into_iter().find(|choice| {
        let config = choice.config;
        config.conversion == conversion && config.scaling == Scaling::Promote
    });
    let Some(choice) = choice else { return 0 };
    let module =
        select::family_of(&choice.config).build(&choice.config, device.backend.device().arch);
    let a = numbers(m * layer.k, 1.0, random);
    let product = Product::<E> { gemm, layer, choice, a, m };
    if let Some(why) = product.noticed(&module) {
        panic!("{} itself: {why}", choice.config);
    }
    let mut alike: BTreeMap<(&str, u32, u32, String), Vec<usize>> = BTreeMap::new();
    for (at, item) in module.entry.items.iter().enumerate() {
        let Item::Inst(Node { inst, emitter, .. }) = item else { continue };
        if emitter.file().starts_with("src/weights/") {
            let place = (emitter.file(), emitter.line(), emitter.column(), shape(inst));
            alike.entry(place).or_default().push(at);
        }
    }
    let mut count = 0;
    for ((file, line, _, text), places) in &alike {
        let inst_at = |at: usize| match module.entry.items[at] {
            Item::Inst(node) => node,
            _ => panic!("an instruction"),
        };
        for change in 0..others(inst_at(places[0]).inst).len() {
            let mut mutant = module.clone();
            let mut how = String::new();
            for at in places {
                let node = inst_at(*at);
                let (what, inst) = others(node.inst).swap_remove(change);
                (mutant.entry.items[*at], how) = (Item::Inst(Node { inst, ..node }), what);
            }
            let noticed = product.noticed(&mutant).is_some();
            assert!(noticed, "{}: not noticed: {file}:{line}: `{text}`: {how}", choice.config);
            count += 1;
        }
    }
    count
}

#[test]
fn every_instruction_of_a_conversion_matters() {
    let mut random = Random(0x636f_6e76);
    for format in FORMATS {
        // One product has every code many times in every place of a word.
        let layer = TypedLayer::new(*format, (64, 512), 32, ScaleType::F16, &mut random);
        let [half, brain] = [
            bites::<f16>(&layer, Conversion::Value, &mut random),
            bites::<bf16>(&layer, Conversion::Value, &mut random),
        ];
        println!("{}: {half} changes in fp16, {brain} in bf16", format.name());
        assert!(half >= 4 && brain >= 8, "{}: {half} and {brain}", format.name());
        if format.subnormal().is_some() {
            let layer = TypedLayer::new(*format, (64, 512), 128, ScaleType::F16, &mut random);
            let count = bites::<f16>(&layer, Conversion::Subnormal, &mut random);
            assert!(count >= 4, "{}: {count} of the subnormal conversion", format.name());
        }
    }
}
