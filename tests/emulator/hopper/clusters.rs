//! The rules of clusters, of grids that begin early, of registers that are given away, one by one.

use makaira::asm::reg::{Reg, SharedAddr};
use makaira::asm::types::{B16, B32, B64, Cmp, F32, Special};
use makaira::asm::{Asm, Module};
use makaira::backend::{Backend, Launch, Stream};
use makaira::emu::FaultKind;

use super::{
    Device, Prelude, elect, elect_in, emulator, expect, fault_of, launch, map, module, pointer,
    wait,
};

/// What a program of a pair of CTAs has at hand: both run, each has a ready barrier, a buffer of 1024 bytes.
struct Hands {
    p: Prelude,
    rank: Reg<B32>,
    /// The base of the other CTA's shared memory.
    there: Reg<B32>,
    bar: u32,
    buffer: u32,
    one: Reg<makaira::asm::types::Pred>,
}

/// `meet` stands between the initialisation of the barriers and `emit`.
fn pair_that(meet: fn(&mut Asm), emit: impl FnOnce(&mut Asm, Hands)) -> Module {
    module(32, 2, |asm, p| {
        let buffer = asm.smem.region("buffer", 1024, 1024).start;
        let bar = asm.smem.region("barrier", 16, 16).start;
        let (rank, other, there) = (asm.reg(), asm.reg(), asm.reg());
        asm.mov_u32_special(rank, Special::ClusterCtarank);
        asm.xor_b32(other, rank, 1);
        asm.mapa_shared_cluster_u32(there, p.smem, other);
        let one = elect(asm);
        asm.when(one, |asm| {
            asm.mbarrier_init_shared_b64(p.smem.at(bar), 1);
            asm.fence_mbarrier_init_release_cluster();
        });
        meet(asm);
        emit(asm, Hands { p, rank, there, bar, buffer, one });
    })
}

fn meet(asm: &mut Asm) {
    asm.barrier_cluster_arrive_relaxed_aligned();
    asm.barrier_cluster_wait_acquire_aligned();
}

fn meet_fully(asm: &mut Asm) {
    asm.barrier_cluster_arrive_release_aligned();
    asm.barrier_cluster_wait_acquire_aligned();
}

const WORDS: [u32; 512] = [3; 512];

fn clean(what: &str, module: &Module) {
    expect(what, &[], module, &WORDS);
}

fn fault(what: &str, kind: FaultKind, module: &Module) -> String {
    expect(what, &[kind], module, &WORDS)
}

/// Each CTA sends 512 bytes to the other and waits for what comes.
fn send(asm: &mut Asm, h: &Hands) {
    let to: Reg<B32> = asm.reg();
    asm.mad_lo_u32(to, h.p.lane, 16, h.there);
    let values = asm.regs::<F32, 4>();
    values.iter().for_each(|value| asm.mov_f32(*value, 1.5));
    asm.st_async_shared_cluster_v4_f32(to.at(h.buffer), values, h.there.at(h.bar));
}

fn receive(asm: &mut Asm, h: &Hands) {
    asm.when(h.one, |asm| {
        asm.mbarrier_arrive_expect_tx_shared_cta_b64(h.p.smem.at(h.bar), 512);
    });
    wait(asm, h.p.smem.at(h.bar), 0);
}

fn mine(asm: &mut Asm, h: &Hands) -> SharedAddr {
    let mine: Reg<B32> = asm.reg();
    asm.mad_lo_u32(mine, h.p.lane, 16, h.p.smem);
    mine.at(h.buffer)
}

#[test]
fn a_peer_runs_before_its_memory_is_used() {
    let exchange = |asm: &mut Asm, h: Hands| {
        send(asm, &h);
        receive(asm, &h);
        let (mine, value) = (mine(asm, &h), asm.reg());
        asm.ld_shared_f32(value, mine);
    };
    clean("met", &pair_that(meet, exchange));
    fault("not met", FaultKind::PeerNotRunning, &pair_that(|_| {}, exchange));
    let arrived: fn(&mut Asm) = |asm| asm.barrier_cluster_arrive_relaxed_aligned();
    fault("not waited", FaultKind::PeerNotRunning, &pair_that(arrived, exchange));
    let peek = |asm: &mut Asm, h: Hands| {
        let value = asm.reg();
        asm.ld_shared_b32(value, h.there.at(h.buffer));
    };
    fault("an ordinary load", FaultKind::OutOfBounds, &pair_that(meet, peek));
    let beyond = |asm: &mut Asm, h: Hands| {
        let there = asm.reg();
        asm.mapa_shared_cluster_u32(there, h.p.smem, 2);
    };
    fault("no such rank", FaultKind::BadOperand, &pair_that(meet, beyond));
}

