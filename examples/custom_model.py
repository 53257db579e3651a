"""A small GPT of one's own, first with a dense key-value cache, then with pagedkv.

    python examples/custom_model.py

The model below leaves attention to a callable, `attend(layer, q, k, v)`, as that is what needs the cache.
Compare `generate_dense` with `generate_paged`: the script prints the lines that differ, and checks that both
of them, and one batch of all prompts, give the same tokens.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import pagedkv

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 8, 2, 32
HIDDEN_SIZE, VOCAB_SIZE, MAX_TOKENS, NUM_NEW_TOKENS = NUM_HEADS * HEAD_DIM, 500, 256, 24

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN_SIZE)
        self.qkv = nn.Linear(HIDDEN_SIZE, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.mlp_norm = nn.LayerNorm(HIDDEN_SIZE)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN_SIZE, 4 * HIDDEN_SIZE), nn.GELU(), nn.Linear(4 * HIDDEN_SIZE, HIDDEN_SIZE)
        )

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        x = x + self.out(attend(layer, q, k, v).flatten(1))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens `[num_tokens]` and their positions -> logits `[num_tokens, vocab_size]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.positions = nn.Embedding(MAX_TOKENS, HIDDEN_SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding(token_ids) + self.positions(positions)
        for layer, module in enumerate(self.layers):
            x = module(x, layer, attend)
        return self.head(self.norm(x))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense attention of the last tokens `q` to all tokens; `[num_tokens, num_heads, head_dim]`."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (heads.transpose(0, 1) for heads in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def generate_dense(model: GPT, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy decoding with a tensor a layer that is copied and grows at every step."""
    keys = [torch.empty(0, NUM_KV_HEADS, HEAD_DIM)] * NUM_LAYERS
    values = [torch.empty(0, NUM_KV_HEADS, HEAD_DIM)] * NUM_LAYERS

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys[layer], values[layer] = torch.cat([keys[layer], k]), torch.cat([values[layer], v])
        return causal_attention(q, keys[layer], values[layer])

    tokens, num_done = list(prompt), 0
    for _ in range(num_tokens):
        positions = torch.arange(num_done, len(tokens))
        logits = model(torch.tensor(tokens[num_done:]), positions, attend)
        num_done = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def generate_paged(model: GPT, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy decoding with a paged cache, which takes a block of 16 tokens when it needs one."""
    cache = pagedkv.PagedKVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, num_blocks=16)
    sequence = cache.add_sequence(prompt)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cache.attend(layer, q, k, v, batch)

    tokens, num_done = list(prompt), 0
    for _ in range(num_tokens):
        positions = torch.arange(num_done, len(tokens))
        batch = cache.batch([sequence])
        logits = model(torch.tensor(tokens[num_done:]), positions, attend)
        num_done = len(tokens)
        tokens.append(int(logits[-1].argmax()))
        sequence.append(tokens[-1:])
    return tokens


def generate_batch(model: GPT, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The same for prompts of any lengths at once: their tokens lie one after the other, without padding."""
    cache = pagedkv.PagedKVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, num_blocks=64)
    sequences = [cache.add_sequence(prompt) for prompt in prompts]
    tokens, new = [list(prompt) for prompt in prompts], prompts
    for _ in range(num_tokens):
        batch = cache.batch(sequences)
        positions = torch.cat([torch.arange(len(t))[-len(n) :] for t, n in zip(tokens, new, strict=True)])
        token_ids = torch.tensor([token for row in new for token in row])
        logits = model(token_ids, positions, functools.partial(cache.attend, batch=batch))
        last_rows = batch.query_start_loc[1:].long() - 1
        new = [[token] for token in logits[last_rows].argmax(-1).tolist()]
        for sequence, known, more in zip(sequences, tokens, new, strict=True):
            sequence.append(more)
            known += more
    print(f"\nThe pool at the end, a letter for a block of each prompt:\n{cache}")
    return tokens


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model = GPT()
    prompts = [torch.randint(VOCAB_SIZE, (length,)).tolist() for length in (40, 3, 17, 90)]

    dense = [generate_dense(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    paged = [generate_paged(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    assert paged == dense, "the paged cache gave other tokens"

    before, after = (inspect.getsource(f).splitlines()[2:] for f in (generate_dense, generate_paged))
    diff = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    print("From a dense cache (-) to a paged one (+):\n")
    print("\n".join(diff))
    assert len(diff) < 10, "the difference has grown"

    assert generate_batch(model, prompts, NUM_NEW_TOKENS) == dense, "the batch gave other tokens"
    print(
        f"\nEqual tokens for {len(prompts)} prompts: dense cache, paged cache, all as one batch on a paged "
        "cache."
    )


if __name__ == "__main__":
    main()
