//! Stores that are wrong in any way end in a value or a typed refusal, never in a panic or a wrong number.

use std::sync::Arc;

use makaira::backend::Backend;
use makaira::checkpoint;
use makaira::emu::EmuBackend;
use makaira::gemm::Gemm;
use makaira::reference::Random;
use makaira::store::{Error, PackedStore};
use serde_json::{Value, json};

use crate::support::{Packed, below};

fn packed() -> Packed {
    Packed::new(4, u64::MAX, &mut Random::new(Random::fresh_seed()))
}

/// Changes the descriptions of the layers in a header.
fn layers(header: &mut Value, change: impl FnOnce(&mut Value)) {
    let text = header["__metadata__"]["makaira.layers"].as_str().expect("a text").to_owned();
    let mut layers: Value = serde_json::from_str(&text).expect("JSON");
    change(&mut layers);
    header["__metadata__"]["makaira.layers"] = layers.to_string().into();
}

/// Gives a tensor of a header another name.
fn rename(header: &mut Value, from: &str, to: &str) {
    let map = header.as_object_mut().expect("an object");
    let entry = map.remove(from).expect("there");
    map.insert(to.to_owned(), entry);
}

fn refusal(opened: Result<PackedStore, Error>) -> (Error, String) {
    let error = opened.map(|_| ()).expect_err("it must be refused");
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    (error, text)
}

#[test]
fn an_untouched_header_opens() {
    let packed = packed();
    let store = packed.with_header(|_| ()).expect("nothing was changed");
    store.check(1).expect("nor any tensor");
    assert_eq!(store.layers().len(), 4);
}

#[test]
fn other_versions_are_refused_with_both() {
    let packed = packed();
    for (key, found) in [("makaira.store", "2"), ("makaira.layout", "1"), ("makaira.layout", "")] {
        let (error, text) =
            refusal(packed.with_header(|header| header["__metadata__"][key] = found.into()));
        assert!(matches!(error, Error::Version { .. }), "{text}");
        assert!(text.contains(&format!("version {found}, this program reads")), "{text}");
    }
    let (error, text) = refusal(packed.with_header(|header| {
        header["__metadata__"].as_object_mut().expect("texts").remove("makaira.store");
    }));
    assert!(matches!(error, Error::NotAStore { .. }), "{text}");
    let model = packed.folder.path().join("model");
    assert!(!PackedStore::is_at(&model) && PackedStore::is_at(&packed.directory()));
    assert!(matches!(PackedStore::open(&model), Err(Error::NotAStore { .. })));
}

