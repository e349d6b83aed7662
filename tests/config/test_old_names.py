"""The table of old names: each row does what its letter says, by keyword and by flag; and what some of them become."""

from __future__ import annotations

import json
import re

import pytest

from quire.compat.vllm_values import StructuredOutputsConfig
from quire.config.engine_args import AsyncEngineArgs, EngineArgs
from quire.config.flags import FlagParser, parse
from quire.config.from_keywords import UnknownName, engine_config, translate
from quire.config.options import options
from quire.config.structured import structured_options
from quire.config.vllm_flags import OLD, SHORT, TABLE, VllmFlag
from quire.errors import ConfigError, Unsupported

ROWS = [row for row in OLD.values() if row.name != "model_tag"]  # that one is the positional word


def loud(row: VllmFlag):
    """A value that asks for something."""
    if row.kind == "flag":
        return True
    if row.name in ("max_num_scheduled_tokens", "distributed_timeout_seconds"):
        return 512
    return ["loud"] if row.kind == "list" else "loud"


def on_command_line(row: VllmFlag, value) -> list[str]:
    flag = f"--{row.name.replace('_', '-')}"
    if row.kind == "flag":
        return [flag if value else f"--no-{flag[2:]}"]
    if row.kind == "list":
        return [flag, *value]
    return [flag, value if isinstance(value, str) else json.dumps(value)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_has_its_effect(row, warnings):
    value = loud(row)
    if row.treatment == "E":
        feature, colon, remedy = row.say.partition(": ")
        assert feature
        assert colon
        assert remedy
        with pytest.raises(Unsupported, match=f"(?s){row.name}.*{remedy[:20]}"):
            engine_config({row.name: value})
        with pytest.raises(SystemExit):
            parse(on_command_line(row, value))
        return
    engine_config({row.name: value})
    parse(on_command_line(row, value))
    if row.treatment == "W":
        assert row.say
        assert [text.split()[0] for text in warnings] == [
            row.name,
            f"--{row.name.replace('_', '-')}",
        ]
        assert all(row.say in text for text in warnings)
    else:
        assert not warnings


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_default_value_causes_no_warning(row, warnings):
    for value in (None, *row.quiet):
        engine_config({row.name: value})
        if value not in (None, ""):
            parse(on_command_line(row, [value] if row.kind == "list" else value))
    if row.kind == "flag" and row.to is None:
        engine_config({row.name: False})
        parse(on_command_line(row, False))
    assert not warnings


def test_no_name_is_in_the_table_twice():
    sections = (TABLE[name] for name in ("refused", "warned", "accepted"))
    names = [
        re.match(r"\w+", word)[0]
        for rows in sections
        for words in rows.values()
        for word in words.split()
    ]
    assert len(names) == len(set(names))
    assert not set(names) & set(options())


def test_short_forms_are_of_rows():
    assert set(SHORT) <= set(OLD) | set(options())
    assert len(set(SHORT.values())) == len(SHORT)


# What they become


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"disable_log_requests": True}, {"enable_log_requests": False}),
        ({"disable_log_requests": False}, {"enable_log_requests": True}),
        ({"task": "generate"}, {"runner": "generate"}),
        ({"task": "auto"}, {"runner": "auto"}),
        ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
        ({"task": "score"}, {"runner": "pooling", "convert": "classify"}),
        ({"rope_theta": 5.0}, {"hf_overrides": {"rope_theta": 5.0}}),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear"}, "hf_overrides": {"a": 1}},
            {"hf_overrides": {"rope_theta": 5.0, "rope_scaling": {"type": "linear"}, "a": 1}},
        ),
        ({"rope_theta": 5.0, "hf_overrides": '{"rope_theta": 6.0}'}, {"hf_overrides": {"rope_theta": 6.0}}),
        ({"attention_config": {"backend": "TORCH_SDPA"}}, {"attention_backend": "TORCH_SDPA"}),
        ({"attention_config": {"use_cudnn": True}}, {}),
        ({"attention_config": {"backend": "A"}, "attention_backend": "B"}, {"attention_backend": "B"}),
        ({"attention_config": {"backend": "A"}, "attention_backend": None}, {"attention_backend": "A"}),
        ({"device_memory_utilization": 0.4}, {"gpu_memory_utilization": 0.4}),
        ({"max-num-seqs": 3}, {"max_num_seqs": 3}),
    ],
    ids=str,
)  # fmt: skip
def test_old_names_map_to_new_options(given, fields):
    assert translate(given) == fields


def test_from_the_command_line():
    assert parse(["--no-disable-log-requests"]).observe.enable_log_requests
    assert parse(["--rope-theta", "5"]).model.hf_overrides == {"rope_theta": 5}
    assert parse(["--rope-scaling", '{"factor": 2}']).model.hf_overrides == {
        "rope_scaling": {"factor": 2}
    }
    assert parse(["-ac.backend", "XFORMERS"]).parallel.attention_backend == "XFORMERS"


