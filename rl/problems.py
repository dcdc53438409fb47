"""Small programming problems, made from a random number generator: what is asked, and what is right.

A right solution stays here, on the host; only arguments go to where a model's program runs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A function to be written."""

    family: str
    signature: str
    """solve(numbers)"""
    text: str
    """what it returns"""
    solve: Callable[..., Any]
    draw: Callable[[random.Random], list[Any]]
    """arguments of a call"""


def divisible(rng: random.Random) -> Problem:
    by = rng.randint(2, 9)
    return Problem(
        family="divisible",
        signature="solve(numbers)",
        text=f"the sum of those numbers in the list that {by} divides",
        solve=lambda numbers: sum(number for number in numbers if number % by == 0),
        draw=lambda rng: [_numbers(rng)],
    )


def caesar(rng: random.Random) -> Problem:
    shift = rng.randint(1, 25)

    def moved(char: str) -> str:
        first = "a" if char.islower() else "A"
        return chr((ord(char) - ord(first) + shift) % 26 + ord(first)) if char.isalpha() else char

    return Problem(
        family="caesar",
        signature="solve(text)",
        text=f"the text with each letter from a to z or A to Z moved on by {shift} places in the alphabet, around its end, and "
        f"all else as it is",
        solve=lambda text: "".join(map(moved, text)),
        draw=lambda rng: [_text(rng)],
    )


def runs(rng: random.Random) -> Problem:
    least = rng.randint(1, 3)

    def counted(text: str) -> list[list[Any]]:
        found: list[list[Any]] = []
        for char in text:
            if found and found[-1][0] == char:
                found[-1][1] += 1
            else:
                found.append([char, 1])
        return [one for one in found if one[1] >= least]

    return Problem(
        family="runs",
        signature="solve(text)",
        text=f"a list of [character, length] for each run of equal characters that is at least {least} long, in order",
        solve=counted,
        draw=lambda rng: ["".join(rng.choice("abc") * rng.randint(1, 4) for _ in range(rng.randint(0, 12)))],
    )


def digits(rng: random.Random) -> Problem:
    base = rng.choice([2, 3, 5, 7, 8, 12])

    def written(number: int) -> list[int]:
        found = [number % base]
        while number := number // base:
            found.append(number % base)
        return found[::-1]

    return Problem(
        family="digits",
        signature="solve(number)",
        text=f"the list of the digits of a whole number, 0 or more, in base {base}, the highest first; [0] for 0",
        solve=written,
        draw=lambda rng: [rng.choice([0, base, *(rng.randint(0, 10**6) for _ in range(4))])],
    )


def window(rng: random.Random) -> Problem:
    size = rng.randint(2, 5)
    return Problem(
        family="window",
        signature="solve(numbers)",
        text=f"the largest sum of {size} neighbouring numbers in the list, or None where it has fewer",
        solve=lambda numbers: max((sum(numbers[i : i + size]) for i in range(len(numbers) - size + 1)), default=None),
        draw=lambda rng: [_numbers(rng)],
    )


def words(rng: random.Random) -> Problem:
    least = rng.randint(2, 5)
    return Problem(
        family="words",
        signature="solve(text)",
        text=f"a dict with how often each word of at least {least} letters is in the text; words are between spaces, and are "
        f"counted in lower case",
        solve=lambda text: {word: text.lower().split().count(word) for word in text.lower().split() if len(word) >= least},
        draw=lambda rng: [_text(rng)],
    )


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    make.__name__: make for make in (divisible, caesar, runs, digits, window, words)
}


def cases(problem: Problem, rng: random.Random, count: int) -> list[list[Any]]:
    """The arguments of so many calls, no two alike."""
    found: dict[str, list[Any]] = {}
    while len(found) < count:
        drawn = problem.draw(rng)
        found[repr(drawn)] = drawn
    return list(found.values())


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-50, 50) for _ in range(rng.randint(3, 12))]


def _text(rng: random.Random) -> str:
    some = ("the", "Cat", "zoo", "Quick", "a", "it", "lazy", "The", "xylem", "IT")
    return " ".join(rng.choice(some) for _ in range(rng.randint(0, 9)))