#[test]
fn wrong_types_shapes_names_and_places_are_refused() {
    let packed = packed();
    let weight = "layers.0.proj.packed";
    let order = "layers.1.proj.packed_inputs";
    let open = |change: &dyn Fn(&mut Value)| refusal(packed.with_header(change));
    let (error, text) = open(&|header| header[weight]["dtype"] = "I8".into());
    let is_dtype =
        |error: &Error| matches!(error, Error::Checkpoint(checkpoint::Error::TensorDtype { .. }));
    assert!(is_dtype(&error), "{text}");
    let (error, text) = open(&|header| header[order]["dtype"] = "I32".into());
    assert!(is_dtype(&error), "{text}");
    let (error, text) = open(&|header| {
        let size = header[weight]["shape"][0].as_u64().expect("a size");
        header[weight]["shape"] = json!([size / 2, 2]);
    });
    let is_shape =
        |error: &Error| matches!(error, Error::Checkpoint(checkpoint::Error::TensorShape { .. }));
    assert!(is_shape(&error), "{text}");
    for (tensor, missing) in [(weight, weight), (order, order), ("layers.2.proj.bias", "proj.bias")]
    {
        let (error, text) = open(&|header| rename(header, tensor, "other"));
        assert!(matches!(error, Error::MissingTensor { .. }), "{text}");
        assert!(text.contains(missing), "{text}");
    }
    let (error, text) = open(&|header| header["layers.2.proj.bias"]["shape"] = json!([32, 2]));
    assert!(is_shape(&error), "{text}");
    // Two tensors on the same bytes; a hole; a tensor that ends before it begins.
    for offsets in [json!([0, 66]), json!([1u64 << 40, (1u64 << 40) + 66]), json!([66, 0])] {
        let (error, text) = open(&|header| header["norm.weight"]["data_offsets"] = offsets.clone());
        assert!(matches!(error, Error::Checkpoint(_)), "{text}");
    }
    // A legal file whose tensors are moved by a few bytes.
    for shift in [1usize, 4, 128] {
        let bytes = std::fs::read(packed.file()).expect("there");
        let header_bytes = u64::from_le_bytes(*bytes.first_chunk().expect("long")) as usize;
        let (header, data) = bytes[8..].split_at(header_bytes);
        let length = ((header_bytes + shift) as u64).to_le_bytes();
        let moved = packed.folder.path().join("moved.safetensors");
        let parts = [&length[..], header, &vec![b' '; shift], data];
        std::fs::write(&moved, parts.concat()).expect("written");
        let (error, text) = refusal(PackedStore::open(&moved));
        assert!(matches!(error, Error::Misaligned { alignment: 256, .. }), "{text}");
    }
}

#[test]
fn descriptions_that_contradict_the_tensors_are_refused() {
    let packed = packed();
    let open = |layer: &str, field: &str, value: Value| {
        packed.with_header(|header| {
            layers(header, |layers| {
                let place = &mut layers[format!("layers.{layer}.proj")];
                *place.pointer_mut(field).expect(field) = value;
            })
        })
    };
    let wrong = [
        ("0", "/n", json!(128)),
        ("0", "/n", json!(0)),
        ("0", "/k", json!(u64::MAX)),
        ("0", "/k", json!(-1)),
        ("0", "/k", json!(256)),
        ("0", "/group", json!(64)),
        ("0", "/group", json!(48)),
        ("0", "/group", json!(1024)),
        ("0", "/group", json!("32")),
        ("0", "/format", json!("u8b128")),
        ("0", "/format", json!("u4")),
        ("0", "/format", json!("q4")),
        ("0", "/scales", json!("e5m3")),
        ("0", "/scales", json!("f32")),
        ("0", "/factor", json!("00000000")),
        ("0", "/factor", json!("7f800000")),
        ("0", "/factor", json!("ffc00000")),
        ("0", "/factor", json!("00000001")),
        ("0", "/factor", json!("3f80000")),
        ("0", "/factor", json!(1.0)),
        ("0", "/order", json!(true)),
        ("0", "/order", json!("no")),
        ("0", "/bias", json!("nowhere.bias")),
        ("0", "/bias", json!("norm.weight")),
        ("0", "/bias", json!(1)),
        ("2", "/expert", json!(0)),
        ("2", "/expert", json!(u64::MAX >> 1)),
        ("0", "/source", json!({})),
        ("0", "/source/global", json!("")),
        ("0", "/source/scales", json!("f64")),
        ("1", "/k", json!(255)),
        ("1", "/k", json!(257)),
        ("1", "/group", json!(-1)),
        ("1", "/group", json!(128)),
    ];
    for (layer, field, value) in wrong {
        let (error, text) = refusal(open(layer, field, value.clone()));
        let typed = matches!(
            error,
            Error::Description { .. }
                | Error::Weight { .. }
                | Error::MissingTensor { .. }
                | Error::Checkpoint(checkpoint::Error::TensorShape { .. })
        );
        assert!(typed, "{layer} {field} {value}: {text}");
    }
    let (error, text) = refusal(packed.with_header(|header| {
        header["__metadata__"]["makaira.layers"] = "[".into();
    }));
    assert!(matches!(error, Error::Description { .. }), "{text}");
}

