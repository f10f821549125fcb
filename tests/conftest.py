"""What holds for every test: engines in this process and below it fail where one in production would mend itself.

Not fixtures (tests/support/): only the environment, which child processes inherit.
"""

import os

os.environ.setdefault("MOEWE_STRICT_BOOKS", "1")
# Two test processes on two cores: more threads would only wait for each other. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
