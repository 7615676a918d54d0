"""A model, data, settings or a folder from somebody else: nothing in it runs, nothing of ours leaves, nothing blows up."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lohan.data.sources import open_rows
from lohan.errors import LohanError, ModelError, OptionError
from lohan.keep.checkpoint import find_checkpoint
from lohan.model.load import open_model
from lohan.model.safetensors_file import MAX_HEADER_BYTES, read_header
from lohan.plan.plan import Plan
from lohan.ssd.file_store import FileStore
from lohan.train.arguments import read_yaml
from lohan.train.checks import check_model, open_tokenizer
from lohan.train.log import read_log
from tests.unit.training import make_model, on_a_drive

DEEP = "[" * 200_000
EVIL = "import pathlib\npathlib.Path(__file__).with_name('it-ran').touch()\nclass Evil: pass\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder that opens, with code beside it that must not run."""
    folder = make_model(tmp_path / "model")
    (folder / "evil.py").write_text(EVIL)
    return folder


@pytest.fixture
def drive() -> Iterator[Path]:
    with on_a_drive() as folder:
        yield folder


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def configure(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **fields)


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def header(text: str, data: bytes = b"") -> Callable[[Path], object]:
    """The weights as a file with this header."""
    return write("model.safetensors", len(text).to_bytes(8, "little") + text.encode() + data)


def linked(name: str) -> Callable[[Path], object]:
    """The file is a link to what is private."""

    def link(folder: Path) -> None:
        (folder.parent / "private").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "private")

    return link


