//! What can go wrong between us and the driver.
//!
//! A driver's result code is kept as the integer it was, with the name and the text that the driver
//! itself gives it; a code that nobody knows is as representable as any other. Messages state the
//! rule, the value and the remedy.

use std::fmt;

use super::sys::DriverVersion;
use crate::target::PtxIsa;

/// Result of this room.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the driver room.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no driver library on this machine, or it cannot be opened.
    #[error(
        "no CUDA driver: {why}; install the NVIDIA driver, or name the library in MAKAIRA_LIBCUDA"
    )]
    DriverUnavailable {
        /// What the loader said about each name that was tried.
        why: String,
    },
    /// The driver lacks a function that was asked for.
    #[error(
        "the driver (CUDA {driver_version}) has no function `{symbol}`; a newer driver is needed"
    )]
    MissingSymbol {
        /// Exported name.
        symbol: &'static str,
        /// Version that the driver reports; unknown when the library lacks even that function.
        driver_version: DriverVersion,
    },
    /// A driver call returned an error code.
    #[error("{call} failed: {name} ({code}){}{text}", if text.is_empty() { "" } else { ": " })]
    Call {
        /// Exported name of the function.
        call: &'static str,
        /// The code, as returned.
        code: i32,
        /// The driver's name for the code, or `unknown error code`.
        name: String,
        /// The driver's explanation, empty when it has none.
        text: String,
    },
    /// There is no device of this index.
    #[error("no device {ordinal}: the driver shows {count}; look at CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// Index asked for.
        ordinal: u32,
        /// Number of devices.
        count: u32,
    },
    /// The driver's assembler refused a PTX text.
    #[error(
        "the driver cannot assemble the PTX: {call} failed with {name} ({code}){}",
        JitDetail(log, lines)
    )]
    Jit {
        /// Exported name of the function.
        call: &'static str,
        /// The code, as returned.
        code: i32,
        /// The driver's name for the code.
        name: String,
        /// The driver's error log, whole.
        log: String,
        /// The PTX lines that the log points at.
        lines: Vec<PtxLine>,
    },
    /// The PTX needs a newer ISA than this driver assembles.
    #[error(
        "the driver (CUDA {driver_version}) assembles PTX up to {}, the text says .version {}; \
         emit a lower version or update the driver",
        OrElse(ceiling, "(unknown)"),
        OrElse(ptx, "(unknown)")
    )]
    UnsupportedPtx {
        /// Version of the driver.
        driver_version: DriverVersion,
        /// Newest ISA of that driver, if known.
        ceiling: Option<PtxIsa>,
        /// The text's `.version`, if it has one.
        ptx: Option<PtxIsa>,
    },
    /// A request exceeds what the device, the kernel or the argument list can hold.
    #[error("{what}: {requested} requested, the limit is {limit}; {remedy}")]
    Limit {
        /// The quantity, with its unit.
        what: &'static str,
        /// What was asked for.
        requested: u64,
        /// What there is.
        limit: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// Two lengths that must agree do not.
    #[error("{what}: {found} found, {expected} expected")]
    Length {
        /// The quantity, with its unit.
        what: &'static str,
        /// What there must be.
        expected: u64,
        /// What was passed.
        found: u64,
    },
    /// An argument of a launch is not the kernel's parameter of the same place.
    #[error(
        "argument {index} of `{kernel}`: {given} given, {} declared; pass the kernel's parameters in \
         order",
        OrElse(declared, "none")
    )]
    Argument {
        /// Name of the kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
        /// Where the argument lies in the list.
        given: Placed,
        /// Where the parameter lies; `None` if the kernel has none of this index.
        declared: Option<Placed>,
    },
    /// A text for the driver contains a NUL character, which ends a C string.
    #[error("{what} contains a NUL character at byte {position}; remove it")]
    Nul {
        /// Which text.
        what: &'static str,
        /// Byte index.
        position: usize,
    },
}

impl Error {
    /// Whether the error means that no GPU can be used here at all (no driver, a driver that does
    /// not start, no device), as opposed to a failed operation: the case in which a caller takes
    /// the emulator.
    pub fn is_unavailable(&self) -> bool {
        match self {
            Self::DriverUnavailable { .. } | Self::NoDevice { .. } => true,
            Self::Call { call, .. } => *call == "cuInit",
            _ => false,
        }
    }

    /// The driver's result code, if a driver call caused this error.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } | Self::Jit { code, .. } => Some(*code),
            Self::UnsupportedPtx { .. } => Some(super::sys::ERROR_UNSUPPORTED_PTX_VERSION),
            _ => None,
        }
    }
}

/// A line of PTX that a driver's log points at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxLine {
    /// Line number, from 1.
    pub number: u32,
    /// The line's text.
    pub text: String,
}

/// The log and the lines of a JIT failure, each on a line of its own.
struct JitDetail<'e>(&'e str, &'e [PtxLine]);

impl fmt::Display for JitDetail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(log, lines) = self;
        for line in log.lines().filter(|line| !line.trim().is_empty()) {
            write!(f, "\n  {}", line.trim_end())?;
        }
        for PtxLine { number, text } in *lines {
            write!(f, "\n  {number:>5} | {text}")?;
        }
        Ok(())
    }
}

/// Size and place of a kernel parameter or argument, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Bytes before it.
    pub offset: usize,
    /// Bytes that it takes.
    pub bytes: usize,
}

impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at offset {}", self.bytes, self.offset)
    }
}

/// A value that may be absent, and the word for that.
struct OrElse<'e, T>(&'e Option<T>, &'e str);

impl<T: fmt::Display> fmt::Display for OrElse<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str(self.1),
        }
    }
}
