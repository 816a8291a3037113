//! The packed layout, version 2 ([`LAYOUT_VERSION`]): where the code of (k, n), the scale and the zero of (group, n)
//! lie.
//!
//! One buffer serves every kernel family and is uploaded in one piece. K is padded to a multiple
//! of 128 and N to a multiple of 64. A *tile* holds 16 channels (outputs) x 128 inputs:
//!
//! ```text
//! tile     codes, then the scale rows of the groups inside the 128 inputs, then their zero rows
//!
//! 4 bits   1024 B of codes: u32 words [k64 half h 2][lane 32][k16 step s 4], little endian
//!          lane = 4 g + c;  channel in the tile = g + 8 (p % 2) for nibble p (0 = lowest)
//!          input in the tile = 64 h + 16 s + 2 c + p / 4 + 8 (p / 2 % 2)
//!   nibble       7        6        5        4        3        2        1        0
//!   channel    g + 8      g      g + 8      g      g + 8      g      g + 8      g
//!   input k    2c + 9   2c + 9   2c + 1   2c + 1   2c + 8   2c + 8     2c       2c
//!
//! 8 bits   2048 B of codes: u32 words [k64 half h 2][pair of k16 steps j 2][lane 32][s % 2 2][f 2], s = 2 j + s % 2
//!          word f has inputs 64 h + 16 s + 8 f + 2 c (bytes 0, 1) and the next one (bytes 2, 3), the even bytes
//!          channel g, the odd ones g + 8
//!
//! scales   f16: 32 B a group, 8 words, word g = scale of channel g (low half) and of channel g + 8 (high half)
//!          e5m3: 16 B a group, bytes [g 8][group][channel g, channel g + 8]; a byte b is the f16 of bits b << 7
//! zeros    32 B a group, or a tile if scales are per column: 8 words, word g = f16 of a number that the type says
//!          plus the zero, of channel g (low half) and of channel g + 8 (high half)
//!
//! chunk    four tiles = 64 channels x 128 inputs (4224 B for 4 bits at group 128), contiguous
//! buffer   chunks run along K first, then along N:
//!          tile index = ((n / 64) (K_padded / 128) + k / 128) 4 + n % 64 / 16
//! ```
//!
//! 16 bytes of a lane are the fragments of one m16n8k16 operand for four k16 steps, of 8-bit codes for two. Within
//! each half of a word a type may order the bits of its codes otherwise ([`Fragments::arrange`]): what is said here
//! of codes is said of them in order. A 4-bit word is a word of the Marlin tensor with nibbles 1, 2 and 5, 6
//! exchanged, so the low nibbles of its bytes belong to channel g and the high ones to g + 8.
//! One scale per column: tiles have no scales; N_padded f16 scales in channel order follow the tiles, at a multiple
//! of 128 bytes.
//!
//! [`Fragments::arrange`]: super::Fragments::arrange

use super::{Error, Group, WeightFormat, ZeroRule};

/// The version of the layout, which files of packed weights name.
pub const LAYOUT_VERSION: u32 = 2;
/// Channels (outputs) of a tile.
pub const TILE_CHANNELS: usize = 16;
/// Inputs of a tile.
pub const TILE_K: usize = 128;
/// Channels of a chunk: four tiles.
pub const CHUNK_CHANNELS: usize = 64;
/// Steps of 16 inputs in each of a tile's two halves.
pub const K16_STEPS_PER_HALF: usize = 4;
/// Bytes of a tile's 4-bit codes.
pub const CODE_BYTES_PER_TILE: usize = TILE_CHANNELS * TILE_K / 2;
/// Bytes of the f16 scales, or of the zeros, of one group in a tile.
pub const SCALE_ROW_BYTES: usize = 2 * TILE_CHANNELS;

const TILES_PER_CHUNK: usize = CHUNK_CHANNELS / TILE_CHANNELS;
/// N x K above this is refused: every byte and bit count then fits 64 bits with room.
const MAX_ELEMENTS: usize = 1 << 48;

/// What the scale rows of a tile hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScaleRow {
    /// f16.
    F16,
    /// Bytes of 5 exponent and 3 mantissa bits, without a sign: a byte b is the f16 of bits b << 7. Every e4m3 scale
    /// times 2^7 is one, and every power of two that f16 has.
    E5m3,
}

impl ScaleRow {
    /// The name that files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::E5m3 => "e5m3",
        }
    }

    /// The row of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        [Self::F16, Self::E5m3].into_iter().find(|row| row.name() == name)
    }
}

/// What tiles hold of a weight, beside its group rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileKind {
    /// Bits of a code: 4 or 8.
    pub code_bits: u32,
    /// What the scale rows hold.
    pub scales: ScaleRow,
    /// Whether there are zero rows.
    pub zeros: bool,
}

