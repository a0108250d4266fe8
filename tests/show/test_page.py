"""Pages as text: well-formed, self-contained, with the right numbers, for any content of the file."""

import base64
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import spanax
from pages import Read, a_certificate, a_plan, a_run
from programs import zoo_program
from spanax import cli
from spanax.check.report import Report
from spanax.commands.report import page_of, read
from spanax.displays import display
from spanax.errors import DataError, EntryError, SpanaxError
from spanax.hardware.cluster import cluster
from spanax.plan.advice.summary import summarize
from spanax.plan.pipeline.ticks import ticks
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.show.page.document import Block, Page, bars, document, lines, table, text
from spanax.show.page.notebook import SHOWN
from spanax.show.page.plan import layouts_part, plan_blocks, search_page, seconds_text
from spanax.train.record.metric_curves import MAX_POINTS, Points, thinned
from spanax.train.record.report import run_report
from spanax.units import bytes_text

SCRIPT = files("spanax.show.page").joinpath("page.js")
DRAWN = Path(__file__).with_name("drawn.js")
VALUE = re.compile(r'<script type="application/json" id="value">(.*)</script>')
KINDS = ("plan", "unpriced", "check", "run")


def value_of(page: str) -> dict[str, Any]:
    """The value in a page."""
    (value,) = VALUE.findall(page)
    return json.loads(value)


