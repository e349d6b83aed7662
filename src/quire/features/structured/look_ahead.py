"""GrammarLookAhead: the draft tokens of rows with a grammar, and the masks after each.

Knows rows' grammars and their processes. Does not know drafters or logits. A grammar's process steps
along the draft tokens and back: it cuts them at the first that the grammar excludes, and puts forced tokens first. Rows
whose forced tokens are known without a draw have none left here.

A draft token may be wrong, so nothing that it causes fails its row: a process that ends on the way is replaced, and its rows
get no more draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from quire.features.structured.grammar_process import STEP_S, GrammarProcess
from quire.features.structured.row_grammar import RowGrammar
from quire.logging import get_logger
from quire.processes.isolated_child import ProcessEnded

log = get_logger(__name__)

Proposals = list[tuple[RowGrammar, list[int], int]]
"""Rows, what is proposed for each, and the most that each may have."""


class GrammarLookAhead:
    """Talks to the processes in `thread`, after the jobs that feed drawn tokens. `restart`: gives a row a new process."""

    def __init__(self, thread: ThreadPoolExecutor, restart: Callable[[RowGrammar], None]):
        self.thread, self.restart = thread, restart

    def cut(
        self, grammars: dict[int, RowGrammar], drafts: dict[int, list[int]], most: dict[int, int]
    ) -> None:
        """Replace the draft tokens of these rows by those that may follow, at most `most` of each row. Waits for that."""
        proposals: Proposals = []
        for row in most.keys() & grammars.keys():
            grammar, proposed = grammars[row], drafts.pop(row, [])
            if grammar.looks_ahead and most[row] and (proposed or not grammar.settings.jumps):
                proposals.append((grammar, proposed, most[row]))
        if not proposals:
            return
        job = self.thread.submit(self._look_ahead, proposals)
        try:
            drafts.update(job.result(STEP_S))
        except Exception as error:
            if not isinstance(error, TimeoutError):
                log.exception("looking ahead in grammars failed")
            for grammar, _, _ in proposals:
                grammar.looks_ahead = False

    # -- in the thread
    def _look_ahead(self, proposals: Proposals) -> dict[int, list[int]]:
        by_process: dict[GrammarProcess, Proposals] = {}
        for one in proposals:
            grammar = one[0]
            if grammar.error is None and grammar.restart is None and grammar.process is not None:
                by_process.setdefault(grammar.process, []).append(one)
        found: dict[int, list[int]] = {}
        sent: list[tuple[GrammarProcess, Proposals]] = []
        until = time.monotonic() + STEP_S
        for process, of_process in by_process.items():
            process.lock.acquire()
            try:
                process.look_ahead(
                    [(g.number, tokens, most) for g, tokens, most in of_process], until
                )
            except ProcessEnded:
                process.lock.release()
                self._give_up(of_process)
            else:
                sent.append((process, of_process))
        for process, of_process in sent:
            try:
                reply, masks_NW = process.read_ahead(until)
            except ProcessEnded:
                self._give_up(of_process)
                continue
            finally:
                process.lock.release()
            masks = iter(masks_NW)
            for (grammar, _, _), tokens, over in zip(
                of_process, reply.drafts, reply.over, strict=True
            ):
                grammar.ahead = list(zip(over, masks, strict=False))
                found[grammar.row] = tokens
        return found

    def _give_up(self, of_process: Proposals) -> None:
        for grammar, _, _ in of_process:
            grammar.looks_ahead = False
            self.restart(grammar)
