"""`quire bench serve`: the load generator, with the options and the result file of `vllm bench serve`."""
