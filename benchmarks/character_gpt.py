"""A character GPT of nanoGPT's size with half or a quarter of its heads' and neurons' channels, trained.

    python benchmarks/character_gpt.py shakespeare.txt --out runs/gpt --device cuda --seeds 0 1 2
    python benchmarks/character_gpt.py shakespeare.txt --out runs/gpt --table

Every network starts from a dense one, is trained on with a penalty (Group-HS, group lasso) or without one (magnitude,
random), loses channels that a score finds small, is finetuned with the zeros held, and compacted. The dense one is
trained on for as many steps under the same schedule. Stages are kept in the folder, so a run goes on where it
stopped, and several processes may each do a seed; `seed-N.json` there have everything that the table shows. Data is a
text file that you give; the last tenth of it is for validation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import deephoyer as dh
from zoo_own import CharacterGPT


@dataclass(frozen=True)
class Sizes:
    """The network and its training; the defaults are nanoGPT's for single characters."""

    layers: int = 6
    heads: int = 6
    width: int = 384
    length: int = 256
    batch: int = 64
    dropout: float = 0.2
    rate: float = 1e-3
    later_rate: float = 5e-4  # of everything after the dense training
    dense_steps: int = 2500
    penalty_steps: int = 1000
    finetune_steps: int = 1500
    warmup: int = 100
    check_every: int = 500
    check_batches: int = 40


METHODS: dict[str, dict[str, Any]] = {
    "group-hs": {"penalty": "hoyer-square", "strengths": (3e-4, 1e-4, 1e-3), "score": "magnitude"},
    "group-lasso": {"penalty": "l1", "strengths": (3e-4, 1e-4, 3e-5), "score": "magnitude"},
    "magnitude": {"penalty": None, "strengths": (0.0,), "score": "magnitude"},
    "random": {"penalty": None, "strengths": (0.0,), "score": "random"},
}


