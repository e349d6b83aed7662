"""`quire run-batch -i IN -o OUT --model M`: answer a file of requests in OpenAI's batch format.

    in    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out   {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

One line for each request, in the order of the input. IN and OUT are files, or http(s) addresses (OUT is then PUT).
Knows the file format. The HTTP server's application, called in this process without a socket, answers the requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from quire.config import flags, from_keywords
from quire.config.engine import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.logging import configure, get_logger

if TYPE_CHECKING:
    from quire.server.state import ServerState

log = get_logger(__name__)

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/embed", "/pooling",
    "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v2/embed",
)  # fmt: skip
AHEAD = 512  # requests in flight at once: enough to fill any batch
HELP = """usage: quire run-batch -i IN -o OUT [--model] MODEL [flags]

Runs every request of IN, an OpenAI batch file, and writes the responses to OUT in the same order.

-i, --input-file IN     a file, or an http(s) address
-o, --output-file OUT   a file, or an http(s) address that accepts PUT
--output-tmp-dir DIR    where responses are collected if OUT is an address
--enable-metrics        serve /metrics at --host and --port meanwhile
All engine flags are accepted too: see quire serve --help=all.
"""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Options from the command line."""

    config: EngineConfig
    source: str
    target: str
    folder: str | None = None
    metrics: bool = False


def read(argv: Sequence[str]) -> BatchJob:
    """Parse flags. Ends the program on --help (0) and on a usage error (2)."""
    parser = flags.make_parser("quire run-batch")
    if any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        parser.exit(0)
    parser.add_argument("-i", "--input-file", dest="input_file")
    parser.add_argument("-o", "--output-file", dest="output_file")
    parser.add_argument("--output-tmp-dir", dest="output_tmp_dir")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--url")  # the old name of --host
    try:
        given = flags.keywords(argv, parser)
        own = {name: given.pop(name, None) for name in ("input_file", "output_file", "output_tmp_dir")}  # fmt: skip
        metrics = bool(given.pop("enable_metrics", False))
        if (url := given.pop("url", None)) is not None:
            log.warning("--url is an old name: use --host")
            given.setdefault("host", url)
        for name in ("input_file", "output_file"):
            if not own[name]:
                raise ConfigError(f"--{name.replace('_', '-')} is required")
        config = from_keywords.engine_config({"disable_log_stats": True, **given}, "flag")
    except (QuireError, TypeError, ValueError) as why:
        parser.error(str(why))
    config = replace(config, server=replace(config.server, api_key=None))
    return BatchJob(config, own["input_file"], own["output_file"], own["output_tmp_dir"], metrics)


def main(argv: Sequence[str]) -> int:
    """Answer the file; 0 if every line has a response, which may be an error."""
    job = read(argv)
    configure("batch", job.config.observe.log_level)
    try:
        with opened(job.source) as lines, written(job) as out:
            work = run(job.config, lines, out, job.metrics)
            count, refused = asyncio.run(until_terminated(work))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (QuireError, OSError) as why:
        print(f"quire run-batch: error: {why}", file=sys.stderr)
        return 1
    print(f"{count} requests, {refused} with an error", file=sys.stderr)
    return 0


