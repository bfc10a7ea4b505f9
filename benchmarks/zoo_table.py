"""The page `docs/zoo.md`, from the records of `zoo.py`: families, every network, every refusal with its reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

Record = dict[str, Any]
Records = dict[tuple[str, str], Record]

HEAD = """# Networks that people prune

Half of the coupled channels of each network zeroed by magnitude, removed by `compact`, and the outputs compared on
inputs that compaction has not seen (float64 up to 40M parameters and for some detectors, float32 above). Networks come
from configurations with random weights. Made by `python benchmarks/zoo.py --out zoo.jsonl --side` and
`--render docs/zoo.md`; do not edit.

- **smaller**: 40 % of the parameters or more are gone;
- **heads and neurons**: a network whose width a norm holds, and of all channels that it does not hold, heads and
  neurons among them, half are gone; or of what lies between embeddings and the output layer, nearly half is gone;
- outputs may differ by 1e-9 of their scale in float64, by 1e-5 where a network itself computes something in float32
  (Hugging Face's RMSNorms), by 2e-3 in float32;
- **less**: exact, but fewer parameters went; **refused**: see the reasons below; **wrong**: outputs differ;
- **Torch-Pruning works**: the network runs afterwards with outputs of the same shape and has lost 40 % of its
  parameters. It does not keep what a network computes.

The first column of numbers says how many of a family's networks on the list (`benchmarks/zoo.txt`) were run. Seconds
are of one busy core, good for orders of magnitude; those of `tv-det` and `yolo` are of a slower graph.
Torch-Pruning has 30 processor seconds for each network. The family `yolo` was tried by hand: its library is under the
AGPL, which this project does not install; its convolutions' weights were made 2.5 times larger, so that inputs reach
the outputs.
"""
COLUMNS = ("smaller", "heads and neurons", "less", "refused", "wrong", "timeout", "died", "not built")


def render(records: Records, names: dict[str, list[str]]) -> str:
    return "\n".join([HEAD, *_families(records, names), "", *_refusals(records), "", *_networks(records, names), ""])


def works(record: Record) -> bool:
    return record.get("torch_pruning", {}).get("status") == "smaller"


def _families(records: Records, names: dict[str, list[str]]) -> list[str]:
    lines = ["## By family", "", "| family | networks | " + " | ".join(COLUMNS) + " | Torch-Pruning works |"]
    lines += ["|---|" + "--:|" * (len(COLUMNS) + 2)]
    totals: Counter[str] = Counter()
    for family, members in names.items():
        tried = [records[family, name] for name in members if (family, name) in records]
        counts = Counter(r["status"] for r in tried)
        counts["tp"] = sum(map(works, tried))
        totals.update(counts)
        if tried:
            lines.append(_row(family, f"{len(tried)} of {len(members)}", counts))
    total = sum(n for status, n in totals.items() if status != "tp")
    return [*lines, _row("all", str(total), totals)]


def _row(name: str, tried: str, counts: Counter[str]) -> str:
    return f"| {name} | {tried} | " + " | ".join(str(counts[c] or "") for c in (*COLUMNS, "tp")) + " |"


def _refusals(records: Records) -> list[str]:
    lines = ["## What is refused, can't be built, or takes too long", ""]
    for (family, name), record in records.items():
        if "why" in record:
            why = " ".join(record["why"].replace("|", "/").split())
            lines.append(f"- `{family}` {name}, {record['status']}: {why[:300]}")
    return lines if len(lines) > 2 else [*lines, "Nothing."]


def _networks(records: Records, names: dict[str, list[str]]) -> list[str]:
    lines = ["## Every network", ""]
    head = "| network | parameters | parameters left | MACs left | outputs differ by | seconds | status |"
    head += " most held by | Torch-Pruning: parameters left, seconds |"
    for family, members in names.items():
        tried = [records[family, name] for name in members if (family, name) in records]
        if tried:
            lines += [f"### {family}", "", head, "|---|--:|--:|--:|--:|--:|---|---|---|", *map(_network, tried), ""]
    return lines[:-1]


def _network(r: Record) -> str:
    cells = [r["name"], _millions(r.get("parameters"))]
    if "parameters_left" in r:
        seconds = r["coupled_seconds"] + r["compact_seconds"]
        cells += [f"{r['parameters_left'] / r['parameters']:.2f}", f"{r['macs_left'] / max(1, r['macs']):.2f}"]
        cells += [f"{r['difference']:.0e}", f"{seconds:.1f}"]
    else:
        cells += ["", "", "", ""]
    held = r.get("held") or []
    cells += [r["status"], f"{held[0][0]} ({held[0][1]:.0%} of the channels)" if held else ""]
    cells.append(_side(r.get("torch_pruning"), r))
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _side(side: Record | None, record: Record) -> str:
    if side is None:
        return ""
    if "parameters_left" not in side:
        return side["status"]
    shape = "" if side["status"] in ("smaller", "less") else f", {side['status']}"
    return f"{side['parameters_left'] / record['parameters']:.2f}, {side['seconds']:.1f} s{shape}"


def _millions(n: int | None) -> str:
    return "" if n is None else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.0f}k"
