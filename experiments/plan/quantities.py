"""Quantities on a command line: numbers of parameters, seconds and bandwidths, with their units."""

import re

NUMBER = r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
COUNT = re.compile(rf"{NUMBER}\s*([kmbgt]?)", re.IGNORECASE)
SECONDS = re.compile(rf"{NUMBER}\s*(s|ms|us|)", re.IGNORECASE)
RATE = re.compile(rf"{NUMBER}\s*([kmgt]?)(bit|byte|b)(?:/?(s))?", re.IGNORECASE)
THOUSANDS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
SECONDS_OF = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
BITS_PER_BYTE = 8
MIN_COUNT = 1.0
MAX_COUNT = 1e15
MIN_SECONDS = 1e-9
MAX_SECONDS = 1e6
MIN_RATE = 1.0  # bytes per second
MAX_RATE = 1e15


def parse_count(text: str, option: str) -> float:
    """A number from 1 to 1e15 with an optional k, M, B (or G) or T, in powers of 1000.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_count("25.6M", "--parameters"), parse_count("1B", "--parameters")
    (25600000.0, 1000000000.0)
    """
    way_out = "a positive number, with k, M, B or T after it if you like, as in 25.6M"
    number, unit = _match(COUNT, text, option, way_out)
    value = number * THOUSANDS[unit.lower()]
    _require_between(MIN_COUNT, value, MAX_COUNT, "", f"{option} must be {way_out}, got {text!r}")
    return value


def parse_seconds(text: str, option: str, is_zero_allowed: bool = False) -> float:
    """Seconds from 1e-9 to 1e6, or 0 where allowed, of a number with an optional s, ms or us.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_seconds("228ms", "--compute"), parse_seconds("0.228", "--compute")
    (0.228, 0.228)
    """
    zero = "0 or " if is_zero_allowed else ""
    way_out = f"{zero}a positive time in seconds, or with s, ms or us after it, as in 228ms"
    number, unit = _match(SECONDS, text, option, way_out)
    if number == 0 and is_zero_allowed:
        return 0.0
    seconds = number * SECONDS_OF[unit.lower()]
    message = f"{option} must be {way_out}, got {text!r}"
    _require_between(MIN_SECONDS, seconds, MAX_SECONDS, " s", message)
    return seconds


def parse_bandwidth(text: str, option: str) -> float:
    """Bytes per second of a bandwidth in bits (`10gbit`, `10Gbit/s`) or bytes (`450GB/s`).

    From 1 to 1e15 bytes per second. `b` alone, and `bps`, mean bits to some and bytes to others:
    `450GB/s` needs its capital B, and the others are refused.

    Raises:
      ValueError: names the option, and what it must be.

    >>> parse_bandwidth("10gbit", "--bandwidth"), parse_bandwidth("450GB/s", "--bandwidth")
    (1250000000.0, 450000000000.0)
    """
    way_out = "a positive bandwidth in bits or bytes per second, as in 10gbit, 200mbit or 450GB/s"
    match = RATE.fullmatch(text.strip())
    if match is None or match[3] == "b":
        raise ValueError(f"{option} must be {way_out}, got {text!r}: write a number and its unit.")
    bytes_of_unit = 1 / BITS_PER_BYTE if match[3].lower() == "bit" else 1.0
    rate = float(match[1]) * THOUSANDS[match[2].lower()] * bytes_of_unit
    message = f"{option} must be {way_out}, got {text!r}"
    _require_between(MIN_RATE, rate, MAX_RATE, " bytes per second", message)
    return rate


def format_bandwidth(bytes_per_second: float) -> str:
    """A bandwidth in words, in bits per second below 20 GB/s and in bytes from there on.

    >>> format_bandwidth(1.25e9), format_bandwidth(25e6), format_bandwidth(450e9)
    ('10 Gbit/s', '200 Mbit/s', '450 GB/s')
    """
    if bytes_per_second >= 2e10:
        return f"{bytes_per_second / 1e9:.4g} GB/s"
    bits = bytes_per_second * BITS_PER_BYTE
    return f"{bits / 1e9:.4g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"


def format_seconds(seconds: float) -> str:
    """Seconds in words, to a millisecond where that says something, else of three digits.

    >>> format_seconds(0.2284), format_seconds(3e-6), format_seconds(2.5e12), format_seconds(0.0)
    ('0.228 s', '3e-06 s', '2.5e+12 s', '0.000 s')
    """
    is_plain = seconds == 0 or 1e-3 <= seconds < 1e5
    return f"{seconds:.3f} s" if is_plain else f"{seconds:.3g} s"


def format_count(number: float) -> str:
    """A number of parameters in words.

    >>> format_count(25.6e6), format_count(1e9), format_count(512.0)
    ('25.6M', '1B', '512')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def _match(pattern: re.Pattern[str], text: str, option: str, way_out: str) -> tuple[float, str]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{option} must be {way_out}, got {text!r}: write a number and its unit.")
    return float(match[1]), match[2]


def _require_between(low: float, value: float, high: float, unit: str, message: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{message}: give one from {low:g} to {high:g}{unit}.")
