"""The checkpoint files of a run: safetensors with a JSON header, written atomically, the last two kept.

A checkpoint holds everything that the rest of the run depends on. Each carries a digest of its
content; one that is damaged is passed over for the one before it. What the content means is
known to `train/resume.py` only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, first_line, shown
from deephoyer.export import container, load
from deephoyer.files import folder_at, plain_file, write_atomically
from deephoyer.lab.schema import TORCH_FILES

KIND = "run"
KEPT = 2


def save(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Writes the next checkpoint of a folder and removes those that are too old."""
    folder_at(folder)
    have = numbers(folder)
    path = folder / f"{(have[-1] if have else 0) + 1:06d}.safetensors"
    flat = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    write_atomically(path, container.seal(flat, {"kind": KIND, "state": dict(state)}))
    for number in have[: 1 - KEPT]:
        (folder / f"{number:06d}.safetensors").unlink(missing_ok=True)
    return path


def numbers(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.safetensors") if p.stem.isdigit())


def newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]] | None:
    """The newest intact checkpoint, with the errors of newer ones; None if there are no checkpoints."""
    troubles: list[str] = []
    for number in reversed(numbers(folder)):
        try:
            tensors, state = read(folder / f"{number:06d}.safetensors")
            return tensors, state, troubles
        except UserError as why:
            troubles.append(str(why))
    if troubles:
        raise UserError(f"{troubles[0]} No intact checkpoint is left in {folder}; delete the folder to start again.")
    return None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint, or a `UserError` that says what is wrong with it."""
    tensors, manifest = container.unseal(path)
    if manifest.get("kind") != KIND:
        raise UserError(f"{path} is not a checkpoint of a run.")
    return tensors, manifest["state"]


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors named `index.key`, and the rest, which fits into JSON."""
    every = {f"{index}.{key}": value for index, of in state["state"].items() for key, value in of.items()}
    tensors = {name: value for name, value in every.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in every.items() if name not in tensors}


def refill(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """Loads the state that `flatten` returned into a new optimizer, which keeps its own hyperparameters.

    So a run can be resumed with captured or plain steps, on any device.
    """
    state: dict[int, dict[str, Any]] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, value in (*tensors.items(), *rest.items()):
        index, _, key = name.partition(".")
        if not index.isdigit() or int(index) >= len(parameters) or not key:
            raise UserError(f"the checkpoint's optimizer has {shown(name)}, which this run's optimizer does not have.")
        if isinstance(value, Tensor) and value.dim() and value.shape != parameters[int(index)].shape:
            raise UserError(f"the checkpoint's optimizer has {shown(name)} in the shape {tuple(value.shape)}.")
        state.setdefault(int(index), {})[key] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as why:
        raise UserError(f"the checkpoint's optimizer does not fit this run: {why}.") from None
    for parameter, of in optimizer.state.items():
        for key, value in of.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                # A file has lost the memory format, and fused optimizers go through memory in its order.
                of[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors as plain safetensors; no file if there are none."""
    if tensors:
        write_atomically(path, safetensors.torch.save({n: t.cpu().contiguous() for n, t in tensors.items()}))


def fill(model: nn.Module, path: Path, key: str, classes_may_differ: bool = False) -> list[str]:
    """Loads the weights of a model from a file: plain safetensors, one that `deephoyer.save` wrote, or a torch file.

    With `classes_may_differ`, a classifier with another number of classes keeps the model's own weights; returns
    their names.
    """
    plain_file(path)
    try:
        if path.suffix in TORCH_FILES:
            state = _torch_file(path, key)
        else:
            with safetensors.safe_open(path, framework="pt") as file:
                ours = (file.metadata() or {}).get("format") == container.FORMAT
            state = load(path, model).state_dict() if ours else safetensors.torch.load(path.read_bytes())
        own = model.state_dict()
        state = _unwrapped(state, own)
        for name, tensor in state.items():  # load_state_dict would convert without a word
            if name in own and tensor.is_floating_point() != own[name].is_floating_point():
                raise UserError(f"{key}: {path}: {name} is of type {tensor.dtype}, the model's of {own[name].dtype}.")
        new = _classifier(own, state) if classes_may_differ else []
        model.load_state_dict(state | {name: own[name] for name in new})
    except (OSError, safetensors.SafetensorError) as why:
        raise UserError(f"{key}: {path} can't be read: {why}.") from None
    except RuntimeError as why:
        told = first_line(str(why).splitlines()[-1], 300)
        raise UserError(f"{key}: {path} does not fit the model: {told}") from None
    return new


def _torch_file(path: Path, key: str) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote; a file that would execute code is refused."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{key}: {path} contains more than tensors and is not opened; save only its state_dict."
        ) from None
    except OSError:
        raise
    except Exception:  # on damaged bytes torch raises whatever comes up
        raise UserError(f"{key}: {path} can't be read: it is damaged, or torch.save did not write it.") from None
    found = _weights_in(content)
    if found is None:
        raise UserError(f"{key}: {path} is not a file of weights: it should hold a state_dict.")
    return found


def _weights_in(content: Any) -> dict[str, Tensor] | None:
    """The state_dict in what a training program saved: all of it, or the part beside its epoch and optimizer."""
    if not isinstance(content, dict) or not content:
        return None
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        return content
    inner = {name: found for name, value in content.items() if (found := _weights_in(value)) is not None}
    usual = next((name for name in ("state_dict", "model", "model_state_dict") if name in inner), None)
    return inner[usual] if usual else next(iter(inner.values())) if len(inner) == 1 else None


def _unwrapped(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what DataParallel, torch.compile or a trainer's `model` put before every name."""
    bare = dict(state)
    while bare and not any(name in own for name in bare):
        if len({name.partition(".")[0] for name in bare}) > 1 or not all("." in name for name in bare):
            return dict(state)
        bare = {name.partition(".")[2]: tensor for name, tensor in bare.items()}
    return bare


def _classifier(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """The parameters of the classifier: those that differ only in their first dimension, if they are of one layer."""
    differ = [n for n, t in own.items() if n in state and state[n].shape != t.shape]
    layers = {name.rpartition(".")[0] for name in differ}
    rows = {(own[n].shape[:1], state[n].shape[:1]) for n in differ}
    alike = all(own[n].shape[1:] == state[n].shape[1:] for n in differ)
    return differ if len(layers) == 1 and len(rows) == 1 and alike else []
