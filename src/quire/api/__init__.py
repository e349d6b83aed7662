"""The Python API: LLM, AsyncLLM and their outputs. Does not know HTTP."""
