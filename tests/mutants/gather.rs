//! The kernel that gathers activations: its waits, guards, strides and constants.
//!
//! Two of them run one after the other, the second launched early and reading what the first one wrote. Orders have
//! inputs that do not exist, rows outnumber the grid's, and the columns end inside a CTA.

use std::sync::Arc;

use makaira::asm::Module;
use makaira::asm::builder::{Item, Node};
use makaira::asm::isa::Inst;
use makaira::asm::isa::alu::{Alu, MadLoU32, MadWideU32, MovB32, MovU32Special, MulLoU32, SetpU32};
use makaira::asm::isa::cluster::Cluster;
use makaira::asm::reg::In;
use makaira::asm::types::{Cmp, Special};
use makaira::backend::{Backend, DevicePtr, Launch, Stream};
use makaira::emu::{EmuBackend, Options};
use makaira::kernel::gather::{self, GatherArguments};
use makaira::weights::InputOrder;

use crate::support::{Random, chain};

const ROWS: usize = 5;
/// Columns of the source, of the first result and of the second one.
const WIDTHS: [usize; 3] = [90, 136, 2048];
/// No number that is gathered.
const POISON: u16 = 0xdead;

/// Two gathers in a row, and what they must give.
struct Chain {
    backend: Arc<EmuBackend>,
    source: Vec<u16>,
    orders: [Vec<u32>; 2],
    wanted: Vec<u16>,
}

fn gathered(from: &[u16], width: usize, order: &[u32]) -> Vec<u16> {
    let of =
        |row: &[u16], input: u32| if input == InputOrder::NONE { 0 } else { row[input as usize] };
    from.chunks(width).flat_map(|row| order.iter().map(|input| of(row, *input))).collect()
}

impl Chain {
    fn new() -> Self {
        let options = Options { overlap: true, max_steps: 4 << 20, ..Options::default() };
        let backend = Arc::new(EmuBackend::h200_like(2).with_options(options));
        let mut random = Random(0x6761_7468);
        // Never zero, and never the poison.
        let source: Vec<u16> = (0..ROWS * WIDTHS[0]).map(|at| 1 + at as u16).collect();
        let mut order = |from: usize, to: usize| {
            let input = |_| match random.below(8) {
                0 => InputOrder::NONE,
                _ => random.below(from) as u32,
            };
            (0..to).map(input).collect::<Vec<_>>()
        };
        let orders = [order(WIDTHS[0], WIDTHS[1]), order(WIDTHS[1], WIDTHS[2])];
        let middle = gathered(&source, WIDTHS[0], &orders[0]);
        let wanted = gathered(&middle, WIDTHS[1], &orders[1]);
        Self { backend, source, orders, wanted }
    }

    /// What is wrong with what a module leaves.
    fn noticed(&self, module: &Module) -> Option<String> {
        let backend = &*self.backend;
        let kernel = match backend.load(module) {
            Ok(kernel) => kernel,
            Err(error) => return Some(chain(&error)),
        };
        let put = |bytes: &[u8]| {
            let ptr = backend.alloc(bytes.len() as u64).expect("it fits");
            backend.upload(ptr, bytes).expect("it fits");
            ptr
        };
        let source = put(bytemuck::cast_slice(&self.source));
        let orders = [0, 1].map(|idx| put(bytemuck::cast_slice(&self.orders[idx])));
        let results =
            [1, 2].map(|idx| put(bytemuck::cast_slice(&vec![POISON; ROWS * WIDTHS[idx]])));
        let gather = |idx: usize, from: DevicePtr| {
            let args = GatherArguments {
                from_ptr: from.addr(),
                from_stride_bytes: 2 * WIDTHS[idx] as u32,
                inputs_ptr: orders[idx].addr(),
                to_ptr: results[idx].addr(),
                columns: WIDTHS[idx + 1] as u32,
                rows: ROWS as u32,
            };
            let list = args.list();
            // Fewer rows of CTAs than rows: each takes several.
            let grid = [args.grid()[0], 2];
            let launch = Launch::new(grid, &list, Stream::default());
            backend.launch(&*kernel, &Launch { overlap_previous: idx == 1, ..launch })
        };
        let ran = gather(0, source)
            .and_then(|()| gather(1, results[0]))
            .and_then(|()| backend.synchronize(Stream::default()));
        let mut found = vec![0u16; self.wanted.len()];
        backend.download(results[1], bytemuck::cast_slice_mut(&mut found)).expect("it is there");
        for ptr in [source].into_iter().chain(orders).chain(results) {
            backend.free(ptr).expect("it is ours");
        }
        match ran {
            Err(error) => Some(chain(&error)),
            Ok(()) if found != self.wanted => Some("other numbers".into()),
            Ok(()) => None,
        }
    }
}

