"""Published shapes of models, for rows that name a model and leave its widths out."""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

COLUMNS = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab")


@functools.cache
def published_shapes() -> tuple[dict[str, str], ...]:
    """Returns the entries of `shapes.toml`, as cells of text."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple({key: str(value) for key, value in entry.items()} for entry in table.values())


def completed(text: Mapping[str, str]) -> dict[str, str]:
    """Returns a row's cells, with those of the published model of its name where the row leaves them empty.

    A row whose own cells contradict the published shape is another model of that name, and stays as it is.

    Example:
      >>> completed({"model": "Llama2-70B", "n_layers": ""})["n_layers"]
      '80'
    """
    name = re.sub(r"[^a-z0-9.]+", "-", text.get("model", "").lower())
    for entry in published_shapes():
        if re.search(entry["name"], name):
            sizes = {key: value for key, value in entry.items() if key not in ("name", "source")}
            if all(text.get(key, "") in ("", value, f"{value}.0") for key, value in sizes.items() if key in COLUMNS):
                return {**text, **{key: value for key, value in sizes.items() if not text.get(key)}}
            return dict(text)
    return dict(text)
