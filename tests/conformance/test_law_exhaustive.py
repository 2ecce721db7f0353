"""Every acceptance rule emits the target's law: computed, not sampled, by trying every case of every coin.

What runs is what the round loop calls: `Verify` rules over logits and rounds, and the draws of a chain.
Logits are float64 here, so that the law holds to 1e-9 in every rule, filter and penalty; what the engine
loses by float32 is the rounding of its weights (about 1e-7). The law to hold to comes from plain Python.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from engine.params import SamplingParams
from engine.randomness import ACCEPT_STREAM, DRAFT_STREAM, TARGET_STREAM
from engine.request import Request
from engine.sampling import Row, law_of
from engine.sampling_state import SamplingState
from speculative.accept_rules import BLOCK, TOKEN_WISE, ChainRule, target_only
from speculative.drafts.chain_draws import ChainDraws
from speculative.proposer import Proposal
from speculative.tree import Tree, build
from speculative.verify import Drafted, DrawAtEveryNode
from speculative.verify_drawn import VerifyDrawn
from tests.exact_coins import Key, KnownCoins, cdf, points, sides
from tests.unit import plain_rules

Path = tuple[int, ...]
Law = dict[Path, float]

PROMPT = (0, 1, 1)
ROOT = 2
POSITION = len(PROMPT) + 1  # of the first token after the root
TOLERANCE = 1e-9

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"temperature": 1.5},
    "top-k": {"temperature": 1.5, "top_k": 2},
    "top-p": {"temperature": 1.5, "top_p": 0.75},
    "min-p": {"temperature": 1.0, "min_p": 0.25},
    "all-filters": {"temperature": 0.5, "min_p": 0.0625, "top_k": 3, "top_p": 0.9375},
    "penalties": {"frequency_penalty": 0.75, "presence_penalty": 0.5, "repetition_penalty": 1.5},
    "logit-bias": {"logit_bias": ((0, 1.5), (2, -0.75))},
    "min-tokens": {"min_tokens": 2, "stop_token_ids": (1,)},  # of the two tokens only the first is forbidden
    "bans": {"banned_sequences": ((1, 1), (0, 2), (2, 1, 0))},
    "all": {
        "temperature": 1.5,
        "top_p": 0.875,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": ((1, 0.5),),
        "min_tokens": 2,
        "stop_token_ids": (2,),
    },
}
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)
every_size = pytest.mark.parametrize("vocab_size", [3, 4, 5, 6])
both_rules = pytest.mark.parametrize("rule", [TOKEN_WISE, BLOCK], ids=["rejection", "block"])


def params_of(sampling: str, seed: int = 0) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=9, **SAMPLINGS[sampling])


@cache
def logits(model: str, vocab_size: int, path: Path) -> tuple[float, ...]:
    """What a model says after ROOT and `path`: fixed, and otherwise arbitrary."""
    rng = random.Random(f"{model} {vocab_size} {path}")
    return tuple(rng.uniform(-2.0, 2.0) for _ in range(vocab_size))


@cache
def p_of(sampling: str, vocab_size: int, path: Path) -> tuple[float, ...]:
    params = params_of(sampling)
    raw = list(logits("target", vocab_size, path))
    scores = plain_rules.adjusted(raw, params, list(PROMPT), [ROOT, *path])
    return tuple(plain_rules.distribution(scores, params))


@cache
def q_of(sampling: str, vocab_size: int, path: Path) -> tuple[float, ...]:
    """What a draft is drawn from: its own logits under the request's temperature and filters."""
    return tuple(plain_rules.distribution(list(logits("draft", vocab_size, path)), params_of(sampling)))


