//! The packed layout, version 1: where the code of (k, n) and the scale of (group, n) lie.
//!
//! One buffer serves every kernel family and is uploaded in one piece. K is padded to a multiple
//! of 128 and N to a multiple of 64. A *tile* holds 16 channels (outputs) x 128 inputs:
//!
//! ```text
//! tile     1024 B of codes: u32 words [k64 half h 2][lane 32][k16 step s 4], little endian
//!          then, if grouped, 32 B per group inside the 128 inputs (1, 2 or 4 of them):
//!          8 words, word g = f16 scale of channel g (low half) and of channel g + 8 (high half)
//! word     lane = 4 g + c;  channel in the tile = g + 8 (p % 2) for nibble p (0 = lowest)
//!          input in the tile = 64 h + 16 s + 2 c + p / 4 + 8 (p / 2 % 2)
//!   nibble       7        6        5        4        3        2        1        0
//!   channel    g + 8      g      g + 8      g      g + 8      g      g + 8      g
//!   input k    2c + 9   2c + 9   2c + 1   2c + 1   2c + 8   2c + 8     2c       2c
//! chunk    four tiles = 64 channels x 128 inputs (4224 B at group 128), contiguous
//! buffer   chunks run along K first, then along N:
//!          tile index = ((n / 64) (K_padded / 128) + k / 128) 4 + n % 64 / 16
//! ```
//!
//! A lane's four words of one half are 16 bytes: the fragments of one m16n8k16 operand for four
//! k16 steps. A word is a word of the Marlin tensor with nibbles 1, 2 and 5, 6 exchanged, so the
//! low nibbles of its bytes belong to channel g and the high ones to g + 8.
//! One scale per column: tiles have no scales; N_padded f16 scales in channel order follow the codes,
//! at a multiple of 4096 bytes because a chunk then has 4096.

use super::{Error, Group};

/// Channels (outputs) of a tile.
pub const TILE_CHANNELS: usize = 16;
/// Inputs of a tile.
pub const TILE_K: usize = 128;
/// Channels of a chunk: four tiles.
pub const CHUNK_CHANNELS: usize = 64;
/// Steps of 16 inputs in each of a tile's two halves.
pub const K16_STEPS_PER_HALF: usize = 4;
/// Bytes of a tile's codes.
pub const CODE_BYTES_PER_TILE: usize = TILE_CHANNELS * TILE_K / 2;
/// Bytes of the scales of one group in a tile.
pub const SCALE_ROW_BYTES: usize = 2 * TILE_CHANNELS;

