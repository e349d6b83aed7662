"""vLLM's functions for the prompts of a benchmark, on the datasets of `quire bench serve`."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import Any

from quire.bench.serve import cli, datasets

MORE_FLAGS = ("--no-stream", "--no-oversample", "--skip-chat-template", "--enable-multimodal-chat")
"""Flags of vLLM without an effect here: there are no streamed datasets and no media."""


@dataclass
class SampleRequest:
    """One prompt of a dataset. Lengths in tokens."""

    prompt: str
    prompt_len: int
    expected_output_len: int = 0
    multi_modal_data: Any = None
    lora_request: Any = None
    request_id: str | None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a dataset, each by its full name only, since programs have flags such as --output-len."""
    for option in cli.OPTIONS["prompts"]:
        name = option.flags.split()[0]
        if name != "--tokenizer":
            option._replace(flags=name).add_to(parser)
    for flag in MORE_FLAGS:
        parser.add_argument(flag, action="store_true", help="accepted for vLLM; no effect")


def get_samples(args: argparse.Namespace, tokenizer: Any, **ignored: Any) -> list[SampleRequest]:
    """The prompts that the flags of `add_dataset_parser` choose.

    Args:
        tokenizer: of Transformers.

    Raises:
        ConfigError: an unknown dataset, or a file that is missing or malformed.
    """
    prefix = getattr(args, "request_id_prefix", "")
    prompts = asyncio.run(datasets.make(cli.dataset_options(args), _Cutter(tokenizer)))
    return [
        SampleRequest(prompt.text, prompt.length, prompt.output, request_id=f"{prefix}{number}")
        for number, prompt in enumerate(prompts)
    ]


class _Cutter:
    """A tokenizer of Transformers, as the datasets use it."""

    name = "the program's"

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    async def encode(self, text: str, special: bool = False) -> list[Any]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    async def decode(self, tokens: list[Any]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
