"""Merging two attention results, against the same formula in torch and a copy of the result."""

from __future__ import annotations

import timing
import torch

import pagedkv

NUM_HEADS, HEAD_DIM = 32, 128


def bench(num_tokens: int, dtype: torch.dtype, device: torch.device, rounds: int) -> None:
    """One table: two states of `num_tokens` rows."""
    out_a, out_b = (torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(num_tokens, NUM_HEADS, device=device) for _ in range(2))
    copy = torch.empty_like(out_a)

    def formula() -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        weight_a, weight_b = ((part - lse).exp()[..., None] for part in (lse_a, lse_b))
        return (out_a * weight_a + out_b * weight_b).to(dtype), lse

    contenders = {
        "pagedkv": lambda: pagedkv.merge_attn_states(out_a, lse_a, out_b, lse_b),
        "the formula in torch": formula,
        "copy_ of one state": lambda: copy.copy_(out_a),
    }
    samples = timing.measure(contenders, rounds, device)
    title = f"merge_attn_states, {num_tokens} tokens, {NUM_HEADS} heads of {HEAD_DIM}, {dtype}"
    timing.print_table(title, samples, num_bytes=3 * out_a.nbytes)


def main() -> None:
    """Decode steps and a prompt."""
    arguments = timing.parse_arguments(__doc__ or "")
    print(timing.machine_line())
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for num_tokens in (1, 64, 2048):
            bench(num_tokens, dtype, torch.device(arguments.device), arguments.rounds)


if __name__ == "__main__":
    main()
