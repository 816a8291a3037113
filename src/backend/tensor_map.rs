//! `TensorMap`: a matrix of 2-byte elements as the tile copies of Hopper see it.
//!
//! The kernel receives the map as one parameter and names tiles by the coordinates of their first element.
//! Whatever of a tile lies outside the matrix is read as zeros and not written. The rules are those of the
//! hardware's descriptor, checked before any backend makes one, so that the emulator refuses what a card
//! would refuse. Source: CUDA Driver API, "Tensor Map Object Management" (`cuTensorMapEncodeTiled`).

use super::DevicePtr;

/// Bytes of an element.
const ELEMENT_BYTES: u64 = 2;
/// Pieces that the hardware moves: addresses, rows and the inner side of a tile are multiples.
const PIECE_BYTES: u64 = 16;
/// Rows are less than this apart.
const ROW_BYTES_END: u64 = 1 << 40;
/// Most elements along a side of the matrix.
const MAX_ELEMENTS: u64 = 1 << 32;
/// Most elements along a side of a tile.
const MAX_TILE: u32 = 256;
/// Bytes that a row of a tile may have with [`Swizzle::B128`].
const B128_BYTES: u64 = 128;

/// How the 16-byte pieces of a tile's rows lie in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Swizzle {
    /// One after the other.
    None,
    /// Rows of 128 bytes, piece `q` of row `r` in place `q ^ (r % 8)`: eight rows of one column of pieces
    /// lie in different banks.
    B128,
}

/// A matrix of 2-byte elements and the size of its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMap {
    /// Address of the first element, a multiple of 16 bytes.
    pub base: DevicePtr,
    /// Elements of a row (the inner side), and rows.
    pub elements: [u64; 2],
    /// Bytes from one row to the next, a multiple of 16.
    pub row_bytes: u64,
    /// Elements of a tile's row, and its rows: at most 256 each.
    pub tile: [u32; 2],
    /// How a tile lies in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// Size of the kernel parameter, in bytes; it is aligned to 64.
    pub const PARAM_BYTES: u32 = 128;

    /// Bytes of shared memory that a tile takes, also where it leaves the matrix.
    pub fn tile_bytes(&self) -> u32 {
        ELEMENT_BYTES as u32 * self.tile[0] * self.tile[1]
    }

    /// Checks the rules of the hardware.
    ///
    /// # Errors
    /// The first rule that is broken, with its value and what to do.
    pub fn check(&self) -> Result<(), TensorMapError> {
        let Self { base, elements: [columns, rows], row_bytes, tile, swizzle } = *self;
        let rule = |holds, what, value, rule, remedy| match holds {
            true => Ok(()),
            false => Err(TensorMapError { what, value, rule, remedy }),
        };
        let copy = "copy the matrix to rows of whole 16-byte pieces";
        let is_aligned = base.addr().is_multiple_of(PIECE_BYTES);
        rule(is_aligned, "address", base.addr(), "must be a multiple of 16 bytes", copy)?;
        for (what, count) in [("elements of a row", columns), ("rows", rows)] {
            let remedy = "launch nothing for an empty matrix, split a larger one";
            let fits = (1..=MAX_ELEMENTS).contains(&count);
            rule(fits, what, count, "must be 1 to 2^32", remedy)?;
        }
        let is_whole = row_bytes.is_multiple_of(PIECE_BYTES);
        rule(is_whole, "distance of rows in bytes", row_bytes, "must be a multiple of 16", copy)?;
        let is_near = (ELEMENT_BYTES * columns..ROW_BYTES_END).contains(&row_bytes);
        let near = "must hold a row and be less than 2^40";
        rule(is_near, "distance of rows in bytes", row_bytes, near, "pass the matrix's stride")?;
        let smaller = "choose a configuration with a smaller tile";
        for (what, side) in [("elements of a tile's row", tile[0]), ("rows of a tile", tile[1])] {
            let fits = (1..=MAX_TILE).contains(&side);
            rule(fits, what, side.into(), "must be 1 to 256", smaller)?;
        }
        let inner_bytes = ELEMENT_BYTES * u64::from(tile[0]);
        let is_whole = inner_bytes.is_multiple_of(PIECE_BYTES);
        let (what, wider) = ("bytes of a tile's row", "choose a tile of whole 16-byte pieces");
        rule(is_whole, what, inner_bytes, "must be a multiple of 16", wider)?;
        let fits = swizzle == Swizzle::None || inner_bytes <= B128_BYTES;
        rule(fits, what, inner_bytes, "must be at most 128 with the 128-byte swizzle", smaller)
    }
}

/// A tensor map breaks a rule of the hardware.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tensor map: {what} {value}, {rule}; {remedy}")]
pub struct TensorMapError {
    /// The quantity.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
    /// The rule.
    pub rule: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: TensorMap = TensorMap {
        base: DevicePtr(0x7f00_0000_0010),
        elements: [4096, 33],
        row_bytes: 8192,
        tile: [64, 64],
        swizzle: Swizzle::B128,
    };

    #[test]
    fn sound_maps_pass_up_to_the_limits() {
        let wide = TensorMap { tile: [256, 256], swizzle: Swizzle::None, ..SOUND };
        let huge = TensorMap {
            elements: [1 << 32, 1 << 32],
            row_bytes: ROW_BYTES_END - 16,
            tile: [8, 1],
            ..SOUND
        };
        let tiny = TensorMap { elements: [1, 1], row_bytes: 16, ..SOUND };
        for map in [SOUND, wide, huge, tiny] {
            assert_eq!(map.check(), Ok(()), "{map:?}");
        }
        assert_eq!((SOUND.tile_bytes(), wide.tile_bytes()), (8192, 131_072));
    }

    #[test]
    fn each_broken_rule_is_named_with_value_and_remedy() {
        let base = |addr| TensorMap { base: DevicePtr(addr), ..SOUND };
        let elements = |elements| TensorMap { elements, ..SOUND };
        let row_bytes = |row_bytes| TensorMap { row_bytes, ..SOUND };
        let tile = |tile| TensorMap { tile, ..SOUND };
        let plain = |tile| TensorMap { tile, swizzle: Swizzle::None, ..SOUND };
        let broken = [
            (base(0x7f00_0000_0008), "address 139637976727560, must be a multiple of 16 bytes"),
            (elements([0, 33]), "elements of a row 0, must be 1 to 2^32"),
            (elements([4096, 0]), "rows 0, must be 1 to 2^32"),
            (elements([4096, (1 << 32) + 1]), "rows 4294967297, must be 1 to 2^32"),
            (row_bytes(8200), "distance of rows in bytes 8200, must be a multiple of 16"),
            (row_bytes(8176), "distance of rows in bytes 8176, must hold a row"),
            (row_bytes(1 << 40), "distance of rows in bytes 1099511627776, must hold a row"),
            (tile([0, 64]), "elements of a tile's row 0, must be 1 to 256"),
            (tile([64, 257]), "rows of a tile 257, must be 1 to 256"),
            (plain([257, 1]), "elements of a tile's row 257, must be 1 to 256"),
            (plain([12, 64]), "bytes of a tile's row 24, must be a multiple of 16"),
            (tile([72, 64]), "bytes of a tile's row 144, must be at most 128"),
        ];
        for (map, text) in broken {
            let error = map.check().expect_err(text).to_string();
            assert!(error.starts_with(&format!("tensor map: {text}")), "{error}");
            assert!(error.contains("; "), "no remedy: {error}");
        }
    }
}
