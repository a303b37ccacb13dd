"""Assigns cache pages to their owners: prompts, rows, and histories kept for later turns, which are dropped first."""

from __future__ import annotations

from lockstep.rollout.kept import Kept
from lockstep.rollout.paged.scheduler import Prompt, Running, free_bytes, pages_of
from lockstep.rollout.paged.state import PAGE, PageCache
from lockstep.types import Request, TokenIds

CACHE_SHARE = 0.9
"""Share of the free memory that the cache may take."""


class Pool:
    """Prompts by group, and kept histories, in the pages of a cache.

    A request that begins with a kept history shares its whole pages and copies the last one, of which it writes the rest: a page
    that has two owners is not written to.
    """

    def __init__(self, cache: PageCache) -> None:
        self.cache, self.prompts = cache, dict[str, Prompt]()
        self.kept: Kept[list[int]] = Kept(dropped=cache.give)
        self._copies: list[tuple[int, int]] = []

    def allocate(self, pages: int) -> None:
        """Make room for `pages` pages if the memory allows, else for as many as fit; without kept histories exactly that."""
        for prompt in self.prompts.values():
            self.cache.give(prompt.pages)
        self.prompts.clear()
        self.rest()
        size = self.cache.bytes_per_page
        memory = free_bytes(self.cache.device) + self.cache.pages * size
        self.cache.allocate(min(pages, int(memory * CACHE_SHARE) // size))

    def rest(self) -> None:
        """Free the memory, while nothing runs, unless histories are kept in it."""
        if not len(self.kept):
            self.cache.release()

    def release(self) -> None:
        """Free the memory whatever is there."""
        self.prompts.clear()
        self.kept.clear()
        self._copies.clear()
        self.cache.release()

    def admit(self, request: Request) -> Running | None:
        """Return a row for a request, with a prompt that may be unprocessed yet; None if there are not enough pages."""
        length, known = len(request.prompt_ids), self.prompts.get(request.group)
        prompt = known or self._begun(request.prompt_ids)
        own = pages_of(length + request.sampling.max_tokens) - length // PAGE
        rest = pages_of(length) - len(prompt.pages)
        if not self._free(own + rest, request.group):
            if known is None:
                self.cache.give(prompt.pages)
            return None
        prompt.pages += self.cache.take(rest)
        if prompt.source is not None:
            self._copies.append((prompt.source, prompt.pages[prompt.begun // PAGE]))
            prompt.source = None
        self.prompts[request.group] = prompt
        prompt.users += 1
        return Running(request, prompt, self.cache.take(own))

    def copy(self) -> None:
        """Fill what admitted prompts take over of a page. Until then no page that was given up may be written to."""
        if self._copies:
            sources, targets = zip(*self._copies, strict=True)
            self.cache.copy(sources, targets)
            self._copies.clear()

    def keep(self, row: Running, ids: TokenIds) -> None:
        """Keep what is in memory of a row if later turns may begin with it. `ids` are those sampled: the last was never fed."""
        if row.request.keep:
            history = row.prompt.ids + ids[:-1]
            pages = row.pages if ids else row.prompt.pages
            self.kept.keep(history, self.cache.share(pages[: pages_of(len(history))]))

    def leave(self, row: Running) -> None:
        """Free a row's own pages."""
        self.cache.give(row.own)
        row.prompt.users -= 1

    def end(self, group: str) -> None:
        """Free the pages of a group's prompt, which none of its requests needs any more."""
        if group in self.prompts:
            self.cache.give(self.prompts.pop(group).pages)

    def _begun(self, ids: TokenIds) -> Prompt:
        """Return a new prompt with the whole pages of the longest kept beginning."""
        tokens, pages = self.kept.longest(ids, 1) or (0, [])
        whole = tokens // PAGE
        return Prompt(
            ids, self.cache.share(pages[:whole]), begun=tokens, source=pages[whole] if tokens % PAGE else None
        )

    def _free(self, pages: int, but: str) -> bool:
        """Have free pages: kept histories are given up, then prompts without readers, except this group's.

        Otherwise prompts that wait for their next samples could block the room that the first in the queue needs.
        """
        while self.cache.free_pages < pages:
            if not self.kept.drop_oldest():
                idle = [group for group, prompt in self.prompts.items() if not prompt.users and group != but]
                if not idle:
                    return False
                self.end(idle[0])
        return True
