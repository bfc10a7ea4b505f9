"""Mutation testing: changes one operator or constant of the source at a time, and runs the tests nearest to it.

    python benchmarks/mutants.py --count 200 --out mutants.jsonl     # the same command resumes
    python benchmarks/mutants.py --out mutants.jsonl --again         # tries the mutants that survived once more
    python benchmarks/mutants.py --out mutants.jsonl --show          # only shows the results so far

Mutants are drawn by a seeded hash of what they change, so that edits elsewhere do not affect the draw. A room (a file
or folder) gets a number of mutants that is proportional to the square root of its size, as the channel graph alone has
three quarters of all. All work is done in a copy of the tree. First the nearest tests run once without a mutant, while
the functions that each of them enters are recorded; a mutant is then tried with its file's doctests and the tests that
enter its function, the fastest first, until one fails. A test that takes too long counts as failed. Not changed:
annotations, docstrings, the content of `raise` and `assert`, `strict=` of `zip`, `frozen=` of dataclasses, and strings
that are not compared.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEED = 22
NEAREST: dict[str, list[str]] = {
    "penalties.py": ["penalties", "groups", "regularizer", "misuse"],
    "groups.py": ["groups", "regularizer", "masks", "rules", "misuse"],
    "rules.py": ["rules", "masks", "multiples", "misuse"],
    "masks.py": ["masks", "rules", "multiples", "misuse", "sharded"],
    "strength.py": ["strength", "regularizer", "misuse"],
    "lab/train/strength_control.py": ["strength_control", "strength"],
    "structure": ["structure_parts", "coupled", "tidy", "joints", "passing_channels_on", "networks_that_choose",
                  "computed_weights", "apparent_constants", "compacted_again", "networks_in_use", "smaller", "compact"],
    "export": ["checkpoints", "export", "fuzz", "joints"],
    "lab/runs/checkpoint.py": ["checkpoints", "run", "fuzz", "training_parts", "models"],
}  # fmt: skip
"""The test files that are nearest to each room (a file or a folder of the package)."""
NO_TESTS = 5
"""pytest's exit status where there are none, as in a file without doctests."""
MOST_SECONDS = 15
"""Each mutant is tried with the fastest tests, up to this total time (as they took while they were watched)."""


# Mutants


@dataclass(frozen=True)
class Mutant:
    """One change of one token; `owner` is the first line of the innermost function around it, 0 for none."""

    id: str
    room: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    owner: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} → {self.after}"


OPERATORS = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "@": "*", "<<": ">>", ">>": "<<",
    "&": "|", "|": "&", "^": "&", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "and": "or", "or": "and",
}  # fmt: skip


