"""How numbers are written in the terminal and on the page."""

import math
from datetime import UTC, datetime

from polyfed.privacy.differential.guarantee import number as epsilon_of

MISSING = "–"
"""The text that replaces a missing number."""

PREFIXES = ("B", "kB", "MB", "GB", "TB", "PB")


def number_of(value: float | None, unit: str) -> str:
    """Return a value with its unit: shares in percent, bytes with a decimal prefix, and an epsilon rounded up.

    >>> number_of(0.5, "share"), number_of(30_497_400, "bytes"), number_of(0.0475, "seconds")
    ('50.0 %', '30.5 MB', '47.5 ms')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        return bytes_of(value)
    if unit == "epsilon":
        return epsilon_of(value)
    if unit == "seconds":
        return seconds_of(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Return a text of a number and a noun. The noun gets an `s` unless the number is 1.

    >>> counted(1, "round"), counted(30, "round")
    ('1 round', '30 rounds')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def bytes_of(value: float) -> str:
    """Bytes with a decimal prefix and three digits.

    >>> bytes_of(999), bytes_of(68_864)
    ('999 B', '68.9 kB')
    """
    power = min(int(math.log10(value) / 3), len(PREFIXES) - 1) if value >= 1 else 0
    scaled = value / 1000**power
    return f"{scaled:.0f} {PREFIXES[power]}" if scaled >= 100 else f"{scaled:.3g} {PREFIXES[power]}"


def seconds_of(value: float) -> str:
    """A duration in seconds, written in the unit that fits.

    >>> seconds_of(0.0475), seconds_of(3.73), seconds_of(95), seconds_of(7300)
    ('47.5 ms', '3.73 s', '1 min 35 s', '2 h 01 min')
    """
    if value < 0.9995:  # a value that would round to 1000 ms is written as 1 s
        return f"{1000 * value:.3g} ms"
    if value < 59.95:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def moment_of(text: str | None) -> str | None:
    """Format an ISO date as UTC with hours and minutes. Any other text is returned unchanged.

    >>> moment_of("2026-01-02T03:04:05+00:00")
    '2026-01-02 03:04 UTC'
    """
    try:
        return f"{datetime.fromisoformat(text or '').astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return text