def target_law(sampling: str, vocab_size: int, depth: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(depth):
        law = {
            (*path, token): mass * p
            for path, mass in law.items()
            for token, p in enumerate(p_of(sampling, vocab_size, path))
        }
    return law


def assert_equal(found: Law, sampling: str, vocab_size: int, *, depth: int = 2) -> None:
    expected = target_law(sampling, vocab_size, depth)
    assert set(found) <= set(expected)
    for path, mass in expected.items():
        assert found.get(path, 0.0) == pytest.approx(mass, abs=TOLERANCE), path


def state_of(sampling: str, vocab_size: int, path: Path, seed: int) -> SamplingState:
    """After ROOT and `path` were emitted."""
    return SamplingState(
        params_of(sampling, seed),
        tokens=(*PROMPT, ROOT, *path),
        num_prompt_tokens=len(PROMPT),
        vocab_size=vocab_size,
    )


def logits_RV(vocab_size: int, paths: Sequence[Path]) -> torch.Tensor:
    return torch.tensor([logits("target", vocab_size, path) for path in paths], dtype=torch.float64)


# ---- the target's own tokens, walked


CHAIN = Proposal(token_ids=(1, 0), parents=(0, 1))
SIBLINGS = Proposal(token_ids=(0, 2, 1), parents=(0, 0, 1))
BRANCHES = Proposal(token_ids=(0, 2, 1, 2, 0), parents=(0, 0, 1, 1, 2))


def walked_law(sampling: str, vocab_size: int, proposal: Proposal) -> Law:
    """Two tokens: a round with drafts, and where it gives one token a round with the next ones."""
    p, tokens = p_of, range(vocab_size)
    first = points(cdf(p(sampling, vocab_size, ())))
    second = points(end for token in tokens for end in cdf(p(sampling, vocab_size, (token,))))
    coins, masses = KnownCoins(), list[float]()
    for (coin_1, length_1), (coin_2, length_2) in product(first, second):
        # A deeper node's coin changes none of the two tokens.
        coins.add(
            {(POSITION + i, TARGET_STREAM, 0): coin for i, coin in enumerate((coin_1, coin_2, 0.5, 0.5))}
        )
        masses.append(length_1 * length_2)
    verify = DrawAtEveryNode(coins=coins)
    texts: list[Path] = [()] * len(masses)
    while open_seeds := [seed for seed, text in enumerate(texts) if len(text) < 2]:
        rounds = [
            Drafted(
                state=state_of(sampling, vocab_size, texts[seed], seed),
                tree=build((ROOT, *texts[seed])[-1], proposal),
            )
            for seed in open_seeds
        ]
        paths = [
            (*texts[seed], *path)
            for seed, drafted in zip(open_seeds, rounds, strict=True)
            for path in drafted.tree.paths
        ]
        verdicts = verify(logits_RV(vocab_size, paths), rounds)
        for seed, verdict in zip(open_seeds, verdicts, strict=True):
            texts[seed] += verdict.accepted.token_ids
    law: Law = {}
    for text, mass in zip(texts, masses, strict=True):
        law[text[:2]] = law.get(text[:2], 0.0) + mass
    return law


@every_size
@every_sampling
@pytest.mark.parametrize("proposal", [Proposal(), CHAIN, BRANCHES], ids=["nothing", "chain", "tree"])
def test_walking_the_targets_tokens_has_the_targets_law(
    proposal: Proposal, sampling: str, vocab_size: int
) -> None:
    assert_equal(walked_law(sampling, vocab_size, proposal), sampling, vocab_size)


# ---- target-only sampling of a tree, by coins of its nodes


def target_only_law(sampling: str, vocab_size: int, tree: Tree) -> Law:
    state = state_of(sampling, vocab_size, (), 0)
    weights_NV = law_of(
        logits_RV(vocab_size, tree.paths), [Row(state, path) for path in tree.paths]
    ).weights_RV
    p_NV = weights_NV / weights_NV.sum(dim=1, keepdim=True)
    node_points, final_ends = [], list[float]()
    for node in range(tree.num_nodes):
        p = p_of(sampling, vocab_size, tree.paths[node])
        children = [tree.token_ids[child] for child, parent in enumerate(tree.parents) if parent == node]
        mass, ends = 0.0, list[float]()
        for token in children:
            mass += p[token]
            ends.append(mass)
        node_points.append(points(ends) if children else [(0.5, 1.0)])  # a leaf reads no coin
        if len(tree.paths[node]) > 1:
            continue  # what is drawn from here is the third token
        left = [0.0 if token in children else weight for token, weight in enumerate(p)]
        final_ends += cdf(left) if sum(left) > 0 else []
    law: Law = {}
    for *coins, (final, length) in product(*node_points, points(final_ends)):
        outcome = target_only(tree, p_NV, coins=[coin for coin, _ in coins], final_coin=final)
        for _, part in coins:
            length *= part
        text = outcome.token_ids[:2]
        law[text] = law.get(text, 0.0) + length
    return completed(law, 2, lambda path: {(t,): p for t, p in enumerate(p_of(sampling, vocab_size, path))})


def completed(law: Law, depth: int, after: Callable[[Path], Law]) -> Law:
    """Texts shorter than `depth` go on by the law `after` them, as the next round does."""
    found: Law = {}
    for text, mass in law.items():
        endings = after(text) if len(text) < depth else {(): 1.0}
        for ending, share in endings.items():
            found[text + ending] = found.get(text + ending, 0.0) + mass * share
    return found


@every_size
@every_sampling
@pytest.mark.parametrize("proposal", [CHAIN, SIBLINGS], ids=["chain", "tree"])
def test_target_only_sampling_has_the_targets_law(proposal: Proposal, sampling: str, vocab_size: int) -> None:
    found = target_only_law(sampling, vocab_size, build(ROOT, proposal))
    assert_equal(found, sampling, vocab_size)


# ---- chains drawn from q


def request_after(sampling: str, path: Path, seed: int) -> Request:
    """As a drafter sees it: the last token is the root."""
    prompt = (*PROMPT, ROOT, *path)
    request = Request(
        key=seed, prompt_ids=prompt, num_prompt_tokens=len(PROMPT), sampling=params_of(sampling, seed)
    )
    request.num_committed = len(prompt) - 1
    return request


@every_size
@every_sampling
def test_drafts_are_drawn_from_the_q_that_is_handed_over(sampling: str, vocab_size: int) -> None:
    for step, path in enumerate([(), (0,), (2, 1)]):
        expected = q_of(sampling, vocab_size, path)
        coins, lengths = KnownCoins(), list[float]()
        for coin, length in points(cdf(expected)):
            coins.add({(POSITION - 1, DRAFT_STREAM, step): coin})
            lengths.append(length)
        requests = [request_after(sampling, (), seed) for seed in range(len(lengths))]
        draws = ChainDraws(coins, target_ids_V=None, target_vocab_size=vocab_size)
        row = torch.tensor(logits("draft", vocab_size, path), dtype=torch.float64)
        drawn = draws.draw(requests, row.expand(len(requests), -1), step=step)
        masses = [0.0] * vocab_size
        for token, length in zip(drawn, lengths, strict=True):
            masses[token] += length
        q_KV = draws.q_KV(requests[0], 1)
        assert q_KV is not None
        assert q_KV[0].tolist() == pytest.approx(expected, abs=TOLERANCE)
        assert masses == pytest.approx(expected, abs=TOLERANCE)


def draft_law(sampling: str, vocab_size: int, path: Path, length: int) -> Law:
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*drafts, token): mass * q
            for drafts, mass in law.items()
            for token, q in enumerate(q_of(sampling, vocab_size, path + drafts))
            if q > 0
        }
    return law


