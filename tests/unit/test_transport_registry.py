import pytest

from kv_transfer.ids import TransferId, new_incarnation
from kv_transfer.transport import PoolMemory, Ready, TransportError
from kv_transfer.transports import registry
from kv_transfer.transports.grpc_frames import (
    Ack,
    FrameError,
    FrameHead,
    pack_ack,
    pack_frame,
    pack_greeting,
    parse_ack,
    parse_frame,
    parse_greeting,
)

HEAD = FrameHead(write=2**40, tid=TransferId("ключ", 7), start=3, stop=9, first=4, page_ids=(2**31, 5, 0))
PAGES = [memoryview(bytes([fill]) * 8) for fill in (1, 2, 3)]


def without_nixl(name: str) -> str:
    """What the registry finds on a machine without NIXL."""
    return "nixl not installed" if name == "nixl" else ""


def test_auto_falls_back_to_grpc_and_says_why() -> None:
    choice = registry.choose("auto", probe=without_nixl)
    assert choice == registry.Choice(name="grpc", degraded="nixl not installed")


def test_named_transport_that_cannot_work_is_an_error_with_the_reason() -> None:
    with pytest.raises(TransportError, match=r"^transport nixl: nixl not installed$"):
        registry.choose("nixl", probe=without_nixl)


def test_auto_without_any_usable_transport_names_every_reason() -> None:
    with pytest.raises(TransportError, match=r"^transport auto: no nixl; no grpc$"):
        registry.choose("auto", probe=lambda name: f"no {name}")


def test_auto_prefers_nixl_where_it_works() -> None:
    if registry.unusable("nixl"):
        pytest.skip(registry.unusable("nixl"))
    assert registry.choose("auto") == registry.Choice(name="nixl", degraded="")


def test_unknown_transport_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match=r"transport must be one of \['auto', 'nixl', 'grpc'\], got 'smoke'"):
        registry.choose("smoke")


def test_grpc_is_built_with_its_rpc_handler() -> None:
    setup = registry.Setup(incarnation=new_incarnation(), address="localhost:1", may_write=None)
    built = registry.build("grpc", setup)
    assert (built.transport.name, len(built.rpc_handlers)) == ("grpc", 1)


def test_frame_comes_back_as_packed() -> None:
    head, data = parse_frame(pack_frame(HEAD, PAGES), 8)
    assert head == HEAD
    assert data == b"".join(PAGES)


def test_frame_cut_anywhere_is_refused() -> None:
    whole = pack_frame(HEAD, PAGES)
    for length in range(len(whole)):
        with pytest.raises(FrameError, match=r"^frame: "):
            parse_frame(whole[:length], 8)


def test_frame_outside_of_its_write_is_refused() -> None:
    head = FrameHead(write=0, tid=HEAD.tid, start=3, stop=6, first=4, page_ids=(0, 1, 2))
    with pytest.raises(FrameError, match=r"pages \[4, 7\) outside of \[3, 6\)"):
        parse_frame(pack_frame(head, PAGES), 8)


def test_frame_of_another_page_size_is_refused() -> None:
    with pytest.raises(FrameError, match="3 pages of 16 bytes"):
        parse_frame(pack_frame(HEAD, PAGES), 16)


def test_ack_and_greeting_come_back_as_packed() -> None:
    ack = Ack(write=5, first=2, error="nicht gemietet")
    assert parse_ack(pack_ack(ack)) == ack
    incarnation = new_incarnation()
    assert parse_greeting(pack_greeting(incarnation)) == incarnation


def test_greeting_of_another_version_is_refused() -> None:
    with pytest.raises(FrameError, match="version"):
        parse_greeting(b"PGP9abc")


@pytest.mark.parametrize(("local", "remote", "start"), [((), (), 0), ((1,), (1, 2), 0), ((1,), (1,), -1)])
def test_ready_that_makes_no_range_is_refused(
    local: tuple[int, ...], remote: tuple[int, ...], start: int
) -> None:
    with pytest.raises(ValueError, match=r"remote_pages|start"):
        Ready(tid=HEAD.tid, start=start, local_pages=local, remote_pages=remote)


def test_pool_must_be_writable_and_whole() -> None:
    with pytest.raises(ValueError, match="writable"):
        PoolMemory(address=0, page_bytes=4, num_pages=2, buffer=memoryview(bytes(8)))
    with pytest.raises(ValueError, match="2 pages of 4 bytes, got 9"):
        PoolMemory(address=0, page_bytes=4, num_pages=2, buffer=memoryview(bytearray(9)))
