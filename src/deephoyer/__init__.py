"""deephoyer: make neural networks sparse, small and fast while they train."""

__version__ = "0.1.0"
