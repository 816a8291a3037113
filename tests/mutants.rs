//! The checker bites: every wait, commit, barrier, flag, swizzle, region and guard of a kernel is missed
//! when it is gone.
//!
//! A mutant is a kernel with one instruction left out, weakened or moved. It runs twice on one workspace,
//! between canaries, in several orders of the warps, and must be noticed: by a fault, a wrong number, a
//! lock that is left set, or a count of bank conflicts. Mutants that cannot be noticed are listed with the
//! reason in [`redundant`]; one that is listed and noticed all the same fails as well, so the list stays
//! true. `tests/emulator/mutants.rs` asks the emulator alone; this asks the whole suite, of kernels that
//! differ in every emission paragraph.

#[path = "gemm/support.rs"]
mod support;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{Alu, MovB32, SetpU32, XorB32};
use makaira::asm::isa::async_copy::{CopyAsync, CpAsyncWaitGroup};
use makaira::asm::isa::bulk::Bulk;
use makaira::asm::isa::cluster::Cluster;
use makaira::asm::isa::mbarrier::{
    Mbarrier, MbarrierArriveExpectTx, MbarrierInit, MbarrierTryWaitParity,
};
use makaira::asm::isa::mem::{
    LdGlobalB32, LdRelaxedGpuGlobalU32, Mem, RedRelaxedGpuGlobalAddU32, StGlobalB32,
};
use makaira::asm::isa::sync::Sync;
use makaira::asm::isa::tensor::Tensor;
use makaira::asm::reg::{Imm, In, SharedAddr};
use makaira::asm::types::Cmp;
use makaira::emu::{EmuBackend, Options};
use makaira::gemm::Prepared;
use makaira::kernel::epilogue::epilogue_bytes;
use makaira::kernel::{Config, Reduction, Rows, select};
use makaira::weights::{CODE_BYTES_PER_TILE, Group};

use support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
};

/// One change to a module.
#[derive(Clone)]
struct Mutant {
    /// Which item.
    at: usize,
    /// What stands there instead; nothing if it is left out.
    with: Option<Node>,
    /// Where: the section's path.
    section: String,
    /// Which one of its row of the instruction table in the section, from 0.
    nth: usize,
    /// The change in words: section, instruction, what becomes of it.
    what: String,
}

impl Mutant {
    /// Whether an instruction of this row is what is left out, in this section.
    fn leaves_out(&self, method: &str, section: &str, module: &Module) -> bool {
        let Item::Inst(node) = module.entry.items[self.at] else { return false };
        self.with.is_none() && node.inst.row().method == method && self.section.starts_with(section)
    }
}

