"""The diagrams of the documentation: each is what its plan says, has a text, and is readable without colors."""

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from diagrams import DIAGRAMS, IMAGES, draw
from drawings.canvas import svg_text
from drawings.collectives import DRAWN, collectives_diagram
from drawings.schedules import schedules_diagram
from drawings.shards import shards_diagram
from pages import a_plan
from sampling import sampled
from spanax.hardware.mesh import MeshShape
from spanax.plan.pipeline.ticks import ticks
from spanax.units import bytes_text

DOCS = IMAGES.parent
MAX_BYTES = 15_000
TOLERANCE = 0.05
"""By how much a number may differ: JAX's versions trace some operations otherwise."""

BY_HAND = {"axes", "fsdp-memory", "neighbors"}
"""Diagrams that no program draws."""

NUMBER = re.compile(r"\d+(?:\.\d+)?")
SVG = "{http://www.w3.org/2000/svg}"


def close(item: str, other: str) -> bool:
    """Whether two drawings have the same elements and texts, and numbers within the tolerance."""
    if NUMBER.sub("#", item) != NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, NUMBER.findall(item)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= TOLERANCE * max(a, b) + 0.011 for a, b in pairs)


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", sampled(DIAGRAMS, ["specs", "interleaved", "fsdp"]))
def test_a_diagram_equals_the_plan(name: str) -> None:
    assert close(draw(name), (IMAGES / f"{name}.svg").read_text()), "python benchmarks/diagrams.py, then look at it"


def test_another_drawing_is_not_close() -> None:
    text = (IMAGES / "fsdp.svg").read_text()
    assert close(text, text.replace("256 KiB", "257 KiB")) and not close(text, text.replace("256 KiB", "512 KiB"))
    assert not close(text, text.replace("fsdp", "data")) and not close(text, text.replace("</svg>", "<g/></svg>"))


def test_every_diagram_is_on_a_page_with_a_text() -> None:
    pages = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    shown = [match for text in pages.values() for match in re.findall(r"!\[([^\]]*)\]\(images/([\w-]+)\.svg\)", text)]
    assert {name for _, name in shown} == {path.stem for path in IMAGES.iterdir()} == {*DIAGRAMS} | BY_HAND
    assert all(len(text) >= 40 for text, _ in shown) and len({text for text, _ in shown}) == len(shown)


@pytest.mark.parametrize("name", [*DIAGRAMS, *sorted(BY_HAND)])
def test_a_diagram_is_small_and_has_a_description(name: str) -> None:
    svg = (IMAGES / f"{name}.svg").read_text()
    root = ElementTree.fromstring(svg)
    assert len(svg.encode()) <= MAX_BYTES
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and desc is not None and len(title.text or "") > 10 and len(desc.text or "") > 40
    assert "prefers-color-scheme:dark" in svg and "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_device_shows_its_shard() -> None:
    plan = a_plan()
    kernel = plan["block_up_0.kernel"]
    svg = svg_text(shards_diagram([kernel, plan["blocks.0.scale"]], plan.mesh, "on a mesh"))
    areas = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}rect") if node.get("class", "").startswith("c")]
    assert len(areas) == 8 + 8
    (left, top), outline = ({node.get(key) for node in areas[:8]} for key in ("width", "height")), areas[8]
    assert len(left) == len(top) == 1
    assert float(areas[0].get("width", 0)) == pytest.approx(float(outline.get("width", 0)) / 2, abs=0.1)
    assert float(areas[0].get("height", 0)) == pytest.approx(float(outline.get("height", 0)) / 4, abs=0.1)
    assert "P('fsdp', 'model'): 8 shards, 8 KiB each" in texts(svg) and texts(svg).count("full") == 8


def test_a_timeline_shows_every_task_once() -> None:
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
        table = ticks(name, 4, 4, chunks)
        svg = svg_text(schedules_diagram([table], name))
        labels = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}text") if " " in node.get("x", "")]
        tasks = [task for row in table.tasks for task in row if task is not None]
        assert sum(len(node.text or "") for node in labels) == len(tasks)
        assert all(len(node.get("x", "").split()) == len(node.text or "") for node in labels)
        for node in labels:
            places = [float(x) for x in node.get("x", "").split()]
            assert all(a < b for a, b in pairwise(places))
        cells = [(x, node.get("y")) for node in labels for x in node.get("x", "").split()]
        assert len(set(cells)) == len(tasks)


def test_collectives_are_drawn_as_they_work() -> None:
    def blocks(kind: str, is_after: bool) -> list[set[str]]:
        return [{block.text for block in DRAWN[kind][is_after](device, 4)} for device in range(4)]

    everything = {"A", "B", "C", "D"}
    assert blocks("all-gather", False) == [{"A"}, {"B"}, {"C"}, {"D"}] == blocks("reduce-scatter", True)
    assert blocks("all-gather", True) == [everything] * 4 == blocks("all-reduce", True)
    assert blocks("collective-permute", True) == [{"D"}, {"A"}, {"B"}, {"C"}]
    sent, received = blocks("all-to-all", False), blocks("all-to-all", True)
    assert set.union(*sent) == set.union(*received) and all(len(a & b) == 1 for a in sent for b in received)
    moved = {"fsdp": {"all-gather": 5_000_000, "all-reduce": 68}, "fsdp+model": {"reduce-scatter": 1_000_000}}
    lines = texts(svg_text(collectives_diagram(moved, MeshShape.of("fsdp=4,model=2"), "of a step")))
    assert [line for line in lines if "per step" in line] == [
        f"all-gather over fsdp: {bytes_text(5_000_000)} per step",
        f"reduce-scatter over fsdp+model: {bytes_text(1_000_000)} per step",
    ]
