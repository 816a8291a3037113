//! Bulk copies: bytes in a row, tiles of tensor maps, one or several destinations, groups of stores.
//!
//! Everything happens at the issue, stamped with an agent (`agents.rs`), so nobody may touch the bytes before
//! the wait that tells of the copy's end. A load reads its source and writes its destination for the agent of
//! the barrier that counts it, in the phase that is current there. A store reads and writes for two agents
//! of the issuing thread, of which `wait_group.read` tells about the first and `wait_group` about both.
//! Prefetches are only checked for their range. A CTA must not end while its shared memory is still being
//! read or written: PTX says nothing of it, but the memory may belong to another CTA a moment later.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy"; "Tensors".

use super::agents::Agent;
use super::clock::{COPY, Stamp, WRITE};
use super::machine::{Executor, Stop};
use super::report::FaultKind;
use crate::asm::isa::{BulkLoad, BulkOp, BulkSource, SharedAt, TileStore};
use crate::backend::{Swizzle, TensorMap};
use crate::layout::swizzle_128b;

/// The address that stands for the first entry parameter; those of the others follow.
const PARAM_BASE: u64 = 0x5_0000_0000;
/// Bytes of a piece that the copies move.
const PIECE: u32 = 16;

/// The bulk stores of a thread.
#[derive(Debug)]
pub(super) struct BulkGroups {
    /// Groups closed so far.
    closed: u32,
    /// The newest store, if there is one.
    pub last: Option<Stamp>,
}

/// The bytes of one row of a tile: where they lie, and which of the matrix they are.
struct Row {
    /// First byte, from the start of the tile without a swizzle.
    at: u32,
    /// Bytes of the row that lie inside the matrix: from `first`, `bytes` of them; none if `bytes` is 0.
    first: u32,
    bytes: u32,
    /// Global address of byte `first`.
    addr: u64,
}

/// The rows of the tile whose first element is `(x, y)`.
fn rows(map: &TensorMap, [x, y]: [i32; 2]) -> impl Iterator<Item = Row> {
    let [width, height] = map.tile;
    let [columns, lines] = map.elements.map(|count| count as i64);
    let (base, pitch) = (map.base.addr(), map.row_bytes);
    (0..height).map(move |row| {
        let line = i64::from(y) + i64::from(row);
        let start = i64::from(x).clamp(0, columns);
        let end = (i64::from(x) + i64::from(width)).clamp(0, columns);
        let inside = (0..lines).contains(&line) && end > start;
        Row {
            at: row * 2 * width,
            first: if inside { 2 * (start - i64::from(x)) as u32 } else { 0 },
            bytes: if inside { 2 * (end - start) as u32 } else { 0 },
            addr: if inside { base + line as u64 * pitch + 2 * start as u64 } else { 0 },
        }
    })
}

