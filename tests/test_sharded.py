"""Two processes: the regularizer of replicated or sharded weights is the one of the whole weights.

Real processes with real collectives (gloo on the CPU), in float64, so that a difference is a mistake.
"""

import contextlib
import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import deephoyer as dh

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
CASES = [
    ("hoyer-square", "elements"),
    ("hoyer", "filters+channels"),
    ("mcp", "elements+filters+channels"),
    ("trimmed-l1", "elements+channels"),  # left to the plain path, which gathers
]


def network():
    """Sizes that two processes can't share evenly: 5 and 7 rows, and one row, of which one process gets none."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Conv2d(3, 7, 3), nn.Linear(9, 1), nn.Conv2d(4, 6, 3, groups=2)]
    return nn.Sequential(*layers).double()


def penalised(model, penalty, groups):
    """The value and the gradients added to 1."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    reg = dh.Regularizer(model, penalty, groups, strength=0.3)
    value = reg.loss().detach()
    reg.add_grad_()
    reg.stats()
    return value, [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def assert_same(model, whole):
    for penalty, groups in CASES:
        value, grads = penalised(model, penalty, groups)
        exact_value, exact = penalised(whole, penalty, groups)
        torch.testing.assert_close(value, exact_value, rtol=1e-12, atol=0)
        for g, e in zip(grads, exact, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


def fully_sharded():
    from torch.distributed.fsdp import fully_shard

    model = network()
    whole = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    assert_same(model, whole)
    assert dh.Regularizer(model).stats()["backend"] == {"foreach": 4}


def tensor_parallel():
    """Rows of one layer, columns of another, a third whole on every process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = network()
    whole = copy.deepcopy(model)
    for layer, cut in zip(model, (Shard(0), Shard(1), Replicate(), Shard(2)), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [cut]))
    assert_same(model, whole)


def loss_trains_sharded_weights():
    """`loss()` is differentiable through the shards."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    for m in (model, whole):
        dh.Regularizer(m, "hoyer-square", "elements+filters").loss().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-14)


def trained(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dh.Regularizer(model, "hoyer-square", "filters+channels", strength=0.01).attach(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def training_together():
    """DDP and `fully_shard`: after steps on different data, the processes agree with one that saw all of it."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    replicated = nn.parallel.DistributedDataParallel(copy.deepcopy(alone))
    sharded = copy.deepcopy(alone)
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    x = torch.randn(8, 6).double()
    exact = trained(alone, x)
    for model in (replicated, sharded):
        for p, q in zip(trained(model, x.chunk(2)[dist.get_rank()]), exact, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def whole_of(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def pruned_and_trained(model, groups, batch):
    """Half of the groups gone, held through steps of Adam; the weights and the moments."""
    masks = dh.prune(model, dh.Density(0.5), groups=groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    masks.hold(optimizer)
    dh.Regularizer(model, "hoyer-square", groups, strength=0.01).attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    moments = [whole_of(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
    return masks, [*(whole_of(p.detach()) for p in model.parameters()), *moments]


def pruning_and_holding():
    """Masks of sharded weights are those of the whole ones, and hold; coupled groups were found before sharding."""
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2)).double()
    for kind in ("elements", "filters+channels", "coupled"):
        torch.manual_seed(1)
        alone = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        sharded = copy.deepcopy(alone)
        groups = [dh.Coupled(m, x) if kind == "coupled" else kind for m in (alone, sharded)]
        fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        sharded(x)  # leaves the weights whole
        exact_masks, exact = pruned_and_trained(alone, groups[0], x)
        masks, found = pruned_and_trained(sharded, groups[1], x.chunk(2)[dist.get_rank()])
        assert masks.keys() == exact_masks.keys() and all(torch.equal(masks[n], exact_masks[n]) for n in masks)
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        zeros = dict(zip(dict(alone.named_parameters()), found, strict=False))
        assert all((zeros[name][~mask] == 0).all() for name, mask in masks.items())


def one_process(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    parts = (training_together, fully_sharded, tensor_parallel, loss_trains_sharded_weights, pruning_and_holding)
    for part in parts:
        part()
    dist.barrier()
    (folder / f"agreed-{rank}").touch()
    time.sleep(0.5)  # until the other has said so, too
    dist.destroy_process_group()


def test_two_processes_agree_with_one(tmp_path):
    # Gloo's own threads sometimes abort a process that is ending, after everything has been compared.
    with contextlib.suppress(mp.ProcessExitedException):
        mp.spawn(one_process, args=(tmp_path,), nprocs=2)
    assert (tmp_path / "agreed-0").exists() and (tmp_path / "agreed-1").exists()
