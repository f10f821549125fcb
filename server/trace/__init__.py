"""Step traces: the file that one becomes, its table of shares, and `moewe trace`. The route is in server/http."""
