//! Device memory and shared memory: bytes, which of them are defined, and who touched them.
//!
//! Allocations lie in a 64-bit address space of their own with gaps between them, so that an address that
//! leaves one does not land in the next; freed addresses are never used again. Every byte is undefined
//! until it is written. The record of accesses ([`Line`]) lasts one launch: launches are ordered.

use super::check::{LINE, Line};

/// Lines of a page of access records; pages are made when first touched.
const PAGE: usize = 256;
/// The address of the first allocation.
const FIRST_ADDRESS: u64 = 0x7_0000_0000;
/// Alignment of allocations, in bytes.
const ALIGN: u64 = 256;
/// Least distance between two allocations, in bytes.
const GAP: u64 = 64 << 10;

/// Bytes with definedness per byte and an access record per line.
#[derive(Debug)]
pub(super) struct Bytes {
    data: Vec<u8>,
    /// One bit per byte, one word per line.
    defined: Vec<u16>,
    lines: Vec<Option<Box<[Line]>>>,
    len: usize,
}

/// The bits of `size` bytes at `offset` in a line's mask.
fn mask(offset: usize, size: usize) -> u16 {
    (((1u32 << size) - 1) << offset) as u16
}

impl Bytes {
    /// `len` undefined bytes.
    pub fn new(len: usize) -> Self {
        let num_lines = len.div_ceil(LINE);
        Self {
            data: vec![0; num_lines * LINE],
            defined: vec![0; num_lines],
            lines: Vec::new(),
            len,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Reads; the offset of the first undefined byte is the error. The range lies within one line.
    #[inline]
    pub fn read(&self, at: usize, buf: &mut [u8]) -> Result<(), usize> {
        let wanted = mask(at % LINE, buf.len());
        let missing = wanted & !self.defined[at / LINE];
        if missing != 0 {
            return Err(at / LINE * LINE + missing.trailing_zeros() as usize);
        }
        buf.copy_from_slice(&self.data[at..at + buf.len()]);
        Ok(())
    }

    /// Writes. The range lies within one line.
    #[inline]
    pub fn write(&mut self, at: usize, buf: &[u8]) {
        self.defined[at / LINE] |= mask(at % LINE, buf.len());
        self.data[at..at + buf.len()].copy_from_slice(buf);
    }

    /// Writes any range.
    pub fn write_range(&mut self, at: usize, bytes: &[u8]) {
        self.data[at..at + bytes.len()].copy_from_slice(bytes);
        let mut at = at;
        let end = at + bytes.len();
        while at < end {
            let size = (LINE - at % LINE).min(end - at);
            self.defined[at / LINE] |= mask(at % LINE, size);
            at += size;
        }
    }

    /// Copies any range out, undefined bytes as zeros: the host may look at everything.
    fn read_range(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.data[at..at + bytes.len()]);
    }

    /// The access record of the line that holds byte `at`.
    #[inline]
    pub fn line(&mut self, at: usize) -> &mut Line {
        let line = at / LINE;
        if self.lines.is_empty() {
            self.lines.resize_with(self.defined.len().div_ceil(PAGE), || None);
        }
        let page = self.lines[line / PAGE]
            .get_or_insert_with(|| (0..PAGE).map(|_| Line::default()).collect());
        &mut page[line % PAGE]
    }

    fn forget_accesses(&mut self) {
        self.lines = Vec::new();
    }
}

/// An allocation.
#[derive(Debug)]
pub(super) struct Allocation {
    pub start: u64,
    pub bytes: Bytes,
    /// A bit per line: written by a launch that nothing has waited for.
    fresh: Vec<u64>,
}

impl Allocation {
    /// The device writes. The range lies within one line.
    #[inline]
    pub fn write(&mut self, at: usize, buf: &[u8]) {
        self.bytes.write(at, buf);
        if self.fresh.is_empty() {
            self.fresh = vec![0; self.bytes.len().div_ceil(64 * LINE)];
        }
        let line = at / LINE;
        self.fresh[line / 64] |= 1 << (line % 64);
    }

    /// Whether one of these bytes was written by a launch that nothing has waited for.
    pub fn is_fresh(&self, at: usize, size: usize) -> bool {
        let mut lines = at / LINE..(at + size).div_ceil(LINE);
        !self.fresh.is_empty() && lines.any(|line| self.fresh[line / 64] >> (line % 64) & 1 != 0)
    }
}

/// Why an address range is not one of device memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// No live allocation holds the range.
    #[error("{bytes} bytes at {addr:#x} lie in no allocation ({near}); allocate enough first")]
    OutOfBounds {
        /// First byte of the range.
        addr: u64,
        /// Its length.
        bytes: u64,
        /// The nearest allocation, in words.
        near: String,
    },
    /// The range was freed.
    #[error("{addr:#x} lies in an allocation that was freed ({near}); free it after its last use")]
    Freed {
        /// First byte of the range.
        addr: u64,
        /// The freed allocation, in words.
        near: String,
    },
    /// The address is not the start of a live allocation.
    #[error("{addr:#x} is no start of a live allocation; free what `alloc` returned, once")]
    NotAnAllocation {
        /// The address.
        addr: u64,
    },
    /// More than the emulator offers.
    #[error(
        "{asked} bytes asked with {used} in use, limit {limit}; free memory or raise the limit"
    )]
    TooMuch {
        /// Bytes asked for.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes that exist.
        limit: u64,
    },
}

