"""LoRA adapters: files of PEFT, the registry of an engine, its gate, and the hook of a worker."""