def thresholds(
    rule: ChainRule, p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], drafts: Path
) -> tuple[list[float], list[list[float]]]:
    """Below which coin each draft stands, and what may be drawn from after each number of drafts."""
    scale, scales, bounds = 1.0, [1.0], list[float]()
    for step, token in enumerate(drafts):
        ratio = p[step][token] / q[step][token]
        scale = min(1.0, scale * ratio) if rule is BLOCK else 1.0
        scales.append(scale)
        bounds.append(min(1.0, ratio))
        if rule is BLOCK:
            bounds[-1] = scale
            if step + 1 < len(drafts) and scale < 1.0:
                mass = sum(max(scale * a - b, 0.0) for a, b in zip(p[step + 1], q[step + 1], strict=True))
                bounds[-1] = mass / (mass + 1.0 - scale)
    left = [
        [max(scales[n] * a - b, 0.0) for a, b in zip(p[n], q[n], strict=True)] for n in range(len(drafts))
    ]
    return bounds, [*left, list(p[len(drafts)])]


def coin_tables(
    rule: ChainRule, sampling: str, vocab_size: int, path: Path, drafts: Path
) -> list[tuple[dict[Key, float], float]]:
    """Every case of the coins of a round that drafted `drafts` after `path`, with how much it weighs."""
    after = [path + drafts[:n] for n in range(len(drafts) + 1)]
    p = [p_of(sampling, vocab_size, one) for one in after]
    q = [q_of(sampling, vocab_size, one) for one in after[:-1]]
    bounds, left = thresholds(rule, p, q, drafts)
    final = points(end for weights in left if sum(weights) > 0 for end in cdf(weights))
    root = POSITION - 1 + len(path)
    tables: list[tuple[dict[Key, float], float]] = []
    for *accept, (final_coin, length) in product(*map(sides, bounds), final):
        table = {(root, ACCEPT_STREAM, step): coin for step, (coin, _) in enumerate(accept)}
        table |= {(root + 1 + n, TARGET_STREAM, 0): final_coin for n in range(len(drafts) + 1)}
        for _, part in accept:
            length *= part
        tables.append((table, length))
    return tables


