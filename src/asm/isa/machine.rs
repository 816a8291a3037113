//! `Machine`: what runs instructions, and the words in which the rows ask it for things.
//!
//! A row's meaning is written against this trait, so the assembler knows no emulator and a checker or tracer
//! can wrap another machine. Values of operands are had through [`Source`] and set through [`Destination`].
//! What only Hopper has is asked for by families: one method and one enumeration for barriers in shared
//! memory, bulk copies, clusters, grids and warpgroup products each.

use crate::asm::reg::{
    AnyReg, In, InOut, Label, Out, Param, Reg, RegRange, Region, SharedAddr, Use,
};
use crate::asm::types::{B32, F32, Order, RegClass, Space, Special};

/// One memory access of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The state space.
    pub space: Space,
    /// The address: of device memory, or an offset into the shared window.
    pub addr: u64,
    /// The shared region that the emitter promised to stay in.
    pub region: Option<Region>,
    /// How it takes part in the memory model.
    pub order: Order,
}

/// A copy from global to shared memory that completes asynchronously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncCopy {
    /// Shared address of the first byte written.
    pub dst: u32,
    /// The shared region that the emitter promised to stay in.
    pub region: Option<Region>,
    /// Global address of the first byte read.
    pub src: u64,
    /// Bytes written.
    pub bytes: u32,
    /// Bytes read; the rest of the destination is filled with zeros.
    pub src_bytes: u32,
}

/// A shared address of one lane: of its own CTA, or of another one of the cluster as `mapa` gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedAt {
    /// The address in the shared window.
    pub addr: u32,
    /// The shared region that the emitter promised to stay in.
    pub region: Option<Region>,
}

/// What is done to a barrier in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarrierOp {
    /// Begin phase 0; each phase expects this many arrivals.
    Init(u32),
    /// Raise the transaction count by bytes.
    ExpectTx(u32),
    /// Raise the transaction count by bytes, then arrive.
    Arrive(u32),
    /// Arrive at a barrier of the cluster, ordering memory within the CTA only.
    ArriveCluster,
    /// Ask whether the phase of this parity has completed.
    Test(u32),
}

/// A fence that lets the asynchronous proxy see what threads did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyFence {
    /// All accesses to shared memory.
    Async,
    /// The initialisation of barriers, also for the CTAs of the cluster.
    BarrierInit,
}

/// Where a bulk copy reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkSource {
    /// Bytes in a row.
    Bytes {
        /// The first one.
        addr: u64,
        /// How many.
        bytes: u32,
    },
    /// A tile of a tensor map.
    Tile {
        /// The map's address.
        map: u64,
        /// The tile's first element: in its row, and its row.
        at: [i32; 2],
    },
}

/// A bulk copy from global to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BulkLoad {
    /// The first byte written.
    pub dst: SharedAt,
    /// What is read.
    pub src: BulkSource,
    /// The barrier that counts the bytes.
    pub bar: SharedAt,
    /// The CTAs of the cluster that receive it, bit per rank; `None` for the one that `dst` names.
    pub ctas: Option<u16>,
}

/// A bulk copy of a tile from shared to global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileStore {
    /// The tensor map's address.
    pub map: u64,
    /// The tile's first element: in its row, and its row.
    pub at: [i32; 2],
    /// The first byte read.
    pub src: SharedAt,
}

/// What a lane asks of the bulk copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BulkOp {
    /// Start a load.
    Load(BulkLoad),
    /// Start a store in the lane's open bulk group.
    Store(TileStore),
    /// Bring bytes into the second-level cache.
    Prefetch {
        /// The first one.
        addr: u64,
        /// How many.
        bytes: u32,
    },
    /// Bring a tensor map to where tensor copies look it up.
    PrefetchMap {
        /// Its address.
        map: u64,
    },
    /// Close the lane's open bulk group.
    Commit,
    /// Wait for the lane's groups except the newest `pending`; if `read`, only until they have read.
    Wait {
        /// Groups that may be left.
        pending: u32,
        /// Only their reads are waited for.
        read: bool,
    },
}

/// What a warp does at the cluster's barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterOp {
    /// Arrive; if `release`, publish what the threads did.
    Arrive {
        /// Whether memory accesses are published.
        release: bool,
    },
    /// Wait until all threads of the cluster have arrived, and acquire.
    Wait,
}

