"""Which router's stream each request came in on, and what is still to be told to it.

Owns the rule that exactly one terminal event ends a tid on a node and nothing follows it.
Must never know what a request does.
"""

from kv_transfer.ids import TransferId
from wire.host_events import Link, ToLink
from wire.work import Event, Failed, Finished, Preempted, Rejected

TERMINAL = (Rejected, Finished, Preempted, Failed)


class LinkTable:
    """Invariant: a tid is owned by at most one open link, from `own` to its terminal event."""

    def __init__(self) -> None:
        self._tids: dict[Link, dict[TransferId, None]] = {}
        self._link_of: dict[TransferId, Link] = {}
        self._outputs: list[ToLink] = []

    def open(self, link: Link) -> None:
        self._tids[link] = {}

    def close(self, link: Link) -> tuple[TransferId, ...]:
        """Forget the link; returns the tids it leaves behind, oldest first, which the node must cancel."""
        left = tuple(self._tids.pop(link, ()))
        for tid in left:
            del self._link_of[tid]
        self._outputs = [output for output in self._outputs if output.link != link]
        return left

    def own(self, link: Link, tid: TransferId) -> None:
        self._tids[link][tid] = None
        self._link_of[tid] = link

    def reject(self, link: Link, event: Rejected) -> None:
        """Answer a Submit that was never taken on."""
        self._outputs.append(ToLink(link=link, event=event))

    def emit(self, event: Event) -> None:
        """Tell the owner of `event.tid`. Dropped when its link is gone or the tid has ended."""
        link = self._link_of.get(event.tid)
        if link is None:
            return
        self._outputs.append(ToLink(link=link, event=event))
        if isinstance(event, TERMINAL):
            self.forget(event.tid)

    def forget(self, tid: TransferId) -> None:
        """The tid is over and its owner needs no further word (it cancelled)."""
        link = self._link_of.pop(tid, None)
        if link is not None:
            self._tids[link].pop(tid, None)

    def take(self) -> list[ToLink]:
        outputs, self._outputs = self._outputs, []
        return outputs
