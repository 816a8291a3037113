//! Bulk asynchronous copies, of bytes in a row and of tensor tiles, and their fences and groups.
//!
//! They run in the asynchronous proxy: bytes that threads wrote before must be fenced (`fence.proxy.async`)
//! before a bulk copy reads them. Loads complete on an mbarrier, stores in the issuing thread's bulk group.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy",
//! "Asynchronous copy: async proxy".

use super::{isa, ptx};
use crate::asm::reg::{GlobalAddr, Imm, In, Out, ParamAddr, SharedAddr, Use};
use crate::asm::types::{B16, B32, B64};

isa! {
    /// Bulk copies.
    Bulk;

    /// Copies `n` bytes (a multiple of 16) from global to shared memory and counts them on `bar`.
    cp_async_bulk_shared_global = CpAsyncBulk { d: SharedAddr, a: GlobalAddr, n: In<B32>, bar: SharedAddr }
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {d}, {a}, {n}, {bar};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// The same under an L2 eviction policy.
    cp_async_bulk_shared_global_hint = CpAsyncBulkHint { d: SharedAddr, a: GlobalAddr, n: In<B32>, bar: SharedAddr, policy: In<B64> }
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint {d}, {a}, {n}, {bar}, {policy};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// Copies the 2-D tile at (`x`, `y`) of a tensor map to shared memory and counts the tile's bytes on `bar`.
    cp_async_bulk_tensor_2d_shared_global = CpAsyncBulkTensor2d { d: SharedAddr, map: Use<B64>, x: Use<B32>, y: Use<B32>, bar: SharedAddr }
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes {d}, [{map}, {{{x}, {y}}}], {bar};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// The same to the same place, and on the same barrier, of every CTA of the cluster in `mask`.
    cp_async_bulk_tensor_2d_shared_global_multicast = CpAsyncBulkTensor2dMulticast { d: SharedAddr, map: Use<B64>, x: Use<B32>, y: Use<B32>, bar: SharedAddr, mask: Use<B16> }
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster {d}, [{map}, {{{x}, {y}}}], {bar}, {mask};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// Copies a tile from shared memory to (`x`, `y`) of a tensor map, in this thread's open bulk group.
    cp_async_bulk_tensor_2d_global_shared = CpAsyncBulkTensor2dStore { map: Use<B64>, x: Use<B32>, y: Use<B32>, a: SharedAddr }
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{map}, {{{x}, {y}}}], {a};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// Asks for `n` bytes (a multiple of 16) of global memory to be brought into L2.
    cp_async_bulk_prefetch_l2_global = CpAsyncBulkPrefetchL2 { a: GlobalAddr, n: In<B32> }
        "cp.async.bulk.prefetch.L2.global {a}, {n};", ptx(8, 0, 90), Lane, Sync(16), |m, _l, _i| { m.unmodelled()?; }
    /// Closes this thread's open bulk group.
    cp_async_bulk_commit_group = CpAsyncBulkCommitGroup {}
        "cp.async.bulk.commit_group;", ptx(8, 0, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// Waits until at most the newest `n` of this thread's bulk groups are incomplete.
    cp_async_bulk_wait_group = CpAsyncBulkWaitGroup { n: Imm }
        "cp.async.bulk.wait_group {n};", ptx(8, 0, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// Waits until at most the newest `n` of this thread's bulk groups still read their source.
    cp_async_bulk_wait_group_read = CpAsyncBulkWaitGroupRead { n: Imm }
        "cp.async.bulk.wait_group.read {n};", ptx(8, 0, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// Orders this thread's accesses to shared memory before later ones of the asynchronous proxy.
    fence_proxy_async_shared_cta = FenceProxyAsyncSharedCta {}
        "fence.proxy.async.shared::cta;", ptx(8, 0, 90), Lane, Sync, |m, _l, _i| { m.unmodelled()?; }
    /// The generic address of an entry parameter that is passed as bytes: a tensor map. (`mov` gives its place
    /// in the parameter space, which is no address that copies take.)
    cvta_param_u64 = CvtaParamU64 { d: Out<B64>, p: ParamAddr }
        "cvta.param.u64 {d}, {p};", ptx(7, 7, 70), Lane, Pure, |m, _l, _i| { m.unmodelled()?; }
}
