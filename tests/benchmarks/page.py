"""How soon a large page opens in Chromium, and how smoothly it scrolls.

    python -m tests.benchmarks.page            measure (five minutes)
    python -m tests.benchmarks.page --show     the newest results

The pages: a search of 5,000 probes (those of tests/truth, again and again with other batches and
rates), an estimate whose ledger has 20,503 events (timm's Swin-L), and a page of six charts of
5,000 points under a table of 5,000 rows (tests/page/pages.py). Each is opened by file://, in a new
browser each time, in a window of 1380 by 900, and asked what it noted six seconds later.

"Ready" is when plotly and the figures are unpacked, "drawn" when the first chart is: some pages
have one only further down, and then it is drawn when it is scrolled to. "CPU" is what the page's
process took until the charts in view were drawn, with an observer; where many other processes wait,
the wall clock says more of them than of the page. Scrolling goes from top to bottom by 60 px a
frame, as fast as frames come.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import sync_playwright
from tabulate import tabulate

from planner.core.schema import TrainSetting
from planner.estimation.estimate import choose, estimate_ledger
from planner.estimation.ledgers import step_ledger
from planner.machine.hardware import find_gpu
from planner.report.page.contents import Page
from planner.report.page.rendering import page_html
from planner.report.pages.step import Step
from search.report.reading import read_run
from search.report.run import Run
from search.report.writing import make_page
from tests.benchmarks.dated import latest_results, write_results
from tests.page import pages
from tests.page.browser import looking_at

TRUTH = Path(__file__).parents[1] / "truth" / "cpu_grid_2026-11-20.jsonl"
NUM_PROBES, NUM_RUNS = 5000, 5
ALONE_SECONDS = 6  # by then the charts in view are drawn
MODEL, GPU = "timm:swin_large_patch4_window7_224", "h100-sxm-80gb"
PACKAGES = ("plotly", "playwright")

LOADED = """() => {
  const marks = performance.getEntriesByType("mark");
  const of = (name) => marks.find((mark) => mark.name.startsWith(name))?.startTime ?? null;
  return {
    painted_ms: performance.getEntriesByType("paint")[0]?.startTime ?? null,
    load_ms: performance.getEntriesByType("navigation")[0].loadEventEnd,
    ready_ms: of("ready"), drawn_ms: of("drawn"),
  };
}"""
SCROLLED = """async () => {
  const tasks = [];
  new PerformanceObserver((list) => tasks.push(...list.getEntries().map((e) => e.duration)))
    .observe({ type: "longtask" });
  const frames = [];
  let before = await new Promise(requestAnimationFrame);
  for (let y = 0; y < document.documentElement.scrollHeight - innerHeight; y += 60) {
    scrollTo({ top: y, behavior: "instant" });
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - before);
    before = now;
  }
  await new Promise((done) => setTimeout(done, 500));
  return { frames, tasks };
}"""


def probes() -> Page:
    """A search of NUM_PROBES probes, each like one that was measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["tune", "--replay", str(TRUTH), "--output", folder, "--quiet"]
        subprocess.run([sys.executable, "-m", "planner", *command], check=True, capture_output=True)
        run = read_run(folder)
    made = []
    for number in range(NUM_PROBES):
        record = run.records[number % len(run.records)]
        factor = 1 + number / NUM_PROBES
        setting = record.setting.model_copy(update={"batch_size": 1 + number % 509})
        changes: dict[str, Any] = {"probe_id": f"made-{number}", "setting": setting}
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"):
            value = getattr(record, name)
            changes[name] = value if value is None else int(value * factor)
        if record.images_per_second is not None:
            changes["images_per_second"] = record.images_per_second * factor
        made.append(record.model_copy(update=changes))
    many: Run = replace(run, records=tuple(made))
    return make_page([many])


