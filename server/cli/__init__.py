"""The `moewe` command: from a command line to the command that runs."""
