"""Runs programs for vLLM: `vllm_shim.py` makes `import vllm` mean Quire; `python -m quire.compat` runs a program so."""
