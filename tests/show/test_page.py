"""Pages as text: well-formed, self-contained, with the right numbers, for any content of the file."""

import base64
import hashlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pages import Read, a_certificate, a_plan, a_run, leaf
from spanax import cli
from spanax.check.certificate import Certificate
from spanax.commands.report import page_of, read
from spanax.errors import DataError, EntryError, SpanaxError
from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.ticks import ticks
from spanax.plan.plan import Plan
from spanax.show.page.document import document, text_of
from spanax.show.page.parts.bars import Bar, stacked
from spanax.show.page.parts.curves import Curve, chart
from spanax.show.page.parts.markup import html
from spanax.show.page.parts.mesh import mesh_grid
from spanax.show.page.parts.schedule_grid import schedule_grid
from spanax.show.page.plan import seconds_text
from spanax.train.record.metric_curves import MAX_POINTS, Points, thinned
from spanax.train.record.report import run_report
from spanax.units import bytes_text


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    result = {"plan": a_plan(), "unpriced": a_plan(has_price=False), "check": a_certificate()}
    result |= {"bare check": replace(a_certificate(), plan=None, findings=())}
    result["run"] = run_report(a_run(folder / "a", a_plan()))
    return {name: document(page_of(value)) for name, value in result.items()}


KINDS = ("plan", "unpriced", "check", "bare check", "run")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_well_formed_and_needs_nothing_else(kind: str, written: dict[str, str]) -> None:
    text = written[kind]
    read = Read(text)
    assert not read.problems
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 2
    assert "http://" not in text and "https://" not in text and "//" not in text.replace("// ", "")
    loading = [(tag, a) for tag, a in read.elements if {"src", "srcset", "data", "action"} & a.keys() or tag == "link"]
    assert not loading
    links = [attributes["href"] for _, attributes in read.elements if "href" in attributes]
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    digest = base64.b64encode(hashlib.sha256(text_of("script.js").encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and text.count("<script>") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_drawing_has_an_accessible_name(kind: str, written: dict[str, str]) -> None:
    read = Read(written[kind])
    for tag, attributes in read.elements:
        if attributes.get("role") in ("img", "region"):
            assert len(attributes["aria-label"]) > 5
        if tag == "svg":
            assert attributes.get("role") == "img" or attributes.get("aria-hidden") == "true"
    tables = sum(tag == "table" for tag, _ in read.elements)
    assert tables == sum(tag == "caption" for tag, _ in read.elements)
    assert ("html", {"lang": "en"}) in read.elements and sum(tag == "h1" for tag, _ in read.elements) == 1


def test_a_fault_in_a_page_is_detected() -> None:
    assert Read("<p><b>a</p></b>").problems and Read("<p>").problems and Read("<p class=a class=b></p>").problems


def test_the_numbers_on_the_page_are_those_of_the_plan(written: dict[str, str]) -> None:
    plan, read = a_plan(), Read(written["plan"])
    for item in (*plan.leaves, *plan.batch):
        assert f"{item.local_bytes:,} bytes ({bytes_text(item.local_bytes)}), {list(item.local_shape)}" in read.text
    price = plan.price
    assert price is not None
    output = [
        bytes_text(price.peak_bytes),
        "20 ms",
        "41.0 % MFU",
        bytes_text(plan.state_bytes()),
        "all-gather over fsdp 64 KiB per step",
    ]
    assert all(line in read.text for line in output)
    bars = [attributes for _, attributes in read.elements if attributes.get("class") == "track"]
    assert bars[0]["aria-label"] == (
        "predicted: matmuls 12 ms, memory 5 ms, weights between devices 3 ms; 20 ms in total"
    )
    widths = [float(width) for width in re.findall(r'class="seg [^"]*" style="width:([\d.]+)%"', written["plan"])]
    assert sum(widths[:3]) == pytest.approx(100, abs=0.01) and widths[0] == pytest.approx(60)


def test_the_numbers_on_the_page_are_those_of_the_run(written: dict[str, str]) -> None:
    text = Read(written["run"]).text
    for output in (
        "goodput 38.7 %",
        "steps 60 2 attempts",
        "step time 25 ms",
        "died",
        "it was killed.",
        "step 20 ms 25 ms -20 %",
    ):
        assert output in text, output
    assert "spanax train --output-dir" in text


def test_the_speed_of_a_run_is_that_of_its_median_step(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", a_plan())
    steps = [(9.0, 100), (0.1, 9000), (0.1, 9000), (0.2, 4500)]
    lines = [
        {"event": "step", "step": step, "loss": 1.0, "step_seconds": seconds, "tokens_per_second": rate}
        for step, (seconds, rate) in enumerate(steps, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"event": "start", "step": 0}, *lines])))
    assert "step time 100 ms 9 k tokens/s, medians" in Read(document(page_of(run_report(folder)))).text


