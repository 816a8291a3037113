//! Which candidates are measured, and which of them wins.

use makaira::kernel::Problem;
use makaira::kernel::select::Choice;
use serde_json::{Value, json};

use crate::bench::layer::Shape;
use crate::problem::WeightType;

/// Ways to cut the grid that are measured of one configuration.
const PLANS_PER_CONFIG: usize = 2;
/// A candidate must be faster than the current choice by more than this share: less is noise.
const NOISE: f64 = 0.01;

/// Heading of [`Verdict::line`].
pub const HEADING: &str =
    "layer               m  order      before us  after us    gain  of  winner";

/// The candidates to measure: `count` of the best-ranked ones, a quarter of that of every family, so that a
/// family which the cost model misjudges is tried, and the current choices.
pub fn shortlist(ranked: &[Choice], count: usize, current: [Choice; 2]) -> Vec<Choice> {
    let mut list: Vec<Choice> = Vec::new();
    let mut families: Vec<&str> = ranked.iter().map(|choice| choice.config.family).collect();
    families.sort_unstable();
    families.dedup();
    let mut take = |wanted: usize, is_wanted: &dyn Fn(&Choice) -> bool| {
        for choice in ranked.iter().filter(|choice| is_wanted(choice)) {
            let have = list.iter().filter(|known| is_wanted(known)).count();
            let plans = list.iter().filter(|known| known.config == choice.config).count();
            if have < wanted && plans < PLANS_PER_CONFIG && !list.iter().any(|c| same(c, choice)) {
                list.push(*choice);
            }
        }
    };
    take(count, &|_| true);
    for family in families {
        take(count.div_ceil(4), &|choice| choice.config.family == family);
    }
    for choice in current {
        if !list.iter().any(|known| same(known, &choice)) {
            list.push(choice);
        }
    }
    list
}

/// Whether two choices launch the same.
pub fn same(a: &Choice, b: &Choice) -> bool {
    a.config == b.config && a.stripe == b.stripe
}

/// A candidate and its time.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// The candidate.
    pub choice: Choice,
    /// Microseconds.
    pub us: f64,
}

/// What a measurement changes.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// The choice before, with its time if it was right.
    pub before: (Choice, Option<f64>),
    /// The winner.
    pub after: Timed,
    /// How many candidates were timed.
    pub num_timed: usize,
}

impl Verdict {
    /// The winner among `timed`: the fastest, or the current choice where the fastest is not clearly faster.
    pub fn of(timed: &[Timed], current: &Choice) -> Option<Self> {
        let fastest = timed.iter().min_by(|a, b| a.us.total_cmp(&b.us))?;
        let before = timed.iter().find(|timed| same(&timed.choice, current));
        let after = match before {
            Some(before) if fastest.us > before.us * (1.0 - NOISE) => before,
            _ => fastest,
        };
        let before = (*current, before.map(|before| before.us));
        Some(Self { before, after: *after, num_timed: timed.len() })
    }

    /// Whether another choice wins.
    pub fn changes(&self) -> bool {
        !same(&self.before.0, &self.after.choice)
    }

    /// A row of the table.
    pub fn line(&self, shape: &Shape, problem: &Problem, early: bool) -> String {
        let Timed { choice, us } = self.after;
        let before = self.before.1.map_or("wrong".to_owned(), |us| format!("{us:.2}"));
        let gain = match self.before.1 {
            Some(before) => format!("{:+.1}%", 100.0 * (before / us - 1.0)),
            None => "-".to_owned(),
        };
        let name = match self.changes() {
            true => format!("{} stripe {}", choice.config, choice.stripe),
            false => format!("as before: {} stripe {}", choice.config, choice.stripe),
        };
        let order = if early { "early" } else { "in order" };
        format!(
            "{:<14} {:>6}  {order:<8} {before:>11} {us:>9.2} {gain:>7} {:>3}  {name}",
            shape.name, problem.m, self.num_timed
        )
    }