def test_vllms_object_of_structured_outputs():
    """Any object with these attributes: vLLM's class is a stand-in that keeps its arguments."""
    given = StructuredOutputsConfig(
        backend="guidance", reasoning_parser="qwen3", disable_any_whitespace=None
    )
    config = engine_config({"structured_outputs_config": given})
    assert config.structured.structured_outputs_config == {"backend": "guidance"}
    assert config.server.reasoning_parser == "qwen3"
    line = ["--structured-outputs-config.reasoning_parser", "qwen3", "--reasoning-parser", "hermes"]
    assert parse(line[:2]).server.reasoning_parser == "qwen3"
    assert parse(line).server.reasoning_parser == "hermes"  # the field's own name takes precedence
    assert given.reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backends": 1}, "structured_outputs_config.backends: unknown key; choose from backend, "),
        ({"jumps": 3}, "structured_outputs_config.jumps=3: must be true or false"),
        (
            {"backend": "mine"},
            "structured_outputs_config.backend='mine': choose from auto, guidance",
        ),
    ],
    ids=str,
)
def test_a_wrong_key_of_structured_outputs(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        structured_options(given)


def test_rope_theta_beside_a_function_as_hf_overrides_is_refused():
    with pytest.raises(ConfigError, match=r"hf_overrides is a function, so rope_theta"):
        translate({"rope_theta": 5.0, "hf_overrides": lambda config: config})


@pytest.mark.parametrize(
    ("limits", "pictures"),
    [
        ({"image": 0}, 0), ({"image": {"count": 2, "width": 512}, "video": 0}, 2), ("image=3,video=0", 3), ({}, 999),
        ('{"image": 4}', 4), ({"video": 1}, 999), ({"image": {"width": 1}}, 999),
    ],
    ids=str,
)  # fmt: skip
def test_forms_of_limits_of_media(limits, pictures, warnings):
    assert engine_config({"limit_mm_per_prompt": limits}).media.max_pictures == pictures
    assert not warnings


@pytest.mark.parametrize("limits", [{"image": -1}, {"smell": 1}, "image", "image=x", [1]], ids=str)
def test_other_limits_of_media_are_refused(limits):
    with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
        engine_config({"limit_mm_per_prompt": limits})


# Names in no table


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match="unknown keyword max_num_seq; did you mean max_num_seqs"):
        engine_config({"max_num_seq": 4})
    with pytest.raises(UnknownName, match=r"unknown keyword zzzzqqqq$"):
        engine_config({"zzzzqqqq": 4})
    with pytest.raises(
        UnknownName, match="unknown flag --max-num-seq; did you mean --max-num-seqs"
    ):
        engine_config({"max_num_seq": 4}, "flag")


def test_a_flag_of_the_server_is_no_keyword():
    with pytest.raises(TypeError, match="quire serve --api-server-count"):
        engine_config({"api_server_count": 2})
    assert engine_config({"api_server_count": None, "host": None}).server.host is None
    config = engine_config({"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})
    assert config.server.tool_call_parser == "hermes"


# EngineArgs


def test_engine_args_have_fields_as_attributes():
    args = EngineArgs("m", max_num_seqs=4, disable_log_requests=True)
    assert (args.model, args.max_num_seqs, args.enable_log_requests) == ("m", 4, False)
    args.max_num_seqs = 5
    config = args.create_engine_config()
    assert config.scheduler.max_num_seqs == 5
    assert config.model.model == "m"
    assert repr(args) == "EngineArgs(model='m', max_num_seqs=5)"
    with pytest.raises(TypeError, match="max_num_seqs"):
        AsyncEngineArgs(max_num_seq=4)


def test_a_programs_own_parser_accepts_the_flags(warnings):
    parser = EngineArgs.add_cli_args(FlagParser())
    parser.add_argument("--host", default="here")  # the program's, as --port and --config are
    parser.add_argument("--my_own", type=int)
    args = parser.parse_args(
        [
            "--model",
            "m",
            "--max_num_seqs",
            "4",
            "--no_enable_prefix_caching",
            "--my-own=3",
            "--hf-overrides",
            '{"a": 1}',
            "--swap-space=4",
            "--max-loras=1",
            "--limit-mm-per-prompt",
            '{"image": 0}',
        ]
    )
    assert (args.host, args.my_own, args.max_model_len, args.dtype) == ("here", 3, None, "auto")
    made = EngineArgs.from_cli_args(args)
    assert (made.model, made.max_num_seqs, made.enable_prefix_caching) == ("m", 4, False)
    assert made.hf_overrides == {"a": 1}
    assert not warnings


def test_the_environment_fills_options_that_a_parser_left_unset(monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "3")
    args = EngineArgs.add_cli_args(FlagParser()).parse_args([])
    assert EngineArgs.from_cli_args(args).log_stats_interval == 3.0