class Text:
    """Characters as numbers, in two parts."""

    def __init__(self, path: Path, device: str):
        text = path.read_text()
        self.characters = sorted(set(text))
        number = {c: i for i, c in enumerate(self.characters)}
        every = torch.tensor([number[c] for c in text], dtype=torch.long, device=device)
        cut = int(0.9 * len(every))
        self.train, self.validation = every[:cut], every[cut:]

    def batches(self, part: Tensor, sizes: Sizes, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows at random places, with what comes next at each place of them."""
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(sizes.length + 1, device=part.device)
        while True:
            for starts in torch.randint(len(part) - sizes.length, (100, sizes.batch, 1), generator=generator).to(part):
                found = part[starts + window]
                yield found[:, :-1], found[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        logits = model(x)
    return functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def validated(model: nn.Module, text: Text, sizes: Sizes) -> float:
    """The mean loss on windows that are the same every time."""
    model.eval()
    batches = text.batches(text.validation, sizes, seed=12345)
    losses = [loss_of(model, next(batches)).item() for _ in range(sizes.check_batches)]
    model.train()
    return statistics.fmean(losses)


def cosine(highest: float, warmup: int, total: int) -> Callable[[int], float]:
    """The learning rate at each of `total` steps: a warm-up, then half a cosine down to a tenth."""

    def rate(step: int) -> float:
        if step < warmup:
            return highest * (step + 1) / (warmup + 1)
        share = (step - warmup) / max(1, total - warmup)
        return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    return rate


class Trainer:
    """A model, its optimizer and a schedule that several stages may go on with.

    On a GPU a step is captured as a CUDA graph once a few have been done plainly, and replayed.
    """

    WARM_UP = 3

    def __init__(
        self, model: nn.Module, text: Text, sizes: Sizes, seed: int, rate: Callable[[int], float], step: int = 0
    ):
        self.model, self.text, self.sizes, self.rate, self.step = model.train(), text, sizes, rate, step
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.captures = text.train.is_cuda
        first = torch.tensor(rate(step), device=text.train.device) if self.captures else rate(step)
        self.optimizer = torch.optim.AdamW(groups, first, (0.9, 0.99), fused=True, capturable=self.captures)
        self.regularizer: dh.Regularizer | None = None
        self.batches = text.batches(text.train, sizes, seed)
        torch.manual_seed(seed)

    def once(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.regularizer is not None:
            self.regularizer.add_grad_(advance=False)
        self.optimizer.step()

    def run(self, steps: int) -> dict[str, Any]:
        """Trains, and gives the validation loss at the last step and at the best that was looked at."""
        seen: list[tuple[float, int]] = []
        graph: torch.cuda.CUDAGraph | None = None
        places = next(self.batches)
        for i in range(1, steps + 1):
            for group in self.optimizer.param_groups:
                if self.captures:
                    group["lr"].fill_(self.rate(self.step))
                else:
                    group["lr"] = self.rate(self.step)
            if graph is None and self.captures and i > self.WARM_UP:
                places = tuple(t.clone() for t in places)  # what the graph reads
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.once(places)
            if graph is None:
                self._aside(next(self.batches))
            else:
                for place, new in zip(places, next(self.batches), strict=True):
                    place.copy_(new)
                graph.replay()
            self.step += 1
            if i % self.sizes.check_every == 0 or i == steps:
                seen.append((validated(self.model, self.text, self.sizes), self.step))
                print(f"  step {self.step}: {seen[-1][0]:.4f}", flush=True)
        return {"last": seen[-1][0], "best": min(seen)[0], "best_step": min(seen)[1]}

    def _aside(self, batch: tuple[Tensor, Tensor]) -> None:
        """A step by itself; on a GPU on a stream of its own, as a capture wants its warm-up."""
        if not self.captures:
            return self.once(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.once(batch)
        torch.cuda.current_stream().wait_stream(stream)


class Study:
    """Stages of one folder and seed: each is done once, its network and its numbers are kept."""

    def __init__(self, folder: Path, seed: int, text: Text, sizes: Sizes, device: str, end: float = math.inf):
        self.folder, self.text, self.sizes, self.device, self.end = folder, text, sizes, device, end
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"seed-{seed}.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        known = self.results.setdefault("sizes", asdict(sizes))
        if known != asdict(sizes):
            raise SystemExit(f"{folder} holds networks of other sizes: {known}")

    def fresh(self) -> nn.Module:
        s = self.sizes
        settings = {"width": s.width, "heads": s.heads, "layers": s.layers, "length": s.length, "dropout": s.dropout}
        return CharacterGPT(len(self.text.characters), **settings).to(self.device)  # type: ignore[arg-type]

    def example(self) -> Tensor:
        return self.text.validation[: 2 * self.sizes.length].view(2, -1)

    def stage(self, name: str, work: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> nn.Module:
        """The stage's network, made now if it was not yet."""
        path = self.folder / f"{name}.safetensors"
        if name not in self.results or not path.exists():
            if time.monotonic() > self.end:
                raise TimeoutError
            print(name, flush=True)
            model, numbers = work()
            dh.save(model, path)
            self.results[name] = numbers
            self.write()
            return model
        return dh.load(path, self.fresh())

    def once(self, name: str, work: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
        """A last stage, whose network nothing goes on from."""
        if name not in self.results:
            self.stage(name, work)

    def write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        temporary.replace(self.file)

    @property
    def more(self) -> int:
        """Steps after the dense training, the same number for all."""
        return self.sizes.penalty_steps + self.sizes.finetune_steps

    def later(self) -> Callable[[int], float]:
        return cosine(self.sizes.later_rate, self.sizes.warmup, self.more)

    def dense(self, seed: int) -> nn.Module:
        def work() -> tuple[nn.Module, dict[str, Any]]:
            torch.manual_seed(seed)
            sizes = self.sizes
            rate = cosine(sizes.rate, sizes.warmup, sizes.dense_steps)
            trainer = Trainer(self.fresh(), self.text, sizes, seed, rate)
            return trainer.model, trainer.run(sizes.dense_steps) | self.costs(trainer.model)

        return self.stage(f"dense-{seed}", work)

    def continued(self, seed: int) -> None:
        def work() -> tuple[nn.Module, dict[str, Any]]:
            trainer = Trainer(self.dense(seed), self.text, self.sizes, seed + 1000, self.later())
            return trainer.model, trainer.run(self.more) | self.costs(trainer.model)

        self.once(f"continued-{seed}", work)

    def penalised(self, method: str, strength: float, seed: int) -> nn.Module:
        """Trained on under the penalty of a method; where it has none, without."""
        penalty = METHODS[method]["penalty"]

        def work() -> tuple[nn.Module, dict[str, Any]]:
            model = self.dense(seed)
            trainer = Trainer(model, self.text, self.sizes, seed + 1000, self.later())
            if penalty is not None:
                groups = dh.Coupled(model, self.example())
                trainer.regularizer = dh.Regularizer(model, penalty, groups, strength, weigh="size")
            return trainer.model, trainer.run(self.sizes.penalty_steps)

        return self.stage(f"plain-{seed}" if penalty is None else f"{method}-{strength:g}-{seed}", work)

    def pruned(self, method: str, strength: float, density: float, seed: int) -> None:
        def work() -> tuple[nn.Module, dict[str, Any]]:
            model = self.penalised(method, strength, seed)
            groups = dh.Coupled(model, self.example())
            torch.manual_seed(seed)
            masks = dh.prune(model, dh.Density(density), groups, score=METHODS[method]["score"])
            after = validated(model, self.text, self.sizes)
            trainer = Trainer(model, self.text, self.sizes, seed + 2000, self.later(), self.sizes.penalty_steps)
            masks.hold(trainer.optimizer)
            numbers = {"pruned": after} | trainer.run(self.sizes.finetune_steps)
            small = dh.compact(model.eval(), self.example(), groups=groups)
            numbers |= {"compacted": validated(small, self.text, self.sizes)}
            return small, numbers | self.costs(small)

        self.once(f"{method}-{strength:g}-{density:g}-{seed}", work)

    def costs(self, model: nn.Module) -> dict[str, Any]:
        """Parameters, MACs that one window takes, and tokens in a second, in eval mode."""
        model.eval()
        x = self.text.validation[: self.sizes.batch * self.sizes.length].view(self.sizes.batch, -1)
        total = dh.summary(model, self.example(), latency=False).total
        return {"parameters": total.parameters, "macs": total.macs_executed, "tokens_per_second": _speed(model, x)}


@torch.no_grad()
def _speed(model: nn.Module, x: Tensor, seconds: float = 1.0) -> float:
    def once() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            model(x)
        if x.is_cuda:
            torch.cuda.synchronize()

    once()
    calls, start = 0, time.perf_counter()
    while calls < 3 or time.perf_counter() - start < seconds:
        once()
        calls += 1
    return calls * x.numel() / (time.perf_counter() - start)


def table(results: dict[str, Any]) -> str:
    """Means over seeds, ± their standard deviation; the strength of each method that is best after the last step."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, numbers in results.items():
        row = name.rpartition("-")[0]
        if "parameters" in numbers:
            runs.setdefault(row, []).append(numbers)
    whole = statistics.fmean(r["macs"] for r in runs["dense"])
    lines = ["| network | seeds | loss, last step | loss, best | MACs executed | parameters | tokens/s |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|"]
    for row, found in sorted(runs.items(), key=lambda item: (-item[1][0]["macs"], _mean(item[1], "last"))):
        macs, parameters = _mean(found, "macs"), _mean(found, "parameters")
        cells = [row, str(len(found)), _spread(found, "last"), _spread(found, "best"), f"{macs / whole:.2f}"]
        timed = all("tokens_per_second" in r for r in found)
        speed = f"{_mean(found, 'tokens_per_second'):,.0f}" if timed else ""
        lines.append(f"| {' | '.join(cells)} | {parameters / 1e6:.2f}M | {speed} |")
    return "\n".join(lines)


def _mean(found: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(r[key] for r in found)


def _spread(found: list[dict[str, Any]], key: str) -> str:
    values = [r[key] for r in found]
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("text", type=Path)
    words.add_argument("--out", type=Path, required=True, help="a folder for networks and results.json")
    words.add_argument("--device", default="cpu")
    words.add_argument("--seeds", type=int, nargs="+", default=[0])
    words.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    words.add_argument("--strengths", type=float, nargs="+", help="instead of each method's own")
    words.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.25])
    words.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many")
    words.add_argument("--table", action="store_true", help="only show what is there")
    for field in fields(Sizes):
        words.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    chosen = words.parse_args()
    sizes = Sizes(**{field.name: getattr(chosen, field.name) for field in fields(Sizes)})
    end = time.monotonic() + chosen.seconds
    try:
        for seed in [] if chosen.table else chosen.seeds:
            study = Study(chosen.out, seed, Text(chosen.text, chosen.device), sizes, chosen.device, end)
            study.dense(seed)
            study.continued(seed)
            for method, strength in _tries(chosen.methods, chosen.strengths):
                for density in chosen.densities:
                    study.pruned(method, strength, density, seed)
    except TimeoutError:
        print("the time is over; the same command goes on", flush=True)
    found = [json.loads(file.read_text()) for file in sorted(chosen.out.glob("seed-*.json"))]
    print(table({name: r for results in found for name, r in results.items() if name != "sizes"}))


def _tries(methods: list[str], strengths: list[float] | None) -> list[tuple[str, float]]:
    """Every method with every strength of its own: first all methods' first, so that a run cut short compares them."""
    own = {m: strengths if strengths and METHODS[m]["penalty"] else METHODS[m]["strengths"] for m in methods}
    longest = max(map(len, own.values()))
    return [(m, own[m][i]) for i in range(longest) for m in methods if i < len(own[m])]


if __name__ == "__main__":
    main()
