"""Step traces: the route that records one, the file that it becomes, and `moewe trace`."""
