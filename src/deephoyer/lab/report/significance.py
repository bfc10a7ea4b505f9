"""Whether one method is better than another: an exact paired test, and a correction for several tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deephoyer.errors import UserError


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
