"""The page of the methods (`docs/methods.md`), from the results files of comparisons; rows without results say so.

The numbers come from `comparison.py`, through `results/methods/*.json`; nothing is typed here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deephoyer.errors import UserError
from deephoyer.files import folder_at, write_atomically
from deephoyer.lab import comparison
from deephoyer.lab.comparison import FORMAT, ComparedRun, Comparison, Protocol, holm, near, sign_flips
from deephoyer.lab.report import own_settings
from deephoyer.lab.report.record import read_all

RESULTS = Path("results") / "methods"
LEVEL = 0.05
NOT_RUN = "not run yet"
PAPERS = """The paper's strengths and thresholds, Adam at 1e-3 throughout, test-best epochs. Where its appendix
(normalised inputs) and the released scripts (raw inputs, weight decay 1e-4 while finetuning) differ, both are run.
*Reproduced* is an accuracy that rounds to the printed one at no more than 1.05 times the size."""
OTHERS = """What sparse variational dropout, SNIP and l0 print for these networks, with the epochs, optimizers and
schedules of their papers and released scripts. l0 has one λ for all layers here, where those sizes came about with one
for each; it is cut to them, and finetuned."""


def write(found: Comparison) -> Path:
    """Keeps what a comparison came to."""
    path = folder_at(RESULTS) / f"{found.name}.json"
    write_atomically(path, (json.dumps(found.content(), indent=1) + "\n").encode())
    return path


def read(name: str, results: Path = RESULTS) -> dict[str, Any] | None:
    """What a comparison came to; None where it was not run."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: is not a comparison that this deephoyer wrote.")
    return content


