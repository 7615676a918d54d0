"""`lohan generate FOLDER "prompt"`: what a trained model says, exactly as Transformers' `generate` says it.

FOLDER is a run's output_dir, or any folder that Transformers loads. The model has to fit into memory; while a run trains, its
`sample_prompts` are answered through the engine instead, which needs no more than training does.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lohan.errors import OptionError
from lohan.train.console import Console


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.max_new_tokens < 1:
        raise OptionError("max_new_tokens", options.max_new_tokens, "it is below 1", "Set it to 1 or more")
    if options.temperature < 0:
        raise OptionError("temperature", options.temperature, "it is negative", "Set it to 0 for the likeliest tokens")
    folder = model_folder(Path(options.folder))
    with Console(sys.stderr) as console:
        console.phase("import libraries")
        import transformers

        from lohan.data.fit import padding_token
        from lohan.train.checks import check_model, open_tokenizer
        from lohan.train.prompts import encode_prompt

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        console.phase(f"open {folder}")
        _, config = check_model(folder)
        tokenizer = open_tokenizer(folder)
        if tokenizer is None:
            remedy = "Put the files of its tokenizer into that folder"
            raise OptionError("FOLDER", str(folder), "there is no tokenizer with it", remedy)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
        console.phase("generate")
        console.idle()
        transformers.set_seed(options.seed)
        inputs = encode_prompt(tokenizer, options.prompt, raw=options.raw)
        model.generate(
            **inputs,
            **_choices(options),
            max_new_tokens=options.max_new_tokens,
            pad_token_id=padding_token(tokenizer, config.get_text_config().vocab_size),
            streamer=transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    return 0


def model_folder(folder: Path) -> Path:
    """Where the model of a run is, or the folder itself."""
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if (folder / "config.json").is_file():
        return folder
    if not folder.is_dir():
        raise OptionError("FOLDER", str(folder), "there is no such folder", "Name a run's output_dir, or a model's folder")
    if (folder / "config.yaml").is_file():
        remedy = f"Let the run end (the same lohan train command continues it), or write it with: lohan export {folder} OUT"
        raise OptionError("FOLDER", str(folder), "its run has not saved a model yet", remedy)
    raise OptionError("FOLDER", str(folder), "there is no model in it", "Name a run's output_dir, or a model's folder")


def _choices(options: Namespace) -> dict[str, Any]:
    if options.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": options.temperature}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="lohan generate", description="Continue a prompt.", allow_abbrev=False)
    parser.add_argument("folder", help="a run's output_dir, or a model's folder")
    parser.add_argument("prompt", help="put into the tokenizer's chat template, if it has one")
    parser.add_argument("--raw", action="store_true", help="without the chat template")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="the most tokens to add (100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest tokens (the default)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at a temperature above 0 (0)")
    return parser
