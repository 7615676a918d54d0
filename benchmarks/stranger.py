"""A stranger's path, walked for real: an own model and own conversations, by nothing but the commands that are documented.

    python benchmarks/stranger.py                  three minutes on two cores; what it makes below .bench is removed

make        a folder with a random Llama of 134M parameters and a tokenizer; a JSONL file of `messages`
help        `lohan --help`, `lohan train --help`, `lohan doctor`
train       off a terminal, Ctrl-C in the middle; the same command, on a terminal, goes on to the end, with evaluations
compare     losses and weights with those of a run that nobody interrupted
use         export, load in Transformers, and the same answers from `lohan generate` as from Transformers' greedy generation
look back   every byte of the store verified; one page about the run

Every command is timed as somebody in front of it sees it: how long until it says something, and the longest silence.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import selectors
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure, publish
from models import BENCH_DIR
from quiet import quiet

LOHAN = Path(sys.executable).with_name("lohan")
HELP_S, FIRST_LINE_S, SILENCE_S = 0.3, 2.0, 5.0
"""bars: until help is there, until a command's first line, and between two signs of life"""
NUM_HELPS = 5
NUM_STEPS, INTERRUPTED_STEP, EVAL_STEPS = 24, 7, 12
PROMPTS = ("What is 3 plus 4?", "What is 11 plus 30?", "Who is there?")
NUM_TOKENS = 12
"""of an answer"""
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    f"{ASSISTANT}{{% generation %}}{{{{ message.content }}}}{END}{{% endgeneration %}}"
    f"{{% else %}}{USER}{{{{ message.content }}}}{END}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


# -------------------------------------------------------------------- a command, watched


@dataclass(slots=True)
class Ran:
    """What a command did, as somebody in front of it saw it."""

    code: int
    out: str
    """stdout; on a terminal all there was"""
    all: str
    first_s: float
    """until its first line"""
    silence_s: float
    """the longest time without a sign of life, from its start to its end"""
    took_s: float


@dataclass(slots=True)
class Watch:
    """Reads what a process writes, and when."""

    began_s: float = field(default_factory=time.monotonic)
    texts: dict[int, bytes] = field(default_factory=dict)
    heard_s: float = 0.0
    first_s: float | None = None
    silence_s: float = 0.0

    def hear(self, descriptor: int, data: bytes) -> None:
        now_s = time.monotonic() - self.began_s
        self.silence_s, self.heard_s = max(self.silence_s, now_s - self.heard_s), now_s
        self.texts[descriptor] += data
        if self.first_s is None and self.texts[descriptor].strip():
            self.first_s = now_s


def run(place: Path, *words: str, on_terminal: bool = False, interrupt_at: str = "", shows: bool = True) -> Ran:
    """`lohan WORDS` in that folder; Ctrl-C once it has said what `interrupt_at` matches."""
    print(f"\n$ {shlex.join(['lohan', *words])}{'    (on a terminal)' if on_terminal else ''}", flush=True)
    ends = [pty.openpty()] * 2 if on_terminal else [os.pipe(), os.pipe()]
    if on_terminal:
        fcntl.ioctl(ends[0][1], termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    watch = Watch(texts={end[0]: b"" for end in ends})
    process = subprocess.Popen([LOHAN, *words], cwd=place, stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1])
    for end in set(ends):
        os.close(end[1])
    with selectors.DefaultSelector() as selector:
        for descriptor in watch.texts:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                if not (data := _read(key.fd)):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    continue
                watch.hear(key.fd, data)
                if interrupt_at and re.search(interrupt_at, watch.texts[key.fd].decode(errors="replace")):
                    interrupt_at = ""
                    process.send_signal(signal.SIGINT)
    code = process.wait()
    took_s = time.monotonic() - watch.began_s
    out, *rest = (_lines(text) for text in watch.texts.values())
    ran = Ran(code, out, out + "".join(rest), watch.first_s or took_s, max(watch.silence_s, took_s - watch.heard_s), took_s)
    print("".join(f"    {line}\n" for line in _trimmed(ran.all) if shows), end="")
    print(f"exit code {code}, {took_s:.1f} s; first line after {ran.first_s:.2f} s, longest silence {ran.silence_s:.1f} s")
    return ran


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


def _lines(data: bytes) -> str:
    """What stays on the screen: of a line that was drawn again and again, the last."""
    text = data.decode(errors="replace").replace("\r\n", "\n")
    return "\n".join(line.rpartition("\x1b[2K")[2] for line in text.split("\n"))


def _trimmed(text: str, num: int = 12) -> list[str]:
    lines = [line[:200] for line in text.rstrip("\n").split("\n") if line]
    return lines if len(lines) <= 2 * num else [*lines[:num], f"... {len(lines) - 2 * num} lines", *lines[-num:]]


# -------------------------------------------------------------------- what the stranger has


