"""The page of ark_torch.explain: self-contained, complete, drawn and zoomed by a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import ark_torch
from ark_torch.compile.choice import Choice
from ark_torch.compile.report import Fallback, GraphReport, PieceReport, Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARK = {"choose": "ark", "threads": 2}
# Clicks "+" three times and reads what is under the pointer at the middle of the first bar. The page then shows both.
DRIVE = """
<script>
const box = document.querySelector(".timeline"), text = () => box.querySelector(".bar").lastChild.textContent;
document.body.dataset.before = text();
for (let i = 0; i < 3; ++i) box.querySelector("button").click();
document.body.dataset.zoomed = text();
document.body.dataset.bars = box.querySelectorAll("rect.task").length;
box.querySelectorAll("button")[2].click();
const bar = box.querySelector("rect.task");
bar.scrollIntoView({ block: "center" });  // elementFromPoint() sees what the window shows
const place = bar.getBoundingClientRect();
const at = { clientX: place.x + place.width / 2, clientY: place.y + place.height / 2, bubbles: true };
box.querySelector("svg").dispatchEvent(new PointerEvent("pointermove", at));
document.body.dataset.told = document.querySelector(".tip").textContent;
</script>
"""


def llama() -> Report:
    model = models.Llama(models.Config()).eval()
    return ark_torch.explain(model, torch.tensor([[1]]), torch.tensor([3]), ark_options=ARK, target="sm_90a")


class Reader(HTMLParser):
    """Collects open tags, the content of tables, and every external reference."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "action", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def read(text: str) -> tuple[Reader, list[dict[str, Any]]]:
    reader = Reader()
    reader.feed(text)
    assert reader.open == [], f"left open: {reader.open}"
    (data,) = re.findall(r'<script type="application/json" id="timelines">(.*?)</script>', text, re.S)
    return reader, json.loads(data)


@pytest.mark.quick
def test_the_schedule_is_the_plans(tmp_path: Path) -> None:
    report = llama()
    report.save(tmp_path / "report.html")
    reader, timelines = read((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert reader.outside == [], "nothing is loaded"
    (region,) = report.regions
    plans = [json.loads(region.plan_json), json.loads(region.target_plan)]
    assert [one["target"] for one in timelines] == ["cpu", "sm_90a"]
    for shown, plan in zip(timelines, plans, strict=True):
        assert shown["workers"] == len(plan["queues"]) and len(shown["tasks"]) == len(plan["tasks"])
        last = [0.0] * shown["workers"]
        for (worker, begin, length, stage, *_, waits), task in zip(shown["tasks"], plan["tasks"], strict=True):
            assert (worker, stage) == (task["worker"], task["stage"]) and length > 0
            assert begin >= last[worker] - 1e-3, "a worker runs one task at a time"
            last[worker] = begin + length
            assert all(waits) and bool(waits) == bool(task["waits"])
        assert max(last) == pytest.approx(plan["estimated_us"], rel=1e-3), "it ends when the estimate says"
    assert "matmul" in reader.cells and "attention" in reader.cells and "ark" in reader.cells


@pytest.mark.quick
def test_what_falls_back_has_module_and_line() -> None:
    report = ark_torch.explain(models.ResidualBlock(transposed=True).eval(), torch.randn(1, 8, 5, 5), ark_options=ARK)
    reader, _ = read(report_page(report))
    for fallback in report.fallbacks:
        place = reader.cells.index(f"{fallback.file}:{fallback.line}")
        assert reader.cells[place - 3 : place] == [fallback.operator, fallback.reason, reader.cells[place - 1]]
    assert {"c1", "c2"} <= set(reader.cells)


def report_page(report: Report) -> str:
    frame = report._repr_html_()
    (document,) = re.findall(r'^<iframe srcdoc="([^"]*)" style=', frame)
    return html.unescape(document)


@pytest.mark.quick
def test_all_that_a_report_holds_is_shown_and_escaped() -> None:
    nasty = "</script><b>&\"'"
    measured = PieceReport("piece 0", "inductor", 3, re_counter(nasty), nasty)
    choice = Choice("inductor", {"ark": 12.5, "inductor": 7.25})
    graphs = [
        GraphReport(
            nodes=3, choice=choice, pieces=[measured], fallbacks=[Fallback(nasty, nasty, nasty, nasty, 7)], in_place=1
        ),
        GraphReport(whole=nasty, whole_on="eager PyTorch"),
    ]
    report = Report(graphs, graph_breaks=[f"{nasty}\nmore"], notes=[nasty])
    text = report_page(report)
    reader, timelines = read(text)
    assert timelines == [] and "<b>" not in text
    assert {f"{nasty}:7", "Inductor"} <= set(reader.cells)
    assert "<p>Runs on Inductor: measured ark 12.5 us, Inductor 7.2 us. This is how ark would run it.</p>" in text
    assert "1 graph not on ark at all, 1 graph break." in text and "The whole graph runs on eager PyTorch" in text


def re_counter(name: str) -> Any:
    from collections import Counter

    return Counter({name: 3})


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), "")
    if not found:
        pytest.skip(f"no browser in PATH ({', '.join(BROWSERS)}): install Debian's chromium")
    return found


def dom_of(page: Path, profile: Path) -> tuple[str, list[str]]:
    """Returns the DOM after a page's scripts have run in a browser, and their console output."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    more = ["--enable-logging=stderr", "--window-size=1280,900", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([*command, *more, page.as_uri()], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_browser_draws_and_zooms_it(tmp_path: Path) -> None:
    report = llama()
    page = tmp_path / "report.html"
    report.save(page)
    plan = json.loads(report.regions[0].plan_json)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", DRIVE + "</body>"), encoding="utf-8")
    dom, console = dom_of(page, tmp_path / "profile")
    assert console == [] and 'class="error"' not in dom
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[dom.index("<body") :].partition(">")[0]))
    tasks = sum(len(json.loads(text)["tasks"]) for text in (report.regions[0].plan_json, report.regions[0].target_plan))
    assert 0.5 * tasks < int(said["drawn"]) <= tasks, "a bar for each task that is wide enough to be seen"
    assert 0 < int(said["bars"]) < len(plan["tasks"]), "zoomed in, fewer are to be seen"
    whole, eighth = (re.search(r"([\d.]+) to ([\d.]+) of", said[name]) for name in ("before", "zoomed"))
    assert whole and eighth
    spans = [float(found.group(2)) - float(found.group(1)) for found in (whole, eighth)]
    assert spans[0] == pytest.approx(plan["estimated_us"], abs=0.02) and spans[1] == pytest.approx(
        spans[0] / 8, abs=0.02
    )
    assert said["told"].startswith(plan["stages"][plan["tasks"][0]["stage"]]["name"]), said["told"]
    for worker in range(len(plan["queues"])):
        assert f">worker {worker}</text>" in dom


@pytest.mark.nightly
def test_a_script_that_fails_is_noticed(tmp_path: Path) -> None:
    """Verifies the test above: the browser's console is read, and the page reports errors."""
    report = ark_torch.explain(lambda x: torch.tanh(x) * 2 + 1, torch.ones(3), ark_options=ARK)
    page = tmp_path / "report.html"
    report.save(page)
    page.write_text(page.read_text(encoding="utf-8").replace('"stages":[', '"steges":['), encoding="utf-8")
    dom, console = dom_of(page, tmp_path / "profile")
    assert console and 'class="error"' in dom
