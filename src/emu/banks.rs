//! Shared-memory bank conflicts.
//!
//! Shared memory has 32 banks of 4 bytes. A warp's access is served in phases that move at most 128 bytes:
//! all 32 lanes at once for accesses up to 4 bytes, halves for 8, quarters for 16 and for the eight rows of
//! one `ldmatrix` matrix. A phase takes as many wavefronts as the fullest bank has distinct words; lanes
//! that name one word share it.
//! Source: CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x and later.

/// The addresses of one instruction.
#[derive(Debug)]
pub(super) struct Banks {
    /// Unit of each lane's access: its address divided by the access size, at least one word.
    units: [u32; 32],
    lanes: u32,
    size: u32,
}

impl Banks {
    pub fn new() -> Self {
        Self { units: [0; 32], lanes: 0, size: 4 }
    }

    /// Notes that a lane touches `size` bytes at `at`.
    #[inline]
    pub fn note(&mut self, lane: u32, at: u32, size: u32) {
        self.size = size.max(4);
        self.units[lane as usize] = at / self.size;
        self.lanes |= 1 << lane;
    }

    /// Wavefronts without conflicts, and further ones that conflicts cost; empties the record.
    pub fn take(&mut self) -> (u64, u64) {
        let per_phase = 128 / self.size;
        let (mut ideal, mut extra) = (0, 0);
        for first in (0..32).step_by(per_phase as usize) {
            let lanes = self.lanes >> first & (u32::MAX >> (32 - per_phase));
            if lanes != 0 {
                let units = &self.units[first as usize..(first + per_phase) as usize];
                ideal += 1;
                extra += wavefronts(units, lanes) - 1;
            }
        }
        self.lanes = 0;
        (ideal, extra)
    }
}

/// Wavefronts of one phase: the most distinct units that fall on one group of banks.
fn wavefronts(units: &[u32], lanes: u32) -> u64 {
    let groups = units.len() as u32;
    let mut first = [0; 32];
    let (mut seen, mut conflict) = (0u32, false);
    for (lane, unit) in units.iter().enumerate().filter(|(lane, _)| lanes >> lane & 1 != 0) {
        let _ = lane;
        let group = unit % groups;
        if seen >> group & 1 == 0 {
            seen |= 1 << group;
            first[group as usize] = *unit;
        } else {
            conflict |= first[group as usize] != *unit;
        }
    }
    if !conflict {
        return 1;
    }
    let mut distinct: Vec<u32> = units
        .iter()
        .enumerate()
        .filter(|(lane, _)| lanes >> lane & 1 != 0)
        .map(|(_, unit)| *unit)
        .collect();
    distinct.sort_unstable();
    distinct.dedup();
    let mut counts = [0; 32];
    distinct.iter().for_each(|unit| counts[(unit % groups) as usize] += 1);
    counts.into_iter().max().unwrap_or(1)
}
