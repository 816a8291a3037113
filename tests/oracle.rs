//! The real assembler judges the instruction table, the printer and the shipped kernels.

mod common;

use common::Random;
use common::oracle::{Nvdisasm, Ptxas};
use common::row_kernel::RowKernel;
use makaira::asm::isa::{Inst, Row, TargetSet, table};
use makaira::asm::{Asm, Module, PrintOptions, Rule};
use makaira::target::{PtxIsa, SmArch};
use proptest::prelude::*;

/// The oldest PTX and target that we ever print: no row claims less, whatever it could do with.
const FLOOR: (PtxIsa, u16) = (PtxIsa::new(7, 0), 70);
/// The oldest architecture that the assembler makes code for; text for an older one is accepted there.
const OLDEST_CODE: u16 = 75;
/// PTX versions and targets, ascending.
const VERSIONS: [(u8, u8); 19] = [
    (7, 0),
    (7, 1),
    (7, 2),
    (7, 3),
    (7, 4),
    (7, 5),
    (7, 6),
    (7, 7),
    (7, 8),
    (8, 0),
    (8, 1),
    (8, 2),
    (8, 3),
    (8, 4),
    (8, 5),
    (8, 6),
    (8, 7),
    (8, 8),
    (9, 0),
];
const TARGETS: [u16; 6] = [70, 75, 80, 86, 89, 90];

/// A kernel around an instruction of the row. The target only matters for what is printed.
fn kernel(row: &Row, target: SmArch) -> Module {
    let mut asm = Asm::new();
    match row.method {
        "bar_sync_n" => {
            asm.bar_sync_n(1, 32);
            asm.exit();
            asm.finish("row", target, 32, 1)
        }
        _ => RowKernel::new(row, choices(row), target).module,
    }
}

/// Registers only, and immediates that are in the range of the row.
fn choices(row: &Row) -> &'static [u32] {
    match row.method {
        "wgmma_mma_async_m64k16_f32_f16" | "wgmma_mma_async_m64k16_f32_bf16" => &[8],
        "setmaxnreg_dec_sync_aligned_u32" | "setmaxnreg_inc_sync_aligned_u32" => &[24],
        _ => &[],
    }
}

/// The module's text under another version line.
fn with_version(module: &Module, version: PtxIsa) -> String {
    module.to_string().replacen(
        &format!(".version {}", module.isa()),
        &format!(".version {version}"),
        1,
    )
}

fn target_of(row: &Row) -> SmArch {
    match row.since.targets {
        TargetSet::From(sm) => SmArch::baseline(sm),
        TargetSet::Specific(sm) => SmArch::specific(sm),
    }
}

fn code_arch(target: SmArch) -> String {
    SmArch { sm: target.sm.max(OLDEST_CODE), ..target }.to_string()
}

