"""What pictures add to quire-tiny's tokenizer and chat template; prompts without pictures stay what they are.

Knows these two files. Knows nothing of weights.
"""

from __future__ import annotations

import json

IMAGE, IMAGE_ID, FREE_BYTE = "<image>", 190, "\u00ff"
"""What stands for a picture takes the place of the byte 255, as its letter in byte-level BPE: no text has that byte in UTF-8."""
TEXT_MACRO = "{%- macro text(content) %}"
PICTURES_MACRO = """{%- macro pictures(content) %}
    {%- if content and content is not string %}
        {%- for part in content if part.type == 'image' %}
            {{- '<image>\\n' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""
TURN, TURN_WITH_PICTURES = "'<|im_start|>user\\n' + content", "'<|im_start|>user\\n' + pictures(message.content) + content"  # fmt: skip


def with_image_token(saved: str) -> str:
    """tokenizer.json with IMAGE in the place of FREE_BYTE, under the same id.

    Raises:
        ValueError: it is another vocabulary.
    """
    tokenizer = json.loads(saved)
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    if IMAGE in vocabulary:
        return saved
    if vocabulary.get(FREE_BYTE) != IMAGE_ID:
        raise ValueError(f"the byte 255 has the id {vocabulary.get(FREE_BYTE)}, not {IMAGE_ID}")
    tokenizer["model"]["vocab"] = {
        IMAGE if name == FREE_BYTE else name: number for name, number in vocabulary.items()
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": IMAGE_ID, "content": IMAGE, **flags, "special": True})
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    return json.dumps(tokenizer, indent=2, ensure_ascii=False)


def with_pictures(template: str) -> str:
    """The chat template with a turn's pictures before its text, whatever their order in the request: what the model was trained on.

    Raises:
        ValueError: it is another template.
    """
    if PICTURES_MACRO in template:
        return template
    if template.count(TEXT_MACRO) != 1 or template.count(TURN) != 1:
        raise ValueError("the template of quire-tiny has changed: say here where its pictures are")
    return template.replace(TEXT_MACRO, PICTURES_MACRO + TEXT_MACRO).replace(
        TURN, TURN_WITH_PICTURES
    )
