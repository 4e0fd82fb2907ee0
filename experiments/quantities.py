"""Reads numbers with units, which options give."""

import re
from typing import NamedTuple


class Quantity(NamedTuple):
    """A kind of number with a unit, for options."""

    description: str  # for the error if a text is no such quantity
    unit: str  # a regular expression
    factors: dict[str, float]  # unit in lower case -> factor
    low: float  # the range of the product
    high: float
    base: str = ""  # unit of the product, for the error if it is out of range


NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*"
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BYTES = {"bit": 1 / 8, "byte": 1.0, "b": 1.0}
# `b` alone, and `bps`, mean bits to some and bytes to others: bytes need their capital B.
BANDWIDTH = Quantity(
    "a positive bandwidth in bits or bytes per second, as in 10gbit, 200mbit or 450GB/s",
    "((?i:[kmgt]?(?:bit|byte))|[kKmMgGtT]?B)(?:/?[sS])?",
    {prefix + name: n * m for prefix, n in THOUSANDS.items() for name, m in BYTES.items()},
    1.0,
    1e15,
    " bytes per second",
)


def parse(quantity: Quantity, text: str, option: str) -> float:
    """Returns the value of a text in the base unit, for example seconds or bytes per second.

    >>> parse(BANDWIDTH, "10gbit", "--bandwidth"), parse(BANDWIDTH, "450GB/s", "--bandwidth")
    (1250000000.0, 450000000000.0)
    """
    message = f"{option} must be {quantity.description}, got {text!r}"
    match = re.fullmatch(NUMBER + quantity.unit, text.strip())
    if match is None:
        raise ValueError(f"{message}: write a number and its unit.")
    value = float(match[1]) * quantity.factors[match[2].lower()]
    if not quantity.low <= value <= quantity.high:
        bounds = f"{quantity.low:g} to {quantity.high:g}{quantity.base}"
        raise ValueError(f"{message}: give one from {bounds}.")
    return value
