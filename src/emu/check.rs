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

/// Who makes an access, as far as its order goes: what is known, and whose own earlier accesses come before
/// it without a word. For an agent's access that is the thread that issued it.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub known: &'a Knowledge,
    pub cta: u32,
    pub thread: u16,
}

impl View<'_> {
    #[inline]
    fn before(&self, earlier: &Stamp) -> bool {
        earlier.cta == self.cta && earlier.thread == self.thread || self.known.covers(earlier)
    }
}

/// The accesses to one place.
#[derive(Clone, Debug)]
struct Cell {
    write: Stamp,
    others: Others,
}

/// Reads since the last write; if that was atomic, also older writes that it does not stand for.
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
    /// Records an access of `size` bytes at `offset`, seen from `view`.
    ///
    /// # Errors
    /// The earlier access that nothing orders before this one.
    #[inline]
    pub fn access(
        &mut self,
        offset: usize,
        size: usize,
        stamp: Stamp,
        view: View<'_>,
    ) -> Result<(), Stamp> {
        if size == LINE && self.split.is_none() {
            return self.whole.access(stamp, view);
        }
        self.access_cells(offset, size, stamp, view)
    }

    /// Calls `f` with the last write of each part.
    #[inline]
    pub fn writes(&self, mut f: impl FnMut(&Stamp)) {
        match &self.split {
            None => f(&self.whole.write),
            Some(cells) => cells.iter().for_each(|cell| f(&cell.write)),
        }
    }

    /// Calls `f` with the reads since the last write of each part that `offset` and `size` touch.
    pub fn reads(&self, offset: usize, size: usize, mut f: impl FnMut(&Stamp)) {
        let cells = match &self.split {
            None => std::slice::from_ref(&self.whole),
            Some(cells) => &cells[offset / GRANULE..(offset + size).div_ceil(GRANULE)],
        };
        for cell in cells {
            cell.others.each(|access| {
                if access.flags & WRITE == 0 {
                    f(access);
                }
            });
        }
    }

    fn access_cells(
        &mut self,
        offset: usize,
        size: usize,
        stamp: Stamp,
        view: View<'_>,
    ) -> Result<(), Stamp> {
        let whole = &self.whole;
        let cells =
            self.split.get_or_insert_with(|| Box::new(std::array::from_fn(|_| whole.clone())));
        for cell in &mut cells[offset / GRANULE..(offset + size).div_ceil(GRANULE)] {
            cell.access(stamp, view)?;
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
    fn access(&mut self, stamp: Stamp, view: View<'_>) -> Result<(), Stamp> {
        let before = |earlier: &Stamp| view.before(earlier);
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
            self.others.clear();
        } else {
            // A later weak access must be ordered after every atomic one, not only after the last; a
            // later atomic one after every weak one.
            let matters = |earlier: &Stamp| earlier.flags & ATOMIC == 0 || !before(earlier);
            self.others.retain(matters);
            if self.write.cta != u32::MAX && matters(&self.write) {
                self.others.push(self.write);
            }
        }
        self.write = stamp;
        Ok(())
    }
}

impl Others {
    /// Empties the list; a long one keeps its memory, for buffers are read by as many again.
    #[inline]
    fn clear(&mut self) {
        match self {
            Others::Many(stamps) => stamps.clear(),
            _ => *self = Others::None,
        }
    }

    fn find(&self, matches: impl Fn(&Stamp) -> bool) -> Option<Stamp> {
        match self {
            Others::None => None,
            Others::One(stamp) => Some(*stamp).filter(|stamp| matches(stamp)),
            Others::Many(stamps) => stamps.iter().copied().find(|stamp| matches(stamp)),
        }
    }

