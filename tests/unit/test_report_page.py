"""`lohan report` writes one page that holds the run's numbers, asks for nothing, and runs nothing that came from a run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lohan.cli import main
from lohan.simulate.timeline import Span
from lohan.simulate.trace import write_trace
from lohan.train.report_numbers import binary_bytes, count, decimal_bytes, duration
from tests.unit.runs import spans, step_record, write_log, write_run

ROOT = Path(__file__).parents[2]
MAX_PAGE_BYTES = 2_000_000


class Page(HTMLParser):
    """A page as a browser takes it apart."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.text = ""
        self.blocks: list[tuple[str, str]] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.blocks.append((tag, ""))
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, text: str) -> None:
        if self.inside:
            self.blocks[-1] = (self.inside[-1], self.blocks[-1][1] + text)
        else:
            self.text += text

    @property
    def data(self) -> Any:
        return json.loads(self.blocks[1][1])

    @property
    def policy(self) -> str:
        return next(a["content"] or "" for tag, a in self.tags if a.get("http-equiv") == "Content-Security-Policy")


def report(folder: Path) -> Page:
    assert main(["report", str(folder)]) == 0
    return Page(folder / "report.html")


# -------------------------------------------------------------------- numbers


def test_the_page_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "first"))
    records, columns = [step_record(step) for step in range(1, 37)], page.data["columns"]
    for name in ("step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s", "peak_host_bytes"):
        assert columns[name] == pytest.approx([record[name] for record in records], rel=1e-6)
    assert columns["total_write_bytes"][-1] == sum(record["ssd_write_bytes"] for record in records)
    assert columns["share of optimizer"][7] == pytest.approx(1 / 7)
    assert page.data["evaluations"] == [[12, pytest.approx(5 / 12)], [24, pytest.approx(5 / 24)], [36, pytest.approx(5 / 36)]]
    assert page.data["budgets"] == {"host": 48 * 2**20, "device": 40 * 2**20}


def test_the_headline_has_the_numbers_of_the_log(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "first")).text
    records = [step_record(step) for step in range(1, 37)]
    tokens, written = (sum(record[name] for record in records) for name in ("tokens", "ssd_write_bytes"))
    assert f"{records[0]['loss']:.4f} → {records[-1]['loss']:.4f}" in text
    assert f"lowest {5 / 36:.4f} after step 36" in text
    assert "tiny-llama" in text and "36 of 100" in text and "35 committed" in text
    assert f"{sum(record['grad_norm'] > 1 for record in records)} clipped" in text
    assert f"{tokens:,}" in text and f"{written / 1e9:.2f} GB" in text
    assert f"{written / tokens * 1e6 / 1e9:.0f} GB per million tokens" in text
    assert "45.0 MiB" in text and "94% of 48.0 MiB" in text and "45% of 40.0 MiB" in text


def test_the_timeline_has_the_bars_of_the_trace(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "first"))
    measured, simulated = page.data["timelines"]
    assert [measured["name"], simulated["name"]] == ["measured", "simulated"]
    start_us, end_us, name, nbytes, num_ops, *numbers = measured["tracks"][1]["bars"][2]
    assert (start_us, end_us, nbytes, num_ops) == (4_400_000, 6_050_000, 3_000_000, 1)
    assert (measured["names"][name], numbers) == ("read weights unit #", [4])


def test_settings_samples_and_notes_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", run_name="all chats", weight_decay=0.0)
    (folder / "trace.json").write_text('{"traceEvents": [')
    page = report(folder)
    assert "all chats" in page.text and "a drive read 36 units" in page.text
    assert "2 at their defaults" in page.text and page.text.index("learning_rate") < page.text.index("weight_decay")
    assert "trace.json could not be read" in page.text
    assert page.data["timelines"] == []


@pytest.mark.parametrize(
    "words, expected",
    [
        (binary_bytes(47.13 * 2**20), "47.1 MiB"),
        (binary_bytes(1023), "1,023 B"),
        (decimal_bytes(4.3125e9), "4.31 GB"),
        (decimal_bytes(0.4), "0 B"),
        (count(18_288), "18,288"),
        (count(1_234_567), "1.23 million"),
        (duration(0.0262), "26.2 ms"),
        (duration(1.944), "1.94 s"),
        (duration(3 * 3600 + 59.7), "3 h 1 min"),
        (duration(55 * 3600), "2 d 7 h"),
    ],
)
def test_numbers_for_people(words: str, expected: str) -> None:
    assert words == expected


