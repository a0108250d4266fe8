"""Moves modules as `modules.txt` lists them, with their tests, and rewrites every import and mention.

It may be run again: what has been moved is only looked for in text, so that a merged branch follows.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("*.py", "*.md", "*.toml", "*.txt", "Makefile", "*.json")
SKIPPED = ("renames/", "CHANGELOG.md", "tests/test_house.py")


def moves() -> dict[str, str]:
    rows = (Path(__file__).parent / "modules.txt").read_text().splitlines()
    pairs = (row.split() for row in rows if row and not row.startswith("#"))
    return {old: new[1:] if new.startswith("/") else f"{top(old)}/{new}" for old, new in pairs}


def move(source: Path, target: Path) -> None:
    if not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", source, target], cwd=ROOT, check=True)


def rewritten(text: str, pairs: dict[str, str]) -> str:
    """Text with dotted modules and paths of files replaced, and `from package import module` by its new package."""
    dotted = {old.replace("/", "."): new.replace("/", ".") for old, new in pairs.items()}
    text = by_package(text, dotted)
    done = {new: new for new in dotted.values()}  # a new package may have the name of an old module
    either = "|".join(re.escape(path) for path in sorted(done | dotted, key=len, reverse=True))
    text = re.sub(rf"(?<![\w.])(spanax\.)({either})(?![\w])", lambda m: m[1] + (done | dotted)[m[2]], text)
    pattern = "|".join(re.escape(old) for old in sorted(dotted, key=len, reverse=True))
    text = re.sub(rf'"({pattern})"', lambda m: f'"{dotted[m[1]]}"', text)  # the table of public names
    paths = "|".join(re.escape(old) for old in sorted(pairs, key=len, reverse=True))
    text = re.sub(rf"(?<![\w./])((?:src/)?(?:spanax/)?)({paths})\.py\b", lambda m: f"{m[1]}{pairs[m[2]]}.py", text)
    tests = {
        f"tests/{folder(old)}/test_{name(old)}": f"tests/{folder(new)}/test_{name(new)}" for old, new in pairs.items()
    }
    paths = "|".join(re.escape(old) for old in sorted(tests, key=len, reverse=True))
    return re.sub(rf"(?<![\w./])({paths})\.py\b", lambda m: f"{tests[m[1]]}.py", text)


def by_package(text: str, dotted: dict[str, str]) -> str:
    """Text with `from spanax.package import module` importing each moved module from its new package."""

    def imports(match: re.Match[str]) -> str:
        lines, rest = [], []
        for entry in match[2].split(", "):
            module, _, alias = entry.partition(" as ")
            new = dotted.get(f"{match[1]}.{module}")
            if new is None:
                rest.append(entry)
                continue
            package, _, name = new.rpartition(".")
            lines.append(
                f"from spanax.{package} import {name}" + (f" as {alias or module}" if name != (alias or module) else "")
            )
        if rest:
            lines.append(f"from spanax.{match[1]} import {', '.join(rest)}")
        indent = re.match(r"[ >.]*", match[0])[0]
        return "\n".join(indent + line for line in lines) + (match[3] or "")

    return re.sub(r"(?m)^[ >.]*from spanax\.([\w.]+) import ([\w, ]+?)(  # .*)?$", imports, text)


def top(path: str) -> str:
    return path.partition("/")[0]


def folder(path: str) -> str:
    return path.rpartition("/")[0]


def name(path: str) -> str:
    return path.rpartition("/")[2]


def main() -> None:
    pairs = moves()
    for old, new in pairs.items():
        move(ROOT / f"src/spanax/{old}.py", ROOT / f"src/spanax/{new}.py")
        move(ROOT / f"tests/{folder(old)}/test_{name(old)}.py", ROOT / f"tests/{folder(new)}/test_{name(new)}.py")
        package = ROOT / f"src/spanax/{folder(new)}"
        while package.name != "spanax":
            (package / "__init__.py").touch()
            package = package.parent
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *TEXTS], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for file in files.stdout.split("\n"):
        path = ROOT / file
        if file and not file.startswith(SKIPPED) and path.exists() and "golden" not in file:
            text = path.read_text()
            if (changed := rewritten(text, pairs)) != text:
                path.write_text(changed)


if __name__ == "__main__":
    main()