/// How a grid stands to those before and after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GridOp {
    /// Wait until the grids before this one have completed.
    Wait,
    /// Let the grid after this one begin.
    LaunchDependents,
}

/// A warpgroup product `d[64][n] = a[64][16] * b[16][n] + (accumulate ? d : 0)` as it is issued by one warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Columns.
    pub n: u32,
    /// The accumulators.
    pub d: RegRange<F32>,
    /// The fragment of A.
    pub a: [Reg<B32>; 4],
    /// The descriptor of B.
    pub desc: u64,
    /// Whether the accumulators' values are added.
    pub accumulate: bool,
}

/// What orders warpgroup products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductOp {
    /// Order earlier register accesses before later products.
    Fence,
    /// Close the open group.
    Commit,
    /// Wait for all groups except this many of the newest.
    Wait(u32),
}

/// What runs instructions. The emulator implements it; a checker or tracer may wrap it.
///
/// Lane numbers are 0 to 31. `Err(Stop)` ends the launch; the machine's own type says why.
pub trait Machine {
    /// Why the machine stopped.
    type Stop;

    /// The lanes that execute the current instruction, bit per lane.
    fn active(&self) -> u32;
    /// The bits of a register, zero-extended. Reading a register that was never written is an error.
    fn read(&mut self, lane: u32, reg: AnyReg) -> Result<u64, Self::Stop>;
    /// Sets the bits of a register.
    fn write(&mut self, lane: u32, reg: AnyReg, bits: u64);
    /// A special register.
    fn special(&mut self, lane: u32, special: Special) -> u32;
    /// The shared-window address of byte 0 of the CTA's shared memory.
    fn smem_base(&self) -> u32;
    /// The value of an entry parameter, zero-extended.
    fn param(&mut self, param: Param) -> Result<u64, Self::Stop>;
    /// Loads `buf.len()` bytes (1 to 16, naturally aligned).
    fn load(&mut self, lane: u32, access: Access, buf: &mut [u8]) -> Result<(), Self::Stop>;
    /// Stores `buf.len()` bytes (1 to 16, naturally aligned).
    fn store(&mut self, lane: u32, access: Access, buf: &[u8]) -> Result<(), Self::Stop>;
    /// Replaces the 32-bit word at a place by `f` of it, atomically; the old value.
    fn atomic(
        &mut self,
        lane: u32,
        access: Access,
        f: &mut dyn FnMut(u32) -> u32,
    ) -> Result<u32, Self::Stop>;
    /// Starts an asynchronous copy in the lane's open group.
    fn copy_async(&mut self, lane: u32, copy: AsyncCopy) -> Result<(), Self::Stop>;
    /// Closes the lane's open group of asynchronous copies.
    fn commit_async(&mut self, lane: u32) -> Result<(), Self::Stop>;
    /// Completes the lane's groups except the newest `pending`.
    fn wait_async(&mut self, lane: u32, pending: u32) -> Result<(), Self::Stop>;
    /// A fence of the given order at GPU scope.
    fn fence(&mut self, lane: u32, order: Order) -> Result<(), Self::Stop>;
    /// The warp arrives at CTA barrier `id` and waits until `threads` threads (all if `None`) have.
    /// An instruction whose lanes name several barriers arrives at each, which the machine may refuse.
    fn barrier(&mut self, id: u32, threads: Option<u32>) -> Result<(), Self::Stop>;
    /// The lane waits for the lanes of `members`; their memory accesses before the meeting are ordered
    /// before those after.
    fn warp_barrier(&mut self, lane: u32, members: u32) -> Result<(), Self::Stop>;
    /// The lane continues at a label.
    fn jump(&mut self, lane: u32, label: Label) -> Result<(), Self::Stop>;
    /// The lane ends.
    fn exit(&mut self, lane: u32) -> Result<(), Self::Stop>;
    /// Does something to the barrier at `at` for one lane. Whether the phase asked for has completed;
    /// `true` for what asks nothing.
    fn mbarrier(&mut self, lane: u32, at: SharedAt, op: BarrierOp) -> Result<bool, Self::Stop>;
    /// A proxy fence.
    fn proxy_fence(&mut self, lane: u32, fence: ProxyFence) -> Result<(), Self::Stop>;
    /// A bulk copy, or what orders them.
    fn bulk(&mut self, lane: u32, op: BulkOp) -> Result<(), Self::Stop>;
    /// The address of an entry parameter.
    fn param_addr(&mut self, lane: u32, param: Param) -> Result<u64, Self::Stop>;
    /// The address of `addr` in the CTA of the cluster with this rank.
    fn peer_addr(&mut self, lane: u32, addr: u32, rank: u32) -> Result<u32, Self::Stop>;
    /// Starts an asynchronous store of 16 bytes that barrier `bar` of the same CTA counts.
    fn store_async(
        &mut self,
        lane: u32,
        at: SharedAt,
        value: [u8; 16],
        bar: SharedAt,
    ) -> Result<(), Self::Stop>;
    /// The warp arrives at the cluster's barrier or waits there.
    fn cluster(&mut self, op: ClusterOp) -> Result<(), Self::Stop>;
    /// The lane waits for other grids or lets them go.
    fn grid(&mut self, lane: u32, op: GridOp) -> Result<(), Self::Stop>;
    /// The lane of the warp that `elect.sync` elects.
    fn elected(&self) -> u32;
    /// The warp's threads have `n` registers from now on: more than before if `more`, which may have to
    /// wait, else fewer.
    fn set_registers(&mut self, n: u32, more: bool) -> Result<(), Self::Stop>;
    /// Begins a product of the warp; fills `b` with its second operand, fp16 bits by column and k.
    fn product(&mut self, product: &Product, b: &mut [[u16; 16]]) -> Result<(), Self::Stop>;
    /// Orders products.
    fn order_products(&mut self, op: ProductOp) -> Result<(), Self::Stop>;
    /// Adds to four floats in a row, each atomically; subnormal operands and results count as zero.
    fn reduce_f32(&mut self, lane: u32, access: Access, values: [f32; 4])
    -> Result<(), Self::Stop>;

