"""The block drafter on its own: worked examples of the reference, and checkpoints that must be refused."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention_mask import SpanMask, visible
from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.layout import PoolSpec, build_layout
from engine.models.config import ModelConfig
from engine.pool import PagePool
from engine.request import Request
from speculative.accept import walk
from speculative.dflash import DflashConfig, DflashProposer
from speculative.drafts.dflash_config import LayerView, default_target_layers, dflash_facts
from speculative.proposer import Advance, Proposal
from speculative.registry import create_proposer
from speculative.tree import build
from tests.engines import VOCAB_SIZE, make_request, tiny_model
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

GOLDEN_LAYER_IDS = {
    (36, 5): (1, 9, 17, 25, 33),
    (30, 5): (1, 8, 14, 20, 27),
    (30, 3): (1, 14, 27),
    (28, 5): (1, 7, 13, 19, 25),
    (24, 4): (1, 8, 14, 21),
    (12, 1): (6,),
    (64, 5): (1, 16, 31, 46, 61),
    (8, 2): (1, 5),
}


@pytest.mark.parametrize(("depths", "expected"), GOLDEN_LAYER_IDS.items())
def test_g1_layers_tapped_by_default(depths: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert default_target_layers(*depths) == expected


# ---- G3: the tiny drafter of the reference, through the proposer


class GoldenTarget:
    """An embedding and a head; its forwards are given as features."""

    def __init__(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> None:
        self.embedding_VE = embedding_VE
        self.head_VE = head_VE
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.config: ModelConfig = replace(
            tiny_model().config, hidden_size=8, vocab_size=12, num_layers=4, windows=(None,) * 4
        )

    def final_norm(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        raise NotImplementedError


GOLDEN_CONFIG: Mapping[str, Any] = {
    **LAYER_CONFIG,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rope_theta": 10000.0,
    "vocab_size": 12,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 11},
}


class Golden:
    """Weights by the reference's formula, call after call."""

    def __init__(self) -> None:
        self._calls = 0
        self.target = GoldenTarget(self.fill(12, 8), self.fill(12, 8))
        tensors = {"fc.weight": self.fill(8, 16)}
        shapes = {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (16, 8),
            "mlp.up_proj": (16, 8),
            "mlp.down_proj": (8, 16),
        }
        for layer in (0, 1):
            for name, shape in shapes.items():
                tensors[f"layers.{layer}.{name}.weight"] = self.fill(*shape)
        self.features_TX = self.fill(9, 16, scale=1.0)
        for layer in (0, 1):
            for name, width in {"input_layernorm": 8, "post_attention_layernorm": 8}.items():
                tensors[f"layers.{layer}.{name}.weight"] = torch.ones(width)
            for name in ("q_norm", "k_norm"):
                tensors[f"layers.{layer}.self_attn.{name}.weight"] = torch.ones(4)
        for name in ("hidden_norm", "norm"):
            tensors[f"{name}.weight"] = torch.ones(8)
        self.proposer = DflashProposer(DflashConfig(draft=str(save_draft(GOLDEN_CONFIG, tensors))))
        self.pool = pool_for_drafts(self.proposer.needs.draft_kv, page_size=4)
        self.pool.storage.view(torch.float32).fill_(1e4)
        self.proposer.bind(self.target, self.pool)
        self.request = make_request("golden", [1, 2, 3, 4])
        self.request.pages = [7, 2, 9]

    def fill(self, *shape: int, scale: float = 0.5) -> torch.Tensor:
        self._calls += 1
        i = torch.arange(math.prod(shape), dtype=torch.float64) + 1
        return (scale * torch.sin(i * i * 0.37 + self._calls)).view(shape).float()

    def observe(self, start: int, stop: int, *emitted: int) -> None:
        """Features of positions [start, stop) are committed."""
        request = self.request
        request.num_committed = stop
        request.tokens += emitted
        hidden = {1: self.features_TX[start:stop, :8], 2: self.features_TX[start:stop, 8:]}
        advance = Advance(
            request=request,
            rows=(0, stop - start),
            accepted_nodes=range(stop - start),
            token_ids=emitted,
            is_prompt=start == 0,
        )
        self.proposer.observe([advance], ForwardOutput(logits_RV=torch.empty(0, 12), hidden=hidden))

    def kv(self, layer: int, slot: int) -> tuple[list[float], list[float]]:
        k, v = self.pool.kv("draft", layer)
        page = self.request.pages[slot // 4]
        return k[page, slot % 4, 0].tolist(), v[page, slot % 4, 0].tolist()

    def block(self, start: int, root: int, width: int = 4) -> Span:
        return Span(
            token_ids=(root, *[11] * (width - 1)),
            num_committed=start,
            pages=self.request.pages,
            positions=range(start, start + width),
            logit_rows=range(width),
            is_bidirectional=True,
        )

    def hidden(self, span: Span) -> torch.Tensor:
        return self.proposer._network.hidden([span])


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-5)