def round_law(rule: ChainRule, sampling: str, vocab_size: int, path: Path, num_drafts: int) -> Law:
    """What one round after `path` emits, over all drafts and coins."""
    coins, masses = KnownCoins(), list[float]()
    rounds: list[Drafted] = []
    paths: list[Path] = []
    for drafts, q_mass in draft_law(sampling, vocab_size, path, num_drafts).items():
        proposal = Proposal(token_ids=drafts, parents=tuple(range(num_drafts)))
        tree = build((ROOT, *path)[-1], proposal)
        q_KV = torch.tensor(
            [q_of(sampling, vocab_size, path + drafts[:n]) for n in range(num_drafts)], dtype=torch.float64
        )
        for table, length in coin_tables(rule, sampling, vocab_size, path, drafts):
            state = state_of(sampling, vocab_size, path, coins.add(table))
            rounds.append(Drafted(state=state, tree=tree, q_KV=q_KV))
            paths += [path + one for one in tree.paths]
            masses.append(q_mass * length)
    law: Law = {}
    verdicts = VerifyDrawn(rule, coins=coins)(logits_RV(vocab_size, paths), rounds)
    for verdict, mass in zip(verdicts, masses, strict=True):
        assert verdict.error == ""
        text = verdict.accepted.token_ids
        law[text] = law.get(text, 0.0) + mass
    return law


def drawn_law(rule: ChainRule, sampling: str, vocab_size: int, path: Path, depth: int) -> Law:
    """The next `depth` tokens, over as many rounds as they take; each drafts what is still wanted."""
    law: Law = {}
    for text, mass in round_law(rule, sampling, vocab_size, path, depth).items():
        law[text[:depth]] = law.get(text[:depth], 0.0) + mass
    return completed(
        law, depth, lambda text: drawn_law(rule, sampling, vocab_size, path + text, depth - len(text))
    )


@every_size
@every_sampling
@both_rules
def test_drawn_chains_have_the_targets_law(rule: ChainRule, sampling: str, vocab_size: int) -> None:
    assert_equal(drawn_law(rule, sampling, vocab_size, (), 2), sampling, vocab_size)


@both_rules
def test_chains_of_three_have_the_joint_law_of_three_tokens(rule: ChainRule) -> None:
    assert_equal(drawn_law(rule, "plain", 3, (), 3), "plain", 3, depth=3)


@every_sampling
def test_a_block_never_accepts_fewer_than_token_by_token(sampling: str) -> None:
    def mean_accepted(rule: ChainRule) -> float:
        law = round_law(rule, sampling, 4, (), 2)
        return sum((len(text) - 1) * mass for text, mass in law.items())

    assert mean_accepted(BLOCK) >= mean_accepted(TOKEN_WISE) - TOLERANCE
    if sampling == "plain":
        assert mean_accepted(BLOCK) > mean_accepted(TOKEN_WISE) + 1e-3


@both_rules
def test_what_is_certain_greedy_or_undrafted_goes_by_the_targets_tokens_in_the_same_batch(
    rule: ChainRule,
) -> None:
    coins = KnownCoins([{(POSITION + i, TARGET_STREAM, 0): 0.625 for i in range(3)}] * 4)
    chain, lone = build(ROOT, CHAIN), build(ROOT, Proposal())
    q_KV = torch.full((2, 4), 0.25, dtype=torch.float64)
    states = [state_of("plain", 4, (), seed) for seed in range(4)]
    greedy = state_of("plain", 4, (), 2)
    greedy.params = replace(greedy.params, temperature=0.0)
    rounds = [
        Drafted(state=states[0], tree=chain),  # certain
        Drafted(state=states[1], tree=lone),
        Drafted(state=greedy, tree=chain, q_KV=q_KV),
    ]
    tables = coin_tables(rule, "plain", 4, (), CHAIN.token_ids)
    drawn_q = torch.tensor([q_of("plain", 4, ()), q_of("plain", 4, (1,))], dtype=torch.float64)
    expected = DrawAtEveryNode(coins=coins)(logits_RV(4, [*chain.paths, (), *chain.paths]), rounds)
    for table, _ in tables:
        coins.tables[3] = table
        drawn = Drafted(state=states[3], tree=chain, q_KV=drawn_q)
        (alone,) = VerifyDrawn(rule, coins=coins)(logits_RV(4, chain.paths), [drawn])
        mixed = [rounds[0], drawn, *rounds[1:]]
        found = VerifyDrawn(rule, coins=coins)(
            logits_RV(4, [*chain.paths, *chain.paths, (), *chain.paths]), mixed
        )
        assert found == [expected[0], alone, *expected[1:]]
