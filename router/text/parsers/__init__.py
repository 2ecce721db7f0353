"""Splits what a model writes into reasoning, content and tool calls, as it arrives. Knows text, not tokens."""
