"""What the commands of `moewe` do that run, show or check a model; each is imported when it runs."""
