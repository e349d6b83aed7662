"""From a configuration to a running server: checks the options, binds, and starts the processes.

Knows which processes a configuration needs. Never imports torch: the engine has its own process unless configured
otherwise.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from socket import socket

from quire.config.engine import EngineConfig
from quire.config.parallel.data_parallel import check_data_parallel, num_http_processes
from quire.engine.build import make_client
from quire.engine.client import EngineClient
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.frontend.parsers.model_formats import ModelFormats
from quire.frontend.startup import check_startup
from quire.observe.buckets import checked
from quire.observe.tracing import Tracer, tracer_of
from quire.platforms.cpu_affinity import physical_cores
from quire.processes.child import COLLECT_AFTER
from quire.server.api_keys import ApiKeys
from quire.server.process import tls
from quire.server.process.command_line import hide_secrets
from quire.server.process.sockets import bind_all
from quire.server.user_middleware import own_layers

MOST_QUEUED = 1 << 14  # requests
MOST_QUEUED_TOKENS = 1 << 25  # about a gigabyte of token ids


def serve(config: EngineConfig) -> int:
    """Serve until a stop signal.

    Returns:
        0: stopped by a signal; 1: could not start, or the engine died.

    Raises:
        ConfigError: the options are invalid; nothing was started.
    """
    parallel = config.parallel
    if parallel.nnodes > 1 and (config.server.headless or parallel.node_rank):
        from quire.engine.remote_rank import run_node

        return run_node(config)
    check_data_parallel(config.parallel, config.server)
    if config.server.headless:
        from quire.engine.headless import serve_engines

        return serve_engines(resolve_config(bounded(config), check_startup))
    if config.parallel.data_parallel_multi_port_external_lb:
        from quire.server.process.port_supervisor import PortSupervisor

        return PortSupervisor(config).run()
    with listening(config) as (config, listeners, tenants, tracer):
        if len(listeners) > 1:
            from quire.server.process.http_supervisor import serve_many

            if tracer is not None:
                tracer.close()
            return serve_many(config, listeners)  # each process has its own tracer
        client = engine_of(config)
        # Imported while the engine's process imports torch.
        from quire.server.process.server_process import ServerProcess, event_loop

        with asyncio.Runner(loop_factory=event_loop()) as runner:
            serving = ServerProcess(config, listeners[0], client, tenants, tracer=tracer)
            code = runner.run(serving.run())
    serving.loading.leave_behind(code)
    return code


async def serve_in_loop(config: EngineConfig) -> int:
    """As `serve`, in the running event loop of a program.

    Raises:
        ConfigError: also for several HTTP processes.
    """
    if (count := config.server.api_server_count or 1) > 1:
        raise ConfigError(f"api_server_count={count} needs `quire serve`; leave it out here")
    config = replace(config, server=replace(config.server, api_server_count=1))
    with listening(config) as (config, (listener,), tenants, tracer):
        from quire.server.process.server_process import ServerProcess

        serving = ServerProcess(config, listener, engine_of(config), tenants, tracer=tracer)
        return await serving.run()


@contextmanager
def listening(
    config: EngineConfig,
) -> Iterator[tuple[EngineConfig, list[socket], ApiKeys, Tracer | None]]:
    """Check the options before the model is loaded, and bind; yields what the processes of the server need.

    Raises:
        ConfigError: as `serve`.
    """
    check_data_parallel(config.parallel, config.server)
    count = num_http_processes(config.parallel, config.server, physical_cores())
    config = replace(config, server=replace(config.server, api_server_count=count))
    if count > 1 and config.server.disable_frontend_multiprocessing:
        raise ConfigError(
            f"api_server_count={count} needs the engine in a separate process: leave out"
            " --disable-frontend-multiprocessing"
        )
    config = bounded(config)
    hide_secrets(config)
    # Refuse what does not exist before the model is loaded.
    ModelFormats.of(config.server)
    own_layers(config.server.middleware)
    tls.check(config.server)
    tenants = ApiKeys(config.server)
    checked(config.observe.custom_histogram_buckets)
    tracer = tracer_of(config)
    listeners = bind_all(config.server, count)
    try:
        yield config, listeners, tenants, tracer
    finally:
        for listener in listeners:
            listener.close()
        if config.server.uds is not None:
            with suppress(OSError):
                os.unlink(config.server.uds)


def engine_of(config: EngineConfig) -> EngineClient | None:
    """A starting engine in a process of its own; None: the HTTP process loads it."""
    gc.set_threshold(*COLLECT_AFTER)  # a step makes objects for hundreds of streams
    if config.server.disable_frontend_multiprocessing:
        return None
    return make_client(resolve_config(config, check_startup), process=True, wait=False)


def bounded(config: EngineConfig) -> EngineConfig:
    """With default limits on the queue: any client can fill it."""
    queue = config.scheduler
    return replace(
        config,
        scheduler=replace(
            queue,
            max_num_queued_reqs=MOST_QUEUED if queue.max_num_queued_reqs is None else queue.max_num_queued_reqs,
            max_num_queued_tokens=MOST_QUEUED_TOKENS if queue.max_num_queued_tokens is None else queue.max_num_queued_tokens,
        ),
    )  # fmt: skip
