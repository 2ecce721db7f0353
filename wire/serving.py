"""Runs an `Accept` callback for one channel: the task boundary of every accepted stream."""

import logging

from wire.channel import Accept, Channel, ChannelClosed

logger = logging.getLogger(__name__)


async def serve_accepted(accept: Accept, channel: Channel) -> None:
    """Serve `channel` to its end and close it. A failure ends this channel only and is logged."""
    try:
        await accept(channel)
    except ChannelClosed as closed:
        logger.debug("channel of %s ended: %s", channel.peer, closed)
    except Exception:
        logger.exception("channel of %s failed", channel.peer)
    finally:
        await channel.close()
