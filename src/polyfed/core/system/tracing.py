"""Traces of OpenTelemetry, by the extra `polyfed[otel]`: off, and not imported, unless its variables ask for them.

A span says what happened when, by whom it was caused, and how often: names of tasks, numbers of rounds and of clients.
It has no data, label, id, path or text of an error. `span` takes only the attributes of `ALLOWED`.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from polyfed.core.errors import PolyfedWarning

ASKED = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The standard variables of which one asks for traces."""

ALLOWED = frozenset({"round", "rounds", "clients", "task", "engine", "verdict"})
"""The attributes that a span may have."""

PARENT = "traceparent"
"""The entry in the header of a packet that names the span of the request, in the form of W3C Trace Context."""

_providers: dict[int, Any] = {}
"""Process id -> what makes and sends its spans, or None. A forked process has no thread that sends, so it has its
own."""

P = ParamSpec("P")
T = TypeVar("T")


def enabled() -> bool:
    """Return whether the environment asks for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter != "none" and any(os.environ.get(name, "").strip() for name in ASKED)


def tracer() -> Any:
    """Return the tracer of this process, or None if traces are off."""
    process = os.getpid()
    if process not in _providers:
        _providers[process] = _made() if enabled() else None
    provider = _providers[process]
    return None if provider is None else provider.get_tracer("polyfed")


def _made() -> Any:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter()
    except ImportError as error:
        _warn(f"needs the extra ({error}): pip install 'polyfed[otel]'")
        return None
    if exporter is None:
        return None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "polyfed"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter() -> Any:
    """Return what sends spans away, as the variables say, or None if they name what polyfed does not have."""
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() or "otlp"
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if wanted == "console":
        import sys

        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    if wanted != "otlp":
        _warn(f"has OTEL_TRACES_EXPORTER = '{wanted}'. Allowed: otlp, console, none")
        return None
    if protocol not in (None, "", "http/protobuf"):
        _warn(f"has the protocol '{protocol}'. Allowed: http/protobuf")
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _warn(why: str) -> None:
    warnings.warn(f"the environment asks for traces, but {why}. The run goes on without", PolyfedWarning, stacklevel=2)


@contextmanager
def span(name: str, parent: str = "", **facts: int | str) -> Iterator[dict[str, int | str]]:
    """Record what the block does as a span.

    Args:
        name: its name.
        parent: the span that caused it, if that is in another process: what `here` returned there.
        **facts: attributes, of `ALLOWED`. Those that are added to the yielded dict become attributes too.
    """
    if (maker := tracer()) is None:
        yield facts
        return
    from opentelemetry.trace import StatusCode

    quiet: dict[str, Any] = {"record_exception": False, "set_status_on_exception": False}  # a text may hold data
    with maker.start_as_current_span(name, context=_context(parent), **quiet) as made:
        try:
            yield facts
        except BaseException as error:
            made.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            assert facts.keys() <= ALLOWED, "attributes tell nothing of data"
            made.set_attributes(facts)


def traced(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Record each call of a function as a span."""

    def wrapped(work: Callable[P, T]) -> Callable[P, T]:
        @wraps(work)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if tracer() is None:
                return work(*args, **kwargs)
            with span(name):
                return work(*args, **kwargs)

        return call

    return wrapped


def _context(parent: str) -> Any:
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({PARENT: parent})


def here() -> str:
    """Return the present span, for the header of a packet; "" without one."""
    if tracer() is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(PARENT, "")


def flush() -> None:
    """Send what has been recorded, before the process ends without its usual steps."""
    if (provider := _providers.get(os.getpid())) is not None:
        provider.force_flush(FLUSH_MILLISECONDS)


FLUSH_MILLISECONDS = 2000
"""How long a process that ends waits for the collector."""
