"""How families of models mark their thoughts, each a row."""

from __future__ import annotations

from quire.frontend.parsers.table import Reasoning

THINK = (("<think>",), ("</think>",), "\n\n")

REASONING: dict[str, Reasoning] = {
    "deepseek_r1": Reasoning(*THINK, implied=True, signs=("<｜Assistant｜>", "</think>")),
    "qwen3": Reasoning(*THINK, calls_end=True, signs=("<think>", "</think>")),
    "granite": Reasoning(
        ("Here's my thought process:", "Here is my thought process:"),
        ("Here's my response:", "Here is my response:"),
        signs=("Here is my thought process:", "Here is my response:"),
    ),
    "mistral": Reasoning(("[THINK]",), ("[/THINK]",), signs=("[THINK]",)),
    "glm45": Reasoning(*THINK, signs=("<think>", "<arg_key>")),
    "kimi_k2": Reasoning(*THINK, calls_end=True, signs=("<think>", "<|tool_calls_section_begin|>")),
    "minimax_m2": Reasoning(*THINK, implied=True, signs=("<think>", "<minimax:tool_call>")),
    "gemma4": Reasoning(
        ("<|channel>thought",), ("<channel|>",), again=True, signs=("<|channel>thought",)
    ),
    "olmo3": Reasoning(*THINK, signs=("<think>", "<functions>")),
    "seed_oss": Reasoning(("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",)),
    "openai_gptoss": Reasoning(
        ("<|channel|>analysis<|message|>",),
        ("<|end|><|start|>assistant",),
        answer="<|channel|>final<|message|>",
        signs=("<|channel|>", "<|message|>"),
        whole="openai",
    ),
}
