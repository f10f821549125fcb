"""What bounds a step trace, for the route and for the command. Units: seconds, steps of one replica."""

MOST_STEPS = 1000
DEFAULT_STEPS = 200
MOST_SECONDS = 600.0
LEAST_IDLE_SECONDS, MOST_IDLE_SECONDS = 0.1, 600.0
DEFAULT_IDLE_SECONDS = 10.0
