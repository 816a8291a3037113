//! Mutants of the kernels that make lists of rows by expert, and of what products with experts do with them.

use std::panic::{AssertUnwindSafe, catch_unwind};

use half::f16;
use makaira::asm::Module;
use makaira::backend::{Backend, DevicePtr, Launch, Stream};
use makaira::emu::{EmuBackend, Options};
use makaira::gemm::experts::{List, PreparedExperts};
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::experts::blocks::{self, BlockArguments};
use makaira::kernel::experts::route::{self, NO_PLACE, RouteArguments};
use makaira::kernel::experts::rows::{self, RowsArguments};
use makaira::kernel::{Config, select};
use makaira::target::SmArch;
use makaira::weights::{Activation, PackedWeights};

use crate::changes::{Mutant, apply, mutants};
use crate::support::{Fill, Layer, Random, Tolerance, activations, chain, compare};

/// Rows of a block in the lists.
const TILE_SHIFT: u32 = 2;
const POISON: u32 = 0xdead_beef;

/// The emulator in several orders of the warps. Grids may begin before earlier ones have ended.
fn emulators() -> Vec<EmuBackend> {
    let of = |seed| {
        let options =
            Options { seed, max_idle_steps: 100_000, overlap: true, ..Options::default() };
        EmuBackend::h200_like(4).with_options(options)
    };
    [None, Some(1), Some(2)].map(of).into()
}

fn put<T: bytemuck::Pod>(backend: &dyn Backend, values: &[T]) -> DevicePtr {
    let ptr = backend.alloc(size_of_val(values) as u64).expect("it fits");
    backend.upload(ptr, bytemuck::cast_slice(values)).expect("it fits");
    ptr
}

fn take(backend: &dyn Backend, ptr: DevicePtr, count: usize) -> Vec<u32> {
    let mut words = vec![0; count];
    backend.download(ptr, bytemuck::cast_slice_mut(&mut words)).expect("it is there");
    words
}

/// Enough choices for every thread to have some, and more experts than a CTA has threads, some of them without rows.
struct Lists {
    num_experts: u32,
    top_k: u32,
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// Choices in the order of the list.
    list: Vec<usize>,
}

impl Lists {
    fn new() -> Self {
        let (num_experts, top_k, mut random) = (260, 3, Random(7));
        let ids: Vec<u32> = (0..1100)
            .map(|_| match random.below(9) {
                0 => u32::MAX,
                1..=4 => random.pick(&[2, 3, 258]),
                _ => random.below(259) as u32,
            })
            .collect();
        let weights = ids.iter().map(|_| random.uniform(0.1, 1.0) as f32).collect();
        let mut list: Vec<usize> = (0..ids.len()).filter(|at| ids[*at] < num_experts).collect();
        list.sort_by_key(|at| (ids[*at], *at));
        Self { num_experts, top_k, ids, weights, list }
    }

    fn offsets(&self) -> Vec<u32> {
        let before = |expert| self.list.iter().filter(|at| self.ids[**at] < expert).count() as u32;
        (0..=self.num_experts).map(before).collect()
    }

    /// The records of all blocks, and empty ones up to `count`.
    fn blocks(&self, count: usize) -> Vec<u32> {
        let mut words = Vec::new();
        for (expert, pair) in self.offsets().windows(2).enumerate() {
            for first in (pair[0]..pair[1]).step_by(1 << TILE_SHIFT) {
                words.extend([expert as u32, first, (pair[1] - first).min(1 << TILE_SHIFT), 0]);
            }
        }
        words.resize(4 * count, 0);
        words
    }

