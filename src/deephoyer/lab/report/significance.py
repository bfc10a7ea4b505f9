"""Whether one method is better than another: an exact paired test, and a correction for several tests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from deephoyer.errors import UserError

LEVEL, BEST = 0.05, "**best**"


def sign_flips(differences: Sequence[float]) -> float:
    """The exact two-sided p of a paired permutation test: how often chance alone makes a mean that far from 0.

    >>> sign_flips([1.0, 2.0, 1.5, 0.5, 1.0])
    0.0625
    """
    count = len(differences)
    if not 1 <= count <= 20:
        raise UserError(f"a paired test needs 1 to 20 seeds, not {count}.")
    # Accuracies are multiples of one image's share, so that ties are common: rounding must not break them.
    observed = abs(sum(differences)) - 1e-9 * sum(map(abs, differences))
    extreme = 0
    for signs in range(2**count):
        total = sum(-d if signs >> i & 1 else d for i, d in enumerate(differences))
        extreme += abs(total) >= observed
    return extreme / 2**count


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction for as many tests as there are: the chance of even one false difference stays under the level.

    >>> holm({"a": 0.01, "b": 0.04})
    {'a': 0.02, 'b': 0.04}
    """
    adjusted: dict[str, float] = {}
    least = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = least
    return adjusted


def verdicts(accuracies: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Which method is best, and from which it does not differ significantly: an exact paired test over the seeds,
    corrected for the number of tests. `accuracies` has the accuracy of every seed for each method.

    A method that lacks seeds which others have is not judged, for its mean is over other seeds; nor is any method
    called the best while there is such a one.

    >>> verdicts({"a": {3: 0.98, 4: 0.97}, "b": {3: 0.95, 4: 0.95}, "c": {3: 0.99}})
    {'c': 'seeds are missing', 'b': 'not significant (p = 0.5)', 'a': 'highest mean'}
    """
    run = {method: seeds for method, seeds in accuracies.items() if seeds}
    most = max(map(len, run.values()), default=0)
    judged = {method: "seeds are missing" for method, seeds in run.items() if len(seeds) < most}
    means = {method: statistics.fmean(seeds.values()) for method, seeds in run.items() if method not in judged}
    if len(means) < 2:
        return judged
    best = max(means, key=lambda method: means[method])
    p_values = {}
    for method in means:
        common = sorted(set(run[method]) & set(run[best]))
        if method != best and common:
            p_values[method] = sign_flips([run[best][seed] - run[method][seed] for seed in common])
    adjusted = holm(p_values)
    clear = not judged and all(p < LEVEL for p in adjusted.values())
    judged |= {m: f"p = {p:.3g}" if p < LEVEL else f"not significant (p = {p:.2g})" for m, p in adjusted.items()}
    return judged | {best: BEST if clear else "highest mean"}
