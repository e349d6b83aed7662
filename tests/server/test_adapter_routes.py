"""Adapters over HTTP: loading and unloading, their statuses, paths and rights; which adapter a request gets; cards; resolvers."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import malformed_requests
import pytest
from asgi import browser
from scripted import make_state

sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))

import page_model_engine
from scripted_adapters import ScriptedAdapters

from quire.api.async_engine import AsyncEngine
from quire.frontend.lora_resolvers import FilesystemResolver, LoRAResolver, LoRAResolverRegistry
from quire.protocol.lora_request import LoRARequest
from quire.server.state import ServerState

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SHORT = {"prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
Body = Callable[["Served"], Coroutine[Any, Any, None]]


class Served:
    """An application over a scripted model with the engine's functions of adapters."""

    def __init__(self, state: ServerState, engine: ScriptedAdapters, http: httpx.AsyncClient):
        self.state, self.engine, self.http = state, engine, http

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def load(self, name: str, path: str, **more: Any) -> httpx.Response:
        return await self.post(LOAD, lora_name=name, lora_path=path, **more)

    async def complete(self, model: str | None = None, **more: Any) -> httpx.Response:
        return await self.post("/v1/completions", **SHORT, **more, **({} if model is None else {"model": model}))  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[..., str]:
    def made(name: str, base: str = "m") -> str:
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": base}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path / name)

    return made


