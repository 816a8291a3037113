//! What a compiled kernel is found by: everything that determines the machine code.
//!
//! A key is a text, made of the ingredients one a line and the PTX after them, and a 128-bit hash
//! of it that names the file. The whole text is stored with the entry and compared, so that a
//! collision is a miss and the hash needs no cryptographic strength. A missing ingredient would
//! hand out code for another device, driver or option (fault B71).

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::driver::{DriverVersion, JitOptions};
use crate::target::SmArch;

/// The ingredients of a key.
#[derive(Clone, Debug)]
pub struct KeyParts<'a> {
    /// Name of the configuration, which is the PTX entry's name too.
    pub name: &'a str,
    /// The PTX text, which carries tile, types, pipeline and `.target`.
    pub ptx: &'a str,
    /// The device that the code is for, which may be newer than the text's `.target`.
    pub device: SmArch,
    /// The assembler's version: that of the driver.
    pub driver_version: DriverVersion,
    /// How the driver is to assemble.
    pub options: &'a JitOptions,
    /// Who wrote the text; [`KeyParts::EMITTER`] is this crate.
    pub emitter: &'a str,
}

impl KeyParts<'_> {
    /// Name and version of this crate.
    pub const EMITTER: &'static str =
        concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"));
}

/// The key of a compiled kernel.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    name: String,
    text: String,
    hash: u128,
}

impl Key {
    /// The key of these ingredients.
    pub fn new(parts: &KeyParts<'_>) -> Self {
        let KeyParts { name, ptx, device, driver_version, options, emitter } = parts;
        // `Debug` of a string escapes line ends: no ingredient can pass for two. The PTX is last.
        let text = format!(
            "name {name:?}\nemitter {emitter:?}\ndevice {device}\ndriver {}\noptions {options}\n\
             ptx\n{ptx}",
            driver_version.0
        );
        let hash = hash128(text.as_bytes());
        Self { name: (*name).to_owned(), text, hash }
    }

    /// Name of the configuration.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All ingredients.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The hash as 32 hexadecimal digits.
    pub fn hex(&self) -> String {
        format!("{:032x}", self.hash)
    }

    /// Name of the entry's file without extension: the configuration's name, as far as it is fit
    /// for a file name, and the hash.
    pub(super) fn stem(&self) -> String {
        let fit = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' };
        let name: String = self.name.chars().take(100).map(fit).collect();
        format!("{name}-{}", self.hex())
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.stem())
    }
}

/// 128 bits over bytes: two FNV-1a lanes that start apart and multiply differently, each finished
/// by a mix in which every input bit reaches every output bit.
pub(super) fn hash128(bytes: &[u8]) -> u128 {
    /// FNV-1a's published offset and prime.
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    /// The golden ratio as a 64-bit fraction, odd: the other lane's start and factor.
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let (mut low, mut high) = (OFFSET, GOLDEN);
    for byte in bytes {
        low = (low ^ u64::from(*byte)).wrapping_mul(PRIME);
        high = (high ^ u64::from(*byte)).wrapping_mul(GOLDEN).rotate_left(29);
    }
    let len = bytes.len() as u64;
    u128::from(mix(high ^ len)) << 64 | u128::from(mix(low ^ len.rotate_left(32)))
}

/// The finishing mix of MurmurHash3 for 64 bits.
fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    value ^ (value >> 33)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn parts<'a>(options: &'a JitOptions) -> KeyParts<'a> {
        KeyParts {
            name: "marlin_sm80",
            ptx: ".version 8.0\n.target sm_80\n",
            device: SmArch::baseline(90),
            driver_version: DriverVersion(12040),
            options,
            emitter: KeyParts::EMITTER,
        }
    }

    /// Fault B71: each ingredient makes another key, the same ingredients the same.
    #[test]
    fn b71_every_ingredient_changes_the_key() {
        let plain = JitOptions::default();
        let lines = JitOptions { line_info: true, ..JitOptions::default() };
        let level = JitOptions { optimization_level: Some(4), ..JitOptions::default() };
        let regs = JitOptions { max_regs: Some(128), ..JitOptions::default() };
        let base = parts(&plain);
        let variants = [
            base.clone(),
            KeyParts { name: "marlin_sm80_m16", ..base.clone() },
            KeyParts { ptx: ".version 8.0\n.target sm_90a\n", ..base.clone() },
            KeyParts { device: SmArch::baseline(80), ..base.clone() },
            KeyParts { device: SmArch::specific(90), ..base.clone() },
            KeyParts { driver_version: DriverVersion(12050), ..base.clone() },
            KeyParts { emitter: "makaira 0.0.1", ..base.clone() },
            parts(&lines),
            parts(&level),
            parts(&regs),
        ];
        let keys: HashSet<String> = variants.iter().map(|parts| Key::new(parts).hex()).collect();
        assert_eq!(keys.len(), variants.len(), "two ingredients share a key");
        assert_eq!(Key::new(&base), Key::new(&parts(&JitOptions::default())));
    }

    #[test]
    fn no_ingredient_passes_for_two() {
        let options = JitOptions::default();
        let odd = KeyParts { name: "a\"\nemitter \"b", emitter: "c", ..parts(&options) };
        let lines: Vec<String> = Key::new(&odd).text().lines().map(str::to_owned).collect();
        assert_eq!(lines.iter().filter(|line| line.starts_with("emitter ")).count(), 1);
    }

    #[test]
    fn file_names_are_plain() {
        let options = JitOptions::default();
        let long = "../x y/".repeat(50);
        let stem = Key::new(&KeyParts { name: &long, ..parts(&options) }).stem();
        assert!(stem.len() <= 133 && stem.starts_with("___x_y_"), "{stem}");
        assert!(stem.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-'));
    }

    #[test]
    fn every_bit_of_the_text_reaches_both_halves_of_the_hash() {
        let base: Vec<u8> = (0..64_u8).collect();
        let hash = hash128(&base);
        for bit in 0..base.len() * 8 {
            let mut other = base.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let flipped = hash ^ hash128(&other);
            let (low, high) =
                ((flipped as u64).count_ones(), ((flipped >> 64) as u64).count_ones());
            assert!(
                (10..=54).contains(&low) && (10..=54).contains(&high),
                "bit {bit}: {low} {high}"
            );
        }
        assert_ne!(hash128(b""), hash128(b"\0"));
    }
}
