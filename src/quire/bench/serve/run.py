"""`quire bench serve`: send a load to a running server and report how fast it answers.

Works with any server that implements OpenAI's API. Options, printout and the keys of the result file are those of
`vllm bench serve`. Status 0; 1 if no request succeeded; 2 for a mistake in the options.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from quire import env
from quire.bench.serve import datasets, metrics, timeline
from quire.bench.serve.arrivals import Arrivals, run
from quire.bench.serve.cli import SAMPLING, dashed, dataset_options, pairs, parser
from quire.bench.serve.endpoints import KINDS, BenchPrompt, Kind, RequestRecord, ask
from quire.bench.serve.http_client import HttpFailed, HttpTarget
from quire.errors import ConfigError, QuireError
from quire.server.process.accept import allow_files


def main(argv: Sequence[str]) -> int:
    options = parser()
    given = options.parse_args(dashed(argv))
    try:
        plan = ServePlan(given)
    except ConfigError as why:
        options.error(str(why))
    allow_files()
    try:
        return asyncio.run(plan.run())
    except QuireError as why:
        print(f"quire bench serve: error: {why}", file=sys.stderr)
        return 2 if isinstance(why, ConfigError) else 1


class ServePlan:
    """One run, with validated options."""

    def __init__(self, given: argparse.Namespace):
        """Raises ConfigError: invalid options."""
        self.given = given
        if given.backend not in KINDS:
            raise ConfigError(f"--backend {given.backend}: choose from {', '.join(KINDS)}")
        self.kind: Kind = KINDS[given.backend]
        self.path = given.endpoint or self.kind.path
        self.url = given.base_url or f"http://{_host(given.host)}:{given.port}"
        if self.path.startswith("/v1/"):  # users write the address with and without /v1
            self.url = self.url.rstrip("/").removesuffix("/v1")
        self.told = metrics.MetricOptions.read(
            given.percentile_metrics, given.metric_percentiles, given.goodput
        )
        self.arrivals = Arrivals(
            given.request_rate, given.burstiness, given.ramp_up_strategy,
            given.ramp_up_start_rps, given.ramp_up_end_rps, given.max_concurrency,
        )  # fmt: skip
        self.arrivals.check()
        self.metadata = pairs("--metadata", given.metadata)
        self.headers = pairs("--header", given.header)
        key = given.api_key or env.raw("API_KEY") or env.outer("OPENAI_API_KEY")
        if key:
            self.headers.setdefault("Authorization", f"Bearer {key}")
        self.wanted = dataset_options(given)

    async def run(self) -> int:
        given = self.given
        async with HttpTarget(self.url, self.headers, given.insecure) as server:
            model = await self._ready(server)
            tokenizer = await datasets.cutter(
                server, model, given.tokenizer, given.trust_remote_code
            )
            prompts = await datasets.make(self.wanted, tokenizer)
            self._announce(model, tokenizer.name)
            if given.num_warmups > 0:
                await self._warm(server, prompts[0], model)
            if given.profile:
                started = await server.ask("POST", "/start_profile")
                if started.status != 200:
                    raise HttpFailed(
                        f"--profile: the server answered /start_profile with {started.status}"
                    )
            done, seconds = await self._load(server, prompts, model)
            if given.profile:
                await server.ask("POST", "/stop_profile")
        result = metrics.figures(done, seconds, self.told)
        if given.hourly_cost is not None:
            result |= metrics.costs(result, given.hourly_cost)
        print(metrics.printout(result, self.told, given.max_concurrency, given.request_rate))
        if wrong := metrics.failures(done):
            print(wrong, file=sys.stderr)
        if given.save_result or given.append_result or given.save_detailed or given.plot_timeline:
            self._save(result, done, prompts, model, tokenizer.name)
        return 0 if result["completed"] else 1

    async def _ready(self, server: HttpTarget) -> str:
        """Wait until the server answers; returns the name of its model.

        Raises:
            HttpFailed: it did not answer in time.
        """
        given = self.given
        name = given.served_model_name or given.model
        end = time.monotonic() + given.ready_check_timeout_sec
        while True:
            try:
                if name and not given.ready_check_timeout_sec:
                    return str(name)
                listed = await server.json("GET", "/v1/models", timeout=30)
                return str(name or listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise HttpFailed(f"{self.url} lists no model; name one with --model") from None
            except HttpFailed as why:
                refused = any(f" {status}:" in str(why) for status in (401, 403))
                if name and " 404:" in str(why):
                    return str(name)  # a server without /v1/models
                if refused or time.monotonic() > end:
                    raise
            await asyncio.sleep(1)

    def _announce(self, model: str, tokenizer: str) -> None:
        given = self.given
        rate = (
            "all at once"
            if given.request_rate == math.inf
            else f"{given.request_rate:g} per second"
        )
        print(
            f"{self.wanted.count} prompts ({self.wanted.dataset}) to {self.url}{self.path}, model {model}, {rate},"
            f" burstiness {given.burstiness:g}, at most {given.max_concurrency or 'any number'} at once;"
            f" tokenizer: {tokenizer}",
            flush=True,
        )

    def _body(self, model: str) -> dict[str, Any]:
        given = self.given
        body = {"model": model, "temperature": 0.0}
        body |= {name: value for name in SAMPLING if (value := getattr(given, name)) is not None}
        if given.logprobs is not None:
            chat = given.backend == "openai-chat"
            body |= (
                {"logprobs": True, "top_logprobs": given.logprobs}
                if chat
                else {"logprobs": given.logprobs}
            )
        return body | given.extra_body

    async def _send(
        self, server: HttpTarget, prompt: BenchPrompt, body: dict[str, Any], name: str
    ) -> RequestRecord:
        return await ask(
            server, self.kind, self.path, prompt, body,
            ignore_eos=self.given.ignore_eos, clock=time.perf_counter, headers={"X-Request-Id": name},
        )  # fmt: skip

    async def _warm(self, server: HttpTarget, prompt: BenchPrompt, model: str) -> None:
        body, prefix = self._body(model), self.given.request_id_prefix

        async def one(number: int) -> RequestRecord:
            return await self._send(server, prompt, body, f"{prefix}warm-{number}")

        done, _ = await run(one, self.given.num_warmups, self.arrivals, 0)
        if all(not each.ok for each in done):
            raise HttpFailed(f"the first request failed: {done[0].error}")

    async def _load(
        self, server: HttpTarget, prompts: list[BenchPrompt], model: str
    ) -> tuple[list[RequestRecord], float]:
        import random

        import tqdm

        given, body = self.given, self._body(model)
        draw = random.Random(given.seed)
        names = [draw.choice(given.lora_modules or [body["model"]]) for _ in prompts]
        with tqdm.tqdm(total=len(prompts), disable=given.disable_tqdm, unit="req") as bar:
            tokens = 0

            def ended(done: RequestRecord) -> None:
                nonlocal tokens
                tokens += done.output_tokens
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()

            async def one(number: int) -> RequestRecord:
                mine = body | {"model": names[number]}
                name = f"{given.request_id_prefix}{number}"
                return await self._send(server, prompts[number], mine, name)

            return await run(one, len(prompts), self.arrivals, given.seed, ended)

    def _save(
        self,
        result: dict[str, Any],
        done: list[RequestRecord],
        prompts: list[BenchPrompt],
        model: str,
        tokenizer: str,
    ) -> None:
        given, now = self.given, datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        rate: float | str = given.request_rate if given.request_rate != math.inf else "inf"
        whole: dict[str, Any] = {
            "date": now, "endpoint_type": given.backend, "backend": given.backend, "label": given.label,
            "model_id": model, "tokenizer_id": given.tokenizer or tokenizer, "num_prompts": len(prompts),
            **self.metadata, "request_rate": rate, "burstiness": given.burstiness,
            "max_concurrency": given.max_concurrency,
        }  # fmt: skip
        if given.ramp_up_strategy:
            names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            whole |= {name: getattr(given, name) for name in names}
        whole |= result
        if given.save_detailed:
            whole |= metrics.details(done, [prompt.length for prompt in prompts])
        limit = f"-concurrency{given.max_concurrency}" if given.max_concurrency else ""
        name = given.result_filename or (
            f"{given.label or given.backend}-{rate}qps{limit}-{model.rpartition('/')[2]}-{now}.json"
        )
        path = given.result_dir / name
        try:
            given.result_dir.mkdir(parents=True, exist_ok=True)
            with path.open("a" if given.append_result else "w", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")
            if given.plot_timeline:
                drawn = path.with_suffix(".timeline.html")
                title = f"{len(done)} requests to {model}, {now}"
                page = timeline.page(done, title, given.timeline_itl_thresholds)
                drawn.write_text(page, encoding="utf-8")
        except OSError as why:
            raise QuireError(f"could not write the result: {why}") from why
        print(f"result in {path}")


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name