@pytest.fixture
def serve(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(body: Body, runtime: bool = True, headers: dict[str, str] | None = None, **keywords: Any) -> None:  # fmt: skip
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", str(int(runtime)))
        keywords = {"enable_lora": True, **keywords}

        async def go() -> None:
            client = page_model_engine.make(checkpoint)
            state = make_state(None, model="m", served_model_name=["toy", "other"], **keywords)
            object.__setattr__(client.resolved.config, "lora", state.config.lora)
            scripted, engine = ScriptedAdapters(client.core), AsyncEngine(client, state.config)
            state.attach(engine)
            await engine.listen()
            async with browser(state, headers=headers) as http:
                await body(Served(state, scripted, http))
            engine.shutdown()

        asyncio.run(go())

    return run


def said(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["message"]


def test_load_use_reload_and_unload(serve, adapter):
    async def body(on: Served) -> None:
        path = adapter("a")
        loaded = await on.load("sql", path)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")  # fmt: skip
        for model in ("sql", "toy", None, "other"):
            answer = await on.complete(model)
            assert answer.json()["model"] == (model or "toy")
        assert on.engine.sent == ["sql", None, None, None]
        twice = said(await on.load("sql", path))
        assert twice[:2] == (400, "InvalidUserInput")
        assert "load_inplace" in twice[2]
        assert (await on.load("sql", path, load_inplace=True)).status_code == 200
        assert on.engine.loads == 2
        gone = await on.post(UNLOAD, lora_name="sql", lora_int_id=7)
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")  # fmt: skip
        assert said(await on.complete("sql"))[0:2] == (404, "NotFoundError")
        assert said(await on.post(UNLOAD, lora_name="sql"))[:2] == (404, "NotFoundError")

    serve(body)


def test_every_protocol_chooses_by_model(serve, adapter):
    async def body(on: Served) -> None:
        on.state.engine.front.tokenizer.template = page_template()
        await on.load("a", adapter("a"))
        chat = [{"role": "user", "content": "x"}]
        sent = {
            "/v1/chat/completions": {"messages": chat, "max_tokens": 2},
            "/v1/completions": {"prompt": ["x", "y"], "max_tokens": 2, "n": 2},
            "/v1/responses": {"input": chat, "max_output_tokens": 2},
            "/v1/messages": {"messages": chat, "max_tokens": 2},
            "/invocations": {"prompt": "x", "max_tokens": 2},
        }
        for path, fields in sent.items():
            for stream in (False, True) if path != "/invocations" else (False,):
                on.engine.sent.clear()
                answer = await on.post(path, model="a", stream=stream, ignore_eos=True, **fields)
                assert answer.status_code == 200, answer.text
                assert set(on.engine.sent) == {"a"}, path
                assert '"a"' in answer.text
        on.engine.sent.clear()
        beams = await on.complete("a", use_beam_search=True, n=2)
        assert beams.status_code == 200
        assert set(on.engine.sent) == {"a"}
        for path, fields in {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}}.items():
            assert (await on.post(path, model="a", **fields)).status_code == 200
            assert (await on.post(path, model="b", **fields)).status_code == 404

    serve(body)


def page_template() -> Any:
    from quire.frontend.chat_template import ChatTemplate

    return ChatTemplate("{{ messages[0].content }}")


def test_cards_have_parent_and_root(serve, adapter):
    async def body(on: Served) -> None:
        a, b = adapter("a"), adapter("b")
        await on.load("a", a)
        await on.load("org/b", b, base_model_name="other")
        cards = (await on.http.get("/v1/models")).json()["data"]
        found = [
            (card["id"], card["parent"], card["root"], card["max_model_len"]) for card in cards
        ]
        length = on.state.engine.inputs.max_model_len
        assert found[:2] == [("toy", None, "m", length), ("other", None, "m", length)]
        assert found[2:] == [("a", "toy", a, None), ("org/b", "other", b, None)]
        assert (await on.http.get("/v1/models/org/b")).json() == cards[3]
        assert (await on.http.get("/v1/models/none")).status_code == 404

    serve(body)


WRONG = [
    ({"lora_name": "", "lora_path": "/x"}, 400, "InvalidUserInput"),
    ({"lora_name": "a", "lora_path": ""}, 400, "InvalidUserInput"),
    ({"lora_name": "a"}, 400, "Bad Request"),
    ({"lora_path": "/x"}, 400, "Bad Request"),
    ({"lora_name": 7, "lora_path": "/x"}, 400, "Bad Request"),
    ({"lora_name": "other", "lora_path": "/x"}, 400, "InvalidUserInput"),
    ({"lora_name": "a", "lora_path": "/no/such/place"}, 404, "LoRAAdapterNotFoundError"),
    ({"lora_name": "a", "lora_path": "org/none"}, 404, "LoRAAdapterNotFoundError"),
    ({"lora_name": "a", "lora_path": "/" + "x" * 300}, 404, "LoRAAdapterNotFoundError"),
    ({"lora_name": "a", "lora_path": "~nobody-here/x"}, 404, "LoRAAdapterNotFoundError"),
    ({"lora_name": "a", "lora_path": "/"}, 400, "InvalidUserInput"),
    ({"lora_name": "a" * 300, "lora_path": "/"}, 400, "InvalidUserInput"),
    ({"lora_name": "a\u0007", "lora_path": "/"}, 400, "InvalidUserInput"),
    ({"lora_name": "a", "lora_path": "/x\u0000"}, 400, "InvalidUserInput"),
    ({"lora_name": "a", "lora_path": "https://a.b/c"}, 400, "InvalidUserInput"),
    ({"lora_name": "a", "lora_path": "x" * 5000}, 400, "InvalidUserInput"),
]


@pytest.mark.parametrize(("fields", "status", "kind"), WRONG, ids=lambda value: str(value)[:50])
def test_a_load_that_fails(serve, fields, status, kind):
    async def body(on: Served) -> None:
        assert said(await on.post(LOAD, **fields))[:2] == (status, kind)
        assert not on.engine.rows

    serve(body)


def test_an_unload_that_fails(serve):
    async def body(on: Served) -> None:
        assert said(await on.post(UNLOAD, lora_name=""))[:2] == (400, "InvalidUserInput")
        assert said(await on.post(UNLOAD))[0] == 400
        assert said(await on.post(UNLOAD, lora_name="toy"))[0] == 404

    serve(body)


def test_without_the_switch_the_routes_are_not_there(serve):
    async def body(on: Served) -> None:
        for path in (LOAD, UNLOAD, "/adapters"):
            status, _, message = said(await on.post(path, lora_name="a", lora_path="/x"))
            assert status == 404
            assert "QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1" in message

    serve(body, runtime=False)


def test_without_lora_a_load_says_so(serve):
    async def body(on: Served) -> None:
        assert "--enable-lora" in said(await on.load("a", "/"))[2]
        assert said(await on.post(UNLOAD, lora_name="a"))[0] == 404
        assert said(await on.complete("a"))[0] == 404
        assert len((await on.http.get("/v1/models")).json()["data"]) == 2

    serve(body, enable_lora=False)


def test_paths_outside_the_allowed_directories_are_refused(serve, adapter, tmp_path):
    inside = adapter("in")
    outside = tmp_path / "in" / "link"
    outside.symlink_to(adapter("out"))

    async def body(on: Served) -> None:
        assert (await on.load("a", inside)).status_code == 200
        for path in (str(outside), f"{inside}/../out", "org/repository", "/", "~nobody-here/x"):
            status, kind, message = said(await on.load("b", path))
            assert (status, kind) == (400, "InvalidUserInput")
            assert "--allowed-lora-paths" in message

    serve(body, allowed_lora_paths=[inside])


class Hub:
    """A hub with the public adapter org/small and the large one org/large; `calls` has what it was asked for."""

    SIZES: ClassVar[dict[str, int | None]] = {
        "org/small": 1000,
        "org/large": 50 << 30,
        "org/hidden": None,
    }

    def __init__(self, patch: pytest.MonkeyPatch, folder: str):
        self.folder, self.calls = folder, []
        patch.setattr("huggingface_hub.HfApi", self.api)
        patch.setattr("huggingface_hub.snapshot_download", self.download)

    def api(self, token: object = None) -> Hub:
        self.calls.append(("token", token))
        return self

    def model_info(self, name: str, *, files_metadata: bool = False, **options: Any) -> Any:
        if name not in self.SIZES or "token" in options:
            raise OSError("401")
        names = (
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "model.safetensors",
        )
        size = self.SIZES[name] if files_metadata else None
        return SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename=file, size=size) for file in names])  # fmt: skip

    def download(self, name: str, **options: Any) -> str:
        self.calls.append((name, options))
        return self.folder


