//! What the instruction rows ask of the machine.

use super::async_ops::Flight;
use super::clock::{ATOMIC, COPY, WRITE};
use super::machine::{Executor, Stop};
use super::report::FaultKind;
use crate::asm::isa::{
    Access, AsyncCopy, BarrierOp, BulkOp, ClusterOp, GridOp, Machine, Product, ProductOp,
    ProxyFence, SharedAt,
};
use crate::asm::reg::{AnyReg, Label, Param};
use crate::asm::types::{Class, Order, Space, Special};

/// Whether an access of this order acquires.
fn acquires(order: Order) -> bool {
    matches!(order, Order::AcquireGpu | Order::AcqRelGpu)
}

/// Whether an access of this order releases.
fn releases(order: Order) -> bool {
    matches!(order, Order::ReleaseGpu | Order::AcqRelGpu)
}

fn atomic_flag(order: Order) -> u16 {
    if order == Order::Weak { 0 } else { ATOMIC }
}

impl Machine for Executor<'_> {
    type Stop = Stop;

    #[inline(always)]
    fn active(&self) -> u32 {
        self.active
    }

    #[inline(always)]
    fn read(&mut self, lane: u32, reg: AnyReg) -> Result<u64, Stop> {
        let slot = self.launch.program.slot(reg);
        if self.warp.defined[slot] >> lane & 1 == 0 {
            return Err(self.undefined_register(lane, reg));
        }
        Ok(match reg.class {
            Class::B64 => self.warp.longs[reg.id as usize * 32 + lane as usize],
            _ => self.warp.words[slot * 32 + lane as usize].into(),
        })
    }

    #[inline(always)]
    fn write(&mut self, lane: u32, reg: AnyReg, bits: u64) {
        let slot = self.launch.program.slot(reg);
        self.warp.defined[slot] |= 1 << lane;
        match reg.class {
            Class::B64 => self.warp.longs[reg.id as usize * 32 + lane as usize] = bits,
            _ => self.warp.words[slot * 32 + lane as usize] = bits as u32,
        }
    }

    fn special(&mut self, lane: u32, special: Special) -> u32 {
        let [x, y] = self.launch.ctaid(self.cta.index);
        match special {
            Special::TidX => self.thread(lane),
            Special::NtidX => self.launch.program.threads,
            Special::CtaidX => x,
            Special::CtaidY => y,
            Special::NctaidX => self.launch.grid[0],
            Special::NctaidY => self.launch.grid[1],
            Special::Laneid => lane,
            Special::ClusterCtarank => self.rank as u32,
        }
    }

    fn smem_base(&self) -> u32 {
        self.launch.program.smem_base
    }

    fn param(&mut self, param: Param) -> Result<u64, Stop> {
        match self.launch.args.get(param.index as usize) {
            Some(value) => Ok(*value),
            None => Err(self.fault(
                FaultKind::BadOperand,
                self.active.trailing_zeros(),
                "read",
                format!("the entry has no parameter {}", param.name),
                "declare the parameter with this builder",
            )),
        }
    }

    fn load(&mut self, lane: u32, access: Access, buf: &mut [u8]) -> Result<(), Stop> {
        let stamp = self.stamp(lane, atomic_flag(access.order));
        match access.space {
            Space::Shared => {
                let size = buf.len();
                let at = self.shared_place(lane, "read", access.addr, access.region, size)?;
                self.banks.note(lane, at as u32, size as u32);
                self.touch_shared(lane, at, size, stamp)?;
                self.cta
                    .shared
                    .read(at, buf)
                    .map_err(|byte| self.undefined_memory(lane, format!("shared byte {byte}")))
            }
            Space::Global => {
                self.touch_global(lane, access.addr, buf.len(), stamp)?;
                self.read_global(lane, access.addr, buf)?;
                if access.order != Order::Weak {
                    let thread = self.thread(lane);
                    let words = self.launch.words.borrow();
                    let word = words.get(access.addr);
                    self.cta.threads.atomic_read(thread, word, acquires(access.order));
                }
                Ok(())
            }
        }
    }

    fn store(&mut self, lane: u32, access: Access, buf: &[u8]) -> Result<(), Stop> {
        let stamp = self.stamp(lane, WRITE | atomic_flag(access.order));
        match access.space {
            Space::Shared => {
                let size = buf.len();
                let at = self.shared_place(lane, "write", access.addr, access.region, size)?;
                self.banks.note(lane, at as u32, size as u32);
                self.touch_shared(lane, at, size, stamp)?;
                self.cta.shared.write(at, buf);
                self.progress = true;
                Ok(())
            }
            Space::Global => {
                self.touch_global(lane, access.addr, buf.len(), stamp)?;
                self.write_global(lane, access.addr, buf)?;
                let mut words = self.launch.words.borrow_mut();
                if access.order != Order::Weak {
                    let thread = self.thread(lane);
                    let release = releases(access.order);
                    let word = self.cta.threads.atomic_write(thread, None, release);
                    words.set(access.addr, word);
                } else {
                    words.overwrite(access.addr, buf.len() as u64);
                }
                Ok(())
            }
        }
    }

    fn atomic(
        &mut self,
        lane: u32,
        access: Access,
        f: &mut dyn FnMut(u32) -> u32,
    ) -> Result<u32, Stop> {
        if access.space == Space::Shared {
            return Err(self.fault(
                FaultKind::Unsupported,
                lane,
                "atomic",
                "atomic operations on shared memory".into(),
                "use global memory, or a barrier and ordinary accesses",
            ));
        }
        let stamp = self.stamp(lane, WRITE | ATOMIC);
        self.touch_global(lane, access.addr, 4, stamp)?;
        let mut buf = [0; 4];
        self.read_global(lane, access.addr, &mut buf)?;
        let old = u32::from_le_bytes(buf);
        self.write_global(lane, access.addr, &f(old).to_le_bytes())?;
        let thread = self.thread(lane);
        let mut words = self.launch.words.borrow_mut();
        let word = words.get(access.addr);
        self.cta.threads.atomic_read(thread, word, acquires(access.order));
        let word = self.cta.threads.atomic_write(thread, word, releases(access.order));
        words.set(access.addr, word);
        Ok(old)
    }

    fn copy_async(&mut self, lane: u32, copy: AsyncCopy) -> Result<(), Stop> {
        let size = copy.bytes as usize;
        if copy.src_bytes > copy.bytes {
            return Err(self.fault(
                FaultKind::BadOperand,
                lane,
                "asynchronous copy",
                format!("{} source bytes for a copy of {size}", copy.src_bytes),
                "the source size is at most the size of the copy",
            ));
        }
        let at =
            self.shared_place(lane, "asynchronous copy", copy.dst.into(), copy.region, size)?;
        if !copy.src.is_multiple_of(u64::from(copy.bytes)) {
            return Err(self.misaligned(lane, "source of an asynchronous copy", copy.src, size));
        }
        self.banks.note(lane, at as u32, copy.bytes);
        let mut data = [0; 16];
        let source = self.stamp(lane, COPY);
        self.read_source(lane, copy.src, &mut data[..copy.src_bytes as usize], source)?;
        let stamp = self.stamp(lane, WRITE | COPY);
        self.touch_shared(lane, at, size, stamp)?;
        let flight = Flight { at: at as u32, bytes: copy.bytes, data, stamp };
        self.cta.flights.issue(self.thread(lane), flight);
        self.progress = true;
        Ok(())
    }

    fn commit_async(&mut self, lane: u32) -> Result<(), Stop> {
        self.cta.flights.commit(self.thread(lane));
        Ok(())
    }

    fn wait_async(&mut self, lane: u32, pending: u32) -> Result<(), Stop> {
        let thread = self.thread(lane);
        while let Some(flight) = self.cta.flights.complete(thread, pending) {
            let (at, size) = (flight.at as usize, flight.bytes as usize);
            // Written by this lane now, but by the instruction that issued the copy.
            let stamp = flight.stamp;
            let stamp = super::clock::Stamp { pc: stamp.pc, ..self.stamp(lane, stamp.flags) };
            self.touch_shared(lane, at, size, stamp)?;
            self.cta.shared.write(at, &flight.data[..size]);
        }
        Ok(())
    }

    fn fence(&mut self, lane: u32, _order: Order) -> Result<(), Stop> {
        self.cta.threads.fence(self.thread(lane));
        Ok(())
    }

    fn barrier(&mut self, id: u32, threads: Option<u32>) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let misuse = |what: String| {
            let help = "barriers are numbered 0 to 15, all lanes of a warp name the same one; the \
                        count is a positive multiple of 32 and at most the CTA's threads";
            self.fault(FaultKind::BarrierMisuse, lane, "arrived", what, help)
        };
        if let Some((other, _)) = self.arrival {
            return Err(misuse(format!("lanes of one warp name barriers {other} and {id}")));
        }
        if id > 15 {
            return Err(misuse(format!("barrier {id} does not exist")));
        }
        let most = self.launch.program.threads.next_multiple_of(32);
        if let Some(count) = threads
            && (count == 0 || !count.is_multiple_of(32) || count > most)
        {
            return Err(misuse(format!("barrier {id} for {count} threads of {most}")));
        }
        self.arrival = Some((id, threads));
        Ok(())
    }

    fn warp_barrier(&mut self, lane: u32, members: u32) -> Result<(), Stop> {
        if members >> lane & 1 == 0 {
            return Err(self.fault(
                FaultKind::BarrierMisuse,
                lane,
                "arrived",
                format!("lane {lane} is not in its own mask {members:#010x}"),
                "a lane that executes `bar.warp.sync` must be in the mask",
            ));
        }
        self.warp.wait_for(lane, members);
        Ok(())
    }

    fn jump(&mut self, lane: u32, label: Label) -> Result<(), Stop> {
        let Some(pc) = self.launch.program.target(label) else {
            return Err(self.fault(
                FaultKind::BadOperand,
                lane,
                "branch",
                format!("label {label} is bound nowhere"),
                "bind the label",
            ));
        };
        self.warp.place(lane, pc);
        Ok(())
    }

    fn exit(&mut self, lane: u32) -> Result<(), Stop> {
        self.warp.live &= !(1 << lane);
        self.progress = true;
        Ok(())
    }

    fn mbarrier(&mut self, lane: u32, at: SharedAt, op: BarrierOp) -> Result<bool, Stop> {
        self.mbarrier_op(lane, at, op)
    }

    fn proxy_fence(&mut self, lane: u32, fence: ProxyFence) -> Result<(), Stop> {
        self.fence_proxy(lane, fence);
        Ok(())
    }

    fn bulk(&mut self, lane: u32, op: BulkOp) -> Result<(), Stop> {
        self.bulk_op(lane, op)
    }

    fn param_addr(&mut self, _lane: u32, param: Param) -> Result<u64, Stop> {
        Ok(Self::param_address(param.index))
    }

    fn peer_addr(&mut self, lane: u32, addr: u32, rank: u32) -> Result<u32, Stop> {
        self.mapped(lane, addr, rank)
    }

    fn store_async(
        &mut self,
        lane: u32,
        at: SharedAt,
        value: [u8; 16],
        bar: SharedAt,
    ) -> Result<(), Stop> {
        self.async_store(lane, at, value, bar)
    }

    fn cluster(&mut self, op: ClusterOp) -> Result<(), Stop> {
        self.cluster_op(op)
    }

    fn grid(&mut self, lane: u32, op: GridOp) -> Result<(), Stop> {
        self.grid_op(lane, op);
        Ok(())
    }

    fn elected(&self) -> u32 {
        self.launch.elected
    }

    fn set_registers(&mut self, n: u32, more: bool) -> Result<(), Stop> {
        self.change_registers(n, more)
    }

    fn product(&mut self, product: &Product, b: &mut [[u16; 16]]) -> Result<(), Stop> {
        self.begin_product(product, b)
    }

    fn order_products(&mut self, op: ProductOp) -> Result<(), Stop> {
        self.products_op(op)
    }

    fn reduce_f32(&mut self, lane: u32, access: Access, values: [f32; 4]) -> Result<(), Stop> {
        let stamp = self.stamp(lane, WRITE | ATOMIC);
        self.touch_global(lane, access.addr, 16, stamp)?;
        let mut bytes = [0; 16];
        self.read_global(lane, access.addr, &mut bytes)?;
        for (old, value) in bytes.chunks_exact_mut(4).zip(values) {
            let sum =
                flushed(f32::from_le_bytes([old[0], old[1], old[2], old[3]])) + flushed(value);
            old.copy_from_slice(&canonical(flushed(sum)).to_le_bytes());
        }
        self.write_global(lane, access.addr, &bytes)?;
        let thread = self.thread(lane);
        let mut words = self.launch.words.borrow_mut();
        for addr in (access.addr..access.addr + 16).step_by(4) {
            let old = words.get(addr);
            let word = self.cta.threads.atomic_write(thread, old, false);
            words.set(addr, word);
        }
        Ok(())
    }
}

/// A subnormal counts as a zero of its sign.
fn flushed(value: f32) -> f32 {
    if value.is_subnormal() { 0.0f32.copysign(value) } else { value }
}

/// Every NaN is the one that PTX defines.
fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7fff_ffff) } else { value }
}

impl Executor<'_> {
    /// Reads the source of an asynchronous copy, any number of bytes up to 16.
    fn read_source(
        &mut self,
        lane: u32,
        src: u64,
        data: &mut [u8],
        stamp: super::clock::Stamp,
    ) -> Result<(), Stop> {
        let mut at = 0;
        while at < data.len() {
            // The largest naturally aligned pieces, so that a short source is checked exactly.
            let size = 1 << (data.len() - at).ilog2();
            self.touch_global(lane, src + at as u64, size, stamp)?;
            self.read_global(lane, src + at as u64, &mut data[at..at + size])?;
            at += size;
        }
        Ok(())
    }
}
