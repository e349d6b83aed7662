"""Pictures of requests: content parts, fetching, decoding in processes with limits, and placeholders in prompts."""
