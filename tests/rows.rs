//! Every instruction of the table against vectors: inputs and outputs of one instruction in one warp.
//!
//! `tests/vectors/<row>.txt` says in its first line where its outputs come from: `computed` by the second
//! implementation in `common/row_reference.rs`, or `recorded` on a card. Every backend must reproduce them, and
//! the second implementation must agree with what was recorded.
//!
//! | variable | effect |
//! |---|---|
//! | `MAKAIRA_BLESS=1` | writes the files of rows that have none or computed ones anew |
//! | `MAKAIRA_RECORD_VECTORS=<dir>` | writes files with what the last backend (the GPU, if any) answers |

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;

use common::row_kernel::{IMAGE, RowKernel, target_of};
use common::row_reference::State;
use common::vectors::{Case, Vectors};
use common::{Random, backends, vectors};
use makaira::asm::isa::{Row, TargetSet, table};
use makaira::backend::{Arg, Backend, Launch, Stream};
use makaira::target::DeviceSpec;

const PROTOCOL: &str = "a protocol: patterns, on every backend, in tests/emulator/hopper";
const PRODUCTS: &str = "with every product here; what they order in tests/emulator/hopper";
/// Rows whose effect is no function of registers and bytes, and where they are tested instead.
const WITHOUT_VECTORS: &[(&str, &str)] = &[
    ("bra", "control flow: divergence and loops in tests/emulator"),
    ("bra_uni", "control flow: loops in tests/emulator"),
    ("exit", "ends every kernel; early exits in tests/emulator"),
    ("bar_sync", "orders warps: races and deadlocks in tests/emulator, and every kernel here"),
    ("bar_sync_n", "orders warps: named barriers in tests/emulator"),
    ("bar_warp_sync", "orders lanes: races between lanes in tests/emulator"),
    ("fence_acq_rel_gpu", "orders accesses: message passing in tests/emulator"),
    ("cp_async_commit_group", "with every copy here; missing waits in tests/emulator"),
    ("cp_async_wait_group", "with every copy here; missing waits in tests/emulator"),
    ("mov_u32_smem", "the address is the loader's choice; every shared access here starts from it"),
    ("cp_async_cg_16_hint", "some drivers trap on it: DESIGN.md, eviction policies"),
    ("mbarrier_init_shared_b64", PROTOCOL),
    ("mbarrier_expect_tx_shared_cta_b64", PROTOCOL),
    ("mbarrier_arrive_expect_tx_shared_cta_b64", PROTOCOL),
    ("mbarrier_arrive_shared_cta_b64", PROTOCOL),
    ("mbarrier_arrive_shared_cluster_b64", PROTOCOL),
    ("mbarrier_try_wait_parity_shared_cta_b64", PROTOCOL),
    ("fence_mbarrier_init_release_cluster", PROTOCOL),
    ("cp_async_bulk_shared_global", PROTOCOL),
    ("cp_async_bulk_shared_global_hint", PROTOCOL),
    ("cp_async_bulk_tensor_2d_shared_global", PROTOCOL),
    ("cp_async_bulk_tensor_2d_shared_global_multicast", PROTOCOL),
    ("cp_async_bulk_tensor_2d_global_shared", PROTOCOL),
    ("cp_async_bulk_prefetch_l2_global", PROTOCOL),
    ("prefetch_tensormap", PROTOCOL),
    ("cp_async_bulk_commit_group", PROTOCOL),
    ("cp_async_bulk_wait_group", PROTOCOL),
    ("cp_async_bulk_wait_group_read", PROTOCOL),
    ("fence_proxy_async_shared_cta", PROTOCOL),
    ("cvta_param_u64", "the address is the loader's choice; tile copies in tests/emulator/hopper"),
    (
        "mapa_shared_cluster_u32",
        "the address is the card's choice; clusters in tests/emulator/hopper",
    ),
    ("st_async_shared_cluster_v4_f32", PROTOCOL),
    ("barrier_cluster_arrive_relaxed_aligned", PROTOCOL),
    ("barrier_cluster_arrive_release_aligned", PROTOCOL),
    ("barrier_cluster_wait_acquire_aligned", PROTOCOL),
    ("griddepcontrol_wait", PROTOCOL),
    ("griddepcontrol_launch_dependents", PROTOCOL),
    ("setmaxnreg_dec_sync_aligned_u32", PROTOCOL),
    ("setmaxnreg_inc_sync_aligned_u32", PROTOCOL),
    ("wgmma_fence_sync_aligned", PRODUCTS),
    ("wgmma_commit_group_sync_aligned", PRODUCTS),
    ("wgmma_wait_group_sync_aligned", PRODUCTS),
];