/// A store whose orders name an input twice, or none, or one that is not there.
#[test]
fn orders_that_are_none_are_refused() {
    let packed = packed();
    let bytes = std::fs::read(packed.file()).expect("there");
    let store = PackedStore::open(&packed.file()).expect("legal");
    let (_, place) = store.tensors().place("layers.1.proj.packed_inputs").expect("there");
    let words: Vec<u32> =
        bytes[place.clone()].as_chunks().0.iter().map(|quad| u32::from_le_bytes(*quad)).collect();
    let input = words.iter().position(|&word| word != u32::MAX).expect("inputs");
    let other = (input + 1..words.len()).find(|&at| words[at] != u32::MAX).expect("two");
    for (value, part) in [
        (words[other], "which has one"),
        (256, "there are 256"),
        (u32::MAX - 1, "there are 256"),
        (u32::MAX, "has no place"),
    ] {
        let mut damaged = bytes.clone();
        damaged[place.start + 4 * input..][..4].copy_from_slice(&value.to_le_bytes());
        let path = packed.folder.path().join("order.safetensors");
        std::fs::write(&path, damaged).expect("written");
        let (error, text) = refusal(PackedStore::open(&path));
        assert!(matches!(error, Error::Weight { .. }) && text.contains(part), "{value}: {text}");
    }
}

#[test]
fn files_that_are_cut_or_missing_or_of_another_store_are_refused() {
    let mut random = Random::new(Random::fresh_seed());
    let packed = Packed::new(4, 20_000, &mut random);
    assert!(packed.report.num_files > 2);
    let name = format!("model-00002-of-{:05}.safetensors", packed.report.num_files);
    let file = packed.directory().join(&name);
    let whole = std::fs::read(&file).expect("there");
    for cut in [0, 7, 100, 1024, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&file, &whole[..cut]).expect("written");
        let (error, text) = refusal(packed.open());
        let is_cut = matches!(error, Error::Checkpoint(checkpoint::Error::Truncated { .. }));
        assert!(is_cut, "{cut}: {text}");
    }
    std::fs::write(&file, [&whole[..], &[0; 256]].concat()).expect("written");
    let (error, text) = refusal(packed.open());
    assert!(matches!(error, Error::Checkpoint(checkpoint::Error::TrailingBytes { .. })), "{text}");
    std::fs::remove_file(&file).expect("there");
    let (error, text) = refusal(packed.open());
    assert!(matches!(error, Error::Checkpoint(checkpoint::Error::ShardMissing { .. })), "{text}");
    // The same model with other numbers: every size agrees.
    let other = Packed::new(4, 20_000, &mut random);
    std::fs::copy(other.directory().join(&name), &file).expect("copied");
    let (error, text) = refusal(packed.open());
    assert!(matches!(error, Error::Header { .. }) && text.contains(&name), "{text}");
    std::fs::write(&file, &whole).expect("written");
    packed.open().expect("whole again");
    std::fs::write(packed.directory().join("makaira-pack.lock"), "").expect("written");
    packed.open().expect("finished but for the mark");
    std::fs::remove_file(packed.directory().join("model.safetensors.index.json")).expect("there");
    let (error, text) = refusal(packed.open());
    assert!(matches!(error, Error::Unfinished { .. }), "{text}");
}

/// Any bit of any tensor is found by the checksums, in the tensor that it belongs to.
#[test]
fn a_damaged_tensor_is_named() {
    let packed = packed();
    let mut random = Random::new(Random::fresh_seed());
    let bytes = std::fs::read(packed.file()).expect("there");
    let store = packed.open().expect("legal");
    let names: Vec<String> = store.tensors().names().map(str::to_owned).collect();
    for name in names.iter().filter(|name| !name.starts_with("makaira.")) {
        let (_, place) = store.tensors().place(name).expect("there");
        let at = place.start + below(&mut random, place.len());
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << below(&mut random, 8);
        let path = packed.folder.path().join("damaged.safetensors");
        std::fs::write(&path, damaged).expect("written");
        let found = match PackedStore::open(&path) {
            Ok(store) => store.check(2).expect_err("a bit was flipped"),
            Err(error) => {
                assert!(name.contains("packed_inputs"), "{name}: {error}");
                continue;
            }
        };
        let Error::Checksum { tensor, .. } = found else { panic!("{found}") };
        assert_eq!(tensor, *name);
    }
}

