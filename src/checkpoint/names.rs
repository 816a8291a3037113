//! Names of modules, as configurations write them: exact, as patterns, fused and sharded.
//!
//! Configurations name modules of the program that wrote them. A file may hold the same weights
//! under the names of the fused module (`qkv_proj`) or of its parts (`q_proj`, `k_proj`, `v_proj`),
//! so each name is also looked up under the other form.

use regex_lite::Regex;

/// Fused modules and their parts, by the last component of their names.
const FUSED: &[(&str, &[&str])] =
    &[("qkv_proj", &["q_proj", "k_proj", "v_proj"]), ("gate_up_proj", &["gate_proj", "up_proj"])];

/// A list of names and patterns.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    entries: Vec<Entry>,
    /// Patterns that could not be understood, each with the reason.
    pub(super) unreadable: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
enum Entry {
    /// The whole name.
    Whole(String),
    /// A pattern that must match from the start of the name on.
    Pattern(Regex),
    /// Whole components of a name, anywhere in it.
    Part(String),
}

impl Names {
    /// Adds a name, or a pattern after `re:`, as compressed-tensors means it.
    pub(super) fn add(&mut self, text: &str) {
        match text.strip_prefix("re:") {
            Some(pattern) => self.add_pattern(pattern),
            None => self.entries.push(Entry::Whole(text.to_owned())),
        }
    }

    /// Adds a part of a name; a `*` stands for any characters.
    pub(super) fn add_part(&mut self, text: &str) {
        if text.starts_with("re:") {
            self.add(text);
        } else if text.contains('*') {
            let parts: Vec<String> = text.split('*').map(regex_lite::escape).collect();
            self.add_pattern(&parts.join(".*"));
        } else {
            self.entries.push(Entry::Part(text.trim_matches('.').to_owned()));
        }
    }

    fn add_pattern(&mut self, pattern: &str) {
        // The programs that write these use a match from the start that may end anywhere.
        match Regex::new(&format!("^(?:{pattern})")) {
            Ok(regex) => self.entries.push(Entry::Pattern(regex)),
            Err(error) => self.unreadable.push((pattern.to_owned(), error.to_string())),
        }
    }

    /// Whether the list holds the module `name`: by that name, by the fused module that it is a part
    /// of, or by all parts that it is fused of.
    pub(super) fn contain(&self, name: &str) -> bool {
        if self.entries.is_empty() {
            return false;
        }
        let (parent, last) = name.rsplit_once('.').map_or(("", name), |(p, last)| (p, last));
        let sibling = |other: &str| {
            if parent.is_empty() { other.to_owned() } else { format!("{parent}.{other}") }
        };
        let by_other_form = FUSED.iter().any(|(fused, parts)| {
            last == *fused && parts.iter().all(|part| self.contain_exactly(&sibling(part)))
                || parts.contains(&last) && self.contain_exactly(&sibling(fused))
        });
        self.contain_exactly(name) || by_other_form
    }

    fn contain_exactly(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| match entry {
            Entry::Whole(whole) => whole == name,
            Entry::Pattern(regex) => regex.is_match(name),
            Entry::Part(part) => has_part(name, part),
        })
    }
}

/// Whether whole components of `name` spell `part`.
fn has_part(name: &str, part: &str) -> bool {
    name.match_indices(part).any(|(at, _)| {
        let (before, after) = (&name[..at], &name[at + part.len()..]);
        (before.is_empty() || before.ends_with('.')) && (after.is_empty() || after.starts_with('.'))
    }) && !part.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(entries: &[&str]) -> Names {
        let mut names = Names::default();
        entries.iter().for_each(|entry| names.add(entry));
        names
    }

    #[test]
    fn names_and_patterns_match_as_their_tools_mean_them() {
        let list = names(&["lm_head", r"re:.*mlp\.gate$", "re:visual", "re:(?!x)bad"]);
        for name in ["lm_head", "model.layers.3.mlp.gate", "visual.blocks.0.qkv"] {
            assert!(list.contain(name), "{name}");
        }
        for name in ["model.lm_head", "model.layers.3.mlp.gate_proj", "model.visual.x", "bad"] {
            assert!(!list.contain(name), "{name}");
        }
        assert_eq!(list.unreadable.len(), 1);
        assert_eq!(list.unreadable[0].0, "(?!x)bad");
        assert!(!names(&[]).contain("lm_head"));
    }

    #[test]
    fn parts_of_names_are_whole_components() {
        let mut list = Names::default();
        list.add_part("self_attn");
        list.add_part("model.layers.*.mlp.router");
        list.add_part("lm_head");
        for name in [
            "model.layers.0.self_attn.q_proj",
            "lm_head",
            "model.layers.11.mlp.router",
            "self_attn",
        ] {
            assert!(list.contain(name), "{name}");
        }
        for name in ["model.layers.0.self_attn2.q_proj", "model.lm_heads", "layers.1.mlp.router"] {
            assert!(!list.contain(name), "{name}");
        }
    }

    #[test]
    fn fused_and_sharded_names_find_each_other() {
        let sharded = names(&["a.q_proj", "a.k_proj", "a.v_proj", "b.q_proj", "re:.*gate_proj"]);
        assert!(sharded.contain("a.qkv_proj"));
        assert!(!sharded.contain("b.qkv_proj"), "only one of three parts is named");
        assert!(!sharded.contain("a.gate_up_proj"));
        let fused = names(&["a.qkv_proj", "gate_up_proj"]);
        assert!(fused.contain("a.k_proj") && fused.contain("up_proj"));
        assert!(!fused.contain("b.k_proj") && !fused.contain("a.o_proj"));
    }
}
