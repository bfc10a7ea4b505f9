"""A record: one published run, as JSON, beside the weights it came to.

`results/NAME/record.json` says what was run, where, and what came out; `weights.safetensors` is the network
itself. Here records are written, read and found. Making them is `publish.py`, measuring them again `verify.py`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deephoyer.errors import UserError
from deephoyer.files import write_atomically
from deephoyer.lab.schema import Recipe, named

RECORD, WEIGHTS = "record.json", "weights.safetensors"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Layer(_Strict):
    """One layer's counts; MACs with its zero filters and channels discounted, as the paper counts them."""

    name: str
    shape: tuple[int, ...]
    weights: int
    nonzeros: int
    live_filters: int
    filters: int
    live_channels: int
    channels: int
    macs_paper: int


class Total(_Strict):
    """The network's counts: `nonzeros` of the layers' weights, `nonzero_parameters` with biases and all."""

    weights: int
    nonzeros: int
    parameters: int
    nonzero_parameters: int
    macs_paper: int
    macs_there: int


class Compacted(_Strict):
    """The network that is left when all that is dead is physically taken out."""

    macs: int
    parameters: int


class Measured(_Strict):
    """What anyone can measure again from the weights: images of the test set that are right, and counts.

    Where there is a `compact`, it is the compacted network that was shown the images.
    """

    right: int = Field(ge=0)
    images: int = Field(ge=1)
    structure: str | None
    total: Total
    compact: Compacted | None = None
    layers: tuple[Layer, ...]

    @property
    def accuracy(self) -> float:
        return self.right / self.images


class Timing(_Strict):
    """Median milliseconds a batch of the dense and the compacted network, measured in turns on one device."""

    device: str
    name: str
    batch: int
    dense_ms: float
    ms: float


class WeightsFile(_Strict):
    """The file beside the record."""

    bytes: int
    sha256: str


class Record(_Strict):
    """One run. `base` and `overrides` make the command; `recipe` is what they come to, every default written out.

    `accuracy` is what the run itself saw on its device after each stage; `measured` is the final network
    measured on a CPU in float32 when it was published, and is what tables show.
    """

    format: Literal["deephoyer-record-1"] = "deephoyer-record-1"
    command: str
    base: str
    overrides: tuple[str, ...]
    row: str | None = None
    tags: tuple[str, ...] = ()
    protocol: Literal["held-out", "test-best"]
    selected: dict[str, int]
    accuracy: dict[str, float]
    prune_value: float | None = None
    measured: Measured
    latency: tuple[Timing, ...] = ()
    weights: WeightsFile
    seconds: dict[str, float]
    environment: dict[str, Any]
    recipe: dict[str, Any]
    metrics: tuple[dict[str, Any], ...] = Field(max_length=40)

    @model_validator(mode="after")
    def _speaks_with_one_voice(self) -> Record:
        if self.command != command(self.base, self.overrides):
            raise ValueError(f"command is not what base and overrides make: {command(self.base, self.overrides)!r}")
        if self.settings.epoch_selection != self.protocol:
            raise ValueError(f"protocol is {self.protocol!r}, the recipe selects by {self.settings.epoch_selection!r}")
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
    def model(self) -> str:
        return str(named(self.settings.model)["choice"])

    @property
    def seed(self) -> int:
        return self.settings.seed


def command(base: str, overrides: Iterable[str], verb: str = "run") -> str:
    """What to type to run it again.

    >>> command("demo", ["seed=1", "prune.parameters=*"])
    "deephoyer run demo seed=1 'prune.parameters=*'"
    """
    return shlex.join(["deephoyer", verb, base, *overrides])


def write(record: Record, folder: Path) -> None:
    """Writes `folder/record.json`: a line a key, a line a layer, a line an epoch."""
    content = record.model_dump(mode="json")
    text = ",\n".join(f" {json.dumps(key)}: {_block(value)}" for key, value in content.items())
    write_atomically(folder / RECORD, f"{{\n{text}\n}}\n".encode())


def _block(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
    return json.dumps(value, ensure_ascii=False)


def read(path: Path) -> Record:
    """The record in a folder, or in a file; a `UserError` says what is wrong with it."""
    path = path / RECORD if path.is_dir() else path
    try:
        return Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such record.") from None
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror}.") from None
    except ValidationError as why:
        first = why.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise UserError(f"{path}: is damaged: {place + ': ' if place else ''}{first['msg']}.") from None


def find(path: Path) -> list[Path]:
    """The folders of all records under `path`, in order; `path` may be one record's folder or file."""
    if path.name == RECORD:
        return [path.parent]
    if not path.is_dir():
        raise UserError(f"{path}: there is no such record, nor a folder of records.")
    return sorted(found.parent for found in path.rglob(RECORD))


def read_all(path: Path) -> list[Record]:
    """All records under a folder; none where there is no such folder. The same run twice is refused."""
    seen: dict[str, Path] = {}
    records = []
    for folder in find(path) if path.is_dir() else []:
        record = read(folder)
        if record.command in seen:
            raise UserError(f"{folder}: the same run as {seen[record.command]}: {record.command}. Delete one of them.")
        seen[record.command] = folder
        records.append(record)
    return records
