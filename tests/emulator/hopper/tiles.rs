//! Where tiles of a tensor map may lie: what the hardware takes, and what is cut at the edges.

use makaira::asm::Asm;
use makaira::asm::types::{B32, B64};
use makaira::backend::{Arg, Swizzle, TensorMap};
use makaira::emu::FaultKind;
use proptest::prelude::*;

use super::copies::{Hands, clean, fault};
use super::{Device, elect_in, emulator, launch, map, module, plus, pointer, wait};

/// Where tiles may begin. Recorded on an H200 (driver 580.159), which stops with an illegal instruction at what is a
/// fault here: loads begin with a whole piece of 16 bytes of a row, before the matrix or behind it too; stores likewise,
/// but not before it.
#[test]
fn tiles_begin_where_the_hardware_takes_them() {
    let copy = |x: i32, y: i32, stores: bool| {
        move |asm: &mut Asm, h: Hands| {
            let (tensor, to) = (map(asm, "map"), plus(asm, h.p.smem, 1024));
            let [at_x, at_y, zero] = asm.regs::<B32, 3>();
            for (reg, place) in [(at_x, x), (at_y, y), (zero, 0)] {
                asm.mov_b32(reg, place);
            }
            let load = if stores { [zero, zero] } else { [at_x, at_y] };
            asm.when(h.one, |asm| {
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(h.bar, 1024);
                asm.cp_async_bulk_tensor_2d_shared_global(to, tensor, load[0], load[1], h.bar);
            });
            wait(asm, h.bar, 0);
            if stores {
                asm.when(h.one, |asm| {
                    asm.cp_async_bulk_tensor_2d_global_shared(tensor, at_x, at_y, to);
                    asm.cp_async_bulk_commit_group();
                    asm.cp_async_bulk_wait_group(0);
                });
            }
        }
    };
    for (x, y) in [(0, 0), (8, 0), (-8, 0), (0, 3), (0, -3), (1000, 0)] {
        clean(&format!("a load at {x}, {y}"), copy(x, y, false));
    }
    fault("a load at 5", FaultKind::BadOperand, copy(5, 0, false));
    fault("a load at -5, 3", FaultKind::BadOperand, copy(-5, 3, false));
    for (x, y) in [(0, 0), (8, 0), (0, 3), (64, 0)] {
        clean(&format!("a store at {x}, {y}"), copy(x, y, true));
    }
    for (x, y) in [(20, 0), (20, -7), (45, 15), (500, 0), (-2, 3), (-8, 3), (-64, 0), (0, -3)] {
        fault(&format!("a store at {x}, {y}"), FaultKind::BadOperand, copy(x, y, true));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Tiles anywhere: inside, over the edges, outside; loaded and stored; with and without the swizzle.
    #[test]
    fn tiles_are_cut_at_the_edges(
        x in (-9i32..9).prop_map(|piece| 8 * piece),
        y in -10i32..12,
        columns in 1u64..100,
        rows in 1u64..10,
        swizzle: bool,
    ) {
        let tile = [64u32, 4];
        let program = module(32, 1, |asm, p| {
            let buffer = asm.smem.region("buffer", 512, 1024);
            let bars = asm.smem.region("barrier", 16, 16);
            let (from, to, raw) = (map(asm, "from"), map(asm, "to"), pointer(asm, "raw"));
            let [at_x, at_y, to_x, to_y] = asm.regs::<B32, 4>();
            for (reg, place) in [(at_x, x), (at_y, y), (to_x, x.max(0)), (to_y, y.max(0))] {
                asm.mov_b32(reg, place);
            }
            let bar = p.smem.at(bars.start);
            let one = elect_in(asm, p, 0);
            asm.when(one, |asm| {
                asm.mbarrier_init_shared_b64(bar, 1);
                asm.fence_mbarrier_init_release_cluster();
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(bar, 512);
                let place = p.smem.at(buffer.start);
                asm.cp_async_bulk_tensor_2d_shared_global(place, from, at_x, at_y, bar);
            });
            asm.bar_warp_sync(-1);
            wait(asm, bar, 0);
            let mine = asm.reg();
            asm.mad_lo_u32(mine, p.lane, 16, p.smem);
            let words = asm.regs::<B32, 4>();
            asm.ld_shared_v4_b32(words, mine.at(buffer.start));
            let place = asm.reg::<B64>();
            asm.mad_wide_u32(place, p.lane, 16, raw);
            asm.st_global_v4_b32(place, words);
            asm.bar_warp_sync(-1);
            asm.when(one, |asm| {
                let place = p.smem.at(buffer.start);
                asm.cp_async_bulk_tensor_2d_global_shared(to, to_x, to_y, place);
                asm.cp_async_bulk_commit_group();
                asm.cp_async_bulk_wait_group_read(0);
            });
        });
        let backend = emulator(None);
        let device = Device { backend: &backend };
        let pitch = (columns as usize).next_multiple_of(8);
        let matrix: Vec<u16> = (1..=(rows as usize * pitch) as u16).collect();
        let (from, to) = (device.upload(&matrix), device.upload(&vec![0u16; matrix.len()]));
        let raw = device.alloc(512);
        let swizzle = if swizzle { Swizzle::B128 } else { Swizzle::None };
        let tensor = |base, columns| {
            let row_bytes = 2 * pitch as u64;
            Arg::TensorMap(TensorMap { base, elements: [columns, rows], row_bytes, tile, swizzle })
        };
        // The hardware stores whole pieces of 16 bytes: rows that end within one would be overrun.
        let (to_x, to_y) = (x.max(0), y.max(0));
        let overruns = columns % 8 != 0
            && (to_x < columns as i32 && to_x + 64 > columns as i32)
            && to_y < rows as i32;
        let args = [tensor(from, columns), tensor(to, columns), raw.into()];
        let found = launch(&backend, &program, [1, 1], &args).map(|(kind, _)| kind);
        prop_assert_eq!(found, overruns.then_some(FaultKind::BadOperand));
        let args = [tensor(from, columns), tensor(to, pitch as u64), raw.into()];
        prop_assert_eq!(launch(&backend, &program, [1, 1], &args), None);
        let (raw, to): (Vec<u16>, Vec<u16>) =
            (device.download(raw, 256), device.download(to, matrix.len()));
        let inside = |row: i32, column: i32| {
            (0..rows as i32).contains(&row) && (0..columns as i32).contains(&column)
        };
        for (n, value) in raw.iter().enumerate() {
            let (row, place) = (n as i32 / 64, n as i32 % 64);
            let piece = if swizzle == Swizzle::B128 { (place / 8) ^ (row % 8) } else { place / 8 };
            let (row, column) = (y + row, x + 8 * piece + place % 8);
            let wanted = match inside(row, column) {
                true => matrix[row as usize * pitch + column as usize],
                false => 0,
            };
            prop_assert_eq!(*value, wanted, "{}", n);
        }
        for (n, value) in to.iter().enumerate() {
            let (row, column) = ((n / pitch) as i32, (n % pitch) as i32);
            let (line, place) = (row - to_y, column - to_x);
            let source = (y + line, x + place);
            let is_copied = (0..4).contains(&line)
                && (0..64).contains(&place)
                && inside(source.0, source.1);
            let wanted = match is_copied {
                true => matrix[source.0 as usize * pitch + source.1 as usize],
                false => 0,
            };
            prop_assert_eq!(*value, wanted, "{}", n);
        }
    }
}
