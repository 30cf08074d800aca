"""The registry of metrics for Prometheus: counts, times and versions, but no names of people, classes or rows."""

from importlib.metadata import version
from typing import Any

from polyfed.core.errors import RecipeError

INSTALL = "pip install 'polyfed[server]' or 'polyfed[device]'"
"""How a server and a device get the packages that they need."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus's text format."""


def require_prometheus() -> None:
    """Refuse to serve metrics if the package `prometheus_client` is not installed.

    Raises:
        RecipeError: the package is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"metrics need an extra: {INSTALL} ({error})") from None


def registry() -> Any:
    """Return a new registry (`prometheus_client.CollectorRegistry`) that holds the installed version."""
    from prometheus_client import CollectorRegistry, Info, disable_created_metrics

    disable_created_metrics()  # type: ignore[no-untyped-call]
    made = CollectorRegistry(auto_describe=False)
    Info("polyfed", "Installed version.", registry=made).info(installed())
    return made


def installed() -> dict[str, str]:
    """Return the installed version of polyfed."""
    return {"polyfed": version("polyfed")}
