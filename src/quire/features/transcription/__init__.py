"""Speech recognition by an encoder of sound and a decoder with cross attention (Whisper)."""
