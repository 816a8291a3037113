//! Which configurations are measured for a problem.
//!
//! By default the ones that the library takes, which may be others with early launch than in plain order. A
//! sweep takes the best-ranked ones, so that prediction and measurement can be compared, or all; a list
//! narrows either.

use std::fmt;

use anyhow::Context as _;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Problem};
use makaira::target::DeviceSpec;

/// What is measured in plain order and what with early launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// In plain order.
    pub plain: Choice,
    /// With early launch.
    pub early: Choice,
}

impl Pair {
    /// One choice for both orders.
    pub fn both(choice: Choice) -> Self {
        Self { plain: choice, early: choice }
    }

    /// What `choose` says for plain order (`false`) and for early launch.
    ///
    /// # Errors
    /// Those of `choose`.
    pub fn of<E>(choose: impl Fn(bool) -> Result<Choice, E>) -> Result<Self, E> {
        Ok(Self { plain: choose(false)?, early: choose(true)? })
    }

    /// Whether both orders have the same.
    pub fn is_one(&self) -> bool {
        (self.plain.config, self.plain.stripe) == (self.early.config, self.early.stripe)
    }

    /// Both.
    pub fn choices(&self) -> [&Choice; 2] {
        [&self.plain, &self.early]
    }
}

/// `NAME:STRIPE`, and the one of early launch if it is another.
impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.plain.config, self.plain.stripe)?;
        if self.is_one() {
            return Ok(());
        }
        write!(f, ", early {}:{}", self.early.config, self.early.stripe)
    }
}

/// How many configurations a sweep takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// The best-ranked ones.
    Best(usize),
    /// Every legal one.
    AllConfigs,
}

impl std::str::FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text, text.parse()) {
            ("all-configs", _) => Ok(Sweep::AllConfigs),
            (_, Ok(count)) if count > 0 => Ok(Sweep::Best(count)),
            _ => Err(format!("`{text}` is neither a positive number nor all-configs")),
        }
    }
}

/// A configuration by name, with a stripe length if one is given: `NAME[:STRIPE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forced {
    /// The kernel.
    pub config: Config,
    /// Runs of 128 inputs per CTA.
    pub stripe: Option<u32>,
}

impl std::str::FromStr for Forced {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, stripe) = match text.split_once(':') {
            Some((name, stripe)) => (name, Some(stripe)),
            None => (text, None),
        };
        let parse = |stripe: &str| match stripe.parse() {
            Ok(stripe) if stripe > 0 => Ok(stripe),
            _ => Err(format!("stripe `{stripe}` is no positive number of runs of 128 inputs")),
        };
        let config =
            name.parse().map_err(|error: <Config as std::str::FromStr>::Err| error.to_string())?;
        Ok(Self { config, stripe: stripe.map(parse).transpose()? })
    }
}

impl Forced {
    /// The choice for a problem; without a stripe length the one with the lowest predicted cost.
    pub fn choice(&self, problem: &Problem, device: &DeviceSpec) -> Choice {
        let Self { config, stripe } = *self;
        let problem = Problem { rows: config.rows, ..*problem };
        let with = |stripe| Choice {
            config,
            stripe,
            cost: select::cost(&config, &problem, device, stripe),
        };
        if let Some(stripe) = stripe {
            return with(stripe);
        }
        let k_tiles = problem.k.div_ceil(128);
        let runs = problem.n.div_ceil(config.tile_n) * k_tiles;
        let row_tiles = problem.m.div_ceil(config.tile_m.into()) as u32;
        let share = (runs * row_tiles).div_ceil(device.num_sms * config.ctas_per_sm);
        let parts = (1..=8).map(|parts| k_tiles.div_ceil(parts)).chain([share.clamp(1, runs)]);
        parts
            .map(with)
            .min_by(|a, b| a.cost.total_us.total_cmp(&b.cost.total_us))
            .expect("there are nine candidates")
    }
}