def test_g3_two_rounds_of_the_tiny_drafter() -> None:
    golden = Golden()
    golden.observe(0, 4, 3)
    row1 = golden.hidden(golden.block(4, 3))[1]
    assert row1[:4].tolist() == near([0.595317, -0.668416, -2.297618, -0.802985])
    logits = golden.proposer._network.head.logits(row1[None])[0, :4].tolist()
    assert logits == near([0.423650, 0.396870, 1.421837, -1.570446])
    assert golden.proposer.propose([golden.request], [3])[0].token_ids == (2, 2, 2)
    golden.observe(4, 7, 2, 2, 5)
    k, v = golden.kv(0, 4)
    assert k == near([1.512050, 1.112360, 0.268708, -0.635731])
    assert v == near([-0.571568, 0.846640, 0.660238, -0.124323])
    row1 = golden.hidden(golden.block(7, 5))[1]
    assert row1[:4].tolist() == near([0.227032, -0.443588, -2.164030, -0.968842])
    (proposal,) = golden.proposer.propose([golden.request], [3])
    assert (proposal.token_ids, proposal.parents) == ((2, 2, 8), (0, 1, 2))


def test_g3_appended_context_is_the_context_built_at_once() -> None:
    appended, at_once = Golden(), Golden()
    appended.observe(0, 3)
    appended.observe(3, 4, 3)
    appended.proposer.propose([appended.request], [3])  # scratch rows that the next lines must overwrite
    appended.observe(4, 5, 2)
    appended.observe(5, 7, 2, 5)
    at_once.observe(0, 7, 3, 2, 2, 5)
    for layer in (0, 1):
        for slot in range(7):
            assert appended.kv(layer, slot) == (
                near(at_once.kv(layer, slot)[0]),
                near(at_once.kv(layer, slot)[1]),
            )


def test_g3_a_missed_append_a_shifted_start_and_a_shorter_block_all_change_row_one() -> None:
    golden, forgetful = Golden(), Golden()
    golden.observe(0, 7, 3, 2, 2, 5)
    forgetful.observe(0, 4, 3)
    forgetful.proposer.propose([forgetful.request], [3])
    right = golden.hidden(golden.block(7, 5))[1]
    wrong = {
        "not appended": forgetful.hidden(forgetful.block(7, 5))[1],
        "shifted": golden.hidden(replace(golden.block(7, 5), positions=range(6, 10)))[1],
        "three rows": golden.hidden(golden.block(7, 5, width=3))[1],
    }
    assert {name: bool((row - right).abs().max() > 1e-4) for name, row in wrong.items()} == dict.fromkeys(
        wrong, True
    )


