"""Drafters without a model: what they propose, from which texts, and that failures and wrong tokens cost proposals only."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire.errors import ConfigError, RankLost
from quire.features.speculation import past_answers, token_index
from quire.features.speculation.copy_source import NEAR, CopySource
from quire.features.speculation.drafter import Drafter
from quire.features.speculation.drafters import Drafters
from quire.features.speculation.lookup_drafter import LookupDrafter
from quire.features.speculation.past_answers import PastAnswers
from quire.features.speculation.token_index import END, TokenIndex
from quire.protocol.request import EngineRequest
from quire.protocol.sampling_params import SamplingParams

A, B = b"a", b"b"
ROWS: Any = SimpleNamespace(vocab_size=9)
PROMPTS = prompts(6)


def drafter(depth: int = 8, answers: int = 10, factor: float = 2.0, least: float = 0.1) -> LookupDrafter:  # fmt: skip
    return LookupDrafter(1, depth, PastAnswers(answers), factor, least)


def proposal(one: LookupDrafter, tokens: Sequence[int], scope: bytes = A, limit: int = 9) -> list[int]:  # fmt: skip
    one.enter(7, tokens, scope)
    found = one.propose(7, limit)
    one.leave(7)
    return found


def answered(one: LookupDrafter, prompt: list[int], answer: list[int], scope: bytes = A) -> None:
    one.enter(3, prompt, scope)
    one.propose(3, 1)
    for token in answer:
        one.extend(3, [token])
    one.leave(3)


def test_the_text_itself_is_searched() -> None:
    assert proposal(drafter(), [1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1, 2, 3, 4]
    assert proposal(drafter(), [1, 2, 2, 2]) == [2, 2, 2, 2]
    assert proposal(drafter(factor=1.0), [1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]
    assert proposal(drafter(), [1, 2, 3, 4, 5, 2, 6, 2]) == [6, 2]  # of one token, the last place
    assert proposal(drafter(), [1, 2, 3, 4, 5, 1, 2, 3], limit=2) == [4, 5]
    assert proposal(drafter(), [1, 2, 3]) == []
    assert proposal(drafter(), [1]) == []


def test_the_longest_match_counts_and_then_the_most_frequent_continuation() -> None:
    far = [9, 1, 2, 3, 7, 8, 6, 1, 2, 3, 5, 5, 4, 9, 1, 2, 3]
    assert proposal(drafter(), far, limit=2) == [7, 8]
    often = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2, 5, 3, 3, 1, 2]
    assert proposal(drafter(depth=2), often, limit=1) == [5]
    assert proposal(drafter(depth=2, least=0.7), often, limit=1) == []


def record(*values: int) -> list[int]:
    """Two keys, and their values."""
    return [1, 2, values[0], 3, 4, *values[1:], 5, 6]


@pytest.mark.parametrize("one", [LookupDrafter(2, 4), LookupDrafter(1, 4), drafter(factor=8)])
def test_a_text_goes_on_behind_one_or_two_other_tokens(one: Drafter) -> None:
    one.enter(7, record(11, 12, 13), A)
    assert one.propose(7, 4) == []
    found = []
    for token in record(21, 22, 23):
        one.extend(7, [token])
        found.append(one.propose(7, 2))
    assert found[1:7] == [[11, 3], [3, 4], [4, 12], [12, 13], [13, 5], [5, 6]]
    assert found[8] == [1, 2]
    for token in (31, 32, 33):
        one.extend(7, [token])
        found.append(one.propose(7, 2))
    assert found[9:] == [[2, 21], [21, 3], []]  # the third is none of that text


def three_keys(*values: list[int]) -> list[int]:
    """A comma (9) follows each value but the last."""
    return [20, 1, 11, *values[0], 9, 2, 11, *values[1], 9, 3, 11, *values[2], 12]


@pytest.mark.parametrize("one", [LookupDrafter(1, 4), drafter(factor=8)])
def test_a_record_goes_on_after_its_commas_as_the_last_one(one: Drafter) -> None:
    # The first value is copied from the place after these tokens, which is a run of its own.
    others = range(100, 116)
    question = [*others, 60, 61, 62, 63, 50]
    one.enter(7, [*three_keys([31, 32], [33], [34, 35]), *question], A)
    behind_values, behind_commas = [], []
    for token in three_keys([60, 61, 62, 63], [71, 72, 73, 74, 75], [81])[:-1]:
        one.extend(7, [token])
        found = one.propose(7, 3)
        if token == 60:
            behind_values = found
        if token == 9:
            behind_commas.append(found[0])
    assert behind_values == [61, 62, 63]
    assert behind_commas == [2, 3]


def test_a_run_counts_only_near_and_of_two_tokens_or_more() -> None:
    def place_behind(copied: int, between: int) -> int:
        """The place of token 9 after a run of `copied` tokens and `between` others; token 9 also occurs later."""
        index, runs = TokenIndex(), CopySource()
        index.extend([1, 2, 3, *range(100, 100 + between), 9, 4, *range(200, 230), 9, 5, 6])
        runs.follow(index.tokens, 0)
        index.extend([*range(1, 1 + copied), 300, 301, 9])
        found = runs.place_after_token(index)
        assert runs.place_after_token(index) == found  # what it copied is known
        return index.after(found, 1)[0]

    assert [place_behind(2, n) for n in (0, 8, NEAR - 2, NEAR - 1)] == [4, 4, 4, 5]
    assert [place_behind(n, 8) for n in (0, 1, 2, 3)] == [5, 5, 4, 4]


def test_a_past_answer_goes_on_behind_one_or_two_other_tokens() -> None:
    one = drafter(factor=8)
    answered(one, [50, 51], record(11, 12, 13))
    one.enter(7, [60, 1, 2], A)
    assert one.propose(7, 2) == [11, 3]
    for token, expected in ((21, [3, 4]), (22, [4, 12]), (23, [])):
        one.extend(7, [token])
        assert one.propose(7, 2) == expected


def test_the_longer_match_counts_of_the_text_itself_and_a_past_answer() -> None:
    one = drafter(factor=8)
    answered(one, [50, 51], [1, 2, 3, 4, 5, 6])
    assert proposal(one, [2, 3, 8, 8, 1, 2, 3], limit=3) == [4, 5, 6]
    assert proposal(one, [9, 2, 3, 8, 8, 9, 2, 3], limit=3) == [8, 8, 9]


def test_past_answers_are_found_in_their_scope_only() -> None:
    one = drafter()
    answered(one, [50, 51], [1, 2, 3, 4, 5])
    assert proposal(one, [60, 1, 2]) == [3, 4, 5]
    assert proposal(one, [60, 50, 51]) == []  # prompts are not kept
    assert proposal(one, [60, 1, 2], scope=B) == []
    assert list(one.past._by_scope) == [A]
    none = drafter(answers=0)
    answered(none, [50, 51], [1, 2, 3, 4, 5])
    assert proposal(none, [60, 1, 2]) == []


def test_answers_for_which_another_drafter_had_all_proposals_are_kept_too() -> None:
    one = drafter()
    chain = Drafters([Always(), one], ROWS)
    chain.enter(3, [50, 51], A)
    for token in (1, 2, 3, 4, 5):
        assert chain.propose_all({3: 2}) == {3: [8, 8]}
        chain.extend(3, [token])
    chain.leave(3)
    assert proposal(one, [60, 1, 2]) == [3, 4, 5]
    assert list(one.past._by_scope[A].tokens) == [1, 2, 3, 4, 5, END]


def test_what_a_preempted_request_knew_counts_once() -> None:
    one = drafter()
    answered(one, [50, 51], [1, 2, 3])
    answered(one, [50, 51, 1, 2, 3], [4, 5, 6])
    assert list(one.past._by_scope[A].tokens) == [1, 2, 3, END, 4, 5, 6, END]


def test_the_oldest_answers_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    one = drafter(answers=2)
    for start, scope in ((10, A), (20, B), (30, A)):
        answered(one, [1], [start, start + 1, start + 2, start + 3], scope)
    assert [proposal(one, [1, 10, 11]), proposal(one, [1, 20, 21], B), proposal(one, [1, 30, 31])] == [[], [22, 23], [32, 33]]  # fmt: skip
    monkeypatch.setattr(past_answers, "MAX_BYTES", 8 * past_answers.BYTES_PER_TOKEN)
    answered(one, [1], list(range(40, 60)), B)
    assert one.past.num_bytes <= past_answers.MAX_BYTES
    assert list(one.past._by_scope) == [B]
    assert proposal(one, [1, 40, 41], B) == [42, 43, 44, 45]


def test_of_several_places_the_longest_match_counts_and_then_the_last() -> None:
    one = LookupDrafter(2, 3)

    def found(*tokens: int) -> list[int]:
        one.enter(4, tokens[:3], A)
        one.extend(4, tokens[3:])
        return one.propose(4, 2)

    assert found(7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 8, 1, 2) == [4, 9]
    assert found(7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2) == [3, 9]
    assert found(8, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2) == [4, 9]
    assert found(1, 2, 1, 2) == [1, 2]
    assert found(5, 6, 6, 6) == [6, 6]
    assert found(1, 2, 3) == []
    assert found(3, 1, 3) == []
    one = LookupDrafter(1, 3)
    assert found(3, 1, 3) == [1, 3]
    assert found(3, 1, 3, 2, 3) == [2, 3]
    assert found(1, 2, 3) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_index_agrees_with_a_search_through_all_texts(size: int) -> None:
    draw = random.Random(size)
    index, texts = TokenIndex(size), list[list[int]]()
    for _ in range(60):
        texts.append([draw.randrange(4) for _ in range(draw.randint(1, 12))])
        index.add_text(texts[-1])
        if len(texts) > 5:
            index.drop_text(len(texts.pop(0)))
        for _ in range(5):
            recent = type(index.tokens)("i", [draw.randrange(4) for _ in range(6)])
            expected = [
                (index.start + sum(len(text) + 1 for text in texts[:number]) + end, common(text[:end], recent))
                for number, text in enumerate(texts)
                for end in range(size, len(text))
                if text[end - size : end] == recent[-size:].tolist()
            ]  # fmt: skip
            found = [(place, index.match(place, recent)) for place in index.places(recent)]
            assert found == expected[::-1][: token_index.MAX_PLACES]
    for text in texts:
        index.drop_text(len(text))
    assert [len(index.tokens), len(index._last), len(index._after)] == [0, 0, 0]


def common(text: list[int], recent: Any) -> int:
    """How many of the last tokens are equal."""
    count = 0
    while count < min(len(text), len(recent)) and text[-1 - count] == recent[-1 - count]:
        count += 1
    return count


class Fixed(Drafter):
    def __init__(self, proposals: dict[int, list[int]]):
        self.proposals, self.asked = proposals, list[dict[int, int]]()

    def propose_all(self, limits: dict[int, int]) -> dict[int, list[int]]:
        self.asked.append(limits)
        return {row: self.proposals[row] for row in limits if row in self.proposals}


def test_a_chain_asks_the_next_drafter_for_rows_without_a_proposal() -> None:
    first, second = Fixed({1: [5], 2: []}), Fixed({1: [6], 2: [7], 3: [8]})
    assert Drafters([first, second], ROWS).propose_all({1: 4, 2: 4, 3: 4}) == {
        1: [5],
        2: [7],
        3: [8],
    }
    assert second.asked == [{2: 4, 3: 4}]


class Failing(Drafter):
    """It fails for some rows, and proposes what is no token."""

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        if len(tokens) % 2:
            raise RuntimeError("odd")

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        if row == 2:
            raise KeyError(row)

    def leave(self, row: int) -> None:
        raise KeyError(row)

    def propose(self, row: int, limit: int) -> list[int]:
        return [5, 1 << 20, 3] if row else [-1]


class Broken(Drafter):
    def propose(self, row: int, limit: int) -> list[int]:
        raise RuntimeError("never")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> list[list[int]]:
    with engine(checkpoint) as one:
        return one.tokens(PROMPTS, greedy(40))


@pytest.fixture(scope="module")
def speculating(checkpoint: str) -> Iterator[Engine]:
    config = {"method": "suffix,ngram", "num_speculative_tokens": 4, "adaptive": False, "prompt_lookup_max": 2}  # fmt: skip
    with engine(checkpoint, speculative_config=config) as one:
        yield one


def drafted(one: Engine, params: SamplingParams, **fields: Any) -> int:
    before = one.stats()["counts"]["spec_decode_num_draft_tokens"]
    one.found = one.tokens(PROMPTS, params, **fields)
    return int(one.stats()["counts"]["spec_decode_num_draft_tokens"] - before)


def test_past_answers_help_the_next_request(speculating: Engine, plain: list[list[int]]) -> None:
    first = drafted(speculating, greedy(40))
    assert speculating.found == plain
    before = speculating.stats()["counts"]["spec_decode_num_accepted_tokens"]
    assert drafted(speculating, greedy(40)) > first + 50
    assert speculating.found == plain
    assert speculating.stats()["counts"]["spec_decode_num_accepted_tokens"] > before + 100


@pytest.mark.parametrize("field", ["salt", "tenant"])
def test_requests_that_share_nothing_get_nothing_of_one_another(
    speculating: Engine, plain: list[list[int]], field: str
) -> None:
    first = drafted(speculating, greedy(40), **{field: "a"})
    assert drafted(speculating, greedy(40), **{field: "a"}) > first + 50
    assert drafted(speculating, greedy(40), **{field: "b"}) == first
    assert speculating.found == plain


def test_a_request_limits_its_draft_tokens(speculating: Engine, plain: list[list[int]]) -> None:
    drafted(speculating, greedy(40))  # their answers are known now
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculative={"k": 0})
    assert drafted(speculating, params) == 0
    assert speculating.found == plain
    params.speculative = {"k": 1}
    steps = speculating.stats()["counts"]["spec_decode_num_drafts"]
    tokens = drafted(speculating, params)
    assert 0 < tokens == speculating.stats()["counts"]["spec_decode_num_drafts"] - steps


@pytest.mark.parametrize("kind", [Failing, Broken])
def test_a_drafter_that_fails_costs_proposals_only(
    speculating: Engine, plain: list[list[int]], kind: type[Drafter], caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    hook = next(hook for hook in speculating.client.core.executor.worker.hooks if hook.name == "speculation")  # fmt: skip
    good, hook.drafter = hook.drafter, Drafters([kind()], hook.rows)
    try:
        assert speculating.tokens(PROMPTS, greedy(40)) == plain
    finally:
        hook.drafter = good
    assert caplog.text.count(f"the drafter {kind.__name__} failed") == 1


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_rank_is_no_failure_of_a_drafter(lost: bool) -> None:
    """A draft model's own pass found that another rank is lost: the worker must end, for the supervisor to replace all ranks."""
    inner, calls = Drafter(), ("enter", "leave", "extend", "observe", "propose_all")

    def fails(*args: Any) -> None:
        raise RankLost("rank 0 waited for rank 1, which has ended") if lost else RuntimeError

    for name in calls:
        setattr(inner, name, fails)
    one = Drafters([inner], ROWS)
    arguments = {"enter": (1, [1], A), "leave": (2,), "extend": (3, [1]), "observe": (None, None)}
    for name in calls:
        with pytest.raises(RankLost) if lost else nullcontext():
            getattr(one, name)(*arguments.get(name, ({4: 2},)))