/// Device memory.
#[derive(Debug)]
pub struct Memory {
    /// Live allocations, ascending.
    allocations: Vec<Allocation>,
    /// Start and length of freed allocations, ascending.
    freed: Vec<(u64, u64)>,
    next: u64,
    used: u64,
    limit: u64,
    last: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(4 << 30)
    }
}

impl Memory {
    /// Empty memory that holds at most `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self {
            allocations: Vec::new(),
            freed: Vec::new(),
            next: FIRST_ADDRESS,
            used: 0,
            limit,
            last: 0,
        }
    }

    /// Allocates undefined bytes at a multiple of 256.
    ///
    /// # Errors
    /// [`MemoryError::TooMuch`].
    pub fn alloc(&mut self, bytes: u64) -> Result<u64, MemoryError> {
        if bytes > self.limit - self.used {
            return Err(MemoryError::TooMuch { asked: bytes, used: self.used, limit: self.limit });
        }
        let start = self.next;
        self.next = (start + bytes + GAP).next_multiple_of(ALIGN);
        self.used += bytes;
        self.allocations.push(Allocation {
            start,
            bytes: Bytes::new(bytes as usize),
            fresh: Vec::new(),
        });
        Ok(start)
    }

    /// Frees the allocation that starts at `addr`.
    ///
    /// # Errors
    /// [`MemoryError::NotAnAllocation`].
    pub fn free(&mut self, addr: u64) -> Result<(), MemoryError> {
        let index = self
            .allocations
            .binary_search_by_key(&addr, |allocation| allocation.start)
            .map_err(|_| MemoryError::NotAnAllocation { addr })?;
        let allocation = self.allocations.remove(index);
        let bytes = allocation.bytes.len() as u64;
        self.used -= bytes;
        let place = self.freed.partition_point(|(start, _)| *start < addr);
        self.freed.insert(place, (addr, bytes));
        Ok(())
    }

    /// Writes bytes; they are defined afterwards.
    ///
    /// # Errors
    /// If the range is not allocated.
    pub fn upload(&mut self, addr: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        let (allocation, at) = self.find(addr, bytes.len())?;
        allocation.bytes.write_range(at, bytes);
        let lines = at / LINE..(at + bytes.len()).div_ceil(LINE);
        if !allocation.fresh.is_empty() {
            lines.for_each(|line| allocation.fresh[line / 64] &= !(1 << (line % 64)));
        }
        Ok(())
    }

    /// All launches until now have been waited for: whatever they wrote is visible to later ones.
    pub(super) fn settle(&mut self) {
        self.allocations.iter_mut().for_each(|allocation| allocation.fresh = Vec::new());
    }

    /// Reads bytes, undefined ones as zeros.
    ///
    /// # Errors
    /// If the range is not allocated.
    pub fn download(&mut self, addr: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        let (allocation, at) = self.find(addr, bytes.len())?;
        allocation.bytes.read_range(at, bytes);
        Ok(())
    }

    /// The allocation that holds the range, and the range's offset in it.
    #[inline]
    pub(super) fn find(
        &mut self,
        addr: u64,
        size: usize,
    ) -> Result<(&mut Allocation, usize), MemoryError> {
        let holds = |allocation: &Allocation| {
            let at = addr.wrapping_sub(allocation.start);
            at <= allocation.bytes.len() as u64 && size as u64 <= allocation.bytes.len() as u64 - at
        };
        if !self.allocations.get(self.last).is_some_and(holds) {
            let after = self.allocations.partition_point(|allocation| allocation.start <= addr);
            self.last = after.wrapping_sub(1);
            if !self.allocations.get(self.last).is_some_and(holds) {
                return Err(self.explain(addr, size as u64));
            }
        }
        let allocation = &mut self.allocations[self.last];
        let at = (addr - allocation.start) as usize;
        Ok((allocation, at))
    }

    /// Which rule an address range outside all allocations breaks.
    #[cold]
    fn explain(&self, addr: u64, bytes: u64) -> MemoryError {
        let words = |start: u64, len: u64| {
            let end = start + len;
            if addr < start {
                format!("{} bytes before the {len} bytes at {start:#x}", start - addr)
            } else if addr >= end {
                format!("{} bytes past the end of the {len} bytes at {start:#x}", addr - end)
            } else {
                format!("byte {} of the {len} bytes at {start:#x}", addr - start)
            }
        };
        if let Some((start, len)) =
            self.freed.iter().find(|(start, len)| (*start..start + len).contains(&addr))
        {
            return MemoryError::Freed { addr, near: words(*start, *len) };
        }
        let distance = |allocation: &&Allocation| {
            let end = allocation.start + allocation.bytes.len() as u64;
            if addr < allocation.start { allocation.start - addr } else { addr.saturating_sub(end) }
        };
        let near = match self.allocations.iter().min_by_key(distance) {
            Some(near) => words(near.start, near.bytes.len() as u64),
            None => "nothing is allocated".to_owned(),
        };
        MemoryError::OutOfBounds { addr, bytes, near }
    }

    /// A launch has ended: what comes next is ordered after it.
    pub(super) fn forget_accesses(&mut self) {
        self.allocations.iter_mut().for_each(|allocation| allocation.bytes.forget_accesses());
    }
}
