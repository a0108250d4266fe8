"""The catalog of chips, and the parser of its tables and of cluster files."""

import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from spanax.documents import read_toml
from spanax.entries.local_path import local_path
from spanax.errors import ClusterFileError, FileError, UnknownNameError, nearest
from spanax.hardware.chip import Chip, Link
from spanax.units import quantity, quantity_text

Table = Mapping[str, Any]

MAX_CHIPS = 1 << 20
"""The maximum size of a slice in a cluster file, since all factorizations of its sides are enumerated."""

# Key in a table -> field and kind of quantity. The kinds `count`, `shape`, `text`, `texts` and `flag` have no unit.
CHIP_KEYS = {
    "memory": ("memory_bytes", "bytes"),
    "usable_memory": ("usable_bytes", "bytes"),
    "on_chip_memory": ("on_chip_bytes", "bytes"),
    "memory_rate": ("memory_bytes_per_second", "bytes per second"),
    "memory_share": ("memory_share", "share"),
    "sustained": ("sustained_share", "share"),
    "cores": ("num_cores", "count"),
    "tile": ("tile", "count"),
    "vector_rate": ("vector_flops_per_second", "operations per second"),
    "kernel_start": ("kernel_start_seconds", "seconds"),
    "host_rate": ("host_bytes_per_second", "bytes per second"),
    "devices_per_host_link": ("devices_per_host_link", "count"),
    "devices_per_chip": ("devices_per_chip", "count"),
    "devices_per_host": ("devices_per_host", "count"),
    "dollars_per_hour": ("dollars_per_hour", "dollars"),
    "shared": ("shared", "flag"),
    "aliases": ("aliases", "texts"),
    "device_kinds": ("device_kinds", "texts"),
}
DTYPE_KEYS = {"peak": ("peak_flops", "operations per second"), "matmul_share": ("matmul_shares", "share")}
LINK_KEYS = {
    "name": ("name", "text"),
    "kind": ("kind", "text"),
    "rate": ("bytes_per_second", "bytes per second"),
    "share": ("share", "share"),
    "latency": ("latency_seconds", "seconds"),
    "start": ("start_seconds", "seconds"),
    "devices": ("max_devices", "count"),
    "in_switch_share": ("in_switch_share", "share"),
    "in_switch_devices": ("in_switch_devices", "count"),
    "contention": ("contention", "share"),
    "shape": ("max_shape", "shape"),
    "wrap_multiple": ("wrap_multiple", "count"),
    "wrap_size": ("wrap_size", "count"),
    "on_chip": ("on_chip_bytes_per_second", "bytes per second"),
}
LINKS = ("inside", "between")
DTYPES = ("bf16", "fp16", "fp32", "fp8", "fp4", "int8")
LINK_KINDS = ("switch", "direct", "torus")
NUMBERLESS = ("text", "texts", "flag")
UNITLESS = ("count", "shape", "dollars", *NUMBERLESS)


@functools.cache
def catalogue() -> Mapping[str, Chip]:
    """Returns all chips of the catalog by name.

    Example:
      >>> len(catalogue()) > 10, "v5p" in catalogue()
      (True, True)
    """
    return {name: read_chip(name, table, "chips.toml", _tables()) for name, table in _tables().items()}


def chip_named(name: str, where: str = "") -> Chip:
    """Returns a chip of the catalog by its name or an alias, ignoring case.

    Args:
      name: the name or alias.
      where: the `where` of the error.

    Raises:
      SpanaxError: no chip has that name.

    Example:
      >>> chip_named("trillium").name
      'v6e'
    """
    names = chip_names()
    if name.lower() not in names:
        raise UnknownNameError(
            f"unknown chip '{name}'.", where=where, fix=nearest(name.lower(), [*catalogue(), *names])
        )
    return catalogue()[names[name.lower()]]


def chip_names() -> Mapping[str, str]:
    """Returns the name in the catalog by name or alias."""
    return {alias: chip.name for chip in catalogue().values() for alias in (chip.name, *chip.aliases)}


def chip_of_kind(device_kind: str) -> Chip:
    """Returns the chip whose `device_kind` in JAX this is; for an unknown kind, a Chip whose fields are unknown.

    Example:
      >>> chip_of_kind("TPU v5 lite").name, chip_of_kind("Quantum 9").peak_flops
      ('v5e', {})
    """
    matches = [chip for chip in catalogue().values() if device_kind in chip.device_kinds]
    return matches[0] if matches else Chip(device_kind)


