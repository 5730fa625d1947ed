"""The engine without services, in processes of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import MAX_MODEL_LEN, NUM_TOKENS, PROMPTS, TinyModel
from worker.core.errors import InvalidSequenceError
from worker.local import LocalEngine
from worker.runner.config import RunnerConfig


def test_prompts_in_tokens_out(tiny: TinyModel) -> None:
    config = RunnerConfig(
        model=str(tiny.path), device="cpu", num_threads=1, num_blocks=64, max_num_seqs=8, max_model_len=MAX_MODEL_LEN
    )
    with LocalEngine(config) as engine:
        for depth in (0, 1):
            run = engine.generate(PROMPTS, NUM_TOKENS, async_depth=depth)
            assert run.token_ids == tiny.references
            assert run.load.num_free_blocks == run.load.num_blocks
            assert sum(step.batch.num_tokens for step in run.steps) == sum(len(p) + NUM_TOKENS - 1 for p in PROMPTS)
        tight = engine.generate(PROMPTS, NUM_TOKENS, num_blocks=12)
        assert tight.token_ids == tiny.references
        assert tight.load.num_preemptions > 0
        with pytest.raises(InvalidSequenceError):
            engine.generate([[1] * MAX_MODEL_LEN], 1)


def test_the_example_of_the_readme() -> None:
    root = Path(__file__).parents[2]
    examples = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (code for code in examples if "LocalEngine" in code)
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
