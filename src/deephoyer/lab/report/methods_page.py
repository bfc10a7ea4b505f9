"""The page of the methods (`docs/methods.md`), from the results files of comparisons; what was not run is listed.

The numbers are those of `results/methods/*.json` (`comparison_results.py`); nothing is typed here.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from deephoyer.lab import comparison_protocol
from deephoyer.lab.comparison import near
from deephoyer.lab.comparison_protocol import Protocol
from deephoyer.lab.report import printed_results
from deephoyer.lab.report.comparison_results import RESULTS, TAG, ComparisonResults, read
from deephoyer.lab.report.printed_results import PrintedResult
from deephoyer.lab.report.record import Record, read_all
from deephoyer.lab.report.significance import verdicts
from deephoyer.lab.report.table import Column, Table

NOT_RUN = "not run yet"
PAPERS = """The paper's strengths and thresholds, Adam at 1e-3 throughout, the epoch that is best on the test images.
The paper's appendix (normalised inputs) and the released scripts (raw inputs, weight decay 1e-4 while finetuning)
differ, so each figure has two settings. *Reproduced*: the accuracy rounds to the printed one or is higher, at no more
than 1.05 times the size."""
OTHERS = """The figures that sparse variational dropout, SNIP and l0 report for these networks, with the epochs,
optimizers and schedules of their papers and released scripts. The l0 paper used a different λ for each layer; here l0
has one λ for all layers, is pruned to the printed size, and finetuned."""


def page(folder: Path = RESULTS, figures: Path | None = None) -> str:
    """The whole page, as Markdown. `folder` has the results files, `figures` the pictures that may be there."""
    parts = [(Path(__file__).parent / "templates" / "methods.md").read_text(encoding="utf-8").rstrip()]
    records = read_all(folder.parent)
    for name in comparison_protocol.names():
        parts += _comparison(name, folder, figures, records)
    for title, about, results in (
        ("By the paper's own settings", PAPERS, printed_results.PAPER),
        ("By their own settings", OTHERS, printed_results.METHODS),
    ):
        parts += [f"## {title}", about, _repeated(results, records)]
    return "\n\n".join(part for part in parts if part) + "\n"


def page_of_own(source: str, folder: Path = RESULTS) -> str:
    """The page of a comparison that is a file of the user's."""
    parts = _comparison(source, folder, None, read_all(folder.parent))
    return "\n\n".join(part for part in parts if part).removeprefix("#") + "\n"


def _comparison(name: str, folder: Path, figures: Path | None, records: Sequence[Record]) -> list[str]:
    """The paragraphs on one comparison: one of ours by its name, or a file."""
    protocol = comparison_protocol.read(name)
    results = read(Path(name).stem, protocol, folder)
    title = f"## {protocol.about}"
    if results is None or not results.content["outcomes"]:
        return [title, _planned(name, protocol)]
    epochs, words = results.content["epochs"], results.content.get("words", ())
    return [
        title,
        f"`{_command(name, protocol, epochs, words)}`; {_numbers(protocol, epochs, words)}.",
        *(_table(results, size) for size in protocol.sizes),
        _published(protocol, records),
        _picture(figures, f"methods-{name}", "Test accuracy of every seed"),
        _losses_by_setting(results),
        _losses_near_best(results),
        _picture(figures, f"strengths-{name}", "Points lost against the strength"),
    ]


def _picture(figures: Path | None, name: str, about: str) -> str:
    if figures is None or not (figures / f"{name}.svg").exists():
        return ""
    return f"![{about}]({figures.name}/{name}.svg)"


def _published(protocol: Protocol, records: Sequence[Record]) -> str:
    """The folder of the runs that anyone can measure again."""
    published = [record for record in records if TAG in record.tags and record.base == protocol.base]
    if not published:
        return ""
    first, folder = published[0], Path(published[0].path).parent.name
    return (
        f"Of {len(published)} methods the run with seed {first.seed} at {100 * protocol.middle:g} % is published with "
        f"its weights: `deephoyer verify results/{first.network}/{folder}` measures it again."
    )


def _numbers(protocol: Protocol, epochs: Mapping[str, int | None], words: Sequence[str]) -> str:
    """The numbers of a comparison: the epochs and other overrides of all runs, settings, seeds."""
    overrides = [f"{count} epochs of {stage}" for stage, count in epochs.items() if count is not None]
    overrides += [f"`{word}`" for word in words]
    settings = min(len(entry.values) for entry in protocol.methods.values())
    seeds = "1 seed" if protocol.choose == 1 else f"{protocol.choose} seeds"
    return (
        f"all runs use `{protocol.base}`{f' with {_listed(overrides)}' if overrides else ''}; {settings} settings for "
        f"each method, chosen on {seeds}; {protocol.final} fresh seeds"
    )


def _command(name: str, protocol: Protocol, epochs: Mapping[str, int], words: Sequence[str]) -> str:
    """What was typed: the epochs and overrides that are not the comparison's own."""
    default = dict(protocol.epochs)
    typed = [f"{stage}.epochs={count}" for stage, count in epochs.items() if count != default[stage]]
    return shlex.join(["deephoyer", "compare", name, *(w for w in words if w not in protocol.words), *typed])


def _planned(name: str, protocol: Protocol) -> str:
    """What a comparison without results would compare, in a sentence."""
    sizes = _listed([f"{100 * size:g}" for size in protocol.sizes])
    return (
        f"Not run yet. `deephoyer compare {name}` compares {_listed(list(protocol.methods))} at {sizes} % of the "
        f"{protocol.counts}; {_numbers(protocol, dict(protocol.epochs), protocol.words)}."
    )


