//! Loads, stores, fences and atomic operations.
//!
//! Vector forms move 8 or 16 bytes and need that alignment. Weak accesses are ordered only by barriers and
//! by release/acquire patterns on other words.
//! Source: PTX ISA, "Data Movement and Conversion Instructions" (ld, st), "Parallel Synchronization and
//! Communication Instructions" (atom, red, fence), "Memory Consistency Model".

use super::{Access, Machine, isa, ptx};
use crate::asm::reg::{GlobalAddr, In, Out, SharedAddr, Use, Vector};
use crate::asm::types::{B16, B32, B64, F32, Order, Space};

isa! {
    /// Loads, stores, fences and atomics.
    Mem;

    /// Loads 16 bits from global memory.
    ld_global_b16 = LdGlobalB16 { d: Out<B16>, a: GlobalAddr }
        "ld.global.b16 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(2), |m, l, i| { let [v] = load_global::<_, 2, 1>(m, l, i.a, Order::Weak)?; m.set(l, i.d, v as u16); }
    /// Loads 32 bits from global memory.
    ld_global_b32 = LdGlobalB32 { d: Out<B32>, a: GlobalAddr }
        "ld.global.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(4), |m, l, i| { let [v] = load_global::<_, 4, 1>(m, l, i.a, Order::Weak)?; m.set(l, i.d, v); }
    /// Loads 8 bytes from global memory.
    ld_global_v2_b32 = LdGlobalV2B32 { d: Vector<Out<B32>, 2>, a: GlobalAddr }
        "ld.global.v2.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(8), |m, l, i| { let v = load_global::<_, 8, 2>(m, l, i.a, Order::Weak)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, v); } }
    /// Loads 16 bytes from global memory.
    ld_global_v4_b32 = LdGlobalV4B32 { d: Vector<Out<B32>, 4>, a: GlobalAddr }
        "ld.global.v4.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(16), |m, l, i| { let v = load_global::<_, 16, 4>(m, l, i.a, Order::Weak)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, v); } }
    /// Loads two single-precision values from global memory.
    ld_global_v2_f32 = LdGlobalV2F32 { d: Vector<Out<F32>, 2>, a: GlobalAddr }
        "ld.global.v2.f32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(8), |m, l, i| { let v = load_global::<_, 8, 2>(m, l, i.a, Order::Weak)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, f32::from_bits(v)); } }
    /// Loads four single-precision values from global memory.
    ld_global_v4_f32 = LdGlobalV4F32 { d: Vector<Out<F32>, 4>, a: GlobalAddr }
        "ld.global.v4.f32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(16), |m, l, i| { let v = load_global::<_, 16, 4>(m, l, i.a, Order::Weak)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, f32::from_bits(v)); } }
    /// Stores 16 bits to global memory.
    st_global_b16 = StGlobalB16 { a: GlobalAddr, b: Use<B16> }
        "st.global.b16 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(2), |m, l, i| { let v = m.get(l, i.b)?; store_global::<_, 2>(m, l, i.a, Order::Weak, &[v.into()])?; }
    /// Stores 32 bits to global memory.
    st_global_b32 = StGlobalB32 { a: GlobalAddr, b: In<B32> }
        "st.global.b32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(4), |m, l, i| { let v = m.get(l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &[v])?; }
    /// Stores 8 bytes to global memory.
    st_global_v2_b32 = StGlobalV2B32 { a: GlobalAddr, b: Vector<Use<B32>, 2> }
        "st.global.v2.b32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(8), |m, l, i| { let v = words(m, l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &v)?; }
    /// Stores 16 bytes to global memory.
    st_global_v4_b32 = StGlobalV4B32 { a: GlobalAddr, b: Vector<Use<B32>, 4> }
        "st.global.v4.b32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(16), |m, l, i| { let v = words(m, l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &v)?; }
    /// Stores a single-precision value to global memory.
    st_global_f32 = StGlobalF32 { a: GlobalAddr, b: Use<F32> }
        "st.global.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(4), |m, l, i| { let v = m.get(l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &[v.to_bits()])?; }
    /// Stores two single-precision values to global memory.
    st_global_v2_f32 = StGlobalV2F32 { a: GlobalAddr, b: Vector<Use<F32>, 2> }
        "st.global.v2.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(8), |m, l, i| { let v = floats(m, l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &v)?; }
    /// Stores four single-precision values to global memory.
    st_global_v4_f32 = StGlobalV4F32 { a: GlobalAddr, b: Vector<Use<F32>, 4> }
        "st.global.v4.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(16), |m, l, i| { let v = floats(m, l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &v)?; }
    /// Stores 64 bits to global memory.
    st_global_b64 = StGlobalB64 { a: GlobalAddr, b: Use<B64> }
        "st.global.b64 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(8), |m, l, i| { let v = m.get(l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::Weak, &[v as u32, (v >> 32) as u32])?; }

    /// Loads 16 bits from shared memory.
    ld_shared_b16 = LdSharedB16 { d: Out<B16>, a: SharedAddr }
        "ld.shared.b16 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(2), |m, l, i| { let [v] = load_shared::<_, 2, 1>(m, l, i.a)?; m.set(l, i.d, v as u16); }
    /// Loads 32 bits from shared memory.
    ld_shared_b32 = LdSharedB32 { d: Out<B32>, a: SharedAddr }
        "ld.shared.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(4), |m, l, i| { let [v] = load_shared::<_, 4, 1>(m, l, i.a)?; m.set(l, i.d, v); }
    /// Loads 8 bytes from shared memory.
    ld_shared_v2_b32 = LdSharedV2B32 { d: Vector<Out<B32>, 2>, a: SharedAddr }
        "ld.shared.v2.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(8), |m, l, i| { let v = load_shared::<_, 8, 2>(m, l, i.a)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, v); } }
    /// Loads 16 bytes from shared memory.
    ld_shared_v4_b32 = LdSharedV4B32 { d: Vector<Out<B32>, 4>, a: SharedAddr }
        "ld.shared.v4.b32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(16), |m, l, i| { let v = load_shared::<_, 16, 4>(m, l, i.a)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, v); } }
    /// Loads a single-precision value from shared memory.
    ld_shared_f32 = LdSharedF32 { d: Out<F32>, a: SharedAddr }
        "ld.shared.f32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(4), |m, l, i| { let [v] = load_shared::<_, 4, 1>(m, l, i.a)?; m.set(l, i.d, f32::from_bits(v)); }
    /// Loads two single-precision values from shared memory.
    ld_shared_v2_f32 = LdSharedV2F32 { d: Vector<Out<F32>, 2>, a: SharedAddr }
        "ld.shared.v2.f32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(8), |m, l, i| { let v = load_shared::<_, 8, 2>(m, l, i.a)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, f32::from_bits(v)); } }
    /// Loads four single-precision values from shared memory.
    ld_shared_v4_f32 = LdSharedV4F32 { d: Vector<Out<F32>, 4>, a: SharedAddr }
        "ld.shared.v4.f32 {d}, {a};", ptx(7, 0, 70), Lane, LoadShared(16), |m, l, i| { let v = load_shared::<_, 16, 4>(m, l, i.a)?; for (d, v) in i.d.0.into_iter().zip(v) { m.set(l, d, f32::from_bits(v)); } }
    /// Stores 16 bits to shared memory.
    st_shared_b16 = StSharedB16 { a: SharedAddr, b: Use<B16> }
        "st.shared.b16 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(2), |m, l, i| { let v = m.get(l, i.b)?; store_shared::<_, 2>(m, l, i.a, &[v.into()])?; }
    /// Stores 32 bits to shared memory.
    st_shared_b32 = StSharedB32 { a: SharedAddr, b: In<B32> }
        "st.shared.b32 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(4), |m, l, i| { let v = m.get(l, i.b)?; store_shared::<_, 4>(m, l, i.a, &[v])?; }
    /// Stores 16 bytes to shared memory.
    st_shared_v4_b32 = StSharedV4B32 { a: SharedAddr, b: Vector<Use<B32>, 4> }
        "st.shared.v4.b32 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(16), |m, l, i| { let v = words(m, l, i.b)?; store_shared::<_, 4>(m, l, i.a, &v)?; }
    /// Stores a single-precision value to shared memory.
    st_shared_f32 = StSharedF32 { a: SharedAddr, b: Use<F32> }
        "st.shared.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(4), |m, l, i| { let v = m.get(l, i.b)?; store_shared::<_, 4>(m, l, i.a, &[v.to_bits()])?; }
    /// Stores two single-precision values to shared memory.
    st_shared_v2_f32 = StSharedV2F32 { a: SharedAddr, b: Vector<Use<F32>, 2> }
        "st.shared.v2.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(8), |m, l, i| { let v = floats(m, l, i.b)?; store_shared::<_, 4>(m, l, i.a, &v)?; }
    /// Stores four single-precision values to shared memory.
    st_shared_v4_f32 = StSharedV4F32 { a: SharedAddr, b: Vector<Use<F32>, 4> }
        "st.shared.v4.f32 {a}, {b};", ptx(7, 0, 70), Lane, StoreShared(16), |m, l, i| { let v = floats(m, l, i.b)?; store_shared::<_, 4>(m, l, i.a, &v)?; }

    /// Loads a flag atomically, without ordering other accesses.
    ld_relaxed_gpu_global_u32 = LdRelaxedGpuGlobalU32 { d: Out<B32>, a: GlobalAddr }
        "ld.relaxed.gpu.global.u32 {d}, {a};", ptx(7, 0, 70), Lane, LoadGlobal(4), |m, l, i| { let [v] = load_global::<_, 4, 1>(m, l, i.a, Order::RelaxedGpu)?; m.set(l, i.d, v); }
    /// Loads a flag; what its writer released before is visible afterwards.
    ld_acquire_gpu_global_u32 = LdAcquireGpuGlobalU32 { d: Out<B32>, a: GlobalAddr }
        "ld.acquire.gpu.global.u32 {d}, {a};", ptx(7, 0, 70), Lane, Sync(4), |m, l, i| { let [v] = load_global::<_, 4, 1>(m, l, i.a, Order::AcquireGpu)?; m.set(l, i.d, v); }
    /// Stores a flag; publishes what this thread has seen and done.
    st_release_gpu_global_u32 = StReleaseGpuGlobalU32 { a: GlobalAddr, b: In<B32> }
        "st.release.gpu.global.u32 {a}, {b};", ptx(7, 0, 70), Lane, Sync(4), |m, l, i| { let v = m.get(l, i.b)?; store_global::<_, 4>(m, l, i.a, Order::ReleaseGpu, &[v])?; }
    /// Adds to a word atomically, without ordering other accesses.
    red_relaxed_gpu_global_add_u32 = RedRelaxedGpuGlobalAddU32 { a: GlobalAddr, b: In<B32> }
        "red.relaxed.gpu.global.add.u32 {a}, {b};", ptx(7, 0, 70), Lane, StoreGlobal(4), |m, l, i| { let v = m.get(l, i.b)?; atomic(m, l, i.a, Order::RelaxedGpu, &mut |old| old.wrapping_add(v))?; }
    /// Adds to a word atomically; publishes what this thread has seen and done.
    red_release_gpu_global_add_u32 = RedReleaseGpuGlobalAddU32 { a: GlobalAddr, b: In<B32> }
        "red.release.gpu.global.add.u32 {a}, {b};", ptx(7, 0, 70), Lane, Sync(4), |m, l, i| { let v = m.get(l, i.b)?; atomic(m, l, i.a, Order::ReleaseGpu, &mut |old| old.wrapping_add(v))?; }
    /// Adds to four floats, each atomically, without ordering other accesses.
    red_relaxed_gpu_global_add_v4_f32 = RedRelaxedGpuGlobalAddV4F32 { a: GlobalAddr, b: Vector<Use<F32>, 4> }
        "red.relaxed.gpu.global.add.v4.f32 {a}, {b};", ptx(8, 1, 90), Lane, StoreGlobal(16), |m, l, i| { let access = global(m, l, i.a, Order::RelaxedGpu)?; let v = floats(m, l, i.b)?; m.reduce_f32(l, access, v.map(f32::from_bits))?; }
    /// Adds to a word atomically and returns the old value; both publishes and acquires.
    atom_acq_rel_gpu_global_add_u32 = AtomAcqRelGpuGlobalAddU32 { d: Out<B32>, a: GlobalAddr, b: In<B32> }
        "atom.acq_rel.gpu.global.add.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Sync(4), |m, l, i| { let v = m.get(l, i.b)?; let old = atomic(m, l, i.a, Order::AcqRelGpu, &mut |old| old.wrapping_add(v))?; m.set(l, i.d, old); }
    /// Increments a word atomically, wrapping to 0 once it has reached `b`, and returns the old value; both
    /// publishes and acquires.
    atom_acq_rel_gpu_global_inc_u32 = AtomAcqRelGpuGlobalIncU32 { d: Out<B32>, a: GlobalAddr, b: In<B32> }
        "atom.acq_rel.gpu.global.inc.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Sync(4), |m, l, i| { let v = m.get(l, i.b)?; let old = atomic(m, l, i.a, Order::AcqRelGpu, &mut |old| if old >= v { 0 } else { old + 1 })?; m.set(l, i.d, old); }
    /// Orders this thread's accesses before the fence with those after it, at GPU scope.
    fence_acq_rel_gpu = FenceAcqRelGpu {}
        "fence.acq_rel.gpu;", ptx(7, 0, 70), Lane, Sync, |m, l, _i| { m.fence(l, Order::AcqRelGpu)?; }
}