def test_short_times_are_in_microseconds() -> None:
    assert seconds_text(5e-6) == "5 µs" and seconds_text(0.005) == "5 ms"


def test_without_sequences_examples_are_counted(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", a_plan())
    rates = '"tokens_per_second": 512.0, "examples_per_second": {}'
    for examples, kind in ((512.0, "examples"), (8.0, "tokens")):
        step = '{"event": "step", "step": 1, "loss": 1.0, "step_seconds": 0.1, ' + rates.format(examples) + "}"
        (folder / "metrics.jsonl").write_text(f"{step}\n{step.replace('1,', '2,', 1)}\n")
        page = document(page_of(run_report(folder)))
        assert f"512 {kind}/s" in page and f"{kind} per second" in page


def test_the_numbers_on_the_page_are_those_of_the_check(written: dict[str, str]) -> None:
    text = Read(written["check"]).text
    assert "findings 3 1 error, 1 warning" in text and "SPX001" in text and "Fix: layout fsdp" in text
    assert "peak memory 39 MiB 41 MiB -4.9 %" in text and "model.py:63" in text
    assert "no findings" in Read(written["bare check"]).text.lower()


EVIL = "<script>alert(1)</script>"
ODD_LOSSES = ("NaN", "1e999", "1" + 400 * "0", '"nan"', '"x"')


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    plan = a_plan(paths=(EVIL, 'a" onmouseover="alert(1)', "</style><img src=x>", "gnp."))
    plan = replace(plan, why=EVIL, layout=replace(plan.layout, name=EVIL))
    steering = a_plan(paths=("\u202egnp.\ud800",))
    (tmp_path / "steering.json").write_text(steering.to_json())
    with pytest.raises(DataError, match=r"path is '\\u202egnp.\\ud800', not str"):
        Plan.load(tmp_path / "steering.json")
    folder = a_run(tmp_path / "a", plan)
    lines = [f'{{"event": "step", "step": {60 + index}, "loss": {loss}}}' for index, loss in enumerate(ODD_LOSSES, 1)]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n".join([*lines, '{"event": "step", "step": "9", "loss": 1}', "[]", '{"event": "st', ""]))
    (folder / "profile" / "summary.json").write_text('{"seconds": 3}')
    assert "\u202e" not in document(page_of(steering))
    for value in (plan, run_report(folder)):
        text = document(page_of(value))
        read = Read(text)
        assert not read.problems and EVIL in read.text and sum(tag == "script" for tag, _ in read.elements) == 1
        assert not any(name.startswith("on") for _, attributes in read.elements for name in attributes)
        assert not any(tag == "img" for tag, _ in read.elements)
        text.encode()
    assert "4 of 64 values of the loss are not finite" in read.text and "this is not a profile summary" in read.text


def test_a_run_with_missing_files_is_reported_partially(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", a_plan())
    (folder / "plan.json").unlink()
    (folder / "metrics.jsonl").unlink()
    read = Read(document(page_of(run_report(folder))))
    assert not read.problems and "cannot read the plan" in read.text and "goodput 38.7 %" in read.text
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(EntryError, match="'metrics.jsonl' is a FIFO"):
        run_report(folder)


def test_a_page_of_a_thousand_arrays_is_small() -> None:
    plan = a_plan(248)
    assert len(plan.leaves) == 1000
    text = document(page_of(Plan.from_json(plan.to_json())))
    assert len(text.encode()) < 2_000_000
    assert text.count('class="array"') == 994 + 1  # the 4 scales are one row, and so are their moments


def test_a_large_mesh_is_truncated_to_its_first_devices() -> None:
    text = html(mesh_grid(MeshShape.of("data=128,fsdp=4,model=8")))
    assert text.count('class="cell"') == 256 and "the first 8 of 128 along data" in text
    assert text.count('class="facet"') == 8 and 'data-at="7 3 7"><b>255</b>' in text
    assert html(mesh_grid(MeshShape.of("data=1"))).count('class="cell"') == 1
    assert html(mesh_grid(MeshShape.of("data=1048576"))).count('class="cell"') == 256


def test_a_long_schedule_is_truncated_to_its_first_ticks() -> None:
    table = ticks("1f1b", 8, 256)
    text = html(schedule_grid(table))
    assert text.count("<rect") == 4000 and f"the first 500 of {table.num_ticks} ticks" in text
    short = html(schedule_grid(ticks("1f1b", 2, 2)))
    assert short.count("<title>") == 12 and "tick 1: forward of microbatch 1" in short
    absurd = replace(a_plan(), schedule=replace(a_plan().schedule, microbatches=100_000))
    assert "Too long to draw" in document(page_of(absurd))


def test_a_line_is_thinned_out_to_its_extremes() -> None:
    points = [(float(step), float(step % 100 == 50) - float(step % 777 == 3)) for step in range(50_000)]
    result = thinned(points)
    assert (
        len(result) <= MAX_POINTS and result[0] == points[0] and result[-1] == points[-1] and result == sorted(result)
    )
    assert {value for _, value in result} == {-1.0, 0.0, 1.0}
    taken = Points()
    for x, y in points:
        taken.add(x, y)
    assert len(taken.retained) < 4 * MAX_POINTS and {value for _, value in taken.retained} == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("points", [[(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -1e-12), (1.0, 1e12)]])
def test_odd_curves_are_drawn(points: list[tuple[float, float]]) -> None:
    text = html(chart("Loss", [Curve("loss", points), Curve("none", [])], "{:.3g}".format))
    numbers = re.findall(r'd="M([-\d. ML]+)', text)
    assert numbers and "nan" not in text and not Read(text).problems


def test_bars_may_be_empty_or_exceed_a_limit() -> None:
    assert "nothing" in html(stacked("of", [Bar("plan", {"a": 0})], bytes_text))
    near, far = (html(stacked("of", [Bar("plan", {"a": 6})], bytes_text, limit)) for limit in (8, 800))
    assert 'class="limit"' in near and "width:75.000%" in near and "dashed line" in near
    assert 'class="limit"' not in far and "width:100.000%" in far and "the peak is 0.8 % of it" in far


# ---- what is recognised


def test_the_kind_of_a_file_is_detected_from_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_plan().save(tmp_path / "a")
    a_certificate().save(tmp_path / "b")
    a_run(tmp_path / "c", a_plan())
    output = {"a": "layout fsdp+tensor on 8 devices", "b": "SPX001 error", "c": "38.7 % goodput"}
    for name, words in output.items():
        out = tmp_path / f"{name}.html"
        cli.main(["report", str(tmp_path / name), "-o", str(out)])
        text = capsys.readouterr().out
        assert f"written to {out}" in text and words in text
        assert Read(out.read_text()).text.startswith(
            {
                "a": "fsdp+tensor on fsdp=4,model=2: 114 k parameters, batch size 32",
                "b": "fsdp+tensor on h100",
                "c": "gpt-nano",
            }[name]
        )
        cli.main(["report", str(tmp_path / name), "--json"])
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "content, says",
    [
        ("{}", "is neither a plan nor a check"),
        ('{"best": null}', "it has 'best'"),
        ("[1]", "it is not a JSON object"),
        ("<html>", "cannot read"),
        ('{"predicted": {}, "compiled": 3}', "this is not a certificate"),
        ('{"predicted": {}, "compiled": {}, "version": 99}', "another version"),
        ('{"fingerprint": 1, "leaves": []}', "this is not a plan file"),
    ],
)
def test_another_file_is_reported(content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path / "x.json"), "-o", str(tmp_path / "x.html")])
    error = capsys.readouterr().err
    assert stopped.value.code == 65 and says in error and len(error.splitlines()) <= 4
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_plan().save(tmp_path / "p.json")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path / "p.json"), "-o", str(tmp_path / "no" / "x.html")])
    assert stopped.value.code == 73 and "cannot write the page" in capsys.readouterr().err


