//! Whole small programs: what they compute.

use makaira::asm::types::{B32, Cmp};
use makaira::backend::{Arg, Backend, Launch, Stream};
use makaira::emu::EmuBackend;
use makaira::target::SmArch;
use proptest::prelude::*;

use super::support::{Run, element, module, pointer, slot, sum};

/// Lanes take turns of different lengths in a loop and meet again.
#[test]
fn divergent_loops_reconverge() {
    let collatz = module(64, 0, |asm, p| {
        let out = pointer(asm, "out");
        let [value, count, odd] = asm.regs::<B32, 3>();
        asm.add_u32(value, p.tid, 1);
        asm.mov_b32(count, 0);
        let (head, even, done) = (asm.label("head"), asm.label("even"), asm.label("done"));
        asm.bind(head);
        let one = asm.test_u32(Cmp::Eq, value, 1);
        asm.when(one, |asm| asm.bra(done));
        asm.and_b32(odd, value, 1);
        asm.add_u32(count, count, 1);
        let is_even = asm.test_u32(Cmp::Eq, odd, 0);
        asm.when(is_even, |asm| asm.bra(even));
        asm.mad_lo_u32(value, value, 3, 1);
        asm.bra(head);
        asm.bind(even);
        asm.shr_u32(value, value, 1);
        asm.bra(head);
        asm.bind(done);
        // Aligned: faults unless the lanes have met.
        let (copy, lane) = (asm.reg(), sum(asm, p.tid, 1));
        asm.shfl_sync_idx_b32(copy, count, lane);
        let place = element(asm, out, p.tid, 8);
        asm.st_global_v2_b32(place, [count, copy]);
    });
    let mut run = Run::new().undefined(64 * 8);
    run.clean(&collatz, [1, 1]);
    let steps = |n: u32| {
        let (mut value, mut steps) = (n, 0);
        while value != 1 {
            value = if value % 2 == 0 { value / 2 } else { 3 * value + 1 };
            steps += 1;
        }
        steps
    };
    let expected: Vec<u32> = (0..64)
        .flat_map(|tid| [steps(tid + 1), steps(tid / 32 * 32 + (tid + 1) % 32 + 1)])
        .collect();
    assert_eq!(run.read(0, 128), expected);
}