/// Bytes that come are read after the phase that counts them.
#[test]
fn what_a_peer_sends_is_waited_for() {
    let unwaited = |asm: &mut Asm, h: Hands| {
        send(asm, &h);
        meet_fully(asm);
        let (mine, value) = (mine(asm, &h), asm.reg());
        asm.ld_shared_f32(value, mine);
        receive(asm, &h);
    };
    fault("read before", FaultKind::MissingWait, &pair_that(meet, unwaited));
    let in_use = |release: bool| {
        move |asm: &mut Asm, h: Hands| {
            let (mine, value) = (mine(asm, &h), asm.reg());
            asm.mov_f32(value, 2.0);
            asm.st_shared_f32(mine, value);
            asm.ld_shared_f32(value, mine);
            asm.bar_warp_sync(-1);
            if release {
                meet_fully(asm)
            } else {
                meet(asm)
            }
            send(asm, &h);
            receive(asm, &h);
        }
    };
    clean("sent where all use is over", &pair_that(meet, in_use(true)));
    fault("a relaxed arrival tells nothing", FaultKind::Race, &pair_that(meet, in_use(false)));
}

#[test]
fn a_cta_stays_while_others_may_visit() {
    let leave = |asm: &mut Asm, h: Hands| send(asm, &h);
    let report = fault("bytes under way", FaultKind::EarlyExit, &pair_that(meet, leave));
    assert!(report.contains("st.async") || report.contains("has ended"), "{report}");
    let visit = |stays: bool| {
        move |asm: &mut Asm, h: Hands| {
            let is_low = asm.test_u32(Cmp::Eq, h.rank, 0);
            let visits = asm.reg();
            asm.and_pred(visits, h.one, is_low);
            asm.when(visits, |asm| asm.mbarrier_arrive_shared_cluster_b64(h.there.at(h.bar)));
            if stays {
                meet_fully(asm);
            }
        }
    };
    clean("it stays", &pair_that(meet, visit(true)));
    fault("it leaves", FaultKind::EarlyExit, &pair_that(meet, visit(false)));
    let waits = |asm: &mut Asm, h: Hands| {
        asm.when(h.one, |asm| asm.mbarrier_arrive_shared_cluster_b64(h.there.at(h.bar)));
        wait(asm, h.p.smem.at(h.bar), 0);
    };
    clean("it waits for the visit", &pair_that(meet, waits));
}

#[test]
fn the_clusters_barrier_is_used_in_turn() {
    let misuse = FaultKind::BarrierMisuse;
    fault(
        "no arrival",
        misuse,
        &pair_that(meet, |asm, _| {
            asm.barrier_cluster_wait_acquire_aligned();
        }),
    );
    fault(
        "two arrivals",
        misuse,
        &pair_that(meet, |asm, _| {
            asm.barrier_cluster_arrive_release_aligned();
            asm.barrier_cluster_arrive_release_aligned();
        }),
    );
    let alone = |asm: &mut Asm, h: Hands| {
        let (high, end) = (asm.test_u32(Cmp::Eq, h.rank, 1), asm.label("end"));
        asm.when(high, |asm| asm.bra_uni(end));
        meet_fully(asm);
        asm.bind(end);
    };
    // Threads that have ended are not waited for.
    clean("the other one has ended", &pair_that(meet, alone));
}