const TILES_PER_CHUNK: usize = CHUNK_CHANNELS / TILE_CHANNELS;
/// N x K above this is refused: every byte and bit count then fits 64 bits with room.
const MAX_ELEMENTS: usize = 1 << 48;

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
    /// Bytes of a tile: codes and, if grouped, scales.
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
    /// The layout of `n` outputs by `k` inputs.
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
        let fits = n.checked_mul(k).is_some_and(|elements| (1..MAX_ELEMENTS).contains(&elements));
        if !fits {
            return Err(Error::Size { n, k });
        }
        let group = Group::new(k, group.raw())?;
        let n_padded = n.next_multiple_of(CHUNK_CHANNELS);
        let k_padded = k.next_multiple_of(TILE_K);
        let scale_rows = scale_rows_per_tile(group);
        let tile_bytes = CODE_BYTES_PER_TILE + scale_rows * SCALE_ROW_BYTES;
        let codes_bytes = (n_padded / TILE_CHANNELS) * (k_padded / TILE_K) * tile_bytes;
        let (column_scales_offset, total_bytes) = match group {
            Group::Size(_) => (None, codes_bytes),
            Group::PerColumn => (Some(codes_bytes), codes_bytes + 2 * n_padded),
        };
        Ok(Self {
            n,
            k,
            n_padded,
            k_padded,
            group,
            tile_bytes,
            chunk_bytes: TILES_PER_CHUNK * tile_bytes,
            codes_bytes,
            column_scales_offset,
            total_bytes,
        })
    }

    /// Number of groups of the unpadded layer.
    pub fn num_groups(&self) -> usize {
        self.group.num_groups(self.k)
    }

    /// Groups whose scales lie in one tile: 0 with one scale per column.
    pub fn scale_rows_per_tile(&self) -> usize {
        scale_rows_per_tile(self.group)
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

    /// Bit of the buffer at which the four bits of the code of (k, n) start; bit b is bit b % 8 of
    /// byte b / 8. Both indices below the padded sizes.
    pub fn code_bit(&self, k: usize, n: usize) -> usize {
        let (word, nibble) = word_and_nibble(k % TILE_K, n % TILE_CHANNELS);
        8 * (self.tile_idx(k, n) * self.tile_bytes + 4 * word) + 4 * nibble
    }

    /// The (k, n) whose code starts at `bit`: the inverse of [`PackedLayout::code_bit`]. None for a
    /// bit that starts no code.
    pub fn code_at(&self, bit: usize) -> Option<(usize, usize)> {
        let (tile_idx, in_tile) = (bit / 8 / self.tile_bytes, bit % (8 * self.tile_bytes));
        let is_code = bit < 8 * self.codes_bytes
            && in_tile < 8 * CODE_BYTES_PER_TILE
            && in_tile.is_multiple_of(4);
        is_code.then(|| {
            let (k, n) = self.tile_origin(tile_idx);
            let (k_in_tile, channel) = element_of(in_tile / 32, in_tile % 32 / 4);
            (k + k_in_tile, n + channel)
        })
    }

    /// Byte of the buffer at which the f16 scale of (group, n) starts; `group_idx` counts groups of
    /// the padded K.
    pub fn scale_byte(&self, group_idx: usize, n: usize) -> usize {
        match (self.group, self.column_scales_offset) {
            (Group::Size(size), _) => {
                let k = group_idx * size as usize;
                let row = k % TILE_K / size as usize;
                let channel = n % TILE_CHANNELS;
                self.tile_idx(k, n) * self.tile_bytes
                    + CODE_BYTES_PER_TILE
                    + row * SCALE_ROW_BYTES
                    + 4 * (channel % 8)
                    + 2 * (channel / 8)
            }
            (Group::PerColumn, offset) => offset.unwrap_or(self.codes_bytes) + 2 * n,
        }
    }

    /// The (group, n) whose scale starts at `byte`: the inverse of [`PackedLayout::scale_byte`].
    /// None for a byte that starts no scale.
    pub fn scale_at(&self, byte: usize) -> Option<(usize, usize)> {
        if byte >= self.total_bytes || !byte.is_multiple_of(2) {
            return None;
        }
        match (self.group, self.column_scales_offset) {
            (Group::Size(_), _) => {
                let in_tile = (byte % self.tile_bytes).checked_sub(CODE_BYTES_PER_TILE)?;
                let (k, n) = self.tile_origin(byte / self.tile_bytes);
                let (row, in_row) = (in_tile / SCALE_ROW_BYTES, in_tile % SCALE_ROW_BYTES);
                let channel = in_row / 4 + 8 * (in_row % 4 / 2);
                Some((self.group.index_of(k) + row, n + channel))
            }
            (Group::PerColumn, offset) => Some((0, byte.checked_sub(offset?)? / 2)),
        }
    }
}

fn scale_rows_per_tile(group: Group) -> usize {
    match group {
        Group::PerColumn => 0,
        Group::Size(size) => TILE_K / size as usize,
    }
}

/// Word and nibble, inside a tile, of the code of input `k_in_tile` and channel `channel`.
fn word_and_nibble(k_in_tile: usize, channel: usize) -> (usize, usize) {
    let (h, s, kr) = (k_in_tile / 64, k_in_tile % 64 / 16, k_in_tile % 16);
    let (g, c) = (channel % 8, kr % 8 / 2);
    let word = (32 * h + 4 * g + c) * K16_STEPS_PER_HALF + s;
    (word, 4 * (kr % 2) + 2 * (kr / 8) + channel / 8)
}

