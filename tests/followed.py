"""Command lines after the fix of an error, derived from its text where the fix is a name, a flag or a command."""

import re
import shlex
from collections.abc import Sequence

_FLAG = r'--[a-z-]+(?: (?:"[^"]*"|[^\s"-]\S*))?'
_FLAGS = re.compile(f"{_FLAG}(?: {_FLAG})*")
_MESH = re.compile(r"(?:mesh )?(\w+=\d+(?:,\w+=\d+)*)")


def followed(args: Sequence[str], error: str) -> list[list[str]]:
    """Returns the command lines that the fix of an error suggests, one for each of its alternatives.

    None of a fix in prose, such as one about the content of a file, or with a placeholder.
    """
    about, _, fix = error.partition("  fix: ")
    fix = fix.partition("\n")[0]
    wrong = [word for word in re.findall(r"'([^' ]+)'", about) if any(word in arg for arg in args)]
    if near := re.match(r"did you mean '(.+?)'\?", fix):
        named = [word for word in wrong if f"'{word}'" in about.partition("  where: ")[0]]
        return [[arg.replace(named[-1], near[1]) for arg in args]] if named else []
    if removed := re.match(r"omit (--.*)", fix):
        return [_without(args, removed[1].split(" and "))]
    if other := re.match(r"mesh (\S+), layout '(.*)'", fix):
        return [_with(args, ["--mesh", other[1], "--layout", other[2]])]
    if size := re.match(r"a batch of (\d+).* \((--[\w-]+)(?: \d+)?\)", fix):
        return [_with(args, [size[2], size[1]])]
    if fix.startswith("another") or "..." in fix or " NAME" in fix or " N," in fix:
        return []
    parts = [re.sub(r" \(.*\)$", "", part).removeprefix("write it like ") for part in re.split("; |, or |, | or ", fix)]
    first = _line(args, parts[0], wrong[-1:])
    others = (_line(args, part, ()) for part in parts[1:] if not part.startswith("spanax "))
    return [line for line in (first, *others) if line is not None]


def _line(args: Sequence[str], part: str, wrong: Sequence[str]) -> list[str] | None:
    """Returns the command line of one alternative, if it is one."""
    if part.startswith("spanax "):
        return shlex.split(part)[1:]
    if part.startswith("-- "):
        return [*args[: args.index("--") if "--" in args else None], *shlex.split(part)]
    if _FLAGS.fullmatch(part):
        return _with(args, shlex.split(part))
    if (mesh := _MESH.fullmatch(part)) and "--mesh" in args:
        return _with(args, ["--mesh", mesh[1]])
    is_value = re.fullmatch(r"[a-z0-9-]+(:[\dx:]+)?", part) is not None
    return [arg.replace(wrong[0], part) for arg in args] if is_value and wrong else None


def _with(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns the arguments with flags, in place of the same ones, or before the command that is launched."""
    end = len(args)
    result = list(args)
    for flag, value in zip(flags, [*flags[1:], "--"], strict=True):
        if not flag.startswith("--"):
            continue
        values = [] if value.startswith("--") else [value]
        if flag in result and values:
            result[result.index(flag) + 1] = value
        elif flag not in result:
            end = result.index("--") if "--" in result else len(result)
            result[end:end] = [flag, *values]
    return result


def _without(args: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Returns the arguments without flags and their values."""
    return [arg for before, arg in zip(["", *args[:-1]], args, strict=True) if arg not in flags and before not in flags]
