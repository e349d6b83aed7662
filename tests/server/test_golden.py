"""The answer to every request of `exchanges.py`, as stored in golden/.

An error keeps status, type, param and code; its message is stored only for the cases in `EXACT_MESSAGES`, where a
client may match on the wording. All other messages may be reworded freely.
To store a changed answer: `PYTHONPATH=src:tests/server python tests/server/test_golden.py`, and read the diff.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from asgi import browser
from golden_cases import ADMIN, ANSWERS, FIELDS, MESSAGES, REFUSALS, RESPONSES, TEXT_FIELDS, Case

GOLDEN = Path(__file__).parent / "golden"
GROUPS = {
    "answers": ANSWERS,
    "admin": ADMIN,
    "messages": MESSAGES,
    "responses": RESPONSES,
    "refusals": REFUSALS,
}
HEADERS = ("content-type", "retry-after", "www-authenticate", "x-request-id", "allow", "connection",
        "access-control-allow-origin", "endpoint-load-metrics")  # fmt: skip
EXACT_MESSAGES = {"no-route", "no-method", "no-key", "media-type", "unknown-model", "prompt-too-long", "loading",
                  "queue-full", "messages-missing", "later-lora", "field-n", "messages-no-key"}  # fmt: skip


async def answer(case: Case) -> httpx.Response:
    headers = {"X-Request-Id": "golden", **case.headers}
    async with browser(case.state(), headers=headers) as client:
        if isinstance(case.body, str | bytes):
            return await client.request(case.verb, case.path, content=case.body)
        return await client.request(case.verb, case.path, json=case.body)


def rendered(name: str, case: Case) -> str:
    """An answer as text, without its free wording and what differs from run to run."""
    found = asyncio.run(answer(case))
    lines = [f"## {name}", f"{found.status_code}"]
    lines += [f"{key}: {found.headers[key]}" for key in HEADERS if key in found.headers]
    text = found.text if name in EXACT_MESSAGES else without_messages(found.text)
    text = re.sub(r'"created(_at)?":\d+', r'"created\1":0', text)
    return "\n".join([*lines, text.rstrip("\n")]) + "\n\n"


def without_messages(text: str) -> str:
    """The text with "..." for the message of each error, in a body or in a stream."""
    return re.sub(r'("error":\{[^{}]*?"message":)"(?:[^"\\]|\\.)+"', r'\1"..."', text)


def golden(group: str) -> dict[str, str]:
    text = (GOLDEN / f"{group}.txt").read_text(encoding="utf-8")
    parts = re.split(r"(?m)^(?=## )", text)
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts if part}


@pytest.mark.parametrize("group", GROUPS)
def test_answers_match_the_golden_files(group: str):
    known = golden(group)
    assert set(known) == set(GROUPS[group])
    for name, case in GROUPS[group].items():
        assert rendered(name, case) == known[name]


def test_only_listed_errors_freeze_their_message():
    worded = rendered("no-key", REFUSALS["no-key"])
    assert "Unauthorized" in worded
    free = rendered("stream-options", REFUSALS["stream-options"])
    assert '"message":"..."' in free
    assert '"param":"stream_options","code":400' in free
    assert without_messages('{"error":{"message":""}}') == '{"error":{"message":""}}', (
        "an empty message is seen"
    )
    assert REFUSALS.keys() | MESSAGES.keys() >= EXACT_MESSAGES
    assert len(EXACT_MESSAGES) <= 12


def test_each_refused_field_is_named():
    for name in FIELDS | TEXT_FIELDS:
        found = asyncio.run(answer(REFUSALS[f"field-{name}"])).json()["error"]
        field = name.partition("-")[0]
        assert found["code"] == 400
        assert found["param"].partition(".")[0] == field, (name, found)
        assert field in found["message"]


def test_refusals_are_errors_in_the_envelope():
    for name, case in REFUSALS.items():
        found = asyncio.run(answer(case))
        assert found.status_code >= 400, name
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}, name
        assert found.json()["error"]["code"] == found.status_code, name
        assert "secret" not in found.text, name


if __name__ == "__main__":
    for group, cases in GROUPS.items():
        text = "".join(rendered(name, case) for name, case in cases.items())
        (GOLDEN / f"{group}.txt").write_text(text, encoding="utf-8")
