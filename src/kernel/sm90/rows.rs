//! A team's ring of activations: `cp.async` by its lanes, several runs ahead.
//!
//! A slot's copies are one group. A slot is refilled after the team has met, which says both that all its
//! copies into the next slot are complete and that all its reads of this one are over: at the beginning of the
//! next run, but by a team of one warp in this one, which begins with its reads. Every copy of a
//! lane has a pointer of its own, so that the runs of the unrolled loop differ by constants.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy".

use super::weights::Warp;
use crate::asm::reg::{Imm, Reg, Region};
use crate::asm::types::{B32, B64, Cmp, Pred};
use crate::asm::{Asm, Stream};
use crate::kernel::epilogue::Thread;
use crate::kernel::params::{Params, load_u32, load_u64};
use crate::kernel::problem::{Config, Rows};
use crate::kernel::stream::{Geometry, ROW_BYTES, RowCopies, emit_team_barrier};
use crate::kernel::stripe::Segment;

/// The ring and what advances from run to run.
pub(super) struct RowRing<'a> {
    config: &'a Config,
    pub(super) slots: Vec<Region>,
    params: Params,
    thread: Thread,
    team: Reg<B32>,
    copies: RowCopies,
    /// Address of each copy's source for the first run that the loop asks for.
    from: Vec<Reg<B64>>,
    /// Inputs left from the lane's next activations on, in bytes of a row.
    bytes_left: Option<Reg<B32>>,
}

impl<'a> RowRing<'a> {
    /// The ring's shared memory.
    pub(super) fn plan(a: &mut Asm, config: &Config, num_slots: u32) -> Vec<Region> {
        let bytes = config.warps_k * Geometry::new(config).rows_bytes;
        (0..num_slots)
            .map(|slot| a.smem.region(&format!("slot {slot}: activations"), bytes, 128))
            .collect()
    }

    pub(super) fn new(
        a: &mut Asm,
        config: &'a Config,
        params: &Params,
        slots: Vec<Region>,
        warp: &Warp,
        thread: &Thread,
    ) -> Self {
        let geometry = Geometry::new(config);
        let copies = RowCopies::new(a, config, &geometry, warp.smem, thread.tid, warp.team);
        Self {
            config,
            slots,
            params: *params,
            thread: *thread,
            team: warp.team,
            from: (0..copies.num_copies).map(|_| a.reg()).collect(),
            copies,
            bytes_left: (config.rows != Rows::Whole).then(|| a.reg()),
        }
    }

    pub(super) fn num_slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Bytes of a row from one run of the team to its next.
    fn step(&self) -> u32 {
        self.config.warps_k * ROW_BYTES
    }

    /// Whether the team is one warp, which refills a slot as soon as it has read it.
    fn is_alone(&self) -> bool {
        self.config.warps_n == 1
    }

    /// Runs whose activations are on their way while the next is waited for.
    fn ahead(&self) -> u32 {
        self.num_slots() - if self.is_alone() { 0 } else { 1 }
    }

    /// The team meets.
    pub(super) fn emit_barrier(&self, a: &mut Asm) {
        emit_team_barrier(a, self.config, self.team);
    }

    /// Points at the team's first run of a segment and asks for its first runs.
    pub(super) fn emit_fill(&self, a: &mut Asm, segment: &Segment, num_runs: Reg<B32>) {
        a.section("fill the activations' ring", |a| {
            let [first, byte, zero, num_rows] = a.regs();
            a.add_u32(first, segment.begin, self.team);
            a.mul_lo_u32(byte, first, ROW_BYTES);
            a.mad_lo_u32(byte, self.copies.unit, 16, byte);
            // The top bit of a tile's number, 0, but the assembler cannot know: it would otherwise keep what
            // follows in registers during the main loop.
            a.shr_u32(zero, segment.tile, 31);
            a.add_u32(num_rows, self.thread.num_rows, zero);
            let stride = load_u32(a, self.params.a_stride_bytes);
            let a_ptr = load_u64(a, self.params.a_ptr);
            let tile_ptr: Reg<B64> = a.reg();
            a.mad_wide_u32(tile_ptr, self.thread.row_begin, stride, a_ptr);
            a.mad_wide_u32(tile_ptr, byte, 1, tile_ptr);
            let offsets = self.copies.emit_from(a, num_rows, stride);
            for (from, offset) in self.from.iter().zip(offsets) {
                a.mad_wide_u32(*from, offset, 1, tile_ptr);
            }
            if let Some(left) = self.bytes_left {
                let k = load_u32(a, self.params.k);
                a.add_u32(left, k, k);
                a.sub_u32(left, left, byte);
            }
            for slot in 0..self.ahead() {
                let exists = a.test_u32(Cmp::Gt, num_runs, slot);
                self.emit_copies(a, slot, slot, exists);
                a.cp_async_commit_group();
            }
            self.emit_advance(a, self.ahead());
        });
    }

    /// Waits until the oldest slot's activations are there for the whole team, and until the team has finished
    /// with the slot before, then refills that; a team of one warp refills the oldest slot itself, as soon as
    /// it has read it. `run` is the number of the run in the loop. What of `loads`, those of the batch, is not
    /// done yet.
    pub(super) fn emit_begin_run(
        &self,
        a: &mut Asm,
        run: u32,
        num_runs: Reg<B32>,
        loads: Stream,
    ) -> Stream {
        a.cp_async_wait_group(Imm(self.ahead() - 1));
        self.emit_barrier(a);
        if self.is_alone() {
            a.append(loads);
            self.emit_barrier(a);
            self.emit_request(a, run, num_runs);
            return Stream::new();
        }
        self.emit_request(a, run, num_runs);
        loads
    }

    fn emit_request(&self, a: &mut Asm, run: u32, num_runs: Reg<B32>) {
        let exists = a.test_u32(Cmp::Gt, num_runs, self.ahead());
        self.emit_copies(a, (run + self.ahead()) % self.num_slots(), run, exists);
        a.cp_async_commit_group();
    }

    /// Copies the activations of the run `ahead` runs past `from`, if it `exists`. Inputs that do not exist
    /// become zeros.
    fn emit_copies(&self, a: &mut Asm, slot: u32, ahead: u32, exists: Reg<Pred>) {
        let rows = self.slots[slot as usize];
        if let Some(takes_part) = self.copies.takes_part {
            a.and_pred(exists, exists, takes_part);
        }
        // Bytes of the lane's unit that lie inside the row: 0 to 16.
        let inside = self.bytes_left.map(|left| {
            let inside = a.reg();
            a.max_s32(inside, left, 0);
            a.min_u32(inside, inside, 16);
            a.sub_u32(left, left, self.step());
            inside
        });
        for (c, from) in self.from.iter().enumerate() {
            let (base, offset) = self.copies.to(c as u32);
            let to = base.at(rows.start + offset).within(rows);
            let from = from.at((ahead * self.step()) as i32);
            a.when(exists, |a| match inside {
                Some(inside) => a.cp_async_cg_16_zfill(to, from, inside),
                None => a.cp_async_cg_16(to, from),
            });
        }
    }

    /// Moves on by some runs.
    pub(super) fn emit_advance(&self, a: &mut Asm, runs: u32) {
        for from in &self.from {
            a.add_u64(*from, *from, u64::from(runs * self.step()));
        }
    }
}
