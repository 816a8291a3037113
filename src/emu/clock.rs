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
/// The access is one of an agent: it lasts from its issue until a wait for the agent.
pub(super) const ASYNC: u16 = 8;
/// Where the issuing thread of an agent's access begins in [`Stamp::flags`].
const ISSUER: u32 = 6;

/// Who accessed memory, when and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    /// Linear index of the CTA, [`Stamp::NOBODY`]'s if there was no access.
    pub cta: u32,
    /// The thread within its CTA, or the agent.
    pub thread: u16,
    /// [`ATOMIC`], [`WRITE`], [`COPY`], [`ASYNC`] and the issuing thread.
    pub flags: u16,
    /// The thread's epoch.
    pub epoch: u32,
    /// The instruction.
    pub pc: u32,
}

impl Stamp {
    /// No access since the launch began.
    pub const NOBODY: Stamp = Stamp { cta: u32::MAX, thread: 0, flags: 0, epoch: 0, pc: 0 };

    /// The access of an agent, issued by `thread`.
    pub fn of_agent(cta: u32, agent: u16, epoch: u32, thread: u32, flags: u16, pc: u32) -> Self {
        let flags = flags | ASYNC | (thread as u16) << ISSUER;
        Self { cta, thread: agent, flags, epoch, pc }
    }

    /// The thread that made or issued the access.
    pub fn issuer(&self) -> u16 {
        if self.flags & ASYNC != 0 { self.flags >> ISSUER } else { self.thread }
    }

    /// Whether both are accesses of the same thread.
    #[inline]
    pub fn same_thread(&self, other: &Stamp) -> bool {
        self.cta == other.cta && self.thread == other.thread
    }
}

/// The newest epoch of each thread that is known, threads of one CTA.
type Epochs = Vec<u32>;

/// What is known of other CTAs.
type Foreign = Option<Arc<BTreeMap<u32, Arc<Epochs>>>>;

/// What is known: for each thread the newest epoch whose accesses are ordered before now.
///
/// After the threads come the agents of the CTA, see `agents.rs`: they stand for operations that complete
/// later, and their epochs are those of the barrier or group that tells of it.
#[derive(Clone, Debug)]
pub(super) struct Knowledge {
    cta: u32,
    own: Epochs,
    others: Foreign,
    /// Of these only what is over: reads, and what agents did. Writes of threads may still be on their way.
    over: Foreign,
}

impl Knowledge {
    /// What the threads of a CTA know when the grid starts: nothing.
    pub fn none(cta: u32, threads: usize) -> Self {
        Self { cta, own: vec![0; threads], others: None, over: None }
    }

    /// Whether it is that of a CTA.
    pub fn is_of(&self, cta: u32) -> bool {
        self.cta == cta
    }

    /// The newest epoch of a thread or agent that is known without reserve.
    pub fn epoch_of(&self, cta: u32, thread: u16) -> u32 {
        let epochs = match cta == self.cta {
            true => Some(&self.own),
            false => {
                self.others.as_ref().and_then(|others| others.get(&cta)).map(|epochs| &**epochs)
            }
        };
        epochs.and_then(|epochs| epochs.get(usize::from(thread))).copied().unwrap_or(0)
    }

    /// Learns an epoch of a thread or agent of this CTA.
    pub fn raise(&mut self, thread: u16, epoch: u32) {
        let thread = usize::from(thread);
        if self.own.len() <= thread {
            self.own.resize(thread + 1, 0);
        }
        self.own[thread] = self.own[thread].max(epoch);
    }

    /// Of this CTA's knowledge of itself only the threads and agents that `keep` names.
    pub fn only(&self, keep: impl Fn(u16) -> bool) -> Self {
        let own = self.own.iter().enumerate();
        let own = own.map(|(thread, epoch)| if keep(thread as u16) { *epoch } else { 0 });
        Self { cta: self.cta, own: own.collect(), others: None, over: None }
    }

    /// Whether the access is ordered before now.
    #[inline]
    pub fn covers(&self, stamp: &Stamp) -> bool {
        let thread = usize::from(stamp.thread);
        if stamp.cta == self.cta {
            return self.own.get(thread).is_some_and(|epoch| *epoch >= stamp.epoch);
        }
        if stamp.cta == u32::MAX {
            return true;
        }
        let known = |foreign: &Foreign| {
            let epochs = foreign.as_ref().and_then(|foreign| foreign.get(&stamp.cta));
            epochs.and_then(|epochs| epochs.get(thread)).is_some_and(|epoch| *epoch >= stamp.epoch)
        };
        let is_over = stamp.flags & WRITE == 0 || stamp.flags & ASYNC != 0;
        known(&self.others) || is_over && known(&self.over)
    }

