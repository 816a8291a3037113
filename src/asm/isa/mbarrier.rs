//! Barriers in shared memory that count arrivals and bytes (`mbarrier`).
//!
//! A phase completes when all expected arrivals have come and the transaction count is zero; the barrier then
//! begins the next phase by itself. Waiting names the parity of a phase: parity 1 of a fresh barrier has
//! completed already. Copies that complete on a barrier make their bytes visible to whoever waits for the phase.
//! Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

use super::{BarrierOp, Machine, ProxyFence, isa, ptx};
use crate::asm::reg::{In, Out, SharedAddr};
use crate::asm::types::{B32, Pred};

isa! {
    /// Barriers in shared memory.
    Mbarrier;

    /// Begins phase 0 of the barrier at `a`, which expects `n` arrivals a phase.
    mbarrier_init_shared_b64 = MbarrierInit { a: SharedAddr, n: In<B32> }
        "mbarrier.init.shared.b64 {a}, {n};", ptx(7, 0, 80), Lane, Sync(8), |m, l, i| { let n = m.get(l, i.n)?; barrier(m, l, i.a, BarrierOp::Init(n))?; }
    /// Raises the transaction count of the current phase by `n` bytes, without an arrival.
    mbarrier_expect_tx_shared_cta_b64 = MbarrierExpectTx { a: SharedAddr, n: In<B32> }
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {a}, {n};", ptx(8, 0, 90), Lane, Sync(8), |m, l, i| { let n = m.get(l, i.n)?; barrier(m, l, i.a, BarrierOp::ExpectTx(n))?; }
    /// Raises the transaction count by `n` bytes and arrives.
    mbarrier_arrive_expect_tx_shared_cta_b64 = MbarrierArriveExpectTx { a: SharedAddr, n: In<B32> }
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, {a}, {n};", ptx(8, 0, 90), Lane, Sync(8), |m, l, i| { let n = m.get(l, i.n)?; barrier(m, l, i.a, BarrierOp::Arrive(n))?; }
    /// Arrives once at a barrier of this CTA.
    mbarrier_arrive_shared_cta_b64 = MbarrierArrive { a: SharedAddr }
        "mbarrier.arrive.shared::cta.b64 _, {a};", ptx(7, 8, 80), Lane, Sync(8), |m, l, i| { barrier(m, l, i.a, BarrierOp::Arrive(0))?; }
    /// Arrives once at a barrier of a CTA of the cluster; `a` comes from `mapa`.
    mbarrier_arrive_shared_cluster_b64 = MbarrierArriveCluster { a: SharedAddr }
        "mbarrier.arrive.shared::cluster.b64 _, {a};", ptx(8, 0, 90), Lane, Sync(8), |m, l, i| { barrier(m, l, i.a, BarrierOp::ArriveCluster)?; }
    /// Whether the phase of this parity has completed; may suspend the thread for a while before it says no.
    mbarrier_try_wait_parity_shared_cta_b64 = MbarrierTryWaitParity { d: Out<Pred>, a: SharedAddr, parity: In<B32> }
        "mbarrier.try_wait.parity.shared::cta.b64 {d}, {a}, {parity};", ptx(7, 8, 90), Lane, Sync(8), |m, l, i| { let parity = m.get(l, i.parity)?; let done = barrier(m, l, i.a, BarrierOp::Test(parity))?; m.set(l, i.d, done); }
    /// Makes this thread's barrier initialisations visible to the cluster and to asynchronous copies.
    fence_mbarrier_init_release_cluster = FenceMbarrierInit {}
        "fence.mbarrier_init.release.cluster;", ptx(8, 0, 90), Lane, Sync, |m, l, _i| { m.proxy_fence(l, ProxyFence::BarrierInit)?; }
}

fn barrier<M: Machine>(m: &mut M, l: u32, a: SharedAddr, op: BarrierOp) -> Result<bool, M::Stop> {
    let at = m.shared_at(l, a)?;
    m.mbarrier(l, at, op)
}