fn load<M: Machine, const BYTES: usize, const N: usize>(
    m: &mut M,
    lane: u32,
    access: Access,
) -> Result<[u32; N], M::Stop> {
    let mut buf = [0; BYTES];
    m.load(lane, access, &mut buf)?;
    Ok(std::array::from_fn(|n| {
        buf[n * 4..BYTES.min(n * 4 + 4)]
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u32::from(*byte))
    }))
}

fn global<M: Machine>(m: &mut M, l: u32, a: GlobalAddr, order: Order) -> Result<Access, M::Stop> {
    let addr = m.get(l, Use(a.base))?.wrapping_add_signed(a.offset.into());
    Ok(Access { space: Space::Global, addr, region: None, order })
}

fn shared<M: Machine>(m: &mut M, l: u32, a: SharedAddr) -> Result<Access, M::Stop> {
    let addr = m.get(l, Use(a.base))?.wrapping_add_signed(a.offset);
    Ok(Access { space: Space::Shared, addr: addr.into(), region: a.region, order: Order::Weak })
}

fn load_global<M: Machine, const BYTES: usize, const N: usize>(
    m: &mut M,
    l: u32,
    a: GlobalAddr,
    order: Order,
) -> Result<[u32; N], M::Stop> {
    let access = global(m, l, a, order)?;
    load::<M, BYTES, N>(m, l, access)
}

