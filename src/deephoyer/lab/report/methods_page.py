"""The page of the methods (`docs/methods.md`), from the results files of comparisons; what was not run is listed.

The numbers come from `comparison.py`, through `results/methods/*.json`; nothing is typed here.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.files import folder_at, write_atomically
from deephoyer.lab import comparison_protocol
from deephoyer.lab.comparison import FORMAT, ComparedRun, Comparison, near
from deephoyer.lab.comparison_protocol import Protocol
from deephoyer.lab.report import own_settings
from deephoyer.lab.report.record import Record, read_all
from deephoyer.lab.report.significance import holm, sign_flips
from deephoyer.lab.report.table import Column, Table

RESULTS = Path("results") / "methods"
TAG = "one-protocol"
"""That of the records of comparisons."""
LEVEL, BEST = 0.05, "**best**"
NOT_RUN = "not run yet"
PAPERS = """The paper's strengths and thresholds, Adam at 1e-3 throughout, the epoch that is best on the test images.
The paper's appendix (normalised inputs) and the released scripts (raw inputs, weight decay 1e-4 while finetuning)
differ, so each figure has two settings. *Reproduced*: the accuracy rounds to the printed one or is higher, at no more
than 1.05 times the size."""
OTHERS = """The figures that sparse variational dropout, SNIP and l0 report for these networks, with the epochs,
optimizers and schedules of their papers and released scripts. The l0 paper used a different λ for each layer; here l0
has one λ for all layers, is pruned to the printed size, and finetuned."""

TABLES = ("chosen", "outcomes", "failed")
"""What a results file keeps as tables: a line of names, then a line for each run or setting."""


def write(found: Comparison) -> Path:
    """Writes the results of a comparison to its file, unless that belongs to another."""
    refuse_another(found)
    path = folder_at(RESULTS) / f"{found.name}.json"
    write_atomically(path, _one_line_per_run(found.content()).encode())
    return path


def refuse_another(found: Comparison) -> None:
    """Tells it where the results file of this comparison's name belongs to another protocol."""
    path = RESULTS / f"{found.name}.json"
    content, mine = _content(path), found.protocol
    if found.name in comparison_protocol.names() and _without_title(comparison_protocol.read(found.name)) != (
        _without_title(mine)
    ):
        raise UserError(
            f"compare: {path} is for the comparison {found.name!r} that comes with deephoyer, and {found.source} says "
            "something else: give your file another name."
        )
    if content is None:
        return
    if content["protocol"] == mine.digest() and set(content["methods"]) <= set(mine.methods):
        if not found.has_settings_of(content):
            kept = " ".join([*(f"{stage}.epochs={n}" for stage, n in content["epochs"].items()), *content["words"]])
            raise UserError(f"compare: {path} has the results of other settings ({kept}): rename or delete that file.")
        return
    raise UserError(
        f"compare: {path} has the results of another protocol than {found.source}: rename or delete that file, or give "
        "this comparison another name."
    )


def _without_title(protocol: Protocol) -> Protocol:
    return protocol.model_copy(update={"about": ""})


def read(name: str, protocol: Protocol, results: Path = RESULTS) -> dict[str, Any] | None:
    """The results of a comparison; None if it was not run, or if those of that name are of another protocol.

    Without those of methods that are run differently now, or no longer.
    """
    content = _content(results / f"{name}.json")
    if content is None or content["protocol"] != protocol.digest():
        return None
    same = {m for m, entry in protocol.methods.items() if content["methods"].get(m) == entry.digest()}
    return content | {key: [line for line in content[key] if line["method"] in same] for key in TABLES}


