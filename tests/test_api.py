"""The public names: sorted, present, each with an example that runs."""

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import spanax

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "spanax"
NAMES = [name for name in spanax.__all__ if not name.startswith("__")]
LOSSES = [name for name, value in vars(spanax.losses).items() if inspect.isfunction(value) and not name.startswith("_")]


def undocumented(thing: object) -> str:
    """Why the doctest run shows no example of `thing`; empty if it does."""
    text = inspect.getdoc(thing) or ""
    if not text:
        return "no docstring"
    thing = inspect.unwrap(thing) if callable(thing) else thing
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return ""
    if "Example:" not in text:
        return "no Example: section"
    home = importlib.import_module(thing.__module__)
    if PACKAGE not in Path(inspect.getfile(home)).resolve().parents:
        return f"defined outside the package, in {home.__name__}: no doctest of ours runs it"
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(thing, module=home) if test.examples]
    if not any(not example.options.get(doctest.SKIP) for test in tests for example in test.examples):
        return "its example is not run"
    return ""


def test_public_names_are_sorted_and_unique() -> None:
    assert list(spanax.__all__) == sorted(set(spanax.__all__))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    why = undocumented(getattr(spanax, name))
    assert not why, f"spanax.{name}: {why}"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_documented(name: str) -> None:
    why = undocumented(getattr(spanax.losses, name))
    assert not why, f"spanax.losses.{name}: {why}"


def test_dir_shows_the_public_names() -> None:
    assert set(NAMES) <= set(dir(spanax))


def test_a_package_is_also_the_function_of_its_name() -> None:
    """`spanax.plan` is a function and a package, whichever modules are imported before; importing starts no JAX."""
    functions = [name for name in NAMES if (PACKAGE / name).is_dir()]
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.glob("*/*.py") if path.stem != "__init__")
    modules = sorted(".".join(("spanax", *path.with_suffix("").parts)) for path in paths)
    checks = ["import inspect, sys, spanax", "assert 'jax' not in sys.modules"]
    checks += [f"inspect.signature(spanax.{name}).bind_partial()" for name in functions]
    checks += [f"import {module} as module; assert module is sys.modules['{module}']" for module in modules]
    checks += [f"assert callable(spanax.{name}) and inspect.signature(spanax.{name})" for name in functions]
    run = subprocess.run([sys.executable, "-c", "\n".join(checks)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert functions == ["check", "jit", "plan", "stack", "trace"]


def no_docstring() -> None: ...


def no_example() -> None:
    """A thing."""


def skipped() -> None:
    """A thing.

    Example:
      >>> skipped()  # doctest: +SKIP
    """


@pytest.mark.parametrize(
    "thing, why", [(no_docstring, "no docstring"), (no_example, "no Example"), (skipped, "defined outside")]
)
def test_an_undocumented_name_is_detected(thing: object, why: str) -> None:
    assert undocumented(thing).startswith(why)


def test_a_skipped_example_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", Path(__file__).parent)
    assert undocumented(skipped) == "its example is not run"
