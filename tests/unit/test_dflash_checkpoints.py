"""What block drafters say in their configs and checkpoints, in every layout, and what is refused of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layout import PoolSpec
from engine.request import Request
from speculative.dflash import DflashConfig, DflashProposer
from speculative.drafts.dflash_config import LayerView, dflash_facts
from speculative.proposer import Proposal
from speculative.registry import create_proposer
from tests.engines import VOCAB_SIZE, make_engine, make_request, tiny_model
from tests.tiny_block_drafts import (
    BLOCK,
    DRAFT_VOCAB,
    LAYER_CONFIG,
    MASK,
    WIDTH,
    Tensors,
    dflash_tensors,
    draft_ids,
    pool_for_drafts,
    save_draft,
    speculators_config,
    zlab_config,
)


def proposer_of(config: Mapping[str, Any], tensors: Tensors, **options: Any) -> DflashProposer:
    return DflashProposer(DflashConfig(draft=str(save_draft(config, tensors)), **options))


def bound(config: Mapping[str, Any], tensors: Tensors) -> DflashProposer:
    proposer = proposer_of(config, tensors)
    proposer.bind(tiny_model().model, pool_for_drafts(proposer.needs.draft_kv))
    return proposer


def test_needs_say_the_block_the_taps_and_the_draft() -> None:
    needs = proposer_of(zlab_config(), dflash_tensors()).needs
    assert (needs.max_draft_tokens, needs.num_scratch_slots, needs.num_lookahead_tokens) == (4, 5, 0)
    assert needs.hidden_layers == (1, 2)
    assert needs.draft_kv == (PoolSpec(pool="draft", num_layers=2, num_kv_heads=1, head_dim=16),)
    assert (needs.handoff, needs.prefill_identity, needs.draft) == ((), "dflash", "draft")
    assert len(needs.draft_weights) == 32
    assert proposer_of(zlab_config(), dflash_tensors(), num_draft_tokens=2).needs.max_draft_tokens == 2


def test_layer_ids_of_both_layouts_mean_the_same_hidden_states() -> None:
    by_default = zlab_config(num_target_layers=8, dflash_config={"mask_token_id": MASK})
    assert dflash_facts(zlab_config()).layer_ids == (1, 2)
    assert dflash_facts(speculators_config()).layer_ids == (1, 2)
    assert dflash_facts(by_default).layer_ids == (2, 6)


def test_a_speculators_block_is_eight_wide_unless_it_says_so() -> None:
    config = speculators_config()
    del config["block_size"]
    assert dflash_facts(config).block_size == 8


def test_sliding_layers_are_causal_inside_the_block_unless_told_otherwise() -> None:
    fields = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    full = LayerView(window=None, is_bidirectional=True)
    assert dflash_facts(zlab_config(**fields)).views == (LayerView(window=7, is_bidirectional=False), full)
    assert dflash_facts(zlab_config(**fields, is_causal=False)).views == (
        LayerView(window=7, is_bidirectional=True),
        full,
    )


def test_a_window_hides_old_context_and_causal_rows_hide_later_ones() -> None:
    rows = {}
    for window, is_causal in ((512, False), (3, False), (512, True)):
        config = zlab_config(
            layer_types=["sliding_attention"] * 2, sliding_window=window, is_causal=is_causal
        )
        proposer = bound(config, dflash_tensors())
        features = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
        proposer._network.write_context(features, range(9), range(9))
        request = make_request("r", [1] * 9)
        request.tokens.append(5)
        request.num_committed, request.pages = 9, [0, 1, 2, 3]
        rows[window, is_causal] = proposer._network.hidden([proposer._block(request, 4)])
    plain = bound(zlab_config(), dflash_tensors())
    plain._network.write_context(features, range(9), range(9))
    expected = plain._network.hidden([plain._block(request, 4)])
    assert torch.allclose(rows[512, False], expected, atol=1e-6)
    assert (rows[3, False] - expected).abs().max() > 1e-3
    assert (rows[512, True] - expected).abs().max() > 1e-3


def test_names_with_a_prefix_and_of_an_encoder_are_the_same_draft() -> None:
    plain = dflash_tensors()
    prefixed = {f"model.{name}": tensor for name, tensor in plain.items()}
    renames = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    encoder = {renames.get(name, name): tensor for name, tensor in plain.items()}
    identities = {bound(zlab_config(), tensors).needs.draft_weights for tensors in (plain, prefixed, encoder)}
    assert len(identities) == 1


def test_a_trained_mask_embedding_is_used_by_the_draft_and_leaves_the_target_alone() -> None:
    folder = save_draft(zlab_config(), dflash_tensors())
    before = tiny_model().model.embedding_VE.clone()
    outputs, weights = [], set()
    for embedding in (None, before[MASK], torch.ones(WIDTH)):
        if embedding is not None:
            torch.save({"embedding": embedding.clone(), "mask_token_id": MASK}, folder / "mask_embedding.pt")
        proposer = DflashProposer(DflashConfig(draft=str(folder)))
        proposer.bind(tiny_model().model, pool_for_drafts(proposer.needs.draft_kv))
        request = make_request("r", [5])
        request.pages = [0, 1]
        weights.add(proposer.needs.draft_weights)
        outputs.append(proposer._network.hidden([proposer._block(request, 4)]))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert len(weights) == 3
    assert torch.equal(tiny_model().model.embedding_VE, before)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"mask_token_id": MASK}, "mask_embedding.pt must hold an embedding, got dict without one"),
        ([1, 2], "mask_embedding.pt must hold an embedding, got list without one"),
        ({"embedding": torch.ones(WIDTH), "mask_token_id": MASK + 1}, "mask_token_id of mask_embedding.pt"),
        ({"embedding": torch.ones(3)}, r"mask_embedding must have shape \(64,\), got \(3,\)"),
        (None, "mask_embedding.pt must be a torch file: "),
    ],
)
def test_a_mask_embedding_that_is_none_is_refused(stored: object, message: str) -> None:
    folder = save_draft(zlab_config(), dflash_tensors())
    file = folder / "mask_embedding.pt"
    if stored is None:
        file.write_bytes(b"not a torch file")
    else:
        torch.save(stored, file)
    with pytest.raises(ValueError, match=message):
        make_engine(create_proposer("dflash", {"draft": str(folder)}))


def with_vocabulary() -> Tensors:
    ids = draft_ids()
    return {
        **dflash_tensors(),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "lm_head.weight": torch.randn(DRAFT_VOCAB, WIDTH, generator=torch.Generator().manual_seed(1)),
    }


def test_drafts_of_a_reduced_vocabulary_are_the_targets_ids() -> None:
    proposer = bound(speculators_config(), with_vocabulary())
    requests: list[Request] = []
    for index in range(6):
        request = make_request(str(index), [7 + index])
        request.pages = [2 * index, 2 * index + 1]
        requests.append(request)
    tokens = {token for proposal in proposer.propose(requests, [4] * 6) for token in proposal.token_ids}
    assert len(tokens) >= 3
    assert tokens <= set(draft_ids().tolist())


def test_limits_cut_the_chain_and_zero_drafts_nothing() -> None:
    proposer = bound(zlab_config(), dflash_tensors())
    requests = []
    for index in range(4):
        request = make_request(str(index), [9])
        request.pages = [2 * index, 2 * index + 1]
        requests.append(request)
    whole = proposer.propose(requests[:1], [9])[0].token_ids
    assert len(whole) == BLOCK - 1
    cut = proposer.propose(requests, [0, 1, 3, 9])
    assert [proposal.token_ids for proposal in cut] == [(), whole[:1], whole[:3], whole]
    assert proposer.propose(requests[:2], [0, 0]) == [Proposal(), Proposal()]


@pytest.mark.parametrize("name", sorted(dflash_tensors()))
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(name: str) -> None:
    tensors = dflash_tensors()
    del tensors[name]
    with pytest.raises(ValueError, match=f"the checkpoint lacks {name}"):
        bound(zlab_config(), tensors)


@pytest.mark.parametrize(
    "name",
    [
        "fc.bias",
        "layers.2.mlp.up_proj.weight",
        "layers.0.attention_conv.base_kernel",
        "candidate_selector.hidden_projection",
        "markov_head.markov_w1.weight",
        "confidence_head.weight",
    ],
)
def test_a_tensor_that_nothing_uses_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"has 1 tensors nothing uses, first .*{name}"):
        bound(zlab_config(), {**dflash_tensors(), name: torch.ones(2)})


def test_a_misshapen_tensor_is_refused_by_its_name_and_both_shapes() -> None:
    tensors = {**dflash_tensors(), "fc.weight": torch.ones(WIDTH, WIDTH)}
    with pytest.raises(ValueError, match=r"fc.weight must have shape \(64, 128\), got \(64, 64\)"):
        bound(zlab_config(), tensors)


NESTED = zlab_config()["dflash_config"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zlab_config(block_size=None), "block_size .* whole number of at least 2, got None"),
        (zlab_config(block_size=1), "block_size .* got 1"),
        (zlab_config(dflash_config={"target_layer_ids": [0]}), "mask_token_id .* got None"),
        (zlab_config(dflash_config={**NESTED, "target_layer_ids": [1, 0]}), "target_layer_ids must be"),
        (zlab_config(dflash_config={**NESTED, "projector_type": "domino"}), "projector_type .* got 'domino'"),
        (zlab_config(dflash_config={**NESTED, "conv_kernel_size": 2}), "conv_kernel_size .* got 2"),
        (zlab_config(dflash_config={**NESTED, "selector_rank": 256}), "selector_rank .* got 256"),
        (zlab_config(dflash_config={**NESTED, "attention_value_scale": 2.0}), "attention_value_scale"),
        (zlab_config(is_causal=True), "is_causal must be false"),
        (zlab_config(layer_types=["full_attention"]), "layer_types must be 2 of"),
        (zlab_config(model_type="dflash"), "model_type of a draft must be one of"),
        (speculators_config(speculators_model_type="dspark"), "speculators_model_type must be 'dflash'"),
        (speculators_config(sample_from_anchor=True), "sample_from_anchor .* got True"),
        (speculators_config(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids must be"),
        (zlab_config(dflash_config={**NESTED, "target_layer_ids": 1}), "target_layer_ids must be a list"),
        (zlab_config(dflash_config=7), "dflash_config must be an object, got 7"),
        (speculators_config(transformer_layer_config=7), "transformer_layer_config must be an object"),
        (
            speculators_config(
                transformer_layer_config={
                    **LAYER_CONFIG,
                    "layer_types": ["sliding_attention"] * 2,
                    "sliding_window": 4,
                }
            ),
            "layer_types of a speculators draft",
        ),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_field_and_value(
    config: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dflash_facts(config)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (zlab_config(num_target_layers=4), dflash_tensors(), "num_target_layers .* target's 3, got 4"),
        (zlab_config(vocab_size=300), dflash_tensors(), "vocab_size .* target's 256, got 300"),
        (zlab_config(hidden_size=32), dflash_tensors(), "target_hidden_size .* 64, got 32"),
        (
            zlab_config(dflash_config={**NESTED, "target_layer_ids": [0, 2]}),
            dflash_tensors(),
            r"hidden states before the last of 3, got hidden states \(1, 3\)",
        ),
        (
            zlab_config(dflash_config={**NESTED, "mask_token_id": VOCAB_SIZE}),
            dflash_tensors(),
            "mask_token_id must be below .* 256, got 256",
        ),
        (speculators_config(), dflash_tensors(), "lacks d2t, which draft_vocab_size 200 needs"),
        (
            speculators_config(),
            {name: tensor for name, tensor in with_vocabulary().items() if name != "lm_head.weight"},
            "lacks lm_head.weight",
        ),
        (
            speculators_config(),
            {**with_vocabulary(), "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool)},
            "t2d must mark the 200 target ids",
        ),
    ],
)
def test_a_draft_of_another_target_is_refused_by_field(
    config: Mapping[str, Any], tensors: Tensors, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bound(config, tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": ""}, "draft must be a folder"),
        ({"draft": "/nonexistent"}, "draft must be a folder"),
        ({"draft": ".", "num_draft_tokens": 0}, r"num_draft_tokens must be a whole number in \[1, 256\]"),
    ],
)
def test_bad_options_are_refused(options: Mapping[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        create_proposer("dflash", options)
