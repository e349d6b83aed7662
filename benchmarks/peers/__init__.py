"""The offline workloads beside vLLM and OpenVINO, each in an environment of its own."""