/// What an instruction may become; `None` leaves it out.
fn weaker(node: &Node) -> Vec<(&'static str, Option<Node>)> {
    let left_out = ("left out", None);
    let becomes = |how, inst: Inst| (how, Some(Node { inst, ..*node }));
    match node.inst {
        Inst::Sync(Sync::BarSync(_) | Sync::BarSyncN(_) | Sync::BarWarpSync(_)) => vec![left_out],
        Inst::CopyAsync(CopyAsync::CpAsyncCommitGroup(_)) => vec![left_out],
        Inst::CopyAsync(CopyAsync::CpAsyncWaitGroup(wait)) => {
            let later = CpAsyncWaitGroup { n: Imm(wait.n.0 + 1) };
            vec![left_out, becomes("waits for one group less", later.into())]
        }
        Inst::Mem(Mem::LdAcquireGpuGlobalU32(load)) => vec![
            becomes("relaxed", LdRelaxedGpuGlobalU32 { d: load.d, a: load.a }.into()),
            becomes("weak", LdGlobalB32 { d: load.d, a: load.a }.into()),
        ],
        Inst::Mem(Mem::RedReleaseGpuGlobalAddU32(red)) => {
            let relaxed = RedRelaxedGpuGlobalAddU32 { a: red.a, b: red.b };
            vec![left_out, becomes("relaxed", relaxed.into())]
        }
        Inst::Mem(Mem::StReleaseGpuGlobalU32(store)) => {
            vec![left_out, becomes("weak", StGlobalB32 { a: store.a, b: store.b }.into())]
        }
        // The only plain 32-bit store is the reset of a lock.
        Inst::Mem(Mem::StGlobalB32(_)) => vec![left_out],
        Inst::Mbarrier(Mbarrier::MbarrierInit(init)) => {
            let two = MbarrierInit { n: In::Imm(2), ..init };
            vec![left_out, becomes("expects two arrivals", two.into())]
        }
        Inst::Mbarrier(Mbarrier::FenceMbarrierInit(_)) => vec![left_out],
        Inst::Mbarrier(Mbarrier::MbarrierArriveExpectTx(arrive)) => {
            let In::Imm(bytes) = arrive.n else { return vec![left_out] };
            let fewer = MbarrierArriveExpectTx { n: In::Imm(bytes - 16), ..arrive };
            vec![left_out, becomes("expects 16 bytes less", fewer.into())]
        }
        Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(wait)) => {
            let passes = SetpU32 { d: wait.d, cmp: Cmp::Eq, a: In::Imm(0), b: In::Imm(0) };
            let parity = |n| MbarrierTryWaitParity { parity: In::Imm(n), ..wait };
            vec![
                becomes("does not wait", passes.into()),
                becomes("waits for even phases", parity(0).into()),
                becomes("waits for odd phases", parity(1).into()),
            ]
        }
        Inst::Bulk(Bulk::CpAsyncBulk(_) | Bulk::CpAsyncBulkHint(_)) => vec![left_out],
        Inst::Cluster(Cluster::GriddepcontrolWait(_)) => vec![left_out],
        Inst::Alu(Alu::XorB32(XorB32 { b: In::Imm(0), .. })) => Vec::new(),
        Inst::Alu(Alu::XorB32(XorB32 { d, a, .. })) => {
            vec![becomes("passes its first operand on", MovB32 { d, a }.into())]
        }
        _ => Vec::new(),
    }
}

/// The same instruction one promised region further on.
fn misplaced(inst: &Inst) -> Option<Inst> {
    let moved = |a: SharedAddr| {
        let region = a.region?;
        Some(SharedAddr { offset: a.offset + region.bytes as i32, ..a })
    };
    let mut inst = *inst;
    match &mut inst {
        Inst::CopyAsync(CopyAsync::CpAsyncCg16(copy)) => copy.d = moved(copy.d)?,
        Inst::CopyAsync(CopyAsync::CpAsyncCg16Zfill(copy)) => copy.d = moved(copy.d)?,
        Inst::CopyAsync(CopyAsync::CpAsyncCg16Hint(copy)) => copy.d = moved(copy.d)?,
        Inst::Bulk(Bulk::CpAsyncBulk(copy)) => copy.d = moved(copy.d)?,
        Inst::Bulk(Bulk::CpAsyncBulkHint(copy)) => copy.d = moved(copy.d)?,
        Inst::Mem(Mem::LdSharedV4B32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::LdSharedB32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::LdSharedV4F32(load)) => load.a = moved(load.a)?,
        Inst::Mem(Mem::StSharedV4B32(store)) => store.a = moved(store.a)?,
        Inst::Mem(Mem::StSharedF32(store)) => store.a = moved(store.a)?,
        Inst::Tensor(Tensor::LdmatrixX4(load)) => load.a = moved(load.a)?,
        _ => return None,
    }
    Some(inst)
}

