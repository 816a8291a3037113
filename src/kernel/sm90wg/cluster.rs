//! Clusters: two CTAs sum half of the runs each of the same segments, and each ends up with half of the rows.
//!
//! Where one CTA per tile leaves SMs idle, tiles must be shared. Through scratch memory and locks a hop takes
//! 1.3 us and more, and the sums pass through L2; through each other's shared memory 0.8 us, at once for both CTAs.
//! ```text
//! team       stores its sums of the other CTA's rows there      (st.async, counted as bytes on `sums` there)
//! teams but the first   store those of this CTA's rows here     (st.shared, an arrival a warp on `sums`)
//! first team wait sums | add slots | give them back (`free`, here and there) | own rows go on to scratch or C
//! ```
//! A slot has the sums of one team in fragment order: what a thread stores, the thread of the same place reads.
//! `sums` completes once a segment. `free` lets the senders of the next segment go on, of both CTAs; after the last
//! one nobody arrives, for the other CTA may have ended. Neither CTA ends while the other may still store to it:
//! every segment's bytes are waited for.
//! The order of additions is fixed: teams first, then CTAs, of which there are two, and a + b is b + a.
//! Source: PTX ISA, "st.async", "mapa", "mbarrier.arrive", "barrier.cluster".

use super::Wg;
use super::output::num_items;
use crate::asm::Asm;
use crate::asm::reg::{Label, Reg};
use crate::asm::types::{B32, Cmp, F32, Pred, Special};
use crate::kernel::epilogue::Accumulators;
use crate::kernel::problem::Config;
use crate::kernel::stripe::{Segment, Stripe};

/// What a CTA of a cluster knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    /// Its place in the cluster.
    pub(super) rank: Reg<B32>,
    /// Parity of the phase of `sums` that the current segment completes.
    parity: Reg<B32>,
}

impl Member {
    pub(super) fn new(a: &mut Asm) -> Self {
        let [rank, parity] = a.regs();
        a.mov_u32_special(rank, Special::ClusterCtarank);
        a.mov_b32(parity, 0);
        Self { rank, parity }
    }
}

/// Bytes of a team's sums of one CTA's rows.
fn slot_bytes(config: &Config) -> u32 {
    num_items(config) * 16 * 32 * config.warps_n
}

