"""For programs written for vLLM: `as_vllm.py` makes `import vllm` mean Quire; `python -m quire.compat` runs them so."""
