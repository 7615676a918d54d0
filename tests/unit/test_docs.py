"""The documents say what is so: quotes are in the code, files exist, tables are complete, commands and programs run."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lohan import SGD, AdamW, Engine, Plan
from lohan.cli import COMMANDS, main
from lohan.model.shape import ModelShape, SiteShape, UnitKind, lay_out
from lohan.plan.plan import UnitPlan, Update
from lohan.report import StepReport
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Sizes, SlotTable
from tests.unit.training import chats, make_model, on_a_drive, write_jsonl

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
    missing = {name for name in named if not (ROOT / name).exists()}
    missing |= {target for target in re.findall(r"\]\(([^)#:]+)\)", text) if not (document.parent / target).exists()}
    assert not missing


def test_every_guide_can_be_found_from_the_readme() -> None:
    assert {f"docs/{path.name}" for path in DOCUMENTS[1:]} <= set(re.findall(r"\]\(([^)#:]+)\)", README.read_text()))


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
    methods = {f"Engine.{name}" for name, _ in inspect.getmembers(Engine, inspect.isfunction) if name[0] != "_"}
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


# -------------------------------------------------------------------- commands and programs

COMMAND = re.compile(r"^    (?:\.venv/bin/)?lohan (\w+ .*?)(?:  +#.*| > .*)?$", re.MULTILINE)
UNITS = re.compile(r"# (?:[KMGT]i?B)\b")
IN_SMALL = {"500": "2", "100": "2", "50": "1", "checkpoint-500": "checkpoint-2", "24GiB": "64MiB"}
IN_SMALL |= {"MODEL": "my-model", "DATA.jsonl": "chats.jsonl"}
"""words of a command, and of a path in one -> what a test takes instead"""
NOT_RUN = ("doctor",)
"""commands that take long and have tests of their own: their words are looked at"""
WITH_PROGRAMS = ("train.md", "export.md")
"""guides whose programs nobody else runs"""
FIRST = "train --model_name_or_path my-model --dataset_name chats.jsonl --output_dir runs/first"


def commands(document: Path) -> list[str]:
    """What is typed behind `lohan`, in a document's order."""
    return COMMAND.findall(document.read_text())


def words_of(command: str, drive: Path) -> list[str]:
    """The words of a command, in small, its drives below `drive`."""
    words = []
    for word in shlex.split(command):
        word = re.sub(r"^/(nvme\d|backup)/", rf"{drive}/\1/", word)
        words.append("/".join(IN_SMALL.get(part, part) for part in word.split("/")))
    return words


@pytest.fixture(scope="module")
def model_and_data() -> Iterator[Path]:
    with on_a_drive() as folder:
        make_model(folder / "my-model")
        settings = json.loads((folder / "my-model" / "config.json").read_text())
        (folder / "my-model" / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 2048}))
        write_jsonl(folder / "chats.jsonl", chats(8))
        write_jsonl(folder / "held-out.jsonl", chats(4))
        yield folder


