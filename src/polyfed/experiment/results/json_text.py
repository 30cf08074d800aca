"""The strict JSON that a run writes. Numbers that are not finite become null."""

import json
import math
from typing import Any


def json_ready(value: Any) -> Any:
    """Convert nested lists and dictionaries for JSON. Numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(content: Any) -> str:
    """Return indented JSON without NaN or infinity: the format of result.json and of `polyfed run --json`."""
    return json.dumps(json_ready(content), indent=1, allow_nan=False)
