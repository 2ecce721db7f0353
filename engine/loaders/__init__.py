"""Checkpoints on disk to models in memory."""

from engine.loaders.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