    fn each(&self, f: impl FnMut(&Stamp)) {
        match self {
            Others::None => {}
            Others::One(stamp) => std::slice::from_ref(stamp).iter().for_each(f),
            Others::Many(stamps) => stamps.iter().for_each(f),
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
        // Whoever knows of an agent's read knows of its earlier ones.
        let replaces = |o: &Stamp| {
            o.flags & (WRITE | ATOMIC) == stamp.flags & ATOMIC
                && (before(o) || o.same_thread(&stamp) && o.epoch <= stamp.epoch)
        };
        match self {
            Others::None => *self = Others::One(stamp),
            Others::One(only) if replaces(only) => *only = stamp,
            _ => {
                let races = |o: &Stamp| {
                    o.flags & WRITE != 0 && o.flags & stamp.flags & ATOMIC == 0 && !before(o)
                };
                if let Some(race) = self.find(races) {
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
            if stamps.len().is_power_of_two() && stamps.len() > 4 {
                stamps.retain(|o| !replaces(o));
            }
        }
        self.push(stamp);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::clock::Threads;
    use super::*;

    const CTAS: usize = 2;
    const THREADS: usize = 4;

    #[derive(Clone, Debug)]
    enum Event {
        /// An access of `1 << size` bytes.
        Access {
            cta: usize,
            thread: usize,
            offset: usize,
            size: u32,
            write: bool,
        },
        /// An atomic store (or read-modify-write) of a word, or an atomic load.
        Atomic {
            cta: usize,
            thread: usize,
            word: usize,
            write: bool,
            rmw: bool,
            orders: bool,
        },
        Fence {
            cta: usize,
            thread: usize,
        },
        /// The threads of a CTA in the mask meet.
        Meet {
            cta: usize,
            mask: u8,
        },
    }

    fn event() -> impl Strategy<Value = Event> {
        let who = || (0..CTAS, 0..THREADS);
        let access = (who(), 0..LINE, 1u32..=4, any::<bool>()).prop_map(
            |((cta, thread), offset, size, write)| Event::Access {
                cta,
                thread,
                offset: offset >> size << size,
                size,
                write,
            },
        );
        let atomic = (who(), 0..2usize, any::<[bool; 3]>()).prop_map(
            |((cta, thread), word, [write, rmw, orders])| Event::Atomic {
                cta,
                thread,
                word,
                write,
                rmw,
                orders,
            },
        );
        let fence = who().prop_map(|(cta, thread)| Event::Fence { cta, thread });
        let meet = (0..CTAS, 0u8..1 << THREADS).prop_map(|(cta, mask)| Event::Meet { cta, mask });
        prop_oneof![4 => access, 4 => atomic, 1 => fence, 3 => meet]
    }

    /// Words that only atomics touch lie in a line of their own, so that the flags themselves never race.
    const FLAG_WORDS: usize = LINE / 4;

    fn view<'a>(stamp: &Stamp, known: &'a Knowledge) -> View<'a> {
        View { known, cta: stamp.cta, thread: stamp.thread }
    }

    /// The position of the first racing event, by the detector.
    fn detected(events: &[Event]) -> Option<usize> {
        let mut threads: Vec<Threads> =
            (0..CTAS).map(|cta| Threads::new(cta as u32, THREADS as u32)).collect();
        let mut lines = [Line::default(), Line::default()];
        let mut words: [Option<Arc<Knowledge>>; FLAG_WORDS] = Default::default();
        let stamp = |threads: &[Threads], cta: usize, thread: usize, flags| Stamp {
            cta: cta as u32,
            thread: thread as u16,
            flags,
            epoch: threads[cta].get(thread as u32).epoch,
            pc: 0,
        };
        events.iter().position(|event| match *event {
            Event::Access { cta, thread, offset, size, write } => {
                let stamp = stamp(&threads, cta, thread, if write { WRITE } else { 0 });
                let known = &threads[cta].get(thread as u32).known;
                lines[0].access(offset, 1 << size, stamp, view(&stamp, known)).is_err()
            }
            Event::Atomic { cta, thread, word, write, rmw, orders } => {
                let flags = ATOMIC | if write { WRITE } else { 0 };
                let stamp = stamp(&threads, cta, thread, flags);
                // Word 1 lies in the line that weak accesses touch, too.
                let known = &threads[cta].get(thread as u32).known;
                let raced = lines[1 - word].access(0, 4, stamp, view(&stamp, known)).is_err();
                let old = words[word].clone();
                if !write || rmw {
                    threads[cta].atomic_read(thread as u32, old.as_ref(), orders);
                }
                if write {
                    let old = old.filter(|_| rmw);
                    words[word] = threads[cta].atomic_write(thread as u32, old.as_ref(), orders);
                }
                raced
            }
            Event::Fence { cta, thread } => {
                threads[cta].fence(thread as u32);
                false
            }
            Event::Meet { cta, mask } => {
                threads[cta].meet((0..THREADS as u32).filter(|thread| mask >> thread & 1 != 0));
                false
            }
        })
    }

    type Clock = [usize; CTAS * THREADS];

    fn join(clock: &mut Clock, other: &Clock) {
        clock.iter_mut().zip(other).for_each(|(ours, theirs)| *ours = (*ours).max(*theirs));
    }

    /// The same by the book: a dense clock per thread that ticks at every event, all accesses remembered
    /// byte by byte and compared.
    fn by_the_book(events: &[Event]) -> Option<usize> {
        struct Past {
            who: usize,
            time: usize,
            bytes: std::ops::Range<usize>,
            write: bool,
            atomic: bool,
        }
        let mut clocks = [[0; CTAS * THREADS]; CTAS * THREADS];
        let (mut fenced, mut seen) = (clocks, clocks);
        let mut words = [[0; CTAS * THREADS]; FLAG_WORDS];
        let mut past: Vec<Past> = Vec::new();
        let mut access = |clock: &Clock, now: Past| {
            let races = past.iter().any(|then| {
                then.who != now.who
                    && then.bytes.start < now.bytes.end
                    && now.bytes.start < then.bytes.end
                    && (then.write || now.write)
                    && !(then.atomic && now.atomic)
                    && clock[then.who] < then.time
            });
            past.push(now);
            races
        };
        events.iter().enumerate().position(|(n, event)| match *event {
            Event::Access { cta, thread, offset, size, write } => {
                let who = cta * THREADS + thread;
                clocks[who][who] = n + 1;
                let bytes = offset..offset + (1 << size);
                access(&clocks[who], Past { who, time: n + 1, bytes, write, atomic: false })
            }
            Event::Atomic { cta, thread, word, write, rmw, orders } => {
                let who = cta * THREADS + thread;
                clocks[who][who] = n + 1;
                let start = (1 - word) * LINE;
                let now = Past { who, time: n + 1, bytes: start..start + 4, write, atomic: true };
                let raced = access(&clocks[who], now);
                let old = words[word];
                if !write || rmw {
                    join(if orders { &mut clocks[who] } else { &mut seen[who] }, &old);
                }
                if write {
                    let published = if orders { clocks[who] } else { fenced[who] };
                    words[word] = published;
                    if rmw {
                        join(&mut words[word], &old);
                    }
                }
                raced
            }
            Event::Fence { cta, thread } => {
                let who = cta * THREADS + thread;
                clocks[who][who] = n + 1;
                let acquired = seen[who];
                join(&mut clocks[who], &acquired);
                fenced[who] = clocks[who];
                false
            }
            Event::Meet { cta, mask } => {
                let members: Vec<usize> = (0..THREADS)
                    .filter(|thread| mask >> thread & 1 != 0)
                    .map(|thread| cta * THREADS + thread)
                    .collect();
                let mut all = [0; CTAS * THREADS];
                members.iter().for_each(|who| join(&mut all, &clocks[*who]));
                members.iter().for_each(|who| clocks[*who] = all);
                false
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20000))]

        /// The first race is found, where it happens, and none is invented.
        #[test]
        fn the_detector_agrees_with_the_book(events in proptest::collection::vec(event(), 1..40)) {
            prop_assert_eq!(detected(&events), by_the_book(&events));
        }
    }
}
