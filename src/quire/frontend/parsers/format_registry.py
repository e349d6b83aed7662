"""Format registry: chooses a model's tool and reasoning formats, by configured name or by its chat template.

Knows names (vLLM's included) and the detect by which a template shows a format. Does not parse output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.config.unsupported import PARSERS
from quire.errors import ConfigError
from quire.frontend.parsers.format_table import ReasoningFormat, ToolFormat
from quire.frontend.parsers.reasoning import REASONING
from quire.frontend.parsers.tool_formats import TOOLS

AUTO, OFF = "auto", ("", "none", "off")

TOOL_NAMES = {
    "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder", "qwen3_json": "hermes", "step3p5": "qwen3_coder",
    "granite4": "hermes", "glm47": "glm45", "ling3": "glm45", "poolside_v1": "glm45",
    "harmony": "openai", "gpt_oss": "openai", "nemotron_v3": "qwen3_coder",
    "ernie45": "hermes", "internlm2": "internlm", "granite_20b_fc": "granite-20b-fc",
    "phi4_mini": "phi4_mini_json", "longcat_flash": "longcat", "hunyuan_a13b": "jamba",
    "cohere_command4": "cohere_command3", "minimax_m1": "minimax", "hy_v4": "hy_v3",
}  # fmt: skip
REASONING_NAMES = {
    "glm47": "glm45", "ling3": "glm45", "poolside_v1": "glm45", "hy_v4": "hy_v3",
    "nemotron_v3": "deepseek_r1", "deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1",
    "deepseek_v32": "deepseek_r1", "deepseek_v4": "deepseek_r1", "deepseek_v41": "deepseek_r1",
    "step3": "deepseek_r1", "step3p5": "deepseek_r1", "holo2": "deepseek_r1", "minimax_m2_append_think": "minimax_m2",
    "openai": "openai_gptoss", "gpt_oss": "openai_gptoss", "harmony": "openai_gptoss",
    "magistral": "mistral", "qwen3_thinking": "qwen3", "mimo": "qwen3",
}  # fmt: skip
# `auto` takes the first format whose detect are all in the template; formats with the rarest detect come first.
TOOL_ORDER = (
    "openai", "deepseek_v32", "deepseek_v41", "deepseek_v4", "kimi_k2", "k2_horizon", "minimax_m2", "dots",
    "seed_oss", "step3", "gemma4", "functiongemma", "hy_v3", "glm45", "qwen3_coder", "minicpm5", "deepseek_v3",
    "deepseek_v31", "olmo3", "lfm2", "llama4_pythonic", "internlm", "longcat", "apertus", "cohere_command3",
    "gigachat3", "jamba", "phi4_mini_json", "granite", "granite-20b-fc", "mistral", "hermes", "llama3_json",
)  # fmt: skip
REASONING_ORDER = (
    "openai_gptoss", "gemma4", "mistral", "seed_oss", "granite", "cohere_command3", "cohere_command4", "apertus", "k2_horizon",
    "minimax_m3", "minimax_m2", "kimi_k2", "hy_v3", "glm45", "olmo3", "hunyuan_a13b", "ernie45", "deepseek_r1", "qwen3",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A format's name ("": none) and the reason for the choice."""

    name: str
    why: str


class FormatRegistry:
    """Formats by name: built-in ones and those of plugins."""

    def __init__(self) -> None:
        self.tools: dict[str, ToolFormat] = dict(TOOLS)
        self.reasoning: dict[str, ReasoningFormat] = dict(REASONING)

    def add_tools(self, name: str, format: ToolFormat) -> None:
        self.tools[name] = format

    def add_reasoning(self, name: str, reasoning: ReasoningFormat) -> None:
        self.reasoning[name] = reasoning

    def choose_tools(self, requested: str | None, template: str) -> FormatChoice:
        """`template`: text of the chat templates and of the checkpoint's response_template.

        Raises:
            ConfigError: an unknown name.
        """
        detect = {name: self.tools[name].detect for name in TOOL_ORDER}
        return _choose(requested, template, "tool_call_parser", self.tools, TOOL_NAMES, detect)

    def choose_reasoning(self, requested: str | None, template: str) -> FormatChoice:
        """As `choose_tools`."""
        detect = {name: self.reasoning[name].detect for name in REASONING_ORDER}
        known = self.reasoning
        return _choose(requested, template, "reasoning_parser", known, REASONING_NAMES, detect)


def _choose(
    requested: str | None, template: str, field: str, known: Iterable[str],
    others: Mapping[str, str], detect: Mapping[str, tuple[str, ...]],
) -> FormatChoice:  # fmt: skip
    if requested in OFF:
        return FormatChoice("", f"{field}={requested!r}")
    if requested is None or requested == AUTO:
        text = template.replace('\\"', '"').replace("\\'", "'")
        for name, texts in detect.items():
            if texts and all(one in text for one in texts):
                return FormatChoice(
                    name, "the checkpoint's template has " + " and ".join(map(repr, texts))
                )
        return FormatChoice("", "the checkpoint's template shows no known format")
    name = requested if requested in known else others.get(requested, "")
    if not name:
        names = ", ".join(sorted({*known, *others}))
        remedy = PARSERS.get(requested) or f"choose from auto, none, {names}"
        what = "is not supported yet" if requested in PARSERS else "is unknown"
        raise ConfigError(f"{field}={requested!r} {what}; {remedy}")
    why = f"{field}={requested!r}"
    return FormatChoice(name, why if name == requested else f"{why}, which uses the format {name}")