class _Finder(ast.NodeVisitor):
    """All that can be changed in a file: (start, end, replacement, owner), in offsets of its text."""

    def __init__(self, text: str):
        self.text = text
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line.encode()))
        self.raw = text.encode()
        self.found: list[tuple[int, int, str, int]] = []
        self.owners = [0]
        self.tokens = [
            (self.at(t.start[0], len(t.line[: t.start[1]].encode())), t.string)
            for t in tokenize.generate_tokens(io.StringIO(text).readline)
            if t.type in (tokenize.OP, tokenize.NAME)
        ]
        self.visit(ast.parse(text))

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column

    def begin(self, node: ast.AST) -> int:
        return self.at(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def add(self, start: int, end: int, after: str) -> None:
        self.found.append((start, end, after, self.owners[-1]))

    def between(self, left: int, right: int, words: str) -> None:
        """Changes the operator `words` that stands between two operands."""
        wanted = words.split()
        here = [(place, word) for place, word in self.tokens if left <= place < right and word not in "()"]
        for i in range(len(here) - len(wanted) + 1):
            if [word for _, word in here[i : i + len(wanted)]] == wanted:
                last = here[i + len(wanted) - 1]
                self.add(here[i][0], last[0] + len(last[1]), OPERATORS[words])
                return

    # What is left as it is

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "stacklevel", "frozen"):
            self.visit(node.value)

    # Scopes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if part is not None:
                self.visit(part)
        self.owners.append(min([node.lineno, *(d.lineno for d in node.decorator_list)]))
        for part in node.body:
            self.visit(part)
        self.owners.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.owners.append(node.lineno if self.owners[-1] == 0 else self.owners[-1])
        self.visit(node.body)
        self.owners.pop()

    # What is changed

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if not (isinstance(node.op, ast.BitOr) and _is_type(node)):
            self.between(self.end(node.left), self.begin(node.right), _SIGNS[type(node.op)])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        sign = _SIGNS[type(node.op)]
        for place, word in self.tokens:
            if self.end(node.target) <= place < self.begin(node.value) and word == f"{sign}=":
                self.add(place, place + len(word), f"{OPERATORS[sign]}=")

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        left: ast.AST = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            self.between(self.end(left), self.begin(right), _SIGNS[type(op)])
            left = right
        for text in (node.left, *node.comparators):
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value:
                self.add(self.begin(text), self.end(text), repr(text.value + "x"))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(self.end(left), self.begin(right), _SIGNS[type(node.op)])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            sign = {ast.Not: 3, ast.USub: 1, ast.Invert: 1}[type(node.op)]
            self.add(self.begin(node), self.begin(node) + sign, "")

    def visit_Constant(self, node: ast.Constant) -> None:
        value, after = node.value, None
        if isinstance(value, bool):
            after = repr(not value)
        elif isinstance(value, int | float):
            after = repr(value + 1)
        elif isinstance(value, bytes) and value:
            after = repr(value + b"x")
        if after is not None:
            self.add(self.begin(node), self.end(node), after)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.generic_visit(node)
        self._negate(node.test)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.generic_visit(node)
        self._negate(node.test)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.UnaryOp):  # these change by their operators
            self.add(
                self.begin(test), self.end(test), f"(not ({self.raw[self.begin(test) : self.end(test)].decode()}))"
            )


def _is_type(node: ast.AST) -> bool:
    """`int | float` and `X | None` in `isinstance` and type aliases."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Constant | ast.Attribute)]
    plain = all(isinstance(n, ast.Name | ast.Constant | ast.Attribute | ast.BinOp | ast.operator | ast.expr_context)
                for n in ast.walk(node))  # fmt: skip
    words = [n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else "None" for n in names]
    known = {"int", "float", "str", "bool", "bytes", "list", "tuple", "dict", "None"}
    return plain and any(word in known or word[:1].isupper() for word in words)


_SIGNS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or",
}  # fmt: skip


def sources(tree: Path) -> Iterator[tuple[str, Path]]:
    """Each room and the files in it."""
    for room in NEAREST:
        place = tree / "src/deephoyer" / room
        yield from ((room, file) for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place]))


def mutants(tree: Path) -> list[Mutant]:
    """All possible mutants, in the order in which they are drawn."""
    every = []
    for room, path in sources(tree):
        file = str(path.relative_to(tree / "src/deephoyer"))
        finder = _Finder(path.read_text())
        lines, seen = finder.text.splitlines(), Counter[str]()
        for start, end, after, owner in sorted(set(finder.found)):
            line = finder.raw[:start].count(b"\n") + 1
            what = f"{SEED} {file} {lines[line - 1].strip()} {finder.raw[start:end].decode()} {after}"
            seen[what] += 1
            key = hashlib.sha256(f"{what} {seen[what]}".encode()).hexdigest()[:12]
            every.append(Mutant(key, room, file, line, start, end, finder.raw[start:end].decode(), after, owner))
    return sorted(every, key=lambda mutant: mutant.id)


def drawn(every: list[Mutant], count: int) -> list[Mutant]:
    """A number of mutants, each room's share in proportion to the square root of its size."""
    roots = {room: sum(m.room == room for m in every) ** 0.5 for room in NEAREST}
    shares = {room: count * root / sum(roots.values()) for room, root in roots.items()}
    counts = {room: int(share) for room, share in shares.items()}
    for room in sorted(shares, key=lambda room: counts[room] - shares[room])[: count - sum(counts.values())]:
        counts[room] += 1
    return [m for room in NEAREST for m in [m for m in every if m.room == room][: counts[room]]]


# Tests, in a process of their own that has torch loaded already


