//! Addresses, strides, workspaces, and the limits of targets.

use half::f16;
use makaira::backend::{DevicePtr, Stream};
use makaira::emu::EmuBackend;
use makaira::gemm::{Error, Matrix};
use makaira::kernel::select::{self, MAX_ROW_STRIDE_BYTES};
use makaira::kernel::{Config, Kind, Problem, Rows};
use makaira::target::{DeviceSpec, PtxIsa, SmArch};
use makaira::weights::Group;
use proptest::prelude::*;

use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
    devices,
};

fn check(setup: &Setup, a: &[f16], spread: Spread) {
    let c = setup.run(a, spread).unwrap_or_else(|error| panic!("{spread:?}: {}", chain(&error)));
    compare(&setup.layer, a, &c, Tolerance::Exact)
        .unwrap_or_else(|why| panic!("{spread:?}: {why}"));
}

/// Fault B51: activations that are a slice of something wider.
#[test]
fn b51_slices_of_wider_activations() {
    for device in devices() {
        for (n, k) in [(96, 384), (90, 200)] {
            let mut random = Random(51);
            let setup = Setup::new(&device, Layer::new(n, k, -1, Fill::Integers, &mut random));
            let a = activations(33, k, Fill::Integers, &mut random);
            // [M, K + 64], and the second half of [M, 2 K].
            check(&setup, &a, Spread { a_gap: 64, ..Spread::default() });
            check(&setup, &a, Spread { a_gap: k, a_shift: k, ..Spread::default() });
            check(&setup, &a, Spread { a_gap: k, a_shift: k, c_gap: n, c_shift: n });
        }
    }
}

/// Every address that is a multiple of an element, for both operands.
#[test]
fn every_alignment() {
    for device in devices() {
        let mut random = Random(2);
        let setup = Setup::new(&device, Layer::new(72, 256, 128, Fill::Integers, &mut random));
        let a = activations(5, 256, Fill::Integers, &mut random);
        for shift in 0..8 {
            check(&setup, &a, Spread { a_shift: shift, ..CANARIES });
            check(&setup, &a, Spread { c_shift: shift, ..CANARIES });
            check(&setup, &a, Spread { a_gap: shift, c_gap: 7 - shift, ..Spread::default() });
        }
    }
}

#[test]
fn bad_operands_are_refused_by_name() {
    for device in devices() {
        let setup = Setup::new(&device, Layer::new(64, 128, -1, Fill::Integers, &mut Random(3)));
        let workspace = setup.gemm.workspace(&setup.weight, 8).expect("fits");
        let ptr = device.backend.alloc(1 << 16).expect("fits");
        let good = Matrix { ptr, stride: 128 };
        let refused = |a: Matrix, c: Matrix, operand: &str, numbers: &[&str]| {
            let result = setup.gemm.matmul(a, &setup.weight, c, 8, &workspace, Stream::default());
            let error = result.expect_err("the operand breaks a rule");
            let text = error.to_string();
            let named =
                matches!(&error, Error::Operand { operand: found, .. } if *found == operand);
            assert!(named && numbers.iter().all(|number| text.contains(number)), "{text}");
        };
        refused(Matrix { ptr: ptr.offset(1), ..good }, good, "a", &["odd", "2 bytes"]);
        refused(good, Matrix { ptr: ptr.offset(3), ..good }, "c", &["odd"]);
        refused(Matrix { stride: 127, ..good }, good, "a", &["127", "128"]);
        refused(good, Matrix { stride: 63, ..good }, "c", &["63", "64"]);
        let too_far = MAX_ROW_STRIDE_BYTES / 2 + 1;
        refused(Matrix { stride: too_far, ..good }, good, "a", &[&too_far.to_string()]);
        device.backend.free(ptr).expect("allocated above");
    }
}

/// Rows `stride` bytes apart. On the emulator nothing lies between them: what is between was freed.
pub fn rows_apart(
    device: &Device,
    rows: u64,
    stride: u64,
    bytes: u64,
) -> (DevicePtr, Vec<DevicePtr>) {
    let alloc = |bytes| device.backend.alloc(bytes).expect("fits");
    if device.is_gpu() {
        let all = alloc(rows * stride);
        return (all, vec![all]);
    }
    // The emulator places allocations one after the other, some bytes apart.
    let (one, other) = (alloc(256), alloc(256));
    let gap = other.addr() - one.addr() - 256;
    let mut placed: Vec<DevicePtr> = vec![one, other];
    let base = alloc(bytes);
    placed.push(base);
    for row in 1..rows {
        let between = alloc(stride - bytes - 2 * gap);
        device.backend.free(between).expect("allocated above");
        let ptr = alloc(bytes);
        assert_eq!(ptr.addr(), base.addr() + row * stride, "row {row}");
        placed.push(ptr);
    }
    (base, placed)
}

