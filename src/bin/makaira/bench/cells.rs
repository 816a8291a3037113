//! Cells: one layer, one batch, one configuration at a time.
//!
//! For each shape a random layer is made, packed and copied to the device often enough that no copy is in
//! L2 when its turn comes. For each batch the configurations that the library takes in plain order and with
//! early launch (or those of a sweep) compute a product that is checked against f64 before it is timed and
//! after; a configuration must give the same bits in both orders. The read ceiling, measured on the same
//! bytes, stands beside it.

use std::time::Instant;

use anyhow::Context as _;
use makaira::backend::{Backend, Stream};
use makaira::gemm::{Prepared, Workspace};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Kind, Problem};
use makaira::weights::Group;

use super::ceiling::{self, Ceiling};
use super::layer::{self, Layer, Shape};
use super::operands::{Checked, Operands};
use super::plan::{self, Pair};
use super::reader;
use super::reference::Reference;
use super::report::{self, Others, Row};
use super::timer::Timing;
use super::{Args, CELL_MS, Session, error_limit, in_order, plot};
use crate::problem::KindArgs;

/// Measures all cells.
///
/// # Errors
/// If a kernel fails or an answer is wrong.
pub fn run(session: Session<'_>) -> anyhow::Result<()> {
    let args = session.args;
    let fragments = match &args.list {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("reading {}", path.display()))?
            .lines()
            .map(|line| line.trim().to_owned())
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .collect(),
        None => Vec::new(),
    };
    let shapes = if args.shapes.is_empty() { Shape::all() } else { args.shapes.clone() };
    let mut cells = Cells {
        ms: args.ms(&CELL_MS),
        fragments,
        peers: peers(args)?,
        fp16: args.fp16.as_deref().map(Others::read).transpose()?.unwrap_or_default(),
        rows: Vec::new(),
        session,
    };
    // All kernels at once: the last shape's compile while the first one's would wait.
    let choices: Vec<Vec<(u64, Vec<Pair>)>> =
        shapes.iter().map(|shape| cells.choices(shape)).collect::<Result<_, _>>()?;
    let pairs = choices.iter().flatten().flat_map(|(_, pairs)| pairs);
    cells.session.compile(pairs.flat_map(Pair::choices));
    for (shape, choices) in shapes.iter().zip(&choices) {
        cells.shape(shape, choices)?;
    }
    if let Some(path) = &args.plot {
        plot::draw(path, &cells.session.card(), &cells.rows, &cells.peers, &cells.fp16)?;
    }
    let wrong = cells.rows.iter().filter(|row| row.answer.is_err()).count();
    anyhow::ensure!(wrong == 0, "{wrong} of {} answers are wrong", cells.rows.len());
    Ok(())
}

struct Cells<'a> {
    session: Session<'a>,
    ms: Vec<u64>,
    fragments: Vec<String>,
    peers: Others,
    fp16: Others,
    rows: Vec<Row>,
}

/// The published times, if they are of such weights.
fn peers(args: &Args) -> anyhow::Result<Others> {
    let is_theirs = args.kind.kind() == Kind::U4B8 && args.kind.group(256)? == Group::Size(128);
    Ok(if is_theirs { Others::peers() } else { Others::default() })
}

/// What all cells of one shape share.
struct Cell<'a> {
    shape: &'a Shape,
    operands: &'a Operands,
    reference: &'a Reference,
    ceiling: Option<Ceiling>,
    weight_bytes: usize,
}

