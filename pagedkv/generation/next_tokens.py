"""What a step gives its branches: worked out before anything changes, so that a failure changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagedkv.generation.requests import FinishReason, TextBuilder
from pagedkv.generation.sampling import draw_token, greedy_tokens, log_probability
from pagedkv.generation.scheduling import Branch


@dataclass(frozen=True)
class NextToken:
    """A token that a branch is to get.

    Attributes:
        text: the branch's, with the token.
        new_text: what has become certain of the completion's text.
        finish_reason: set where the token is the last one.
    """

    branch: Branch
    token_id: int
    logprob: float | None
    text: TextBuilder | None
    new_text: str
    finish_reason: FinishReason | None


def choose_next(logits: Tensor, row_idxs: list[int], branches: list[Branch]) -> list[NextToken]:
    """A token for each branch from its row, and what follows from it."""
    if not branches:
        return []
    rows = logits if row_idxs == list(range(len(logits))) else logits[row_idxs]
    token_ids = greedy_tokens(rows)
    for i, branch in enumerate(branches):
        if branch.request.sampling.temperature > 0:
            token_ids[i] = draw_token(rows[i], branch.request.sampling, branch.uniform)
    logprobs = [
        log_probability(row, token_id) if branch.request.sampling.logprobs else None
        for row, token_id, branch in zip(rows, token_ids, branches, strict=True)
    ]
    return [_next_token(*values) for values in zip(branches, token_ids, logprobs, strict=True)]


def _next_token(branch: Branch, token_id: int, logprob: float | None) -> NextToken:
    sampling, text, new_text = branch.request.sampling, branch.text, ""
    reason: FinishReason | None = None
    if token_id in sampling.stop_token_ids:
        reason = "stop"
    elif text is not None:
        text, new_text, stopped = text.add(token_id)
        reason = "stop" if stopped else None
    if reason is None and len(branch.completion.token_ids) + 1 == sampling.max_new_tokens:
        reason = "length"
    if reason is not None and text is not None:
        new_text += text.held
    return NextToken(branch, token_id, logprob, text, new_text, reason)
