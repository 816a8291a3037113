//! Mapped files that shrink: the signal is caught, the lost pages become zeros, and the loss is known.
//!
//! If another process shortens a file while it is mapped, touching the lost pages raises SIGBUS, which
//! ends a process that does not handle it. A handler is installed with the first guard. For an
//! address in a guarded mapping it puts zeroed memory over the rest of the mapping and notes the loss,
//! so that the reader goes on and its result is thrown away by [`Guard::is_lost`]. Any other address
//! is left to the handler that was there before.
//!
//! The handler uses atomics, `mmap` and `sigaction` only. Guarded ranges are nodes of a list that
//! grows and never shrinks: a node that is given back is used again.
#![allow(unsafe_code)] // Signal handlers are beyond what the compiler can check.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

/// A range of addresses of a mapping; `end` is 0 while it guards none.
struct Node {
    used: AtomicBool,
    lost: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Written before the node is published, never after.
    next: *mut Node,
}

static HEAD: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapping whose lost pages are survived, until this is dropped. It must be dropped before the mapping.
pub(super) struct Guard(&'static Node);

// SAFETY: the list's nodes are never freed, and all that changes in them is atomic.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("lost", &self.is_lost()).finish_non_exhaustive()
    }
}

impl Guard {
    /// Guards the mapping that starts at `bytes`.
    pub(super) fn new(bytes: &[u8]) -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let node = free_node();
        let start = bytes.as_ptr() as usize;
        node.lost.store(false, Ordering::Relaxed);
        node.start.store(start, Ordering::Relaxed);
        node.end.store(start + bytes.len(), Ordering::Release);
        Self(node)
    }

    /// Whether a page of the mapping was lost and has been replaced by zeros.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Release);
        self.0.used.store(false, Ordering::Release);
    }
}

/// The published nodes.
fn nodes() -> impl Iterator<Item = &'static Node> {
    let mut at = HEAD.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: a published node is never freed, and its `next` never changes.
        let node: &'static Node = unsafe { at.as_ref()? };
        at = node.next;
        Some(node)
    })
}

/// A node that guards nothing, taken into use.
fn free_node() -> &'static Node {
    let take = |node: &&Node| {
        node.used.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if let Some(node) = nodes().find(take) {
        return node;
    }
    let node = Box::leak(Box::new(Node {
        used: AtomicBool::new(true),
        lost: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        next: ptr::null_mut(),
    }));
    let mut head = HEAD.load(Ordering::Acquire);
    loop {
        node.next = head;
        match HEAD.compare_exchange(head, node, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return node,
            Err(found) => head = found,
        }
    }
}

fn install() {
    // SAFETY: the calls get structures of their own types, zeroed first as C callers do. The handler
    // is in place for the life of the process, and what it reads is initialised before it is.
    unsafe {
        let page_bytes = libc::sysconf(libc::_SC_PAGESIZE);
        PAGE_BYTES.store(usize::try_from(page_bytes).unwrap_or(4096), Ordering::Release);
        let mut previous: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) != 0 {
            return; // A shrinking file then ends the process, as it would without this room.
        }
        PREVIOUS.get_or_init(|| previous);
        let mut ours: libc::sigaction = std::mem::zeroed();
        ours.sa_sigaction = on_sigbus as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut ours.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const ours, ptr::null_mut());
    }
}

/// Puts zeros where the mapping that holds `address` lost its file; whether there is such a mapping.
fn survive(address: usize) -> bool {
    let holds = |node: &&Node| {
        let end = node.end.load(Ordering::Acquire);
        (node.start.load(Ordering::Relaxed)..end).contains(&address)
    };
    let Some(node) = nodes().find(holds) else { return false };
    let page = address & !(PAGE_BYTES.load(Ordering::Acquire) - 1);
    let length = node.end.load(Ordering::Relaxed) - page;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is the rest of a mapping that its owner keeps while the guard lives; its pages
    // are replaced by readable ones, and unmapped with it.
    let mapped = unsafe { libc::mmap(page as *mut c_void, length, libc::PROT_READ, flags, -1, 0) };
    let survived = mapped != libc::MAP_FAILED;
    node.lost.fetch_or(survived, Ordering::AcqRel);
    survived
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system passes a valid structure to a handler installed with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    if survive(address) {
        return;
    }
    let Some(previous) = PREVIOUS.get() else { return };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: puts back what was there; the instruction is tried again and meets it.
            unsafe { libc::sigaction(libc::SIGBUS, previous, ptr::null_mut()) };
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler installed with SA_SIGINFO has this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: a handler installed without SA_SIGINFO has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use memmap2::MmapOptions;

    use super::*;

    const FILE_BYTES: u64 = 1 << 20;

    fn mapping() -> (File, memmap2::Mmap) {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(FILE_BYTES).expect("long");
        // SAFETY: the test reads plain bytes, and knows that the file will shrink.
        let map = unsafe { MmapOptions::new().map_copy_read_only(&file) }.expect("maps");
        (file, map)
    }

    #[test]
    fn a_file_that_shrinks_reads_as_zeros_and_is_known() {
        for kept in [0, 4096, FILE_BYTES / 2] {
            let (file, map) = mapping();
            let guard = Guard::new(&map);
            assert!(map.iter().all(|&byte| byte == 0) && !guard.is_lost());
            file.set_len(kept).expect("shorter");
            assert!(map.iter().all(|&byte| byte == 0));
            assert!(guard.is_lost());
            let other = mapping();
            assert!(!Guard::new(&other.1).is_lost());
        }
    }

    #[test]
    fn nodes_are_used_again() {
        let maps: Vec<_> = (0..3).map(|_| mapping()).collect();
        for _ in 0..100 {
            let guards: Vec<Guard> = maps.iter().map(|(_, map)| Guard::new(map)).collect();
            assert!(guards.iter().all(|guard| !guard.is_lost()));
        }
        // Other tests of the process guard something too.
        assert!(nodes().count() < 100, "{}", nodes().count());
    }

    /// Run by the next test, in a process of its own: it must not survive.
    #[test]
    #[ignore = "ends the process"]
    fn an_unguarded_file_that_shrinks() {
        let (_kept, guarded) = mapping();
        let _guard = Guard::new(&guarded);
        let (file, map) = mapping();
        file.set_len(0).expect("shorter");
        assert_eq!(std::hint::black_box(&map)[0], 1, "it was read");
    }

    #[test]
    fn what_is_not_guarded_ends_as_before() {
        let this = std::env::current_exe().expect("a test binary");
        let name = "checkpoint::map::guard::tests::an_unguarded_file_that_shrinks";
        let output = Command::new(this).args(["--exact", name, "--ignored"]).output();
        let status = output.expect("it starts").status;
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
    }
}