@pytest.fixture
def drive(model_and_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with what the guides speak of, beside the checkout: /tmp may be tmpfs, which is no drive."""
    with on_a_drive() as folder, monkeypatch.context() as patch:
        shutil.copytree(model_and_data, folder, dirs_exist_ok=True)
        (folder / "demo").symlink_to(ROOT / "demo")
        for disk in ("nvme0", "nvme1", "backup"):
            (folder / disk).mkdir()
        patch.chdir(folder)
        yield folder


def run_command(command: str, drive: Path) -> None:
    """As it is typed by somebody who has trained `runs/first`; a training begins anew, unless it goes on from a checkpoint."""
    words = words_of(command, drive)
    if words[0] in NOT_RUN:
        assert words[0] in COMMANDS
        return
    if words[0] == "train" and "--resume_from_checkpoint" not in words:
        for path in [drive / "runs", *drive.glob("nvme*/*"), *drive.glob("backup/*")]:
            shutil.rmtree(path, ignore_errors=True)
    elif words[0] != "train" and not (drive / "runs").exists():
        assert main(FIRST.split()) == 0
    assert main(words) == 0, command


def test_words_of_a_command_are_taken_apart(drive: Path) -> None:
    text = '    lohan report runs/a   # a page\n    lohan doctor --json > out.json\n    .venv/bin/lohan generate a "b  c"\n'
    assert COMMAND.findall(text) == ["report runs/a", "doctor --json", 'generate a "b  c"']
    assert words_of("train --ssd /nvme0/a --save_steps 500", drive) == [
        "train",
        "--ssd",
        f"{drive}/nvme0/a",
        "--save_steps",
        "2",
    ]


@pytest.mark.parametrize("document", DOCUMENTS[1:], ids=lambda document: document.name)
def test_what_is_typed_runs(document: Path, drive: Path) -> None:
    """Commands, then programs; a block of YAML is the file that it says it is."""
    for block in blocks(document, "yaml"):
        name, _, text = block.partition("\n")
        Path(name.removeprefix("# ")).write_text(re.sub(r"/(nvme\d)/", rf"{drive}/\1/", text))
    if not Path("run.yaml").exists():
        Path("run.yaml").write_text("model_name_or_path: my-model\ndataset_name: chats.jsonl\noutput_dir: runs/first\n")
    for command in commands(document):
        run_command(command, drive)
    names: dict[str, object] = {}
    for program in blocks(document, "python") if document.name in WITH_PROGRAMS else ():
        exec(compile(re.sub(r"=100\b", "=2", program), document.name, "exec"), names)


def test_all_of_the_readme_runs(drive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it shows as output is what is printed, but for the numbers; losses come close on any processor."""
    losses = re.compile(r"(?:loss|evaluation) ([\d.]+)")
    parts = re.findall(rf"```python\n([^`]*)```|({COMMAND.pattern})", README.read_text(), re.MULTILINE)
    num_compared = 0
    for program, typed, command in parts:
        capsys.readouterr()
        if program:
            exec(compile(program, "README.md", "exec"), {})
        else:
            run_command(command, drive)
        if expected := output_of(program or typed):
            got = "\n".join(line for line in capsys.readouterr().out.split("\n") if not line.endswith(" s so far"))
            assert plain(got).split("\n") == plain(expected).split("\n")
            expected_losses = [float(x) for x in losses.findall(expected)]
            assert [float(x) for x in losses.findall(got)] == pytest.approx(expected_losses, rel=0.02)
            num_compared += 1
    assert num_compared == 2 and Path("out/model.safetensors").stat().st_size > 0


def output_of(typed: str) -> str:
    """The block of output that the README shows directly behind a program or a command."""
    behind = README.read_text().partition(typed)[2]
    shown = re.match(r"(?:```)?\n+```text\n(.*?)^```$", behind, re.DOTALL | re.MULTILINE)
    return shown[1] if shown else ""


def plain(text: str) -> str:
    """Without numbers and their units."""
    return UNITS.sub("# B", NUMBER.sub("#", re.sub(r"(?<=\d),(?=\d)", "", text)))


def test_every_flag_that_is_named_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        try:
            main([name, "--help"])
        except SystemExit as ended:
            assert ended.code == 0
    known = set(FLAG.findall(capsys.readouterr().out))
    named = {(path.name, flag) for path in DOCUMENTS for flag in FLAG.findall(path.read_text()) if path not in NO_GUIDES}
    assert {(name, flag) for name, flag in named if flag not in known} <= OTHER_FLAGS


FLAG = re.compile(r"(?<![\w-])--([a-z]\w*)")
NO_GUIDES = (ROOT / "docs" / "RESULTS.md", ROOT / "docs" / "LOG.md")
OTHER_FLAGS = {("demo.md", "out"), ("demo.md", "per_kind"), ("demo.md", "layers"), ("demo.md", "hidden_size")}
"""of programs of the repository that are no commands"""
