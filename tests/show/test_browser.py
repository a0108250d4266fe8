"""Pages, diagrams and the site in a real browser: they load nothing, fit a phone, pass axe, and work with keys."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.resources import files
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
from spanax.show.page.plan import search_page
from spanax.train.record.report import run_report

pytest.importorskip("axe_playwright_python", reason='no axe-core: pip install "spanax[browser]"')
ROOT = Path(__file__).resolve().parents[2]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
PAGES = ("plan", "run", "check", "ranked", "notebook")
VIEWS = [(width, theme) for width in (390, 1280) for theme in ("light", "dark")]
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 27)"}
HEAD = '<!doctype html><html lang="en"><head><title>x</title><meta name="color-scheme" content="light dark"></head>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of a page of each kind, and of what a notebook displays."""
    folder, plan = tmp_path_factory.mktemp("pages"), a_plan()
    ranked = search(zoo_program("gpt"), cluster("h100:8"), top=20, each=True)
    values = {"plan": plan, "run": run_report(a_run(folder / "run", plan)), "check": a_certificate()}
    texts = {name: document(page_of(value)) for name, value in values.items()}
    texts["ranked"] = document(search_page(summarize(ranked), plan, "gpt"))
    texts["notebook"] = f"{HEAD}<body><main><h1>A notebook</h1>{plan._repr_html_()}</main></body></html>"
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens an address at a width and in a theme; an error or a request fails the test.

    axe needs pages without their policy; with it, so does anything that the policy blocks.
    """
    contexts, output = [], list[str]()

    def show(address: str, width: int, theme: str = "light", has_policy: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline=True, bypass_csp=not has_policy,
            reduced_motion="reduce",
        )  # fmt: skip
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: output.append(str(error)))
        page.on("request", lambda request: output.append(request.url) if request.url.startswith("http") else None)
        if has_policy:
            page.on("console", lambda message: output.append(message.text))
        page.goto(address)
        return page

    yield show
    for context in contexts:
        context.close()
    assert not output


def violations(page: Any) -> list[str]:
    """What axe-core reports as serious or critical: the rule and the first element."""
    page.evaluate(AXE)
    reported = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{item['id']}: {item['nodes'][0]['html'][:200]}"
        for item in reported
        if item["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width, theme", VIEWS)
def test_a_page_passes_axe_fits_and_follows_the_theme(
    name: str, width: int, theme: str, addresses: dict[str, str], opened: Any
) -> None:
    page = opened(addresses[name], width, theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tables = "[...document.querySelectorAll('.scroll:has(table)')]"
    cut = f"{tables}.filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.ariaLabel)"
    assert width > 390 or page.evaluate(cut) == []
    if name != "notebook":
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == BACKGROUNDS[theme]
        assert page.locator("section").count() > 3
    assert violations(page) == []


def test_axe_reports_low_contrast_and_missing_names(opened: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(f'{HEAD}<body><main><p style="color:#ccc">pale</p><img src="x"></main></body>')
    reported = violations(opened((tmp_path / "bad.html").as_uri(), 390))
    assert {line.split(":")[0] for line in reported} == {"color-contrast", "image-alt"}


@pytest.mark.parametrize("name", ["plan", "run", "ranked"])
def test_tab_visits_every_control_and_shows_where_it_is(name: str, addresses: dict[str, str], opened: Any) -> None:
    page = opened(addresses[name], 1280)
    count = page.locator("a[href], button, input, [tabindex='0']").count()
    focused = """() => [document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"""
    for _ in range(count):
        page.keyboard.press("Tab")
        tag, outline = page.evaluate(focused)
        assert tag != "BODY" and outline == "solid"
    assert count > 8


def test_layouts_are_sorted_and_filtered_and_a_curve_is_read(addresses: dict[str, str], opened: Any) -> None:
    page = opened(addresses["ranked"], 1280, has_policy=True)
    page.get_by_role("button", name="memory").press("Enter")
    assert page.locator("th[aria-sort='ascending']").text_content() == "memory"
    count = page.locator("tbody tr:visible").count()
    page.get_by_label("Find rows of layouts").fill("fsdp=8")
    assert 0 < page.locator(".long >> nth=0 >> tbody tr:visible").count() < count
    run = opened(addresses["run"], 390, has_policy=True)
    run.get_by_label("Step of Loss").press("ArrowLeft")
    assert run.locator(".lines output").first.text_content().startswith("step 59, loss")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_of_diagrams_lie_inside_and_have_contrast(theme: str, opened: Any) -> None:
    page = opened("about:blank", 1280, theme)
    for path in sorted((ROOT / "docs" / "images").glob("*.svg")):
        page.set_content(f"{HEAD}<body><main><h1>x</h1>{path.read_text()}</main></body></html>")
        outside = page.evaluate(
            """() => { const svg = document.querySelector("svg"), all = svg.getBoundingClientRect();
                 return [...svg.querySelectorAll("text")].filter((node) => { const box = node.getBoundingClientRect();
                   return box.left < all.left || box.right > all.right - 2 || box.bottom > all.bottom; })
                   .map((node) => node.textContent); }"""
        )
        assert outside == [], path.name
        assert page.evaluate("getComputedStyle(document.querySelector('.page')).fill") == BACKGROUNDS[theme]
        assert ElementTree.fromstring(path.read_text()).get("role") == "img" and violations(page) == []


@pytest.mark.parametrize("width, theme", [(390, "dark"), (1280, "light")])
def test_the_site_passes_axe(width: int, theme: str, opened: Any) -> None:
    pages = sorted((ROOT / "build" / "docs").glob("*.html"))
    if not pages:
        pytest.skip("the site is not built: make docs")
    for path in pages:
        page = opened(path.as_uri(), width, theme)
        assert (path.name, violations(page)) == (path.name, [])
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path.name
        page.close()
