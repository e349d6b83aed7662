"""What crosses a process boundary: msgspec Structs, importing nothing of ours and no torch."""
