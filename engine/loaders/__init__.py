"""Checkpoints on disk to models in memory."""

from engine.loaders.load import Checkpoint, LoadedModel, load_model, open_checkpoint

__all__ = ["Checkpoint", "LoadedModel", "load_model", "open_checkpoint"]
