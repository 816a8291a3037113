//! Launches with tensor maps and in clusters, on the emulator and on a GPU: that what the host hands over is
//! what the kernel finds.
//!
//! A tile of a matrix is copied to shared memory by its map, its image there is written out as it lies, and the
//! tile is stored through a second map. The image must be the matrix's elements, zeros outside, pieces where
//! the swizzle puts them; the store must write nothing outside. Parameters of other sizes stand before and
//! between the maps, because a map's place depends on them.

mod common;
#[path = "gemm/support.rs"]
mod support;

use makaira::asm::reg::{In, Param, Reg};
use makaira::asm::types::{B32, B64, Cmp, Special};
use makaira::asm::{Asm, Module, PrintOptions};
use makaira::backend::{Arg, Backend, DevicePtr, Launch, Stream, Swizzle, TensorMap};
use makaira::target::SmArch;

use common::oracle::Ptxas;
use support::{Device, Random, chain, devices, skipped};

const TILE: [u32; 2] = [64, 16];
const TILE_BYTES: u32 = 2 * TILE[0] * TILE[1];
/// One piece of 16 bytes of the tile's image for each thread.
const THREADS: u32 = TILE_BYTES / 16;
/// Names of the 4-byte parameters before the first map.
const PADS: [&str; 3] = ["pad_0", "pad_1", "pad_2"];

/// A parameter's value in a register.
fn value(a: &mut Asm, param: Param) -> Reg<B32> {
    let reg = a.reg();
    a.ld_param_u32(reg, param);
    reg
}

/// The kernel: `dst`, `num_pads` numbers, a map, the tile's place, another map, the place there.
fn copy_tile(num_pads: usize) -> Module {
    let mut a = Asm::new();
    // It may begin before an earlier grid has ended.
    a.griddepcontrol_wait();
    let tile = a.smem.region("tile", TILE_BYTES, 1024);
    let bar = a.smem.region("bar", 8, 8);
    let dst = a.param_u64("dst");
    for pad in &PADS[..num_pads] {
        a.param_u32(pad);
    }
    let from = a.param_tensor_map("from");
    let place = ["x", "y"].map(|name| a.param_u32(name));
    let to = a.param_tensor_map("to");
    let target = ["to_x", "to_y"].map(|name| a.param_u32(name));
    let [tid, smem]: [Reg<B32>; 2] = a.regs();
    a.mov_u32_special(tid, Special::TidX);
    a.mov_u32_smem(smem);
    let [from_ptr, to_ptr, out, out_ptr]: [Reg<B64>; 4] = a.regs();
    a.cvta_param_u64(from_ptr, from);
    a.cvta_param_u64(to_ptr, to);
    a.ld_param_u64(out, dst);
    let place = place.map(|param| value(&mut a, param));
    let target = target.map(|param| value(&mut a, param));
    let (tile_at, bar_at) = (smem.at(tile.start).within(tile), smem.at(bar.start).within(bar));
    let first = a.test_u32(Cmp::Eq, tid, 0);
    a.section("load", |a| {
        a.when(first, |a| {
            a.mbarrier_init_shared_b64(bar_at, 1);
            a.fence_mbarrier_init_release_cluster();
        });
        a.bar_sync(0);
        a.when(first, |a| {
            a.mbarrier_arrive_expect_tx_shared_cta_b64(bar_at, TILE_BYTES);
            let [x, y] = place;
            a.cp_async_bulk_tensor_2d_shared_global(tile_at, from_ptr, x, y, bar_at);
        });
        let (again, done) = (a.label("again"), a.reg());
        a.bind(again);
        let parity: In<B32> = 0.into();
        a.mbarrier_try_wait_parity_shared_cta_b64(done, bar_at, parity);
        a.unless(done, |a| a.bra(again));
    });
    a.section("image", |a| {
        let (piece, words) = (a.reg(), a.regs::<B32, 4>());
        a.mad_lo_u32(piece, tid, 16, smem);
        a.ld_shared_v4_b32(words, piece.at(tile.start).within(tile));
        a.mad_wide_u32(out_ptr, tid, 16, out);
        a.st_global_v4_b32(out_ptr, words);
    });
    a.section("store", |a| {
        a.when(first, |a| {
            let [x, y] = target;
            a.cp_async_bulk_tensor_2d_global_shared(to_ptr, x, y, tile_at);
            a.cp_async_bulk_commit_group();
            a.cp_async_bulk_wait_group(0);
        });
    });
    a.exit();
    a.finish("copy_tile", SmArch::baseline(90), THREADS, 1)
}

/// A matrix on the device whose rows are further apart than they are long.
struct Rows {
    columns: usize,
    rows: usize,
    /// Elements from row to row.
    stride: usize,
    host: Vec<u16>,
    ptr: DevicePtr,
}

