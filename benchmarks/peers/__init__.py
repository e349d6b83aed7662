"""The offline workloads on vLLM and OpenVINO, each in its own environment."""