/// The choices of a sweep for a problem: at most `per_config` stripe lengths of one configuration, and only
/// names (`NAME:STRIPE`) that contain one of the fragments, if there are any.
///
/// # Errors
/// If nothing is left.
pub fn sweep(
    problem: &Problem,
    device: &DeviceSpec,
    sweep: Sweep,
    per_config: usize,
    fragments: &[String],
) -> anyhow::Result<Vec<Choice>> {
    let mut choices: Vec<Choice> = Vec::new();
    for choice in select::ranked(problem, device) {
        let name = format!("{}:{}", choice.config, choice.stripe);
        let wanted = fragments.is_empty() || fragments.iter().any(|part| name.contains(part));
        let known = choices.iter().filter(|known| known.config == choice.config).count();
        if wanted && known < per_config {
            choices.push(choice);
        }
        if matches!(sweep, Sweep::Best(count) if choices.len() == count) {
            break;
        }
    }
    let first = choices.first().copied();
    first.context("no legal configuration is in the list; give fragments of names, one a line")?;
    Ok(choices)
}

#[cfg(test)]
mod tests {
    use makaira::backend::Backend;
    use makaira::emu::EmuBackend;
    use makaira::kernel::Rows;
    use makaira::weights::Group;

    use super::*;
    use makaira::kernel::Kind;

    const PROBLEM: Problem = Problem {
        kind: Kind::U4B8,
        m: 16,
        n: 4096,
        k: 4096,
        group: Group::Size(128),
        rows: Rows::Whole,
    };

    #[test]
    fn a_sweep_is_unique_ranked_and_filtered() {
        let backend = EmuBackend::h200_like(132);
        let of = |kind, per_config, list: &[&str]| {
            let list: Vec<String> = list.iter().map(|text| (*text).to_owned()).collect();
            sweep(&PROBLEM, backend.device(), kind, per_config, &list)
        };
        let best = of(Sweep::Best(12), 1, &[]).expect("there are many");
        assert_eq!(best.len(), 12);
        assert!(best.is_sorted_by(|a, b| a.cost.total_us <= b.cost.total_us));
        for (idx, choice) in best.iter().enumerate() {
            assert!(best[..idx].iter().all(|other| other.config != choice.config));
        }
        let listed = of(Sweep::AllConfigs, 2, &["_w2_s4_c1:", "_w1_s3_c2:32"]).expect("some match");
        assert!(listed.iter().all(|choice| {
            let Config { warps_n, stages, ctas_per_sm, .. } = choice.config;
            matches!((warps_n, stages, ctas_per_sm), (2, 4, 1) | (1, 3, 2))
        }));
        assert!(of(Sweep::Best(3), 1, &["nothing"]).is_err());
    }

    #[test]
    fn a_pair_names_the_second_only_if_it_is_another() {
        let backend = EmuBackend::h200_like(132);
        let ranked = select::ranked(&PROBLEM, backend.device());
        let (first, second) = (ranked[0], ranked[1]);
        let one = Pair::both(first);
        assert_eq!(one.to_string(), format!("{}:{}", first.config, first.stripe));
        let pick = |early| Ok::<_, ()>(if early { second } else { first });
        let two = Pair::of(pick).expect("both are there");
        assert!(one.is_one() && !two.is_one());
        let tail = format!(", early {}:{}", second.config, second.stripe);
        assert_eq!(two.to_string(), format!("{one}{tail}"));
        assert_eq!(Pair::of(|early| if early { Err("none") } else { Ok(first) }), Err("none"));
    }

    #[test]
    fn forced_configurations_parse_with_and_without_stripe() {
        let name = "marlin_sm80_u4b8_f16_m16n64k1024_g128_w1_s3_c2";
        let device = EmuBackend::h200_like(132);
        let forced: Forced = format!("{name}:7").parse().expect("a name");
        assert_eq!(forced.choice(&PROBLEM, device.device()).stripe, 7);
        let free: Forced = name.parse().expect("a name");
        let choice = free.choice(&PROBLEM, device.device());
        assert!(choice.stripe > 0 && choice.cost.total_us > 0.0);
        for text in ["marlin", &format!("{name}:0"), &format!("{name}:x")] {
            assert!(text.parse::<Forced>().is_err(), "{text}");
        }
        assert_eq!("all-configs".parse(), Ok(Sweep::AllConfigs));
        assert_eq!("7".parse(), Ok(Sweep::Best(7)));
        assert!("0".parse::<Sweep>().is_err());
    }
}
