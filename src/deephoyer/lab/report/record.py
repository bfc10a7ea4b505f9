"""A record: one published run, as a small JSON file.

`results/NETWORK/EXPERIMENT/NAME-sSEED.json` says what was run, where, and what came out; the network's file is in
`results/weights`, unless it was not kept. A record contains its whole recipe: none is ever looked up by its name.
Records are made in `publish.py`, and measured again in `verify.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deephoyer.errors import UserError, first_line
from deephoyer.files import folder_at, plain_file, write_atomically
from deephoyer.lab.choices import named
from deephoyer.lab.recipe import Command
from deephoyer.lab.report.stored_weights import RESULTS, WEIGHTS
from deephoyer.lab.schema import Recipe

FORMAT = "deephoyer-record-2"
LONGEST_PATH = 80
"""Characters of a record's path, from the folder that contains `results`."""

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LayerRecord(_Strict):
    """One layer; MACs with its zero filters and channels discounted, as the paper counts them."""

    name: str
    shape: tuple[int, ...]
    nonzeros: Count
    live_filters: Count
    live_channels: Count
    macs_paper: Count


class NetworkRecord(_Strict):
    """The whole network: `nonzeros` counts the layers' weights, `nonzero_parameters` biases and all others, too."""

    weights: Count
    nonzeros: Count
    parameters: Count
    nonzero_parameters: Count
    macs_paper: Count
    macs_executed: Count


class CompactRecord(_Strict):
    """The network that is left after compaction."""

    macs: Count
    parameters: Count


class Measured(_Strict):
    """What anyone can measure again from the weights: how many test images are classified correctly, and counts.

    With `compact`, it was the compacted network that classified them.
    """

    right: Count
    right5: Count | None = None
    """Images whose class is among the first five guesses, if there are more than ten classes."""
    images: int = Field(ge=1)
    layer_widths: str | None = None
    total: NetworkRecord
    compact: CompactRecord | None = None
    layers: tuple[LayerRecord, ...] = Field(min_length=1)

    @property
    def accuracy(self) -> float:
        return self.right / self.images

    @property
    def top5(self) -> float | None:
        return None if self.right5 is None else self.right5 / self.images

    @property
    def macs_executed(self) -> int:
        """MACs of the network that is left after compaction."""
        return self.total.macs_executed if self.compact is None else self.compact.macs

    @property
    def parameters_left(self) -> int:
        return self.total.parameters if self.compact is None else self.compact.parameters


class Timing(_Strict):
    """Median milliseconds per batch of the dense and the compacted network, measured in turns on one device."""

    device: str
    name: str
    batch: int
    dense_ms: float
    ms: float


class WeightsFile(_Strict):
    """The network's file: its digest and size, and its name in `results/weights`; None if it was not kept.

    With `matrices` in float16, the record's `measured` is of the network as it is stored; `right_in_float32` is the
    number of test images that the run's own network classifies correctly, if it differs.
    """

    sha256: str
    bytes: int
    file: str | None = None
    matrices: Literal["float32", "float16"] = "float32"
    right_in_float32: Count | None = None


class Provenance(_Strict):
    """The source tree of the run: its commit, and whether it had no other changes."""

    commit: str | None = None
    clean: bool | None = None


