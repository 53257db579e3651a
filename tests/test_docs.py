"""README's code and every docstring's example run, and every path that the documentation names exists."""

from __future__ import annotations

import contextlib
import doctest
import fnmatch
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pagedkv

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    "pagedkv.__main__",
    "pagedkv._batching",
    "pagedkv._capacity",
    "pagedkv._core",
    "pagedkv._handles",
    "pagedkv._layers",
    "pagedkv._picture",
    "pagedkv._pool",
    "pagedkv._prefix",
    "pagedkv._stats",
    "pagedkv.viz",
    "pagedkv.cache",
    "pagedkv.generation.generator",
    "pagedkv.generation.linear",
    "pagedkv.generation.requests",
    "pagedkv.generation.sampling",
    "pagedkv.integrations.flash_attn",
    "pagedkv.integrations.llama",
    "pagedkv.integrations.ragged",
    "pagedkv.integrations.transformers",
    "pagedkv.ops",
    "pagedkv.reference",
]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()


def documented(owner: Any, name: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of a module or class and of what it defines, compiled or not."""
    if owner.__doc__:
        yield name, owner.__doc__
    for member_name, member in vars(owner).items():
        if inspect.isclass(member) and member.__module__ in (name, "pagedkv"):
            yield from documented(member, f"{name}.{member_name}")
        elif (inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod)) and (
            inspect.isclass(owner) or getattr(member, "__module__", name) == name
        ):
            text = member.__doc__
            if text and not member_name.startswith("__"):
                yield f"{name}.{member_name}", text


def examples() -> Iterator[Any]:
    """A parameter for each docstring that has an example."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, text in documented(module, module_name):
            if ">>>" in text:
                yield pytest.param(module, name, text, id=name)


@pytest.mark.parametrize(("module", "name", "text"), list(examples()))
def test_docstring_example(module: Any, name: str, text: str) -> None:
    scope = {**vars(module), "torch": torch, "pagedkv": pagedkv, "transformers": transformers}
    example = doctest.DocTestParser().get_doctest(text, scope, name, None, None)
    output = io.StringIO()
    result = doctest.DocTestRunner(verbose=False).run(example, out=output.write)
    assert result.failed == 0, output.getvalue()


@pytest.mark.parametrize("name", sorted(set(pagedkv.__all__) - {"OutOfMemoryError"}))
def test_public_name_has_an_example(name: str) -> None:
    """In its own docstring, or for a class in one of its methods'."""
    public = getattr(pagedkv, name)
    texts = [public.__doc__, *(member.__doc__ for member in vars(public).values())]
    assert any(">>>" in text for text in texts if text)


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Tokenizer:
    """Stands in for a tokenizer: a token is a letter."""

    pad_token_id = 0

    def __call__(self, texts: list[str], **options: object) -> transformers.BatchEncoding:
        """Pad to the left, as the README's tokenizer is asked to."""
        width = max(map(len, texts))
        ids = [[0] * (width - len(text)) + [ord(letter) % 63 + 1 for letter in text] for text in texts]
        mask = [[int(token != 0) for token in row] for row in ids]
        return transformers.BatchEncoding(
            {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        )

    def decode(self, ids: list[int], **options: object) -> str:
        """A letter a token."""
        return "".join(chr(64 + token) for token in ids)

    def batch_decode(self, ids: torch.Tensor, **options: object) -> list[str]:
        """A letter a token."""
        return ["".join(chr(64 + int(token)) for token in row) for row in ids]


def small_model(name: str, **options: Any) -> transformers.LlamaForCausalLM:
    """Stands in for a download: the same architecture with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def test_code_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All blocks in one scope, with a small random model in place of the one that it downloads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small_model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **options: Tokenizer())
    blocks = code_blocks(README, "python")
    assert len(blocks) >= 2
    scope: dict[str, Any] = {}
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, "README.md", "exec"), scope)


def test_examples_of_the_cache_page_run() -> None:
    """With the block maps that they print."""
    result = doctest.testfile(str(ROOT / "docs" / "cache.md"), module_relative=False)
    assert result.attempted > 20
    assert result.failed == 0


class Layer:
    """Stands in for a layer of somebody's model."""

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Two heads of 16 each."""
        assert len(positions) == len(x)
        states = x.view(len(x), 2, 16)
        return states, states.clone(), states.clone()

    def rest(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The residual alone."""
        return x + out.flatten(1)


def test_code_of_the_generation_page_runs() -> None:
    """With small stand-ins for what the reader has: a model, a tokenizer, layers, a cache."""
    embedding = torch.nn.Embedding(64, 32)
    key_cache, value_cache = torch.randn(2, 8, 16, 2, 16)
    scope: dict[str, Any] = {
        "pagedkv": pagedkv,
        "torch": torch,
        "model": small_model(""),
        "tokenizer": Tokenizer(),
        "token_ids": [1, 2, 3],
        **{"num_layers": 2, "num_kv_heads": 2, "head_dim": 16},
        **{"embedding": embedding, "layers": [Layer(), Layer()], "head": torch.nn.Linear(32, 64)},
        **{"q": torch.randn(2, 1, 4, 16), "k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16)},
        **{"k_cache": key_cache, "v_cache": value_cache},
        **{"lens": torch.tensor([5, 20], dtype=torch.int32), "table": torch.arange(8).int().view(2, 4)},
    }
    blocks = code_blocks((ROOT / "docs" / "generation.md").read_text(), "python")
    assert len(blocks) == 3
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, "generation.md", "exec"), scope)
    (request,) = scope["generator"].generate([[1, 2, 3]], max_new_tokens=2)
    assert len(request.completions[0].token_ids) == 2
    assert scope["out"].shape == scope["q"].shape


def test_quick_start_of_the_readme_is_short() -> None:
    lines = [line for line in code_blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    # `csrc/cpu/`, `tests/conftest.py`, but not patterns such as `csrc/cpu/<op>.cpp`.
    folders = "benchmarks|csrc|docs|examples|pagedkv|tests"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_make_targets_named_exist() -> None:
    targets = re.findall(r"^([\w%-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        named = set(re.findall(r"\bmake ([a-z][\w-]*)`|^make ([a-z][\w-]*)", page.read_text(), re.MULTILINE))
        for name in {name for pair in named for name in pair if name}:
            assert any(fnmatch.fnmatchcase(name, target.replace("%", "*")) for target in targets), page.name


@pytest.mark.parametrize("op", sorted(set(pagedkv.ops.__all__) - {"set_debug"}))
def test_readme_says_where_an_operator_runs(op: str) -> None:
    """The operator table, against the sources."""
    row = re.search(rf"^\| `{op}` \|.*\| (\w+) \| (\w[\w ]*) \|$", README, re.MULTILINE)
    assert row is not None
    binding = (ROOT / "csrc/bindings" / f"{op}.cpp").read_text()
    with_cuda = re.search(rf"^PAGEDKV_OP\(\s*{op}\b", binding, re.MULTILINE)
    assert row.groups() == ("yes", "yes" if with_cuda else "in development")