impl Cells<'_> {
    fn shape(&mut self, shape: &Shape, choices: &[(u64, Vec<Pair>)]) -> anyhow::Result<()> {
        let start = Instant::now();
        let args = self.session.args;
        let KindArgs { weight, activation, .. } = args.kind;
        let (kind, group) = (args.kind.kind(), args.kind.group(shape.k)?);
        let random = &mut self.session.random;
        let layer = Layer::random(shape, weight, group, random.next());
        let packed = layer.pack()?;
        let max_m = self.ms.iter().copied().max().unwrap_or(1) as usize;
        let a = layer::random_activations(activation, max_m, shape.k, random.next());
        let matrix = layer.matrix()?;
        let reference = Reference::new(&matrix, activation, &a, &self.ms, random.next());
        let gemm = &self.session.gemm;
        let operands = Operands::new(gemm, &packed, activation, &a, !args.check_only)?;
        let weight_bytes = packed.bytes().len();
        println!(
            "\n{}: N={} K={}, {}, group {group}, {:.2} MB of codes and scales x {} copies, {:.1} s to make",
            shape.name,
            shape.n,
            shape.k,
            args.kind.text(),
            weight_bytes as f64 / 1e6,
            operands.weights.len(),
            start.elapsed().as_secs_f64()
        );
        let ceiling = match args.no_ceiling || args.check_only {
            true => None,
            false => {
                let weight = |idx| operands.weight(idx).ptr();
                let sum = reader::sum_of(packed.bytes());
                Some(ceiling::measure(&self.session, &weight, weight_bytes, sum)?)
            }
        };
        let cell =
            Cell { shape, operands: &operands, reference: &reference, ceiling, weight_bytes };
        println!("{}", report::HEADING);
        for (m, pairs) in choices {
            self.batch(&cell, &shape.problem(kind, *m, group), pairs)?;
        }
        Ok(())
    }

    /// What is measured for each batch.
    fn choices(&self, shape: &Shape) -> anyhow::Result<Vec<(u64, Vec<Pair>)>> {
        let (args, device) = (self.session.args, self.session.gpu.device());
        let (kind, group) = (args.kind.kind(), args.kind.group(shape.k)?);
        let of = |m: u64| {
            let problem = shape.problem(kind, m, group);
            let pairs = match args.sweep {
                Some(sweep) => {
                    let per_config = args.per_config as usize;
                    let choices =
                        plan::sweep(&problem, device, sweep, per_config, &self.fragments)?;
                    choices.into_iter().map(Pair::both).collect()
                }
                None if args.config.is_empty() => {
                    vec![Pair::of(|early| self.session.gemm.choice(&problem, early))?]
                }
                None => {
                    let forced = args.config.iter().map(|c| c.choice(&problem, device));
                    forced.map(Pair::both).collect()
                }
            };
            anyhow::Ok((m, pairs))
        };
        self.ms.iter().map(|m| of(*m)).collect()
    }

    /// Measures the choices for one batch; prints them sorted by time.
    fn batch(&mut self, cell: &Cell, problem: &Problem, pairs: &[Pair]) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        for pair in pairs {
            let what = format!("{} m={} {pair}", cell.shape.name, problem.m);
            let measure = || self.measure(cell, problem, pair);
            let watched = self.session.watchdog.watch(&what, measure);
            rows.push(watched.with_context(|| what)?);
        }
        rows.sort_by(|a, b| a.us().total_cmp(&b.us()));
        for row in &rows {
            println!("{}", report::line(row, &self.peers, &self.fp16));
        }
        self.rows.extend(rows);
        // After each batch, so that a run that is cut short leaves what it has.
        let json = self.rows.iter().map(|row| row.json(&self.peers, &self.fp16));
        self.session.write_json("rows", json.collect())
    }

    fn measure(&self, cell: &Cell, problem: &Problem, pair: &Pair) -> anyhow::Result<Row> {
        let args = self.session.args;
        let mut row = Row::new(cell.shape, args.kind.weight, problem.m, cell.weight_bytes, *pair);
        row.ceiling = cell.ceiling.clone();
        // If one does not load the card is as it was: the other configurations can go on.
        let load = |choice| {
            let subject = self.subject(cell, problem, choice);
            subject.map_err(|error| format!("{:#}", anyhow::Error::from(error)))
        };
        let subject = match load(pair.plain) {
            Ok(subject) => subject,
            Err(why) => return Ok(Row { answer: Err(why), ..row }),
        };
        row.grid = subject.grid;
        let kernel = &subject.prepared.kernel;
        (row.num_regs, row.local_bytes) = (kernel.num_regs(), kernel.local_bytes());
        let plain = self.order(&subject, false, !args.check_only)?;
        row.answer = plain.answer.clone().map(|checked| checked.error);
        row.timing = plain.timing;
        let Ok(plain) = plain.answer else { return Ok(row) };
        if args.no_early {
            return Ok(row);
        }
        let early = if pair.is_one() {
            self.early(&subject, plain)?
        } else {
            match load(pair.early) {
                Ok(subject) => match self.order(&subject, false, false)?.answer {
                    Ok(plain) => self.early(&subject, plain)?,
                    Err(why) => Order { answer: Err(why), timing: None },
                },
                Err(why) => Order { answer: Err(why), timing: None },
            }
        };
        row.early = early.timing;
        if let Err(why) = early.answer {
            row.answer = Err(format!("early launch: {why}"));
        }
        Ok(row)
    }

    /// A configuration with all that its launches need.
    fn subject<'c>(
        &self,
        cell: &'c Cell<'c>,
        problem: &Problem,
        choice: Choice,
    ) -> Result<Subject<'c>, makaira::gemm::Error> {
        let gemm = &self.session.gemm;
        let problem = Problem { rows: choice.config.rows, ..*problem };
        let prepared = gemm.prepare_choice(choice)?;
        let (mut grid, mut needs) = ([0; 2], (0, 0));
        for plan in select::plans(&choice.config, &problem, choice.stripe) {
            grid = plan.grid;
            needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
        }
        let workspace = gemm.workspace_of(needs.0, needs.1)?;
        Ok(Subject { cell, problem, prepared, grid, workspace, num_locks: needs.1 as usize })
    }

    /// Early launch of a subject whose answer in plain order is `plain`.
    fn early(&self, subject: &Subject<'_>, plain: Checked) -> anyhow::Result<Order> {
        let early = self.order(subject, true, !self.session.args.check_only)?;
        let answer = early.answer.and_then(|early| match early.bits == plain.bits {
            true => Ok(early),
            false => Err("other bits than in plain order".to_owned()),
        });
        Ok(Order { answer, ..early })
    }

    /// One launch order: the answer of the first launches and, if `timed`, the time and the answer that
    /// the timed launches left.
    fn order(&self, subject: &Subject<'_>, early: bool, timed: bool) -> anyhow::Result<Order> {
        let Subject { cell, problem, prepared, workspace, .. } = subject;
        let launch = |idx: usize, stream: Stream| {
            let (a, c) = (cell.operands.a(), cell.operands.c());
            let weight = cell.operands.weight(idx);
            let stream = in_order(stream, early && idx > 0);
            self.session.gemm.matmul_with(prepared, a, weight, c, problem.m, workspace, stream)?;
            anyhow::Ok(())
        };
        let m = problem.m as usize;
        let limit = error_limit(prepared);
        let check = || {
            let answer = cell.operands.check(m, cell.reference, limit)?;
            let locks_are_zero = self.locks_are_zero(subject)?;
            anyhow::Ok(answer.and_then(|checked| match locks_are_zero {
                true => Ok(checked),
                false => Err("locks are not zero afterwards".to_owned()),
            }))
        };
        cell.operands.poison(m)?;
        // The second and third overlap their predecessors.
        self.session.timer.run(if early { 3 } else { 1 }, &launch)?;
        let mut order = Order { answer: check()?, timing: None };
        if let (Ok(first), true) = (&order.answer, timed) {
            let first = first.bits;
            cell.operands.poison(m)?;
            order.timing = Some(self.session.timer.time(&launch)?);
            order.answer = check()?.and_then(|left| match left.bits == first {
                true => Ok(left),
                false => Err("the same product gave other bits".to_owned()),
            });
        }
        Ok(order)
    }

    fn locks_are_zero(&self, subject: &Subject<'_>) -> anyhow::Result<bool> {
        let Some(locks) = subject.workspace.locks_ptr() else { return Ok(true) };
        let mut bytes = vec![0; 4 * subject.num_locks];
        self.session.gpu.download(locks, &mut bytes)?;
        Ok(bytes.iter().all(|byte| *byte == 0))
    }
}

/// A configuration that is measured.
struct Subject<'a> {
    cell: &'a Cell<'a>,
    problem: Problem,
    prepared: Prepared,
    grid: [u32; 2],
    workspace: Workspace,
    num_locks: usize,
}

/// What came out in one order.
struct Order {
    answer: Result<Checked, String>,
    timing: Option<Timing>,
}