/// An arrival at another CTA's barrier without cluster scope tells that reads are over, and no more.
#[test]
fn plain_remote_arrivals_release_reads() {
    let program = |writes: bool| {
        pair_that(meet, move |asm, h| {
            let (tensor, zero) = (map(asm, "map"), asm.reg());
            asm.mov_b32(zero, 0);
            let (full, empty) = (h.p.smem.at(h.bar), h.there.at(h.bar + 8));
            let (word, both) = (asm.reg::<B32>(), asm.regs::<B16, 2>());
            asm.mov_b32(word, 3);
            asm.mov_b32_unpack(both, word);
            let is_low = asm.test_u32(Cmp::Eq, h.rank, 0);
            let sends = asm.reg();
            asm.and_pred(sends, h.one, is_low);
            let copy = |asm: &mut Asm, parity: u32| {
                asm.when(h.one, |asm| asm.mbarrier_arrive_expect_tx_shared_cta_b64(full, 1024));
                asm.when(sends, |asm| {
                    let to = h.p.smem.at(h.buffer);
                    asm.cp_async_bulk_tensor_2d_shared_global_multicast(
                        to, tensor, zero, zero, full, both[0],
                    );
                });
                wait(asm, full, parity);
            };
            copy(asm, 0);
            let (mine, word) = (mine(asm, &h), asm.reg());
            asm.ld_shared_b32(word, mine);
            if writes {
                asm.st_shared_b32(mine, word);
                asm.fence_proxy_async_shared_cta();
            }
            // Nobody arrives for the sender's own reads.
            asm.when(is_low, |asm| asm.fence_proxy_async_shared_cta());
            asm.bar_warp_sync(-1);
            asm.when(h.one, |asm| asm.mbarrier_arrive_shared_cluster_b64(empty));
            wait(asm, h.p.smem.at(h.bar + 8), 0);
            copy(asm, 1);
        })
    };
    let ready = |writes: bool| {
        let mut module = program(writes);
        // A second barrier, for the arrivals of the other CTA.
        let init = module.entry.items.iter().position(|item| match item {
            makaira::asm::builder::Item::Inst(node) => {
                node.inst.to_string().starts_with("mbarrier.init")
            }
            _ => false,
        });
        let init = init.expect("one barrier is initialised");
        let makaira::asm::builder::Item::Inst(mut second) = module.entry.items[init] else {
            panic!("an instruction was found")
        };
        use makaira::asm::isa::{Inst, mbarrier::Mbarrier};
        if let Inst::Mbarrier(Mbarrier::MbarrierInit(i)) = &mut second.inst {
            i.a = i.a + 8;
        }
        module.entry.items.insert(init, makaira::asm::builder::Item::Inst(second));
        module
    };
    clean("only read", &ready(false));
    fault("written", FaultKind::Race, &ready(true));
}

#[test]
fn destinations_are_those_of_the_cluster() {
    let program = |mask: u32, far_barrier: bool| {
        pair_that(meet, move |asm, h| {
            let (tensor, zero) = (map(asm, "map"), asm.reg());
            asm.mov_b32(zero, 0);
            let (word, halves) = (asm.reg::<B32>(), asm.regs::<B16, 2>());
            asm.mov_b32(word, mask);
            asm.mov_b32_unpack(halves, word);
            asm.when(h.one, |asm| {
                let bar = h.p.smem.at(h.bar);
                asm.mbarrier_arrive_expect_tx_shared_cta_b64(bar, 1024);
                let to = h.p.smem.at(h.buffer);
                let bar = if far_barrier { h.there.at(h.bar) } else { bar };
                match mask {
                    0xff => asm.cp_async_bulk_tensor_2d_shared_global(to, tensor, zero, zero, bar),
                    _ => asm.cp_async_bulk_tensor_2d_shared_global_multicast(
                        to, tensor, zero, zero, bar, halves[0],
                    ),
                }
            });
            wait(asm, h.p.smem.at(h.bar), 0);
        })
    };
    fault("no CTA", FaultKind::BadOperand, &program(0, false));
    fault("a third CTA", FaultKind::BadOperand, &program(7, false));
    fault("another CTA's barrier", FaultKind::BadOperand, &program(0xff, true));
}

