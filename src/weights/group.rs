//! The group rule: how many inputs share a scale.
//!
//! Checkpoints write one scale per output column as -1, or as a group size equal to K. Both become
//! [`Group::PerColumn`] here, once, so that nothing downstream divides by -1 or takes a one-group
//! layer for a grouped one. [`Group::SIZES`] is the only list of sizes that are understood.

use std::fmt;

use super::Error;

/// How the inputs of an output column are divided among scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// One scale for the whole column.
    PerColumn,
    /// One scale for each run of this many inputs.
    Size(u32),
}

impl Group {
    /// The sizes that checkpoints, the packed layout and the kernels may have, beside one scale per column.
    pub const SIZES: [u32; 4] = [16, 32, 64, 128];

    /// The rule that a checkpoint of `k` inputs means by the number `raw`.
    ///
    /// -1 and any size of at least `k` mean one scale per column.
    ///
    /// # Errors
    /// [`Error::GroupSize`] for a size that is not supported, [`Error::GroupRemainder`] when the
    /// last group would be short.
    ///
    /// ```
    /// use makaira::weights::Group;
    /// assert_eq!(Group::new(4096, 128)?, Group::Size(128));
    /// assert_eq!(Group::new(128, 128)?, Group::PerColumn);
    /// assert_eq!(Group::new(4096, -1)?, Group::PerColumn);
    /// assert!(Group::new(4096, 48).is_err());
    /// # Ok::<(), makaira::weights::Error>(())
    /// ```
    pub fn new(k: usize, raw: i64) -> Result<Self, Error> {
        Self::resolve(k, raw, None)
    }

    /// [`Group::new`], checked against the number of scale rows that a file holds.
    ///
    /// # Errors
    /// Those of [`Group::new`], naming `scale_rows`, and [`Error::ScaleRows`] when there is not one
    /// row per group.
    pub fn for_scale_rows(k: usize, raw: i64, scale_rows: usize) -> Result<Self, Error> {
        let group = Self::resolve(k, raw, Some(scale_rows))?;
        let expected = group.num_groups(k);
        if scale_rows == expected {
            Ok(group)
        } else {
            Err(Error::ScaleRows { k, group, expected, found: scale_rows })
        }
    }

    fn resolve(k: usize, raw: i64, scale_rows: Option<usize>) -> Result<Self, Error> {
        if raw == -1 {
            return Ok(Self::PerColumn);
        }
        let size = usize::try_from(raw).map_err(|_| Error::GroupSize { raw })?;
        if size > 0 && size >= k {
            return Ok(Self::PerColumn);
        }
        let supported = Self::SIZES.into_iter().find(|&s| s as usize == size);
        let supported = supported.ok_or(Error::GroupSize { raw })?;
        if !k.is_multiple_of(size) {
            return Err(Error::GroupRemainder { k, group: size, scale_rows });
        }
        Ok(Self::Size(supported))
    }

    /// Number of scales of a column of `k` inputs (the last group counts even if it is short).
    pub fn num_groups(self, k: usize) -> usize {
        match self {
            Self::PerColumn => 1,
            Self::Size(size) => k.div_ceil(size as usize),
        }
    }

    /// The group that input `k_idx` belongs to.
    pub fn index_of(self, k_idx: usize) -> usize {
        match self {
            Self::PerColumn => 0,
            Self::Size(size) => k_idx / size as usize,
        }
    }

    /// The number that checkpoints and configuration names use: -1 or the size.
    pub fn raw(self) -> i64 {
        match self {
            Self::PerColumn => -1,
            Self::Size(size) => i64::from(size),
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b18_every_size_is_accepted_or_refused_with_the_allowed_ones_named() {
        for k in [128, 512, 4096] {
            for raw in [-1, 16, 32, 64, 128] {
                let group = Group::new(k, raw).expect("supported");
                let per_column = raw == -1 || raw as usize >= k;
                assert_eq!(group == Group::PerColumn, per_column, "K = {k}, g = {raw}");
                assert_eq!(
                    group.num_groups(k),
                    if per_column { 1 } else { k / raw as usize },
                    "K = {k}, g = {raw}"
                );
            }
            for raw in [0, 1, 15, 48, -2, -128, i64::MIN] {
                let error = Group::new(k, raw).expect_err("unsupported");
                assert_eq!(error, Error::GroupSize { raw });
                let text = error.to_string();
                assert!(text.contains(&raw.to_string()), "{text}");
                assert!(text.contains("-1") && text.contains("16, 32, 64 or 128"), "{text}");
            }
        }
        assert_eq!(Group::new(0, 0), Err(Error::GroupSize { raw: 0 }));
        assert_eq!(Group::new(512, 256), Err(Error::GroupSize { raw: 256 }));
        assert_eq!(Group::new(4096, 256), Err(Error::GroupSize { raw: 256 }));
    }

    #[test]
    fn b06_a_short_last_group_is_refused_with_k_group_and_rows() {
        for rows in [134, 135] {
            let text = Group::for_scale_rows(4304, 32, rows).expect_err("short").to_string();
            for part in ["4304", "32", &format!("{rows} rows"), "134 whole groups"] {
                assert!(text.contains(part), "{text} lacks {part}");
            }
        }
        let error = Group::for_scale_rows(4096, 32, 127).expect_err("a row is missing");
        assert_eq!(
            error.to_string(),
            "K = 4096 with group size 32 needs 128 rows of scales, found 127"
        );
    }

    #[test]
    fn b21_per_column_is_one_rule_however_it_is_written() {
        for k in [128, 4096] {
            assert_eq!(Group::new(k, -1), Group::new(k, k as i64));
            assert_eq!(Group::new(k, -1), Group::new(k, k as i64 + 1));
        }
        assert_eq!(Group::PerColumn.raw(), -1);
        assert_eq!(Group::Size(64).to_string(), "64");
    }
}
