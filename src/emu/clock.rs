//! Happens-before between the threads of a grid, as vector clocks.
//!
//! Every thread counts epochs; an access is stamped with its thread's epoch ([`Stamp`]), and a thread
//! *knows* an access once a chain of barriers, fences and flags leads from it to the thread. What a thread
//! knows is a [`Knowledge`], shared between all threads that met at the same barrier, so a barrier costs
//! one vector and not one per thread. Knowledge of other CTAs only exists where flags were exchanged.
//! A thread's epoch ends when it publishes (barrier, release, fence): later accesses are not covered.
//! Source: PTX ISA, "Memory Consistency Model" (causality order, release and acquire patterns).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The access was made by an atomic operation.
pub(super) const ATOMIC: u16 = 1;
/// The access wrote.
pub(super) const WRITE: u16 = 2;
/// The access was made by an asynchronous copy.
pub(super) const COPY: u16 = 4;

/// Who accessed memory, when and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Linear index of the CTA, [`Stamp::NOBODY`]'s if there was no access.
    pub cta: u32,
    /// The thread within its CTA.
    pub thread: u16,
    /// [`ATOMIC`], [`WRITE`], [`COPY`].
    pub flags: u16,
    /// The thread's epoch.
    pub epoch: u32,
    /// The instruction.
    pub pc: u32,
}

impl Stamp {
    /// No access since the launch began.
    pub const NOBODY: Stamp = Stamp { cta: u32::MAX, thread: 0, flags: 0, epoch: 0, pc: 0 };

    /// Whether both are accesses of the same thread.
    #[inline]
    pub fn same_thread(&self, other: &Stamp) -> bool {
        self.cta == other.cta && self.thread == other.thread
    }
}

/// The newest epoch of each thread that is known, threads of one CTA.
type Epochs = Vec<u32>;

/// What is known: for each thread the newest epoch whose accesses are ordered before now.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    cta: u32,
    own: Epochs,
    others: Option<Arc<BTreeMap<u32, Arc<Epochs>>>>,
}

impl Knowledge {
    /// What the threads of a CTA know when the grid starts: nothing.
    fn none(cta: u32, threads: usize) -> Self {
        Self { cta, own: vec![0; threads], others: None }
    }

    /// Whether the access is ordered before now.
    #[inline]
    pub fn covers(&self, stamp: &Stamp) -> bool {
        let thread = usize::from(stamp.thread);
        if stamp.cta == self.cta {
            return self.own[thread] >= stamp.epoch;
        }
        if stamp.cta == u32::MAX {
            return true;
        }
        let epochs = self.others.as_ref().and_then(|others| others.get(&stamp.cta));
        epochs.is_some_and(|epochs| epochs[thread] >= stamp.epoch)
    }

    /// Adds all that `other` knows.
    fn join(&mut self, other: &Knowledge) {
        self.join_cta(other.cta, &EpochsRef::Borrowed(&other.own));
        let Some(theirs) = &other.others else { return };
        if self.others.as_ref().is_some_and(|ours| Arc::ptr_eq(ours, theirs)) {
            return;
        }
        for (cta, epochs) in theirs.iter() {
            self.join_cta(*cta, &EpochsRef::Shared(epochs));
        }
    }

    fn join_cta(&mut self, cta: u32, epochs: &EpochsRef<'_>) {
        if cta == self.cta {
            raise(&mut self.own, epochs.get());
            return;
        }
        let others = Arc::make_mut(self.others.get_or_insert_default());
        match (others.get_mut(&cta), epochs) {
            (Some(known), EpochsRef::Shared(epochs)) if Arc::ptr_eq(known, epochs) => {}
            (Some(known), _) => raise(Arc::make_mut(known), epochs.get()),
            (None, EpochsRef::Shared(epochs)) => {
                others.insert(cta, Arc::clone(epochs));
            }
            (None, EpochsRef::Borrowed(epochs)) => {
                others.insert(cta, Arc::new((*epochs).clone()));
            }
        }
    }
}

enum EpochsRef<'a> {
    Borrowed(&'a Epochs),
    Shared(&'a Arc<Epochs>),
}

impl EpochsRef<'_> {
    fn get(&self) -> &Epochs {
        match self {
            EpochsRef::Borrowed(epochs) => epochs,
            EpochsRef::Shared(epochs) => epochs,
        }
    }
}

fn raise(known: &mut Epochs, epochs: &Epochs) {
    for (known, epoch) in known.iter_mut().zip(epochs) {
        *known = (*known).max(*epoch);
    }
}

/// What atomic writes have published, by address of the word.
#[derive(Debug, Default)]
pub(super) struct Words {
    published: HashMap<u64, Arc<Knowledge>>,
    /// Lowest and highest address, to pass over ordinary stores elsewhere at once.
    span: Option<(u64, u64)>,
}

