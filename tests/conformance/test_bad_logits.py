"""A request whose logits are no numbers fails alone."""

from dataclasses import replace

import pytest
import torch

from engine.batch import ForwardBatch, ForwardOutput
from engine.errors import ALL_FORBIDDEN
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.loop import EngineLoop
from speculative.proposer import Proposer
from tests.conformance.test_loop import PROPOSERS, prompt_of, proposer, reference
from tests.engines import make_engine, make_request, tiny_model
from tests.node_pair import NodePair
from wire.work import Failed

ERROR = "the model returned a NaN or infinite logit"


class SpoiltModel:
    """The tiny model, until `spoil`: then whatever it says of one request's rows is NaN."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.spoilt: Request | None = None

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def embedding_VE(self) -> torch.Tensor:
        return self._model.embedding_VE

    @property
    def head(self) -> Linear:
        return self._model.head

    def final_norm(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        return self._model.final_norm(hidden_TE)

    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        output = self._model.forward(batch, pool)
        logits_RV, row = output.logits_RV.clone(), 0
        for span in batch.spans:
            stop = row + len(span.logit_rows)
            if self.spoilt is not None and span.pages is self.spoilt.pages:
                logits_RV[row:stop] = float("nan")
            row = stop
        return replace(output, logits_RV=logits_RV)


def spoilt_engine(using: Proposer | None = None) -> tuple[EngineLoop, SpoiltModel]:
    model = SpoiltModel(tiny_model().model)
    return make_engine(using, model=model), model


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_request_without_numbers_fails_and_its_neighbour_goes_on(name: str, num_steps: int) -> None:
    engine, model = spoilt_engine(proposer(name))
    doomed, spared = make_request("doomed", prompt_of(20), max_tokens=40), make_request("b", prompt_of(31))
    for request in (doomed, spared):
        engine.add(request)
    for _ in range(num_steps):
        engine.step()
    model.spoilt = doomed
    errors = []
    for _ in range(20):
        errors += [(item.request.key, item.error) for item in engine.step().progress if item.error]
    assert errors == [("doomed", ERROR)]
    assert tuple(spared.tokens[31:]) == reference(tuple(prompt_of(31)), 12)
    assert engine.cache.num_available == engine.cache.num_pages


def test_pages_that_may_be_under_way_outlive_the_failure_to_draw() -> None:
    engine, model = spoilt_engine()
    request = make_request("r", prompt_of(20))
    engine.add(request, hold=True)
    model.spoilt = request
    assert [item.error for item in engine.step().progress] == [ERROR]
    assert engine.requests() == [request]
    assert len(request.pages) == 6
    assert engine.cache.problems(engine.requests()) == []
    assert not engine.step().progress
    engine.release("r")
    assert engine.requests() == []
    assert engine.cache.num_available == engine.cache.num_pages


class WithoutNumbers(SpoiltModel):
    """Says nothing but NaN, of whatever request."""

    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        output = super().forward(batch, pool)
        return replace(output, logits_RV=torch.full_like(output.logits_RV, float("nan")))


@pytest.mark.parametrize(
    ("banned", "ends"), [((3,), ("no_token", "no_token")), ((3, 3), ("handed_over", "no_token"))]
)
def test_a_request_that_forbids_every_token_is_told_apart_from_a_model_that_fails(
    banned: tuple[int, ...], ends: tuple[str, str]
) -> None:
    """On the prefill node, or one token later on the decode node."""
    pair = NodePair()
    tid = pair.submit("r", prompt_of(20), allowed_token_ids=(3,), banned_sequences=(banned,))
    pair.run()
    assert pair.ends(tid) == ends
    failures = [event for events in pair.events.values() for event in events if isinstance(event, Failed)]
    assert all(failure.reason.endswith(ALL_FORBIDDEN) and not failure.retryable for failure in failures)
    assert pair.is_at_rest()


def test_both_nodes_of_a_pair_say_the_same_of_a_prompt_without_numbers() -> None:
    """Else the router would blame the decode node for what the prefill node's logits were."""
    pair = NodePair(prefill_options={"model": WithoutNumbers(tiny_model().model)})
    tid = pair.submit("r", prompt_of(20))
    pair.run()
    assert pair.ends(tid) == ("bad_logits", "bad_logits")
    failures = [event for events in pair.events.values() for event in events if isinstance(event, Failed)]
    assert [failure.retryable for failure in failures] == [False, False]
    assert pair.is_at_rest()
