"""The figures, by name. Each file makes one `Figure`; how all of them look and are saved is in `style.py`."""

from deephoyer.lab.report.figures.cifar_front import cifar
from deephoyer.lab.report.figures.contours import contours
from deephoyer.lab.report.figures.descent import descent
from deephoyer.lab.report.figures.front import front
from deephoyer.lab.report.figures.histograms import histograms, model_of
from deephoyer.lab.report.figures.style import save

__all__ = ["cifar", "contours", "descent", "front", "histograms", "model_of", "save"]