fn without_vectors(row: &Row) -> bool {
    WITHOUT_VECTORS.iter().any(|(method, _)| *method == row.method)
}

/// Cargo runs tests in the root of the package; a staged binary is run there by hand.
fn folder() -> PathBuf {
    PathBuf::from("tests/vectors")
}

fn file_of(row: &Row) -> PathBuf {
    folder().join(format!("{}.txt", row.method))
}

/// The rows with their vectors.
fn all_vectors() -> BTreeMap<&'static str, Vectors> {
    let with_file = table().filter(|row| file_of(row).exists());
    with_file
        .map(|row| {
            let text = std::fs::read_to_string(file_of(row)).expect("it exists");
            (row.method, Vectors::parse(&text).unwrap_or_else(|e| panic!("{}: {e}", row.method)))
        })
        .collect()
}

fn row(method: &str) -> &'static Row {
    table().find(|row| row.method == method).expect("a row of the table")
}

/// What a backend makes of a case's inputs.
fn run(backend: &dyn Backend, kernel: &RowKernel, case: &Case) -> State {
    let num_slots = kernel.inputs.len().max(kernel.outputs.len()).max(1);
    let buffers = [256 * num_slots, 256 * num_slots, 2 * IMAGE];
    let [input, output, memory] =
        buffers.map(|bytes| backend.alloc(bytes as u64).expect("there is memory"));
    let mut bytes = vec![0; 256 * num_slots];
    for (n, slot) in case.before.slots.iter().enumerate() {
        for (lane, value) in slot.iter().enumerate() {
            let at = 256 * n + 8 * lane;
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
    }
    backend.upload(input, &bytes).expect("it fits");
    backend.upload(output, &vec![0; 256 * num_slots]).expect("it fits");
    let images = [case.before.memory.clone(), case.before.shared.clone()].concat();
    backend.upload(memory, &images).expect("it fits");
    let mut args = vec![input.into(), output.into(), memory.into()];
    args.extend(kernel.param_bytes.map(|bytes| match bytes {
        8 => Arg::U64(case.param),
        _ => Arg::U32(case.param as u32),
    }));
    let loaded = backend.load(&kernel.module).expect("the module is correct");
    backend
        .launch(loaded.as_ref(), &Launch::new([1, 1], &args, Stream::default()))
        .expect("it runs");
    backend.synchronize(Stream::default()).expect("it ran");
    backend.download(output, &mut bytes).expect("it is there");
    let mut images = vec![0; 2 * IMAGE];
    backend.download(memory, &mut images).expect("it is there");
    for buffer in [input, output, memory] {
        backend.free(buffer).expect("it is ours");
    }
    let value = |n: usize, lane: usize| {
        let at = 256 * n + 8 * lane;
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let shared = images.split_off(IMAGE);
    let slots = 0..kernel.outputs.len();
    let slots = slots.map(|n| std::array::from_fn(|lane| value(n, lane))).collect();
    State { slots, memory: images, shared }
}

/// Whether a device has the row.
fn has(device: &DeviceSpec, row: &Row) -> bool {
    match row.since.targets {
        TargetSet::From(sm) => device.arch.sm >= sm,
        TargetSet::Specific(sm) => device.arch.sm == sm,
    }
}

/// The kernel of a case, for the row's own target.
fn kernel_of(row: &Row, case: &Case) -> RowKernel {
    let kernel = RowKernel::new(row, &case.choices, target_of(row));
    kernel.module.verify().unwrap_or_else(|found| panic!("{found}"));
    assert_eq!(kernel.inst.to_string(), case.text, "the choices no longer give this instruction");
    kernel
}

#[test]
fn every_row_has_vectors() {
    let bless = std::env::var_os("MAKAIRA_BLESS").is_some();
    let known = all_vectors();
    let mut missing = Vec::new();
    for row in table().filter(|row| !without_vectors(row)) {
        let replaceable =
            known.get(row.method).is_none_or(|vectors| vectors.source == vectors::COMPUTED);
        if bless && replaceable {
            let made = vectors::compute(row);
            std::fs::write(file_of(row), made.to_string()).expect("the folder is writable");
        } else if !known.contains_key(row.method) {
            missing.push(row.method);
        }
    }
    assert!(missing.is_empty(), "no vectors for {missing:?}: run this test with MAKAIRA_BLESS=1");
    for (method, reason) in WITHOUT_VECTORS {
        assert!(table().any(|row| row.method == *method), "{method} is no row");
        assert!(
            !folder().join(format!("{method}.txt")).exists(),
            "{method} has vectors, yet: {reason}"
        );
    }
    for entry in std::fs::read_dir(folder()).expect("the folder is there") {
        let name = entry.expect("it can be listed").file_name().to_string_lossy().into_owned();
        let method = name.trim_end_matches(".txt");
        assert!(table().any(|row| row.method == method), "{name} belongs to no row: remove it");
    }
}

#[test]
fn backends_reproduce_the_vectors() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for (name, backend) in backends() {
        for (method, vectors) in all_vectors() {
            if !has(backend.device(), row(method)) {
                eprintln!("skipped: {method} on {name}, which does not have it");
                continue;
            }
            for case in &vectors.cases {
                let kernel = kernel_of(row(method), case);
                let got = run(backend.as_ref(), &kernel, case);
                count += 1;
                if let Some(difference) = vectors.difference(&kernel, case, &got) {
                    wrong.push(format!("{name}: {difference}"));
                }
            }
        }
    }
    assert!(count > 100, "only {count} cases");
    assert!(wrong.is_empty(), "{} of {count} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_second_implementation_agrees_with_the_vectors() {
    let mut wrong = Vec::new();
    for (method, vectors) in all_vectors() {
        for case in &vectors.cases {
            let kernel = kernel_of(row(method), case);
            let got = vectors::expected(&kernel, case);
            wrong.extend(vectors.difference(&kernel, case, &got));
        }
    }
    assert!(wrong.is_empty(), "{} cases differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// New vectors from the last backend, with the inputs of the computed ones.
#[test]
fn vectors_are_recorded_on_request() {
    let Some(dir) = std::env::var_os("MAKAIRA_RECORD_VECTORS").map(PathBuf::from) else {
        eprintln!("skipped: MAKAIRA_RECORD_VECTORS names no folder; nothing was recorded");
        return;
    };
    std::fs::create_dir_all(&dir).expect("the folder can be made");
    let (_, backend) = backends().pop().expect("there is a backend");
    let device = backend.device();
    for row in table().filter(|row| !without_vectors(row) && has(device, row)) {
        let mut vectors = vectors::compute(row);
        vectors.source = format!("recorded: {}, PTX up to {}", device.name, device.isa);
        for case in &mut vectors.cases {
            let kernel = kernel_of(row, case);
            case.after = run(backend.as_ref(), &kernel, case);
        }
        let path = dir.join(format!("{}.txt", row.method));
        std::fs::write(path, vectors.to_string()).expect("the folder is writable");
    }
}

/// A wrong answer is seen: one flipped bit in a number or in an image.
#[test]
fn a_flipped_bit_is_a_difference() {
    let mut random = Random(11);
    let is_number = |bits: u64| bits & 0x7c00 != 0x7c00 && bits & 0x7c00_0000 != 0x7c00_0000;
    for (method, vectors) in all_vectors() {
        let case = random.pick(&vectors.cases.iter().collect::<Vec<_>>());
        let kernel = kernel_of(row(method), case);
        let mut wrong = case.after.clone();
        match wrong.slots.first_mut() {
            Some(slot) => {
                let value = slot.iter_mut().find(|value| is_number(**value));
                *value.unwrap_or_else(|| panic!("{method}: no number among the results")) ^= 2;
            }
            None => {
                let at = 16 * random.below(32) as usize;
                wrong.memory[at] ^= 1;
                wrong.shared[at] ^= 1;
            }
        }
        assert!(vectors.difference(&kernel, case, &wrong).is_some(), "{method}: {:?}", wrong.slots);
    }
}