def _content(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: not a comparison written by this version of deephoyer.")
    return {key: _as_objects(value) if key in TABLES else value for key, value in content.items()}


def page(results: Path = RESULTS, figures: Path | None = None) -> str:
    """The whole page, as Markdown."""
    parts = [(Path(__file__).parent / "templates" / "methods.md").read_text(encoding="utf-8").rstrip()]
    every = read_all(results.parent)
    for name in comparison_protocol.names():
        protocol = comparison_protocol.read(name)
        content = read(name, protocol, results)
        parts.append(f"## {protocol.about}")
        if content is None or not content["outcomes"]:
            parts.append(_planned(name, protocol))
            continue
        epochs, words = content["epochs"], content.get("words", ())
        parts.append(f"`{_command(name, protocol, epochs, words)}`; {_protocol(protocol, epochs, words)}.")
        parts += [_table(protocol, content, size) for size in protocol.sizes]
        parts.append(_published(protocol, every))
        if figures is not None and (figures / f"methods-{name}.svg").exists():
            parts.append(f"![Test accuracy of every seed]({figures.name}/methods-{name}.svg)")
        parts.append(_flatness(protocol, content))
        parts.append(_off_by_a_factor(protocol, content))
        if figures is not None and (figures / f"strengths-{name}.svg").exists():
            parts.append(f"![Points lost against the strength]({figures.name}/strengths-{name}.svg)")
    for title, about, rows in (
        ("By the paper's own settings", PAPERS, own_settings.PAPER),
        ("By their own settings", OTHERS, own_settings.OWN),
    ):
        parts += [f"## {title}", about, _by_own_settings(rows, every)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _published(protocol: Protocol, every: Sequence[Record]) -> str:
    """Where the runs lie that anyone can measure again."""
    own = [record for record in every if TAG in record.tags and record.base == protocol.base]
    if not own:
        return ""
    seed, folder = own[0].seed, Path(own[0].path).parent.name
    return (
        f"Of {len(own)} methods the run with seed {seed} at {100 * protocol.middle:g} % is published with its weights: "
        f"`deephoyer verify results/{own[0].network}/{folder}` measures it again."
    )


def _protocol(protocol: Protocol, epochs: Mapping[str, int | None], words: Sequence[str]) -> str:
    """The numbers of a comparison: epochs and other words that all runs have, settings, seeds."""
    own = [f"{count} epochs of {stage}" for stage, count in epochs.items() if count is not None]
    own += [f"`{word}`" for word in words]
    settings = min(len(entry.values) for entry in protocol.methods.values())
    seeds = "1 seed" if protocol.choose == 1 else f"{protocol.choose} seeds"
    return (
        f"all runs use `{protocol.base}`{f' with {_listed(own)}' if own else ''}; {settings} settings for each method, "
        f"chosen on {seeds}; {protocol.final} fresh seeds"
    )


def _command(name: str, protocol: Protocol, epochs: Mapping[str, int], words: Sequence[str]) -> str:
    """What was typed: the epochs and words that are not the comparison's own."""
    own = dict(protocol.epochs)
    typed = [f"{stage}.epochs={count}" for stage, count in epochs.items() if count != own[stage]]
    return shlex.join(["deephoyer", "compare", name, *(w for w in words if w not in protocol.words), *typed])


def _planned(name: str, protocol: Protocol) -> str:
    """What a comparison without results would compare, in a sentence."""
    sizes = _listed([f"{100 * size:g}" for size in protocol.sizes])
    return (
        f"Not run yet. `deephoyer compare {name}` compares {_listed(list(protocol.methods))} at {sizes} % of the "
        f"{counted(protocol)}; {_protocol(protocol, dict(protocol.epochs), protocol.words)}."
    )


def _listed(words: Sequence[str]) -> str:
    """
    >>> _listed(["l1", "ADMM", "random"]), _listed(["Taylor, one cut", "random"])
    ('l1, ADMM and random', 'Taylor, one cut; and random')
    """
    if any("," in word for word in words[:-1]):
        return "; ".join([*words[:-1], f"and {words[-1]}"])
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]


def counted(protocol: Protocol) -> str:
    return "weights" if protocol.target == "live" else "MACs"


def _by_own_settings(figures: Sequence[own_settings.Figure], every: Sequence[Record]) -> str:
    """A table of the figures that have records, then a list of the others with the commands that run them."""
    found = own_settings.table(figures, every)
    missing = [figure for figure in figures if not figure.records(every)]
    parts = [_grid(own_settings.TITLES, found, words=1)] if found else []
    if missing:
        lines = [f"- {one.title} ({one.printed}): `{one.command}`" for one in missing]
        parts.append(
            "\n".join(["Not run yet, with the printed figure and the words after `deephoyer run`:", "", *lines])
        )
    return "\n\n".join(parts)


def _one_line_per_run(content: dict[str, Any]) -> str:
    """JSON in which each run is a line: a difference of two files then names the runs that differ."""
    parts = []
    for key, value in content.items():
        text = json.dumps(value)
        if key in TABLES:
            lines = [list(value[0]), *(list(one.values()) for one in value)] if value else []
            text = "[\n  " + ",\n  ".join(map(json.dumps, lines)) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _as_objects(lines: list[list[Any]]) -> list[dict[str, Any]]:
    """What a table of a results file says: its first line has the names."""
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def finals(protocol: Protocol, content: dict[str, Any] | None, method: str, size: float) -> list[ComparedRun]:
    """The runs of a method's chosen setting on the fresh seeds."""
    if content is None:
        return []
    value = next((c["value"] for c in content["chosen"] if (c["method"], c["size"]) == (method, size)), None)
    found = [
        ComparedRun(**o) for o in content["outcomes"] if (o["method"], o["size"], o["value"]) == (method, size, value)
    ]
    return sorted((o for o in found if o.seed >= protocol.choose), key=lambda o: o.seed)


def verdicts(rows: dict[str, list[ComparedRun]]) -> dict[str, str]:
    """Which method is best, and from which it does not differ significantly: an exact paired test over the seeds,
    corrected for the number of tests.

    Methods that lack seeds which others have are not judged, for their means are over other seeds; nor is a best called
    while there are such methods.
    """
    by_seed = {name: {o.seed: o.accuracy for o in found} for name, found in rows.items() if found}
    most = max(map(len, by_seed.values()), default=0)
    judged = {name: "seeds are missing" for name, mine in by_seed.items() if len(mine) < most}
    mean = {name: statistics.fmean(mine.values()) for name, mine in by_seed.items() if name not in judged}
    if len(mean) < 2:
        return judged
    best = max(mean, key=lambda name: mean[name])
    p_values = {}
    for name in mean:
        common = sorted(set(by_seed[name]) & set(by_seed[best]))
        if name != best and common:
            p_values[name] = sign_flips([by_seed[best][seed] - by_seed[name][seed] for seed in common])
    adjusted = holm(p_values)
    clear = not judged and all(p < LEVEL for p in adjusted.values())
    judged |= {n: f"p = {p:.3g}" if p < LEVEL else f"not significant (p = {p:.2g})" for n, p in adjusted.items()}
    return judged | {best: BEST if clear else "highest mean"}


def _table(protocol: Protocol, content: dict[str, Any] | None, size: float) -> str:
    rows = {method: finals(protocol, content, method, size) for method in protocol.methods}
    judged = verdicts(rows)
    what = "weights without idle ones" if protocol.target == "live" else "MACs executed"
    titles = ["method", "setting", "against the best", "test accuracy, %", f"{what}, %", "seeds", "seconds"]
    lines, missing = [], []
    for method, found in rows.items():
        if not found:
            why = _failure(content, method, size)
            if why is None:
                missing.append(method)
            else:
                lines.append([method, f"no setting can be pruned that far: {why}", "", "", "", "", ""])
            continue
        entry = protocol.methods[method]
        shares = [100 * o.share for o in found]
        mark = "" if all(o.met for o in found) else " ‡"
        setting = f"`{entry.word(found[0].value)}`"
        accuracy, left = _spread([100 * o.accuracy for o in found]), _spread(shares) + mark
        seconds = f"{statistics.fmean(o.seconds for o in found):,.0f}"
        lines.append([method, setting, judged.get(method, ""), accuracy, left, str(len(found)), seconds])
    parts = [f"**Target: {100 * size:g} % of the {counted(protocol)}**"]
    if lines:
        parts.append(_grid(titles, lines, words=3))
    if any("‡" in line[4] for line in lines):
        parts.append("‡ the size of at least one seed is more than 1 % off the target.")
    if missing:
        parts.append(
            f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}: {_listed(missing)}." if lines else f"{parts.pop()}: {NOT_RUN}."
        )
    return "\n\n".join(parts)


