"""The figures, by name. Each file makes one `Figure`; how all of them look and are saved is in `style.py`."""

from deephoyer.report.figures.cifar import cifar
from deephoyer.report.figures.contours import contours
from deephoyer.report.figures.descent import descent
from deephoyer.report.figures.front import front
from deephoyer.report.figures.histograms import histograms, model_of
from deephoyer.report.figures.style import save

__all__ = ["cifar", "contours", "descent", "front", "histograms", "model_of", "save"]
