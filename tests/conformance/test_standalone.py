"""A whole small model as drafter: lossless, its KV in step with the target's, refused if it does not fit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import ForwardBatch, Span
from engine.layout import PoolSpec
from engine.loaders import load_model
from engine.loaders.convert import convert_gguf
from engine.pool import PagePool
from speculative.drafts.same_tokens import check_same_tokens
from speculative.registry import create_proposer
from speculative.standalone import StandaloneConfig, StandaloneProposer
from tests.conformance.test_loop import SAMPLINGS, prompt_of
from tests.draft_claims import (
    check_continued_text,
    check_greedy,
    check_pair,
    check_preemption,
    check_prefix_hits,
    check_release,
    check_scratch_is_never_read_back,
    check_seeds,
    check_stop,
)
from tests.engines import make_engine, make_request, run, tiny_model
from tests.tiny_block_drafts import pool_for_drafts, standalone, standalone_folder
from tests.tiny_models import save_tiny, write_tiny_gguf

KINDS = ("same", "noisy", "other")


@pytest.mark.parametrize("max_running", [1, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_at_every_border(kind: str, page_size: int, max_running: int) -> None:
    engine = check_greedy(
        lambda: standalone(kind), page_size=page_size, chunk_tokens=64, max_running=max_running
    )
    counters = engine.counters
    assert {
        "same": counters.accepted == counters.drafted == 120,  # 15 requests: rounds of 4 and 4 drafts
        "noisy": 40 < counters.accepted < 120,
        "other": counters.accepted < 40,
    }[kind]


@pytest.mark.parametrize("num_steps", [1, 2, 7])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_draft_that_is_the_target_is_always_right(page_size: int, num_steps: int) -> None:
    engine = make_engine(standalone("same", num_steps=num_steps), page_size=page_size)
    history = run(engine, [make_request("r", prompt_of(37), max_tokens=1 + 5 * (num_steps + 1))])["r"]
    rounds = [(progress.num_drafted, progress.num_accepted) for progress in history[-5:]]
    assert rounds == [(num_steps, num_steps)] * 5


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_seeded_text_is_unchanged_by_speculation(sampling: dict[str, object]) -> None:
    check_seeds(lambda: standalone("noisy"), sampling)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_prefix_hits_change_no_round(kind: str, page_size: int) -> None:
    check_prefix_hits(lambda: standalone(kind), page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_pages_filled_while_decoding_carry_the_drafts_kv(kind: str, page_size: int) -> None:
    check_continued_text(lambda: standalone(kind), page_size=page_size)


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_inside_an_accepted_chain_ends_it_there(index: int) -> None:
    check_stop(lambda: standalone("same"), index)


@pytest.mark.parametrize("steps", range(6))
def test_released_in_any_phase_leaves_no_page_and_no_state(steps: int) -> None:
    proposers: list[StandaloneProposer] = []

    def make() -> StandaloneProposer:
        proposers.append(standalone("same"))
        return proposers[-1]

    check_release(make, steps)
    assert [proposer._filled for proposer in proposers] == [{}]


@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_preemption_leaves_no_page(kind: str) -> None:
    check_preemption(lambda: standalone(kind))


def test_scratch_rows_are_never_read_back() -> None:
    """Past the committed slots nothing of the last chain is used: its rows are fed again or overwritten."""
    check_scratch_is_never_read_back(lambda: standalone("noisy"))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kind", ["same", "noisy"])
def test_draft_kv_after_chunks_and_rounds_is_that_of_one_forward_over_the_text(
    kind: str, page_size: int
) -> None:
    proposer = standalone(kind)
    engine = make_engine(proposer, page_size=page_size, chunk_tokens=16)
    request = make_request("r", prompt_of(41), max_tokens=60)
    engine.add(request)
    while request.num_outputs < 40:
        engine.step()
        if request.is_prompt_done:
            assert proposer._filled[request] >= request.num_committed // page_size * page_size
    length = min(proposer._filled[request], request.num_committed)
    assert length >= request.num_committed - 1
    draft = load_model(standalone_folder(kind), dtype="float32", device="cpu", pool_name="draft").model
    pool = PagePool(engine.pool.layout, 100 // page_size, torch.device("cpu"))
    span = Span(
        token_ids=request.tokens[:length],
        num_committed=0,
        pages=range(100 // page_size),
        positions=range(length),
        logit_rows=(),
    )
    draft.forward(ForwardBatch(spans=[span]), pool)
    for layer in range(3):
        ours, theirs = (
            kv[pages].transpose(1, 2).flatten(0, 1)[:length]
            for kv, pages in (
                (engine.pool.kv_pair("draft", layer), request.pages),
                (pool.kv_pair("draft", layer), list(range(100 // page_size))),
            )
        )
        assert torch.allclose(ours, theirs, atol=2e-4), layer


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.3, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("kind", ["same", "noisy", "other"])
def test_rounds_of_a_pair_are_those_of_one_engine(kind: str, sampling: dict[str, object]) -> None:
    options = {"draft": str(standalone_folder(kind))}
    pair = check_pair("standalone", options, lambda: standalone(kind), sampling)
    accepted = pair.decode.status().counters["accepted_tokens"]
    assert (accepted > 10) == (kind != "other")


# ---- what does not fit


def test_needs_say_the_models_own_geometry() -> None:
    needs = standalone("other", num_steps=3).needs
    assert needs.draft_kv == (PoolSpec(pool="draft", num_layers=2, num_kv_heads=2, head_dim=32),)
    assert (needs.max_draft_tokens, needs.num_scratch_slots, needs.num_lookahead_tokens) == (3, 3, 0)
    assert (needs.hidden_layers, needs.handoff) == ((), ())
    assert (needs.prefill_identity, needs.draft) == ("standalone", "other")


def test_the_chain_is_as_long_as_the_smaller_of_both_limits() -> None:
    assert standalone("same", num_steps=5, num_draft_tokens=2).needs.max_draft_tokens == 2
    assert standalone("same", num_steps=5, num_draft_tokens=9).needs.max_draft_tokens == 5


def test_weights_are_known_by_their_values_whatever_the_file(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    identities = [
        StandaloneProposer(StandaloneConfig(draft=str(path))).needs.draft_weights
        for path in (standalone_folder("same"), gguf, standalone_folder("noisy"))
    ]
    assert identities[0] == identities[1]
    assert identities[0] != identities[2]


def test_a_gguf_file_drafts_as_its_folder_does(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = make_engine(StandaloneProposer(StandaloneConfig(draft=str(gguf))))
    run(engine, [make_request("r", prompt_of(20), max_tokens=21)])
    assert engine.counters.accepted == engine.counters.drafted == 16


def test_another_vocabulary_size_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "big", vocab_size=300)
    proposer = StandaloneProposer(StandaloneConfig(draft=str(folder)))
    with pytest.raises(ValueError, match="vocab_size of the draft must be the target's 256, got 300"):
        proposer.bind(tiny_model().model, pool_for_drafts(proposer.needs.draft_kv))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.norm.weight", "drop", r"checkpoint lacks 1 tensors, first \['model.norm.weight'\]"),
        ("model.layers.1.mlp.up_proj.weight", "drop", "lacks 1 tensors, first .*layers.1.mlp.up_proj"),
        ("model.layers.3.mlp.up_proj.weight", "add", "1 tensors nothing uses, first .*layers.3.mlp.up_proj"),
        ("fc.weight", "add", r"1 tensors nothing uses, first \['fc.weight'\]"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_by_name(
    name: str, change: str, message: str, tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    if change == "drop":
        del tensors[name]
    else:
        tensors[name] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        StandaloneProposer(StandaloneConfig(draft=str(folder)))


def tokenizer(folder: Path, vocab: object, added: Mapping[str, int] | None = None) -> Path:
    folder.mkdir()
    tokens = [{"content": content, "id": index} for content, index in (added or {}).items()]
    content: dict[str, Any] = {"model": {"vocab": vocab}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_tokenizers_that_differ_are_refused_by_token_and_ids(tmp_path: Path) -> None:
    target = tokenizer(tmp_path / "target", {"a": 0, "b": 1}, {"<s>": 2})
    same = tokenizer(tmp_path / "same", [["a", -1.0], ["b", -2.0]], {"<s>": 2})
    other = tokenizer(tmp_path / "other", {"a": 0, "c": 1}, {"<s>": 2})
    swapped = tokenizer(tmp_path / "swapped", {"a": 1, "b": 0}, {"<s>": 2})
    check_same_tokens(same, target)
    check_same_tokens(same, tmp_path)
    with pytest.raises(ValueError, match="token 'b' has id None, the target's is 1"):
        check_same_tokens(other, target)
    with pytest.raises(ValueError, match="token 'a' has id 1, the target's is 0"):
        check_same_tokens(swapped, target)


def test_a_draft_with_another_tokenizer_is_refused_where_the_target_is_known(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "draft")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0}}}))
    target = tokenizer(tmp_path / "target", {"y": 0})
    with pytest.raises(ValueError, match="of the draft must be the target's: token"):
        create_proposer("standalone", {"draft": str(folder), "target": str(target)})
    assert create_proposer("standalone", {"draft": str(folder)}).needs.max_draft_tokens == 4


def test_tokens_are_compared_whatever_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GGUF file is compared with its folder and another file by what every id says; without a tokenizer
    nothing can be, and that is said."""
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", with_tokenizer=True)
    folder = convert_gguf(gguf, tmp_path / "folder")
    text = (folder / "tokenizer.json").read_text()
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.__getitem__)[70:72]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    swapped = save_tiny("llama", tmp_path / "swapped")
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    for draft, target in ((gguf, folder), (folder, gguf), (gguf, gguf)):
        create_proposer("standalone", {"draft": str(draft), "target": str(target)})
    assert caplog.messages == []
    for draft, target in ((gguf, swapped), (swapped, gguf)):
        with pytest.raises(ValueError, match="the tokens of the draft must be the target's: id 70 is b"):
            create_proposer("standalone", {"draft": str(draft), "target": str(target)})
    bare = standalone_folder("same")
    create_proposer("standalone", {"draft": str(gguf), "target": str(bare)})
    missing = f"model folder lacks {bare / 'tokenizer.json'}"
    assert caplog.messages == [f"the tokens of draft and target are not compared: {missing}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "/nonexistent"}, "model path must be a Hugging Face folder or a .gguf file"),
        ({"draft": ".", "num_steps": 0}, r"num_steps must be a whole number in \[1, 64\], got 0"),
        ({"draft": ".", "num_draft_tokens": True}, "num_draft_tokens must be a whole number .* got True"),
    ],
)
def test_bad_options_are_refused(options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_proposer("standalone", options)