impl Words {
    /// What the word at `addr` carries.
    pub fn get(&self, addr: u64) -> Option<&Arc<Knowledge>> {
        self.published.get(&addr)
    }

    /// An atomic write leaves `word` at `addr`.
    pub fn set(&mut self, addr: u64, word: Option<Arc<Knowledge>>) {
        let Some(word) = word else {
            self.published.remove(&addr);
            return;
        };
        let (low, high) = self.span.unwrap_or((addr, addr));
        self.span = Some((low.min(addr), high.max(addr)));
        self.published.insert(addr, word);
    }

    /// An ordinary store of `size` bytes ends what earlier flags in its words published.
    #[inline]
    pub fn overwrite(&mut self, addr: u64, size: u64) {
        let Some((low, high)) = self.span else { return };
        if addr <= high && addr + size > low {
            for word in (addr & !3..addr + size).step_by(4) {
                self.published.remove(&word);
            }
        }
    }
}

/// One thread's clock.
#[derive(Clone, Debug)]
pub(super) struct Thread {
    /// The epoch that its accesses are stamped with.
    pub epoch: u32,
    /// What it knows of others.
    pub known: Arc<Knowledge>,
    /// What its last fence published: a relaxed atomic write after it releases this.
    fenced: Option<Arc<Knowledge>>,
    /// What relaxed atomic reads have seen: a fence after them acquires this.
    seen: Option<Arc<Knowledge>>,
}

/// The clocks of a CTA's threads.
#[derive(Debug)]
pub(super) struct Threads(Vec<Thread>);

impl Threads {
    /// Threads that know nothing of each other.
    pub fn new(cta: u32, threads: u32) -> Self {
        let known = Arc::new(Knowledge::none(cta, threads as usize));
        let thread = Thread { epoch: 1, known, fenced: None, seen: None };
        Self(vec![thread; threads as usize])
    }

    /// A thread's clock.
    #[inline]
    pub fn get(&self, thread: u32) -> &Thread {
        &self.0[thread as usize]
    }

    /// The threads meet: each knows afterwards what any of them knew or did.
    pub fn meet(&mut self, members: impl Iterator<Item = u32> + Clone) {
        let mut bases: Vec<Arc<Knowledge>> = Vec::new();
        for thread in members.clone() {
            let known = &self.0[thread as usize].known;
            if !bases.iter().any(|base| Arc::ptr_eq(base, known)) {
                bases.push(Arc::clone(known));
            }
        }
        let Some((first, rest)) = bases.split_first() else { return };
        let mut known = (**first).clone();
        for base in rest {
            known.join(base);
        }
        for thread in members.clone() {
            known.own[thread as usize] = self.0[thread as usize].epoch;
        }
        let known = Arc::new(known);
        for thread in members {
            let thread = &mut self.0[thread as usize];
            thread.epoch += 1;
            thread.known = Arc::clone(&known);
        }
    }

    /// All that the thread knows and did until now; its epoch ends.
    fn publish(&mut self, thread: u32) -> Arc<Knowledge> {
        let index = thread as usize;
        let thread = &mut self.0[index];
        Arc::make_mut(&mut thread.known).own[index] = thread.epoch;
        thread.epoch += 1;
        Arc::clone(&thread.known)
    }

    fn learn(&mut self, thread: u32, news: &Knowledge) {
        Arc::make_mut(&mut self.0[thread as usize].known).join(news);
    }

    /// A fence: publishes for later relaxed writes, acquires what earlier relaxed reads saw.
    pub fn fence(&mut self, thread: u32) {
        if let Some(seen) = self.0[thread as usize].seen.take() {
            self.learn(thread, &seen);
        }
        let published = self.publish(thread);
        self.0[thread as usize].fenced = Some(published);
    }

    /// An atomic read of a word that carries `word`; `acquire` learns it at once, else a fence does.
    pub fn atomic_read(&mut self, thread: u32, word: Option<&Arc<Knowledge>>, acquire: bool) {
        let Some(word) = word else { return };
        if acquire {
            self.learn(thread, word);
            return;
        }
        let seen = &mut self.0[thread as usize].seen;
        match seen {
            Some(seen) => Arc::make_mut(seen).join(word),
            None => *seen = Some(Arc::clone(word)),
        }
    }

    /// What an atomic write leaves in the word; `old` is what it carried and a read-modify-write continues.
    pub fn atomic_write(
        &mut self,
        thread: u32,
        old: Option<&Arc<Knowledge>>,
        release: bool,
    ) -> Option<Arc<Knowledge>> {
        let published = if release {
            Some(self.publish(thread))
        } else {
            self.0[thread as usize].fenced.clone()
        };
        match (old, published) {
            (None, published) => published,
            (Some(old), None) => Some(Arc::clone(old)),
            (Some(old), Some(published)) => {
                let mut both = (**old).clone();
                both.join(&published);
                Some(Arc::new(both))
            }
        }
    }
}
