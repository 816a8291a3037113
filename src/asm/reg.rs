//! Typed registers and operands.
//!
//! An operand type says what the instruction does with it: [`Out`] is written, [`Use`] is read, [`In`] is
//! read and may be an immediate, [`InOut`] is both, [`Vector`] is a braced list. A row of the instruction
//! table is a struct of such fields, so roles, text and register visiting all follow from the types.
//! Addresses are a base register and an immediate; a shared address may name the [`Region`] it stays in,
//! which the weaver takes as a promise and the emulator checks at every access.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Add;

use super::builder::Asm;
use super::types::{B32, B64, Class, Cmp, F32, Pred, RegClass, Special};

/// A virtual register of class `C`.
#[derive(Debug, PartialEq, Eq)]
pub struct Reg<C> {
    id: u32,
    class: PhantomData<C>,
}

impl<C> Clone for Reg<C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Reg<C> {}

impl<C: RegClass> Reg<C> {
    pub(super) fn new(id: u32) -> Self {
        Self { id, class: PhantomData }
    }

    /// The register without its class in the type.
    pub fn any(self) -> AnyReg {
        AnyReg { class: C::CLASS, id: self.id }
    }
}

impl<C: RegClass> fmt::Display for Reg<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.any().fmt(f)
    }
}

/// A register of any class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AnyReg {
    /// Its class.
    pub class: Class,
    /// Its number within the class.
    pub id: u32,
}

impl AnyReg {
    /// The register with its class in the type, `None` if it is of another class.
    pub fn typed<C: RegClass>(self) -> Option<Reg<C>> {
        (self.class == C::CLASS).then(|| Reg::new(self.id))
    }
}

impl fmt::Display for AnyReg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}{}", self.class.prefix(), self.id)
    }
}

/// What an instruction does with a register operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Only read.
    Read,
    /// Only written.
    Write,
    /// Read, then written.
    ReadWrite,
}

/// A memory operand as the verifier and the weaver see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The base register.
    pub base: AnyReg,
    /// The immediate added to it.
    pub offset: i64,
    /// The shared region that the address stays in, if it was stated.
    pub region: Option<Region>,
    /// Bytes that the address names, if they are not those of the instruction's row: a barrier's 8.
    pub bytes: Option<u32>,
}

/// Anything that can stand in an operand position.
pub trait Operand: fmt::Display {
    /// Calls `f` for each register in the operand.
    fn registers(&self, f: &mut dyn FnMut(AnyReg, Role));
    /// Calls `f` for each address in the operand.
    fn places(&self, _f: &mut dyn FnMut(Place)) {}
    /// The label that the operand names.
    fn label(&self) -> Option<Label> {
        None
    }
    /// The entry parameter that the operand names.
    fn param(&self) -> Option<Param> {
        None
    }
}

/// A register that the instruction writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Out<C>(pub Reg<C>);
/// A register that the instruction reads; no immediate is allowed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use<C>(pub Reg<C>);
/// A register that the instruction reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InOut<C>(pub Reg<C>);
/// A register that the instruction reads, or an immediate of that class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum In<C> {
    /// A register.
    Reg(Reg<C>),
    /// The bits of an immediate, zero-extended.
    Imm(u64),
}

macro_rules! register_operand {
    ($($Name:ident $role:ident),*) => {$(
        impl<C> From<Reg<C>> for $Name<C> {
            fn from(reg: Reg<C>) -> Self {
                Self(reg)
            }
        }
        impl<C: RegClass> fmt::Display for $Name<C> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl<C: RegClass> Operand for $Name<C> {
            fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
                f(self.0.any(), Role::$role);
            }
        }
    )*};
}
register_operand!(Out Write, Use Read, InOut ReadWrite);

impl<C> From<Reg<C>> for In<C> {
    fn from(reg: Reg<C>) -> Self {
        In::Reg(reg)
    }
}
impl From<u32> for In<B32> {
    fn from(value: u32) -> Self {
        In::Imm(value.into())
    }
}
impl From<i32> for In<B32> {
    fn from(value: i32) -> Self {
        In::Imm(u64::from(value as u32))
    }
}
impl From<u64> for In<B64> {
    fn from(value: u64) -> Self {
        In::Imm(value)
    }
}
impl From<bool> for In<Pred> {
    fn from(value: bool) -> Self {
        In::Imm(value.into())
    }
}
impl From<f32> for In<F32> {
    fn from(value: f32) -> Self {
        In::Imm(u64::from(value.to_bits()))
    }
}

impl<C: RegClass> fmt::Display for In<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, C::CLASS) {
            (In::Reg(reg), _) => reg.fmt(f),
            (In::Imm(bits), Class::F32) => write!(f, "0f{bits:08X}"),
            (In::Imm(bits), _) if *bits < 0x1_0000 => write!(f, "{bits}"),
            (In::Imm(bits), Class::B64) => write!(f, "0x{bits:016x}"),
            (In::Imm(bits), _) => write!(f, "0x{bits:08x}"),
        }
    }
}
impl<C: RegClass> Operand for In<C> {
    fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
        if let In::Reg(reg) = self {
            f(reg.any(), Role::Read);
        }
    }
}