/// What an instruction may become; none is left out.
fn changes(node: &Node) -> Vec<(&'static str, Option<Node>)> {
    let becomes = |how, inst: Inst| vec![(how, Some(Node { inst, ..*node }))];
    let mut changes = match node.inst {
        Inst::Cluster(Cluster::GriddepcontrolWait(_)) => vec![("left out", None)],
        Inst::Alu(Alu::MadWideU32(mad)) => match mad.b {
            In::Imm(size) => {
                becomes("steps half as far", MadWideU32 { b: In::Imm(size / 2), ..mad }.into())
            }
            In::Reg(_) => Vec::new(),
        },
        Inst::Alu(Alu::MadLoU32(mad)) => {
            becomes("steps one less", MadLoU32 { b: In::Imm(127), ..mad }.into())
        }
        Inst::Alu(Alu::MulLoU32(mul)) => {
            becomes("steps half as far", MulLoU32 { b: In::Imm(4), ..mul }.into())
        }
        Inst::Alu(Alu::SetpU32(SetpU32 { d, cmp: Cmp::Ge, a, b })) => {
            becomes("one too many", SetpU32 { d, cmp: Cmp::Gt, a, b }.into())
        }
        Inst::Alu(Alu::SetpU32(SetpU32 { d, cmp: Cmp::Ne, a, b: In::Imm(none) })) => {
            becomes("of another index", SetpU32 { d, cmp: Cmp::Ne, a, b: In::Imm(none - 1) }.into())
        }
        Inst::Alu(Alu::MovB32(MovB32 { d, a: In::Imm(0) })) => {
            becomes("not zero", MovB32 { d, a: In::Imm(0x1_0000) }.into())
        }
        Inst::Alu(Alu::MovU32Special(MovU32Special { d, a: Special::CtaidY })) => {
            becomes("of the columns", MovU32Special { d, a: Special::CtaidX }.into())
        }
        _ => Vec::new(),
    };
    if node.guard.is_some() && !matches!(node.inst, Inst::Control(_)) {
        changes.push(("by every thread", Some(Node { guard: None, ..*node })));
    }
    changes
}

#[test]
fn gathered_activations() {
    let chain = Chain::new();
    let module = gather::build(chain.backend.device().arch);
    if let Some(why) = chain.noticed(&module) {
        panic!("the kernel itself: {why}");
    }
    let (mut count, mut wrong) = (0, Vec::new());
    for (at, item) in module.entry.items.iter().enumerate() {
        let Item::Inst(node) = item else { continue };
        for (how, with) in changes(node) {
            let mut mutant = module.clone();
            match with {
                Some(node) => mutant.entry.items[at] = Item::Inst(node),
                None => drop(mutant.entry.items.remove(at)),
            }
            count += 1;
            if chain.noticed(&mutant).is_none() {
                wrong.push(format!("not noticed: `{}` {how}", node.inst));
            }
        }
    }
    println!("{count} mutants");
    assert!(count > 25, "only {count} mutants");
    assert!(wrong.is_empty(), "of {count} mutants:\n{}", wrong.join("\n"));
}
