"""The page in a real browser: what it draws, how it responds, that it fits its width and executes nothing foreign."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, QUOTES, write_landscape, write_run

from steppe.report.page import write_report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.common.exceptions import NoAlertPresentException  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # A container has no user namespaces for the sandbox, and little shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods with three seeds, two with landscapes, one with a single seed, and a second benchmark with hostile
    names."""
    root = tmp_path_factory.mktemp("report")
    for seed in range(3):
        for method, lift, sharpness in (("fs-dgpm", 3.0 + seed / 7, 1.0), ("er", 0.0, 2.0)):
            write_run(root / method / f"seed-{seed}", method, seed, lift=lift)
            write_landscape(root / method / f"seed-{seed}", sharpness=sharpness)
        write_run(root / "gpm" / f"seed-{seed}", "gpm", seed, lift=1.5)
    write_run(root / "lone", "lone", 7, lift=-9.0)
    names = (HOSTILE, QUOTES, "a name that is longer than any phone is wide, for it goes on and on and on")
    for method in (HOSTILE, QUOTES):
        write_run(
            *(root / f"hostile-{len(method)}", method),
            benchmark=QUOTES,
            tasks=names,
            settings={HOSTILE: QUOTES},
            remarks=[QUOTES],
        )
    out = root / "report.html"
    write_report([root], out, f"steppe report {HOSTILE}")
    return out


@pytest.fixture
def opened(browser: Any, study: Path) -> Iterator[Any]:
    """The page, newly opened at desktop width; the console must stay free of errors."""
    show(browser, study, 1280)
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def show(browser: Any, path: Path, width: int, theme: str = "light", *, settled: bool = True) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(path.as_uri())
    if settled:
        settle(browser)


