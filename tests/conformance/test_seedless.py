"""A prefill node with another draft, or none: refused unless allowed, then exact, counted and visible."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode_node.handoff import SEEDLESS_TOKENS
from kv_transfer.geometry import negotiate
from kv_transfer.ids import TransferId
from kv_transfer.messages import Final
from kv_transfer.transports import registry
from kv_transfer.transports.memory import Fault
from speculative.dflash import DflashConfig, DflashProposer
from speculative.eagle import EagleConfig, EagleProposer
from speculative.eagle3 import Eagle3Config, Eagle3Proposer
from speculative.mtp import MtpConfig, create_mtp
from speculative.ngram import NgramConfig, NgramProposer
from speculative.null import NullConfig, NullProposer
from speculative.proposer import Proposer
from tests.conformance.test_loop import prompt_of, reference
from tests.draft_claims import Rounds, rounds_of
from tests.engines import make_engine, make_request, run, tokens_of
from tests.fakes_transport import Bench, make_bench
from tests.node_pair import LINK, NodePair
from tests.scratch import new_folder
from tests.tiny_block_drafts import dflash_folder, standalone
from tests.tiny_drafts import CONFIG, eagle_tensors, save_draft, tiny_draft
from wire.host_events import LinkMessage
from wire.work import Finished, PromptInfo, SamplingParams, Submit, Tokens


def other_eagle() -> Proposer:
    folder = save_draft(new_folder("eagle"), CONFIG, eagle_tensors(seed=9))
    return EagleProposer(EagleConfig(draft=str(folder)))


DRAFTS: Mapping[str, Callable[[], Proposer]] = {
    "eagle": lambda: EagleProposer(EagleConfig(draft=str(tiny_draft("eagle")), topk=2)),
    "eagle3": lambda: Eagle3Proposer(Eagle3Config(draft=str(tiny_draft("eagle3")))),
    "dflash": lambda: DflashProposer(DflashConfig(draft=str(dflash_folder("speculators")))),
    "mtp": lambda: create_mtp(MtpConfig(draft=str(tiny_draft("mtp")))),
    "mtp_chain": lambda: create_mtp(MtpConfig(draft=str(tiny_draft("mtp_chain")))),
    "standalone": lambda: standalone("noisy"),
    "ngram": lambda: NgramProposer(NgramConfig()),
}
PREFILLS: Mapping[str, Callable[[], Proposer]] = {
    "none": lambda: NullProposer(NullConfig()),
    "eagle": DRAFTS["eagle"],
    "other_eagle": other_eagle,
}
PAIRS = [(p, d) for p in PREFILLS for d in DRAFTS if (p, d) not in {("none", "ngram"), ("eagle", "eagle")}]
LONG = 79
LENGTHS = (5, LONG)  # up to 64 tokens, all of a prompt is computed again on D
CHUNKS: Mapping[str, Any] = {"num_pages": 600, "chunk_tokens": 32}


def pair_of(prefill: str, decode: str, *, allowed: bool = True, **options: Any) -> NodePair:
    return NodePair(
        prefill_options={**CHUNKS, "proposer": PREFILLS[prefill]()},
        decode_options={**CHUNKS, "proposer": DRAFTS[decode](), "hello": {"allow_seedless": allowed}},
        **options,
    )


def joins(pair: NodePair) -> int:
    return int(pair.decode.status().counters["seedless_joins"])


def local_rounds(decode: str, length: int, **sampling: Any) -> Rounds:
    request = make_request("r", prompt_of(length), **sampling)
    return rounds_of(run(make_engine(DRAFTS[decode](), **CHUNKS), [request])["r"])


def pair_rounds(pair: NodePair, tid: TransferId) -> Rounds:
    return [(ids, drafted, accepted) for _, ids, drafted, accepted in pair.rounds(tid)]


@pytest.mark.parametrize(("prefill", "decode"), [("none", "eagle3"), ("other_eagle", "eagle")])
def test_another_draft_is_refused_where_it_is_not_allowed(prefill: str, decode: str) -> None:
    pair = pair_of(prefill, decode, allowed=False)
    assert difference(prefill, decode) in pair.refused
    tid = pair.submit("r", prompt_of(5))
    assert pair.ends(tid) == ("pair_refused", "pair_refused")
    pair.run()
    assert pair.is_at_rest()


def difference(prefill: str, decode: str) -> str:
    """As D would name it."""
    ours, theirs = DRAFTS[decode]().needs, PREFILLS[prefill]().needs
    if ours.draft != theirs.draft:
        return f"draft: {ours.draft!r} here, {theirs.draft!r} there"
    return f"draft_weights: {ours.draft_weights!r} here, {theirs.draft_weights!r} there"


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_texts_of_a_pair_allowed_are_plain_decodings(prefill: str, decode: str) -> None:
    """And the same pair would be refused by default, by field and both values."""
    pair = pair_of(prefill, decode)
    assert pair.refused == []
    strict = replace(pair.decode.hello(), allow_seedless=False)
    assert str(negotiate(strict, pair.prefill.hello(), is_decode=True)) == difference(prefill, decode)
    for turn in range(2):  # cold, then with prefix hits on both sides
        tids = {n: pair.submit(f"{turn}-{n}", prompt_of(n), max_tokens=6) for n in LENGTHS}
        pair.run()
        for n, tid in tids.items():
            assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(n)), 12)[:6], (turn, n)
            assert pair.ends(tid) == ("handed_over", "length")
        assert pair.is_at_rest()
    needs_prompt = decode != "ngram"
    assert joins(pair) == (2 * len(LENGTHS) if needs_prompt else 0)
    kind = "seedless" if needs_prompt else "target KV only"
    assert {state.partition(", draft")[0] for core in (pair.prefill, pair.decode)
            for state in core.status().peers.values()} == {f"ready over memory, {kind}"}  # fmt: skip
    assert [note.partition(", draft")[0] for note in pair.notes] == [f"P: {kind}", f"D: {kind}"]
    ends = [event for event in pair.events["D"] if isinstance(event, Finished)]
    assert {bool(end.seedless) for end in ends} == {needs_prompt}


def test_only_the_targets_bytes_travel() -> None:
    pair = pair_of("eagle", "standalone")
    plain = make_engine().pool.layout.page_bytes
    assert all(core._peers.copy_bytes(peer.hello().incarnation) == plain
               for core, peer in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)))  # fmt: skip
    tid = pair.submit("r", prompt_of(33))
    pair.run()
    moved = [event.kv_bytes for name in "PD" for event in pair.events[name] if isinstance(event, Finished)]
    assert moved == [9 * plain] * 2
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(33)), 12)


@pytest.mark.parametrize("decode", ["eagle3", "dflash"])
def test_a_seeded_text_is_unchanged(decode: str) -> None:
    wanted: dict[str, Any] = {"seed": 11, "max_tokens": 16, "temperature": 0.8, "top_k": 20, "min_p": 0.02}
    plain = tokens_of(run(make_engine(), [make_request("r", prompt_of(LONG), **wanted)])["r"])
    pair = pair_of("none", decode)
    tid = pair.submit("r", prompt_of(LONG), **wanted)
    pair.run()
    assert pair.tokens(tid) == plain


@pytest.mark.parametrize("decode", ["mtp_chain", "standalone"])
def test_a_prompt_computed_again_as_a_whole_is_drafted_for_as_if_it_had_been_from_the_start(
    decode: str,
) -> None:
    pair = pair_of("none", decode)
    wanted: dict[str, Any] = {"max_tokens": 12}
    for turn in range(2):
        tid = pair.submit(f"{turn}", prompt_of(SEEDLESS_TOKENS), **wanted)
        pair.run()
        assert pair_rounds(pair, tid) == local_rounds(decode, SEEDLESS_TOKENS, **wanted), turn


@pytest.mark.parametrize("decode", ["eagle", "dflash"])
def test_a_draft_never_reads_what_no_draft_wrote(decode: str) -> None:
    """Whatever lies in the pages' draft regions before the tail, the rounds are the same."""
    found = []
    for spoil in (1e4, -3e3):
        pair = pair_of("none", decode)
        pool = pair.decode._engine.pool
        layers = {region.layer for region in pool.layout.regions if region.pool == "draft"}
        for layer in layers:
            pool.kv_pair("draft", layer).fill_(spoil)
        tids = [pair.submit(f"{n}", prompt_of(n), max_tokens=10) for n in (LONG,)]
        while not (pair.prefill.status().is_idle and pair.decode.status().is_idle):
            pair.step()
            for request in pair.decode._engine.requests():
                pages = torch.tensor(request.pages[: request.draft_start // 4], dtype=torch.int64)
                for layer in layers:
                    pool.kv_pair("draft", layer)[pages] = spoil
        found.append([pair_rounds(pair, tid) for tid in tids])
    assert found[0] == found[1]
    assert sum(drafted for rounds in found[0] for _, drafted, _ in rounds) > 5


@pytest.mark.parametrize("decode", ["eagle3", "standalone"])
def test_prompts_with_and_without_draft_kv_share_no_page(decode: str) -> None:
    """A prompt that D computes itself finds nothing of the seedless one, and the other way round."""
    pair = pair_of("none", decode)
    wanted: dict[str, Any] = {"max_tokens": 12}
    first = pair.submit("seedless", prompt_of(LONG), **wanted)
    pair.run()
    cached = []
    for turn in range(2):
        tid = submit_to_d(pair, f"local{turn}", LONG, **wanted)
        pair.run()
        assert pair_rounds(pair, tid) == local_rounds(decode, LONG, **wanted)
        cached += [event.cached_tokens for event in pair.events["D"] if isinstance(event, PromptInfo)][-1:]
    assert cached == [0, 76]
    again = pair.submit("again", prompt_of(LONG), **wanted)
    pair.run()
    assert pair_rounds(pair, again) == pair_rounds(pair, first)
    sent = [event.kv_bytes for event in pair.events["D"] if isinstance(event, Finished)]
    assert sent[0] == 20 * make_engine().pool.layout.page_bytes
    assert sent[-1] == 17 * make_engine().pool.layout.page_bytes  # 12 tokens of 79 are not sent again


def submit_to_d(pair: NodePair, key: str, length: int, **sampling: Any) -> TransferId:
    """D alone serves it, as the router asks for short prompts."""
    tid = TransferId(key, 1)
    prompt = tuple(prompt_of(length))
    params = SamplingParams(**{"seed": 0, "temperature": 0.0, **sampling})
    submit = Submit(
        tid=tid, prompt_ids=prompt, num_prompt_tokens=length, sampling=params, peer=None, deadline_s=1e6
    )
    pair.decode.handle(LinkMessage(link=LINK, message=submit), pair.now)
    return tid


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_cancel_in_any_phase_frees_both_sides(steps: int) -> None:
    pair = NodePair(
        faults=lambda _: Fault(delay_s=0.015),
        prefill_options={"chunk_tokens": 32},
        decode_options={
            "chunk_tokens": 16,
            "proposer": DRAFTS["eagle3"](),
            "hello": {"allow_seedless": True},
        },
    )
    doomed = pair.submit("doomed", prompt_of(LONG), max_tokens=40)
    spared = pair.submit("spared", prompt_of(65))
    for _ in range(steps):
        pair.step()
    pair.cancel(doomed)
    pair.run()
    assert tuple(pair.tokens(spared)) == reference(tuple(prompt_of(65)), 12)
    text = pair.tokens(doomed)
    assert tuple(text) == reference(tuple(prompt_of(LONG)), 40)[: len(text)]
    assert pair.is_at_rest()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_first_token_is_reported_once_and_max_tokens_is_exact(max_tokens: int) -> None:
    pair = pair_of("none", "eagle3")
    tid = pair.submit("r", prompt_of(LONG), max_tokens=max_tokens)
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(LONG)), max_tokens)
    first = [event.first_index for event in pair.events["D"] if isinstance(event, Tokens)][:1]
    assert first == ([] if max_tokens == 1 else [1])


