"""Finding a model, and converting the bundled one once."""

from pathlib import Path

import pytest

from deploy import models
from deploy.errors import ModelNotFound
from router.text.model_text import ModelText
from speculative.registry import create_proposer
from tests.smollm2_text import NOON
from tests.tiny_models import write_tiny_gguf
from wire.node_config import draft_options


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert models.resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_name_that_is_no_path_is_refused_by_name() -> None:
    with pytest.raises(ModelNotFound, match="got 'nowhere/at-all'"):
        models.resolve("nowhere/at-all")


def test_a_router_reads_the_tokenizer_of_a_lone_gguf_file_from_a_folder_made_for_it(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny-1.5.gguf", with_tokenizer=True)
    folder = models.tokenizer_of(gguf, tmp_path / "made")
    text = ModelText.from_folder(folder, local_time=lambda: NOON)
    ids = text.tokenizer.encode("Hi!", add_special_tokens=False)
    assert text.tokenizer.decode(ids) == "Hi!"
    assert text.tokenizer.eos_token_ids == (2,)
    assert text.max_model_len == 512
    assert not list(folder.glob("*.safetensors"))
    assert models.tokenizer_of(tmp_path, tmp_path / "unused") == tmp_path
    (tmp_path / "tokenizer.json").touch()
    assert models.tokenizer_of(gguf, tmp_path / "unused") == gguf
    assert not (tmp_path / "unused").exists()


def test_a_finished_conversion_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "paceline" / f"{models.BUNDLED_NAME}-v{models.FORMAT}" / models.BUNDLED_NAME
    folder.mkdir(parents=True)
    assert models.resolve("smollm2") == folder


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    said: list[str] = []
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"GGUF|gguf"):
        models.convert(broken, tmp_path / "out" / "model", report=said.append)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_folder_is_never_written_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must not exist yet"):
        models.convert(tmp_path / "a.gguf", tmp_path)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_the_bundled_model_has_a_head_for_these_algorithms(algorithm: str) -> None:
    folder = Path(models.bundled_draft("SmolLM2", algorithm))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "draft_options"}


@pytest.mark.parametrize(
    ("model", "algorithm"), [("/other", "eagle3"), ("smollm2", "ngram"), ("smollm2", "")]
)
def test_no_other_model_or_algorithm_has_a_bundled_head(model: str, algorithm: str) -> None:
    assert models.bundled_draft(model, algorithm) == ""
    assert models.bundled_draft_options(model, algorithm) == ""


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_the_shape_of_a_bundled_head_is_one_its_algorithm_takes(algorithm: str) -> None:
    options = draft_options(models.bundled_draft_options("smollm2", algorithm))
    draft = models.bundled_draft("smollm2", algorithm)
    proposer = create_proposer(algorithm, {"draft": draft, **options})
    assert proposer.needs.max_draft_tokens == options["num_draft_tokens"]


def test_a_budget_alone_leaves_a_bundled_head_its_shape() -> None:
    shape = models.bundled_draft_options("smollm2", "eagle3")
    assert models.options_in_shape("smollm2", "eagle3", "") == shape
    assert models.options_in_shape("smollm2", "eagle3", "budget=adaptive") == f"{shape},budget=adaptive"
    assert models.options_in_shape("smollm2", "eagle3", "topk=1,budget=adaptive") == "topk=1,budget=adaptive"
    assert models.options_in_shape("smollm2", "ngram", "budget=adaptive") == "budget=adaptive"
