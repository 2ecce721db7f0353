"""The block drafter on its own: the worked examples of the reference."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention_mask import SpanMask, visible
from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.layout import PoolSpec, build_layout
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.pool import PagePool
from speculative.accept import Acceptance, walk
from speculative.accept_rules import BLOCK, TOKEN_WISE, ChainRule, DrawnChain, verify_chain
from speculative.dflash import DflashConfig, DflashProposer
from speculative.drafts.dflash_config import default_target_layers
from speculative.proposer import Advance, Proposal
from speculative.tree import build
from tests.engines import make_request, tiny_model
from tests.tiny_block_drafts import (
    LAYER_CONFIG,
    dflash,
    dflash_tensors,
    pool_for_drafts,
    save_draft,
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
def test_dflash_g1_layers_tapped_by_default(depths: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert default_target_layers(*depths) == expected


# ---- G3: the tiny drafter of the reference, through the proposer


class GoldenTarget:
    """An embedding and a head; its forwards are given as features."""

    def __init__(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> None:
        self.embedding_VE = embedding_VE
        self.head = Linear(head_VE)
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


def test_dflash_g3_two_rounds_of_the_tiny_drafter() -> None:
    golden = Golden()
    assert golden.proposer._network.context(golden.features_TX[:1])[0].tolist() == near(
        [-2.178739, -0.907682, 0.520026, 0.824490, -0.884034, -0.297235, -0.708625, 0.327080]
    )
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


def test_dflash_g3_appended_context_is_the_context_built_at_once() -> None:
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


def test_dflash_g3_a_missed_append_a_shifted_start_and_a_shorter_block_all_change_row_one() -> None:
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


def test_dflash_g3_g10_blocks_of_one_forward_see_their_own_context_and_rows_alone() -> None:
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


@pytest.mark.parametrize(("anchor", "root"), [(1, 11), (3, 13)])
def test_dflash_g10_a_block_reads_its_anchor_and_masks_and_drafts_the_tokens_after_it(
    anchor: int, root: int
) -> None:
    """Inputs [11, M, M] at 1 and [13, M, M] at 3; rows 1 and 2 are drafts (weights [0, 1, 1])."""
    config = zlab_config(block_size=3, dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 99})
    proposer = DflashProposer(DflashConfig(draft=str(save_draft(config, dflash_tensors()))))
    request = make_request("r", list(range(10, 10 + anchor)))
    request.tokens.append(root)
    request.num_committed = anchor
    block = proposer._block(request, 2)
    assert (list(block.token_ids), list(block.logit_rows)) == ([root, 99, 99], [1, 2])


@pytest.mark.parametrize(("anchor", "context"), [(1, 1), (3, 3)])
def test_dflash_g10_a_block_sees_context_before_its_anchor_and_all_its_rows(
    anchor: int, context: int
) -> None:
    span = Golden().block(anchor, 5, width=3)
    seen = visible(SpanMask.of(span, window=None), 0, anchor + 3 + 2)
    assert seen.tolist() == [[True] * (context + 3) + [False] * 2] * 3


def test_dflash_g2_blocks_are_the_root_and_masks_at_the_next_positions() -> None:
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


def test_dflash_g4_the_longest_matching_run_stands() -> None:
    candidates = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
    drawn = [[11, 12, 99, 14], [77, 22, 23, 24], [31, 32, 33, 34], [41, 88, 43, 44]]
    outcomes = [
        walk(build(root, Proposal(token_ids=tuple(drafts), parents=(0, 1, 2))), tokens)
        for (root, *drafts), tokens in zip(candidates, drawn, strict=True)
    ]
    assert [outcome.num_correct_drafts for outcome in outcomes] == [2, 0, 3, 1]
    assert [outcome.token_ids for outcome in outcomes] == [(11, 12, 99), (77,), (31, 32, 33, 34), (41, 88)]
    assert [outcome.nodes for outcome in outcomes] == [(0, 1, 2), (0,), (0, 1, 2, 3), (0, 1)]
    assert [outcome.num_advanced for outcome in outcomes] == [3, 1, 4, 2]
    committed = zip((5, 8, 100, 3), outcomes, strict=True)
    assert [before + outcome.num_advanced for before, outcome in committed] == [8, 9, 104, 5]
    kept = [[int(row in outcome.nodes) for row in range(4)] for outcome in outcomes]
    assert kept == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]


# ---- G5, G6: rejection and block verification

G5_P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.float64)
G5_Q = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)


def verified(
    rule: ChainRule,
    drafts: Sequence[int],
    *,
    coins: Sequence[float],
    final: float,
    q_KV: torch.Tensor = G5_Q,
    p_NV: torch.Tensor = G5_P,
) -> Acceptance:
    return verify_chain(rule, drafts, p_NV=p_NV, q_KV=q_KV, coins=coins, final_coin=final)


@pytest.mark.parametrize(
    ("is_one_hot", "drafts", "coins", "final", "accepted", "bonus"),
    [
        (True, [0, 1], [0.4, 0.7], 0.3, 1, 2),
        (True, [0, 1], [0.49, 0.59], 0.85, 2, 2),
        (False, [0, 2], [0.6, 0.5], 0.5, 2, 2),
        (False, [0, 2], [0.8, 0.5], 0.5, 0, 2),
        (False, [0, 2], [0.715, 0.5], 0.5, 0, 2),  # the first coin's threshold is .5 / .7 = .714
        (False, [0, 2], [0.713, 0.5], 0.5, 2, 2),
    ],
)
def test_dflash_g5_rejection_with_one_hot_and_dense_drafts(
    is_one_hot: bool, drafts: list[int], coins: list[float], final: float, accepted: int, bonus: int
) -> None:
    q_KV = torch.nn.functional.one_hot(torch.tensor(drafts), 3).double() if is_one_hot else G5_Q
    outcome = verified(TOKEN_WISE, drafts, q_KV=q_KV, coins=coins, final=final)
    assert outcome.num_correct_drafts == accepted
    assert outcome.token_ids == (*drafts[:accepted], bonus)


@pytest.mark.parametrize(
    ("is_one_hot", "drafts", "coins", "residual"),
    [(True, [0, 1], [0.4, 0.7], [0.25, 0.0, 0.75]), (False, [0, 2], [0.8, 0.5], [0.0, 0.5, 0.5])],
)
def test_dflash_g5_the_last_token_has_the_law_of_the_residual(
    is_one_hot: bool, drafts: list[int], coins: list[float], residual: list[float]
) -> None:
    q_KV = torch.nn.functional.one_hot(torch.tensor(drafts), 3).double() if is_one_hot else G5_Q
    drawn = [
        verified(TOKEN_WISE, drafts, q_KV=q_KV, coins=coins, final=(step + 0.5) / 100).token_ids[-1]
        for step in range(100)
    ]
    assert [drawn.count(token_id) / 100 for token_id in range(3)] == residual


def test_dflash_g5_the_first_token_has_the_targets_law_and_stands_with_one_minus_the_distance() -> None:
    law, stands, steps = torch.zeros(3, dtype=torch.float64), 0.0, 200
    for draft, q in enumerate(G5_Q[0].tolist()):
        for step in range(steps):
            for final in (0.25, 0.75):  # the only residual, [0, .5, .5], has its border between them
                outcome = verified(
                    TOKEN_WISE,
                    [draft],
                    p_NV=G5_P[[0, 2]],
                    q_KV=G5_Q[:1],
                    coins=[(step + 0.5) / steps],
                    final=final,
                )
                law[outcome.token_ids[0]] += q / steps / 2
                stands += outcome.num_correct_drafts * q / steps / 2
    assert law.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1 / steps)
    assert stands == pytest.approx(0.8, abs=1 / steps)


def test_dflash_g6_a_block_is_accepted_as_far_as_it_holds() -> None:
    """r = [.714286, .428571], h = [.310345, .428571]: coins [.3, .5] accept one draft, and then token 1."""
    chain = DrawnChain(p_K=(0.5, 0.3), q_K=(0.7, 0.5), coins_K=(0.3, 0.5))
    assert BLOCK.scales(chain) == pytest.approx([0.714286, 0.428571], abs=1e-6)
    for final in (0.0, 0.5, 0.99):
        outcome = verified(BLOCK, [0, 2], coins=[0.3, 0.5], final=final)
        assert outcome.token_ids == (0, 1)
    lengths = [
        verified(BLOCK, [0, 2], coins=coins, final=0.5).num_correct_drafts
        for coins in ([0.3103, 0.9], [0.3104, 0.9], [0.9, 0.42857], [0.9, 0.42858])
    ]
    assert lengths == [1, 0, 2, 0]


def test_dflash_g6_blocks_accept_more_and_follow_the_joint_law() -> None:
    """Expected drafts that stand: 1.36 token by token, 1.42 as a block."""
    steps, means = 25, {}
    grid = [(step + 0.5) / steps for step in range(steps)]
    for name, rule in (("token-wise", TOKEN_WISE), ("block", BLOCK)):
        mean, joint = 0.0, torch.zeros(3, 3, dtype=torch.float64)
        for drafts in itertools.product(range(3), repeat=2):
            weight = float(G5_Q[0, drafts[0]] * G5_Q[1, drafts[1]]) / steps**2
            for number, coins in enumerate(itertools.product(grid, repeat=2)):
                final = (number * 0.618034) % 1.0  # spread evenly over the coins
                outcome = verified(rule, drafts, coins=coins, final=final)
                mean += weight * outcome.num_correct_drafts
                if len(outcome.token_ids) > 1:
                    joint[outcome.token_ids[:2]] += weight
                else:  # the next round draws the second token from p
                    joint[outcome.token_ids[0]] += weight * G5_P[1]
        means[name] = mean
        assert joint.flatten().tolist() == pytest.approx(torch.outer(G5_P[0], G5_P[1]).flatten(), abs=0.015)
    assert means == pytest.approx({"token-wise": 1.36, "block": 1.42}, abs=0.02)


def kv_bytes(*shapes: tuple[int, int, int]) -> int:
    """Per token of 16-token pages, in bfloat16. A shape is layers, KV heads, head dim."""
    specs = [
        PoolSpec(pool=str(index), num_layers=layers, num_kv_heads=heads, head_dim=dim)
        for index, (layers, heads, dim) in enumerate(shapes)
    ]
    return build_layout(page_size=16, dtype="bfloat16", pools=specs).page_bytes // 16


def test_dflash_g13_bytes_per_token_of_target_and_draft() -> None:
    assert [kv_bytes((36, 8, 128)), kv_bytes((5, 8, 128))] == [147456, 20480]
    assert [kv_bytes((30, 3, 64)), kv_bytes((2, 3, 64)), kv_bytes((5, 3, 64))] == [23040, 1536, 3840]
    assert [kv_bytes((36, 8, 128), (5, 8, 128)), kv_bytes((30, 3, 64), (2, 3, 64))] == [167936, 24576]
    # Qwen3-4B has Qwen3-8B's numbers. Shipping features or what they project to (B, C) is not our way: KV is.
    assert dflash("zlab").needs.handoff == ()
