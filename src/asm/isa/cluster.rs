//! Clusters of CTAs: distributed shared memory, cluster barriers, and the order of grids.
//!
//! A CTA may write to the shared memory of its cluster's CTAs once they run, and none may end while another
//! may still write to it. Programmatic dependent launch lets a grid begin before the one before it has ended:
//! what that one wrote may be read after `griddepcontrol.wait` only.
//! Source: PTX ISA, "mapa", "st.async", "barrier.cluster", "griddepcontrol", "elect.sync", "setmaxnreg".

use super::{ClusterOp, GridOp, Machine, Since, TargetSet, isa, lanes, ptx};
use crate::asm::reg::{BarrierAddr, Imm, In, Out, SharedAddr, Use, Vector};
use crate::asm::types::{B32, F32, Pred};
use crate::target::PtxIsa;

/// PTX ISA 8.0, `sm_90a` alone.
pub(super) const SM_90A: Since = Since { isa: PtxIsa::new(8, 0), targets: TargetSet::Specific(90) };

isa! {
    /// Clusters and grids.
    Cluster;

    /// The address of `a` in CTA `rank` of the cluster.
    mapa_shared_cluster_u32 = Mapa { d: Out<B32>, a: Use<B32>, rank: In<B32> }
        "mapa.shared::cluster.u32 {d}, {a}, {rank};", ptx(7, 8, 90), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let rank = m.get(l, i.rank)?; let a = m.peer_addr(l, a, rank)?; m.set(l, i.d, a); }
    /// Stores four floats to a CTA of the cluster and counts their 16 bytes on a barrier of that CTA.
    st_async_shared_cluster_v4_f32 = StAsyncV4F32 { a: SharedAddr, b: Vector<Use<F32>, 4>, bar: BarrierAddr }
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 {a}, {b}, {bar};", ptx(8, 1, 90), Lane, Sync(16), |m, l, i| { store_async(m, l, i)?; }
    /// Arrives at the cluster's barrier and publishes nothing.
    barrier_cluster_arrive_relaxed_aligned = BarrierClusterArriveRelaxed {}
        "barrier.cluster.arrive.relaxed.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.cluster(ClusterOp::Arrive { release: false })?; }
    /// Arrives at the cluster's barrier and publishes what this thread did.
    barrier_cluster_arrive_release_aligned = BarrierClusterArrive {}
        "barrier.cluster.arrive.release.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.cluster(ClusterOp::Arrive { release: true })?; }
    /// Waits until all threads of the cluster have arrived.
    barrier_cluster_wait_acquire_aligned = BarrierClusterWait {}
        "barrier.cluster.wait.acquire.aligned;", ptx(8, 0, 90), Warp, Sync, |m, _i| { m.cluster(ClusterOp::Wait)?; }
    /// Waits until the grids before this one have completed and their writes are visible.
    griddepcontrol_wait = GriddepcontrolWait {}
        "griddepcontrol.wait;", ptx(7, 8, 90), Lane, Sync, |m, l, _i| { m.grid(l, GridOp::Wait)?; }
    /// This CTA does not mind if the next grid begins; it may once all CTAs have said so or ended.
    griddepcontrol_launch_dependents = GriddepcontrolLaunchDependents {}
        "griddepcontrol.launch_dependents;", ptx(7, 8, 90), Lane, Sync, |m, l, _i| { m.grid(l, GridOp::LaunchDependents)?; }
    /// True in one lane of the warp.
    elect_sync = ElectSync { d: Out<Pred> }
        "elect.sync _|{d}, 0xffffffff;", ptx(8, 0, 90), Warp, Pure, |m, i| { let elected = m.elected(); for l in lanes(m.active()) { m.set(l, i.d, l == elected); } }
    /// The warpgroup keeps `n` registers a thread and gives the others back to the CTA's pool.
    setmaxnreg_dec_sync_aligned_u32 = SetmaxnregDec { n: Imm }
        "setmaxnreg.dec.sync.aligned.u32 {n};", SM_90A, Warp, Sync, |m, i| { m.set_registers(i.n.0, false)?; }
    /// The warpgroup waits for the CTA's pool until it has `n` registers a thread.
    setmaxnreg_inc_sync_aligned_u32 = SetmaxnregInc { n: Imm }
        "setmaxnreg.inc.sync.aligned.u32 {n};", SM_90A, Warp, Sync, |m, i| { m.set_registers(i.n.0, true)?; }
}

fn store_async<M: Machine>(m: &mut M, l: u32, i: &StAsyncV4F32) -> Result<(), M::Stop> {
    let (at, bar) = (m.shared_at(l, i.a)?, m.shared_at(l, i.bar.0)?);
    let mut value = [0; 16];
    for (bytes, b) in value.chunks_exact_mut(4).zip(i.b.0) {
        bytes.copy_from_slice(&m.get(l, b)?.to_le_bytes());
    }
    m.store_async(l, at, value, bar)
}