fn load_shared<M: Machine, const BYTES: usize, const N: usize>(
    m: &mut M,
    l: u32,
    a: SharedAddr,
) -> Result<[u32; N], M::Stop> {
    let access = shared(m, l, a)?;
    load::<M, BYTES, N>(m, l, access)
}

/// Stores words of `WIDTH` bytes each.
fn store<M: Machine, const WIDTH: usize>(
    m: &mut M,
    l: u32,
    access: Access,
    words: &[u32],
) -> Result<(), M::Stop> {
    let mut buf = [0; 16];
    for (n, word) in words.iter().enumerate() {
        buf[n * WIDTH..(n + 1) * WIDTH].copy_from_slice(&word.to_le_bytes()[..WIDTH]);
    }
    m.store(l, access, &buf[..words.len() * WIDTH])
}

fn store_global<M: Machine, const WIDTH: usize>(
    m: &mut M,
    l: u32,
    a: GlobalAddr,
    order: Order,
    words: &[u32],
) -> Result<(), M::Stop> {
    let access = global(m, l, a, order)?;
    store::<M, WIDTH>(m, l, access, words)
}

fn store_shared<M: Machine, const WIDTH: usize>(
    m: &mut M,
    l: u32,
    a: SharedAddr,
    words: &[u32],
) -> Result<(), M::Stop> {
    let access = shared(m, l, a)?;
    store::<M, WIDTH>(m, l, access, words)
}

fn atomic<M: Machine>(
    m: &mut M,
    l: u32,
    a: GlobalAddr,
    order: Order,
    f: &mut dyn FnMut(u32) -> u32,
) -> Result<u32, M::Stop> {
    let access = global(m, l, a, order)?;
    m.atomic(l, access, f)
}

fn words<M: Machine, const N: usize>(
    m: &mut M,
    l: u32,
    v: Vector<Use<B32>, N>,
) -> Result<[u32; N], M::Stop> {
    let mut words = [0; N];
    for (word, reg) in words.iter_mut().zip(v.0) {
        *word = m.get(l, reg)?;
    }
    Ok(words)
}

fn floats<M: Machine, const N: usize>(
    m: &mut M,
    l: u32,
    v: Vector<Use<F32>, N>,
) -> Result<[u32; N], M::Stop> {
    let mut words = [0; N];
    for (word, reg) in words.iter_mut().zip(v.0) {
        *word = m.get(l, reg)?.to_bits();
    }
    Ok(words)
}
