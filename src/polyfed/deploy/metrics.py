"""Metrics in the text format of Prometheus: counts, times and versions, but no names of people, classes or rows.

Every request computes the metrics anew, and nothing is stored between requests.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from polyfed.core.errors import RecipeError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus's text format."""

Gauges = Mapping[str, tuple[str, float]]
"""Name of a metric -> its description and its value."""


def require_prometheus() -> None:
    """Refuse to serve metrics if the package `prometheus_client` is not installed.

    Raises:
        RecipeError: the package is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"metrics need the extra: pip install 'polyfed[flower]' ({error})") from None


def text_of(gauges: Gauges, counters: Gauges, labelled: Mapping[str, tuple[str, str, Mapping[str, float]]]) -> bytes:
    """Return metrics as text.

    Args:
        gauges: values that can rise and fall. Every name begins with `polyfed_`.
        counters: values that only rise during a process or a run. This function adds `_total` to their names.
        labelled: counters with one label: description, name of the label, and the value for each label.
    """
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

    versions = {"polyfed": version("polyfed"), "flower": version("flwr")}
    families: list[Metric] = [InfoMetricFamily("polyfed", "Installed versions.", value=versions)]
    families += [GaugeMetricFamily(name, text, value=value) for name, (text, value) in gauges.items()]
    families += [CounterMetricFamily(name, text, value=value) for name, (text, value) in counters.items()]
    for name, (text, label, values) in labelled.items():
        family = CounterMetricFamily(name, text, labels=[label])
        for key, value in values.items():
            family.add_metric([key], value)
        families.append(family)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)


class _Given:
    """A collector that returns given metric families."""

    def __init__(self, families: Iterable[Any]) -> None:
        self.families = list(families)

    def collect(self) -> Iterable[Any]:
        """Return the families."""
        return self.families
