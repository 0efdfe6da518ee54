"""Pages in the Chromium of the machine: what a person would see, click and read.

Mark what uses it `browser`. Without Chromium or playwright it skips, with the reason.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# A window, a theme and how one points, by name.
FORMS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1380, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1380, "height": 900}, "color_scheme": "dark"},
    "narrow": {
        "viewport": {"width": 360, "height": 780}, "color_scheme": "light",
        "is_mobile": True, "has_touch": True,
    },
}  # fmt: skip


@contextmanager
def looking_at(path: Path, form: str = "light", **options: Any) -> Iterator[Any]:
    """A playwright page at a file, in one of FORMS, loaded and with the first charts drawn.

    AssertionError at the end where anything was said on the console as an error or a warning, an
    error was raised, something was asked of the network, or a dialog opened.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on PATH")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            context = browser.new_context(
                **FORMS[form], permissions=["clipboard-read", "clipboard-write"], **options
            )
            page = context.new_page()
            page.set_default_timeout(120_000)  # ms: the usual 30 s are few on a busy machine
            faults = _faults_of(page, path.resolve().as_uri())
            page.goto(path.resolve().as_uri())
            settle(page)
            yield page
            assert faults == []
        finally:
            browser.close()


def _faults_of(page: Any, address: str) -> list[str]:
    """A list that grows by what should not happen."""
    faults: list[str] = []

    def said(message: Any) -> None:
        if message.type in ("error", "warning"):
            faults.append(f"console {message.type}: {message.text}")

    def asked(request: Any) -> None:
        if request.url.partition("#")[0] != address and not request.url.startswith(
            ("data:", "blob:")
        ):
            faults.append(f"request: {request.url}")

    def opened(dialog: Any) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("console", said)
    page.on("request", asked)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", opened)
    return faults


def until(page: Any, expression: str) -> None:
    """Waits until an expression of JavaScript holds; the page's policy forbids any that is not a
    function."""
    page.wait_for_function(f"() => {expression}")


def settle(page: Any) -> None:
    """Waits until every chart that began to be drawn is drawn."""
    until(
        page,
        """typeof page === "undefined" || !document.querySelector("[data-chart]")
          || document.querySelector(".failed") || (page.ready
            && page.waiting === undefined && page.drawn().every(
            (target) => target.querySelector(".main-svg")))""",
    )


def scroll_through(page: Any) -> None:
    """From top to bottom and back, so that every chart that is not hidden is drawn."""
    page.evaluate(
        """async () => {
          for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight / 2) {
            scrollTo({ top: y, behavior: "instant" });
            do await new Promise((done) => setTimeout(done, 60));
            while (page.waiting !== undefined);
          }
          scrollTo({ top: 0, behavior: "instant" });
        }"""
    )
    settle(page)


def sideways(page: Any) -> int:
    """How many px of the page lie beyond the window's width."""
    found: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return found


def unreadable(page: Any) -> list[str]:
    """Texts with less contrast than WCAG's AA asks: 4.5, and 3 for large ones. Of charts: the texts
    that lie on the page's ground (ticks, titles, legends)."""
    found: list[str] = page.evaluate(_CONTRAST)
    return found


def nameless(page: Any) -> list[str]:
    """Controls and regions that a screen reader could not name."""
    found: list[str] = page.evaluate(
        """() => [...document.querySelectorAll(
            "button, a, input, summary, [role=tab], [role=tabpanel], [role=region], [role=group]")]
          .filter((e) => {
            const by = e.getAttribute("aria-labelledby");
            const labelled = by && document.getElementById(by)?.textContent.trim();
            return !e.closest(".js-plotly-plot .modebar-container")
              && !(e.textContent.trim() || e.getAttribute("aria-label") || labelled);
          }).map((e) => e.outerHTML.slice(0, 120))"""
    )
    return found


_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  const inChart = ".xtick text, .ytick text, .legendtext, .xtitle, .ytitle, .gtitle";
  const found = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || element.closest("script, .unseen, :disabled")) continue;
    if (element.closest("svg, .hoverlayer") && !element.closest(inChart)) continue;
    if (!element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const colour = rgba(element.closest("svg") ? style.fill : style.color);
    const [a, b] = [light(colour), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const px = parseFloat(style.fontSize);
    const large = px >= 24 || (px >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) {
      found.add(`${ratio.toFixed(2)} ${element.tagName}.${element.className}: `
        + texts.currentNode.data.trim().slice(0, 40));
    }
  }
  return [...found];
}"""
