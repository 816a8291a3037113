//! One safetensors file: its header checked before any tensor is handed out.
//!
//! The header is untrusted. Every size and offset is computed with checked arithmetic and compared
//! with the real length of the file; then the `safetensors` crate checks it once more (order,
//! holes, overlaps). One rule for the length: the header must account for every byte. A shorter
//! file is refused as cut short, a longer one as carrying trailing bytes, with both counts.
//!
//! Nothing is assumed about alignment: tensors are byte slices.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use super::map::FileMap;
use super::{Dtype, Error};

/// Larger headers are refused; the `safetensors` crate has the same limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const PREFIX_BYTES: u64 = 8;

/// An open file and the places of its tensors.
#[derive(Debug)]
pub(super) struct Container {
    map: FileMap,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    data_start: usize,
}

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Bytes of the file.
    pub(super) range: Range<usize>,
}

impl Container {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let map = FileMap::open(path)?;
        let Header { entries, metadata, data_start } = read_header(path, map.bytes())?;
        Ok(Self { map, entries, metadata, data_start })
    }

    pub(super) fn path(&self) -> &Path {
        self.map.path()
    }

    pub(super) fn map(&self) -> &FileMap {
        &self.map
    }

    pub(super) fn is_mapped(&self) -> bool {
        self.map.is_mapped()
    }

    pub(super) fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The texts that lie beside the tensors.
    pub(super) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Everything before the tensors.
    pub(super) fn header(&self) -> &[u8] {
        &self.map.bytes()[..self.data_start]
    }

    pub(super) fn bytes(&self, entry: &Entry) -> &[u8] {
        &self.map.bytes()[entry.range.clone()]
    }
}

struct Header {
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
    data_start: usize,
}

fn read_header(path: &Path, bytes: &[u8]) -> Result<Header, Error> {
    let found = bytes.len() as u64;
    let truncated = |expected| Error::Truncated { path: path.to_owned(), expected, found };
    let header_error = |reason| Error::Header { path: path.to_owned(), reason };
    let prefix = bytes.first_chunk::<8>().ok_or_else(|| truncated(PREFIX_BYTES))?;
    let header_bytes = u64::from_le_bytes(*prefix);
    if header_bytes > MAX_HEADER_BYTES {
        let reason =
            format!("it claims {header_bytes} bytes of header, {MAX_HEADER_BYTES} at most");
        return Err(header_error(reason));
    }
    let data_start = PREFIX_BYTES + header_bytes;
    if data_start > found {
        return Err(truncated(data_start));
    }
    let text = &bytes[PREFIX_BYTES as usize..data_start as usize];
    let header: Value = serde_json::from_slice(text).map_err(|e| header_error(e.to_string()))?;
    let tensors = header.as_object().ok_or_else(|| header_error("not a JSON object".to_owned()))?;
    let mut entries = BTreeMap::new();
    let mut expected = data_start;
    for (name, value) in tensors.iter().filter(|(name, _)| *name != "__metadata__") {
        let (entry, end) = read_entry(value, data_start).map_err(|reason| Error::TensorEntry {
            path: path.to_owned(),
            tensor: name.clone(),
            reason,
        })?;
        expected = expected.max(end);
        entries.insert(name.clone(), entry);
    }
    if expected > found {
        return Err(truncated(expected));
    }
    if expected < found {
        let extra = found - expected;
        return Err(Error::TrailingBytes { path: path.to_owned(), expected, found, extra });
    }
    let (_, checked) =
        SafeTensors::read_metadata(bytes).map_err(|e| header_error(e.to_string()))?;
    let texts = checked.metadata().iter().flatten();
    let metadata = texts.map(|(name, text)| (name.clone(), text.clone())).collect();
    Ok(Header { entries, metadata, data_start: data_start as usize })
}

