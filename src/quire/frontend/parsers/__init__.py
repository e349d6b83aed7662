"""Output parsers: model output -> reasoning, content and tool calls. One parser, and a state table per format."""
