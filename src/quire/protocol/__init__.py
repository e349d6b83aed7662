"""The messages that cross process boundaries, as msgspec Structs. No torch here."""
