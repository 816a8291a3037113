//! What fuzzers found stays found: the inputs in `fuzz/corpus/`, and fresh mutations of them and of legal files.
//!
//! `MAKAIRA_FUZZ_SECONDS` says how long each target is mutated; without it a moment. `MAKAIRA_FUZZ_SEEDS` names a folder
//! that gets legal inputs, for a fuzzer to start from: see `fuzz/README.md`.

#[path = "../fuzz/src/lib.rs"]
mod fuzz;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use fuzz::{SEEDS, Seed, TARGETS};
use makaira::checkpoint::Checkpoint;
use makaira::reference::Random;
use makaira::store::{PackOptions, pack};

/// Bytes that mean something to one reader or another.
const WORDS: [&str; 16] = [
    "{}",
    "[]",
    "\"\"",
    "null",
    "true",
    "-1",
    "0",
    "4",
    "8",
    "128",
    "1e400",
    "I32",
    "F16",
    "U8",
    "18446744073709551615",
    "9223372036854775808",
];

fn below(random: &mut Random, bound: usize) -> usize {
    (random.bits() >> 13) as usize % bound.max(1)
}

/// Legal inputs of a target.
fn legal(target: &str) -> Vec<Vec<u8>> {
    let with_pick = |of: fn(&Seed) -> &'static [u8]| {
        let seeds = SEEDS.iter().enumerate();
        seeds.map(|(at, seed)| [&[at as u8], of(seed)].concat()).collect()
    };
    match target {
        "config" => with_pick(|seed| seed.1),
        "header" => with_pick(|seed| seed.2),
        "index" => {
            let names = |idx: usize| {
                let tensors = safetensors::SafeTensors::deserialize(
                    SEEDS
                        [SEEDS.iter().position(|s| s.0 == ["gptq", "plain"][idx]).expect("listed")]
                    .2,
                );
                let tensors = tensors.expect("legal");
                tensors.names().into_iter().map(str::to_owned).collect::<Vec<_>>()
            };
            let of = |idx: usize| {
                names(idx).into_iter().map(move |name| {
                    (name, format!("model-0000{}-of-00002.safetensors", idx + 1).into())
                })
            };
            let map: serde_json::Map<String, serde_json::Value> = of(0).chain(of(1)).collect();
            vec![serde_json::json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes()]
        }
        "group_indices" => {
            let list = |first: u8, groups: &[i32]| {
                let bytes = groups.iter().flat_map(|group| group.to_le_bytes());
                [first].into_iter().chain(bytes).collect()
            };
            vec![
                list(3, &[0, 0, 1, 3, 2, 2, 1, 0]),
                list(0x83, &(0..128).map(|i| i / 32).collect::<Vec<_>>()),
                list(0x83, &(0..128).map(|i| i * 37 % 128 / 32).collect::<Vec<_>>()),
            ]
        }
        "store" => stores(),
        other => panic!("no legal input of {other}"),
    }
}

/// Stores of some seeds.
fn stores() -> Vec<Vec<u8>> {
    let of = |name: &&str| {
        let (_, config, tensors) = SEEDS.iter().find(|seed| seed.0 == *name).expect("listed");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::create_dir(&from).expect("writable");
        fs::write(from.join("config.json"), config).expect("writable");
        fs::write(from.join("model.safetensors"), tensors).expect("writable");
        let checkpoint = Checkpoint::open(&from).expect("legal");
        pack(&checkpoint, &to, &PackOptions::default(), &mut |_| ()).expect("packs");
        let files =
            fs::read_dir(&to).expect("a folder").map(|entry| entry.expect("an entry").path());
        let file =
            files.into_iter().find(|path| path.extension().is_some_and(|e| e == "safetensors"));
        fs::read(file.expect("one file of tensors")).expect("readable")
    };
    ["gptq", "gptq-asymmetric", "ct-nvfp4", "ct-fp8"].iter().map(of).collect()
}

/// The kept inputs of a target.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let entries =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort_unstable();
    let read = |path: std::path::PathBuf| {
        let bytes = fs::read(&path).expect("readable");
        (path.display().to_string(), bytes)
    };
    paths.into_iter().map(read).collect()
}

#[test]
fn kept_inputs_are_taken_or_refused() {
    for (target, run) in TARGETS {
        let kept = corpus(target);
        assert!(kept.len() > 3, "{target} has a corpus");
        for (path, input) in kept {
            println!("{path}");
            run(&input);
        }
    }
}

#[test]
fn legal_inputs_are_accepted_and_empty_ones_are_not() {
    for (target, run) in TARGETS {
        for (at, input) in legal(target).iter().enumerate() {
            if let Some(folder) = std::env::var_os("MAKAIRA_FUZZ_SEEDS") {
                let folder = Path::new(&folder).join(target);
                fs::create_dir_all(&folder).expect("writable");
                fs::write(folder.join(format!("legal-{at}")), input).expect("writable");
            }
            assert!(run(input), "{target}: legal input {at}");
        }
        assert!(!run(&[]), "{target}: nothing");
    }
}

/// An input with one to three changes.
fn mutated(mut input: Vec<u8>, others: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    for _ in 0..1 + below(random, 3) {
        // Headers and texts are at the start.
        let near = if below(random, 2) == 0 { input.len().min(600) } else { input.len() };
        let at = below(random, near);
        let end = (at + 1 + below(random, 24)).min(input.len());
        match below(random, 8) {
            0 if !input.is_empty() => input[at] ^= 1 << below(random, 8),
            1 if !input.is_empty() => input[at] = random.bits() as u8,
            2 => input.truncate(at),
            3 => drop(input.drain(at..end)),
            4 => {
                let copy = input[at..end].to_vec();
                input.splice(at..at, copy);
            }
            5 => {
                let word = WORDS[below(random, WORDS.len())].bytes();
                input.splice(at..end.min(at + below(random, 8)), word);
            }
            6 => {
                let other = &others[below(random, others.len())];
                let from = below(random, other.len());
                let piece = &other[from..(from + 40).min(other.len())];
                input.splice(at..end, piece.iter().copied());
            }
            // Digits become others: sizes and offsets.
            _ => {
                if let Some(digit) = input[at..].iter_mut().find(|byte| byte.is_ascii_digit()) {
                    *digit = b'0' + below(random, 10) as u8;
                }
            }
        }
    }
    input
}

#[test]
fn mutations_are_taken_or_refused() {
    let seconds = std::env::var("MAKAIRA_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    let time = Duration::from_secs_f64(seconds.unwrap_or(0.4));
    let seed = Random::fresh_seed();
    println!("seed {seed}");
    for (target, run) in TARGETS {
        let mut random = Random::new(seed);
        let mut inputs = legal(target);
        inputs.extend(corpus(target).into_iter().map(|(_, input)| input));
        let (mut count, mut accepted, start) = (0u64, 0u64, Instant::now());
        while start.elapsed() < time || count < 40 {
            let base = inputs[below(&mut random, inputs.len())].clone();
            let input = mutated(base, &inputs, &mut random);
            let outcome = std::panic::catch_unwind(|| run(&input));
            match outcome {
                Ok(taken) => accepted += u64::from(taken),
                Err(_) => {
                    let path = std::env::temp_dir().join(format!("makaira-fuzz-{target}"));
                    fs::write(&path, &input).expect("writable");
                    panic!("{target}: input {count} of seed {seed}, kept in {}", path.display());
                }
            }
            count += 1;
        }
        println!("{target}: {count} inputs, {accepted} accepted");
    }
}
