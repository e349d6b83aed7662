"""A minute of a random mixture on a server of vectors with two HTTP processes: `python tests/processes/soak_pooling.py`.

The embedded embedder: vectors one by one and in lists, as numbers, base64 and bytes, rows of tokens, scores, ranks, Cohere's
form, hang-ups at any moment, half requests, broken bytes, odd bodies. Every vector must have the bits that it had alone. At the
end nothing runs, and memory, files, threads and processes are as before. Prints what it did; exit status 1 if anything is not so.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from typing import Any

import httpx
import numpy as np
import soak
from server_process import Served

MODEL = "quire-tiny-embed"
FLAGS = ("--api-server-count", "2", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
EMBEDDINGS = "/v1/embeddings"
TEXTS = [f"{'Once upon a time, ' * (number % 9)}there was {subject}." for number, subject in enumerate(soak.SUBJECTS)]  # fmt: skip
KINDS = {"list": 6, "rows": 2, "rerank": 3, "cohere": 2, "hang up": 3, "half": 1, "noise": 1, "wrong": 2, "many": 1}  # fmt: skip
WRONG: list[tuple[str, dict[str, Any]]] = [
    (EMBEDDINGS, {"input": []}), (EMBEDDINGS, {"input": [[1, "x"]]}), (EMBEDDINGS, {"input": "a" * 100_000}),
    (EMBEDDINGS, {"input": "a", "dimensions": 3}), (EMBEDDINGS, {"input": [[10**9]]}), ("/classify", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": []}), ("/score", {"queries": ["a", "b"], "documents": ["c"]}),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["x"]}), ("/v1/completions", {"prompt": "a"}),
]  # fmt: skip

ARENAS_MIB = 48
"""The threads of two HTTP processes take their share of the heap in the first minute; then nothing grows."""

Alone = dict[str, bytes]


def alone(server: Served) -> Alone:
    """The vector of each text, with nothing beside it."""
    found = {}
    for text in TEXTS:
        answer = server.post(EMBEDDINGS, input=text, encoding_format="base64")
        found[text] = base64.b64decode(answer["data"][0]["embedding"])
    return found


class PoolingSoak(soak.Soak):
    """Clients that ask, hang up and send nonsense until the time is over."""

    expected: Alone  # type: ignore[assignment]

    async def client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            what = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
            some = self.draw.choices(TEXTS, k=self.draw.choice((1, 2, 9, 40)))
            self.did[what] += 1
            try:
                match what:
                    case "list":
                        await self.listed(http, some)
                    case "many":
                        await self.listed(http, some * 25)
                    case "rows":
                        await self.rows(http, some)
                    case "rerank":
                        await self.rerank(http, some)
                    case "cohere":
                        await self.cohere(http, some)
                    case "hang up":
                        await self.leave(http, some * 25)
                    case "half":
                        await self.half(EMBEDDINGS, some[0])
                    case "noise":
                        await self.noise(EMBEDDINGS, some[0])
                    case "wrong":
                        await self.refused(http, *self.draw.choice(WRONG))
            except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
                self.wrong.append(f"{what} {some[:1]}: {type(error).__name__}: {error}")

    def compare(self, what: str, texts: list[str], found: list[bytes]) -> None:
        self.did["vectors"] += len(found)
        if found != [self.expected[text] for text in texts]:
            self.wrong.append(f"{what} of {texts[:3]}...: not the vectors of each text alone")

    async def listed(self, http: httpx.AsyncClient, texts: list[str]) -> None:
        form = self.draw.choice(("float", "base64", "bytes_only"))
        answer = await http.post(EMBEDDINGS, json={"input": texts, "encoding_format": form})
        if form == "bytes_only":
            size = len(self.expected[TEXTS[0]])
            raw = answer.content
            vectors = [raw[at : at + size] for at in range(0, len(raw), size)]
        else:
            vectors = [as_bytes(one["embedding"]) for one in answer.json()["data"]]
        self.compare(form, texts, vectors)

    async def rows(self, http: httpx.AsyncClient, texts: list[str]) -> None:
        answer = await http.post("/pooling", json={"input": texts, "task": "token_embed"})
        counts = [len(one["data"]) for one in answer.json()["data"]]
        if len(counts) != len(texts) or min(counts) < 3:
            self.wrong.append(f"rows of {texts[:3]}: {counts[:3]}")

    async def rerank(self, http: httpx.AsyncClient, texts: list[str]) -> None:
        answer = await http.post("/v1/rerank", json={"query": TEXTS[0], "documents": texts})
        query = np.frombuffer(self.expected[TEXTS[0]], np.float32)
        for one in answer.json()["results"]:
            document = np.frombuffer(self.expected[texts[one["index"]]], np.float32)
            if one["relevance_score"] != float(np.dot(query, document)):
                self.wrong.append(f"score of {texts[one['index']]!r}: {one['relevance_score']}")

    async def cohere(self, http: httpx.AsyncClient, texts: list[str]) -> None:
        answer = await http.post("/v2/embed", json={"texts": texts, "embedding_types": ["float"]})
        self.compare(
            "cohere", texts, [as_bytes(one) for one in answer.json()["embeddings"]["float"]]
        )

    async def leave(self, http: httpx.AsyncClient, texts: list[str]) -> None:
        try:
            async with asyncio.timeout(self.draw.random() * 0.3):
                await http.post(EMBEDDINGS, json={"input": texts})
        except TimeoutError:
            self.did["hung up"] += 1

    async def refused(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        answer = await http.post(path, json=body)
        if answer.status_code != 400:
            self.wrong.append(f"{path} {str(body)[:200]}: {answer.status_code} {answer.text[:200]}")


def as_bytes(vector: str | list[float]) -> bytes:
    """The float32 numbers of a vector in JSON."""
    if isinstance(vector, str):
        return base64.b64decode(vector)
    return np.array(vector, np.float32).tobytes()


def soak_pooling(server: Served, seconds: float, clients: int, seed: int) -> tuple[soak.Round, list[str], str]:  # fmt: skip
    """The result of one run: requests, errors, and memory as text."""

    def make(expected: Any, seconds: float, seed: int) -> PoolingSoak:
        return PoolingSoak(server.url, expected, seconds, seed)

    lengths = seconds, seconds
    return soak.rounds(server, lambda: alone(server), make, clients, lengths, seed, ARENAS_MIB)


def main() -> int:
    given, flags = soak.options(__doc__, 60)
    with Served(MODEL, *FLAGS, *flags) as server:
        found = soak_pooling(server, given.seconds, given.clients, given.seed)
        lines = server.lines
    return soak.verdict(found, lines, ("Traceback", " CRITICAL ", " ERROR "))


if __name__ == "__main__":
    sys.exit(main())
