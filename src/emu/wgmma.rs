//! Warpgroup products: registers in flight, the second operand in shared memory, what a warpgroup shares.
//!
//! A product's result is computed when it is issued; until a wait covers its group, ordinary instructions may
//! touch neither its accumulators nor its A registers, and whoever overwrites its B in shared memory races with
//! it (`agents.rs`). Registers that ordinary instructions touched must pass `wgmma.fence` before a product
//! uses them. The four warps of a warpgroup execute the same products, fences, commits and waits in the same
//! order; each waits for its own quarter. Of descriptors, K-major ones without a swizzle and with the 128-byte
//! swizzle are modelled, with 1024-byte atoms at multiples of 1024.
//! Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

use std::collections::VecDeque;
use std::sync::Arc;

use super::check::{LINE, View};
use super::clock::{ASYNC, Stamp};
use super::machine::{Executor, Stop};
use super::program::Program;
use super::report::{Fault, FaultKind};
use crate::asm::isa::{Product, ProductOp, lanes};
use crate::asm::reg::AnyReg;
use crate::layout::Descriptor;

/// One register of at most 32 bits, as products see it.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// The newest group with a product that accumulates here; 0 if there is none.
    d_group: u32,
    /// That product's first accumulator and columns.
    shape: (u32, u32),
    /// The newest group with a product that has it in A.
    a_group: u32,
    /// One more than the number of fences before the last ordinary access.
    touched: u32,
}

/// The products of a warp.
#[derive(Debug)]
pub(super) struct Products {
    agent: u16,
    slots: Vec<Slot>,
    /// Groups closed so far, and those known to be complete.
    closed: u32,
    done: u32,
    fences: u32,
}

impl Products {
    /// For a warp of a program that has products.
    pub fn new(program: &Program, agent: u16) -> Self {
        let slots = vec![Slot::default(); program.num_words];
        Self { agent, slots, closed: 0, done: 0, fences: 0 }
    }
}

/// What the warps of a warpgroup have executed together.
#[derive(Debug, Default)]
pub(super) struct Warpgroup {
    /// The instructions that not all have executed, with what must agree.
    log: VecDeque<(u32, (u64, bool))>,
    /// Number of the first of them.
    first: u64,
    /// How many each warp has executed.
    at: [u64; 4],
}