    /// Runs the kernel of lists twice, the second launch before the first has ended; what is wrong, if anything.
    fn noticed_route(&self, module: &Module) -> Option<String> {
        emulators().iter().find_map(|emu| {
            let kernel = match emu.load(module) {
                Ok(kernel) => kernel,
                Err(error) => return Some(chain(&error)),
            };
            let (rows, experts) = (self.ids.len(), self.num_experts as usize);
            let room = |count: usize| put(emu, &vec![POISON; count + 1]);
            let [token_ids, places, row_weights] = [(); 3].map(|()| room(rows));
            let (offsets, blocks, counter) = (room(experts + 1), room(4 * rows), put(emu, &[0u32]));
            let args = RouteArguments {
                topk_ids_ptr: put(emu, &self.ids).addr(),
                topk_weights_ptr: Some(put(emu, &self.weights).addr()),
                top_k: self.top_k,
                num_choices: rows as u32,
                token_ids_ptr: token_ids.addr(),
                places_ptr: places.addr(),
                row_weights_ptr: row_weights.addr(),
                counter_ptr: counter.addr(),
                blocks: self.block_arguments(offsets, blocks),
            };
            let mut expected_places = vec![NO_PLACE; rows];
            self.list.iter().enumerate().for_each(|(row, at)| expected_places[*at] = row as u32);
            let pad = |mut words: Vec<u32>, count: usize| {
                words.resize(count + 1, POISON);
                words
            };
            let tokens = self.list.iter().map(|at| *at as u32 / self.top_k).collect();
            let weights = self.list.iter().map(|at| self.weights[*at].to_bits()).collect();
            let expected = [
                (token_ids, pad(tokens, rows)),
                (row_weights, pad(weights, rows)),
                (places, pad(expected_places, rows)),
                (offsets, pad(self.offsets(), experts + 1)),
                (blocks, pad(self.blocks(rows), 4 * rows)),
                (counter, vec![0]),
            ];
            for launch in 0..2 {
                let list = args.list();
                let run = Launch::new(args.grid(), &list, Stream::default());
                if let Err(error) = emu.launch(&*kernel, &run) {
                    return Some(format!("launch {launch}: {}", chain(&error)));
                }
                for (ptr, words) in &expected {
                    if take(emu, *ptr, words.len()) != *words {
                        return Some(format!("launch {launch}: a list is wrong"));
                    }
                }
            }
            None
        })
    }

    fn noticed_blocks(&self, module: &Module) -> Option<String> {
        emulators().iter().find_map(|emu| {
            let kernel = match emu.load(module) {
                Ok(kernel) => kernel,
                Err(error) => return Some(chain(&error)),
            };
            let rows = self.ids.len();
            let blocks = put(emu, &vec![POISON; 4 * rows + 1]);
            let list = self.block_arguments(put(emu, &self.offsets()), blocks).list();
            if let Err(error) = emu.launch(&*kernel, &Launch::new([1, 1], &list, Stream::default()))
            {
                return Some(chain(&error));
            }
            let mut expected = self.blocks(rows);
            expected.push(POISON);
            (take(emu, blocks, expected.len()) != expected).then(|| "a block is wrong".to_owned())
        })
    }

    fn block_arguments(&self, offsets: DevicePtr, blocks: DevicePtr) -> BlockArguments {
        BlockArguments {
            offsets_ptr: offsets.addr(),
            blocks_ptr: blocks.addr(),
            num_experts: self.num_experts,
            max_rows: self.ids.len() as u32,
            tile_shift: TILE_SHIFT,
            max_blocks: self.ids.len() as u32,
        }
    }
}

/// The kernel that orders rows: two launches, of which the second reads what the first writes.
fn noticed_rows(module: &Module) -> Option<String> {
    emulators().iter().find_map(|emu| {
        let kernel = match emu.load(module) {
            Ok(kernel) => kernel,
            Err(error) => return Some(chain(&error)),
        };
        let (tokens, rows, listed, row_words) = (7u32, 2100u32, 2090u32, 12u32);
        let mut random = Random(9);
        let a: Vec<u32> = (0..tokens * row_words).map(|_| random.bits() as u32).collect();
        let ids: Vec<u32> = (0..listed).map(|_| random.below(7) as u32).collect();
        let of = |from: &[u32]| -> Vec<u32> {
            let row = |token: &u32| &from[(token * row_words) as usize..][..row_words as usize];
            let mut words: Vec<u32> = ids.iter().flat_map(row).copied().collect();
            words.resize((rows * row_words) as usize, 0);
            words
        };
        let once = of(&a);
        let expected = of(&once);
        let between = put(emu, &vec![POISON; expected.len()]);
        let to = put(emu, &vec![POISON; expected.len() + 1]);
        let (ids, end) = (put(emu, &ids), put(emu, &[listed]));
        for (from, to) in [(put(emu, &a), between), (between, to)] {
            let args = RowsArguments {
                from_ptr: from.addr(),
                from_stride_bytes: 4 * row_words,
                token_ids_ptr: ids.addr(),
                num_tokens: tokens,
                end_ptr: end.addr(),
                to_ptr: to.addr(),
                row_bytes: 4 * row_words,
                rows,
            };
            let list = args.list();
            let launch = Launch::new(args.grid(), &list, Stream::default());
            if let Err(error) = emu.launch(&*kernel, &launch) {
                return Some(chain(&error));
            }
        }
        let found = take(emu, to, expected.len() + 1);
        let right = found[..expected.len()] == expected && found[expected.len()] == POISON;
        (!right).then(|| "a row is wrong".to_owned())
    })
}

