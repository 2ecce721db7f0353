"""Draft folders of every layout: what loads, that all of it is used, and what is refused by name."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from speculative.drafts.config import default_layer_ids, eagle3_layer_ids
from speculative.drafts.head import best, target_ids_of
from speculative.drafts.recurrent import RecurrentProposer
from speculative.eagle3 import head_facts
from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.conformance.test_loop import prompt_of, reference
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tokens_of
from tests.tiny_drafts import (
    CONFIG,
    DRAFT_VOCAB,
    WIDTH,
    Random,
    Tensors,
    as_qwen_next,
    as_speculators,
    deepseek_tensors,
    draft_ids,
    eagle3_config,
    eagle3_tensors,
    eagle_tensors,
    save_draft,
    speculators_config,
    target,
    tiny_draft,
)

FULL_VOCAB = {"draft_vocab_size": VOCAB_SIZE}


def bound(algorithm: str, folder: Path, **options: Any) -> Proposer:
    """A proposer that has met the tiny target. Raises what a node would fail with at its start."""
    return make_engine(create_proposer(algorithm, {"draft": str(folder), **options})).proposer


def texts(algorithm: str, folder: Path, **options: Any) -> tuple[list[tuple[int, ...]], int]:
    """(what was said, how many drafts stood) over some prompts."""
    engine = make_engine(create_proposer(algorithm, {"draft": str(folder), **options}), num_pages=600)
    requests = [make_request(f"r{n}", prompt_of(n)) for n in (1, 15, 33, 64, 129)]
    history = run(engine, requests)
    return [tuple(tokens_of(history[str(request.key)])) for request in requests], engine.counters.accepted


def state_hidden(folder: Path) -> torch.Tensor:
    """The recurrent hidden that an EAGLE-3 head makes of a prompt."""
    engine = make_engine(create_proposer("eagle3", {"draft": str(folder)}))
    request = make_request("r", prompt_of(33))
    engine.add(request, hold=True)
    engine.step()
    return engine.seed(request).tensors["hidden"]


def rewritten(
    folder: Path, source: Path, change: Callable[[dict[str, Any], Tensors], None] | None = None
) -> Path:
    """A copy of a draft folder with its config and tensors changed."""
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    if change is not None:
        change(config, tensors)
    return save_draft(folder, config, tensors)


EXPECTED = [reference(tuple(prompt_of(n)), 12) for n in (1, 15, 33, 64, 129)]


# ---- layouts


def test_every_layout_of_one_head_drafts_the_same(tmp_path: Path) -> None:
    official = tiny_draft("eagle3")

    def base_architecture(config: dict[str, Any], tensors: Tensors) -> None:
        config["architectures"] = ["LlamaForCausalLM"]

    def prefixed(config: dict[str, Any], tensors: Tensors) -> None:
        for name in [name for name in tensors if name not in ("d2t", "t2d", "lm_head.weight")]:
            tensors[f"model.{name}"] = tensors.pop(name)

    def layers(config: dict[str, Any], tensors: Tensors) -> None:
        renamed = as_speculators(tensors)
        tensors.clear()
        tensors.update(renamed)

    def speculators(config: dict[str, Any], tensors: Tensors) -> None:
        layers(config, tensors)
        config.clear()
        config.update(speculators_config())

    wanted = texts("eagle3", official)
    assert wanted[0] == EXPECTED
    assert wanted[1] >= 10
    for change in (base_architecture, prefixed, layers, speculators):
        assert texts("eagle3", rewritten(tmp_path / change.__name__, official, change)) == wanted


def test_a_torch_file_loads_as_safetensors_do(tmp_path: Path) -> None:
    source = tiny_draft("eagle")
    folder = tmp_path / "eagle"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    assert texts("eagle", folder) == texts("eagle", source)
    both = [create_proposer("eagle", {"draft": str(path)}).needs.draft_weights for path in (source, folder)]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, None),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}, (2, 15, 27)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, (2, 15, 27)),
        (
            {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 15, 30]},
            (2, 15, 30),
        ),
    ],
)
def test_layer_ids_become_indices_of_hidden_states(
    config: Mapping[str, Any], ids: tuple[int, ...] | None
) -> None:
    assert eagle3_layer_ids(config) == ids


def test_default_taps_are_early_middle_and_late() -> None:
    assert default_layer_ids(30) == (2, 15, 27)
    assert default_layer_ids(32) == (2, 16, 29)


def test_switches_mean_what_their_layout_means_by_them() -> None:
    assert head_facts(speculators_config(norm_output=True)).norm_output
    assert not head_facts(eagle3_config(norm_output=True)).norm_output
    assert head_facts(speculators_config(norm_before_residual=True)).norm_before_residual
    assert not head_facts(speculators_config()).norm_before_residual
    assert head_facts(eagle3_config(use_aux_norm=True)).fc_norm


def test_eagle_g8_d2t_holds_offsets() -> None:
    """G8"""
    assert target_ids_of(torch.tensor([0, 0, 3, 3]), target_vocab=8).tolist() == [0, 1, 5, 6]


def test_best_candidates_are_probabilities_in_order_and_never_above_one() -> None:
    p, found = best(torch.tensor([[0.0, 3.0, 3.0, -1.0], [0.0, 200.0, 0.0, 0.0]]), 3)
    assert found[0].tolist() == [1, 2, 0]
    np.testing.assert_allclose(p[0], torch.tensor([0.0, 3, 3, -1]).softmax(0)[[1, 2, 0]], rtol=1e-5)
    assert p[1, 0] == 1.0


# ---- S10: variants that load


def test_without_a_head_the_target_s_is_borrowed(tmp_path: Path) -> None:
    tensors = eagle3_tensors(vocab=VOCAB_SIZE)
    tensors["lm_head.weight"] = target().head.weight_OI()
    filled = save_draft(tmp_path / "filled", eagle3_config(**FULL_VOCAB), tensors)
    del tensors["lm_head.weight"]
    lacking = save_draft(tmp_path / "lacking", eagle3_config(**FULL_VOCAB), tensors)
    assert texts("eagle3", lacking, topk=4) == texts("eagle3", filled, topk=4)
    assert texts("eagle3", lacking)[0] == EXPECTED


def test_a_tied_head_is_the_draft_s_own_embedding(tmp_path: Path) -> None:
    tensors = eagle3_tensors(vocab=VOCAB_SIZE)
    tensors["embed_tokens.weight"] = tensors.pop("lm_head.weight")
    folder = save_draft(tmp_path / "tied", eagle3_config(**FULL_VOCAB, tie_word_embeddings=True), tensors)
    proposer = bound("eagle3", folder)
    assert isinstance(proposer, RecurrentProposer)
    assert torch.equal(proposer._network.head.head.weight_OI(), tensors["embed_tokens.weight"])


def test_an_own_embedding_is_used(tmp_path: Path) -> None:
    source = tiny_draft("eagle3")

    def same(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = target().embedding_VE.clone()

    def other(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = Random(8).matrix(VOCAB_SIZE, WIDTH)

    wanted = texts("eagle3", source)
    assert texts("eagle3", rewritten(tmp_path / "same", source, same)) == wanted
    changed = rewritten(tmp_path / "other", source, other)
    assert texts("eagle3", changed)[0] == EXPECTED
    assert not torch.allclose(state_hidden(changed), state_hidden(source), atol=1e-3)


def test_an_eagle_head_s_own_lm_head_is_not_used(tmp_path: Path) -> None:
    source = tiny_draft("eagle")

    def with_head(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["lm_head.weight"] = Random(8).matrix(VOCAB_SIZE, WIDTH)

    assert texts("eagle", rewritten(tmp_path / "head", source, with_head)) == texts("eagle", source)


def test_a_hot_token_map_limits_what_is_drafted(tmp_path: Path) -> None:
    everything, few = tmp_path / "all.pt", tmp_path / "few.pt"
    torch.save(list(range(VOCAB_SIZE)), everything)
    torch.save(torch.tensor([9, 3, 200, 41]), few)
    source = tiny_draft("eagle")
    assert texts("eagle", source, token_map=str(everything)) == texts("eagle", source)
    drafting = create_proposer("eagle", {"draft": str(source), "token_map": str(few), "topk": 4})
    engine = make_engine(drafting)
    request = make_request("r", prompt_of(33))
    engine.add(request)
    engine.step()
    engine.cache.grow(request, request.num_committed + 16)
    (proposal,) = drafting.propose([request], [8])
    assert len(proposal.token_ids) == 8
    assert set(proposal.token_ids) <= {9, 3, 200, 41}


def test_a_folder_that_also_holds_the_target_gives_its_modules(tmp_path: Path) -> None:
    source = tiny_draft("mtp")

    def with_target(config: dict[str, Any], tensors: Tensors) -> None:
        random = Random(4)
        tensors["model.embed_tokens.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
        tensors["lm_head.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
        tensors["model.norm.weight"] = random.norm(WIDTH)
        tensors["model.layers.3.shared_head.head.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
        tensors["model.layers.3.embed_tokens.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
        for index in range(3):
            tensors.update(random.layer(f"model.layers.{index}."))

    assert texts("mtp", rewritten(tmp_path / "whole", source, with_target)) == texts("mtp", source)


def test_qwen_next_names_and_norms_draft_as_deepseek_s_do() -> None:
    assert texts("mtp", tiny_draft("mtp_qwen")) == texts("mtp", tiny_draft("mtp"))


# ---- refused by name


def drop(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = tensor

    return change


def say(**fields: Any) -> Callable[[dict[str, Any], Tensors], None]:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        config.update(fields)

    return change


def no_maps(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["d2t"], tensors["t2d"]


def map_twice(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def map_outside(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"][5] = VOCAB_SIZE


REFUSED: dict[str, tuple[Callable[[dict[str, Any], Tensors], None], str]] = {
    "reduced vocabulary without d2t": (no_maps, "lacks d2t, which draft_vocab_size 160 needs"),
    "reduced vocabulary without head": (drop("lm_head.weight"), "lacks lm_head.weight"),
    "d2t outside": (
        map_outside,
        r"d2t must stay inside the target's vocabulary of 256, got id 261 at d2t\[5\]",
    ),
    "d2t twice": (map_twice, "d2t must give every draft id its own target id"),
    "t2d contradicts d2t": (
        put("t2d", torch.zeros(VOCAB_SIZE, dtype=torch.bool)),
        "t2d must mark the 160 target ids of d2t",
    ),
    "missing norm": (drop("norm.weight"), "lacks norm.weight"),
    "missing layer tensor": (
        drop("midlayer.hidden_norm.weight"),
        "lacks layers.0.hidden_norm.weight",
    ),
    "unused tensor": (put("fc2.weight", torch.zeros(2)), r"1 tensors nothing uses, first \['fc2.weight'\]"),
    "misshapen tensor": (
        put("fc.weight", torch.zeros(WIDTH, WIDTH)),
        r"fc.weight must have shape \(64, 192\), got \(64, 64\)",
    ),
    "same tensor twice": (
        put("layers.0.hidden_norm.weight", torch.zeros(WIDTH)),
        "holds layers.0.hidden_norm.weight twice",
    ),
    "other hidden size": (
        say(hidden_size=32, head_dim=16),
        "target_hidden_size of the draft must be .* 64, got 32",
    ),
    "other vocabulary": (say(vocab_size=300), "vocab_size of the draft must be the target's 256, got 300"),
    "layers beyond the target": (
        say(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}),
        "eagle_aux_hidden_state_layer_ids must be hidden states of 3 layers",
    ),
    "missing fc norms": (say(fc_norm=True), "lacks fc_norm.0.weight"),
    "both norms": (say(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm exclude each other"),
    "missing bias": (say(bias=True), "lacks fc.bias"),
    "missing attention bias": (say(attention_bias=True), "lacks layers.0.self_attn.q_proj.bias"),
    "last hidden only": (
        say(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state must be true",
    ),
    "layers that are no list": (
        say(eagle_config={"eagle_aux_hidden_state_layer_ids": 2}),
        "eagle_aux_hidden_state_layer_ids must be a list of layers, got 2",
    ),
    "a section that is none": (say(eagle_config=[1]), r"eagle_config must be an object, got \[1\]"),
    "rope that is no section": (say(rope_scaling=2.0), "rope_scaling must be an object, got 2.0"),
    "heads that are no number": (
        say(num_key_value_heads=-1),
        "num_key_value_heads must be a positive integer, got -1",
    ),
    "width that is no number": (
        say(target_hidden_size="64"),
        "target_hidden_size must be a positive integer, got '64'",
    ),
    "unknown activation": (say(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
    "unknown layer": (say(model_type="gpt2", architectures=["GPT2"]), "model_type of a draft must be one of"),
    "other kind of speculator": (
        say(speculators_model_type="peagle", transformer_layer_config=dict(CONFIG)),
        "speculators_model_type must be 'eagle3' for this algorithm, got 'peagle'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_eagle3_folder_that_cannot_draft_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    folder = rewritten(tmp_path / "draft", tiny_draft("eagle3"), change)
    with pytest.raises(ValueError, match=message):
        bound("eagle3", folder)


@pytest.mark.parametrize(
    ("algorithm", "tensors", "fields", "message"),
    [
        ("eagle", eagle_tensors(), {"hidden_size": 32, "head_dim": 16}, "hidden_size of the draft must be"),
        ("eagle", eagle_tensors(), {"vocab_size": 300}, "vocab_size of the draft must be the target's 256"),
        (
            "eagle",
            {**eagle_tensors(), "layers.0.input_layernorm.weight": torch.ones(WIDTH)},
            {},
            r"nothing uses, first \['layers.0.input_layernorm.weight'\]",
        ),
        ("eagle", eagle3_tensors(), {}, r"fc.weight must have shape \(64, 128\)"),
        ("mtp", eagle_tensors(), {}, "lacks eh_proj.weight and mtp.fc.weight"),
    ],
)
def test_other_heads_that_cannot_draft_are_refused_by_name(
    tmp_path: Path, algorithm: str, tensors: Tensors, fields: dict[str, Any], message: str
) -> None:
    folder = save_draft(tmp_path / "draft", {**CONFIG, **fields}, tensors)
    with pytest.raises(ValueError, match=message):
        bound(algorithm, folder)


MODULES: dict[str, tuple[str, int, Callable[[dict[str, Any], Tensors], None], str]] = {
    "missing norm": ("deepseek", 1, drop("model.layers.3.hnorm.weight"), "lacks model.layers.3.hnorm.weight"),
    "missing mix": ("deepseek", 3, drop("model.layers.4.eh_proj.weight"), "lacks model.layers.4.eh_proj"),
    "last mix missing": (
        "deepseek",
        3,
        drop("model.layers.5.eh_proj.weight"),
        "lacks model.layers.5.eh_proj",
    ),
    "fewer modules than said": (
        "deepseek",
        2,
        say(num_nextn_predict_layers=3),
        "num_nextn_predict_layers must be the number of modules in the checkpoint, 2, got 3",
    ),
    "unused tensor": (
        "deepseek",
        1,
        put("fc.weight", torch.zeros(2)),
        r"nothing uses, first \['fc.weight'\]",
    ),
    "layer after the module": (
        "deepseek",
        1,
        put("model.layers.4.mlp.up_proj.weight", torch.zeros(2)),
        r"nothing uses, first \['model.layers.4.mlp.up_proj.weight'\]",
    ),
    "unused beside mtp": (
        "qwen",
        1,
        put("fc.weight", torch.zeros(2)),
        r"nothing uses, first \['fc.weight'\]",
    ),
    "unused in mtp": ("qwen", 1, put("mtp.fc2.weight", torch.zeros(2)), r"first \['mtp.fc2.weight'\]"),
    "mtp norm missing": ("qwen", 1, drop("mtp.norm.weight"), "lacks mtp.norm.weight"),
    "mtp mix missing": ("qwen", 1, drop("mtp.fc.weight"), "lacks mtp.fc.weight"),
}


@pytest.mark.parametrize("case", MODULES)
def test_modules_that_cannot_all_draft_are_refused_by_name(tmp_path: Path, case: str) -> None:
    """Also in a folder that holds the target, whose tensors are nobody's concern."""
    layout, num_modules, change, message = MODULES[case]
    tensors = deepseek_tensors(num_modules=num_modules)
    tensors = as_qwen_next(tensors) if layout == "qwen" else tensors
    tensors |= {"model.norm.weight": torch.ones(WIDTH), **Random(4).layer("model.layers.0.")}
    config: dict[str, Any] = dict(CONFIG)
    assert bound("mtp", save_draft(tmp_path / "good", config, tensors)).needs.draft == "good"
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        bound("mtp", save_draft(tmp_path / "bad", config, tensors))


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("eagle3", {"draft": ""}, "draft must be a folder with a draft model, got ''"),
        ("eagle3", {"draft": "/nowhere"}, "draft must be a folder with a draft model, got '/nowhere'"),
        ("eagle", {"topk": 17}, r"topk must be a whole number in \[1, 16\], got 17"),
        ("eagle", {"num_steps": 0}, r"num_steps must be a whole number in \[1, 32\], got 0"),
        ("eagle3", {"num_draft_tokens": 0}, r"num_draft_tokens must be a whole number in \[1, 256\], got 0"),
        ("eagle", {"token_map": "/nowhere"}, "token_map must be a torch file with token ids, got '/nowhere'"),
        ("mtp_chain", {"topk": 2}, "topk must be 1 for a draft of 3 modules, got 2"),
    ],
)
def test_an_option_that_cannot_work_is_refused_by_name(
    algorithm: str, options: dict[str, Any], message: str
) -> None:
    given = {"draft": str(tiny_draft(algorithm)), **options}
    with pytest.raises(ValueError, match=message):
        create_proposer(algorithm.split("_")[0], given)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft folder lacks .*config.json"):
        create_proposer("eagle3", {"draft": str(tmp_path)})


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def broken_torch_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not a torch file")