def read_chip(name: str, table: Table, where: str, known: Mapping[str, Table]) -> Chip:
    """Parses a table into a Chip; `like` names the table in `known` whose keys are inherited.

    Raises:
      SpanaxError: a key is unknown or missing, or a quantity has no unit, a wrong unit or an implausible value.
    """
    merged = _with_parents(table, where, known)
    _known_keys(merged, (*CHIP_KEYS, *DTYPE_KEYS, *LINKS, "source"), "", where)
    for key in ("peak", "memory_rate") if merged.get("shared") else ("peak", "memory", "memory_rate"):
        if key not in merged:
            raise ClusterFileError(f"'{key}' is missing.", where=where, fix=f'{_example(key)}, or like = "h100"')
    fields: dict[str, Any] = {
        field: _value(merged[key], kind, key, where) for key, (field, kind) in CHIP_KEYS.items() if key in merged
    }
    for key, (field, kind) in DTYPE_KEYS.items():
        by_dtype = _is_table(merged.get(key, {}), key, where)
        _known_keys(by_dtype, DTYPES, f"{key}.", where)
        fields[field] = {dtype: _value(by_dtype[dtype], kind, f"{key}.{dtype}", where) for dtype in by_dtype}
    for key in LINKS:
        if key in merged:
            fields[key] = _link(_is_table(merged[key], key, where), key, where)
    for field in ("memory_bytes", "usable_bytes"):
        fields[field] = int(fields[field]) if field in fields else fields.get("memory_bytes")
    if "on_chip_bytes" in fields:
        fields["on_chip_bytes"] = int(fields["on_chip_bytes"])
    if fields["memory_bytes"] and fields["usable_bytes"] > fields["memory_bytes"]:
        raise ClusterFileError(
            f"usable_memory = {merged['usable_memory']!r} is more than memory = {merged['memory']!r}.", where=where
        )
    return Chip(name, **fields, sources=dict(_sources(merged, where)))


def read_file(path: str | Path) -> tuple[Chip, str | None]:
    """Returns the chip of a cluster file and its `shape`, if any; `like` may name a chip of the catalog.

    Raises:
      DataError: the file cannot be read, or is not TOML.
      SpanaxError: as for `read_chip`.
    """
    path = local_path(path)
    try:
        table = read_toml(path)
    except OSError as error:
        raise FileError(f"cannot read the cluster file '{path}'.", where=error.strerror or str(error)) from None
    except ValueError as error:
        raise FileError(f"'{path}' is not TOML.", where=str(error)) from None
    entries = {key: value for key, value in table.items() if key not in ("name", "shape")}
    shape = table.get("shape")
    if shape is not None and not isinstance(shape, str):
        raise ClusterFileError(f"shape = {shape!r} is not a string.", where=str(path), fix='shape = "8x8"')
    chip = read_chip(str(table.get("name", Path(path).stem)), entries, str(path), _tables())
    return replace(chip, aliases=()), shape


@functools.cache
def _tables() -> Mapping[str, Table]:
    return tomllib.loads(resources.files("spanax.hardware").joinpath("chips.toml").read_text())


def _with_parents(table: Table, where: str, known: Mapping[str, Table]) -> dict[str, Any]:
    """Merges a table into the one that `like` names; an overridden number does not inherit its source."""
    if "like" not in table:
        return dict(table)
    like = str(table["like"]).lower()
    like = next((n for n, t in known.items() if like == n or like in t.get("aliases", ())), like)
    if like not in known:
        raise ClusterFileError(
            f"like = '{table['like']}': there is no such chip.", where=where, fix=nearest(like, known)
        )
    parent = _with_parents(known[like], where, known)
    overrides = {key: value for key, value in table.items() if key != "like"}
    merged = parent | overrides
    for key in (*DTYPE_KEYS, *LINKS):
        override = overrides.get(key)
        base = parent.get(key, {})
        if isinstance(override, dict) and override.get("kind") in (None, base.get("kind")):
            merged[key] = base | override
    inherited = dict(_sources(parent, where, by_field=False))
    for key in _numbers(overrides):
        inherited.pop(key, None)
    merged["source"] = inherited | _is_table(overrides.get("source", {}), "source", where)
    return merged


def _numbers(table: Table) -> Iterator[str]:
    """Yields the dotted key of each number in a table."""
    for key, (_, kind) in CHIP_KEYS.items():
        if key in table and kind not in NUMBERLESS:
            yield key
    for key in DTYPE_KEYS:
        yield from (f"{key}.{dtype}" for dtype in table.get(key, ()))
    for key in LINKS:
        parts = (part for part in table.get(key, ()) if part in LINK_KEYS and LINK_KEYS[part][1] not in NUMBERLESS)
        yield from (f"{key}.{part}" for part in parts)


def _sources(table: Table, where: str, by_field: bool = True) -> Iterator[tuple[str, str]]:
    """Yields the source of each number: that of its key, else of its group, else the file."""
    listed_sources = _is_table(table.get("source", {}), "source", where)
    numbers = list(_numbers(table))
    groups = [key for key in (*DTYPE_KEYS, *LINKS) if key in table]
    _known_keys(listed_sources, (*groups, *numbers), "source.", where)
    for key in numbers:
        group, _, part = key.partition(".")
        text = str(listed_sources.get(key, listed_sources.get(group, f"as written in {where}")))
        yield (_field(key) if by_field else key), text


def _link(table: Table, group: str, where: str) -> Link:
    _known_keys(table, LINK_KEYS, f"{group}.", where)
    kind = table.get("kind", "switch")
    if kind not in LINK_KINDS:
        raise ClusterFileError(f"{group}.kind = {kind!r} is unknown.", where=where, fix=nearest(str(kind), LINK_KINDS))
    for key in ("rate", "shape") if kind == "torus" else ("rate",):
        if key not in table:
            raise ClusterFileError(f"'{group}.{key}' is missing.", where=where, fix=_example(f"{group}.{key}"))
    fields = {
        field: _value(table[key], what, f"{group}.{key}", where)
        for key, (field, what) in LINK_KEYS.items()
        if key in table
    }
    return Link(**{"name": group, "kind": kind} | fields)


