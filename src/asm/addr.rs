//! Addresses as operands.
//!
//! An address is a base register and an immediate; a shared address may name the [`Region`] it stays in, which
//! the weaver takes as a promise and the emulator checks at every access.

use std::fmt;
use std::ops::Add;

use super::reg::{AnyReg, Operand, Place, Reg, Role};
use super::types::{B32, B64};

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
