"""Figures that need no records; those that do are in `test_report.py`."""

import pytest
import torch

from deephoyer import UserError
from deephoyer.lab.report import figures
from deephoyer.lab.report.figures.descent import walk


def test_figures_are_the_same_bytes_each_time(tmp_path):
    for place in ("a", "b"):
        figures.save(figures.descent(), tmp_path / place, "descent")
    for ending in ("svg", "png"):
        first, again = ((tmp_path / place / f"descent.{ending}").read_bytes() for place in ("a", "b"))
        assert first == again


def test_the_descent_path_leaves_one_element_and_never_climbs():
    path = walk(torch.randn(20, generator=torch.Generator().manual_seed(4), dtype=torch.float64))
    value = path.abs().sum(1) ** 2 / path.square().sum(1)
    assert (value.diff() <= 1e-9).all() and value[-1] == pytest.approx(1)


def test_histograms_of_what_is_no_run_are_refused(tmp_path):
    with pytest.raises(UserError, match="finished run"):
        figures.histograms(tmp_path)