class Always(Drafter):
    """Proposes as many as it may, for every row."""

    def propose(self, row: int, limit: int) -> list[int]:
        return [8] * limit


class SometimesWrong(Drafter):
    """About every second proposal is of tokens that do not follow."""

    def __init__(self) -> None:
        self.chance = random.Random(1)

    def propose(self, row: int, limit: int) -> list[int]:
        return [4, 3][:limit] if self.chance.random() < 0.5 else []


@pytest.mark.parametrize("depth", [1, 2])
def test_refused_tokens_are_in_no_index(
    checkpoint: str, plain: list[list[int]], depth: int
) -> None:
    config = {"method": "suffix", "num_speculative_tokens": 3, "adaptive": False}
    with engine(checkpoint, depth, speculative_config=config) as one:
        hook = next(hook for hook in one.client.core.executor.worker.hooks if hook.name == "speculation")  # fmt: skip
        (found,) = hook.drafter.drafters
        hook.drafter.drafters.insert(0, SometimesWrong())
        assert one.tokens(PROMPTS, greedy(40)) == plain
        one.tokens([[5]], greedy(1))  # the rows of the last ones are free then
        counts = one.stats()["counts"]
    assert counts["spec_decode_num_draft_tokens"] > counts["spec_decode_num_accepted_tokens"] + 100
    kept: list[list[int]] = [[]]
    for index in found.past._by_scope.values():
        for token in index.tokens:
            kept[-1].append(token) if token != END else kept.append([])
    assert sorted(filter(None, kept)) == sorted(plain)