def _failure(content: dict[str, Any] | None, method: str, size: float) -> str | None:
    failed = [f for f in (content or {}).get("failed", []) if (f["method"], f["size"]) == (method, size)]
    return str(failed[0]["why"]) if failed else None


def by_setting(protocol: Protocol, content: dict[str, Any] | None, method: str) -> dict[float, list[float]]:
    """The held-out accuracies, in percent, of a method's settings at the middle size, on the seeds that choose."""
    found: dict[float, list[float]] = {}
    for o in (content or {}).get("outcomes", []):
        if (o["method"], o["size"]) == (method, protocol.middle) and o["seed"] < protocol.choose:
            found.setdefault(o["value"], []).append(100 * o["held_out"])
    return dict(sorted(found.items()))


def _flatness(protocol: Protocol, content: dict[str, Any] | None) -> str:
    """The cost of missing the best setting: held-out accuracy for each setting, over the seeds that chose it."""
    lines = []
    for method in protocol.methods:
        mean = {value: statistics.fmean(found) for value, found in by_setting(protocol, content, method).items()}
        best = chosen_setting(protocol, content, method)
        if best is not None:  # else its search is not finished
            top = mean[best]
            lost = ", ".join(f"**{v:g}**" if v == best else f"{v:g}: {m - top:+.2f}" for v, m in mean.items())
            lines.append([method, f"{top:.2f}", lost])
    if not lines:
        return ""
    titles = ["method", "best, %", "points lost at other settings"]
    title = f"**How much the setting matters**: accuracy on held-out images, target {100 * protocol.middle:g} %"
    return f"{title}\n\n{_grid(titles, lines, words=1)}"