def settle(browser: Any) -> None:
    """Wait until charts that have just come into view are redrawn, in the next frame."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def part(browser: Any, name: str, section: int = 0) -> Any:
    return browser.find_element("css selector", f"[data-section='{section}'] [data-part='{name}']")


def hover(browser: Any, place: Any, across: float = 0.0, down: float = 0.0) -> str:
    """Move the pointer over a chart, by fractions of its half width and height from its center; returns the tooltip's
    text."""
    chart = place.find_element("css selector", ".chart svg")
    settle(browser)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    box = chart.rect
    at = (int(across * box["width"] / 2), int(down * box["height"] / 2))
    ActionChains(browser, duration=0).move_to_element_with_offset(chart, *at).perform()
    return str(place.find_element("css selector", ".tooltip").text)


def lines(place: Any) -> int:
    return len(place.find_elements("css selector", "path.line:not(.back)"))


def test_curves_respond_to_hovering_and_selection(opened: Any) -> None:
    place = part(opened, "curves")
    assert lines(place) == 4
    told = hover(opened, place, across=0.97)
    assert "after task 3: third" in told
    assert told.splitlines()[1::2] == ["fs-dgpm", "gpm", "er", "lone"]  # in the order of their heights
    assert " ± " in told
    assert len(place.find_elements("css selector", ".band")) == 3  # the method with one seed has none
    place.find_element("xpath", ".//label[normalize-space()='er']/input").click()
    assert lines(place) == 3
    assert "er" not in hover(opened, place, across=0.97).splitlines()
    place.find_element("xpath", ".//label[contains(., 'band')]/input").click()
    assert place.find_elements("css selector", ".band") == []
    Select(place.find_element("css selector", "select")).select_by_visible_text("task 2: second")
    assert "nothing measured here" in hover(opened, place, across=-0.97)
    assert "task 2: second" in place.find_element("css selector", "svg[role='img']").get_attribute("aria-label")


def test_select_all_and_none(opened: Any) -> None:
    place = part(opened, "curves")
    every, none = place.find_elements("css selector", "button")
    none.click()
    assert lines(place) == 0
    assert place.find_elements("css selector", ".methods :checked") == []
    every.click()
    assert lines(place) == 4


def test_charts_respond_to_the_keyboard(opened: Any) -> None:
    chart = part(opened, "curves").find_element("css selector", ".chart svg")
    tooltip = part(opened, "curves").find_element("css selector", ".tooltip")
    chart.send_keys(Keys.END)
    assert "after task 3" in tooltip.text
    chart.send_keys(Keys.ARROW_LEFT)
    assert "after task 2" in tooltip.text
    chart.send_keys(Keys.ESCAPE)
    assert not tooltip.is_displayed()
    cells = part(opened, "matrix").find_element("css selector", ".chart svg")
    cells.send_keys(Keys.ARROW_DOWN)
    cells.send_keys(Keys.ARROW_RIGHT)
    assert "task 2: second, after task 3" in part(opened, "matrix").find_element("css selector", ".tooltip").text


def test_heat_map_shows_numbers_and_switches_methods(opened: Any) -> None:
    place = part(opened, "matrix")
    before = place.find_element("css selector", ".chart text.on-dark, .chart text.on-light").text
    told = hover(opened, place, across=-0.75, down=0.1)
    assert told.startswith("task 1: first, after task")
    assert "accuracy" in told
    Select(place.find_elements("css selector", "select")[0]).select_by_visible_text("lone")
    assert place.find_element("css selector", ".chart text.on-dark, .chart text.on-light").text != before
    assert len(place.find_elements("css selector", ".chart")) == 2


def test_landscape_slider(opened: Any) -> None:
    place = part(opened, "landscape")
    assert lines(place) == 2
    assert place.find_element("css selector", "output").text == "after task 1"
    assert place.find_elements("css selector", "path.back") == []
    before = place.find_element("css selector", "tbody td").text
    place.find_element("css selector", "input[type='range']").send_keys(Keys.END)
    assert place.find_element("css selector", "output").text == "after task 3"
    assert len(place.find_elements("css selector", "path.back")) == 2
    assert place.find_element("css selector", "tbody td").text != before
    assert "α = 0" in hover(opened, place)
    Select(place.find_element("css selector", "select")).select_by_visible_text("task 3: third")
    assert place.find_element("css selector", "output").text == "after task 3"


def test_differences_switch_their_reference(opened: Any) -> None:
    place = part(opened, "differences")
    assert [body.is_displayed() for body in place.find_elements("css selector", "tbody")] == [True, False, False, False]
    assert "too few seeds" in place.text
    Select(place.find_element("css selector", "select")).select_by_visible_text("lone")
    assert [body.is_displayed() for body in place.find_elements("css selector", "tbody")] == [False, False, False, True]


def test_costs_and_layers(opened: Any) -> None:
    place = part(opened, "costs")
    assert "training" in hover(opened, place, down=-0.7)
    Select(place.find_element("css selector", "select")).select_by_visible_text("er, by task")
    assert "task 2: second" in hover(opened, place)
    assert "median" in hover(opened, part(opened, "importances"), across=0.5)
    assert "of 100" in hover(opened, part(opened, "ranks"))


def test_dark_and_light(browser: Any, study: Path) -> None:
    for system, other in (("light", "dark"), ("dark", "light")):
        show(browser, study, 1280, system)
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        button = browser.find_element("id", "theme")
        assert button.text.lower() == other
        button.click()
        assert button.text.lower() == system
        assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != ground


def test_hostile_names_show_as_text(opened: Any) -> None:
    tabs = opened.find_elements("css selector", "[role='tab']")
    assert [tab.text for tab in tabs] == ["pmnist", QUOTES]
    tabs[0].send_keys(Keys.ARROW_RIGHT)
    assert tabs[1].get_attribute("aria-selected") == "true"
    assert not opened.find_element("id", "section-0").is_displayed()
    section = opened.find_element("id", "section-1")
    assert {HOSTILE, QUOTES} <= {cell.text for cell in section.find_elements("css selector", "tbody th")}
    assert HOSTILE in hover(opened, part(opened, "curves", 1))
    assert HOSTILE in hover(opened, part(opened, "costs", 1), down=-0.5)
    assert opened.find_elements("css selector", "main img, main script, svg script") == []
    assert "steppe landscape" in part(opened, "landscape", 1).text
    with pytest.raises(NoAlertPresentException):
        opened.switch_to.alert.dismiss()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_page(opened: Any, study: Path, width: int) -> None:
    show(opened, study, width)
    for tab in opened.find_elements("css selector", "[role='tab']"):
        tab.click()
        opened.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")
        wide, inner = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= inner == width
        drawn = opened.execute_script(
            "return [...document.querySelectorAll('.chart svg')].map((svg) => svg.getBoundingClientRect().right)"
        )
        assert max(drawn) <= width


def test_view_is_kept_when_the_window_is_resized(opened: Any, study: Path) -> None:
    chart = part(opened, "curves").find_element("css selector", ".chart svg")
    chart.send_keys(Keys.HOME)
    before = chart.get_dom_attribute("viewBox")
    size = {"width": 600, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    settle(opened)
    assert chart.get_dom_attribute("viewBox") != before
    assert "after task 1" in part(opened, "curves").find_element("css selector", ".tooltip").text


def test_every_control_has_a_name(opened: Any) -> None:
    unnamed = opened.execute_script(
        "return [...document.querySelectorAll('select, input, button')].filter((control) =>"
        " !(control.labels && control.labels.length && control.labels[0].textContent.trim())"
        " && !control.textContent.trim() && !control.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
    charts = opened.find_elements("css selector", ".chart svg[role='img']")
    assert charts
    assert all(chart.get_attribute("aria-label") for chart in charts)


def test_without_scripts_the_tables_remain(browser: Any, study: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        show(browser, study, 1280, settled=False)
        text = browser.find_element("tag name", "body").text
        assert "JavaScript is disabled" in text
        assert "compared with fs-dgpm" in text
        assert "Accuracy matrix" not in text
        assert browser.find_element("css selector", "table.results").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
