"""The peers of one node: who was agreed with, over which transport, and who was refused.

Owns the connections of every transport. Must never know about requests or pages.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kv_transfer.geometry import Agreement, negotiate
from kv_transfer.ids import Incarnation
from kv_transfer.messages import Hello, Refused
from kv_transfer.transport import Transport, TransportError, TransportEvent, WriteHandle

_MAX_REMEMBERED = 1024  # refusals, notes; peers that restart for ever must not fill the memory


class PeerTable:
    """Invariant: a peer is agreed exactly while its transport connection is open."""

    def __init__(self, *, ours: Hello, transports: Mapping[str, Transport], is_decode: bool) -> None:
        """`ours.offers` need only name the transports, best first: connection blobs are made per session."""
        self._ours = ours
        self._is_decode = is_decode
        self._transports = dict(transports)
        self._agreed: dict[Incarnation, Agreement] = {}
        self._refused: dict[Incarnation, Refused] = {}
        self._noted: dict[Incarnation, None] = {}

    def hello(self) -> Hello:
        """Our Hello for one session, with connection blobs of its own. Raises TransportError."""
        offers = tuple(self._transports[offer.name].offer() for offer in self._ours.offers)
        return replace(self._ours, offers=offers)

    def accept(self, theirs: Hello) -> Agreement | Refused:
        """Compare, connect, remember. A lasting refusal is remembered until that incarnation is gone."""
        outcome = negotiate(self._ours, theirs, is_decode=self._is_decode)
        if isinstance(outcome, Agreement):
            outcome = self._connect(outcome, theirs)
        if isinstance(outcome, Refused):
            if not outcome.is_transient:
                self._remember(theirs.incarnation, outcome)
        else:
            self._agreed[theirs.incarnation] = outcome
        return outcome

    def fresh_note(self, peer: Incarnation) -> str:
        """What an operator should know of the pair with a peer just accepted; said once per incarnation."""
        note = self._agreed[peer].note
        if not note or peer in self._noted:
            return ""
        self._noted[peer] = None
        _forget_oldest(self._noted)
        return note

    def reply(self, peer: Incarnation) -> Hello | Refused | None:
        """P's Hello for a peer just accepted; D has said its own already.

        A transport that has no connection to offer undoes the acceptance.
        """
        if self._is_decode:
            return None
        transport = self._agreed[peer].transport
        try:
            return self.hello()
        except TransportError as error:
            self.drop(peer)
            return _unusable(transport, error)

    def refusal(self, peer: Incarnation) -> Refused | None:
        return self._refused.get(peer)

    def agreement(self, peer: Incarnation) -> Agreement | None:
        return self._agreed.get(peer)

    def transport_name(self, peer: Incarnation) -> str:
        """The name of the data plane agreed with a peer; "" while there is no agreement."""
        agreement = self._agreed.get(peer)
        return "" if agreement is None else agreement.transport

    def is_fallback(self, agreement: Agreement) -> bool:
        """Is this not the data plane we like best?"""
        return bool(self._ours.offers) and agreement.transport != self._ours.offers[0].name

    def transport(self, peer: Incarnation) -> Transport:
        """The data plane agreed with a peer; the peer must be connected."""
        return self._transports[self._agreed[peer].transport]

    def copy_bytes(self, peer: Incarnation) -> int:
        """How many leading bytes of every page travel to or from a connected peer."""
        return self._agreed[peer].copy_bytes

    def cancel(self, handle: WriteHandle) -> None:
        """Stop a write where that is still possible; with its peer gone it has settled already."""
        if handle.peer in self._agreed:
            self.transport(handle.peer).cancel(handle)

    def drop(self, peer: Incarnation) -> None:
        """Tear the connection down: after this nothing of the peer can write here."""
        agreement = self._agreed.pop(peer, None)
        if agreement is not None:
            self._transports[agreement.transport].close_peer(peer)

    def poll(self) -> list[TransportEvent]:
        return [event for transport in self._transports.values() for event in transport.poll()]

    def states(self) -> dict[str, str]:
        """Incarnation -> "ready over <transport>" and what is special of the pair, or the refusal."""
        ready = {str(peer): _ready(agreed) for peer, agreed in self._agreed.items()}
        refused = {str(peer): f"refused at handshake: {why}" for peer, why in self._refused.items()}
        return refused | ready

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _remember(self, peer: Incarnation, refused: Refused) -> None:
        self._refused[peer] = refused
        _forget_oldest(self._refused)

    def _connect(self, agreement: Agreement, theirs: Hello) -> Agreement | Refused:
        try:
            self._transports[agreement.transport].connect(
                theirs.incarnation,
                agreement.peer_offer,
                copy_bytes=None if agreement.draft_differs is None else agreement.copy_bytes,
            )
        except TransportError as error:
            return _unusable(agreement.transport, error)
        return agreement


def _ready(agreement: Agreement) -> str:
    return ", ".join(filter(None, (f"ready over {agreement.transport}", agreement.note)))


def _forget_oldest(remembered: dict[Incarnation, Any]) -> None:
    while len(remembered) > _MAX_REMEMBERED:
        del remembered[next(iter(remembered))]


def _unusable(transport: str, error: TransportError) -> Refused:
    return Refused(field=f"transport {transport}", ours="usable", theirs=str(error), is_transient=True)
