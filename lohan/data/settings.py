"""What data is turned into. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.errors import OptionError

TOO_LONG = ("truncate", "split", "drop", "error")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """From rows to tokens, and from tokens to batches."""

    max_length: int = 1024
    """tokens of the longest example; of a packed row, with packing"""
    too_long: str = "truncate"
    """what becomes of a longer example: `truncate` at the end, `split` into several, `drop` (all three are told), `error`"""
    completion_only_loss: bool | None = None
    """only tokens of the completion are targets; None: where there is a prompt"""
    assistant_only_loss: bool = False
    """only tokens that the assistant writes are targets"""
    text_field: str = "text"
    """the column of plain text; the option is called `dataset_text_field`"""
    packing: bool = False
    """several examples in one row, each blind to the others"""
    group_by_length: bool = False
    """examples of similar length share a batch, so that less is padded"""
    seed: int = 0
    """of the order"""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise OptionError("max_length", self.max_length, "a target needs a token before it", "Set it to 2 or more")
        if self.too_long not in TOO_LONG:
            raise OptionError("too_long", self.too_long, "there is no such choice", f"Choose one of {', '.join(TOO_LONG)}")
        if self.packing and self.group_by_length:
            raise OptionError(
                "group_by_length",
                True,
                "packed rows are all about equally long",
                "Leave out one of packing and group_by_length",
            )
        if not self.text_field:
            raise OptionError("dataset_text_field", self.text_field, "a column has a name", "Leave it out for `text`")

    @property
    def tokenization(self) -> dict[str, object]:
        """The settings that tokens depend on; the others may change without tokenising again."""
        return {
            "max_length": self.max_length,
            "too_long": self.too_long,
            "completion_only_loss": self.completion_only_loss,
            "assistant_only_loss": self.assistant_only_loss,
            "text_field": self.text_field,
        }
