"""The outer file: safetensors, with a manifest and a digest of everything in the header's metadata.

Reading refuses whatever is cut, changed, foreign or malformed, before a model sees any of it.
Nothing is unpickled or executed. What the manifest means is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from deephoyer.errors import UserError, first_line
from deephoyer.files import path_of, plain_file

FORMAT = "deephoyer"
_LENGTH = 8  # bytes that say how long the header is


def seal(tensors: dict[str, Tensor], manifest: dict[str, Any]) -> bytes:
    """The file's bytes."""
    text = json.dumps(manifest, sort_keys=True, allow_nan=False, separators=(",", ":"))
    plain = safetensors.torch.save(tensors, {"format": FORMAT, "manifest": text})
    end = _LENGTH + int.from_bytes(plain[:_LENGTH], "little")
    header, body = json.loads(plain[_LENGTH:end]), plain[end:]
    return rewrite(header, body)


def rewrite(header: dict[str, Any], body: bytes) -> bytes:
    """The file's bytes, with the digest of this header and body in the header."""
    metadata = {**header["__metadata__"], "digest": _digest(header, body)}
    # The library gives metadata in another order in each process; the same network must be the same bytes.
    text = json.dumps({**header, "__metadata__": metadata}, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    return len(text).to_bytes(_LENGTH, "little") + text + body


def unseal(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the manifest of a file, once its digest has been found right."""
    data = _read(path_of(path))
    header, body = _split(path, data)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} is a safetensors file, but not one of deephoyer's; "
            "`model.load_state_dict(safetensors.torch.load_file(...))` reads plain ones."
        )
    if metadata.get("digest") != _digest(header, body):
        raise UserError(f"{path} is damaged: its digest does not match its content.")
    _check_keys(path, header)
    manifest = parse(path, metadata.get("manifest"))
    try:
        return safetensors.torch.load(data), manifest
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as why:
        raise UserError(f"{path} is damaged: {first_line(why)}.") from None


def parse(path: str | os.PathLike[str], text: object) -> dict[str, Any]:
    """A JSON object; names that occur twice, numbers that are none, and bottomless nesting are refused."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError) as why:
        raise UserError(f"{path} is damaged: its header is not sound JSON ({first_line(why)}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: its header is not a JSON object.")
    return found


def _read(path: Path) -> bytes:
    try:
        data = plain_file(path).read_bytes()
    except OSError as why:
        raise UserError(f"{path}: can't be read: {why.strerror or why}.") from None
    # The first bytes of a safetensors file are its header's length, which may look like a pickle's beginning.
    header = data[_LENGTH : _LENGTH + 1] == b"{"
    if not header and (data[:4] == b"PK\x03\x04" or (data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05")):
        raise UserError(
            f"{path} is a pickle (.pt, .pth), which can run code when it is opened: deephoyer reads safetensors only. "
            "Load it yourself with torch.load(..., weights_only=True), then deephoyer.save it."
        )
    return data


def _split(path: str | os.PathLike[str], data: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if len(data) < _LENGTH + 2 or end > len(data):
        raise UserError(f"{path} is cut short, or is not a safetensors file ({len(data):,} bytes).")
    return parse(path, data[_LENGTH:end]), data[end:]


def _check_keys(path: str | os.PathLike[str], header: dict[str, Any]) -> None:
    """The library overlooks what it does not know; a file of ours has nothing of the kind."""
    for name, entry in header.items():
        known = {"format", "manifest", "digest"} if name == "__metadata__" else {"dtype", "shape", "data_offsets"}
        if not isinstance(entry, dict) or set(entry) != known:
            raise UserError(f"{path} is damaged: its header has something strange at {name[:80]!r}.")


def _digest(header: dict[str, Any], body: bytes) -> str:
    """sha256 over everything but the digest itself; how the header is spaced or ordered does not matter."""
    known = {k: v for k, v in header["__metadata__"].items() if k != "digest"}
    text = json.dumps({**header, "__metadata__": known}, sort_keys=True, separators=(",", ":"))
    whole = hashlib.sha256(text.encode())
    whole.update(body)
    return whole.hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number")
