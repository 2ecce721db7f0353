"""Whether two models mean the same by every token id, which drafting with a whole model takes for granted.

Owns the comparison of tokenizers, whatever file they come in. Must never know the models.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.loaders.hf_folder import read_json
from engine.loaders.load import open_checkpoint
from engine.loaders.vocabulary import vocabulary_of
from engine.models.config import UnsupportedModel

_TOKENIZER_FILE = "tokenizer.json"

logger = logging.getLogger(__name__)


def check_same_tokens(draft: Path, target: Path) -> None:
    """Folders by every token of their tokenizers; where one is a GGUF file, which marks and spells control
    tokens its own way, by the text of every id. Raises ValueError naming a token that differs.

    A checkpoint without a tokenizer is not compared, which is logged.
    """
    files = [path / _TOKENIZER_FILE for path in (draft, target)]
    if all(file.is_file() for file in files):
        _check_ids(*(_token_ids(read_json(file)) for file in files))
        return
    try:
        ours, theirs = (vocabulary_of(open_checkpoint(path)).texts for path in (draft, target))
    except UnsupportedModel as error:
        logger.warning("the tokens of draft and target are not compared: %s", error)
        return
    for token_id, (text, other) in enumerate(zip(ours, theirs, strict=False)):
        if text and other and text != other:
            raise ValueError(
                f"the tokens of the draft must be the target's: id {token_id} is {text!r},"
                f" the target's is {other!r}"
            )


def _check_ids(ours: Mapping[str, int], theirs: Mapping[str, int]) -> None:
    for token in sorted(set(ours.items()) ^ set(theirs.items())):
        name = token[0]
        raise ValueError(
            f"{_TOKENIZER_FILE} of the draft must be the target's:"
            f" token {name!r} has id {ours.get(name)}, the target's is {theirs.get(name)}"
        )


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocab = tokenizer["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    added = ((token["content"], token["id"]) for token in tokenizer.get("added_tokens") or ())
    return {**dict(pairs), **dict(added)}