    /// The value of a source operand.
    #[inline]
    fn get<S: Source>(&mut self, lane: u32, source: S) -> Result<S::Value, Self::Stop>
    where
        Self: Sized,
    {
        source.value(self, lane)
    }
    /// Sets a destination operand.
    #[inline]
    fn set<D: Destination>(&mut self, lane: u32, destination: D, value: D::Value)
    where
        Self: Sized,
    {
        self.write(lane, destination.reg(), D::to_bits(value));
    }

    /// The shared address that an operand names in a lane.
    #[inline]
    fn shared_at(&mut self, lane: u32, addr: SharedAddr) -> Result<SharedAt, Self::Stop>
    where
        Self: Sized,
    {
        let base = self.get(lane, Use(addr.base))?;
        Ok(SharedAt { addr: base.wrapping_add_signed(addr.offset), region: addr.region })
    }
}

/// An operand that has a value.
pub trait Source {
    /// The value's type.
    type Value;
    /// The value in `lane`.
    fn value<M: Machine>(self, machine: &mut M, lane: u32) -> Result<Self::Value, M::Stop>;
}

/// An operand that takes a value.
pub trait Destination {
    /// The value's type.
    type Value;
    /// The register written.
    fn reg(&self) -> AnyReg;
    /// The bits to write.
    fn to_bits(value: Self::Value) -> u64;
}

macro_rules! sources {
    ($($Name:ident),*) => {$(
        impl<C: RegClass> Source for $Name<C> {
            type Value = C::Value;
            #[inline]
            fn value<M: Machine>(self, machine: &mut M, lane: u32) -> Result<C::Value, M::Stop> {
                machine.read(lane, self.0.any()).map(C::from_bits)
            }
        }
    )*};
}
sources!(Use, InOut);

impl<C: RegClass> Source for In<C> {
    type Value = C::Value;
    #[inline]
    fn value<M: Machine>(self, machine: &mut M, lane: u32) -> Result<C::Value, M::Stop> {
        match self {
            In::Reg(reg) => machine.read(lane, reg.any()).map(C::from_bits),
            In::Imm(bits) => Ok(C::from_bits(bits)),
        }
    }
}

macro_rules! destinations {
    ($($Name:ident),*) => {$(
        impl<C: RegClass> Destination for $Name<C> {
            type Value = C::Value;
            fn reg(&self) -> AnyReg {
                self.0.any()
            }
            fn to_bits(value: C::Value) -> u64 {
                C::to_bits(value)
            }
        }
    )*};
}
destinations!(Out, InOut);