/// A product with experts: one with two blocks, one without rows, one with a row, one with a block that is full.
fn noticed_product(config: Config, module: &Module) -> Option<String> {
    let (tile_m, mut random) = (config.tile_m as usize, Random(8));
    let (n, k) = (3 * config.tile_n as usize - 4, 128 * 4 * config.warps_k as usize);
    let layers: Vec<Layer> =
        (0..4).map(|_| Layer::new(n, k, config.group.raw(), Fill::Integers, &mut random)).collect();
    let packed: Vec<PackedWeights> = layers.iter().map(Layer::packed).collect();
    let counts = [tile_m + 3, 0, 1, tile_m];
    let rows: usize = counts.iter().sum();
    let tokens = rows - 2;
    let token_ids: Vec<u32> = (0..rows).map(|_| random.below(tokens) as u32).collect();
    let a = activations(tokens, k, Fill::Integers, &mut random);
    let mut offsets = vec![0u32];
    counts.iter().for_each(|count| offsets.push(offsets[offsets.len() - 1] + *count as u32));
    // Powers of two, so that products stay exact.
    let weights: Vec<f32> = (0..rows).map(|_| random.pick(&[0.5, 1.0, 2.0])).collect();
    emulators().into_iter().find_map(|emu| {
        let kernel = match emu.load(module) {
            Ok(kernel) => kernel,
            Err(error) => return Some(chain(&error)),
        };
        let emu = std::sync::Arc::new(emu);
        let gemm = Gemm::new(emu.clone());
        let experts = gemm.upload_experts(&packed, Activation::F16).expect("it fits");
        let routing = gemm.routing(4, tokens as u64, 2).expect("it fits");
        let routing = routing.with_tile_m(config.tile_m).expect("a height that kernels have");
        let workspace = gemm.expert_workspace(&experts, tokens as u64, 2).expect("it fits");
        let list = List {
            offsets: put(&*emu, &offsets),
            token_ids: Some(put(&*emu, &token_ids)),
            row_weights: Some(put(&*emu, &weights)),
            rows: rows as u64,
            tokens: tokens as u64,
        };
        let stride = n + 4;
        let poison = f16::from_bits(0x7d5a);
        let (a_ptr, c_ptr) = (put(&*emu, &a), put(&*emu, &vec![poison; (rows + 2) * stride]));
        let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
        let c = matrix(c_ptr.offset(2 * stride as u64), stride);
        // Twice: the list is made anew before the first product may have ended.
        for launch in 0..2 {
            let run = || {
                let order = Stream::default().early();
                let routed = gemm.route_list(&routing, list, order)?.weighted();
                let problem =
                    experts.problem(config.rows, config.tile_m, routed.max_blocks(), Some(1));
                let mut choice = problem.choice(&config, emu.device()).expect("few items");
                choice.num_ctas = 3;
                let prepared = PreparedExperts { choice, kernel: kernel.clone() };
                let a = matrix(a_ptr, k);
                gemm.matmul_experts_with(&prepared, a, &experts, c, &routed, &workspace, order)
            };
            match catch_unwind(AssertUnwindSafe(run)) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Some(format!("launch {launch}: {}", chain(&error))),
                Err(_) => return Some(format!("launch {launch}: a panic")),
            }
        }
        let mut out = vec![f16::ZERO; (rows + 2) * stride];
        emu.download(c_ptr, bytemuck::cast_slice_mut(&mut out)).expect("it is there");
        let is_outside = |at: usize| !(1..=rows).contains(&(at / stride)) || at % stride >= n;
        let outside = out.iter().enumerate().filter(|(at, _)| is_outside(*at));
        if outside.into_iter().any(|(_, value)| value.to_bits() != poison.to_bits()) {
            return Some("a canary was overwritten".to_owned());
        }
        let mut row = 0;
        for (layer, count) in layers.iter().zip(counts) {
            for _ in 0..count {
                let weight = f16::from_f32(weights[row]);
                let a = &a[token_ids[row] as usize * k..][..k];
                let weighted: Vec<f16> = a.iter().map(|a| *a * weight).collect();
                let c = &out[(row + 1) * stride..][..n];
                if let Err(why) = compare(layer, &weighted, c, Tolerance::Exact) {
                    return Some(why);
                }
                row += 1;
            }
        }
        None
    })
}