/// A braced list of `N` operands, `{%r1, %r2}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vector<T, const N: usize>(pub [T; N]);

impl<T: From<U>, U, const N: usize> From<[U; N]> for Vector<T, N> {
    fn from(items: [U; N]) -> Self {
        Vector(items.map(T::from))
    }
}
impl<T: fmt::Display, const N: usize> fmt::Display for Vector<T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (i, item) in self.0.iter().enumerate() {
            write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("}")
    }
}
impl<T: Operand, const N: usize> Operand for Vector<T, N> {
    fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
        self.0.iter().for_each(|item| item.registers(f));
    }
}

/// Consecutive registers of a class, for operands too long to list one by one.
#[derive(Debug, PartialEq, Eq)]
pub struct RegRange<C> {
    first: u32,
    len: u32,
    class: PhantomData<C>,
}

impl<C> Clone for RegRange<C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for RegRange<C> {}

impl<C: RegClass> RegRange<C> {
    pub(super) fn new(first: u32, len: u32) -> Self {
        Self { first, len, class: PhantomData }
    }

    /// The registers in order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = Reg<C>> {
        (self.first..self.first + self.len).map(Reg::new)
    }

    /// How many registers.
    pub fn len(self) -> u32 {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Register `n`.
    ///
    /// # Panics
    /// If there are not so many: a bug in the emitter.
    pub fn get(self, n: usize) -> Reg<C> {
        assert!(n < self.len as usize, "register {n} of a range of {}", self.len);
        Reg::new(self.first + n as u32)
    }
}

/// A range that the instruction reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InOutRange<C>(pub RegRange<C>);

impl<C> From<RegRange<C>> for InOutRange<C> {
    fn from(range: RegRange<C>) -> Self {
        Self(range)
    }
}
impl<C: RegClass> fmt::Display for InOutRange<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (n, reg) in self.0.iter().enumerate() {
            write!(f, "{}{reg}", if n == 0 { "" } else { ", " })?;
        }
        f.write_str("}")
    }
}
impl<C: RegClass> Operand for InOutRange<C> {
    fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
        self.0.iter().for_each(|reg| f(reg.any(), Role::ReadWrite));
    }
}

/// A named byte range of the CTA's shared memory, handed out by the shared-memory plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// First byte, from the start of the CTA's shared memory.
    pub start: u32,
    /// Length in bytes.
    pub bytes: u32,
}

impl Region {
    /// The part of `bytes` bytes that begins `start` bytes into this region.
    ///
    /// # Panics
    /// If the part does not lie inside: a bug in the emitter that asked for it.
    pub fn part(self, start: u32, bytes: u32) -> Region {
        assert!(start + bytes <= self.bytes, "part {start}+{bytes} of a region of {}", self.bytes);
        Region { start: self.start + start, bytes }
    }

    /// Whether no byte belongs to both.
    pub fn is_disjoint(self, other: Region) -> bool {
        self.start + self.bytes <= other.start || other.start + other.bytes <= self.start
    }
}

/// A shared-memory address: 32-bit base register plus immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedAddr {
    /// The base register.
    pub base: Reg<B32>,
    /// Bytes added to it.
    pub offset: i32,
    /// The region the address stays in; a promise for the weaver, checked by the emulator.
    pub region: Option<Region>,
}

impl SharedAddr {
    /// States the region that this address stays in.
    pub fn within(self, region: Region) -> Self {
        Self { region: Some(region), ..self }
    }
}

/// A global address: 64-bit base register plus immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalAddr {
    /// The base register.
    pub base: Reg<B64>,
    /// Bytes added to it.
    pub offset: i32,
}

impl Reg<B32> {
    /// The shared address `offset` bytes past this register.
    pub fn at(self, offset: u32) -> SharedAddr {
        SharedAddr { base: self, offset: offset as i32, region: None }
    }
}
impl From<Reg<B32>> for SharedAddr {
    fn from(base: Reg<B32>) -> Self {
        base.at(0)
    }
}
impl Reg<B64> {
    /// The global address `offset` bytes past this register.
    pub fn at(self, offset: i32) -> GlobalAddr {
        GlobalAddr { base: self, offset }
    }
}
impl From<Reg<B64>> for GlobalAddr {
    fn from(base: Reg<B64>) -> Self {
        base.at(0)
    }
}
impl Add<u32> for SharedAddr {
    type Output = SharedAddr;
    fn add(self, bytes: u32) -> SharedAddr {
        SharedAddr { offset: self.offset + bytes as i32, ..self }
    }
}
impl Add<i32> for GlobalAddr {
    type Output = GlobalAddr;
    fn add(self, bytes: i32) -> GlobalAddr {
        GlobalAddr { offset: self.offset + bytes, ..self }
    }
}