    /// Adds all that `other` knows.
    pub fn join(&mut self, other: &Knowledge) {
        self.join_cta(other.cta, &EpochsRef::Borrowed(&other.own));
        self.join_foreign(&other.others, true);
        self.join_foreign(&other.over, false);
    }

    fn join_foreign(&mut self, theirs: &Foreign, full: bool) {
        let Some(theirs) = theirs else { return };
        let ours = if full { &self.others } else { &self.over };
        if ours.as_ref().is_some_and(|ours| Arc::ptr_eq(ours, theirs)) {
            return;
        }
        for (cta, epochs) in theirs.iter() {
            match full {
                true => self.join_cta(*cta, &EpochsRef::Shared(epochs)),
                false => self.join_over(*cta, &EpochsRef::Shared(epochs)),
            }
        }
    }

    /// Adds what `other`, of another CTA, knows to be over.
    pub fn join_what_is_over(&mut self, other: &Knowledge) {
        self.join_over(other.cta, &EpochsRef::Borrowed(&other.own));
        for theirs in [&other.others, &other.over].into_iter().flatten() {
            for (cta, epochs) in theirs.iter() {
                self.join_over(*cta, &EpochsRef::Shared(epochs));
            }
        }
    }

    fn join_cta(&mut self, cta: u32, epochs: &EpochsRef<'_>) {
        match cta == self.cta {
            true => raise(&mut self.own, epochs.get()),
            false => join_into(&mut self.others, cta, epochs),
        }
    }

    /// What another CTA says of this one is left out: this one knows better.
    fn join_over(&mut self, cta: u32, epochs: &EpochsRef<'_>) {
        if cta != self.cta {
            join_into(&mut self.over, cta, epochs);
        }
    }
}

