"""What a model is going to see of an example, with its targets marked: green on a terminal, between « and » elsewhere."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from lohan.data.dataset import Example
from lohan.data.encoding import IGNORED

_TARGET, _GIVEN, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show_masked(example: Example, tokenizer: Any, color: bool) -> str:
    """The text of the example after a line that counts its tokens. Data cannot send commands to the terminal."""
    masked = [at == 0 or bool(label == IGNORED) for at, label in enumerate(example.labels)]  # nothing comes before the first
    parts = []
    for given, run in groupby(zip(example.input_ids.tolist(), masked, strict=True), key=lambda pair: pair[1]):
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", tokenizer.decode([token for token, _ in run]))
        if color:
            parts.append(f"{_GIVEN if given else _TARGET}{text}{_PLAIN}")
        else:
            parts.append(text if given else f"«{text}»")
    how = f"{_TARGET}green{_PLAIN}" if color else "between « and »"
    return f"{len(masked)} tokens, {masked.count(False)} of them targets ({how}):\n{''.join(parts)}"
