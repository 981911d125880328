"""The KV memory of an engine: pages that requests lease, share and leave behind for later ones.

A page whose tokens are all committed is known by its tokens and all before them, as a node of a tree. So a request
whose prompt begins alike reads the same page. Tokens are compared, not digests of them: prefixes never collide.
Pages that nobody uses are kept until room is needed; the longest unused goes first, the end of a sequence before its
beginning.

A request takes pages as it grows. Pages are given only while those who run can still all finish, in the order of
their arrival, whatever they may need at most (the banker's rule): nobody has to be put back, and the oldest never
waits.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

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
    _node: "_Node"


class _Node:
    """A prefix of whole pages: its last page's tokens after those of `parent`, and the page that holds them, if any.

    A node lives as long as its page is known, a longer prefix or a lease needs it.
    """

    def __init__(self, parent: "_Node | None") -> None:
        self.parent = parent
        self.page: int | None = None
        self.longer: WeakValueDictionary[tuple[int, ...], _Node] = WeakValueDictionary()


class PageTable:
    """Who uses which page of a store, and which tokens the pages hold."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self._num_users = [0] * store.num_pages
        self._leases: dict[Lease, None] = {}  # by arrival
        self._free = set(range(store.num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, unused; the next to go comes first
        self._root = _Node(None)
        self._node_of: dict[int, _Node] = {}

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

    def lease(self, prompt_ids: Sequence[int], num_tokens: int, *, reuse: bool = True) -> Lease | None:
        """Room for a prompt that grows to `num_tokens` at most; None while it must wait.

        The prompt's last token is never taken as known: a forward must run on it. So a lease always takes a page, and
        is given only where all can still finish.

        Args:
            reuse: begin with the pages that are known of the prompt.
        """
        shared, node = self._find_prefix(prompt_ids) if reuse else ([], self._root)
        cache = PagedCache(self.store, shared, length=len(shared) * self.store.page_size)
        lease = Lease(cache=cache, most_pages=self.count_pages(num_tokens), _num_known=len(shared), _node=node)
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
            tokens = tuple(token_ids[idx * size : (idx + 1) * size])
            lease._node = node = lease._node.longer.setdefault(tokens, _Node(lease._node))
            if node.page is None:
                node.page = lease.cache.pages[idx]
                self._node_of[node.page] = node
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
            if page in self._node_of:
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

    def _find_prefix(self, prompt_ids: Sequence[int]) -> tuple[list[int], _Node]:
        size, pages, node = self.store.page_size, list[int](), self._root
        for start in range(0, len(prompt_ids) - size, size):
            longer = node.longer.get(tuple(prompt_ids[start : start + size]))
            if longer is None or longer.page is None:
                break
            pages.append(longer.page)
            node = longer
        return pages, node

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
        node = self._node_of.pop(page, None)
        if node is not None:
            node.page = None
