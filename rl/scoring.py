"""Scores of answers, and the weights of a reward's components."""

from collections.abc import Mapping


def text_scores(given: str, answer: str) -> dict[str, float]:
    """Of an answer in digits. exact: 0 or 1; right: share of characters right in place, of the longer text; digits: share of
    characters that are digits."""
    return {
        "exact": float(given == answer),
        "right": sum(a == b for a, b in zip(given, answer, strict=False)) / max(len(given), len(answer)),
        "digits": sum(c in "0123456789" for c in given) / max(len(given), 1),
    }


def component_weights(given: Mapping[str, float], **defaults: float) -> dict[str, float]:
    """The weights of a reward's components. ValueError for an unknown one."""
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(f"weights: there is no component {unknown[0]!r}; use some of {', '.join(defaults)}")
    return {**defaults, **given}
