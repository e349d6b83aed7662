"""Routes for sound: transcription and translation, and the socket of live sound."""