class Repeating(Drafter):
    """Proposes the last token again."""

    def __init__(self, options: Any):
        self.most, self.last = options.num_speculative_tokens, dict[int, int]()

    def enter(self, row: int, tokens: Sequence[int], scope: bytes) -> None:
        self.last[row] = tokens[-1]

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        self.last[row] = tokens[-1]

    def propose(self, row: int, limit: int) -> list[int]:
        return [self.last[row]] * limit


def test_a_class_of_the_users(checkpoint: str, plain: list[list[int]]) -> None:
    config = {"method": "custom_class", "model": f"{__name__}.Repeating", "num_speculative_tokens": 3, "adaptive": False}  # fmt: skip
    with engine(checkpoint, speculative_config=config) as one:
        assert drafted(one, greedy(40)) > 400
        assert one.found == plain
    for model, why in ((f"{__name__}.Nothing", "cannot be imported"), ("builtins.str", "derived from")):  # fmt: skip
        with pytest.raises(ConfigError, match=why), engine(checkpoint, speculative_config=config | {"model": model}):  # fmt: skip
            pass


SAMPLING = [
    greedy(24),
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True, logprobs=1, presence_penalty=0.5),
    SamplingParams(seed=2, max_tokens=24, ignore_eos=True, top_p=0.8, min_p=0.02, temperature=1.4),
    SamplingParams(seed=3, max_tokens=24, logit_bias={7: 4.0}, stop_token_ids=[11], bad_words=[]),
    greedy(24),
    SamplingParams(seed=5, max_tokens=24, ignore_eos=True, logprobs=0, repetition_penalty=1.2),
]


