//! Asynchronous copies from global to shared memory (`cp.async`).
//!
//! A copy belongs to the lane that started it and to that lane's open group. Its bytes become visible to
//! that lane after a wait that covers the group, to other threads after a barrier that follows that wait.
//! Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy" (cp.async,
//! cp.async.commit_group, cp.async.wait_group) and "createpolicy".

use super::{AsyncCopy, Machine, isa, ptx};
use crate::asm::reg::{GlobalAddr, Imm, In, Out, SharedAddr, Use};
use crate::asm::types::{B32, B64};

isa! {
    /// Asynchronous copies.
    CopyAsync;

    /// Copies 16 bytes past L1.
    cp_async_cg_16 = CpAsyncCg16 { d: SharedAddr, a: GlobalAddr }
        "cp.async.cg.shared.global {d}, {a}, 16;", ptx(7, 0, 80), Lane, CopyAsync(16), |m, l, i| { copy(m, l, i.d, i.a, 16, None)?; }
    /// Copies the first `n` of 16 bytes past L1 and fills the rest with zeros.
    cp_async_cg_16_zfill = CpAsyncCg16Zfill { d: SharedAddr, a: GlobalAddr, n: In<B32> }
        "cp.async.cg.shared.global {d}, {a}, 16, {n};", ptx(7, 0, 80), Lane, CopyAsync(16), |m, l, i| { copy(m, l, i.d, i.a, 16, Some(i.n))?; }
    /// Copies the first `n` of 4 bytes and fills the rest with zeros.
    cp_async_ca_4_zfill = CpAsyncCa4Zfill { d: SharedAddr, a: GlobalAddr, n: In<B32> }
        "cp.async.ca.shared.global {d}, {a}, 4, {n};", ptx(7, 0, 80), Lane, CopyAsync(4), |m, l, i| { copy(m, l, i.d, i.a, 4, Some(i.n))?; }
    /// Copies 16 bytes past L1 under an L2 eviction policy.
    cp_async_cg_16_hint = CpAsyncCg16Hint { d: SharedAddr, a: GlobalAddr, policy: Use<B64> }
        "cp.async.cg.shared.global.L2::cache_hint {d}, {a}, 16, {policy};", ptx(7, 4, 80), Lane, CopyAsync(16), |m, l, i| { m.get(l, i.policy)?; copy(m, l, i.d, i.a, 16, None)?; }
    /// An L2 policy under which all accesses are the first to be evicted.
    createpolicy_fractional_l2_evict_first_b64 = CreatepolicyEvictFirst { d: Out<B64> }
        "createpolicy.fractional.L2::evict_first.b64 {d}, 0f3F800000;", ptx(7, 4, 80), Lane, Pure, |m, l, i| { m.set(l, i.d, 0x12F0_0000_0000_0000); }
    /// Closes this lane's open group of copies.
    cp_async_commit_group = CpAsyncCommitGroup {}
        "cp.async.commit_group;", ptx(7, 0, 80), Lane, Sync, |m, l, _i| { m.commit_async(l)?; }
    /// Waits until at most the newest `n` of this lane's groups are incomplete.
    cp_async_wait_group = CpAsyncWaitGroup { n: Imm }
        "cp.async.wait_group {n};", ptx(7, 0, 80), Lane, Sync, |m, l, i| { m.wait_async(l, i.n.0)?; }
}

fn copy<M: Machine>(
    m: &mut M,
    lane: u32,
    d: SharedAddr,
    a: GlobalAddr,
    bytes: u32,
    src_bytes: Option<In<B32>>,
) -> Result<(), M::Stop> {
    let dst = m.get(lane, Use(d.base))?.wrapping_add_signed(d.offset);
    let src = m.get(lane, Use(a.base))?.wrapping_add_signed(a.offset.into());
    let src_bytes = match src_bytes {
        Some(n) => m.get(lane, n)?,
        None => bytes,
    };
    m.copy_async(lane, AsyncCopy { dst, region: d.region, src, bytes, src_bytes })
}