class _Watch:
    """A pytest plugin that records which functions of the package each test enters, and how long it takes."""

    def __init__(self, package: Path):
        self.package = f"{package}{os.sep}"
        self.found: dict[str, dict[str, Any]] = {}
        self.entered: set[tuple[str, int]] = set()

    def trace(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self.package):
            self.entered.add((code.co_filename.removeprefix(self.package), code.co_firstlineno))

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.entered.clear()
        self.begin = time.perf_counter()
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        entry = self.found.setdefault(report.nodeid, {"passed": True})
        entry["passed"] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.found[nodeid] |= {"seconds": time.perf_counter() - self.begin, "entered": sorted(self.entered)}


class _Choice:
    """A pytest plugin that runs only the chosen tests, the fastest first, and records the first that fails."""

    def __init__(self, seconds: dict[str, float], result: Path):
        self.seconds, self.result = seconds, result

    def pytest_configure(self, config: Any) -> None:
        from hypothesis import Phase, settings

        # Without shrinking: that a test fails is enough.
        settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [i for i in items if i.nodeid in self.seconds or i.nodeid.startswith("src")]
        items[:] = sorted(chosen, key=lambda i: self.seconds.get(i.nodeid, 0.0))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.result.write_text(report.nodeid)


def in_child(tree: Path, files: Iterable[str], plugin: Any, timeout: float, log: Path) -> int | None:
    """Runs pytest in a forked process; returns its exit status, None if it had to be stopped."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        os.environ.update(PYTHONPATH=f"{tree}/src", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        sys.dont_write_bytecode = isinstance(plugin, _Choice)  # a compiled mutant could be taken for the next
        sys.path[:0] = [f"{tree}/src", f"{tree}/tests", f"{tree}/benchmarks"]
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status: int = 3
        resource.setrlimit(resource.RLIMIT_CPU, (int(timeout), int(timeout)))  # of the processor's, not of the clock
        try:
            import pytest

            words = ["-x"] * isinstance(plugin, _Choice) + ["-q", "-m", "not slow and not browser", "--durations=0"]
            status = int(pytest.main([*words, "-p", "no:cacheprovider", *files], plugins=[plugin]))
            if isinstance(plugin, _Watch):
                (tree / "watched.json").write_text(json.dumps(plugin.found))
        finally:
            os._exit(status)
    ends = time.monotonic() + 20 * timeout
    while True:
        done, code = os.waitpid(child, os.WNOHANG)
        if done or time.monotonic() > ends:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    if not done:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(code)


def watched(tree: Path, kept: Path) -> dict[str, dict[str, Any]]:
    """The functions that each of the nearest tests enters; files watched with the same sources are not run again."""
    code = hashlib.sha256(b"".join(path.read_bytes() for _, path in sources(tree))).hexdigest()
    known = json.loads(kept.read_text()) if kept.exists() else {}
    known = known if known.get("sources") == code else {"sources": code, "files": {}}
    for name in dict.fromkeys(name for names in NEAREST.values() for name in names):
        file = f"tests/test_{name}.py"
        digest = hashlib.sha256((tree / file).read_bytes()).hexdigest()
        if known["files"].get(name, {}).get("digest") == digest:
            continue
        status = in_child(tree, [file], _Watch(tree / "src/deephoyer"), 1800, tree / "watch.log")
        if status is None or not (tree / "watched.json").exists():
            sys.exit(f"{file} could not be watched:\n{(tree / 'watch.log').read_text()[-2000:]}")
        tests = json.loads((tree / "watched.json").read_text())
        known["files"][name] = {"digest": digest, "tests": tests}
        kept.write_text(json.dumps(known))
        bad = [test for test, entry in tests.items() if not entry["passed"]]
        print(
            f"{file}: {len(tests)} tests" + (f", not counted on: {len(bad)} ({bad[0]}, …)" if bad else ""), flush=True
        )
    return {name: entry["tests"] for name, entry in known["files"].items()}


def tried(mutant: Mutant, tree: Path, tests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tries a mutant: its record, with the first test that fails."""
    near = {test: e for name in NEAREST[mutant.room] for test, e in tests[name].items() if e["passed"]}
    here = [mutant.file, mutant.owner]
    entering = sorted((e["seconds"], test) for test, e in near.items() if not mutant.owner or here in e["entered"])
    sums = itertools.accumulate(seconds for seconds, _ in entering)
    chosen = {test: seconds for (seconds, test), sum in zip(entering, sums, strict=True) if sum <= MOST_SECONDS}
    path, result = tree / "src/deephoyer" / mutant.file, tree / "failed.txt"
    before, stat = path.read_bytes(), path.stat()
    files = [f"src/deephoyer/{mutant.file}", *(f"tests/test_{name}.py" for name in NEAREST[mutant.room])]
    result.unlink(missing_ok=True)
    begin = time.perf_counter()
    status: int | None = 0
    try:
        path.write_bytes(before[: mutant.start] + mutant.after.encode() + before[mutant.end :])
        os.utime(path, (stat.st_atime, stat.st_mtime + 3600))  # no compiled file is taken for it
        for file in files:  # one by one: to load a file of tests takes longer than most of its tests
            doctests = file.startswith("src")
            if status in (0, NO_TESTS) and (doctests or any(test.startswith(file) for test in chosen)):
                status = in_child(tree, [file], _Choice(chosen, result), 60 + MOST_SECONDS, tree / "try.log")
    finally:
        path.write_bytes(before)
        os.utime(path, (stat.st_atime, stat.st_mtime))
    failed = result.read_text() if result.exists() else "import"
    by = "time" if status in (None, -signal.SIGXCPU) else "" if status in (0, NO_TESTS) else failed
    return {**asdict(mutant), "tests": len(chosen), "noticed by": by, "seconds": round(time.perf_counter() - begin, 1)}