def make_model(folder: Path, texts: list[str]) -> None:
    """A Llama of 134M parameters, as random as its configuration makes it, with a tokenizer of a few words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END, USER, ASSISTANT], initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    print(f"a Llama of {model.num_parameters() / 1e6:.1f}M parameters, {len(tokenizer)} tokens")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def chats(first: int, num: int) -> list[dict[str, Any]]:
    """Conversations of one question and its answer."""
    pairs = [(number * 7 % 40, number * 11 % 50) for number in range(first, first + num)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
            ]
        }
        for a, b in pairs
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -------------------------------------------------------------------- the path


@dataclass(slots=True)
class Verdicts:
    """PASS and FAIL lines, and figures against their bars."""

    figures: list[Figure] = field(default_factory=list)
    num_failed: int = 0

    def check(self, name: str, holds: bool, detail: object = "") -> None:
        self.num_failed += not holds
        print(f"{'PASS' if holds else 'FAIL'}  {name}{f'   ({detail})' if detail != '' else ''}", flush=True)

    def at_most(self, name: str, value: float, bar: float) -> None:
        self.figures.append(Figure(name, value, bar))
        self.check(name, value <= bar, f"{value:.2f}, at most {bar}")

    def timed(self, name: str, ran: Ran) -> None:
        self.at_most(f"{name}: until its first line, s", ran.first_s, FIRST_LINE_S)
        self.at_most(f"{name}: longest silence, s", ran.silence_s, SILENCE_S)


def walk(place: Path, verdicts: Verdicts) -> None:
    rows = chats(0, 256)
    texts = [message["content"] for row in rows for message in row["messages"]]
    write_jsonl(place / "chats.jsonl", rows)
    write_jsonl(place / "held-out.jsonl", chats(256, 16))
    make_model(place / "my-model", texts)

    for words in (("--help",), ("train", "--help")):
        took_s = statistics.median(run(place, *words, shows=False).took_s for _ in range(NUM_HELPS))
        verdicts.at_most(f"lohan {' '.join(words)}, s", took_s, HELP_S)
    verdicts.timed("doctor", run(place, "doctor", "--quick", "--ssd", "drive"))

    interrupted = run(place, "train", *flags("first"), interrupt_at=rf"step {INTERRUPTED_STEP}/\d+ \|")
    verdicts.check("Ctrl-C lets the step finish and ends with 130", interrupted.code == 130, interrupted.code)
    verdicts.check("it says how to go on", "The same command continues" in interrupted.out)
    verdicts.timed("train off a terminal", interrupted)
    ended = run(place, "train", *flags("first"), on_terminal=True)
    verdicts.check("the same command continues, to the end", ended.code == 0 and "continues after step" in ended.out)
    verdicts.timed("train on a terminal", ended)
    whole = run(place, "train", *flags("whole"))
    verdicts.check("a run that nobody interrupts", whole.code == 0)

    log, log_whole = read_log(place / "runs" / "first"), read_log(place / "runs" / "whole")
    verdicts.check(
        "its log has every step once", [line["step"] for line in log if "loss" in line] == [*range(1, NUM_STEPS + 1)]
    )
    verdicts.check("losses are those of the run that nobody interrupted", told(log, "loss") == told(log_whole, "loss"))
    evaluations = told(log, "eval_loss")
    verdicts.check("so are evaluations", evaluations == told(log_whole, "eval_loss") and len(evaluations) == 2, evaluations)
    weights = [(place / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("first", "whole")]
    verdicts.check("so are all weights, to the bit", weights[0] == weights[1])
    losses = told(log, "loss")
    verdicts.check("it has learnt", losses[-1] < losses[0] / 2, f"loss {losses[0]:.2f} to {losses[-1]:.2f}")

    exported = run(place, "export", "runs/first", "exported")
    verdicts.check("export ends well, everything read back", exported.code == 0 and "all read back" in exported.out)
    verdicts.timed("export", exported)
    use(place, verdicts)

    verified = run(place, "store", "verify", "runs/first")
    verdicts.check("the store is what was written", verified.code == 0)
    verdicts.timed("store", verified)
    report = run(place, "report", "runs/first")
    page = place / "runs" / "first" / "report.html"
    verdicts.check("a page of less than 2 MB", report.code == 0 and 0 < page.stat().st_size < 2e6, page.stat().st_size)
    verdicts.timed("report", report)


def flags(name: str) -> list[str]:
    """What the stranger types behind `lohan train`."""
    text = (
        f"--model_name_or_path my-model --dataset_name chats.jsonl --output_dir runs/{name} "
        f"--eval_dataset_name held-out.jsonl --eval_strategy steps --eval_steps {EVAL_STEPS} "
        f"--assistant_only_loss --max_length 64 --max_steps {NUM_STEPS} --learning_rate 1e-3 --device cpu --host_memory 512MiB"
    )
    return [*text.split(), "--sample_prompts", PROMPTS[0], "--sample_max_new_tokens", str(NUM_TOKENS)]


def read_log(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "log.jsonl").read_text().splitlines()]


def told(log: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in log if name in line]


def use(place: Path, verdicts: Verdicts) -> None:
    """The exported model, in Transformers and in `lohan generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(place / "exported", dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(place / "exported")
    saved = AutoModelForCausalLM.from_pretrained(place / "runs" / "first" / "model", dtype="auto").state_dict()
    same = all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    verdicts.check("Transformers loads the export: the bits of the run's model", same, model.dtype)
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        expected = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        ran = run(place, "generate", "runs/first", prompt, "--max_new_tokens", str(NUM_TOKENS))
        verdicts.check("generate says what Transformers says", ran.out.rstrip("\n") == expected.rstrip("\n"), repr(expected))
        verdicts.timed("generate", ran)


def main() -> int:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=BENCH_DIR, help="a folder on the drive to use (default: .bench)")
    parser.add_argument("--keep", action="store_true", help="leave the folder, and say where it is")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    began_s, verdicts = time.monotonic(), Verdicts()
    place = Path(tempfile.mkdtemp(prefix="stranger-", dir=options.dir))
    try:
        walk(place, verdicts)
    finally:
        if options.keep:
            print(f"kept: {place}")
        else:
            shutil.rmtree(place)
    print(f"\n{verdicts.num_failed} failed, {time.monotonic() - began_s:.0f} s")
    publish("stranger", verdicts.figures)
    return 1 if verdicts.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