impl TileKind {
    /// Tiles of 4-bit codes with f16 scales: those of [`U4B8`](super::U4B8).
    pub const U4B8: Self = Self { code_bits: 4, scales: ScaleRow::F16, zeros: false };

    /// The tiles of a weight type.
    pub fn of(format: &dyn WeightFormat, scales: ScaleRow) -> Self {
        let zeros = format.zero_rule() == ZeroRule::Stored;
        Self { code_bits: format.bits(), scales, zeros }
    }

    /// Bytes of a tile's codes.
    pub fn code_bytes(&self) -> usize {
        TILE_CHANNELS * TILE_K * self.code_bits as usize / 8
    }

    /// Words that hold the codes of a lane's m16n8k16 fragment.
    pub fn words_per_fragment(&self) -> usize {
        self.code_bits as usize / 4
    }

    /// Groups whose scales lie in one tile: 0 with one scale per column.
    pub fn scale_rows(&self, group: Group) -> usize {
        match group {
            Group::PerColumn => 0,
            Group::Size(size) => TILE_K / size as usize,
        }
    }

    /// Bytes of the scales of one group in a tile.
    pub fn scale_row_bytes(&self) -> usize {
        match self.scales {
            ScaleRow::F16 => SCALE_ROW_BYTES,
            ScaleRow::E5m3 => TILE_CHANNELS,
        }
    }

    /// Rows of zeros in one tile.
    pub fn zero_rows(&self, group: Group) -> usize {
        if self.zeros { self.scale_rows(group).max(1) } else { 0 }
    }

    /// Where a tile's zero rows start.
    pub fn zeros_offset(&self, group: Group) -> usize {
        self.code_bytes() + self.scale_rows(group) * self.scale_row_bytes()
    }

    /// Bytes of a tile: codes, scale rows, zero rows.
    pub fn tile_bytes(&self, group: Group) -> usize {
        self.zeros_offset(group) + self.zero_rows(group) * SCALE_ROW_BYTES
    }
}

/// Sizes and positions of one packed weight; see the module's drawing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackedLayout {
    /// Outputs of the layer.
    pub n: usize,
    /// Inputs of the layer.
    pub k: usize,
    /// `n` rounded up to a multiple of 64.
    pub n_padded: usize,
    /// `k` rounded up to a multiple of 128.
    pub k_padded: usize,
    /// The group rule, normalised for `k`.
    pub group: Group,
    /// What tiles hold.
    pub kind: TileKind,
    /// Bytes of a tile: codes, scales and zeros.
    pub tile_bytes: usize,
    /// Bytes of a chunk of four tiles.
    pub chunk_bytes: usize,
    /// Bytes of all tiles.
    pub codes_bytes: usize,
    /// Where the per-column scales start; none if the scales lie in the tiles.
    pub column_scales_offset: Option<usize>,
    /// Bytes of the buffer.
    pub total_bytes: usize,
}

impl PackedLayout {
    /// The layout of `n` outputs by `k` inputs of 4-bit codes with f16 scales: [`TileKind::U4B8`].
    ///
    /// # Errors
    /// [`Error::Size`] for an empty or absurd shape, and those of [`Group::new`].
    ///
    /// ```
    /// use makaira::weights::{Group, PackedLayout};
    /// let layout = PackedLayout::new(4096, 4096, Group::Size(128))?;
    /// assert_eq!((layout.tile_bytes, layout.chunk_bytes), (1056, 4224));
    /// assert_eq!(layout.total_bytes, 4096 / 16 * (4096 / 128) * 1056);
    /// # Ok::<(), makaira::weights::Error>(())
    /// ```
    pub fn new(n: usize, k: usize, group: Group) -> Result<Self, Error> {
        let group = if n > 0 && k > 0 { Group::new(k, group.raw())? } else { group };
        Self::of(n, k, group, TileKind::U4B8)
    }

    /// The layout of `n` outputs by `k` inputs in tiles of some kind. The last group may be short.
    ///
    /// # Errors
    /// [`Error::Size`] for an empty or absurd shape, and those of [`Group::new`].
    pub fn of(n: usize, k: usize, group: Group, kind: TileKind) -> Result<Self, Error> {
        let fits = n.checked_mul(k).is_some_and(|elements| (1..MAX_ELEMENTS).contains(&elements));
        if !fits {
            return Err(Error::Size { n, k });
        }
        let group = match group {
            Group::Size(size) if Group::SIZES.contains(&size) && k > size as usize => group,
            _ => Group::new(k, group.raw())?,
        };
        Ok(Self::laid(n, k, group, kind))
    }