def test_g3_g10_blocks_of_one_forward_see_their_own_context_and_rows_alone() -> None:
    golden, other = Golden(), Golden()
    golden.observe(0, 9, 3, 2, 2, 5)
    other.observe(0, 9, 3, 2, 2, 5)
    # Blocks at 2 and 5 overwrite slots the other sees, so each has pages of its own.
    golden.pool.storage.view(90, -1)[[20, 21, 22]] = golden.pool.storage.view(90, -1)[[7, 2, 9]]
    blocks = [golden.block(2, 3, width=3), replace(golden.block(5, 6, width=3), pages=[20, 21, 22])]
    together = golden.hidden(blocks[0]), golden.hidden(blocks[1])
    packed = other.proposer._network.hidden([other.block(2, 3, width=3)])
    other.observe(0, 9)
    packed = torch.cat([packed, other.proposer._network.hidden([other.block(5, 6, width=3)])])
    assert torch.allclose(torch.cat(together), packed, atol=1e-6)


@pytest.mark.parametrize(("anchor", "context"), [(1, 1), (3, 3)])
def test_g10_a_block_sees_context_before_its_anchor_and_all_its_rows(anchor: int, context: int) -> None:
    span = Golden().block(anchor, 5, width=3)
    seen = visible(SpanMask.of(span, window=None), 0, anchor + 3 + 2)
    assert seen.tolist() == [[True] * (context + 3) + [False] * 2] * 3


def test_g2_blocks_are_the_root_and_masks_at_the_next_positions() -> None:
    config = zlab_config(block_size=4, dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 99})
    proposer = DflashProposer(DflashConfig(draft=str(save_draft(config, dflash_tensors()))))
    blocks = []
    for bonus, committed in ((11, 5), (22, 8)):
        request = make_request(str(bonus), [1] * committed)
        request.tokens.append(bonus)
        request.num_committed = committed
        blocks.append(proposer._block(request, 3))
    assert [list(block.token_ids) for block in blocks] == [[11, 99, 99, 99], [22, 99, 99, 99]]
    assert [list(block.positions) for block in blocks] == [[5, 6, 7, 8], [8, 9, 10, 11]]
    assert [list(block.logit_rows) for block in blocks] == [[1, 2, 3]] * 2
    assert [block.is_bidirectional for block in blocks] == [True, True]


def test_g4_the_longest_matching_run_stands() -> None:
    candidates = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
    drawn = [[11, 12, 99, 14], [77, 22, 23, 24], [31, 32, 33, 34], [41, 88, 43, 44]]
    outcomes = [
        walk(build(root, Proposal(token_ids=tuple(drafts), parents=(0, 1, 2))), tokens)
        for (root, *drafts), tokens in zip(candidates, drawn, strict=True)
    ]
    assert [outcome.num_correct_drafts for outcome in outcomes] == [2, 0, 3, 1]
    assert [outcome.token_ids for outcome in outcomes] == [(11, 12, 99), (77,), (31, 32, 33, 34), (41, 88)]
    assert [outcome.nodes for outcome in outcomes] == [(0, 1, 2), (0,), (0, 1, 2, 3), (0, 1)]


def kv_bytes(*shapes: tuple[int, int, int]) -> int:
    """Per token of 16-token pages, in bfloat16. A shape is layers, KV heads, head dim."""
    specs = [
        PoolSpec(pool=str(index), num_layers=layers, num_kv_heads=heads, head_dim=dim)
        for index, (layers, heads, dim) in enumerate(shapes)
    ]
    return build_layout(page_size=16, dtype="bfloat16", pools=specs).page_bytes // 16


def test_g13_bytes_per_token_of_target_and_draft() -> None:
    assert [kv_bytes((36, 8, 128)), kv_bytes((5, 8, 128))] == [147456, 20480]
    assert [kv_bytes((30, 3, 64)), kv_bytes((2, 3, 64)), kv_bytes((5, 3, 64))] == [23040, 1536, 3840]
    assert kv_bytes((30, 3, 64), (2, 3, 64)) == 23040 + 1536


# ---- what a config and a checkpoint say


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