def everything(one: Engine) -> list[Any]:
    """Tokens, end and scores of each request."""
    return [
        (
            [token for out in outputs for token in out.tokens],
            (outputs[-1].finish, outputs[-1].stopped_by),
            [value for out in outputs if out.logprobs for value in out.logprobs.values],
        )
        for outputs in one.run(PROMPTS, SAMPLING)
    ]


@pytest.fixture(scope="module")
def sampled(checkpoint: str) -> list[Any]:
    with engine(checkpoint) as one:
        return everything(one)


@pytest.mark.parametrize(
    ("depth", "most", "more"),
    [
        (1, 8, {"max_num_batched_tokens": 24, "block_size": 16, "kv_cache_memory_bytes": 400 << 10}),
        (2, 1, {"max_num_seqs": 3}),
        (3, 5, {"enable_prefix_caching": False}),
    ],
)  # fmt: skip
def test_past_answers_never_change_one(
    checkpoint: str, sampled: list[Any], depth: int, most: int, more: dict[str, Any]
) -> None:
    config = {"method": "suffix", "num_speculative_tokens": most, "adaptive": False, "suffix_decoding_max_spec_factor": 4.0}  # fmt: skip
    with engine(checkpoint, depth=depth, speculative_config=config, **more) as one:
        for _ in range(2):
            assert everything(one) == sampled
        assert one.stats()["counts"]["spec_decode_num_accepted_tokens"] > 50


