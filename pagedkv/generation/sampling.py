"""From logits to tokens. Each row is treated alone: a request's tokens do not depend on the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.generation.requests import Sampling

_PIECE = 256  # of a row of logits
_LEAST_TEMPERATURE = 1e-37  # its inverse is a float32; the likeliest token alone is left long before


def greedy_tokens(logits: Tensor) -> list[int]:
    """The likeliest token of each row of `[num_rows, vocab_size]`; of equal ones the first.

    torch finds largest values faster than their places, so first the piece of a row is found. And numbers of
    16 bits above zero have the order of their bits, in which torch finds the largest many times faster.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size % _PIECE != 0 or num_rows == 0:
        return _places(logits).tolist()
    pieces = logits.reshape(num_rows, -1, _PIECE)
    if logits.dtype.itemsize == 2:
        bits = pieces.view(torch.int16)
        if bool((bits.amax(-1).amax(-1) > 0).all()):
            pieces = bits
    piece_idxs = _places(pieces.amax(-1))
    token_idxs = _places(pieces[torch.arange(num_rows, device=logits.device), piece_idxs])
    tokens: list[int] = (piece_idxs * _PIECE + token_idxs).tolist()
    return tokens


def _places(rows: Tensor) -> Tensor:
    return rows.max(-1).indices


def draw_token(logits: Tensor, sampling: Sampling, uniform: float) -> int:
    """Draw a token by inverting the cumulative distribution.

    Args:
        logits: `[vocab_size]`.
        sampling: its temperature (above 0), top_k and top_p.
        uniform: a random number in [0, 1).

    >>> draw_token(torch.tensor([0.0, 9.0, 0.0]), Sampling(temperature=1.0), 0.5)
    1
    """
    scores = logits.float()
    scores = (scores - scores.max()) / max(sampling.temperature, _LEAST_TEMPERATURE)
    token_ids = None
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores, token_ids = scores.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scores, token_ids = scores.sort(descending=True)
    probabilities = scores.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    if sampling.top_p < 1:
        # The token that reaches top_p is the last one; the first always stays.
        num_kept = max(1, int((cumulative - probabilities < sampling.top_p).sum()))
        cumulative = cumulative[:num_kept]
    total = float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if place == len(cumulative) or not probabilities[place] > 0:  # rounding: uniform * total may be total
        return int(logits.argmax())
    return place if token_ids is None else int(token_ids[place])


def log_probability(logits: Tensor, token_id: int) -> float:
    """Log-probability of a token under `[vocab_size]` logits.

    Not by torch, whose logsumexp rounds by how rows and threads share the work.
    """
    row = logits.float().cpu().numpy().astype(np.float64)
    largest = row.max()
    return float(row[token_id] - largest - np.log(np.exp(row - largest).sum()))
