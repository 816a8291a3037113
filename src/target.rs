//! What a target is: PTX ISA versions, SM architectures and the numbers of each.
//!
//! This is the only home of hardware numbers. Everything that must know how much shared memory a CTA
//! gets, how many registers an SM has or which `.version` an architecture needs asks here.
//! Sources: CUDA C++ Programming Guide, "Compute Capabilities" (technical specifications per compute
//! capability); PTX ISA, "Release Notes" (which version introduced which target, which driver branch
//! understands it).

use std::fmt;
use std::str::FromStr;

/// A PTX ISA version, the argument of `.version`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PtxIsa {
    /// Major version.
    pub major: u8,
    /// Minor version.
    pub minor: u8,
}

impl PtxIsa {
    /// The version `major.minor`.
    pub const fn new(major: u8, minor: u8) -> Self {
        Self { major, minor }
    }

    /// The newest PTX ISA that a driver understands, from `cuDriverGetVersion` (1000 * major + 10 * minor).
    ///
    /// The mapping is a table and not a formula: CUDA 12.5 and 12.6 both speak 8.5. A driver newer than
    /// the table gets the newest known version; one older than CUDA 11.0 gets `None`, since no PTX that
    /// we emit can run there. Source: PTX ISA, "Release Notes".
    pub fn of_driver(driver_version: i32) -> Option<Self> {
        DRIVER_PTX.iter().rev().find(|(driver, _)| *driver <= driver_version).map(|(_, isa)| *isa)
    }
}

/// CUDA driver API version and the newest PTX ISA it assembles, in ascending order.
const DRIVER_PTX: &[(i32, PtxIsa)] = &[
    (11000, PtxIsa::new(7, 0)),
    (11010, PtxIsa::new(7, 1)),
    (11020, PtxIsa::new(7, 2)),
    (11030, PtxIsa::new(7, 3)),
    (11040, PtxIsa::new(7, 4)),
    (11050, PtxIsa::new(7, 5)),
    (11060, PtxIsa::new(7, 6)),
    (11070, PtxIsa::new(7, 7)),
    (11080, PtxIsa::new(7, 8)),
    (12000, PtxIsa::new(8, 0)),
    (12010, PtxIsa::new(8, 1)),
    (12020, PtxIsa::new(8, 2)),
    (12030, PtxIsa::new(8, 3)),
    (12040, PtxIsa::new(8, 4)),
    (12050, PtxIsa::new(8, 5)),
    (12060, PtxIsa::new(8, 5)),
    (12070, PtxIsa::new(8, 6)),
    (12080, PtxIsa::new(8, 7)),
    (12090, PtxIsa::new(8, 8)),
    (13000, PtxIsa::new(9, 0)),
];

impl fmt::Display for PtxIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A `.target`: compute capability times ten, and whether architecture-specific features are on (`sm_90a`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SmArch {
    /// Compute capability times ten: 80, 86, 89, 90, 100, 120 ….
    pub sm: u16,
    /// The `a` suffix: code for this compute capability alone, with its own instructions.
    pub specific: bool,
}

impl SmArch {
    /// The baseline target `sm_<sm>`.
    pub const fn baseline(sm: u16) -> Self {
        Self { sm, specific: false }
    }

    /// The architecture-specific target `sm_<sm>a`.
    pub const fn specific(sm: u16) -> Self {
        Self { sm, specific: true }
    }

    /// The first PTX ISA that knows this target, `None` for one that we do not know.
    /// Source: PTX ISA, "Release Notes", targets introduced per version.
    pub fn since(self) -> Option<PtxIsa> {
        let isa = match (self.sm, self.specific) {
            (70, false) => PtxIsa::new(6, 0),
            (75, false) => PtxIsa::new(6, 3),
            (80, false) => PtxIsa::new(7, 0),
            (86, false) => PtxIsa::new(7, 1),
            (87, false) => PtxIsa::new(7, 4),
            (89, false) | (90, false) => PtxIsa::new(7, 8),
            (90, true) => PtxIsa::new(8, 0),
            (100, _) => PtxIsa::new(8, 6),
            (120, _) => PtxIsa::new(8, 7),
            _ => return None,
        };
        Some(isa)
    }

    /// The numbers of this architecture; a capability newer than the table has those of the newest one
    /// that is not above it, `None` below 7.0.
    pub fn spec(self) -> Option<&'static ArchSpec> {
        ARCHS.iter().rev().find(|spec| spec.sm <= self.sm)
    }
}

impl fmt::Display for SmArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.sm, if self.specific { "a" } else { "" })
    }
}

/// The text is no target of the form `sm_80` or `sm_90a`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no target; write one like sm_80, sm_89 or sm_90a")]
pub struct ParseSmArchError(pub String);

impl FromStr for SmArch {
    type Err = ParseSmArchError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseSmArchError(text.to_owned());
        let digits = text.strip_prefix("sm_").ok_or_else(error)?;
        let (digits, specific) = match digits.strip_suffix('a') {
            Some(digits) => (digits, true),
            None => (digits, false),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(error());
        }
        let arch = Self { sm: digits.parse().map_err(|_| error())?, specific };
        arch.since().map(|_| arch).ok_or_else(error)
    }
}

