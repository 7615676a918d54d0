"""From what a flag, a YAML file or a caller gives to the type of a setting. Strict: what is not clearly meant is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lohan.errors import OptionError

_TRUE, _FALSE, _NONE = ("true", "yes", "on"), ("false", "no", "off"), ("none", "null", "")


def convert(option: str, kind: str, value: object) -> object:
    """`value` as the type that `kind` spells, as in an annotation: `int`, `str | int | None`, `Sequence[str]`."""
    kinds = kind.split(" | ")
    if kinds == ["Sequence[str]"]:
        return _texts(option, value)
    if value is None or (isinstance(value, str) and value.lower() in _NONE):
        if "None" in kinds:
            return None
        raise OptionError(option, value, f"it has to be {_article(kinds[0])}", "Leave it out for its default")
    if "bool" in kinds and not ("str" in kinds and _is_other_text(value)):
        return _truth(option, value)
    if "str" in kinds and (isinstance(value, str) or value is False):
        return value or "no"  # which YAML reads as false
    if "float" in kinds:
        return _number(option, value)
    if "int" in kinds:
        return _whole(option, value)
    raise OptionError(option, value, f"it has to be {_article('str')}", "Write it in quotes if it is meant as text")


def _is_other_text(value: object) -> bool:
    return isinstance(value, str) and value.lower() not in (*_TRUE, *_FALSE)


def _truth(option: str, value: object) -> bool:
    if isinstance(value, str):
        value = True if value.lower() in _TRUE else False if value.lower() in _FALSE else value
    if not isinstance(value, bool):
        raise OptionError(option, value, "it has to be true or false", f"Write {option}: true, or --{option}")
    return value


def _number(option: str, value: object) -> float:
    """YAML takes 1e-5 for a text: it is meant as a number nevertheless."""
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except ValueError:
        pass
    raise OptionError(option, value, "it has to be a number", "Write it like 3, 0.5 or 2e-5")


def _whole(option: str, value: object) -> int:
    number = _number(option, value)
    if number != int(number):
        raise OptionError(option, value, "it has to be a whole number", "Write it like 8 or -1")
    return int(number)


def _texts(option: str, value: object) -> tuple[str, ...]:
    if value is None or value == "none" or value == ["none"]:
        return ()
    texts: Sequence[object] = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    for text in texts:
        if not isinstance(text, str) or not text:
            raise OptionError(option, value, f"{text!r} in it is not a text", "Give a list of texts, or the flag several times")
    return tuple(str(text) for text in texts)


def _article(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}[kind]
