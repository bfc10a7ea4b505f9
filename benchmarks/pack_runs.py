"""Packs runs into a few files, so that another machine can resume them: for machines that have to be given back.

    python benchmarks/pack_runs.py FOLDER    # all of runs/, those of comparisons and searches, too
    cat FOLDER/runs-* | tar xz               # on the other machine

The lists of `run_list.py` pack their own runs with `--pack FOLDER`.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deephoyer.files import folder_at, write_atomically
from deephoyer.lab.runs import checkpoint
from deephoyer.lab.runs.find import RUNS
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.train.result import COMPACT
from run_list import Job, Publisher, without_repeats

PART, MOST = 15 * 2**20, 60 * 2**20
"""Bytes of each file, and of all together."""
ALWAYS = ("command.json", "recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "method.safetensors")
"""Files that are packed of every run."""


def pack(
    folders: Iterable[Path], target: Path, most: int, needs_network: Callable[[Path], bool] = lambda folder: True
) -> list[str]:
    """Writes the runs in these folders into `target`, as parts of one archive.

    Of a finished run its record is packed, and its network where that is needed; of another one its newest checkpoint.
    At most `most` bytes, finished runs first. Returns the folders that found no room: their runs would start again.
    """
    stream, left = io.BytesIO(), []
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for folder in sorted(folders, key=lambda folder: not (folder / "summary.json").exists()):
            run, files = RunFolder(folder), [folder / name for name in ALWAYS]
            recipe = run.recipe() if (folder / "recipe.yaml").exists() else None
            if recipe is None:
                continue
            if not (folder / "summary.json").exists():
                numbers = checkpoint.numbers(run.checkpoints)
                files += [run.checkpoints / f"{n:06d}.safetensors" for n in numbers[-1:]]
            elif needs_network(folder):
                files += [folder / recipe.result_file, folder / COMPACT]
            files = [file for file in files if file.exists()]
            archive.fileobj.flush()  # type: ignore[union-attr]
            if stream.tell() + sum(file.stat().st_size for file in files) > most:
                left.append(str(folder))
                continue
            for file in files:
                archive.add(file)
    content = stream.getvalue()
    for old in folder_at(target).glob("runs-*"):
        old.unlink()
    for i, start in enumerate(range(0, len(content), PART)):
        write_atomically(target / f"runs-{i:02d}", content[start : start + PART])
    return left


def pack_jobs(jobs: Sequence[Job], target: Path, publisher: Publisher) -> list[str]:
    """Packs the runs of a list, with the networks that others still build on or that are to be published; returns
    lines that say what was packed."""
    needed = {identity for job in jobs if not job.done() for identity in job.builds_on}
    needed |= {job.identity for job in jobs if job.is_row} - publisher.published()
    with_network = {job.folder for job in jobs if job.identity in needed}
    left = pack([job.folder for job in without_repeats(jobs)], target, MOST, lambda folder: folder in with_network)
    return _report(target, left)


def _report(target: Path, left: Sequence[str]) -> list[str]:
    size = sum(file.stat().st_size for file in target.glob("runs-*"))
    packed = f"packed into {target}: {size / 2**20:.1f} MiB; `cat {target}/runs-* | tar xz` unpacks it"
    return [packed, *(f"no room for {folder}" for folder in left)]


def main() -> None:
    target = Path(sys.argv[1])
    left = pack((path.parent for path in RUNS.glob("*/command.json")), target, MOST)
    print(*_report(target, left), sep="\n")


if __name__ == "__main__":
    main()