impl Rows {
    fn new(gpu: &dyn Backend, [columns, rows]: [usize; 2], random: &mut Random) -> Self {
        let stride = columns.next_multiple_of(8) + 16;
        let host: Vec<u16> = (0..stride * rows).map(|_| random.bits() as u16 | 1).collect();
        let ptr = gpu.alloc(2 * host.len() as u64).expect("fits");
        gpu.upload(ptr, bytemuck::cast_slice(&host)).expect("fits");
        Self { columns, rows, stride, host, ptr }
    }

    fn map(&self, swizzle: Swizzle) -> TensorMap {
        let elements = [self.columns as u64, self.rows as u64];
        let row_bytes = 2 * self.stride as u64;
        TensorMap { base: self.ptr, elements, row_bytes, tile: TILE, swizzle }
    }

    /// The element at a place, zero outside.
    fn at(&self, x: i64, y: i64) -> u16 {
        let inside = (0..self.columns as i64).contains(&x) && (0..self.rows as i64).contains(&y);
        if inside { self.host[y as usize * self.stride + x as usize] } else { 0 }
    }
}

/// The image of the tile at a place in shared memory.
fn image(matrix: &Rows, swizzle: Swizzle, [x, y]: [i64; 2]) -> Vec<u16> {
    let mut image = vec![0; (TILE[0] * TILE[1]) as usize];
    for row in 0..TILE[1] as usize {
        for column in 0..TILE[0] as usize {
            let piece = match swizzle {
                Swizzle::None => column / 8,
                Swizzle::B128 => (column / 8) ^ (row % 8),
            };
            let at = row * TILE[0] as usize + 8 * piece + column % 8;
            image[at] = matrix.at(x + column as i64, y + row as i64);
        }
    }
    image
}

/// The emulator, and the GPU if it is a Hopper card; else a word about what is not tested.
fn hoppers(what: &str) -> Vec<Device> {
    let is_hopper = |device: &Device| device.backend.device().arch.sm == 90;
    let devices: Vec<Device> = devices().into_iter().filter(is_hopper).collect();
    if !devices.iter().any(Device::is_gpu) {
        skipped(&format!("{what} on a GPU: it takes a Hopper card"));
    }
    devices
}

#[test]
fn tiles_are_copied_by_their_maps_wherever_parameters_lie() {
    for device in hoppers("tensor maps") {
        copy_tiles(&device);
    }
}

fn copy_tiles(device: &Device) {
    let gpu = &*device.backend;
    let mut random = Random(90);
    // Tiles begin with whole pieces of 16 bytes; loads may begin before the matrix, stores may not.
    let places = [[0, 0], [64, 16], [-8, 3], [40, -7], [96, 30], [1000, 0]];
    for num_pads in 0..=PADS.len() {
        let kernel = gpu.load(&copy_tile(num_pads)).unwrap_or_else(|e| panic!("{}", chain(&e)));
        for swizzle in [Swizzle::None, Swizzle::B128] {
            for place in places {
                let from = Rows::new(gpu, [100, 37], &mut random);
                // The hardware stores whole pieces of 16 bytes, so rows end with one.
                let to = Rows::new(gpu, [72, 21], &mut random);
                let dst = gpu.alloc(TILE_BYTES.into()).expect("fits");
                let target = [place[0] / 16 * 8, place[1]].map(|place| place.max(0));
                let number = |value: i64| Arg::U32(value as u32);
                let mut args = vec![dst.into()];
                args.extend(std::iter::repeat_n(Arg::U32(random.bits() as u32), num_pads));
                args.push(Arg::TensorMap(from.map(swizzle)));
                args.extend(place.map(number));
                args.push(Arg::TensorMap(to.map(swizzle)));
                args.extend(target.map(number));
                let launch = Launch::new([1, 1], &args, Stream::default());
                gpu.launch(&*kernel, &launch).unwrap_or_else(|e| panic!("{}", chain(&e)));
                let what = format!("{num_pads} numbers first, {swizzle:?}, tile at {place:?}");
                let mut found = vec![0u16; (TILE_BYTES / 2) as usize];
                gpu.download(dst, bytemuck::cast_slice_mut(&mut found))
                    .unwrap_or_else(|e| panic!("{what}: {}", chain(&e)));
                assert!(found == image(&from, swizzle, place), "{what}: the image");
                let mut stored = vec![0u16; to.host.len()];
                gpu.download(to.ptr, bytemuck::cast_slice_mut(&mut stored)).expect("it is there");
                for (at, element) in stored.iter().enumerate() {
                    let (x, y) = ((at % to.stride) as i64, (at / to.stride) as i64);
                    let (dx, dy) = (x - target[0], y - target[1]);
                    let is_target = (0..i64::from(TILE[0])).contains(&dx)
                        && (0..i64::from(TILE[1])).contains(&dy)
                        && x < to.columns as i64;
                    let wanted = match is_target {
                        true => from.at(place[0] + dx, place[1] + dy),
                        false => to.host[at],
                    };
                    assert_eq!(*element, wanted, "{what}: the store at ({x}, {y})");
                }
                for ptr in [from.ptr, to.ptr, dst] {
                    gpu.free(ptr).expect("allocated above");
                }
            }
        }
    }
}

