"""The same network without idle weights, those that carry nothing of the input to an output; shapes stay.

Pruning leaves such weights behind: those that read a neuron which has become a constant, and those that feed one
which nobody reads. Compaction takes their neurons out; here the layers keep their size and the weights become zero.
"""

from __future__ import annotations

from torch import nn

from deephoyer.inference import Examples, outside_modes
from deephoyer.structure.compact import dead_channels
from deephoyer.structure.coupled import Coupled, clean_copy
from deephoyer.structure.equality import same
from deephoyer.structure.fold_constants import fold
from deephoyer.structure.remove import zero


@outside_modes
def tidy(model: nn.Module, example_inputs: Examples, *, groups: Coupled | None = None) -> nn.Module:
    """A copy in eval mode without idle weights; `Differs` is raised if its outputs are not the same.

    They are compared on the example inputs and on random ones. Constants go into the biases of the layers that read
    them, pruned biases too. Where one layer has no bias to take a constant, or a weight would have to come back to
    carry it, as behind zero padding, the whole copy is as the model was. `groups` shares the graph of a `Coupled` made
    from this model.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> _ = net[0].weight.data[0].zero_()
    >>> tidy(net, torch.randn(5, 2))[2].weight[0, 0].item()
    0.0
    """
    graph = (groups or Coupled(model, example_inputs)).graph
    made = clean_copy(model)
    fold(made, example_inputs)
    zero(made, graph, dead_channels(made, graph))
    if made.state_dict().keys() != model.state_dict().keys() or _came_back(model, made):
        made = clean_copy(model)
    same(clean_copy(model), made, example_inputs)
    return made


def _came_back(before: nn.Module, after: nn.Module) -> bool:
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return any(bool(((old == 0) & (new != 0)).any()) for old, new in pairs if old.dim() > 1)