impl Executor<'_> {
    /// Ordinary accesses to registers that products use: `(slot, written)`.
    pub(super) fn touch_products(&mut self, touched: &[(u32, bool)]) -> Result<(), Stop> {
        let Some(products) = &mut self.warp.products else { return Ok(()) };
        let mut in_flight = None;
        for (slot, _) in touched {
            let state = &mut products.slots[*slot as usize];
            if state.d_group > products.done || state.a_group > products.done {
                in_flight = Some((*slot, state.d_group > products.done));
                break;
            }
            state.touched = products.fences + 1;
        }
        match in_flight {
            None => Ok(()),
            Some((slot, is_d)) => Err(self.register_in_flight(slot, is_d)),
        }
    }

    #[cold]
    fn register_in_flight(&self, slot: u32, is_d: bool) -> Stop {
        let reg = self.launch.program.word_register(slot as usize);
        let what = match is_d {
            true => format!("{reg} is the accumulator of a product in flight"),
            false => format!("{reg} is in the A fragment of a product in flight"),
        };
        let help = "commit the group and wait for it (`wgmma.wait_group`) before the register is used, \
                    or use another one";
        let lane = self.active.trailing_zeros();
        self.fault(FaultKind::RegisterInFlight, lane, "register used", what, help)
    }

    /// Notes that the warp executes something that its warpgroup executes together.
    pub(super) fn follow_group(&mut self, what: (u64, bool)) -> Result<(), Stop> {
        let (group, member) = (self.warp.index as usize / 4, self.warp.index as usize % 4);
        let lane = self.active.trailing_zeros();
        if self.launch.program.threads < (group as u32 + 1) * 128 {
            let what = "the CTA's last warpgroup has fewer than four warps".into();
            let help = "give the CTA a multiple of 128 threads";
            return Err(self.fault(FaultKind::WarpgroupMismatch, lane, "executed", what, help));
        }
        let pc = self.pc;
        let shared = &mut self.cta.warpgroups[group];
        let place = (shared.at[member] - shared.first) as usize;
        shared.at[member] += 1;
        match shared.log.get(place) {
            None => shared.log.push_back((pc, what)),
            Some(known) if *known == (pc, what) => {}
            Some((other, _)) => {
                let other = *other;
                return Err(self.group_differs(lane, other));
            }
        }
        let shared = &mut self.cta.warpgroups[group];
        let slowest = shared.at.iter().copied().min().unwrap_or(0);
        while shared.first < slowest {
            shared.log.pop_front();
            shared.first += 1;
        }
        Ok(())
    }

    #[cold]
    fn group_differs(&self, lane: u32, other: u32) -> Stop {
        let first = self.warp.index / 4 * 4;
        let there = self.site(self.cta.index, first * 32, other, "executed there".into());
        Box::new(Fault {
            kind: FaultKind::WarpgroupMismatch,
            what: format!(
                "warps {first} to {} are a warpgroup and execute different products, or one with \
                 different operands",
                first + 3
            ),
            accesses: vec![self.here(lane, "executed here"), there],
            help: "let all four warps take the same path with the same descriptors".into(),
        })
    }

    /// All warps of each warpgroup have executed the same.
    pub(super) fn check_groups_end(&self) -> Result<(), Stop> {
        for (group, shared) in self.cta.warpgroups.iter().enumerate() {
            if let Some((pc, _)) = shared.log.front() {
                let lag = (0..4).min_by_key(|member| shared.at[*member]).unwrap_or(0);
                let what = format!(
                    "warp {} has ended without what others of its warpgroup executed",
                    4 * group + lag
                );
                let lead = (0..4).max_by_key(|member| shared.at[*member]).unwrap_or(0);
                let thread = (4 * group + lead) as u32 * 32;
                return Err(Box::new(Fault {
                    kind: FaultKind::WarpgroupMismatch,
                    what,
                    accesses: vec![self.site(self.cta.index, thread, *pc, "executed".into())],
                    help: "let all four warps take the same path".into(),
                }));
            }
        }
        Ok(())
    }

    /// Fences, commits and waits.
    pub(super) fn products_op(&mut self, op: ProductOp) -> Result<(), Stop> {
        self.follow_group((0, false))?;
        let first = self.warp.index * 32;
        let members = lanes(self.active).map(|lane| first + lane);
        let Some(products) = &mut self.warp.products else { return Ok(()) };
        match op {
            ProductOp::Fence => products.fences += 1,
            ProductOp::Commit => products.closed += 1,
            ProductOp::Wait(pending) => {
                products.done = products.done.max(products.closed.saturating_sub(pending));
                self.cta.threads.raise(members, products.agent, products.done);
            }
        }
        Ok(())
    }

    /// Begins a product: its registers, then its second operand.
    pub(super) fn begin_product(
        &mut self,
        product: &Product,
        b: &mut [[u16; 16]],
    ) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let n = product.n;
        if !(8..=256).contains(&n) || !n.is_multiple_of(8) || product.d.len() != n / 2 {
            let what = format!("{n} columns in {} accumulators", product.d.len());
            let help = "8 to 256 columns in steps of 8, half as many accumulators";
            return Err(self.fault(FaultKind::BadOperand, lane, "product", what, help));
        }
        self.check_uniform(product)?;
        self.follow_group((product.desc, product.accumulate))?;
        self.take_registers(product)?;
        self.read_b(product, b)
    }

    /// The descriptor and the scale are those of all lanes.
    fn check_uniform(&self, product: &Product) -> Result<(), Stop> {
        // The operands' registers are those of the instruction; compare them lane by lane.
        let mut differs = None;
        let step = &self.launch.program.steps[self.pc as usize];
        step.inst.registers(&mut |reg, _| {
            let is_scalar =
                !matches!(reg.class, crate::asm::types::Class::F32 | crate::asm::types::Class::B32);
            let lanes = lanes(self.active);
            if is_scalar && differs.is_none() {
                let first = self.raw(self.active.trailing_zeros(), reg);
                differs = lanes
                    .into_iter()
                    .find(|lane| self.raw(*lane, reg) != first)
                    .map(|lane| (lane, reg));
            }
        });
        match differs {
            None => Ok(()),
            Some((lane, reg)) => {
                let what = format!("{reg} differs between lanes ({:#x} here)", product.desc);
                let help = "descriptor and scale are the same in all threads of a warpgroup";
                Err(self.fault(FaultKind::WarpgroupMismatch, lane, "product", what, help))
            }
        }
    }

    /// A register's bits, whatever they are.
    fn raw(&self, lane: u32, reg: AnyReg) -> u64 {
        match reg.class {
            crate::asm::types::Class::B64 => self.warp.longs[reg.id as usize * 32 + lane as usize],
            _ => {
                let slot = self.launch.program.slot(reg);
                self.warp.words[slot * 32 + lane as usize].into()
            }
        }
    }

    fn take_registers(&mut self, product: &Product) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let program = self.launch.program;
        let first_d = program.slot(product.d.get(0).any()) as u32;
        let shape = (first_d, product.n);
        let Some(products) = &mut self.warp.products else { return Ok(()) };
        let group = products.closed + 1;
        let (done, fences) = (products.done, products.fences);
        let mut wrong: Option<(u32, FaultKind, &str)> = None;
        for slot in first_d..first_d + product.n / 2 {
            let state = &mut products.slots[slot as usize];
            if state.a_group > done {
                wrong = Some((
                    slot,
                    FaultKind::RegisterInFlight,
                    "is in the A fragment of a product in flight",
                ));
            } else if state.d_group > done && state.shape != shape {
                wrong = Some((
                    slot,
                    FaultKind::RegisterInFlight,
                    "accumulates a product of another shape in flight",
                ));
            } else if state.touched > fences {
                wrong =
                    Some((slot, FaultKind::MissingFence, "was used since the last `wgmma.fence`"));
            }
            state.d_group = group;
            state.shape = shape;
        }
        for reg in product.a {
            let slot = program.slot(reg.any()) as u32;
            let state = &mut products.slots[slot as usize];
            if state.d_group > done {
                wrong =
                    Some((slot, FaultKind::RegisterInFlight, "accumulates a product in flight"));
            } else if state.touched > fences {
                wrong =
                    Some((slot, FaultKind::MissingFence, "was used since the last `wgmma.fence`"));
            }
            state.a_group = group;
        }
        if fences == 0 {
            let what = "the first product without a `wgmma.fence` before it".to_owned();
            let help = "execute `wgmma.fence` before the first product";
            return Err(self.fault(FaultKind::MissingFence, lane, "product", what, help));
        }
        if let Some((slot, kind, why)) = wrong {
            let what = format!("{} {why}", self.launch.program.word_register(slot as usize));
            let help = "order the product after other uses of its registers: `wgmma.fence` after \
                        ordinary ones, `wgmma.wait_group` after those of unlike products";
            return Err(self.fault(kind, lane, "product", what, help));
        }
        Ok(())
    }

    /// The places of B, checked.
    fn descriptor(&self, lane: u32, product: &Product) -> Result<Descriptor, Stop> {
        let bad = |what: String, help: &str| {
            self.fault(FaultKind::BadOperand, lane, "product", what, help)
        };
        let Some(descriptor) = Descriptor::decode(product.desc) else {
            let what = format!("descriptor {:#018x} has bits outside its fields", product.desc);
            return Err(bad(what, "mask each field to its width"));
        };
        let unsupported = |what: String| {
            self.fault(
                FaultKind::Unsupported,
                lane,
                "product",
                what,
                "use a descriptor of the other kind",
            )
        };
        match descriptor.swizzle {
            Descriptor::NONE => Ok(descriptor),
            Descriptor::B128 => {
                if descriptor.base_offset != 0 {
                    return Err(unsupported(format!("base offset {}", descriptor.base_offset)));
                }
                let (row, unit) = (descriptor.start / 128 % 8, descriptor.start / 16 % 8);
                if row != 0 {
                    let what = format!(
                        "swizzled operand at {:#x}, {row} rows of 128 bytes into a pattern of 8",
                        descriptor.start
                    );
                    return Err(bad(
                        what,
                        "begin atoms at multiples of 1024 bytes; step through k within 128",
                    ));
                }
                if unit > 6 {
                    return Err(bad(
                        format!("a k16 step at unit {unit} of a row of 8 units"),
                        "step through k by 32 bytes within 128",
                    ));
                }
                if product.n > 8 && !descriptor.stride_bytes.is_multiple_of(1024) {
                    return Err(unsupported(format!(
                        "stride of {} bytes",
                        descriptor.stride_bytes
                    )));
                }
                Ok(descriptor)
            }
            other => Err(unsupported(format!("swizzle mode {other}"))),
        }
    }

    /// Reads B through the asynchronous proxy.
    fn read_b(&mut self, product: &Product, b: &mut [[u16; 16]]) -> Result<(), Stop> {
        let lane = self.active.trailing_zeros();
        let descriptor = self.descriptor(lane, product)?;
        let Some(products) = &self.warp.products else { return Ok(()) };
        let (agent, group) = (products.agent, products.closed + 1);
        let thread = self.thread(lane);
        let stamp = Stamp::of_agent(self.cta.index, agent, group, thread, 0, self.pc);
        let known = Arc::clone(&self.cta.threads.get(thread).known);
        let view = View { known: &known, cta: self.cta.index, thread: thread as u16 };
        // The writes that the product is ordered after must be known to every lane.
        let mut writes: Vec<(usize, Stamp)> = Vec::new();
        let (smem_base, len) = (self.launch.program.smem_base, self.cta.shared.len());
        for (column, values) in b.iter_mut().enumerate() {
            for half in 0..2 {
                let addr = descriptor.address(column as u32, half);
                let at = addr.wrapping_sub(smem_base) as usize;
                if at > len || len - at < LINE {
                    return Err(self.outside_shared(
                        lane,
                        "operand of a product",
                        addr.into(),
                        LINE,
                    ));
                }
                if let Some(flight) = self.cta.flights.over(at, LINE) {
                    return Err(self.in_flight(lane, stamp, *flight, at));
                }
                let line = self.cta.shared.line(at);
                line.writes(|write| {
                    if writes.last().is_none_or(|(_, last)| last != write) {
                        writes.push((at, *write));
                    }
                });
                // Whether a thread's write has passed a fence is asked below, where all are.
                if let Err(earlier) = line.access(0, LINE, stamp, view) {
                    return Err(self.race(lane, stamp, earlier, format!("shared byte {at}")));
                }
                let mut bytes = [0; LINE];
                if let Err(byte) = self.cta.shared.read(at, &mut bytes) {
                    return Err(self.undefined_memory(lane, format!("shared byte {byte}")));
                }
                let halves = &mut values[8 * half as usize..8 * half as usize + 8];
                for (value, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = u16::from_le_bytes([bytes[0], bytes[1]]);
                }
            }
        }
        writes.dedup_by_key(|(_, write)| *write);
        self.check_b_writes(&writes, &stamp)
    }

    /// The last writes to B are known to all lanes, and those of threads have passed a proxy fence.
    fn check_b_writes(&mut self, writes: &[(usize, Stamp)], stamp: &Stamp) -> Result<(), Stop> {
        let mut last: Option<Arc<super::clock::Knowledge>> = None;
        for lane in lanes(self.active) {
            let thread = self.thread(lane);
            let known = Arc::clone(&self.cta.threads.get(thread).known);
            if last.as_ref().is_some_and(|last| Arc::ptr_eq(last, &known)) {
                continue;
            }
            for (at, write) in writes {
                let is_own = write.flags & ASYNC == 0
                    && write.cta == self.cta.index
                    && u32::from(write.thread) == thread;
                if !is_own && !known.covers(write) {
                    return Err(self.race(lane, *stamp, *write, format!("shared byte {at}")));
                }
                if write.flags & ASYNC == 0 && write.cta != u32::MAX {
                    self.check_fenced(lane, write, stamp, *at)?;
                }
            }
            last = Some(known);
        }
        Ok(())
    }
}
