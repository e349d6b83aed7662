"""Odd requests, drawn by chance: bodies mutated from good ones or made of nothing, paths, queries and headers.

The same seed draws the same requests.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import msgspec

from quire.server.openapi import BODIES

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), "", "a",
    "\x00", "é🙂\ud7ff", "x" * 300, "1", "-1", "1e9", "nan", "true", [], [[]], [None], [0], [1, 2, 3], [-1], ["a"],
    [["a"]], [[1], [2]], [1 << 40], {}, {"a": 1}, {"": None}, {"type": "text"}, {"role": "user"}, [{"role": "user"}],
    [{"role": "user", "content": "x"}], [{"role": "assistant", "content": "x"}], [{"type": "text", "text": "x"}],
    {"include_usage": True}, {"type": "json_object"}, {"5": 1.0}, {"x": 1.0}, {"5": 1000.0}, ["a"] * 40, [5] * 200,
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}, {"regex": "(a|b)+"},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}, {"choice": ["a", "a"]}, {"regex": "("},
    {"grammar": "root ::= "}, {"json": {"allOf": [{"type": "x"}]}}, "required", "auto", "none", "high",
    {"type": "function", "function": {"name": "f"}}, [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    [{"type": "function"}], [{"role": "tool", "content": "x", "tool_call_id": "a"}], [{"role": "system", "content": []}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    "{{ 1 / 0 }}", "{% for a in range(10**9) %}{% endfor %}", "{{ messages.__class__ }}", "default", "flex",
]  # fmt: skip

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, *HI], "max_tokens": 4, "response_format": {"type": "json_object"}}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 4, "n": 2, "best_of": 2, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": [[5, 6]], "max_tokens": 4, "stream": True, "stop": ["a"], "seed": 1, "logit_bias": {"5": 1}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ("/v1/responses", {"input": HI, "max_output_tokens": 4, "stream": True, "instructions": "s"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4, "stream": True, "system": "s", "stop_sequences": ["a"]}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/api/chat", {"messages": HI, "options": {"num_predict": 4, "temperature": 0}}),
    ("/api/chat", {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "content": "x", "tool_name": "f"}], "tools": [TOOL], "stream": False, "think": True, "format": "json", "options": {"num_predict": 4}}),
    ("/api/generate", {"prompt": "hi", "options": {"num_predict": 4, "stop": ["a"]}, "system": "s"}),
    ("/api/generate", {"prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 4}, "keep_alive": "5m"}),
    ("/api/embed", {"input": ["hi"], "truncate": True}),
    ("/api/show", {"model": "toy"}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t"}], "n_predict": 4, "stream": True}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": HI, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/adapters", {"name": "a", "src": "/nowhere"}),
    ("/invocations", {"prompt": "hi", "max_tokens": 4}),
    ("/invocations", {"messages": HI, "max_tokens": 4}),
]  # fmt: skip
DEV = ("/reset_prefix_cache", "/collective_rpc", "/abort_requests", "/sleep", "/release_kv_cache_memory", "/wake_up", "/server_info", "/is_sleeping", "/is_paused", "/pause", "/resume", "/get_world_size")  # fmt: skip
OTHERS = ("/", "/health", "/health/ready", "/ping", "/version", "/load", "/metrics", "/v1/models", "/v1/models/toy", "/openapi.json",
          "/docs", "/redoc", "/ui/state", "/ui/words", "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/nowhere", "//", "/v1/models/%00",
          "/v1/models/..%2f..%2fetc", "/v1/chat/completions/", "/%F0%9F%99%82", "/v1//models", *DEV)  # fmt: skip
QUERIES = ("", "?since=-1", "?since=9999999999999999", "?n=x", "?n=%00", "?a=1&a=2", "?%ff=%fe", "?mode=abort", "?config_format=json")  # fmt: skip
METHODS = ("GET", "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
HEADERS: list[dict[str, str]] = [
    {}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json; charset=utf-16"}, {"Content-Type": ""},
    {"Authorization": "Bearer"}, {"Authorization": "Basic \xff"}, {"X-Request-Id": "x" * 5000}, {"X-Request-Id": "\xe9"},
    {"Origin": "null"}, {"If-None-Match": "*"}, {"Accept": "nothing/at-all"}, {"Sec-Fetch-Site": "cross-site"},
    {"X-Data-Parallel-Rank": "a"}, {"Content-Encoding": "gzip"}, {"anthropic-version": "0"},
]  # fmt: skip
RAW = [b"", b"null", b"[]", b"{", b"\xef\xbb\xbf{}", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800", "max_tokens": 1}',
       b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"1" * 10_000,
       b'{"prompt": "a", "prompt": "b", "max_tokens": 1}', b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": "a", "max_tokens": NaN}',
       b'{"prompt": "a", "seed": ' + b"9" * 500 + b"}", b'{"messages": [' + b'{"role": "user", "content": "a"},' * 2000 + b"{}]}"]  # fmt: skip


def names(path: str) -> list[str]:
    kind = BODIES.get(path, BODIES["/v1/completions"])
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def anything(draw: random.Random, depth: int = 0) -> Any:
    """JSON of nothing in particular."""
    kind = draw.random()
    if depth > 4 or kind < 0.5:
        return copy.deepcopy(draw.choice(ODD))
    size = draw.choice((0, 1, 1, 2, 3))
    if kind < 0.75:
        return [anything(draw, depth + 1) for _ in range(size)]
    keys = ("type", "text", "content", "role", "name", "id", "schema", "function", "a")
    return {draw.choice(keys): anything(draw, depth + 1) for _ in range(size)}


def changed(draw: random.Random, value: Any) -> Any:
    """The value, or something inside it, replaced by something odd."""
    if isinstance(value, dict) and value and draw.random() < 0.6:
        key = draw.choice(list(value))
        return value | {key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.6:
        at = draw.randrange(len(value))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return anything(draw) if draw.random() < 0.3 else copy.deepcopy(draw.choice(ODD))


def body(draw: random.Random, path: str, good: dict[str, Any]) -> bytes:
    found: Any = copy.deepcopy(good)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        if draw.random() < 0.6:
            found[draw.choice(names(path))] = copy.deepcopy(draw.choice(ODD))
        else:
            changed_whole = changed(draw, found)
            found = changed_whole if isinstance(changed_whole, dict) else found
    raw = json.dumps(found).encode()
    if draw.random() < 0.05:
        at = draw.randrange(len(raw))
        raw = raw[:at] + bytes([draw.randrange(256)]) + raw[at + draw.randrange(3) :]
    return raw


Odd = tuple[str, str, dict[str, str], bytes]
"""method, path with query, headers, body"""


def request(draw: random.Random) -> Odd:
    json_kind = {"Content-Type": "application/json"}
    kind = draw.random()
    if kind < 0.86:
        path, good = draw.choice(GOOD)
        return "POST", path, json_kind, body(draw, path, good)
    path = draw.choice(GOOD)[0]
    if kind < 0.90:
        return "POST", path, json_kind, draw.choice(RAW)
    if kind < 0.93:
        return "POST", path, json_kind, json.dumps(anything(draw)).encode()
    if kind < 0.95:
        return "POST", path, draw.choice(HEADERS), body(draw, path, draw.choice(GOOD)[1])
    raw = draw.choice((b"", b"", b"{}", json.dumps(anything(draw)).encode()))
    path = draw.choice(OTHERS) + draw.choice(QUERIES)
    return draw.choice(METHODS), path, draw.choice((json_kind, *HEADERS)), raw
