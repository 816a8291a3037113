//! XXH64 without a seed, the checksum of a store's tensors: fast, and known to the tool `xxhsum`.
//!
//! Source: xxHash fast digest algorithm, "XXH64 Algorithm Description", version 0.1.1.

const PRIMES: [u64; 5] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
    0x27d4_eb2f_1656_67c5,
];

fn round(lane: u64, word: u64) -> u64 {
    let mixed = lane.wrapping_add(word.wrapping_mul(PRIMES[1]));
    mixed.rotate_left(31).wrapping_mul(PRIMES[0])
}

/// The checksum of some bytes.
pub(super) fn xxh64(bytes: &[u8]) -> u64 {
    let (stripes, rest) = bytes.as_chunks::<32>();
    let mut hash = if stripes.is_empty() {
        PRIMES[4]
    } else {
        let first = PRIMES[0].wrapping_add(PRIMES[1]);
        let mut lanes = [first, PRIMES[1], 0, PRIMES[0].wrapping_neg()];
        for stripe in stripes {
            for (lane, word) in lanes.iter_mut().zip(stripe.as_chunks().0) {
                *lane = round(*lane, u64::from_le_bytes(*word));
            }
        }
        let turned = lanes.iter().zip([1, 7, 12, 18]).map(|(lane, by)| lane.rotate_left(by));
        let merged = turned.fold(0u64, u64::wrapping_add);
        lanes.iter().fold(merged, |hash, lane| {
            (hash ^ round(0, *lane)).wrapping_mul(PRIMES[0]).wrapping_add(PRIMES[3])
        })
    };
    hash = hash.wrapping_add(bytes.len() as u64);
    let (words, rest) = rest.as_chunks::<8>();
    for word in words {
        hash ^= round(0, u64::from_le_bytes(*word));
        hash = hash.rotate_left(27).wrapping_mul(PRIMES[0]).wrapping_add(PRIMES[3]);
    }
    let (halves, rest) = rest.as_chunks::<4>();
    for half in halves {
        hash ^= u64::from(u32::from_le_bytes(*half)).wrapping_mul(PRIMES[0]);
        hash = hash.rotate_left(23).wrapping_mul(PRIMES[1]).wrapping_add(PRIMES[2]);
    }
    for byte in rest {
        hash ^= u64::from(*byte).wrapping_mul(PRIMES[4]);
        hash = hash.rotate_left(11).wrapping_mul(PRIMES[0]);
    }
    hash = (hash ^ hash >> 33).wrapping_mul(PRIMES[1]);
    hash = (hash ^ hash >> 29).wrapping_mul(PRIMES[2]);
    hash ^ hash >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reference implementation's answers.
    #[test]
    fn known_texts_have_their_known_sums() {
        for (text, sum) in [
            ("", 0xef46_db37_51d8_e999),
            ("a", 0xd24e_c4f1_a98c_6e5b),
            ("abc", 0x44bc_2cf5_ad77_0999),
            ("Nobody inspects the spammish repetition", 0xfbce_a83c_8a37_8bf1),
        ] {
            assert_eq!(xxh64(text.as_bytes()), sum, "{text}");
        }
    }

    #[test]
    fn every_bit_of_every_length_counts() {
        let bytes: Vec<u8> = (0..100u8).map(|i| i.wrapping_mul(37)).collect();
        for len in 1..bytes.len() {
            let sum = xxh64(&bytes[..len]);
            assert_ne!(sum, xxh64(&bytes[..len - 1]));
            for bit in 0..8 * len {
                let mut other = bytes[..len].to_vec();
                other[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(sum, xxh64(&other), "bit {bit} of {len}");
            }
        }
    }
}
