//! A kernel and a product that exercises all of it; how a mutant of it is noticed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use makaira::asm::Module;
use makaira::backend::Stream;
use makaira::emu::{EmuBackend, Options};
use makaira::gemm::{Error, Matrix, Prepared};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Rows};
use makaira::weights::Group;

use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
};

/// A kernel and products that exercise all of it.
pub struct Case {
    pub config: Config,
    products: Vec<Product>,
}

/// A product in several orders of the warps.
struct Product {
    setups: Vec<Setup>,
    m: usize,
    a: Vec<half::f16>,
    choice: Choice,
    num_locks: u64,
    tolerance: Tolerance,
}

impl Case {
    /// Products that together have everything: CTAs with several segments, that begin and end inside tiles, and
    /// rings that are filled more than once.
    pub fn new(name: &str, m: usize) -> Self {
        let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
        let teams = config.warps_k as usize;
        let stages = config.stages as usize;
        let num_tiles = if config.tile_m < 32 { 3 } else { 2 };
        let product =
            |num_tiles, k_tiles, stripe| Product::new(config, m, num_tiles, k_tiles, stripe);
        let products = match config.family {
            "sm90wg" => {
                let stage = teams * (config.runs_per_stage * config.cluster_k) as usize;
                let k_tiles = stage * (2 * stages - 1);
                vec![
                    // An owned segment is followed by one of one stage, the next CTA's, a stage shorter, by one of
                    // two, and so on down to a first segment of one stage. Every slot is filled again.
                    product(3, k_tiles, k_tiles + stage),
                    // Nothing but output stands between tiles of one stage.
                    product(3, stage, 3 * stage),
                ]
            }
            // An owned segment is followed by one that refills every slot of the ring. Every run of the unrolled
            // loop does: that of Hopper's rings has up to twice the stages.
            "sm90" => {
                let k_tiles = teams * (3 * stages + 1) + 1;
                vec![product(num_tiles, k_tiles, 2 * k_tiles - 1)]
            }
            _ => {
                let k_tiles = teams * (stages + 2) + 1;
                vec![product(num_tiles, k_tiles, 2 * k_tiles - 1)]
            }
        };
        assert!(products.iter().any(|product| product.num_locks > 0), "{name}: CTAs share tiles");
        Self { config, products }
    }

    pub fn module(&self) -> Module {
        let arch = self.products[0].setups[0].device.backend.device().arch;
        select::check(&self.config, arch).unwrap_or_else(|error| panic!("{error}"));
        select::family_of(&self.config).build(&self.config, arch)
    }

    /// Runs a module; how it was noticed, if it was. Wrong numbers, set locks and overwritten canaries
    /// count as much as faults.
    pub fn noticed(&self, module: &Module) -> Option<String> {
        self.products.iter().find_map(|product| product.noticed(module))
    }
}

impl Product {
    /// The last output tile is ragged.
    fn new(config: Config, m: usize, num_tiles: usize, k_tiles: usize, stripe: usize) -> Self {
        let (ragged_n, ragged_k) = match config.rows {
            Rows::Whole => (4, 0),
            Rows::Vector => (4, 40),
            Rows::Element => (3, 41),
        };
        let n = num_tiles * config.tile_n as usize - ragged_n;
        let k = 128 * k_tiles - ragged_k;
        let k = match config.group {
            Group::Size(size) => k / size as usize * size as usize,
            Group::PerColumn => k,
        };
        let mut random = Random(0x6d75_7461_6e74);
        let layer = Layer::new(n, k, config.group.raw(), Fill::Integers, &mut random);
        let a = activations(m, k, Fill::Integers, &mut random);
        let stripe = stripe as u32;
        let tolerance = Tolerance::of(Fill::Integers, &config, k, stripe);
        let setups: Vec<Setup> = [None, Some(1), Some(2)]
            .map(|seed| {
                let options = Options {
                    seed,
                    max_idle_steps: 100_000,
                    max_steps: 8 << 20,
                    overlap: true,
                    ..Options::default()
                };
                let emu = EmuBackend::h200_like(4).with_options(options);
                Setup::new(&Device::emulated(emu), layer.clone())
            })
            .into();
        let problem = setups[0].problem(m, config.rows);
        let plans = select::plans(&config, &problem, stripe);
        let num_locks = plans.map(|plan| plan.num_locks).max().expect("one launch");
        let choice = setups[0].choice(config, stripe, m);
        Self { setups, m, a, choice, num_locks, tolerance }
    }

    fn noticed(&self, module: &Module) -> Option<String> {
        let spread = match self.choice.config.rows {
            Rows::Element => Spread { a_gap: 3, c_gap: 5, a_shift: 1, c_shift: 7 },
            _ => CANARIES,
        };
        for setup in &self.setups {
            let kernel = match setup.device.backend.load(module) {
                Ok(kernel) => kernel,
                Err(error) => return Some(chain(&error)),
            };
            let prepared = Prepared { choice: self.choice, kernel };
            let workspace = setup.workspace(&self.choice, self.m);
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
        if self.choice.config.rows == Rows::Element {
            return None;
        }
        let setup = &self.setups[0];
        let kernel = setup.device.backend.load(module).expect("it was loaded before");
        let followed = self.follow(setup, &Prepared { choice: self.choice, kernel });
        followed.err().map(|error| format!("after another launch: {}", chain(&error)))
    }

    /// Two launches, of which the second reads what the first wrote and may begin before that has ended.
    fn follow(&self, setup: &Setup, prepared: &Prepared) -> Result<(), Error> {
        let backend = &setup.device.backend;
        let (m, n, k) = (self.m as u64, setup.layer.n as u64, setup.layer.k as u64);
        let stride = n.max(k).next_multiple_of(8);
        let ones = vec![half::f16::ONE; (m * stride) as usize];
        let buffers = [(); 3].map(|()| backend.alloc(2 * m * stride));
        let [a, between, c] = buffers.map(|ptr| Matrix { ptr: ptr.expect("it fits"), stride });
        for matrix in [a, between, c] {
            backend.upload(matrix.ptr, bytemuck::cast_slice(&ones)).expect("it fits");
        }
        let workspace = setup.workspace(&self.choice, self.m);
        let run = |a, c| {
            let (weight, stream) = (&setup.weight, Stream::default());
            setup.gemm.matmul_with(prepared, a, weight, c, m, &workspace, stream)
        };
        let result = run(a, between).and_then(|()| run(between, c));
        for matrix in [a, between, c] {
            backend.free(matrix.ptr).expect("it is allocated");
        }
        result
    }
}