class Record(_Strict):
    """One run. It was started with `base` and `overrides`; `recipe` is what they amount to, without defaults.

    `accuracy` is what the run itself measured on its device after each stage; `measured` is the final network,
    measured on a CPU in float32 when it was published, and is what tables show.
    """

    format: Literal["deephoyer-record-2"] = "deephoyer-record-2"
    base: str
    overrides: tuple[str, ...]
    row: str
    tags: tuple[str, ...] = ()
    protocol: Literal["held-out", "test-best", "last"]
    digest: str
    recipe: dict[str, Any]
    images: str | None = None
    """The fingerprint of a folder of images; None for data that their name identifies."""
    measured: Measured
    accuracy: dict[str, Share]
    selected: dict[str, int] = {}
    prune_value: float | None = None
    latency: tuple[Timing, ...] = ()
    weights: WeightsFile
    seconds: dict[str, float] = {}
    environment: dict[str, Any] = {}
    provenance: Provenance = Provenance()
    notes: tuple[str, ...] = ()
    metrics: tuple[dict[str, Any], ...] = ()
    path: str = Field(default="", exclude=True)
    """The file it was read from; not stored in it."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Record:
        if self.settings.digest() != self.digest:
            raise ValueError(f"digest: the recipe's is {self.settings.digest()}, the record says {self.digest}")
        if self.settings.epoch_selection != self.protocol:
            raise ValueError(
                f"protocol is {self.protocol!r}, the recipe's epoch_selection {self.settings.epoch_selection!r}"
            )
        return self

    @cached_property
    def settings(self) -> Recipe:
        """The recipe, checked."""
        try:
            return Recipe.model_validate(self.recipe)
        except ValidationError as why:
            first = why.errors()[0]
            raise ValueError(f"recipe.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @property
    def command(self) -> str:
        """What to type to run it again."""
        return str(Command(self.base, self.overrides))

    @property
    def data(self) -> str:
        return named(self.settings.data)[0]

    @property
    def network(self) -> str:
        return named(self.settings.model)[0]

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def best_test_epoch(self) -> float | None:
        """The best accuracy on test images of any epoch of the last stage, for runs that kept the last epoch."""
        if self.protocol != "last":
            return None
        return max((line["test"] for line in self.metrics if line["stage"] == list(self.selected)[-1]), default=None)

    @property
    def structural(self) -> bool:
        """Whether whole groups were made zero, rather than single weights."""
        return self.settings.regularize is not None and self.settings.regularize.groups != "elements"


EXPERIMENTS = ("ablation", "front")
"""Tags that have a folder of their own; other records are in that of their recipe."""


def place(record: Record, taken: bool = False) -> Path:
    """A record's path in `results`: network / experiment / title of its row.

    A piece of the digest distinguishes runs of one row: in `ablation` and `front`, and where the name is `taken`.
    """
    experiment = next((tag for tag in EXPERIMENTS if tag in record.tags), None)
    network = re.sub(r"[^\w.-]+", "-", record.network)  # torchvision:resnet18
    users_file = Path(record.base).suffix in (".yaml", ".yml")  # its folder means nothing to others
    folder = Path(network) / (experiment or ("" if users_file else Path(record.base).parent.name) or "own")
    end = f"-{record.digest[:8]}-s{record.seed}.json" if experiment or taken else f"-s{record.seed}.json"
    room = LONGEST_PATH - len((RESULTS / folder / end).as_posix())
    words = [*re.findall(r"[a-z0-9.]+", record.row.lower()), record.protocol]
    while len("-".join(words)) > room and len(words) > 2:
        del words[-2]
    return folder / ("-".join(words)[:room] + end)


def write(record: Record, path: Path) -> None:
    """Writes the file: one line for each key, layer and epoch; defaults are left out."""
    content = record.model_dump(mode="json", exclude_defaults=True) | {"format": record.format}
    content = {key: content[key] for key in type(record).model_fields if key in content}
    text = ",\n".join(f" {json.dumps(key)}: {_block(value)}" for key, value in content.items())
    folder_at(path.parent)
    write_atomically(path, f"{{\n{text}\n}}\n".encode())


def _block(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n ]"
    return json.dumps(value, ensure_ascii=False)


def read(path: Path) -> Record:
    """The record in a file; a `UserError` says what is wrong with it."""
    try:
        record = Record.model_validate_json(plain_file(path).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such record.") from None
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror}.") from None
    except ValidationError as why:
        first = why.errors()[0]
        key = ".".join(str(step) for step in first["loc"])
        if key == "format" and str(first.get("input")).startswith("deephoyer-record-"):
            raise UserError(
                f"{path}: is a record of another version of deephoyer ({first['input']}, not {FORMAT})."
            ) from None
        raise UserError(f"{path}: is damaged: {key[:100] + ': ' if key else ''}{first_line(first['msg'])}.") from None
    return record.model_copy(update={"path": path.as_posix()})


def find(path: Path) -> list[Path]:
    """The files of all records under `path`, in order; `path` may be one of them."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: there is no such record, nor a folder of records.")
    without_records = {WEIGHTS, "bench", "methods"}
    return sorted(file for file in path.rglob("*.json") if not without_records & set(file.relative_to(path).parts[:-1]))


def results_of(path: Path) -> Path:
    """The folder of results that a record belongs to: the nearest one above it that has a folder `weights`."""
    for folder in path.parents:
        if (folder / WEIGHTS).is_dir():
            return folder
    return path.parent


def read_all(path: Path) -> list[Record]:
    """All records in a folder; none if there is no such folder. The same run twice is refused."""
    records: dict[tuple[str, int], Record] = {}
    for file in find(path) if path.is_dir() else ():
        record = read(file)
        twin = records.setdefault((record.digest, record.seed), record)
        if twin is not record:
            raise UserError(f"{record.path}: the same run as {twin.path}: {record.command}. Delete one of them.")
    return list(records.values())


LINES = 12
"""The approximate number of lines of metrics in a record."""


def thin(metrics: Sequence[dict[str, Any]], selected: dict[str, int]) -> list[dict[str, Any]]:
    """A few epochs of each stage: the first, last, selected and best on test images, and others evenly between."""
    stages = list(dict.fromkeys(line["stage"] for line in metrics))
    kept = []
    for stage in stages:
        lines = [line for line in metrics if line["stage"] == stage]
        steps = max(1, min(LINES // len(stages) - 1, len(lines)) - 1)  # one is left for the selected epoch
        chosen = {round(i * (len(lines) - 1) / steps) for i in range(steps + 1)}
        chosen |= {i for i, line in enumerate(lines) if line["epoch"] == selected.get(stage)}
        if stage in selected and "test" in lines[0]:
            chosen.add(max(range(len(lines)), key=lambda i: lines[i]["test"]))
        kept += [_short(lines[i]) for i in sorted(chosen)]
    return kept


def _short(line: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items() if k != "seconds"}
