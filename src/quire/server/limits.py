"""Checks the limits of a request's key, before the server renders or tokenizes anything for the request.

Knows requests and their keys. Does not know how limits are counted (`api_keys.py`).
"""

from __future__ import annotations

from starlette.requests import Request

from quire.protocol.sampling_params import SamplingParams
from quire.server.api_keys import KeyUse
from quire.server.errors import ApiError, invalid
from quire.server.middleware import KEY_USE
from quire.server.state import ServerState, state_of

MOST_ENTRIES = 1 << 22
"""Of allowed_token_ids and logit_bias, over all completions: the engine needs about 40 bytes for each entry."""


def take_from_key(request: Request, completions: int = 1) -> None:
    """Count `completions` against the limits of the request's key, until the request ends.

    Raises:
        ApiError: 429, or 400 where the request asks for more than the key may ever have at once.
    """
    use: KeyUse | None = request.scope.get(KEY_USE)
    if use is None:
        return  # no key is needed
    try:
        use.begin(completions)
    except ApiError as error:
        if error.status == 429:
            state_of(request).metrics.key_refused(use.tenant.name)
        raise


def completions_of(prompts: int, params: SamplingParams, state: ServerState) -> int:
    """Number of completions that the engine makes for one request.

    Raises:
        ApiError: 400: more than --max-completions, or too many entries in all of them.
    """
    per_prompt = max(params.n, params.best_of or 1)
    limit = state.config.server.max_completions
    if (total := prompts * per_prompt) > limit:
        raise invalid(
            f"{prompts} prompts with `n` = {per_prompt} make {total} completions; the limit for one"
            f" request is {limit} (--max-completions)",
            "n",
        )
    entries = len(params.allowed_token_ids or ()) + len(params.logit_bias or ())
    if total * entries > MOST_ENTRIES:
        raise invalid(
            f"{total} completions with {entries} entries of `allowed_token_ids` and `logit_bias` each make"
            f" {total * entries} entries; the limit is {MOST_ENTRIES}: lower either",
            "allowed_token_ids" if params.allowed_token_ids else "logit_bias",
        )
    return total
