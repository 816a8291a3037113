//! Barriers and exchanges between the lanes of a warp.
//!
//! A CTA barrier orders the shared and global accesses of the participating threads; a warp barrier those
//! of its member lanes.
//! Source: PTX ISA, "Parallel Synchronization and Communication Instructions" (bar, bar.warp.sync) and
//! "shfl.sync".

use super::{isa, lanes, ptx};
use crate::asm::reg::{Imm, In, Out, Use};
use crate::asm::types::{B32, F32};

isa! {
    /// Barriers and warp exchanges.
    Sync;

    /// All threads of the CTA meet at barrier `id`.
    bar_sync = BarSync { id: Imm }
        "bar.sync {id};", ptx(7, 0, 70), Cta, Sync, |m, i| { m.barrier(i.id.0, None)?; }
    /// `n` threads (a multiple of 32) of the CTA meet at barrier `id`.
    bar_sync_n = BarSyncN { id: In<B32>, n: Imm }
        "bar.sync {id}, {n};", ptx(7, 0, 70), Cta, Sync, |m, i| {
            let mut arrived = None;
            for lane in lanes(m.active()) {
                let id = m.get(lane, i.id)?;
                if arrived != Some(id) { m.barrier(id, Some(i.n.0))?; }
                arrived = Some(id);
            }
        }
    /// The lanes of a mask meet.
    bar_warp_sync = BarWarpSync { members: In<B32> }
        "bar.warp.sync {members};", ptx(7, 0, 70), Lane, Sync, |m, l, i| { let members = m.get(l, i.members)?; m.warp_barrier(l, members)?; }
    /// Each lane receives `a` of lane `b`.
    shfl_sync_idx_b32 = ShflSyncIdxB32 { d: Out<B32>, a: Use<B32>, b: In<B32> }
        "shfl.sync.idx.b32 {d}, {a}, {b}, 31, 0xffffffff;", ptx(7, 0, 70), Warp, Pure, |m, i| {
            let mut values = [0; 32];
            for lane in lanes(m.active()) {
                let from = m.get(lane, i.b)? & 31;
                values[lane as usize] = m.get(from, i.a)?;
            }
            for lane in lanes(m.active()) { m.set(lane, i.d, values[lane as usize]); }
        }
    /// Each lane receives the float `a` of lane `b`.
    shfl_sync_idx_f32 = ShflSyncIdxF32 { d: Out<F32>, a: Use<F32>, b: In<B32> }
        "shfl.sync.idx.b32 {d}, {a}, {b}, 31, 0xffffffff;", ptx(7, 0, 70), Warp, Pure, |m, i| {
            let mut values = [0.0; 32];
            for lane in lanes(m.active()) {
                let from = m.get(lane, i.b)? & 31;
                values[lane as usize] = m.get(from, i.a)?;
            }
            for lane in lanes(m.active()) { m.set(lane, i.d, values[lane as usize]); }
        }
}
