"""Model output -> reasoning, content and tool calls: one engine, and a table for each format."""