fn join_into(foreign: &mut Foreign, cta: u32, epochs: &EpochsRef<'_>) {
    let foreign = Arc::make_mut(foreign.get_or_insert_default());
    match (foreign.get_mut(&cta), epochs) {
        (Some(known), EpochsRef::Shared(epochs)) if Arc::ptr_eq(known, epochs) => {}
        (Some(known), _) => raise(Arc::make_mut(known), epochs.get()),
        (None, EpochsRef::Shared(epochs)) => {
            foreign.insert(cta, Arc::clone(epochs));
        }
        (None, EpochsRef::Borrowed(epochs)) => {
            foreign.insert(cta, Arc::new((*epochs).clone()));
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
    if known.len() < epochs.len() {
        known.resize(epochs.len(), 0);
    }
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
    /// The epochs that ended with a fence of the asynchronous proxy, ascending.
    proxy_fences: Vec<u32>,
    /// What completed phases of barriers in shared memory told: accesses that have left the memory pipeline, for
    /// the arrivals went through it after them.
    settled: Option<Arc<Knowledge>>,
}

/// The clocks of a CTA's threads.
#[derive(Debug)]
pub(super) struct Threads {
    threads: Vec<Thread>,
    /// What was known, what was learned, and both together, of the last time: lanes of a warp learn alike.
    learned: Option<[Arc<Knowledge>; 3]>,
    /// The same of what was settled.
    settled: Option<[Arc<Knowledge>; 3]>,
}

impl Threads {
    /// Threads that know nothing of each other.
    pub fn new(cta: u32, threads: u32) -> Self {
        let known = Arc::new(Knowledge::none(cta, threads as usize));
        let proxy_fences = Vec::new();
        let thread =
            Thread { epoch: 1, known, fenced: None, seen: None, proxy_fences, settled: None };
        Self { threads: vec![thread; threads as usize], learned: None, settled: None }
    }

    /// How many threads.
    pub fn len(&self) -> usize {
        self.threads.len()
    }

    /// All threads know this epoch of an agent from the start.
    pub fn all_know(&mut self, agent: u16, epoch: u32) {
        let Some(first) = self.threads.first() else { return };
        let mut known = (*first.known).clone();
        known.raise(agent, epoch);
        let known = Arc::new(known);
        self.threads.iter_mut().for_each(|thread| thread.known = Arc::clone(&known));
    }

    /// A fence of the asynchronous proxy: what the thread wrote until now has passed it.
    pub fn proxy_fence(&mut self, thread: u32) {
        let thread = &mut self.threads[thread as usize];
        thread.proxy_fences.push(thread.epoch);
        thread.epoch += 1;
    }

    /// Whether a thread's access of epoch `at` passed a proxy fence of that thread before epoch `until`.
    pub fn is_fenced(&self, thread: u16, at: u32, until: u32) -> bool {
        let fences = &self.threads[usize::from(thread)].proxy_fences;
        let next = fences.partition_point(|fence| *fence < at);
        fences.get(next).is_some_and(|fence| *fence < until)
    }

    /// Threads learn an epoch of an agent of their CTA.
    pub fn raise(&mut self, threads: impl Iterator<Item = u32>, agent: u16, epoch: u32) {
        let mut last: Option<[Arc<Knowledge>; 2]> = None;
        for thread in threads {
            let known = &mut self.threads[thread as usize].known;
            if let Some([before, after]) = &last
                && Arc::ptr_eq(before, known)
            {
                *known = Arc::clone(after);
                continue;
            }
            if known.epoch_of(known.cta, agent) >= epoch {
                continue;
            }
            let mut more = (**known).clone();
            more.raise(agent, epoch);
            let more = Arc::new(more);
            last = Some([std::mem::replace(known, Arc::clone(&more)), more]);
        }
    }

    /// Threads publish what they know and did, together; their epochs end.
    pub fn publish_all(&mut self, members: impl Iterator<Item = u32> + Clone) -> Knowledge {
        let mut bases: Vec<Arc<Knowledge>> = Vec::new();
        for thread in members.clone() {
            let known = &self.threads[thread as usize].known;
            if !bases.iter().any(|base| Arc::ptr_eq(base, known)) {
                bases.push(Arc::clone(known));
            }
        }
        let mut known = (*bases[0]).clone();
        for base in &bases[1..] {
            known.join(base);
        }
        for thread in members {
            let epoch = &mut self.threads[thread as usize].epoch;
            known.raise(thread as u16, *epoch);
            *epoch += 1;
        }
        known
    }

    /// A thread's clock.
    #[inline]
    pub fn get(&self, thread: u32) -> &Thread {
        &self.threads[thread as usize]
    }

    /// The threads meet: each knows afterwards what any of them knew or did.
    pub fn meet(&mut self, members: impl Iterator<Item = u32> + Clone) {
        if members.clone().next().is_none() {
            return;
        }
        let known = Arc::new(self.publish_all(members.clone()));
        for thread in members {
            self.threads[thread as usize].known = Arc::clone(&known);
        }
    }

    /// All that the thread knows and did until now; its epoch ends.
    pub fn publish(&mut self, thread: u32) -> Arc<Knowledge> {
        let index = thread as usize;
        let thread = &mut self.threads[index];
        Arc::make_mut(&mut thread.known).own[index] = thread.epoch;
        thread.epoch += 1;
        Arc::clone(&thread.known)
    }

    /// A thread learns all that `news` knows.
    pub fn learn(&mut self, thread: u32, news: &Arc<Knowledge>) {
        let known = &mut self.threads[thread as usize].known;
        if let Some([before, added, after]) = &self.learned
            && Arc::ptr_eq(before, known)
            && Arc::ptr_eq(added, news)
        {
            *known = Arc::clone(after);
            return;
        }
        let mut more = (**known).clone();
        more.join(news);
        let more = Arc::new(more);
        let before = std::mem::replace(known, Arc::clone(&more));
        self.learned = Some([before, Arc::clone(news), more]);
    }

    /// A thread has seen a phase complete, whose arrivals told `news`.
    pub fn settle(&mut self, thread: u32, news: &Arc<Knowledge>) {
        let Some(settled) = &mut self.threads[thread as usize].settled else {
            self.threads[thread as usize].settled = Some(Arc::clone(news));
            return;
        };
        if let Some([before, added, after]) = &self.settled
            && Arc::ptr_eq(before, settled)
            && Arc::ptr_eq(added, news)
        {
            *settled = Arc::clone(after);
            return;
        }
        let mut more = (**settled).clone();
        more.join(news);
        let more = Arc::new(more);
        let before = std::mem::replace(settled, Arc::clone(&more));
        self.settled = Some([before, Arc::clone(news), more]);
    }

    /// Whether completed phases that `thread` has seen told of an access.
    pub fn is_settled(&self, thread: u32, access: &Stamp) -> bool {
        let settled = &self.threads[thread as usize].settled;
        settled.as_ref().is_some_and(|s| s.epoch_of(access.cta, access.thread) >= access.epoch)
    }

    /// A fence: publishes for later relaxed writes, acquires what earlier relaxed reads saw.
    pub fn fence(&mut self, thread: u32) {
        if let Some(seen) = self.threads[thread as usize].seen.take() {
            self.learn(thread, &seen);
        }
        let published = self.publish(thread);
        self.threads[thread as usize].fenced = Some(published);
    }

    /// An atomic read of a word that carries `word`; `acquire` learns it at once, else a fence does.
    pub fn atomic_read(&mut self, thread: u32, word: Option<&Arc<Knowledge>>, acquire: bool) {
        let Some(word) = word else { return };
        if acquire {
            self.learn(thread, word);
            return;
        }
        let seen = &mut self.threads[thread as usize].seen;
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
            self.threads[thread as usize].fenced.clone()
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
