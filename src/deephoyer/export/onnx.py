"""`export`: a network as ONNX, with any batch size, run back and compared before the file is written."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, first_line
from deephoyer.files import write_atomically
from deephoyer.inference import Examples, arguments, at_rest, batch_of, call, try_call, with_batch
from deephoyer.structure.inputs import tensors_in
from deephoyer.weights import with_values

TOLERANCE = 1e-4


def export(model: nn.Module, example_inputs: Examples, path: str | os.PathLike[str]) -> float:
    """Writes `model` as ONNX to `path`; returns the largest difference to onnxruntime's outputs.

    The batch size is left open. The file is run through onnxruntime on the examples, in their own
    and in another batch size; a difference beyond 1e-4 of the outputs' scale raises, and nothing is written.
    """
    _need("onnx", "onnxscript", "onnxruntime")
    with_values(model)
    batch = max(2, batch_of(example_inputs))  # the exporter takes a batch of one for a constant
    with at_rest(model):
        try_call(model, example_inputs)  # the exporter would tell in pages what is wrong with them
        content = _to_onnx(model, with_batch(example_inputs, batch), batch)
        worst = max(_difference(model, content, with_batch(example_inputs, size)) for size in (1, batch, batch + 1))
    if not worst <= TOLERANCE:
        raise UserError(f"export: onnxruntime's outputs differ by {worst:.2g} of their scale; {path} was not written.")
    write_atomically(path, content)
    return worst


def _need(*packages: str) -> None:
    for package in packages:
        try:
            __import__(package)
        except ImportError as why:
            raise UserError(
                f"export needs {package}, which can't be imported ({why}). "
                "`pip install 'deephoyer[export]'` installs it."
            ) from None


def _to_onnx(model: nn.Module, examples: Examples, batch: int) -> bytes:
    args, kwargs = arguments(examples)
    open_batch = {0: torch.export.Dim("batch", min=1, max=2**31 - 1)}

    def dims(value: Any) -> Any:
        return open_batch if isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch else None

    shapes = {k: dims(v) for k, v in kwargs.items()} if kwargs else tuple(dims(a) for a in args)
    try:
        # The exporter reports its steps on stdout and warns of its own internals.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model, args, kwargs=kwargs or None, dynamo=True, dynamic_shapes=shapes, verbose=False
            )
        return program.model_proto.SerializeToString()  # type: ignore[union-attr]
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError) as why:
        raise UserError(
            f"export: PyTorch can't express this network in ONNX: {type(why).__name__}: {first_line(why)}"
        ) from why


def _difference(model: nn.Module, content: bytes, examples: Examples) -> float:
    """The largest difference between the two outputs, as a share of their scale."""
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    args, kwargs = arguments(examples)
    values = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    names = [i.name for i in session.get_inputs()]
    theirs = session.run(None, {n: v.detach().cpu().numpy() for n, v in zip(names, values, strict=True)})
    ours = tensors_in(call(model, examples))
    if len(ours) != len(theirs) or any(tuple(a.shape) != b.shape for a, b in zip(ours, theirs, strict=True)):
        raise UserError("export: onnxruntime's outputs have other shapes than the network's; nothing was written.")
    pairs = [(a.detach().cpu().double(), torch.from_numpy(b).double()) for a, b in zip(ours, theirs, strict=True)]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-6)) for a, b in pairs if a.numel()), default=0.0)
