//! The zero of codes that stay as they lie: what the sums begin with.
//!
//! Fragments of bare codes are worth `(value + bias) * 2^-e`, `e` one of two exponents by the half of the
//! tile's rows, so a group's sums are too large by `bias * sum(x) * 2^-e`. The sums therefore begin with minus
//! that. What one `ldmatrix.x4` brings is an A fragment as it lies: two k16 steps of one row tile, or one step
//! of two. One mma adds it up against a B fragment that is `-bias * 2^-e` in the first eight inputs of even
//! columns and in the last eight of odd ones, so even columns have registers 0 and 1 of the batch, odd ones
//! 2 and 3. Its result has rows of the batch where sums have columns: lanes fetch theirs.
//! All factors are powers of two and fp32 has room for them, so nothing is rounded that was not before.

use super::run::BatchStep;
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::{B32, Cmp, F32};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::{Config, Conversion};
use crate::weights::{Group, Subnormal};

/// What a warp needs for the zero of bare codes.
pub(in crate::kernel) struct Bias {
    exponents: [u32; 2],
    /// The B fragment: `-bias * 2^-e` for the first exponent, or zero.
    negative: [Reg<B32>; 2],
    /// The lanes that hold the sums of a lane's two rows of each row tile.
    from: [Reg<B32>; 2],
    /// Sums over all inputs, if scales are per column.
    column: Option<Column>,
}

/// Sums over the inputs of a segment, as the mma leaves them.
struct Column {
    sums: [Reg<F32>; 4],
    row_tiles: u32,
}

/// `2^exponent`.
fn power(exponent: u32) -> f32 {
    f32::from_bits((127 + exponent) << 23)
}

impl Bias {
    /// What the conversion of a configuration wants in registers: the type's constants, or its bias.
    pub(in crate::kernel) fn or_constants(
        a: &mut Asm,
        config: &Config,
        row_tiles: u32,
        lane: Reg<B32>,
    ) -> (Vec<Reg<B32>>, Option<Self>) {
        let format = config.weight_format();
        match (config.conversion, format.subnormal()) {
            (Conversion::Subnormal, Some(subnormal)) => {
                (Vec::new(), Some(Self::new(a, subnormal, config.group, row_tiles, lane)))
            }
            _ => (format.emit_constants(a), None),
        }
    }

    fn new(
        a: &mut Asm,
        format: &dyn Subnormal,
        group: Group,
        row_tiles: u32,
        lane: Reg<B32>,
    ) -> Self {
        let exponents = format.exponents();
        // Subnormals count 2^-24.
        let bits = 0x8000 | u32::from(format.bias()) << (24 - exponents[0]);
        let bits = bits << 16 | bits;
        // Lane (g, c) has inputs of column g.
        let odd = a.reg();
        a.and_b32(odd, lane, 4);
        let odd = a.test_u32(Cmp::Ne, odd, 0);
        let negative: [Reg<B32>; 2] = a.regs();
        a.selp_b32(negative[0], 0u32, bits, odd);
        a.selp_b32(negative[1], bits, 0u32, odd);
        let from: [Reg<B32>; 2] = a.regs();
        // Lane (g, c) wants rows 2 c and 2 c + 1; lanes 4 g .. 4 g + 3 have row g. Of a lane's number the
        // exchange takes five bits.
        a.shl_b32(from[0], lane, 3);
        a.add_u32(from[1], from[0], 4);
        let column = (group == Group::PerColumn).then(|| Column { sums: a.regs(), row_tiles });
        Self { exponents, negative, from, column }
    }

    pub(super) fn emit_begin(&self, a: &mut Asm) {
        for sum in self.column.iter().flat_map(|column| column.sums) {
            a.mov_f32(sum, 0.0);
        }
    }

    /// Emits what a group's sums begin with, by row tile, from the group's B fragments. With scales per column
    /// the inputs are only added up.
    pub(super) fn emit_group(
        &self,
        a: &mut Asm,
        steps: &[BatchStep],
        zero: Reg<F32>,
    ) -> Vec<[Reg<F32>; 4]> {
        let row_tiles = steps[0].len();
        // The fragments as they were loaded.
        let fragments: Vec<[Reg<B32>; 4]> = steps
            .concat()
            .chunks(2)
            .map(|pair| [pair[0][0], pair[0][1], pair[1][0], pair[1][1]])
            .collect();
        if let Some(Column { sums, .. }) = self.column {
            for fragment in fragments {
                a.mma_m16n8k16_f32_f16(sums, fragment, self.negative, sums);
            }
            return vec![[zero; 4]; row_tiles];
        }
        // A chain a row tile: they do not wait for each other.
        let mut chains: Vec<[Reg<F32>; 4]> = (0..row_tiles).map(|_| a.regs()).collect();
        for (n, fragment) in fragments.into_iter().enumerate() {
            let sums = chains[n % row_tiles];
            let before = if n < row_tiles { [zero; 4] } else { sums };
            a.mma_m16n8k16_f32_f16(sums, fragment, self.negative, before);
        }
        let mut sums = chains.remove(0);
        for other in chains {
            for (sum, other) in sums.iter_mut().zip(other) {
                *sum = emit_add(a, *sum, other);
            }
        }
        self.emit_fetch(a, sums, row_tiles)
    }

    /// Emits the starting sums by row tile from what the mma left: even and odd columns of rows g and g + 8.
    fn emit_fetch(&self, a: &mut Asm, sums: [Reg<F32>; 4], row_tiles: usize) -> Vec<[Reg<F32>; 4]> {
        let mut rows = vec![emit_add(a, sums[0], sums[2]), emit_add(a, sums[1], sums[3])];
        if row_tiles == 1 {
            rows = vec![emit_add(a, rows[0], rows[1])];
        }
        let [e0, e1] = self.exponents;
        rows.into_iter()
            .map(|row| {
                let sums: [Reg<F32>; 4] = a.regs();
                for n in 0..2 {
                    a.shfl_sync_idx_f32(sums[n], row, self.from[n]);
                    a.mul_f32(sums[2 + n], sums[n], power(e0 - e1));
                }
                sums
            })
            .collect()
    }

    /// Emits the accumulators' scale, and their zero if scales are per column.
    pub(super) fn emit_finish(&self, a: &mut Asm, acc: &Accumulators) {
        let zeros = self
            .column
            .as_ref()
            .map(|column| self.emit_fetch(a, column.sums, column.row_tiles as usize));
        for (j, fragment) in acc.iter().flat_map(|tile| tile.iter().enumerate()) {
            for (n, value) in fragment.iter().enumerate() {
                if let Some(zeros) = &zeros {
                    a.add_f32(*value, *value, zeros[j][n]);
                }
                a.mul_f32(*value, *value, power(self.exponents[n / 2]));
            }
        }
    }
}

fn emit_add(a: &mut Asm, x: Reg<F32>, y: Reg<F32>) -> Reg<F32> {
    let sum = a.reg();
    a.add_f32(sum, x, y);
    sum
}