def huge(name: str) -> Callable[[Path], object]:
    """A file of a terabyte, none of which is on the drive."""

    def make(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(2**40)

    return make


def indexed(weight_map: object) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return make


def into_every_shape(number: str) -> str:
    """A header within its limit whose shapes multiply for hours."""
    return '{"a":{"dtype":"F32","shape":[' + ",".join([number] * 3000) + '],"data_offsets":[0,8]}}'


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "kernel from the hub": (
        configure(_attn_implementation="someone/kernel"),
        "_attn_implementation 'someone/kernel' needs code",
    ),
    "kernel for a part": (configure(attn_implementation={"text_config": "someone/kernel:run"}), "needs code from the hub"),
    "kernel for experts": (configure(experts_implementation="someone/kernel"), "experts_implementation 'someone/kernel' needs"),
    "a layer too many": (configure(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, but the weight files hold"),
    "more than there is memory": (configure(hidden_size=2**44, head_dim=8), "no model can be made from it"),
    "no activation": (configure(hidden_act="os.system"), "no model can be made from it"),
    "no dtype": (configure(dtype="__import__"), "no model can be made from it"),
    "model type that is no text": (configure(model_type=["llama"]), "model_type ['llama'] is unknown"),
    "deep configuration": (write("config.json", DEEP), "config.json: the file is not valid JSON"),
    "configuration that is a list": (write("config.json", "[1]"), "config.json: the file is not a JSON object"),
    "huge configuration": (huge("config.json"), "are more than the"),
    "huge index": (lambda f: (indexed({})(f), huge("model.safetensors.index.json")(f)), "are more than the"),
    "huge tokenizer": (huge("tokenizer.model"), "tokenizer.model: its 1099511627776 bytes are more than"),
    "deep header": (header(DEEP), "the safetensors header is not valid JSON"),
    "header bomb": (header("{" + " " * MAX_HEADER_BYTES + "}"), "longer than the"),
    "header of twins": (header("{" + ",".join(['"a":1,"b":1'] * 300_000) + "}"), "names a, b more than once"),
    "shapes that multiply for hours": (header(into_every_shape("9" * 4000)), "does not fill its bytes"),
    "many dimensions": (header(into_every_shape("1"), bytes(8)), "does not fill its bytes"),
    "dtype that is a list": (
        header('{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "stored as ['F32']",
    ),
    "truth for a number": (header('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', bytes(4)), "does not fill"),
    "traversal": (indexed({"a": "../../private.safetensors"}), "not the plain name"),
    "absolute path": (indexed({"a": "/etc/shadow.safetensors"}), "not the plain name"),
    "zero byte": (indexed({"a": "a\0b.safetensors"}), "not the plain name"),
    "map that is a list": (indexed(["a"]), "not an index of weight files"),
    "weights that are a link": (linked("model.safetensors"), "outside the model's folder"),
    "tokenizer that is a link": (linked("tokenizer_extra.json"), "tokenizer_extra.json is a link to"),
    "template that is a link": (linked("chat_template.jinja"), "chat_template.jinja is a link to"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "lohan does not read pickles"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malicious_model_is_refused_with_the_reason(name: str, model: Path) -> None:
    """By what `lohan train` looks at before anything is read, and by the engine."""
    open_model(model)
    spoil, reason = REFUSED[name]
    spoil(model)
    with pytest.raises(ModelError) as refused:
        open_model(model)
    assert reason in str(refused.value) and len(str(refused.value)) < 1000
    if name not in ("more than there is memory", "no activation", "no dtype"):
        with pytest.raises(ModelError):
            check_model(model)


def test_code_beside_a_model_does_not_run(model: Path) -> None:
    change(model / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}, tokenizer_class="Evil")
    open_model(model)
    with pytest.raises(ModelError, match="tokenizer cannot be opened.*custom code"):
        open_tokenizer(model)
    change(model / "config.json", model_type="evil")
    with pytest.raises(ModelError, match="needs code that comes with the model, which lohan does not run"):
        open_model(model)
    assert not (model / "it-ran").exists() and "evil" not in sys.modules


def test_a_chat_template_reaches_nothing_of_python(model: Path) -> None:
    """It is a program of somebody else: in a sandbox."""
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (model / "chat_template.jinja").write_text(reach)
    tokenizer = open_tokenizer(model)
    assert tokenizer is not None and reach in str(tokenizer.chat_template)
    with pytest.raises(Exception, match="unsafe|is undefined") as stopped:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert stopped.type.__module__.startswith("jinja2")


def test_what_was_saved_holds_nothing_that_was_linked(model: Path) -> None:
    """Inside of the folder a link is as good as a file."""
    (model / "vocab_inside.json").symlink_to("config.json")
    assert "vocab_inside.json" in open_model(model).side_files
    assert all(load_file(model / "model.safetensors"))


# -------------------------------------------------------------------- settings, data, plans, logs


@pytest.mark.parametrize(
    "text, reason",
    [
        ("seed: [" * 5_000, "it is not YAML"),
        ("a: &a [x,x]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", "has an alias"),
        ("when: 2001-99-99\n", "it is not YAML"),
        (f"seed: {'9' * 5000}\n", "it is not YAML"),
        ("? {a: 1}\n: 2\n", "it is not YAML"),
        ("seed: !!python/object/apply:os.system [true]\n", "it is not YAML"),
        ("".join(f"k{n}: 1\n" for n in range(2000)) + "k7: 2\n", "k7 is set twice"),
    ],
    ids=["deep", "bomb", "date", "number", "key", "object", "wide"],
)
def test_a_malicious_settings_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(OptionError, match=f"config=.*{reason}"):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
@pytest.mark.parametrize("row", [DEEP, "9" * 5000], ids=["deep", "number"])
def test_malicious_rows_are_told_with_their_line(name: str, row: str, tmp_path: Path) -> None:
    good = '{"text": "a"}'
    (tmp_path / name).write_text(f"{good}\n{row}\n" if name.endswith("l") else f"[{good},\n{row}]")
    with pytest.raises(OptionError, match=f"{name}.*line 2"):
        list(open_rows(tmp_path / name).read())


def test_a_data_set_with_a_script_is_refused_and_the_script_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text(EVIL)
    with pytest.raises(OptionError, match="dataset_name=.*holds no file"):
        open_rows(tmp_path / "evil")
    monkeypatch.chdir(tmp_path / "evil")  # by a name that the hub might know, and that is a script here
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OptionError, match="dataset_name='evil'"):
        open_rows("evil")
    assert not (tmp_path / "evil" / "it-ran").exists()


@pytest.mark.parametrize("text", [DEEP, "[]", "{}", '{"units": 3}', '{"units": [], "boundaries": ["ram"]}', "9" * 5000])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(OptionError, match="plan"):
        Plan.load(tmp_path / "plan.json")


def test_broken_lines_of_a_log_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{DEEP}\n{"9" * 5000}\n[]\n{{"step": 2}}\n')
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("text", [DEEP, "{}", "[]", '{"manifest": 1}', '{"manifest": {"format": 2}}', "9" * 5000, "\0"])
def test_what_is_no_checkpoint_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OptionError, match="resume_from_checkpoint="):
        find_checkpoint(tmp_path)


# -------------------------------------------------------------------- folders and files of ours


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another user's": (lambda folder: os.chown(folder, 12345, -1), "belongs to user 12345"),
    "writable by all": (lambda folder: folder.chmod(0o777), "is writable by other users"),
    "writable by a group": (lambda folder: folder.chmod(0o770), "is writable by other users"),
    "a link": (lambda folder: (folder.rename(folder.with_name("real")), folder.symlink_to("real")), "is a link, not a folder"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_store_is_not_put_where_others_can_read_or_change_it(case: str, drive: Path) -> None:
    folder = drive / "store"
    folder.mkdir(mode=0o700)
    spoil, reason = FOLDERS[case]
    if case == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    spoil(folder)
    for unlinked in (False, True):
        with pytest.raises(OptionError, match=f"ssd=.*{reason}"):
            FileStore.create([folder], 4096, unlinked=unlinked)
    assert list(folder.iterdir()) == []


def test_a_file_of_the_store_that_is_a_link_is_not_followed(drive: Path) -> None:
    (drive / "private").write_bytes(b"mine")
    (drive / "store").symlink_to(drive / "private")
    with pytest.raises(OptionError, match="ssd="):
        FileStore.create([drive], 4096)
    assert (drive / "private").read_bytes() == b"mine"


def test_what_a_run_writes_of_weights_is_for_its_owner_alone(drive: Path) -> None:
    before = os.umask(0)
    try:
        FileStore.create([drive / "new"], 4096).close()
        spill = FileStore.create([drive / "new"], 4096, unlinked=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((drive / "new").stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in (drive / "new").iterdir()} == {"store": 0o600}
    spill.close()


def test_all_refusals_are_errors_of_one_kind() -> None:
    assert issubclass(ModelError, LohanError) and issubclass(OptionError, LohanError)
    with pytest.raises(ModelError):
        read_header(Path(__file__))