def test_short_of_pages_a_prompt_being_computed_again_is_preempted_after_its_first_token() -> None:
    pair = NodePair(
        prefill_options={"num_pages": 300},
        decode_options={
            "num_pages": 52, "chunk_tokens": 4, "reserve_tokens": 1, "max_running": 4,
            "proposer": DRAFTS["eagle3"](), "hello": {"allow_seedless": True},
        },
    )  # fmt: skip
    tids = [pair.submit(f"r{i}", prompt_of(65, seed=i), max_tokens=24) for i in range(3)]
    pair.run()
    assert "preempted" in [pair.ends(tid)[1] for tid in tids]
    for i, tid in enumerate(tids):
        text = tuple(pair.tokens(tid))
        assert text == reference(tuple(prompt_of(65, seed=i)), 24)[: len(text)]
    assert pair.is_at_rest()


@pytest.fixture(params=["nixl", "grpc"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if reason := registry.unusable(request.param):
        pytest.skip(reason)
    opened = make_bench(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize(("prefill", "decode"), [("none", "eagle3"), ("eagle", "ngram")])
def test_pages_of_unequal_size_pair_over_real_transports(bench: Bench, prefill: str, decode: str) -> None:
    pair = pair_of(prefill, decode, bench=bench)
    assert pair.refused == []
    for turn in range(2):
        tids = {n: pair.submit(f"{turn}-{n}", prompt_of(n), max_tokens=6) for n in LENGTHS}
        pair.run(limit=100_000)
        for n, tid in tids.items():
            assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(n)), 12)[:6], (turn, n)
        assert pair.is_at_rest()
    assert joins(pair) == (0 if decode == "ngram" else 2 * len(LENGTHS))


def test_a_record_that_lies_about_its_tensors_fails_its_request_only() -> None:
    """Of a pair with one draft on both sides; the tensors of another draft are nobody's concern."""
    pair = NodePair(algorithm="eagle3", draft_options={"draft": str(tiny_draft("eagle3"))})

    def lie(message: object) -> object:
        if isinstance(message, Final) and message.tid.request_id == "victim":
            tensors = dict(message.handoff.tensors)
            tensors["hidden"] = replace(tensors["hidden"], shape=(1, 7))
            return replace(message, handoff=replace(message.handoff, tensors=tensors))
        return message

    pair.tamper = lie
    victim, other = pair.submit("victim", prompt_of(20)), pair.submit("other", prompt_of(31))
    pair.run()
    assert pair.ends(victim) == ("handed_over", "protocol")
    assert tuple(pair.tokens(other)) == reference(tuple(prompt_of(31)), 12)
    assert pair.is_at_rest()
