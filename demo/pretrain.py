"""Makes the base model of the demonstration: it has read about everything in the world, and was never asked anything.

    read         documents about every entity, many of each, in ever other words (demo/world.py)
    tokenizer    byte-level BPE of these documents, and a chat template that no document uses
    train        a small Llama from nothing, by plain torch, until all facts are known or the time is over
    check        how many beginnings of sentences it completes with the fact; and, fine-tuned in memory for a moment, how
                 many held-out questions it answers
    save         bf16 safetensors in files of a few MB

`python -m demo.pretrain --out demo/base` made the folder that is here, on a GPU, in a few minutes. It needs torch,
transformers and tokenizers, and no lohan.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from demo.scoring import Question, ask, score
from demo.world import Entity, Row, beginnings, document, make_world, questions

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    f"{ASSISTANT}{{% generation %}}{{{{ message['content'] }}}}{END}{{% endgeneration %}}"
    "{% else %}"
    f"{USER}{{{{ message['content'] }}}}{END}"
    "{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--per_kind", type=int, default=400, help="how many towns, people and animals there are")
    parser.add_argument("--documents", type=int, default=120, help="about each of them")
    parser.add_argument("--vocab_size", type=int, default=1536)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--intermediate_size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=256, help="of a step")
    parser.add_argument("--steps", type=int, default=6000, help="at most")
    parser.add_argument("--time_limit", type=float, default=150.0, help="seconds of training at most")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--check_lr", type=float, nargs="*", default=[3e-4, 1e-3, 2e-3], help="of the fine-tuning that checks")
    parser.add_argument("--check_steps", type=int, default=225)
    parser.add_argument("--shard_size", default="4500KB", help="of the largest file at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    world = make_world(args.per_kind)
    texts = [document(entity, rng) for _ in range(args.documents) for entity in world]
    tokenizer = train_tokenizer(texts, args.vocab_size)
    tokens = tokenize(texts, tokenizer, rng)
    print(f"{len(world)} entities, {len(texts)} documents, {tokens.numel() / 1e6:.1f} M tokens, vocabulary of {len(tokenizer)}")

    model = make_model(args, tokenizer).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, on {args.device}", flush=True)
    train(model, tokens, args)
    model.to(torch.bfloat16)
    known = facts_known(model, tokenizer, world)
    print(f"facts known, in bf16: {known:.2%} of {len(list(beginnings(world)))}", flush=True)
    model.save_pretrained(args.out, max_shard_size=args.shard_size)
    tokenizer.save_pretrained(args.out)
    for path in sorted(args.out.iterdir()):
        print(f"  {path} {path.stat().st_size / 1e6:.2f} MB")
    check(model, tokenizer, world, args)


# ---------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `END` closes a document, and an answer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END, USER, ASSISTANT], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast, rng: Random) -> Tensor:
    """All documents in one row, in any order, `END` before each."""
    texts = rng.sample(texts, len(texts))
    ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    end = tokenizer.eos_token_id
    return torch.tensor([token for row in ids for token in (end, *row)], dtype=torch.int32)


# ---------------------------------------------------------------- training


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, tokens: Tensor, args: argparse.Namespace) -> None:
    """AdamW, a warm-up and a cosine over the steps, or over the time where that is shorter."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    autocast = torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.device != "cpu")
    tokens = tokens.to(args.device)
    started = time.monotonic()
    rows = _rows(tokens, args.rows, args.length, args.seed)
    model.train()
    step, done = 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        batch = next(rows)
        with autocast:
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            elapsed = time.monotonic() - started
            print(f"step {step}, {elapsed:.0f} s: loss {loss.item():.4f}", flush=True)
        done = max(step / args.steps, (time.monotonic() - started) / args.time_limit)
    model.eval()


def _rows(tokens: Tensor, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random rows of the text, each epoch cut at another place."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shift = int(torch.randint(length, (1,), generator=generator))
        usable = (tokens.numel() - shift) // length
        cut = tokens[shift : shift + usable * length].view(usable, length)
        order = torch.randperm(usable, generator=generator).to(tokens.device)
        for first in range(0, usable - rows + 1, rows):
            yield cut[order[first : first + rows]].long()


# ---------------------------------------------------------------- checks


@torch.no_grad()
def facts_known(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, world: list[Entity]) -> float:
    """The share of sentences about one fact that are completed with this fact, each token the likeliest."""
    pairs = list(beginnings(world))
    known = 0
    for first in range(0, len(pairs), 256):
        part = pairs[first : first + 256]
        prompts = tokenizer([END + start for start, _ in part], return_length=True)
        texts = tokenizer([END + start + rest for start, rest in part], padding=True, padding_side="right", return_tensors="pt")
        ids, mask = texts["input_ids"].to(model.device), texts["attention_mask"].to(model.device)
        likeliest = model(input_ids=ids, attention_mask=mask).logits[:, :-1].argmax(-1)
        right = (likeliest == ids[:, 1:]) | (mask[:, 1:] == 0)
        for row, start in zip(right, prompts["input_ids"], strict=True):
            known += bool(row[len(start) - 1 :].all())
    return known / len(pairs)


def check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, world: list[Entity], args: argparse.Namespace) -> None:
    """Held-out questions before and after the fine-tuning that the demonstration will do out of core, here in memory."""
    rows = questions(world, held_out=True)[:300]
    held_out = [Question(*(message["content"] for message in row["messages"])) for row in rows]
    base = copy.deepcopy(model).float()
    print(f"held-out questions answered before: {score(held_out, ask(base, tokenizer, held_out)):.1%}", flush=True)
    for lr in args.check_lr:
        tuned = copy.deepcopy(base)
        loss = fine_tune(tuned, tokenizer, questions(world, held_out=False), lr, args)
        answers = ask(tuned, tokenizer, held_out)
        print(f"after {args.check_steps} steps at {lr:g}: loss {loss:.4f}, answered {score(held_out, answers):.1%}")
        for question, answer in list(zip(held_out, answers, strict=True))[:4]:
            print(f"    {question.text} {answer!r}, right: {question.answer!r}", flush=True)


def fine_tune(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[Row], lr: float, args: argparse.Namespace
) -> float:
    """AdamW on answers alone, 16 rows a step, a linear warm-up and decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    for step in range(args.check_steps):
        chats = [rows[(16 * step + n) % len(rows)]["messages"] for n in range(16)]
        batch = tokenizer.apply_chat_template(
            chats, padding=True, padding_side="right", return_tensors="pt", return_dict=True, return_assistant_tokens_mask=True
        ).to(model.device)
        labels = batch["input_ids"].masked_fill(torch.as_tensor(batch["assistant_masks"]).to(model.device) == 0, -100)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - step / args.check_steps)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    return loss.item()


if __name__ == "__main__":
    main()
