//! The layout's maps against each other and against its drawing.

use proptest::prelude::*;

use super::*;

fn kinds() -> impl Strategy<Value = TileKind> {
    let scales = prop::sample::select(vec![ScaleRow::F16, ScaleRow::E5m3]);
    (prop::sample::select(vec![4, 8]), scales, any::<bool>())
        .prop_map(|(code_bits, scales, zeros)| TileKind { code_bits, scales, zeros })
}

fn layouts() -> impl Strategy<Value = PackedLayout> {
    let raw = prop::sample::select(vec![-1i64, 16, 32, 64, 128]);
    (1usize..200, 1usize..12, raw, 0usize..32, kinds()).prop_map(|(n, groups, raw, odd, kind)| {
        let k = if raw < 0 { groups * 40 + odd } else { groups * raw as usize };
        let group = Group::new(k, raw).expect("k is a multiple of the group");
        PackedLayout::of(n, k, group, kind).expect("small")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn codes_scales_and_zeros_fill_the_buffer_without_overlap(layout in layouts()) {
        let mut owner = vec![0u8; layout.total_bytes];
        let code_mask = if layout.kind.code_bits == 4 { 0xf } else { 0xff };
        let grouped = layout.group != Group::PerColumn;
        let scale_bytes = if grouped { layout.kind.scale_row_bytes() / TILE_CHANNELS } else { 2 };
        for n in 0..layout.n_padded {
            for k in 0..layout.k_padded {
                let bit = layout.code_bit(k, n);
                let mask = code_mask << (bit % 8);
                prop_assert_eq!(owner[bit / 8] & mask, 0, "({}, {})", k, n);
                owner[bit / 8] |= mask;
                prop_assert_eq!(layout.code_at(bit), Some((k, n)));
                prop_assert_eq!(layout.code_at(bit + 1), None);
            }
            for group_idx in 0..layout.group.num_groups(layout.k_padded) {
                let byte = layout.scale_byte(group_idx, n);
                prop_assert!(owner[byte..byte + scale_bytes].iter().all(|owner| *owner == 0));
                owner[byte..byte + scale_bytes].fill(0xff);
                prop_assert_eq!(layout.code_at(8 * byte), None);
                prop_assert_eq!(layout.scale_at(byte), Some((group_idx, n)));
                prop_assert!(scale_bytes == 1 || layout.scale_at(byte + 1).is_none());
            }
            let per_zero = if layout.group == Group::PerColumn { TILE_K } else { layout.group.raw() as usize };
            for k in (0..layout.k_padded).step_by(per_zero) {
                let Some(byte) = layout.zero_byte(k, n) else { continue };
                prop_assert_eq!(&owner[byte..byte + 2], &[0, 0]);
                owner[byte..byte + 2].fill(0xff);
                prop_assert_eq!(layout.scale_at(byte), None);
                prop_assert_eq!(layout.code_at(8 * byte), None);
                prop_assert_eq!(layout.zero_byte(k + per_zero - 1, n), Some(byte));
            }
        }
        prop_assert!(owner.iter().all(|&byte| byte == 0xff), "no byte is left over");
        prop_assert!(layout.column_scales_offset.is_none_or(|offset| offset % 128 == 0));
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
    let bytes = TileKind { code_bits: 8, scales: ScaleRow::F16, zeros: true };
    let layout = PackedLayout::of(128, 256, Group::Size(64), bytes).expect("small");
    assert_eq!(layout.tile_bytes, 2048 + 2 * 32 + 2 * 32);
    // The same element: pair of steps 3 (half 1, steps 2 and 3), step 0 of it, inputs below 8.
    let word = (32 * 3 + 4 + 2) * 4;
    assert_eq!(layout.code_bit(229, 97), 8 * (tile * 2176 + 4 * word + 2));
    assert_eq!(layout.code_bit(229 + 8, 105), 8 * (tile * 2176 + 4 * (word + 1) + 3));
    assert_eq!(layout.zero_byte(229, 105), Some(tile * 2176 + 2048 + 64 + 32 + 6));
    let nvfp4 = TileKind { code_bits: 4, scales: ScaleRow::E5m3, zeros: false };
    let layout = PackedLayout::of(128, 256, Group::Size(16), nvfp4).expect("small");
    assert_eq!(layout.tile_bytes, 1024 + 8 * 16);
    assert_eq!(
        layout.scale_byte(229 / 16, 105),
        tile * 1152 + 1024 + 16 + 2 * (229 % 128 / 16) + 1
    );
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
