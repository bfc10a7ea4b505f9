"""Kills runs at random moments and compares their final results, bit for bit, with those of uninterrupted runs.

    python benchmarks/torture.py --kills 200        # make torture; about a quarter of an hour

Four kinds: single runs, runs with rounds, runs that stream images, and searches (either the command alone is killed, or
all of its processes). Each is started, killed with SIGKILL after a random time, and started again by the same command
until it ends; then the next one begins. The networks' files must be equal byte for byte, and the metrics except for
their times; the network of every trial of a search must be that of a run with the trial's own command. No temporary
file may be left. To have more moments at which to kill in less time, processes are forked from one that has loaded
torch, and checkpoints are written after every epoch or step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch

import image_folders
from deephoyer.lab import cli, data, search  # loaded before the forks, which saves them the time
from deephoyer.lab.report import run_page
from deephoyer.lab.train import result, resume

SHORT = ("data={name: mnist, limit: 1500}", "device=cpu", "pretrain.epochs=3", "finetune.epochs=3")
SINGLE = ("run", "demo", *SHORT, "regularize.epochs=4")
ROUNDS = ("run", "demo", *SHORT, "regularize.epochs=2", "rounds=3", "prune={rule: density, value: 0.1}")
TRIALS = 3
SEARCH = ("search", "demo", *SHORT, "regularize.epochs=1", "--vary", "regularize.strength=1e-4..1e-2:log")
SEARCH += ("--trials", str(TRIALS), "--maximize", "accuracy", "--minimize", "nonzeros", "--jobs", "1")
SEARCH += ("--silent-after", "2")
SHARES = {"single runs": 0.4, "rounds": 0.3, "streaming": 0.25, "searches": 0.05}


@dataclass
class Kind:
    """A command that is started again and again; `check` returns a line for each error in the folder that it left."""

    words: tuple[str, ...]
    check: Callable[[Path], list[str]]
    kills: int
    most: float = float("inf")
    """Kills of one folder: of a search no more than the number of times that a trial is retried."""
    done: int = 0
    ended: int = 0


def start(words: Sequence[str], folder: Path) -> int:
    """Starts `deephoyer …` in a forked process with its own session; returns the process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        out = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        torch.set_num_threads(1)
        resume.SAVE_SECONDS = resume.SAVE_WITHIN = 0.0
        resume.SAVE_SHARE = float("inf")
        result.BATCHES = (1,)  # neither times nor pages are compared
        run_page.write = lambda folder: [folder]
        sys.argv = ["deephoyer", *words, "--out", str(folder)]
        try:
            cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
    finally:
        os._exit(status)


def ended(child: int, seconds: float) -> int | None:
    """The exit status; None if the process still runs after this time."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(0.002)


def kill(child: int, everyone: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL) if everyone else os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def in_full(words: Sequence[str], folder: Path) -> float:
    """Runs a command to its end; returns the seconds that it took."""
    began = time.monotonic()
    status = ended(start(words, folder), 3600)
    if status != 0:
        sys.exit(f"{' '.join(words)} ended with status {status}:\n{folder.with_suffix('.log').read_text()[-2000:]}")
    return time.monotonic() - began


def differences(whole: Path, folder: Path) -> list[str]:
    """The differences between the folders of an uninterrupted run and of one that was killed."""
    errors = []
    for file in ("finetuned.safetensors", "compact.safetensors"):
        if (folder / file).read_bytes() != (whole / file).read_bytes():
            errors.append(f"{folder}: {file} differs")
    metrics = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (whole, folder)]
    a, b = ([{k: v for k, v in line.items() if k != "seconds"} for line in lines] for lines in metrics)
    return errors + [f"{folder}: metrics.jsonl differs"] * (a != b) + leftovers(folder)


def leftovers(folder: Path) -> list[str]:
    return [f"{path}: was left behind" for path in folder.rglob(".*.tmp")]


def wrong_trials(folder: Path) -> list[str]:
    """The trials of a search that are missing, and those whose networks differ from a run with their command."""
    trials = sorted(path.parent for path in folder.glob("*/summary.json"))
    errors = [f"{folder}: {len(trials)} of {TRIALS} trials ended"] * (len(trials) != TRIALS)
    for trial in trials:
        command = json.loads((trial / "command.json").read_text())
        alone = folder.parent / f"alone-{folder.name}-{trial.name}"
        in_full(["run", command["base"], *command["overrides"]], alone)
        errors += differences(alone, trial)
    return errors


def torture(
    kind: Kind, name: str, place: Path, longest: float, draw: random.Random, say: Callable[[str], None]
) -> list[str]:
    """Kills commands of a kind until there were enough kills, and lets the last one end; returns the errors."""
    errors: list[str] = []
    number = 0
    while kind.done < kind.kills:
        folder = place / f"{name.replace(' ', '-')}-{number}"
        number, kills_here = number + 1, 0
        while True:
            child = start(kind.words, folder)
            enough = kind.done >= kind.kills or kills_here >= kind.most
            most = longest / 4 if draw.random() < 0.8 else longest  # else none would ever end
            status = ended(child, 3600 if enough else draw.uniform(0, most))
            if status is None:
                kill(child, everyone=name != "searches" or draw.random() < 0.5)
                kind.done, kills_here = kind.done + 1, kills_here + 1
            elif status == 0:
                kind.ended += 1
                errors += kind.check(folder)
                break
            else:
                log = folder.with_suffix(".log").read_text()[-1000:]
                errors.append(f"{folder}: ended with status {status} after {kind.done} kills: {log}")
                break
        say(f"{name}: {kind.done} kills, {kind.ended} ended, {len(errors)} wrong")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES, help="only kills of this kind")
    chosen = parser.parse_args()
    draw, began, errors = random.Random(chosen.seed), time.monotonic(), []
    data.load("mnist")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        job = image_folders.recipe_file(place, image_folders.make(place / "photos"))
        commands = {"single runs": SINGLE, "rounds": ROUNDS, "streaming": ("run", str(job), "data.workers=1")}
        kinds: dict[str, tuple[Kind, float]] = {}
        for name, command in commands.items():
            whole = place / f"whole-{name.replace(' ', '-')}"
            seconds = in_full(command, whole)
            print(f"{name}: {seconds:.1f} s without a kill", flush=True)
            compare = lambda folder, whole=whole: differences(whole, folder)  # noqa: E731
            kinds[name] = Kind(command, compare, round(chosen.kills * SHARES[name])), seconds
        left = chosen.kills - sum(kind.kills for kind, _ in kinds.values())
        kinds["searches"] = Kind(SEARCH, wrong_trials, left, search.RETRIES), 4 * kinds["single runs"][1]
        if chosen.only:
            kinds = {chosen.only: kinds[chosen.only]}
            kinds[chosen.only][0].kills = chosen.kills
        for name, (kind, longest) in kinds.items():
            errors += torture(kind, name, place, longest, draw, lambda text: print(text, flush=True))
    total = sum(kind.done for kind, _ in kinds.values())
    print(f"{total} kills, {sum(kind.ended for kind, _ in kinds.values())} ended, {len(errors)} wrong")
    print(*errors, sep="\n")
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
