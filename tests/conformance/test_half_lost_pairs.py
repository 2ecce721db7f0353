"""What happens while only one of two nodes has noticed that they lost each other."""

import pytest

from kv_transfer.ids import Incarnation
from kv_transfer.transport import WriteHandle
from kv_transfer.transports.memory import Fault
from tests.conformance.test_loop import prompt_of, reference
from tests.node_pair import NodePair
from wire.host_events import PeerClosed


@pytest.mark.parametrize("outlives_peer", [False, True])
def test_pages_of_a_lost_peers_writes_are_not_reused_while_the_transport_reads_them(
    outlives_peer: bool,
) -> None:
    """Without checksums Final travels beside the data: the decode node, which has noticed nothing, joins."""

    def faults(handle: WriteHandle) -> Fault:
        is_first = handle.tid.request_id == "first"
        return Fault(delay_s=1.0 if is_first else 0.0, ignores_cancel=True, outlives_peer=outlives_peer)

    pair = NodePair(
        faults=faults,
        prefill_options={"num_pages": 12, "hello": {"checksums": False}},
        decode_options={"hello": {"checksums": False}},
    )
    prompt = prompt_of(22)
    first = pair.submit("first", prompt)
    for _ in range(3):
        pair.step()
    assert pair.timeline[-1][2] == "Final"
    pair.prefill.handle(PeerClosed(peer=Incarnation("D")), pair.now)
    others = [pair.submit(f"other {number}", prompt_of(34, seed=number)) for number in (1, 2)]
    while pair.now < 2.0:
        pair.step()
    assert pair.ends(first) == ("peer_lost", "length")
    assert tuple(pair.tokens(first)) == reference(tuple(prompt), 12)
    pair.disconnect()
    for tid in others:
        pair.cancel(tid)
    pair.run()
    assert pair.is_at_rest()