/// Every mutant of a module: all weakenings, and of misplaced or unguarded accesses one a section and
/// row of the instruction table.
fn mutants(module: &Module) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    let mut seen = Vec::new();
    let mut counts: HashMap<_, usize> = HashMap::new();
    for (at, item) in module.entry.items.iter().enumerate() {
        let Item::Inst(node) = item else { continue };
        let section = module.entry.sections[node.section as usize].as_str();
        let kind = (section, node.inst.row().method);
        let count = counts.entry(kind).or_default();
        let nth = *count;
        *count += 1;
        let mut push = |how: &str, with| {
            let what = format!("{section}, number {nth}: `{}` {how}", node.inst);
            mutants.push(Mutant { at, with, section: section.into(), nth, what });
        };
        for (how, with) in weaker(node) {
            push(how, with);
        }
        if seen.contains(&kind) {
            continue;
        }
        if let Some(inst) = misplaced(&node.inst) {
            seen.push(kind);
            push("one region further on", Some(Node { inst, ..*node }));
        }
        let stores = matches!(
            node.inst,
            Inst::Mem(
                Mem::StGlobalV4F32(_)
                    | Mem::StGlobalV2B32(_)
                    | Mem::StGlobalB16(_)
                    | Mem::StGlobalB32(_)
                    | Mem::RedReleaseGpuGlobalAddU32(_)
            )
        );
        if stores && node.guard.is_some() {
            seen.push(kind);
            push("by every thread", Some(Node { guard: None, ..*node }));
        }
    }
    mutants
}

/// The module with these changes, which are in ascending order.
fn apply<'m>(module: &Module, mutants: impl IntoIterator<Item = &'m Mutant>) -> Module {
    let mut module = module.clone();
    for (removed, mutant) in mutants.into_iter().enumerate() {
        match mutant.with {
            Some(node) => module.entry.items[mutant.at - removed] = Item::Inst(node),
            None => drop(module.entry.items.remove(mutant.at - removed)),
        }
    }
    module
}

/// A kernel and a product that exercises all of it.
struct Case {
    config: Config,
    setups: Vec<Setup>,
    m: usize,
    a: Vec<half::f16>,
    stripe: u32,
    num_locks: u64,
    tolerance: Tolerance,
}

impl Case {
    /// Output tiles of which the last one is ragged. A stripe is a tile and some runs: CTAs have several
    /// segments, begin and end inside tiles, and every ring is filled more than once.
    fn new(name: &str, m: usize) -> Self {
        let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
        // Every run of the unrolled loop refills its slot: that of Hopper's rings has up to twice the stages.
        let runs = match config.family {
            "sm90" => 3 * config.stages as usize + 1,
            _ => config.stages as usize + 2,
        };
        let k_tiles = config.warps_k as usize * runs + 1;
        let (ragged_n, ragged_k) = match config.rows {
            Rows::Whole => (4, 0),
            Rows::Vector => (4, 40),
            Rows::Element => (3, 41),
        };
        let num_tiles = if config.tile_m < 32 { 3 } else { 2 };
        let n = num_tiles * config.tile_n as usize - ragged_n;
        let k = 128 * k_tiles - ragged_k;
        let k = match config.group {
            Group::Size(size) => k / size as usize * size as usize,
            Group::PerColumn => k,
        };
        // An owned segment is followed by one that refills every slot of the ring.
        let stripe = 2 * k_tiles as u32 - 1;
        let mut random = Random(0x6d75_7461_6e74);
        let layer = Layer::new(n, k, config.group.raw(), Fill::Integers, &mut random);
        let a = activations(m, k, Fill::Integers, &mut random);
        let tolerance = Tolerance::of(Fill::Integers, &config, k, stripe);
        let setups: Vec<Setup> = [None, Some(1), Some(2)]
            .map(|seed| {
                // Kernels for this target may begin before earlier grids have ended.
                let options =
                    Options { seed, max_idle_steps: 100_000, max_steps: 8 << 20, overlap: true };
                let emu = EmuBackend::h200_like(4).with_options(options);
                Setup::new(&Device::emulated(emu), layer.clone())
            })
            .into();
        let problem = setups[0].problem(m, config.rows);
        let plans = select::plans(&config, &problem, stripe);
        let num_locks = plans.map(|plan| plan.num_locks).max().expect("one launch");
        assert!(num_locks > 0, "{name}: CTAs share tiles");
        Self { config, setups, m, a, stripe, num_locks, tolerance }
    }

