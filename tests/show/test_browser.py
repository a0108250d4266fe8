"""Pages in a real browser: they render, load nothing, answer to pointer and keys, and fit on a phone in both themes."""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import chromium
from pages import a_certificate, a_plan, a_run
from programs import zoo_program
from spanax.commands.report import page_of
from spanax.hardware.cluster import cluster
from spanax.plan.advice.summary import summarize
from spanax.plan.search import search
from spanax.show.page.document import document
from spanax.show.page.search import search_page
from spanax.train.record.report import run_report

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "pages.json"
PAGES = ("plan", "run", "check", "ranked")
SIZES = {"phone": (360, 780), "desktop": (1240, 900)}
THEMES = ("light", "dark")
FAR = {"phone": 0.85, "desktop": 0.12}
"""Above these two pictures differ. Seen: 0.62 and 0.02 with another font, 0.96 and 0.16 without the bars."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    run = run_report(a_run(folder / "run", a_plan()))
    pages = {name: page_of(value) for name, value in (("plan", a_plan()), ("run", run), ("check", a_certificate()))}
    search_result = search(zoo_program("gpt"), cluster("h100:8"), top=20, each=True)
    pages["ranked"] = search_page(summarize(search_result), a_plan(), "gpt")
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(document(page))
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture
def show(browser: Any, files: dict[str, str]) -> Iterator[Any]:
    """Opens a page in a theme and size; console messages and network requests fail the test."""
    contexts, output = [], list[str]()

    def opened(name: str, *, size: str = "desktop", theme: str = "light") -> Any:
        width, height = SIZES[size]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, offline=True, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda message: output.append(message.text))
        page.on("pageerror", lambda error: output.append(str(error)))
        page.on("request", lambda request: output.append(request.url) if request.url != files[name] else None)
        page.goto(files[name])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not output


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES)
def test_a_page_fits_and_follows_the_theme(name: str, theme: str, size: str, show: Any) -> None:
    page = show(name, size=size, theme=theme)
    assert page.evaluate("document.documentElement.scrollWidth") == SIZES[size][0]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 27)"}[theme]
    # Only elements inside of scrolling boxes extend beyond the edge.
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((one) =>
             !one.closest(".scroll, .unseen, .grids, .times, svg") 
             && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.className || one.tagName)"""
    )
    assert outside == []
    small = page.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((one) => one.children.length === 0 && one.textContent
             && one.offsetParent && parseFloat(getComputedStyle(one).fontSize) < 10).map((one) => one.className)"""
    )
    assert small == []


def test_pointing_at_an_array_shows_it_on_the_mesh(show: Any) -> None:
    page = show("plan")
    plan = a_plan()
    chosen = page.locator(".chosen")
    parts = lambda: page.locator(".cell i").all_text_contents()  # noqa: E731
    expected = max((leaf for leaf in plan.leaves if leaf.kind == "param"), key=lambda leaf: leaf.local_bytes)
    assert chosen.locator("code").first.text_content() == expected.path
    assert parts() == [f"shard {part}" for part in range(8)]
    page.locator(".array", has_text="blocks.*.scale").first.locator("summary").hover()
    assert "too small to split" in chosen.text_content() and parts() == ["full"] * 8
    page.locator(".array", has_text="inputs").locator("summary").hover()
    assert parts() == [f"shard {part // 2}" for part in range(8)]
    colours = page.evaluate(
        "[...document.querySelectorAll('.cell')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) == 4 and colours[0] == colours[1] != colours[2]
    page.locator(".array", has_text="block_up_0.kernel").first.locator("summary").hover()
    reported = chosen.text_content()
    assert (
        "P('fsdp', 'model')" in reported
        and "8,192 bytes" in reported
        and "all-gather over fsdp 64 KiB per step" in reported
    )


def test_the_keyboard_reaches_what_the_pointer_does(show: Any) -> None:
    page = show("plan")
    page.locator(".find").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.parentElement.className") == "kind"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    focused = page.evaluate("document.activeElement.querySelector('code').textContent")
    names = page.locator(".array > summary code").all_text_contents()
    assert page.locator(".chosen code").first.text_content() == focused == names[1]
    page.keyboard.press("Enter")
    assert page.locator(".array[open] dd").first.is_visible()
    page.keyboard.press("ArrowUp")
    assert page.locator(".chosen code").first.text_content() == names[0]


def test_an_array_is_selected_by_its_path(show: Any) -> None:
    page = show("plan", size="phone")
    page.locator(".find").fill("UP_2")
    shown = page.locator(".array:visible code").all_text_contents()
    assert {text for text in shown if text.endswith("kernel")} == {
        "block_up_2.kernel",
        "opt_state.0.mu.block_up_2.kernel",
    }
    page.locator(".array:visible").first.locator("summary").click()
    assert page.locator(".array:visible dl").first.is_visible()


def test_pointer_and_keyboard_read_a_curve(show: Any) -> None:
    page = show("run")
    assert page.evaluate("getComputedStyle(document.querySelector('.line')).stroke") == "rgb(32, 74, 222)"
    plot = page.locator(".plot").first
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] - 1, "y": 50})
    assert plot.locator(".tip").text_content().startswith("step 60\nloss 1.167\nheld-out loss 1.367")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    assert plot.locator(".tip").text_content().startswith("step 59\nloss")
    plot.blur()
    assert not plot.locator(".tip").is_visible()


def test_layouts_are_sorted_and_filtered(show: Any) -> None:
    page = show("ranked")
    memory = lambda: [float(item) for item in page.evaluate(  # noqa: E731
        "[...document.querySelectorAll('.ranked tbody tr')].filter((row) => !row.hidden)"
        ".map((row) => row.cells[3].firstChild.dataset.value)"
    )]  # fmt: skip
    before = memory()
    page.get_by_role("button", name="memory").click()
    assert memory() == sorted(before) != before
    page.get_by_role("button", name="memory").press("Enter")
    assert memory() == sorted(before, reverse=True)
    assert page.locator("th[aria-sort='descending']").text_content() == "memory"
    page.get_by_label("family").select_option("fsdp")
    assert set(page.locator(".ranked tbody tr:visible th").all_text_contents()) <= {"fsdp", "fsdp+seq"}
    assert 0 < len(memory()) < len(before) and f"{len(memory())} of" in page.locator("output").text_content()
    page.get_by_label("family").select_option("all")
    page.get_by_label("model", exact=True).select_option("not sharded")
    assert memory() and not any(
        "model" in text for text in page.locator(".ranked tbody tr:visible td:nth-child(6)").all_text_contents()
    )


@pytest.mark.parametrize("name", PAGES)
def test_labels_for_screen_readers(name: str, show: Any) -> None:
    reported = show(name).locator("main").aria_snapshot()
    expected = {
        "plan": ['heading "fsdp+tensor on fsdp=4,model=2: 114 k parameters, batch size 32" [level=1]',
                 'img "8 devices: fsdp 4 down, model 2 across"',
                 "1f1b: 2 stages, 4 microbatches", 'searchbox "Find an array by its path"'],
        "run": ["Loss: loss from 6 at step 1 to", "all attempts: step: steps that count 29.0 s", 'table "attempts"'],
        "check": ['heading "Findings" [level=2]', 'table "predicted and compiled"', 'button "kind"'],
        "ranked": ['combobox "family"', 'checkbox "only layouts that fit" [checked]', 'button "step"'],
    }[name]  # fmt: skip
    for item in expected:
        assert item in reported, f"{item} is not in\n{reported}"


def picture(page: Any, columns: int = 24) -> list[str]:
    """A screenshot as rows of digits, 0 black to f white: coarse enough not to tell one font from another."""
    image = base64.b64encode(page.screenshot(full_page=True)).decode()
    blank = page.context.new_page()
    rows = blank.evaluate(
        """async ([image, columns]) => {
             const picture = new Image();
             picture.src = "data:image/png;base64," + image;
             await picture.decode();
             const rows = Math.round(columns * picture.height / picture.width);
             const canvas = new OffscreenCanvas(columns, rows).getContext("2d");
             canvas.imageSmoothingQuality = "high";
             canvas.drawImage(picture, 0, 0, columns, rows);
             const data = canvas.getImageData(0, 0, columns, rows).data;
             const light = (at) => 0.2126 * data[at] + 0.7152 * data[at + 1] + 0.0722 * data[at + 2];
             return [...Array(rows)].map((_, row) => [...Array(columns)].map((_, column) =>
               Math.round(light(4 * (row * columns + column)) / 17).toString(16)).join(""));
           }""",
        [image, columns],
    )
    blank.close()
    return rows


def apart(item: list[str], other: list[str]) -> float:
    """The mean difference of two pictures, in steps of 15; their first rows, as far as both go."""
    pairs = [
        (int(a, 16), int(b, 16)) for row, like in zip(item, other, strict=False) for a, b in zip(row, like, strict=True)
    ]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def test_pages_look_as_they_did(show: Any) -> None:
    """Coarsely: fonts differ between machines, and a part that is lost or moved shows all the same."""
    result = {
        f"{name} {size} {theme}": picture(show(name, size=size, theme=theme))
        for name in PAGES[:3] for size in SIZES for theme in THEMES
    }  # fmt: skip
    if os.environ.get("SPANAX_GOLDEN") == "update":
        GOLDEN.write_text(json.dumps(result, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert result.keys() == golden.keys()
    far = {name: apart(result[name], golden[name]) for name in result}
    far = {name: by for name, by in far.items() if by > FAR[name.split()[1]]}
    tall = {name for name in result if not 0.9 < len(result[name]) / len(golden[name]) < 1.1}
    assert not far and not tall, "a page looks otherwise: `SPANAX_GOLDEN=update make browser`, then look at it"
    again = picture(show("plan"))
    assert apart(again, result["plan desktop light"]) == 0
    places = [f"{name} {size}" for name in PAGES[:3] for size in SIZES]
    assert all(apart(result[f"{place} light"], result[f"{place} dark"]) > 8 for place in places)
    assert apart(result["plan desktop light"], result["check desktop light"]) > 0.3
