"""How the eyes of quire-tiny are trained; see README.md."""
