"""Flower's simulation runtime as a transport. Only this folder imports `flwr` (1.41 or 1.42, extra `polyfed[flower]`).

This package turns off Flower's telemetry and update check, and Ray's usage statistics. Environment variables can turn
them on again.
"""

import os

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""Environment variables that turn off the telemetry of Flower and Ray."""

# RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 will be Ray's default; setting it now avoids a warning
for _name, _value in (QUIET | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}).items():
    os.environ.setdefault(_name, _value)

from flwr.supercore import telemetry  # noqa: E402

# set here too, because flwr has already read the variable if it was imported before polyfed
telemetry.FLWR_TELEMETRY_ENABLED = os.environ["FLWR_TELEMETRY_ENABLED"]

from polyfed.engines.flower.apps import client_app, simulate  # noqa: E402
from polyfed.engines.flower.transport import GridTransport  # noqa: E402

__all__ = ["QUIET", "GridTransport", "client_app", "simulate"]
