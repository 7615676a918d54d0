"""`lohan COMMAND ...`: finds the command's module and runs it. Imports nothing heavy, so that help is there at once.

A command is a module with `main(arguments) -> int`. What lohan raises on purpose is told in one line and ends with 2, as a
wrong argument does; Ctrl-C ends with 130, a pipe that nobody reads any more with 141.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

from lohan import __version__
from lohan.errors import LohanError

COMMANDS = {
    "train": ("lohan.train.command", "fine-tune a model on data, from a YAML file or flags"),
    "generate": ("lohan.train.generate", "continue a prompt with a trained model"),
    "export": ("lohan.train.export", "write a run's model as safetensors that Transformers loads"),
    "store": ("lohan.train.store", "what a run has on its drives: list, verify, repair, remove"),
    "report": ("lohan.train.report", "one page about a run: loss, throughput, memory, a step's timeline"),
    "doctor": ("lohan.machine.doctor", "what this machine can do, what is wrong with it, and how to mend it"),
}
"""name -> module, what it does"""
EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of the console script; returns the exit code."""
    name, *rest = arguments if arguments is not None else sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"lohan {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"The commands are {', '.join(COMMANDS)}"
        print(f"lohan: error: there is no command {name!r}. {hint}", file=sys.stderr)
        return EXIT_ERROR
    try:
        run: Callable[[Sequence[str]], int] = import_module(COMMANDS[name][0]).main
        return run(rest)
    except LohanError as error:
        print(f"lohan {name}: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except MemoryError as error:
        print(f"lohan {name}: error: the system has no more memory for this process. {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(f"lohan {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read what is printed has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def usage() -> str:
    """What `lohan --help` prints."""
    lines = [f"    {name:10} {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: lohan COMMAND ...", "", *lines, "", "lohan COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
