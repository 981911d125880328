"""The KV memory of an engine: pages that requests lease, share and leave behind for later ones.

A page whose tokens are all committed is known by a digest of its tokens and of all before them, so a request whose
prompt begins alike reads the same page. Pages that nobody uses are kept until room is needed; the longest unused goes
first, the end of a sequence before its beginning.

A request takes pages as it grows. Pages are given only while those who run can still all finish, in the order of
their arrival, whatever they may need at most (the banker's rule): nobody has to be put back, and the oldest never
waits.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from ar2diff.attention.kv_cache import KVStore, PagedCache

AHEAD = 256
"""Places that a request takes together beyond what it needs now, where there is room."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """What a request holds.

    Attributes:
        cache: its keys and values; a prefix that was there before is already committed.
        most_pages: what it may need at most.
    """

    cache: PagedCache
    most_pages: int
    _num_known: int
    _digest: bytes


class PageTable:
    """Who uses which page of a store, and which tokens the pages hold."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._num_users = [0] * store.num_pages
        self._leases: dict[Lease, None] = {}  # by arrival
        self._free = set(range(store.num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, unused; the next to go comes first
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.store.num_pages - len(self._free) - len(self._idle)

    @property
    def num_kept(self) -> int:
        """Unused pages whose tokens are known."""
        return len(self._idle)

    def count_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.store.page_size)

    def lease(self, prompt_ids: Sequence[int], num_tokens: int) -> Lease | None:
        """Room for a prompt that grows to `num_tokens` at most, with what is known of it; None while it must wait.

        The prompt's last token is never taken as known: a forward must run on it.
        """
        shared, digest = self._find_prefix(prompt_ids)
        cache = PagedCache(self.store, shared, length=len(shared) * self.store.page_size)
        lease = Lease(cache=cache, most_pages=self.count_pages(num_tokens), _num_known=len(shared), _digest=digest)
        self._leases[lease] = None
        self._hold(shared)
        if not self.grow(lease, len(prompt_ids)):
            self.release(lease)
            return None
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Have room for `num_tokens`, and some to spare if possible; whether there is."""
        held = len(lease.cache.pages)
        needed = self.count_pages(num_tokens) - held
        if needed <= 0:
            return True
        spare = min(lease.most_pages, self.count_pages(num_tokens + AHEAD)) - held
        for count in (spare, needed):
            if count >= needed and self._is_safe(lease, count):
                lease.cache.extend(self._take(count))
                return True
        return False

    def publish(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Let others use the full pages of the committed prefix, whose tokens begin with `token_ids`."""
        size = self.store.page_size
        num_full = min(lease.cache.length, len(token_ids)) // size
        for idx in range(lease._num_known, num_full):
            lease._digest = _extend(lease._digest, token_ids[idx * size : (idx + 1) * size])
            if lease._digest not in self._page_of:
                self._page_of[lease._digest] = lease.cache.pages[idx]
                self._digest_of[lease.cache.pages[idx]] = lease._digest
        lease._num_known = max(lease._num_known, num_full)

    def release(self, lease: Lease, *, is_spoiled: bool = False) -> None:
        """Take the pages back. Spoiled ones are forgotten and cleared: they may hold what is not finite."""
        del self._leases[lease]
        for page in reversed(lease.cache.pages):
            self._num_users[page] -= 1
            if is_spoiled:
                self._forget(page)
            if self._num_users[page] > 0:
                continue
            if page in self._digest_of:
                self._idle[page] = None
                continue
            if is_spoiled:
                self.store.clear(page)
            self._free.add(page)

    def forget_kept(self) -> None:
        """Let go of every unused page whose tokens are known, as if nothing had been asked before."""
        while self._idle:
            page, _ = self._idle.popitem()
            self._forget(page)
            self._free.add(page)

    def _is_safe(self, taker: Lease, count: int) -> bool:
        """Whether all can finish in the order of arrival once `taker` has `count` more pages."""
        free = len(self._free) + len(self._idle) - count
        if free < 0:
            return False
        for lease in self._leases:
            taken = count if lease is taker else 0
            if lease.most_pages - len(lease.cache.pages) - taken > free:
                return False
            free += taken + sum(self._num_users[page] == 1 for page in lease.cache.pages)
        return True

    def _hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._num_users[page] += 1

    def _find_prefix(self, prompt_ids: Sequence[int]) -> tuple[list[int], bytes]:
        size, pages, digest = self.store.page_size, list[int](), b""
        for start in range(0, len(prompt_ids) - size, size):
            longer = _extend(digest, prompt_ids[start : start + size])
            if longer not in self._page_of:
                break
            pages.append(self._page_of[longer])
            digest = longer
        return pages, digest

    def _take(self, count: int) -> list[int]:
        pages = self._find_run(count) or sorted(self._free)[:count]
        self._free.difference_update(pages)
        while len(pages) < count:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            pages.append(page)
        self._hold(pages)
        return pages

    def _find_run(self, count: int) -> list[int]:
        """The first free pages that lie side by side, since those are read in place; or nothing."""
        run: list[int] = []
        for page in sorted(self._free):
            if run and run[-1] != page - 1:
                run = []
            run.append(page)
            if len(run) == count:
                return run
        return []

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]


def _extend(digest: bytes, token_ids: Sequence[int]) -> bytes:
    return sha256(digest + array("q", token_ids).tobytes()).digest()
