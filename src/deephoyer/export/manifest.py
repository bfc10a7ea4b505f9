"""What a file says about its tensors: which are packed, which are one and the same, masks, shape, provenance."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deephoyer.errors import UserError

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Size = Annotated[int, Field(ge=0, lt=2**62)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Packed(_Strict):
    """A tensor stored as the places of its nonzeros and their values; or indices, stored as a pattern alone."""

    shape: Annotated[list[Size], Field(max_length=16)]
    form: Literal["bitmap", "gaps"]
    holds: Literal["values", "chosen", "ranks"] = "values"

    def parts(self, name: str) -> list[str]:
        """The names under which the tensor lies in the file."""
        return [f"{name}:where", f"{name}:values"] if self.holds == "values" else [f"{name}:where"]


class MaskForm(_Strict):
    """A mask: the nonzeros of its tensor, or a pattern of its own."""

    form: Literal["nonzeros", "bitmap", "gaps"]


class Manifest(_Strict):
    """`same` gives, for each further name of a tied tensor, the name it is stored under."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    packed: dict[Name, Packed] = {}
    same: dict[Name, Name] = {}
    masks: dict[Name, MaskForm] = {}
    structure: dict[str, Any] | None = None
    provenance: dict[str, Any] = {}


def validate(path: str | os.PathLike[str], data: dict[str, Any]) -> Manifest:
    """The manifest, or an error that says which entry is wrong."""
    try:
        return Manifest.model_validate(data)
    except (ValidationError, RecursionError) as why:
        first = why.errors()[0] if isinstance(why, ValidationError) else {"loc": (), "msg": "nested too deep"}
        where = ".".join(str(part) for part in first["loc"])[:100] or "the whole"
        if first["loc"] == ("version",):
            raise UserError(f"{path} was written by a newer deephoyer than this one, which reads version 1.") from None
        raise UserError(f"{path}: its manifest is wrong at {where}: {first['msg']}.") from None