    fn module(&self) -> Module {
        let arch = self.setups[0].device.backend.device().arch;
        select::check(&self.config, arch).unwrap_or_else(|error| panic!("{error}"));
        select::family_of(&self.config).build(&self.config, arch)
    }

    /// Runs a module; how it was noticed, if it was. Wrong numbers, set locks and overwritten canaries
    /// count as much as faults.
    fn noticed(&self, module: &Module) -> Option<String> {
        let spread = match self.config.rows {
            Rows::Element => Spread { a_gap: 3, c_gap: 5, a_shift: 1, c_shift: 7 },
            _ => CANARIES,
        };
        for setup in &self.setups {
            let kernel = match setup.device.backend.load(module) {
                Ok(kernel) => kernel,
                Err(error) => return Some(chain(&error)),
            };
            let choice = setup.choice(self.config, self.stripe, self.m);
            let prepared = Prepared { choice, kernel };
            let workspace = setup.workspace(&choice, self.m);
            for launch in 0..2 {
                let run = || setup.run_with(&prepared, &self.a, spread, &workspace);
                // The canaries' assertions panic.
                let c = match catch_unwind(AssertUnwindSafe(run)) {
                    Ok(Ok(c)) => c,
                    Ok(Err(error)) => return Some(format!("launch {launch}: {}", chain(&error))),
                    Err(_) => return Some(format!("launch {launch}: a canary was overwritten")),
                };
                if let Err(why) = compare(&setup.layer, &self.a, &c, self.tolerance) {
                    return Some(format!("launch {launch}: {why}"));
                }
                if !setup.locks_are_zero(&workspace, self.num_locks) {
                    return Some(format!("launch {launch}: a lock is left set"));
                }
            }
            let report = setup.device.emu.as_ref().and_then(|emu| emu.last_report());
            let conflicts = report.map_or(0, |report| report.total.conflict_wavefronts);
            if conflicts > 0 {
                return Some(format!("{conflicts} bank conflicts"));
            }
        }
        None
    }
}

/// Whether a mutant takes a barrier between the windows of a tall tile's weave away: they keep the
/// assembler from moving loads out of their window, and order nothing.
fn is_window(config: &Config, mutant: &Mutant, module: &Module) -> bool {
    let team_barrier = config.warps_n == 1 && mutant.nth == 0;
    config.tile_m >= 32
        && !team_barrier
        && mutant.leaves_out("bar_warp_sync", "main loop, slot", module)
}

/// Why a mutant cannot be noticed, if that is known.
fn redundant(config: &Config, mutant: &Mutant, module: &Module) -> Option<&'static str> {
    let left_out = |method, section| mutant.leaves_out(method, section, module);
    let sums = "partial sums to shared memory";
    let in_place = config.reduction == Reduction::F16InPlace;
    if in_place && left_out("bar_sync", sums) && mutant.nth == 1 {
        return Some("the barrier behind the lock lies between the sums' stores and loads as well");
    }
    // The sums' readers and the next runs' copies to that place are both team 0, which has a barrier of
    // its own between them.
    let items = config.tile_m * config.tile_n / 4;
    let team_codes = config.warps_n * config.tiles_per_warp() * CODE_BYTES_PER_TILE as u32;
    let inside = items <= 32 * config.warps_n && epilogue_bytes(config) <= team_codes;
    let at_the_end = left_out("bar_sync", "tile done");
    if config.family == "sm80" && at_the_end && inside {
        return Some("only the team whose ring holds the sums reads them");
    }
    let Item::Inst(node) = module.entry.items[mutant.at] else { return None };
    let swizzles = matches!(node.inst, Inst::Alu(Alu::XorB32(XorB32 { b: In::Reg(_), .. })));
    if config.tile_m == 1 && swizzles {
        return Some("row 0 lies as it is in every swizzle");
    }
    let paces = mutant.section == "fill the rest of the weights' ring"
        && matches!(node.inst, Inst::Mbarrier(Mbarrier::MbarrierTryWaitParity(_)));
    let odd = "waits for odd phases";
    if paces && !mutant.what.ends_with(odd) {
        return Some(
            "the first wait only paces the copies; the run that reads the slot waits again",
        );
    }
    let rows_per_pass = config.num_threads() / (config.tile_n / 4);
    let unguarded = mutant.with.is_some_and(|node| node.guard.is_none());
    let to_slot = matches!(node.inst, Inst::Mem(Mem::StGlobalV4F32(_)));
    if unguarded && to_slot && config.tile_m.is_multiple_of(rows_per_pass) {
        return Some("a slot has room for rows that do not exist");
    }
    None
}

