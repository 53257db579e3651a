"""Continuous batching: requests join and leave a running batch at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pagedkv.cache import Batch, PagedKVCache
from pagedkv.generation.next_tokens import NextToken, choose_next
from pagedkv.generation.progress import progress_bar
from pagedkv.generation.requests import (
    Completion,
    Event,
    Request,
    Sampling,
    TextBuilder,
    Tokenizer,
    draws_of,
)
from pagedkv.generation.scheduling import Branch, GeneratorStats, Scheduler, blocks_alone

Model = Callable[[Tensor, Tensor, Batch], Tensor]


class Generator:
    """Generates text for many requests at once on one paged cache.

    Each step computes one batch: the next token of every branch that is decoding, then, up to
    max_batch_tokens rows, pieces of prompts. A branch leaves the moment it ends, and its blocks go to those
    that wait. Requests start in the order in which they came, but for one thing: a prompt that begins like
    another one that is being computed waits until it can share its blocks (with `prefix_caching`).

    When blocks run out, the last to come gives its own back and waits: on the host where the cache has
    `num_host_blocks` left, else its tokens are computed again later. Its completion goes on as if nothing had
    happened, and its random draws too.

    Args:
        model: a callable, `model(token_ids, positions, batch) -> logits`. Rows lie one sequence after the
            other, as in `batch.query_start_loc`; token_ids and positions are `[num_tokens]` int64 on the
            cache's device, logits `[num_tokens, vocab_size]`, or those of each sequence's last row,
            `[num_seqs, vocab_size]`. It calls `cache.attend` in every layer.
            `pagedkv.integrations.ragged.RaggedModel` makes one of a transformers model, see
            `from_transformers`.
        cache: the cache that the model attends to.
        tokenizer: turns tokens into text, for `Completion.text`, streams and stop strings.
        max_batch_tokens: rows of a step; decoding branches take part in any case.
        max_num_seqs: branches that run at once. A request with a larger n runs alone.
        reserve: admission counts on this share of the new tokens that requests allow. With 1 a request starts
            only when all that run can grow to their ends, and nothing is preempted unless prompts that take
            several steps upset the forecast; with 0 as soon as its prompt fits.

    Raises:
        ValueError: max_batch_tokens or max_num_seqs below 1, reserve outside [0, 1].

    >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=8)
    >>> def count_up(token_ids, positions, batch):
    ...     return torch.nn.functional.one_hot(token_ids + 1, 100)
    >>> generator = Generator(count_up, cache)
    >>> [request.completions[0].token_ids for request in generator.generate([[5], [7, 8]], max_new_tokens=3)]
    [[6, 7, 8], [9, 10, 11]]
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        *,
        tokenizer: Tokenizer | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 256,
        reserve: float = 0.5,
    ) -> None:
        """Start without requests."""
        self.cache = cache
        self.stats = GeneratorStats()
        self._model = model
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(cache, max_batch_tokens, max_num_seqs, reserve, self.stats)
        self._num_requests = 0

    @classmethod
    def from_transformers(
        cls,
        model: Any,
        *,
        num_blocks: int | None = None,
        memory: int | float | str | None = None,
        block_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        split_size: int | None = None,
        **options: Any,
    ) -> Generator:
        """A generator for a causal model of transformers, with a cache of the model's shape.

        Args:
            model: left as it is: the generator packs a copy of its linear layers' weights.
            num_blocks: as for `PagedKVCache`: exactly one of num_blocks and memory.
            memory: the same.
            block_size: the same.
            kv_dtype: the same.
            prefix_caching: the same.
            num_host_blocks: the same; blocks for preempted branches.
            split_size: as for `paged_attention`. With it a request's tokens and log-probabilities have the
                same bits alone and in any batch.
            options: of the generator.

        Raises:
            NotImplementedError: a model that `pagedkv.integrations.ragged` does not support.

        >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
        >>> import transformers
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        >>> generator = Generator.from_transformers(model, num_blocks=16)
        >>> len(generator.generate([[1, 2, 3]], max_new_tokens=4)[0].completions[0].token_ids)
        4
        """
        from pagedkv.integrations.ragged import RaggedModel, make_cache

        cache = make_cache(
            model,
            num_blocks=num_blocks,
            memory=memory,
            block_size=block_size,
            kv_dtype=kv_dtype,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        return cls(RaggedModel(model, cache, split_size=split_size), cache, **options)

    @property
    def num_running(self) -> int:
        """Branches that hold blocks."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Branches that have not started, or were preempted."""
        return len(self._scheduler.waiting)

    def submit(self, prompt: Iterable[int], sampling: Sampling | None = None, **options: Any) -> Request:
        """Queue a request; the next steps will serve it.

        Args:
            prompt: token ids, at least one.
            sampling: how to continue it.
            options: values of `Sampling` in place of sampling's own.

        Raises:
            TypeError: a value of `Sampling` that is none.
            ValueError: the same; the prompt is empty, or does not fit into the pool or into the cache's
                max_tokens_per_seq together with max_new_tokens; stop strings without a tokenizer.
        """
        token_ids = [int(token) for token in prompt]
        sampling = (sampling or Sampling()).replaced(**options)
        if len(token_ids) == 0:
            raise ValueError("the prompt is empty; it needs at least one token")
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: make the Generator with tokenizer=")
        num_tokens = len(token_ids) + sampling.max_new_tokens - 1  # the last new one is not stored
        self.cache.add_sequence(num_tokens=num_tokens).free()  # raises where a sequence cannot be that long
        num_blocks = blocks_alone(num_tokens, self.cache.block_size, self.cache._groups.windows)
        if num_blocks > self.cache.num_blocks:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_new_tokens={sampling.max_new_tokens} take "
                f"{num_blocks} blocks, but the pool has {self.cache.num_blocks}"
            )
        completions = [Completion() for _ in range(sampling.n)]
        request = Request(self._num_requests, token_ids, sampling, completions)
        self._num_requests += 1
        root = self._make_branch(request, 0)
        root.forks = [self._make_branch(request, index) for index in range(1, sampling.n)]
        self._scheduler.waiting.append(root)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now: its blocks are free at once, its completions keep what they have.

        Text that was held back, as a stop string might have been beginning, comes to `Completion.text`.
        Does nothing for a request that is done.
        """
        for branch in self._scheduler.drop(request):
            if branch.text is not None:
                branch.completion.text += branch.text.held
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.finish_reason = "cancelled"
                self.stats.num_finished += 1

    def step(self) -> list[Event]:
        """Compute one batch: the tokens that it gave, none where nothing is left to do.

        After an exception, the model's and the tokenizer's too, everything is as before, and the step can be
        tried again.

        Raises:
            OutOfMemoryError: not even the oldest branch alone finds its blocks. Cancel its request.
        """
        branches, counts, batch = self._scheduler.open_batch()
        if batch is None:
            return []
        try:
            logits = self._forward(branches, counts, batch)
            tokens = _next_tokens(branches, counts, logits)
            self.cache.commit(batch)
        except BaseException:
            self._undo(branches, batch)
            raise
        self.stats.num_steps += 1
        self.stats.num_computed_tokens += batch.num_tokens
        self.stats.num_running_total += len(branches)
        self.stats.peak_running = max(self.stats.peak_running, len(branches))
        return self._advance(branches, counts, tokens)

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Step until these requests are done, and give their tokens as they come.

        Other requests make progress too; their tokens are in their completions.

        >>> cache = pagedkv.PagedKVCache(1, 1, 8, num_blocks=8)
        >>> generator = Generator(lambda ids, positions, batch: torch.eye(9)[ids], cache)
        >>> [event.token_id for event in generator.stream([generator.submit([3], max_new_tokens=2)])]
        [3, 3]
        """
        pending = set(requests)
        while pending := {request for request in pending if not request.done}:
            for event in self.step():
                if event.request in pending and not _was_cancelled(event.request):
                    yield event

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        sampling: Sampling | None = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[Request]:
        """Submit prompts, and step until they are done.

        Args:
            prompts: token ids of each.
            sampling: how to continue all of them.
            progress: show a bar (needs tqdm).
            options: values of `Sampling` in place of sampling's own.

        Raises:
            ValueError: as `submit`, and so TypeError; nothing was queued.
        """
        requests: list[Request] = []
        try:
            requests += (self.submit(prompt, sampling, **options) for prompt in prompts)
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        total = sum(request.sampling.max_new_tokens * request.sampling.n for request in requests)
        with progress_bar(total, progress) as bar:
            for event in self.stream(requests):
                bar.update(1)
                if event.finish_reason is not None:
                    completion = event.request.completions[event.index]
                    bar.total -= event.request.sampling.max_new_tokens - len(completion.token_ids)
                    bar.set_postfix(running=self.num_running, waiting=self.num_waiting, refresh=False)
        return requests

    @torch.inference_mode()
    def _forward(self, branches: list[Branch], counts: list[int], batch: Batch) -> Tensor:
        """Logits `[num_seqs, vocab_size]` of each branch's last row."""
        token_ids: list[int] = []
        positions: list[int] = []
        for branch, count in zip(branches, counts, strict=True):
            begin, end = branch.num_computed, branch.num_computed + count
            token_ids += branch.token_ids[begin:end]
            positions += range(begin, end)
        device = self.cache.device
        logits = self._model(
            torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), batch
        )
        if logits.dim() != 2 or logits.shape[0] not in (len(branches), len(token_ids)):
            raise ValueError(
                f"the model gave logits of shape {list(logits.shape)}, but the batch has {len(token_ids)} "
                f"tokens of {len(branches)} sequences: [num_tokens or num_seqs, vocab_size] is supported"
            )
        if len(logits) != len(branches):
            logits = logits[batch.query_start_loc[1:].long() - 1]
        return logits

    def _undo(self, branches: list[Branch], batch: Batch) -> None:
        """Have the tokens of a failed batch computed again."""
        with contextlib.suppress(ValueError):  # it was committed, if the model came to its last layer
            self.cache.abandon(batch)
        for branch in branches:
            assert branch.sequence is not None
            branch.sequence.truncate(branch.num_computed)
            branch.sequence.append(branch.token_ids[branch.num_computed :])

    def _advance(self, branches: list[Branch], counts: list[int], tokens: list[NextToken]) -> list[Event]:
        """Note what was computed, and give the branches their tokens. Runs nothing that may fail."""
        for branch, count in zip(branches, counts, strict=True):
            branch.num_computed += count
            if branch.is_root and branch.num_uncomputed == 0:
                self._scheduler.fork(branch)
        events = [self._extend(token) for token in tokens]
        alive = [token.branch for token in tokens if token.finish_reason is None]
        sequences = [branch.sequence for branch in alive if branch.sequence is not None]
        self.cache.append(sequences, [branch.token_ids[-1] for branch in alive])
        if len(alive) < len(tokens):
            self._scheduler.drop_ended()
        self.stats.num_new_tokens += len(events)
        return events

    def _extend(self, token: NextToken) -> Event:
        """Add a token to its branch and to the completion, and end it where that was the last one."""
        branch, completion = token.branch, token.branch.completion
        branch.token_ids.append(token.token_id)
        branch.text, branch.uniform = token.text, branch.draws.random()
        completion.token_ids.append(token.token_id)
        if token.logprob is not None:
            completion.logprobs.append(token.logprob)
        completion.text += token.new_text
        completion.finish_reason = token.finish_reason
        if token.finish_reason is not None:
            self._scheduler.release(branch)
            self.stats.num_finished += 1
        return Event(branch.request, branch.index, token.token_id, token.new_text, token.finish_reason)

    def _make_branch(self, request: Request, index: int) -> Branch:
        sampling, tokenizer = request.sampling, self._tokenizer
        text = None if tokenizer is None else TextBuilder(tokenizer, sampling.stop)
        return Branch(request, index, list(request.prompt), draws_of(sampling, index), text, index == 0)


def _next_tokens(branches: list[Branch], counts: list[int], logits: Tensor) -> list[NextToken]:
    """Those of branches that have all their tokens computed now; at the end of a prompt of its forks, too."""
    row_idxs: list[int] = []
    growing: list[Branch] = []
    for row_idx, (branch, count) in enumerate(zip(branches, counts, strict=True)):
        if branch.num_uncomputed == count:
            growing += [branch, *branch.forks]
            row_idxs += [row_idx] * (1 + len(branch.forks))
    return choose_next(logits, row_idxs, growing)


def _was_cancelled(request: Request) -> bool:
    return any(completion.finish_reason == "cancelled" for completion in request.completions)
