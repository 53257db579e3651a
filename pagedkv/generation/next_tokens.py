"""What a step gives its branches: worked out before anything changes, so that a failure changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pagedkv.generation.requests import FinishReason, TextBuilder
from pagedkv.generation.sampling import draw_token, greedy_tokens, log_probability
from pagedkv.generation.scheduling import Branch


class NextToken(NamedTuple):
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
    tokens = []
    for i, (branch, token_id) in enumerate(zip(branches, greedy_tokens(rows), strict=True)):
        sampling = branch.request.sampling
        if sampling.temperature > 0:
            token_id = draw_token(rows[i], sampling, branch.uniform)
        logprob = log_probability(rows[i], token_id) if sampling.logprobs else None
        tokens.append(_next_token(branch, token_id, logprob))
    return tokens


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
