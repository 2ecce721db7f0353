"""What a forward of the target adds to a draft's KV: the committed rows whose next token is known.

Owns the shift by one between tokens and hidden states. Must never know networks or states.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.batch import Span
from engine.request import Request
from speculative.proposer import Advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Slots of one request whose pairs are now known. `rows`: packed target rows of their hiddens."""

    request: Request
    rows: Sequence[int]
    span: Span


def following_tokens(advance: Advance) -> list[int]:
    """For each committed row the token after it; fewer where none followed (a request dropped)."""
    request, count = advance.request, len(advance.accepted_nodes)
    if not advance.is_prompt:
        return list(advance.token_ids[:count])
    start = request.num_committed - count
    return [*request.prompt_ids[start + 1 : request.num_committed], *advance.token_ids[:1]]


def extension_of(advance: Advance) -> Extension | None:
    request = advance.request
    token_ids = following_tokens(advance)
    if not token_ids:
        return None
    start = request.num_committed - len(advance.accepted_nodes)
    return Extension(
        request=request,
        rows=[advance.rows[0] + node for node in advance.accepted_nodes[: len(token_ids)]],
        span=Span(
            token_ids=token_ids,
            num_committed=start,
            pages=request.pages,
            positions=range(start, start + len(token_ids)),
            logit_rows=(len(token_ids) - 1,) if request.is_prompt_done else (),
        ),
    )


def captured_rows(
    extensions: Sequence[Extension], hidden: Mapping[int, torch.Tensor]
) -> Mapping[int, torch.Tensor]:
    rows = [row for extension in extensions for row in extension.rows]
    wanted = torch.tensor(rows)
    picked: dict[int, torch.Tensor] = {}
    for layer, hidden_TE in hidden.items():
        is_all = rows == list(range(len(hidden_TE)))
        picked[layer] = hidden_TE if is_all else hidden_TE.index_select(0, wanted.to(hidden_TE.device))
    return picked
