"""Which sequences run, and which wait: who gets the blocks of the pool."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagedkv._core import OutOfMemoryError
from pagedkv.cache import Batch, PagedKVCache, Sequence
from pagedkv.generation.requests import Completion, Request, TextBuilder


@dataclass
class GeneratorStats:
    """What a generator has done so far."""

    num_steps: int = 0
    """Forward passes."""
    num_computed_tokens: int = 0
    """Rows of all forward passes: prompts, new tokens, and what was computed again after a preemption."""
    num_new_tokens: int = 0
    """Tokens of completions."""
    num_cached_tokens: int = 0
    """Tokens that were found in the prefix cache when a branch was admitted."""
    num_preemptions: int = 0
    """Branches that had to give their blocks back for a while."""
    num_swaps: int = 0
    """Of these, the ones that waited on the host and were not computed again."""
    num_finished: int = 0
    """Completions that ended, cancelled ones included."""
    peak_running: int = 0
    """Most branches of a step."""
    num_running_total: int = 0
    """Branches of all steps together."""

    @property
    def mean_running(self) -> float:
        """Branches of a step, on average."""
        return self.num_running_total / max(1, self.num_steps)


_BEGINNING = 16  # tokens by which branches are told apart that share a prefix


@dataclass(eq=False)
class Branch:
    """One sequence of a request. It begins as its prompt; with `n` completions it then forks into n branches.

    Attributes:
        index: which of the request's completions.
        token_ids: all known tokens, prompt and new ones.
        sequence: None while the branch waits without keys and values.
        num_computed: tokens whose keys and values are in the cache.
        is_root: the prompt is not computed yet, so that it stands for all completions.
        is_new: it was never admitted, nor forked from one that was.
        forks: of a root, the branches of the further completions.
        uniform: the random number that draws the next token.
        order: of coming.
        beginning: its first tokens.
    """

    request: Request
    index: int
    token_ids: list[int]
    draws: random.Random
    text: TextBuilder | None
    is_root: bool
    sequence: Sequence | None = None
    num_computed: int = 0
    is_new: bool = True
    forks: list[Branch] = field(default_factory=list)
    uniform: float = field(init=False)
    order: tuple[int, int] = field(init=False)
    beginning: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """The first to come is the last to be preempted."""
        self.uniform = self.draws.random()
        self.order = (self.request.number, self.index)
        self.beginning = self.token_ids[:_BEGINNING]

    @property
    def completion(self) -> Completion:
        """What it is to become."""
        return self.request.completions[self.index]

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the next batches have to compute before there is a new one."""
        return len(self.token_ids) - self.num_computed

    def num_to_come(self, reserve: float) -> int:
        """New tokens that are expected to be stored: a share of those that are allowed, but for the last."""
        num_left = self.request.sampling.max_new_tokens - len(self.completion.token_ids)
        return max(0, int(num_left * reserve) - 1)


