"""The commands of `quire bench`, with the names of `vllm bench`: serve, throughput, latency, startup."""
