//! Cells: one layer, one batch, one configuration at a time.
//!
//! For each shape a random layer is made, packed and copied to the device often enough that no copy is in
//! L2 when its turn comes. For each batch the chosen configuration (or those of a sweep) computes a product
//! that is checked against f64 before it is timed and after, in plain order and with early launch; both
//! orders must give the same bits. The read ceiling, measured on the same bytes, stands beside it.

use std::time::Instant;

use anyhow::Context as _;
use makaira::backend::{Backend, Stream};
use makaira::gemm::{Prepared, Workspace};
use makaira::kernel::Problem;
use makaira::kernel::select::{self, Choice};
use makaira::weights::Group;

use super::ceiling::{self, Ceiling};
use super::layer::{self, Layer, Shape};
use super::operands::{Checked, Operands};
use super::reader;
use super::reference::Reference;
use super::report::{self, Others, Row};
use super::timer::Timing;
use super::{CELL_MS, Session, error_limit, in_order, plan, plot};

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
        peers: if args.group == 128 { Others::peers() } else { Others::default() },
        fp16: args.fp16.as_deref().map(Others::read).transpose()?.unwrap_or_default(),
        rows: Vec::new(),
        session,
    };
    // All kernels at once: the last shape's compile while the first one's would wait.
    let choices: Vec<Vec<(u64, Vec<Choice>)>> =
        shapes.iter().map(|shape| cells.choices(shape)).collect::<Result<_, _>>()?;
    cells.session.compile(choices.iter().flatten().flat_map(|(_, choices)| choices));
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

/// What all cells of one shape share.
struct Cell<'a> {
    shape: &'a Shape,
    operands: &'a Operands,
    reference: &'a Reference,
    ceiling: Option<Ceiling>,
    weight_bytes: usize,
}

impl Cells<'_> {
    fn shape(&mut self, shape: &Shape, choices: &[(u64, Vec<Choice>)]) -> anyhow::Result<()> {
        let start = Instant::now();
        let args = self.session.args;
        let group = Group::new(shape.k, args.group)?;
        let random = &mut self.session.random;
        let layer = Layer::random(shape, group, random.next());
        let packed = layer.pack()?;
        let max_m = self.ms.iter().copied().max().unwrap_or(1) as usize;
        let a = layer::random_activations(max_m, shape.k, random.next());
        let reference = Reference::new(&layer, &a, &self.ms, random.next());
        let operands = Operands::new(&self.session.gemm, &packed, &a, !args.check_only)?;
        let weight_bytes = packed.bytes().len();
        println!(
            "\n{}: N={} K={}, {:.2} MB of codes and scales x {} copies, {:.1} s to make",
            shape.name,
            shape.n,
            shape.k,
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
        for (m, choices) in choices {
            self.batch(&cell, &shape.problem(*m, group), choices)?;
        }
        Ok(())
    }

    /// What is measured for each batch.
    fn choices(&self, shape: &Shape) -> anyhow::Result<Vec<(u64, Vec<Choice>)>> {
        let (args, device) = (self.session.args, self.session.gpu.device());
        let group = Group::new(shape.k, args.group)?;
        let of = |m: u64| {
            let problem = shape.problem(m, group);
            let choices = match args.sweep {
                Some(sweep) => {
                    let per_config = args.per_config as usize;
                    plan::sweep(&problem, device, sweep, per_config, &self.fragments)?
                }
                None if args.config.is_empty() => vec![select::choose(&problem, device)?],
                None => args.config.iter().map(|c| c.choice(&problem, device)).collect(),
            };
            anyhow::Ok((m, choices))
        };
        self.ms.iter().map(|m| of(*m)).collect()
    }

    /// Measures the choices for one batch; prints them sorted by time.
    fn batch(&mut self, cell: &Cell, problem: &Problem, choices: &[Choice]) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        for choice in choices {
            let what =
                format!("{} m={} {}:{}", cell.shape.name, problem.m, choice.config, choice.stripe);
            let watched =
                self.session.watchdog.watch(&what, || self.measure(cell, problem, *choice));
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

    fn measure(&self, cell: &Cell, problem: &Problem, choice: Choice) -> anyhow::Result<Row> {
        let gemm = &self.session.gemm;
        let problem = &Problem { rows: choice.config.rows, ..*problem };
        let mut row = Row::new(cell.shape, problem.m, cell.weight_bytes, choice);
        row.ceiling = cell.ceiling.clone();
        let prepared = match gemm.prepare_choice(choice) {
            Ok(prepared) => prepared,
            // The card is as it was: the other configurations can go on.
            Err(error) => {
                row.answer = Err(format!("{:#}", anyhow::Error::from(error)));
                return Ok(row);
            }
        };
        (row.num_regs, row.local_bytes) =
            (prepared.kernel.num_regs(), prepared.kernel.local_bytes());
        let mut needs = (0, 0);
        for plan in select::plans(&choice.config, problem, choice.stripe) {
            row.grid = plan.grid;
            needs = (needs.0.max(plan.scratch_bytes), needs.1.max(plan.num_locks));
        }
        let workspace = gemm.workspace_of(needs.0, needs.1)?;
        let subject = Subject { cell, problem, prepared, workspace };
        let plain = self.order(&subject, false)?;
        row.answer = plain.answer.clone().map(|checked| checked.error);
        row.timing = plain.timing;
        if row.answer.is_ok() && !self.session.args.no_early {
            let early = self.order(&subject, true)?;
            row.early = early.timing;
            match (plain.answer, early.answer) {
                (Ok(plain), Ok(early)) if plain.bits == early.bits => {}
                (_, Ok(_)) => row.answer = Err("early launch changes bits".to_owned()),
                (_, Err(why)) => row.answer = Err(format!("early launch: {why}")),
            }
        }
        if let (Ok(_), Some(locks)) = (&row.answer, subject.workspace.locks_ptr()) {
            let mut bytes = vec![0; 4 * needs.1 as usize];
            self.session.gpu.download(locks, &mut bytes)?;
            if bytes.iter().any(|byte| *byte != 0) {
                row.answer = Err("locks are not zero afterwards".to_owned());
            }
        }
        Ok(row)
    }

    /// One launch order: the answer of the first launches, the time, the answer that the timed ones left.
    fn order(&self, subject: &Subject<'_>, early: bool) -> anyhow::Result<Order> {
        let Subject { cell, problem, prepared, workspace } = subject;
        let launch = |idx: usize, stream: Stream| {
            let (a, c) = (cell.operands.a(), cell.operands.c());
            let weight = cell.operands.weight(idx);
            let stream = in_order(stream, early && idx > 0);
            self.session.gemm.matmul_with(prepared, a, weight, c, problem.m, workspace, stream)?;
            anyhow::Ok(())
        };
        let m = problem.m as usize;
        let check = || cell.operands.check(m, cell.reference, error_limit(prepared));
        cell.operands.poison(m)?;
        // The second and third overlap their predecessors.
        self.session.timer.run(if early { 3 } else { 1 }, &launch)?;
        let mut order = Order { answer: check()?, timing: None };
        if let (Ok(first), false) = (&order.answer, self.session.args.check_only) {
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
}

/// What is measured in both orders.
struct Subject<'a> {
    cell: &'a Cell<'a>,
    problem: &'a Problem,
    prepared: Prepared,
    workspace: Workspace,
}

/// What came out in one order.
struct Order {
    answer: Result<Checked, String>,
    timing: Option<Timing>,
}
