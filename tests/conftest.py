"""What holds for every test: engines here and below fail where one in production would mend itself, and start quickly.

Not fixtures (tests/support/): only the environment, which child processes inherit.
"""

import os

os.environ.setdefault("MOEWE_STRICT_BOOKS", "1")
# A rank of every engine that is started measures how fast it reads memory: here a small buffer will do.
os.environ.setdefault("MOEWE_QUICK_MEASURE", "1")
# Two test processes on two cores: more threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
