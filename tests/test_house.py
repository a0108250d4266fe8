"""The house rules: each a function from a package folder to what breaks it, and each seen failing once."""

import ast
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "spanax"

# The order of the house, from the bottom up: a place imports from itself and from the rows below. `spanax` stands for
# the public names. A new place needs an entry here. Inside a place, folders and modules have an order of their own:
# no folder at any depth is part of a circle.
ORDER: tuple[set[str], ...] = (
    {"frames", "printable", "sealed", "displays", "batch_dims", "compat"},
    {"errors", "documents"},
    {"units", "usage", "schema", "entries"},
    {"processes", "adapters"},
    {"trace", "hardware"},
    {"plan"},
    {"step"},
    {"train"},
    {"check", "doctor"},
    {"show"},
    {"jit", "stack", "losses"},
    {"decoding"},
    {"spanax"},
    {"models"},
    {"interop", "launch"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}

# Methods of values that call what is built on the values: `_repr_html_`, and `Plan.constrain`.
UPWARD = {
    ("displays.py", "spanax.show.page.notebook"),
    ("displays.py", "spanax.show.quotes"),
    ("plan/sharding/placement.py", "spanax.jit.constrain"),
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base", "manager", "context"}
EMPTY_ENDINGS = ("Manager", "Helper", "Util", "Utils", "Context", "Base")
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


parse = functools.cache(ast.parse)


def sources(root: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """The path below `root`, the text and the tree of every source file."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(root).as_posix(), text, parse(text)


def module_name(path: str) -> str:
    """`plan/cost.py` -> `spanax.plan.cost`; `plan/__init__.py` -> `spanax.plan`."""
    return ".".join(part for part in ("spanax", *path.removesuffix(".py").split("/")) if part != "__init__")


def place(module: str) -> str:
    """Its folder or top module: `spanax.plan.cost` -> `plan`; `spanax` itself stands for the public names."""
    return [*module.split("."), "spanax"][1]


def imports(path: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yields the line and the module of every import of the package, also in functions and for types only."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            full = [f"{source}.{alias.name}" for alias in node.names]
            names = [name if source != "spanax" and name in modules else source for name in full]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        ours = (name for name in names if name.split(".")[0] == "spanax" and (path, name) not in UPWARD)
        yield from ((node.lineno, name) for name in ours)


def wrong_way(root: Path) -> list[str]:
    """Imports that do not run down the house, wherever they hide."""
    files = list(sources(root))
    modules = {module_name(path) for path, _, _ in files}
    problems = []
    for path, _, tree in files:
        here = place(module_name(path))
        if here not in ROW:
            problems.append(f"{path}: '{here}' has no place in the house; give it an entry in ORDER")
            continue
        for line, module in imports(path, tree, modules):
            there = place(module)
            is_inside = there == here != "spanax"
            if not is_inside and ROW.get(there, len(ORDER)) >= ROW[here]:
                problems.append(f"{path}:{line}: {here} must not import {module}")
    return problems


def import_cycles(root: Path) -> list[str]:
    """Returns the circles of modules and folders at every depth: also by imports in functions and for types only."""
    files = list(sources(root))
    modules = {module_name(path) for path, _, _ in files}
    edges = {
        (module_name(path), module)
        for path, _, tree in files
        for _, module in imports(path, tree, modules)
        if module in modules
    }
    folders = {name.rsplit(".", cut)[0] for name in modules for cut in range(1, name.count(".") + 1)}
    return [circle for folder in sorted(folders) for circle in circles(inside(folder, edges))]


def inside(folder: str, edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    """Returns the imports between the modules and folders that a folder directly contains."""
    depth = len(folder.split(".")) + 1
    needs: dict[str, set[str]] = {}
    for here, there in edges:
        if here.startswith(f"{folder}.") and there.startswith(f"{folder}."):
            ours = ".".join(here.split(".")[:depth])
            theirs = ".".join(there.split(".")[:depth])
            if ours != theirs or here == there == ours:
                needs.setdefault(ours, set()).add(theirs)
    return needs


def circles(needs: Mapping[str, set[str]]) -> list[str]:
    """Returns a path for every circle that a walk through a graph meets."""
    problems, done = [], set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            problems.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for needed in sorted(needs.get(name, ())):
                walk(needed, (*trail, name))
            done.add(name)

    for name in sorted(needs):
        walk(name, ())
    return problems


def too_long(root: Path) -> list[str]:
    """Files and functions that are too long."""
    problems = []
    for path, text, tree in sources(root):
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            problems.append(f"{path}: {lines} lines, over {MAX_FILE_LINES}")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                reported = node.body[0] if ast.get_docstring(node) else None
                told_lines = (reported.end_lineno or reported.lineno) - reported.lineno + 1 if reported else 0
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - told_lines
                if lines > MAX_FUNCTION_LINES:
                    problems.append(f"{path}:{node.lineno}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}")
    return problems


def empty_names(root: Path) -> list[str]:
    """Names that say nothing of what is inside."""
    problems = []
    for path, _, tree in sources(root):
        problems += [f"{path}: '{part}' says nothing" for part in re.split(r"[/.]", path) if part in EMPTY_NAMES]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith(EMPTY_ENDINGS):
                problems.append(f"{path}:{node.lineno}: class {node.name} says nothing")
    return problems


def unsafe_calls(root: Path) -> list[str]:
    """What can run code out of data."""
    problems = []
    for path, _, tree in sources(root):
        for node in ast.walk(tree):
            result: set[str] = set()
            if isinstance(node, ast.Import):
                result = {alias.name.split(".")[0] for alias in node.names} & UNSAFE_MODULES
            elif isinstance(node, ast.ImportFrom):
                result = {(node.module or "").split(".")[0]} & UNSAFE_MODULES
            elif isinstance(node, ast.Call):
                result = {ast.unparse(node.func)} & UNSAFE_CALLS
                result |= {k.arg for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"}
            problems += [f"{path}:{node.lineno}: {name}" for name in sorted(result)]
    return problems


def without_code(root: Path) -> list[str]:
    """Errors of the base type, whose code says nothing about the mistake."""
    return [
        f"{path}:{node.lineno}: raise the type of spanax.errors that describes the mistake"
        for path, _, tree in sources(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "SpanaxError"
    ]


BROAD = {"SpanaxError", "Exception", "BaseException"}
READS_TEXT = {"startswith", "endswith", "find", "index", "match", "search", "fullmatch"}
TEXT_OF_ERROR = re.compile(r"(str|first_line)\(\w*error\w*\)(\.lower\(\))?")


def swallowed(root: Path) -> list[str]:
    """Broad errors that are dropped, and decisions by the text of an error, where no comment says why."""
    problems = []
    for path, text, tree in sources(root):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        for node in ast.walk(tree):
            what = dropped(node) or by_text(node)
            end = getattr(node, "end_lineno", 0) if isinstance(node, ast.ExceptHandler) else getattr(node, "lineno", 0)
            if what and commented.isdisjoint(range(getattr(node, "lineno", 0), end + 1)):
                problems.append(f"{path}:{getattr(node, 'lineno', 0)}: {what}")
    return problems


def dropped(node: ast.AST) -> str:
    """What a `suppress` or a handler swallows of BROAD; empty where it raises, or uses the error."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
        return ", ".join(sorted(BROAD & set(map(ast.unparse, node.args)))) and "suppresses a broad error"
    if not isinstance(node, ast.ExceptHandler):
        return ""
    kinds = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
    if not BROAD & {"BaseException" if kind is None else ast.unparse(kind) for kind in kinds}:
        return ""
    inside = [child for statement in node.body for child in ast.walk(statement)]
    uses = any(
        isinstance(child, ast.Raise) or (isinstance(child, ast.Name) and child.id == node.name) for child in inside
    )
    return "" if uses else "drops a broad error"


def by_text(node: ast.AST) -> str:
    """How a condition reads the text of an error: `x in str(error)`, `str(error).startswith(x)`, `re.match`."""
    read: list[ast.AST] = []
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn | ast.Eq) for op in node.ops):
        read = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS_TEXT:
        read = [node.func.value, *node.args]
    shown = [ast.unparse(part) for part in read]
    return "decides by the text of an error" if any(TEXT_OF_ERROR.fullmatch(item) for item in shown) else ""


CLOCK = re.compile(r"time\.(time|monotonic|perf_counter|process_time|thread_time)(_ns)?\(\)|ru_[us]time")
WAITS = {"run", "communicate", "wait", "join", "alarm"}
MIN_HANG_SECONDS = 240


def asserted_times(root: Path) -> list[str]:
    """Limits on elapsed time, which a busy machine exceeds: a clock beside a number, and waits that end too soon."""
    problems = []
    for path, _, tree in sources(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                if any(map(CLOCK.search, sides)) and any(re.fullmatch(r"[A-Z0-9_e.+*/ -]+", side) for side in sides):
                    problems.append(f"{path}:{node.lineno}: {ast.unparse(node)} limits elapsed time")
            elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WAITS:
                for value in [*(k.value for k in node.keywords if k.arg == "timeout"), *node.args[:1]]:
                    seconds = value.value if isinstance(value, ast.Constant) else None
                    if type(seconds) in (int, float) and 0 < seconds < MIN_HANG_SECONDS:
                        problems.append(f"{path}:{node.lineno}: {ast.unparse(node.func)} waits {seconds} s")
    return sorted(problems)


OPENS_RUN_FOLDERS = (
    "train/record/", "train/store/", "train/state/", "train/job/", "processes/", "launch/", "show/", "commands/",
    "check/array_placement.py", "check/profile.py", "cli.py",
)  # fmt: skip
OPENS = {
    "open", "read_text", "write_text", "read_bytes", "write_bytes", "read_json", "read_toml", "unlink", "mkdir",
    "rmdir", "iterdir", "glob", "rglob", "symlink_to", "hardlink_to", "is_file", "is_dir", "exists",
    "is_symlink", "lstat",
}  # fmt: skip
OPENS_OF_OS = {
    "open", "replace", "rename", "remove", "unlink", "makedirs", "mkdir", "listdir", "scandir", "walk", "stat", "lstat",
    "utime", "link", "symlink", "rmdir", "exists", "lexists", "isfile", "isdir", "islink",
}  # fmt: skip
# What these open is not in a run folder, or is the path that the user names.
OPENS_ELSEWHERE = {
    "check/array_placement.py": {"path.is_file()", "path.is_dir()"},
    "check/profile.py": {"trace.rglob('*.xplane.pb')", "run.parent.glob(f'*/{PROFILE_SUMMARY}')"},
    "cli.py": {"os.open(os.devnull, os.O_WRONLY)"},
    "launch/local.py": {"Path('/dev/nvidiactl').exists()"},
    "launch/request.py": {"shutil.which(program)"},
    "launch/slurm.py": {"shutil.which(name)", "tempfile.TemporaryFile()"},
    "train/record/run_lock.py": {"Path('/proc/self').exists()", "Path('/proc', match[1]).exists()"},
    "processes/absent_tpu.py": {"root.glob(pattern)", "root.glob(PCI_VENDORS)", "path.read_text()"},
    "processes/ports.py": {"Path('/proc/net', table).read_text()", "os.listdir('/proc/self/fd')"},
    "train/record/folder.py": {"read_toml(path)"},
    "train/record/time_ledger.py": {"open('/proc/self/stat')"},
    "show/check.py": {"Path(file).read_text()"},
    "commands/generate.py": {"read_bytes(command.prompts)"},
    "commands/inspect.py": {"path.write_text(text)"},
    "commands/plan/ranked.py": {"command.out_cluster.write_text(cluster_text(calibration.cluster))"},
    "commands/machine.py": {
        "command.out.is_dir()", "command.out.parent.is_dir()",
        "command.out.write_text(probe(devices(command.devices), seconds=command.seconds))",
    },
    "show/page/document.py": {
        "files(__package__).joinpath(name).read_text(encoding='utf-8')",
        "path.write_text(document(page), encoding='utf-8')",
    },
    "launch/guard.py": {
        "Path('/proc').glob('[0-9]*')", "(folder / 'stat').read_text(errors='replace')",
        "(folder / 'environ').read_bytes()", "Path(f'/proc/{pid}/stat').read_text(errors='replace')",
    },
    "commands/report.py": {"command.run.is_file()"},
    "train/record/report.py": {"folder.is_dir()"},
}  # fmt: skip


def opened_by_path(root: Path) -> list[str]:
    """Entries of run folders that are opened by path, past `spanax.entries`, which follows no link there."""
    problems = []
    for path, _, tree in sources(root):
        is_of_run = path.startswith(OPENS_RUN_FOLDERS) or (path.startswith("train/") and path.count("/") == 1)
        for node in ast.walk(tree):
            if not is_of_run or path == "train/compilation_cache.py" or not isinstance(node, ast.Call):
                continue
            module, _, name = ast.unparse(node.func).rpartition(".")
            opens = name in OPENS_OF_OS if module in ("os", "os.path") else name in OPENS or module in UNPACKS
            if opens and ast.unparse(node) not in OPENS_ELSEWHERE.get(path, ()):
                problems.append(f"{path}:{node.lineno}: {ast.unparse(node.func)} opens an entry by path")
    return problems


UNPACKS = {"shutil", "tempfile", "glob"}

MAX_FILES = 13


def crowded(root: Path) -> list[str]:
    """Folders with too many modules."""
    folders = sorted(path for path in (root, *root.rglob("*")) if path.is_dir())
    problems = []
    for folder in folders:
        name, count = folder.relative_to(root).as_posix(), len([*folder.glob("[!_]*.py")])
        if count > MAX_FILES:
            problems.append(f"{name}: {count} modules; divide it into packages by concept")
    return problems


def packed(root: Path) -> list[str]:
    """Statements that assign several values which do not depend on one another."""
    problems = []
    for path, _, tree in sources(root):
        for node in ast.walk(tree):
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
                continue
            if any(isinstance(value, ast.Starred) for value in node.value.elts):
                continue
            names = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
            is_swap = any(isinstance(name, ast.Name) and name.id in names for name in ast.walk(node.value))
            if len(target.elts) == len(node.value.elts) and not is_swap:
                problems.append(f"{path}:{node.lineno}: assign one value a statement")
    return problems


def chained(root: Path) -> list[str]:
    """Conditional expressions inside of one another, also between parentheses."""
    return [
        f"{path}:{node.lineno}: a conditional expression in another one"
        for path, _, tree in sources(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))
    ]


RULES: list[Callable[[Path], list[str]]] = [
    wrong_way,
    import_cycles,
    too_long,
    packed,
    chained,
    empty_names,
    unsafe_calls,
    without_code,
    swallowed,
    opened_by_path,
    crowded,
]
TEST_RULES: list[Callable[[Path], list[str]]] = [asserted_times]

# rule, a file that breaks it, its text, what is reported
BROKEN: list[tuple[Callable[[Path], list[str]], str, str, str]] = [
    (wrong_way, "plan/cost.py", "import spanax.step\n", "plan must not import spanax.step"),
    (wrong_way, "trace/axes.py", "from spanax.hardware import chips\n", "trace must not import spanax.hardware"),
    (wrong_way, "hardware/mesh.py", "from spanax.trace.axes import Axes\n", "hardware must not import spanax.trace"),
    (wrong_way, "plan/cost.py", "def f():\n    from spanax.show import table\n", "cost.py:2: plan must not import"),
    (wrong_way, "step/ring.py", "from spanax.train.data import order\n", "step must not import spanax.train.data"),
    (wrong_way, "train/loop.py", "import typing\nif typing.TYPE_CHECKING:\n    import spanax.check.hlo\n", "loop.py:3"),
    (wrong_way, "plan/cost.py", "from ..step import run\n", "plan must not import spanax.step"),
    (wrong_way, "plan/cost.py", "from .. import trace\n", "plan must not import spanax"),
    (wrong_way, "train/loop.py", "from spanax import plan\n", "train must not import spanax"),
    (wrong_way, "stack/a.py", "from spanax.jit import jit\n", "stack must not import spanax.jit"),
    (wrong_way, "plan/cost.py", "import importlib\nx = importlib.import_module('spanax.step')\n", "cost.py:2"),
    (wrong_way, "engine/loop.py", "x = 1\n", "'engine' has no place"),
    (import_cycles, "plan.py", "import spanax.plan\n", "spanax.plan -> spanax.plan"),
    (packed, "a.py", "first, second = 1, f()\n", "a.py:1: assign one value"),
    (chained, "a.py", "x = 1 if a else 2 if b else 3\n", "a.py:1: a conditional expression"),
    (too_long, "a.py", "x = 1\n" * 501, "501 lines"),
    (too_long, "a.py", "def f():\n" + "    x = 1\n" * 80, "f has 81 lines"),
    (empty_names, "plan/utils.py", "", "'utils' says nothing"),
    (empty_names, "core/plan.py", "", "'core' says nothing"),
    (empty_names, "plan/a.py", "class MeshManager:\n    pass\n", "class MeshManager"),
    (unsafe_calls, "a.py", "def f():\n    import pickle\n", "a.py:2: pickle"),
    (unsafe_calls, "a.py", "from pickle import loads\n", "a.py:1: pickle"),
    (unsafe_calls, "a.py", "eval('1')\n", "a.py:1: eval"),
    (unsafe_calls, "a.py", "exec('1')\n", "a.py:1: exec"),
    (unsafe_calls, "a.py", "yaml.load(f)\n", "a.py:1: yaml.load"),
    (unsafe_calls, "a.py", "numpy.load(f, allow_pickle=True)\n", "a.py:1: allow_pickle"),
    (without_code, "a.py", "raise SpanaxError('no')\n", "a.py:1: raise the type"),
    (swallowed, "a.py", "with suppress(SpanaxError):\n    f()\n", "a.py:1: suppresses a broad error"),
    (swallowed, "a.py", "with contextlib.suppress(OSError, Exception):\n    f()\n", "a.py:1: suppresses"),
    (swallowed, "a.py", "try:\n    f()\nexcept Exception:\n    x = 1\n", "a.py:3: drops a broad error"),
    (swallowed, "a.py", "try:\n    f()\nexcept:\n    pass\n", "a.py:3: drops a broad error"),
    (swallowed, "a.py", "try:\n    f()\nexcept (OSError, SpanaxError) as error:\n    x = 1\n", "a.py:3: drops"),
    (swallowed, "a.py", "x = 'full' in str(error)\n", "a.py:1: decides by the text"),
    (swallowed, "a.py", "x = str(error).startswith('no')\n", "a.py:1: decides by the text"),
    (swallowed, "a.py", "x = re.search('no', str(error))\n", "a.py:1: decides by the text"),
    (opened_by_path, "train/record/a.py", "open(folder / 'x')\n", "a.py:1: open opens an entry by path"),
    (opened_by_path, "train/a.py", "(folder / 'x').read_text()\n", "read_text opens an entry by path"),
    (opened_by_path, "launch/a.py", "os.replace(new, path)\n", "os.replace opens an entry by path"),
    (opened_by_path, "show/a.py", "shutil.rmtree(folder)\n", "shutil.rmtree opens an entry by path"),
    (asserted_times, "a.py", "assert time.process_time() - began < 3 and x == 1\n", "began < 3 limits elapsed time"),
    (asserted_times, "a.py", "assert (perf() - t) / 9 < 1 or 0 < (time.perf_counter() - t) / 9 < 1e-4\n", "0.0001"),
    (asserted_times, "a.py", "assert usage.ru_utime < 0.4\n", "usage.ru_utime < 0.4"),
    (asserted_times, "a.py", "child.communicate(timeout=30)\n", "child.communicate waits 30 s"),
    (asserted_times, "a.py", "thread.join(5.0)\n", "thread.join waits 5.0 s"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    problems = rule(PACKAGE)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule: Callable[[Path], list[str]]) -> None:
    problems = rule(ROOT / "tests")
    assert not problems, "\n".join(problems)


def test_polls_and_hang_guards_may_read_a_clock(tmp_path: Path) -> None:
    text = "while time.monotonic() < deadline:\n    assert time.time() - began >= before\nchild.wait(timeout=240)\n"
    (tmp_path / "a.py").write_text(text)
    assert asserted_times(tmp_path) == []


@pytest.mark.parametrize("rule, path, text, reported", BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_rule_is_reported(
    rule: Callable[[Path], list[str]], path: str, text: str, reported: str, tmp_path: Path
) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    problems = rule(tmp_path)
    assert len(problems) == 1 and reported in problems[0]


def test_an_error_may_be_dropped_with_a_reason(tmp_path: Path) -> None:
    retained = (
        "try:\n    f()\nexcept SpanaxError:\n    pass  # the answer: there is none\nx = 'a' in str(error)  # C++ text\n"
    )
    (tmp_path / "a.py").write_text(retained + "try:\n    f()\nexcept Exception as error:\n    g(error)\n")
    assert swallowed(tmp_path) == []


def test_every_rule_has_a_failing_example() -> None:
    assert {rule for rule, *_ in BROKEN} | {crowded} == {*RULES, *TEST_RULES}


def test_a_folder_with_too_many_entries_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    for number in range(MAX_FILES + 1):
        (tmp_path / "plan" / f"module{number}.py").touch()
    assert crowded(tmp_path) == [f"plan: {MAX_FILES + 1} modules; divide it into packages by concept"]


def tree_of(page: str) -> set[str]:
    """The folders that the last block of the page draws, by indentation."""
    rows = [line for line in page.rpartition("```text\n")[2].partition("```")[0].splitlines() if "/" in line]
    folders, parents = set(), list[str]()
    for row in rows:
        depth = (len(row) - len(row.lstrip())) // 2
        parents[depth:] = [row.split()[0].rstrip("/")]
        folders.add("/".join(parents))
    return folders


def test_the_page_on_architecture_draws_every_folder() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")} - {"."}
    page = (ROOT / "notes" / "architecture.md").read_text()
    assert tree_of(page) == folders
    assert tree_of(page.replace("  spmd/", "  mpmd/")) != folders


@pytest.mark.parametrize("line", ["import {}", "def f():\n    import {}", "if TYPE_CHECKING:\n    import {}"])
def test_import_cycles_include_every_kind_of_import(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import spanax.b\n")
    (tmp_path / "b.py").write_text(line.format("spanax.c") + "\n")
    assert import_cycles(tmp_path) == []
    (tmp_path / "b.py").write_text(line.format("spanax.a") + "\n")
    assert import_cycles(tmp_path) == ["spanax.a -> spanax.b -> spanax.a"]


@pytest.mark.parametrize("folder", ["", "plan/"])
def test_a_circle_of_folders_is_reported_at_every_depth(folder: str, tmp_path: Path) -> None:
    above = "spanax." + folder.replace("/", ".")
    files = {
        f"{folder}cost/a.py": f"import {above}spmd.b",
        f"{folder}spmd/b.py": "",
        f"{folder}spmd/c.py": f"import {above}cost.a",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert import_cycles(tmp_path) == [f"{above}cost -> {above}spmd -> {above}cost"]


def test_downward_imports_are_allowed(tmp_path: Path) -> None:
    for path, text in {
        "plan/cost.py": "from spanax.errors import SpanaxError\nfrom spanax.plan.layout import Layout\n",
        "models/gpt.py": "import spanax\nimport jax\n",
        "__init__.py": "from spanax.step import compile\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert wrong_way(tmp_path) == []


# ---- the files around the package


def addresses(*paths: Path) -> list[str]:
    """Lines that name a registry: where packages come from is the machine's business."""
    sign = re.compile(r"://|--(?:extra-)?index-url|--find-links|--trusted-host|^-[if] ")
    lines = ((path, number, line) for path in paths for number, line in enumerate(path.read_text().splitlines(), 1))
    return [f"{path.name}:{number}: {line}" for path, number, line in lines if sign.search(line)]


def unpinned(constraints: Path, requirements: list[str]) -> list[str]:
    """Lines that are no `name==version`, and requirements without a line."""
    lines = constraints.read_text().splitlines()
    problems = [f"not a pin: {line}" for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)]
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in lines}
    names = (re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in requirements)
    return problems + [f"no pin: {name}" for name in names if re.sub(r"[-_.]+", "-", name).lower() not in pinned]


CONSTRAINTS = [ROOT / "constraints" / "py311.txt", ROOT / "constraints" / "py312.txt"]


def test_no_registry_is_named(tmp_path: Path) -> None:
    problems = addresses(*CONSTRAINTS, ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci" / "run")
    assert not problems, "\n".join(problems)
    bad = tmp_path / "bad.txt"
    bad.write_text("jax==0.10.2\n--index-url x\njax @ https" + "://example.org/jax.whl\n")
    assert len(addresses(bad)) == 2


@pytest.mark.parametrize("constraints", CONSTRAINTS, ids=lambda path: path.stem)
def test_everything_required_is_pinned(constraints: Path, tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    problems = unpinned(constraints, project["dependencies"] + project["optional-dependencies"]["dev"])
    assert not problems, "\n".join(problems)
    bad = tmp_path / "bad.txt"
    bad.write_text("jax>=0.10\nOrbax_Checkpoint==1.0\n")
    assert unpinned(bad, ["orbax-checkpoint>=0.1", "rich"]) == ["not a pin: jax>=0.10", "no pin: rich"]


def too_new(constraints: Path, python: str) -> list[str]:
    """Pins of installed packages that do not support the Python that the file is for."""
    problems = []
    for line in constraints.read_text().splitlines():
        name, _, pinned = line.partition("==")
        with suppress(PackageNotFoundError):
            requires = metadata(name).get("Requires-Python") or ""
            if version(name) == pinned and python not in SpecifierSet(requires):
                problems.append(f"{line} requires Python {requires}")
    return problems


@pytest.mark.parametrize("constraints, python", list(zip(CONSTRAINTS, ["3.11", "3.12"], strict=True)))
def test_every_pin_supports_the_python_of_its_file(constraints: Path, python: str) -> None:
    problems = too_new(constraints, python)
    assert not problems, "\n".join(problems)


def test_a_requirement_pinned_too_new_is_reported(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text(f"jax=={version('jax')}\nnot-installed-here==1.0\n")
    assert too_new(bad, "3.12") == []
    assert len(too_new(bad, "3.6")) == 1


# Python of an environment in which pip fails, and explains why unless -q is passed.
FAILS = """#!/bin/sh
case "$*" in *"pip install"*)
  case "$*" in *" -q"*) ;; *) echo "The conflict is caused by: two pins" ;; esac
  echo "ERROR: ResolutionImpossible" >&2
  exit 1 ;;
esac
"""


@pytest.mark.parametrize("target", ["install", "docs", "dist", "browser", "bench-peers"])
def test_make_prints_the_error_of_pip(target: str, tmp_path: Path) -> None:
    venvs = [tmp_path / "venv", tmp_path / ".venv-peers"]
    for venv in venvs:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").write_text(FAILS)
        (venv / "bin" / "python").chmod(0o755)
        if target != "install":
            (venv / ".installed").touch()
    for name in ("Makefile", "pyproject.toml", "constraints"):
        (tmp_path / name).symlink_to(ROOT / name)
    argv = ["make", target, "VENV=venv", f"PYTHON={venvs[0] / 'bin' / 'python'}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "The conflict is caused by: two pins" in done.stdout + done.stderr, done.stderr


# ---- what importing starts


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter that can start no backend."""
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


BACKENDS = "from jax._src import xla_bridge; print(sorted(xla_bridge._backends))"


def test_import_spanax_starts_no_backend() -> None:
    assert python(f"import spanax; [getattr(spanax, name) for name in spanax.__all__]; {BACKENDS}") == "[]"


def test_spanax_jit_loads_only_what_it_calls() -> None:
    # `spanax` itself imports the packages, which are empty, and not their modules.
    places = "{name.split('.')[1] for name in sys.modules if name.startswith('spanax.') and name.count('.') > 1}"
    loaded = set(python(f"import sys, spanax; spanax.jit(lambda x: x); print(*{places})").split())
    assert {"trace", "plan", "step", "jit"} <= loaded
    assert not loaded & {"train", "check", "show", "commands", "launch", "interop", "models", "doctor"}


def test_a_started_backend_is_detected() -> None:
    assert python(f"import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices(); {BACKENDS}") == "['cpu']"


def test_modules_that_need_no_array_do_not_import_jax() -> None:
    """The supervisor, the doctor and the readers of data; of the command line, see test_manners.py."""
    modules = "spanax.commands.launch, spanax.doctor.network, spanax.doctor.jax_probe, spanax.train.data.batches"
    loaded = "sorted({'jax', 'grain', 'tokenizers'} & set(sys.modules))"
    assert python(f"import sys, {modules}; print({loaded})") == "[]"
    assert python(f"import sys, jax; print({loaded})") == "['jax']"
