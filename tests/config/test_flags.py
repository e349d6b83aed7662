"""Command lines and YAML files become a configuration; mistakes are reported."""

from __future__ import annotations

import pytest

from quire.config.config_file import read_yaml
from quire.config.engine_args import EngineArgs
from quire.config.flags import FlagParser, parse
from quire.config.from_keywords import engine_config
from quire.config.options import human_int, options
from quire.config.unknown_names import LLAMA_CPP
from quire.config.vllm_flags import OLD


def mistake(argv, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("128", 128),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("1M", 2**20),
        ("2g", 2 * 10**9),
        ("2G", 2 * 2**30),
        ("1t", 10**12),
        ("1T", 2**40),
        ("4Ki", 4096),
        ("1_000", 1000),
        ("-1", -1),
        ("0.5k", 500),
    ],
)
def test_numbers_for_people(text, number):
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1.0001k", "1x", "1kk", "١.٥", "1e3"])
def test_invalid_human_readable_numbers_are_refused(text):
    with pytest.raises(ValueError, match=r"whole number|capitals"):
        human_int(text)


def test_numbers_on_the_command_line():
    config = parse(
        ["--max-model-len", "25.6k", "--max-num-batched-tokens=8K", "--kv-cache-memory-bytes", "2G"]
    )
    assert config.model.max_model_len == 25600
    assert config.scheduler.max_num_batched_tokens == 8192
    assert config.cache.kv_cache_memory_bytes == 2 << 30
    assert parse(["--max-model-len", "-1"]).model.max_model_len == -1
    assert parse(["--max-model-len=auto"]).model.max_model_len == "auto"


def test_the_model_is_positional_or_a_flag():
    assert parse([]).model.model == "quire-tiny"
    assert parse(["some/model", "--seed", "1"]).model.model == "some/model"
    assert parse(["--seed", "1", "some/model"]).model.model == "some/model"
    assert parse(["--model", "some/model"]).model.model == "some/model"
    assert parse(["some/model", "--model", "some/model"]).model.model == "some/model"


