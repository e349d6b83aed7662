"""Python: what a program imports. Knows LLM, AsyncLLM and their outputs; not HTTP."""
