//! The picture of a run: for each shape the time and the speed-up over fp16, against the batch.
//!
//! Both axes of the time are logarithmic. The roofline is the read ceiling of the layer's bytes, measured
//! in the same run, or the tensor cores' time, whichever is longer.

use std::path::Path;

use anyhow::Context as _;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{Others, Row};

/// Dense fp16 products reach this on an H200 (the best of cuBLAS there), in operations per microsecond.
const TENSOR_OPS_PER_US: f64 = 776e6;
const PANEL: (u32, u32) = (460, 300);
/// Panels side by side: time and speed-up of two shapes.
const COLUMNS: usize = 4;

const OURS: RGBColor = RGBColor(0, 90, 181);
const EARLY: RGBColor = RGBColor(120, 60, 200);
const FP16: RGBColor = RGBColor(120, 120, 120);
const PEER: RGBColor = RGBColor(220, 80, 0);
const ROOFLINE: RGBColor = RGBColor(0, 140, 60);

/// A line of a panel: points (batch, value).
type Line = Vec<(f64, f64)>;

struct Lines {
    ours: Line,
    early: Line,
    fp16: Line,
    peer: Line,
    roofline: Line,
}

impl Lines {
    /// Times of one shape; of several rows of a batch the fastest.
    fn of(rows: &[&Row], peers: &Others, fp16: &Others) -> Self {
        let [ours, early, fp16_line, peer, roofline] = [const { vec![] }; 5];
        let mut lines = Lines { ours, early, fp16: fp16_line, peer, roofline };
        let mut ms: Vec<u64> = rows.iter().map(|row| row.m).collect();
        ms.sort_unstable();
        ms.dedup();
        for m in ms {
            let timed = rows.iter().filter(|row| row.m == m && row.timing.is_some());
            let Some(row) = timed.min_by(|a, b| a.us().total_cmp(&b.us())) else { continue };
            let at = |us: f64| (m as f64, us);
            let name = &row.shape.name;
            lines.ours.push(at(row.us()));
            lines.early.extend(row.early.map(|timing| at(timing.mean())));
            lines.fp16.extend(fp16.us(name, m, "us").map(at));
            lines.peer.extend(peers.best(name, m).map(|best| at(best.0)));
            let ops = 2.0 * m as f64 * row.shape.n as f64 * row.shape.k as f64;
            if let Some(ceiling) = &row.ceiling {
                let us = ceiling.us().max(ops / TENSOR_OPS_PER_US);
                lines.roofline.push(at(us));
            }
        }
        lines
    }

    fn all(&self) -> [(&'static str, &Line, RGBColor); 5] {
        [
            ("makaira", &self.ours, OURS),
            ("makaira, early launch", &self.early, EARLY),
            ("best 4-bit peer", &self.peer, PEER),
            ("fp16", &self.fp16, FP16),
            ("roofline", &self.roofline, ROOFLINE),
        ]
    }

    /// Every line as fp16's time over its own.
    fn speedups(&self) -> Self {
        let over = |line: &Line| {
            let fp16 = |m: f64| self.fp16.iter().find(|point| point.0 == m).map(|point| point.1);
            line.iter().filter_map(|(m, us)| Some((*m, fp16(*m)? / us))).collect()
        };
        let [ours, early, fp16, peer, roofline] =
            [&self.ours, &self.early, &self.fp16, &self.peer, &self.roofline].map(over);
        Self { ours, early, fp16, peer, roofline }
    }
}

/// Draws all rows as SVG.
///
/// # Errors
/// If nothing was timed or the file cannot be written.
pub fn draw(
    path: &Path,
    title: &str,
    rows: &[Row],
    peers: &Others,
    fp16: &Others,
) -> anyhow::Result<()> {
    let mut shapes: Vec<&str> = Vec::new();
    for row in rows {
        if row.timing.is_some() && !shapes.contains(&row.shape.name.as_str()) {
            shapes.push(&row.shape.name);
        }
    }
    anyhow::ensure!(!shapes.is_empty(), "nothing was timed, so there is nothing to draw");
    let num_rows = (2 * shapes.len()).div_ceil(COLUMNS) as u32;
    let size = (PANEL.0 * COLUMNS as u32, PANEL.1 * num_rows + 40);
    let root = SVGBackend::new(path, size).into_drawing_area();
    let drawn = (|| -> Result<(), Box<dyn std::error::Error + '_>> {
        root.fill(&WHITE)?;
        let panels = root.titled(title, ("sans-serif", 18))?;
        let panels = panels.split_evenly((num_rows as usize, COLUMNS));
        for (pair, shape) in panels.chunks(2).zip(&shapes) {
            let of_shape: Vec<&Row> = rows.iter().filter(|row| row.shape.name == *shape).collect();
            let lines = Lines::of(&of_shape, peers, fp16);
            draw_time(&pair[0], of_shape[0], &lines)?;
            draw_speedup(&pair[1], shape, &lines)?;
        }
        root.present()?;
        Ok(())
    })();
    drawn
        .map_err(|error| anyhow::anyhow!("{error}"))
        .with_context(|| format!("drawing {}", path.display()))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), Box<dyn std::error::Error + 'a>>;

