//! The measured read ceiling of some weights: the best of all readers.

use makaira::backend::{Backend, DevicePtr};
use serde_json::{Value, json};

use super::Session;
use super::reader::{self, Reader, Variant};
use super::timer::Timing;

/// How fast a weight can be read.
#[derive(Clone, Debug)]
pub struct Ceiling {
    /// Every reader and its time, the fastest first.
    readers: Vec<(Variant, Timing)>,
}

impl Ceiling {
    /// A ceiling of readers' times.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(mut readers: Vec<(Variant, Timing)>) -> Self {
        assert!(!readers.is_empty(), "a ceiling is of some reader");
        readers.sort_by(|a, b| a.1.mean().total_cmp(&b.1.mean()));
        Self { readers }
    }

    /// The time of the best reader, in microseconds.
    pub fn us(&self) -> f64 {
        self.readers[0].1.mean()
    }

    /// The best reader.
    pub fn variant(&self) -> Variant {
        self.readers[0].0
    }

    /// All readers and their times.
    pub fn json(&self) -> Value {
        let of = |(variant, timing): &(Variant, Timing)| json!({"reader": variant.to_string(), "us": timing.mean(), "run_us": timing.us});
        self.readers.iter().map(of).collect()
    }
}

/// Times all readers on weights of `bytes` bytes each, the launch with a number reading the one that
/// `weight` says. Weight 0 holds words whose sum is `sum`.
///
/// # Errors
/// Those of the readers; if one of them reads something else.
pub fn measure(
    session: &Session<'_>,
    weight: &dyn Fn(usize) -> DevicePtr,
    bytes: usize,
    sum: u32,
) -> anyhow::Result<Ceiling> {
    let backend = &*session.gpu;
    let found_ptr = backend.alloc(4)?;
    let mut readers = Vec::new();
    for variant in reader::variants(backend.device().arch) {
        let timing = session.watchdog.watch(format!("reader {variant}"), || {
            let reader = Reader::load(backend, variant)?;
            let launch = |idx, flush, stream| {
                let read = (weight(idx), bytes);
                anyhow::Ok(reader.launch(backend, read, found_ptr, flush, stream)?)
            };
            backend.upload(found_ptr, &[0; 4])?;
            session.timer.run(1, &|idx, stream| launch(idx, true, stream))?;
            let mut found = [0; 4];
            backend.download(found_ptr, &mut found)?;
            let found = u32::from_le_bytes(found);
            anyhow::ensure!(found == sum, "reader {variant} sums {found}, not {sum}");
            session.timer.time(&|idx, stream| launch(idx, false, stream))
        })?;
        readers.push((variant, timing));
    }
    backend.free(found_ptr)?;
    let ceiling = Ceiling::new(readers);
    println!(
        "read ceiling {:.2} us = {:.0} GB/s ({}, the best of {})",
        ceiling.us(),
        bytes as f64 / ceiling.us() / 1e3,
        ceiling.variant(),
        ceiling.readers.len()
    );
    Ok(ceiling)
}
