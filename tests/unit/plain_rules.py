"""Plain-Python references for sampling, draft trees and acceptance: lists, loops, no tensors, slow.

Written from the rules (ARCHITECTURE.md section 4; Leviathan et al. 2023; Sun et al. 2024), not from the code
that they test. p is the target's distribution, q the draft's.
"""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

from engine.params import SamplingParams

_GOLDEN_PATH = Path(__file__).parents[3] / "shared" / "data" / "golden_trees.json"


def murmur3(words: list[int]) -> int:
    mask, value = 0xFFFFFFFF, 0
    for word in words:
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        value ^= word * 0x1B873593 & mask
        value = (value << 13 | value >> 19) & mask
        value = (value * 5 + 0xE6546B64) & mask
    value ^= 4 * len(words)
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16


def adjusted(
    logits: list[float], params: SamplingParams, prompt: list[int], outputs: list[int]
) -> list[float]:
    scores = list(logits)
    for token_id in {*prompt, *outputs}:
        factor = params.repetition_penalty
        scores[token_id] = scores[token_id] / factor if scores[token_id] > 0 else scores[token_id] * factor
    for token_id in set(outputs):
        scores[token_id] -= params.frequency_penalty * outputs.count(token_id) + params.presence_penalty
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for sequence in params.banned_sequences:
        begin = list(sequence[:-1])
        if outputs[max(0, len(outputs) - len(begin)) :] == begin or not begin:
            scores[sequence[-1]] = -math.inf
    if len(outputs) < params.min_tokens:
        for token_id in params.stop_token_ids:
            scores[token_id] = -math.inf
    return scores


def distribution(scores: list[float], params: SamplingParams) -> list[float]:
    """Normalised probabilities after temperature (0: the best alone), min-p, top-k and top-p."""
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if params.temperature == 0:
        return [float(i == ranked[0]) for i in range(len(scores))]
    best = scores[ranked[0]]
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    kept = [i for i in ranked if weights[i] >= params.min_p]
    kept = kept[: params.top_k or None]
    if params.top_p < 1:
        goal = params.top_p * sum(weights[i] for i in kept)
        mass, num_kept = 0.0, 0
        while mass < goal and num_kept < len(kept):
            mass += weights[kept[num_kept]]
            num_kept += 1
        kept = kept[:num_kept]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in set(kept) else 0.0 for i in range(len(scores))]


def inverse_cdf(weights: list[float], uniform: float) -> int:
    goal, mass, last = uniform * sum(weights), 0.0, len(weights) - 1
    for i, weight in enumerate(weights):
        mass += weight
        if weight > 0:
            last = i
            if mass > goal:
                return i
    return last


# ---- trees: `parent` has None for the root in front, like the golden file's -1


def describe(parents: list[int], committed: int) -> dict[str, Any]:
    num_nodes = len(parents)
    lines = [_line(parents, node) for node in range(num_nodes)]
    children = [[c for c in range(num_nodes) if parents[c] == node] for node in range(num_nodes)]
    next_sibling = [-1] * num_nodes
    for siblings in children:
        for left, right in itertools.pairwise(siblings):
            next_sibling[left] = right
    return {
        "parent": parents,
        "depth": [len(line) - 1 for line in lines],
        "mask": [[int(j in line) for j in range(num_nodes)] for line in lines],
        "positions": [committed + len(line) - 1 for line in lines],
        "next_token": [kids[0] if kids else -1 for kids in children],
        "next_sibling": next_sibling,
    }


def _line(parents: list[int], node: int) -> list[int]:
    return [node] if node == 0 else [*_line(parents, parents[node]), node]


def greedy(parents: list[int], tokens: list[int], argmax: list[int]) -> tuple[list[int], list[int]]:
    """Accepted nodes, emitted tokens. `tokens` of all nodes, the root's first."""
    node, nodes, emitted = 0, [0], [argmax[0]]
    while True:
        hits = [c for c, parent in enumerate(parents) if c and parent == node and tokens[c] == argmax[node]]
        if not hits:
            return nodes, emitted
        node = hits[0]
        nodes.append(node)
        emitted.append(argmax[node])


def target_only(
    parents: list[int], tokens: list[int], p: list[list[float]], coins: list[float], final: float
) -> tuple[list[int], list[int]]:
    node, nodes, emitted = 0, [0], list[int]()
    while True:
        mass, accepted, left = 0.0, None, list(p[node])
        for child in [c for c, parent in enumerate(parents) if c and parent == node]:
            mass += p[node][tokens[child]]
            if coins[node] < mass and p[node][tokens[child]] > 0:
                accepted = child
                break
            left[tokens[child]] = 0.0
        if accepted is None:
            return nodes, [*emitted, inverse_cdf(left, final)]
        node = accepted
        nodes.append(node)
        emitted.append(tokens[node])


def chain(
    drafts: list[int], p: list[list[float]], q: list[list[float]], coins: list[float], final: float
) -> list[int]:
    for step, draft in enumerate(drafts):
        if not coins[step] * q[step][draft] < p[step][draft]:
            left = [max(a - b, 0.0) for a, b in zip(p[step], q[step], strict=True)]
            return [*drafts[:step], inverse_cdf(left, final)]
    return [*drafts, inverse_cdf(p[len(drafts)], final)]


