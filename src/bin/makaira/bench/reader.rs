//! The read ceiling: how fast this card reads exactly the bytes of a layer, by kernels of our assembler.
//!
//! A reader is a grid of `ctas_per_sm` CTAs for each SM whose threads add up the layer in 16-byte loads,
//! `unroll` of them in flight. No product can be faster than the best reader, unless it finds weights in
//! L2. Which variant is best depends on the size, so all are timed. With `flush` set the sums reach memory
//! and are compared with the host's, which proves that every byte is read.

use std::fmt;
use std::sync::Arc;

use makaira::asm::reg::Reg;
use makaira::asm::types::{B32, B64, Cmp, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Backend, DevicePtr, Error, Kernel, Launch, Stream};
use makaira::target::SmArch;

/// Bytes of one load.
const UNIT_BYTES: u32 = 16;

/// Which CTA reads what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The whole grid side by side.
    Interleaved,
    /// One contiguous slab per CTA.
    Slab,
}

/// A reader kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Which CTA reads what.
    pub order: Order,
    /// Loads in flight per thread.
    pub unroll: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// CTAs per SM.
    pub ctas_per_sm: u32,
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { order, unroll, threads, ctas_per_sm } = self;
        let order = match order {
            Order::Interleaved => "inter",
            Order::Slab => "slab",
        };
        write!(f, "{order}_u{unroll}_t{threads}_x{ctas_per_sm}")
    }
}

/// The variants that are timed.
pub fn variants() -> Vec<Variant> {
    let shapes = [(4, 256, 8), (8, 256, 8), (4, 512, 4), (8, 512, 4), (4, 1024, 2), (8, 1024, 1)];
    let with = |order| {
        move |(unroll, threads, ctas_per_sm)| Variant { order, unroll, threads, ctas_per_sm }
    };
    let slabs = [(4, 1024, 2), (8, 512, 4), (4, 512, 2)].map(with(Order::Slab));
    shapes.map(with(Order::Interleaved)).into_iter().chain(slabs).collect()
}

/// A loaded reader.
pub struct Reader {
    kernel: Arc<dyn Kernel>,
    num_ctas: u32,
}

impl Reader {
    /// Builds and loads a variant.
    ///
    /// # Errors
    /// Those of [`Backend::load`].
    pub fn load(backend: &dyn Backend, variant: Variant) -> Result<Self, Error> {
        let num_ctas = variant.ctas_per_sm * backend.device().num_sms;
        let kernel = backend.load(&build(variant, num_ctas, backend.device().arch))?;
        Ok(Self { kernel, num_ctas })
    }

    /// Enqueues a read of `bytes` bytes at `ptr`. With `flush` the sum of their words is added to the word
    /// at `sum`.
    ///
    /// # Errors
    /// Those of [`Backend::launch`].
    pub fn launch(
        &self,
        backend: &dyn Backend,
        (ptr, bytes): (DevicePtr, usize),
        sum: DevicePtr,
        flush: bool,
        stream: Stream,
    ) -> Result<(), Error> {
        let num_units = (bytes / UNIT_BYTES as usize) as u32;
        let slab = num_units.div_ceil(self.num_ctas);
        let args =
            [ptr.into(), sum.into(), Arg::U32(num_units), Arg::U32(slab), Arg::U32(flush.into())];
        backend.launch(&*self.kernel, &Launch::new([self.num_ctas, 1], &args, stream))
    }
}

/// The sum of the little-endian words of `bytes`, as the readers compute it.
pub fn sum_of(bytes: &[u8]) -> u32 {
    let words = bytes.as_chunks::<4>().0.iter();
    words.fold(0, |sum, word| sum.wrapping_add(u32::from_le_bytes(*word)))
}

