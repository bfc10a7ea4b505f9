"""The HTML pages of a run, of several runs, and of all published runs: one self-contained file each.

A run's folder is read in `run_facts.py`, plots are in `plots.py`, text and style in `templates/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined

from deephoyer.errors import UserError
from deephoyer.files import write_atomically
from deephoyer.lab.report import plots, run_facts
from deephoyer.lab.report.record import Record
from deephoyer.lab.report.run_facts import RunFacts

SELECTIONS = {
    "held-out": "The epoch that is kept was selected on images held out from training.",
    "test-best": "The epoch that is kept was selected on the test images themselves, as in the paper.",
    "last": "The last epoch is kept, whichever was best.",
}


def write(run: str | Path, target: Path | None = None) -> tuple[Path, RunFacts]:
    """Writes the page of a run, by default as `report.html` into its folder; returns its path and the facts."""
    facts = run_facts.read(run)
    path = target or facts.folder / "report.html"
    write_atomically(path, run_page(facts).encode())
    return path, facts


def write_comparison(runs: Sequence[str | Path], target: Path) -> Path:
    """Writes one page that compares several runs."""
    facts = [run_facts.read(run) for run in runs]
    headlines = [{change.title: change for change in run.headline()} for run in facts]
    titles = list(dict.fromkeys(title for headline in headlines for title in headline))
    rows = [(run, [headline.get(title) for title in titles]) for run, headline in zip(facts, headlines, strict=True)]
    drawn = {"compared": plots.compared(facts)} if any(run.metrics for run in facts) else {}
    page = _render("compare.html", drawn, title=f"{len(facts)} runs compared", titles=titles, rows=rows)
    write_atomically(target, page.encode())
    return target


def write_results(records: Sequence[Record], results: Path, target: Path) -> Path:
    """Writes the page of all published runs: one point per seed, with filters by network, protocol and experiment."""
    if not records:
        raise UserError(f"{results}: there are no records to show.")
    rows = [_point(record, results) for record in sorted(records, key=lambda record: record.path)]
    experiments = sorted({row["experiment"] for row in rows})
    colours = dict(zip(experiments, plots.CYCLE * len(experiments), strict=False))
    for row in rows:
        row["colour"] = colours[row["experiment"]]
    page = _render(
        "results.html",
        {"points": plots.points([{**rows[0], "size": rows[0]["nonzeros"]}])},
        title=f"{len(rows)} published runs",
        networks=sorted({row["network"] for row in rows}),
        protocols=sorted({row["protocol"] for row in rows}),
        experiments=experiments,
        colours=list(colours.items()),
        data=_script(rows),
    )
    write_atomically(target, page.encode())
    return target


def _point(record: Record, results: Path) -> dict[str, Any]:
    path = Path(record.path).relative_to(results)
    measured = record.measured
    return {
        "network": record.network,
        "experiment": path.parts[1] if len(path.parts) > 2 else "other",
        "method": record.row or path.stem,
        "command": record.command,
        "protocol": record.protocol,
        "seed": record.seed,
        "accuracy": round(100 * measured.accuracy, 2),
        "nonzeros": measured.total.nonzeros,
        "macs_paper": measured.total.macs_paper,
        "macs_executed": measured.macs_executed,
    }


def run_page(facts: RunFacts) -> str:
    """The page of one run as text."""
    layers, histograms = facts.layers(), run_facts.magnitudes(facts)
    drawn: dict[str, Any] = {}
    if facts.metrics:
        drawn["epochs"] = plots.epochs(facts)
        if (pressure := plots.pressure(facts)) is not None:
            drawn["pressure"] = pressure
    if layers:
        drawn["structure"] = plots.structure(layers)
    if histograms:
        drawn["magnitudes"] = plots.magnitudes(histograms)
    summary = facts.summary
    removed = any(row["filters_left"] is not None for row in layers)
    return _render(
        "run.html",
        drawn,
        title=f"{facts.name}: report of a run",
        facts=facts,
        headline=facts.headline(),
        selection=SELECTIONS.get(summary.get("protocol", ""), ""),
        same=_same(summary),
        stages=facts.stages(),
        layers=layers,
        timed=any(row["ms"] is not None for row in layers),
        structure_caption="Filters after compaction."
        if removed
        else "Filters that are not all zero; no channels were removed.",
        histograms=histograms,
        histogram_data=_script([_choice(entry) for entry in histograms]),
        sets=facts.sets(),
        heads=facts.heads(),
        layer_batch=(summary.get("layer_ms") or {}).get("batch", 1),
        network_file=list(summary.get("files") or ["finetuned.safetensors"])[-1],
        model_words=_model_words(summary),
        machine=_machine(facts.environment),
        environment=json.dumps(facts.environment, indent=1),
    )


def _choice(entry: Mapping[str, Any]) -> dict[str, Any]:
    counts = {"stayed": sum(entry["stayed"]), "went": sum(entry["went"]), "zeros": entry["zeros"]}
    return {"bars": plots.bars(entry), "threshold": entry["threshold"], **counts}


def _same(summary: Mapping[str, Any]) -> str:
    if "changed_predictions" in summary:
        count = summary["changed_predictions"]
        if not count:
            return "The compacted network predicts the same for every test image."
        return f"The compacted network differs on {count} of {summary.get('test_images', 0):,} test images."
    return f"Not compacted: {summary['not_compacted']}" if "not_compacted" in summary else ""


def _model_words(summary: Mapping[str, Any]) -> str:
    model = (summary.get("recipe") or {}).get("model", "…")
    if isinstance(model, str):
        return json.dumps(model)
    settings = {key: value for key, value in model.items() if key != "name"}
    return ", ".join([json.dumps(model.get("name")), *(f"{key}={value!r}" for key, value in settings.items())])


def _machine(environment: Mapping[str, Any]) -> str:
    shown = {"device_name": "", "torch": "torch ", "python": "Python "}
    return ", ".join(word + str(environment[key]) for key, word in shown.items() if key in environment)


def _script(data: Any) -> str:
    """JSON for a script element: nothing in it can end the script."""
    return json.dumps(data).replace("<", "\\u003c")


def _render(template: str, drawn: Mapping[str, Any], **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("deephoyer.lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawing, parts = components(dict(drawn)) if drawn else ("", {})
    script = Resources(mode="inline", components=["bokeh"], minified=True).render_js() if drawn else ""
    names = ("epochs", "pressure", "structure", "magnitudes", "compared", "points")
    drawings = {name: parts.get(name, "") for name in names}
    try:
        return environment.get_template(template).render(plots=drawings, drawing=drawing, script=script, **values)
    except (TypeError, ValueError, KeyError) as why:
        raise UserError(f"the page can't be generated from this folder: {why}.") from None