def page(results: Path = RESULTS, figures: Path | None = None) -> str:
    """The whole page, as Markdown."""
    parts = [(Path(__file__).parent / "templates" / "methods.md").read_text(encoding="utf-8").rstrip()]
    for name in comparison.names():
        protocol, content = comparison.read(name), read(name, results)
        parts += [
            f"## {protocol.about}",
            f"`deephoyer compare {name}`; all runs are of `{protocol.base}`{_epochs(protocol, content)}.",
        ]
        parts += [_table(protocol, content, size) for size in protocol.sizes]
        if figures is not None and (figures / f"methods-{name}.svg").exists():
            parts.append(f"![Test accuracy of every seed]({figures.name}/methods-{name}.svg)")
        parts.append(_flatness(protocol, content))
        parts.append(_off_by_a_factor(protocol, content))
        if figures is not None and (figures / f"strengths-{name}.svg").exists():
            parts.append(f"![Points lost against the strength]({figures.name}/strengths-{name}.svg)")
        parts.append(_commands(protocol, content))
    every = read_all(results.parent)
    for title, told, rows in (
        ("By the paper's own settings", PAPERS, own_settings.PAPER),
        ("By their own settings", OTHERS, own_settings.OWN),
    ):
        parts += [f"## {title}", told, _grid(own_settings.TITLES, own_settings.table(rows, every), words=1)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _epochs(protocol: Protocol, content: dict[str, Any] | None) -> str:
    """Those that were run, or else would be."""
    epochs = dict(protocol.epochs) if content is None else content["epochs"]
    own = [f"{count} to {stage}" for stage, count in epochs.items() if count is not None]
    return f" with epochs of their own ({', '.join(own)})" if own else ""


def finals(protocol: Protocol, content: dict[str, Any] | None, method: str, size: float) -> list[ComparedRun]:
    """The outcomes of a method's chosen setting, on the fresh seeds."""
    if content is None:
        return []
    value = next((c["value"] for c in content["chosen"] if (c["method"], c["size"]) == (method, size)), None)
    found = [
        ComparedRun(**o) for o in content["outcomes"] if (o["method"], o["size"], o["value"]) == (method, size, value)
    ]
    return sorted((o for o in found if o.seed >= protocol.choose), key=lambda o: o.seed)


def verdicts(rows: dict[str, list[ComparedRun]]) -> dict[str, str]:
    """Which method is best, and which can't be told from it: paired by seeds, exact, corrected for all the tests.

    Methods that lack seeds which others have are not judged, for their means are of other seeds; nor is a best called
    while there are such.
    """
    by_seed = {name: {o.seed: o.accuracy for o in found} for name, found in rows.items() if found}
    most = max(map(len, by_seed.values()), default=0)
    told = {name: "seeds are missing" for name, mine in by_seed.items() if len(mine) < most}
    mean = {name: statistics.fmean(mine.values()) for name, mine in by_seed.items() if name not in told}
    if len(mean) < 2:
        return told
    best = max(mean, key=lambda name: mean[name])
    p_values = {}
    for name in mean:
        common = sorted(set(by_seed[name]) & set(by_seed[best]))
        if name != best and common:
            p_values[name] = sign_flips([by_seed[best][seed] - by_seed[name][seed] for seed in common])
    adjusted = holm(p_values)
    clear = not told and all(p < LEVEL for p in adjusted.values())
    told |= {n: f"p = {p:.3g}" if p < LEVEL else f"not told from it (p = {p:.2g})" for n, p in adjusted.items()}
    return told | {best: "**best**" if clear else "highest mean"}


def _table(protocol: Protocol, content: dict[str, Any] | None, size: float) -> str:
    rows = {method: finals(protocol, content, method, size) for method in protocol.methods}
    judged = verdicts(rows)
    what = "weights, idle ones gone" if protocol.target == "live" else "MACs executed"
    titles = ["method", "setting", "against the best", "test accuracy, %", f"{what}, %", "seeds", "seconds"]
    lines = []
    for method, found in rows.items():
        if not found:
            lines.append([method, _without(content, method, size), "", "", "", "", ""])
            continue
        entry = protocol.methods[method]
        shares = [100 * o.share for o in found]
        mark = "" if all(o.met for o in found) else " ‡"
        setting = f"`{entry.word(found[0].value)}`"
        accuracy, left = _spread([100 * o.accuracy for o in found]), _spread(shares) + mark
        seconds = f"{statistics.fmean(o.seconds for o in found):,.0f}"
        lines.append([method, setting, judged.get(method, ""), accuracy, left, str(len(found)), seconds])
    title = f"**{100 * size:g} % of the {'weights' if protocol.target == 'live' else 'MACs'} asked for**"
    notes = "\n\n‡ a seed is more than 1 % off the size." if any("‡" in line[4] for line in lines) else ""
    return f"{title}\n\n{_grid(titles, lines, words=3)}{notes}"


def _without(content: dict[str, Any] | None, method: str, size: float) -> str:
    failed = [f for f in (content or {}).get("failed", []) if (f["method"], f["size"]) == (method, size)]
    return f"no setting can be pruned that far: {failed[0]['why']}" if failed else NOT_RUN


def by_setting(protocol: Protocol, content: dict[str, Any] | None, method: str) -> dict[float, list[float]]:
    """The held-out accuracies, in percent, of a method's settings at the middle size, on the seeds that choose."""
    found: dict[float, list[float]] = {}
    for o in (content or {}).get("outcomes", []):
        if (o["method"], o["size"]) == (method, protocol.middle) and o["seed"] < protocol.choose:
            found.setdefault(o["value"], []).append(100 * o["held_out"])
    return dict(sorted(found.items()))


def _flatness(protocol: Protocol, content: dict[str, Any] | None) -> str:
    """What it costs to miss the best setting: held-out accuracy of the seeds that chose, against the setting."""
    lines = []
    for method in protocol.methods:
        mean = {value: statistics.fmean(found) for value, found in by_setting(protocol, content, method).items()}
        if mean:
            top = max(mean.values())
            lost = ", ".join(f"{v:g}: {m - top:+.2f}" if m < top else f"**{v:g}**" for v, m in mean.items())
            lines.append([method, f"{top:.2f}", lost])
    if not lines:
        return ""
    titles = ["method", "best, %", "points lost at other settings"]
    title = f"**How much the setting matters**, held-out images, {100 * protocol.middle:g} % asked for"
    return f"{title}\n\n{_grid(titles, lines, words=1)}"


def best_strength(protocol: Protocol, content: dict[str, Any] | None, method: str) -> float | None:
    """The strength of a penalty that was chosen for the middle size."""
    chosen = (content or {}).get("chosen", []) if protocol.methods[method].penalizes else []
    return next((c["value"] for c in chosen if (c["method"], c["size"]) == (method, protocol.middle)), None)


def losses_near_best(protocol: Protocol, content: dict[str, Any] | None, method: str) -> dict[float, list[float]]:
    """For each strength of a penalty within a decade of the chosen one, as a factor of that, what its seeds lose there,
    in points of held-out accuracy."""
    best = best_strength(protocol, content, method)
    if best is None:
        return {}
    found = by_setting(protocol, content, method)
    top = statistics.fmean(found[best])
    return {value / best: [top - a for a in seeds] for value, seeds in found.items() if near(value / best)}


def _off_by_a_factor(protocol: Protocol, content: dict[str, Any] | None) -> str:
    """What a strength costs that is off by up to a factor of ten: whether a penalty forgives that."""
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
        "best",
        "lost on average",
        "at worst below",
        "at worst above",
        "from … to … times",
        "that fail",
    ]
    title = "**What a strength costs that is off by up to ten times**, in points of held-out accuracy, "
    return f"{title}{100 * protocol.middle:g} % asked for\n\n{_grid(titles, lines, words=1)}"


def _commands(protocol: Protocol, content: dict[str, Any] | None) -> str:
    lines = []
    for method in protocol.methods:
        for size in protocol.sizes:
            found = finals(protocol, content, method, size)
            if found:
                lines.append(f"- {method}, {100 * size:g} %, seed {found[0].seed}: `{found[0].command}`")
    if not lines:
        return ""
    return "\n".join(["<details><summary>The runs behind the rows</summary>", "", *lines, "", "</details>"])


def _grid(titles: Sequence[str], lines: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table; the first columns hold words, the others numbers."""
    bars = ["---" if i < words else "---:" for i in range(len(titles))]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (titles, bars, *lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _spread(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"