# -------------------------------------------------------------------- safety


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "first"))
    assert not [attributes for _, attributes in page.tags if attributes.keys() & {"src", "href", "srcset", "action", "style"}]
    addresses = set(re.findall(r"\w+://[\w./-]+", page.source))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\b[ (]|innerHTML|eval\(", page.source)
    assert page.policy.startswith("default-src 'none';")
    assert "unsafe" not in page.policy


def test_only_our_own_script_may_run(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "first"))
    (_, style), _, (_, script) = page.blocks
    for kind, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in page.policy


EVIL = """</script></style></pre><script>alert(1)</script><img src=x onerror=alert(1)>"'&amp;<!--\u2028\ud800"""


def test_texts_of_a_run_stay_texts(tmp_path: Path) -> None:
    plain = EVIL.replace("/", "|").removesuffix("\ud800")
    folder = write_run(tmp_path / plain, run_name=plain, model_name_or_path=plain)
    records = [step_record(1), {"step": 1, "prompt": EVIL, "sample": EVIL}, {"step": 1, "eval_loss": 1.0, f"eval_{EVIL}": 2.0}]
    write_log(folder, records)
    write_trace({EVIL: [Span(0, one.lane, EVIL, 0.0, 1.0, 0.0, 1) for one in spans(1, 1.0)]}, folder / "trace.json")
    page = report(folder)
    assert [tag for tag, _ in page.blocks] == ["style", "script", "script"]
    tags = {tag for tag, _ in page.tags}
    assert "img" not in tags and {"table", "pre", "h1"} <= tags
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    # title, heading, folder, model, timeline, prompt, sample, evaluation, two settings
    assert page.text.count("<img src=x onerror=alert(1)>") == 10
    assert page.data["timelines"][0]["name"] == EVIL


# -------------------------------------------------------------------- any run


def test_one_step_makes_a_page(tmp_path: Path) -> None:
    page = report(write_log(tmp_path, [{"step": 1, "loss": 8.5}], '{"step": 2, "lo'))
    assert page.data["columns"]["loss"] == [8.5]
    assert "8.5000" in page.text and "line 2" in page.text


def test_a_loss_that_is_never_finite_makes_a_page(tmp_path: Path) -> None:
    page = report(write_log(tmp_path, [step_record(1, loss=None, grad_norm=float("nan"))]))
    assert "loss" not in page.data["columns"]


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 1)
    records = [step_record(step) for step in range(1, 10_001)]
    for step in range(20, 10_001, 20):
        records.append({"step": step, "eval_loss": 1 / step})
        records.append({"step": step, "prompt": "word " * 2000, "sample": "word " * 2000})
    records += [step_record(9_999, skipped=True)] * 5000
    records[5000]["loss"] = 123.25
    write_log(folder, records)
    write_trace({"measured": spans(10_000, 0.01), "simulated": spans(10_000, 0.01)}, folder / "trace.json")
    page = report(folder)
    assert 400_000 < len(page.source.encode()) < MAX_PAGE_BYTES
    assert max(page.data["columns"]["loss"]) == 123.25
    assert page.data["columns"]["step"][-1] == page.data["numSteps"] == 10_000
    assert "476 more are in log.jsonl" in page.text


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize("log", [None, "", '{"step": 1, "eval_loss": 2.0}\n'])
def test_a_folder_without_a_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], log: str | None) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    if log is not None:
        (folder / "log.jsonl").write_text(log)
    assert main(["report", str(folder)]) == 2
    assert f"output_dir={str(folder)!r}" in capsys.readouterr().err
    assert not (folder / "report.html").exists()


def test_an_unknown_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder. Name the output_dir" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["missing/page.html", "log.jsonl/page.html", "folder"])
def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    write_log(tmp_path, [step_record(1)])
    (tmp_path / "folder").mkdir()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / out)]) == 2
    assert "out=" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "folder"}


def test_the_page_goes_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "run", [step_record(1)])
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert (tmp_path / "page.html").as_uri() in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.jsonl"]


def test_the_command_imports_nothing_heavy(tmp_path: Path) -> None:
    write_log(tmp_path, [step_record(1)])
    code = (
        f"import sys; from lohan.cli import main; main(['report', {str(tmp_path)!r}]);"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_parts_of_the_page_are_installed() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lohan.train"]
    parts = [path.name for path in (ROOT / "lohan" / "train").iterdir() if path.suffix in (".js", ".css")]
    assert len(parts) == 3
    assert all(any(fnmatch(part, pattern) for pattern in patterns) for part in parts)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
TITLES = ["Loss", "Gradient norm", "Learning rate", "Throughput", "Step time", "Share of the step that each lane was busy",
          "Speed of light", "Host memory", "Device memory", "SSD traffic of all steps so far"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser to draw the page")
@pytest.mark.parametrize("num_steps", [1, 36])
def test_a_browser_draws_it(tmp_path: Path, num_steps: int) -> None:
    report(write_run(tmp_path / "run", num_steps))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *QUIET, f"--user-data-dir={tmp_path / 'browser'}"]
    command += ["--enable-logging=stderr", "--dump-dom", (tmp_path / "run" / "report.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    drawn = result.stdout.partition("<body>")[2].partition('<script type="application/json"')[0]
    assert re.findall(r"<h3>([\w ]+)</h3>", drawn)[: len(TITLES)] == TITLES
    lines = [path for path in re.findall(r'<path d="([^"]*)" class="series', drawn) if path]
    assert len(lines) == (0 if num_steps == 1 else 18)
    assert drawn.count('class="bars') == 6
    assert "NaN" not in drawn and "undefined" not in drawn