#[test]
fn a_grid_consists_of_whole_clusters() {
    let program = pair_that(meet, |_, _| {});
    let backend = emulator(None);
    let kernel = backend.load(&program).expect("it is sound");
    let refused = backend.launch(kernel.as_ref(), &Launch::new([3, 1], &[], Stream::default()));
    let refused = refused.expect_err("three CTAs are no pairs");
    assert!(fault_of(&refused).is_none());
    let text = refused.source.to_string();
    assert_eq!(text, "test launched with 3 CTAs in x; its clusters have 2: use a multiple");
}

/// A grid that begins early: what it may do before the wait for the grids before it.
#[test]
fn grids_wait_for_those_before_them() {
    #[derive(Clone, Copy, PartialEq)]
    enum Deed {
        ReadUploaded,
        ReadWritten,
        Write,
        Copy,
        Nothing,
    }
    // The first thread of the warp waits, or nobody.
    let program = |deed: Deed, waits: bool| {
        module(32, 1, |asm, p| {
            let buffer = asm.smem.region("buffer", 64, 128).start;
            let bar = asm.smem.region("barrier", 16, 16).start;
            let (uploaded, written) = (pointer(asm, "uploaded"), pointer(asm, "written"));
            let one = elect_in(asm, p, 0);
            asm.when(one, |asm| {
                asm.mbarrier_init_shared_b64(p.smem.at(bar), 1);
                asm.fence_mbarrier_init_release_cluster();
            });
            asm.bar_warp_sync(-1);
            if waits {
                asm.when(one, |asm| asm.griddepcontrol_wait());
                asm.bar_warp_sync(-1);
            }
            let word = asm.reg();
            match deed {
                Deed::ReadUploaded => asm.ld_global_b32(word, uploaded),
                Deed::ReadWritten => asm.ld_global_b32(word, written),
                Deed::Write => {
                    let place = asm.reg::<B64>();
                    asm.mad_wide_u32(place, p.lane, 4, uploaded);
                    asm.st_global_b32(place, 3);
                }
                Deed::Copy => {
                    asm.when(one, |asm| {
                        asm.mbarrier_arrive_expect_tx_shared_cta_b64(p.smem.at(bar), 64);
                        let to = p.smem.at(buffer);
                        asm.cp_async_bulk_shared_global(to, written, 64, p.smem.at(bar));
                    });
                    wait(asm, p.smem.at(bar), 0);
                }
                Deed::Nothing => {}
            }
            asm.griddepcontrol_launch_dependents();
            if deed != Deed::Nothing {
                asm.griddepcontrol_wait();
            }
        })
    };
    let early = Some(FaultKind::EarlyAccess);
    for (deed, waits, wanted) in [
        (Deed::ReadUploaded, false, None),
        (Deed::ReadWritten, false, early),
        (Deed::ReadWritten, true, None),
        (Deed::Copy, false, early),
        (Deed::Copy, true, None),
        (Deed::Write, false, early),
        (Deed::Write, true, None),
        (Deed::Nothing, false, Some(FaultKind::EarlyExit)),
        (Deed::Nothing, true, None),
    ] {
        for overlap in [true, false] {
            for synchronised in [false, true] {
                let backend = emulator(None);
                let device = Device { backend: &backend };
                let (uploaded, written) = (device.upload(&WORDS), device.upload(&WORDS));
                super::rewrite(&backend, written, 512);
                if synchronised {
                    backend.synchronize(Stream::default()).expect("it ran");
                }
                let kernel = backend.load(&program(deed, waits)).expect("it is sound");
                let args = [uploaded.into(), written.into()];
                let launch = Launch {
                    overlap_previous: overlap,
                    ..Launch::new([1, 1], &args, Stream::default())
                };
                let found = backend.launch(kernel.as_ref(), &launch).err();
                let found = found.and_then(|error| fault_of(&error)).map(|fault| fault.kind);
                let reads = matches!(deed, Deed::ReadWritten | Deed::Copy);
                let wanted = match (overlap, synchronised && reads) {
                    (true, false) => wanted,
                    _ => None,
                };
                assert_eq!(found, wanted, "{waits} {overlap} {synchronised} {}", deed as u32);
            }
        }
    }
}