def no_tensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"step": 3}, folder / "pytorch_model.bin")


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"hidden_size": 64,')


def listed_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "mtp"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, "model.safetensors must be a whole safetensors file: "),
        (pointer, "model.safetensors must be a whole safetensors file: "),
        (broken_torch_file, "pytorch_model.bin must be a torch file: "),
        (no_tensors, "pytorch_model.bin must be a torch file of tensors by name"),
        (half_a_config, "config.json must be JSON: "),
        (listed_config, "config.json must hold a JSON object, got a list"),
    ],
)
def test_a_file_that_did_not_arrive_whole_is_refused_by_its_name(
    tmp_path: Path, algorithm: str, spoil: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(tiny_draft(algorithm), folder)
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        create_proposer(algorithm, {"draft": str(folder)})


def test_weights_and_what_the_config_makes_of_them_are_the_draft_s_identity(tmp_path: Path) -> None:
    source = tiny_draft("eagle3")

    def other_weight(config: dict[str, Any], tensors: Tensors) -> None:
        tensors["norm.weight"][0] += 1

    folders = {
        "copy": rewritten(tmp_path / "copy", source),
        "weight": rewritten(tmp_path / "weight", source, other_weight),
        "meaning": rewritten(tmp_path / "meaning", source, say(norm_before_residual=True)),
    }
    found = {
        name: create_proposer("eagle3", {"draft": str(folder)}).needs.draft_weights
        for name, folder in folders.items()
    }
    original = create_proposer("eagle3", {"draft": str(source)}).needs.draft_weights
    assert found["copy"] == original
    assert len({original, found["weight"], found["meaning"]}) == 3


def test_the_reduced_vocabulary_maps_onto_the_ids_it_holds() -> None:
    proposer = bound("eagle3", tiny_draft("eagle3"))
    assert isinstance(proposer, RecurrentProposer)
    head = proposer._network.head
    assert head.to_target(np.arange(DRAFT_VOCAB)).tolist() == draft_ids().tolist()


def test_a_chain_is_the_default_and_the_shape_bounds_what_is_drafted() -> None:
    draft = str(tiny_draft("eagle3"))

    def needs(**options: int) -> tuple[int, int, int]:
        found = create_proposer("eagle3", {"draft": draft, **options}).needs
        return found.max_draft_tokens, found.num_scratch_slots, found.num_lookahead_tokens

    assert needs() == (3, 2, 1)
    assert needs(num_steps=5, num_draft_tokens=4) == (4, 4, 1)
    assert needs(num_steps=4, topk=4, num_draft_tokens=11) == (11, 12, 1)
    assert needs(num_steps=1, topk=4, num_draft_tokens=11) == (4, 0, 1)
    chain = create_proposer("mtp", {"draft": str(tiny_draft("mtp_chain"))}).needs
    assert (chain.max_draft_tokens, chain.num_scratch_slots, chain.num_lookahead_tokens) == (3, 0, 4)
    assert chain.draft_kv[0].num_layers == 3
