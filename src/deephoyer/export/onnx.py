"""`export`: a network as ONNX, with any batch size, run back and compared before the file is written."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deephoyer.errors import UserError, first_line
from deephoyer.files import write_atomically
from deephoyer.inference import Examples, arguments, at_rest, batch_of, call, try_call, with_batch
from deephoyer.structure.equality import TOLERANCE, error, tolerance
from deephoyer.structure.inputs import tensors_in
from deephoyer.weights import with_values

LARGEST_FILE = 2**31 - 1
"""Bytes that one ONNX file can hold."""


def export(model: nn.Module, example_inputs: Examples, path: str | os.PathLike[str]) -> float:
    """Writes `model` as ONNX to `path`; returns the largest difference to onnxruntime's outputs.

    The batch size is left open. The file is run through onnxruntime on the examples, in their own
    and in another batch size; a difference beyond rounding (in float32: 1e-4 of the outputs' scale) raises, and
    nothing is written.
    """
    _need("onnx", "onnxscript", "onnxruntime")
    tensors = [*(model := with_values(model)).parameters(), *model.buffers()]
    if (size := sum(t.numel() * t.element_size() for t in tensors)) > LARGEST_FILE:
        raise UserError(f"export: the network has {size:,} bytes; an ONNX file holds at most {LARGEST_FILE:,}.")
    batch = max(2, batch_of(example_inputs))  # the exporter takes a batch of one for a constant
    with at_rest(model):
        output = try_call(model, example_inputs)  # the exporter would tell in pages what is wrong with them
        content = _to_onnx(model, with_batch(example_inputs, batch), batch, output)
        worst = max(_difference(model, content, with_batch(example_inputs, size)) for size in (1, batch, batch + 1))
    if not worst <= max([TOLERANCE[torch.float32], *(tolerance(t) for t in tensors if t.is_floating_point())]):
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


def _call_outputs_as(graph: Any, output: Any) -> None:
    """Gives the outputs the names that a dict has for them, unless something else in the graph is called so."""
    flat = isinstance(output, Mapping) and all(isinstance(value, Tensor) for value in output.values())
    if not flat or len(output) != len(graph.outputs):
        return
    taken = {value.name for node in graph for value in node.outputs} | {value.name for value in graph.inputs}
    taken |= set(graph.initializers)
    for name, value in zip(map(str, output), list(graph.outputs), strict=True):
        if name not in taken and not value.is_graph_input() and graph.outputs.count(value) == 1:
            value.name = name


def _to_onnx(model: nn.Module, examples: Examples, batch: int, output: Any) -> bytes:
    args, kwargs = arguments(examples)
    open_batch = {0: torch.export.Dim("batch", min=1, max=2**31 - 1)}

    def dims(value: Any) -> Any:
        return open_batch if isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch else None

    shapes = pytree.tree_map(dims, kwargs or args)
    try:
        # The exporter reports its steps on stdout and warns of its own internals.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model, args, kwargs=kwargs or None, dynamo=True, dynamic_shapes=shapes, verbose=False
            )
        assert program is not None, "of the dynamo exporter"
        _call_outputs_as(program.model.graph, output)
        return program.model_proto.SerializeToString()
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError) as why:
        cause = why.__cause__ or why  # the exporter wraps it in advice of many lines
        raise UserError(
            f"export: PyTorch can't express this network in ONNX: {type(cause).__name__}: {first_line(cause)}"
        ) from why


def _difference(model: nn.Module, content: bytes, examples: Examples) -> float:
    """The largest difference between the two outputs, as a share of their scale."""
    import onnxruntime

    values = [v for v in pytree.tree_leaves(arguments(examples)) if isinstance(v, Tensor)]
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        results = session.run(None, {n: v.detach().cpu().numpy() for n, v in zip(names, values, strict=True)})
    except Exception as why:  # its own classes, and TypeError for what NumPy has no type of
        raise UserError(f"export: onnxruntime can't run this network: {first_line(why)}; nothing was written.") from why
    ours, theirs = tensors_in(call(model, examples)), [torch.from_numpy(result) for result in results]
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        raise UserError("export: onnxruntime's outputs have other shapes than the network's; nothing was written.")
    return max((error(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)), default=0.0)
