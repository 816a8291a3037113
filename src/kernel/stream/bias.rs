//! The zero of codes that stay as they lie: what the sums begin with.
//!
//! Fragments of bare codes are worth `(value + bias) * 2^-e`, `e` one of two exponents by the half of the
//! tile's rows, so a group's sums are too large by `bias * sum(x) * 2^-e`. The sums therefore begin with minus
//! that. What one `ldmatrix.x4` brings, two k16 steps of a row tile, is an A fragment as it lies: one mma adds
//! it up against a B fragment that is `-bias * 2^-e` everywhere. Its result has rows of the batch where sums
//! have columns, and half of each row's sum in row g, half in row g + 8: lanes fetch theirs. Nothing is
//! multiplied by zero, so that a row of infinities spoils no other.
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
    /// The B fragment: `-bias * 2^-e` for the first exponent in even columns, something else in odd ones: a
    /// constant the assembler would make anew for every mma.
    negative: [Reg<B32>; 2],
    /// The lanes that hold the sums of a lane's two rows of each row tile.
    from: [Reg<B32>; 2],
    /// Sums over the inputs of a segment by row tile, as the mma leaves them, if scales are per column.
    column: Option<Vec<[Reg<F32>; 4]>>,
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
        let format = config.kind.weight_format();
        match (config.conversion, format.subnormal()) {
            (Conversion::Subnormal, Some(subnormal)) => {
                (Vec::new(), Some(Self::new(a, subnormal, config.group, row_tiles, lane)))
            }
            _ => {
                let kind = &config.kind;
                (kind.fragments().emit_constants(a, kind.activation), None)
            }
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
        a.selp_b32(negative[0], bits + 1, bits, odd);
        a.selp_b32(negative[1], bits + 2, bits, odd);
        let from: [Reg<B32>; 2] = a.regs();
        // Lane (g, c) wants rows 2 c and 2 c + 1; lanes 4 g .. 4 g + 3 have row g. Of a lane's number the
        // exchange takes five bits.
        a.shl_b32(from[0], lane, 3);
        a.add_u32(from[1], from[0], 4);
        let column =
            (group == Group::PerColumn).then(|| (0..row_tiles).map(|_| a.regs()).collect());
        Self { exponents, negative, from, column }
    }

    pub(super) fn emit_begin(&self, a: &mut Asm) {
        for sum in self.column.iter().flatten().flatten() {
            a.mov_f32(*sum, 0.0);
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
        let chains: Vec<[Reg<F32>; 4]> = match &self.column {
            Some(sums) => sums.clone(),
            None => steps[0].iter().map(|_| a.regs()).collect(),
        };
        for (n, pair) in steps.chunks(2).enumerate() {
            for (j, sums) in chains.iter().enumerate() {
                let fragment = [pair[0][j][0], pair[0][j][1], pair[1][j][0], pair[1][j][1]];
                let before = if n == 0 && self.column.is_none() { [zero; 4] } else { *sums };
                a.mma_m16n8k16_f32_f16(*sums, fragment, self.negative, before);
            }
        }
        match &self.column {
            Some(_) => vec![[zero; 4]; chains.len()],
            None => self.emit_fetch(a, &chains),
        }
    }

    /// Emits the starting sums by row tile from what the mma left.
    fn emit_fetch(&self, a: &mut Asm, chains: &[[Reg<F32>; 4]]) -> Vec<[Reg<F32>; 4]> {
        let [e0, e1] = self.exponents;
        chains
            .iter()
            .map(|chain| {
                let row = a.reg();
                a.add_f32(row, chain[0], chain[2]);
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
        let zeros = self.column.as_ref().map(|sums| self.emit_fetch(a, sums));
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