/// Every mutant is noticed but those that `redundant` gives a reason for.
fn bites(
    module: &Module,
    of_interest: impl Fn(&Mutant) -> bool,
    noticed: impl Fn(&Module) -> Option<String>,
    redundant: impl Fn(&Mutant) -> Option<&'static str>,
) {
    let name = &module.entry.name;
    if let Some(why) = noticed(module) {
        panic!("{name} itself: {why}");
    }
    let all: Vec<Mutant> = mutants(module).into_iter().filter(of_interest).collect();
    let mut wrong = Vec::new();
    for mutant in &all {
        match (noticed(&apply(module, [mutant])), redundant(mutant)) {
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => wrong.push(format!("not noticed: {}", mutant.what)),
            (Some(how), Some(reason)) => {
                wrong.push(format!("not redundant ({reason}): {}: {how}", mutant.what));
            }
        }
    }
    println!("{name}: {} mutants", all.len());
    assert!(!all.is_empty(), "{name} has no mutants");
    assert!(wrong.is_empty(), "{name}, of {} mutants:\n{}", all.len(), wrong.join("\n"));
}

#[test]
fn lists_of_rows() {
    let (lists, module) = (Lists::new(), route::build(SmArch::baseline(90)));
    let last = |mutant: &Mutant| {
        (mutant.leaves_out("bar_sync", "count", &module) && mutant.nth == 19).then_some(
            "those that are not the last CTA sum no more, and that one meets before it does",
        )
    };
    bites(&module, |_| true, |module| lists.noticed_route(module), last);
}

#[test]
fn row_blocks() {
    let (lists, module) = (Lists::new(), blocks::build(SmArch::baseline(90)));
    bites(&module, |_| true, |module| lists.noticed_blocks(module), |_| None);
}

#[test]
fn rows_in_the_lists_order() {
    bites(&rows::build(SmArch::baseline(90)), |_| true, noticed_rows, |_| None);
}

/// What is not shared with products without experts.
fn product_bites(name: &str, redundant: impl Fn(&Mutant, &Module) -> Option<&'static str>) {
    let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
    let arch = SmArch::baseline(90);
    select::check(&config, arch).unwrap_or_else(|error| panic!("{error}"));
    let module = select::family_of(&config).build(&config, arch);
    let sections = ["items", "stripe", "fill the ring", "next segment", "output", "tile done"];
    let of_interest =
        |mutant: &Mutant| sections.iter().any(|section| mutant.section.starts_with(section));
    let noticed = |module: &Module| noticed_product(config, module);
    bites(&module, of_interest, noticed, |mutant| redundant(mutant, &module));
}

#[test]
fn items_of_experts() {
    product_bites("marlin_sm80_u4b8_f16_m8n128k256_g128_w2_s3_c1_xp", |_, _| None);
}

#[test]
fn items_of_experts_by_warpgroups() {
    let one_batch = |mutant: &Mutant, module: &Module| {
        (mutant.leaves_out("bar_sync_n", "output", module) && mutant.nth == 0)
            .then_some("the barriers around the teams' sums lie between two tiles' staging")
    };
    product_bites("marlin_sm90wg_u4b8_f16_m16n64k256_g128_w4_s3_c1_xp", one_batch);
}