impl Wg<'_> {
    /// Bytes that the other CTA stores in a segment.
    fn remote_bytes(&self) -> u32 {
        self.config.warps_k * slot_bytes(self.config)
    }

    /// Makes the barriers of the hand-over, in one thread: who announces the bytes arrives at `sums`, and so does
    /// each warp that stores here; each warp that reads arrives at `free` of all CTAs that store to it.
    pub(super) fn emit_handover_barriers(&self, a: &mut Asm) {
        let config = self.config;
        let (sums, free) = self.handover();
        a.mbarrier_init_shared_b64(sums, 1 + (config.warps_k - 1) * config.warps_n);
        let readers = if config.warps_k > 1 { 2 } else { 1 };
        a.mbarrier_init_shared_b64(free, readers * config.warps_n);
        a.mbarrier_arrive_expect_tx_shared_cta_b64(sums, self.remote_bytes());
    }

    /// The barriers `sums` and `free`.
    fn handover(&self) -> (crate::asm::reg::SharedAddr, crate::asm::reg::SharedAddr) {
        let region = self.plan.handover;
        (self.smem.at(region.start), self.smem.at(region.start + 8))
    }

    /// Hands the other CTA's rows over and adds up the own ones, in the first team; others go on to `done`.
    /// Gives the thread's place in its team, and the sums of the own rows.
    pub(super) fn emit_handover(
        &self,
        a: &mut Asm,
        member: &Member,
        sums: &Accumulators,
        (stripe, segment): (&Stripe, &Segment),
        in_team: Reg<B32>,
        done: Label,
    ) -> Accumulators {
        let config = self.config;
        let team_threads = 32 * config.warps_n;
        let region = self.plan.exchange;
        let (sums_bar, free_bar) = self.handover();
        let [team, base, other, there, bars_there, to, parity] = a.regs();
        if config.warps_k > 1 {
            a.shr_u32(team, self.tid, team_threads.ilog2());
            a.and_b32(in_team, self.tid, team_threads - 1);
        } else {
            a.mov_b32(team, 0);
            a.mov_b32(in_team, self.tid);
        }
        a.mad_lo_u32(base, in_team, 16, self.smem);
        a.xor_b32(other, member.rank, 1);
        a.mapa_shared_cluster_u32(there, base, other);
        a.mapa_shared_cluster_u32(bars_there, self.smem, other);
        a.mad_lo_u32(to, team, slot_bytes(config), there);
        a.mov_b32(parity, member.parity);
        a.xor_b32(member.parity, parity, 1);
        let own = sums[0].len() / 2;

        a.section("send", |a| {
            // What came in the segment before has been read, here and there; a fresh barrier says so too.
            self.emit_wait(a, free_bar, member.parity);
            let (sums_there, _) = self.handover();
            let sums_there = bars_there.at(sums_there.offset as u32);
            let send = |a: &mut Asm, first: usize| {
                let items = sums.iter().flat_map(|sums| &sums[first..first + own]);
                for (n, item) in items.enumerate() {
                    let place = to.at(region.start + n as u32 * 16 * team_threads).within(region);
                    a.st_async_shared_cluster_v4_f32(place, *item, sums_there);
                }
            };
            let [low, sent] = ["low", "sent"].map(|name| a.label(name));
            let is_low = a.test_u32(Cmp::Eq, member.rank, 0);
            a.when(is_low, |a| a.bra(low));
            send(a, 0);
            for sums in sums {
                let (to, from) = sums.split_at(own);
                for (to, from) in to.iter().flatten().zip(from.iter().flatten()) {
                    a.mov_f32(*to, *from);
                }
            }
            a.bra(sent);
            a.bind(low);
            send(a, own);
            a.bind(sent);
        });
        let sums: Accumulators = sums.iter().map(|sums| sums[..own].to_vec()).collect();
        let slot = |slot: u32, item: usize| {
            region.start + slot * slot_bytes(config) + item as u32 * 16 * team_threads
        };
        if config.warps_k > 1 {
            a.section("sums of the other teams", |a| {
                let adds = a.label("adds");
                let is_first = a.test_u32(Cmp::Eq, team, 0);
                a.when(is_first, |a| a.bra(adds));
                let own = a.reg();
                a.mad_lo_u32(own, team, slot_bytes(config), base);
                for (n, item) in sums.iter().flatten().enumerate() {
                    let place = own.at(slot(config.warps_k - 1, n)).within(region);
                    a.st_shared_v4_f32(place, *item);
                }
                a.bar_warp_sync(0xffff_ffffu32);
                a.when(self.elected, |a| a.mbarrier_arrive_shared_cta_b64(sums_bar));
                a.bra(done);
                a.bind(adds);
            });
        }
        a.section("receive", |a| {
            self.emit_wait(a, sums_bar, parity);
            for (n, item) in sums.iter().flatten().enumerate() {
                let load = |a: &mut Asm, from: u32| {
                    let part: [Reg<F32>; 4] = a.regs();
                    a.ld_shared_v4_f32(part, base.at(slot(from, n)).within(region));
                    part
                };
                let add = |a: &mut Asm, to: &[Reg<F32>; 4], part: [Reg<F32>; 4]| {
                    to.iter().zip(part).for_each(|(to, part)| a.add_f32(*to, *to, part));
                };
                let theirs = load(a, 0);
                for team in 1..config.warps_k {
                    let ours = load(a, config.warps_k + team - 1);
                    add(a, item, ours);
                    let part = load(a, team);
                    add(a, &theirs, part);
                }
                add(a, item, theirs);
            }
        });
        a.section("give back", |a| self.emit_give_back(a, stripe, segment, bars_there));
        sums
    }

    /// Lets both CTAs store the next segment's sums here, if there is one.
    fn emit_give_back(
        &self,
        a: &mut Asm,
        stripe: &Stripe,
        segment: &Segment,
        bars_there: Reg<B32>,
    ) {
        let (sums_bar, free_bar) = self.handover();
        let releases = stripe.emit_has_next(a, segment);
        a.and_pred(releases, releases, self.elected);
        let announces: Reg<Pred> = a.test_u32(Cmp::Eq, self.warp, 0);
        a.and_pred(announces, announces, releases);
        let bytes = self.remote_bytes();
        a.when(announces, |a| a.mbarrier_arrive_expect_tx_shared_cta_b64(sums_bar, bytes));
        a.bar_warp_sync(0xffff_ffffu32);
        a.when(releases, |a| {
            if self.config.warps_k > 1 {
                a.mbarrier_arrive_shared_cta_b64(free_bar);
            }
            let free_there = bars_there.at(free_bar.offset as u32);
            a.mbarrier_arrive_shared_cluster_b64(free_there);
        });
    }
}