def shown(page: str) -> str:
    """All texts of the value in a page, in order."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)

    return " ".join(texts(value_of(page)))


def drawn(page: str, folder: Path, *used: str) -> str:
    """What the script of a page draws; `used` are headers to click on, and words to filter rows by."""
    if shutil.which("node") is None:
        pytest.skip("no node: apt-get install nodejs")
    (folder / "value.json").write_text(json.dumps(value_of(page)))
    command = ["node", str(DRAWN), str(SCRIPT), str(folder / "value.json"), *used]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_parts(*parts: dict[str, Any]) -> str:
    return document(Page("test", "a page", [Block("Parts", parts)]))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    result = {"plan": a_plan(), "unpriced": a_plan(has_price=False), "check": a_certificate()}
    result["run"] = run_report(a_run(folder / "a", a_plan()))
    return {name: document(page_of(value)) for name, value in result.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_well_formed_and_needs_nothing_else(kind: str, written: dict[str, str]) -> None:
    page = written[kind]
    read = Read(page)
    assert not read.problems and "http://" not in VALUE.sub("", page).replace("http://www.w3.org/2000/svg", "")
    assert not [tag for tag, a in read.elements if {"src", "srcset", "data", "action"} & a.keys() or tag == "link"]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.read_bytes()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page
    assert page.count("<script") == 2 and ("html", {"lang": "en"}) in read.elements


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_draws_a_page_that_is_well_formed_and_named(
    kind: str, written: dict[str, str], tmp_path: Path
) -> None:
    read = Read(drawn(written[kind], tmp_path))
    assert not read.problems
    assert all(len(a["aria-label"]) > 5 for tag, a in read.elements if a.get("role") in ("img", "region"))
    assert all(a.get("role") == "img" for tag, a in read.elements if tag == "svg")
    assert all(a.get("scope") in ("row", "col") for tag, a in read.elements if tag == "th")
    tags = [tag for tag, _ in read.elements]
    assert tags.count("table") == tags.count("caption") > 0
    ids = [a["id"] for _, a in read.elements if "id" in a]
    links = [a["href"] for _, a in read.elements if "href" in a]
    assert links == [f"#{name}" for name in ids] and len(set(ids)) == len(ids) > 2
    parts = [part for block in value_of(written[kind])["blocks"] for part in block["parts"]]
    cells = [cell for part in parts for row in part.get("rows", ()) for cell in row]
    texts = [cell if isinstance(cell, str) else cell[0] for cell in cells]
    drawn_texts, cell_texts = ({" ".join(text.split()) for text in each} for each in (read.texts, texts))
    assert len(texts) > 20 and cell_texts <= {*drawn_texts, ""}


def test_a_fault_in_a_page_is_detected() -> None:
    assert Read("<p><b>a</p></b>").problems and Read("<p>").problems and Read("<p class=a class=b></p>").problems


def test_the_numbers_on_the_page_are_those_of_the_plan(written: dict[str, str], tmp_path: Path) -> None:
    plan = a_plan()
    (arrays,) = (part for block in plan_blocks(plan) for part in block.parts if part["caption"] == "arrays")
    rows = {row[0]: row for row in arrays["rows"]}
    assert len(rows) == 15  # the 4 scales are one row, and so are their moments
    for item in (*plan.leaves[:6], *plan.batch):
        row = rows[item.path]
        assert row[4] == (bytes_text(item.local_bytes), item.local_bytes) and str(list(item.local_shape)) in row[5]
    assert rows["block_up_0.kernel"][3] == "(fsdp, model)" and rows["block_up_0.kernel"][6:8] == [("8", 8), ("1", 1)]
    assert rows["block_up_0.kernel"][9].startswith("all-gather over fsdp 64 KiB;")
    assert rows["blocks.*.scale ×4"][6:9] == [("1", 1), ("8", 8), "too small to split"]
    price, content = plan.price, shown(written["plan"])
    assert price is not None and "stage 0: F0" in content
    for line in ("39 MiB", "Predicted for h100:8, 41.0 % MFU", bytes_text(plan.state_bytes())):
        assert line in content
    result = drawn(written["plan"], tmp_path)
    assert 'aria-label="predicted: matmuls 12 ms, memory 5 ms, weights between devices 3 ms; 20 ms in total"' in result
    widths = [float(width) for width in re.findall(r'style="width:([\d.]+)%"', result)]
    assert widths[:3] == [60, 25, 15]


def test_the_numbers_on_the_page_are_those_of_the_run_and_the_check(written: dict[str, str], tmp_path: Path) -> None:
    run, check = shown(written["run"]), shown(written["check"])
    for words in ("38.7 % goodput", "Median step: 25 ms, 9.2 k tokens/s", "it was killed.", "step 20 ms 25 ms -20 %",
                  "spanax train --output-dir"):  # fmt: skip
        assert words in run, words
    for words in ("SPX001", "layout fsdp", "-4.9 %", "model.py:63"):
        assert words in check, words
    assert "samples step prompt text 60 one one\n of 60 60 two" in run
    assert "Loss: loss from 6 at step 1 to 1.167 at step 60, between 1.167 and 6" in drawn(written["run"], tmp_path)


def test_speed_is_of_the_median_step_and_counts_examples_without_sequences(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", a_plan())
    for per_token, kind in ((1, "examples"), (64, "tokens")):
        events = [{"event": "start", "step": 0}]
        for step, (seconds, rate) in enumerate([(9.0, 1), (9.0, 1), (0.1, 9000), (0.1, 9000), (0.2, 4500)], 1):
            rates = {"tokens_per_second": rate, "examples_per_second": rate / per_token}
            events.append({"event": "step", "step": step, "loss": 1.0, "step_seconds": seconds} | rates)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, events)))
        content = shown(document(page_of(run_report(folder))))
        assert f"Median step: 100 ms, 9 k {kind}/s." in content and f"{kind} per second" in content
    assert seconds_text(5e-6) == "5 µs" and seconds_text(0.005) == "5 ms"


EVIL = "<script>alert(1)</script>"
ODD_LOSSES = ("NaN", "1e999", "1" + 400 * "0", '"nan"', '"x"')


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    plan = a_plan(paths=(EVIL, 'a" onmouseover="alert(1)', "</style><img src=x>", "<!--", "${gnp}."))
    plan = replace(plan, why=EVIL, layout=replace(plan.layout, name=EVIL))
    steering = a_plan(paths=("\u202egnp.\ud800",))
    (tmp_path / "steering.json").write_text(steering.to_json())
    with pytest.raises(DataError, match=r"path is '\\u202egnp.\\ud800', not str"):
        Plan.load(tmp_path / "steering.json")
    folder = a_run(tmp_path / "a", plan)
    events = [f'{{"event": "step", "step": {60 + index}, "loss": {loss}}}' for index, loss in enumerate(ODD_LOSSES, 1)]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write("\n".join([*events, '{"event": "step", "step": "9", "loss": 1}', "[]", '{"event": "st', ""]))
    with open(folder / "samples.jsonl", "a") as file:
        file.write(json.dumps({"step": 61, "prompt": EVIL, "text": f"\x1b[2J{EVIL}"}) + '\n{"step": -1}\n')
    (folder / "profile" / "summary.json").write_text('{"seconds": 3}')
    assert "\u202e" not in document(page_of(steering)) and "\\u202e" in shown(document(page_of(steering)))
    for value in (plan, run_report(folder)):
        page = document(page_of(value))
        page.encode()
        framed = unescape(plan._repr_html_() or "")
        assert EVIL in shown(page) and "<" not in VALUE.findall(page)[0] and "&lt;script&gt;" in framed
        for result, num_scripts in ((Read(page), 2), (Read(drawn(page, tmp_path)), 0)):
            assert not result.problems and (num_scripts or EVIL in result.text)
            tags = [tag for tag, _ in result.elements]
            assert tags.count("script") == num_scripts and "img" not in tags
            assert not any(name.startswith("on") for _, attributes in result.elements for name in attributes)
    assert f"61 {EVIL} \\x1b[2J{EVIL}" in shown(page) and "samples.jsonl: 1 line damaged" in shown(page)
    assert "4 of 64 values of the loss are not finite" in shown(page)
    assert "this is not a profile summary" in shown(page)


def test_a_run_with_missing_files_is_reported_partially(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", a_plan())
    (folder / "plan.json").unlink()
    (folder / "metrics.jsonl").unlink()
    content = shown(document(page_of(run_report(folder))))
    assert "cannot read the plan" in content and "38.7 % goodput" in content
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(EntryError, match="'metrics.jsonl' is a FIFO"):
        run_report(folder)


def test_large_values_are_small_pages() -> None:
    plan = a_plan(248)
    assert len(plan.leaves) == 1000 and len(document(page_of(plan)).encode()) < 400_000
    absurd = replace(a_plan(), schedule=replace(a_plan().schedule, microbatches=100_000))
    assert "Too long to show" in document(page_of(absurd))


def test_a_line_is_thinned_out_to_its_extremes() -> None:
    points = [(float(step), float(step % 100 == 50) - float(step % 777 == 3)) for step in range(50_000)]
    result, added = thinned(points), Points()
    for x, y in points:
        added.add(x, y)
    assert len(result) <= MAX_POINTS and result[:: len(result) - 1] == points[:: len(points) - 1]
    assert result == sorted(result) and len(added.retained) < 4 * MAX_POINTS
    for retained in (result, added.retained):
        assert {value for _, value in retained} == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("points", [[(3.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -1e-12), (1.0, 1e12)]])
def test_odd_curves_are_drawn(points: list[tuple[float, float]], tmp_path: Path) -> None:
    result = drawn(of_parts(lines("Loss", {"loss": points, "none": []})), tmp_path)
    assert re.search(r'd="M\d[-\d. MLh]+"', result) and not re.search("nan|infinity|undefined", result, re.IGNORECASE)


def test_bars_may_be_empty_or_exceed_a_limit(tmp_path: Path) -> None:
    assert "nothing" in drawn(of_parts(bars("sizes", {"plan": {"a": 0}}, bytes_text)), tmp_path)
    near, far = (drawn(of_parts(bars("sizes", {"plan": {"a": 6}}, bytes_text, limit)), tmp_path) for limit in (8, 800))
    assert 'class="limit"' in near and "width:75.000%" in near and "dashed line" in near
    assert 'class="limit"' not in far and "width:100.000%" in far and "the peak is 0.8 % of it" in far


def test_a_long_table_is_sorted_and_filtered_by_words(tmp_path: Path) -> None:
    rows = [(f"fsdp={size}", (f"{size} B", size), "yes" if size % 2 else "no") for size in range(20)]
    page = of_parts(table("layouts", ("mesh", "memory", "fits"), [*rows, ("data=2", ("", None), "yes")]))
    cells = re.compile(r'<tr( hidden)?><th scope="row">([\w=]+)</th>').findall
    once = cells(drawn(page, tmp_path, "memory", "fsdp no"))
    assert [mesh for _, mesh in once] == ["data=2", *(row[0] for row in rows)]
    assert [mesh for hidden, mesh in once if not hidden] == [row[0] for row in rows[::2]]
    twice = cells(drawn(page, tmp_path, "memory,memory", ""))
    assert [mesh for _, mesh in twice] == [mesh for _, mesh in reversed(once)]
    assert [mesh for _, mesh in cells(drawn(page, tmp_path, "mesh", ""))][:3] == ["data=2", "fsdp=0", "fsdp=1"]
    few = drawn(of_parts(table("few", ("a",), [("b",)]), text("lines", "a\n b")), tmp_path)
    assert "<button" not in few and "wide" not in few


def test_a_table_of_many_columns_wraps_on_a_phone(tmp_path: Path) -> None:
    result = drawn(of_parts(table("layouts", (*"abcde",), [(*"12345",)])), tmp_path)
    assert '<table class="wide">' in result and '<td data-head="e">5</td>' in result


# ---- layouts, and values in a notebook


def test_a_saved_and_drawn_plan_is_the_first_of_the_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "r.html", tmp_path / "p.json"
    cli.main(["plan", "gpt-nano", "--on", "h100:8", "--html", str(page), "--out", str(file), "--json"])
    data = json.loads(capsys.readouterr().out)
    price, best = Plan.load(file).price, data["best"]
    assert price is not None and price.cluster == data["cluster"] == "h100:8"
    assert (price.step_seconds, price.seconds) == (best["step_seconds"], best["seconds"])
    assert price.peak_bytes == best["memory"]["peak"] and price.mfu == pytest.approx(best["mfu"])
    rows = value_of(page.read_text())["blocks"][1]["parts"][0]["rows"]
    seconds = [row[5][1] for row in rows]
    assert len(rows) > 50 and seconds == sorted(seconds) and seconds[0] == best["step_seconds"]
    assert {row[8] for row in rows} == {"yes"} and {"fsdp", "data"} <= {row[0] for row in rows}


def test_layouts_that_do_not_fit_come_last() -> None:
    machine, program = cluster("h100:8"), zoo_program("mlp")
    roomy = search(program, machine, top=50)
    peaks = sorted(candidate.upper_bytes for candidate in roomy.candidates)
    for limit, fits in ((peaks[len(peaks) // 2], ["yes", "no"]), (1, ["no"])):
        tight = search(program, type(machine)(machine.chip, 8, limit, machine.shape), top=50)
        assert all(item.upper_bytes > limit for item in tight.too_large)
        assert [key for key, _ in itertools.groupby(row[8] for row in layouts_part(tight)["rows"])] == fits
        content = shown(document(search_page(summarize(tight), None, "gpt")))
        assert tight.best is not None or "the layout with the lowest peak needs" in content


def test_every_value_has_a_display() -> None:
    program, machine = zoo_program("mlp"), cluster("h100:8")
    plan, result = spanax.plan(program, machine, layout="fsdp"), search(program, machine, top=30)
    values: list[Any] = [
        plan, a_certificate(), ticks("1f1b", 2, 4), program, result,
        spanax.plan(program, on=["h100:8", "a100:8"]),
    ]  # fmt: skip
    assert {type(value) for value in values} == set(SHOWN)
    for value in values:
        content = value._repr_html_()
        ((_, frame),) = [(tag, a) for tag, a in Read(content).elements if tag == "iframe"]
        assert content.startswith('<div class="spanax fragment">') and content == display(value)
        # Nothing in the frame reaches the notebook: it has an origin of its own.
        assert frame["sandbox"] == "allow-scripts" and not Read(frame["srcdoc"]).problems and frame["title"]
        assert len(shown(frame["srcdoc"])) > 20


# ---- what is recognized


def test_the_kind_of_a_file_is_detected_from_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_plan().save(tmp_path / "a")
    a_certificate().save(tmp_path / "b")
    a_run(tmp_path / "c", a_plan())
    output = {
        "a": ("layout fsdp+tensor on 8 devices", "fsdp+tensor on fsdp=4,model=2: 114 k parameters, batch size 32"),
        "b": ("SPX001 error", "fsdp+tensor on h100"),
        "c": ("38.7 % goodput", "gpt-nano"),
    }
    for name, (words, title) in output.items():
        out = tmp_path / f"{name}.html"
        cli.main(["report", str(tmp_path / name), "-o", str(out)])
        printed = capsys.readouterr().out
        assert f"written to {out}" in printed and words in printed
        assert value_of(out.read_text())["title"].startswith(title) and f"<h1>{title}" in out.read_text()
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
        ('{"predicted": {}, "compiled": {}, "version": 99}', "it has version 99"),
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
    assert Report.from_json(reported.to_json()) == reported
    printed = json.loads(reported.to_json())
    del printed["version"], printed["plan"]
    printed |= {"by": reported.by, "parity": {}}
    printed["collectives"] = [collective | {"bytes": 1} for collective in printed["collectives"]]
    assert Report.from_json(json.dumps(printed)) == replace(reported, plan=None)


def _luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_texts_and_colors_have_contrast(theme: int) -> None:
    """Source: WCAG 2.2, relative luminance and contrast ratio."""
    style = files("spanax.show.page").joinpath("page.css").read_text()
    colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", re.findall(r":root \{([^}]*)\}", style)[theme]))

    def contrast(*names: str) -> float:
        low, high = sorted(_luminance(colors[name]) for name in names)
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(name, "surface") for name in ("ink", "quiet", "accent", "bad")) >= 4.5
    assert min(contrast(name, "raised") for name in ("ink", "quiet", "bad")) >= 4.5
    assert min(contrast(f"c{number}", "surface") for number in range(1, 9)) >= 3


# ---- files that lie

NUM_LIES = 20
ODD = (
    None, True, -1, 0, 1e308, 9e14, -5e-324, 1 << 61, "", "x" * 5000, "\x1b[2J", "nan", [], {}, [[]], {"a": 1}, [1, 2]
)  # fmt: skip


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
        page = document(page_of(read()))
        assert not Read(page).problems and value_of(page)["blocks"]
    except SpanaxError as error:
        page = str(error)
        assert len(page.splitlines()) <= 4
    return page


@pytest.mark.parametrize("kind", ["plan", "check", "run"])
def test_any_file_yields_a_page_or_an_error(kind: str, tmp_path: Path) -> None:
    rng, output = random.Random(7), set[bool]()
    value = {"plan": a_plan(1), "check": a_certificate()}.get(kind)
    folder = a_run(tmp_path / "a", a_plan(0), 5) if value is None else tmp_path
    events = (folder / "events.jsonl").read_text().splitlines() if value is None else []
    for _ in range(NUM_LIES):
        if value is not None:
            (tmp_path / "x").write_text(json.dumps(_lied(json.loads(value.to_json()), rng)))
            page = _told(lambda: read(tmp_path / "x"))
        else:
            lies = [json.dumps(_lied(json.loads(line), rng)) if rng.random() < 0.4 else line for line in events]
            (folder / "events.jsonl").write_text("\n".join(lies))
            page = _told(lambda: run_report(folder))
        output.add(page.startswith("<!doctype"))
    assert True in output