class Scheduler:
    """The branches that run and those that wait, and the batch that comes next.

    Args:
        cache: whose blocks are given out.
        max_batch_tokens: see `Generator`.
        max_num_seqs: see `Generator`.
        reserve: see `Generator`.
        stats: where preemptions and hits are counted.

    Attributes:
        running: branches that hold blocks.
        waiting: branches that have not started or were preempted, in the order of their coming.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_batch_tokens: int,
        max_num_seqs: int,
        reserve: float,
        stats: GeneratorStats,
    ) -> None:
        """Start empty."""
        for name, value in (("max_batch_tokens", max_batch_tokens), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= reserve <= 1:
            raise ValueError(f"reserve must be between 0 and 1, got {reserve}")
        self.running: list[Branch] = []
        self.waiting: list[Branch] = []
        self.stats = stats
        self._cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._reserve = reserve

    def fork(self, root: Branch) -> None:
        """Have a branch whose prompt is computed, and all its forks, run each for itself."""
        assert root.sequence is not None
        root.is_root = False
        for fork in root.forks:
            fork.sequence, fork.num_computed, fork.is_new = root.sequence.fork(), root.num_computed, False
        self.running += root.forks
        root.forks = []

    def drop(self, request: Request) -> list[Branch]:
        """Forget a request, and give back what its branches hold; these branches."""
        branches = [branch for branch in [*self.running, *self.waiting] if branch.request is request]
        for branch in branches:
            self.release(branch)
        self.running = [branch for branch in self.running if branch.request is not request]
        self.waiting = [branch for branch in self.waiting if branch.request is not request]
        return branches

    def drop_ended(self) -> None:
        """Forget branches whose completion has ended."""
        self.running = [branch for branch in self.running if branch.completion.finish_reason is None]

    def open_batch(self) -> tuple[list[Branch], list[int], Batch | None]:
        """The branches of the next batch, how many tokens each computes, and the batch with their blocks."""
        branches, counts = self._schedule()
        self._admit(branches, counts)
        while branches:
            sequences = [branch.sequence for branch in branches if branch.sequence is not None]
            try:
                return branches, counts, self._cache.batch(sequences, counts)
            except OutOfMemoryError:
                if self._release_passed_blocks():
                    continue
                if len(self.running) > 1:
                    self._preempt(max(self.running, key=lambda branch: branch.order))
                    branches, counts = self._schedule()
                elif counts[0] > 1:
                    counts[0] //= 2  # of a shorter piece less lies in a window
                else:
                    raise
        return [], [], None

    def _release_passed_blocks(self) -> bool:
        """Give back now what windows have passed, not only with the next batch; whether there was any."""
        num_used = self._cache.stats().num_used
        sequences = [branch.sequence for branch in self.running if branch.sequence is not None]
        self._cache.commit(self._cache.batch(sequences, [0] * len(sequences)))
        return self._cache.stats().num_used < num_used

    def _schedule(self) -> tuple[list[Branch], list[int]]:
        """Every branch that decodes, and pieces of prompts as far as the budget goes.

        Branches that begin alike are neighbours, so that attention finds what they share in the processor's
        cache.
        """
        branches = [branch for branch in self.running if branch.num_uncomputed == 1]
        branches.sort(key=lambda branch: branch.beginning)
        counts = [1] * len(branches)
        budget = self._max_batch_tokens - len(branches)
        for branch in self.running:
            if budget > 0 and branch.num_uncomputed > 1:
                counts.append(min(budget, branch.num_uncomputed))
                branches.append(branch)
                budget -= counts[-1]
        return branches, counts

    def _admit(self, branches: list[Branch], counts: list[int]) -> None:
        """Start branches that wait while budget and pool allow, and add them to the batch."""
        budget = self._max_batch_tokens - sum(counts)
        num_seqs = sum(1 + len(branch.forks) for branch in self.running)  # what they become
        for branch in list(self.waiting):
            num_more = 1 + len(branch.forks)
            has_place = num_seqs + num_more <= max(self._max_num_seqs, num_more)
            if budget <= 0 or not has_place:
                break
            if branch.sequence is None and self._will_share(branch):
                continue
            if not self._start(branch):
                break
            self.waiting.remove(branch)
            self.running.append(branch)
            num_seqs += num_more
            branches.append(branch)
            counts.append(min(budget, branch.num_uncomputed))
            budget -= counts[-1]

    def _will_share(self, branch: Branch) -> bool:
        """Whether the next block of the branch's prompt is being computed for another one."""
        if not self._cache.prefix_caching:
            return False
        filling = [other.token_ids for other in self.running if other.num_uncomputed > 1]
        if not any(token_ids[:1] == branch.token_ids[:1] for token_ids in filling):
            return False
        block_size, num_tokens = self._cache.block_size, len(branch.token_ids)
        end = (self._cache.probe(branch.token_ids) // block_size + 1) * block_size
        prefix = branch.token_ids[:end]
        return end < num_tokens and any(token_ids[:end] == prefix for token_ids in filling)

    def _start(self, branch: Branch) -> bool:
        """Give the branch its sequence, if the pool has room for it and for those that run to grow."""
        cache = self._cache
        if branch.sequence is not None:
            if not cache.can_swap_in(branch.sequence):
                return False
            branch.sequence.swap_in()
            return True
        num_spare = expected_growth(
            self.running,
            branch,
            cache.probe(branch.token_ids),
            cache.block_size,
            self._reserve,
            cache._groups.windows,
        )
        if not cache.can_allocate(branch.token_ids, num_spare_blocks=num_spare) and self.running:
            return False
        branch.sequence = cache.add_sequence(branch.token_ids)
        branch.num_computed = branch.sequence.num_cached_tokens
        self.stats.num_cached_tokens += branch.num_computed
        if branch.is_new:
            branch.request.num_cached_tokens = branch.num_computed
            branch.is_new = False
        return True

    def _preempt(self, branch: Branch) -> None:
        """Take the branch's blocks; it waits for its turn, on the host or without keys and values."""
        assert branch.sequence is not None
        self.stats.num_preemptions += 1
        self.running.remove(branch)
        bisect.insort(self.waiting, branch, key=lambda waiting: waiting.order)
        if branch.num_computed > 0 and self._cache.num_host_blocks > 0:
            try:
                branch.sequence.swap_out()
            except OutOfMemoryError:
                pass  # the host is full
            else:
                self.stats.num_swaps += 1
                return
        self.release(branch)

    def release(self, branch: Branch) -> None:
        """Give back what the branch holds."""
        if branch.sequence is not None:
            branch.sequence.free()
        branch.sequence, branch.num_computed = None, 0


def blocks_alone(num_tokens: int, block_size: int, windows: Iterable[int]) -> int:
    """How many blocks are enough to store so many tokens of one sequence, in pieces if need be.

    Args:
        num_tokens: that are stored in the end.
        block_size: of the cache.
        windows: of each group of layers, 0 where it sees all tokens.
    """
    num_blocks = -(-num_tokens // block_size)
    return sum(
        num_blocks if window == 0 else min(num_blocks, -(-(window - 1) // block_size) + 1)
        for window in windows
    )


def _num_common(token_ids: list[int], others: list[int], end: int) -> int:
    """How many of the first `end` tokens are the same in both, up to the first that is not."""
    if token_ids[:end] == others[:end]:
        return end
    return bisect.bisect_left(range(end), True, key=lambda i: token_ids[: i + 1] != others[: i + 1])


def expected_growth(
    running: Iterable[Branch],
    candidate: Branch,
    num_found: int,
    block_size: int,
    reserve: float,
    windows: Iterable[int] = (0,),
) -> int:
    """How many blocks more than now the branches will hold together, at the worst moment.

    All grow at the same pace: t steps from now, those that have not ended hold t tokens more than they know
    now, and of those that have only the blocks that others may use are left. The worst moment is that of some
    branch's end.

    What is shared within a window gives no room to whom the window takes it from: others may still see it. So
    each is expected to fill its window with blocks of its own, which may be too many by those shared now.

    Args:
        running: branches that hold blocks for the tokens that they have computed.
        candidate: one more, which is taken to hold blocks for all tokens that it knows.
        num_found: of these, the leading ones whose blocks it will share with others.
        block_size: of the cache.
        reserve: share of the tokens still allowed that is expected to come.
        windows: of each group of layers, 0 where it sees all tokens.
    """
    # Tokens computed, known, to come, left at the end, and the leading ones whose blocks others have too.
    rows: list[tuple[int, int, int, int, int]] = []
    num_found_running = 0
    for branch in running:
        num_known, num_computed = len(branch.token_ids), branch.num_computed
        num_shared = 0 if branch.sequence is None else branch.sequence.num_shared_tokens
        num_common = _num_common(branch.token_ids, candidate.token_ids, num_found)
        num_found_running = max(num_found_running, num_common)
        num_shared = max(num_shared, num_common)
        if num_computed <= num_shared:  # it has just forked: its next token goes into a copy
            num_computed = num_computed // block_size * block_size
        rows.append((num_computed, num_known, branch.num_to_come(reserve), num_shared, num_shared))
    num_known = len(candidate.token_ids)
    rows.append((num_known, num_known, candidate.num_to_come(reserve), num_known, num_found_running))
    for branch in [*running, candidate]:
        if branch.is_root:  # each further completion shares the prompt's full blocks, and copies the last one
            num_known, num_full = len(branch.token_ids), len(branch.token_ids) // block_size * block_size
            fork = (num_full, num_known, branch.num_to_come(reserve), num_full, num_full)
            rows += [fork] * (branch.request.sampling.n - 1)
    computed, known, to_come, left, shared = np.array(rows).T
    moments = np.unique(to_come)[:, None]
    tokens = np.where(to_come >= moments, known + moments, left)
    full = -(-tokens // block_size) - -(-computed // block_size)
    growth = np.zeros_like(full)
    for window in windows:
        if window == 0:
            growth += full
            continue
        num_passed = np.maximum(computed - window + 1, 0) // block_size
        own = np.maximum(-(-computed // block_size) - np.maximum(num_passed, -(-shared // block_size)), 0)
        # A window lies in so many blocks, at most. One with a prompt ahead may need them all at once.
        most = np.maximum(-(-(window - 1) // block_size) + 1, -(-known // block_size) - num_passed)
        growth += np.clip(full, -own, most - own)
    return int(growth.sum(1).max())