#[test]
fn every_row_assembles_at_its_minimum() {
    let Some(ptxas) = Ptxas::find() else { return };
    let mut refused = Vec::new();
    for row in table() {
        let target = target_of(row);
        let module = kernel(row, target);
        let since = target.since().expect("rows name known targets");
        // The copies around a row of the asynchronous family are at home at its target.
        assert!(module.isa() <= row.since.isa.max(since).max(FLOOR.0), "{}", row.method);
        let text = with_version(&module, row.since.isa.max(since));
        if let Err(log) = ptxas.assemble(&text, &code_arch(target), &[]) {
            refused.push(format!("{}: {log}", row.method));
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
}

#[test]
fn no_row_claims_more_than_it_needs() {
    let Some(ptxas) = Ptxas::find() else { return };
    let mut accepted = Vec::new();
    for row in table() {
        let target = target_of(row);
        let module = kernel(row, target);
        let isa = row.since.isa;
        if isa > FLOOR.0.max(target.since().expect("rows name known targets")) {
            let older = VERSIONS.map(|(major, minor)| PtxIsa::new(major, minor));
            let older =
                older.into_iter().rfind(|older| *older < isa).expect("it is above the floor");
            if ptxas.assemble(&with_version(&module, older), &code_arch(target), &[]).is_ok() {
                accepted.push(format!("{} also assembles with PTX {older}", row.method));
            }
        }
        if target.sm > FLOOR.1 {
            let older = match target.specific {
                true => target.sm,
                false => {
                    let mut older = TARGETS.into_iter().filter(|older| *older < target.sm);
                    older.next_back().expect("above the floor")
                }
            };
            let module = kernel_for_older(row, SmArch::baseline(older));
            if ptxas.assemble(&module.to_string(), &code_arch(module.target), &[]).is_ok() {
                accepted.push(format!("{} also assembles for {}", row.method, module.target));
            }
        }
    }
    assert!(accepted.is_empty(), "{}", accepted.join("\n"));
}

/// The instruction alone, so that what refuses it is not a neighbour.
fn kernel_for_older(row: &Row, target: SmArch) -> Module {
    let mut asm = Asm::new();
    let inst = common::row_kernel::instruction(row, &mut asm, choices(row));
    asm.emit(inst);
    asm.exit();
    asm.finish("row", target, 32, 1)
}

#[test]
fn line_information_reaches_the_machine_code() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut asm = Asm::new();
    let out = asm.param_u64("out");
    let [base] = asm.regs();
    let value = asm.reg();
    asm.ld_param_u64(base, out);
    asm.mov_b32(value, 7);
    let line = line!() + 1;
    asm.st_global_b32(base, value);
    asm.exit();
    let module = asm.finish("lines", SmArch::baseline(80), 32, 1);
    assert!(!module.to_string().contains(".loc"));
    let text = module.to_ptx(PrintOptions { line_info: true });
    let built = ptxas.assemble(&text, "sm_80", &["-lineinfo"]).expect("it assembles");
    let listing = nvdisasm.text(&built.cubin, &["-g", "-c"]);
    let wanted = format!("{}\", line {line}", file!());
    let at = listing.find(&wanted).unwrap_or_else(|| panic!("no {wanted} in {listing}"));
    let part = listing[at + wanted.len()..].split("//## File").next().unwrap_or("");
    assert!(part.contains("STG"), "the store stands at its line: {part}");
}

#[test]
fn the_listing_is_read() {
    let (Some(ptxas), Some(nvdisasm)) = (Ptxas::find(), Nvdisasm::find()) else { return };
    let mut asm = Asm::new();
    let out = asm.param_u64("out");
    let [base] = asm.regs();
    let [n, sum] = asm.regs();
    asm.ld_param_u64(base, out);
    asm.ld_global_b32(n, base);
    asm.mov_b32(sum, 1);
    let top = asm.label("top");
    asm.bind(top);
    asm.mul_hi_u32(sum, sum, n);
    asm.bar_sync(0);
    asm.sub_u32(n, n, 1);
    let more = asm.test_u32(makaira::asm::types::Cmp::Ne, n, 0);
    asm.when(more, |asm| asm.bra(top));
    asm.st_global_b32(base, sum);
    asm.exit();
    let module = asm.finish("looping", SmArch::baseline(80), 32, 1);
    module.verify().expect("it is correct");
    let built = ptxas.assemble(&module.to_string(), "sm_80", &[]).expect("it assembles");
    assert_eq!(
        (built.spill_bytes, built.stack_bytes, built.smem_bytes),
        (0, 0, 0),
        "{}",
        built.log
    );
    assert!((4..32).contains(&built.regs), "{}", built.log);
    let functions = nvdisasm.functions(&built.cubin);
    assert_eq!(functions.len(), 1);
    assert_eq!(functions[0].name, "looping");
    let main = functions[0].main_loop("BAR").expect("there is one loop with a barrier");
    assert!(main.iter().all(|sass| !sass.opcode().starts_with("STG")), "{main:?}");
    assert!(functions[0].code.iter().any(|sass| sass.opcode().starts_with("STG")));
}

/// Rows that a straight line can hold any number of, in any order.
fn straight_line_rows() -> Vec<&'static Row> {
    let special = [
        "bra",
        "bra_uni",
        "exit",
        "bar_sync",
        "bar_sync_n",
        "ld_param_u32",
        "ld_param_u64",
        "cvta_param_u64",
    ];
    table()
        .filter(|row| {
            row.since.targets.contains(SmArch::baseline(80)) && !special.contains(&row.method)
        })
        .collect()
}

fn immediates_are_in_range(inst: Inst) -> bool {
    if !inst.since().targets.contains(SmArch::baseline(80)) {
        return false;
    }
    let mut asm = Asm::new();
    asm.emit(inst);
    match asm.finish("one", SmArch::baseline(80), 64, 1).verify() {
        Ok(()) => true,
        Err(found) => found.iter().all(|one| one.rule != Rule::Immediate),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Printed text of random straight-line modules, immediates and all, is what the assembler reads.
    #[test]
    fn random_straight_lines_assemble(seed: u64, length in 1usize..120) {
        let Some(ptxas) = Ptxas::find() else { return Ok(()) };
        let rows = straight_line_rows();
        let mut random = Random(seed);
        let mut asm = Asm::new();
        asm.smem.region("tile", 1024, 128);
        let p = asm.test_u32(makaira::asm::types::Cmp::Eq, 1, 2);
        for _ in 0..length {
            let row = random.pick(&rows);
            let inst = loop {
                let inst = (row.example)(&mut asm, &mut |n| random.below(n));
                if immediates_are_in_range(inst) {
                    break inst;
                }
            };
            match random.below(4) {
                0 if row.scope == makaira::asm::types::Scope::Lane => asm.when(p, |asm| asm.emit(inst)),
                _ => asm.emit(inst),
            }
        }
        asm.exit();
        let module = asm.finish("random", SmArch::baseline(80), 64, 1);
        let text = module.to_ptx(PrintOptions { line_info: seed % 2 == 0 });
        let built = ptxas.assemble(&text, "sm_80", &[]);
        prop_assert!(built.is_ok(), "{}\n{}", built.unwrap_err(), text);
    }
}
