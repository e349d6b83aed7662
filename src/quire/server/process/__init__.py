"""The processes of `quire serve`: sockets, connections, start, supervision and end."""