/// The numbers of one SM architecture.
#[derive(Debug, PartialEq)]
pub struct ArchSpec {
    /// Compute capability times ten.
    pub sm: u16,
    /// Most shared memory that one CTA can have (opt-in dynamic limit), in bytes.
    pub smem_per_cta_bytes: u32,
    /// Shared memory of an SM, in bytes.
    pub smem_per_sm_bytes: u32,
    /// Shared memory that the system keeps per resident CTA, in bytes.
    pub smem_reserved_bytes: u32,
    /// 32-bit registers of an SM.
    pub regs_per_sm: u32,
    /// Resident warps of an SM.
    pub warps_per_sm: u32,
    /// Resident CTAs of an SM.
    pub ctas_per_sm: u32,
}

impl ArchSpec {
    /// How many CTAs of `threads` threads with `regs` registers each and `smem_bytes` of shared memory
    /// fit on one SM. Registers are allocated per warp in units of 256, shared memory in units of 128 bytes.
    pub fn ctas_that_fit(&self, threads: u32, regs: u32, smem_bytes: u32) -> u32 {
        let warps = threads.div_ceil(32).max(1);
        let regs_per_warp = (regs.max(1) * 32).next_multiple_of(256);
        let by_regs = self.regs_per_sm / regs_per_warp / warps;
        let by_smem = self.smem_per_sm_bytes
            / (smem_bytes + self.smem_reserved_bytes).next_multiple_of(128).max(128);
        by_regs.min(by_smem).min(self.warps_per_sm / warps).min(self.ctas_per_sm)
    }
}

/// A device: its architecture and the numbers that differ between cards of one architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    /// The card's name.
    pub name: String,
    /// Its compute capability, as a baseline target.
    pub arch: SmArch,
    /// The newest PTX ISA that its driver assembles.
    pub isa: PtxIsa,
    /// Streaming multiprocessors.
    pub num_sms: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Most shared memory that one CTA can have, in bytes.
    pub smem_per_cta_bytes: u32,
}

/// Per-architecture numbers in ascending order.
/// Source: CUDA C++ Programming Guide, "Compute Capabilities".
#[rustfmt::skip]
const ARCHS: &[ArchSpec] = &[
    ArchSpec { sm: 70,  smem_per_cta_bytes:  96 << 10, smem_per_sm_bytes:  96 << 10, smem_reserved_bytes:    0, regs_per_sm: 65536, warps_per_sm: 64, ctas_per_sm: 32 },
    ArchSpec { sm: 75,  smem_per_cta_bytes:  64 << 10, smem_per_sm_bytes:  64 << 10, smem_reserved_bytes:    0, regs_per_sm: 65536, warps_per_sm: 32, ctas_per_sm: 16 },
    ArchSpec { sm: 80,  smem_per_cta_bytes: 163 << 10, smem_per_sm_bytes: 164 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 64, ctas_per_sm: 32 },
    ArchSpec { sm: 86,  smem_per_cta_bytes:  99 << 10, smem_per_sm_bytes: 100 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 48, ctas_per_sm: 16 },
    ArchSpec { sm: 87,  smem_per_cta_bytes: 163 << 10, smem_per_sm_bytes: 164 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 48, ctas_per_sm: 16 },
    ArchSpec { sm: 89,  smem_per_cta_bytes:  99 << 10, smem_per_sm_bytes: 100 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 48, ctas_per_sm: 24 },
    ArchSpec { sm: 90,  smem_per_cta_bytes: 227 << 10, smem_per_sm_bytes: 228 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 64, ctas_per_sm: 32 },
    ArchSpec { sm: 100, smem_per_cta_bytes: 227 << 10, smem_per_sm_bytes: 228 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 64, ctas_per_sm: 32 },
    ArchSpec { sm: 120, smem_per_cta_bytes:  99 << 10, smem_per_sm_bytes: 100 << 10, smem_reserved_bytes: 1024, regs_per_sm: 65536, warps_per_sm: 48, ctas_per_sm: 24 },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault B56: the CUDA-to-PTX mapping is a table with irregular entries.
    #[test]
    fn b56_driver_versions_map_to_published_ptx_versions() {
        let published = [
            (11080, (7, 8)),
            (12000, (8, 0)),
            (12010, (8, 1)),
            (12020, (8, 2)),
            (12030, (8, 3)),
            (12040, (8, 4)),
            (12050, (8, 5)),
            (12060, (8, 5)),
            (12070, (8, 6)),
            (12080, (8, 7)),
            (12090, (8, 8)),
            (13000, (9, 0)),
        ];
        for (driver, (major, minor)) in published {
            assert_eq!(
                PtxIsa::of_driver(driver),
                Some(PtxIsa::new(major, minor)),
                "driver {driver}"
            );
        }
        assert_eq!(
            PtxIsa::of_driver(99000),
            Some(PtxIsa::new(9, 0)),
            "unknown future drivers get the newest known version"
        );
        assert_eq!(PtxIsa::of_driver(10020), None);
    }

    #[test]
    fn targets_print_and_parse_back() {
        for text in ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120"] {
            assert_eq!(text.parse::<SmArch>().expect("a known target").to_string(), text);
        }
        for text in ["", "sm_", "sm_90b", "90", "sm_80a", "sm_+80", "sm_99999999"] {
            assert!(text.parse::<SmArch>().is_err(), "{text}");
        }
    }

    #[test]
    fn occupancy_is_bounded_by_each_resource() {
        let hopper = SmArch::baseline(90).spec().expect("sm_90 is in the table");
        assert_eq!(hopper.ctas_that_fit(256, 128, 100 << 10), 2);
        assert_eq!(hopper.ctas_that_fit(256, 255, 10 << 10), 1);
        assert_eq!(hopper.ctas_that_fit(256, 64, 227 << 10), 1);
        assert_eq!(hopper.ctas_that_fit(1024, 32, 0), 2);
    }
}