/// Every mutant of a kernel is noticed, or is known to be redundant.
fn bites(name: &str, m: usize) {
    let case = Case::new(name, m);
    let module = case.module();
    if let Some(why) = case.noticed(&module) {
        panic!("{name} itself: {why}");
    }
    let all = mutants(&module);
    let (windows, others): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|mutant| is_window(&case.config, mutant, &module));
    if let Some(how) = case.noticed(&apply(&module, &windows)) {
        panic!("{name}: the {} barriers between windows matter: {how}", windows.len());
    }
    let (mut wrong, mut excused) = (Vec::new(), Vec::new());
    for mutant in &others {
        let noticed = case.noticed(&apply(&module, [mutant]));
        match (noticed, redundant(&case.config, mutant, &module)) {
            (Some(_), None) => {}
            (None, Some(reason)) => excused.push((mutant, reason)),
            (None, None) => wrong.push(format!("not noticed: {}", mutant.what)),
            (Some(how), Some(reason)) => {
                wrong.push(format!("not redundant ({reason}): {}: {how}", mutant.what));
            }
        }
    }
    println!("{name}: {} mutants, {} redundant", others.len(), excused.len());
    excused.iter().for_each(|(mutant, reason)| println!("   {}: {reason}", mutant.what));
    assert!(others.len() > 30, "{name}: only {} mutants", others.len());
    assert!(wrong.is_empty(), "{name}, of {} mutants:\n{}", others.len(), wrong.join("\n"));
}

#[test]
fn one_row() {
    bites("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1);
}

#[test]
fn teams_of_two_warps_and_two_stages() {
    bites("marlin_sm80_u4b8_f16_m16n128k256_col_w2_s2_c1", 19);
}

#[test]
fn half_chunks_groups_of_64_and_cut_rows() {
    bites("marlin_sm80_u4b8_f16_m32n128k128_g64_w4_s4_c1_fs_kt", 30);
}

#[test]
fn in_place_reduction() {
    bites("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16", 16);
}

#[test]
fn single_elements() {
    bites("marlin_sm80_u4b8_f16_m8n64k256_col_w1_s2_c1_el", 9);
}

#[test]
fn tall_tiles() {
    bites("marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs", 61);
}

#[test]
fn evict_first_and_groups_of_32() {
    bites("marlin_sm80_u4b8_f16_m4n64k256_g32_w2_s3_c1_ef", 3);
}

#[test]
fn rings_of_one_warp() {
    bites("marlin_sm90_u4b8_f16_m1n64k512_g128_w1_s2_c1", 1);
}

#[test]
fn rings_of_one_warp_and_subnormal_codes() {
    bites("marlin_sm90_u4b8_f16_m16n128k256_g128_w2_s2_c1_sn", 15);
}

#[test]
fn three_warps_side_by_side_and_cut_rows() {
    bites("marlin_sm90_u4b8_f16_m8n96k256_col_w3_s3_c1_sr_sn_kt", 7);
}