def _value(value: Any, kind: str, key: str, where: str) -> Any:
    if kind == "count":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ClusterFileError(f"{key} = {value!r} is not an integer >= 1.", where=where, fix=f"{key} = 8")
        return value
    if kind == "shape":
        is_list = isinstance(value, list) and 0 < len(value) <= 8
        if not is_list or any(type(size) is not int or not 1 <= size <= MAX_CHIPS for size in value):
            raise ClusterFileError(f"{key} = {value!r} is not a shape.", where=where, fix=f"{key} = [16, 16]")
        if math.prod(value) > MAX_CHIPS:
            raise ClusterFileError(f"{key} = {value!r} are more than {MAX_CHIPS:,} chips.", where=where)
        return tuple(value)
    if kind == "dollars":
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ClusterFileError(f"{key} = {value!r} is not a number >= 0.", where=where, fix=f"{key} = 2.5")
        return float(value)
    if kind == "flag" and isinstance(value, bool) or kind == "text" and isinstance(value, str):
        return value
    if kind == "texts" and isinstance(value, list):
        return tuple(str(item) for item in value)
    if kind in NUMBERLESS:
        raise ClusterFileError(f"{key} = {value!r} is not a {kind}.", where=where)
    return quantity(value, kind, key=key, where=where)


def _is_table(value: Any, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterFileError(f"{key} = {value!r} is not a table.", where=where, fix=_example(key))
    return value


def _known_keys(table: Table, known: Any, prefix: str, where: str) -> None:
    for key in table:
        if key not in known:
            raise ClusterFileError(f"unknown key '{prefix}{key}'.", where=where, fix=nearest(key, known))


def _example(key: str) -> str:
    examples = {
        "peak": 'peak = { bf16 = "312 TFLOP/s" }',
        "matmul_share": 'matmul_share = { bf16 = "80 %" }',
        "memory": 'memory = "80 GiB"',
        "memory_rate": 'memory_rate = "2 TB/s"',
        "source": 'source = { memory = "its data sheet" }',
    }
    link = f'[{re.sub(r"[.].*", "", key)}] with rate = "300 GB/s", and for a torus shape = [16, 16]'
    return examples.get(key, link)


def file_text(chip: Chip, size: str) -> str:
    """Returns the text of a cluster file, from which `read_file` returns the chip and the size.

    Of a chip of the catalog, it lists only what differs. Numbers have six digits.

    Args:
      chip: of a shared host, with the resources of all devices.
      size: the size after the colon of a cluster's name.

    Example:
      >>> chip = replace(chip_named("h100"), memory_share=0.8, sources={"memory_share": "runs/a"})
      >>> print(file_text(chip, "8x8"), end="")
      like = "h100"
      memory_share = "80 %"
      shape = "8x8"
      <BLANKLINE>
      [source]
      memory_share = "runs/a"
    """
    import tomli_w  # not needed to read cluster files

    base = catalogue().get(chip.name)
    table = {"name": chip.name} if base is None else {"like": chip.name}
    inherited = {} if base is None else _table(base)
    for key, value in _table(chip).items():
        known = inherited.get(key, {})
        if isinstance(value, dict):
            value = {part: text for part, text in value.items() if text != known.get(part)}
        if value and value != known:
            table[key] = value
    table = {**table, "shape": size}
    listed = {key: chip.sources[_field(key)] for key in _numbers(table) if _field(key) in chip.sources}
    return tomli_w.dumps(table | ({"source": listed} if listed else {}))


def _table(chip: Chip) -> dict[str, Any]:
    """Returns the known numbers of a chip as the values of a cluster file."""
    table = _entries(chip, CHIP_KEYS)
    for key, (field, kind) in DTYPE_KEYS.items():
        table[key] = {dtype: quantity_text(value, kind, 6) for dtype, value in getattr(chip, field).items()}
    links = {key: getattr(chip, key) for key in LINKS}
    return table | {key: _entries(link, LINK_KEYS) for key, link in links.items() if link is not None}


def _entries(record: Chip | Link, keys: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Returns the known fields of a chip or link as values of a cluster file."""
    entries: dict[str, Any] = {}
    for key, (field, kind) in keys.items():
        value = getattr(record, field)
        if isinstance(value, tuple):
            value = list(value)
        if value:
            is_number = kind not in UNITLESS
            entries[key] = quantity_text(value, kind, 6) if is_number else value
    return entries


def _field(key: str) -> str:
    """Returns the name of a number in `Chip.sources`, from its dotted key."""
    group, _, part = key.partition(".")
    if not part:
        return CHIP_KEYS[key][0]
    return f"{DTYPE_KEYS[group][0]}.{part}" if group in DTYPE_KEYS else f"{group}.{LINK_KEYS[part][0]}"
