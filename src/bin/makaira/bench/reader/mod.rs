//! The read ceiling: how fast this card reads exactly the bytes of a layer, by kernels of our assembler.
//!
//! No product can be faster than the best reader, unless it finds weights in L2. Which reader is best
//! depends on the size, so several are timed: they differ in the instruction that reads, in the bytes in
//! flight and in who reads what. Each adds up what it reads; with `flush` set the sums reach memory and are
//! compared with the host's, which proves that every byte is read. Readers never start early: the ceiling
//! is that of one layer after the other.

mod bulk;
mod copies;
mod loads;

use std::fmt;
use std::sync::Arc;

use makaira::asm::reg::{Param, Reg};
use makaira::asm::types::{B32, B64, Cmp, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Arg, Backend, DevicePtr, Error, Kernel, Launch, Stream};
use makaira::target::SmArch;

pub use bulk::Bulk;
pub use copies::Copies;
pub use loads::Loads;

/// Bytes of a unit: the size of the readers' smallest step.
const UNIT_BYTES: u32 = 16;

/// A reader kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Loads to registers.
    Loads(Loads),
    /// `cp.async` of 16 bytes to shared memory.
    Copies(Copies),
    /// Bulk copies to shared memory.
    Bulk(Bulk),
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Variant::Loads(loads) => loads.fmt(f),
            Variant::Copies(copies) => copies.fmt(f),
            Variant::Bulk(bulk) => bulk.fmt(f),
        }
    }
}

/// The variants that are timed on a target.
pub fn variants(target: SmArch) -> Vec<Variant> {
    let loads = Loads::all().into_iter().map(Variant::Loads);
    let copies = Copies::all().into_iter().map(Variant::Copies);
    let bulk = if target.sm >= 90 { Bulk::all() } else { Vec::new() };
    loads.chain(copies).chain(bulk.into_iter().map(Variant::Bulk)).collect()
}

impl Variant {
    fn ctas_per_sm(&self) -> u32 {
        match self {
            Variant::Loads(loads) => loads.ctas_per_sm,
            Variant::Copies(copies) => copies.ctas_per_sm,
            Variant::Bulk(bulk) => bulk.ctas_per_sm,
        }
    }

    /// How `num_units` units are shared out: the kernel's parameter `share`.
    fn share(&self, num_units: u32, num_ctas: u32) -> u32 {
        match self {
            Variant::Loads(_) => num_units.div_ceil(num_ctas),
            Variant::Copies(copies) => copies.turns(num_units, num_ctas),
            Variant::Bulk(bulk) => bulk.chunks(num_units),
        }
    }

    /// The kernel for a grid of `num_ctas` CTAs.
    fn build(&self, num_ctas: u32, target: SmArch) -> Module {
        let name = format!("reader_{self}_g{num_ctas}");
        match self {
            Variant::Loads(loads) => loads.build(&name, num_ctas, target),
            Variant::Copies(copies) => copies.build(&name, num_ctas, target),
            Variant::Bulk(bulk) => bulk.build(&name, num_ctas, target),
        }
    }
}

/// A loaded reader.
pub struct Reader {
    variant: Variant,
    kernel: Arc<dyn Kernel>,
    num_ctas: u32,
}

impl Reader {
    /// Builds and loads a variant.
    ///
    /// # Errors
    /// Those of [`Backend::load`].
    pub fn load(backend: &dyn Backend, variant: Variant) -> Result<Self, Error> {
        let num_ctas = variant.ctas_per_sm() * backend.device().num_sms;
        let kernel = backend.load(&variant.build(num_ctas, backend.device().arch))?;
        Ok(Self { variant, kernel, num_ctas })
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
        let share = self.variant.share(num_units, self.num_ctas);
        let args =
            [ptr.into(), sum.into(), Arg::U32(num_units), Arg::U32(share), Arg::U32(flush.into())];
        backend.launch(&*self.kernel, &Launch::new([self.num_ctas, 1], &args, stream))
    }
}

/// The sum of the little-endian words of `bytes`, as the readers compute it.
pub fn sum_of(bytes: &[u8]) -> u32 {
    let words = bytes.as_chunks::<4>().0.iter();
    words.fold(0, |sum, word| sum.wrapping_add(u32::from_le_bytes(*word)))
}

/// What every reader begins with.
struct Prologue {
    sum_ptr: Param,
    share: Param,
    flush: Param,
    data: Reg<B64>,
    num_units: Reg<B32>,
    tid: Reg<B32>,
    cta: Reg<B32>,
    /// Sums of words 0, 1, 2, 3 of the units.
    sums: [Reg<B32>; 4],
}

impl Prologue {
    fn emit(a: &mut Asm) -> Self {
        let [data_ptr, sum_ptr] = ["data_ptr", "sum_ptr"].map(|name| a.param_u64(name));
        let [count, share, flush] = ["num_units", "share", "flush"].map(|name| a.param_u32(name));
        let [num_units, tid, cta] = a.regs();
        a.mov_u32_special(tid, Special::TidX);
        a.mov_u32_special(cta, Special::CtaidX);
        a.ld_param_u32(num_units, count);
        let data = a.reg();
        a.ld_param_u64(data, data_ptr);
        let sums: [Reg<B32>; 4] = a.regs();
        sums.iter().for_each(|sum| a.mov_b32(*sum, 0));
        Self { sum_ptr, share, flush, data, num_units, tid, cta, sums }
    }

    /// Adds a unit to the sums.
    fn add(&self, a: &mut Asm, unit: &[Reg<B32>; 4]) {
        for (sum, word) in self.sums.into_iter().zip(unit) {
            a.add_u32(sum, sum, *word);
        }
    }

    /// Adds this thread's sums to the word in memory, if that is wanted, and ends.
    fn finish(&self, a: &mut Asm) {
        a.section("sums", |a| {
            for sum in &self.sums[1..] {
                a.add_u32(self.sums[0], self.sums[0], *sum);
            }
            let wanted = a.reg();
            a.ld_param_u32(wanted, self.flush);
            let wanted = a.test_u32(Cmp::Ne, wanted, 0);
            let sum: Reg<B64> = a.reg();
            a.ld_param_u64(sum, self.sum_ptr);
            a.when(wanted, |a| a.red_relaxed_gpu_global_add_u32(sum, self.sums[0]));
            a.exit();
        });
    }
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
            for variant in variants(backend.device().arch) {
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

    #[test]
    fn readers_have_different_names() {
        let backend = EmuBackend::h200_like(132);
        let names: Vec<String> =
            variants(backend.device().arch).iter().map(Variant::to_string).collect();
        let unique: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(unique.len(), names.len(), "{names:?}");
    }
}
