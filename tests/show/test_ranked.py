"""`spanax plan --html`: the ranked layouts as a page; and the values of Spanax in a notebook."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spanax
from pages import Read, a_certificate, a_plan
from programs import zoo_program
from spanax import cli
from spanax.check.lint.subject import LintSubject
from spanax.displays import display
from spanax.hardware.cluster import cluster
from spanax.plan.advice.summary import summarize
from spanax.plan.pipeline.ticks import ticks
from spanax.plan.plan import Plan
from spanax.plan.search import search
from spanax.show.page.document import document
from spanax.show.page.notebook import SHOWN
from spanax.show.page.search import search_page


def test_a_saved_and_drawn_plan_is_the_first_of_the_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file = tmp_path / "r.html", tmp_path / "p.json"
    cli.main(["plan", "gpt-nano", "--on", "h100:8", "--html", str(page), "--out", str(file), "--json"])
    data = json.loads(capsys.readouterr().out)
    price = Plan.load(file).price
    best = data["best"]
    assert price is not None and price.cluster == data["cluster"] == "h100:8"
    assert (price.step_seconds, price.seconds, price.peak_bytes) == (
        best["step_seconds"], best["seconds"], best["memory"]["peak"],
    )  # fmt: skip
    assert price.mfu == pytest.approx(best["mfu"]) and len(data["candidates"]) == 10
    text = page.read_text()
    read = Read(text)
    assert not read.problems and "http" not in re.sub("http-equiv", "", text)
    rows = [attributes for tag, attributes in read.elements if tag == "tr" and "data-family" in attributes]
    seconds = [float(item) for item in re.findall(r'data-value="([\d.e-]+)">[\d.]+ [mµ]?s<', text)]
    assert len(rows) == len(seconds) > 50 and seconds == sorted(seconds) and seconds[0] == best["step_seconds"]
    assert {row["data-fits"] for row in rows} == {"yes"} and {"fsdp", "data"} <= {row["data-family"] for row in rows}


def test_layouts_that_do_not_fit_are_on_the_page() -> None:
    machine = cluster("h100:8")
    program = zoo_program("mlp")
    roomy = search(program, machine, top=50)
    peaks = sorted(candidate.upper_bytes for candidate in roomy.candidates)
    for limit, fits in ((peaks[len(peaks) // 2], {"yes", "no"}), (1, {"no"})):
        tight = search(program, type(machine)(machine.chip, 8, limit, machine.shape), top=50)
        assert all(item.upper_bytes > limit for item in tight.too_large)
        assert bool(tight.candidates) == ("yes" in fits)
        read = Read(document(search_page(summarize(tight), None, "gpt")))
        assert {a["data-fits"] for tag, a in read.elements if tag == "tr" and "data-fits" in a} == fits
        assert not read.problems and (tight.best is not None or "the layout with the lowest peak needs" in read.text)


VALUES: dict[str, Any] = {
    "Plan": a_plan(),
    "Placement": a_plan().leaves[0],
    "MeshShape": spanax.MeshShape.of("data=2,fsdp=2,model=2"),
    "Cluster": cluster("v5p:2x2x1"),
    "Report": a_certificate().report,
    "Certificate": a_certificate(),
    "Ticks": ticks("1f1b", 2, 4),
}


def displayed_values() -> dict[str, Any]:
    """One of each kind of value that a notebook may show."""
    program, machine = zoo_program("mlp"), cluster("h100:8")
    plan, result = spanax.plan(program, machine, layout="fsdp"), search(program, machine, top=30)
    checked = LintSubject(program, plan, machine)
    more = {"Program": program, "Traced": program.step, "Search": result, "Candidate": result.best, "Checked": checked}
    return VALUES | more


def test_every_value_has_a_display() -> None:
    values = displayed_values()
    assert {type(value) for value in values.values()} == set(SHOWN)
    for name, value in values.items():
        text = value._repr_html_()
        read = Read(text)
        assert not read.problems and text.startswith('<div class="spanax fragment">'), name
        assert not any(tag == "script" or "id" in attributes for tag, attributes in read.elements), name
        assert len(read.text) > 20 and text == display(value), name
    assert "data+zero1" in values["Search"]._repr_html_() or "data" in values["Search"]._repr_html_()
    assert "4,096 bytes" not in display(values["MeshShape"]) and "model" in display(values["MeshShape"])


def test_a_style_applies_only_to_spanax_elements() -> None:
    style = Path(spanax.__path__[0], "show", "page", "style.css").read_text()
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
    selectors = [item.strip() for rule in re.findall(r"([^{}]+)\{", style) for item in rule.split(",")]
    ours = ("@media", ".spanax", "main.spanax", "body:has(> main.spanax)")
    assert not [selector for selector in selectors if not selector.startswith(ours)]


def test_without_html_a_notebook_shows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanax.displays._shown", [])
    assert VALUES["MeshShape"]._repr_html_() is None and display(SimpleNamespace()) is None
