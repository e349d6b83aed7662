"""Users' logits processors, in both shapes: what they see, what they change, and whom their failures hurt."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from devices import VOCAB, Driver, TinyModel, enter, follow, generate, make_worker

from quire.errors import ConfigError
from quire.protocol.plan import WorkItem
from quire.protocol.sampling_params import SamplingParams
from quire.worker.sampling.load_processors import load_processors
from quire.worker.sampling.logits_processors import Processor
from quire.worker.sampling.vllm_processors import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
)


def wish(**extra) -> SamplingParams:
    temperature = extra.pop("temperature", 0.0)
    return SamplingParams(temperature=temperature, seed=5, max_tokens=50, extra_args=extra or None)


# -- our shape --------------------------------------------------------------------------------
class Force(Processor):
    """Row by row: the token that was asked for; or trouble, if that was."""

    def __init__(self):
        self.tokens = {}

    def validate(self, params):
        if (params.extra_args or {}).get("force") == "nonsense":
            raise ValueError("force must be a token id")

    def enter(self, new):
        if (token := (new.params.extra_args or {}).get("force")) is None:
            return False
        self.tokens[new.row] = token
        return True

    def leave(self, row):
        del self.tokens[row]

    def apply(self, logits_SV, selected):
        for index, row in zip(selected.indices.tolist(), selected.rows.tolist(), strict=True):
            token = self.tokens[row]
            if token == "raise":
                raise RuntimeError("as was asked")
            if token == "tell":
                selected.errors[index] = "told"
                continue
            logits_SV[index, token] = 1e4
        return logits_SV


class Halve(Processor):
    """Changes no argmax."""

    changes_argmax = False

    def enter(self, new):
        return bool((new.params.extra_args or {}).get("halve"))

    def apply(self, logits_SV, selected):
        logits_SV[torch.from_numpy(selected.indices)] *= 0.5
        return logits_SV


def test_a_native_logits_processor_is_applied():
    model = TinyModel()
    worker = make_worker(model, processors=load_processors([Force, f"{__name__}:Halve"]))
    half = wish(halve=True, temperature=1.0)
    prompts = {
        0: ([5], wish(force=42)),
        1: ([5], wish()),
        2: ([5], half),
        3: ([5], SamplingParams(temperature=2.0, seed=5)),
        4: ([5], wish(halve=True)),
    }
    texts, _ = generate(worker, prompts, 4)
    assert texts[0] == [42] * 4
    assert texts[1] == texts[4] == follow(model, [5], 4)
    assert texts[2] == texts[3] != generate(make_worker(), {0: ([5], wish(temperature=1.0))}, 4)[0]
    assert not worker.model_output.pipeline.uses.any()
    assert not any(worker.model_output.pipeline.counts)
    assert worker.model_output.pipeline.processors[4].tokens == {}


def test_failures_of_a_native_logits_processor():
    worker = make_worker(processors=[Force()])
    drive = Driver(worker)
    well = follow(TinyModel(), [5], 3)
    entered = [
        enter(0, [5], wish()),
        enter(1, [5], wish(force="tell")),
        enter(2, [5], wish(force="nonsense")),
        enter(3, [5], wish(force=9)),
    ]
    result = drive([WorkItem(row, 1) for row in range(4)], entered)
    assert result.errors == {1: "told", 2: "Force: force must be a token id"}
    assert result.kinds == {2: "invalid"}
    assert (result.tokens[0], result.tokens[3]) == (well[:1], [9])
    drive.left = [1, 2]
    result = drive(
        [WorkItem(0, 1), WorkItem(3, 1), WorkItem(1, 1)], [enter(1, [5], wish(force="raise"))]
    )
    # all that use it fail in this step, and nobody else
    message = "logits processor Force failed; the log has the exception"
    assert result.errors == {1: message, 2: message}
    assert result.kinds == {1: "processor", 2: "processor"}
    assert result.tokens[0] == well[1:2]
    drive.left = [1, 3]
    assert drive([WorkItem(0, 1), WorkItem(1, 1)], [enter(1, [5], wish(force=8))]).tokens == [
        well[2:],
        [8],
    ]


# -- the shape that vLLM users know -------------------------------------------------------------
class Follow(LogitsProcessor):
    """Forces token (start + number of outputs), and checks its batch update."""

    made = None

    def __init__(self, vllm_config, device, is_pin_memory):
        self.members, self.updates, self.calls = {}, 0, 0
        self.given = vllm_config, device, is_pin_memory
        Follow.made = self

    @classmethod
    def validate_params(cls, sampling_params):
        if (sampling_params.extra_args or {}).get("start") == -1:
            raise ValueError("start must be positive")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        self.calls += 1
        if batch_update is None:
            return
        self.updates += 1
        for index in batch_update.removed:
            del self.members[index]
        for index, params, prompt_ids, output_ids in batch_update.added:
            self.members[index] = params, prompt_ids, output_ids
        for start, end, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            assert end not in self.members
            self.members[end] = self.members.pop(start)
        assert sorted(self.members) == list(range(batch_update.batch_size))

    def apply(self, logits):
        assert logits.dtype == torch.float32
        assert len(logits) == len(self.members)
        for index, (params, prompt_ids, output_ids) in self.members.items():
            extra = params.extra_args or {}
            if (start := extra.get("start")) is not None:
                assert prompt_ids == [start, 1]
                logits[index, (start + len(output_ids)) % VOCAB] = 1e4
            if extra.get("raise"):
                raise KeyError("as was asked")
        return logits if self.calls % 2 else logits.clone()  # both are allowed


def test_a_processor_of_vllms_shape_through_comings_and_goings():
    worker = make_worker(processors=load_processors([Follow]))
    drive, dice = Driver(worker), random.Random(1)
    seated: dict[int, list[int]] = {}  # row -> start, outputs so far
    for _ in range(120):
        entered = []
        for row in set(range(8)) - set(seated) - set(drive.left):
            if dice.random() < 0.3:
                start, outputs = dice.randrange(VOCAB), []
                if dice.random() < 0.3:  # one that was preempted
                    outputs = [(start + i) % VOCAB for i in range(3)]
                entered.append(enter(row, [start, 1, *outputs], wish(start=start), 2))
                seated[row] = [start, len(outputs), len(outputs) + 2]
        working = [row for row in seated if dice.random() < 0.8]
        dice.shuffle(working)
        result = drive([WorkItem(row, seated[row][2]) for row in working], entered)
        assert not result.errors
        for row, tokens in zip(working, result.tokens, strict=True):
            start, outputs, _ = seated[row]
            assert tokens == [(start + outputs) % VOCAB]
            seated[row] = [start, outputs + 1, 1]
        for row in list(seated):
            if dice.random() < 0.15 or seated[row][1] > 50:
                del seated[row]
                drive.left.append(row)
    assert 20 < Follow.made.updates < Follow.made.calls


def test_a_vllm_logits_processor_changes_only_its_rows():
    worker = make_worker(processors=load_processors([Follow]))
    texts, _ = generate(worker, {0: ([5], wish()), 3: ([7, 1], wish(start=7))}, 3)
    assert texts == {0: follow(TinyModel(), [5], 3), 3: [7, 8, 9]}
    drive = Driver(worker)
    result = drive(
        [WorkItem(0, 1), WorkItem(1, 1)], [enter(0, [5], wish(start=-1)), enter(1, [5], wish())]
    )
    assert result.errors == {0: "Follow: start must be positive"}
    drive.left = [0]
    result = drive([WorkItem(1, 1), WorkItem(2, 1)], [enter(2, [6], wish(**{"raise": 1}))])
    assert set(result.errors) == {0, 1}  # such a class sees all rows at once
    assert "Follow failed; the log" in result.errors[0]
    drive.left = [1, 2]
    drive([])
    assert generate(worker, {0: ([5], wish())}, 3)[0] == {0: follow(TinyModel(), [5], 3)}


class OneByOne(AdapterLogitsProcessor):
    """Functions of one request."""

    def new_req_logits_processor(self, params):
        kind = (params.extra_args or {}).get("kind")
        if kind == "two":
            return self.no_repeat
        if kind == "three":
            return lambda prompt_ids, output_ids, logits: self.no_repeat(prompt_ids, logits)
        if kind == "bad":
            return lambda output_ids, logits: logits[:3] + output_ids[99]
        return None

    @staticmethod
    def no_repeat(ids, logits):
        logits[ids] = -torch.inf
        return logits


def test_functions_of_one_request():
    model = TinyModel()
    worker = make_worker(model, processors=load_processors([OneByOne]))
    first = follow(model, [5], 1)
    prompts = {
        0: ([5], wish(kind="two")),
        1: ([5], wish()),
        2: ([*first, 5], wish(kind="three")),
        3: ([5], wish(kind="bad")),
    }
    texts, results = generate(worker, prompts, 30)
    assert len(set(texts[0])) == 30
    assert texts[1] == follow(model, [5], 30)
    assert not set(texts[2]) & {*first, 5}
    for result in results:
        assert list(result.errors) == [3]
        assert "OneByOne failed; the log" in result.errors[3]
    # with nobody beside it that a function serves
    assert generate(worker, {1: ([5], wish())}, 2)[0][1] == texts[1][:2]


class Shrinks(LogitsProcessor):
    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits[:, :-1]


def test_logits_of_another_shape_are_refused():
    worker = make_worker(processors=load_processors([Shrinks]))
    _, (result,) = generate(worker, {0: ([5], wish(temperature=1.0))}, 1)
    assert "Shrinks failed; the log" in result.errors[0]
    # it changes no argmax, so it does not run where all rows are greedy
    assert generate(worker, {0: ([5], wish())}, 2)[0][0] == follow(TinyModel(), [5], 2)


# -- finding them -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nowhere_at_all:Thing", "'nowhere_at_all:Thing' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:Nothing", "cannot be imported: AttributeError"),
        ("Thing", "is not of the form module.Class or module:Class"),
        (dict, "is not a logits processor: it must be a class with apply, update_state"),
        (f"{__name__}:wish", "is not a logits processor"),
    ],
)
def test_invalid_processors_are_refused(wanted, message):
    with pytest.raises(ConfigError, match=message) as failure:
        load_processors([wanted])
    assert str(failure.value).startswith("logits_processors")


def test_valid_processors_are_loaded(tmp_path, monkeypatch):
    made = load_processors([f"{__name__}:Force", f"{__name__}.Force", Force, Follow], None, "cpu")
    assert [processor.name for processor in made] == ["Force"] * 3 + ["Follow"]
    _, device, pinned = Follow.made.given
    assert (device, pinned) == (torch.device("cpu"), False)

    class Fails(Follow):
        def __init__(self, *given):
            raise OSError("no such file")

    with pytest.raises(ConfigError, match="Fails cannot be constructed: OSError: no such file"):
        load_processors([Fails])
    # one that an installed package offers
    about = tmp_path / "offers-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: offers\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[quire.logits_processors]\nours = {__name__}:Force\n"
        f"[vllm.logits_processors]\ntheirs = {__name__}:Follow\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert [processor.name for processor in load_processors([])] == ["Force"]
    monkeypatch.setenv("QUIRE_PLUGINS", "theirs")
    assert [processor.name for processor in load_processors([])] == ["Follow"]
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    assert load_processors([]) == []
