//! Where text goes: results to stdout, errors and progress to stderr.

use std::io::{ErrorKind, IsTerminal, Write};
use std::process;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;

/// How a command answers.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Format {
    /// Answer with one JSON value.
    #[arg(long)]
    pub json: bool,
}

impl Format {
    /// Prints a line of text, unless the answer is to be JSON.
    pub fn line(self, text: impl AsRef<str>) -> anyhow::Result<()> {
        if self.json { Ok(()) } else { write(&format!("{}\n", text.as_ref())) }
    }

    /// Prints the answer if it is to be JSON.
    pub fn value(self, value: impl FnOnce() -> Value) -> anyhow::Result<()> {
        if self.json { write(&format!("{:#}\n", value())) } else { Ok(()) }
    }
}

/// Writes to stdout. If nobody reads any more (`makaira ptx … | head`), the program ends quietly.
pub fn write(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => process::exit(0),
        outcome => outcome.context("cannot write to stdout"),
    }
}

/// An error and its causes, one a line.
pub fn error(error: &anyhow::Error) {
    let mut stderr = std::io::stderr().lock();
    // If stderr is gone there is nobody to tell.
    let _ = writeln!(stderr, "error: {error}");
    for cause in error.chain().skip(1) {
        let _ = writeln!(stderr, "  because: {cause}");
    }
}

/// Progress on stderr: a bar on a terminal, else a line for each step.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: usize,
    done: usize,
}

impl Progress {
    /// Progress over so many steps.
    pub fn new(total: usize) -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}")
            .expect("the template is a constant");
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            bar.set_style(style);
            bar
        });
        Self { bar, total, done: 0 }
    }

    /// Progress over a number of bytes that is told with the first of them.
    pub fn of_bytes() -> Self {
        let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {wide_msg}")
            .expect("the template is a constant");
        let progress = Self::new(100);
        if let Some(bar) = &progress.bar {
            bar.set_style(style);
        }
        progress
    }

    /// Says that so many bytes of so many are done, the last of them `what`; elsewhere than on a terminal once in
    /// every tenth of them.
    pub fn reach(&mut self, done: u64, total: u64, what: &str) {
        let percent = (u128::from(done) * 100 / u128::from(total.max(1))) as usize;
        match &self.bar {
            Some(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(what.to_owned());
            }
            None if percent / 10 > self.done / 10 => eprintln!("[{percent} %] {what}"),
            None => {}
        }
        self.done = percent;
    }

    /// Says what begins.
    pub fn step(&mut self, what: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(self.done as u64);
                bar.set_message(what.to_owned());
            }
            None if self.total > 1 => eprintln!("[{}/{}] {what}", self.done + 1, self.total),
            None => {}
        }
        self.done += 1;
    }

    /// Says what begins, where a bar shows it; nothing otherwise.
    pub fn quiet_step(&mut self, what: &str) {
        if self.bar.is_some() {
            self.step(what);
        }
    }

    /// Does something, usually printing, while the bar is out of the way.
    pub fn pause<T>(&self, work: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(work),
            None => work(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// `1 layer`, `2 layers`.
pub fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A size in the unit that suits it.
pub fn bytes(size: u64) -> String {
    match size {
        0..10_240 => format!("{size} B"),
        10_240..10_485_760 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}