/// The kernel of a variant for a grid of `num_ctas` CTAs.
fn build(variant: Variant, num_ctas: u32, target: SmArch) -> Module {
    let Variant { order, unroll, threads, ctas_per_sm } = variant;
    let mut a = Asm::new();
    let [data_ptr, sum_ptr] = ["data_ptr", "sum_ptr"].map(|name| a.param_u64(name));
    let [num_units, slab, flush] = ["num_units", "slab", "flush"].map(|name| a.param_u32(name));
    let [tid, cta, count] = a.regs();
    a.mov_u32_special(tid, Special::TidX);
    a.mov_u32_special(cta, Special::CtaidX);
    a.ld_param_u32(count, num_units);
    // Units of this thread: next, next + step, … below end.
    let [next, end] = a.regs();
    let step = match order {
        Order::Interleaved => {
            a.mad_lo_u32(next, cta, threads, tid);
            a.mov_b32(end, count);
            threads * num_ctas
        }
        Order::Slab => {
            let size = a.reg();
            a.ld_param_u32(size, slab);
            a.mad_lo_u32(next, cta, size, tid);
            a.mad_lo_u32(end, cta, size, size);
            a.min_u32(end, end, count);
            threads
        }
    };
    let [data, ptr]: [Reg<B64>; 2] = a.regs();
    a.ld_param_u64(data, data_ptr);
    a.mad_wide_u32(ptr, next, UNIT_BYTES, data);
    let sums: [Reg<B32>; 4] = a.regs();
    sums.iter().for_each(|sum| a.mov_b32(*sum, 0));
    let values: Vec<[Reg<B32>; 4]> = (0..unroll).map(|_| a.regs()).collect();
    let offset = |u: u32| (u * step * UNIT_BYTES) as i32;
    let add = |a: &mut Asm| {
        for (sum, value) in values.iter().flat_map(|values| sums.into_iter().zip(*values)) {
            a.add_u32(sum, sum, value);
        }
    };

    let [whole, rest] = ["whole", "rest"].map(|name| a.label(name));
    a.section("whole rounds", |a| {
        a.bind(whole);
        let last = a.reg();
        a.add_u32(last, next, (unroll - 1) * step);
        let fits = a.test_u32(Cmp::Lt, last, end);
        a.unless(fits, |a| a.bra(rest));
        for (u, value) in (0..).zip(&values) {
            a.ld_global_v4_b32(*value, ptr.at(offset(u)));
        }
        add(a);
        a.add_u32(next, next, unroll * step);
        a.add_u64(ptr, ptr, u64::from(unroll * step * UNIT_BYTES));
        a.bra(whole);
    });
    a.bind(rest);
    a.section("the last round", |a| {
        for (u, value) in (0..).zip(&values) {
            let unit = a.reg();
            a.add_u32(unit, next, u * step);
            let exists = a.test_u32(Cmp::Lt, unit, end);
            value.iter().for_each(|value| a.mov_b32(*value, 0));
            a.when(exists, |a| a.ld_global_v4_b32(*value, ptr.at(offset(u))));
        }
        add(a);
    });
    a.section("sums", |a| {
        for sum in &sums[1..] {
            a.add_u32(sums[0], sums[0], *sum);
        }
        let wanted = a.reg();
        a.ld_param_u32(wanted, flush);
        let wanted = a.test_u32(Cmp::Ne, wanted, 0);
        let sum: Reg<B64> = a.reg();
        a.ld_param_u64(sum, sum_ptr);
        a.when(wanted, |a| a.red_relaxed_gpu_global_add_u32(sum, sums[0]));
        a.exit();
    });
    // 32 registers hold four loads and the addresses, 64 hold eight.
    let resident_threads = if unroll <= 4 { 2048 } else { 1024 };
    let min_ctas = ctas_per_sm.min(resident_threads / threads);
    a.finish(&format!("reader_{variant}_g{num_ctas}"), target, threads, min_ctas)
}

#[cfg(test)]
mod tests {
    use makaira::emu::EmuBackend;

    use super::super::layer::Random;
    use super::*;

    #[test]
    fn every_reader_reads_every_byte_once() {
        let backend = EmuBackend::h200_like(2);
        let mut random = Random(11);
        for bytes in [16usize, 4224 * 3, 300_000] {
            let data: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
            let ptr = backend.alloc(bytes as u64).expect("fits");
            backend.upload(ptr, &data).expect("uploads");
            let sum = backend.alloc(4).expect("fits");
            for variant in variants() {
                let reader = Reader::load(&backend, variant).expect("loads");
                backend.upload(sum, &[0; 4]).expect("uploads");
                for flush in [false, true] {
                    let read = (ptr, bytes / 16 * 16);
                    reader.launch(&backend, read, sum, flush, Stream::default()).expect("runs");
                }
                let mut found = [0; 4];
                backend.download(sum, &mut found).expect("downloads");
                let wanted = sum_of(&data[..bytes / 16 * 16]);
                assert_eq!(u32::from_le_bytes(found), wanted, "{variant}, {bytes} bytes");
            }
        }
    }
}