def test_a_switch_before_the_model_does_not_consume_it():
    config = parse(["--enforce-eager", "some/model", "--hf-token", "--seed", "1"])
    assert config.model.model == "some/model"
    assert config.model.hf_token is True
    assert config.parallel.enforce_eager


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a", "b"], "unexpected argument 'b': the model is already 'a'"),
        (["a", "--model", "b"], "two models were given: 'a' and --model 'b'"),
        (["--served-model-name", "a", "b"], "write the model first: quire serve MODEL --served-model-name"),
        (["--max-num-seq", "8"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["-z"], "unknown flag"),
        (["--no-seed"], "unknown flag --no-seed; did you mean --seed?"),
        (["--max-num-seqs"], "--max-num-seqs: expected one argument"),
        (["--max-num-seqs", "many"], "max_num_seqs='many': 'many' is not a whole number"),
        (["--max-model-len", "1.5K"], "25.6k is 25600"),
        (["--gpu-memory-utilization", "most"], "gpu_memory_utilization='most'"),
        (["--dtype", "int3"], "dtype='int3': choose from auto, half, float16"),
        (["--enforce-eager=perhaps"], "enforce_eager='perhaps'|--enforce-eager"),
        (["--hf-overrides", "{a"], "hf_overrides='{a': must be a JSON object such as"),
        (["--hf-overrides", "[1]"], "hf_overrides='[1]': must be a JSON object"),
        (["--hf-overrides", "x", "--hf-overrides.a", "1"], "--hf-overrides x: not a JSON object"),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], "a already has a value"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config was given twice"),
        (["--config", "a.json"], "--config a.json: the file name must end in .yaml or .yml"),
        (["--config", "/nowhere/a.yaml"], "--config /nowhere/a.yaml: "),
        (["--config"], "--config: the file name is missing"),
        (["--port", "70000"], "port='70000': must be a whole number of at most 65535"),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization='0': must be a number above 0"),
        (["--cudagraph-capture-sizes", "1", "0"], "$[1] must be a whole number of at least 1"),
        (["--ctx-size", "4096"], "unknown flag --ctx-size, a name of llama.cpp: use --max-model-len"),
        (["-c", "4096"], "unknown flag -c, a name of llama.cpp: use --max-model-len"),
        (["-m", "model.gguf"], "unknown flag -m, a name of llama.cpp: use the model as the first word"),
        (["-ngl", "99"], "unknown flag -ngl, a name of llama.cpp: leave it out (the whole model is on the device"),
        (["--threads", "4"], "a name of llama.cpp: use QUIRE_CPU_OMP_THREADS_BIND"),
        (["--no-mmap"], "unknown flag --no-mmap, a name of llama.cpp: leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_names_the_flag_and_the_remedy(argv, says, capsys):
    said = mistake(argv, capsys)
    assert said.startswith("quire serve: error: ")
    assert any(part in said for part in says.split("|")), said
    assert said.count("\n") == 1


def test_names_of_llama_cpp_are_no_names_here():
    for name, remedy in LLAMA_CPP.items():
        assert name.replace("-", "_") not in options()
        assert name.replace("-", "_") not in OLD
        flags = [word.strip(",;()") for word in remedy.split() if word.startswith("--")]
        for flag in flags:
            assert flag[2:].replace("-", "_") in options() | OLD


def test_a_keyword_of_llama_cpp_python():
    with pytest.raises(
        TypeError, match=r"unknown keyword n_ctx, a name of llama.cpp: use --max-model-len"
    ):
        engine_config({"n_ctx": 4096})


def test_the_last_of_two_equal_flags_counts(warnings):
    assert parse(["--seed", "1", "--seed=2", "--max_num_seqs", "3"]).model.seed == 2
    assert warnings == ["Found duplicate keys --seed: the last value is used"]


# YAML


def yaml(tmp_path, text, name="server.yaml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


YAML = """
# what a deployment keeps
model: from/file
max-num-seqs: 8
max_model_len: 4k
served-model-name: [one, two]
enforce-eager: true
enable-prefix-caching: false
no-enable-chunked-prefill: true
hf-overrides:
  rope_scaling: {rope_type: linear, factor: 2.0}
disable-log-requests: true
api-key: 123
host:
"""


def test_a_file_has_flags(tmp_path, warnings):
    config = parse(["--config", yaml(tmp_path, YAML)])
    assert config.model.model == "from/file"
    assert config.scheduler.max_num_seqs == 8
    assert config.model.max_model_len == 4000
    assert config.model.served_model_name == ["one", "two"]
    assert config.parallel.enforce_eager
    assert config.cache.enable_prefix_caching is False
    assert config.scheduler.enable_chunked_prefill is False
    assert config.model.hf_overrides == {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert config.server.host is None
    assert [text.split()[0] for text in warnings] == ["--disable-log-requests"]


def test_the_command_line_wins_over_the_file(tmp_path):
    path = yaml(tmp_path, YAML)
    config = parse(["other/model", "--config", path, "--max-num-seqs", "2", "--no-enforce-eager"])
    assert config.model.model == "other/model"
    assert config.scheduler.max_num_seqs == 2
    assert not config.parallel.enforce_eager
    assert parse([f"--config={path}", "--served-model-name", "x"]).model.served_model_name == ["x"]
    wrong = yaml(tmp_path, "seed: one\ngrpc: true\n", "wrong.yaml")
    assert parse(["--config", wrong, "--seed", "3", "--no-grpc"]).model.seed == 3


def test_an_empty_config_file_sets_nothing(tmp_path):
    assert read_yaml(yaml(tmp_path, "# nothing\n", "a.yml")) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: 1\nmax-num-seq: 3\n", "line 2: unknown flag --max-num-seq; did you mean --max-num-seqs"),
        ("- seed\n", "the file must map flags to values"),
        ("seed: 1\nhost: [a\nport: 1\n", "server.yaml, line 3: while parsing a flow sequence that begins in line 2, expected ',' or ']', but got ':'"),
        ("# two\n\thost: a\n", "server.yaml, line 2: while scanning for the next token, found character '\\t' that cannot start"),
        ("host: \x07\n", "server.yaml: unacceptable character"),
        ("# one\nseed: one\n", "server.yaml, line 2: seed='one'"),
        ("max-num-seqs: 1.5\n", "server.yaml, line 1: max_num_seqs=1.5: must be a whole number"),
        ("seed: 1\ngrpc: true\n", "server.yaml, line 2: --grpc (gRPC, rendering servers and scale-out) is not supported yet"),
        ("enforce-eager: 7\n", "server.yaml, line 1: enforce_eager=7: must be true or false"),
    ],
    ids=lambda text: text.splitlines()[0],
)  # fmt: skip
def test_a_mistake_in_a_file(tmp_path, text, says, capsys):
    assert says in mistake(["--config", yaml(tmp_path, text)], capsys)


def test_every_field_can_stand_in_a_file(tmp_path):
    """Also lists, objects and switches: the default of each, written and read, is the default again."""
    import yaml as library

    defaults = {name: o.default for name, o in options().items() if o.default is not None}
    config = parse(["--config", yaml(tmp_path, library.safe_dump(defaults))])
    for name, option in options().items():
        assert getattr(getattr(config, option.section), name) == option.default


# The parser of a program


def program() -> FlagParser:
    """A parser as vLLM's examples make it, with flags of the program."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="program"))
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=16)
    group.add_argument("--top_p", type=float)
    group.add_argument("--port", type=int)
    group.add_argument("--stream", action="store_true")
    return parser


FlexibleArgumentParser = FlagParser  # under this name, programs know it


def test_a_program_reads_a_file(tmp_path):
    text = (
        "model: from/file\nmax-num-seqs: 8\nmax_tokens: '32'\ntop-p: 0.5\nstream: true\nport: 80\n"
    )
    args = program().parse_args(["--config", yaml(tmp_path, text), "--max_num_seqs=9"])
    assert (args.max_tokens, args.top_p, args.stream, args.port) == (32, 0.5, True, 80)
    assert (args.model, args.max_num_seqs, args.dtype) == ("from/file", 9, "auto")
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert (config.model.model, config.scheduler.max_num_seqs) == ("from/file", 9)


def test_a_program_has_dotted_flags(warnings):
    args = program().parse_args(
        ["--hf-overrides.a.b", "1", "-cc.mode", "3", "--max-tokens", "7", "--max-model-len", "4k"]
    )
    assert (args.hf_overrides, args.max_tokens, args.max_model_len) == ({"a": {"b": 1}}, 7, 4000)
    assert EngineArgs.from_cli_args(args).hf_overrides == {"a": {"b": 1}}
    assert [text.split()[0] for text in warnings] == ["compilation_config"]
    assert program().parse_args([]).hf_overrides == {}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config", "nothere.yml"], "program: error: --config nothere.yml: [Errno 2]"),
        (["--max-num-seq", "3"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["--max-num-seqs", "many"], "max_num_seqs='many': "),
        (["--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["--host", "a"], "unknown flag --host"),
    ],
    ids=str,
)
def test_a_mistake_in_a_program(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        program().parse_args(argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_mistake_in_a_programs_file(tmp_path, capsys):
    for text, message in (
        ("max_tokens: many\n", "line 1: invalid literal"),
        ("a: 1\n", "line 1: unknown flag --a"),
    ):
        with pytest.raises(SystemExit):
            program().parse_args(["--config", yaml(tmp_path, text)])
        assert message in capsys.readouterr().err


def test_a_programs_own_flags_are_its_own(tmp_path):
    parser = EngineArgs.add_cli_args(FlagParser())
    parser.add_argument("--config")
    parser.add_argument("--api-key")
    args = parser.parse_args(["--config", "mine.ini", "--api-key", "text"])
    assert (args.config, args.api_key) == ("mine.ini", "text")
    commands = FlagParser()
    run = commands.add_subparsers(dest="command").add_parser("run")
    EngineArgs.add_cli_args(run)
    run.add_argument("-v", action="count")
    path = yaml(tmp_path, "seed: 4\n")
    args = commands.parse_args(["run", "--config", path, "--max_num_seqs", "2", "-vv"])
    assert (args.command, args.seed, args.max_num_seqs, args.v) == ("run", 4, 2, 2)


def test_a_program_passes_all_its_arguments_on(tmp_path, warnings):
    """As vLLM's examples do: their own flags are taken out, then LLM(**vars(args))."""
    args = program().parse_args(["--config", yaml(tmp_path, "max-num-seqs: 8\n"), "--seed", "3"])
    assert (args.enable_lora, args.max_loras, args.speculative_config) == (False, 1, {})
    EngineArgs.from_cli_args(args)
    own = ("max_tokens", "top_p", "port", "stream")
    config = engine_config({name: value for name, value in vars(args).items() if name not in own})
    assert (config.scheduler.max_num_seqs, config.model.seed) == (8, 3)
    assert not warnings
