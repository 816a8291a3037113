#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    makaira_fuzz::group_indices(input);
});
