"""Hooks on a model's modules are called, with the same tokens, or refused; and when they are gone so is what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from equality.engines import Engine, engine, greedy, make_checkpoint, prompts

from quire.errors import QuireError
from quire.ops.cpu.bindings import best

CALLED = (
    "", "model", "model.embed_tokens", "model.layers", "model.layers.0", "model.layers.1.self_attn",
    "model.layers.1.self_attn.qkv", "model.layers.0.mlp", "model.layers.0.mlp.gate_up", "model.layers.0.mlp.down_proj", "lm_head",
)  # fmt: skip
PARTS_OF_CALLS = (
    "model.norm", "model.layers.0.input_layernorm", "model.layers.0.self_attn.q_norm",
    "model.layers.0.self_attn.attn",
)  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("qwen3")
    path = make_checkpoint("qwen3", folder, intermediate_size=128, head_dim=32)
    with engine(path, dtype="bfloat16") as made:
        yield made


def apply(one: Engine, function: Callable[[Any], Any]) -> Any:
    (answer,) = one.client.call("collective_rpc", "apply_model", [function], {})
    return answer


def tokens(one: Engine) -> list[list[int]]:
    one.client.call("reset_prefix_cache")
    return one.tokens(prompts(3), greedy(5))


def is_whole(one: Engine) -> bool:
    """Whether its steps are one call of the kernels."""
    worker = one.client.core.executor.worker  # type: ignore[attr-defined]
    return worker.fast_step is not None and worker.fast_step.model is not None


@pytest.mark.parametrize("how", ["register_forward_hook", "register_forward_pre_hook"])
def test_each_hook_is_called_and_changes_no_token(one: Engine, how: str) -> None:
    """Regression: fused layers called no hook, without an error."""
    before, seen = tokens(one), set()

    def hang(model: Any) -> list[Any]:
        return [
            getattr(model.get_submodule(name), how)(lambda *_, name=name: seen.add(name))
            for name in CALLED
        ]

    handles = apply(one, hang)
    assert tokens(one) == before
    assert seen == set(CALLED)
    assert not is_whole(one)
    apply(one, lambda model: [handle.remove() for handle in handles])
    seen.clear()
    assert tokens(one) == before
    assert not seen
    assert is_whole(one) == (best() is not None)


def test_a_module_hook_may_change_the_output(one: Engine) -> None:
    before = tokens(one)
    handle = apply(
        one, lambda model: model.lm_head.register_forward_hook(lambda module, args, out: -out)
    )
    assert tokens(one) != before
    apply(one, lambda model: handle.remove())
    assert tokens(one) == before


def test_another_forward_is_called(one: Engine) -> None:
    before = tokens(one)

    def replace(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x_TD: 2 * type(mlp).forward(mlp, x_TD)

    apply(one, replace)
    assert tokens(one) != before
    apply(one, lambda model: delattr(model.model.layers[0].mlp, "forward"))
    assert tokens(one) == before


@pytest.mark.parametrize("name", PARTS_OF_CALLS)
def test_a_hook_on_a_never_called_module_is_refused(one: Engine, name: str) -> None:
    before = tokens(one)
    with pytest.raises(QuireError, match=f"{name} .*would not be called.*self_attn"):
        apply(one, lambda model: model.get_submodule(name).register_forward_hook(print))
    assert not apply(one, lambda model: model.get_submodule(name)._forward_hooks)
    assert tokens(one) == before
    assert is_whole(one) == (best() is not None)


@pytest.mark.slow
def test_hooks_do_not_vanish_with_the_weights(one: Engine) -> None:
    before = tokens(one)
    handle = apply(one, lambda model: model.lm_head.register_forward_hook(lambda *_: None))
    with pytest.raises(QuireError, match="level 1"):
        one.client.call("sleep", 2)
    one.client.call("sleep", 1)
    one.client.call("wake_up")
    apply(one, lambda model: handle.remove())
    one.client.call("sleep", 2)
    one.client.call("wake_up")
    assert tokens(one) == before


class Extension:
    """What a framework mixes into each worker."""

    calls = 0

    def weight_names(self, prefix: str = "") -> tuple[int, list[str]]:
        self.calls += 1
        return self.calls, [
            n for n, _ in self.get_model().named_parameters() if n.startswith(prefix)
        ]  # type: ignore[attr-defined]


class Taken:
    def get_model(self) -> None:
        """The worker has such a method."""


def test_workers_have_the_methods_of_an_extension(tmp_path):
    path = make_checkpoint("llama", tmp_path)
    with engine(path, worker_extension_cls=f"{__name__}.Extension") as made:
        ask = lambda *args: made.client.call("collective_rpc", *args)  # noqa: E731
        ((count, names),) = ask("weight_names", ["lm_head"], {})
        assert (count, names) == (1, ["lm_head.weight"])
        ((count, _),) = ask("weight_names", [], {"prefix": "model"})
        assert count == 2  # the object is the same for all calls
        (found,) = ask("call_function", [lambda worker: (worker.calls, worker.local_rank)], {})
        assert found == (2, 0)
        with pytest.raises(QuireError, match="has no function or method '_secret'"):
            ask("_secret", [], {})


@pytest.mark.parametrize(("name", "why"), [
    ("Taken", r"the worker has get_model already; rename it in the class"),
    ("Absent", "cannot be imported"),
    ("CALLED", "is not a class"),
])  # fmt: skip
def test_an_extension_that_cannot_be_mixed_in_is_refused(tmp_path, name, why):
    path = make_checkpoint("llama", tmp_path)
    extension = f"{__name__}.{name}"
    with pytest.raises(QuireError, match=why), engine(path, worker_extension_cls=extension):
        pass