impl Executor<'_> {
    /// What a row asks of the bulk copies.
    pub(super) fn bulk_op(&mut self, lane: u32, op: BulkOp) -> Result<(), Stop> {
        let thread = self.thread(lane);
        match op {
            BulkOp::Load(load) => self.bulk_load(lane, load),
            BulkOp::Store(store) => self.bulk_store(lane, store),
            BulkOp::Prefetch { addr, bytes } => self.prefetch(lane, addr, bytes),
            BulkOp::PrefetchMap { map } => self.tensor_map(lane, map).map(drop),
            BulkOp::Commit => {
                self.cta.bulk_groups.entry(thread).or_insert_with(BulkGroups::new).closed += 1;
                Ok(())
            }
            BulkOp::Wait { pending, read } => {
                let Some(groups) = self.cta.bulk_groups.get(&thread) else { return Ok(()) };
                let done = groups.closed.saturating_sub(pending);
                let reads = self.cta.agents.id(Agent::Reads(thread));
                self.cta.threads.raise(std::iter::once(thread), reads, done);
                if !read {
                    let writes = self.cta.agents.id(Agent::Writes(thread));
                    self.cta.threads.raise(std::iter::once(thread), writes, done);
                }
                Ok(())
            }
        }
    }

    /// The address that stands for a parameter.
    pub(super) fn param_address(index: u32) -> u64 {
        PARAM_BASE + u64::from(index) * u64::from(TensorMap::PARAM_BYTES)
    }

    /// The tensor map at an address.
    fn tensor_map(&self, lane: u32, addr: u64) -> Result<TensorMap, Stop> {
        let index = addr.wrapping_sub(PARAM_BASE) / u64::from(TensorMap::PARAM_BYTES);
        let map = self.launch.maps.get(index as usize).copied().flatten();
        map.filter(|_| Self::param_address(index as u32) == addr).ok_or_else(|| {
            self.fault(
                FaultKind::BadOperand,
                lane,
                "tile copy",
                format!("{addr:#x} is no tensor map of this launch"),
                "pass the map as an entry parameter and take its address with `cvta.param`",
            )
        })
    }

    fn bulk_load(&mut self, lane: u32, load: BulkLoad) -> Result<(), Stop> {
        let (data, align, swizzle, pieces) = match load.src {
            BulkSource::Bytes { addr, bytes } => {
                self.check_pieces(lane, addr, bytes)?;
                (vec![0; bytes as usize], PIECE, Swizzle::None, vec![(0, bytes, addr)])
            }
            BulkSource::Tile { map, at } => {
                let map = self.tensor_map(lane, map)?;
                self.check_tile_begin(lane, at)?;
                let inside = rows(&map, at).filter(|row| row.bytes > 0);
                let pieces = inside.map(|row| (row.at + row.first, row.bytes, row.addr)).collect();
                (vec![0; map.tile_bytes() as usize], 128, map.swizzle, pieces)
            }
        };
        let bytes = data.len();
        let targets = self.targets(lane, &load, bytes, align)?;
        let stamps: Vec<Stamp> = targets
            .iter()
            .map(|(rank, index, _)| self.barrier_stamp(lane, *rank, *index, WRITE | COPY))
            .collect();
        let mut data = data;
        let source = Stamp { flags: stamps[0].flags & !WRITE, ..stamps[0] };
        for (at, len, addr) in pieces {
            self.touch_async_global(lane, addr, len as usize, source)?;
            self.read_global_range(lane, addr, &mut data[at as usize..(at + len) as usize])?;
        }
        for ((rank, index, place), stamp) in targets.into_iter().zip(stamps) {
            self.touch_async(lane, rank, place..place + bytes, stamp, true)?;
            let smem_base = self.launch.program.smem_base;
            let shared = &mut self.state(rank).shared;
            match swizzle {
                Swizzle::None => shared.write_range(place, &data),
                Swizzle::B128 => {
                    for (n, piece) in data.chunks_exact(PIECE as usize).enumerate() {
                        let addr = smem_base + place as u32 + n as u32 * PIECE;
                        shared.write((swizzle_128b(addr) - smem_base) as usize, piece);
                    }
                }
            }
            self.land(lane, rank, index, bytes as u32, stamp)?;
        }
        Ok(())
    }

    /// The stamp of what completes on a barrier in its current phase.
    pub(super) fn barrier_stamp(
        &mut self,
        lane: u32,
        rank: usize,
        index: usize,
        flags: u16,
    ) -> Stamp {
        let (thread, pc) = (self.thread(lane), self.pc);
        let state = self.state(rank);
        let barrier = &state.barriers.list[index];
        Stamp::of_agent(state.index, barrier.agent, barrier.phase + 1, thread, flags, pc)
    }

    /// Where a load goes: rank, number of the barrier, place.
    fn targets(
        &mut self,
        lane: u32,
        load: &BulkLoad,
        bytes: usize,
        align: u32,
    ) -> Result<Vec<(usize, usize, usize)>, Stop> {
        let deed = "destination of a bulk copy";
        let (rank, place) = self.shared_range(lane, deed, load.dst, bytes, align)?;
        let (bar_rank, index) = self.find_barrier(lane, load.bar)?;
        if bar_rank != rank {
            let what = format!("destination in CTA {rank} of the cluster, barrier in {bar_rank}");
            let help = "a copy completes on a barrier of the CTA that it writes to";
            return Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help));
        }
        let size = self.cluster_size();
        let ranks: Vec<usize> = match load.ctas {
            None => vec![rank],
            Some(ctas) if ctas != 0 && u32::from(ctas) < 1 << size => {
                (0..size).filter(|rank| ctas >> rank & 1 != 0).collect()
            }
            Some(ctas) => {
                let what = format!("CTA mask {ctas:#x} in a cluster of {size}");
                let help = "name at least one CTA, and only those of the cluster";
                return Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help));
            }
        };
        let mut targets = Vec::new();
        for rank in ranks {
            let mut index = index;
            if rank != self.rank {
                self.check_peer(lane, rank, "bulk copy")?;
            }
            if load.ctas.is_some() {
                let at = SharedAt { addr: self.address_in(rank, load.bar.addr), ..load.bar };
                index = self.find_barrier(lane, at)?.1;
            }
            self.check_fenced_init(lane, rank, index)?;
            targets.push((rank, index, place));
        }
        Ok(targets)
    }

    /// A tile begins with a piece of 16 bytes, counted from the matrix's first: seen on an H200, which stops with an
    /// illegal instruction elsewhere.
    fn check_tile_begin(&self, lane: u32, at: [i32; 2]) -> Result<(), Stop> {
        if at[0].rem_euclid(PIECE as i32 / 2) == 0 {
            return Ok(());
        }
        let what =
            format!("a tile begins at element {} of a row, within a piece of 16 bytes", at[0]);
        let help = "begin at a multiple of 8 elements";
        Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help))
    }

    /// Alignment and size of bytes in a row.
    fn check_pieces(&self, lane: u32, addr: u64, bytes: u32) -> Result<(), Stop> {
        if bytes == 0 || !bytes.is_multiple_of(PIECE) {
            let what = format!("a bulk copy of {bytes} bytes");
            let help = "copy a positive multiple of 16 bytes";
            return Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help));
        }
        if !addr.is_multiple_of(PIECE.into()) {
            return Err(self.misaligned(lane, "source of a bulk copy", addr, PIECE as usize));
        }
        Ok(())
    }

    fn prefetch(&mut self, lane: u32, addr: u64, bytes: u32) -> Result<(), Stop> {
        self.check_pieces(lane, addr, bytes)?;
        match self.memory.find(addr, bytes as usize) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.memory_fault(lane, "prefetch", &error)),
        }
    }

    fn bulk_store(&mut self, lane: u32, store: TileStore) -> Result<(), Stop> {
        let (thread, pc, cta) = (self.thread(lane), self.pc, self.cta.index);
        let map = self.tensor_map(lane, store.map)?;
        let bytes = map.tile_bytes() as usize;
        let deed = "source of a bulk copy";
        let (rank, place) = self.shared_range(lane, deed, store.src, bytes, 128)?;
        if rank != self.rank {
            return Err(self.outside_shared(lane, deed, store.src.addr.into(), bytes));
        }
        let groups = self.cta.bulk_groups.entry(thread).or_insert_with(BulkGroups::new);
        let epoch = groups.closed + 1;
        let reads = self.cta.agents.id(Agent::Reads(thread));
        let writes = self.cta.agents.id(Agent::Writes(thread));
        let read = Stamp::of_agent(cta, reads, epoch, thread, COPY, pc);
        let write = Stamp::of_agent(cta, writes, epoch, thread, COPY | WRITE, pc);
        groups.last = Some(read);
        self.touch_async(lane, rank, place..place + bytes, read, true)?;
        self.check_tile_begin(lane, store.at)?;
        if store.at.iter().any(|place| *place < 0) {
            let what = format!("a tile is stored at {:?}, before the matrix", store.at);
            let help = "begin at 0 or later: the hardware stops with an illegal instruction, though loads may";
            return Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help));
        }
        let [columns, _] = map.elements;
        let leaves = i64::from(store.at[0]) + i64::from(map.tile[0]) > columns as i64;
        if leaves && !columns.is_multiple_of(8) && rows(&map, store.at).any(|row| row.bytes > 0) {
            let what = format!(
                "a tile that leaves rows of {columns} elements is stored: the hardware writes whole pieces of \
                 16 bytes, and the last one does not end with the row"
            );
            let help = "let rows have a multiple of 8 elements, or store the edge by threads";
            return Err(self.fault(FaultKind::BadOperand, lane, "bulk copy", what, help));
        }
        let smem_base = self.launch.program.smem_base;
        for row in rows(&map, store.at).filter(|row| row.bytes > 0) {
            let mut data = vec![0; row.bytes as usize];
            let mut done = 0;
            while done < row.bytes {
                let at = row.at + row.first + done;
                let size = (PIECE - at % PIECE).min(row.bytes - done);
                let plain = smem_base + place as u32 + at;
                let addr = match map.swizzle {
                    Swizzle::None => plain,
                    Swizzle::B128 => swizzle_128b(plain),
                };
                let part = &mut data[done as usize..(done + size) as usize];
                self.cta
                    .shared
                    .read((addr - smem_base) as usize, part)
                    .map_err(|byte| self.undefined_memory(lane, format!("shared byte {byte}")))?;
                done += size;
            }
            self.touch_async_global(lane, row.addr, data.len(), write)?;
            self.write_global_range(lane, row.addr, &data)?;
        }
        self.progress = true;
        Ok(())
    }
}

impl BulkGroups {
    fn new() -> Self {
        Self { closed: 0, last: None }
    }
}
