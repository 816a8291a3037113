//! Bulk asynchronous copies, of bytes in a row and of tensor tiles, and their fences and groups.
//!
//! They run in the asynchronous proxy: bytes that threads wrote before must be fenced (`fence.proxy.async`)
//! before a bulk copy reads them. Loads complete on an mbarrier, stores in the issuing thread's bulk group.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy",
//! "Asynchronous copy: async proxy".

use super::{BulkLoad, BulkOp, BulkSource, Machine, ProxyFence, TileStore, isa, ptx};
use crate::asm::reg::{BarrierAddr, GlobalAddr, Imm, In, Out, ParamAddr, SharedAddr, Use};
use crate::asm::types::{B16, B32, B64};

isa! {
    /// Bulk copies.
    Bulk;

    /// Copies `n` bytes (a multiple of 16) from global to shared memory and counts them on `bar`.
    cp_async_bulk_shared_global = CpAsyncBulk { d: SharedAddr, a: GlobalAddr, n: In<B32>, bar: BarrierAddr }
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {d}, {a}, {n}, {bar};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { let src = bytes(m, l, i.a, i.n)?; load(m, l, i.d, src, i.bar, None)?; }
    /// The same under an L2 eviction policy.
    cp_async_bulk_shared_global_hint = CpAsyncBulkHint { d: SharedAddr, a: GlobalAddr, n: In<B32>, bar: BarrierAddr, policy: In<B64> }
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint {d}, {a}, {n}, {bar}, {policy};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { m.get(l, i.policy)?; let src = bytes(m, l, i.a, i.n)?; load(m, l, i.d, src, i.bar, None)?; }
    /// Copies the 2-D tile at (`x`, `y`) of a tensor map to shared memory and counts the tile's bytes on `bar`.
    cp_async_bulk_tensor_2d_shared_global = CpAsyncBulkTensor2d { d: SharedAddr, map: Use<B64>, x: Use<B32>, y: Use<B32>, bar: BarrierAddr }
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes {d}, [{map}, {{{x}, {y}}}], {bar};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { let (map, at) = tile(m, l, i.map, [i.x, i.y])?; load(m, l, i.d, BulkSource::Tile { map, at }, i.bar, None)?; }
    /// The same to the same place, and on the same barrier, of every CTA of the cluster in `mask`.
    cp_async_bulk_tensor_2d_shared_global_multicast = CpAsyncBulkTensor2dMulticast { d: SharedAddr, map: Use<B64>, x: Use<B32>, y: Use<B32>, bar: BarrierAddr, mask: Use<B16> }
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster {d}, [{map}, {{{x}, {y}}}], {bar}, {mask};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { let (map, at) = tile(m, l, i.map, [i.x, i.y])?; let ctas = m.get(l, i.mask)?; load(m, l, i.d, BulkSource::Tile { map, at }, i.bar, Some(ctas))?; }
    /// Copies a tile from shared memory to (`x`, `y`) of a tensor map, in this thread's open bulk group.
    cp_async_bulk_tensor_2d_global_shared = CpAsyncBulkTensor2dStore { map: Use<B64>, x: Use<B32>, y: Use<B32>, a: SharedAddr }
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{map}, {{{x}, {y}}}], {a};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { let (map, at) = tile(m, l, i.map, [i.x, i.y])?; let src = m.shared_at(l, i.a)?; m.bulk(l, BulkOp::Store(TileStore { map, at, src }))?; }
    /// Asks for `n` bytes (a multiple of 16) of global memory to be brought into L2.
    cp_async_bulk_prefetch_l2_global = CpAsyncBulkPrefetchL2 { a: GlobalAddr, n: In<B32> }
        "cp.async.bulk.prefetch.L2.global {a}, {n};", ptx(8, 0, 90), Lane, Sync(16), |m, l, i| { let addr = address(m, l, i.a)?; let bytes = m.get(l, i.n)?; m.bulk(l, BulkOp::Prefetch { addr, bytes })?; }
    /// Asks for a tensor map to be brought to where tensor copies look it up.
    prefetch_tensormap = PrefetchTensormap { map: Use<B64> }
        "prefetch.tensormap [{map}];", ptx(8, 0, 90), Lane, Sync, |m, l, i| { let map = m.get(l, i.map)?; m.bulk(l, BulkOp::PrefetchMap { map })?; }
    /// Closes this thread's open bulk group.
    cp_async_bulk_commit_group = CpAsyncBulkCommitGroup {}
        "cp.async.bulk.commit_group;", ptx(8, 0, 90), Lane, Sync, |m, l, _i| { m.bulk(l, BulkOp::Commit)?; }
    /// Waits until at most the newest `n` of this thread's bulk groups are incomplete.
    cp_async_bulk_wait_group = CpAsyncBulkWaitGroup { n: Imm }
        "cp.async.bulk.wait_group {n};", ptx(8, 0, 90), Lane, Sync, |m, l, i| { m.bulk(l, BulkOp::Wait { pending: i.n.0, read: false })?; }
    /// Waits until at most the newest `n` of this thread's bulk groups still read their source.
    cp_async_bulk_wait_group_read = CpAsyncBulkWaitGroupRead { n: Imm }
        "cp.async.bulk.wait_group.read {n};", ptx(8, 0, 90), Lane, Sync, |m, l, i| { m.bulk(l, BulkOp::Wait { pending: i.n.0, read: true })?; }
    /// Orders this thread's accesses to shared memory before later ones of the asynchronous proxy.
    fence_proxy_async_shared_cta = FenceProxyAsyncSharedCta {}
        "fence.proxy.async.shared::cta;", ptx(8, 0, 90), Lane, Sync, |m, l, _i| { m.proxy_fence(l, ProxyFence::Async)?; }
    /// The address of an entry parameter that is passed as bytes: a tensor map.
    cvta_param_u64 = CvtaParamU64 { d: Out<B64>, p: ParamAddr }
        "cvta.param.u64 {d}, {p};", ptx(7, 7, 70), Lane, Pure, |m, l, i| { let a = m.param_addr(l, i.p.0)?; m.set(l, i.d, a); }
}

fn address<M: Machine>(m: &mut M, l: u32, a: GlobalAddr) -> Result<u64, M::Stop> {
    Ok(m.get(l, Use(a.base))?.wrapping_add_signed(a.offset.into()))
}

fn bytes<M: Machine>(m: &mut M, l: u32, a: GlobalAddr, n: In<B32>) -> Result<BulkSource, M::Stop> {
    Ok(BulkSource::Bytes { addr: address(m, l, a)?, bytes: m.get(l, n)? })
}

/// The map and the tile's first element; coordinates are signed.
fn tile<M: Machine>(
    m: &mut M,
    l: u32,
    map: Use<B64>,
    at: [Use<B32>; 2],
) -> Result<(u64, [i32; 2]), M::Stop> {
    Ok((m.get(l, map)?, [m.get(l, at[0])? as i32, m.get(l, at[1])? as i32]))
}

fn load<M: Machine>(
    m: &mut M,
    l: u32,
    d: SharedAddr,
    src: BulkSource,
    bar: BarrierAddr,
    ctas: Option<u16>,
) -> Result<(), M::Stop> {
    let (dst, bar) = (m.shared_at(l, d)?, m.shared_at(l, bar.0)?);
    m.bulk(l, BulkOp::Load(BulkLoad { dst, src, bar, ctas }))
}
