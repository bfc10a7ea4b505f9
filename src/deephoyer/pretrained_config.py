"""A Hugging Face configuration that says the sizes of a compacted model, where its keys can say them.

They can where all layers lost the same: `intermediate_size` and, in families that know a `head_dim`, the numbers of
heads. Which key governs which size is not known here by family but tried: the model is built on the meta device with
another number. What is found is taken only if a model built from it has the compacted one's shapes, and its outputs
with the same weights; the plain `from_pretrained` then loads it. Otherwise the configuration stays as it was.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from deephoyer.inference import Examples
from deephoyer.structure.equality import answers, same
from deephoyer.structure.narrowed import RECORD, asking_otherwise

Place = tuple[str, int]  # a parameter's or buffer's name, and a dimension of it
Sizes = dict[Place, int]
WORDS = ("size", "inner", "ff", "heads", "n_head", "d_model", "n_embd", "hidden_dim", "mlp_dim")
HEAD_DIM = ("head_dim", "d_kv", "attention_head_dim")
"""Channels within a head stay, so these never change; where none is set, it is what the heads divide."""


def say_sizes(model: nn.Module, inputs: Examples) -> None:
    """Writes the sizes of a compacted model in eval mode into its configuration, if that can say them."""
    sizes = _sizes(model)
    if not _even(sizes):
        return
    try:
        config = _fitting(type(model), model.config, sizes, _eps(model))
        if config is not None:
            plain = _with_tensors_of(model, _built(type(model), config))
            if _floats(plain) == _floats(model) and same(model, plain, inputs) < 1e-6:
                vars(model.config).update(vars(config))
                with asking_otherwise(model):
                    answers(model, inputs)
    except Exception:  # it can't be built from its configuration alone, or is something else then
        return


def _fitting(kind: Any, config: Any, wanted: Sizes, eps: float | None) -> Any:
    """A configuration of which models have these sizes; None where there is none."""
    config = copy.deepcopy(config)
    dense = _sizes(_built(kind, config))
    if dense.keys() != wanted.keys() or dense == wanted:
        return None
    _pin(kind, config, dense, {n for place, n in dense.items() if wanted[place] != n})
    slopes = {key: found for key in _keys(config) if (found := _governed(kind, config, key, dense))}
    places = list(dense)
    matrix = torch.tensor([[its.get(place, 0.0) for its in slopes.values()] for place in places], dtype=torch.float64)
    change = torch.tensor([[float(wanted[place] - dense[place])] for place in places], dtype=torch.float64)
    steps = torch.linalg.lstsq(matrix, change, driver="gelsd").solution.flatten().round().int()
    for key, step in zip(slopes, steps.tolist(), strict=True):
        setattr(config, key, getattr(config, key) + step)
    for key in [key for key in vars(config) if "eps" in key and eps is not None]:
        setattr(config, key, eps)
    return config if _sizes_or_none(kind, config) == wanted else None


def _pin(kind: Any, config: Any, dense: Sizes, changed: set[int]) -> None:
    """Gives keys that are left open the value that they have by themselves, so that others don't change it."""
    heads = getattr(config, "num_attention_heads", None)
    if not any(getattr(config, key, None) for key in HEAD_DIM) and isinstance(heads, int):
        setattr(config, HEAD_DIM[0], config.hidden_size // heads)
    for key in [key for key, value in vars(config).items() if value is None and any(word in key for word in WORDS)]:
        for size in changed:
            setattr(config, key, size)
            if _sizes_or_none(kind, config) == dense and _governed(kind, config, key, dense):
                break
            setattr(config, key, None)


def _keys(config: Any) -> list[str]:
    """The keys that may say a size."""
    kept = (*HEAD_DIM, "vocab_size", "image_size", "patch_size")
    return [k for k, v in vars(config).items() if type(v) is int and k not in kept and any(word in k for word in WORDS)]


def _governed(kind: Any, config: Any, key: str, dense: Sizes) -> dict[Place, float]:
    """The sizes that a key governs, each with how much it grows by one more. Some numbers must divide others."""
    value = getattr(config, key)
    for other in (value + 1, 2 * value):
        probe = copy.deepcopy(config)
        setattr(probe, key, other)
        sizes = _sizes_or_none(kind, probe)
        if sizes is not None and sizes.keys() == dense.keys():
            return {place: (n - dense[place]) / (other - value) for place, n in sizes.items() if n != dense[place]}
    return {}


def _built(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = kind._from_config(copy.deepcopy(config))
    return made.eval()


def _sizes_or_none(kind: Any, config: Any) -> Sizes | None:
    try:
        return _sizes(_built(kind, config))
    except Exception:  # a number that doesn't fit the others
        return None


def _sizes(model: nn.Module) -> Sizes:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {(name, dim): size for name, tensor in named for dim, size in enumerate(tensor.shape)}


def _even(sizes: Sizes) -> bool:
    """Whether layers of the same name but for numbers have the same sizes."""
    seen: dict[Place, int] = {}
    return all(seen.setdefault((re.sub(r"\.\d+\.", ".*.", name), dim), n) == n for (name, dim), n in sizes.items())


def _eps(model: nn.Module) -> float | None:
    """The number that all norms by the mean square were given when their width went."""
    given = {v for m in model.modules() for v in vars(m).get(RECORD, {}).values() if isinstance(v, float)}
    return given.pop() if len(given) == 1 else None


def _floats(model: nn.Module) -> list[tuple[str, dict[str, float]]]:
    """What no shape shows and a comparison could miss: the small numbers of norms, the scales of attention."""
    return [(n, {k: v for k, v in vars(m).items() if isinstance(v, float)}) for n, m in model.named_modules()]


def _with_tensors_of(model: nn.Module, plain: nn.Module) -> nn.Module:
    plain.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        prefix, _, attribute = name.rpartition(".")
        plain.get_submodule(prefix)._buffers[attribute] = buffer
    return plain
