"""How words on a command line, and lines of a YAML file, become a configuration; and what is said of mistakes."""

from __future__ import annotations

import pytest

from quire.config.flags import parse, read_yaml
from quire.config.options import human_int, options


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
def test_what_is_no_number_for_people(text):
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


def test_the_model_comes_first_or_by_flag():
    assert parse([]).model.model == "quire-tiny"
    assert parse(["some/model", "--seed", "1"]).model.model == "some/model"
    assert parse(["--seed", "1", "some/model"]).model.model == "some/model"
    assert parse(["--model", "some/model"]).model.model == "some/model"
    assert parse(["some/model", "--model", "some/model"]).model.model == "some/model"


def test_a_switch_beside_the_model_does_not_eat_it():
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_names_the_flag_and_the_remedy(argv, says, capsys):
    said = mistake(argv, capsys)
    assert said.startswith("quire serve: error: ")
    assert any(part in said for part in says.split("|")), said
    assert said.count("\n") == 1


def test_a_flag_given_twice(warnings):
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
    wrong = yaml(tmp_path, "seed: one\nenable-lora: true\n", "wrong.yaml")
    assert parse(["--config", wrong, "--seed", "3", "--no-enable-lora"]).model.seed == 3


def test_an_empty_file_says_nothing(tmp_path):
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
        ("max-num-seqs: 1.5\n", "server.yaml, line 1: max_num_seqs=1.5: Expected `int`, got `float`"),
        ("seed: 1\nenable-lora: true\n", "server.yaml, line 2: --enable-lora (LoRA) is not supported yet"),
        ("enforce-eager: 7\n", "server.yaml, line 1: enforce_eager=7: Expected `bool`, got `int`"),
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
