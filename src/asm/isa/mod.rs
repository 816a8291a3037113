//! The instruction table: one row per instruction, everything else derived from it.
//!
//! A row of `isa!` gives the builder method (the PTX opcode with dots as underscores), the operands with
//! their roles, the exact text, the requirement ([`Since`]), who executes it ([`Scope`]), what it does to
//! memory and control ([`Effect`], with the bytes per address if it has one) and its meaning against a
//! [`Machine`]. The compiler refuses a row whose text misses an operand, a call with a register of the
//! wrong class, and a row without meaning. Modifiers that change operands or meaning are rows of their
//! own; modifiers that only tune are operands.
//! Requirements are those of the PTX ISA's "PTX ISA Notes" and "Target ISA Notes" per instruction; the
//! offline assembler confirms them in the test suite.

use std::fmt;

use super::builder::Asm;
use super::reg::{AnyReg, Label, Param, Place, Role};
use super::types::{Scope, Special};
use crate::target::{PtxIsa, SmArch};

pub mod alu;
pub mod async_copy;
pub mod bulk;
pub mod cluster;
pub mod control;
pub mod half;
mod machine;
pub mod mbarrier;
pub mod mem;
pub mod sync;
pub mod tensor;
#[cfg(test)]
mod tests;
pub mod wgmma;

pub use machine::{
    Access, AsyncCopy, BarrierOp, BulkLoad, BulkOp, BulkSource, ClusterOp, Destination, GridOp,
    Machine, Product, ProductOp, ProxyFence, SharedAt, Source, TileStore,
};

/// Which targets have an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetSet {
    /// Every target from this compute capability (times ten) on.
    From(u16),
    /// Only the architecture-specific target of this compute capability (`sm_90a`).
    Specific(u16),
}

impl TargetSet {
    /// Whether the set holds `arch`.
    pub fn contains(self, arch: SmArch) -> bool {
        match self {
            TargetSet::From(sm) => arch.sm >= sm,
            TargetSet::Specific(sm) => arch.specific && arch.sm == sm,
        }
    }
}

impl fmt::Display for TargetSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TargetSet::From(sm) => write!(f, "sm_{sm} or higher"),
            TargetSet::Specific(sm) => write!(f, "sm_{sm}a only"),
        }
    }
}

/// What an instruction form needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since {
    /// The first PTX ISA with this form.
    pub isa: PtxIsa,
    /// The targets that have it.
    pub targets: TargetSet,
}

/// A row's requirement: PTX ISA `major.minor` and every target from `sm` on.
pub const fn ptx(major: u8, minor: u8, sm: u16) -> Since {
    Since { isa: PtxIsa::new(major, minor), targets: TargetSet::From(sm) }
}

/// What an instruction does besides reading and writing registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Pure,
    /// Reads shared memory.
    LoadShared,
    /// Writes shared memory.
    StoreShared,
    /// Reads global memory.
    LoadGlobal,
    /// Writes global memory.
    StoreGlobal,
    /// Starts a copy from global to shared memory that completes later.
    CopyAsync,
    /// Orders memory accesses: nothing that touches memory may cross it.
    Sync,
    /// Changes the flow of control: nothing may cross it. One that names a label continues there, one that
    /// names none ends the thread.
    Control,
}

/// The set lanes of a mask, ascending.
pub fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    (0..32).filter(move |lane| mask >> lane & 1 != 0)
}

/// A row as data, for the printed instruction reference and for tests that go over the table.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The builder method.
    pub method: &'static str,
    /// The text with operand names in braces.
    pub text: &'static str,
    /// The requirement.
    pub since: Since,
    /// Who executes it.
    pub scope: Scope,
    /// The effect.
    pub effect: Effect,
    /// Bytes that each address of the instruction names, 0 if it has none; the address is a multiple of it.
    pub access_bytes: u32,
    /// The doc comment.
    pub doc: &'static str,
    /// An instruction of this row with fresh registers, for tests and listings. Where the row leaves a
    /// choice, the function decides: it returns a number below its argument.
    pub example: fn(&mut Asm, &mut dyn FnMut(u32) -> u32) -> Inst,
}