    /// The same for programs.
    pub fn json(&self, shape: &Shape, weight: WeightType, problem: &Problem, early: bool) -> Value {
        let choice = |choice: &Choice, us: Option<f64>| json!({ "config": choice.config.to_string(), "stripe": choice.stripe, "us": us });
        json!({
            "layer": shape.name,
            "type": weight.to_string(),
            "activation": problem.kind.activation.name(),
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "group": problem.group.raw(),
            "early": early,
            "before": choice(&self.before.0, self.before.1),
            "after": choice(&self.after.choice, Some(self.after.us)),
            "changes": self.changes(),
            "num_timed": self.num_timed,
        })
    }
}

#[cfg(test)]
mod tests {
    use makaira::backend::Backend;
    use makaira::emu::EmuBackend;
    use makaira::kernel::{FAMILIES, Kind, Rows, select};
    use makaira::weights::Group;

    use super::*;

    fn ranked() -> (Problem, Vec<Choice>) {
        let problem = Problem {
            kind: Kind::U4B8,
            m: 16,
            n: 4096,
            k: 4096,
            group: Group::Size(128),
            rows: Rows::Whole,
        };
        (problem, select::ranked(&problem, EmuBackend::h200_like(132).device()))
    }

    #[test]
    fn the_best_and_the_current_are_measured_once_each() {
        let (_, ranked) = ranked();
        let last = *ranked.last().expect("there are many");
        let list = shortlist(&ranked, 12, [ranked[0], last]);
        assert!(list.len() > 12 && list.len() <= 12 + 3 * FAMILIES.len() + 1, "{}", list.len());
        assert!(same(&list[0], &ranked[0]) && list.iter().any(|choice| same(choice, &last)));
        for (idx, choice) in list.iter().enumerate() {
            assert!(!list[..idx].iter().any(|other| same(other, choice)), "{}", choice.config);
            let plans = list.iter().filter(|other| other.config == choice.config).count();
            assert!(plans <= PLANS_PER_CONFIG + usize::from(choice.config == last.config));
        }
        for family in FAMILIES {
            let has = |list: &[Choice]| {
                list.iter().filter(|choice| choice.config.family == family.name()).count()
            };
            assert!(has(&list) >= has(&ranked).min(3), "{} is not tried", family.name());
        }
        let one = shortlist(&ranked, 1, [ranked[0]; 2]);
        assert!(same(&one[0], &ranked[0]) && one.len() <= FAMILIES.len());
    }

    #[test]
    fn the_fastest_wins_if_it_is_clearly_faster() {
        let (problem, ranked) = ranked();
        let shape = Shape { name: "8b_o".into(), n: 4096, k: 4096 };
        let timed = |us: [f64; 3]| -> Vec<Timed> {
            us.iter().zip(&ranked).map(|(us, choice)| Timed { choice: *choice, us: *us }).collect()
        };
        let verdict = |us, current: usize| Verdict::of(&timed(us), &ranked[current]);
        let better = verdict([8.0, 6.0, 7.0], 0).expect("there are times");
        assert!(same(&better.after.choice, &ranked[1]) && better.changes());
        assert_eq!((better.before.1, better.after.us, better.num_timed), (Some(8.0), 6.0, 3));
        let line = better.line(&shape, &problem, true);
        assert!(
            line.starts_with("8b_o               16  early           8.00      6.00  +33.3%   3")
        );
        let json = better.json(&shape, WeightType::U4B8, &problem, true);
        assert_eq!((&json["after"]["us"], &json["type"]), (&json!(6.0), &json!("u4b8")));
        let noise = verdict([8.0, 7.95, 9.0], 0).expect("there are times");
        assert!(!noise.changes() && noise.after.us == 8.0);
        assert!(noise.line(&shape, &problem, false).contains("as before: marlin_"));
        // The current choice gave a wrong product or was not timed.
        let broken = verdict([8.0, 7.0, 9.0], 7).expect("there are times");
        assert!(same(&broken.after.choice, &ranked[1]) && broken.before.1.is_none());
        assert!(broken.line(&shape, &problem, false).contains(" wrong "));
        assert!(Verdict::of(&[], &ranked[0]).is_none());
    }
}
