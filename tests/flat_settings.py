"""Settings of tests: one flat dictionary, so that a test can change any of them by its name alone."""

from __future__ import annotations

from typing import Any

from mmdata.config import LoadingConfig


def grouped(**settings: Any) -> dict[str, Any]:
    """A section `data`, with num_workers=2 and the like in its group: loading={"num_workers": 2}."""
    loading = {name: settings.pop(name) for name in LoadingConfig.model_fields if name in settings}
    return {**settings, "loading": {**settings.get("loading", {}), **loading}}
