//! Laws: any small product is right, names parse back, divisions are exact.

use makaira::kernel::params::magic;
use makaira::kernel::{
    Config, Conversion, FAMILIES, Kind, Problem, Reduction, Rows, Start, select,
};
use makaira::target::SmArch;
use makaira::weights::Group;
use proptest::prelude::*;

use crate::support::{
    Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
};

fn group_and_k() -> impl Strategy<Value = (i64, usize)> {
    prop_oneof![
        (1usize..600).prop_map(|k| (-1, k)),
        (prop::sample::select(vec![32i64, 64, 128]), 1usize..19)
            .prop_map(|(group, groups)| (group, (group as usize * groups).min(600 / 128 * 128))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Any product is right, whatever its size and however its rows lie.
    #[test]
    fn any_small_product(
        m in 1usize..=80,
        n in 1usize..=200,
        (group, k) in group_and_k(),
        (a_gap, c_gap) in (0usize..20, 0usize..20),
        (a_shift, c_shift) in prop_oneof![Just((0, 0)), (0usize..9, 0usize..9)],
        vectors in any::<bool>(),
        seed in any::<u64>(),
        exact in any::<bool>(),
    ) {
        // Half of the cases can be read by vectors if N and K can.
        let round = |gap: usize, len: usize| (gap + len).next_multiple_of(8) - len;
        let spread = if vectors {
            let (a_gap, c_gap) = (round(a_gap, k), round(c_gap, n));
            Spread { a_gap, c_gap, a_shift: 0, c_shift: 0 }
        } else {
            Spread { a_gap, c_gap, a_shift, c_shift }
        };
        let mut random = Random(seed);
        let fill = if exact { Fill::Integers } else { Fill::Random };
        let layer = Layer::new(n, k, group, fill, &mut random);
        let a = activations(m, k, fill, &mut random);
        let setup = Setup::new(&Device::hopper_seeded(seed), layer);
        let c = setup.run(&a, spread).map_err(|error| TestCaseError::fail(chain(&error)))?;
        let tolerance = match fill {
            Fill::Integers => Tolerance::Exact,
            _ => Tolerance::Bound { fragments: true, hops: 0 },
        };
        compare(&setup.layer, &a, &c, tolerance).map_err(TestCaseError::fail)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The quotient that the kernel computes: the high word of a 32-bit product, shifted.
    #[test]
    fn division_by_magic_is_exact(
        d in prop_oneof![1u32..300, 1u32..=u32::MAX / 2, (0u32..31).prop_map(|e| 1 << e)],
        x in 0u32..1 << 31,
        near in -2i64..=2,
    ) {
        let (multiplier, shift) = magic(d);
        // Quotients change at multiples of d.
        let edge = i64::from(x / d * d) + near;
        for x in [Some(x), u32::try_from(edge).ok().filter(|x| *x < 1 << 31)].into_iter().flatten() {
            let high = (u64::from(2 * x) * u64::from(multiplier)) >> 32;
            prop_assert_eq!((high as u32) >> shift, x / d, "{} / {}", x, d);
        }
    }
}

fn configs() -> impl Strategy<Value = Config> {
    let one_of = |values: &'static [u32]| prop::sample::select(values);
    (
        (one_of(&[1, 2, 4, 8, 16, 32, 48, 64]), one_of(&[2, 4]), one_of(&[1, 2, 4, 8])),
        (one_of(&[1, 2, 4, 8, 16]), 1u32..20, 1u32..5),
        prop::sample::select(vec![
            Group::PerColumn,
            Group::Size(32),
            Group::Size(64),
            Group::Size(128),
        ]),
        (any::<bool>(), any::<bool>(), any::<bool>(), 0usize..3),
        (0..FAMILIES.len(), any::<bool>(), any::<bool>(), 1u32..3),
    )
        .prop_map(|(tile, pipeline, group, numerics, stream)| {
            let (fragment, in_place, evict_first, rows) = numerics;
            let (family, ramped, subnormal, cluster_k) = stream;
            let (tile_m, tiles_per_warp, warps_n) = tile;
            let (warps_k, stages, ctas_per_sm) = pipeline;
            let known = "marlin_sm80_u4b8_f16_m16n64k1024_g128_w1_s3_c2_fs";
            let known: Config = known.parse().expect("a configuration's name");
            let promote =
                "marlin_sm80_u4b8_f16_m16n64k1024_g128_w1_s3_c2".parse::<Config>().expect("a name");
            Config {
                family: FAMILIES[family].name(),
                group,
                tile_m,
                tile_n: 16 * tiles_per_warp * warps_n,
                warps_n,
                warps_k,
                stages,
                ctas_per_sm,
                cluster_k,
                start: if ramped { Start::Ramped } else { Start::Full },
                conversion: if subnormal { Conversion::Subnormal } else { Conversion::Value },
                scaling: if fragment { known.scaling } else { promote.scaling },
                reduction: if in_place { Reduction::F16InPlace } else { Reduction::F32 },
                rows: [Rows::Whole, Rows::Vector, Rows::Element][rows],
                evict_first,
                ..known
            }
        })
}

proptest! {
    #[test]
    fn names_parse_back(config in configs()) {
        prop_assert_eq!(config.to_string().parse::<Config>(), Ok(config));
    }

    /// What is not a name is refused, not repaired: cut, doubled or altered names.
    #[test]
    fn altered_names_are_refused(config in configs(), at in 0usize..60, with in "[a-z0-9_]") {
        let name = config.to_string();
        let at = at % name.len();
        let altered = format!("{}{with}{}", &name[..at], &name[at + 1..]);
        if let Ok(other) = altered.parse::<Config>() {
            prop_assert_eq!(other.to_string(), altered);
        }
        let longer = name.clone() + "_";
        prop_assert!(longer.parse::<Config>().is_err());
        prop_assert!(name[..at].parse::<Config>().map_or(true, |c| c.to_string() == name[..at]));
    }

    /// The selection is a function, legal, and the best of its own ranking.
    #[test]
    fn choices_are_legal_and_cheapest(
        m in prop_oneof![1u64..100, 1u64..1 << 20],
        n in 1u32..20_000,
        groups in 1u32..80,
        raw in prop::sample::select(vec![-1i64, 32, 64, 128]),
        sm in prop::sample::select(vec![80u16, 86, 89, 90, 100, 120]),
        sms in 1u32..200,
    ) {
        let k = groups * if raw < 0 { 40 } else { raw as u32 };
        let group = Group::new(k as usize, raw).expect("whole groups");
        let arch = SmArch::baseline(sm);
        let device = makaira::target::DeviceSpec {
            name: "any".into(),
            arch,
            isa: makaira::target::PtxIsa::new(8, 0),
            num_sms: sms,
            l2_bytes: 40 << 20,
            smem_per_cta_bytes: arch.spec().expect("in the table").smem_per_cta_bytes,
        };
        let problem = Problem { kind: Kind::U4B8, m, n, k, group, rows: Rows::Whole };
        let choice = select::choose(&problem, &device).expect("every size has a kernel");
        select::check(&choice.config, arch).expect("what is chosen is legal");
        prop_assert_eq!(select::choose(&problem, &device).expect("again"), choice);
        prop_assert!(choice.cost.total_us.is_finite() && choice.cost.total_us > 0.0);
        let num_tiles = select::num_tiles(&choice.config, &problem, select::step(m));
        let num_runs = num_tiles * u64::from(k.div_ceil(128));
        let step = select::family_of(&choice.config).stripe_step(&choice.config);
        prop_assert!((1..=num_runs).contains(&choice.stripe.into()));
        prop_assert!(choice.stripe.is_multiple_of(step));
    }
}
