//! Device time of repeated launches, and a watchdog for launches that never end.
//!
//! Launches are captured into a graph of about [`GRAPH_US`], replayed until the card is warm, then replayed
//! [`NUM_REPLAYS`] times between events; the figure is the median replay divided by its launches, so the gap
//! from launch to launch is in it. Everything is done twice: the difference is the noise. Before that the
//! card rests, so that a product that ran into the power limit does not slow the next one.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use makaira::backend;
use makaira::driver::{CaptureMode, Context, Event, GraphExec, Stream};

/// Length of a graph, in microseconds.
const GRAPH_US: f64 = 2500.0;
/// Most launches of a graph.
pub const MAX_LAUNCHES: usize = 512;
/// Length of the replays before the timed ones, in microseconds.
const WARM_US: f64 = 15000.0;
const NUM_REPLAYS: usize = 7;
/// Launches of the graph that tells how many launches the timed one takes: few, in case they are long.
const PROBE_LAUNCHES: [usize; 2] = [2, 16];
/// The card rests this long before a timing.
const REST: Duration = Duration::from_millis(30);

/// Microseconds per launch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The medians of two timings.
    pub us: [f64; 2],
    /// Launches in the graph.
    pub num_launches: usize,
}

impl Timing {
    /// Their mean.
    pub fn mean(&self) -> f64 {
        (self.us[0] + self.us[1]) / 2.0
    }

    /// Their difference as a fraction of the mean.
    pub fn spread(&self) -> f64 {
        (self.us[0] - self.us[1]).abs() / self.mean()
    }
}

/// Enqueues the launch with a number on a stream.
pub type Launcher<'l> = dyn Fn(usize, backend::Stream) -> anyhow::Result<()> + 'l;

/// Launches of a graph whose launches take `us` microseconds each.
fn graph_launches(us: f64) -> usize {
    ((GRAPH_US / us) as usize).clamp(4, MAX_LAUNCHES)
}

/// Times launches on a stream of its own.
pub struct Timer {
    context: Context,
    stream: Stream,
}

impl Timer {
    /// A timer of a device.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(context: &Context) -> anyhow::Result<Self> {
        Ok(Self { context: context.clone(), stream: Stream::new(context)? })
    }

    /// Runs what `launch` enqueues for the first `count` launches and waits for it.
    ///
    /// # Errors
    /// Those of `launch` and of the kernel.
    pub fn run(&self, count: usize, launch: &Launcher<'_>) -> anyhow::Result<()> {
        (0..count).try_for_each(|idx| launch(idx, self.stream.borrow().into()))?;
        self.stream.synchronize().context("running the kernel")
    }

    /// Times `launch`, which enqueues the launch with the number that it is given.
    ///
    /// # Errors
    /// Those of `launch`, of the driver and of the kernel.
    pub fn time(&self, launch: &Launcher<'_>) -> anyhow::Result<Timing> {
        let mut guess = f64::INFINITY;
        for num_launches in PROBE_LAUNCHES {
            // The short graph's time holds the start of a graph and is too long, not too short.
            if guess * num_launches as f64 <= GRAPH_US || guess.is_infinite() {
                let probe = self.graph(num_launches, launch)?;
                self.replays(&probe, 1)?;
                guess = self.replays(&probe, 3)?[1] / num_launches as f64;
            }
        }
        self.time_graph(graph_launches(guess), launch)
    }

    /// Times a graph of exactly that many launches. Microseconds are those of one launch.
    ///
    /// # Errors
    /// Those of `launch`, of the driver and of the kernel.
    pub fn time_graph(&self, num_launches: usize, launch: &Launcher<'_>) -> anyhow::Result<Timing> {
        let graph = self.graph(num_launches, launch)?;
        self.replays(&graph, 1)?;
        std::thread::sleep(REST);
        let warm = (WARM_US / self.replays(&graph, 1)?[0]).ceil() as usize;
        let mut us = [0.0; 2];
        for us in &mut us {
            let mut replays = self.replays(&graph, warm + NUM_REPLAYS)?.split_off(warm);
            replays.sort_by(f64::total_cmp);
            *us = replays[NUM_REPLAYS / 2] / num_launches as f64;
        }
        Ok(Timing { us, num_launches })
    }

    fn graph(&self, num_launches: usize, launch: &Launcher<'_>) -> anyhow::Result<GraphExec> {
        let graph = self.stream.capture(CaptureMode::Relaxed, |stream| {
            (0..num_launches).try_for_each(|idx| launch(idx, stream.into()))
        })?;
        Ok(graph.instantiate()?)
    }

    /// Microseconds of each of `count` replays, one right after the other.
    fn replays(&self, graph: &GraphExec, count: usize) -> anyhow::Result<Vec<f64>> {
        let stream = self.stream.borrow();
        let events: Vec<Event> =
            (0..=count).map(|_| Event::timed(&self.context)).collect::<Result<_, _>>()?;
        events[0].record(stream)?;
        for event in &events[1..] {
            graph.launch(stream)?;
            event.record(stream)?;
        }
        self.stream.synchronize().context("replaying the graph")?;
        let times = events
            .windows(2)
            .map(|pair| Ok(1e3 * f64::from(pair[1].milliseconds_since(&pair[0])?)));
        times.collect()
    }
}

/// Ends the process when a step takes too long: a kernel that waits forever cannot be stopped otherwise.
#[derive(Clone)]
pub struct Watchdog {
    step: Arc<Mutex<Option<(Instant, String)>>>,
    limit: Duration,
}

impl Watchdog {
    /// A watchdog that allows every step `limit`.
    pub fn start(limit: Duration) -> Self {
        let step = Arc::new(Mutex::new(None::<(Instant, String)>));
        let watched = step.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(100));
                let step = watched.lock().expect("no panic holds it");
                if let Some((deadline, what)) = &*step
                    && *deadline < Instant::now()
                {
                    eprintln!(
                        "gave up: {what} took more than {limit:?}; raise --timeout if that is right"
                    );
                    std::process::abort();
                }
            }
        });
        Self { step, limit }
    }

    /// Runs a step under watch.
    pub fn watch<R>(&self, what: impl Into<String>, step: impl FnOnce() -> R) -> R {
        let set = |value| *self.step.lock().expect("no panic holds it") = value;
        set(Some((Instant::now() + self.limit, what.into())));
        let result = step();
        set(None);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_is_about_as_long_whatever_its_launches_take() {
        assert_eq!(graph_launches(2.0), MAX_LAUNCHES);
        assert_eq!(graph_launches(25.0), 100);
        assert_eq!(graph_launches(5000.0), 4);
        assert_eq!(graph_launches(f64::INFINITY), 4);
    }

    #[test]
    fn a_timing_is_the_mean_of_two_and_their_difference() {
        let timing = Timing { us: [9.0, 11.0], num_launches: 4 };
        assert_eq!((timing.mean(), timing.spread()), (10.0, 0.2));
    }
}
