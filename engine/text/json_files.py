"""JSON files of a model folder, each of which may be absent."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from sluice.engine.errors import ModelFolderError

Json = Mapping[str, object]
"""A parsed JSON object."""


def read_json(path: Path) -> Json:
    """Return the object in a file; empty if there is no such file.

    Raises:
        ModelFolderError: it cannot be read, or holds no object.
    """
    if not path.is_file():
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path} does not hold a JSON object.")
    return cast("dict[str, object]", content)
