"""The YAML files of comparisons (`comparisons/`): a recipe, sizes, and methods with a grid of values to search.

Nothing is run here: the runs that follow from a protocol are in `comparison.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deephoyer.errors import UserError, shown, unknown
from deephoyer.files import plain_file
from deephoyer.lab import bounded_yaml

FOLDER = Path(__file__).parent / "comparisons"
MOST_SEEDS = 20
"""The exact test over the fresh seeds tries all 2^n signs."""


class Entry(BaseModel):
    """A method: the overrides that choose it, and the override whose value is searched."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    words: tuple[str, ...] = ()
    vary: str
    """An override with VALUE in it."""
    values: tuple[float, ...] = Field(min_length=2)
    way: Literal["train", "cut", "scratch"] = "train"
    """The network is trained by the method, then pruned; cut without it, and finetuned longer; or pruned before it is
    trained from scratch."""
    each_size: bool = False
    """Whether training depends on the size: then every size is trained separately."""
    least: float | None = None
    most: float | None = None
    """The limits of a grid that is extended."""

    @model_validator(mode="after")
    def _can_be_searched(self) -> Entry:
        if "VALUE" not in self.vary:
            raise UserError(f"vary: {self.vary!r} has no VALUE in it, like regularize.strength=VALUE.")
        if list(self.values) != sorted(set(self.values)) or self.values[0] <= 0:
            raise UserError(f"values: {list(self.values)} must increase and be above 0.")
        return self

    @property
    def penalizes(self) -> bool:
        """Whether the searched setting is the strength of a penalty."""
        return self.vary == "regularize.strength=VALUE"

    def digest(self) -> str:
        """The identity of its runs: those of an extended grid stay the same."""
        return _digest(self, exclude={"values", "least", "most"})

    def word(self, value: float) -> str:
        return self.vary.replace("VALUE", f"{value:g}")

    def beyond(self, values: Sequence[float], end: int) -> float | None:
        """The value that extends a grid before its first (end 0) or after its last (end −1); None beyond the limits."""
        ratio = values[-1] / values[-2] if end else values[0] / values[1]
        following = float(f"{values[end] * ratio:.2g}")
        if all(value == int(value) for value in self.values):
            following = float(max(1, round(following)))
        inside = (self.least or 0) <= following and (self.most is None or following <= self.most)
        return following if inside and following not in values else None


class Epochs(BaseModel):
    """The epochs of the stages, the same for every method: a recipe's own would be too many for a thousand runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pretrain: int | None = Field(default=None, ge=1)
    regularize: int | None = Field(default=None, ge=1)
    finetune: int | None = Field(default=None, ge=1)

    def words(self) -> list[str]:
        return [f"{stage}.epochs={epochs}" for stage, epochs in self if epochs is not None]


class Protocol(BaseModel):
    """The content of a comparison's YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    about: str
    base: str
    """The recipe of all runs."""
    epochs: Epochs = Epochs()
    """Replace those of the recipe."""
    words: tuple[str, ...] = ()
    """More overrides for all runs; those on the command line take precedence."""
    target: Literal["live", "macs"]
    sizes: tuple[float, ...] = Field(min_length=1)
    choose: int = Field(default=3, ge=1)
    """The number of seeds that choose a setting: 0, 1, …"""
    choose_at: Literal["each size", "the middle size"] = "each size"
    """Whether a setting is chosen for every size, or at the middle size for all."""
    extensions: int = Field(default=3, ge=0)
    """How many values a grid may be extended by, where its best value is at an end."""
    final: int = Field(default=10, ge=1, le=MOST_SEEDS)
    """The number of fresh seeds for the chosen settings."""
    methods: dict[str, Entry] = Field(min_length=1)

    @field_validator("sizes")
    @classmethod
    def _sizes_are_shares(cls, sizes: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(sizes)) < len(sizes) or not all(0 < size <= 1 for size in sizes):
            raise UserError(f"{list(sizes)} must be different shares, above 0 and at most 1, like [0.1, 0.05].")
        return sizes

    @property
    def fresh_seeds(self) -> range:
        """The seeds of the chosen settings."""
        return range(self.choose, self.choose + self.final)

    def digest(self) -> str:
        """The identity of what all methods have in common."""
        return _digest(self, exclude={"about", "methods"})

    def chooses_at(self, size: float) -> bool:
        return self.choose_at == "each size" or size == self.middle

    @property
    def middle(self) -> float:
        """The size that is compared first."""
        return self.sizes[len(self.sizes) // 2]

    @property
    def counts(self) -> str:
        """What the sizes are shares of."""
        return "weights" if self.target == "live" else "MACs"


def _digest(part: BaseModel, exclude: set[str]) -> str:
    """A digest of all keys but these, without those at their defaults."""
    content = part.model_dump(mode="json", exclude=exclude, exclude_defaults=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def names() -> list[str]:
    """The comparisons that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(name: str) -> Protocol:
    """The comparison of that name, or of a file."""
    path = Path(name) if Path(name).suffix in (".yaml", ".yml") else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in names():
        raise unknown("comparison", name, names())
    try:
        content = bounded_yaml.load(plain_file(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            needed = ", ".join(key for key, field in Protocol.model_fields.items() if field.is_required())
            raise UserError(f"comparison {name}: has no keys; it needs {needed}.")
        return Protocol.model_validate(content)
    except (OSError, UnicodeDecodeError) as why:
        raise UserError(f"comparison {name}: can't be read: {getattr(why, 'strerror', None) or why}.") from None
    except yaml.YAMLError as why:
        raise UserError(f"comparison {name}: not valid YAML: {bounded_yaml.explain(why)}") from None
    except ValidationError as why:
        raise UserError(f"comparison {name}: {_explain(why)}") from None


def _explain(why: ValidationError) -> str:
    """One error in one line, with its key. A misspelled key is named first: it also makes the right one missing."""
    first = min(why.errors(), key=lambda error: error["type"] != "extra_forbidden")
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place}: is missing."
    if first["type"] == "extra_forbidden":
        outer, _, key = place.rpartition(".")
        part: type[BaseModel] = Epochs if outer == "epochs" else Entry if outer else Protocol
        return f"{outer}{': ' if outer else ''}{unknown('key', key, part.model_fields)}"
    cause = first.get("ctx", {}).get("error")
    return f"{place}: {cause or first['msg'] + '; it is ' + shown(first['input']) + '.'}"
