"""Takes what a model writes apart into reasoning, content and tool calls. Knows text, not tokens."""
