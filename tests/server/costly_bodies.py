"""The most expensive bodies for the event loop within the size limits, by name: the body and its route."""

from __future__ import annotations

from collections.abc import Callable

from loop_monitor import MOST_BODY, many, members

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HI = b'"messages":[{"role":"user","content":"hi"}]'
TOOL = b'{"type":"function","function":{"name":"f%d","parameters":%s}}'
SMALL = 64 << 10

Case = tuple[str, Callable[[int], bytes]]
"""A path, and a body of at most `size` bytes."""


def body(*parts: bytes) -> bytes:
    return b"{" + b",".join(parts) + b"}"


def scrambled(at: int) -> str:
    """Names made of the letters of known ones, all different."""
    return "maxtokens_"[at % 10 :] + f"{at:x}" + "_sekotmax"


def near(at: int) -> str:
    return f"max_tokens{at:x}"


def tools(size: int, schema: Callable[[int], bytes], count: int) -> bytes:
    return b'"tools":[' + b",".join(TOOL % (at, schema(size // count)) for at in range(count)) + b"]"  # fmt: skip


def wide(size: int) -> bytes:
    inner = members(lambda at: f"p{at}", b'{"type":"string"}', size - 60)
    return b'{"type":"object","properties":{' + inner + b"}}"


def nested(size: int) -> bytes:
    return many(b"[" * 500 + b"]" * 500, size)


MSG = b'{"role":"user","content":"a"}'
BLOCKS = b'{"type":"text","text":"a"}'

CASES: dict[str, Case] = {
    "unknown-anagrams": (TEXT, lambda n: body(b'"prompt":"hi","max_tokens":2', members(scrambled, b"1", n))),
    "unknown-near": (TEXT, lambda n: body(b'"prompt":"hi","max_tokens":2', members(near, b"1", n))),
    "unknown-long": (TEXT, lambda n: body(b'"prompt":"hi"', b'"%s":1' % (b"max_tokens" * (n // 11)))),
    "unknown-lists": (TEXT, lambda n: body(b'"prompt":"hi","max_tokens":2,"zz":' + many(b"[]", n))),
    "bad-word": (TEXT, lambda n: body(b'"prompt":"hi","bad_words":["%s"]' % (b"ab " * (n // 3 - 50)))),
    "bad-words": (TEXT, lambda n: body(b'"prompt":"hi","bad_words":' + many(b'"ab cd"', n))),
    "bad-words-most": (TEXT, lambda n: body(b'"prompt":' + many(b'"hi"', 5 * 1000) + b',"max_tokens":1,"bad_words":' + many(b'"%s"' % (b"xy " * 40), 123 * 60 + 200))),
    "stop": (TEXT, lambda n: body(b'"prompt":"hi","n":8,"stop":"%s"' % (b"ab" * (n // 2 - 60)))),
    "stops": (TEXT, lambda n: body(b'"prompt":"hi","stop":' + many(b'"ab cd"', n))),
    "stop-token-ids": (TEXT, lambda n: body(b'"prompt":"hi","stop_token_ids":' + many(b"5", n))),
    "kwargs": (CHAT, lambda n: body(HI, b'"chat_template_kwargs":{"a":' + many(b'"b"', n) + b"}")),
    "kwargs-nested": (CHAT, lambda n: body(HI, b'"chat_template_kwargs":{"a":' + nested(n) + b"}")),
    "prompts": (
        TEXT,
        lambda n: body(
            b'"max_tokens":1,"prompt":' + many(b'"%s"' % (b"word " * 700), min(n, 3503 * 1020))
        ),
    ),
    "prompts-fit": (TEXT, lambda n: body(b'"max_tokens":1,"prompt":' + many(b'"%s"' % (b"word " * 50), min(n, 253 * 1000)))),
    "prompts-of-ids": (TEXT, lambda n: body(b'"max_tokens":1,"prompt":' + many(many(b"55", n // 1100), n))),
    "prompts-of-ids-fit": (TEXT, lambda n: body(b'"max_tokens":1,"prompt":' + many(many(b"55", 9000), min(n, 9000 * 1000)))),
    "prompt-ids": (TEXT, lambda n: body(b'"prompt":' + many(b"5", n))),
    "prompt-empty-lists": (TEXT, lambda n: body(b'"prompt":' + many(b"[]", n))),
    "prompt-empty-texts": (TEXT, lambda n: body(b'"prompt":' + many(b'""', n))),
    "prompt-nested": (TEXT, lambda n: body(b'"prompt":' + nested(n))),
    "prompt-text": (TEXT, lambda n: body(b'"prompt":"%s"' % (b"a b" * (n // 3 - 20)))),
    "children": (TEXT, lambda n: body(b'"max_tokens":1,"n":4,"best_of":4,"stop":["xyz"],"prompt":' + many(b'"hi"', 5 * 1000))),
    "children-of-one": (TEXT, lambda n: body(b'"max_tokens":1,"n":128,"prompt":' + many(b"55", 3 * 4000))),
    "messages": (CHAT, lambda n: body(b'"messages":' + many(MSG, n))),
    "messages-most": (CHAT, lambda n: body(b'"messages":' + many(MSG, min(n, 30 * 9990)))),
    "messages-bad": (CHAT, lambda n: body(b'"messages":' + many(b"{}", n))),
    "message-parts": (CHAT, lambda n: body(b'"messages":[{"role":"user","content":' + many(BLOCKS, n) + b"}]")),
    "message-nested": (CHAT, lambda n: body(b'"messages":[{"role":"user","content":"a","x":' + nested(n) + b"}]")),
    "message-calls": (CHAT, lambda n: body(b'"messages":[{"role":"assistant","tool_calls":' + many(b'{"function":{"name":"f","arguments":"{}"}}', n) + b"}]")),
    "message-text": (CHAT, lambda n: body(b'"messages":[{"role":"user","content":"%s"}]' % (b"a b" * (n // 3 - 60)))),
    "message-role": (CHAT, lambda n: body(b'"messages":[{"role":"user","content":{"a":"%s"}}]' % (b"/a/b c" * (n // 6 - 60)))),
    "part-kind": (CHAT, lambda n: body(b'"messages":[{"role":"user","content":[{"type":"%s"}]}]' % (b"/a/b c" * (n // 6 - 60)))),
    "tools-many": (CHAT, lambda n: body(HI, tools(n, wide, 200))),
    "tools-one": (CHAT, lambda n: body(HI, tools(n, wide, 1))),
    "tools-nested": (CHAT, lambda n: body(HI, tools(n, lambda m: b'{"a":' + nested(m) + b"}", 1))),
    "tools-most": (CHAT, lambda n: body(HI, tools(min(n, 1 << 20) - 5000, wide, 200))),
    "tool-choice": (CHAT, lambda n: body(HI, tools(2000, wide, 2), b'"tool_choice":' + many(b"{}", n))),
    "documents": (CHAT, lambda n: body(HI, b'"documents":' + many(b'{"text":"a"}', n))),
    "logit-bias": (TEXT, lambda n: body(b'"prompt":"hi","logit_bias":{' + members(str, b"1", n) + b"}")),
    "logit-bias-most": (TEXT, lambda n: body(b'"prompt":["a","b","c","d"],"n":8,"max_tokens":1,"logit_bias":{' + members(lambda at: str(at % 10**6 * 10 + 1), b"1", min(n, 65000 * 11)) + b"}")),
    "allowed": (TEXT, lambda n: body(b'"prompt":"hi","max_tokens":1,"allowed_token_ids":' + many(b"5", n))),
    "allowed-n": (TEXT, lambda n: body(b'"prompt":"hi","n":64,"max_tokens":1,"allowed_token_ids":' + many(b"5", n))),
    "schema": (CHAT, lambda n: body(HI, b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":' + wide(n) + b"}}")),
    "schema-nested": (CHAT, lambda n: body(HI, b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"a":' + nested(n) + b"}}}")),
    "structured": (TEXT, lambda n: body(b'"prompt":"hi","structured_outputs":{"json":' + wide(n) + b"}")),
    "choice": (TEXT, lambda n: body(b'"prompt":"hi","guided_choice":' + many(b'"ab"', n))),
    "regex": (TEXT, lambda n: body(b'"prompt":"hi","guided_regex":"%s"' % (b"ab" * (n // 2 - 60)))),
    "xargs": (TEXT, lambda n: body(b'"prompt":"hi","n":8,"max_tokens":1,"vllm_xargs":{"a":' + many(b"[1]", n) + b"}")),
    "response-items": (RESPONSES, lambda n: body(b'"max_output_tokens":2,"input":' + many(b'{"role":"user","content":"a"}', n))),
    "response-parts": (RESPONSES, lambda n: body(b'"max_output_tokens":2,"input":[{"role":"user","content":' + many(b'{"type":"input_text","text":"a"}', n) + b"}]")),
    "response-calls": (RESPONSES, lambda n: body(b'"max_output_tokens":2,"input":' + many(b'{"type":"function_call","name":"f","arguments":"{}"}', n))),
    "response-metadata": (RESPONSES, lambda n: body(b'"stream":true,"max_output_tokens":2,"input":"hi","metadata":{"a":' + many(b"[1]", n) + b"}")),
    "response-tools": (RESPONSES, lambda n: body(b'"stream":true,"max_output_tokens":2,"input":"hi","tools":[{"type":"function","name":"f","parameters":' + wide(n) + b"}]")),
    "response-include": (RESPONSES, lambda n: body(b'"max_output_tokens":2,"input":"hi","include":' + many(b'"a"', n))),
    "anthropic-messages": (MESSAGES, lambda n: body(b'"max_tokens":2,"messages":' + many(MSG, n))),
    "anthropic-blocks": (MESSAGES, lambda n: body(b'"max_tokens":2,"messages":[{"role":"user","content":' + many(BLOCKS, n) + b"}]")),
    "anthropic-results": (MESSAGES, lambda n: body(b'"max_tokens":2,"messages":[{"role":"user","content":' + many(b'{"type":"tool_result","tool_use_id":"a","content":"a"}', n) + b"}]")),
    "anthropic-system": (MESSAGES, lambda n: body(b'"max_tokens":2,' + HI + b',"system":' + many(BLOCKS, n))),
    "anthropic-tools": (MESSAGES, lambda n: body(b'"max_tokens":2,' + HI + b',"tools":[{"name":"f","input_schema":' + wide(n) + b"}]")),
    "anthropic-stops": (MESSAGES, lambda n: body(b'"max_tokens":2,' + HI + b',"stop_sequences":' + many(b'"ab"', n))),
    "count-tokens": ("/v1/messages/count_tokens", lambda n: body(b'"messages":' + many(MSG, n))),
    "tokenize": ("/tokenize", lambda n: body(b'"prompt":"%s"' % (b"a b" * (n // 3 - 60)))),
    "tokenize-most": ("/tokenize", lambda n: body(b'"return_token_strs":true,"prompt":"%s"' % (b"word " * (min(n, 1 << 20) // 5 - 60)))),
    "tokenize-words": ("/tokenize", lambda n: body(b'"return_token_strs":true,"prompt":"%s"' % (b"\\u00e9" * (n // 6 - 60)))),
    "tokenize-messages": ("/tokenize", lambda n: body(b'"messages":' + many(MSG, n))),
    "detokenize": ("/detokenize", lambda n: body(b'"tokens":' + many(b"5", n))),
    "detokenize-most": ("/detokenize", lambda n: body(b'"tokens":' + many(b"55", min(n, 3 * 1_000_000)))),
    "detokenize-bad": ("/detokenize", lambda n: body(b'"tokens":' + many(b'"a"', n))),
    "invocations-messages": ("/invocations", lambda n: body(b'"messages":' + many(MSG, n))),
    "invocations-unknown": ("/invocations", lambda n: body(members(scrambled, b"1", n))),
    "brackets": (CHAT, lambda n: b"[" * n),
    "not-an-object": (CHAT, lambda n: many(b"[]", n)),
    "cut": (CHAT, lambda n: body(b'"messages":' + many(MSG, n))[:-2]),
    "model": (CHAT, lambda n: body(HI, b'"model":"%s"' % (b"/a/b c" * (n // 6 - 60)))),
    "salt": (CHAT, lambda n: body(HI, b'"cache_salt":"%s"' % (b"ab" * (n // 2 - 60)))),
    "abort": ("/abort_requests", lambda n: body(b'"request_ids":' + many(b'"ab"', n))),
}  # fmt: skip


def raw(name: str, size: int = MOST_BODY) -> bytes:
    return CASES[name][1](size)