/// Input and channel, inside a tile, of nibble `p` of word `word`.
fn element_of(word: usize, p: usize) -> (usize, usize) {
    let (h, lane, s) = (word / 128, word % 128 / 4, word % 4);
    let (g, c) = (lane / 4, lane % 4);
    (64 * h + 16 * s + 2 * c + p / 4 + 8 * (p / 2 % 2), g + 8 * (p % 2))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layouts() -> impl Strategy<Value = PackedLayout> {
        (1usize..200, 1usize..12, prop::sample::select(vec![-1i64, 32, 64, 128]), 0usize..32)
            .prop_map(|(n, groups, raw, odd)| {
                let k = if raw < 0 { groups * 40 + odd } else { groups * raw as usize };
                let group = Group::new(k, raw).expect("k is a multiple of the group");
                PackedLayout::new(n, k, group).expect("small")
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn codes_and_scales_fill_the_buffer_without_overlap(layout in layouts()) {
            let mut owner = vec![0u8; layout.total_bytes];
            for n in 0..layout.n_padded {
                for k in 0..layout.k_padded {
                    let bit = layout.code_bit(k, n);
                    let mask = 0xf << (bit % 8);
                    prop_assert_eq!(owner[bit / 8] & mask, 0, "({}, {})", k, n);
                    owner[bit / 8] |= mask;
                    prop_assert_eq!(layout.code_at(bit), Some((k, n)));
                    prop_assert_eq!(layout.code_at(bit + 1), None);
                }
                for group_idx in 0..layout.group.num_groups(layout.k_padded) {
                    let byte = layout.scale_byte(group_idx, n);
                    prop_assert_eq!(&owner[byte..byte + 2], &[0, 0]);
                    owner[byte..byte + 2].fill(0xff);
                    prop_assert_eq!(layout.scale_at(byte), Some((group_idx, n)));
                    prop_assert_eq!(layout.scale_at(byte + 1), None);
                    prop_assert_eq!(layout.code_at(8 * byte), None);
                }
            }
            prop_assert!(owner.iter().all(|&byte| byte == 0xff), "no byte is left over");
            prop_assert!(layout.column_scales_offset.is_none_or(|offset| offset % 4096 == 0));
        }
    }

    #[test]
    fn the_drawing_is_what_the_code_does() {
        let layout = PackedLayout::new(128, 256, Group::Size(128)).expect("small");
        // Channel 1 of tile 2 of the second chunk along N, input 128 + 64 + 32 + 5 (kr 5: c 2).
        let tile = (2 + 1) * 4 + 2; // one chunk down N is two along K
        let word = 128 + (4 + 2) * 4 + 2; // half 1, lane 4 g + c of g 1, step 2
        assert_eq!(layout.code_bit(229, 97), 8 * (tile * 1056 + 4 * word) + 4 * 4);
        // Channel 9 of that tile: the high nibble beside it, and the high half of the scale word.
        assert_eq!(layout.code_bit(229, 105), 8 * (tile * 1056 + 4 * word) + 4 * 5);
        assert_eq!(layout.scale_byte(1, 97), tile * 1056 + 1024 + 4);
        assert_eq!(layout.scale_byte(1, 105), tile * 1056 + 1024 + 6);
        assert_eq!(layout.total_bytes, 128 / 16 * 2 * 1056);
        let layout = PackedLayout::new(65, 129, Group::PerColumn).expect("small");
        assert_eq!((layout.n_padded, layout.k_padded, layout.tile_bytes), (128, 256, 1024));
        assert_eq!(layout.scale_byte(0, 64), 8 * 2 * 1024 + 128);
    }

    #[test]
    fn empty_and_absurd_sizes_are_refused() {
        for (n, k) in [(0, 128), (64, 0), (1 << 40, 1 << 40), (usize::MAX, 2), (1 << 24, 1 << 24)] {
            assert_eq!(PackedLayout::new(n, k, Group::PerColumn), Err(Error::Size { n, k }));
        }
    }
}
