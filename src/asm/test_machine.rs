//! A machine of one warp for the assembler's own tests: registers, flat memories, a log of accesses. It
//! knows no races, no waits and no divergence; copies complete at once.

use std::collections::HashMap;

use super::isa::{
    Access, AsyncCopy, BarrierOp, BulkOp, ClusterOp, GridOp, Inst, Machine, Product, ProductOp,
    ProxyFence, SharedAt,
};
use super::module::Module;
use super::reg::{AnyReg, Label, Param};
use super::types::{Order, Space, Special};

/// Where shared memory begins in the shared window; not 0, so that a forgotten base shows.
const SMEM_BASE: u32 = 1024;

#[derive(Default)]
pub struct TestMachine {
    active: u32,
    pub regs: HashMap<(u32, AnyReg), u64>,
    pub memory: HashMap<(Space, u64), u8>,
    /// Length of every access since the last instruction.
    pub widths: Vec<usize>,
}

impl TestMachine {
    /// Executes a program without branches in lane 0.
    pub fn run(module: &Module) -> Self {
        let mut machine = Self { active: 1, ..Self::default() };
        for node in module.nodes() {
            let holds = node.guard.is_none_or(|guard| {
                let bits = machine.regs.get(&(0, guard.pred.any())).copied().unwrap_or(0);
                (bits != 0) != guard.negated
            });
            if holds {
                node.inst.exec(&mut machine).expect("this machine never stops");
            }
        }
        machine
    }

    /// The widths of the accesses of one instruction, executed by the whole warp.
    pub fn widths_of(inst: &Inst) -> Vec<usize> {
        let mut machine = Self { active: u32::MAX, ..Self::default() };
        inst.exec(&mut machine).expect("this machine never stops");
        machine.widths
    }
}

impl Machine for TestMachine {
    type Stop = std::convert::Infallible;

    fn active(&self) -> u32 {
        self.active
    }
    fn read(&mut self, lane: u32, reg: AnyReg) -> Result<u64, Self::Stop> {
        Ok(self.regs.get(&(lane, reg)).copied().unwrap_or(0))
    }
    fn write(&mut self, lane: u32, reg: AnyReg, bits: u64) {
        self.regs.insert((lane, reg), bits);
    }
    fn special(&mut self, lane: u32, _special: Special) -> u32 {
        lane
    }
    fn smem_base(&self) -> u32 {
        SMEM_BASE
    }
    fn param(&mut self, param: Param) -> Result<u64, Self::Stop> {
        Ok(param.index.into())
    }
    fn load(&mut self, _lane: u32, access: Access, buf: &mut [u8]) -> Result<(), Self::Stop> {
        self.widths.push(buf.len());
        for (n, byte) in buf.iter_mut().enumerate() {
            let key = (access.space, access.addr + n as u64);
            *byte = self.memory.get(&key).copied().unwrap_or(0);
        }
        Ok(())
    }
    fn store(&mut self, _lane: u32, access: Access, buf: &[u8]) -> Result<(), Self::Stop> {
        self.widths.push(buf.len());
        for (n, byte) in buf.iter().enumerate() {
            self.memory.insert((access.space, access.addr + n as u64), *byte);
        }
        Ok(())
    }
    fn atomic(
        &mut self,
        lane: u32,
        access: Access,
        f: &mut dyn FnMut(u32) -> u32,
    ) -> Result<u32, Self::Stop> {
        let mut word = [0; 4];
        self.load(lane, access, &mut word)?;
        let old = u32::from_le_bytes(word);
        self.store(lane, access, &f(old).to_le_bytes())?;
        Ok(old)
    }
    fn copy_async(&mut self, lane: u32, copy: AsyncCopy) -> Result<(), Self::Stop> {
        let access = |space, addr| Access { space, addr, region: None, order: Order::Weak };
        let mut buf = vec![0; copy.bytes as usize];
        self.load(lane, access(Space::Global, copy.src), &mut buf)?;
        self.store(lane, access(Space::Shared, copy.dst.into()), &buf)
    }
    fn commit_async(&mut self, _lane: u32) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn wait_async(&mut self, _lane: u32, _newest: u32) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn fence(&mut self, _lane: u32, _order: Order) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn barrier(&mut self, _id: u32, _threads: Option<u32>) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn warp_barrier(&mut self, _lane: u32, _members: u32) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn jump(&mut self, _lane: u32, _label: Label) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn exit(&mut self, _lane: u32) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn mbarrier(&mut self, _: u32, _: SharedAt, _: BarrierOp) -> Result<bool, Self::Stop> {
        self.widths.push(8);
        Ok(true)
    }
    fn proxy_fence(&mut self, _lane: u32, _fence: ProxyFence) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn bulk(&mut self, _lane: u32, op: BulkOp) -> Result<(), Self::Stop> {
        if !matches!(op, BulkOp::PrefetchMap { .. } | BulkOp::Commit | BulkOp::Wait { .. }) {
            self.widths.push(16);
        }
        Ok(())
    }
    fn param_addr(&mut self, _lane: u32, param: Param) -> Result<u64, Self::Stop> {
        Ok(param.index.into())
    }
    fn peer_addr(&mut self, _lane: u32, addr: u32, _rank: u32) -> Result<u32, Self::Stop> {
        Ok(addr)
    }
    fn store_async(
        &mut self,
        lane: u32,
        at: SharedAt,
        value: [u8; 16],
        _bar: SharedAt,
    ) -> Result<(), Self::Stop> {
        let access = Access {
            space: Space::Shared,
            addr: at.addr.into(),
            region: at.region,
            order: Order::Weak,
        };
        self.store(lane, access, &value)
    }
    fn cluster(&mut self, _op: ClusterOp) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn grid(&mut self, _lane: u32, _op: GridOp) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn elected(&self) -> u32 {
        0
    }
    fn set_registers(&mut self, _n: u32, _more: bool) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn product(&mut self, _product: &Product, _b: &mut [[u16; 16]]) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn order_products(&mut self, _op: ProductOp) -> Result<(), Self::Stop> {
        Ok(())
    }
    fn reduce_f32(
        &mut self,
        _lane: u32,
        access: Access,
        values: [f32; 4],
    ) -> Result<(), Self::Stop> {
        self.widths.push(16);
        for (n, value) in values.into_iter().enumerate() {
            for (b, byte) in value.to_le_bytes().into_iter().enumerate() {
                self.memory.insert((access.space, access.addr + (4 * n + b) as u64), byte);
            }
        }
        Ok(())
    }
}
