"""What holds for every test: engines in this process and below it fail where one in production would mend itself.

Not fixtures (tests/support/): only the environment that child processes inherit.
"""

import os

os.environ.setdefault("MOEWE_STRICT_BOOKS", "1")
