//! The race detector: for each place in memory, the accesses that a later one must be ordered after.
//!
//! Memory is watched in lines of 16 bytes, the size of the widest access and of a row of `ldmatrix`. A line
//! that was only touched as a whole has one [`Cell`]; the first narrower access splits it into cells of
//! [`GRANULE`] bytes, a whole-line write joins it again. A cell keeps the last write and those reads since
//! that are not ordered before another kept one, which is enough to find every first race: an access
//! ordered after the kept ones is ordered after all.
//! Two atomic accesses never race with each other; an atomic and a weak one do.

use super::clock::{ATOMIC, Knowledge, Stamp, WRITE};

/// Bytes of a line.
pub(super) const LINE: usize = 16;
/// Bytes of the finest cell; narrower accesses by different threads to one granule count as a conflict.
const GRANULE: usize = 2;
const CELLS: usize = LINE / GRANULE;

/// The accesses to one place.
#[derive(Clone, Debug)]
struct Cell {
    write: Stamp,
    others: Others,
}

/// Reads since the last write, and atomic writes that the last write was not ordered after.
#[derive(Clone, Debug)]
enum Others {
    None,
    One(Stamp),
    Many(Vec<Stamp>),
}

impl Default for Cell {
    fn default() -> Self {
        Cell { write: Stamp::NOBODY, others: Others::None }
    }
}

/// The accesses to 16 bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    whole: Cell,
    split: Option<Box<[Cell; CELLS]>>,
}

impl Line {
    /// Records an access of `size` bytes at `offset` by a thread that knows `known`.
    ///
    /// # Errors
    /// The earlier access that nothing orders before this one.
    #[inline]
    pub fn access(
        &mut self,
        offset: usize,
        size: usize,
        stamp: Stamp,
        known: &Knowledge,
    ) -> Result<(), Stamp> {
        if size == LINE && self.split.is_none() {
            return self.whole.access(stamp, known);
        }
        self.access_cells(offset, size, stamp, known)
    }

    fn access_cells(
        &mut self,
        offset: usize,
        size: usize,
        stamp: Stamp,
        known: &Knowledge,
    ) -> Result<(), Stamp> {
        let whole = &self.whole;
        let cells =
            self.split.get_or_insert_with(|| Box::new(std::array::from_fn(|_| whole.clone())));
        for cell in &mut cells[offset / GRANULE..(offset + size).div_ceil(GRANULE)] {
            cell.access(stamp, known)?;
        }
        if size == LINE && stamp.flags & WRITE != 0 {
            self.whole = cells[0].clone();
            self.split = None;
        }
        Ok(())
    }
}

impl Cell {
    #[inline]
    fn access(&mut self, stamp: Stamp, known: &Knowledge) -> Result<(), Stamp> {
        let before = |earlier: &Stamp| earlier.same_thread(&stamp) || known.covers(earlier);
        let both_atomic = |earlier: &Stamp| earlier.flags & stamp.flags & ATOMIC != 0;
        if !before(&self.write) && !both_atomic(&self.write) {
            return Err(self.write);
        }
        if stamp.flags & WRITE == 0 {
            return self.others.read(stamp, before);
        }
        if let Some(race) = self.others.find(|earlier| !before(earlier) && !both_atomic(earlier)) {
            return Err(race);
        }
        if stamp.flags & ATOMIC == 0 {
            self.others = Others::None;
        } else {
            // A later weak access must be ordered after every atomic one, not only after the last.
            self.others.retain(|earlier| !before(earlier));
            if !before(&self.write) {
                self.others.push(self.write);
            }
        }
        self.write = stamp;
        Ok(())
    }
}

impl Others {
    fn find(&self, matches: impl Fn(&Stamp) -> bool) -> Option<Stamp> {
        match self {
            Others::None => None,
            Others::One(stamp) => Some(*stamp).filter(|stamp| matches(stamp)),
            Others::Many(stamps) => stamps.iter().copied().find(|stamp| matches(stamp)),
        }
    }

    fn retain(&mut self, keep: impl Fn(&Stamp) -> bool) {
        match self {
            Others::None => {}
            Others::One(stamp) if keep(stamp) => {}
            Others::One(_) => *self = Others::None,
            Others::Many(stamps) => stamps.retain(|stamp| keep(stamp)),
        }
    }

    fn push(&mut self, stamp: Stamp) {
        match self {
            Others::None => *self = Others::One(stamp),
            Others::One(first) => *self = Others::Many(vec![*first, stamp]),
            Others::Many(stamps) => stamps.push(stamp),
        }
    }

    /// Records a read that is ordered after the last write.
    #[inline]
    fn read(&mut self, stamp: Stamp, before: impl Fn(&Stamp) -> bool) -> Result<(), Stamp> {
        // Whoever is ordered after this read is ordered after one before it, so the earlier one can go;
        // unless this one is atomic, which an unordered atomic write may follow, and that one is not.
        let replaces = |o: &Stamp| o.flags & (WRITE | ATOMIC) == stamp.flags & ATOMIC && before(o);
        match self {
            Others::None => *self = Others::One(stamp),
            Others::One(only) if replaces(only) => *only = stamp,
            _ => {
                let unordered_write = |o: &Stamp| o.flags & WRITE != 0 && !before(o);
                if stamp.flags & ATOMIC == 0
                    && let Some(race) = self.find(unordered_write)
                {
                    return Err(race);
                }
                self.add_read(stamp, replaces);
            }
        }
        Ok(())
    }

    fn add_read(&mut self, stamp: Stamp, replaces: impl Fn(&Stamp) -> bool) {
        if let Others::Many(stamps) = self {
            let same = |o: &Stamp| o.same_thread(&stamp) && replaces(o);
            if let Some(same) = stamps.iter().position(same) {
                stamps[same] = stamp;
                return;
            }
            // Tidied now and then: often enough to stay short, rarely enough to cost nothing.
            if stamps.len().is_power_of_two() {
                stamps.retain(|o| !replaces(o));
            }
        }
        self.push(stamp);
    }
}
