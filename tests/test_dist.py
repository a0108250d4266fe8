"""What is released: the files around the package agree, and what is built installs and trains where nothing else is."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
MAX_DEPENDENCIES = 13


def test_the_package_has_few_dependencies() -> None:
    assert 0 < len(PROJECT["dependencies"]) <= MAX_DEPENDENCIES


def test_the_version_is_semantic() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", PROJECT["version"])


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])


def test_the_license_is_the_one_that_is_named() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and "Apache License" in text and "Version 2.0, January 2004" in text


def test_the_changelog_has_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"## [{PROJECT['version']}] - {cited['date-released']}" in (ROOT / "CHANGELOG.md").read_text().splitlines()


TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "config"], ids=lambda path: path.stem)
def test_an_issue_template_is_a_valid_form(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["body"]
    fields = [item for item in form["body"] if item["type"] != "markdown"]
    assert len({item["id"] for item in fields}) == len(fields) > 0
    assert all(item["attributes"]["label"] for item in fields)


def changelog_problems(text: str) -> list[str]:
    """What is not as Keep a Changelog has it: Unreleased first, then versions with dates, newest first; known kinds."""
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    problems = [] if heads[:1] == ["[Unreleased]"] else ["the first section is not [Unreleased]"]
    results = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", head) for head in heads[1:]]
    problems += [
        f"not a version with a date: {head}" for head, match in zip(heads[1:], results, strict=True) if not match
    ]
    versions = [Version(match[1]) for match in results if match]
    problems += [] if versions == sorted(versions, reverse=True) else ["versions are not newest first"]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        problems += [f"unknown kind: {kind}" for kind in kinds if kind not in KINDS]
        problems += [] if len(kinds) == len(set(kinds)) else ["a kind stands twice in one section"]
    return problems


def test_the_changelog_is_valid() -> None:
    assert not changelog_problems((ROOT / "CHANGELOG.md").read_text())


@pytest.mark.parametrize(
    "text",
    [
        "## [0.1.0] - 2026-01-01\n", "## [Unreleased]\n## 0.1\n", "## [Unreleased]\n### New\n",
        "## [Unreleased]\n## [0.1.0] - 2026-01-01\n## [0.2.0] - 2026-02-01\n",
        "## [Unreleased]\n### Added\n### Added\n",
    ],
)  # fmt: skip
def test_an_invalid_changelog_is_detected(text: str) -> None:
    assert len(changelog_problems(text)) == 1


# ---- what is built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel: that of `make dist`, or a new one."""
    if "SPANAX_DIST" in os.environ:
        return ROOT / os.environ["SPANAX_DIST"]
    if find_spec("build") is None:
        pytest.skip('needs build: pip install "spanax[dist]", or make dist')
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], check=True, timeout=600)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (result,) = folder.glob(pattern)
    return result


@pytest.mark.slow
def test_the_wheel_contains_the_package_and_its_metadata(built: Path) -> None:
    with zipfile.ZipFile(only(built, "*.whl")) as wheel:
        names = wheel.namelist()
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        reported = Metadata.from_email(wheel.read(info), validate=True)
    assert {name.split("/")[0] for name in names} == {"spanax", info.split("/")[0]}
    assert {"spanax/py.typed", "spanax/hardware/chips.toml"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert str(reported.version) == PROJECT["version"] and reported.description_content_type == "text/markdown"
    assert sum("extra ==" not in str(item) for item in reported.requires_dist or []) <= MAX_DEPENDENCIES


@pytest.mark.slow
def test_the_sdist_contains_every_tracked_file(built: Path) -> None:
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"Makefile", "CITATION.cff", "docs/index.md", "tests/test_dist.py", "constraints/py311.txt"} <= names
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
        assert set(listed.stdout.splitlines()) - names == set()


@pytest.mark.slow
def test_the_site_is_built_from_the_sdist(built: Path, tmp_path: Path) -> None:
    for module in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(module)
    with tarfile.open(only(built, "*.tar.gz")) as sdist:
        sdist.extractall(tmp_path, filter="data")
    folder = only(tmp_path, "spanax-*")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", "site"]
    environ = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "spx101-unknown-name" in (folder / "site" / "errors.html").read_text()


@pytest.mark.slow
def test_the_wheel_installs_and_trains_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "new", with_pip=True)
    binaries = tmp_path / "new" / "bin"
    constraints = ROOT / "constraints" / ("py311.txt" if sys.version_info < (3, 12) else "py312.txt")
    retained = ("PATH", "HOME", "LANG", "TMPDIR")
    clean = {key: value for key, value in os.environ.items() if key in retained or key.startswith("PIP_")}

    def run(*argv: str | Path) -> str:
        done = subprocess.run(argv, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run(binaries / "python", "-m", "pip", "install", "-q", "-c", constraints, only(built, "*.whl"))
    run(binaries / "python", "-m", "pip", "check")
    assert run(binaries / "spanax", "--version") == f"spanax {PROJECT['version']}\n"
    small = ("--steps", "2", "--global-batch-size", "8", "--seq-len", "16", "--devices", "2", "--output-dir", "run")
    assert "done: 2 steps" in run(binaries / "spanax", "train", "gpt-nano", *small)
    assert (tmp_path / "run" / "checkpoints").is_dir()
