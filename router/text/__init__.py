"""Text on the router: chat templates, tokenising, detokenising and stop strings. Never imports torch."""