/// Fault B15: rows more than 2^32 bytes from the first one, of both operands.
#[test]
fn b15_rows_beyond_32_bits() {
    for device in devices() {
        let mut random = Random(15);
        let (m, n, k) = (67, 64, 128);
        let setup = Setup::new(&device, Layer::new(n, k, -1, Fill::Integers, &mut random));
        let a = activations(m, k, Fill::Integers, &mut random);
        let stride = MAX_ROW_STRIDE_BYTES / 256 * 256;
        assert!((m as u64 - 1) * stride > 1 << 32);
        let (a_ptr, a_rows) = rows_apart(&device, m as u64, stride, 256);
        let (c_ptr, c_rows) = rows_apart(&device, m as u64, stride, 256);
        let backend = &device.backend;
        for (row, a) in a.chunks(k).enumerate() {
            let offset = row as u64 * stride;
            backend.upload(a_ptr.offset(offset), bytemuck::cast_slice(a)).expect("fits");
            backend.upload(c_ptr.offset(offset), &[0xff; 256]).expect("fits");
        }
        let matrix = |ptr| Matrix { ptr, stride: stride / 2 };
        let workspace = setup.gemm.workspace(&setup.weight, m as u64).expect("fits");
        setup
            .gemm
            .matmul(
                matrix(a_ptr),
                &setup.weight,
                matrix(c_ptr),
                m as u64,
                &workspace,
                Stream::default(),
            )
            .unwrap_or_else(|error| panic!("{}", chain(&error)));
        let mut c = Vec::new();
        for row in 0..m as u64 {
            let mut bytes = [0; 256];
            backend.download(c_ptr.offset(row * stride), &mut bytes).expect("fits");
            let (product, canary) = bytes.split_at(2 * n);
            assert!(canary.iter().all(|byte| *byte == 0xff), "row {row} is overrun");
            c.extend(product.chunks(2).map(|half| f16::from_le_bytes([half[0], half[1]])));
        }
        compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
        for ptr in a_rows.into_iter().chain(c_rows) {
            backend.free(ptr).expect("allocated above");
        }
    }
}

proptest! {
    /// Faults B15 and B16: launches cover every row once, grids fit, sizes of partial sums do not wrap.
    #[test]
    fn b16_plans_cover_every_row_and_count_in_64_bits(
        m in prop_oneof![1u64..3000, 1u64 << 17..1 << 33],
        n in 1u32..60_000,
        k in 1u32..60_000,
        stripe_of in 1u32..10_000,
        name in prop::sample::select(vec![
            "marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs",
            "marlin_sm80_u4b8_f16_m1n64k512_col_w1_s3_c1",
            "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16",
        ]),
    ) {
        let config: Config = name.parse().expect("a name");
        let problem = Problem { kind: Kind::U4B8, m, n, k, group: config.group, rows: Rows::Whole };
        let (k_tiles, num_tiles) = (k.div_ceil(128), n.div_ceil(config.tile_n));
        let stripe = 1 + stripe_of % (k_tiles * num_tiles);
        let mut next = 0;
        for plan in select::plans(&config, &problem, stripe) {
            prop_assert_eq!(plan.first_row, next);
            next += u64::from(plan.num_rows);
            let [stripes, row_tiles] = plan.grid.map(u64::from);
            prop_assert!((1..=65535).contains(&row_tiles));
            prop_assert_eq!(row_tiles, u64::from(plan.num_rows.div_ceil(config.tile_m)));
            let runs = u64::from(num_tiles) * u64::from(k_tiles);
            prop_assert!(stripes * u64::from(stripe) >= runs);
            prop_assert!((stripes - 1) * u64::from(stripe) < runs);
            let slots = u128::from(stripes) * u128::from(row_tiles);
            let slot = 4 * u128::from(config.tile_m) * u128::from(config.tile_n);
            let shared = stripe % k_tiles != 0;
            let f32_sums = config.reduction == makaira::kernel::Reduction::F32;
            let bytes = if shared && f32_sums { slots * slot } else { 0 };
            prop_assert_eq!(u128::from(plan.scratch_bytes), bytes);
            if shared {
                prop_assert_eq!(plan.num_locks, u64::from(num_tiles) * row_tiles);
            }
        }
        prop_assert_eq!(next, m);
    }
}

