"""A small network in double precision and a plain loop with room for what a user adds to it."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def net(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(dtype)


def batches(count=6, dtype=torch.float64):
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 2, 5, 5, generator=random, dtype=dtype)
        yield x, x[:, 0].mean((1, 2)).gt(0).long() + x[:, 1].mean((1, 2)).gt(0).long()


def train(model, optimizer, count=6, before_backward=None, before_step=None):
    """A plain loop with room for what a user adds to it."""
    for x, y in batches(count, next(model.parameters()).dtype):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        (loss if before_backward is None else before_backward(loss)).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def gradient(reg, model):
    """What `add_grad_` adds, for each parameter."""
    model.zero_grad()
    reg.add_grad_()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]