def test_ids_of_the_hub_need_a_flag(serve, adapter, monkeypatch):
    """Regression: a client downloaded any repository, of any size, with the operator's token."""
    hub = Hub(monkeypatch, adapter("a"))

    async def body(on: Served) -> None:
        status, kind, message = said(await on.load("x", "org/small"))
        assert (status, kind) == (404, "LoRAAdapterNotFoundError")
        assert "--allow-lora-from-hub" in message

    serve(body)
    assert hub.calls == []


@pytest.mark.parametrize("limited", [False, True])
def test_an_adapter_of_the_hub_is_bounded_and_public(
    serve, adapter, monkeypatch, tmp_path, limited
):
    hub = Hub(monkeypatch, adapter("a"))
    paths = [str(tmp_path / "a")] if limited else []

    async def body(on: Served) -> None:
        assert (await on.load("x", "org/small")).status_code == 200
        wanted = ["adapter_config.json", "adapter_model.safetensors"]
        options = {"revision": "abc", "allow_patterns": wanted, "cache_dir": None, "token": False}
        assert hub.calls == [("token", False), ("org/small", options)]
        for name in ("org/large", "org/hidden"):
            status, kind, message = said(await on.load("y", name))
            assert (status, kind) == (400, "InvalidUserInput"), message
            assert "at most 2147483648" in message
        assert said(await on.load("y", "org/private"))[0] == 404
        assert len([call for call in hub.calls if call[0] != "token"]) == 1

    serve(body, allow_lora_from_hub=True, allowed_lora_paths=paths)


