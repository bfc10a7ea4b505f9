"""The figures, by name. Each file makes one `Figure`; how all of them look and are saved is in `style.py`."""

from deephoyer.lab.report.figures.cifar_front import cifar_front
from deephoyer.lab.report.figures.contours import contours
from deephoyer.lab.report.figures.descent import descent
from deephoyer.lab.report.figures.histograms import histograms, model_of
from deephoyer.lab.report.figures.mnist_front import mnist_front
from deephoyer.lab.report.figures.style import save

__all__ = ["cifar_front", "contours", "descent", "histograms", "mnist_front", "model_of", "save"]