def events() -> Page:
    """The estimate of a step whose ledger has about 20,000 events."""
    config, setting = choose(MODEL, TrainSetting(batch_size=32), None, {})
    ledger, gpu = step_ledger(config, setting, False), find_gpu(GPU)
    assert len(ledger.events) > 20_000
    found = estimate_ledger(config, setting, ledger, gpu, None, None)
    return make_page([Step(found, ledger, gpu)])


PAGES = {
    f"{NUM_PROBES:,} probes": probes,
    "20,503 events": events,
    "5,000 rows and 6 charts": pages.many_probes,
}


def measure() -> dict[str, Any]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in PAGES.items():
            path = Path(folder) / "page.html"
            path.write_text(page_html(make()), encoding="utf-8")
            found[name] = {
                "bytes": path.stat().st_size,
                "runs": [_open(path) for _ in range(NUM_RUNS)],
            }
    return {"window": [1380, 900], "pages": found}


def _open(path: Path) -> dict[str, Any]:
    """Milliseconds of one opening, and of one scrolling in another."""
    loaded = _opened_alone(path)
    with looking_at(path) as page:
        loaded["cpu_ms"] = 1e3 * _process_seconds(page)
        scrolled = page.evaluate(SCROLLED)
    frames = sorted(scrolled["frames"])
    return {
        **{name: None if ms is None else round(ms) for name, ms in loaded.items()},
        "frames": len(frames),
        "frame_median_ms": round(median(frames), 1) if frames else None,
        "frame_95th_ms": round(frames[len(frames) * 95 // 100], 1) if frames else None,
        "frame_longest_ms": round(frames[-1], 1) if frames else None,
        "long_tasks_ms": [round(ms) for ms in scrolled["tasks"]],
    }


def _opened_alone(path: Path) -> dict[str, Any]:
    """What a browser noted that nobody was connected to while it opened the page: for an observer
    V8 parses plotly three times more, to know the lines of its errors."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            shutil.which("chromium") or "chromium", "--headless", "--no-sandbox",
            "--window-size=1380,900", "--remote-debugging-port=0", f"--user-data-dir={folder}",
            path.as_uri(),
        ]  # fmt: skip
        chromium = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            time.sleep(ALONE_SECONDS)
            port = (Path(folder) / "DevToolsActivePort").read_text().splitlines()[0]
            with sync_playwright() as driver:
                browser = driver.chromium.connect_over_cdp(f"http://127.0.0.1:{port}")
                page = browser.contexts[0].pages[0]
                loaded: dict[str, Any] = page.evaluate(LOADED)
                browser.close()
        finally:
            os.killpg(chromium.pid, signal.SIGKILL)
            chromium.wait()
    return loaded


def _process_seconds(page: Any) -> float:
    """Processor seconds of the page's process since it began: other work counts little in them."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "ProcessTime"))


def table(found: dict[str, Any]) -> str:
    """Medians over the runs; of frames and long tasks the worst run."""
    rows = []
    for name, page in found["pages"].items():
        runs = page["runs"]

        def of(key: str, choose: Any = median, runs: list[dict[str, Any]] = runs) -> Any:
            known = [run[key] for run in runs if run[key] is not None]
            return choose(known) if known else "-"

        tasks = max((ms for run in runs for ms in run["long_tasks_ms"]), default=0)
        rows.append([
            name, f"{page['bytes'] / 1e6:.1f} MB", of("painted_ms"), of("load_ms"), of("ready_ms"),
            of("drawn_ms"), of("cpu_ms"), of("frame_median_ms"), of("frame_95th_ms", max),
            of("frame_longest_ms", max), tasks,
        ])  # fmt: skip
    headers = (
        "page", "size", "painted", "load", "ready", "drawn", "CPU", "frame",
        "95th frame", "longest frame", "longest task",
    )  # fmt: skip
    return tabulate(rows, headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    if not parser.parse_args().show:
        print(f"wrote {write_results('page', PACKAGES, measure())}")
    print(table(latest_results("page")))


if __name__ == "__main__":
    main()
