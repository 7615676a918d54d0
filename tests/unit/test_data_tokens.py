"""Golden tokens and targets of each format, and what is refused, with where and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lohan.data import DataSettings, Example, TokenDataset, open_rows, show_masked, tokenize
from lohan.data.formats import ALPACA
from lohan.errors import OptionError
from tests.tiny_tokenizer import MARKED, PLAIN, tiny_tokenizer

USER, ASSISTANT, END, EOS = 284, 285, 287, 282
HELLO, WORLD, ANSWER, SKY, BLUE = 273, 260, 278, 280, 269
QUESTION = {"role": "user", "content": "hello world"}
REPLY = {"role": "assistant", "content": "answer blue"}
TURNS = [QUESTION, REPLY, {"role": "user", "content": "sky"}, {"role": "assistant", "content": "answer"}]
SHOWN = "<|user|>hello world<|end|><|assistant|>«answer blue<|end|>»<|user|>sky<|end|><|assistant|>«answer<|end|>»"
SHOWN_WHOLE = "<|user|>«" + SHOWN.replace("«", "").replace("»", "").removeprefix("<|user|>") + "»"


def made(tmp_path: Path, rows: list[dict[str, Any]], template: str | None = None, **settings: Any) -> TokenDataset:
    return tokenize(open_rows(rows), tiny_tokenizer(template), DataSettings(**settings), tmp_path / "tokens")


def text_of(example: Example) -> str:
    return show_masked(example, tiny_tokenizer(), color=False).split("\n", 1)[1]


def masked(example: Example, *given: int) -> list[int]:
    """The labels that there would be if the tokens at these places were no targets."""
    return [-100 if at in given else token for at, token in enumerate(example.input_ids.tolist())]


# ---------------------------------------------------------------- formats

GOLDEN = {
    "text": ({"text": "hello world"}, "hello« world<eos>»", [HELLO, WORLD, EOS]),
    "text that has ended": ({"text": "hello world<eos>"}, "hello« world<eos>»", [HELLO, WORLD, EOS]),
    "prompt": ({"prompt": "hello", "completion": " world"}, "hello« world<eos>»", [HELLO, WORLD, EOS]),
    "prompt of messages": (
        {"prompt": [QUESTION], "completion": [REPLY]},
        "<|user|>hello world<|end|><|assistant|>«answer blue<|end|>»",
        [USER, HELLO, WORLD, END, ASSISTANT, ANSWER, BLUE, END],
    ),
    "prompt of messages, plain completion": (
        {"prompt": [QUESTION], "completion": "answer"},
        "<|user|>hello world<|end|><|assistant|>«answer<|end|>»",
        [USER, HELLO, WORLD, END, ASSISTANT, ANSWER, END],
    ),
    "messages": (
        {"messages": TURNS},
        SHOWN_WHOLE,
        [USER, HELLO, WORLD, END, ASSISTANT, ANSWER, BLUE, END, USER, SKY, END, ASSISTANT, ANSWER, END],
    ),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"text": " world"}]}]},
        "<|user|>«hello world<|end|>»",
        [USER, HELLO, WORLD, END],
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "answer"}]},
        "<|user|>«hello<|end|><|assistant|>answer<|end|>»",
        [USER, HELLO, END, ASSISTANT, ANSWER, END],
    ),
    "Alpaca": (
        {"instruction": "hello", "input": "sky", "output": "answer"},
        "<|user|>hello\n\nsky<|end|><|assistant|>«answer<|end|>»",
        [USER, HELLO, 198, 198, SKY, END, ASSISTANT, ANSWER, END],
    ),
    "Alpaca without input": (
        {"instruction": "hello", "input": "", "output": "answer"},
        "<|user|>hello<|end|><|assistant|>«answer<|end|>»",
        [USER, HELLO, END, ASSISTANT, ANSWER, END],
    ),
    "tokens": ({"input_ids": [HELLO, WORLD]}, "hello« world»", [HELLO, WORLD]),
    "tokens and labels": (
        {"input_ids": [HELLO, WORLD, SKY], "labels": [HELLO, -100, SKY]},
        "hello world«sky»",
        [HELLO, WORLD, SKY],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(tmp_path: Path, name: str) -> None:
    row, shown, input_ids = GOLDEN[name]
    dataset = made(tmp_path, [row, row], PLAIN)
    assert len(dataset) == 2
    assert [example.input_ids.tolist() for example in dataset] == [input_ids] * 2
    assert text_of(dataset[1]) == shown
    assert dataset[-1].labels.tolist() == dataset[0].labels.tolist()
    with pytest.raises(IndexError):
        dataset[2]


@pytest.mark.parametrize("context", ["", "sky"])
def test_alpaca_without_a_chat_template(tmp_path: Path, context: str) -> None:
    dataset = made(tmp_path, [{"instruction": "hello", "input": context, "output": "answer"}])
    shown = text_of(dataset[0])
    assert shown.endswith("### Response:\n«answer<eos>»")
    assert ("### Input:\nsky\n\n### Response" in shown) == bool(context)
    assert shown.startswith(ALPACA.split("{")[0] + (", paired with an input" if context else ". Write"))


def test_a_text_field_of_another_name(tmp_path: Path) -> None:
    dataset = made(tmp_path, [{"story": "hello world", "messages": TURNS}], PLAIN, text_field="story")
    assert text_of(dataset[0]) == "hello« world<eos>»"
    assert dataset.notes == ("Columns that are not used: messages.",)
    with pytest.raises(OptionError, match="dataset_text_field='tale'.*columns story. Name one of these"):
        made(tmp_path, [{"story": "hello"}], text_field="tale")


def test_the_prompt_can_be_learnt_too(tmp_path: Path) -> None:
    rows = [{"prompt": "hello", "completion": " world"}]
    assert made(tmp_path, rows, completion_only_loss=False)[0].labels.tolist() == [HELLO, WORLD, EOS]


def test_a_token_across_the_end_of_the_prompt_belongs_to_the_answer(tmp_path: Path) -> None:
    dataset = made(tmp_path, [{"prompt": "hello wor", "completion": "ld"}])
    assert text_of(dataset[0]) == "hello« world<eos>»"
    assert "In 1 of 1 rows a token reaches from the prompt" in dataset.notes[0]
    assert made(tmp_path, [{"prompt": "hello", "completion": " world"}]).notes == ()


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else '' }}{{ mood }}" + PLAIN
    messages = [QUESTION, {"role": "assistant", "content": None, "tool_calls": []}, REPLY]
    for tools in ([{"name": "t"}], '[{"name": "t"}]'):
        dataset = made(tmp_path, [{"messages": messages, "tools": tools, "chat_template_kwargs": {"mood": "!"}}], template)
        assert text_of(dataset[0]).replace("«", "").startswith('[{"name": "t"}]!<|user|>')


# ---------------------------------------------------------------- what the assistant wrote


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "compared"])
def test_only_the_assistant(tmp_path: Path, template: str) -> None:
    dataset = made(tmp_path, [{"messages": TURNS}], template, assistant_only_loss=True)
    assert dataset[0].labels.tolist() == masked(dataset[0], 0, 1, 2, 3, 4, 8, 9, 10, 11)
    assert text_of(dataset[0]) == SHOWN


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "compared"])
def test_only_the_assistant_of_the_completion(tmp_path: Path, template: str) -> None:
    rows = [{"prompt": TURNS[:3], "completion": [*TURNS[3:], QUESTION]}]
    dataset = made(tmp_path, rows, template, assistant_only_loss=True)
    asked = SHOWN.replace("«", "", 1).replace("»", "", 1)
    assert text_of(dataset[0]) == asked + "<|user|>hello world<|end|>"


def test_an_end_token_behind_the_whole_conversation_is_the_last_turn_s(tmp_path: Path) -> None:
    template = PLAIN + "{% if not add_generation_prompt %}<eos>{% endif %}"
    dataset = made(tmp_path, [{"messages": TURNS}], template, assistant_only_loss=True)
    assert text_of(dataset[0]) == SHOWN.removesuffix("»") + "<eos>»"


def test_a_token_across_the_beginning_of_a_turn_is_the_assistant_s(tmp_path: Path) -> None:
    template = PLAIN.replace("<|assistant|>", "hello wor")
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": "ld sky"}]}]
    dataset = made(tmp_path, rows, template, assistant_only_loss=True)
    assert text_of(dataset[0]) == "<|user|>hello world<|end|>hello« world sky<|end|>»"
    assert "a token reaches from the prompt" in dataset.notes[0]


FORGETFUL = PLAIN.replace("{{ message.content }}<|end|>", "{{ message.content if loop.last else '...' }}<|end|>", 1)
OTHER_PROMPT = PLAIN.replace("{% if add_generation_prompt %}<|assistant|>", "{% if add_generation_prompt %}<|tool|>")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (FORGETFUL, TURNS, "writes a turn of the assistant differently when others follow"),
        (OTHER_PROMPT, TURNS, "prompt for an answer is not how it writes an answer"),
        (PLAIN, TURNS[1:], "the conversation begins with the assistant"),
    ],
)
def test_turns_that_cannot_be_told_apart(tmp_path: Path, template: str, messages: list[Any], reason: str) -> None:
    rows = [{"messages": TURNS[:2]}, {"messages": messages}]
    with pytest.raises(OptionError, match=f"assistant_only_loss=True.*row [12].*{reason}.*generation") as caught:
        made(tmp_path, rows, template, assistant_only_loss=True)
    assert "{% generation %}" in caught.value.remedy
    assert len(made(tmp_path, rows, template)) == 2  # everything is a target: nothing has to be told apart


# ---------------------------------------------------------------- length


LONG = [{"text": "hello world" * 3}, {"text": "hello"}, {"prompt": "", "text": "sky"}]


def test_too_long_is_cut_and_told(tmp_path: Path) -> None:
    dataset = made(tmp_path, LONG, max_length=4)
    assert [text_of(example) for example in dataset] == ["hello« worldhello world»", "hello«<eos>»", "sky«<eos>»"]
    assert dataset.notes == ("1 of 3 rows were longer than max_length=4 and were cut.",)


def test_too_long_is_split_and_told(tmp_path: Path) -> None:
    dataset = made(tmp_path, LONG, max_length=4, too_long="split")
    assert [text_of(example) for example in dataset][:2] == ["hello« worldhello world»", "hello« world<eos>»"]
    assert len(dataset) == 4 and "and were split" in dataset.notes[0]


def test_too_long_is_dropped_and_told(tmp_path: Path) -> None:
    dataset = made(tmp_path, LONG, max_length=4, too_long="drop")
    assert len(dataset) == 2 and "and were dropped" in dataset.notes[0]


def test_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="max_length=4: a list row 1 has 7 tokens. Set it to 7 or more"):
        made(tmp_path, LONG, max_length=4, too_long="error")
    assert len(made(tmp_path, LONG, max_length=7, too_long="error")) == 3


def test_examples_without_a_target_are_dropped_and_told(tmp_path: Path) -> None:
    rows = [{"prompt": "hello world", "completion": "sky"}, {"prompt": "hello", "completion": "sky"}]
    dataset = made(tmp_path, rows, max_length=2)
    assert [text_of(example) for example in dataset] == ["hello«sky»"]
    assert "1 examples without a target were dropped" in dataset.notes[1]
    # A label at the first token is nobody's target.
    rows = [{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [1, -100]}, {"input_ids": []}]
    with pytest.raises(OptionError, match="no row is left. 3 examples without a target"):
        made(tmp_path, rows)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": 7}, "row 2: `text` is a number, not a string"),
        ({"other": "a"}, "row 2: `text` is missing, not a string"),
        ({"messages": "hello"}, "`messages` is a string, not an array of messages"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["hello"]}, r"`messages\[0\]` is a string, not an object with role"),
        ({"messages": [QUESTION, {"speaker": "me"}]}, r"`messages\[1\]` has no role .it has speaker"),
        ({"messages": [{"role": "user", "content": 7}]}, "content of `messages.0.` is a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part that is not text"),
        ({"messages": [{"role": "ghost", "content": "hello"}]}, "template refuses the conversation: nobody is called ghost"),
        ({"messages": [QUESTION], "tools": "{"}, "`tools` is a string that is not JSON"),
        ({"messages": [QUESTION], "chat_template_kwargs": "x"}, "`chat_template_kwargs` is a string, not an object"),
        ({"prompt": "hello", "completion": None}, "`completion` is null, not an array of messages"),
        ({"instruction": "hello", "output": []}, "`output` is an array, not a string"),
        ({"input_ids": [1, "2"]}, "`input_ids` is not an array of numbers of tokens"),
        ({"input_ids": [1, -100]}, "`input_ids` is not an array of numbers of tokens"),
        ({"input_ids": [1, 2], "labels": [1, -1]}, "`labels` is not an array of numbers of tokens, or -100"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 labels"),
        ({"input_ids": [1, 2**31]}, "a token is not below 2147483648"),
    ],
)
def test_a_row_that_is_wrong(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    good = {
        "messages": {"messages": TURNS},
        "prompt": {"prompt": "a", "completion": "b"},
        "instruction": {"instruction": "a", "output": "b"},
        "input_ids": {"input_ids": [1, 2]},
    }.get(next(iter(row)), {"text": "a"})
    with pytest.raises(OptionError, match=f"dataset_name='a list': row 2: .*{complaint.removeprefix('row 2: ')}"):
        made(tmp_path, [good, row], PLAIN)
    assert not any(tmp_path.glob("tokens/*"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"mesages": 1}, "its columns are mesages. Did you mean 'messages' where it says 'mesages'"),
        ({"prompt": "a", "chosen": "b"}, "'completion' is missing for prompt and completion"),
        ({"Instruction": "a", "output": "b"}, "Did you mean 'instruction'"),
        ({"document": "a"}, "its columns are document. Known are input_ids; messages; conversations; prompt.completion"),
    ],
)
def test_columns_that_fit_nothing(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        made(tmp_path, [row])


@pytest.mark.parametrize(
    ("row", "template", "settings", "complaint"),
    [
        ({"messages": TURNS}, None, {}, "chat_template_path=None: .*has no chat template. Set it to a Jinja file"),
        ({"text": "a"}, PLAIN, {"assistant_only_loss": True}, "assistant_only_loss=True: the rows are text"),
        ({"prompt": "a", "completion": "b"}, PLAIN, {"assistant_only_loss": True}, "assistant_only_loss=True: .*plain text"),
        ({"messages": TURNS}, PLAIN, {"completion_only_loss": True}, "completion_only_loss=True: .*messages.*no prompt"),
        ({"text": "a"}, PLAIN, {"max_length": 1}, "max_length=1"),
        ({"text": "a"}, PLAIN, {"too_long": "cut"}, "too_long='cut'.*truncate, split, drop, error"),
        ({"text": "a"}, PLAIN, {"packing": True, "group_by_length": True}, "group_by_length=True"),
        ({"text": "a"}, PLAIN, {"text_field": ""}, "dataset_text_field=''"),
    ],
)
def test_settings_that_cannot_work(
    tmp_path: Path, row: dict[str, Any], template: str | None, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(OptionError, match=complaint):
        made(tmp_path, [row], template, **settings)


def test_data_without_rows(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there are no rows in it"):
        made(tmp_path, [])


def test_a_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    dataset = tokenize(open_rows([{"text": "hello world"}]), tokenizer, DataSettings(), tmp_path)
    assert dataset[0].input_ids.tolist() == [HELLO, WORLD]
    assert dataset.notes == ("The tokenizer has no end token, so no text is ended by one.",)


# ---------------------------------------------------------------- showing


def test_colours_on_a_terminal(tmp_path: Path) -> None:
    example = made(tmp_path, [{"prompt": "hello\x1b[2J", "completion": "sky"}])[0]
    shown = show_masked(example, tiny_tokenizer(), color=True)
    assert "\x1b[2mhello\N{REPLACEMENT CHARACTER}[2J\x1b[0m\x1b[32msky<eos>\x1b[0m" in shown
    assert shown.startswith("7 tokens, 2 of them targets")