/// Defines one family of instructions. See the module documentation.
macro_rules! isa {
    ($(#[$meta:meta])* $Family:ident;
     $( $(#[doc = $doc:literal])+
        $method:ident = $Name:ident { $($field:ident : $ty:ty),* $(,)? }
        $text:literal, $since:expr, $scope:ident, $effect:ident $(($bytes:literal))?, |$($arg:pat_param),+| $body:block
     )*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Copy, Debug, PartialEq)]
            #[allow(missing_docs)]
            pub struct $Name { $(pub $field: $ty),* }

            impl std::fmt::Display for $Name {
                fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    write!(f, $text, $($field = self.$field),*)
                }
            }

            impl $Name {
                #[allow(unused_variables)]
                fn exec<M: crate::asm::isa::Machine>(&self, machine: &mut M) -> Result<(), M::Stop> {
                    isa!(@exec $scope self machine [$($arg),+] $body);
                    Ok(())
                }
            }

            impl From<$Name> for crate::asm::isa::Inst {
                fn from(inst: $Name) -> Self {
                    crate::asm::isa::Inst::$Family($Family::$Name(inst))
                }
            }
        )*

        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum $Family { $($Name($Name)),* }

        impl std::fmt::Display for $Family {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self { $($Family::$Name(inst) => inst.fmt(f)),* }
            }
        }

        impl $Family {
            /// The rows of this family.
            pub const TABLE: &'static [crate::asm::isa::Row] = &[$(crate::asm::isa::Row {
                method: stringify!($method),
                text: $text,
                since: $since,
                scope: crate::asm::types::Scope::$scope,
                effect: crate::asm::isa::Effect::$effect,
                access_bytes: 0 $(+ $bytes)?,
                doc: concat!($($doc),+),
                example: |_asm, _pick| {
                    $(let $field = crate::asm::reg::Example::example(_asm, _pick);)*
                    $Name { $($field),* }.into()
                },
            }),*];

            /// The row of this instruction.
            pub fn row(&self) -> &'static crate::asm::isa::Row {
                #[allow(non_camel_case_types, clippy::enum_variant_names)]
                enum Position { $($Name),* }
                let position = match self { $($Family::$Name(_) => Position::$Name as usize),* };
                &Self::TABLE[position]
            }

            /// Calls `f` for each operand.
            pub fn operands(&self, f: &mut dyn FnMut(&dyn crate::asm::reg::Operand)) {
                match self { $($Family::$Name(inst) => {
                    let _ = inst;
                    $(f(&inst.$field);)*
                }),* }
            }

            /// Executes the instruction on the machine's active lanes.
            pub fn exec<M: crate::asm::isa::Machine>(&self, machine: &mut M) -> Result<(), M::Stop> {
                match self { $($Family::$Name(inst) => inst.exec(machine)),* }
            }
        }

        impl crate::asm::builder::Asm {
            $(
                $(#[doc = $doc])+
                #[doc = ""]
                #[doc = concat!("`", $text, "`")]
                #[track_caller]
                pub fn $method(&mut self, $($field: impl Into<$ty>),*) {
                    self.push($Name { $($field: $field.into()),* }.into());
                }
            )*
        }
    };
    (@exec Lane $self:ident $machine:ident [$m:pat_param, $lane:pat_param, $i:pat_param] $body:block) => {
        for lane in crate::asm::isa::lanes($machine.active()) {
            let $m = &mut *$machine;
            let $lane = lane;
            let $i = $self;
            $body
        }
    };
    (@exec $scope:ident $self:ident $machine:ident [$m:pat_param, $i:pat_param] $body:block) => {
        {
            let $m = &mut *$machine;
            let $i = $self;
            $body
        }
    };
}
pub(crate) use isa;

macro_rules! families {
    ($($Family:ident in $module:ident),* $(,)?) => {
        /// Any instruction.
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[allow(missing_docs)]
        pub enum Inst { $($Family($module::$Family)),* }

        impl fmt::Display for Inst {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self { $(Inst::$Family(inst) => inst.fmt(f)),* }
            }
        }

        impl Inst {
            /// The instruction's row.
            pub fn row(&self) -> &'static Row {
                match self { $(Inst::$Family(inst) => inst.row()),* }
            }

            /// Calls `f` for each operand.
            pub fn operands(&self, f: &mut dyn FnMut(&dyn super::reg::Operand)) {
                match self { $(Inst::$Family(inst) => inst.operands(f)),* }
            }

            /// Executes the instruction on the machine's active lanes.
            ///
            /// # Errors
            /// Whatever the machine stops with.
            pub fn exec<M: Machine>(&self, machine: &mut M) -> Result<(), M::Stop> {
                match self { $(Inst::$Family(inst) => inst.exec(machine)),* }
            }
        }

        /// All rows of the instruction table.
        pub fn table() -> impl Iterator<Item = &'static Row> {
            [$($module::$Family::TABLE),*].into_iter().flatten()
        }
    };
}

families!(
    Alu in alu,
    Half in half,
    Mem in mem,
    CopyAsync in async_copy,
    Tensor in tensor,
    Sync in sync,
    Control in control,
    Mbarrier in mbarrier,
    Bulk in bulk,
    Cluster in cluster,
    Wgmma in wgmma,
);

impl Inst {
    /// What the instruction needs: what its row does, or more if an operand is younger.
    pub fn since(&self) -> Since {
        match self {
            Inst::Alu(alu::Alu::MovU32Special(i)) if i.a == Special::ClusterCtarank => {
                ptx(7, 8, 90)
            }
            _ => self.row().since,
        }
    }

    /// Calls `f` for each register with what is done to it.
    pub fn registers(&self, f: &mut dyn FnMut(AnyReg, Role)) {
        self.operands(&mut |operand| operand.registers(f));
    }

    /// Calls `f` for each memory operand.
    pub fn places(&self, f: &mut dyn FnMut(Place)) {
        self.operands(&mut |operand| operand.places(f));
    }

    /// The label that the instruction may continue at.
    pub fn label(&self) -> Option<Label> {
        let mut label = None;
        self.operands(&mut |operand| label = label.or(operand.label()));
        label
    }

    /// The entry parameter that the instruction reads.
    pub fn param(&self) -> Option<Param> {
        let mut param = None;
        self.operands(&mut |operand| param = param.or(operand.param()));
        param
    }
}
