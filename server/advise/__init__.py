"""`moewe advise`: the advice of a running server, or of a recorded trace."""