/// Fault B42: locks that an aborted launch left behind are noticed, and `reset` mends them. A spin that
/// never ends is a fault of the emulator; on a GPU it would hang the test.
#[test]
fn b42_dirty_locks_are_noticed_and_reset() {
    let options = makaira::emu::Options { max_idle_steps: 1 << 16, ..Default::default() };
    let device = Device::emulated(EmuBackend::h200_like(4).with_options(options));
    for (name, stripe) in [
        ("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1", 3),
        ("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16", 3),
    ] {
        let config: Config = name.parse().expect("a name");
        let mut random = Random(42);
        let setup = Setup::new(&device, Layer::new(128, 1024, 128, Fill::Integers, &mut random));
        let a = activations(16, 1024, Fill::Integers, &mut random);
        let prepared = setup.prepare(config, stripe, 16);
        let mut workspace = setup.workspace(&prepared.choice, 16);
        let locks = workspace.locks_ptr().expect("tiles are shared");
        for dirt in [1u32, 2, 3, 77, u32::MAX] {
            let dirty = [dirt; 2];
            device.backend.upload(locks, bytemuck::cast_slice(&dirty)).expect("two tiles");
            let tolerance = Tolerance::of(Fill::Integers, &config, 1024, stripe);
            let ran = setup
                .run_with(&prepared, &a, CANARIES, &workspace)
                .map_err(|error| chain(&error))
                .and_then(|c| compare(&setup.layer, &a, &c, tolerance));
            let noticed = ran.expect_err("the locks were not ready");
            // Without partial sums of their own, turns taken out of turn show in the values alone.
            let in_place = config.reduction == makaira::kernel::Reduction::F16InPlace;
            assert!(in_place || noticed.contains("kernel bug") || noticed.contains("no progress"));
            workspace.reset().expect("the locks are allocated");
            let c = setup
                .run_with(&prepared, &a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
            compare(&setup.layer, &a, &c, tolerance).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// Fault B45: a workspace does not belong to a weight; loading the weight again moves nothing in it.
#[test]
fn b45_a_workspace_outlives_reloaded_weights() {
    for device in devices() {
        let mut random = Random(45);
        let layer = Layer::new(128, 1024, 128, Fill::Integers, &mut random);
        let a = activations(16, 1024, Fill::Integers, &mut random);
        let mut setup = Setup::new(&device, layer);
        let workspace = setup.gemm.workspace_of(1 << 20, 64).expect("fits");
        let locks = workspace.locks_ptr();
        for load in 0..3 {
            let c = setup
                .run_in(&a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("load {load}: {}", chain(&error)));
            compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
            setup.weight = setup.gemm.upload(&setup.layer.packed()).expect("fits");
            assert_eq!(workspace.locks_ptr(), locks, "load {load}");
        }
    }
}

/// Fault B46: two products back to back, the second reads what the first wrote; one workspace.
#[test]
fn b46_chained_products_share_a_workspace() {
    for device in devices() {
        let mut random = Random(46);
        let (m, k, mid, n) = (9, 1024, 640, 128);
        let up = Layer::new(mid, k, 128, Fill::Integers, &mut random);
        let mut down = Layer::new(n, mid, 128, Fill::Integers, &mut random);
        down.scales.fill(f16::from_f32(2f32.powi(-10)));
        // Sparse, so that the first product is exact in fp16.
        let mut a = activations(m, k, Fill::Integers, &mut random);
        a.iter_mut().enumerate().filter(|(i, _)| i % 16 != 0).for_each(|(_, a)| *a = f16::ZERO);
        let (up, down) = (Setup::new(&device, up), Setup::new(&device, down));
        let backend = &device.backend;
        let alloc = |elements: usize| backend.alloc(2 * elements as u64).expect("fits");
        let (a_ptr, mid_ptr, c_ptr) = (alloc(m * k), alloc(m * mid), alloc(m * n));
        backend.upload(a_ptr, bytemuck::cast_slice(&a)).expect("fits");
        let workspace = up.gemm.workspace_of(16 << 20, 256).expect("fits");
        let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
        let download = |ptr, elements: usize| {
            let mut c = vec![f16::ZERO; elements];
            backend.download(ptr, bytemuck::cast_slice_mut(&mut c)).expect("fits");
            c
        };
        let mut first = None;
        for round in 0..device.size(3, 1000) {
            backend.upload(mid_ptr, &vec![0xff; 2 * m * mid]).expect("fits");
            for (setup, from, to) in [
                (&up, matrix(a_ptr, k), matrix(mid_ptr, mid)),
                (&down, matrix(mid_ptr, mid), matrix(c_ptr, n)),
            ] {
                setup
                    .gemm
                    .matmul(from, &setup.weight, to, m as u64, &workspace, Stream::default())
                    .unwrap_or_else(|error| panic!("round {round}: {}", chain(&error)));
            }
            let c = download(c_ptr, m * n);
            if first.is_none() {
                let between = download(mid_ptr, m * mid);
                for (layer, a, c) in [(&up.layer, &a, &between), (&down.layer, &between, &c)] {
                    compare(layer, a, c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
                }
            }
            assert_eq!(first.get_or_insert_with(|| c.clone()), &c, "round {round} differs");
        }
        for ptr in [a_ptr, mid_ptr, c_ptr] {
            backend.free(ptr).expect("allocated above");
        }
    }
}

fn device_of(arch: SmArch) -> DeviceSpec {
    let limit = arch.spec().map_or(48 << 10, |spec| spec.smem_per_cta_bytes);
    DeviceSpec {
        name: format!("some {arch}"),
        arch,
        isa: PtxIsa::new(9, 0),
        num_sms: 80,
        l2_bytes: 40 << 20,
        smem_per_cta_bytes: limit,
    }
}

/// Fault B57: cards before 8.0 are refused before anything is built, by name.
#[test]
fn b57_cards_before_ampere_are_refused() {
    for sm in [70, 75] {
        let device = device_of(SmArch::baseline(sm));
        for rows in [Rows::Whole, Rows::Vector, Rows::Element] {
            let problem =
                Problem { kind: Kind::U4B8, m: 1, n: 4096, k: 4096, group: Group::Size(128), rows };
            let error = select::choose(&problem, &device).expect_err("no kernel runs there");
            let text = error.to_string();
            assert!(text.contains(&format!("sm_{sm}")) && text.contains("sm80"), "{text}");
        }
        let config: Config =
            "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1".parse().expect("a name");
        let error = select::check(&config, device.arch).expect_err("no kernel runs there");
        assert!(error.to_string().contains(&format!("sm_{sm}")), "{error}");
        // Nor does the library call reach a driver.
        let emulated = Device::emulated(EmuBackend::new(device));
        let layer = Layer::new(64, 128, -1, Fill::Integers, &mut Random(57));
        let setup = Setup::new(&emulated, layer);
        let error = setup.gemm.prepare(&setup.weight, 4).expect_err("no kernel runs there");
        assert!(matches!(error, Error::NoKernel(_)), "{error}");
    }
}

/// Fault B65: every candidate stays within its target's shared memory, and more is an error at once.
#[test]
fn b65_shared_memory_limits_are_kept() {
    let mut checked = 0;
    for sm in [80, 86, 87, 89, 90, 100, 120] {
        let arch = SmArch::baseline(sm);
        let spec = arch.spec().expect("in the table");
        for m in [1, 8, 16, 32, 48, 64, 1000] {
            for group in [Group::PerColumn, Group::Size(32), Group::Size(128)] {
                let problem =
                    Problem { kind: Kind::U4B8, m, n: 4096, k: 4096, group, rows: Rows::Whole };
                let choice = select::choose(&problem, &device_of(arch)).expect("a kernel");
                let family = select::family_of(&choice.config);
                assert!(family.smem_bytes(&choice.config) <= spec.smem_per_cta_bytes, "{choice:?}");
                let built = family.build(&choice.config, arch).entry.smem.bytes();
                assert_eq!(built, family.smem_bytes(&choice.config), "{}", choice.config);
                checked += 1;
            }
        }
    }
    assert!(checked > 100, "{checked}");
    // What fits an H200 and no consumer card.
    let big: Config = "marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s6_c1_fs".parse().expect("a name");
    let family = select::family_of(&big);
    assert!(family.smem_bytes(&big) > 99 << 10, "{}", family.smem_bytes(&big));
    select::check(&big, SmArch::baseline(90)).expect("it fits there");
    for sm in [86, 89, 120] {
        let arch = SmArch::baseline(sm);
        let text = select::check(&big, arch).expect_err("99 KiB").to_string();
        let (asked, limit) = (family.smem_bytes(&big).to_string(), (99u32 << 10).to_string());
        assert!(text.contains(&asked) && text.contains(&limit), "{text}");
        // A module that was built past the check does not load.
        let emulated = EmuBackend::new(device_of(arch));
        let module = family.build(&big, arch);
        let error = makaira::backend::Backend::load(&emulated, &module).expect_err("too large");
        let text = chain(&error);
        assert!(text.contains(&asked) && text.contains(&limit), "{text}");
    }
}