def block(
    drafts: list[int], p: list[list[float]], q: list[list[float]], coins: list[float], final: float
) -> list[int]:
    ratios = [1.0]
    for step, draft in enumerate(drafts):
        ratios.append(min(1.0, ratios[-1] * p[step][draft] / q[step][draft]))
    kept = 0
    for length in range(1, len(drafts) + 1):
        ratio = ratios[length]
        bound = ratio
        if length < len(drafts) and 0 < ratio < 1:
            mass = sum(max(ratio * a - b, 0.0) for a, b in zip(p[length], q[length], strict=True))
            bound = mass / (mass + 1 - ratio)
        if coins[length - 1] < bound and coins[length - 1] < ratio:
            kept = length
    if kept == len(drafts):
        return [*drafts, inverse_cdf(p[kept], final)]
    left = [max(ratios[kept] * a - b, 0.0) for a, b in zip(p[kept], q[kept], strict=True)]
    return [*drafts[:kept], inverse_cdf(left, final)]


# ---- cases in the golden file's form


def golden_cases(seed: int) -> list[dict[str, Any]]:
    """40 random cases from the references above, then the 60 published ones where the file is at hand."""
    rng = random.Random(seed)
    cases = [_random_case(rng) for _ in range(40)]
    if _GOLDEN_PATH.exists():
        cases += json.loads(_GOLDEN_PATH.read_text())["cases"]
    return cases


def golden_coins(seed: int) -> list[dict[str, Any]]:
    """Seeded coins, from the reference and where at hand from the published file."""
    rng = random.Random(seed)
    coins = []
    for _ in range(100):
        key, position, column = rng.getrandbits(64), rng.randrange(2**17), rng.randrange(64)
        value = murmur3([key & 0xFFFFFFFF, key >> 32, position, column]) / 0xFFFFFFFF
        coins.append({"seed": key, "position": position, "column": column, "coin": value})
    if _GOLDEN_PATH.exists():
        coins += json.loads(_GOLDEN_PATH.read_text())["coins"]
    return coins


def random_distribution(rng: random.Random, vocab_size: int) -> list[float]:
    weights = [math.exp(rng.gauss(0, 1.5)) for _ in range(vocab_size)]
    return [weight / sum(weights) for weight in weights]


def random_parents(rng: random.Random, num_nodes: int) -> list[int]:
    return [-1, *(rng.randrange(max(0, node - 4), node) for node in range(1, num_nodes))]


def random_tokens(rng: random.Random, parents: list[int], vocab_size: int) -> list[int]:
    """Token of every node, siblings distinct."""
    tokens = [rng.randrange(vocab_size)]
    for node, parent in enumerate(parents[1:], start=1):
        taken = {tokens[c] for c in range(1, node) if parents[c] == parent}
        tokens.append(rng.choice([t for t in range(vocab_size) if t not in taken]))
    return tokens


def _random_case(rng: random.Random) -> dict[str, Any]:
    vocab_size, num_nodes, committed = 12, rng.randrange(2, 14), rng.randrange(1, 90)
    parents = random_parents(rng, num_nodes)
    tokens = random_tokens(rng, parents, vocab_size)
    argmax = [_guided(rng, parents, tokens, node, vocab_size) for node in range(num_nodes)]
    p = [random_distribution(rng, vocab_size) for _ in range(num_nodes)]
    coins = [rng.random() * 0.7 for _ in range(num_nodes)]
    final = rng.random()
    greedy_nodes, greedy_emitted = greedy(parents, tokens, argmax)
    sampled_nodes, sampled_emitted = target_only(parents, tokens, p, coins, final)
    return {
        "committed": committed,
        "root": tokens[0],
        "tokens": tokens[1:],
        "tree": describe(parents, committed),
        "greedy": {"argmax": argmax, **_outcome(greedy_nodes, greedy_emitted, num_nodes)},
        "target_only": {
            "p": p,
            "coins": coins,
            "final": final,
            **_outcome(sampled_nodes, sampled_emitted, num_nodes),
        },
        "chain": _random_chain(rng),
    }


def _guided(rng: random.Random, parents: list[int], tokens: list[int], node: int, vocab_size: int) -> int:
    children = [tokens[c] for c, parent in enumerate(parents) if c and parent == node]
    return rng.choice(children) if children and rng.random() < 0.8 else rng.randrange(vocab_size)


def _outcome(nodes: list[int], emitted: list[int], num_nodes: int) -> dict[str, Any]:
    predict = [0] * num_nodes
    for node, token_id in zip(nodes, emitted, strict=True):
        predict[node] = token_id
    return {"predict": predict, "accept_index": [*nodes, -1], "num_correct_drafts": len(nodes) - 1}


def _random_chain(rng: random.Random) -> dict[str, Any]:
    vocab_size, num_drafts = 5, rng.randrange(1, 6)
    drafts = [rng.randrange(vocab_size) for _ in range(num_drafts)]
    p = [random_distribution(rng, vocab_size) for _ in range(num_drafts + 1)]
    q = [random_distribution(rng, vocab_size) for _ in range(num_drafts)]
    coins, final = [rng.random() for _ in drafts], rng.random()
    token_wise, whole = chain(drafts, p, q, coins, final), block(drafts, p, q, coins, final)
    return {
        "candidates": [rng.randrange(vocab_size), *drafts],
        "p": p,
        "q": q,
        "coins": coins,
        "final": final,
        "token_wise": {"num_correct_drafts": len(token_wise) - 1, "emitted": token_wise},
        "block": {"num_correct_drafts": len(whole) - 1, "emitted": whole},
    }
