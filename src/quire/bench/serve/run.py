"""`quire bench serve`: send a load to a running server and report how fast it answers.

Works with any server that implements OpenAI's API. Options, printout and the keys of the result file are the same as in
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
from quire.bench import plot
from quire.bench.serve import datasets, metrics, timeline
from quire.bench.serve.arrivals import Arrivals, run
from quire.bench.serve.cli import SAMPLING, dashed, dataset_options, pairs, parser
from quire.bench.serve.endpoints import BenchPrompt, Kind, RequestRecord, ask
from quire.bench.serve.http_client import ConnectionRefused, HttpFailed, HttpTarget
from quire.bench.serve.sound import ALL_KINDS
from quire.errors import ConfigError, QuireError
from quire.server.process.accept import allow_files

READY_S = 600.0  # a server may take long to load its model
REFUSED_S = 5.0  # after which a server that starts listens, as Quire does before it loads the model


def main(argv: Sequence[str]) -> int:
    options = parser()
    args = options.parse_args(dashed(argv))
    try:
        plan = ServePlan(args)
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

    def __init__(self, args: argparse.Namespace):
        """Raises ConfigError: invalid options."""
        self.args = args
        if args.backend not in ALL_KINDS:
            raise ConfigError(f"--backend {args.backend}: choose from {', '.join(ALL_KINDS)}")
        self.kind: Kind = ALL_KINDS[args.backend]
        self.path = args.endpoint or self.kind.path
        self.url = args.base_url or f"http://{_host(args.host)}:{args.port}"
        if self.path.startswith("/v1/"):  # users write the address with and without /v1
            self.url = self.url.rstrip("/").removesuffix("/v1")
        self.metric_options = metrics.MetricOptions.read(
            args.percentile_metrics, args.metric_percentiles, args.goodput
        )
        self.arrivals = Arrivals(
            args.request_rate, args.burstiness, args.ramp_up_strategy,
            args.ramp_up_start_rps, args.ramp_up_end_rps, args.max_concurrency,
        )  # fmt: skip
        self.arrivals.check()
        self.metadata = pairs("--metadata", args.metadata)
        self.headers = pairs("--header", args.header)
        key = args.api_key or env.raw("API_KEY") or env.outer("OPENAI_API_KEY")
        if key:
            self.headers.setdefault("Authorization", f"Bearer {key}")
        self.dataset_options = dataset_options(args)
        plot.check(args.plot)

    async def run(self) -> int:
        args = self.args
        async with HttpTarget(self.url, self.headers, args.insecure) as server:
            model = await self._ready(server)
            tokenizer = await datasets.cutter(server, model, args.tokenizer, args.trust_remote_code)
            prompts = await datasets.make(self.dataset_options, tokenizer)
            self._announce(model, tokenizer.name)
            if args.num_warmups > 0:
                await self._warm(server, prompts[0], model)
            if args.profile:
                started = await server.ask("POST", "/start_profile")
                if started.status != 200:
                    raise HttpFailed(
                        f"--profile: the server answered /start_profile with {started.status}"
                    )
            done, seconds = await self._load(server, prompts, model)
            if args.profile:
                await server.ask("POST", "/stop_profile")
        result = metrics.figures(done, seconds, self.metric_options)
        if args.hourly_cost is not None:
            result |= metrics.costs(result, args.hourly_cost)
        print(
            metrics.printout(result, self.metric_options, args.max_concurrency, args.request_rate)
        )
        if wrong := metrics.failures(done):
            print(wrong, file=sys.stderr)
        if args.save_result or args.append_result or args.save_detailed or args.plot_timeline:
            self._save(result, done, prompts, model, tokenizer.name)
        if args.plot is not None and result["completed"]:
            plot.load(_spans(done), args.plot, f"{result['completed']} requests to {model}")
        return 0 if result["completed"] else 1

    async def _ready(self, server: HttpTarget) -> str:
        """Wait until the server answers; returns the name of its model.

        Raises:
            HttpFailed: it did not answer in time.
        """
        args = self.args
        name = args.served_model_name or args.model
        began, told = time.monotonic(), False
        given = args.ready_check_timeout_sec
        seconds = READY_S if given is None else given
        end = began + seconds
        while True:
            try:
                if name and not seconds:
                    return str(name)
                listed = await server.json("GET", "/v1/models", timeout=30)
                return str(name or listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise HttpFailed(f"{self.url} lists no model; name one with --model") from None
            except HttpFailed as why:
                if name and " 404:" in str(why):
                    return str(name)  # a server without /v1/models
                if any(f" {status}:" in str(why) for status in (401, 403)):
                    raise HttpFailed(f"{why}; --api-key or OPENAI_API_KEY sets the key") from why
                if given is None and isinstance(why, ConnectionRefused):
                    seconds = REFUSED_S
                    if time.monotonic() > began + seconds:
                        raise HttpFailed(
                            f"{why}; check the address, or wait longer with --ready-check-timeout-sec"
                        ) from why
                if time.monotonic() > end:
                    raise
                if not told:
                    limit = f"at most {seconds:g} s (--ready-check-timeout-sec)"
                    print(f"waiting for {self.url}, {limit}: {why}", file=sys.stderr)
                told = True
            await asyncio.sleep(1)

    def _announce(self, model: str, tokenizer: str) -> None:
        args = self.args
        rate = (
            "all at once" if args.request_rate == math.inf else f"{args.request_rate:g} per second"
        )
        print(
            f"{self.dataset_options.count} prompts ({self.dataset_options.dataset}) to {self.url}{self.path}, model {model}, {rate},"
            f" burstiness {args.burstiness:g}, at most {args.max_concurrency or 'any number'} at once;"
            f" tokenizer: {tokenizer}",
            flush=True,
        )

    def _body(self, model: str) -> dict[str, Any]:
        args = self.args
        body = {"model": model, "temperature": 0.0}
        body |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
        if args.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": args.logprobs}
            body |= chat if args.backend == "openai-chat" else {"logprobs": args.logprobs}
        return body | args.extra_body

    async def _send(
        self, server: HttpTarget, prompt: BenchPrompt, body: dict[str, Any], name: str
    ) -> RequestRecord:
        return await ask(
            server, self.kind, self.path, prompt, body,
            ignore_eos=self.args.ignore_eos, clock=time.perf_counter, headers={"X-Request-Id": name},
        )  # fmt: skip

    async def _warm(self, server: HttpTarget, prompt: BenchPrompt, model: str) -> None:
        body, prefix = self._body(model), self.args.request_id_prefix

        async def one(number: int) -> RequestRecord:
            return await self._send(server, prompt, body, f"{prefix}warm-{number}")

        done, _ = await run(one, self.args.num_warmups, self.arrivals, 0)
        if all(not each.ok for each in done):
            raise HttpFailed(f"the first request failed: {done[0].error}")

    async def _load(
        self, server: HttpTarget, prompts: list[BenchPrompt], model: str
    ) -> tuple[list[RequestRecord], float]:
        import random

        import tqdm

        args, body = self.args, self._body(model)
        draw = random.Random(args.seed)
        names = [draw.choice(args.lora_modules or [body["model"]]) for _ in prompts]
        with tqdm.tqdm(total=len(prompts), disable=args.disable_tqdm, unit="req") as bar:
            tokens = 0

            def ended(done: RequestRecord) -> None:
                nonlocal tokens
                tokens += done.output_tokens
                bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                bar.update()

            async def one(number: int) -> RequestRecord:
                mine = body | {"model": names[number]}
                name = f"{args.request_id_prefix}{number}"
                return await self._send(server, prompts[number], mine, name)

            return await run(one, len(prompts), self.arrivals, args.seed, ended)

    def _save(
        self,
        result: dict[str, Any],
        done: list[RequestRecord],
        prompts: list[BenchPrompt],
        model: str,
        tokenizer: str,
    ) -> None:
        args, now = self.args, datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        rate: float | str = args.request_rate if args.request_rate != math.inf else "inf"
        whole: dict[str, Any] = {
            "date": now, "endpoint_type": args.backend, "backend": args.backend, "label": args.label,
            "model_id": model, "tokenizer_id": args.tokenizer or tokenizer, "num_prompts": len(prompts),
            **self.metadata, "request_rate": rate, "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
        }  # fmt: skip
        if args.ramp_up_strategy:
            names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
            whole |= {name: getattr(args, name) for name in names}
        whole |= result
        if args.save_detailed:
            whole |= metrics.details(done, [prompt.length for prompt in prompts])
        limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        name = args.result_filename or (
            f"{args.label or args.backend}-{rate}qps{limit}-{model.rpartition('/')[2]}-{now}.json"
        )
        path = args.result_dir / name
        try:
            args.result_dir.mkdir(parents=True, exist_ok=True)
            with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")
            if args.plot_timeline:
                drawn = path.with_suffix(".timeline.html")
                title = f"{len(done)} requests to {model}, {now}"
                page = timeline.page(done, title, args.timeline_itl_thresholds)
                drawn.write_text(page, encoding="utf-8")
        except OSError as why:
            raise QuireError(f"could not write the result: {why}") from why
        print(f"result in {path}")


def _spans(done: Sequence[RequestRecord]) -> list[plot.RequestSpan]:
    """When the successful requests were sent, got their first token and ended, from the first sending on."""
    began = min(one.start for one in done)
    return [
        plot.RequestSpan(sent, sent + one.ttft, sent + one.latency, one.output_tokens)
        for one in done
        if one.ok
        for sent in (one.start - began,)
    ]


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name