    /// The layout of a part of this one, of `n` outputs and `k` inputs: it keeps the group rule also where that is one
    /// group.
    pub(super) fn of_part(&self, n: usize, k: usize) -> Self {
        Self::laid(n, k, self.group, self.kind)
    }

    fn laid(n: usize, k: usize, group: Group, kind: TileKind) -> Self {
        let n_padded = n.next_multiple_of(CHUNK_CHANNELS);
        let k_padded = k.next_multiple_of(TILE_K);
        let tile_bytes = kind.tile_bytes(group);
        let codes_bytes = (n_padded / TILE_CHANNELS) * (k_padded / TILE_K) * tile_bytes;
        let (column_scales_offset, total_bytes) = match group {
            Group::Size(_) => (None, codes_bytes),
            Group::PerColumn => (Some(codes_bytes), codes_bytes + 2 * n_padded),
        };
        Self {
            n,
            k,
            n_padded,
            k_padded,
            group,
            kind,
            tile_bytes,
            chunk_bytes: TILES_PER_CHUNK * tile_bytes,
            codes_bytes,
            column_scales_offset,
            total_bytes,
        }
    }

    /// Number of groups of the unpadded layer.
    pub fn num_groups(&self) -> usize {
        self.group.num_groups(self.k)
    }

    /// Groups whose scales lie in one tile: 0 with one scale per column.
    pub fn scale_rows_per_tile(&self) -> usize {
        self.kind.scale_rows(self.group)
    }

    /// Number of tiles along K.
    pub fn num_k_tiles(&self) -> usize {
        self.k_padded / TILE_K
    }

    /// Number of chunks in the buffer.
    pub fn num_chunks(&self) -> usize {
        self.codes_bytes / self.chunk_bytes
    }

    /// Index of the tile that holds (k, n); both below the padded sizes.
    pub fn tile_idx(&self, k: usize, n: usize) -> usize {
        debug_assert!(k < self.k_padded && n < self.n_padded);
        let chunk_idx = (n / CHUNK_CHANNELS) * self.num_k_tiles() + k / TILE_K;
        chunk_idx * TILES_PER_CHUNK + n % CHUNK_CHANNELS / TILE_CHANNELS
    }

    /// The first (k, n) of a tile: the inverse of [`PackedLayout::tile_idx`].
    pub fn tile_origin(&self, tile_idx: usize) -> (usize, usize) {
        let (chunk_idx, in_chunk) = (tile_idx / TILES_PER_CHUNK, tile_idx % TILES_PER_CHUNK);
        let n = chunk_idx / self.num_k_tiles() * CHUNK_CHANNELS + in_chunk * TILE_CHANNELS;
        (chunk_idx % self.num_k_tiles() * TILE_K, n)
    }

    /// Bit of the buffer at which the code of (k, n) starts, before the type's arrangement of a word's halves; bit b
    /// is bit b % 8 of byte b / 8. Both indices below the padded sizes.
    pub fn code_bit(&self, k: usize, n: usize) -> usize {
        let tile = self.tile_idx(k, n) * self.tile_bytes;
        let (k, channel) = (k % TILE_K, n % TILE_CHANNELS);
        let (word, bit) = match self.kind.code_bits {
            4 => {
                let (word, nibble) = word_and_nibble(k, channel);
                (word, 4 * nibble)
            }
            _ => {
                let (word, byte) = word_and_byte(k, channel);
                (word, 8 * byte)
            }
        };
        8 * (tile + 4 * word) + bit
    }

    /// The (k, n) whose code starts at `bit`: the inverse of [`PackedLayout::code_bit`]. None for a
    /// bit that starts no code.
    pub fn code_at(&self, bit: usize) -> Option<(usize, usize)> {
        let (tile_idx, in_tile) = (bit / 8 / self.tile_bytes, bit % (8 * self.tile_bytes));
        let bits = self.kind.code_bits as usize;
        let is_code = bit < 8 * self.codes_bytes
            && in_tile < 8 * self.kind.code_bytes()
            && in_tile.is_multiple_of(bits);
        is_code.then(|| {
            let (k, n) = self.tile_origin(tile_idx);
            let (word, at) = (in_tile / 32, in_tile % 32 / bits);
            let (k_in_tile, channel) =
                if bits == 4 { of_nibble(word, at) } else { of_byte(word, at) };
            (k + k_in_tile, n + channel)
        })
    }

    /// Byte of the buffer at which the scale of (group, n) starts; `group_idx` counts groups of
    /// the padded K.
    pub fn scale_byte(&self, group_idx: usize, n: usize) -> usize {
        match (self.group, self.column_scales_offset) {
            (Group::Size(size), _) => {
                let k = group_idx * size as usize;
                let (row, channel) = (k % TILE_K / size as usize, n % TILE_CHANNELS);
                let at = match self.kind.scales {
                    ScaleRow::F16 => row * SCALE_ROW_BYTES + in_row(channel),
                    ScaleRow::E5m3 => {
                        2 * (channel % 8 * self.scale_rows_per_tile() + row) + channel / 8
                    }
                };
                self.tile_idx(k, n) * self.tile_bytes + self.kind.code_bytes() + at
            }
            (Group::PerColumn, offset) => offset.unwrap_or(self.codes_bytes) + 2 * n,
        }
    }

