"""The documents say what is so: quotes are in the code, files exist, tables are complete, and the README's example runs."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lohan import SGD, AdamW, Engine, Plan
from lohan.model.shape import ModelShape, SiteShape, UnitKind, lay_out
from lohan.plan.plan import UnitPlan, Update
from lohan.report import StepReport
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Sizes, SlotTable

ROOT = Path(__file__).parents[2]
README, HOW, OPTIONS = ROOT / "README.md", ROOT / "docs" / "how-it-works.md", ROOT / "docs" / "options.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
OMISSION = "...\n"
"""a line of a quote that stands for lines left out"""
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


# -------------------------------------------------------------------- quotes and names


def find_quote(quote: str) -> None:
    """ValueError unless the file in the first line has the parts of a quote, whole lines, one behind the other."""
    name, _, rest = quote.partition("\n")
    source, position = (ROOT / name.removeprefix("# ")).read_text(), 0
    for part in rest.split(OMISSION):
        position = source.index(f"\n{part}", position) + len(part)


@pytest.mark.parametrize("quote", blocks(HOW, "python"), ids=lambda quote: quote.partition("\n")[0])
def test_what_is_quoted_is_in_the_code(quote: str) -> None:
    try:
        find_quote(quote)
    except ValueError:
        pytest.fail(f"docs/how-it-works.md quotes what is not in the code (any more); quote it again:\n{quote}")


def test_a_wrong_quote_is_noticed() -> None:
    first, second = "BUFFER_ALIGN = 4096\n", "class UnitKind(Enum):\n"
    find_quote(f"# lohan/model/shape.py\n{first}{OMISSION}{second}")
    for wrong in (first.replace("4096", "512"), f"{second}{OMISSION}{first}", first + second):
        with pytest.raises(ValueError):
            find_quote(f"# lohan/model/shape.py\n{wrong}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"\b(?:lohan|tests|benchmarks|docs)/[\w/.-]*\w\.(?:py|md|cpp|sh)\b", text)
    named += [target for target in re.findall(r"\]\(([^)#:]+)\)", text) if document == README]
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing


def test_commands_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    used = set(re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"setup", "test"} <= used <= targets


# -------------------------------------------------------------------- options

DESCRIBED: dict[str, Callable[..., Any]] = {
    "Engine": Engine,
    "Engine.step": Engine.step,
    "Engine.evaluate": Engine.evaluate,
    "Engine.generate": Engine.generate,
    "Engine.save_pretrained": Engine.save_pretrained,
    "Engine.save_state": Engine.save_state,
    "Engine.drain": Engine.drain,
    "Engine.measure_lanes": Engine.measure_lanes,
    "Engine.write_trace": Engine.write_trace,
    "Engine.read_parameter": Engine.read_parameter,
    "AdamW": AdamW,
    "SGD": SGD,
    "Plan": Plan,
    "UnitPlan": UnitPlan,
    "StepReport": StepReport,
}


def described() -> dict[str, list[tuple[str, str]]]:
    """For each heading of docs/options.md: names and defaults."""
    found = {}
    for section in re.split(r"^##+ ", OPTIONS.read_text(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `(\**\w+)` \| `?(.+?)`? \|", section, re.MULTILINE)
        found[section.partition("\n")[0]] = rows
    return found


def declared(what: Callable[..., Any]) -> list[tuple[str, str]]:
    """Names and defaults in the code."""
    parameters = [p for p in inspect.signature(what).parameters.values() if p.name != "self"]
    names = [("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters]
    return [(n, "required" if p.default is p.empty else _plain(p.default)) for n, p in zip(names, parameters, strict=True)]


def _plain(value: object) -> str:
    return str(value) if isinstance(value, (Tier, Update)) else repr(value)


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_option_is_described(name: str) -> None:
    assert described()[name] == declared(DESCRIBED[name])


def test_everything_public_is_described() -> None:
    methods = {f"Engine.{name}" for name, value in vars(Engine).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods - {"Engine.close"} == {name for name in DESCRIBED if name.startswith("Engine.")}
    assert described().keys() == DESCRIBED.keys()
    assert all(dataclasses.is_dataclass(DESCRIBED[name]) for name in ("AdamW", "SGD", "Plan", "UnitPlan", "StepReport"))


# -------------------------------------------------------------------- what was run


def small_schedule() -> Schedule:
    """The one in docs/how-it-works.md: as the text before it says."""
    units = tuple(lay_out(f"layers.{i}", UnitKind.MODULE, [("weight", (64, 64), True, True, 0)]) for i in range(3))
    shape = ModelShape(units, tuple(SiteShape(unit.name, unit.kind, (i,)) for i, unit in enumerate(units)))
    unit = UnitPlan(update=Update.IMMEDIATE)
    plan = Plan(units=(unit,) * 3, boundaries=(Tier.HOST,) * 3, weight_slots=2, gradient_slots=2, state_slots=1)
    sizes = Sizes(weight=2, state_planes=(2, 4, 4))
    table = SlotTable(shape, plan, sizes, [4096] * 3, on_host=True, sums=False)
    return ScheduleBuilder(shape, plan, sizes, table, on_host=True, sums=False).build(Call(Mode.TRAIN))


def test_the_whole_schedule_is_what_the_builder_builds() -> None:
    schedule, lines = small_schedule(), []
    for op in schedule.ops:
        waits = ", ".join(map(str, op.waits)) or "-"
        written = ", ".join(dict.fromkeys(schedule.slots[access.slot].name for access in op.writes))
        lines.append(f"{op.index:2}  {op.lane.value:9}  {op.kind.value} {op.unit}".ljust(34) + f"{waits:5}{written}".rstrip())
    assert blocks(HOW, "text") == ["\n".join(lines) + "\n"]


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory beside the checkout: /tmp may be tmpfs, which is no drive."""
    scratch = ROOT / ".bench"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder, monkeypatch.context() as patch:
        patch.chdir(folder)
        yield Path(folder)


def test_the_example_of_the_readme_runs(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its output is the one that is printed there, but for the numbers; losses come close on any processor."""
    (code,), (expected,) = blocks(README, "python"), blocks(README, "text")
    exec(compile(code, "README.md", "exec"), {})
    got = capsys.readouterr().out
    assert NUMBER.sub("#", got) == NUMBER.sub("#", expected)
    losses = re.compile(r"(?:loss|evaluation) ([\d.]+)")
    assert [float(x) for x in losses.findall(got)] == pytest.approx([float(x) for x in losses.findall(expected)], rel=0.02)
    assert (drive / "out" / "model.safetensors").stat().st_size > 0