def test_no_home_is_looked_up(serve, adapter, monkeypatch, tmp_path):
    """Regression: "~postgres" was expanded, and the answer had this user's home, so that users could be listed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter("x")
    user = pwd.getpwuid(os.getuid()).pw_name

    async def body(on: Served) -> None:
        for path in ("~", "~/x", f"~{user}", f"~{user}/x", "~nobody-here"):
            status, _, message = said(await on.load("x", path))
            assert status in (400, 404)
            assert str(tmp_path) not in message
            assert os.path.expanduser(f"~{user}") not in message
        assert not on.engine.rows

    serve(body)
    serve(body, allowed_lora_paths=[str(tmp_path)])


def test_sagemaker_routes(serve, adapter):
    async def body(on: Served) -> None:
        assert (await on.post("/adapters", name="org/a", src=adapter("a"))).status_code == 200
        assert on.engine.rows.keys() == {"org/a"}
        assert (await on.http.delete("/adapters/org/a")).status_code == 200
        assert (await on.http.delete("/adapters/org/a")).status_code == 404
        assert (await on.post("/adapters", name="a")).status_code == 400

    serve(body)


def test_keys_guard_the_routes(serve, adapter, tmp_path):
    path = adapter("a")
    keys = [{"name": "one", "key": "sk-1"}, {"name": "two", "key": "sk-2", "may_load_adapters": True}]  # fmt: skip
    (tmp_path / "keys.json").write_text(json.dumps(keys), encoding="utf-8")

    async def body(on: Served) -> None:
        statuses = {}
        for key in ("none", "sk-1", "sk-2"):
            on.http.headers["Authorization"] = f"Bearer {key}"
            statuses[key] = [(await on.load("a", path)).status_code]
            statuses[key].append((await on.post(UNLOAD, lora_name="a")).status_code)
        assert statuses == {"none": [401, 401], "sk-1": [403, 403], "sk-2": [200, 200]}
        await on.load("a", path)
        roots = {}
        for key in ("sk-1", "sk-2"):  # L7: every key saw the server's directories
            on.http.headers["Authorization"] = f"Bearer {key}"
            cards = (await on.http.get("/v1/models")).json()["data"]
            assert (await on.http.get("/v1/models/a")).json() == cards[-1]
            roots[key] = cards[-1]["root"]
        assert roots == {"sk-1": Path(path).name, "sk-2": path}

    serve(body, api_key_file=str(tmp_path / "keys.json"))

    async def plain(on: Served) -> None:
        assert (await on.load("a", path)).status_code == 401
        on.http.headers["Authorization"] = "Bearer sk-3"
        assert (await on.load("a", path)).status_code == 200

    serve(plain, api_key=["sk-3"])


def test_an_adapter_that_another_process_unloaded_is_a_404(serve, adapter):
    async def body(on: Served) -> None:
        await on.load("a", adapter("a"))
        on.engine.rows.clear()  # as another HTTP process does
        for stream in (False, True):
            status, kind, message = said(await on.complete("a", stream=stream))
            assert (status, kind) == (404, "NotFoundError")
            assert "`a` does not exist" in message
        on.engine.load_lora("b", adapter("b"))
        assert (await on.complete("b")).status_code == 200

    serve(body)


def test_requests_and_tokens_are_counted_by_adapter(serve, adapter, monkeypatch):
    monkeypatch.setattr("quire.observe.prometheus.MAX_ADAPTER_LABELS", 2)

    async def body(on: Served) -> None:
        for name in "abc":
            await on.load(name, adapter(name))
            await on.complete(name)
        await on.complete("a")
        await on.complete()
        await on.complete("unknown")
        text = (await on.http.get("/metrics")).text
        counted = dict(re.findall(r'(?m)^quire:adapter_(\S+),model_name="toy"\} (\S+)$', text))
        assert counted['requests_total{adapter="a"'] == "2.0"
        assert {key for key in counted if key.startswith("requests_total")} == {
            f'requests_total{{adapter="{name}"' for name in ("a", "b", "other")
        }
        assert 'quire:adapter_tokens_total{adapter="a",kind="output",model_name="toy"} 4.0' in text

    serve(body)


class Broken(LoRAResolver):
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if lora_name == "raises":
            raise RuntimeError("no")
        return LoRARequest(lora_name, 3, "/") if lora_name == "wrong" else None


@pytest.fixture
def broken() -> Iterator[None]:
    LoRAResolverRegistry.register_resolver("broken", Broken())
    assert LoRAResolverRegistry.get_supported_resolvers() == {"broken"}
    assert isinstance(LoRAResolverRegistry.get_resolver("broken"), Broken)
    yield
    LoRAResolverRegistry.resolvers.clear()
    with pytest.raises(KeyError, match="broken"):
        LoRAResolverRegistry.get_resolver("broken")


def test_resolvers_find_load_and_fail(serve, adapter, tmp_path, monkeypatch, broken):
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    adapter("good")
    adapter("stranger", "another/model")

    async def body(on: Served) -> None:
        both = await asyncio.gather(*(on.complete("good") for _ in range(8)))
        assert {one.status_code for one in both} == {200}
        assert (on.engine.loads, set(on.engine.sent)) == (1, {"good"})
        for name in ("stranger", "none", "raises", "../good", "/etc", "."):
            assert said(await on.complete(name))[:2] == (404, "NotFoundError"), name
        status, kind, message = said(await on.complete("wrong"))
        assert (status, kind) == (400, "BadRequestError")
        assert "was found but not loaded" in message

    serve(body)

    async def unasked(on: Served) -> None:
        assert said(await on.complete("good"))[0] == 404

    serve(unasked, runtime=False)


def test_a_key_without_the_right_loads_nothing_by_a_name(serve, adapter, tmp_path, monkeypatch):
    """Regression: such a key loaded adapters by requests, which a resolver found."""
    monkeypatch.setenv("QUIRE_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    adapter("good")
    keys = [{"name": "one", "key": "sk-1"}, {"name": "two", "key": "sk-2", "may_load_adapters": True}]  # fmt: skip
    (tmp_path / "keys.json").write_text(json.dumps(keys), encoding="utf-8")

    async def body(on: Served) -> None:
        statuses = []
        for key in ("sk-1", "sk-2", "sk-1"):
            on.http.headers["Authorization"] = f"Bearer {key}"
            statuses.append((await on.complete("good")).status_code)
        assert statuses == [404, 200, 200]
        assert on.engine.resolved_for == {"good": "two"}

    serve(body, api_key_file=str(tmp_path / "keys.json"))


def test_a_request_does_not_list_all_adapters(serve, adapter, tmp_path, monkeypatch):
    """Regression: with 4,099 adapters each request with an unknown name held the event loop for 130 ms and more."""
    monkeypatch.setenv("QUIRE_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    adapter("good")

    async def body(on: Served) -> None:
        for number in range(5):
            assert (await on.complete(f"unknown-{number}")).status_code == 404
        assert (await on.complete("good")).status_code == 200
        assert on.engine.lists == 0
        del on.engine.rows["good"]  # as the engine forgets names that are not used
        assert (await on.complete("good")).status_code == 200
        assert on.engine.loads == 2

    serve(body)


def test_the_filesystem_resolver_stays_in_its_directory(adapter, tmp_path):
    adapter("a")
    resolver = FilesystemResolver(tmp_path / "a")
    assert asyncio.run(FilesystemResolver(tmp_path).resolve_lora("m", "a")) is not None
    for name in ("../a", str(tmp_path / "a"), "", ".", "a\0", "x" * 300, "x" * 5000):
        assert asyncio.run(resolver.resolve_lora("m", name)) is None, name
    (tmp_path / "a" / "b").mkdir()
    for text in ("[" * 100_000, "[]", "{", "\xff", '{"peft_type": "IA3"}'):
        (tmp_path / "a" / "b" / "adapter_config.json").write_text(text, encoding="latin-1")
        assert asyncio.run(resolver.resolve_lora("m", "b")) is None


def test_an_adapter_has_one_name_for_the_filesystem_resolver(adapter, tmp_path):
    """Regression: a key that may not load adapters filled the table with 4,096 names of one adapter."""
    adapter("a")
    resolver = FilesystemResolver(tmp_path)
    for name in ("./a", "a/", "a//", ".//a", "././a", "a/.", "a/../a", str(tmp_path / "a")):
        assert asyncio.run(resolver.resolve_lora("m", name)) is None, name


def test_fifty_loads_and_unloads_at_once_answer_true_things(serve, adapter):
    """While requests use the names: each answer is one that a sequence of these calls could have given."""
    paths = {name: adapter(name) for name in ("a", "b", "c")}

    async def body(on: Served) -> None:
        draw, statuses = random.Random(1), Counter()

        async def one(number: int) -> None:
            name = draw.choice("abc")
            kind = draw.choice(("load", "reload", "unload", "use", "use"))
            await asyncio.sleep(draw.random() / 50)
            if kind == "unload":
                answer = await on.post(UNLOAD, lora_name=name)
                assert answer.status_code in (200, 404)
            elif kind == "use":
                answer = await on.complete(name, stream=draw.random() < 0.5)
                assert answer.status_code in (200, 404), answer.text
            else:
                answer = await on.load(name, paths[name], load_inplace=kind == "reload")
                assert answer.status_code == 200 or (kind == "load" and answer.status_code == 400)
            statuses[kind, answer.status_code] += 1

        await asyncio.gather(*map(one, range(80)))
        cards = (await on.http.get("/v1/models")).json()["data"]
        assert {card["id"] for card in cards[2:]} == set(on.engine.rows)
        assert {status for _, status in statuses} == {200, 400, 404}
        for name in paths:
            assert (await on.complete(name)).status_code == (200 if name in on.engine.rows else 404)

    serve(body)


def test_odd_bodies_give_no_server_error(serve):
    async def body(on: Served) -> None:
        draw = random.Random(3)
        for path, known in (
            (LOAD, ("lora_name", "lora_path", "load_inplace")),
            (UNLOAD, ("lora_name", "lora_int_id")),
        ):
            for raw in malformed_requests.RAW:
                answer = await on.http.post(path, content=raw, headers={"Content-Type": "application/json"})  # fmt: skip
                assert 400 <= answer.status_code < 500
            for _ in range(40):
                fields = {name: draw.choice(malformed_requests.ODD) for name in known if draw.random() < 0.9}  # fmt: skip
                raw = json.dumps(fields).encode()
                answer = await on.http.post(path, content=raw, headers={"Content-Type": "application/json"})  # fmt: skip
                assert answer.status_code in (400, 404), (fields, answer.text)
        assert not on.engine.rows

    serve(body)