/// The smallest and largest of a coordinate over all lines, widened by a factor.
fn range(lines: &Lines, coordinate: fn(&(f64, f64)) -> f64, widen: f64) -> std::ops::Range<f64> {
    let values = || lines.all().into_iter().flat_map(|(_, line, _)| line).map(coordinate);
    let smallest = values().fold(f64::INFINITY, f64::min);
    smallest / widen..values().fold(0.0, f64::max) * widen
}

fn draw_time<'a>(area: &Area<'a>, row: &Row, lines: &Lines) -> Drawn<'a> {
    let caption = format!("{}: N={} K={}, us", row.shape.name, row.shape.n, row.shape.k);
    let (x, y) = (range(lines, |p| p.0, 1.1), range(lines, |p| p.1, 1.25));
    // Room for the legend above the lines.
    let y = y.start..y.end * 2.5;
    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 14))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d(x.log_scale().base(2.0), y.log_scale().base(2.0))?;
    chart
        .configure_mesh()
        .x_desc("batch M")
        .x_label_formatter(&|m| format!("{m:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (name, line, color) in lines.all() {
        if line.is_empty() {
            continue;
        }
        chart
            .draw_series(LineSeries::new(line.clone(), color.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}

fn draw_speedup<'a>(area: &Area<'a>, shape: &str, lines: &Lines) -> Drawn<'a> {
    let lines = lines.speedups();
    if lines.ours.is_empty() {
        let text = format!("{shape}: no fp16 times (--fp16)");
        area.draw(&Text::new(text, (60, 130), ("sans-serif", 14)))?;
        return Ok(());
    }
    let (x, y) = (range(&lines, |p| p.0, 1.1), range(&lines, |p| p.1, 1.1));
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{shape}: times as fast as fp16"), ("sans-serif", 14))
        .margin(8)
        .x_label_area_size(28)
        .y_label_area_size(44)
        .build_cartesian_2d(x.log_scale().base(2.0), 0.0..y.end)?;
    chart
        .configure_mesh()
        .x_desc("batch M")
        .x_label_formatter(&|m| format!("{m:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (_, line, color) in lines.all() {
        chart.draw_series(LineSeries::new(line.clone(), color.stroke_width(2)).point_size(3))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use makaira::backend::Backend;
    use makaira::emu::EmuBackend;
    use makaira::kernel::{Kind, select};
    use makaira::weights::Group;

    use super::super::ceiling::Ceiling;
    use super::super::layer::Shape;
    use super::super::plan::Pair;
    use super::super::reader::variants;
    use super::super::timer::Timing;
    use super::*;
    use crate::problem::WeightType;

    #[test]
    fn every_shape_gets_its_lines_and_a_run_without_times_none() {
        let backend = EmuBackend::h200_like(132);
        let timing = |us| Timing { us: [us, us], num_launches: 4 };
        let mut rows = Vec::new();
        for (idx, shape) in Shape::all().into_iter().take(3).enumerate() {
            for m in [1, 8, 16, 32, 64] {
                let problem = shape.problem(Kind::U4B8, m, Group::Size(128));
                let choice = select::choose(&problem, backend.device()).expect("there is a kernel");
                let read = 3.0 + 5.0 * idx as f64;
                let variant = variants(backend.device().arch)[0];
                let mut row = Row::new(&shape, WeightType::U4B8, m, 1, Pair::both(choice));
                row.answer = Ok(2e-4);
                row.timing = Some(timing(read * 1.4 + m as f64 / 16.0));
                row.early = Some(timing(read * 1.2 + m as f64 / 16.0));
                row.ceiling = Some(Ceiling::new(vec![(variant, timing(read))]));
                rows.push(row);
            }
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("plot.svg");
        let fp16 = r#"{"rows": [{"shape": "8b_qkv", "m": 1, "us": 16.0},
            {"shape": "8b_qkv", "m": 16, "us": 16.1}, {"shape": "8b_qkv", "m": 64, "us": 17.0}]}"#;
        let fp16_path = folder.path().join("fp16.json");
        std::fs::write(&fp16_path, fp16).expect("writes");
        let fp16 = Others::read(&fp16_path).expect("reads");
        let peers = Others::peers();
        draw(&path, "a card", &rows, &peers, &fp16).expect("draws");
        let svg = std::fs::read_to_string(&path).expect("is there");
        for text in ["a card", "8b_qkv: N=6144 K=4096", "8b_o: no fp16 times", "8b_gateup: N=28672"]
        {
            assert!(svg.contains(text), "{text}");
        }
        // Three shapes' times with their legends, and the speed-ups of the one that has fp16 times.
        for color in ["#005AB5", "#783CC8"] {
            let line = format!("<polyline fill=\"none\" opacity=\"1\" stroke=\"{color}\"");
            assert_eq!(svg.matches(&line).count(), 4 + 3, "{color}");
        }
        rows.iter_mut().for_each(|row| row.timing = None);
        assert!(draw(&path, "a card", &rows, &peers, &fp16).is_err());
    }
}
