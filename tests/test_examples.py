"""Every example runs and is short enough to be read."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

from sampling import sampled

QUICK = {
    "11_real_images": ["--models", "ResNet", "U-Net", "--steps", "10"],
    "12_real_text": ["--models", "MoE-dropless"],
    "13_reinforcement": ["--steps", "2"],
    "14_reinforce": ["--steps", "2"],
    **dict.fromkeys(("15_preferences", "16_more_preferences", "17_reward_and_distillation"), ["--steps", "2"]),
}
"""What of the longer ones is run each time; `slow` runs every model of them in every layout."""

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def test_examples_exist() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_under_60_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


def run_in(folder: Path, monkeypatch: pytest.MonkeyPatch, example: Path, arguments: list[str]) -> None:
    if "Digits" in example.read_text():
        pytest.importorskip("sklearn", reason='the digits come with scikit-learn: pip install "spanax[examples]"')
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")


LONG = {
    "02_fsdp", "03_tensor", "04_two_dimensions", "05_switch_the_mesh", "09_pipeline", "10_three_dimensions",
    "11_real_images", "12_real_text", "14_reinforce", "15_preferences", "16_more_preferences",
    "17_reward_and_distillation",
}  # fmt: skip
"""Examples that `slow` runs: those of one layout each, which differ in a word, and those that take tens of seconds."""


@pytest.mark.parametrize(
    "example",
    sampled(EXAMPLES, [path for path in EXAMPLES if path.stem not in LONG]),
    ids=lambda path: path.stem,
)
def test_an_example_runs_and_prints_its_result(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path, monkeypatch, example, QUICK.get(example.stem, []))
    assert capsys.readouterr().out.strip(), "it printed nothing"


def held_out(output: str) -> dict[str, float]:
    """The last number of each line, by model and layout."""
    lines = re.findall(r"^(\S+ under \S+), .*?([\d.]+)(?: bits a character)?$", output, re.MULTILINE)
    return {name: float(number) for name, number in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    # The noise of a diffusion is 1 to begin with, a guess among ten digits is log 10, one among 256 characters 8 bits.
    ("stem", "worst"),
    [("11_real_images", {"U-Net": 0.2, "ViT": 1.4, "ResNet": 0.8}), ("12_real_text", {"": 4.6})],
)
def test_every_model_learns_under_every_layout(
    stem: str,
    worst: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = next(path for path in EXAMPLES if path.stem == stem)
    run_in(tmp_path, monkeypatch, example, ["--every"])
    result = held_out(capsys.readouterr().out)
    assert len(result) == {"11_real_images": 9, "12_real_text": 13}[stem]
    for name, value in result.items():
        assert value < worst.get(name.split()[0], worst.get("", 0)), name


def test_without_scikit_learn_an_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    result = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else result(name))
    example = next(path for path in EXAMPLES if path.stem == "11_real_images")
    monkeypatch.setattr(sys, "argv", [str(example)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(example), run_name="__main__")
    assert 'pip install "spanax[examples]"' in str(stop.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["13_reinforcement", "14_reinforce"])
def test_rewards_teach_the_policy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = next(path for path in EXAMPLES if path.stem == name)
    run_in(tmp_path, monkeypatch, example, [])
    lines = re.findall(r"reward ([\d.]+), log-probabilities differ by ([\d.e-]+)", capsys.readouterr().out)
    assert float(lines[0][0]) < 0.6 and float(lines[-1][0]) > 0.9
    assert max(float(difference) for _, difference in lines) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("15_preferences", ["accuracy > 0.9", "rejected_reward < -1"]),
        ("16_more_preferences", ["accuracy > 0.9", "nll < 0.2", "loss < 0.47"]),  # 0.5 is the first loss of KTO
        ("17_reward_and_distillation", ["accuracy > 0.9", "loss < 0.5"]),
    ],
)
def test_losses_of_fine_tuning_teach(
    name: str, bounds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last value of each metric, of the last model that has it."""
    example = next(path for path in EXAMPLES if path.stem == name)
    run_in(tmp_path, monkeypatch, example, [])
    metrics = {key: float(value) for key, value in re.findall(r"'(\w+)': '([-\d.]+)'", capsys.readouterr().out)}
    for bound in bounds:
        key, sign, limit = bound.split()
        assert (metrics[key] > float(limit)) == (sign == ">"), (bound, metrics)
