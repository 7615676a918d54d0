"""Train a random Llama with DeepSpeed ZeRO-3, optimizer state on NVMe: what lohan is compared with.

    .bench/deepspeed-venv/bin/python benchmarks/deepspeed/train.py --batch 1 --seq 512 --steps 6 --nvme DIR --json OUT

One process on the CPU accelerator, in the environment of setup.sh. Four phases:

    build       a Llama in bf16, weights from a seed, Transformers' gradient checkpointing on
    initialize  DeepSpeed takes the weights and writes fp32 masters and Adam moments to files below DIR
    steps       forward, backward and step of the same random tokens again and again, each timed: a loss that falls is the
                proof that state came back from the files as it went
    report      one JSON object, to OUT and to standard output; the files below DIR are removed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
WARMUP_STEPS = 1
"""left out of the medians: the first step fills caches and grows the heap"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a random Llama with DeepSpeed ZeRO-3, optimizer state on NVMe.")
    for option, default in (("layers", 24), ("hidden", 1024), ("intermediate", 2816), ("heads", 16), ("vocab", 32000)):
        parser.add_argument(f"--{option}", type=int, default=default)
    for option, default in (("batch", 1), ("seq", 512), ("steps", 6), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--clip", type=float, default=1.0, help="the gradient's norm is limited to it; 0: not at all")
    parser.add_argument("--nvme", type=Path, required=True, help="folder on the drive; the run works in a new folder below it")
    parser.add_argument("--json", type=Path, help="file that gets the report")
    tuning = parser.add_argument_group("DeepSpeed's own", "the defaults are the best that were found, see README.md")
    tuning.add_argument("--aio-block-mib", type=int, default=8)
    tuning.add_argument("--aio-queue-depth", type=int, default=16)
    tuning.add_argument("--aio-threads", type=int, default=1)
    tuning.add_argument("--huge-pages", action=argparse.BooleanOptionalAction, default=True, help="for all of its memory")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(f"--steps={arguments.steps}: the first {WARMUP_STEPS} is not counted; give at least {WARMUP_STEPS + 1}")
    return arguments


def deepspeed_config(arguments: argparse.Namespace, nvme: Path) -> dict[str, Any]:
    """ZeRO-3 as the comparison defines it: groups of 1e8 parameters, no pipelining, 8 buffers; the rest is tuned."""
    return {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": arguments.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 100_000_000,
            # Transformers' "auto" rules, and live parameters limited. With DeepSpeed's own defaults for these five a step costs
            # half as much CPU time again, and 1.3 to 2.2 GB more.
            "reduce_bucket_size": arguments.hidden**2,
            "stage3_prefetch_bucket_size": arguments.hidden**2 * 9 // 10,
            "stage3_param_persistence_threshold": arguments.hidden * 10,
            "stage3_max_live_parameters": 100_000_000,
            "stage3_max_reuse_distance": 100_000_000,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(nvme),
                "buffer_count": 8,
                "pipeline_read": False,
                "pipeline_write": False,
            },
        },
        "aio": {
            "block_size": arguments.aio_block_mib * MIB,
            "queue_depth": arguments.aio_queue_depth,
            "intra_op_parallelism": arguments.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def start_deepspeed(nvme: Path) -> Any:
    """Import DeepSpeed as the only process of a gloo group; its operators come from where setup.sh has put them."""
    scripts = Path(sys.executable).parent
    os.environ.update(
        DS_ACCELERATOR="cpu",
        TORCH_EXTENSIONS_DIR=str(Path(sys.prefix) / "torch_extensions"),
        PATH=f"{scripts}{os.pathsep}{os.environ['PATH']}",  # the loader asks ninja whether the operators are current
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_SIZE="1",
    )
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    # Processes would meet at a file: no port that another run could hold.
    torch.distributed.init_process_group("gloo", init_method=f"file://{nvme.resolve()}/rendezvous", rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    return deepspeed


def build_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        num_hidden_layers=arguments.layers,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        vocab_size=arguments.vocab,
        max_position_embeddings=arguments.seq,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.activation_checkpointing_enable()
    model.train()
    return model


def run_step(engine: Any, tokens: torch.Tensor) -> dict[str, float]:
    """One optimizer step and the seconds of its three phases."""
    times = [time.perf_counter()]
    loss = engine(input_ids=tokens, labels=tokens).loss
    times.append(time.perf_counter())
    engine.backward(loss)
    times.append(time.perf_counter())
    engine.step()
    times.append(time.perf_counter())
    forward_s, backward_s, step_s = (later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return {
        "loss": loss.item(),
        "grad_norm": float(engine.get_global_grad_norm()),
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": step_s,
        "total_s": times[-1] - times[0],
    }


def peak_rss_bytes(process: str = "self") -> int:
    """VmHWM of a process and of the children that it still has, summed."""
    folder = Path("/proc") / process
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    peak_bytes = int(status["VmHWM"].split()[0]) * 1024
    for task in (folder / "task").iterdir():
        peak_bytes += sum(peak_rss_bytes(child) for child in (task / "children").read_text().split())
    return peak_bytes


def train(arguments: argparse.Namespace, nvme: Path) -> dict[str, Any]:
    deepspeed = start_deepspeed(nvme)
    model = build_model(arguments)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    began_s = time.perf_counter()
    engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(arguments, nvme))
    initialize_s = time.perf_counter() - began_s
    initialize_peak_bytes = peak_rss_bytes()
    generator = torch.Generator().manual_seed(arguments.seed)
    tokens = torch.randint(arguments.vocab, (arguments.batch, arguments.seq), generator=generator)
    steps = [run_step(engine, tokens) for _ in range(arguments.steps)]
    phases = [name for name in steps[0] if name.endswith("_s")]
    median_s = {phase: statistics.median(step[phase] for step in steps[WARMUP_STEPS:]) for phase in phases}
    return {
        "system": f"deepspeed {deepspeed.__version__}",
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()},
        "parameters": num_parameters,
        "threads": torch.get_num_threads(),
        "initialize_s": initialize_s,
        "steps": steps,
        "median_s": median_s,
        "tokens_per_s": tokens.numel() / median_s["total_s"],
        "nvme_bytes": sum(file.stat().st_size for file in nvme.rglob("*.swp")),
        "initialize_peak_bytes": initialize_peak_bytes,
        "peak_bytes": peak_rss_bytes(),
    }


def restart_with_huge_pages() -> None:
    """Have glibc back all memory with huge pages, which it decides before Python starts.

    DeepSpeed's buffers come from malloc, and direct I/O to them is twice as fast so (README.md).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        os.environ["GLIBC_TUNABLES"] = f"{tunables}:glibc.malloc.hugetlb=1".removeprefix(":")
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    arguments = parse_arguments()
    if arguments.huge_pages:
        restart_with_huge_pages()
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    # DeepSpeed logs to standard output, which belongs to the report.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="deepspeed-", dir=arguments.nvme) as nvme:
        report = json.dumps(train(arguments, Path(nvme)), indent=2)
    if arguments.json:
        arguments.json.write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