async def until_terminated(work: Coroutine[Any, Any, tuple[int, int]]) -> tuple[int, int]:
    """SIGTERM cancels it, as Ctrl-C does: the engine ends, and the temporary file is removed."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


@contextmanager
def opened(source: str) -> Iterator[Iterable[bytes]]:
    """The lines of a file or of an HTTP response.

    Raises:
        ConfigError: there is no such file.
    """
    if source.startswith(("http://", "https://")):
        with urllib.request.urlopen(source, timeout=600) as answer:
            yield answer
    else:
        if not os.access(source, os.R_OK):
            raise ConfigError(f"--input-file: cannot read {source}")
        with Path(source).open("rb") as file:
            yield file


@contextmanager
def written(job: BatchJob) -> Iterator[IO[bytes]]:
    """A temporary file that becomes the output when it is complete."""
    remote = job.target.startswith(("http://", "https://"))
    folder = job.folder if remote else str(Path(job.target).resolve().parent)
    if folder and not os.access(folder, os.W_OK):
        name = "--output-tmp-dir" if remote else "--output-file"
        raise ConfigError(
            f"{name}: cannot write to the directory {folder}; create it, or name another"
        )
    with tempfile.NamedTemporaryFile("wb", dir=folder, prefix=".batch-", delete=False) as file:
        try:
            yield file.file
            file.close()
            if remote:
                data = Path(file.name).read_bytes()
                put = urllib.request.Request(job.target, data, method="PUT")
                put.add_header("Content-Type", "application/jsonl")
                urllib.request.urlopen(put, timeout=600).close()
            else:
                os.chmod(file.name, 0o644)
                os.replace(file.name, job.target)
        finally:
            Path(file.name).unlink(missing_ok=True)


async def run(
    config: EngineConfig, lines: Iterable[bytes], out: IO[bytes], metrics: bool = False
) -> tuple[int, int]:
    """Answer all lines; returns their number and the number of errors. `metrics`: serve /metrics meanwhile."""
    from quire.api.async_engine import AsyncEngine
    from quire.frontend.startup import start_engine
    from quire.observe.prometheus import ServerMetrics
    from quire.server.app import build_app
    from quire.server.state import ServerState

    state = ServerState(config, ServerMetrics(config.model.model))
    async with telling(state) if metrics else nullcontext():
        client, tokenizer = await asyncio.to_thread(start_engine, config, process=True)
        try:
            state.attach(await asyncio.to_thread(AsyncEngine, client, config, tokenizer))
            app = build_app(state)
            count = refused = 0
            async for answer in answers(app, lines):
                out.write(msgspec.json.encode(answer) + b"\n")
                count += 1
                refused += answer["response"]["status_code"] != 200
            return count, refused
        finally:
            await asyncio.to_thread(client.close)


@asynccontextmanager
async def telling(state: ServerState) -> AsyncIterator[str]:
    """Serve /metrics meanwhile; yields its address.

    Raises:
        ConfigError: cannot listen at this address.
    """
    from quire.server.app import metrics_app
    from quire.server.process.sockets import address, bind, http_server

    server = state.config.server
    with bind(server) as listener:
        http = http_server(metrics_app(state), server)
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        try:
            yield address(server, listener) + "/metrics"
        finally:
            http.should_exit = True
            await serving


async def answers(app: Any, lines: Iterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """One response per line, in order; up to AHEAD lines are in flight at once."""
    under_way: deque[asyncio.Future[dict[str, Any]]] = deque()
    for line in lines:
        if not line.strip():
            continue
        under_way.append(asyncio.ensure_future(answer(app, line)))
        if len(under_way) >= AHEAD:
            yield await under_way.popleft()
    while under_way:
        yield await under_way.popleft()


async def answer(app: Any, line: bytes) -> dict[str, Any]:
    """The response to one line; an invalid line fails alone."""
    from quire.server.in_process_client import ask

    custom_id, status, body = None, 400, b""
    try:
        asked = msgspec.json.decode(line)
        if not isinstance(asked, dict) or not isinstance(asked.get("body"), dict):
            raise ValueError("each line must be a JSON object with custom_id, method, url and body")
        custom_id = asked.get("custom_id")
        if asked.get("method", "POST") != "POST" or asked.get("url") not in ROUTES:
            raise ValueError(f"method and url must be POST and one of {', '.join(ROUTES)}")
        if asked["body"].get("stream"):
            raise ValueError("`stream` is not supported in a batch file; leave it out")
        if str(asked["body"].get("encoding_format")).startswith("bytes"):
            raise ValueError("`encoding_format` in a batch file must be float or base64")
        status, body = await ask(app, asked["url"], msgspec.json.encode(asked["body"]))
        answered = msgspec.json.decode(body)
    except (ValueError, RecursionError) as why:
        answered = {"error": {"message": str(why), "type": "BadRequestError", "param": None, "code": 400}}  # fmt: skip
    return {
        "id": f"batch_req_{secrets.token_hex(16)}",
        "custom_id": custom_id,
        "response": {
            "status_code": status,
            "request_id": f"req_{secrets.token_hex(16)}",
            "body": answered,
        },
        "error": None,
    }