def shown(results: list[dict[str, Any]], sizes: Counter[str]) -> str:
    """One line for each room, and the mutants that no test noticed."""
    lines, weighted, weights = [], 0.0, 0
    for room in (*NEAREST, ""):
        here = [r for r in results if not room or r["room"] == room]
        noticed = sum(bool(r["noticed by"]) for r in here)
        if here:
            lines.append(f"{room or 'all':24} {noticed:4} of {len(here):4} noticed, {100 * noticed / len(here):.0f} %")
            weighted, weights = weighted + sizes[room] * noticed / len(here), weights + sizes[room]
    lines.append(f"by the size of the rooms {100 * weighted / max(1, weights):.0f} %")
    missed = [r for r in results if not r["noticed by"]]
    lines += [
        f"{r['file']}:{r['line']}: {r['before']} → {r['after']}   ({r['id']}, {r['tests']} tests)" for r in missed
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.jsonl"), help="one line per mutant; those in it are not run again"
    )
    parser.add_argument("--again", action="store_true", help="run the surviving mutants again")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {entry["id"]: entry for entry in map(json.loads, lines)}
    every = mutants(ROOT)
    chosen = drawn(every, options.count)
    if not options.show:
        import numpy, torch, torchvision  # noqa: E401, F401, I001 (loaded once, for all processes to come)
        import hypothesis, pydantic, pytest, safetensors.torch, yaml  # noqa: E401, F401

        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            for part in ("src", "tests", "benchmarks", "pyproject.toml", "results", "README.md", "docs"):
                place = ROOT / part
                if part == "results":
                    (tree / part).symlink_to(place)
                elif place.is_dir():
                    shutil.copytree(place, tree / part)
                else:
                    shutil.copy2(place, tree / part)
            tests = watched(tree, options.out.with_suffix(".watched.json"))
            for number, mutant in enumerate(chosen):
                if mutant.id in known and not (options.again and not known[mutant.id]["noticed by"]):
                    continue
                known[mutant.id] = tried(mutant, tree, tests)
                with open(options.out, "a") as file:
                    file.write(json.dumps(known[mutant.id]) + "\n")
                print(number, mutant, "|", known[mutant.id]["noticed by"] or "NOT NOTICED", flush=True)
    print(shown([known[mutant.id] for mutant in chosen if mutant.id in known], Counter(m.room for m in every)))


if __name__ == "__main__":
    main()
