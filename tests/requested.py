"""Changes and lists the flags of a command, also those in groups that several commands share."""

import dataclasses
from typing import Any


def groups(command: Any) -> dict[str, Any]:
    """The fields of a command, or of its class by default, that are groups of flags."""
    if isinstance(command, type):
        defaults = {field.name: _default(field) for field in dataclasses.fields(command)}
    else:
        defaults = vars(command)
    return {name: value for name, value in defaults.items() if dataclasses.is_dataclass(value)}


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def flag_names(kind: type) -> set[str]:
    """The names of all flags."""
    inner = groups(kind)
    names = {field.name for field in dataclasses.fields(kind)} - inner.keys()
    return names.union(*(vars(group) for group in inner.values()))


def with_flags(command: Any, **changes: Any) -> Any:
    """The command with some flags changed."""
    for name, group in groups(command).items():
        inner = {flag: changes.pop(flag) for flag in vars(group).keys() & changes.keys()}
        changes[name] = dataclasses.replace(group, **inner)
    return dataclasses.replace(command, **changes)