/// One tensor of the header and the end of its bytes in the file; a reason if it is impossible.
fn read_entry(value: &Value, data_start: u64) -> Result<(Entry, u64), String> {
    let dtype = value.get("dtype").ok_or("no dtype")?;
    let dtype: Dtype =
        serde_json::from_value(dtype.clone()).map_err(|_| format!("unknown dtype {dtype}"))?;
    let numbers = |field: &str| -> Result<Vec<u64>, String> {
        let list = value.get(field).and_then(Value::as_array).ok_or(format!("no list {field}"))?;
        list.iter()
            .map(|n| n.as_u64().ok_or_else(|| format!("{field} holds {n}, not a size")))
            .collect()
    };
    let shape = numbers("shape")?;
    let overflow = || format!("the size of shape {shape:?} overflows");
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize() as u64, |product, &size| product.checked_mul(size))
        .ok_or_else(overflow)?;
    let &[begin, end] = numbers("data_offsets")?.as_slice() else {
        return Err("data_offsets are not two numbers".to_owned());
    };
    let length = end.checked_sub(begin).ok_or(format!("it ends at {end}, before {begin}"))?;
    if length.checked_mul(8) != Some(bits) {
        return Err(format!(
            "{length} bytes for {dtype:?} of shape {shape:?}, {} needed",
            bits / 8
        ));
    }
    let end_in_file = data_start.checked_add(end).ok_or(format!("its end {end} overflows"))?;
    let to_usize = |n: u64| usize::try_from(n).map_err(|_| format!("{n} exceeds this machine"));
    let range = to_usize(data_start + begin)?..to_usize(end_in_file)?;
    let shape = shape.into_iter().map(to_usize).collect::<Result<_, _>>()?;
    Ok((Entry { dtype, shape, range }, end_in_file))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use safetensors::tensor::TensorView;

    use super::*;

    fn sample() -> Vec<u8> {
        let data: Vec<u8> = (0..1u32 << 20).map(|i| (i ^ i >> 7) as u8).collect();
        let view = TensorView::new(Dtype::I32, vec![1 << 9, 1 << 9], &data).expect("a megabyte");
        safetensors::serialize(BTreeMap::from([("layer.qweight", view)]), None).expect("fits")
    }

    fn raw(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend((0..data).map(|i| i as u8));
        bytes
    }

    fn open(bytes: &[u8]) -> Result<Container, Error> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("model.safetensors");
        std::fs::write(&path, bytes).expect("written");
        Container::open(&path)
    }

    #[test]
    fn b73_a_file_cut_anywhere_is_refused_with_both_sizes() {
        let whole = sample();
        let data_start = whole.len() - (1 << 20);
        assert!(open(&whole).is_ok());
        for cut in [whole.len() - 1, whole.len() - 4096, data_start] {
            let error = open(&whole[..cut]).expect_err("cut");
            let text = error.to_string();
            let Error::Truncated { expected, found, .. } = error else { panic!("{text}") };
            assert_eq!((expected, found), (whole.len() as u64, cut as u64));
            for part in ["model.safetensors", &whole.len().to_string(), &cut.to_string()] {
                assert!(text.contains(part), "{text} lacks {part}");
            }
        }
        let seven = open(&whole[..7]).expect_err("cut");
        assert!(matches!(seven, Error::Truncated { expected: 8, found: 7, .. }), "{seven}");
        let half_header = open(&whole[..20]).expect_err("cut");
        assert!(matches!(half_header, Error::Truncated { found: 20, .. }), "{half_header}");
        assert!(matches!(open(&[]), Err(Error::Truncated { expected: 8, found: 0, .. })));
    }

    #[test]
    fn b75_numbers_that_overflow_are_refused() {
        let (max, u64_max) = (usize::MAX, u64::MAX);
        let cases = [
            ("[4294967296,4294967296]".to_owned(), "[0,8]".to_owned(), "overflows"),
            ("[9223372036854775810,2]".to_owned(), "[0,8]".to_owned(), "overflows"),
            (format!("[{max},2]"), "[0,8]".to_owned(), "overflows"),
            ("[18446744073709551616]".to_owned(), "[0,8]".to_owned(), "not a size"),
            ("[-1]".to_owned(), "[0,8]".to_owned(), "not a size"),
            ("[7]".to_owned(), format!("[{},{}]", u64_max - 7, u64_max), "overflows"),
            ("[8]".to_owned(), "[8,0]".to_owned(), "before"),
            ("[8]".to_owned(), "[0,9]".to_owned(), "needed"),
            ("[8]".to_owned(), "[0,8,16]".to_owned(), "two numbers"),
        ];
        for (shape, offsets, part) in cases {
            let header =
                format!(r#"{{"t":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#);
            let text = open(&raw(&header, 8)).expect_err(&header).to_string();
            assert!(text.contains(part) && text.contains("tensor t"), "{header}: {text}");
        }
        // The bytes agree with the shape and only the end of the file contradicts.
        let header = format!(
            r#"{{"t":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#,
            u64::MAX / 8
        );
        let error = open(&raw(&header, 8)).expect_err("far too long");
        assert!(matches!(error, Error::Truncated { .. }), "{error}");
        let hole = r#"{"t":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#;
        assert!(matches!(open(&raw(hole, 8)), Err(Error::Header { .. })));
        let mut huge = u64::MAX.to_le_bytes().to_vec();
        huge.extend_from_slice(b"{}");
        assert!(matches!(open(&huge), Err(Error::Header { .. })));
    }

    #[test]
    fn b77_a_misaligned_tensor_has_the_right_bytes() {
        for padding in 0..16 {
            let header = format!(
                concat!(
                    r#"{{"odd":{{"dtype":"U8","shape":[3],"data_offsets":[0,3]}},"#,
                    r#""words":{{"dtype":"I32","shape":[2],"data_offsets":[3,11]}}}}{}"#
                ),
                " ".repeat(padding)
            );
            let container = open(&raw(&header, 11)).expect("legal");
            let words = container.bytes(&container.entries()["words"]);
            assert_eq!(words, [3, 4, 5, 6, 7, 8, 9, 10]);
        }
    }

    #[test]
    fn b82_trailing_bytes_are_refused_with_their_count() {
        for extra in [1, 4096] {
            let mut bytes = sample();
            bytes.resize(bytes.len() + extra, 0);
            let text = open(&bytes).expect_err("trailing").to_string();
            assert!(text.contains(&format!("{extra} bytes after its last tensor")), "{text}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn damaged_headers_never_panic(
            damage in prop::collection::vec((0usize..110, any::<u8>()), 1..6),
            cut in 0usize..200,
        ) {
            let mut bytes = raw(
                concat!(
                    r#"{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"#,
                    r#""b":{"dtype":"I32","shape":[1],"data_offsets":[12,16]}}"#
                ),
                16,
            );
            for (at, value) in damage {
                bytes[at] = value;
            }
            bytes.truncate(bytes.len().saturating_sub(cut.saturating_sub(100)));
            if let Ok(container) = open(&bytes) {
                for entry in container.entries().values() {
                    let elements: usize = entry.shape.iter().product();
                    let bits = container.bytes(entry).len() * 8;
                    prop_assert_eq!(bits, elements * entry.dtype.bitsize());
                }
            }
        }
    }
}
