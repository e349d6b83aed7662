"""Reasoning formats: how families of models mark reasoning, one entry each."""

from __future__ import annotations

from quire.frontend.parsers.format_table import ReasoningFormat

THINK = (("<think>",), ("</think>",), "\n\n")

REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(*THINK, starts_in_reasoning=True, detect=("<｜Assistant｜>", "</think>")),
    "qwen3": ReasoningFormat(*THINK, ended_by_call=True, detect=("<think>", "</think>")),
    "granite": ReasoningFormat(
        ("Here's my thought process:", "Here is my thought process:"),
        ("Here's my response:", "Here is my response:"),
        detect=("Here is my thought process:", "Here is my response:"),
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), detect=("[THINK]",)),
    "glm45": ReasoningFormat(*THINK, detect=("<think>", "<arg_key>")),
    "kimi_k2": ReasoningFormat(*THINK, ended_by_call=True, detect=("<think>", "<|tool_calls_section_begin|>")),
    "minimax_m2": ReasoningFormat(*THINK, starts_in_reasoning=True, detect=("<think>", "<minimax:tool_call>")),
    "gemma4": ReasoningFormat(
        ("<|channel>thought",), ("<channel|>",), may_repeat=True, detect=("<|channel>thought",)
    ),
    "olmo3": ReasoningFormat(*THINK, detect=("<think>", "<functions>")),
    "seed_oss": ReasoningFormat(("<seed:think>",), ("</seed:think>",), detect=("<seed:think>",)),
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",), detect=("<mm:think>",)),
    "ernie45": ReasoningFormat(
        ("<think>",), ("</think>",), "\n\n<response>\n", starts_in_reasoning=True, answer_frame=("<response>", "</response>"),
        detect=("</think>", "<response>"),
    ),
    "hunyuan_a13b": ReasoningFormat(
        ("<think>",), ("</think>",), "\n<answer>\n", answer_frame=("<answer>", "</answer>"),
        detect=("<think>", "<answer>"),
    ),
    "hy_v3": ReasoningFormat(
        ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"),
        detect=("<think", "<tool_sep"),
    ),
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), "<|START_RESPONSE|>",
        answer_frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        detect=("<|START_THINKING|>", "<|START_RESPONSE|>"),
    ),
    "cohere_command4": ReasoningFormat(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), "<|START_TEXT|>",
        answer_frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        detect=("<|START_THINKING|>",),
    ),
    "apertus": ReasoningFormat(
        ("<|inner_prefix|>",), ("<|inner_suffix|>",), may_repeat=True, detect=("<|inner_prefix|>",)
    ),
    "k2_horizon": ReasoningFormat(
        ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
        ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        starts_in_reasoning=True, ended_by_call=True, detect=("<ifm|think>",),
    ),
    "openai_gptoss": ReasoningFormat(
        ("<|channel|>analysis<|message|>",),
        ("<|end|><|start|>assistant",),
        answer_marker="<|channel|>final<|message|>",
        detect=("<|channel|>", "<|message|>"),
        tool_format="openai",
    ),
}  # fmt: skip