    /// The (group, n) whose scale starts at `byte`: the inverse of [`PackedLayout::scale_byte`].
    /// None for a byte that starts no scale.
    pub fn scale_at(&self, byte: usize) -> Option<(usize, usize)> {
        if byte >= self.total_bytes {
            return None;
        }
        match (self.group, self.column_scales_offset) {
            (Group::Size(_), _) => {
                let in_tile = byte % self.tile_bytes;
                if in_tile >= self.kind.zeros_offset(self.group) {
                    return None;
                }
                let at = in_tile.checked_sub(self.kind.code_bytes())?;
                let (k, n) = self.tile_origin(byte / self.tile_bytes);
                let (row, channel) = match self.kind.scales {
                    ScaleRow::F16 => (at / SCALE_ROW_BYTES, of_row(at % SCALE_ROW_BYTES)?),
                    ScaleRow::E5m3 => {
                        let pair = at / 2;
                        let rows = self.scale_rows_per_tile();
                        (pair % rows, pair / rows + 8 * (at % 2))
                    }
                };
                Some((self.group.index_of(k) + row, n + channel))
            }
            (Group::PerColumn, offset) => {
                let at = byte.checked_sub(offset?)?;
                at.is_multiple_of(2).then_some((0, at / 2))
            }
        }
    }

    /// Byte of the buffer at which the f16 of the zero of the group of input `k` and output `n` starts, if zeros are
    /// stored; one scale per column has a zero in every tile. Both indices below the padded sizes.
    pub fn zero_byte(&self, k: usize, n: usize) -> Option<usize> {
        let row = match self.group {
            Group::PerColumn => 0,
            Group::Size(size) => k % TILE_K / size as usize,
        };
        self.kind.zeros.then(|| {
            self.tile_idx(k, n) * self.tile_bytes
                + self.kind.zeros_offset(self.group)
                + row * SCALE_ROW_BYTES
                + in_row(n % TILE_CHANNELS)
        })
    }
}

/// Byte of a channel in a row of halves.
fn in_row(channel: usize) -> usize {
    4 * (channel % 8) + 2 * (channel / 8)
}

/// The channel whose half starts at a byte of a row.
fn of_row(byte: usize) -> Option<usize> {
    byte.is_multiple_of(2).then_some(byte / 4 + 8 * (byte % 4 / 2))
}

/// Word and nibble, inside a tile, of the 4-bit code of input `k_in_tile` and channel `channel`.
fn word_and_nibble(k_in_tile: usize, channel: usize) -> (usize, usize) {
    let (h, s, kr) = (k_in_tile / 64, k_in_tile % 64 / 16, k_in_tile % 16);
    let (g, c) = (channel % 8, kr % 8 / 2);
    let word = (32 * h + 4 * g + c) * K16_STEPS_PER_HALF + s;
    (word, 4 * (kr % 2) + 2 * (kr / 8) + channel / 8)
}

/// Input and channel, inside a tile, of nibble `p` of word `word`.
fn of_nibble(word: usize, p: usize) -> (usize, usize) {
    let (h, lane, s) = (word / 128, word % 128 / 4, word % 4);
    let (g, c) = (lane / 4, lane % 4);
    (64 * h + 16 * s + 2 * c + p / 4 + 8 * (p / 2 % 2), g + 8 * (p % 2))
}

/// Word and byte, inside a tile, of the 8-bit code of input `k_in_tile` and channel `channel`.
fn word_and_byte(k_in_tile: usize, channel: usize) -> (usize, usize) {
    let (pair, s, kr) = (k_in_tile / 32, k_in_tile % 32 / 16, k_in_tile % 16);
    let (g, c) = (channel % 8, kr % 8 / 2);
    let word = (32 * pair + 4 * g + c) * 4 + 2 * s + kr / 8;
    (word, 2 * (kr % 2) + channel / 8)
}

/// Input and channel, inside a tile, of byte `p` of word `word`.
fn of_byte(word: usize, p: usize) -> (usize, usize) {
    let (pair, lane, s, f) = (word / 128, word % 128 / 4, word % 4 / 2, word % 2);
    let (g, c) = (lane / 4, lane % 4);
    (32 * pair + 16 * s + 8 * f + 2 * c + p / 2, g + 8 * (p % 2))
}

#[cfg(test)]
mod tests;