def test_a_chain_ends_with_a_draft_model(checkpoint: str, sampled: list[Any]) -> None:
    """The model itself as draft model: what the suffixes do not propose is right."""
    config = {"method": "suffix,draft_model", "model": checkpoint, "num_speculative_tokens": 3, "adaptive": False}  # fmt: skip
    with engine(checkpoint, speculative_config=config) as one:
        for _ in range(2):
            assert everything(one) == sampled
        counts = one.stats()["counts"]
        assert counts["spec_decode_num_accepted_tokens"] > 0.5 * counts["spec_decode_num_draft_tokens"] > 50  # fmt: skip


def test_no_drafter_sees_tokens_outside_the_vocabulary(speculating: Engine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """They would come back as draft tokens, for which the model has no embedding."""
    seen: list[int] = []
    enter = LookupDrafter.enter

    def noted(one: LookupDrafter, row: int, tokens: Sequence[int], scope: bytes) -> None:
        seen.extend(tokens)
        enter(one, row, tokens, scope)

    monkeypatch.setattr(LookupDrafter, "enter", noted)
    faulty = [7, 1 << 20, 7, 1 << 20, 7]
    speculating.client.core.inbox.put(EngineRequest("faulty", faulty, greedy(9)))  # type: ignore[attr-defined]
    outputs, errors = speculating.client.outputs, list[str]()

    def without_faulty() -> list[Any]:
        found = outputs()
        errors.extend(str(each.error) for each in found if each.id == "faulty")
        return [each for each in found if each.id != "faulty"]

    speculating.client.outputs = without_faulty  # type: ignore[method-assign]
    assert speculating.tokens(PROMPTS, greedy(40)) == plain
    assert ["outside the vocabulary" in each for each in errors] == [True]
    assert seen.count(0) >= len(faulty)
    assert max(seen) < 1 << 20
