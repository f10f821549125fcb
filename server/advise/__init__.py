"""`moewe advise` and `moewe apply`: the advice of a running server or of a recorded trace, and a change of layout."""