def _listed(words: Sequence[str]) -> str:
    """
    >>> _listed(["l1", "ADMM", "random"]), _listed(["Taylor, one cut", "random"])
    ('l1, ADMM and random', 'Taylor, one cut; and random')
    """
    if any("," in word for word in words[:-1]):
        return "; ".join([*words[:-1], f"and {words[-1]}"])
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


def _repeated(results: Sequence[PrintedResult], records: Sequence[Record]) -> str:
    """A table of the printed results that have records, then a list of the others with the commands that run them."""
    rows = printed_results.table(results, records)
    missing = [result for result in results if not result.ours(records)]
    parts = [_grid(printed_results.TITLES, rows, words=1)] if rows else []
    if missing:
        lines = [f"- {result.title} ({result.printed}): `{result.command}`" for result in missing]
        parts.append(
            "\n".join(["Not run yet, with the printed figure and the words after `deephoyer run`:", "", *lines])
        )
    return "\n\n".join(parts)


def _table(results: ComparisonResults, size: float) -> str:
    """The methods at one size, each with the test accuracy of its chosen setting."""
    protocol = results.protocol
    judged = verdicts(results.accuracies(size))
    what = "weights without idle ones" if protocol.target == "live" else "MACs executed"
    titles = ["method", "setting", "against the best", "test accuracy, %", f"{what}, %", "seeds", "seconds"]
    lines, missing = [], []
    for method, entry in protocol.methods.items():
        runs, failures = results.finals(method, size), results.failures(method, size)
        if runs:
            open_end = " §" if results.is_at_an_open_end(method, size) else ""
            setting = f"`{entry.word(runs[0].value)}`{open_end}"
            accuracy = _spread([100 * run.accuracy for run in runs])
            left = _spread([100 * run.share for run in runs]) + ("" if all(run.met for run in runs) else " ‡")
            seconds = f"{statistics.fmean(run.seconds for run in runs):,.0f}"
            lines.append([method, setting, judged.get(method, ""), accuracy, left, str(len(runs)), seconds])
        elif failures:
            lines.append([method, f"no setting can be pruned that far: {failures[0]['why']}", "", "", "", "", ""])
        else:
            missing.append(method)
    title = f"**Target: {100 * size:g} % of the {protocol.counts}**"
    if not lines:
        return f"{title}: {NOT_RUN}."
    parts = [title, _grid(titles, lines, words=3)]
    if any("‡" in line[4] for line in lines):
        parts.append("‡ the size of at least one seed is more than 1 % off the target.")
    if any(line[1].endswith("§") for line in lines):
        parts.append(
            f"§ still the last value of its grid after {_times(protocol.extensions)}: a better one may lie beyond."
        )
    if missing:
        parts.append(f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}: {_listed(missing)}.")
    return "\n\n".join(parts)


def _times(extensions: int) -> str:
    """
    >>> _times(0), _times(1), _times(3)
    ('no extensions', '1 extension', '3 extensions')
    """
    return f"{extensions or 'no'} extension{'' if extensions == 1 else 's'}"


def _losses_by_setting(results: ComparisonResults) -> str:
    """The cost of missing the best setting: held-out accuracy for each setting, over the seeds that chose it."""
    middle, lines, better = results.protocol.middle, [], []
    for method in results.protocol.methods:
        best = results.chosen_setting(method, middle)
        if best is None:  # its search is not finished
            continue
        means = {value: statistics.fmean(seeds) for value, seeds in results.held_out_by_setting(method).items()}
        top = means[best]
        lost = ", ".join(f"**{v:g}**" if v == best else f"{v:g}: {mean - top:+.2f}" for v, mean in means.items())
        lines.append([method, f"{top:.2f}", lost])
        better += [method] * (round(max(means.values()) - top, 2) > 0)
    if not lines:
        return ""
    titles = ["method", "chosen, %", "points lost at other settings"]
    title = f"**How much the setting matters**: accuracy on held-out images, target {100 * middle:g} %"
    parts = [title, _grid(titles, lines, words=1)]
    if better:
        parts.append(f"Better settings of {_listed(better)} were run after the choice, which they do not change.")
    return "\n\n".join(parts)


def _losses_near_best(results: ComparisonResults) -> str:
    """The accuracy lost with a strength that is wrong by up to a factor of ten: how robust a penalty is to that."""
    middle, lines = results.protocol.middle, []
    for method in results.protocol.methods:
        best = results.best_strength(method)
        if best is None:
            continue
        lost = {ratio: statistics.fmean(seeds) for ratio, seeds in results.losses_near_best(method).items()}
        sides = [x for ratio, x in lost.items() if ratio < 1], [x for ratio, x in lost.items() if ratio > 1]
        largest = [f"{max(side):.2f}" if side else "" for side in sides]
        failed = {failure["value"] for failure in results.failures(method, middle) if near(failure["value"] / best)}
        reach = f"{min(lost):.2g} to {max(lost):.2g}"
        mean = f"{statistics.fmean(lost.values()):.2f}"
        lines.append([method, f"{best:g}", mean, *largest, reach, str(len(failed))])
    if not lines:
        return ""
    titles = [
        "penalty",
        "best strength",
        "mean loss",
        "largest loss below it",
        "largest loss above it",
        "range, × the best",
        "strengths that failed",
    ]
    title = "**Accuracy lost with a strength that is wrong by up to a factor of ten**, in points, held-out images, "
    return f"{title}target {100 * middle:g} %\n\n{_grid(titles, lines, words=1)}"


def _grid(titles: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table of cells; the first columns hold words, the others numbers."""
    columns = [
        Column[Sequence[str]](title, itemgetter(i), "left" if i < words else "right") for i, title in enumerate(titles)
    ]
    return Table("", columns, lines).markdown()


def _spread(values: Sequence[float]) -> str:
    """Mean ± sample standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"