def chosen_setting(protocol: Protocol, content: dict[str, Any] | None, method: str) -> float | None:
    """The setting of a method that was chosen for the middle size."""
    chosen = (content or {}).get("chosen", [])
    return next((c["value"] for c in chosen if (c["method"], c["size"]) == (method, protocol.middle)), None)


def best_strength(protocol: Protocol, content: dict[str, Any] | None, method: str) -> float | None:
    """The strength of a penalty that was chosen for the middle size."""
    return chosen_setting(protocol, content, method) if protocol.methods[method].penalizes else None


def losses_near_best(protocol: Protocol, content: dict[str, Any] | None, method: str) -> dict[float, list[float]]:
    """For each strength of a penalty within a decade of the chosen one, as a factor of it: the held-out accuracy that
    its seeds lose, in points."""
    best = best_strength(protocol, content, method)
    if best is None:
        return {}
    found = by_setting(protocol, content, method)
    top = statistics.fmean(found[best])
    return {value / best: [top - a for a in seeds] for value, seeds in found.items() if near(value / best)}


def _off_by_a_factor(protocol: Protocol, content: dict[str, Any] | None) -> str:
    """The accuracy lost with a strength that is wrong by up to a factor of ten: how robust a penalty is to that."""
    lines = []
    for method in protocol.methods:
        best = best_strength(protocol, content, method)
        if content is None or best is None:
            continue
        lost = {ratio: statistics.fmean(s) for ratio, s in losses_near_best(protocol, content, method).items()}
        sides = [x for ratio, x in lost.items() if ratio < 1], [x for ratio, x in lost.items() if ratio > 1]
        worst = [f"{max(side):.2f}" if side else "" for side in sides]
        failed = [f["value"] for f in content["failed"] if (f["method"], f["size"]) == (method, protocol.middle)]
        failing = str(len({value for value in failed if near(value / best)}))
        reach = f"{min(lost):.2g} to {max(lost):.2g}"
        lines.append([method, f"{best:g}", f"{statistics.fmean(lost.values()):.2f}", *worst, reach, failing])
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
    return f"{title}target {100 * protocol.middle:g} %\n\n{_grid(titles, lines, words=1)}"


def _grid(titles: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table of cells; the first columns hold words, the others numbers."""
    columns = [
        Column[Sequence[str]](title, itemgetter(i), "left" if i < words else "right") for i, title in enumerate(titles)
    ]
    return Table("", columns, lines).markdown()


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"