#[test]
fn a_file_that_shrinks_while_it_is_mapped_is_told() {
    let packed = packed();
    let store = packed.open().expect("legal");
    store.check_unchanged().expect("nothing happened");
    let layer = store.layers()[3].name.clone();
    let file = std::fs::File::options().write(true).open(packed.file()).expect("there");
    let kept = 4096;
    file.set_len(kept).expect("shorter");
    let view = store.packed(&layer).expect("it is not known yet");
    // Reading does not end the process; what is read is thrown away.
    let sum: u64 = view.bytes().iter().map(|&byte| u64::from(byte)).sum();
    let is_changed = |error: &Error| {
        matches!(error, Error::Checkpoint(checkpoint::Error::Changed { found: 4096, .. }))
    };
    let error = store.check_unchanged().expect_err("shorter");
    assert!(is_changed(&error), "{error} {sum}");
    assert!(is_changed(&store.check(2).expect_err("shorter")));
    if cfg!(unix) {
        assert!(is_changed(&store.packed(&layer).expect_err("it is known now")));
    }
    assert!(packed.open().is_err());
}

/// Whatever the descriptions say, what opens can be read and uploaded.
#[test]
fn random_damage_never_panics() {
    let packed = packed();
    let seed = Random::fresh_seed();
    let mut random = Random::new(seed);
    let gemm = Gemm::new(Arc::new(EmuBackend::h200_like(2)) as Arc<dyn Backend>);
    let mut num_opened = 0;
    for _ in 0..600 {
        let opened = packed.with_header(|header| {
            for _ in 0..1 + below(&mut random, 2) {
                match below(&mut random, 3) {
                    0 => spoil(header, &mut random),
                    _ => layers(header, |layers| spoil(layers, &mut random)),
                }
                // The texts must stay there to be changed again.
                if !header["__metadata__"]["makaira.layers"].is_string() {
                    break;
                }
            }
        });
        let Ok(store) = opened else { continue };
        num_opened += 1;
        for layer in store.layers() {
            let view = store.packed(&layer.name).expect("checked when it was opened");
            assert_eq!(
                view.unpack().codes.len(),
                layer.spec.layout().n * layer.spec.source_inputs()
            );
            gemm.upload(view).expect("small enough");
            store.bias(&layer.name).expect("checked when it was opened");
        }
        let _ = store.check(1);
    }
    assert!(num_opened > 10, "only {num_opened} of 600 opened (seed {seed})");
}

/// Replaces or removes one value, however deep.
fn spoil(value: &mut Value, random: &mut Random) {
    let replacements = [
        json!(null),
        json!(0),
        json!(-1),
        json!(32),
        json!(128),
        json!(u64::MAX),
        json!(1e300),
        json!("u4"),
        json!("e2m1"),
        json!("3f000000"),
        json!(true),
        json!(false),
        json!([]),
        json!({}),
    ];
    match value {
        Value::Object(map) if !map.is_empty() => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = &keys[below(random, keys.len())];
            match below(random, 6) {
                0 => drop(map.remove(key)),
                1 => {
                    let moved = map.remove(key).expect("listed");
                    map.insert(keys[below(random, keys.len())].clone(), moved);
                }
                _ => spoil(map.get_mut(key).expect("listed"), random),
            }
        }
        _ => *value = replacements[below(random, replacements.len())].clone(),
    }
}
