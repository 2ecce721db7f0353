"""How vocabularies write bytes, for the router, which does not reach into the engine."""

from engine.vocabulary import byte_of, is_byte_level, piece_bytes

__all__ = ["byte_of", "is_byte_level", "piece_bytes"]