def test_a_certificate_and_the_output_of_check_read_back() -> None:
    reported = a_certificate()
    assert Certificate.from_json(reported.to_json()) == reported
    printed = json.loads(reported.to_json())
    del printed["version"], printed["plan"]
    printed |= {"by": reported.report.by, "parity": {}}
    printed["collectives"] = [collective | {"bytes": 1} for collective in printed["collectives"]]
    assert Certificate.from_json(json.dumps(printed)) == replace(reported, plan=None)


# ---- the colours


def _theme(at: int) -> dict[str, str]:
    themes = re.findall(r"\.spanax \{([^}]*--surface[^}]*)\}", text_of("style.css"))
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", themes[at]))


def _linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _contrast(item: str, other: str) -> float:
    """Source: WCAG 2.2, relative luminance and contrast ratio."""
    lights = [
        sum(x * part for x, part in zip((0.2126, 0.7152, 0.0722), _linear(c), strict=True)) for c in (item, other)
    ]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


SIGHTS = {
    "all three": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
"""How colours are seen without one kind of cone, in linear RGB. Source: Machado, Oliveira and Fernandes 2009."""


def _lab(colour: str, sight: str) -> list[float]:
    seen = [max(0, sum(a * b for a, b in zip(row, _linear(colour), strict=True))) for row in SIGHTS[sight]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (
        (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116)
        for value in (
            sum(a * b for a, b in zip(row, seen, strict=True)) / white
            for row, white in zip(to_xyz, (0.9505, 1, 1.089), strict=True)
        )
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("at", [0, 1], ids=["light", "dark"])
def test_texts_and_colors_have_contrast(at: int) -> None:
    theme = _theme(at)
    for name in ("ink", "quiet", "accent", "good", "bad", "warn"):
        assert min(_contrast(theme[name], theme[below]) for below in ("surface", "raised")) >= 4.5, name
    colours = [theme[f"c{number}"] for number in range(1, 9)]
    for number, colour in enumerate(colours, 1):
        assert _contrast(colour, theme["surface"]) >= 3 and _contrast(colour, theme[f"o{number}"]) >= 4.5, number
    for sight in SIGHTS:
        labs = [_lab(colour, sight) for colour in colours]
        apart = [
            sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 for a, b in itertools.combinations(labs, 2)
        ]
        assert min(apart) > 20, sight


def test_a_leaf_of_these_tests_has_its_local_shape() -> None:
    assert leaf("w", shape=(8, 3, 4)).local_shape == (2, 3, 2) and leaf("b", shape=()).local_bytes == 4


# ---- files that lie

NUM_LIES = 20
ODD = (
    None,
    True,
    -1,
    0,
    1e308,
    9e14,
    -5e-324,
    1 << 61,
    "",
    "x" * 5000,
    "\x1b[2J",
    "nan",
    [],
    {},
    [[]],
    {"a": 1},
    [1, 2],
)


def _lied(data: Any, rng: random.Random) -> Any:
    """The same values but for one, which is another, or gone."""
    result = json.loads(json.dumps(data))
    here, key = result, ""
    while isinstance(here, dict | list) and here:
        parent, key = here, rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = parent[key]
        if rng.random() < 0.15:
            break
    if rng.random() < 0.1:
        del parent[key]
    else:
        parent[key] = rng.choice(ODD)
    return result


def _told(read: Callable[[], Any]) -> str:
    """The page of what a file says, or the error."""
    try:
        text = document(page_of(read()))
        assert not Read(text).problems
    except SpanaxError as error:
        text = str(error)
        assert len(text.splitlines()) <= 4
    return text


@pytest.mark.parametrize("kind", ["plan", "check", "run"])
def test_any_file_yields_a_page_or_an_error(kind: str, tmp_path: Path) -> None:
    rng, output = random.Random(7), set[bool]()
    value = {"plan": a_plan(1), "check": a_certificate()}.get(kind)
    folder = a_run(tmp_path / "a", a_plan(0), 5) if value is None else tmp_path
    events = (folder / "events.jsonl").read_text().splitlines() if value is None else []
    for _ in range(NUM_LIES):
        if value is not None:
            (tmp_path / "x").write_text(json.dumps(_lied(json.loads(value.to_json()), rng)))
            text = _told(lambda: read(tmp_path / "x"))
        else:
            lies = [json.dumps(_lied(json.loads(line), rng)) if rng.random() < 0.4 else line for line in events]
            (folder / "events.jsonl").write_text("\n".join(lies))
            text = _told(lambda: run_report(folder))
        output.add(text.startswith("<!doctype"))
    assert True in output
