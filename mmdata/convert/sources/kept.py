"""What of an annotated image is stored beside its boxes: the values that `keep` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdata.config.convert import ALL, RESERVED
from mmdata.convert.sources.boxes import KEY
from mmdata.convert.sources.tables import shown
from mmdata.errors import ConfigError

PATH = "path"


class Kept:
    """The values to keep of each image.

    Args:
        path: of the annotations, for messages.
        keep: as the settings name them; "path" is the image's path, "*" takes all that an image has besides it.
        known: what an image has.
        on_request: further names that "*" does not take, because they are large.

    Raises:
        ConfigError: a name that is not known.
    """

    def __init__(self, path: Path, keep: Sequence[str], known: Sequence[str], on_request: Sequence[str] = ()) -> None:
        known = [name for name in known if name not in (PATH, KEY, *RESERVED)]
        strangers = [name for name in keep if name not in (ALL, PATH, *known, *on_request)]
        if strangers:
            raise ConfigError(
                f"annotations '{path}': nothing of the name '{strangers[0]}' (keep); there are: "
                f"{shown([PATH, *known, *on_request])}"
            )
        named = [name for word in keep for name in (known if word == ALL else (word,))]
        self.names = tuple(dict.fromkeys(named))
        self.asks = frozenset(on_request) & set(named)

    def of(self, image: Mapping[str, Any], path: str | None) -> dict[str, Any]:
        """The kept values of an image with this path; None for one that it lacks."""
        return {name: path if name == PATH else image.get(name) for name in self.names if name not in self.asks}
