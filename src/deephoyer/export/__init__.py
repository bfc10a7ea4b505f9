"""Networks as files: safetensors with a manifest (`save`, `load`), and ONNX (`export`)."""

from deephoyer.export.network_file import load, load_masks, provenance, save
from deephoyer.export.onnx import export

__all__ = ["export", "load", "load_masks", "provenance", "save"]
