//! A check of machine code before the driver sees it.
//!
//! The driver is handed an address without a length and follows the numbers that it finds there. A
//! truncated image, for instance from a full disk, would make it read beyond our memory.
//!
//! Source: System V ABI, "ELF Header", "Sections" (64-bit, little endian).

use super::error::{Error, Result};
use super::sys;

/// Checks that an image is a 64-bit ELF file whose header tables and sections stay within it. The
/// driver gets no length: it believes these numbers.
pub(super) fn check(image: &[u8]) -> Result<()> {
    let word = |at: usize, bytes: usize| -> Option<u64> {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(image.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(value))
    };
    let fits = |offset: u64, bytes: u64| {
        offset.checked_add(bytes).is_some_and(|end| end <= image.len() as u64)
    };
    let sound = || -> Option<bool> {
        let is_elf = image.starts_with(b"\x7fELF\x02\x01") && image.len() >= 64;
        let (segments, sections) = (word(32, 8)?, word(40, 8)?);
        let (segment_bytes, num_segments) = (word(54, 2)?, word(56, 2)?);
        let (section_bytes, num_sections) = (word(58, 2)?, word(60, 2)?);
        let tables = fits(segments, segment_bytes * num_segments)
            && fits(sections, section_bytes * num_sections)
            && (num_sections == 0 || section_bytes == 64);
        if !is_elf || !tables {
            return Some(false);
        }
        for idx in 0..num_sections {
            let at = usize::try_from(sections + idx * 64).ok()?;
            // A section without bytes in the file (type 8, NOBITS) may have any size.
            if word(at + 4, 4)? != 8 && !fits(word(at + 24, 8)?, word(at + 32, 8)?) {
                return Some(false);
            }
        }
        Some(true)
    };
    match sound() {
        Some(true) => Ok(()),
        _ => Err(refused("the image is no complete 64-bit ELF file")),
    }
}

/// The error for an image that the driver would refuse, or should.
pub(super) fn refused(why: &str) -> Error {
    Error::Jit {
        call: "cuModuleLoadData",
        code: sys::ERROR_INVALID_IMAGE,
        name: "CUDA_ERROR_INVALID_IMAGE".to_owned(),
        log: why.to_owned(),
        lines: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header, a table of one section of this type, place and size, and ten bytes of content.
    fn image(kind: u32, offset: u64, bytes: u64) -> Vec<u8> {
        let mut image = vec![0; 64 + 64 + 10];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[40..48].copy_from_slice(&64_u64.to_le_bytes());
        image[58..60].copy_from_slice(&64_u16.to_le_bytes());
        image[60..62].copy_from_slice(&1_u16.to_le_bytes());
        image[64 + 4..64 + 8].copy_from_slice(&kind.to_le_bytes());
        image[64 + 24..64 + 32].copy_from_slice(&offset.to_le_bytes());
        image[64 + 32..64 + 40].copy_from_slice(&bytes.to_le_bytes());
        image
    }

    #[test]
    fn images_that_end_early_are_refused() {
        let sound = image(1, 128, 10);
        assert_eq!(check(&sound), Ok(()));
        for len in 0..sound.len() {
            assert!(check(&sound[..len]).is_err(), "cut to {len} bytes");
        }
    }

    #[test]
    fn numbers_that_point_outside_are_refused() {
        assert!(check(&image(1, 128, 11)).is_err());
        assert!(check(&image(1, u64::MAX, 2)).is_err());
        assert_eq!(check(&image(8, 128, 1 << 40)), Ok(()), "no bytes in the file");
        let mut far_table = image(1, 128, 10);
        far_table[40..48].copy_from_slice(&(u64::MAX - 3).to_le_bytes());
        assert_eq!(check(&far_table).expect_err("refused").code(), Some(sys::ERROR_INVALID_IMAGE));
        let mut other_size = image(1, 128, 10);
        other_size[58] = 32;
        assert!(check(&other_size).is_err());
    }
}
