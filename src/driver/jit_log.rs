//! Options for the driver's JIT and the logs it writes: what goes in, what is read out of them.
//!
//! Source: CUDA Driver API, `CUjit_option`; the log format is that of ptxas, as observed.

use std::ffi::c_void;

use super::error::{Error, PtxLine};
use super::module::JitOptions;
use super::sys::{self, Driver};
use crate::target::PtxIsa;

/// Room for one log, in bytes.
const LOG_BYTES: usize = 64 << 10;

/// The option arrays of one JIT call, with the log buffers that the driver writes into.
///
/// The driver keeps the addresses: this must outlive the call, and for a link the link state.
pub(super) struct JitCall {
    pub options: Vec<i32>,
    pub values: Vec<*mut c_void>,
    info: Vec<u8>,
    error: Vec<u8>,
}

impl JitCall {
    pub fn new(wanted: &JitOptions) -> Self {
        let (mut info, mut error) = (vec![0_u8; LOG_BYTES], vec![0_u8; LOG_BYTES]);
        // Numbers travel in the pointer-sized slots themselves.
        let number = |value: usize| std::ptr::without_provenance_mut::<c_void>(value);
        let mut pairs = vec![
            (sys::JIT_INFO_LOG_BUFFER, info.as_mut_ptr().cast()),
            (sys::JIT_INFO_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES - 1)),
            (sys::JIT_ERROR_LOG_BUFFER, error.as_mut_ptr().cast()),
            (sys::JIT_ERROR_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES - 1)),
            (sys::JIT_LOG_VERBOSE, number(1)),
        ];
        if wanted.line_info {
            pairs.push((sys::JIT_GENERATE_LINE_INFO, number(1)));
        }
        if let Some(level) = wanted.optimization_level {
            pairs.push((sys::JIT_OPTIMIZATION_LEVEL, number(level.into())));
        }
        if let Some(regs) = wanted.max_regs {
            pairs.push((sys::JIT_MAX_REGISTERS, number(regs as usize)));
        }
        let (options, values) = pairs.into_iter().unzip();
        Self { options, values, info, error }
    }

    pub fn info_log(&self) -> String {
        text_of(&self.info)
    }

    /// Turns the failure of a JIT call into our error, with the driver's log and the lines it
    /// means.
    pub fn explain(&self, error: Error, driver: &Driver, ptx: &str) -> Error {
        let Error::Call { call, code, name, .. } = error else { return error };
        if code == sys::ERROR_UNSUPPORTED_PTX_VERSION {
            return Error::UnsupportedPtx {
                driver_version: driver.version(),
                ceiling: driver.ptx_ceiling(),
                ptx: version_of(ptx),
            };
        }
        let log = text_of(&self.error);
        let lines = lines_meant(&log, ptx);
        Error::Jit { call, code, name, log, lines }
    }
}

fn text_of(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).trim_end().to_owned()
}

/// The argument of the text's `.version` directive.
fn version_of(ptx: &str) -> Option<PtxIsa> {
    let line = ptx.lines().find_map(|line| line.trim().strip_prefix(".version"))?;
    let (major, minor) = line.split_whitespace().next()?.split_once('.')?;
    Some(PtxIsa::new(major.parse().ok()?, minor.parse().ok()?))
}

/// The PTX lines that a log names as `…, line 12; error …`, each once, in the log's order.
fn lines_meant(log: &str, ptx: &str) -> Vec<PtxLine> {
    let mut lines: Vec<PtxLine> = Vec::new();
    for tail in log.split(", line ").skip(1) {
        let digits: String = tail.chars().take_while(char::is_ascii_digit).collect();
        let Ok(number) = digits.parse::<u32>() else { continue };
        let text = (number as usize).checked_sub(1).and_then(|idx| ptx.lines().nth(idx));
        if let Some(text) = text
            && lines.iter().all(|line| line.number != number)
        {
            lines.push(PtxLine { number, text: text.trim().to_owned() });
        }
    }
    lines
}

/// The lines of a log that carry one of the assembler's C75xx advisories, by which it says that it
/// gave up an optimisation (for instance: wgmma serialised).
pub(super) fn advisories(log: &str) -> Vec<String> {
    let is_code = |tail: &str| tail.bytes().take(2).filter(u8::is_ascii_digit).count() == 2;
    let has_code =
        |line: &str| line.match_indices("C75").any(|(at, code)| is_code(&line[at + code.len()..]));
    log.lines().map(str::trim).filter(|line| has_code(line)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "// demo\n.version 8.0\n.target sm_90a\n  bad.instr;\n  ret;\n";

    #[test]
    fn a_log_names_its_ptx_lines_once() {
        let log = "ptxas application ptx input, line 4; error   : Not a name of any instruction\n\
                   ptxas application ptx input, line 4; fatal   : Parsing error\n\
                   ptxas application ptx input, line 99; error   : beyond the text\n\
                   ptxas application ptx input, line x; error   : no number";
        assert_eq!(lines_meant(log, PTX), [PtxLine { number: 4, text: "bad.instr;".into() }]);
    }

    #[test]
    fn advisories_are_found_by_their_code() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async serialized\n\
                   ptxas info    : Used 168 registers, C75 is no code, C7 neither";
        let found = advisories(log);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("C7510"));
        assert!(advisories("").is_empty());
    }

    #[test]
    fn the_version_directive_is_read() {
        assert_eq!(version_of(PTX), Some(PtxIsa::new(8, 0)));
        assert_eq!(version_of(".target sm_80"), None);
        assert_eq!(version_of(".version eight"), None);
    }

    #[test]
    fn options_travel_in_pairs() {
        let options =
            JitOptions { line_info: true, optimization_level: Some(3), max_regs: Some(128) };
        let call = JitCall::new(&options);
        assert_eq!(call.options.len(), call.values.len());
        let value = |option| {
            let at = call.options.iter().position(|o| *o == option).expect("the option is set");
            call.values[at].addr()
        };
        assert_eq!(value(sys::JIT_GENERATE_LINE_INFO), 1);
        assert_eq!(value(sys::JIT_OPTIMIZATION_LEVEL), 3);
        assert_eq!(value(sys::JIT_MAX_REGISTERS), 128);
        assert_eq!(value(sys::JIT_LOG_VERBOSE), 1);
        assert_eq!(JitCall::new(&JitOptions::default()).options.len(), 5);
    }
}