macro_rules! address_operand {
    ($($Name:ident, |$this:ident| $region:expr);*) => {$(
        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.offset {
                    0 => write!(f, "[{}]", self.base),
                    offset => write!(f, "[{}{offset:+}]", self.base),
                }
            }
        }
        impl Operand for $Name {
            fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
                f(self.base.any(), Role::Read);
            }
            fn places(&self, f: &mut dyn FnMut(Place)) {
                let $this = self;
                f(Place {
                    base: self.base.any(),
                    offset: self.offset.into(),
                    region: $region,
                    bytes: None,
                });
            }
        }
    )*};
}
address_operand!(SharedAddr, |this| this.region; GlobalAddr, |_this| None);

/// The shared address of a barrier in an instruction whose other addresses name more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierAddr(pub SharedAddr);

impl From<SharedAddr> for BarrierAddr {
    fn from(addr: SharedAddr) -> Self {
        Self(addr)
    }
}
impl From<Reg<B32>> for BarrierAddr {
    fn from(base: Reg<B32>) -> Self {
        Self(base.into())
    }
}
impl fmt::Display for BarrierAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
impl Operand for BarrierAddr {
    fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
        self.0.registers(f);
    }
    fn places(&self, f: &mut dyn FnMut(Place)) {
        self.0.places(&mut |place| f(Place { bytes: Some(8), ..place }));
    }
}

/// A place in the program that a branch can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Label {
    /// Unique number in its program.
    pub id: u32,
    /// What the place is, for the reader.
    pub name: &'static str,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "${}_{}", self.name, self.id)
    }
}
impl Operand for Label {
    fn registers(&self, _f: &mut dyn FnMut(AnyReg, Role)) {}
    fn label(&self) -> Option<Label> {
        Some(*self)
    }
}

/// A parameter of the entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Param {
    /// Its position.
    pub index: u32,
    /// Its name.
    pub name: &'static str,
    /// Its size: 4 (`.u32`) or 8 (`.u64`) bytes, or 128 for a tensor map.
    pub bytes: u32,
}

/// The address of an entry parameter, where [`Param`] itself stands for its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParamAddr(pub Param);

impl From<Param> for ParamAddr {
    fn from(param: Param) -> Self {
        Self(param)
    }
}
impl fmt::Display for ParamAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name)
    }
}
impl Operand for ParamAddr {
    fn registers(&self, _f: &mut dyn FnMut(AnyReg, Role)) {}
    fn param(&self) -> Option<Param> {
        Some(self.0)
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}]", self.name)
    }
}

/// A small unsigned immediate that is part of the instruction (`wait_group` count, look-up table …).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Imm(pub u32);

impl fmt::Display for Imm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
impl From<u32> for Imm {
    fn from(value: u32) -> Self {
        Imm(value)
    }
}

macro_rules! plain_operand {
    ($($Name:ty),*) => {$(
        impl Operand for $Name {
            fn registers(&self, _f: &mut dyn FnMut(AnyReg, Role)) {}
        }
    )*};
}
plain_operand!(Imm, Cmp, Special);

impl Operand for Param {
    fn registers(&self, _f: &mut dyn FnMut(AnyReg, Role)) {}
    fn param(&self) -> Option<Param> {
        Some(*self)
    }
}

/// An operand that can be made up, see [`crate::asm::isa::Row::example`].
pub trait Example {
    /// An operand with fresh registers; `pick(n)` chooses a number below `n`.
    fn example(asm: &mut Asm, pick: &mut dyn FnMut(u32) -> u32) -> Self;
}

macro_rules! examples {
    ($([$($C:ident)?] $Name:ty: |$asm:pat_param, $pick:pat_param| $value:expr;)*) => {$(
        impl$(<$C: RegClass>)? Example for $Name {
            fn example($asm: &mut Asm, $pick: &mut dyn FnMut(u32) -> u32) -> Self {
                $value
            }
        }
    )*};
}
examples! {
    [C] Out<C>: |asm, _| Out(asm.reg());
    [C] Use<C>: |asm, _| Use(asm.reg());
    [C] InOut<C>: |asm, _| InOut(asm.reg());
    [C] In<C>: |asm, pick| match pick(2) {
        0 => In::Reg(asm.reg()),
        _ => In::Imm(C::to_bits(C::from_bits(u64::from(pick(1 << 16)) << pick(49)))),
    };
    [] SharedAddr: |asm, _| asm.reg::<B32>().into();
    [] BarrierAddr: |asm, _| BarrierAddr(asm.reg::<B32>().into());
    [] GlobalAddr: |asm, _| asm.reg::<B64>().into();
    [] Label: |asm, _| asm.label("next");
    [] Param: |asm, _| asm.param_u32("value");
    [] ParamAddr: |asm, _| ParamAddr(asm.param_tensor_map("tile"));
    [C] InOutRange<C>: |asm, pick| InOutRange(asm.reg_range(4 * (1 + pick(32))));
    [] Imm: |_, pick| Imm(pick(256));
    [] Cmp: |_, pick| Cmp::ALL[pick(Cmp::ALL.len() as u32) as usize];
    [] Special: |_, pick| Special::ALL[pick(Special::ALL.len() as u32) as usize];
}
impl<T: Example, const N: usize> Example for Vector<T, N> {
    fn example(asm: &mut Asm, pick: &mut dyn FnMut(u32) -> u32) -> Self {
        Vector(std::array::from_fn(|_| T::example(asm, pick)))
    }
}
