//! Clusters of CTAs: distributed shared memory, cluster barriers, and the order of grids.
//!
//! A CTA may write to the shared memory of its cluster's CTAs once they run, and none may end while another
//! may still write to it. Programmatic dependent launch lets a grid begin before the one before it has ended:
//! what that one wrote may be read after `griddepcontrol.wait` only.
//! Source: PTX ISA, "mapa", "st.async", "barrier.cluster", "griddepcontrol", "elect.sync", "setmaxnreg".

use super::{Since, TargetSet, isa, ptx};
use crate::asm::reg::{Imm, In, Out, SharedAddr, Use, Vector};
use crate::asm::types::{B32, F32, Pred};
use crate::target::PtxIsa;

/// PTX ISA 8.0, `sm_90a` alone.
pub(super) const SM_90A: Since = Since { isa: PtxIsa::new(8, 0), targets: TargetSet::Specific(90) };

isa! {
    /// Clusters and grids.
    Cluster;

    /// The address of `a` in CTA `rank` of the cluster.
    mapa_shared_cluster_u32 = Mapa { d: Out<B32>, a: Use<B32>, rank: In<B32> }
        "mapa.shared::cluster.u32 {d}, {a}, {rank};", ptx(7, 8, 90), Lane, Pure, |m, _l, _i| { m.unmodelled()?; }
    /// Stores four floats to a CTA of the cluster and counts their 16 bytes on a barrier of that CTA.
    st_async_shared_cluster_v4_f32 = StAsyncV4F32 { a: SharedAddr, b: Vector<Use<F32>, 4>, bar: SharedAddr }
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 {a}, {b}, {bar};", ptx(8, 1, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// Arrives at the cluster's barrier and publishes nothing.
    barrier_cluster_arrive_relaxed_aligned = BarrierClusterArriveRelaxed {}
        "barrier.cluster.arrive.relaxed.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// Arrives at the cluster's barrier and publishes what this thread did.
    barrier_cluster_arrive_release_aligned = BarrierClusterArrive {}
        "barrier.cluster.arrive.release.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// Waits until all threads of the cluster have arrived.
    barrier_cluster_wait_acquire_aligned = BarrierClusterWait {}
        "barrier.cluster.wait.acquire.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// Waits until the grids before this one have completed and their writes are visible.
    griddepcontrol_wait = GriddepcontrolWait {}
        "griddepcontrol.wait;", ptx(7, 8, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// This CTA does not mind if the next grid begins; it may once all CTAs have said so or ended.
    griddepcontrol_launch_dependents = GriddepcontrolLaunchDependents {}
        "griddepcontrol.launch_dependents;", ptx(7, 8, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// True in one lane of the warp.
    elect_sync = ElectSync { d: Out<Pred> }
        "elect.sync _|{d}, 0xffffffff;", ptx(8, 0, 90), Warp, Pure, |m, _i| { m.unmodelled()?; }
    /// The warpgroup keeps `n` registers a thread and gives the others back to the CTA's pool.
    setmaxnreg_dec_sync_aligned_u32 = SetmaxnregDec { n: Imm }
        "setmaxnreg.dec.sync.aligned.u32 {n};", SM_90A, Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// The warpgroup waits for the CTA's pool until it has `n` registers a thread.
    setmaxnreg_inc_sync_aligned_u32 = SetmaxnregInc { n: Imm }
        "setmaxnreg.inc.sync.aligned.u32 {n};", SM_90A, Warp, Sync, |m, _i| { m.unmodelled()?; }
}
