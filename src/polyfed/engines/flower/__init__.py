"""Packets on Flower: the only folder that imports `flwr` (1.41; the extra `polyfed[flower]`).

One adapter serves Flower's simulation runtime, SuperLink with SuperNodes, and a grid that calls the ClientApp in this
process. Flower's telemetry and update check and Ray's usage statistics are off unless the environment says otherwise.
"""

import os

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Variables that keep Flower and Ray from calling home."""

# the last is Ray's coming default, and spares a warning
for _name, _value in (QUIET | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}).items():
    os.environ.setdefault(_name, _value)

from flwr.supercore import telemetry  # noqa: E402

telemetry.FLWR_TELEMETRY_ENABLED = os.environ["FLWR_TELEMETRY_ENABLED"]  # it was read already if flwr came first

from polyfed.engines.flower.apps import client_app, server_app, simulate  # noqa: E402
from polyfed.engines.flower.direct import DirectGrid  # noqa: E402
from polyfed.engines.flower.transport import GridTransport  # noqa: E402

__all__ = ["QUIET", "DirectGrid", "GridTransport", "client_app", "server_app", "simulate"]
