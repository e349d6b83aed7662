"""The commands of `quire bench`, which are those of `vllm bench`: serve, throughput, latency, startup."""
