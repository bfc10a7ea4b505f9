"""A record: one published run, as a small JSON file.

`results/NETWORK/EXPERIMENT/NAME-sSEED.json` says what was run, where, and what came out; the network's file, where it
was kept, lies in `results/weights`. A record stands by itself: its recipe is in it, whole, and no recipe is ever looked
up by its name. Making records is `publish.py`, measuring them again `verify.py`.
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
"""Characters of a record's path from the folder that `results` lies in."""

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
    """The network: `nonzeros` of the layers' weights, `nonzero_parameters` with biases and all."""

    weights: Count
    nonzeros: Count
    parameters: Count
    nonzero_parameters: Count
    macs_paper: Count
    macs_executed: Count


class CompactRecord(_Strict):
    """The network that is left when all that is dead is physically taken out."""

    macs: Count
    parameters: Count


class Measured(_Strict):
    """What anyone can measure again from the weights: images of the test set that are right, and counts.

    Where there is a `compact`, it is the compacted network that was shown the images.
    """

    right: Count
    right5: Count | None = None
    """Those whose class is among the first five guesses, where there are more than ten classes."""
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
    """Median milliseconds a batch of the dense and the compacted network, measured in turns on one device."""

    device: str
    name: str
    batch: int
    dense_ms: float
    ms: float


class WeightsFile(_Strict):
    """The network's file: its digest and size, and its name in `results/weights` where it was kept.

    With `matrices` in float16, what was `measured` is the network as it is stored; `right_in_float32` are the test
    images that it got right before, as the run had it, where that is another number.
    """

    sha256: str
    bytes: int
    file: str | None = None
    matrices: Literal["float32", "float16"] = "float32"
    right_in_float32: Count | None = None


class Provenance(_Strict):
    """The source tree that the run was made by: its commit, and whether nothing was changed in it since."""

    commit: str | None = None
    clean: bool | None = None


class Record(_Strict):
    """One run. `base` and `overrides` are the words it was started with, `recipe` what they came to, but for defaults.

    `accuracy` is what the run itself saw on its device after each stage; `measured` is the final network
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
    """The fingerprint of a folder of images; None for data that their name tells."""
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
    """Where it was read from; no part of the file."""

    @model_validator(mode="after")
    def _speaks_with_one_voice(self) -> Record:
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
        """The best accuracy on test images of any epoch of the last stage, as the run saw it; None where it kept it."""
        if self.protocol != "last":
            return None
        seen = [line["test"] for line in self.metrics if line["stage"] == list(self.selected)[-1]]
        return max(seen, default=None)

    @property
    def structural(self) -> bool:
        """Whether whole groups were made zero, rather than single weights."""
        return self.settings.regularize is not None and self.settings.regularize.groups != "elements"


EXPERIMENTS = ("ablation", "front")
"""Tags that have a folder of their own; other records lie in that of their recipe."""


def place(record: Record, taken: bool = False) -> Path:
    """Where a record lies in `results`: by network and experiment, under its row's name.

    A piece of the digest tells runs of one row apart: in `ablation` and `front`, and where the name is `taken`.
    """
    own = next((tag for tag in EXPERIMENTS if tag in record.tags), None)
    network = re.sub(r"[^\w.-]+", "-", record.network)  # torchvision:resnet18
    file = Path(record.base).suffix in (".yaml", ".yml")  # a user's: its folder says nothing to others
    folder = Path(network) / (own or ("" if file else Path(record.base).parent.name) or "own")
    end = f"-{record.digest[:8]}-s{record.seed}.json" if own or taken else f"-s{record.seed}.json"
    room = LONGEST_PATH - len((RESULTS / folder / end).as_posix())
    words = [*re.findall(r"[a-z0-9.]+", record.row.lower()), record.protocol]
    while len("-".join(words)) > room and len(words) > 2:
        del words[-2]
    return folder / ("-".join(words)[:room] + end)


def write(record: Record, path: Path) -> None:
    """Writes the file: a line for each key, layer and epoch; what is as always is left out."""
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
        where = ".".join(str(step) for step in first["loc"])
        if where == "format" and str(first.get("input")).startswith("deephoyer-record-"):
            raise UserError(
                f"{path}: is a record of another version of deephoyer ({first['input']}, not {FORMAT})."
            ) from None
        raise UserError(
            f"{path}: is damaged: {where[:100] + ': ' if where else ''}{first_line(first['msg'])}."
        ) from None
    return record.model_copy(update={"path": path.as_posix()})


def find(path: Path) -> list[Path]:
    """The files of all records under `path`, in order; `path` may be one of them."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: there is no such record, nor a folder of records.")
    apart = {WEIGHTS, "bench", "methods"}  # comparisons keep theirs in the last
    return sorted(found for found in path.rglob("*.json") if not apart & set(found.relative_to(path).parts[:-1]))


def results_of(path: Path) -> Path:
    """The folder whose `weights` a record's file lies in: the nearest one above it that has such a folder."""
    for folder in path.parents:
        if (folder / WEIGHTS).is_dir():
            return folder
    return path.parent


def read_all(path: Path) -> list[Record]:
    """All records under a folder; none where there is no such folder. The same run twice is refused."""
    seen: dict[tuple[str, int], Record] = {}
    for file in find(path) if path.is_dir() else ():
        record = read(file)
        twin = seen.setdefault((record.digest, record.seed), record)
        if twin is not record:
            raise UserError(f"{record.path}: the same run as {twin.path}: {record.command}. Delete one of them.")
    return list(seen.values())


LINES = 12
"""A record keeps about so many lines of metrics."""


def thin(lines: Sequence[dict[str, Any]], selected: dict[str, int]) -> list[dict[str, Any]]:
    """Few lines: of each stage the first, the last, the selected and the best on test images, others evenly between."""
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    kept = []
    for stage in stages:
        own = [line for line in lines if line["stage"] == stage]
        steps = max(1, min(LINES // len(stages) - 1, len(own)) - 1)  # one is left for the selected epoch
        chosen = {round(i * (len(own) - 1) / steps) for i in range(steps + 1)}
        chosen |= {i for i, line in enumerate(own) if line["epoch"] == selected.get(stage)}
        if stage in selected and "test" in own[0]:
            chosen.add(max(range(len(own)), key=lambda i: own[i]["test"]))
        kept += [_short(own[i]) for i in sorted(chosen)]
    return kept


def _short(line: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items() if k != "seconds"}