/// Every CTA adds to its word what it is: the launch had the clusters of the module.
#[test]
fn clusters_are_launched_as_the_module_says() {
    for device in hoppers("clusters") {
        launch_clusters(&device);
    }
}

fn launch_clusters(device: &Device) {
    let gpu = &*device.backend;
    let num_sms = gpu.device().num_sms;
    for cluster in [1, 2, 4, 8] {
        let mut a = Asm::new();
        a.cluster = cluster;
        a.griddepcontrol_wait();
        a.smem.region("half of an SM", 100 << 10, 16);
        let dst = a.param_u64("dst");
        let [cta, rank]: [Reg<B32>; 2] = a.regs();
        a.mov_u32_special(cta, Special::CtaidX);
        a.mov_u32_special(rank, Special::ClusterCtarank);
        let [out, ptr]: [Reg<B64>; 2] = a.regs();
        a.ld_param_u64(out, dst);
        a.mad_wide_u32(ptr, cta, 4, out);
        let tid = a.reg();
        a.mov_u32_special(tid, Special::TidX);
        let first = a.test_u32(Cmp::Eq, tid, 0);
        a.when(first, |a| a.st_global_b32(ptr, rank));
        a.exit();
        let module = a.finish("ranks", SmArch::baseline(90), 32, 1);
        let kernel = gpu.load(&module).unwrap_or_else(|e| panic!("{}", chain(&e)));
        match cluster {
            1 => assert_eq!(kernel.max_active_clusters(), None),
            _ if !device.is_gpu() => {}
            _ => {
                let count = kernel.max_active_clusters().expect("Hopper's drivers know");
                eprintln!("clusters of {cluster} with 100 KB: {count}");
                assert!(
                    count > 0 && count <= 2 * num_sms / cluster,
                    "{count} clusters of {cluster}"
                );
            }
        }
        let num_ctas = 10 * cluster;
        let words = gpu.alloc(4 * u64::from(num_ctas)).expect("fits");
        let args = [words.into()];
        for overlap_previous in [false, true] {
            gpu.upload(words, &vec![0xff; 4 * num_ctas as usize]).expect("fits");
            let launch = Launch::new([num_ctas, 1], &args, Stream::default());
            let launch = Launch { overlap_previous, ..launch };
            gpu.launch(&*kernel, &launch).unwrap_or_else(|e| panic!("{}", chain(&e)));
            let mut ranks = vec![0u32; num_ctas as usize];
            gpu.download(words, bytemuck::cast_slice_mut(&mut ranks)).expect("it ran");
            let wanted: Vec<u32> = (0..num_ctas).map(|cta| cta % cluster).collect();
            assert_eq!(ranks, wanted, "clusters of {cluster}");
        }
        gpu.free(words).expect("allocated above");
    }
}

/// Offsets of the parameters that a cubin states, by position (`EIATTR_KPARAM_INFO`: two bytes 04 17, the
/// length 12, an index of 4 bytes, position and offset of 2 each, a word of flags).
fn param_offsets(cubin: &[u8]) -> Vec<u16> {
    let half = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let records =
        cubin.windows(16).filter(|window| window.starts_with(&[4, 0x17, 12, 0, 0, 0, 0, 0]));
    let mut found: Vec<(u16, u16)> =
        records.map(|record| (half(&record[8..]), half(&record[10..]))).collect();
    found.sort_unstable();
    found.into_iter().map(|(_, offset)| offset).collect()
}

/// The assembler puts a map where its address in the constant bank, in which parameters begin at 0x210, is a
/// multiple of 64. A driver too old to be asked is trusted to do the same.
#[test]
fn maps_lie_at_multiples_of_64_of_the_constant_bank() {
    let ptxas = Ptxas::find();
    for num_pads in 0..=PADS.len() {
        let module = copy_tile(num_pads);
        module.verify().unwrap_or_else(|found| panic!("{found}"));
        let Some(ptxas) = &ptxas else { continue };
        let ptx = module.to_ptx(PrintOptions::default());
        let cubin = ptxas.assemble(&ptx, "sm_90", &[]).unwrap_or_else(|log| panic!("{log}")).cubin;
        let mut end = 0_u32;
        let mut wanted = Vec::new();
        for param in &module.entry.params {
            let (bank, align) = if param.bytes == 128 { (0x210, 64) } else { (0, param.bytes) };
            let offset = (bank + end).next_multiple_of(align) - bank;
            wanted.push(offset as u16);
            end = offset + param.bytes;
        }
        assert_eq!(param_offsets(&cubin), wanted, "{num_pads} numbers first");
    }
}