/// What a launch wrote counts as written until the host has waited, over any number of early launches.
#[test]
fn early_launches_add_up() {
    let reader = module(32, 1, |asm, _| {
        let (input, word) = (pointer(asm, "input"), asm.reg());
        asm.ld_global_b32(word, input);
        asm.griddepcontrol_wait();
    });
    let idle = module(32, 1, |asm, _| asm.griddepcontrol_wait());
    for (between, wanted) in [(true, Some(FaultKind::EarlyAccess)), (false, None)] {
        let backend = emulator(None);
        let written = Device { backend: &backend }.upload(&WORDS);
        super::rewrite(&backend, written, 512);
        let launch = |module: &Module, args: &[makaira::backend::Arg], early: bool| {
            let kernel = backend.load(module).expect("it is sound");
            let launch =
                Launch { overlap_previous: early, ..Launch::new([1, 1], args, Stream::default()) };
            let found = backend.launch(kernel.as_ref(), &launch).err();
            found.and_then(|error| fault_of(&error)).map(|fault| fault.kind)
        };
        // A launch in plain order begins when all before it have ended.
        assert_eq!(launch(&idle, &[], between), None);
        assert_eq!(launch(&reader, &[written.into()], true), wanted);
    }
}

/// The pool is what the threads enter with: 640 of them with 96 registers each.
#[test]
fn registers_come_from_what_was_given_back() {
    let program = |more: u32, fewer: u32, gives: bool| {
        module(640, 1, |asm, p| {
            let (give, end) = (asm.label("give"), asm.label("end"));
            let gives_back = asm.test_u32(Cmp::Ge, p.warp, 16);
            asm.when(gives_back, |asm| asm.bra_uni(give));
            asm.setmaxnreg_inc_sync_aligned_u32(more);
            asm.bra_uni(end);
            asm.bind(give);
            if gives {
                asm.setmaxnreg_dec_sync_aligned_u32(fewer);
            }
            asm.bind(end);
        })
    };
    assert_eq!(program(112, 32, true).entry_regs(), 96);
    clean("4 x 128 x 16 of 128 x 64", &program(112, 32, true));
    let report = fault("24 more each", FaultKind::BarrierDeadlock, &program(120, 24, true));
    assert!(report.contains("640 threads enter with 96 each, 61440 in all"), "{report}");
    fault("nothing given back", FaultKind::BarrierDeadlock, &program(112, 32, false));
    fault("more by `dec`", FaultKind::RegisterPool, &program(112, 128, true));
    fault("fewer by `inc`", FaultKind::RegisterPool, &program(64, 32, true));
    let one_warp = module(128, 1, |asm, p| {
        let (other, end) = (asm.test_u32(Cmp::Ne, p.warp, 1), asm.label("end"));
        asm.when(other, |asm| asm.bra_uni(end));
        asm.setmaxnreg_dec_sync_aligned_u32(64);
        asm.bind(end);
    });
    fault("one warp alone", FaultKind::WarpgroupMismatch, &one_warp);
}

/// One lane is elected, the same one every time, and not always the first.
#[test]
fn one_lane_is_elected() {
    let program = module(64, 1, |asm, p| {
        let out = pointer(asm, "out");
        let [first, second] = [elect(asm), elect(asm)];
        let (place, word) = (asm.reg::<B64>(), asm.reg());
        asm.mad_wide_u32(place, p.tid, 4, out);
        asm.selp_b32(word, 1, 0, first);
        asm.when(second, |asm| asm.add_u32(word, word, 2));
        asm.st_global_b32(place, word);
    });
    let mut elected = Vec::new();
    for seed in (1..8).map(Some).chain([None]) {
        let backend = emulator(seed);
        let device = Device { backend: &backend };
        let out = device.upload(&[0u32; 64]);
        assert_eq!(launch(&backend, &program, [1, 1], &[out.into()]), None);
        let words: Vec<u32> = device.download(out, 64);
        let lane = words.iter().position(|word| *word == 3).expect("one is elected");
        let wanted: Vec<u32> =
            (0..64).map(|thread| if thread % 32 == lane { 3 } else { 0 }).collect();
        assert_eq!(words, wanted);
        elected.push(lane);
    }
    assert_eq!(elected.pop(), Some(0));
    assert!(elected.iter().any(|lane| *lane != 0));
}
