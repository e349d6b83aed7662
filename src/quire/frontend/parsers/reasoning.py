"""Reasoning formats: how families of models mark reasoning, one entry each."""

from __future__ import annotations

from quire.frontend.parsers.format_table import ReasoningFormat

THINK = (("<think>",), ("</think>",), "\n\n")

REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(*THINK, implied=True, signs=("<｜Assistant｜>", "</think>")),
    "qwen3": ReasoningFormat(*THINK, calls_end=True, signs=("<think>", "</think>")),
    "granite": ReasoningFormat(
        ("Here's my thought process:", "Here is my thought process:"),
        ("Here's my response:", "Here is my response:"),
        signs=("Here is my thought process:", "Here is my response:"),
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), signs=("[THINK]",)),
    "glm45": ReasoningFormat(*THINK, signs=("<think>", "<arg_key>")),
    "kimi_k2": ReasoningFormat(*THINK, calls_end=True, signs=("<think>", "<|tool_calls_section_begin|>")),
    "minimax_m2": ReasoningFormat(*THINK, implied=True, signs=("<think>", "<minimax:tool_call>")),
    "gemma4": ReasoningFormat(
        ("<|channel>thought",), ("<channel|>",), again=True, signs=("<|channel>thought",)
    ),
    "olmo3": ReasoningFormat(*THINK, signs=("<think>", "<functions>")),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",)),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",), signs=("<mm:think>",)),
    "ernie45": ReasoningFormat(
        ("<think>",), ("</think>",), "\n\n<response>\n", implied=True, frame=("<response>", "</response>"),
        signs=("</think>", "<response>"),
    ),
    "hunyuan_a13b": ReasoningFormat(
        ("<think>",), ("</think>",), "\n<answer>\n", frame=("<answer>", "</answer>"),
        signs=("<think>", "<answer>"),
    ),
    "hy_v3": ReasoningFormat(
        ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"),
        signs=("<think", "<tool_sep"),
    ),
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), "<|START_RESPONSE|>",
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        signs=("<|START_THINKING|>", "<|START_RESPONSE|>"),
    ),
    "cohere_command4": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), "<|START_TEXT|>",
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        signs=("<|START_THINKING|>",),
    ),
    "apertus": ReasoningFormat(
        ("<|inner_prefix|>",), ("<|inner_suffix|>",), again=True, signs=("<|inner_prefix|>",)
    ),
    "k2_horizon": ReasoningFormat(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        implied=True, calls_end=True, signs=("<ifm|think>",),
    ),
    "openai_gptoss": ReasoningFormat(
        ("<|channel|>analysis<|message|>",),
        ("<|end|><|start|>assistant",),
        answer="<|channel|>final<|message|>",
        signs=("<|channel|>", "<|message|>"),
        whole="openai",
    ),
}  # fmt: skip
