"""The commands of `quire bench`, the same as those of `vllm bench`: serve, throughput, latency, startup."""