/// CTAs add up partial sums in turn, each waiting for the flag of the one before it.
#[test]
fn ctas_hand_a_sum_on() {
    let chain = module(64, 256, |asm, p| {
        let (input, total, flag) =
            (pointer(asm, "input"), pointer(asm, "total"), pointer(asm, "flag"));
        let (ctaid, index, value) = (asm.reg(), asm.reg(), asm.reg());
        asm.mov_u32_special(ctaid, makaira::asm::types::Special::CtaidX);
        asm.mad_lo_u32(index, ctaid, 64, p.tid);
        let from = element(asm, input, index, 4);
        asm.ld_global_b32(value, from);
        let first = asm.test_u32(Cmp::Eq, p.tid, 0);
        let (spin, go) = (asm.label("spin"), asm.label("go"));
        asm.unless(first, |asm| asm.bra(go));
        asm.bind(spin);
        let seen = asm.reg();
        asm.ld_acquire_gpu_global_u32(seen, flag);
        let wait = asm.test_u32(Cmp::Ne, seen, ctaid);
        asm.when(wait, |asm| asm.bra(spin));
        asm.bind(go);
        asm.bar_sync(0);
        let place = element(asm, total, p.tid, 4);
        let old = asm.reg();
        asm.ld_global_b32(old, place);
        asm.add_u32(old, old, value);
        asm.st_global_b32(place, old);
        asm.bar_sync(0);
        asm.when(first, |asm| asm.red_release_gpu_global_add_u32(flag, 1));
    });
    let input: Vec<u32> = (0..7 * 64).map(|i| i * i + 3).collect();
    for seed in [None, Some(1), Some(2), Some(3)] {
        let mut run = Run::new().words(&input).words(&[0; 64]).words(&[0]);
        run.options.seed = seed;
        run.clean(&chain, [7, 1]);
        let expected: Vec<u32> =
            (0..64).map(|tid| (0..7).map(|cta| input[cta * 64 + tid]).sum()).collect();
        assert_eq!(run.read(1, 64), expected, "seed {seed:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Copies through shared memory: each thread reads what another one copied.
    #[test]
    fn copies_arrive(words in proptest::collection::vec(1u32.., 512), shift in 0u32..128) {
        let program = module(128, 128 * 16, |asm, p| {
            let (input, out) = (pointer(asm, "input"), pointer(asm, "out"));
            let from = element(asm, input, p.tid, 16);
            let mine = slot(asm, p.smem, p.tid, 16);
            asm.cp_async_cg_16(mine, from);
            asm.cp_async_commit_group();
            asm.cp_async_wait_group(0);
            asm.bar_sync(0);
            let other = sum(asm, p.tid, shift);
            let index = asm.reg();
            asm.and_b32(index, other, 127);
            let theirs = slot(asm, p.smem, index, 16);
            let values = asm.regs::<B32, 4>();
            asm.ld_shared_v4_b32(values, theirs);
            let place = element(asm, out, p.tid, 16);
            asm.st_global_v4_b32(place, values);
        });
        let mut run = Run::new().words(&words).undefined(2048).seed(u64::from(shift));
        run.clean(&program, [1, 1]);
        let mut expected = words.clone();
        expected.rotate_left(4 * shift as usize);
        prop_assert_eq!(run.read(1, 512), expected);
    }
}

/// The same program through the backend's calls; what does not fit is refused.
#[test]
fn the_backend_loads_and_launches() {
    let double = module(32, 4, |asm, p| {
        let (buffer, factor) = (pointer(asm, "buffer"), asm.param_u32("factor"));
        let (scale, value) = (asm.reg(), asm.reg());
        asm.ld_param_u32(scale, factor);
        let place = element(asm, buffer, p.tid, 4);
        asm.ld_global_b32(value, place);
        asm.mul_lo_u32(value, value, scale);
        asm.st_global_b32(place, value);
    });
    let backend = EmuBackend::like_sm80(4);
    let ptr = backend.alloc(128).expect("128 bytes fit");
    let input: Vec<u32> = (5..37).collect();
    backend.upload(ptr, bytemuck::cast_slice(&input)).expect("the range is allocated");
    let kernel = backend.load(&double).expect("an sm_80 module runs on sm_80");
    let args = [ptr.into(), Arg::U32(3)];
    backend
        .launch(&*kernel, &Launch::new([1, 1], &args, Stream::default()))
        .expect("the program has no fault");
    let mut output = vec![0u32; 32];
    backend.download(ptr, bytemuck::cast_slice_mut(&mut output)).expect("the range is allocated");
    assert_eq!(output, input.iter().map(|value| 3 * value).collect::<Vec<_>>());
    let report = backend.last_report().expect("a launch has finished");
    assert_eq!(report.total.lane_instructions, 32 * report.total.warp_instructions);

    let wrong = backend.launch(&*kernel, &Launch::new([1, 1], &[ptr.into()], Stream::default()));
    let wrong = wrong.expect_err("an argument is missing");
    let cause = std::error::Error::source(&wrong).expect("the backend's own error").to_string();
    assert_eq!(
        cause,
        "test takes (buffer: u64, factor: u32), given (u64); pass its parameters in order"
    );
    let empty = backend.launch(&*kernel, &Launch::new([0, 1], &args, Stream::default()));
    assert!(empty.is_err(), "an empty grid is refused");

    let large = module(32, 164 << 10, |_, _| {});
    let refused = backend.load(&large).expect_err("more shared memory than the device has");
    let cause = std::error::Error::source(&refused).expect("the verifier's diagnostics");
    assert!(cause.to_string().contains("shared"), "{cause}");
    let mut undefined = makaira::asm::Asm::new();
    let value = undefined.reg();
    undefined.mov_b32(value, value);
    undefined.exit();
    let undefined = undefined.finish("undefined", SmArch::baseline(80), 32, 1);
    assert!(backend.load(&undefined).is_err(), "the verifier is asked");
    let mut newer = makaira::asm::Asm::new();
    newer.exit();
    let newer = newer.finish("newer", SmArch::baseline(90), 32, 1);
    assert!(backend.load(&newer).is_err(), "a module for a newer target");
    assert!(EmuBackend::h200_like(4).load(&newer).is_ok());
    backend.free(ptr).expect("the allocation is live");
    assert!(backend.free(ptr).is_err(), "freed twice");
}

/// Memory has an end, an allocation has a start, and the message says what is near.
#[test]
fn the_host_is_held_to_the_allocations() {
    let mut memory = makaira::emu::Memory::new(4096);
    let first = memory.alloc(3000).expect("within the limit");
    assert!(memory.alloc(2000).is_err(), "5000 of 4096 bytes");
    memory.upload(first + 2990, &[1; 10]).expect("the last ten bytes");
    let error = memory.upload(first + 2990, &[1; 11]).expect_err("one byte too many").to_string();
    assert!(error.contains("byte 2990 of the 3000 bytes"), "{error}");
    assert!(memory.free(first + 256).is_err(), "not a start");
    memory.free(first).expect("the start of a live allocation");
    let error = memory.download(first, &mut [0]).expect_err("freed").to_string();
    assert!(error.contains("freed"), "{error}");
    let second = memory.alloc(4096).expect("all of it is free again");
    assert!(second >= first + 3000, "addresses are not used again");
    assert_eq!(second % 256, 0);
}
